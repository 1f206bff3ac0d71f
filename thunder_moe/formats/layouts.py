"""The registry of layouts of NVFP4 weights: how the codes and block scales of (E, N, K) lie in memory.
Called by weight, kernels.select, nn and whoever checks operands; calls swizzled_128x4 and tiled_64x64.

- "linear": codes (E, N, K // 2), scales (E, N, K // 16), as checkpoints hold them.
- "swizzled_128x4": the scales as Blackwell's tensor cores read them.
- "tiled_64x64": codes and scales as our CUDA kernels for SM90 read them.

A new layout is one entry of `REGISTRY`. Legend: E experts, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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
    "layout_of_rank",
    "preferred_on",
    "scale_shape",
]

BLOCK_SIZE = 16  # weights that share a scale
LINEAR, SWIZZLED_128X4, TILED_64X64 = "linear", "swizzled_128x4", "tiled_64x64"
_BYTES_OF_SCALE = BLOCK_SIZE // 2  # bytes of codes that share one byte of scale
Converter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _linear_scale_shape(experts: int, n: int, k: int) -> tuple[int, int, int]:
    return experts, n, k // BLOCK_SIZE


@dataclass(frozen=True)
class Layout:
    """One order of codes and block scales.

    Attributes:
        name: what `NVFP4Weight.layout` and the operators' argument `layout` say.
        from_linear: (codes, scales) in layout "linear" -> in this one.
        to_linear: (codes, scales, n, k) in this layout -> in "linear".
        scale_shape: (experts, n, k) -> the shape of the scales; the codes are (E, N, K // 2) in every layout.
        block_shape: (experts, n, k) -> the shape of the codes that modules keep, which tells the layout by its rank:
            bytes in the order in which they lie, eight codes' bytes for each scale's. None: modules do not keep it.
        multiple: out_features and in_features have to be multiples of it; above 1, neither may be 0.
        preferred_on: compute capabilities of the CUDA devices on which our kernels read it best, where it fits.
    """

    name: str
    from_linear: Converter
    to_linear: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    scale_shape: Callable[[int, int, int], tuple[int, int, int]] = _linear_scale_shape
    block_shape: Callable[[int, int, int], tuple[int, ...]] | None = None
    multiple: int = 1
    preferred_on: frozenset[tuple[int, int]] = frozenset()

    def fits(self, n: int, k: int) -> str | None:
        """None when (E, n, k) weights can have this layout, else what they would need, in words."""
        if n % self.multiple or k % self.multiple or (self.multiple > 1 and not (n and k)):
            return f"out_features and in_features multiples of {self.multiple}, not 0"
        return None


REGISTRY: dict[str, Layout] = {
    layout.name: layout
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
            scale_shape=lambda experts, n, k: (experts, *padded(n, k // BLOCK_SIZE)),
        ),
        Layout(
            TILED_64X64,
            from_linear=to_tiled,
            to_linear=lambda codes, scales, n, k: from_tiled(codes, scales),
            block_shape=lambda experts, n, k: (experts, n // TILE, k // TILE, TILE * TILE // 2),
            multiple=TILE,
            preferred_on=frozenset({(9, 0)}),
        ),
    )
}
LAYOUTS = tuple(REGISTRY)
MODULE_LAYOUTS = tuple(name for name, layout in REGISTRY.items() if layout.block_shape is not None)
_BY_RANK = {
    len(layout.block_shape(1, TILE, TILE)): name for name, layout in REGISTRY.items() if layout.block_shape is not None
}


def find_layout(name: str) -> Layout:
    """The layout of a name.

    Raises:
        ValueError: there is none.
    """
    layout = REGISTRY.get(name) if isinstance(name, str) else None
    if layout is None:
        raise ValueError(f"layout: got {name!r}, wanted one of {LAYOUTS}")
    return layout


def preferred_on(capability: tuple[int, int], n: int, k: int) -> str:
    """The layout of (E, n, k) weights that our CUDA kernels read best on devices of a compute capability."""
    for name, layout in REGISTRY.items():
        if capability in layout.preferred_on and layout.fits(n, k) is None:
            return name
    return LINEAR


def layout_fits(n: int, k: int, layout: str) -> str | None:
    """None when (E, n, k) weights can have a layout, else what they would need, in words."""
    return find_layout(layout).fits(n, k)


def scale_shape(experts: int, n: int, k: int, layout: str) -> tuple[int, int, int]:
    """The shape of the block scales of an (E, N, K) weight in a layout."""
    return find_layout(layout).scale_shape(experts, n, k)


def block_shapes(experts: int, n: int, k: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of codes and scales of (E, n, k) weights that tell their layout, which is how modules keep them.

    Raises:
        ValueError: modules do not keep weights in this layout.
    """
    block_shape = find_layout(layout).block_shape
    if block_shape is None:
        raise ValueError(f"layout: got {layout!r}, wanted one of {MODULE_LAYOUTS}, which modules keep")
    codes = block_shape(experts, n, k)
    return codes, (*codes[:-1], codes[-1] // _BYTES_OF_SCALE)


def layout_of_rank(rank: int) -> str:
    """The layout of codes (experts, ...) that have the shape of `block_shapes`, by their rank alone.

    Raises:
        ValueError: no layout has codes of this rank.
    """
    layout = _BY_RANK.get(rank)
    if layout is None:
        raise ValueError(f"qdata: got {rank} dimensions, wanted one of {tuple(_BY_RANK)}")
    return layout


def layout_of_blocks(qdata: Tensor, scale: Tensor) -> str:
    """The layout of codes and scales that have the shapes of `block_shapes`.

    Raises:
        ValueError: they have not, or are of different layouts.
    """
    codes, scales = tuple(qdata.shape), tuple(scale.shape)
    layout = _BY_RANK.get(len(codes))
    if layout is None:
        raise ValueError(f"qdata: got shape {codes}, wanted (experts, out_features, in_features // 2) or blocks of it")
    if scales != (*codes[:-1], codes[-1] // _BYTES_OF_SCALE):
        raise ValueError(
            f"scale: got shape {scales} with qdata of shape {codes}, wanted one scale for 8 bytes of qdata"
        )
    return layout
