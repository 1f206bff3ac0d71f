"""The layouts of packed weights: round trips, and each order against the one that its kernels document.
Called by pytest; judged by loops over indices and by torchao.
"""

import functools
import itertools
import operator

import pytest
import torch
from oracle import decode_e4m3

from thunder_moe.formats import mxfp8
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.formats.layouts import (
    MODULE_LAYOUTS,
    REGISTRY,
    block_shapes,
    find_layout,
    layout_of_blocks,
    layouts_of,
    module_layouts,
    preferred_on,
)
from thunder_moe.formats.nvfp4 import LAYOUTS, NVFP4Weight, dequantize, quantize
from thunder_moe.formats.registry import FORMATS
from thunder_moe.formats.swizzled_128x4 import swizzle_scale


def bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


CONVERSIONS = [
    (name, *pair) for name in FORMATS for pair in itertools.product(layouts_of(BLOCK_FORMATS[name]), repeat=2)
]


@pytest.mark.parametrize(("format", "source", "target"), CONVERSIONS)
def test_every_conversion_is_exact(format, source, target):
    packed = FORMATS[format].quantize(torch.randn(2, 256, 192))
    converted = packed.to_layout(source).to_layout(target)
    assert converted.layout == target
    assert converted.shape == packed.shape
    assert torch.equal(FORMATS[format].dequantize(converted), FORMATS[format].dequantize(packed))
    for back, first in zip(converted.to_layout("linear").tensors(), packed.tensors(), strict=True):
        assert torch.equal(bits(back), bits(first))


@pytest.mark.parametrize(("n", "k"), [(128, 64), (1, 16), (130, 80), (256, 128), (100, 48)])
def test_swizzled_layout(n, k):
    packed = quantize(torch.randn(2, n, k))
    swizzled = packed.to_layout("swizzled_128x4")
    rows, columns = swizzled.scale.shape[1:]
    assert rows % 128 == 0
    assert columns % 4 == 0
    flat = bits(swizzled.scale).view(2, -1)
    for row, column in [(0, 0), (n - 1, k // 16 - 1), (n // 2, 0), (n // 3, k // 32)]:
        tile = (row // 128) * (columns // 4) + column // 4
        position = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        assert torch.equal(flat[:, position], bits(packed.scale)[:, row, column])
    assert int(bits(swizzled.scale).ne(0).sum()) == int(bits(packed.scale).ne(0).sum())
    back = swizzled.to_layout("linear")
    assert torch.equal(bits(back.scale), bits(packed.scale))
    assert torch.equal(dequantize(swizzled), dequantize(packed))


def test_swizzled_layout_equals_torchao():
    from torchao.prototype.mx_formats.utils import to_blocked

    scale = quantize(torch.randn(1, 200, 160)).scale
    assert torch.equal(bits(swizzle_scale(scale)).flatten(), bits(to_blocked(scale[0])).flatten())


# The registers of a word of "tiled_64x64" as the comments of `to_tiled` and its kernel have them, in Python integers.
MASK, FIRST, WORD = 0x81C081C0, 0x06030603, 0xFFFFFFFF


def rotl(word, count):
    count %= 32
    return (word << count | word >> 32 - count) & WORD


def register(low, high):
    halves = [(code & 7) << 6 | (code >> 3) << 15 for code in (low, high)]
    return halves[0] | halves[1] << 16


def joined(*parts):
    assert sum(parts) == functools.reduce(operator.or_, parts), "the bits are disjoint"
    return sum(parts)


def test_tiled_layout_by_index():
    packed = quantize(torch.randn(2, 128, 192))
    codes = torch.stack([packed.qdata & 15, packed.qdata >> 4], -1).view(2, 128, 192).tolist()
    tiled = packed.to_layout("tiled_64x64")
    words = tiled.qdata.view(torch.int32).view(2, 2, 3, 4, 32, 4).tolist()  # [E, N/64, K/64, w, lane, s]
    for place in itertools.product(range(2), range(2), range(3), range(4), range(8), range(4)):
        expert, n64, k64, w, g, t = place
        row, k0 = 64 * n64 + 16 * w + g, 64 * k64 + 2 * t
        own = [word & WORD for word in words[expert][n64][k64][w][4 * g + t]]
        for s in (0, 2):
            r, other = (
                [
                    register(*codes[expert][row + 8 * (i % 2)][k : k + 2])
                    for i in range(4)
                    for k in [k0 + 16 * step + 8 * (i // 2)]
                ]
                for step in (s, s + 1)
            )
            u = joined(r[3] >> 6, rotl(other[3], -12))
            assert own[s] == joined(r[0], r[1] >> 4, rotl(r[2], -10), u & FIRST)
            assert own[s + 1] == joined(other[0], other[1] >> 4, rotl(other[2], -10), (u & ~FIRST) >> 2)
            # As the kernel decodes them.
            u = own[s] & FIRST | own[s + 1] << 2 & ~FIRST
            for registers, word in ((r, own[s]), (other, own[s + 1])):
                assert registers[:3] == [word & MASK, word << 4 & MASK, rotl(word, 10) & MASK]
            assert (r[3], other[3]) == (u << 6 & MASK, rotl(u & WORD, 12) & MASK)


def scale_bytes(tiled):
    """The bytes of each word of scales in "tiled_64x64", a list of [8 rows][step] after the other."""
    words = tiled.scale.view(torch.int32).flatten().tolist()
    return [byte for word in words for byte in rotl(word & WORD, 4).to_bytes(4, "little")]


def test_tiled_scales_by_index():
    packed = quantize(torch.randn(2, 128, 192) * torch.rand(2, 128, 1) ** 20)
    blocks = torch.tensor(scale_bytes(packed.to_layout("tiled_64x64"))).view(2, 2, 3, 4, 8, 2, 2, 2).tolist()
    scales = bits(packed.scale).tolist()
    for place in itertools.product(range(2), range(2), range(3), range(4), range(8), range(2), range(2), range(2)):
        expert, n64, k64, w, g, p, eight_rows, step = place
        byte = scales[expert][64 * n64 + 16 * w + 8 * eight_rows + g][4 * k64 + 2 * p + step]
        exponent, mantissa = divmod(blocks[expert][n64][k64][w][g][p][eight_rows][step], 8)
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 21) if exponent else mantissa
        assert value == decode_e4m3(byte)


def test_tiled_scales_of_every_byte():
    scale = torch.arange(256, dtype=torch.uint8).view(1, 64, 4)
    codes = torch.randint(1, 256, (1, 64, 32), dtype=torch.uint8)
    packed = NVFP4Weight(codes, scale.view(torch.float8_e4m3fn), torch.ones(1))
    tiled = packed.to_layout("tiled_64x64")
    back = tiled.to_layout("linear")
    assert torch.equal(bits(back.scale), scale)
    assert not back.qdata[0, 0, :8].any(), "of a block whose scale is 0"
    assert torch.equal(back.qdata.flatten()[8:], codes.flatten()[8:])
    given = scale.view(4, 2, 8, 2, 2).permute(0, 2, 3, 1, 4).flatten().tolist()  # [w, g, two steps, 8 rows, step]
    code = dict(zip(given, scale_bytes(tiled), strict=True))
    known = [0, 96, 104, 108, 112, 114, 116, 118, *range(120, 240)]
    assert [code[byte] for byte in range(256)] == [*known, *sorted({*range(256)} - {*known})]


def test_tiled_layout_of_any_strides_and_without_data():
    packed = quantize(torch.randn(2, 128, 64))
    tiled = packed.to_layout("tiled_64x64")
    for weight, layout, expected in ((packed, "tiled_64x64", tiled), (tiled, "linear", packed)):
        qdata, scale = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in weight.tensors()[:2])
        other = NVFP4Weight(qdata, scale, weight.global_scale, weight.layout).to_layout(layout)
        assert torch.equal(other.qdata, expected.qdata)
        assert torch.equal(bits(other.scale), bits(expected.scale))
        shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), weight.qdata.flatten()])[1:].view(weight.qdata.shape)
        other = NVFP4Weight(shifted, weight.scale, weight.global_scale, weight.layout).to_layout(layout)
        assert torch.equal(other.qdata, expected.qdata)
        empty = weight.to("meta").to_layout(layout)
        assert empty.shape == weight.shape
        assert empty.qdata.is_meta


@pytest.mark.parametrize(
    ("layout", "shape", "needs"),
    [
        ("tiled_64x64", (2, 96, 64), "out_features and in_features multiples of 64"),
        ("tiled_64x64", (2, 64, 96), "out_features and in_features multiples of 64"),
        ("tiled_64x64", (2, 0, 64), "out_features and in_features multiples of 64, not 0"),
    ],
)
def test_shapes_that_a_layout_cannot_take(layout, shape, needs):
    packed = quantize(torch.randn(shape))
    with pytest.raises(ValueError, match=f"layout: got '{layout}' .* needs {needs}"):
        packed.to_layout(layout)
    with pytest.raises(ValueError, match=f"qdata: .* wanted {needs}"):
        NVFP4Weight(*packed.tensors(), layout=layout)


def test_unknown_layout():
    packed = quantize(torch.randn(1, 8, 16))
    for layout in ("tiled", "humming"):
        with pytest.raises(ValueError, match=rf"layout: got '{layout}', wanted one of .*'linear'.*'tiled_64x64'"):
            packed.to_layout(layout)
        with pytest.raises(ValueError, match=rf"layout: got '{layout}', wanted one of .*'linear'.*'tiled_64x64'"):
            NVFP4Weight(*packed.tensors(), layout=layout)
    with pytest.raises(ValueError, match="layout: got 'swizzled_128x4' of mxfp8 weights, wanted one of"):
        mxfp8.quantize(torch.randn(1, 8, 32)).to_layout("swizzled_128x4")


@pytest.mark.parametrize("name", FORMATS)
def test_the_registry_tells_layouts_by_the_shapes_that_modules_keep(name):
    format = BLOCK_FORMATS[name]
    assert all(key == (layout.format.name, layout.name) for key, layout in REGISTRY.items())
    assert module_layouts(format) == ("linear", "tiled_64x64")
    assert set(module_layouts(format)) <= set(layouts_of(format))
    packed = FORMATS[name].quantize(torch.randn(2, 128, 64))
    assert packed.to_layout("linear") is packed
    for layout in module_layouts(format):
        qdata, scale, *_ = packed.to_layout(layout).blocks
        assert (tuple(qdata.shape), tuple(scale.shape)) == block_shapes(2, 128, 64, layout, format)
        assert layout_of_blocks(qdata, scale, format) == layout
        assert find_layout(layout, format).format is format
    shapes = [block_shapes(2, 128, 64, layout, format)[0] for layout in module_layouts(format)]
    assert len({len(shape) for shape in shapes}) == len(shapes)


def test_layouts_of_nvfp4():
    assert LAYOUTS == layouts_of(NVFP4) == ("linear", "swizzled_128x4", "tiled_64x64")
    assert module_layouts(NVFP4) == MODULE_LAYOUTS
    with pytest.raises(ValueError, match="layout: got 'swizzled_128x4', wanted one of .* which modules keep"):
        block_shapes(2, 128, 64, "swizzled_128x4")


@pytest.mark.parametrize(
    ("capability", "n", "k", "layout"),
    [
        ((9, 0), 128, 64, "tiled_64x64"),
        ((9, 0), 96, 64, "linear"),
        ((8, 0), 128, 64, "linear"),
        ((10, 0), 64, 64, "linear"),
    ],
)
def test_the_registry_knows_what_a_device_prefers(capability, n, k, layout):
    assert preferred_on(capability, n, k) == layout
