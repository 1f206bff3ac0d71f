"""`batch_invariant`, the context manager: the mode of operators, and linear layers of torch by operators.
Called by users; calls kernels.batch_invariance and ops.grouped_linear.

Legend: ... any leading dimensions, M rows, N out_features, K in_features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from thunder_moe.kernels.batch_invariance import by_rows, is_batch_invariant, refuse, switched_on
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers the operator)
from thunder_moe.ops.checks import ACTIVATION_DTYPES


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """Give each row the same bits beside any other rows, in what is covered.

    A row's result then depends on its own operands alone: not on the number of rows, their order, the experts of other
    rows, or the run; ``with batch_invariant(): model(tokens)``. It covers the experts, grouped and dense layers of
    packed weights, `moe_linear_router`, and the forward of training blocks in 16 bits and float32. These read the mode
    when they run, also in graphs that were compiled outside. A CUDA graph keeps the mode of its capture.

    In eager code it also covers linear layers of 16-bit and float32 tensors, with gradients and without: routers, gates
    and shared experts, attention's projections, heads. On a CPU it covers activations of up to three dimensions, too.
    It does not cover gradients, attention, norms, other functions with products (`torch.addmm`, `torch.einsum`,
    `nn.MultiheadAttention`), and torch's own operations in a compiler's graphs. With gradients torch computes a linear
    layer, too, and its output gets the batch-invariant numbers.

    Backward does not know the mode: give activation checkpoints a ``context_fn`` that returns
    ``(contextlib.nullcontext(), batch_invariant())``, else a token may get other experts when it is computed again.

    The mode belongs to a thread or an asyncio task. A generator that yields inside leaves it on for its caller until
    the generator goes on: leave the mode before each yield.

    Raises:
        ValueError: by an operator or a linear layer inside that has no batch-invariant kernel, and by a linear layer
            or an activation inside of ``torch.func`` and forward-mode differentiation.
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
        if run is None:
            if getattr(function, "__name__", "") not in _ACTIVATIONS:
                return function(*args, **kwargs)
            run = partial(_activation, function)
        operands = (*args, *kwargs.values())
        if not torch.is_grad_enabled() or not any(isinstance(each, Tensor) and each.requires_grad for each in operands):
            values = run(*args, **kwargs)
            return function(*args, **kwargs) if values is None else values
        # Torch's own graph has all derivatives, and saves the same tensors as a checkpoint that is computed outside.
        out = function(*args, **kwargs)
        with torch.no_grad():
            values = run(*args, **kwargs)
            if values is not None:
                out.data.copy_(values)  # of a softmax, backward reads the output
        return out


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute F.linear: (..., K), (N, K), (N,) -> (..., N); None: torch computes it, or has an error for it.

    Raises:
        ValueError: no batch-invariant kernel has its dtype.
    """
    operands = [each for each in (input, weight, bias) if each is not None]
    dtype = autocast_dtype(input) if all(map(_is_dense, operands)) else None
    if dtype is not None:
        casts = [each.is_floating_point() and each.dtype != torch.float64 for each in operands]
        operands = [each.to(dtype) if cast else each for each, cast in zip(operands, casts, strict=True)]
    return _product(*operands)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Compute `_linear` without autocast."""
    operands = [each for each in (input, weight, bias) if each is not None]
    if not all(_is_dense(each) and (each.dtype, each.device) == (input.dtype, input.device) for each in operands):
        return None
    if weight.ndim != 2 or not weight.numel() or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        return None
    if not input.is_floating_point() and not input.is_complex():  # sums of integers are exact
        return None
    _refuse_transforms()
    if input.dtype not in ACTIVATION_DTYPES:
        refuse(f"a linear layer of {input.dtype}", "use bfloat16, float16 or float32")
    rows = input.reshape(-1, input.shape[-1])
    ends = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    out: Tensor = torch.ops.thunder_moe.grouped_linear(rows, weight[None], ends)
    out = out.reshape(*input.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias.expand(out.shape)


def _mm(input: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Tensor | None:
    """Compute torch.mm: (M, K), (K, N) -> (M, N), in products of `out_dtype`; None as `_linear`."""
    if input.ndim != 2 or out_dtype is None or input.dtype != mat2.dtype or not (_is_dense(input) and _is_dense(mat2)):
        return _matmul(input, mat2, out=out) if input.ndim == 2 and out_dtype is None else None
    return _without_out(_product(input.to(out_dtype), mat2.to(out_dtype).t()) if mat2.ndim == 2 else None, out)


def _matmul(input: Tensor, other: Tensor, *, out: Any = None) -> Tensor | None:
    """Compute torch.matmul: (..., K), (K, N) -> (..., N); None as `_linear`, and for products of attention."""
    return _without_out(_linear(input, other.t()) if _is_dense(other) and other.ndim == 2 else None, out)


def _without_out(values: Tensor | None, out: Any) -> Tensor | None:
    if values is not None and out is not None:
        refuse("out=", "leave it out")
    return values


# Functions that torch computes differently at the end of a tensor on a CPU.
_ALONG_ROWS = frozenset({"log_softmax", "softmax"})
_ACTIVATIONS = _ALONG_ROWS | {"exp", "gelu", "logsigmoid", "sigmoid", "silu", "softplus", "tanh"}


def _activation(function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    """Compute a function of rows (..., K); None: torch computes it."""
    if not _is_dense(input) or not input.is_cpu or input.ndim not in (1, 2, 3) or not input.numel():
        return None  # four dimensions: attention
    name = function.__name__
    if name in _ALONG_ROWS:
        if (args[0] if args else kwargs.get("dim")) not in (-1, input.ndim - 1):
            return None
        args, kwargs = ((-1, *args[1:]), kwargs) if args else (args, {**kwargs, "dim": -1})
    _refuse_transforms()
    if kwargs.get("out") is not None or (name == "silu" and (args[0] if args else kwargs.get("inplace"))):
        refuse(f"{name} with out= or inplace=True", "leave it out")
    rows = input.reshape(-1, input.shape[-1])
    values: Tensor = by_rows(lambda row: function(row, *args, **kwargs), rows)
    return values.reshape(input.shape)


def _is_dense(tensor: Any) -> bool:
    """True for a strided tensor with numbers, of torch's own class (a DTensor is of a subclass)."""
    dense = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return dense and not tensor.is_nested and not tensor.is_meta


def _refuse_transforms() -> None:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        refuse("a linear layer or an activation in torch.func or forward-mode differentiation", "run it outside")


_LINEAR: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
}
