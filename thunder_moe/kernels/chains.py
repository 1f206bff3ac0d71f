"""The table of prepared chains: what an operator's arguments are -> the chain of kernels that computes it.
Called by ops/operator.py, which looks for a chain, by kernels/cuda/operators.py, which prepares them, and by
kernels/select.py, which notes calls of other backends.

A chain depends on the shapes, strides, dtypes and devices of tensors, on no values of them, and on all other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any

from torch import Tensor

UNKNOWN = object()  # in place of a chain: no call of this kind has been prepared
MAX_CHAINS = 4096  # the least recently used ones are dropped
_CHAINS: dict[Hashable, Callable[..., Any] | None] = {}
_LOCK = Lock()


def kind_of(name: str, args: Sequence[Any], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Hashable:
    """Return a key for the calls that one chain serves: left out, None at the end and the default are the same."""
    last = len(args)
    while last and args[last - 1] is None:
        last -= 1
    return (
        name,
        *[(a.shape, a.stride(), a.dtype, a.get_device()) if isinstance(a, Tensor) else a for a in args[:last]],
        frozenset((key, value) for key, value in options.items() if key not in defaults or defaults[key] != value),
    )


def find(kind: Hashable) -> Any:
    """Return the chain of a kind, None if no chain serves it, `UNKNOWN` before the first look-up."""
    with _LOCK:
        chain = _CHAINS.pop(kind, UNKNOWN)
        if chain is not UNKNOWN:
            _CHAINS[kind] = chain  # type: ignore[assignment]
    return chain


def remember(kind: Hashable, chain: Callable[..., Any] | None) -> None:
    """Keep the chain of a kind, or that there is none."""
    with _LOCK:
        _CHAINS[kind] = chain
        if len(_CHAINS) > MAX_CHAINS:
            del _CHAINS[next(iter(_CHAINS))]


def clear() -> None:
    """Forget all chains."""
    with _LOCK:
        _CHAINS.clear()
