"""Dense layers of up to 8 rows by the kernel without a pipeline, run by the emulator and by a GPU.
Called by pytest; judged by tests/oracle.py's errors against products with the dequantized weights.
"""

from dataclasses import replace

import pytest
import torch
from emulated_gemms import emulate_device
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error
from pairwise import pairwise

from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import operators
from thunder_moe.kernels.cuda.operands import operands_of
from thunder_moe.kernels.select import quantize_to
from thunder_moe.kernels.specs import GemmSpec, Target, WeightSpec

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = ("nvfp4", "mxfp8")


@pytest.fixture
def tiled(request, device, monkeypatch):
    """Return a device that has the kernels, and a function that makes a weight in their layout."""
    if device == "cpu":
        emulate_device(monkeypatch, 3)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")

    def make(format, *shape):
        generator = torch.Generator().manual_seed(sum(shape))
        weight = quantize_to(format, torch.randn(shape, generator=generator).to(device))
        return weight.to_layout("tiled_64x64")

    return device, make


MM = [(1, 64, 64), (3, 128, 576), (8, 192, 1088), (2, 64, 6144)]  # rows, N, K


@pytest.mark.parametrize(
    ("format", "dtype", "sizes"),
    [
        ("nvfp4", torch.bfloat16, MM[1]),
        ("mxfp8", torch.float16, MM[2]),
        *others_slow([("nvfp4", torch.float16, MM[0]), ("mxfp8", torch.bfloat16, MM[3])]),
        *others_slow(pairwise(FORMATS, DTYPES, MM), exhaustive=True),
    ],
)
def test_mm(tiled, format, dtype, sizes):
    device, make = tiled
    rows, n, k = sizes
    weight, x, bias = make(format, 1, n, k), torch.randn(rows, k).to(device, dtype), torch.randn(n).to(device)
    wanted = reference.mm(x.float(), weight.to_layout("linear"))
    assert relative_error(cuda.mm(x, weight), wanted) < KERNEL_TOLERANCE[dtype]
    assert relative_error(cuda.mm(x, weight, bias), wanted + bias) < KERNEL_TOLERANCE[dtype]


def test_prefetch_gives_the_same_bits(tiled):
    device, make = tiled
    weight, x = make("nvfp4", 1, 128, 640), torch.randn(4, 640, device=device).bfloat16()
    codes, scale, global_scale, *_ = weight.tensors()
    operands = WeightOperands(codes[0].mT, scale[0], global_scale[0], weight.format)
    results = [
        operators.run("f16a_nvfp4weight_scaled_mm", x, operands, layout="tiled_64x64", prefetch=prefetch)
        for prefetch in (False, True)
    ]
    assert torch.equal(*results)


def test_larger_layers_have_a_pipeline():
    target = Target(torch.device("cuda", 0), 132, (9, 0))

    def serves(rows, n, k, capability=(9, 0)):
        where = replace(target, capability=capability)
        spec = GemmSpec(rows, 1, n, k, torch.bfloat16, WeightSpec("tiled_64x64"), where)
        return operators.explain(spec).startswith("mm_tiled_direct<")

    assert serves(8, 5120, 2048)
    assert not serves(9, 5120, 2048)
    assert not serves(1, 151936, 2048)
    assert not serves(1, 2048, 16 * 512 + 64)
    with pytest.raises(ValueError, match="for devices of compute capability"):
        serves(1, 2048, 2048, (10, 0))


NORMED = [(1, 64, 64), (2, 128, 576), (2, 192, 1088)]


@pytest.mark.parametrize(
    ("format", "dtype", "sizes"),
    [
        ("nvfp4", torch.bfloat16, NORMED[1]),
        ("mxfp8", torch.float16, NORMED[2]),
        *others_slow([("nvfp4", torch.float16, NORMED[0])]),
        *others_slow(pairwise(FORMATS, DTYPES, NORMED), exhaustive=True),
    ],
)
def test_norm_of_a_sum_in_front(tiled, format, dtype, sizes):
    device, make = tiled
    rows, n, k = sizes
    weight = make(format, 1, n, k)
    x, residual, norm_weight = (torch.randn(shape).to(device, dtype) for shape in ((rows, k), (rows, k), (k,)))
    out, total = cuda.add_norm_mm(x, residual, norm_weight, weight, None, 1e-6)
    assert torch.equal(total, x + residual)
    wide = total.double()
    normalized = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    wanted = reference.mm(normalized, weight.to_layout("linear"))
    assert relative_error(out, wanted) < 2 * KERNEL_TOLERANCE[dtype]  # rows are rounded twice
    codes, scale, global_scale, *_ = operands_of(weight)
    operands = WeightOperands(codes[0], scale[0], None if global_scale is None else global_scale[0], weight.format)
    name, options = f"f16a_{format}weight_add_norm_scaled_mm", dict(layout="tiled_64x64", epsilon=1e-6)
    early = operators.run(name, x, residual, norm_weight, operands, prefetch=True, **options)
    assert torch.equal(early[0], out)
    assert torch.equal(early[1], total)


def test_norms_of_more_rows_are_plain_torch(tiled):
    device, make = tiled
    weight, x, norm_weight = make("nvfp4", 1, 64, 64), torch.randn(2, 3, 64).to(device, torch.bfloat16), torch.ones(64)
    with pytest.warns(UserWarning, match="plain torch.*more than 2 rows is a kernel of its own"):
        out, total = cuda.add_norm_mm(*x, norm_weight.to(x), weight, None, 1e-6)
    rows = torch.nn.functional.rms_norm(total.float(), (64,), eps=1e-6)
    assert relative_error(out, reference.mm(rows, weight.to_layout("linear"))) < 2 * KERNEL_TOLERANCE[torch.bfloat16]
