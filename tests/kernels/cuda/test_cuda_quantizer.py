"""The CUDA quantizer, byte for byte as formats/nvfp4.py and mxfp8.py: its source run by the emulator, and on a GPU.
Called by pytest, with -m gpu on a GPU; judged by `quantize` of those modules and by `to_layout` on the CPU, which have
oracles of their own.
"""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from thunder_moe.formats import mxfp8
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.formats.weight import MXFP8Weight, PackedWeight
from thunder_moe.kernels import select
from thunder_moe.kernels.cuda import quantizer
from thunder_moe.nn.quantized import NVFP4GroupedLinear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(got, expected):
    assert got.layout == expected.layout
    for name in expected.format.fields:
        mine, theirs = (getattr(weight, name).cpu().view(torch.uint8) for weight in (got, expected))
        assert torch.equal(mine, theirs), name


def awkward(dtype, shape=(3, 64, 128)):
    """Return weights of many magnitudes: zeros, signed zeros, subnormals, ties of the rounding, an expert of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.exp2(torch.randint(-24, 4, (*shape[:2], shape[2] // 16, 1)).float()).expand(
        *shape[:2], shape[2] // 16, 16
    ).reshape(shape)
    grid = torch.tensor([0.0, -0.0, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 448.0, 1e-30, -2.0])
    weight[0, :8, :64] = grid.repeat(4)
    weight[0, 9] = 0.0
    weight[0, 10, :16] = 2.0**-26
    weight[1] = 0.0
    weight[2, 3, 5] = 60000.0
    return weight.to(dtype)


@pytest.mark.parametrize("scale_search", [None, "mse"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.covering(1)
def test_the_same_bytes(device, dtype, scale_search):
    weight = awkward(dtype)
    expected = quantize(weight, scale_search=scale_search)
    got = quantizer.quantize(weight.to(device), scale_search=scale_search)
    same(got, expected)
    tiled = quantizer.to_layout(got, "tiled_64x64")
    same(tiled, expected.to_layout("tiled_64x64"))
    same(quantizer.to_layout(tiled, "linear"), expected)


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])])
def test_the_same_bytes_of_mxfp8(device, dtype):
    weight = awkward(dtype)
    weight[0, 11, :32] = torch.tensor([448.0, 449.0, 450.0, 2.0**-9, 2.0**-10, 3 * 2.0**-10, 464.0, 17.0]).repeat(4)
    weight[0, 12, :32] = weight[0, 12, :32].sign() * 1e-7
    expected = mxfp8.quantize(weight)
    got = quantizer.quantize(weight.to(device), "mxfp8")
    same(got, expected)
    tiled = quantizer.to_layout(got, "tiled_64x64")
    same(tiled, expected.to_layout("tiled_64x64"))
    same(quantizer.to_layout(tiled, "linear"), expected)


@pytest.mark.parametrize("default_dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_makes_no_difference(device, default_dtype):
    weight = awkward(torch.bfloat16)
    expected = quantize(weight)
    torch.set_default_dtype(default_dtype)
    try:
        got = quantizer.quantize(weight.to(device))
    finally:
        torch.set_default_dtype(torch.float32)
    same(got, expected)


def test_strides_chunks_and_shapes(device, monkeypatch):
    monkeypatch.setattr(quantizer, "_COPY_BYTES", 40000)
    for weight in (
        awkward(torch.bfloat16).to(device).mT,
        awkward(torch.bfloat16, (5, 32, 128)).to(device)[1:, ::2],
        torch.tensor(1.0, device=device).expand(2, 3, 16),
        torch.randn(4, 1, 16, device=device),
        torch.randn(2, 0, 32, device=device),
        awkward(torch.bfloat16).to(device).flatten()[1 : 1 + 64 * 128].view(1, 64, 128),  # not aligned
    ):
        same(quantizer.quantize(weight), quantize(weight.cpu()))
        if weight.shape[-1] % 32 == 0:
            same(quantizer.quantize(weight, "mxfp8"), mxfp8.quantize(weight.cpu()))


def test_tiny_and_huge_experts(device):
    weight = torch.zeros(4, 2, 32)
    weight[0, 0, 0] = 1e-38
    weight[1, 0, 0] = 3e38
    weight[1, 1, 3] = 1.0
    weight[2, 0, :4] = torch.tensor([1e-44, 1e-45, -1e-45, 0.0])
    same(quantizer.quantize(weight.to(device)), quantize(weight))
    weight[3, 0, 0], weight[3, 1, :2] = 2.6e-36, 1e-37
    same(quantizer.quantize(weight.to(device), "mxfp8"), mxfp8.quantize(weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_is_not_finite(device, value):
    weight = torch.randn(3, 4, 32)
    weight[1, 2, 3] = value
    with pytest.raises(ValueError, match=r"weight: got NaN or Inf in experts \[1\], wanted finite values"):
        quantizer.quantize(weight.to(device))
    with pytest.raises(ValueError, match=r"weight: got NaN or Inf in experts \[1\], wanted finite values"):
        quantizer.quantize(weight.to(device), "mxfp8")


@pytest.mark.parametrize("shape", [(2, 128, 192), (1, 64, 64), (3, 192, 64), (1, 64, 320)])
def test_layouts_of_any_bytes(device, shape, monkeypatch):
    monkeypatch.setattr(quantizer.backend, "_QUANTIZE_BLOCKS", 4)  # thread blocks convert several tiles
    torch.manual_seed(0)
    experts, n, k = shape
    scale = torch.randint(256, (experts, n, k // 16), dtype=torch.uint8)
    scale[0, 0, :4] = 0
    nvfp4 = NVFP4Weight(
        torch.randint(256, (experts, n, k // 2), dtype=torch.uint8),
        scale.view(torch.float8_e4m3fn),
        torch.rand(experts, n),
    )
    mxfp8 = MXFP8Weight(
        torch.randint(256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randint(256, (experts, n, k // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    for weight in (nvfp4, mxfp8):
        for layout, other in (("linear", "tiled_64x64"), ("tiled_64x64", "linear")):  # any bytes are a weight of each
            given = replace(weight, layout=layout)
            same(quantizer.to_layout(given.to(device), other), given.to_layout(other))


def test_a_state_dict_of_tiles_is_converted_by_the_kernel(device, monkeypatch):
    weight = quantize(torch.randn(2, 64, 128))
    linear = NVFP4GroupedLinear(weight.to_layout("tiled_64x64").to(device))
    monkeypatch.setattr(select, "runs_on_cuda", lambda *_: True)
    monkeypatch.setattr(PackedWeight, "to_layout", None)  # the conversion in plain torch
    state = linear.state_dict()
    assert linear.layout == "tiled_64x64"
    same(NVFP4Weight(*(state[name] for name in weight.format.fields)), weight)


def test_fake_tensors_are_converted_without_the_kernel(monkeypatch):
    weight = quantize(torch.randn(2, 64, 128))
    monkeypatch.setattr(select, "runs_on_cuda", lambda *_: True)
    with FakeTensorMode() as mode:
        fake = weight.with_tensors(map(mode.from_tensor, weight.tensors()))
        for layout in ("tiled_64x64", "linear"):
            fake = select.lay_out(fake, layout)
            assert (fake.layout, fake.shape) == (layout, weight.shape)
            assert isinstance(fake.qdata, FakeTensor)
