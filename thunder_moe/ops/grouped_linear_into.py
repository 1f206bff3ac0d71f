"""Expert linears that write into tensors of the caller: buffers, main_grad, weight gradients that wait.
Called by nn in eager mode; calls the operators of ops.grouped_linear and ops.activation.

Legend: M rows sorted by expert, E experts, N out_features, K in_features, I intermediate_size, D columns of y.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.ops.activation import ActivationForm
from thunder_moe.routing import live_rows

_OPS = torch.ops.thunder_moe


@dataclass(frozen=True, eq=False)
class Waiting:
    """A weight whose gradient waits, with the rows (M, K) and the gradient (M, N) to compute it, and their versions."""

    weight: Tensor
    rows: Tensor
    grad: Tensor
    offsets: Tensor
    versions: tuple[int, int, int]
    recipe: str | None


class Queue(deque[Waiting]):
    """Gradients that wait, the oldest first. A copy is empty, also if a module is copied with its `__dict__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Queue:
        return Queue()


@dataclass(frozen=True, eq=False)
class Into:
    """The buffers that results are written into.

    Attributes:
        out: buffer (M, N) of the result.
        grad_input: buffer (M, K), or (M, D), of the gradient of the first argument.
        main_grad: True if the weight's gradient goes into its main_grad.
        waiting: the queue that gets the weight's rows and gradient, which are not multiplied yet.
        dtype: the dtype that the linear computes in.
        recipe: the 8-bit recipe of its products; None for 16 bits.
    """

    out: Tensor | None
    grad_input: Tensor | None
    main_grad: bool
    waiting: deque[Waiting] | None
    dtype: torch.dtype
    recipe: str | None


def check_buffer(
    name: str, buffer: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, **others: Tensor | None
) -> None:
    """Raise ValueError unless a buffer is None, or contiguous, of this shape and dtype, on x's device, without a
    gradient and apart from the memory of x and of the other operands."""
    if buffer is None:
        return
    if not isinstance(buffer, Tensor):
        raise ValueError(f"{name}: got {type(buffer).__name__}, wanted a tensor")
    require(tuple(buffer.shape) == shape, name, buffer, f"shape {shape}")
    require(buffer.dtype == dtype, name, buffer, f"dtype {dtype}")
    require(buffer.device == x.device, name, buffer, f"device {x.device}")
    if not buffer.is_contiguous():
        raise ValueError(f"{name}: got strides {buffer.stride()}, wanted a contiguous tensor")
    if buffer.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires a gradient, wanted a plain one; use detach()")
    for operand, tensor in dict(x=x, **others).items():
        if tensor is not None and _overlap(buffer, tensor):
            raise ValueError(
                f"{name}: got memory that {operand} is in, which is read after it is written; wanted other memory"
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """True if two tensors lie in the same memory, by the addresses between which they are; never on the meta device."""
    if a.is_meta or b.is_meta:
        return False
    (begin, end), (other_begin, other_end) = _span(a), _span(b)
    return begin < other_end and other_begin < end


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor lies between."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def grouped_linear_into(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    into: Into,
    form: ActivationForm | None = None,
) -> Tensor:
    """Run `grouped_linear`, or with a `form` `activated_grouped_linear`; results go where `into` says.

    Args:
        scales: bias_scale, or with a form the factor of the rows.
    """
    anchor, owner = None, weight
    if into.waiting is not None and weight.requires_grad:
        # The graph leaves out the weight: its hooks have to fire when its gradient exists, in `run_waiting`.
        weight, anchor = weight.detach(), weight.new_empty(0).requires_grad_()
    apply: Any = _GroupedLinearInto.apply
    return apply(x, weight, offsets, scales, bias, into, form, anchor, Owner(owner))


class Owner:
    """Holds the weight that gets a gradient, hidden from autograd: a parameter, or the result of a parametrization."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _GroupedLinearInto(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, scales: Tensor | None, bias: Tensor | None, into: Into,
        form: ActivationForm | None, anchor: Tensor | None, owner: Owner,
    ) -> Tensor:  # fmt: skip
        needs_x, needs_weight, _, needs_scales, needs_bias, *_ = ctx.needs_input_grad
        needs_weight = needs_weight or anchor is not None
        ctx.into, ctx.form, ctx.x_dtype = into, form, x.dtype
        # Hooks of saved tensors (checkpoint, save_on_cpu) give back another tensor, without the attribute main_grad.
        ctx.owner = owner if into.main_grad or into.waiting is not None else None
        x = x.to(into.dtype)
        rows = x if form is None else _OPS.scaled_activation(x, scales, offsets, **form.options)
        operands = rows, weight.to(into.dtype), offsets, bias, None if bias is None else scales
        needs_rows = needs_x or (form is not None and needs_scales)
        ctx.save_for_backward(
            x if needs_weight or (form is not None and needs_rows) else None,
            weight if needs_rows or needs_weight else None,
            offsets,
            scales if form is not None or needs_bias else None,
            bias if needs_scales else None,
        )
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (scales, bias)]
        if into.out is None:
            return _OPS.grouped_linear(*operands, into.recipe)
        _OPS.grouped_linear_out(*operands, into.out, into.recipe)
        torch.autograd.graph.increment_version(into.out)
        return into.out.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, offsets, scales, bias = ctx.saved_tensors
        needs_x, needs_weight, _, needs_scales, needs_bias, _, _, waits, _ = ctx.needs_input_grad
        into: Into = ctx.into
        main_grad = into.main_grad
        if needs_weight and main_grad:
            asked_for = _is_asked_for(ctx.owner.weight)
            needs_weight, main_grad = asked_for is not False, asked_for is True
        needs_weight = needs_weight or waits
        form: ActivationForm | None = ctx.form
        scales_dtype, bias_dtype = ctx.dtypes
        of_x = of_weight = of_scales = of_bias = None
        if needs_weight:
            rows = x if form is None else _OPS.scaled_activation(x, scales, offsets, **form.options)
            if into.waiting is not None:
                versions = rows._version, grad._version, offsets._version
                # Detached tensors share the versions, and keep no graph.
                operands = rows.detach(), grad.detach(), offsets
                into.waiting.append(Waiting(ctx.owner.weight, *operands, versions, into.recipe))
            else:
                owner = ctx.owner.weight if main_grad else weight
                of_weight = _weight_gradient(owner, rows, grad, offsets, main_grad, into.recipe)
        if needs_bias:
            of_bias = _OPS.grouped_bias_grad(grad, offsets, scales).to(bias_dtype)
        if needs_scales and bias is not None:
            of_scales = _OPS.grouped_bias_scale_grad(grad, bias, offsets)
        if form is not None and (needs_x or needs_scales):
            of_rows = _OPS.grouped_linear_dgrad(grad, weight.to(into.dtype), offsets, into.recipe)
            of_x, more = _OPS.scaled_activation_backward(
                of_rows, x, scales, offsets, needs_x, needs_scales, **form.options
            )
            if needs_scales:
                of_scales = more if of_scales is None else of_scales + more.float()
            if needs_x:
                of_x = _put(of_x.to(ctx.x_dtype), into.grad_input, offsets)
        elif needs_x:
            buffer = into.grad_input
            # The buffer may hold `grad` itself, if the next layer was given the same buffer.
            if buffer is not None and buffer.dtype == into.dtype and not _overlap(buffer, grad):
                _OPS.grouped_linear_dgrad_out(grad, weight.to(into.dtype), offsets, buffer, into.recipe)
                torch.autograd.graph.increment_version(buffer)
                of_x = buffer
            else:
                of_x = _OPS.grouped_linear_dgrad(grad, weight.to(into.dtype), offsets, into.recipe)
                of_x = _put(of_x.to(ctx.x_dtype), buffer, offsets)
        if of_scales is not None:
            of_scales = of_scales.to(scales_dtype)
        return of_x if needs_x else None, of_weight, None, of_scales, of_bias, None, None, None, None


def _is_asked_for(weight: Tensor) -> bool | None:
    """True if the running backward accumulates a weight's gradient; None if `torch.autograd.grad` returns it.

    False in `torch.autograd.grad` or `backward(inputs=...)` of other tensors only."""
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        executed: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):  # of a leaf whose gradient is returned
            raise
        return None
    return executed


def _put(grad: Tensor, buffer: Tensor | None, offsets: Tensor) -> Tensor:
    """Return the gradient of x, in the buffer if there is one.

    It returns the buffer itself. So autograd copies it into `.grad`, instead of stealing it.
    """
    if buffer is None:
        return grad
    return buffer.copy_(torch.where(live_rows(offsets, grad.shape[0]), grad, buffer))


def run_waiting(waiting: deque[Waiting], main_grad: bool) -> None:
    """Compute the oldest waiting weight gradient and add it to its weight's, like autograd; do nothing if none waits.

    Raises:
        ValueError: the weight requires no gradient any more, or main_grad does not fit, as in `_weight_gradient`.
        RuntimeError: the rows or the gradient have been changed in place since.
    """
    if not waiting:
        return
    pair = waiting[0]
    weight = pair.weight  # the call's weight: `torch.func.functional_call` may replace the module's
    if not weight.requires_grad:
        raise ValueError("weight: got a frozen one, whose gradient waits; wanted it trainable until backward_dw()")
    tensors = dict(rows=pair.rows, gradient=pair.grad, offsets=pair.offsets)
    for (name, tensor), version in zip(tensors.items(), pair.versions, strict=True):
        if tensor._version != version:
            raise RuntimeError(
                f"the {name} of a weight gradient that waits were changed in place before backward_dw(); a buffer"
                " (out, grad_input) may be written again only after it"
            )
    with torch.no_grad():
        grad = _weight_gradient(weight, pair.rows, pair.grad, pair.offsets, main_grad, pair.recipe)
    waiting.popleft()
    if grad is None:
        with torch.enable_grad():
            visit: Any = _Visit.apply
            visit(weight).backward(weight.new_empty(0))
    else:
        weight.backward(grad)


class _Visit(torch.autograd.Function):
    """A graph that ends at a weight without a gradient for it: its backward fires the hooks there."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def _weight_gradient(
    weight: Tensor, rows: Tensor, grad: Tensor, offsets: Tensor, main_grad: bool, recipe: str | None
) -> Tensor | None:
    """Return the gradient for autograd. With main_grad, add it there and return None, or zeros that fire the hooks of
    a parameter with `grad_added_to_main_grad`.

    Raises:
        ValueError: main_grad is missing, or not float32 or in the weight's dtype, contiguous and of the weight's shape
            and device.
    """
    if not main_grad:
        of_weight: Tensor = _OPS.grouped_linear_wgrad(rows, grad, offsets, recipe)
        return of_weight.to(weight.dtype)
    buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        raise ValueError(
            f"main_grad: got {buffer!r} as the weight's attribute, wanted a tensor {tuple(weight.shape)};"
            " accumulate_into_main_grad adds the gradient to it"
        )
    require(tuple(buffer.shape) == tuple(weight.shape), "main_grad", buffer, f"shape {tuple(weight.shape)}")
    dtypes = dict.fromkeys((torch.float32, weight.dtype))
    require(buffer.dtype in dtypes, "main_grad", buffer, f"dtype {' or '.join(map(str, dtypes))}")
    require(buffer.device == weight.device, "main_grad", buffer, f"device {weight.device}")
    if not buffer.is_contiguous():
        raise ValueError(f"main_grad: got strides {buffer.stride()}, wanted a contiguous tensor")
    accumulate = not getattr(weight, "overwrite_main_grad", False)
    if buffer.dtype == torch.float32:
        _OPS.grouped_linear_wgrad_out(rows, grad, offsets, buffer, accumulate, recipe)
        torch.autograd.graph.increment_version(buffer)
    else:  # the product is rounded, then the sum
        added: Tensor = _OPS.grouped_linear_wgrad(rows, grad, offsets, recipe)
        buffer.add_(added) if accumulate else buffer.copy_(added)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)
