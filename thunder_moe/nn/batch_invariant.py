"""`batch_invariant`, the context manager: the mode of operators, and linear layers of torch by operators.
Called by users; calls kernels.batch_invariance and ops.grouped_linear.

Legend: ... any leading dimensions, M rows, N out_features, K in_features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thunder_moe.kernels.batch_invariance import by_rows, is_batch_invariant, refuse, switched_on
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers the operator)
from thunder_moe.ops.checks import ACTIVATION_DTYPES

__all__ = ["batch_invariant"]

# Functions that torch computes differently at the end of a tensor on a CPU.
_ELEMENTWISE = frozenset({"exp", "gelu", "logsigmoid", "sigmoid", "silu", "softplus", "tanh"})
_ALONG_ROWS = frozenset({"log_softmax", "softmax"})


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Give each row the same bits beside any other rows, in what is covered.

    A row's result then depends on its own operands alone: not on the number of rows, their order, the experts of other
    rows, or the run; ``with batch_invariant(): model(tokens)``. It covers the experts, grouped and dense layers of
    packed weights, `moe_linear_router`, and the forward of training blocks in 16 bits and float32. These read the mode
    when they run, also in graphs that were compiled outside. A CUDA graph keeps the mode of its capture.

    In eager code it also covers linear layers of 16-bit and float32 tensors, with gradients and without: routers, gates
    and shared experts, attention's projections, heads. On a CPU it covers activations of up to three dimensions, too.
    It does not cover gradients, attention, norms, and torch's own operations in a compiler's graphs.

    The mode belongs to a thread or an asyncio task. A generator that yields inside leaves it on for its caller until
    the generator goes on: leave the mode before each yield.

    Raises:
        ValueError: by an operator or a linear layer inside that has no batch-invariant kernel.
    """
    with switched_on(), _RowFunctions():
        yield


class _RowFunctions(TorchFunctionMode):
    """Compute linear layers by `grouped_linear`, and on a CPU activations and softmax one row at a time."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, or what gives a row the same bits among any others."""
        kwargs = kwargs or {}
        # Another asyncio task of this thread may be outside. A graph does not know the mode of its calls.
        if torch.compiler.is_compiling() or not is_batch_invariant():
            return function(*args, **kwargs)
        run = _LINEAR.get(function)
        if run is not None and all(type(each) in (Tensor, nn.Parameter) for each in args[:2]):
            return run(function, *args, **kwargs)
        name = getattr(function, "__name__", "")
        if (name in _ELEMENTWISE or name in _ALONG_ROWS) and args and type(args[0]) is Tensor and args[0].is_cpu:
            return _by_rows(function, name in _ALONG_ROWS, *args, **kwargs)
        return function(*args, **kwargs)


def _by_rows(function: Any, along_rows: bool, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[0] if args else None)
    if not 0 < x.ndim <= 3 or (along_rows and dim not in (-1, x.ndim - 1)):  # four dimensions: attention
        return function(x, *args, **kwargs)
    if along_rows:
        args, kwargs = args[1:], {**kwargs, "dim": -1}
    return by_rows(lambda row: function(row, *args, **kwargs), x.reshape(-1, x.shape[-1])).reshape(x.shape)


def _linear(function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear: (..., K), (N, K), (N,) -> (..., N).

    Raises:
        ValueError: no batch-invariant kernel has its dtype.
    """
    if input.is_meta:
        result: Tensor = function(input, weight, bias)
        return result
    dtype = autocast_dtype(input)
    if dtype is not None:
        input, weight = input.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if input.dtype not in ACTIVATION_DTYPES:
        refuse(f"a linear layer of {input.dtype}", "use bfloat16, float16 or float32")
    rows = input.reshape(-1, input.shape[-1])
    ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    out: Tensor = torch.ops.thunder_moe.grouped_linear(rows, weight[None], ends)
    out = out.reshape(*input.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _mm(function: Any, input: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    """Compute torch.mm: (M, K), (K, N) -> (M, N), in products of `out_dtype`; and torch.matmul with such a `mat2`."""
    if options:
        refuse(f"torch.mm with {', '.join(options)}", "leave it out")
    if mat2.ndim != 2 or input.ndim < 2:  # attention's products have four dimensions
        result: Tensor = function(input, mat2)
        return result
    wide = input.dtype if out_dtype is None else out_dtype
    return _linear(function, input.to(wide), mat2.to(wide).t())


_LINEAR: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__), _mm),
}
