"""Which grouped GEMMs are rewritten, and the reason why another one is not: one predicate for all compilers.
Called by thunder_transform and fx_sites; calls nothing of the package but the block size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.nvfp4 import BLOCK_SIZE

__all__ = ["Decision", "GroupedGemm", "decline_reason", "describe"]


@dataclass(frozen=True)
class GroupedGemm:
    """What a compiler knows of one grouped GEMM ``(M, K) x (E, K, N) -> (M, N)``.

    Attributes:
        weight: qualified name of the parameter or buffer that is the weight; None when it is neither.
        experts: E.
        out_features: N.
        in_features: K.
        rows: M, None when it varies from call to call.
        weight_dtype: of the weight.
        activation_dtype: of the rows.
        needs_grad: the weight requires a gradient and gradients are enabled.
        out_dtype: asked of the GEMM, None for the activation's.
        where: file:line of the call, where the compiler tells.
    """

    weight: str | None
    experts: int
    out_features: int
    in_features: int
    rows: int | None
    weight_dtype: torch.dtype
    activation_dtype: torch.dtype
    needs_grad: bool
    out_dtype: torch.dtype | None = None
    where: str | None = None


def decline_reason(gemm: GroupedGemm) -> str | None:
    """Why a grouped GEMM stays as it is; None when it is rewritten. The gates, in order:

    - the weight is a parameter or a buffer (it can be quantised once, ahead of the call);
    - it is bfloat16 or float16, and so are the rows;
    - in_features is a multiple of 16, the block of NVFP4;
    - no output dtype other than the activation's is asked for;
    - the weight is not being trained: either it is frozen or gradients are disabled.
    """
    if gemm.weight is None:
        return "the weight is not a parameter or buffer, unchanged but for a transpose of its last two dims"
    if gemm.weight_dtype not in (torch.bfloat16, torch.float16):
        return f"the weight is {gemm.weight_dtype}, not bfloat16 or float16"
    if gemm.activation_dtype != gemm.weight_dtype:
        return f"the rows are {gemm.activation_dtype}, the weight {gemm.weight_dtype}"
    if gemm.in_features % BLOCK_SIZE:
        return f"in_features {gemm.in_features} is not a multiple of {BLOCK_SIZE}"
    if gemm.out_dtype not in (None, gemm.activation_dtype):
        return f"out_dtype {gemm.out_dtype} is not the activation's {gemm.activation_dtype}"
    if gemm.needs_grad:
        return "the weight is trainable: freeze it (requires_grad_(False)) or run under torch.no_grad()"
    return None


# What a report says of one GEMM: (its names and sizes, "16-bit" | "nvfp4" | "nvfp4 + swiglu", why).
Decision = tuple[GroupedGemm, str, str]


def describe(gemm: GroupedGemm, declined: str | None, *, requires_grad: bool, fused: bool) -> Decision:
    """The decision on a GEMM, as reports show it.

    Args:
        gemm: names and sizes.
        declined: what `decline_reason` said of it.
        requires_grad: of the weight, whether or not gradients are enabled.
        fused: it becomes part of a fused SwiGLU, if it is rewritten.
    """
    if declined is not None:
        return gemm, "16-bit", declined
    reason = "gradients are disabled" if requires_grad else "the weight is frozen"
    if fused:
        return gemm, "nvfp4 + swiglu", f"{reason}; gate, up and SwiGLU in one operator"
    return gemm, "nvfp4", reason
