"""Layout "tiled_64x64" of NVFP4 weights: codes and scales in the order of our CUDA kernels for SM90.
Called by layouts, and by mxfp8_tiled_64x64 for `rotate`; calls torch alone.

Legend: E experts, N output features, K input features, S = K // 16 block scales of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64  # rows and k of a block
_BLOCK_SIZE = 16  # weights that share a scale
# The bits of the word `u` of two fourth registers that are stored in the first word; see `to_tiled`.
_SHARED_IN_FIRST = 0x06030603


def to_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert linear codes (E, N, K // 2) and scales (E, N, S) to 64 x 64 blocks for tensor cores, in the same shapes.

    The values stay exactly the same. `from_tiled` also restores the bytes exactly, with one exception: codes in blocks
    of 16 weights whose scale byte is 0 become 0. They have no effect, and the quantizer writes 0 there.

    A thread reads its left operands of 64 k at once, 16 bytes. It extracts a pair of codes from a word by a shift and
    a mask at most, and a pair of scales by a mask and an or, every other pair also by a rotation. Shifts to the left
    are the cheapest, because they run as multiplications on another unit.

    Codes are bytes [E, N/64, K/64, 2048]; a block is [4 warps w][32 lanes][4 words s][4 bytes, the lowest first]. Lane
    4 * g + t of warp w has the rows g and g + 8 of the block's rows 16 w to 16 w + 15, and word s the 16 k from
    k0 = 64 * block + 16 * s on. A word holds eight codes, four registers of two:

        R_0: row g, k = k0 + 2 t and the next;  R_1: row g + 8, the same k
        R_2: row g, k = k0 + 8 + 2 t and the next;  R_3: row g + 8, the same k as R_2

    A register has the code of the even k in its lower half and the code of the odd k in its upper half. A half has the
    magnitude (0 to 7) at bits 6 to 8 and the sign at bit 15, so that all bits are in M = 0x81C081C0. It is a bfloat16
    but for a power of two. The words of an even step (R) and of the next, odd step (S) have disjoint bits:

        u    = (R_3 >> 6) | rotr(S_3, 12)                          L = 0x06030603
        even = R_0 | (R_1 >> 4) | rotr(R_2, 10) | (u & L)
        odd  = S_0 | (S_1 >> 4) | rotr(S_2, 10) | ((u & ~L) >> 2)

    The inverse, from an even word w and its odd partner v, is R_0 = w & M, R_1 = (w << 4) & M, R_2 = rotl(w, 10) & M,
    u = (w & L) | ((v << 2) & ~L), R_3 = (u << 6) & M, S_3 = rotl(u, 12) & M.

    Scales are bytes [E, N/64, K/64, 256]; a block is [4 warps w][8 g][2 words p]. A word is four bytes, the lowest
    first, rotated right by 4: row g in steps 2 p and 2 p + 1, then row g + 8 in these steps. A byte is 0 or has 5 bits
    of exponent e over 3 of mantissa m, (1 + m / 8) * 2**(e - 21): E4M3 without subnormals. The E4M3 byte b becomes:
    0 -> 0; 1 to 7 -> 96, 104, 108, 112, 114, 116, 118; 8 to 127 -> b + 112. The bytes 128 to 255 are negative and never
    block scales; they map to the remaining bytes, in order.
    """
    experts, n, half = qdata.shape
    rows, columns = n // TILE, 2 * half // TILE
    table = scale_table(qdata.device)
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        bits = scale[expert].view(torch.uint8)
        live = qdata[expert].reshape(n, -1, _BLOCK_SIZE // 2) * (bits != 0)[..., None]
        # [N/64, w, 8 rows, g, K/64, two steps, step, 8 k, t]
        live = live.view(rows, 4, 2, 8, columns, 2, 2, 2, 4).permute(6, 7, 2, 0, 4, 1, 3, 8, 5).contiguous()
        (r0, r1, r2, r3), (s0, s1, s2, s3) = (map(_register, step.flatten(0, 1)) for step in live)
        shared = rotate(r3, -6) | rotate(s3, -12)
        even = r0 | rotate(r1, -4) | rotate(r2, -10) | (shared & _SHARED_IN_FIRST)
        odd = s0 | rotate(s1, -4) | rotate(s2, -10) | rotate(shared & ~_SHARED_IN_FIRST, -2)
        words = torch.stack((even, odd), -1)  # [N/64, K/64, w, g, t, two steps, step]
        codes[expert] = words.view(torch.uint8).view(n, half)
        bits = table.index_select(0, bits.flatten().int()).view(rows, 4, 2, 8, columns, 2, 2)
        bits = bits.permute(0, 4, 1, 3, 5, 2, 6).flatten().view(torch.int32)
        scales[expert] = rotate(bits, -4).view(torch.uint8).view(n, -1)
    return codes, scales.view(torch.float8_e4m3fn)


def from_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `to_tiled`."""
    experts, n, half = qdata.shape
    rows, columns = n // TILE, 2 * half // TILE
    table = linear_scale_table(qdata.device)
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        words = qdata[expert].clone(memory_format=torch.contiguous_format).view(torch.int32)
        even, odd = words.view(rows, columns, 4, 8, 4, 2, 2).unbind(-1)
        shared = (even & _SHARED_IN_FIRST) | (odd << 2 & ~_SHARED_IN_FIRST)
        registers = [word for step in (even, odd) for word in (step, step << 4, rotate(step, 10))]
        registers.insert(3, shared << 6)
        registers.append(rotate(shared, 12))
        pairs = torch.stack([*map(_code_pair, registers)]).view(2, 2, 2, rows, columns, 4, 8, 4, 2)
        codes[expert] = pairs.permute(3, 5, 2, 6, 4, 8, 0, 1, 7).reshape(n, half)
        bits = rotate(scale[expert].clone(memory_format=torch.contiguous_format).view(torch.int32), 4)
        bits = table.index_select(0, bits.view(torch.uint8).flatten().int())
        bits = bits.view(rows, columns, 4, 8, 2, 2, 2)  # [N/64, K/64, w, g, two steps, 8 rows, step]
        scales[expert] = bits.permute(0, 2, 5, 3, 1, 4, 6).reshape(n, -1)
    return codes, scales.view(torch.float8_e4m3fn)


def _register(pair: Tensor) -> Tensor:
    """Convert bytes of two codes, the even k in the low nibble, to int32 registers of `to_tiled`."""
    word = pair.int()
    return (word & 7) << 6 | (word & 8) << 12 | (word & 0x70) << 18 | (word & 0x80) << 24


def _code_pair(register: Tensor) -> Tensor:
    """Undo `_register`; the bits of other registers in the word are ignored."""
    magnitudes = (register >> 6 & 7) | (register >> 18 & 0x70)
    return (magnitudes | (register >> 12 & 8) | (register >> 24 & 0x80)).to(torch.uint8)


def rotate(word: Tensor, left: int) -> Tensor:
    """Rotate int32 left within 32 bits."""
    left %= 32
    return word << left | (word >> 32 - left & (1 << left) - 1)


def scale_table(device: torch.device) -> Tensor:
    """Return uint8 (256,), the byte of `to_tiled` for each E4M3 byte, computed on the device without a copy to it."""
    byte = torch.arange(128, device=device, dtype=torch.int32)
    # The upper bits of a small integer as float32 are its exponent and 3 bits of mantissa.
    subnormal = ((byte.float().view(torch.int32) >> 20) - 920).clamp_min(0)
    positive = torch.where(byte < 8, subnormal, byte + 112)
    left = torch.ones(256, dtype=torch.int32, device=device).index_fill(0, positive.long(), 0)
    negative = torch.argsort(left, descending=True, stable=True)[:128]
    return torch.cat([positive, negative]).to(torch.uint8)


def linear_scale_table(device: torch.device) -> Tensor:
    """Return uint8 (256,), the inverse of `scale_table`."""
    return torch.argsort(scale_table(device)).to(torch.uint8)
