"""Dense layers of up to 8 rows by the kernel without a pipeline, run by the emulator and by a GPU.
Called by pytest; judged by tests/oracle.py's errors against products with the dequantized weights.
"""

from dataclasses import replace

import pytest
import torch
from emulated_gemms import emulate_device
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error

from thunder_moe.formats.weight import WeightOperands
from thunder_moe.kernels import reference
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import operators
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
    [("nvfp4", torch.bfloat16, MM[1]), ("mxfp8", torch.float16, MM[2])]
    + others_slow([(format, dtype, sizes) for format in FORMATS for dtype in DTYPES for sizes in MM], ()),
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
