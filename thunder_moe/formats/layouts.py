"""The layouts of NVFP4 weights: how the codes and block scales of (E, N, K) lie in memory, each invertible.
Called by nvfp4 and by whoever checks operands; calls torch alone.

- "linear": codes (E, N, K // 2), scales (E, N, K // 16), as checkpoints hold them.
- "swizzled_128x4": the scales as Blackwell's tensor cores read them, see `swizzle_scale`.
- "tiled_64x64": codes and scales as our CUDA kernel for SM90 reads them, see `to_tiled`.

Legend: E experts, N output features, K input features, S = K // 16 block scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "BLOCK_SIZE",
    "LAYOUTS",
    "block_shapes",
    "from_tiled",
    "layout_fits",
    "layout_of_blocks",
    "scale_shape",
    "swizzle_scale",
    "to_tiled",
    "unswizzle_scale",
]

BLOCK_SIZE = 16
LAYOUTS = ("linear", "swizzled_128x4", "tiled_64x64")
_TILE = 64  # rows and k of a block of "tiled_64x64"
# Bits that the fourth registers of two words leave in the first word, of those that they share; see `to_tiled`.
_SHARED_IN_FIRST = 0x06030603


def scale_shape(experts: int, n: int, k: int, layout: str) -> tuple[int, int, int]:
    """The shape of the block scales of an (E, N, K) weight in a layout."""
    if layout == "swizzled_128x4":
        return experts, -(-n // 128) * 128, -(-(k // BLOCK_SIZE) // 4) * 4
    return experts, n, k // BLOCK_SIZE


_LAYOUT_OF_RANK = {3: "linear", 4: "tiled_64x64"}  # of the shapes in `block_shapes`
_BYTES_OF_SCALE = BLOCK_SIZE // 2  # bytes of codes that share one byte of scale


def block_shapes(experts: int, n: int, k: int, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of codes and scales of (E, n, k) weights that tell their layout, which is how modules keep them.

    Codes, the scales an eighth of the last dimension: "linear" (E, N, K // 2); "tiled_64x64" (E, N / 64, K / 64, 2048).
    They are views, in the order in which the bytes lie.
    """
    codes: tuple[int, ...] = (experts, n, k // 2)
    if layout == "tiled_64x64":
        codes = (experts, n // _TILE, k // _TILE, _TILE * _TILE // 2)
    return codes, (*codes[:-1], codes[-1] // _BYTES_OF_SCALE)


def layout_of_blocks(qdata: Tensor, scale: Tensor) -> str:
    """The layout of codes and scales that have the shapes of `block_shapes`.

    Raises:
        ValueError: they have not, or are of different layouts.
    """
    codes, scales = tuple(qdata.shape), tuple(scale.shape)
    layout = _LAYOUT_OF_RANK.get(len(codes))
    if layout is None:
        raise ValueError(f"qdata: got shape {codes}, wanted (experts, out_features, in_features // 2) or blocks of it")
    if scales != (*codes[:-1], codes[-1] // _BYTES_OF_SCALE):
        raise ValueError(
            f"scale: got shape {scales} with qdata of shape {codes}, wanted one scale for 8 bytes of qdata"
        )
    return layout


def layout_fits(n: int, k: int, layout: str) -> str | None:
    """None when (E, n, k) weights can have a layout, else what they would need, in words."""
    if layout == "tiled_64x64" and (n % _TILE or k % _TILE):
        return f"out_features and in_features multiples of {_TILE}"
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


def to_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (E, N, K // 2) and scales (E, N, S), linear -> the same shapes, in 64 x 64 blocks, for tensor cores.

    The values stay exactly the same. The bytes come back exactly too, but for codes in blocks of 16 weights whose scale
    byte is 0: they have no meaning, and become 0 (the quantiser writes 0 there). A thread reads its left operands of 64
    k at once, 16 bytes, and gets a pair of codes out of a word by a shift and a mask at most, a pair of scales by a
    mask and an or, and a rotation for every other. Shifts to the left are the cheapest: another unit multiplies.

    Codes, bytes [E, N/64, K/64, 2048]: of a block [4 warps w][32 lanes][4 words s][4 bytes, the lowest first]. Lane
    4 * g + t of warp w has the rows g and g + 8 of the block's rows 16 w to 16 w + 15, and word s the 16 k from
    k0 = 64 * block + 16 * s on. A word holds eight codes, four registers of two:

        R_0: row g, k = k0 + 2 t and the next;  R_1: row g + 8, the same k
        R_2: row g, k = k0 + 8 + 2 t and the next;  R_3: row g + 8, the same k as R_2

    A register has the code of the even k in its lower half and that of the odd k in the upper: in a half, the
    magnitude (0 to 7) at bits 6 to 8 and the sign at bit 15, so that all its bits are in M = 0x81C081C0. That is a
    bfloat16 but for a power of two. The word of an even step (R) and that of the odd step behind it (S), disjoint bits:

        u    = (R_3 >> 6) | rotr(S_3, 12)                          L = 0x06030603
        even = R_0 | (R_1 >> 4) | rotr(R_2, 10) | (u & L)
        odd  = S_0 | (S_1 >> 4) | rotr(S_2, 10) | ((u & ~L) >> 2)

    and back, from the word w and its partner v: R_0 = w & M, R_1 = (w << 4) & M, R_2 = rotl(w, 10) & M,
    u = (w & L) | ((v << 2) & ~L), R_3 = (u << 6) & M, S_3 = rotl(u, 12) & M.

    Scales, bytes [E, N/64, K/64, 256]: of a block [4 warps w][8 g][2 words p]. A word is four bytes, the lowest first,
    rotated right by 4: row g in steps 2 p and 2 p + 1, then row g + 8 in the same. A byte is 0 or has 5 bits of
    exponent e over 3 of mantissa m, (1 + m / 8) * 2**(e - 21): E4M3 without subnormals. Of the E4M3 byte b: 0 -> 0;
    1 to 7 -> 96, 104, 108, 112, 114, 116, 118; 8 to 127 -> b + 112. The bytes 128 to 255, negative, which no block
    scale is, go in order to those that are left, in order.
    """
    experts, n, half = qdata.shape
    rows, columns = n // _TILE, 2 * half // _TILE
    table = _scale_table(qdata.device)
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        bits = scale[expert].view(torch.uint8)
        live = qdata[expert].reshape(n, -1, BLOCK_SIZE // 2) * (bits != 0)[..., None]
        # [N/64, w, 8 rows, g, K/64, two steps, step, 8 k, t]
        live = live.view(rows, 4, 2, 8, columns, 2, 2, 2, 4).permute(6, 7, 2, 0, 4, 1, 3, 8, 5).contiguous()
        (r0, r1, r2, r3), (s0, s1, s2, s3) = (map(_register, step.flatten(0, 1)) for step in live)
        shared = _rotate(r3, -6) | _rotate(s3, -12)
        even = r0 | _rotate(r1, -4) | _rotate(r2, -10) | (shared & _SHARED_IN_FIRST)
        odd = s0 | _rotate(s1, -4) | _rotate(s2, -10) | _rotate(shared & ~_SHARED_IN_FIRST, -2)
        words = torch.stack((even, odd), -1)  # [N/64, K/64, w, g, t, two steps, step]
        codes[expert] = words.view(torch.uint8).view(n, half)
        bits = table.index_select(0, bits.flatten().int()).view(rows, 4, 2, 8, columns, 2, 2)
        bits = bits.permute(0, 4, 1, 3, 5, 2, 6).flatten().view(torch.int32)
        scales[expert] = _rotate(bits, -4).view(torch.uint8).view(n, -1)
    return codes, scales.view(torch.float8_e4m3fn)


def from_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_tiled`."""
    experts, n, half = qdata.shape
    rows, columns = n // _TILE, 2 * half // _TILE
    table = torch.argsort(_scale_table(qdata.device)).to(torch.uint8)
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        words = qdata[expert].clone(memory_format=torch.contiguous_format).view(torch.int32)
        even, odd = words.view(rows, columns, 4, 8, 4, 2, 2).unbind(-1)
        shared = (even & _SHARED_IN_FIRST) | (odd << 2 & ~_SHARED_IN_FIRST)
        registers = [word for step in (even, odd) for word in (step, step << 4, _rotate(step, 10))]
        registers.insert(3, shared << 6)
        registers.append(_rotate(shared, 12))
        pairs = torch.stack([*map(_code_pair, registers)]).view(2, 2, 2, rows, columns, 4, 8, 4, 2)
        codes[expert] = pairs.permute(3, 5, 2, 6, 4, 8, 0, 1, 7).reshape(n, half)
        bits = _rotate(scale[expert].clone(memory_format=torch.contiguous_format).view(torch.int32), 4)
        bits = table.index_select(0, bits.view(torch.uint8).flatten().int())
        bits = bits.view(rows, columns, 4, 8, 2, 2, 2)  # [N/64, K/64, w, g, two steps, 8 rows, step]
        scales[expert] = bits.permute(0, 2, 5, 3, 1, 4, 6).reshape(n, -1)
    return codes, scales.view(torch.float8_e4m3fn)


def _register(pair: Tensor) -> Tensor:
    """Bytes of two codes, the even k in the low nibble -> int32 registers of `to_tiled`."""
    word = pair.int()
    return (word & 7) << 6 | (word & 8) << 12 | (word & 0x70) << 18 | (word & 0x80) << 24


def _code_pair(register: Tensor) -> Tensor:
    """The inverse of `_register`, which leaves out the bits that belong to others."""
    magnitudes = (register >> 6 & 7) | (register >> 18 & 0x70)
    return (magnitudes | (register >> 12 & 8) | (register >> 24 & 0x80)).to(torch.uint8)


def _rotate(word: Tensor, left: int) -> Tensor:
    """32-bit rotation of int32."""
    left %= 32
    return word << left | (word >> 32 - left & (1 << left) - 1)


def _scale_table(device: torch.device) -> Tensor:
    """uint8 (256,): the byte that stands for each E4M3 byte in `to_tiled`, made on the device without a copy to it."""
    byte = torch.arange(128, device=device, dtype=torch.int32)
    # The upper bits of a small integer as float32 are its exponent and 3 bits of mantissa.
    subnormal = ((byte.float().view(torch.int32) >> 20) - 920).clamp_min(0)
    positive = torch.where(byte < 8, subnormal, byte + 112)
    left = torch.ones(256, dtype=torch.int32, device=device).index_fill(0, positive.long(), 0)
    negative = torch.argsort(left, descending=True, stable=True)[:128]
    return torch.cat([positive, negative]).to(torch.uint8)
