"""The operators of 16-bit expert linears: thunder_moe::grouped_linear with its gradients, biases, writes into buffers.
Called by nn, training, other ops, compilers and integrations.vllm; calls kernels.select.

    grouped_linear             rows x weight + bias * bias_scale    grouped_linear_out     the same into a buffer
    grouped_linear_dgrad       gradient of the rows                 ..._dgrad_out   the same into a buffer
    grouped_linear_wgrad       gradient of the weight               ..._wgrad_out   the same into float32 main_grad
    grouped_bias               (y + bias * bias_scale) * scales     after a GEMM of 4-bit weights
    grouped_bias_grad, grouped_bias_scale_grad                      float32 sums in a fixed order

Rows past the last row end may hold anything: results are zero there; in a buffer of the caller they are not written.
With a `recipe` ("mxfp8" or "fp8") the operands of the products are rounded to 8 bits, as kernels.recipes defines.

Legend: M rows sorted by expert, E experts, N out_features, K in_features; offsets int32 or int64 (E,) row ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.kernels.recipes import RECIPES
from thunder_moe.kernels.select import training_kernels, training_products
from thunder_moe.ops.checks import check_offset_values, refuse_forward_ad
from thunder_moe.ops.operator import define

P = ParamSpec("P")
R = TypeVar("R")


def check_offsets(offsets: Tensor, experts: int, like: Tensor) -> None:
    """Raise ValueError unless offsets are int32 or int64 (experts,) on the device of `like`."""
    # While Thunder traces, dtypes are Thunder's own; its symbols check them then.
    known = isinstance(offsets.dtype, torch.dtype)
    require(not known or offsets.dtype in (torch.int32, torch.int64), "offsets", offsets, "dtype int32 or int64")
    wanted = f"shape ({experts},), one row end per expert"
    require(offsets.ndim == 1 and offsets.shape[0] == experts, "offsets", offsets, wanted)
    require(offsets.device == like.device, "offsets", offsets, f"device {like.device}, as x has")


def check_recipe(recipe: str | None, dtype: Any) -> None:
    """Raise ValueError for an unknown recipe, or a dtype of rows (torch's or Thunder's) that recipes do not take."""
    if recipe is None:
        return
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, wanted one of {RECIPES}, or None for 16-bit products")
    if str(dtype).removeprefix("torch.").removeprefix("thunder.dtypes.") not in ("bfloat16", "float32"):
        raise ValueError(
            f"recipe: got {recipe!r} for {dtype}, wanted bfloat16 or float32, of the weight or by torch.autocast"
        )


def check_row_scale(name: str, scale: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise ValueError unless a factor of rows is floating-point, of a shape, on the device of `like`; None is fine."""
    if scale is None:
        return
    require(tuple(scale.shape) == tuple(shape), name, scale, f"shape {tuple(shape)}, one factor per row")
    require(is_floating(scale), name, scale, "a floating-point dtype")
    require(scale.device == like.device, name, scale, f"device {like.device}, as the rows have")


def is_floating(tensor: Tensor) -> bool:
    """True if a tensor's dtype is a floating-point one."""
    dtype: Any = tensor.dtype  # while Thunder traces, one of its own
    return dtype.is_floating_point if isinstance(dtype, torch.dtype) else "float" in str(dtype)


def _returns_nothing(*args: Any) -> None:
    """Stand in, as the fake, for operators that write alone."""


def int32_offsets(offsets: Tensor, rows: int, of: str = "x") -> Tensor:
    """Return the offsets as kernels take them, after `check_offset_values`."""
    check_offset_values(offsets, rows, of)
    return offsets.to(torch.int32)


def training_operator(
    fake: Callable[..., Any] = _returns_nothing,
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the kernel of an operator, whose name is the kernel's behind the "_". Without a `backward`, a gradient
    through its results is an error; torch would take them for constants."""

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        name = kernel.__name__.removeprefix("_")
        library, _ = define(name, torch.library.infer_schema(kernel, mutates_args=mutates), kernel, fake)
        if not mutates:
            refuse = _refuse_double_backward(name) if backward is None else backward
            torch.library.register_autograd(f"thunder_moe::{name}", refuse, setup_context=setup_context, lib=library)
        return kernel

    return register


def needs_gradient(ctx: Any, count: int) -> tuple[bool, ...]:
    """Return which of an operator's first arguments need a gradient; the dispatcher leaves out arguments at their
    defaults."""
    return (*ctx.needs_input_grad, *(False,) * count)[:count]


def _refuse_double_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(f"{name} has no gradient of its own: second derivatives are not supported")

    return backward


# ---- the linear and its two gradients


def check_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None,
    recipe: str | None = None,
) -> None:  # fmt: skip
    require(x.ndim == 2 and x.shape[1] == weight.shape[2], "x", x, f"shape (rows, in_features = {weight.shape[2]})")
    require(x.dtype == weight.dtype, "x", x, f"dtype {weight.dtype}, as the weight has")
    require(x.device == weight.device, "x", x, f"device {weight.device}, as the weight has")
    check_recipe(recipe, x.dtype)
    check_offsets(offsets, weight.shape[0], x)
    if bias is not None:
        wanted = tuple(weight.shape[:2])
        require(tuple(bias.shape) == wanted, "bias", bias, f"shape {wanted}")
        require(is_floating(bias), "bias", bias, "a floating-point dtype")
        require(bias.device == x.device, "bias", bias, f"device {x.device}, as x has")
    check_row_scale("bias_scale", bias_scale, (x.shape[0],), x)
    if bias_scale is not None and bias is None:
        raise ValueError("bias_scale: got a tensor without a bias to scale, wanted None")


def _fake_linear(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    check_linear(x, weight, *others)
    return x.new_empty(x.shape[0], weight.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, offsets, bias, bias_scale, ctx.recipe = inputs
    needs_x, needs_weight, _, needs_bias, needs_scale = needs_gradient(ctx, 5)
    # Save only what the backward reads: a frozen weight saves no rows.
    ctx.save_for_backward(
        x if needs_weight else None,
        weight if needs_x else None,
        offsets,
        bias if needs_scale else None,
        bias_scale if needs_bias else None,
    )
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.scale_dtype = None if bias_scale is None else bias_scale.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets, bias, bias_scale = ctx.saved_tensors
    ops = torch.ops.thunder_moe
    needs_x, needs_weight, _, needs_bias, needs_scale = needs_gradient(ctx, 5)
    return (
        ops.grouped_linear_dgrad(grad, weight, offsets, ctx.recipe) if needs_x else None,
        ops.grouped_linear_wgrad(x, grad, offsets, ctx.recipe) if needs_weight else None,
        None,
        ops.grouped_bias_grad(grad, offsets, bias_scale).to(ctx.bias_dtype) if needs_bias else None,
        ops.grouped_bias_scale_grad(grad, bias, offsets).to(ctx.scale_dtype) if needs_scale else None,
        None,
    )


@training_operator(_fake_linear, backward=_backward, setup_context=_setup_context)
def _grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None, bias_scale: Tensor | None = None,
    recipe: str | None = None,
) -> Tensor:  # fmt: skip
    refuse_forward_ad()
    check_linear(x, weight, offsets, bias, bias_scale, recipe)
    ends = int32_offsets(offsets, x.shape[0])
    out: Tensor = training_products(x.device, recipe).grouped_mm(x, weight, ends)
    if bias is not None:
        out = training_kernels(x.device).add_bias(out, ends, bias, bias_scale, out=out)
    return out


@training_operator(mutates=("out",))
def _grouped_linear_out(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, bias_scale: Tensor | None, out: Tensor,
    recipe: str | None = None,
) -> None:  # fmt: skip
    check_linear(x, weight, offsets, bias, bias_scale, recipe)
    ends = int32_offsets(offsets, x.shape[0])
    training_products(x.device, recipe).grouped_mm(x, weight, ends, out=out)
    if bias is not None:
        training_kernels(x.device).add_bias(out, ends, bias, bias_scale, out=out)


@training_operator(lambda grad, weight, *_: grad.new_empty(grad.shape[0], weight.shape[2]))
def _grouped_linear_dgrad(grad: Tensor, weight: Tensor, offsets: Tensor, recipe: str | None = None) -> Tensor:
    ends = int32_offsets(offsets, grad.shape[0], "grad")
    return training_products(grad.device, recipe).dgrad(grad, weight, ends)


@training_operator(mutates=("out",))
def _grouped_linear_dgrad_out(
    grad: Tensor, weight: Tensor, offsets: Tensor, out: Tensor, recipe: str | None = None
) -> None:
    ends = int32_offsets(offsets, grad.shape[0], "grad")
    training_products(grad.device, recipe).dgrad(grad, weight, ends, out=out)


@training_operator(lambda x, grad, offsets, *_: x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1]))
def _grouped_linear_wgrad(x: Tensor, grad: Tensor, offsets: Tensor, recipe: str | None = None) -> Tensor:
    return training_products(x.device, recipe).wgrad(x, grad, int32_offsets(offsets, x.shape[0]))


@training_operator(mutates=("main_grad",))
def _grouped_linear_wgrad_out(
    x: Tensor, grad: Tensor, offsets: Tensor, main_grad: Tensor, accumulate: bool, recipe: str | None = None
) -> None:
    ends = int32_offsets(offsets, x.shape[0])
    training_products(x.device, recipe).wgrad(x, grad, ends, out=main_grad, accumulate=accumulate)


# ---- biases


def _fake_bias(y: Tensor, *others: Tensor | None) -> Tensor:
    check_row_scale("scales", (*others, None, None, None, None)[3], (y.shape[0],), y)
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _setup_bias_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    y, offsets, bias, bias_scale, scales = inputs
    _, _, _, needs_bias_scale, needs_scales = needs_gradient(ctx, 5)
    ctx.save_for_backward(
        y if needs_scales else None, offsets, bias if needs_bias_scale or needs_scales else None, bias_scale, scales
    )
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (bias, bias_scale, scales)]


def _bias_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    y, offsets, bias, bias_scale, scales = ctx.saved_tensors
    ops = torch.ops.thunder_moe
    needs_y, _, needs_bias, needs_bias_scale, needs_scales = needs_gradient(ctx, 5)
    bias_dtype, bias_scale_dtype, scales_dtype = ctx.dtypes
    of_y = of_bias = of_bias_scale = of_scales = None
    if needs_y:
        of_y = ops.grouped_bias(grad, offsets, None, None, scales)
    if needs_bias:
        factors = [factor.float() for factor in (bias_scale, scales) if factor is not None]
        both = factors[0] * factors[1] if len(factors) == 2 else factors[0] if factors else None
        of_bias = ops.grouped_bias_grad(grad, offsets, both).to(bias_dtype)
    if needs_bias_scale:
        # Past the last row end the product is zero, and the scales may be NaN.
        of_row = ops.grouped_bias_scale_grad(grad, bias, offsets)
        of_row = of_row if scales is None else torch.where(of_row == 0, 0, of_row * scales.float())
        of_bias_scale = of_row.to(bias_scale_dtype)
    if needs_scales:
        unscaled = ops.grouped_bias(y, offsets, bias, bias_scale)
        live = ops.grouped_bias(grad, offsets)
        of_scales = (live.float() * unscaled.float()).sum(-1).to(scales_dtype)
    return of_y, None, of_bias, of_bias_scale, of_scales


@training_operator(_fake_bias, backward=_bias_backward, setup_context=_setup_bias_context)
def _grouped_bias(
    y: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    ends = int32_offsets(offsets, y.shape[0], "y")
    return training_kernels(y.device).add_bias(y, ends, bias, bias_scale, scales)


def _setup_bias_grad_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, offsets, scale = inputs
    needs_scale = needs_gradient(ctx, 3)[2]
    ctx.save_for_backward(grad if needs_scale else None, offsets, scale)
    ctx.rows, ctx.dtypes = grad.shape[0], (grad.dtype, None if scale is None else scale.dtype)


def _bias_grad_backward(ctx: Any, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    """Give each row the gradient of its expert's sum."""
    grad, offsets, scale = ctx.saved_tensors
    needs_grad, _, needs_scale = needs_gradient(ctx, 3)
    ops = torch.ops.thunder_moe
    of_grad = of_scale = None
    if needs_grad:
        zeros = of_sums.new_zeros(ctx.rows, of_sums.shape[1])
        of_grad = ops.grouped_bias(zeros, offsets, of_sums, scale).to(ctx.dtypes[0])
    if needs_scale:
        of_scale = ops.grouped_bias_scale_grad(grad, of_sums, offsets).to(ctx.dtypes[1])
    return of_grad, None, of_scale


@training_operator(
    lambda grad, offsets, *_: grad.new_empty(offsets.shape[0], grad.shape[1], dtype=torch.float32),
    backward=_bias_grad_backward,
    setup_context=_setup_bias_grad_context,
)
def _grouped_bias_grad(grad: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    ends = int32_offsets(offsets, grad.shape[0], "grad")
    return training_kernels(grad.device).bias_grad(grad, ends, scale)


@training_operator(lambda grad, *_: grad.new_empty(grad.shape[0], dtype=torch.float32))
def _grouped_bias_scale_grad(grad: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    ends = int32_offsets(offsets, grad.shape[0], "grad")
    return training_kernels(grad.device).bias_scale_grad(grad, bias, ends)
