"""The registry of layouts of packed weights, which are orders of the codes and block scales of (E, N, K) in memory.
Called by weight, kernels.select, nn and the checks of operands; calls block_format, swizzled_128x4,
tiled_64x64 and mxfp8_tiled_64x64.

- "linear": codes and scales row by row, like in checkpoints.
- "swizzled_128x4": NVFP4 with the scales in the order of Blackwell's tensor cores.
- "tiled_64x64": codes and scales in the order of our CUDA kernels for SM90.

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

BLOCK_SIZE = NVFP4.block_size
LINEAR, SWIZZLED_128X4, TILED_64X64 = "linear", "swizzled_128x4", "tiled_64x64"


@dataclass(frozen=True)
class Layout:
    """One order of codes and block scales.

    Attributes:
        name: the value of `PackedWeight.layout` and of the operators' argument `layout`.
        from_linear: (codes, scales) in layout "linear" -> (codes, scales) in this one; unchanged by default.
        to_linear: (codes, scales, n, k) in this layout -> (codes, scales) in "linear".
        format: of the weights.
        padded_scales: (experts, n, k) -> the shape of padded scales; None: they are not padded. The codes are
            (E, N, K // codes_per_byte) in every layout.
        block_shape: (experts, n, k) -> the shape of the codes in modules, whose rank tells the layout. It has the bytes
            in memory order, and as many codes for each scale as a row has. None: modules do not keep this layout.
        multiple: out_features and in_features have to be multiples of it; above 1, neither may be 0.
        preferred_on: compute capabilities of the CUDA devices on which our kernels read it fastest, if it fits.
    """

    name: str
    from_linear: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda codes, scales: (codes, scales)
    to_linear: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor]] = lambda codes, scales, n, k: (codes, scales)
    format: BlockFormat = NVFP4
    padded_scales: Callable[[int, int, int], tuple[int, int, int]] | None = None
    block_shape: Callable[[int, int, int], tuple[int, ...]] | None = None
    multiple: int = 1
    preferred_on: frozenset[tuple[int, int]] = frozenset()

    def fits(self, n: int, k: int) -> str | None:
        """Return None if weights (E, n, k) can have this layout, else their missing property in words."""
        if n % self.multiple or k % self.multiple or (self.multiple > 1 and not (n and k)):
            return f"out_features and in_features multiples of {self.multiple}, not 0"
        return None

    def scale_shape(self, experts: int, n: int, k: int) -> tuple[int, int, int]:
        """Return the shape of the block scales of an (E, N, K) weight."""
        if self.padded_scales is not None:
            return self.padded_scales(experts, n, k)
        return experts, n, k // self.format.block_size


REGISTRY: dict[tuple[str, str], Layout] = {
    (layout.format.name, layout.name): layout
    for layout in (
        Layout(LINEAR, block_shape=lambda experts, n, k: (experts, n, k // 2)),
        Layout(LINEAR, format=MXFP8, block_shape=lambda experts, n, k: (experts, n, k)),
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
_BY_RANK = {
    (layout.format.name, len(layout.block_shape(1, TILE, TILE))): layout.name
    for layout in REGISTRY.values()
    if layout.block_shape is not None
}


def layouts_of(format: BlockFormat) -> tuple[str, ...]:
    """Return the layouts that weights of a number format can have."""
    return tuple(name for known, name in REGISTRY if known == format.name)


def module_layouts(format: BlockFormat) -> tuple[str, ...]:
    """Return the layouts of a number format that modules keep."""
    return tuple(name for name in layouts_of(format) if REGISTRY[format.name, name].block_shape is not None)


LAYOUTS, MODULE_LAYOUTS = layouts_of(NVFP4), module_layouts(NVFP4)


def find_layout(name: str, format: BlockFormat = NVFP4) -> Layout:
    """Return the layout of a number format by its name.

    Raises:
        ValueError: the format has no layout of that name.
    """
    layout = REGISTRY.get((format.name, name)) if isinstance(name, str) else None
    if layout is None:
        of = "" if format is NVFP4 else f" of {format.name} weights"
        raise ValueError(f"layout: got {name!r}{of}, wanted one of {layouts_of(format)}")
    return layout


def preferred_on(capability: tuple[int, int], n: int, k: int, format: BlockFormat = NVFP4) -> str:
    """Return the layout of weights (E, n, k) that our CUDA kernels read fastest on a compute capability."""
    for (known, name), layout in REGISTRY.items():
        if known == format.name and capability in layout.preferred_on and layout.fits(n, k) is None:
            return name
    return LINEAR


def layout_fits(n: int, k: int, layout: str, format: BlockFormat = NVFP4) -> str | None:
    """Return None if weights (E, n, k) can have a layout, else their missing property in words."""
    return find_layout(layout, format).fits(n, k)


def scale_shape(experts: int, n: int, k: int, layout: str, format: BlockFormat = NVFP4) -> tuple[int, int, int]:
    """Return the shape of the block scales of an (E, N, K) weight in a layout."""
    return find_layout(layout, format).scale_shape(experts, n, k)


def block_shapes(
    experts: int, n: int, k: int, layout: str, format: BlockFormat = NVFP4
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of codes and scales in modules, for weights (E, n, k); their rank tells the layout.

    Raises:
        ValueError: modules do not keep weights in this layout.
    """
    block_shape = find_layout(layout, format).block_shape
    if block_shape is None:
        raise ValueError(f"layout: got {layout!r}, wanted one of {module_layouts(format)}, which modules keep")
    codes = block_shape(experts, n, k)
    return codes, (*codes[:-1], codes[-1] // format.bytes_of_scale)


def layout_of_blocks(qdata: Tensor, scale: Tensor, format: BlockFormat = NVFP4, *, of_experts: bool = True) -> str:
    """Return the layout of codes and scales with shapes of `block_shapes`.

    Args:
        of_experts: False if they lack the dimension of experts.

    Raises:
        ValueError: they have other shapes, or shapes of different layouts.
    """
    codes, scales = tuple(qdata.shape), tuple(scale.shape)
    layout = _BY_RANK.get((format.name, len(codes) if of_experts else len(codes) + 1))
    if layout is None:
        wanted = f"({'experts, ' * of_experts}out_features, {format.packed_features}) or blocks of it"
        raise ValueError(f"qdata: got shape {codes}, wanted {wanted}")
    if scales != (*codes[:-1], codes[-1] // format.bytes_of_scale):
        raise ValueError(
            f"scale: got shape {scales} with qdata of shape {codes}, wanted one scale for {format.bytes_of_scale} bytes"
            " of qdata"
        )
    return layout
