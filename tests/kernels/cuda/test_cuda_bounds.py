"""The CUDA kernels, run by the emulator, stay inside their operands, also with offsets and slots out of range.
Called by pytest; operands end where their memory does, and what is in range is judged by tests/oracle.py.
"""

import itertools

import pytest
import torch
from emulated_gemms import CONFIGS, FAST, SWIGLU_CONFIGS, TILED_CONFIGS, emulate_device
from emulator.guarded_memory import guarded
from fast_cases import one_of_each, others_slow
from oracle import dequantize, grouped_mm, grouped_swiglu, relative_error

from thunder_moe.activations import SWIGLU, SwiGLUConfig
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.routing import RouterConfig

LEAST, MOST = -(2**31), 2**31 - 1
GATED = SWIGLU_CONFIGS | {name: TILED_CONFIGS[name] for name in FAST[-2:]}
CROSSING = [30, 3, 60, 2]  # two experts have the same rows
OFFSETS = [
    [10, 20, 43, MOST],
    [1 << 30] * 4,
    [-5, 10, MOST, 40],
    [LEAST, 5, 5, 41],
    CROSSING,
    [LEAST] * 4,
]


@pytest.fixture(autouse=True)
def device(emulated, monkeypatch):
    emulate_device(monkeypatch, 3)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))


def ints(values):
    return guarded(torch.tensor(values, dtype=torch.int32))


def make(n, k, layout):
    weight = quantize(torch.randn(4, n, k))
    exact, weight = dequantize(*weight.tensors()), weight.to_layout(layout)
    return NVFP4Weight(*map(guarded, weight.tensors()), layout), exact


def in_order(ends, rows):
    """Return row ends that never decrease nor pass the rows."""
    return list(itertools.accumulate((min(max(end, 0), rows) for end in ends), max))


SHAPES = [
    *((name, 88, k) for k in (16, 656) for name in (*CONFIGS, "wgmma, swiglu")),
    *((name, 192, 320) for name in TILED_CONFIGS),
]


@pytest.mark.parametrize(("name", "n", "k"), one_of_each(SHAPES, FAST))
def test_reads_nothing_beyond_its_operands(name, n, k):
    config = (CONFIGS | TILED_CONFIGS).get(name) or SWIGLU_CONFIGS["wgmma"]
    weight, exact = make(n, k, config.layout)
    rows, offsets = guarded(torch.randn(42, k, dtype=torch.bfloat16)), ints([3, 3, 40, 42])
    swiglu = config.row_blocks == 2 and config.layout == "linear"
    kernel, oracle = (cuda.grouped_swiglu, grouped_swiglu) if swiglu else (cuda.grouped_mm, grouped_mm)
    assert relative_error(kernel(rows, weight, offsets, config=config), oracle(rows, exact, offsets)) < 5e-3


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
@pytest.mark.parametrize("name", FAST)
@pytest.mark.covering(1)
def test_offsets(name, ends):
    config = (CONFIGS | TILED_CONFIGS)[name]
    weight, exact = make(64, 192, config.layout)
    rows = guarded(torch.randn(42, 192, dtype=torch.bfloat16))
    out = cuda.grouped_mm(rows, weight, ints(ends), config=config)
    wanted, live = torch.tensor(in_order(ends, 42)), min(max(ends[-1], 0), 42)  # rows past the last end are undefined
    if ends != CROSSING and live > 0:
        assert relative_error(out[:live], grouped_mm(rows, exact, wanted)[:live]) < 5e-3


@pytest.mark.parametrize("name", others_slow(GATED, ["split 4", "wgmma", *FAST]))
def test_row_slot(name):
    config = GATED[name]
    weight, _ = make(128, 192, config.layout)
    tokens, scale = guarded(torch.randn(6, 192, dtype=torch.bfloat16)), guarded(torch.rand(6, 2))
    offsets, slots = torch.tensor([3, 3, 9, 12], dtype=torch.int32), torch.randperm(12).int()
    wrong = slots.clone()
    wrong[torch.tensor([0, 4, 7, 11])] = torch.tensor([MOST, LEAST, -1, 12], dtype=torch.int32)
    out = cuda.grouped_swiglu(tokens, weight, offsets, guarded(wrong), scale, config=config)
    linear = weight.to_layout("linear")
    expected = reference.grouped_swiglu(tokens.float(), linear, offsets, slots, scale)
    kept = wrong == slots
    assert relative_error(out[kept], expected[kept]) < 1e-2


def test_row_slot_of_the_activation_behind_a_gemm():
    gate_up, scale = guarded(torch.randn(4, 32, dtype=torch.bfloat16)), guarded(torch.rand(4))
    offsets, wrong = torch.tensor([1, 9, 2, 4], dtype=torch.int32), ints([LEAST, 3, MOST, 4])
    out = cuda.swiglu(gate_up, offsets, wrong, scale, None, SWIGLU)
    gate, up = (gate_up[1].float() * scale[3]).chunk(2)
    assert relative_error(out[1], SwiGLUConfig()(gate, up)) < 5e-3


@pytest.mark.parametrize("n", [16, 12])
def test_slots_without_a_row_count_nothing(n):
    rows, weights = guarded(torch.randn(5, n, dtype=torch.bfloat16)), guarded(torch.rand(3, 2))
    out = cuda.combine(rows, ints([[0, 5], [LEAST, MOST], [-1, 4]]), weights)
    expected = torch.stack([rows[0] * weights[0, 0], torch.zeros(n), rows[4] * weights[2, 1]])
    assert relative_error(out, expected) < 5e-3


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 200])
def test_row_starts(experts):
    for ends in (torch.randint(0, 100, (experts,)), torch.randint(LEAST, MOST, (experts,)), torch.arange(experts)):
        starts = cuda.row_starts(ints(ends.tolist()), 70)
        assert starts.tolist() == [0, *in_order(ends.tolist(), 70)]


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
def test_offsets_of_gradients(ends):
    weight, exact = make(24, 80, "linear")
    grad = guarded(torch.randn(42, 24, dtype=torch.bfloat16))
    out = cuda.grouped_mm_dgrad(grad, weight, ints(ends))
    wanted = torch.tensor(in_order(ends, 42))
    if wanted[-1] > 0:
        assert relative_error(out[: wanted[-1]], grouped_mm(grad, exact.transpose(1, 2), wanted)) < 5e-3


@pytest.mark.parametrize("rows", [1, 2])
def test_norm_in_front_of_a_layer(rows):
    weight = quantize(torch.randn(1, 64, 576)).to_layout("tiled_64x64")
    weight = NVFP4Weight(*map(guarded, weight.tensors()), "tiled_64x64")
    x, residual, norm_weight = (guarded(torch.randn(shape).bfloat16()) for shape in ((rows, 576), (rows, 576), (576,)))
    _, total = cuda.add_norm_mm(x, residual, norm_weight, weight, None, 1e-6)
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize(("tokens", "width"), [(1, 2072), (3, 264)])
def test_norm_in_front_of_a_router(tokens, width):
    shapes = (tokens, width), (tokens, width), (width,), (37, width)
    x, residual, norm_weight, weight = (guarded(torch.randn(shape).bfloat16()) for shape in shapes)
    operands = x, residual, norm_weight, 1e-6, weight, None, None, RouterConfig(4), torch.bfloat16, torch.bfloat16
    *_, total, rows = cuda.add_norm_linear_router(*operands)
    assert torch.equal(total, x + residual)
    assert rows.isfinite().all()
