"""Tests the chain of kernels of a layer: equal to its parts, and what overlapping kernels read before they wait.
Called by pytest; emulated launches replace kernels/cuda/launch.py, all else is the backend's own code.

The emulator hides the result of the kernel before (NaNs) until a thread of a block waits for it, block by block, for
kernels that are told to read early; and it aborts when a block ends without having waited.
"""

import multiprocessing
import os
import re
import sys

import pytest
import torch
from emulated_gemms import DTYPES, FAST, TILED_CONFIGS, TILED_SWIGLU_CONFIGS, emulate_device, gemm_with_scratch
from fast_cases import others_slow
from oracle import relative_error

from thunder_moe.activations import SWIGLU, SwiGLUConfig
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import configs as cuda_configs
from thunder_moe.kernels.cuda import operators, prepared, workspace
from thunder_moe.kernels.cuda.chain import ChainBuilder
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.experts import ExpertsCall, unfused

LATE = [*FAST[3:], "tiled mma, 32 tokens", "tiled wgmma, odd", "tiled wgmma, 256 k"]
E, A, BF16 = 6, 2, torch.bfloat16
TILED = "tiled_64x64"


def make_layer(tokens, hidden, inner, layout, top_k=A, dtype=BF16):
    weights = [quantize(torch.randn(E, n, k)).to_layout(layout) for n, k in ((2 * inner, hidden), (hidden, inner))]
    biases = torch.randn(E, 2 * inner, dtype=BF16), torch.randn(E, hidden)
    ids = torch.randint(-1, E + 1, (tokens, top_k))
    return (torch.randn(tokens, hidden, dtype=dtype), ids, torch.rand(tokens, top_k), *weights, *biases)


@pytest.mark.parametrize(("tokens", "weight_on_input"), others_slow([(1, False), (9, True), (70, False)], [1, 9]))
def test_equals_its_parts(layout, tokens, weight_on_input):
    args = make_layer(tokens, 64, 48 if layout == "linear" else 128, layout)
    for order, form in ((None, SWIGLU), (cuda.route(args[1], E), SwiGLUConfig(1.702, 1.5, 1.0))):
        call = ExpertsCall(*args, order, weight_on_input, form)
        assert torch.equal(cuda.moe_experts(call), unfused(cuda, call))


@pytest.mark.parametrize("inner", [128, 96])  # the chain does not serve the latter's tiles
def test_rows_are_those_that_it_adds_up(layout, inner):
    if layout == "linear" or inner == 128:
        x, ids, weights, gate_up, down, *_ = make_layer(9, 64, inner, layout)
    else:
        x, ids, weights, gate_up, down, *_ = make_layer(9, 64, inner, "linear")
        gate_up = gate_up.to_layout(layout)
    order = cuda.route(ids, E)
    call = ExpertsCall(x, ids, weights, gate_up, down, order=order, weight_on_input=True, expert_ranks=2)
    rows = cuda.moe_experts(call._replace(summed=False))
    out = torch.full_like(x[:6], float("nan"))
    assert cuda.combine(rows, order[2][2:8], None, out=out) is out
    assert torch.equal(out, unfused(cuda, call)[2:8])


@pytest.mark.parametrize(("top_k", "dtype"), [(9, DTYPES[0]), *others_slow([(1, DTYPES[1]), (3, DTYPES[0])])])
def test_combine_of_any_number_of_slots(hopper, top_k, dtype):
    call = ExpertsCall(*make_layer(5, 64, 64, TILED, top_k, dtype))
    assert torch.equal(cuda.moe_experts(call), unfused(cuda, call))


def test_numbers_of_an_activation_may_be_integers(emulated):
    """Configs may have integers; they share the chain of equal floats."""
    operands = make_layer(3, 64, 64, "linear")
    forms = SwiGLUConfig(2.0, 7.0, 1.0), SwiGLUConfig(2, 7, 1)
    expected, out = (cuda.moe_experts(ExpertsCall(*operands, form=form)) for form in forms)
    assert torch.equal(out, expected)
    gate_up, (_, offsets, _) = operands[3], cuda.route(operands[1], E)
    rows = torch.randn(operands[1].numel(), 64, dtype=BF16)
    expected, out = (cuda.grouped_swiglu(rows, gate_up, offsets, form=form) for form in forms)
    assert torch.equal(out[: offsets[-1]], expected[: offsets[-1]])


def test_a_result_is_written_into_nothing_of_another_kind(emulated):
    call, out = ExpertsCall(*make_layer(3, 64, 64, "linear")), torch.empty(3, 64, dtype=BF16)
    assert cuda.moe_experts(call, out=out) is out
    assert torch.equal(out, unfused(cuda, call))
    rows, slots = torch.randn(6, 64, dtype=BF16), torch.arange(6, dtype=torch.int32).view(3, 2)
    for wrong in (out.float(), out.repeat(1, 2)[:, :64], out[:2], out.view(4, 48)):
        with pytest.raises(ValueError, match=r"out: got .* wanted contiguous torch.bfloat16 \(3, 64\)"):
            cuda.moe_experts(call, out=wrong)
        with pytest.raises(ValueError, match="out: got "):
            cuda.combine(rows, slots, None, out=wrong)


@pytest.mark.parametrize(
    "name",
    [
        *others_slow(LATE, FAST),
        *others_slow((name for name in TILED_CONFIGS if name not in LATE), exhaustive=True),
    ],
)
def test_rows_that_come_late(hopper, adversary, monkeypatch, name):
    """Every kernel of tiled weights runs behind another GEMM, with more tiles than blocks, and with blocks without
    tiles."""
    monkeypatch.setattr(adversary, "late_copies", 0)  # late ones would read what is there by then
    first = next(iter(TILED_SWIGLU_CONFIGS.values()))
    args = make_layer(21, 64, 320, TILED)
    for experts in (E, 1):  # tokens of one expert leave blocks without a tile
        ids = args[1].clamp(0, experts - 1)
        call = ExpertsCall(args[0], ids, *args[2:])
        expected = unfused(cuda, call)
        for blocks in (3, 50):
            emulate_device(monkeypatch, blocks)
            out = cuda.moe_experts(call, configs=(first, TILED_CONFIGS[name]))
            assert relative_error(out, expected) < 5e-3  # another configuration adds up in another order
        pool = workspace.semaphore_pool(out.device)
        assert not pool.take().any()
        assert not pool.take(overlapping=True).any()


@pytest.mark.parametrize(("name", "overlap"), [("tiled mma, shared", True), ("tiled wgmma, two blocks of rows", False)])
def test_kernels_that_overlap_have_workspaces_apart(hopper, monkeypatch, name, overlap):
    args = make_layer(3, 64, 64, TILED)
    row_slot, offsets, _ = cuda.route(args[1], E)
    taken, semaphores = [], ChainBuilder.semaphores

    def seen(chain, size, *, overlapping=False):
        taken.append(overlapping)
        return semaphores(chain, size, overlapping=overlapping)

    monkeypatch.setattr(ChainBuilder, "semaphores", seen)
    monkeypatch.setattr(ChainBuilder, "build", lambda chain: lambda *operands: None)
    for after_gemm in (False, True):
        gemm_with_scratch(args[0], args[3], offsets, TILED_CONFIGS[name], row_slot, SWIGLU, after_gemm=after_gemm)
    assert taken == [False, overlap]


@pytest.mark.parametrize("layout", [pytest.param("linear", marks=pytest.mark.slow), TILED])
def test_rows_of_no_expert_are_not_gathered(hopper, layout):
    """On a rank of many most slots are of other ranks' experts; their rows lie behind all others."""
    args = make_layer(40, 128, 64, layout)
    ids = torch.where(args[1] < 2, args[1], -1)
    row_slot, offsets, _ = cuda.route(ids, E)
    config = next(c for c in TILED_SWIGLU_CONFIGS.values() if c.kernel == "tiled_wgmma")
    if layout == "linear":
        config = cuda_configs.GemmConfig("wgmma", 1, 2, 1, 1, 3)
    _, (*_, gathered) = gemm_with_scratch(args[0], args[3], offsets, config, row_slot, SWIGLU, fill=7)
    gathered = gathered.view(BF16).view(-1, 128)
    end = int(offsets[-1])
    assert 0 < end < len(ids.flatten())
    expected = args[0][row_slot[:end] // A]  # in the order of k of the kernel's threads
    assert torch.equal(gathered[:end].sort(-1).values, expected.sort(-1).values)
    assert (gathered[end:] == 7).all()


def test_a_hint_of_few_rows_chooses_the_configurations(hopper, monkeypatch):
    call = ExpertsCall(*make_layer(40, 64, 64, TILED)[:5], expert_ranks=3)
    asked, choose = [], operators.choose_config
    monkeypatch.setattr(operators, "choose_config", lambda spec: asked.append(spec.rows) or choose(spec))
    out = torch.empty_like(call.hidden_states)
    version = out._version
    assert cuda.moe_experts(call, out=out) is out
    assert out._version == version + 1
    assert asked == [27, 27]  # of 80 ids
    assert relative_error(out, unfused(cuda, call)) < 5e-3


WITHOUT_WAITING = "a block has ended without waiting"
WAIT = r"        await_previous_kernel\(\);\n"
MUTANTS = {
    "a producer copies tokens first": (
        "tiled_mma.cu",
        WAIT + r"(      \} else if \(elected\) \{[\s\S]*?)(      __syncwarp\(\);\n    \};)",
        r"\1      if constexpr (kWaits) await_previous_kernel();\n\2",
        "assert relative_error",
    ),
    "a producer with tiles does not wait": (
        "tiled_mma.cu", WAIT + r"(      \} else if \(elected\))", r"\1", WITHOUT_WAITING
    ),
    "a producer without tiles does not wait": (
        "tiled_mma.cu", r"(      \} else \{\n)" + WAIT, r"\1", WITHOUT_WAITING
    ),
    "combine reads rows first": (
        "route.cu", r"    if \(late\) await_previous_kernel\(\);\n    late = false;\n", "", "assert torch.equal"
    ),
}  # fmt: skip


def run_test(test, folder, output):
    """Run a test of this file with the sources of a folder."""
    cuda_configs.COMMON = folder / "common.cuh"
    prepared.ROUTE = (cuda_configs.COMMON, folder / "route.cu")
    plan_gemm.cache_clear()
    chains.clear()
    with open(output, "w") as sys.stdout:
        sys.stderr = sys.stdout
        for stream in (1, 2):
            os.dup2(sys.stdout.fileno(), stream)
        sys.exit(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", f"{__file__}::{test}"]))


# One that the emulator aborts, and one whose numbers are wrong.
@pytest.mark.slow
@pytest.mark.parametrize("name", [*list(MUTANTS)[2:], *others_slow(list(MUTANTS)[:2], exhaustive=True)])
def test_a_missing_wait_is_found(name, tmp_path, emulator):
    """Each runs in a process of its own, since the emulator aborts where a block has not waited."""
    file, pattern, replacement, message = MUTANTS[name]
    for source in cuda_configs.COMMON.parent.iterdir():
        text = source.read_text()
        if source.name == file:
            text, changes = re.subn(pattern, replacement, text)
            assert changes == 1
        (tmp_path / source.name).write_text(text)
    test = {
        "tiled_mma.cu": "test_rows_that_come_late[tiled mma]",
        "route.cu": "test_equals_its_parts[tiled_64x64-9-True]",
    }[file]
    process = multiprocessing.get_context("fork").Process(target=run_test, args=(test, tmp_path, tmp_path / "output"))
    process.start()
    process.join()
    output = (tmp_path / "output").read_text()
    assert process.exitcode != 0
    assert message in output, output
