"""NVFP4 weights as Lightning Thunder's operators of the namespace nvf_cutlass take them, and their `NVFP4Weight`.
Called by integrations.thunder_layers and weight_cache; calls weight and swizzled_128x4.

Legend: E experts, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4, scale_shape
from thunder_moe.formats.weight import NVFP4Weight, check_weight


def from_nvf_cutlass(fp4_weight: Tensor, scale: Tensor, global_scale: Tensor) -> NVFP4Weight:
    """Convert the weight arguments of ``nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm``, into new memory.

    Codes and block scales keep their values. Thunder's operator divides by the global scale; ours multiply by its
    float32 reciprocal. So a weight is ``e2m1 * (scale * (1 / global_scale))``: within two float32 roundings of
    Thunder's ``e2m1 * (scale / global_scale)``, and equal to it if the global scale is a power of two.

    Args:
        fp4_weight: (E, K // 2, N), float4_e2m1fn_x2 or uint8; the low nibble is the even k.
        scale: float8_e4m3fn block scales in the order "swizzled_128x4", with or without padding.
        global_scale: float32 (E,), the encode scale; reads it unless it is on "meta".

    Returns:
        (E, N, K) in layout "linear".

    Raises:
        ValueError: a tensor has the wrong rank, shape, dtype or device; scales were cut off; a global scale is not a
            positive finite number.
    """
    _, scale_name, global_name = NVFP4.operands
    if fp4_weight.ndim == 3:
        experts, half, n = fp4_weight.shape
        whole = scale_shape(experts, n, 2 * half, SWIZZLED_128X4)
        if tuple(scale.shape) == scale_shape(experts, n, 2 * half, LINEAR) != whole:
            raise ValueError(
                f"{scale_name}: got shape {tuple(scale.shape)}, wanted {whole}: Thunder cuts block scales off where"
                " out_features is not a multiple of 128, or in_features of 64; convert the 16-bit module instead"
            )
    check_weight(fp4_weight, scale, global_scale, SWIZZLED_128X4, names=NVFP4.operands, transposed=True)
    decode = global_scale.detach().reciprocal()
    if not decode.is_meta and not bool(((decode > 0) & decode.isfinite()).all()):
        raise ValueError(f"{global_name}: got {global_scale.tolist()}, wanted positive finite numbers with reciprocals")
    codes = fp4_weight.detach().view(torch.uint8).mT.clone(memory_format=torch.contiguous_format)
    return NVFP4Weight(codes, scale.detach(), decode, SWIZZLED_128X4).to_layout(LINEAR)
