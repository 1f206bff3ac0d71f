"""Layout "swizzled_128x4" of NVFP4 weights: block scales in the order of Blackwell's tensor cores.
Called by layouts; calls torch alone.

Legend: E experts, N output features, K input features, S = K // 16 block scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padded(n: int, columns: int) -> tuple[int, int]:
    """Return (rows, columns) of block scales, rounded up to whole tiles of 128 rows by 4 columns."""
    return -(-n // 128) * 128, -(-columns // 4) * 4


def swizzle_scale(scale: Tensor) -> Tensor:
    """Convert block scales (E, N, S) to (E, N padded to 128, S padded to 4) in tensor-core order, padding zero.

    Tiles of 128 rows by 4 scales lie one after the other (along S first); in a tile, row r and column c stand at
    ``(r % 32) * 16 + (r // 32) * 4 + c``: cuBLAS' and CUTLASS' layout for 1D block scaling factors.
    """
    experts, n, columns = scale.shape
    n_padded, columns_padded = padded(n, columns)
    whole = torch.zeros(experts, n_padded, columns_padded, dtype=torch.uint8, device=scale.device)
    whole[:, :n, :columns] = scale.view(torch.uint8)
    tiles = whole.view(experts, n_padded // 128, 4, 32, columns_padded // 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(whole.shape).view(torch.float8_e4m3fn)


def unswizzle_scale(scale: Tensor, n: int, columns: int) -> Tensor:
    """Undo `swizzle_scale`: return the scales (E, n, columns) without padding."""
    experts, n_padded, columns_padded = scale.shape
    tiles = scale.view(torch.uint8).view(experts, n_padded // 128, columns_padded // 4, 32, 4, 4)
    whole = tiles.permute(0, 1, 4, 3, 2, 5).reshape(scale.shape)
    return whole[:, :n, :columns].contiguous().view(torch.float8_e4m3fn)
