"""Layout "tiled_64x64" of MXFP8 weights: codes and scales in the order of the reads of a warp of the SM90 kernels.
Called by layouts; calls tiled_64x64 to rotate words. src/mxfp8.cuh decodes it, and src/quantize.cu converts it.

Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.formats.tiled_64x64 import rotate

_TILE, _BLOCK_SIZE = 64, 32
SCALE_OFFSET = 88  # is added to the exponent bytes: decoded weights are 2**-32 of their value as bfloat16
_NAN = 255


def to_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert codes and scales of layout "linear" to "tiled_64x64", in the same shapes.

    Args:
        qdata: float8_e4m3fn (E, N, K), N and K multiples of 64.
        scale: float8_e8m0fnu (E, N, K // 32).

    Blocks of 64 rows by 64 k lie one after the other, K fastest: codes [E, N/64, K/64, 4096] bytes, scales
    [E, N/64, K/64, 128] bytes.

    Codes of a block are [4 warps w][2 halves p][8 g][4 t][2 steps s][2 words i] of 32 bits. For step 2 p + s (16 k),
    lane 4 g + t of warp w has the codes of rows 16 w + g and 16 w + g + 8, at k = 8 i + 2 t and the next. A word W
    holds two registers of a tensor core's left operand, P of the first row and Q of the second. A register has the code
    of the even k in its lower half and the code of the odd k in its upper half. A half has the sign at bit 15 and the
    other seven bits at bits 4 to 10, so that all bits are in T = 0x87F087F0. It is a bfloat16 but for a power of two.

        P = W & T          Q = ((W << 4) ^ (W >> 4)) & T

    Exactly one word satisfies these equations for each P and Q.

    Scales of a block are [4 warps w][8 g] words. A word is four bytes, the lowest first, rotated left by 7: row g in
    the halves 0 and 1, then row g + 8 in the halves 0 and 1. A byte is the exponent of E8M0 plus 88, the exponent of
    the bfloat16 that the kernels multiply by. From 167 (2**40) on it is 255 (NaN): `from_tiled` loses such scales.
    """
    experts, n, k = qdata.shape
    rows, columns = n // _TILE, k // _TILE
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        # [N/64, w, 8 rows, g, K/64, p, s, i, t, odd]
        bits = qdata[expert].view(torch.uint8).int().view(rows, 4, 2, 8, columns, 2, 2, 2, 4, 2)
        halves = (bits & 0x80) << 8 | (bits & 0x7F) << 4
        registers = halves[..., 0] | halves[..., 1] << 16
        first, second = registers.permute(2, 0, 4, 1, 5, 3, 8, 6, 7)  # [rows, columns, w, p, g, t, s, i] of each row
        codes[expert] = _pack(first, second).contiguous().view(torch.uint8).reshape(n, k)
        exponents = (scale[expert].view(torch.uint8).int() + SCALE_OFFSET).clamp_max(_NAN).to(torch.uint8)
        words = exponents.view(rows, 4, 2, 8, columns, 2).permute(0, 4, 1, 3, 2, 5).flatten().view(torch.int32)
        scales[expert] = rotate(words, 7).view(torch.uint8).view(n, -1)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


def from_tiled(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `to_tiled`, but for scales that it made NaN."""
    experts, n, k = qdata.shape
    rows, columns = n // _TILE, k // _TILE
    codes = torch.empty(qdata.shape, dtype=torch.uint8, device=qdata.device)
    scales = torch.empty(scale.shape, dtype=torch.uint8, device=scale.device)
    for expert in range(experts):
        words = _words(qdata[expert])
        registers = torch.stack((words & _TAKEN, (words << 4 ^ _shifted_right(words, 4)) & _TAKEN))
        halves = torch.stack((registers, registers >> 16), -1)
        bits = (halves >> 8 & 0x80 | halves >> 4 & 0x7F).to(torch.uint8)
        # [8 rows, N/64, K/64, w, p, g, t, s, i, odd]
        bits = bits.view(2, rows, columns, 4, 2, 8, 4, 2, 2, 2)
        codes[expert] = bits.permute(1, 3, 0, 5, 2, 4, 7, 8, 6, 9).reshape(n, k)
        exponents = rotate(_words(scale[expert]), -7).view(torch.uint8).int()
        exponents = torch.where(exponents == _NAN, _NAN, exponents - SCALE_OFFSET).to(torch.uint8)
        scales[expert] = exponents.view(rows, columns, 4, 8, 2, 2).permute(0, 2, 4, 3, 1, 5).reshape(n, -1)
    return codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)


_TAKEN = 0x87F087F0 - (1 << 32)  # as int32


def _pack(first: Tensor, second: Tensor) -> Tensor:
    """Return the words that hold two registers each, int32; see `to_tiled`.

    Bits that the shifts bring from the first register are removed. The rest of the second register comes from bits 12
    to 14 and 0 to 2 of each half, and from bits 27, 19, 11 and 3, which each affect the next of these bits, too.
    """
    left = second ^ (first << 4 ^ _shifted_right(first, 4)) & _TAKEN
    word = first | (left & 0x07000700) << 4 | _shifted_right(left & 0x00700070, 4)
    bit = torch.zeros_like(left)
    for place in (31, 23, 15, 7):
        bit = bit ^ _shifted_right(left, place) & 1
        word = word | bit << (place - 4)
    return word


def _words(numbers: Tensor) -> Tensor:
    """Return the bytes of 8-bit numbers as int32, in a copy."""
    return numbers.view(torch.uint8).flatten().clone().view(torch.int32)


def _shifted_right(word: Tensor, by: int) -> Tensor:
    """Shifts int32 right, zeros from above."""
    return word >> by & (1 << 32 - by) - 1
