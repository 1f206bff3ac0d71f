"""The operators of MXFP8 weights: results, gradients, opcheck, other layouts and bad input.
Called by pytest; judged by tests/oracle.py. Layouts, routings and compilation: test_grouped_mm.py, of both formats.
"""

import warnings

import pytest
import torch
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, dequantize_mxfp8, grouped_mm, grouped_swiglu, moe_experts, relative_error

import thunder_moe
import thunder_moe.ops.experts_lora
from thunder_moe.formats import nvfp4
from thunder_moe.formats.mxfp8 import quantize
from thunder_moe.formats.registry import dequantize
from thunder_moe.kernels import select
from thunder_moe.kernels.select import simulate_w4a4, use_backend
from thunder_moe.ops import add_norm, experts, experts_lora, grouped_mm_combine, scaled_mm  # noqa: F401  (registers)
from thunder_moe.ops import grouped_mm as grouped_mm_ops
from thunder_moe.ops import grouped_swiglu as grouped_swiglu_ops
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS
from thunder_moe.ops.scaled_mm import dense_operands

OPS = torch.ops.thunder_moe
DTYPES = list(KERNEL_TOLERANCE)
OFFSETS = torch.tensor([2, 4, 4, 7], dtype=torch.int32)
IDS = torch.tensor([[0, 3], [1, 1], [3, 0], [0, 1]])


def make(n=32, k=64, experts=4, layout="linear"):
    weight = quantize(torch.randn(experts, n, k))
    return weight.to_layout(layout), dequantize_mxfp8(*weight.tensors())


def of_all(gate_up, down, dense, dtype=torch.float32):
    """Each operator's arguments with weights (4, 64, 64), (4, 64, 32) and (1, 32, 64), and what the oracle makes of
    them."""
    generator = torch.Generator().manual_seed(1)
    exact, exact_down, exact_dense = (dequantize(weight, torch.float32) for weight in (gate_up, down, dense))
    x, slots, rows, grad = (torch.randn(size, 64, generator=generator).to(dtype) for size in (4, 7, 8, 7))
    _, offsets, slot_row = OPS.moe_route(IDS, 4)
    weights, bias = torch.rand(4, 2, generator=generator), torch.randn(4, 64, generator=generator)
    y = grouped_mm(rows, exact, offsets)
    return {
        "scaled_grouped_mm": ((slots, *operands(gate_up), OFFSETS), grouped_mm(slots, exact, OFFSETS)),
        "scaled_grouped_mm_dgrad": ((grad, *operands(gate_up), OFFSETS), grouped_mm(grad, exact.mT, OFFSETS)),
        "grouped_swiglu": ((slots, *operands(gate_up), OFFSETS), grouped_swiglu(slots, exact, OFFSETS)),
        "grouped_mm_combine": (
            (rows, *operands(gate_up), offsets, slot_row, weights),
            (y[slot_row.long()] * weights[..., None]).sum(1),
        ),
        "moe_experts": (
            (x, IDS, weights, *operands(gate_up), *operands(down), bias, torch.zeros(4, 64)),
            moe_experts(x, IDS, weights, exact, exact_down, bias),
        ),
        "scaled_mm": ((x, *dense_operands(dense), bias[0, :32]), x.float() @ exact_dense[0].T + bias[0, :32]),
        "scaled_mm_dgrad": ((x[:, :32], *dense_operands(dense)), x[:, :32].float() @ exact_dense[0]),
    }


def weights():
    return [quantize(torch.randn(shape)) for shape in SHAPES]


SHAPES = ((4, 64, 64), (4, 64, 32), (1, 32, 64))
OF_ALL = (
    "scaled_grouped_mm", "scaled_grouped_mm_dgrad", "grouped_swiglu", "grouped_mm_combine", "moe_experts", "scaled_mm",
    "scaled_mm_dgrad",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OF_ALL)
def test_every_operator_matches_the_oracle(name, dtype):
    args, expected = of_all(*weights(), dtype)[name]
    operator = getattr(OPS, f"f16a_mxfp8weight_{name}")
    for _ in range(2):  # the second call knows its arguments
        out = operator(*args)
        assert out.dtype == dtype
        assert relative_error(out, expected) < 2 * KERNEL_TOLERANCE[dtype]
        out.add_(1)  # no view of a kernel's tensor


def test_they_are_all_that_there_are():
    known = {name.removeprefix("f16a_mxfp8weight_") for name in OPERATORS if "mxfp8weight" in name}
    assert known == {
        *OF_ALL,
        "moe_experts_lora",
        "add_norm_scaled_mm",
    }  # test_experts_lora and test_add_norm test these
    for module in (grouped_mm_ops, grouped_swiglu_ops, grouped_mm_combine, experts, scaled_mm):
        for name in dir(module):
            if name.startswith("f16a_mxfp8weight"):
                assert "fp8_weight is the" in getattr(module, name).__doc__
                assert hasattr(thunder_moe, name) == hasattr(thunder_moe, name.replace("mxfp8", "nvfp4"))


@pytest.mark.parametrize(
    "name",
    others_slow(OF_ALL, ["scaled_mm"], exhaustive=True),  # their code is that of NVFP4's operators
)
def test_opcheck(opcheck, name):
    args, _ = of_all(*weights())[name]
    opcheck(getattr(OPS, f"f16a_mxfp8weight_{name}").default, (args[0].requires_grad_(), *args[1:]))


def of_equal_values(shape):
    """Return a weight in NVFP4, and the same values in MXFP8: codes that E2M1 has, in blocks of 32."""
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(0, 8, shape)]
    values *= torch.randn(shape).sign()
    values[..., ::16] = 6.0
    packed = nvfp4.quantize(values)
    scale = torch.ones(packed.scale.shape).to(torch.float8_e4m3fn)
    return nvfp4.NVFP4Weight(packed.qdata, scale, torch.ones(shape[0])), quantize(values), values


@pytest.mark.parametrize("name", OF_ALL)
def test_gradients_are_those_of_nvfp4s_operator(name):
    results = []
    in_nvfp4, in_mxfp8, values = zip(*map(of_equal_values, SHAPES), strict=True)
    for packed in (in_nvfp4, in_mxfp8):
        for weight, exact in zip(packed, values, strict=True):
            assert torch.equal(dequantize(weight, torch.float32), exact)
        args, _ = of_all(*packed)[name]
        args = [t.requires_grad_() if t.dtype == torch.float32 and t.requires_grad is False else t for t in args]
        args = [t.detach() if packed is in_nvfp4 and _is_global_scale(t, in_nvfp4) else t for t in args]
        out = getattr(OPS, f"f16a_{packed[0].format.name}weight_{name}")(*args)
        results.append([out, *torch.autograd.grad(out.square().sum(), [t for t in args if t.requires_grad])])
    for theirs, ours in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def _is_global_scale(tensor, packed):
    pointers = [weight.global_scale.data_ptr() for weight in packed]
    return tensor.data_ptr() in pointers


def test_moe_experts_of_packed_weights():
    (gate_up, exact), (down, exact_down) = make(64, 64), make(64, 32)
    x, weights = torch.randn(4, 64), torch.rand(4, 2)
    out = thunder_moe.moe_experts(x, IDS, weights, gate_up, down)
    assert relative_error(out, moe_experts(x, IDS, weights, exact, exact_down)) < 1e-5
    with pytest.raises(TypeError, match="down: got NVFP4Weight, wanted MXFP8Weight, as gate_up is"):
        thunder_moe.moe_experts(x, IDS, weights, gate_up, nvfp4.quantize(torch.randn(4, 64, 32)))


def test_autocast_computes_in_its_dtype():
    dense, exact = make(32, 64, experts=1)
    x = torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OPS.f16a_mxfp8weight_scaled_mm(x, *dense_operands(dense))
    assert out.dtype == torch.bfloat16
    assert relative_error(out, x @ exact[0].T) < 1e-2


def test_backends_that_take_no_mxfp8_say_so(monkeypatch):
    weight, exact = make()
    x = torch.randn(7, 64)
    expected = OPS.f16a_mxfp8weight_scaled_grouped_mm(x, *operands(weight), OFFSETS)
    with simulate_w4a4():  # of NVFP4 alone
        assert torch.equal(OPS.f16a_mxfp8weight_scaled_grouped_mm(x, *operands(weight), OFFSETS), expected)
    module = select.select(torch.device("cpu"), backend="cpu")
    monkeypatch.setattr(module, "FORMATS", ("nvfp4",), raising=False)
    select._best.cache_clear()
    x = torch.randn(6, 64)  # a kind of arguments that is not known
    offsets = OFFSETS.clamp_max(6)
    with (
        use_backend("cpu"),
        pytest.raises(ValueError, match=r"backend: 'cpu' takes no mxfp8 weights, only \('nvfp4',\)"),
    ):
        OPS.f16a_mxfp8weight_scaled_grouped_mm(x, *operands(weight), offsets)
    with pytest.warns(UserWarning, match="slower plain-torch ones take their place: they take no mxfp8 weights"):
        out = OPS.f16a_mxfp8weight_scaled_grouped_mm(x, *operands(weight), offsets)
    assert relative_error(out, grouped_mm(x, exact, offsets)) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OPS.f16a_mxfp8weight_scaled_grouped_mm(x[:5], *operands(weight), OFFSETS.clamp_max(5))
    select._best.cache_clear()


@pytest.mark.parametrize("fake", [False, True], ids=["eager", "fake"])
def test_refuses(fake):
    (packed, scale), x = operands(make()[0]), torch.randn(7, 64)
    name = "f16a_mxfp8weight_scaled_grouped_mm"
    bad = [
        ((x[:, :48], packed, scale, OFFSETS), "activation: .*in_features a positive multiple of 32"),
        ((x[:, :32], packed, scale, OFFSETS), "fp8_weight: .*in_features = 32 in dim 1, by the activation"),
        ((x, packed.view(torch.uint8), scale, OFFSETS), "fp8_weight: .*wanted a dtype of"),
        ((x, packed, scale[..., :1], OFFSETS), "weight_scaling_factor: .*wanted shape"),
        ((x, packed, scale.view(torch.uint8), OFFSETS), "weight_scaling_factor: .*wanted dtype float8_e8m0fnu"),
        ((x, packed, scale, OFFSETS.long()), "offsets: .*wanted dtype int32"),
    ]
    for args, message in bad:
        if fake:
            args = tuple(tensor.to("meta") for tensor in args)
        with pytest.raises(ValueError, match=message):
            getattr(OPS, name)(*args)
    args = (x, packed, scale, OFFSETS)
    with pytest.raises(ValueError, match="layout: got 'swizzled_128x4' of mxfp8 weights"):
        getattr(OPS, name)(*args, layout="swizzled_128x4")
    with pytest.raises(ValueError, match="offsets: got .* wanted cumulative row ends"):
        getattr(OPS, name)(x, packed, scale, OFFSETS.flip(0))
    dense, _ = make(32, 64, experts=1)
    codes, scales = dense_operands(dense)
    with pytest.raises(ValueError, match=r"fp8_weight: .*wanted shape \(in_features, out_features\)"):
        OPS.f16a_mxfp8weight_scaled_mm(x, codes[None], scales)
    with pytest.raises(ValueError, match="activation: .*the in_features of fp8_weight"):
        OPS.f16a_mxfp8weight_scaled_mm(x[:, :32], codes, scales)
