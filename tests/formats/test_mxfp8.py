"""The number format MXFP8: rounding, scales and bad input of thunder_moe.formats.mxfp8.
Called by pytest; judged by tests/oracle.py and, byte for byte, by torchao.
"""

import pytest
import torch
from oracle import MXFP8_FORMAT_ERROR, decode_e4m3, dequantize_mxfp8, quantize_mxfp8, relative_error

from thunder_moe.formats import nvfp4
from thunder_moe.formats.mxfp8 import dequantize, quantize
from thunder_moe.formats.weight import MXFP8Weight, NVFP4Weight, PackedWeight


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 40, 64), (1, 1, 32), (2, 129, 96)])
def test_format_error_on_normal_weights(shape, dtype):
    weight = (torch.randn(shape) * 0.02).to(dtype)
    packed = quantize(weight)
    decoded = dequantize(packed, torch.float32)
    assert torch.equal(decoded, dequantize_mxfp8(*packed.tensors()))
    if weight.numel() > 1000:
        assert relative_error(decoded, weight) == pytest.approx(MXFP8_FORMAT_ERROR, rel=0.03)


def test_every_code_and_scale_decodes():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127] * 255, dtype=torch.uint8)
    scale = torch.arange(255, dtype=torch.uint8)  # 255 is NaN
    codes = torch.cat([codes, codes.new_zeros(-len(codes) % 32)]).view(1, -1, 32)
    scale = scale.repeat(codes.shape[1] // 255 + 1)[: codes.shape[1]].view(1, -1, 1)
    packed = MXFP8Weight(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    decoded, expected = dequantize(packed, torch.float32), dequantize_mxfp8(*packed.tensors())
    assert torch.equal(decoded, expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(dequantize(packed, dtype), expected.to(dtype)), "rounded once"
    scale[0, 7] = 255
    assert dequantize(packed)[0, 7].isnan().all()


EDGES = {
    "normal": torch.randn(40, 32, generator=torch.Generator().manual_seed(3)),
    "spread": torch.linspace(-2, 2, 1280).view(40, 32)
    * 2.0 ** torch.randint(-20, 20, (40, 32), generator=torch.Generator().manual_seed(4)),
    "powers": torch.linspace(-1, 1, 32) * 2.0 ** torch.tensor([[-9.0], [0.0], [7.0]]),
    "zeros": torch.tensor([[0.0, -0.0] * 16, [1.0] + [-0.0] * 31]),
    "tiny": torch.tensor([[1e-38, -1e-40] * 16, [3e-36, 1e-36] * 16, [2.0**-149] * 32]),
    "huge": torch.tensor([[3.4e38, -1e30] * 16]),
}


@pytest.mark.parametrize("rows", EDGES.values(), ids=EDGES)
def test_equals_the_oracle_byte_for_byte(rows):
    largest = torch.tensor([448.0, 1.0, 2.0**-20])
    limits = torch.stack([torch.nextafter(largest, torch.tensor(x)) for x in (0.0, 1e9)] + [largest]).flatten()
    rows = torch.cat([rows, torch.cat([limits[:, None], torch.zeros(len(limits), 31)], -1)])
    packed = quantize(rows[None])
    for row, codes, scale in zip(rows.tolist(), bits(packed.qdata[0]).tolist(), bits(packed.scale[0]), strict=True):
        assert (codes, scale.item()) == quantize_mxfp8(row)


def test_the_largest_magnitude_decides_the_scale():
    for magnitude, exponent in ((448.0, 0), (448.0001, 1), (1.0, -8), (1.75, -8), (1.7501, -7), (2.0, -7), (3.5, -7)):
        packed = quantize(torch.full((1, 1, 32), magnitude))
        assert bits(packed.scale).item() - 127 == exponent
        assert dequantize(packed, torch.float32)[0, 0, 0].item() <= 448 * 2.0**exponent


def test_codes_round_to_nearest_even():
    values = [decode_e4m3(code) for code in range(127)]
    pairs = list(zip(range(126), values, values[1:], strict=False))
    weight = torch.zeros(1, 126, 32)
    weight[0, :, 0] = 448.0  # scale 1
    for code, low, high in pairs:
        tie = (low + high) / 2
        weight[0, code, 1:4] = torch.tensor([tie, tie * (1 - 1e-6), tie * (1 + 1e-6)])
        weight[0, code, 4] = -tie
    got = bits(quantize(weight).qdata)[0].tolist()
    for code, _, _ in pairs:
        even = code if code % 2 == 0 else code + 1
        assert got[code][1:5] == [even, code, code + 1, even | 128]


def torchao_quantize(weight):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    scale, codes = to_mx(weight, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return codes, scale.view(*weight.shape[:-1], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torchao_byte_for_byte(dtype):
    generator = torch.Generator().manual_seed(1)
    spread = 2.0 ** torch.randint(-30, 30, (1, 256, 16, 1), generator=generator)
    weight = (torch.randn(1, 256, 16, 32, generator=generator) * spread).flatten(-2).to(dtype)
    weight[0, :3] = 0
    weight[0, 3, :64] *= -0.0
    weight[0, 4, :32] = 1e-37  # its scale is the least
    packed = quantize(weight)
    codes, scale = torchao_quantize(weight)
    assert torch.equal(bits(packed.scale), bits(scale))
    assert torch.equal(bits(packed.qdata), bits(codes))


def test_chunks_and_strides_do_not_change_the_result(monkeypatch):
    weight = torch.randn(2, 100, 64)
    whole = quantize(weight)
    monkeypatch.setitem(nvfp4._CHUNK_WEIGHTS, "cpu", 64 * 7)
    for parts in (quantize(weight), quantize(weight.mT.contiguous().mT)):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(whole.tensors(), parts.tensors(), strict=True))
        assert torch.equal(dequantize(parts), dequantize(whole))


def test_concatenate_and_rows():
    first, second = quantize(torch.randn(3, 8, 32)), quantize(torch.randn(3, 24, 32) * 7)
    both = MXFP8Weight.concatenate(first, second)
    assert torch.equal(dequantize(both), torch.cat([dequantize(first), dequantize(second)], 1))
    assert torch.equal(dequantize(both.rows(slice(8, 32))), dequantize(second))
    assert PackedWeight.concatenate(first) is first
    other = nvfp4.quantize(torch.randn(3, 8, 32))
    with pytest.raises(TypeError, match="weights: got a NVFP4Weight at position 1, wanted MXFP8Weight"):
        PackedWeight.concatenate(first, other)
    assert isinstance(PackedWeight.concatenate(other, other), NVFP4Weight)


def test_bytes_are_half():
    weight = torch.randn(2, 256, 512, dtype=torch.bfloat16)
    assert quantize(weight).nbytes == weight.nbytes * 8.25 / 16


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.randn(8, 32), r"weight: got torch.float32 \(8, 32\) on cpu, wanted shape \(experts"),
        (torch.ones(1, 8, 32, dtype=torch.int32), r"weight: got torch.int32 .* wanted dtype float32"),
        (torch.randn(1, 8, 48), r"weight: got .* wanted in_features a positive multiple of 32"),
        (torch.tensor([[[1.0] * 31 + [float("nan")]]]), r"weight: got NaN or Inf in experts \[0\]"),
        (torch.tensor([[[1.0] * 32], [[float("-inf")] * 32]]), r"weight: got NaN or Inf in experts \[1\]"),
    ],
)
def test_quantize_refuses(weight, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight)


def test_float16_weights_that_would_become_infinite_are_refused():
    weight = torch.zeros(3, 32, 64, dtype=torch.float16)
    weight[1, 5, 7] = -63456  # the float16 below 63488, which lies between two multiples
    assert dequantize(quantize(weight), torch.float16)[1, 5, 7] == -61440
    weight[1, 5, 7] = -63488
    with pytest.raises(ValueError, match=r"weight: got a magnitude of 63488 in experts \[1\].*wanted magnitudes below"):
        quantize(weight)
    assert dequantize(quantize(weight.bfloat16()))[1, 5, 7] == -65536


def test_weight_refuses():
    good = quantize(torch.randn(2, 8, 64))
    bad = [
        (dict(qdata=bits(good.qdata)), "qdata: .*wanted dtype float8_e4m3fn"),
        (dict(qdata=good.qdata[0]), r"qdata: .*wanted shape \(experts, out_features, in_features\)"),
        (dict(qdata=good.qdata[..., :40]), "qdata: .*multiple of 32"),
        (dict(scale=bits(good.scale)), "scale: .*wanted dtype float8_e8m0fnu"),
        (dict(scale=good.scale[:, :4]), r"scale: .*wanted shape \(2, 8, 2\)"),
        (dict(scale=good.scale.to("meta")), "scale: .*wanted device cpu"),
        (dict(layout="marlin"), "layout: got 'marlin'"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            MXFP8Weight(**{**dict(qdata=good.qdata, scale=good.scale), **change})
    with pytest.raises(TypeError, match="scale: got NoneType, wanted a tensor"):
        MXFP8Weight(good.qdata, None)
    with pytest.raises(ValueError, match=r"dtype: got torch.int8"):
        dequantize(good, torch.int8)
    with pytest.raises(ValueError, match=r"scale_search: got 'mse', wanted None"):
        quantize(torch.zeros(1, 1, 32), scale_search="mse")
