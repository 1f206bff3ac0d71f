"""MXFP4 to NVFP4, exactly: blocks of 32 with a power-of-two scale become two blocks of 16 with a power-of-two scale.
Called by checkpoint.formats.mxfp4 and integrations.vllm; calls weight.
"""

from __future__ import annotations

import torch

from thunder_moe.formats.weight import NVFP4Weight

E8M0_BIAS = 127
E8M0_NAN = 255
NVFP4_BYTES = 8  # of the codes of a block
# E4M3 holds the powers of two from 2**-9 (subnormal) to 2**8.
E4M3_EXPONENTS = (-9, 8)
FLOAT_BIAS = 127


def mxfp4_to_nvfp4(blocks: torch.Tensor, scales: torch.Tensor) -> NVFP4Weight:
    """Convert an MXFP4 weight to NVFP4 of the same values.

    Each scale is repeated for its two blocks of 16, and the largest exponent goes into the global scale: one for all
    experts if their exponents allow it, else one per expert, else one per row. Blocks of zeros are left out of this.

    Args:
        blocks: uint8 (E, N, K // 32, 16); two E2M1 codes a byte, the low nibble is the even k. Also (E, N, K // 16, 8)
            with a scale for each NVFP4 block.
        scales: uint8, E8M0: 2**(scale - 127); the shape of `blocks` without the last dimension.

    Returns:
        NVFP4Weight in layout "linear", global_scale (E,) or (E, N), all powers of two.

    Raises:
        ValueError: wrong shapes or dtypes, a scale that is NaN, or exponents of one row that spread by more than 17.
    """
    if blocks.dtype != torch.uint8 or blocks.ndim != 4 or blocks.shape[-1] not in (NVFP4_BYTES, 2 * NVFP4_BYTES):
        raise ValueError(f"blocks: got {blocks.dtype} {tuple(blocks.shape)}, wanted uint8 (experts, rows, blocks, 16)")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        shape = tuple(blocks.shape[:-1])
        raise ValueError(f"scales: got {scales.dtype} {tuple(scales.shape)}, wanted uint8 {shape}")
    live = ((blocks & 0x77) != 0).any(-1)  # a code without its sign is not 0
    if bool(((scales == E8M0_NAN) & live).any()):
        raise ValueError("scales: got NaN (255), wanted finite scales")
    exponents = scales.int() - E8M0_BIAS
    lowest, highest = E4M3_EXPONENTS
    top = torch.where(live, exponents, -E8M0_BIAS - 1).amax(-1)  # [E, N]; under every exponent in a row of zeros
    bottom = torch.where(live, exponents, E8M0_BIAS + 1).amin(-1)
    experts, rows = top.shape
    for group in ((1, 1), (experts, 1), (experts, rows)):  # what shares one global scale
        group_top, group_bottom = _amax_over(top, group), -_amax_over(-bottom, group)
        global_exponent = (group_top - highest).clamp_min(-FLOAT_BIAS + 1)
        dead = group_top < group_bottom
        if bool((dead | (group_bottom - global_exponent >= lowest)).all()):
            break
    else:
        expert, row = divmod(int((top - bottom).argmax()), rows)
        raise ValueError(
            f"scales: got exponents from {int(bottom[expert, row])} to {int(top[expert, row])} in row {row} of expert"
            f" {expert}, wanted a spread of at most {highest - lowest}: no NVFP4 weight has these values"
        )
    global_exponent = torch.where(dead, 0, global_exponent).expand(experts, rows)
    scale = _power_of_two(torch.where(live, exponents - global_exponent[..., None], 0)).to(torch.float8_e4m3fn)
    scale = scale.view(torch.uint8).repeat_interleave(blocks.shape[-1] // NVFP4_BYTES, -1).view(torch.float8_e4m3fn)
    global_scale = _power_of_two(global_exponent)
    if group[1] == 1:
        global_scale = global_scale[:, 0]
    return NVFP4Weight(blocks.flatten(-2).contiguous(), scale, global_scale.contiguous())


def _amax_over(values: torch.Tensor, group: tuple[int, int]) -> torch.Tensor:
    """Return the largest value of (E, N), of each expert or of each row, in the shape `group`."""
    dims = [dim for dim in range(2) if group[dim] != values.shape[dim]]
    return values.amax(dims, keepdim=True) if dims else values


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2**exponent as float32, from its bits; only for normal numbers."""
    return ((exponent + FLOAT_BIAS).int() << 23).view(torch.float32)
