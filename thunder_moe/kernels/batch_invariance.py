"""The batch-invariant mode of operators: a row's bits depend on that row's operands alone.
nn.batch_invariant switches it on; kernels, nn, ops.experts_lora and integrations ask for it. Calls torch alone.

Backends then choose kernels by the weight, never by the number of rows, and sum over K in one order: the docstring of
`GemmConfig.parts_of_k` (kernels/cuda/configs.py) has the order on CUDA, `grouped_mm` of kernels/cpu/backend.py on a
CPU. Plain torch, which chooses its kernels itself, multiplies one row at a time: `by_rows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_MODE: ContextVar[bool] = ContextVar("thunder_moe_batch_invariant", default=False)
_process = False


@contextlib.contextmanager
def switched_on() -> Iterator[None]:
    """Switch the mode on for the operators of this thread or asyncio task."""
    token = _MODE.set(True)
    try:
        yield
    finally:
        _MODE.reset(token)


def make_batch_invariant(on: bool = True) -> None:
    """Switch the mode on, or off again, for all threads of this process."""
    global _process
    _process = on


def is_batch_invariant() -> bool:
    """True inside of `switched_on`, and after `make_batch_invariant`."""
    return _process or _MODE.get()


def refuse(what: str, remedy: str) -> None:
    """Raise a ValueError for work without a batch-invariant kernel, if the mode is on."""
    if is_batch_invariant():
        raise ValueError(f"batch_invariant: {what}: a row's bits would depend on other rows; {remedy}")


def refuse_plain_torch(rows: Tensor) -> None:
    """Raise a ValueError for rows that no kernel of their device serves, if the mode is on: torch chooses by their
    number."""
    what = f"{rows.dtype} rows on {rows.device} run in plain torch"
    refuse(what, "use bfloat16 or float16, and sizes that a CUDA kernel serves")


def by_rows(function: Callable[..., Any], *rows: Tensor) -> Any:
    """Return a function's result, or tuple of results, for rows (M, ...): in the batch-invariant mode one at a time.

    Each row is copied first, since torch's kernels may depend on the alignment. Elementwise functions need this too:
    torch computes an exponential differently at the end of a tensor, where no whole vector is left.

    Raises:
        ValueError: the mode is on, and the rows are not on a CPU.
    """
    first = rows[0]
    if not is_batch_invariant() or first.shape[0] == 0:
        return function(*rows)
    if first.device.type != "cpu":
        refuse_plain_torch(first)
    by_row = zip(*(each.split(1) for each in rows), strict=True)
    results = [function(*(part.clone() for part in parts)) for parts in by_row]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(map(torch.cat, zip(*results, strict=True)))
