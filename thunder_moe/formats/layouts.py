"""The registry of layouts of packed weights: how the codes and block scales of (E, N, K) lie in memory.
Called by weight, kernels.select, nn and the checks of operands; calls block_format, swizzled_128x4,
tiled_64x64 and mxfp8_tiled_64x64.

- "linear": codes and scales row by row, as checkpoints hold them.
- "swizzled_128x4": NVFP4 with the scales as Blackwell's tensor cores read them.
- "tiled_64x64": codes and scales as our CUDA kernels for SM90 read them.

A new layout is one entry of `REGISTRY`, of one number format. Legend: E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from thunder_moe.formats import mxfp8_tiled_64x64
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.swizzled_128x4 import padded, swizzle_scale, unswizzle_scale
from thunder_moe.formats.tiled_64x64 import TILE, from_tiled, to_tiled

__all__ = [
    "BLOCK_SIZE",
    "LAYOUTS",
    "LINEAR",
    "MODULE_LAYOUTS",
    "REGISTRY",
    "SWIZZLED_128X4",
    "TILED_64X64",
    "Layout",
    "block_shapes",
    "find_layout",
    "layout_fits",
    "layout_of_blocks",
    "layouts_of",
    "module_layouts",
    "preferred_on",
    "scale_shape",
]

BLOCK_SIZE = NVFP4.block_size
LINEAR, SWIZZLED_128X4, TILED_64X64 = "linear", "swizzled_128x4", "tiled_64x64"
Converter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Layout:
    """One order of codes and block scales.

    Attributes:
        name: what `PackedWeight.layout` and the operators' argument `layout` say.
        from_linear: (codes, scales) in layout "linear" -> in this one.
        to_linear: (codes, scales, n, k) in this layout -> in "linear".
        format: of the weights.
        padded_scales: (experts, n, k) -> the shape of the scales, where they are padded; the codes are
            (E, N, K // codes_per_byte) in every layout.
        block_shape: (experts, n, k) -> the shape of the codes that modules keep, which tells the layout by its rank:
            bytes in the order in which they lie, so many for each scale's as in a row. None: modules do not keep it.
        multiple: out_features and in_features have to be multiples of it; above 1, neither may be 0.
        preferred_on: compute capabilities of the CUDA devices on which our kernels read it best, where it fits.
    """

    name: str
    from_linear: Converter
    to_linear: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    format: BlockFormat = NVFP4
    padded_scales: Callable[[int, int, int], tuple[int, int, int]] | None = None
    block_shape: Callable[[int, int, int], tuple[int, ...]] | None = None
    multiple: int = 1
    preferred_on: frozenset[tuple[int, int]] = frozenset()

    def fits(self, n: int, k: int) -> str | None:
        """Return None when (E, n, k) weights can have this layout, else what they would need, in words."""
        if n % self.multiple or k % self.multiple or (self.multiple > 1 and not (n and k)):
            return f"out_features and in_features multiples of {self.multiple}, not 0"
        return None

    def scale_shape(self, experts: int, n: int, k: int) -> tuple[int, int, int]:
        """The shape of the block scales of an (E, N, K) weight."""
        if self.padded_scales is not None:
            return self.padded_scales(experts, n, k)
        return experts, n, k // self.format.block_size


REGISTRY: dict[tuple[str, str], Layout] = {
    (layout.format.name, layout.name): layout
    for layout in (
        Layout(
            LINEAR,
            from_linear=lambda codes, scales: (codes, scales),
            to_linear=lambda codes, scales, n, k: (codes, scales),
            block_shape=lambda experts, n, k: (experts, n, k // 2),
        ),
        Layout(
            SWIZZLED_128X4,
            from_linear=lambda codes, scales: (codes, swizzle_scale(scales)),
            to_linear=lambda codes, scales, n, k: (codes, unswizzle_scale(scales, n, k // BLOCK_SIZE)),
            padded_scales=lambda experts, n, k: (experts, *padded(n, k // BLOCK_SIZE)),
        ),
        Layout(
            TILED_64X64,
            from_linear=to_tiled,
            to_linear=lambda codes, scales, n, k: from_tiled(codes, scales),
            block_shape=lambda experts, n, k: (experts, n // TILE, k // TILE, TILE * TILE // 2),
            multiple=TILE,
            preferred_on=frozenset({(9, 0)}),
        ),
        Layout(
            LINEAR,
            from_linear=lambda codes, scales: (codes, scales),
            to_linear=lambda codes, scales, n, k: (codes, scales),
            format=MXFP8,
            block_shape=lambda experts, n, k: (experts, n, k),
        ),
        Layout(
            TILED_64X64,
            from_linear=mxfp8_tiled_64x64.to_tiled,
            to_linear=lambda codes, scales, n, k: mxfp8_tiled_64x64.from_tiled(codes, scales),
            format=MXFP8,
            block_shape=lambda experts, n, k: (experts, n // TILE, k // TILE, TILE * TILE),
            multiple=TILE,
            preferred_on=frozenset({(9, 0)}),
        ),
    )
}
LAYOUTS = tuple(name for format, name in REGISTRY if format == NVFP4.name)
MODULE_LAYOUTS = tuple(
    name for (format, name), layout in REGISTRY.items() if format == NVFP4.name and layout.block_shape is not None
)
_BY_RANK = {
    (layout.format.name, len(layout.block_shape(1, TILE, TILE))): layout.name
    for layout in REGISTRY.values()
    if layout.block_shape is not None
}


def layouts_of(format: BlockFormat) -> tuple[str, ...]:
    """The layouts that weights of a number format can have."""
    return tuple(name for known, name in REGISTRY if known == format.name)


def module_layouts(format: BlockFormat) -> tuple[str, ...]:
    """The layouts in which modules keep weights."""
    return tuple(name for name in layouts_of(format) if REGISTRY[format.name, name].block_shape is not None)


def find_layout(name: str, format: BlockFormat = NVFP4) -> Layout:
    """The layout of a name, of weights of a number format.

    Raises:
        ValueError: there is none.
    """
    layout = REGISTRY.get((format.name, name)) if isinstance(name, str) else None
    if layout is None:
        of = "" if format is NVFP4 else f" of {format.name} weights"
        raise ValueError(f"layout: got {name!r}{of}, wanted one of {layouts_of(format)}")
    return layout


def preferred_on(capability: tuple[int, int], n: int, k: int, format: BlockFormat = NVFP4) -> str:
    """The layout of (E, n, k) weights that our CUDA kernels read best on devices of a compute capability."""
    for (known, name), layout in REGISTRY.items():
        if known == format.name and capability in layout.preferred_on and layout.fits(n, k) is None:
            return name
    return LINEAR


def layout_fits(n: int, k: int, layout: str, format: BlockFormat = NVFP4) -> str | None:
    """Return None when (E, n, k) weights can have a layout, else what they would need, in words."""
    return find_layout(layout, format).fits(n, k)


def scale_shape(experts: int, n: int, k: int, layout: str, format: BlockFormat = NVFP4) -> tuple[int, int, int]:
    """The shape of the block scales of an (E, N, K) weight in a layout."""
    return find_layout(layout, format).scale_shape(experts, n, k)


def block_shapes(
    experts: int, n: int, k: int, layout: str, format: BlockFormat = NVFP4
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of codes and scales of (E, n, k) weights that tell their layout, which is how modules keep them.

    Raises:
        ValueError: modules do not keep weights in this layout.
    """
    block_shape = find_layout(layout, format).block_shape
    if block_shape is None:
        raise ValueError(f"layout: got {layout!r}, wanted one of {module_layouts(format)}, which modules keep")
    codes = block_shape(experts, n, k)
    return codes, (*codes[:-1], codes[-1] // format.bytes_of_scale)


def layout_of_blocks(qdata: Tensor, scale: Tensor, format: BlockFormat = NVFP4) -> str:
    """The layout of codes and scales that have the shapes of `block_shapes`.

    Raises:
        ValueError: they have not, or are of different layouts.
    """
    codes, scales = tuple(qdata.shape), tuple(scale.shape)
    layout = _BY_RANK.get((format.name, len(codes)))
    if layout is None:
        wanted = f"(experts, out_features, {format.packed_features}) or blocks of it"
        raise ValueError(f"qdata: got shape {codes}, wanted {wanted}")
    if scales != (*codes[:-1], codes[-1] // format.bytes_of_scale):
        raise ValueError(
            f"scale: got shape {scales} with qdata of shape {codes}, wanted one scale for {format.bytes_of_scale} bytes"
            " of qdata"
        )
    return layout
