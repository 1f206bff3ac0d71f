"""The operator thunder_moe::scaled_activation, times a factor per row; and thunder_moe::activated_grouped_linear, which
runs it on the rows of an expert linear and recomputes it in the backward.
Called by nn, training, compilers and integrations.vllm; calls kernels.select and the operators of ops.grouped_linear.

    scaled_activation         (M, D) -> activation -> times scales (M,) -> (M, I), rounded once
    activated_grouped_linear  that, then rows x weight + bias * scales; keeps its input, not the rows of the GEMM

Legend: M rows, D their columns (2I gate and up, or I), I intermediate_size, E experts, N out_features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import training_kernels
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers the operators)
from thunder_moe.ops.checks import refuse_forward_ad
from thunder_moe.ops.grouped_linear import (
    check_offsets,
    check_recipe,
    check_row_scale,
    int32_offsets,
    needs_gradient,
    training_operator,
)

KINDS = ("swiglu", "srelu")


@dataclass(frozen=True)
class ActivationForm:
    """An activation, in the form of the operators' keyword arguments.

    Attributes:
        kind: one of `KINDS`.
        alpha, limit, up_shift: of SwiGLU, as in `activations.SwiGLUConfig`.
        interleave: s, if gate and up alternate every s columns; None: the gate's columns come first.
    """

    kind: str = "swiglu"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0
    interleave: int | None = None

    @property
    def swiglu_config(self) -> SwiGLUConfig | None:
        """Return the parameters of SwiGLU; None for another kind."""
        return SwiGLUConfig(self.alpha, self.limit, self.up_shift) if self.kind == "swiglu" else None

    @property
    def options(self) -> dict[str, Any]:
        """Return the operators' keyword arguments; by name, because dynamo of torch 2.11 does not trace vars()."""
        return dict(
            kind=self.kind, alpha=self.alpha, limit=self.limit, up_shift=self.up_shift, interleave=self.interleave
        )

    def check(self, columns: int) -> None:
        """Raise ValueError for a limit or an interleave that does not fit `columns` D."""
        if self.kind not in KINDS:
            raise ValueError(f"kind: got {self.kind!r}, wanted one of {KINDS}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit: got {self.limit}, wanted a positive number or None")
        if self.kind == "swiglu":
            turn = 2 * (self.interleave or 1)
            if columns % turn:
                what = "gate and up" if self.interleave is None else f"turns of glu_interleave_size={self.interleave}"
                raise ValueError(f"y: got {columns} columns, wanted a multiple of {turn}, for {what}")

    def width(self, columns: int) -> int:
        """Return I for D columns."""
        return columns // 2 if self.kind == "swiglu" else columns

    def run(self, y: Tensor, scales: Tensor | None, ends: Tensor | None) -> Tensor:
        run = training_kernels(y.device).scaled_activation
        return run(y, scales, ends, form=self.swiglu_config, interleave=self.interleave)


def _ends(offsets: Tensor | None, y: Tensor) -> Tensor | None:
    return None if offsets is None else int32_offsets(offsets, y.shape[0], "y")


def _check(y: Tensor, scales: Tensor | None, offsets: Tensor | None, form: ActivationForm) -> None:
    require(y.ndim == 2, "y", y, "shape (rows, columns)")
    form.check(y.shape[1])
    check_row_scale("scales", scales, (y.shape[0],), y)
    if offsets is not None:
        check_offsets(offsets, offsets.shape[0], y)


def _fake_backward(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor | None, needs_y: bool, needs_scales: bool,
    **form: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_y = y.new_empty(y.shape if needs_y else 0)
    return of_y, y.new_empty(0) if scales is None or not needs_scales else scales.new_empty(y.shape[0])


@training_operator(_fake_backward)
def _scaled_activation_backward(
    grad: Tensor, y: Tensor, scales: Tensor | None, offsets: Tensor | None, needs_y: bool, needs_scales: bool, *,
    kind: str = "swiglu", alpha: float = 1.0, limit: float | None = None, up_shift: float = 0.0,
    interleave: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of y and of scales, empty where they are not needed."""
    form = ActivationForm(kind, alpha, limit, up_shift, interleave)
    options: dict[str, Any] = dict(form=form.swiglu_config, interleave=form.interleave, needs=(needs_y, needs_scales))
    grads = training_kernels(y.device).scaled_activation_gradient(grad, y, scales, _ends(offsets, y), **options)
    of_y, of_scales = (y.new_empty(0) if of is None else of for of in grads)
    return of_y, of_scales


def _fake(y: Tensor, scales: Tensor | None = None, offsets: Tensor | None = None, **form: Any) -> Tensor:
    _check(y, scales, offsets, ActivationForm(**form))
    return y.new_empty(y.shape[0], ActivationForm(**form).width(y.shape[1]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    y, scales, offsets = inputs
    ctx.save_for_backward(y, scales, offsets)
    ctx.form = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    y, scales, offsets = ctx.saved_tensors
    needs = needs_gradient(ctx, 2)
    of = torch.ops.thunder_moe.scaled_activation_backward(grad, y, scales, offsets, *needs, **ctx.form)
    return of[0] if needs[0] else None, of[1] if needs[1] else None, None


@training_operator(_fake, backward=_backward, setup_context=_setup_context)
def _scaled_activation(
    y: Tensor, scales: Tensor | None = None, offsets: Tensor | None = None, *, kind: str = "swiglu",
    alpha: float = 1.0, limit: float | None = None, up_shift: float = 0.0, interleave: int | None = None,
) -> Tensor:  # fmt: skip
    refuse_forward_ad()
    form = ActivationForm(kind, alpha, limit, up_shift, interleave)
    _check(y, scales, offsets, form)
    return form.run(y, scales, _ends(offsets, y))


def _fake_linear(
    y: Tensor, weight: Tensor, offsets: Tensor, scales: Tensor | None = None, bias: Tensor | None = None,
    recipe: str | None = None, **form: Any,
) -> Tensor:  # fmt: skip
    _check(y, scales, offsets, ActivationForm(**form))
    check_recipe(recipe, y.dtype)
    return y.new_empty(y.shape[0], weight.shape[1])


def _setup_linear_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    y, weight, offsets, scales, bias, ctx.recipe = inputs
    needs_y, needs_weight, _, needs_scales = needs_gradient(ctx, 4)
    ctx.save_for_backward(
        y if needs_y or needs_weight or needs_scales else None,
        weight if needs_y or needs_scales else None,
        offsets,
        scales,
        bias if needs_scales else None,
    )
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.form = keyword_only_inputs


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, weight, offsets, scales, bias = ctx.saved_tensors
    ops = torch.ops.thunder_moe
    needs_y, needs_weight, _, needs_scales, needs_bias = needs_gradient(ctx, 5)
    of_y = of_weight = of_scales = of_bias = None
    if needs_weight:  # first, so that the hidden rows and their gradient are not there at the same time
        rows = ops.scaled_activation(y, scales, offsets, **ctx.form)
        of_weight = ops.grouped_linear_wgrad(rows, grad, offsets, ctx.recipe)
        del rows
    if needs_y or needs_scales:
        of_rows = ops.grouped_linear_dgrad(grad, weight, offsets, ctx.recipe)
        of_y, of_scales = ops.scaled_activation_backward(of_rows, y, scales, offsets, needs_y, needs_scales, **ctx.form)
        del of_rows
        if needs_scales and bias is not None:
            of_scales = (of_scales.float() + ops.grouped_bias_scale_grad(grad, bias, offsets)).to(scales.dtype)
    if needs_bias:
        of_bias = ops.grouped_bias_grad(grad, offsets, scales).to(ctx.bias_dtype)
    return of_y if needs_y else None, of_weight, None, of_scales if needs_scales else None, of_bias, None


@training_operator(_fake_linear, backward=_linear_backward, setup_context=_setup_linear_context)
def _activated_grouped_linear(
    y: Tensor, weight: Tensor, offsets: Tensor, scales: Tensor | None = None, bias: Tensor | None = None,
    recipe: str | None = None, *, kind: str = "swiglu", alpha: float = 1.0, limit: float | None = None,
    up_shift: float = 0.0, interleave: int | None = None,
) -> Tensor:  # fmt: skip
    form = ActivationForm(kind, alpha, limit, up_shift, interleave)
    _check(y, scales, offsets, form)
    rows = form.run(y, scales, int32_offsets(offsets, y.shape[0], "y"))
    bias_scale = None if bias is None else scales
    return torch.ops.thunder_moe.grouped_linear(rows, weight, offsets, bias, bias_scale, recipe)
