"""What the Humming backend hands to the library, on a CPU: a stand-in for its launcher makes the launcher's own checks.
Called by pytest; judged by tests/oracle.py. The CUDA kernels around the GEMM are the backend's own, emulated.
"""

import sys
from types import ModuleType

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, grouped_swiglu, moe_experts, relative_error

from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import humming
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.routing import SwiGLU

DTYPES = [torch.bfloat16, torch.float16]
OFFSETS = torch.tensor([3, 3, 9, 11], dtype=torch.int32)


def launch_kernel(
    *, configs, inputs, weight, weight_scale, weight_scale_2, outputs, expert_layout, locks, valid_shape_m
):
    """The checks of launch_kernel_impl in humming-kernels 0.1.19, and what a grouped contiguous GEMM computes."""
    experts, n, k = len(weight), weight.shape[2] // 2, inputs.shape[1]
    for tensor, dtype, shape in (
        (inputs, outputs.dtype, (valid_shape_m, k)),
        (weight, torch.int32, (experts, k // 16, 2 * n)),
        (weight_scale, torch.float8_e4m3fn, (experts, k // 16, n)),
        (weight_scale_2, torch.float32, (experts,)),
        (outputs, inputs.dtype, (valid_shape_m, n)),
        (expert_layout, torch.int32, (experts + 1,)),
        (locks, torch.int32, (2048,)),
        (configs, torch.int64, (4,)),
    ):
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
        assert tensor.is_contiguous()
    assert expert_layout[0] == 0
    assert not locks.any()
    packed = weight.view(torch.uint8).view(experts, n, k // 2), weight_scale.view(experts, n, k // 16)
    linear = NVFP4Weight(*packed, weight_scale_2, layout="humming").to_layout("linear")
    ends = expert_layout[1:]
    outputs.fill_(torch.nan)
    outputs[: ends[-1]] = grouped_mm(inputs, dequantize(*linear.tensors()), ends).to(outputs.dtype)


@pytest.fixture
def library(emulated, monkeypatch):
    package, ops = ModuleType("humming"), ModuleType("humming.ops")
    package.ops, ops.launch_kernel = ops, launch_kernel
    monkeypatch.setitem(sys.modules, "humming", package)
    monkeypatch.setitem(sys.modules, "humming.ops", ops)
    monkeypatch.setattr(humming, "_kernel_for", lambda *shape: torch.tensor([0, 1 << 30, 1, 0]))


def make(n, k, parts=1):
    """A weight in Humming's layout and its dequantised form; with `parts` that differ in scale a global one per row."""
    weight = NVFP4Weight.concatenate(*(quantize(torch.randn(4, n // parts, k) * 3**i) for i in range(parts)))
    return weight.to_layout("humming"), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_grouped_mm(library, parts, dtype):
    weight, exact = make(256, 96, parts)
    rows = torch.randn(12, 96).to(dtype)
    out = humming.grouped_mm(rows, weight, OFFSETS)
    assert relative_error(out[:11], grouped_mm(rows, exact, OFFSETS)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("inner", [64, 192])
def test_grouped_swiglu(library, inner, parts, dtype):
    weight, exact = make(2 * inner, 32, parts)
    rows = torch.randn(12, 32).to(dtype)
    out = humming.grouped_swiglu(rows, weight, OFFSETS)
    assert relative_error(out[:11], grouped_swiglu(rows, exact, OFFSETS)) < 2 * KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_a_whole_layer(library, weight_on_input):
    hidden, inner, tokens = 128, 64, 9
    (gate_up, exact_gate_up), (down, exact_down) = make(2 * inner, hidden, 2), make(hidden, inner)
    biases = torch.randn(4, 2 * inner), torch.randn(4, hidden, dtype=torch.bfloat16)
    x, scores = torch.randn(tokens, hidden, dtype=torch.bfloat16), torch.rand(tokens, 2)
    ids = torch.randint(-1, 5, (tokens, 2))
    row_slot, offsets, slot_row = humming.route(ids, 4)
    on_input, on_output = (scores, None) if weight_on_input else (None, scores)
    form = dict(alpha=1.702, limit=1.5, up_shift=1.0)
    rows = humming.grouped_swiglu(x, gate_up, offsets, row_slot, on_input, biases[0], SwiGLU(**form))
    out = humming.grouped_mm_combine(rows, down, offsets, slot_row, on_output, biases[1])
    expected = moe_experts(x, ids, scores, exact_gate_up, exact_down, *biases, weight_on_input=weight_on_input, **form)
    assert relative_error(out, expected) < 1e-2


def test_gradient(library, monkeypatch):
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (9, 0)))
    weight, exact = make(128, 96)
    grad = torch.randn(11, 128, dtype=torch.bfloat16)
    out = humming.grouped_mm_dgrad(grad, weight, OFFSETS)
    assert relative_error(out, grouped_mm(grad, exact.transpose(1, 2), OFFSETS)) < 5e-3


def test_float32_runs_on_the_reference():
    weight, exact = make(128, 32)
    rows = torch.randn(11, 32)
    assert relative_error(humming.grouped_mm(rows, weight, OFFSETS), grouped_mm(rows, exact, OFFSETS)) < 1e-5
    hidden = humming.grouped_swiglu(rows, weight, OFFSETS)
    assert relative_error(hidden, grouped_swiglu(rows, exact, OFFSETS)) < 1e-5


def test_no_rows(library):
    weight, _ = make(128, 32)
    none = torch.zeros(4, dtype=torch.int32)
    assert humming.grouped_mm(torch.empty(0, 32, dtype=torch.bfloat16), weight, none).shape == (0, 128)


def test_another_layout_is_refused(library):
    weight = quantize(torch.randn(4, 128, 32))
    with pytest.raises(ValueError, match=r"'humming' reads weights in layout 'humming', got 'linear'; use quantize_"):
        humming.grouped_mm(torch.randn(11, 32, dtype=torch.bfloat16), weight, OFFSETS)


def test_the_kernel_of_an_interval_of_rows(monkeypatch):
    intervals = [(0, 8, "small"), (8, 64, "middle"), (64, 1 << 30, "large")]
    monkeypatch.setattr(humming, "_intervals", lambda *shape: intervals)
    monkeypatch.setattr(humming, "_kernel", lambda *shape: intervals[shape[-1]][2])
    found = [
        humming._kernel_for(4, 128, 32, torch.bfloat16, torch.device("cpu"), rows) for rows in (1, 8, 9, 65, 2**30)
    ]
    assert found == ["small", "small", "middle", "large", "large"]


def test_says_why_it_cannot_run(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("it may run here")
    assert humming.unavailable_reason() == "torch finds no CUDA device"
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "for compute capability (10, 0) Humming orders weights otherwise" in humming.unavailable_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(sys.modules, "humming", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert humming.unavailable_reason() == "humming-kernels is not installed: pip install 'thunder_moe[cuda]'"
