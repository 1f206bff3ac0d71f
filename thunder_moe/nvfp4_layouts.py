"""The layouts of NVFP4 weights: how the codes and block scales of (E, N, K) lie in memory, each a permutation.
Called by nvfp4 and by whoever checks operands; calls torch alone.

- "linear": codes (E, N, K // 2), scales (E, N, K // 16), as checkpoints hold them.
- "swizzled_128x4": the scales as Blackwell's tensor cores read them, see `swizzle_scale`.
- "humming": codes and scales as the kernels of the package humming-kernels read them, see `to_humming`.

Legend: E experts, N output features, K input features, S = K // 16 block scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "BLOCK_SIZE",
    "LAYOUTS",
    "from_humming",
    "layout_fits",
    "scale_shape",
    "swizzle_scale",
    "to_humming",
    "unswizzle_scale",
]

BLOCK_SIZE = 16
LAYOUTS = ("linear", "swizzled_128x4", "humming")


def scale_shape(experts: int, n: int, k: int, layout: str) -> tuple[int, int, int]:
    """The shape of the block scales of an (E, N, K) weight in a layout."""
    if layout == "swizzled_128x4":
        return experts, -(-n // 128) * 128, -(-(k // BLOCK_SIZE) // 4) * 4
    return experts, n, k // BLOCK_SIZE


def layout_fits(n: int, k: int, layout: str) -> str | None:
    """None when (E, n, k) weights can have a layout, else what they would need, in words."""
    if layout == "humming" and (n % 128 or k % 32):
        return "out_features a multiple of 128 and in_features of 32"
    return None


def swizzle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Block scales (E, N, S) -> (E, N padded to 128, S padded to 4) in tensor-core order, padding zero.

    Tiles of 128 rows by 4 scales lie one after the other (along S first); in a tile, row r and column c stand at
    ``(r % 32) * 16 + (r // 32) * 4 + c``: cuBLAS' and CUTLASS' layout for 1D block scaling factors.
    """
    experts, n, columns = scale.shape
    _, n_padded, columns_padded = scale_shape(experts, n, columns * BLOCK_SIZE, "swizzled_128x4")
    padded = torch.zeros(experts, n_padded, columns_padded, dtype=torch.uint8, device=scale.device)
    padded[:, :n, :columns] = scale.view(torch.uint8)
    tiles = padded.view(experts, n_padded // 128, 4, 32, columns_padded // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(padded.shape).view(torch.float8_e4m3fn)


def unswizzle_scale(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The inverse of `swizzle_scale`: drops the padding and gives (E, n, k // 16)."""
    experts, n_padded, columns_padded = scale.shape
    tiles = scale.view(torch.uint8).view(experts, n_padded // 128, columns_padded // 4, 32, 4, 4)
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(scale.shape)
    return padded[:, :n, : k // BLOCK_SIZE].contiguous().view(torch.float8_e4m3fn)


def to_humming(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (E, N, K // 2) and scales (E, N, S), linear -> the same shapes, in the order of Humming's kernels.

    That order is the one in which tensor cores take a left operand. Of 64 rows by 16 k, thread 4 * g + t of a warp has
    one word of eight codes for each 16 rows: rows g and g + 8, k of 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Its four words
    lie together, then the threads, then the next 64 rows, then the next 16 k. In a word, the lowest four codes are the
    even k, ordered by row and then by k, and the highest four the odd ones. The scales of 16 k lie together, of
    each 64 rows those whose numbers differ by a multiple of 8 first. (`weight_repack_nk` and
    `transform_humming_weight_scale` of humming-kernels 0.1.19, for 16-bit activations up to SM90.)
    """
    experts, n, half = qdata.shape
    codes = qdata.reshape(experts, n // 64, 4, 2, 8, half // 8, 2, 4)  # [E, N/64, 16 rows, 8 rows, g, K/16, 8 k, t]
    low, high = codes.unbind(6)
    words = torch.stack(_exchange_nibbles(low, high), -1)  # [E, N/64, 16 rows, 8 rows, g, K/16, t, odd]
    codes = words.permute(0, 5, 1, 4, 6, 2, 7, 3).reshape(qdata.shape)
    bits = scale.view(torch.uint8).reshape(experts, n // 64, 8, 8, -1)  # [E, N/64, 8 rows, g, S]
    bits = bits.permute(0, 4, 1, 3, 2).reshape(scale.shape)
    return codes, bits.view(torch.float8_e4m3fn)


def from_humming(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_humming`."""
    experts, n, half = qdata.shape
    words = qdata.reshape(experts, half // 8, n // 64, 8, 4, 4, 2, 2).permute(0, 2, 5, 7, 3, 1, 4, 6)
    codes = torch.stack(_exchange_nibbles(*words.unbind(7)), 6).reshape(qdata.shape)
    bits = scale.view(torch.uint8).reshape(experts, -1, n // 64, 8, 8)  # [E, S, N/64, g, 8 rows]
    bits = bits.permute(0, 2, 4, 3, 1).reshape(scale.shape)
    return codes, bits.view(torch.float8_e4m3fn)


def _exchange_nibbles(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes (low nibbles of both, high nibbles of both); its own inverse."""
    return (low & 0x0F) | (high & 0x0F) << 4, low >> 4 | (high & 0xF0)
