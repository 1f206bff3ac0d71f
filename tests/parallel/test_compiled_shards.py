"""Tensor parallelism under Thunder, and 16-bit shards that a compiler packs, on two processes with gloo.
Called by pytest; calls compiled_programs.py in each process.
"""

import importlib.util

import compiled_programs as programs
import pytest
import torch

from thunder_moe.parallel import ExpertParallel, TensorParallel

EXACT, ROUNDED = 1e-5, 1e-2  # float32; bfloat16 (packing the weights alone makes 9e-2)
MISSING = pytest.mark.skipif(importlib.util.find_spec("thunder") is None, reason="lightning-thunder is not installed")
JIT, FX = (pytest.param(name, marks=[pytest.mark.slow, MISSING]) for name in ("thunder.jit", "thunderfx"))
REPEATED = pytest.param("thunder.jit", marks=[pytest.mark.exhaustive, MISSING])
COMPILERS = ["torch.compile", JIT, pytest.param("thunderfx", marks=[pytest.mark.exhaustive, MISSING])]


@pytest.fixture
def run(ranks):
    return ranks(2)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_compiler_packs_shards_and_notices_their_changes(run, compiler):
    for error, decisions in run(programs.run_packed_by_compiler, compiler, TensorParallel()):
        assert error < ROUNDED
        assert decisions == ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"]


@pytest.mark.exhaustive
def test_a_compiler_packs_whole_experts_of_a_rank(run):
    style = ExpertParallel(capacity=6)
    for error, decisions in run(programs.run_packed_by_compiler, "torch.compile", style):
        assert error < ROUNDED
        assert decisions == ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"]


@pytest.mark.parametrize(
    ("compiler", "format"),
    [
        ("torch.compile", "nvfp4"),
        pytest.param("torch.compile", "mxfp8", marks=pytest.mark.exhaustive),
        pytest.param("thunder.jit", "nvfp4", marks=[pytest.mark.exhaustive, MISSING]),
        pytest.param("thunder.jit", "mxfp8", marks=[pytest.mark.slow, pytest.mark.exhaustive, MISSING]),
        pytest.param("thunderfx", "nvfp4", marks=[pytest.mark.slow, pytest.mark.exhaustive, MISSING]),
        pytest.param("thunderfx", "mxfp8", marks=[pytest.mark.slow, pytest.mark.exhaustive, MISSING]),
    ],
)
def test_weights_that_are_quantized_before_the_cut(run, compiler, format):
    for error, decisions in run(programs.run_cut_after_quantize, compiler, format):
        assert error < ROUNDED
        assert decisions == [f"{format} + swiglu", format]


@pytest.mark.parametrize(
    ("compiler", "quantized"),
    [
        pytest.param("torch.compile", False, marks=pytest.mark.exhaustive),
        ("torch.compile", True),
        pytest.param("thunder.jit", False, marks=[pytest.mark.slow, pytest.mark.exhaustive, MISSING]),
        pytest.param("thunder.jit", True, marks=[pytest.mark.slow, MISSING]),
    ],
)
def test_gradients_are_those_of_one_process(run, compiler, quantized):
    assert max(run(programs.run_training, compiler, quantized)) < EXACT


def test_rows_travel_in_8_bits(run):
    assert max(run(programs.run_training_in_8_bits, "fp8")) < EXACT


@pytest.mark.parametrize("compiler", ["torch.compile", REPEATED])
def test_a_step_of_an_optimizer_is_noticed(run, compiler):
    assert max(run(programs.run_step, compiler)) < ROUNDED


@pytest.mark.parametrize("compiler", [REPEATED, FX])
def test_thunder_refuses_expert_parallelism(run, compiler):
    for message in run(programs.run_refused, compiler, "expert parallel"):
        assert "ExpertParallel" in message
        assert "wanted TensorParallel()" in message


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Thunder traces DTensors")
@pytest.mark.parametrize("compiler", [REPEATED, FX])
def test_thunder_refuses_styles_of_torch(run, compiler):
    for message in run(programs.run_refused, compiler, "styles of torch"):
        assert "DTensor" in message
        assert "thunder_moe.parallel" in message


def test_the_report_says_that_a_weight_is_a_dtensor(run):
    for reason in run(programs.run_dtensor_gemm):
        assert reason.startswith("the weight is a DTensor")
        assert "TensorParallel()" in reason
