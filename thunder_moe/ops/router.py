"""Operators of routers: moe_router, logits -> scores, expert ids and the order of rows; moe_linear_router, the same
behind a linear layer.
Called by users, integrations.huggingface, parallel and compiled graphs; calls kernels.select, and routing (gradient).

Legend: T tokens, H hidden_size, E experts, A = top_k, slot = t * A + a, M = T * A rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import ACTIVATION_DTYPES
from thunder_moe.ops.operator import operator
from thunder_moe.routing import RouterConfig, router_gradient

_SCORES = ("softmax", "sigmoid")


def _shapes(logits: Tensor, *_: Any, top_k: int, **__: Any) -> tuple[tuple[int, ...], ...]:
    tokens, experts = logits.shape
    return (tokens, top_k), (tokens, top_k), (tokens * top_k,), (experts,), (tokens, top_k)


def _dtypes(*_: Any, scores_dtype: torch.dtype | None = None, **__: Any) -> tuple[torch.dtype | None, ...]:
    return scores_dtype, torch.int64, torch.int32, torch.int32, torch.int32


def _check(
    logits: Tensor, bias: Tensor | None = None, *, top_k: int, scores_dtype: torch.dtype | None = None, **options: Any
) -> None:
    require(logits.ndim == 2, "logits", logits, "shape (tokens, experts)")
    require(logits.dtype in ACTIVATION_DTYPES, "logits", logits, "dtype bfloat16, float16 or float32")
    _check_form(logits.shape[1], bias, logits.device, top_k, scores_dtype, options)


def _check_form(
    experts: int, bias: Tensor | None, device: torch.device, top_k: int, scores_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Raise a ValueError for a bias or options that do not fit a choice among so many experts."""
    if bias is not None:
        ok = bias.shape == (experts,) and bias.dtype in ACTIVATION_DTYPES and bias.device == device
        require(ok, "bias", bias, f"shape ({experts},), dtype bfloat16, float16 or float32, on {device}")
    if scores_dtype is not None and scores_dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"scores_dtype: got {scores_dtype}, wanted bfloat16, float16 or float32, or None")
    form = RouterConfig(top_k, **options)
    if form.score not in _SCORES:
        raise ValueError(f"score: got {form.score!r}, wanted one of {_SCORES}")
    if form.num_groups < 1 or experts % form.num_groups:
        raise ValueError(f"num_groups: got {form.num_groups}, wanted a divisor of the {experts} experts")
    if not 1 <= form.top_groups <= form.num_groups:
        raise ValueError(f"top_groups: got {form.top_groups}, wanted 1 to num_groups = {form.num_groups}")
    of_group = experts // form.num_groups
    if form.grouped and not 1 <= form.group_best <= of_group:
        raise ValueError(f"group_best: got {form.group_best}, wanted 1 to {of_group}, the experts of a group")
    kept = of_group * form.top_groups
    if not 1 <= top_k <= kept:
        what = "the experts" if not form.grouped else "the experts of top_groups groups"
        raise ValueError(f"top_k: got {top_k}, wanted 1 to {kept}, {what}")
    for name in ("epsilon", "least_sum", "scale"):
        value = getattr(form, name)
        if not math.isfinite(value) or (value < 0 and name != "scale"):
            raise ValueError(f"{name}: got {value}, wanted a finite number{'' if name == 'scale' else ', at least 0'}")


def _check_values(logits: Tensor, *_: Any, top_k: int, **__: Any) -> None:
    require(logits.shape[0] * top_k < 2**31, "logits", logits, "tokens * top_k below 2**31: rows are int32")


def _gradient(
    grad: Tensor, logits: Tensor, expert_ids: Tensor, *, needs: Any, scores_dtype: Any = None, **options: Any
) -> tuple[Tensor]:
    return (router_gradient(grad, logits, expert_ids, RouterConfig(**options)),)


@operator(
    shapes=_shapes,
    dtype=_dtypes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("logits",),
    saved=slice(1),
    saved_results=slice(1, 2),
)
def moe_router(
    logits: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    epsilon: float = 0.0,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    mask_to_zero: bool = False,
    scores_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Choose the experts of each token, and sort the tokens' slots by expert for grouped GEMMs.

    s = softmax or sigmoid of the logits -> the top_k experts by s + bias, within the best groups -> w = their s
    -> w / max(sum(w) + epsilon, least_sum) -> w * scale. All is computed in float32 and rounded once, to
    `scores_dtype`. The softmax of the chosen logits alone (GPT-OSS) is "softmax" with `normalize`.

    The choice is unique: the largest first, the lower index first among equal ones. torch.topk leaves open which of
    them it takes, and in which order. Without a bias and groups the logits themselves are compared, so that
    probabilities that round to the same number are not ties. NaN counts as larger than any number, as in torch.topk:
    ids are always valid; the scores that depend on NaN are NaN.

    Differentiable in `logits`; `bias` gets no gradient, because it only takes part in the choice. Never synchronises
    with the host on CUDA, where up to 512 experts, 32 groups and a top_k of 32 have a kernel: one launch for few
    tokens, else two.

    Args:
        logits: (T, E) bfloat16, float16 or float32.
        bias: (E,) added to the scores for the choice alone (`e_score_correction_bias`).
        top_k: A, the experts of a token.
        score: "softmax" over all experts, or "sigmoid".
        normalize: divide the scores of a token's experts by their sum.
        epsilon: added to that sum.
        least_sum: the divisor is not below it.
        scale: multiplies the scores (`routed_scaling_factor`).
        num_groups: the experts form that many groups of consecutive ones.
        top_groups: the number of groups that a token's experts come from: the groups with the largest sums of their
            `group_best` best scores.
        group_best: see top_groups; 2 in DeepSeek-V3, 1 in DeepSeek-V2.
        mask_to_zero: experts of other groups compete with 0, so that they outrank negative scores; otherwise they are
            never chosen.
        scores_dtype: the dtype of the scores; the logits' when None.

    Returns:
        scores: (T, A), the weights of the token's experts.
        expert_ids: int64 (T, A).
        row_slot: int32 (M,), the slot ``t * A + a`` of each row, as `moe_route` gives it for these ids.
        offsets: int32 (E,), cumulative row ENDS.
        slot_row: int32 (T, A), the row of each slot.

    Raises:
        ValueError: a tensor has the wrong rank, shape, dtype or device, or an option is out of its range.
    """
    form = RouterConfig(
        top_k, score, normalize, epsilon, least_sum, scale, num_groups, top_groups, group_best, mask_to_zero
    )
    kernel = select(logits.device).router
    return kernel(logits, bias, form, scores_dtype or logits.dtype)


def linear_shapes(hidden_states: Tensor, weight: Tensor, *_: Any, top_k: int, **__: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the results of `moe_linear_router`."""
    tokens, experts = hidden_states.shape[0], weight.shape[0]
    return (tokens, top_k), (tokens, top_k), (tokens * top_k,), (experts,), (tokens, top_k), (tokens, experts)


def linear_dtypes(
    *_: Any, logits_dtype: torch.dtype | None = None, scores_dtype: torch.dtype | None = None, **__: Any
) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the results of `moe_linear_router`; None stands for the dtype of hidden_states."""
    return scores_dtype, torch.int64, torch.int32, torch.int32, torch.int32, logits_dtype


def check_linear_router(
    hidden_states: Tensor, weight: Tensor, linear_bias: Tensor | None = None, bias: Tensor | None = None, *,
    top_k: int, logits_dtype: torch.dtype | None = None, scores_dtype: torch.dtype | None = None,
    prefetch: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Raise the ValueError of `moe_linear_router`, as far as that needs no data."""
    dtype, device = hidden_states.dtype, hidden_states.device
    require(hidden_states.ndim == 2, "hidden_states", hidden_states, "shape (tokens, hidden_size)")
    require(dtype in ACTIVATION_DTYPES, "hidden_states", hidden_states, "dtype bfloat16, float16 or float32")
    fits = weight.ndim == 2 and weight.shape[1] == hidden_states.shape[1]
    ok = fits and weight.dtype == dtype and weight.device == device
    require(ok, "weight", weight, f"shape (experts, {hidden_states.shape[1]}), dtype {dtype}, on {device}")
    if linear_bias is not None:
        ok = linear_bias.shape == weight.shape[:1] and linear_bias.dtype == dtype and linear_bias.device == device
        require(ok, "linear_bias", linear_bias, f"shape ({weight.shape[0]},), dtype {dtype}, on {device}")
    if logits_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"logits_dtype: got {logits_dtype}, wanted {dtype}, float32 or None")
    _check_form(weight.shape[0], bias, device, top_k, scores_dtype, options)


def check_linear_router_values(hidden_states: Tensor, *_: Any, top_k: int, **__: Any) -> None:
    """Raise ValueError for more tokens than rows can be numbered."""
    tokens = hidden_states.shape[0]
    require(tokens * top_k < 2**31, "hidden_states", hidden_states, "tokens * top_k below 2**31: rows are int32")


def _no_gradient(*_: Any, **__: Any) -> tuple[()]:
    raise RuntimeError("moe_linear_router has no gradient; a linear layer and moe_router do")


@operator(
    shapes=linear_shapes,
    dtype=linear_dtypes,
    check=check_linear_router,
    check_values=check_linear_router_values,
    gradient=_no_gradient,
    saved=slice(0),
)
def moe_linear_router(
    hidden_states: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    epsilon: float = 0.0,
    least_sum: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    mask_to_zero: bool = False,
    logits_dtype: torch.dtype | None = None,
    scores_dtype: torch.dtype | None = None,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `moe_router` of a linear layer's logits, for inference: a backward raises an error.

    The logits are float32 sums of products, plus linear_bias, rounded once to logits_dtype; `moe_router` chooses by the
    rounded logits. On CUDA one kernel computes it all for up to three tokens of 16 bits; otherwise a GEMM and the
    kernels of `moe_router` run. The options from top_k to mask_to_zero mean the same as in `moe_router`.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32.
        weight: (E, H), of that dtype.
        linear_bias: (E,) of the linear layer and of that dtype, a part of the logits.
        bias: (E,), as in `moe_router`: added to the scores for the choice alone.
        logits_dtype: None for the dtype of hidden_states, or float32.
        scores_dtype: the dtype of the scores; hidden_states' when None.
        prefetch: on CUDA, the kernel may read the weight before the kernel in front of it has ended. It is right only
            if that kernel does not write the weight; compilers, which know it, set it.

    Returns:
        What `moe_router` returns, and the logits (T, E).

    Raises:
        ValueError: a tensor has the wrong rank, shape, dtype or device, or an option is out of its range.
    """
    form = RouterConfig(
        top_k, score, normalize, epsilon, least_sum, scale, num_groups, top_groups, group_best, mask_to_zero
    )
    dtypes = logits_dtype or hidden_states.dtype, scores_dtype or hidden_states.dtype
    kernel = select(hidden_states.device).linear_router
    return kernel(hidden_states, weight, linear_bias, bias, form, *dtypes)
