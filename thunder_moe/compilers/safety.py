"""The safety analysis of every rewrite: whether GEMMs may be moved, and whether a weight may be packed before the call.
Called by dynamo/ and thunder/, each with its own graph as a list of steps, and by huggingface/implementation.py; calls
torch.

A rewrite puts one operator in the place of several steps, so that some of them run later (or earlier) than written:

    y = gate GEMM    reads x                 x.zero_() here would change y once the GEMM runs at `product`,
    u = up GEMM      reads x                 a change of grad mode would take its gradient away or give it one
    product          fused operator here

Tensors are identified by their storages, so all views of a tensor count. Each compiler has its own objects for
storages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Step:
    """One operation of a program, in the order in which it runs; a nested graph is one step, or its steps in a row."""

    name: str  # the name of the operation, as a report shows it: "mul_", "aten::copy_"
    reads: frozenset[Hashable] = frozenset()  # storages of its operands
    # storages that it changes in place; all that it reads if its effects are unknown
    writes: frozenset[Hashable] = frozenset()
    grad_enabled: bool = True  # the grad mode in force while it runs
    # may change any tensor, or which storage a tensor has (``set_``): counts as writing everything
    opaque: bool = False

    def changes(self, storages: Iterable[Hashable]) -> bool:
        return self.opaque or not self.writes.isdisjoint(storages)


class Program:
    """The steps of one graph in order. Every reason is a clause for `rewrite_report`; None means that it is safe."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self._by_storage: dict[Hashable, list[int]] = defaultdict(list)  # the positions of the steps that have it
        for position, step in enumerate(self.steps):
            for storage in step.reads | step.writes:
                self._by_storage[storage].append(position)
        self._opaque = [position for position, step in enumerate(self.steps) if step.opaque]

    def writer(self, storages: Iterable[Hashable], *, besides: int | None = None) -> Step | None:
        """Return the first step that may change one of some tensors, but for the step at the position `besides`."""
        storages = frozenset(storages)
        positions = {*self._opaque, *(at for storage in storages for at in self._by_storage.get(storage, ()))}
        found = (self.steps[position] for position in sorted(positions - {besides}))
        return next((step for step in found if step.changes(storages)), None)

    def reason_against_fusing(
        self,
        replaced: Collection[int],
        storages: Mapping[Any, str],
        saved: Mapping[Any, str] | None = None,
        differentiated: Collection[int] | None = None,
    ) -> str | None:
        """Return why one operator may not run in the place of some steps, anywhere between the first and the last.

        Args:
            replaced: positions of the steps. The caller, who knows what they compute, is responsible for their writes.
            storages: the tensors that it reads instead of them (and that they hand to each other), storage -> "rows".
            saved: the tensors that it reads again in its backward, but the steps do not in theirs.
            differentiated: the positions in `replaced` that gradients pass; None: all.
        """
        change = self.reason_against_reading_later(min(replaced), max(replaced), storages, replaced)
        if change is None and saved:
            change = self.reason_against_reading_later(max(replaced), len(self.steps), saved)
        passed = replaced if differentiated is None else differentiated
        if change is None and len({self.steps[position].grad_enabled for position in passed}) > 1:
            return f"the grad mode changes {self._between(min(replaced), max(replaced))}"
        return change

    def reason_against_reading_later(
        self, first: int, last: int, storages: Mapping[Any, str], ignored: Collection[int] = ()
    ) -> str | None:
        """Return why tensors that the step at `first` reads or makes may have changed at `last` (the number of steps:
        at the program's end), by a step between the two that is not among `ignored`."""
        for position in range(first + 1, last):
            step = self.steps[position]
            for storage, name in storages.items() if position not in ignored else ():
                if step.changes((storage,)):
                    return f"{name} may be changed in place by {step.name} {self._between(first, last)}"
        return None

    def _between(self, first: int, last: int) -> str:
        end = f"between {self.steps[first].name} and {self.steps[last].name}" if last < len(self.steps) else ""
        return end or f"after {self.steps[first].name}, before its backward"

    def reason_against_packing(self, storages: Iterable[Hashable]) -> str | None:
        """Return why what was packed before the call may be out of date in it: some step changes the weight."""
        writer = self.writer(storages)
        return None if writer is None else f"the weight may be changed in place by {writer.name} in the same graph"


def is_hidden_training_forward() -> bool:
    """True if this may be the forward of an `autograd.Function`, whose gradients its own backward computes though the
    grad mode is off: of reentrant checkpointing, for one. Weights that require a gradient are being trained there.

    torch disables forward-mode AD in such a forward and under `torch.inference_mode`, and not under `torch.no_grad`.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
