"""What the compile-time rewrite did: `rewrite_report(compiled)` and the warning when it did nothing.
Called by users and by the compilers, which record here; calls Thunder only to find a compiled function's data.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from thunder_moe.compilers.eligibility import GroupedGemm

__all__ = ["RewriteEntry", "RewriteReport", "RewriteWarning", "record", "rewrite_report"]


class RewriteWarning(UserWarning):
    """A compilation in which no expert GEMM was rewritten to NVFP4."""


@dataclass(frozen=True)
class RewriteEntry:
    """One grouped GEMM of one compiled graph.

    Attributes:
        graph: which of the function's graphs, 0 for the first one compiled.
        gemm: names and sizes.
        decision: "nvfp4", "nvfp4 + swiglu" (one half of a fused gate and up projection) or "16-bit".
        reason: why.
    """

    graph: int
    gemm: GroupedGemm
    decision: str
    reason: str

    @property
    def rewritten(self) -> bool:
        return self.decision != "16-bit"


@dataclass(frozen=True)
class RewriteReport:
    """The grouped GEMMs of all graphs of a compiled function; prints as a table."""

    entries: tuple[RewriteEntry, ...]

    @property
    def rewritten(self) -> tuple[RewriteEntry, ...]:
        """The entries that run in NVFP4."""
        return tuple(entry for entry in self.entries if entry.rewritten)

    def __iter__(self) -> Iterator[RewriteEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        if not self.entries:
            return "no grouped GEMM was compiled"
        rows = [("graph", "weight", "experts x out x in", "rows", "decision", "reason")]
        for entry in self.entries:
            gemm = entry.gemm
            sizes = f"{gemm.experts} x {gemm.out_features} x {gemm.in_features}"
            rows.append((str(entry.graph), gemm.weight or "?", sizes, str(gemm.rows), entry.decision, entry.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# Compile data of a compiled function -> the entries of each of its graphs.
_GRAPHS: weakref.WeakKeyDictionary[Any, list[list[RewriteEntry]]] = weakref.WeakKeyDictionary()


def record(compile_data: Any, decisions: list[tuple[GroupedGemm, str, str]]) -> None:
    """Keeps what was decided on a graph's (gemm, decision, reason); warns when nothing in it was rewritten."""
    graphs = _GRAPHS.setdefault(compile_data, [])
    entries = [RewriteEntry(len(graphs), *decision) for decision in decisions]
    graphs.append(entries)
    if any(entry.rewritten for entry in entries):
        return
    why = "; ".join(f"{entry.gemm.weight or 'a weight'}: {entry.reason}" for entry in entries)
    why = why or "the graph has no call of torch.nn.functional.grouped_mm"
    warnings.warn(f"thunder_moe rewrote no expert GEMM to NVFP4: {why}", RewriteWarning, stacklevel=2)


def rewrite_report(compiled: Callable) -> RewriteReport:
    """Lists each grouped GEMM of a compiled module or function: sizes, decision, reason.

    Args:
        compiled: what ``thunder.jit(..., executors=[moe_executor])`` returned, called at least once.

    Raises:
        ValueError: compiled was not compiled by Thunder, or not called yet.
    """
    from thunder_moe.compilers.compat import import_thunder

    import_thunder()
    import thunder

    data = thunder.compile_data(compiled)
    if data is None:
        raise ValueError(f"compiled: got {type(compiled).__name__}, wanted what thunder.jit returned")
    if data not in _GRAPHS:
        raise ValueError("compiled: not called yet, or compiled without moe_executor; call it once, then ask again")
    return RewriteReport(tuple(entry for graph in _GRAPHS[data] for entry in graph))
