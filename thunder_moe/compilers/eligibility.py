"""Which grouped GEMMs are rewritten, and the reason why another one is not: one predicate for all compilers.
Called by dynamo/sites.py and thunder/sites.py, beside `safety` for the operations around a GEMM; calls formats.

What a GEMM may be given as its weight, in every compiler: a view of a whole parameter or buffer, with the parameter's
dtype, in its own layout or with its last two dims swapped (`swaps_last_dims`). So all of these are the weight w itself:

    w, w.mT, w.mT.mT.mT, w.transpose(1, 2), swapaxes, swapdims, permute(0, 2, 1), w.detach(), and what does nothing:
    w.to(x.dtype) and w.contiguous() where w is that already, w[:], w.view(w.shape), w.view_as(w)

and these are not: a slice, a cast or a copy of w, a sum with it, w.view(torch.float16) of a bfloat16 w.

A weight is being trained where it, or its view, requires a gradient and the grad mode is on at the GEMM (a
``w.detach()`` of a trainable w stays 16-bit), or where `safety.is_hidden_training_forward` hides the grad mode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.formats.layouts import BLOCK_SIZE

__all__ = ["QUANTIZED", "Decision", "GroupedGemm", "decline_reason", "describe", "swaps_last_dims"]


@dataclass(frozen=True)
class GroupedGemm:
    """Shapes, dtypes and gradient state of one grouped GEMM ``(M, K) x (E, K, N) -> (M, N)``.

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
        hidden_training: the weight requires a gradient, and this is a forward whose grad mode tells nothing.
        changed: `Program.reason_against_packing` of the weight.
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
    hidden_training: bool = False
    changed: str | None = None


def decline_reason(gemm: GroupedGemm) -> str | None:
    """Why a grouped GEMM stays as it is; None when it is rewritten. The gates, in order:

    - the weight is a parameter or a buffer (it can be quantized once, ahead of the call);
    - nothing in the graph changes it;
    - it is bfloat16 or float16, and so are the rows;
    - in_features is a multiple of 16, the block of NVFP4;
    - no output dtype other than the activation's is asked for;
    - the weight is not being trained: either it is frozen or gradients are disabled, and not by a forward that is run
      again for its gradients.
    """
    if gemm.weight is None:
        return "the weight is not a parameter or buffer, unchanged but for a transpose of its last two dims"
    if gemm.changed is not None:
        return gemm.changed
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
    if gemm.hidden_training:
        return (
            "the weight is trainable, and this is the forward of an autograd.Function (or a reentrant checkpoint); "
            "torch.compile keeps the graph for inference too, Thunder makes another one"
        )
    return None


def swaps_last_dims(weight: torch.Tensor, view: torch.Tensor) -> bool | None:
    """Whether a view of a weight (E, A, B) has its last two dims swapped; None when it is not a view of all of it.

    Both may be meta tensors. That they share their storage is up to the caller.
    """
    same_elements = view.dtype == weight.dtype and view.storage_offset() == weight.storage_offset()
    if weight.ndim != 3 or view.ndim != 3 or not same_elements or view.is_neg() != weight.is_neg():
        return None
    layout = (view.shape, view.stride())
    if layout == (weight.shape, weight.stride()):
        return False
    swapped = weight.transpose(1, 2)
    return True if layout == (swapped.shape, swapped.stride()) else None


# What a report says of one GEMM: (its names and sizes, "16-bit" | "nvfp4" | "nvfp4 + swiglu", why).
Decision = tuple[GroupedGemm, str, str]

# The decision that a report shows for the operators of modules that `quantize_` has swapped in, by operator name.
QUANTIZED = {
    "f16a_nvfp4weight_scaled_grouped_mm": "nvfp4",
    "f16a_nvfp4weight_grouped_swiglu": "nvfp4 + swiglu",
    "f16a_nvfp4weight_grouped_mm_combine": "nvfp4",
}


def describe(
    gemm: GroupedGemm,
    declined: str | None,
    *,
    requires_grad: bool,
    fused: bool,
    unfused: str | None = None,
    whole: bool = False,
) -> Decision:
    """The decision on a GEMM, as reports show it.

    Args:
        gemm: names and sizes.
        declined: what `decline_reason` said of it.
        requires_grad: of the weight, whether or not gradients are enabled.
        fused: it becomes part of a fused SwiGLU, if it is rewritten.
        unfused: `Program.reason_against_fusing` of the SwiGLU that it stays out of.
        whole: all of the layer's experts become one operator.
    """
    if declined is not None:
        return gemm, "16-bit", declined
    reason = "gradients are disabled" if requires_grad else "the weight is frozen"
    if whole:
        return gemm, "nvfp4 + swiglu" if fused else "nvfp4", f"{reason}; the experts of the layer in one operator"
    if fused:
        return gemm, "nvfp4 + swiglu", f"{reason}; gate, up and SwiGLU in one operator"
    return gemm, "nvfp4", reason if unfused is None else f"{reason}; not fused with its SwiGLU: {unfused}"
