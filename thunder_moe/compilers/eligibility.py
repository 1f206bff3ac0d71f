"""Decides which grouped GEMMs are rewritten, and into which number format: one predicate for all compilers.
Called by dynamo/sites.py and thunder/sites.py, beside `safety` for the operations around a GEMM; calls formats and
selection. `choosing_format` holds the option of the compilation under way.

What a GEMM may be given as its weight, in every compiler: a view of a whole parameter or buffer, with the parameter's
dtype, in its own layout or with its last two dims swapped (`swaps_last_dims`). So all of these are the weight w itself:

    w, w.mT, w.mT.mT.mT, w.transpose(1, 2), swapaxes, swapdims, permute(0, 2, 1), w.detach(), and what does nothing:
    w.to(x.dtype) and w.contiguous() where w is that already, w[:], w.view(w.shape), w.view_as(w)

and these are not: a slice, a cast or a copy of w, a sum with it, w.view(torch.float16) of a bfloat16 w.

A weight is being trained where it, or its view, requires a gradient and the grad mode is on at the GEMM (a
``w.detach()`` of a trainable w stays 16-bit), or where `safety.is_hidden_training_forward` hides the grad mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.formats.registry import FORMATS, find_format
from thunder_moe.selection import require_signature


@dataclass(frozen=True)
class GroupedGemm:
    """Shapes, dtypes and gradient state of one grouped GEMM ``(M, K) x (E, K, N) -> (M, N)``."""

    weight: str | None  # qualified name of the parameter or buffer that is the weight; None if it is neither
    experts: int  # E
    out_features: int  # N
    in_features: int  # K
    rows: int | None  # M, None if it varies from call to call
    weight_dtype: torch.dtype
    activation_dtype: torch.dtype  # of the rows
    needs_grad: bool  # True if the weight requires a gradient and gradients are enabled
    out_dtype: torch.dtype | None = None  # the requested output dtype; None for the activation's
    where: str | None = None  # file:line of the call, where the compiler tells
    # True if the weight requires a gradient, and this is a forward whose grad mode tells nothing
    hidden_training: bool = False
    changed: str | None = None  # `Program.reason_against_packing` of the weight
    # the name of the number format that the weight is to have, or has; None leaves it 16-bit
    format: str | None = NVFP4.name
    distributed: bool = False  # True if the GEMM takes a DTensor, not the local tensor of one
    recipe: str | None = None  # the 8-bit recipe that the GEMM trains with; None for 16 bits


# The option "thunder_moe.format" or moe_format: a format's name, or a function of a GEMM and its weight's full name.
Format = str | Callable[[GroupedGemm, str], str | None]
_CHOSEN: ContextVar[Format] = ContextVar("thunder_moe_format", default=NVFP4.name)


@contextlib.contextmanager
def choosing_format(option: str, format: Format | None) -> Iterator[None]:
    """Let `in_chosen_format` give weights the format that the option of a compiler says; None is "nvfp4"."""
    format = NVFP4.name if format is None else format
    if isinstance(format, str):
        if format.lower() not in FORMATS:
            raise ValueError(f"{option}: got {format!r}, wanted one of {tuple(FORMATS)}, or a function")
        format = format.lower()
    elif not callable(format):
        wanted = f"wanted one of {tuple(FORMATS)}, or a function of a GEMM and its weight's name"
        raise TypeError(f"{option}: got {format!r}, {wanted}")
    else:
        require_signature(option, format, "gemm")
    token = _CHOSEN.set(format)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def in_chosen_format(gemm: GroupedGemm) -> GroupedGemm:
    """Return a GEMM with the format that the compilation under way chooses for its weight, if it is one."""
    choice = _CHOSEN.get()
    if isinstance(choice, str):
        return replace(gemm, format=choice)
    if gemm.weight is None:
        return gemm
    name = choice(gemm, gemm.weight)
    return replace(gemm, format=None if name is None else find_format(name).name)


def common_format(*gemms: GroupedGemm) -> str:
    """Return the one format of the weights of experts that one operator computes; ValueError for several."""
    formats = {gemm.format for gemm in gemms}
    if len(formats) > 1:
        chosen = ", ".join(f"{gemm.format!r} for {gemm.weight!r}" for gemm in gemms)
        raise ValueError(f"format: got {chosen}, wanted one for all projections of a block of experts")
    (format,) = formats
    assert format is not None
    return format


def decline_reason(gemm: GroupedGemm) -> str | None:
    """Return why a grouped GEMM is not rewritten; None if it is. The checks run in this order:

    - it has no 8-bit recipe;
    - the GEMM takes no DTensor (the local tensor of one is a weight like others);
    - the weight is a parameter or a buffer (it can be quantized once, ahead of the call);
    - nothing in the graph changes it;
    - it is bfloat16 or float16, and so are the rows;
    - a number format is chosen for it;
    - in_features is a multiple of the format's block: 16 for NVFP4, 32 for MXFP8;
    - no output dtype other than the activation's is asked for;
    - the weight is not being trained: either it is frozen or gradients are disabled, and not by a forward that is run
      again for its gradients.
    """
    if gemm.recipe is not None:
        return f"it is computed by the 8-bit recipe {gemm.recipe!r}; recipe=None lets a frozen weight be quantized"
    if gemm.distributed:
        return (
            "the weight is a DTensor, which is not quantized: shard the experts by"
            " thunder_moe.parallel.TensorParallel(), which computes with local tensors"
        )
    if gemm.weight is None:
        return "the weight is not a parameter or buffer, unchanged but for a transpose of its last two dims"
    if gemm.changed is not None:
        return gemm.changed
    if gemm.weight_dtype not in (torch.bfloat16, torch.float16):
        return f"the weight is {gemm.weight_dtype}, not bfloat16 or float16"
    if gemm.activation_dtype != gemm.weight_dtype:
        return f"the rows are {gemm.activation_dtype}, the weight {gemm.weight_dtype}"
    if gemm.format is None:
        return "no number format is chosen for it"
    block = BLOCK_FORMATS[gemm.format].block_size
    if gemm.in_features % block:
        return f"in_features {gemm.in_features} is not a multiple of {block}"
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
    """True if a view of a weight (E, A, B) has its last two dims swapped; None if it is not a view of all of it.

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


# The report of one GEMM: (its names and sizes, "16-bit" or its format with or without " + swiglu", why).
Decision = tuple[GroupedGemm, str, str]

# The operators with packed weights, by name: (position, decision) of each weight among the arguments. Reports show the
# decision for modules that `quantize_` has swapped in.
QUANTIZED: dict[str, tuple[tuple[int, str], ...]] = {}
for _format, _known in BLOCK_FORMATS.items():
    _fused, _down = f"{_format} + swiglu", 3 + len(_known.fields)
    QUANTIZED |= {
        f"f16a_{_format}weight_scaled_grouped_mm": ((1, _format),),
        f"f16a_{_format}weight_grouped_swiglu": ((1, _fused),),
        f"f16a_{_format}weight_grouped_mm_combine": ((1, _format),),
        f"f16a_{_format}weight_moe_experts": ((3, _fused), (_down, _format)),
        f"f16a_{_format}weight_moe_experts_lora": ((3, _format), (_down, _format)),
    }
QUANTIZED["nvf_cutlass_scaled_grouped_mm"] = ((1, NVFP4.name),)


def describe(
    gemm: GroupedGemm,
    declined: str | None,
    *,
    requires_grad: bool,
    fused: bool,
    unfused: str | None = None,
    whole: bool = False,
) -> Decision:
    """Return the decision on a GEMM, as reports show it.

    `declined` is its `decline_reason`, and `requires_grad` the weight's, in any grad mode. If it is rewritten, it is
    `fused` with its SwiGLU (`unfused` says why it is not), or a part of the one operator of a `whole` layer.
    """
    if declined is not None:
        return gemm, "16-bit", declined
    reason = "gradients are disabled" if requires_grad else "the weight is frozen"
    if whole:
        reason = f"{reason}; the experts of the layer in one operator"
    elif fused:
        reason = f"{reason}; gate, up and SwiGLU in one operator"
    elif unfused is not None:
        reason = f"{reason}; not fused with its SwiGLU: {unfused}"
    return gemm, f"{gemm.format} + swiglu" if fused else str(gemm.format), reason
