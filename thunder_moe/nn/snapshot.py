"""`Snapshot`: the weight that forwards of a module read while other threads replace it, never a mixture of two weights.
Called by nn.packed, which takes snapshots, and quantization.quantize, which replaces buffers; calls torch alone.

A weight is several buffers, which get new memory one after the other. A snapshot has aliases of them, taken between two
replacements, which keep their memory alive for as long as a forward uses them. It is current while the buffers have the
addresses that the aliases have: so a forward compares addresses and takes no lock.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from thunder_moe.formats.weight import PackedWeight

# Held while buffers are read to be replaced, while they are replaced, and while a snapshot is taken. A fork waits for
# it, so that a child process never sees a half-finished one of these.
replacing = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=replacing.acquire, after_in_parent=replacing.release, after_in_child=replacing.release)


Method = TypeVar("Method", bound=Callable[..., Any])


def alone(method: Method) -> Method:
    """Let one thread at a time run the methods that are decorated so, of all modules."""

    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with replacing:
            return method(*args, **options)

    return cast("Method", run)


class Snapshot(NamedTuple):
    """The state of a weight between two replacements.

    Attributes:
        addresses: the buffers' addresses, to compare the current buffers with it.
        weight: the weight made of aliases of the buffers.
        operands: its tensors as the module's operator takes them.
        references: references to the buffers, qdata's first.
    """

    addresses: tuple[int | None, ...]
    weight: PackedWeight
    operands: tuple[Tensor, ...]
    references: tuple[Reference, ...]


class SnapshotPlace:
    """The place beside a module for its latest snapshot, which is replaced as a whole, since threads share it."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: Snapshot | None = None


class Reference(weakref.ref):  # type: ignore[type-arg]
    """A weak reference from a snapshot to a buffer: the snapshot goes with the buffer, so that its memory is free."""

    __slots__ = ("place",)
    place: SnapshotPlace

    def __new__(cls, buffer: Tensor, place: SnapshotPlace) -> Reference:
        self = super().__new__(cls, buffer, cls.drop)
        self.place = place
        return self

    def drop(self) -> None:
        self.place.latest = None


def drop_snapshots(buffer: Tensor) -> None:
    """Drop the snapshots of a buffer that gets other memory, in all modules that have the buffer."""
    for reference in weakref.getweakrefs(buffer):
        if isinstance(reference, Reference):
            reference.drop()
