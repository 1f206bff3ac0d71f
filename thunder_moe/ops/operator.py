"""`operator`: registers an operator of the namespace thunder_moe from one description of it.
Called by the other files of ops; compilers.thunder.symbols reads `OPERATORS`; calls torch.library.

The decorated function is the operator: its signature is the schema, its docstring the documentation, its body runs the
kernel once the checks have passed. The checks, the shape of the result and the gradient are functions of the same
arguments; each names those that it reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.ops.checks import WEIGHT_NAMES, refuse_forward_ad, refuse_weight_gradients

__all__ = ["OPERATORS", "Operator", "operator"]

P = ParamSpec("P")
R = TypeVar("R")
Shape = tuple[int, ...]
Gradients = tuple[Tensor | None, ...]
Dtypes = Callable[..., tuple[torch.dtype | None, ...]]
OPERATORS: dict[str, Operator] = {}


class Operator:
    """An operator of the namespace thunder_moe.

    Args:
        function: runs the kernel; its signature is the schema.
        shapes: the arguments -> the shapes of the results. It reads shapes alone, so that it serves tensors, fake
            tensors and the proxies of Thunder.
        check: raises ValueError for arguments that do not fit; reads no data.
        check_values: the same for data, which it may read on a CPU alone.
        dtype: of the results, or the arguments -> those of the results; None for that of the first argument.
        gradient: (grad of the first result, *saved arguments, *saved results, needs=, **options) -> the gradients of
            `differentiable`, those that `needs` asks for. None: the operator is not differentiable.
        differentiable: the names of arguments that get a gradient.
        saved: the positions of the arguments that the gradient reads.
        saved_results: the positions of the results that it reads.

    Attributes:
        name: of the operator, without the namespace.
        signature: of the function.
        positions: of `differentiable` among the arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        shapes: Callable[..., tuple[Shape, ...]],
        check: Callable[..., None],
        check_values: Callable[..., None],
        dtype: torch.dtype | Dtypes | None,
        gradient: Callable[..., Gradients] | None,
        differentiable: Sequence[str],
        saved: slice,
        saved_results: slice,
    ) -> None:
        self.name, self.signature = function.__name__, inspect.signature(function)
        self.shapes, self.check, self.check_values, self._dtype = shapes, check, check_values, dtype
        self.differentiable, self._gradient, self._function = differentiable, gradient, function
        self._saved, self._saved_results = saved, saved_results
        parameters = self.signature.parameters
        self._positional = [name for name, value in parameters.items() if value.kind is not value.KEYWORD_ONLY]
        self.positions = tuple(map(self._positional.index, differentiable))
        schema = torch.library.infer_schema(function, mutates_args=())
        registered = torch.library.custom_op(f"thunder_moe::{self.name}", self._run, mutates_args=(), schema=schema)
        registered.register_fake(self._fake)
        if gradient is not None:
            registered.register_autograd(self._backward, setup_context=self._setup_context)

    def dtypes(self, *args: Any, **options: Any) -> tuple[torch.dtype | None, ...]:
        """Of the results; None for that of the first argument."""
        if callable(self._dtype):
            return self._dtype(*args, **options)
        return (self._dtype,) * len(self.shapes(*args, **options))

    def backward(self, grad: Tensor, *args: Any, needs: Sequence[bool] | None = None, **options: Any) -> Gradients:
        """Gradient of the result -> those of `differentiable` that `needs` asks for (None: all).

        Raises:
            ValueError: as the operator, and for a grad that is not of its result's shape.
        """
        assert self._gradient is not None
        self.check(*args, **options)
        self.check_values(*args, **options)
        (shape,) = self.shapes(*args, **options)
        require(tuple(grad.shape) == shape, "grad", grad, f"shape {shape}")
        needs = (True,) * len(self.positions) if needs is None else needs
        return self._gradient(grad, *args[self._saved], needs=needs, **options)

    def _run(self, *args: Any, **options: Any) -> Any:
        if self._gradient is not None:
            refuse_forward_ad()
        self.check(*args, **options)
        self.check_values(*args, **options)
        return self._function(*args, **options)

    def _fake(self, *args: Any, **options: Any) -> Any:
        self.check(*args, **options)
        described = zip(self.shapes(*args, **options), self.dtypes(*args, **options), strict=True)
        results = tuple(args[0].new_empty(shape, dtype=dtype) for shape, dtype in described)
        return results if len(results) > 1 else results[0]

    def _setup_context(
        self, ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
    ) -> None:
        if tuple(self._positional[1:4]) == WEIGHT_NAMES:
            refuse_weight_gradients(*inputs[1:4])
        results = output[self._saved_results] if isinstance(output, tuple) else ()
        ctx.save_for_backward(*inputs[self._saved], *results)
        ctx.options = keyword_only_inputs

    def _backward(self, ctx: Any, grad: Tensor, *_: Tensor) -> Gradients:
        assert self._gradient is not None
        # Trailing arguments that were left out have no entry.
        needs = tuple(any(ctx.needs_input_grad[position : position + 1]) for position in self.positions)
        grads = self._gradient(grad, *ctx.saved_tensors, needs=needs, **ctx.options)
        result: list[Tensor | None] = [None] * len(self._positional)
        for position, of_argument in zip(self.positions, grads, strict=True):
            result[position] = of_argument
        return tuple(result)


def _no_values(*args: Any, **options: Any) -> None:
    """For operators without checks of data."""


def operator(
    *,
    shapes: Callable[..., tuple[Shape, ...]],
    check: Callable[..., None],
    check_values: Callable[..., None] = _no_values,
    dtype: torch.dtype | Dtypes | None = None,
    gradient: Callable[..., Gradients] | None = None,
    differentiable: Sequence[str] = (),
    saved: slice = slice(None),
    saved_results: slice = slice(0),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the function of an operator: registers it, and gives a function that calls the operator.

    The arguments are those of `Operator`.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        described = OPERATORS[function.__name__] = Operator(
            function,
            shapes=shapes,
            check=check,
            check_values=check_values,
            dtype=dtype,
            gradient=gradient,
            differentiable=differentiable,
            saved=saved,
            saved_results=saved_results,
        )
        registered = getattr(torch.ops.thunder_moe, described.name)

        @wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> R:
            try:
                result: R = registered(*args, **options)
            except RuntimeError:
                described.signature.bind(*args, **options)  # a TypeError for arguments that are missing or unknown
                raise
            return result

        return call

    return register
