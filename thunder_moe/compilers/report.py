"""Reports of the compile-time rewrite: `rewrite_report(compiled)`, and the warning when nothing was rewritten.
Called by users, and by dynamo/backend.py and thunder/rewrite.py, which record here; calls thunder.compile_data.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from thunder_moe.compilers.eligibility import Decision, GroupedGemm

__all__ = [
    "AttentionEntry",
    "RewriteEntry",
    "RewriteReport",
    "RewriteWarning",
    "RouterEntry",
    "record",
    "rewrite_report",
]


class RewriteWarning(UserWarning):
    """A compilation in which no expert GEMM was rewritten."""


@dataclass(frozen=True)
class RewriteEntry:
    """One grouped GEMM of one compiled graph.

    Attributes:
        graph: which of the function's graphs, 0 for the first one compiled.
        gemm: names and sizes.
        decision: "16-bit", or the number format, "nvfp4" or "mxfp8", with " + swiglu" for one half of a fused gate and
            up projection.
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
class AttentionEntry:
    """One call of scaled_dot_product_attention in a graph of torch.compile, whose program repeats keys and values.

    Attributes:
        graph: which of the function's graphs, 0 for the first one compiled.
        heads: of the query.
        key_heads: of keys and values, before they are repeated.
        head_dim: width of a head of the keys.
        keys: their number, None when it varies from call to call.
        decision: "grouped" (the heads of a group read the same keys) or "repeated" (as the program says).
        reason: why.
        where: file:line of the call, where the compiler tells.
    """

    graph: int
    heads: int
    key_heads: int
    head_dim: int
    keys: int | None
    decision: str
    reason: str
    where: str | None = None


@dataclass(frozen=True)
class RouterEntry:
    """One router in a graph of torch.compile: softmax and top-k.

    Attributes:
        graph: which of the function's graphs, 0 for the first one compiled.
        experts: E.
        top_k: the experts of a token.
        tokens: T, None when it varies from call to call.
        decision: "moe_router" or "as written".
        reason: why.
        where: file:line of the call of torch.topk, where the compiler tells.
    """

    graph: int
    experts: int
    top_k: int
    tokens: int | None
    decision: str
    reason: str
    where: str | None = None


Others = AttentionEntry | RouterEntry


@dataclass(frozen=True)
class RewriteReport:
    """The grouped GEMMs of all graphs of a compiled function; prints as a table.

    Attributes:
        entries: the grouped GEMMs, over which it iterates too.
        attention: attention that repeats keys and values, or would have without the rewrite.
        routers: softmax and top-k that `moe_router` computes, or could.
    """

    entries: tuple[RewriteEntry, ...]
    attention: tuple[AttentionEntry, ...] = ()
    routers: tuple[RouterEntry, ...] = ()

    @property
    def rewritten(self) -> tuple[RewriteEntry, ...]:
        """The entries that run in NVFP4."""
        return tuple(entry for entry in self.entries if entry.rewritten)

    def __iter__(self) -> Iterator[RewriteEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("graph", "weight", "experts x out x in", "rows", "decision", "reason")]
        for entry in self.entries:
            gemm = entry.gemm
            sizes = f"{gemm.experts} x {gemm.out_features} x {gemm.in_features}"
            rows.append((
                str(entry.graph), gemm.weight or "?", sizes, _number(gemm.rows), entry.decision,
                _at(entry.reason, gemm.where),
            ))  # fmt: skip
        tables = [_table(rows) if self.entries else "no grouped GEMM was compiled"]
        rows = [("graph", "heads / key heads x width", "keys", "attention", "reason")]
        for each in self.attention:
            heads = f"{each.heads} / {each.key_heads} x {each.head_dim}"
            rows.append((str(each.graph), heads, _number(each.keys), each.decision, _at(each.reason, each.where)))
        tables += [_table(rows)] if self.attention else []
        rows = [("graph", "experts / top-k", "tokens", "router", "reason")]
        for one in self.routers:
            sizes = f"{one.experts} / {one.top_k}"
            rows.append((str(one.graph), sizes, _number(one.tokens), one.decision, _at(one.reason, one.where)))
        tables += [_table(rows)] if self.routers else []
        return "\n\n".join(tables)


def _number(size: int | None) -> str:
    return "varies" if size is None else str(size)


def _at(reason: str, where: str | None) -> str:
    return reason if where is None else f"{reason} ({where})"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@dataclass(frozen=True)
class _Graph:
    """One graph: a call that lists its entries, the line of its code where it was traced (torch.compile), and its
    attention and routers."""

    entries: Callable[[], list[RewriteEntry]]
    frame: tuple[str, int] | None = None
    others: tuple[Others, ...] = ()


class _Graphs:
    """The graphs of one compiled function, its owner."""

    def __init__(self, owner: Any) -> None:
        self.owner = weakref.ref(owner)
        self.graphs: list[_Graph] = []


# Keyed by id(owner). A compiled function's owner is Thunder's compile data, or torch.compile's wrapper of a backend
# (which compares by value and has no hash).
_GRAPHS: dict[int, _Graphs] = {}


def _graphs_of(owner: Any) -> list[_Graph]:
    key = id(owner)
    if key not in _GRAPHS:
        _GRAPHS[key] = _Graphs(owner)
        weakref.finalize(owner, _GRAPHS.pop, key, None)
    return _GRAPHS[key].graphs


def record(
    owner: Any,
    decisions: list[Decision],
    frame: tuple[str, int] | None = None,
    others: Sequence[Others] = (),
) -> None:
    """Keeps what was decided on a graph's (gemm, decision, reason); warns while nothing at all was rewritten.

    Args:
        owner: of the compiled function (see _GRAPHS); None when it is not known.
        decisions: (gemm, decision, reason) of each grouped GEMM of the graph.
        frame: file and line of the code that the graph was traced from, where graphs can be shared by functions.
        others: what was decided on the graph's attention and routers; `graph` is set here.
    """
    graphs = _graphs_of(owner) if owner is not None else []
    entries = [RewriteEntry(len(graphs), *decision) for decision in decisions]
    # A fragment beside the experts is no reason to warn.
    silent = not entries and any(entry.rewritten for graph in graphs for entry in graph.entries())
    graphs.append(_Graph(lambda: entries, frame, tuple(replace(each, graph=len(graphs)) for each in others)))
    if silent or any(entry.rewritten for entry in entries):
        return
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.reason, []).append(entry.gemm.weight or "a weight")
    why = "; ".join(f"{_some(weights)}: {reason}" for reason, weights in names.items())
    why = why or "the graph has no call of torch.nn.functional.grouped_mm"
    warnings.warn(f"thunder_moe rewrote no expert GEMM: {why}", RewriteWarning, stacklevel=2)


def _some(names: list[str]) -> str:
    """At most four of these names."""
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def rewrite_report(compiled: Callable[..., Any]) -> RewriteReport:
    """Lists each grouped GEMM of a compiled module or function: sizes, decision, reason.

    Args:
        compiled: what ``thunder.jit(..., executors=[moe_executor])``, ``thunderfx(..., executors=[moe_executor])`` or
            ``torch.compile(..., backend="thunder_moe")`` returned, called at least once.

    Raises:
        ValueError: compiled is neither, or was not called yet.
    """
    if "thunder.dynamo" in sys.modules:
        from thunder.dynamo.compiler import ThunderFXCompiledObject

        compiled = compiled._func if isinstance(compiled, ThunderFXCompiledObject) else compiled
    if isinstance(compiled, torch.nn.Module) and compiled._compiled_call_impl is not None:
        module: Any = type(compiled)
        codes = [module.forward.__code__]
        compiled = compiled._compiled_call_impl  # of module.compile(), in place
    else:
        codes = _codes(compiled)
    owner = _torch_compile_owner(compiled)
    if owner is None and "thunder" in sys.modules:
        import thunder

        owner = thunder.compile_data(compiled)
    if owner is None:
        raise ValueError(f"compiled: got {type(compiled).__name__}, wanted what thunder.jit or torch.compile returned")
    # thunderfx's compiler is the backend that torch.compile wraps, and serves one function.
    known = [each for each in (owner, getattr(owner, "compiler_fn", None)) if id(each) in _GRAPHS]
    graphs = _GRAPHS[id(known[0])].graphs if known else _shared_graphs(owner, codes)
    if not graphs:
        raise ValueError("compiled: not called yet, or compiled without thunder_moe; call it once, then ask again")
    others = [entry for graph in graphs for entry in graph.others]
    return RewriteReport(
        tuple(entry for graph in graphs for entry in graph.entries()),
        tuple(entry for entry in others if isinstance(entry, AttentionEntry)),
        tuple(entry for entry in others if isinstance(entry, RouterEntry)),
    )


def _shared_graphs(owner: Any, codes: list[CodeType]) -> list[_Graph]:
    """The graphs that another torch.compile of the same code with the same options has made: dynamo shares them (the
    layers of a model, each compiled by itself, are one graph)."""
    if not isinstance(owner, torch._TorchCompileWrapper):
        return []
    lines = {(code.co_filename, line) for code in codes for _, _, line in code.co_lines()}
    others = [graphs for graphs in list(_GRAPHS.values()) if graphs.owner() == owner]
    return [graph for graphs in others for graph in graphs.graphs if graph.frame in lines]


def _codes(compiled: Any) -> list[CodeType]:
    """The code that torch.compile traces for a module or function."""
    original = getattr(compiled, "_orig_mod", None)
    function = getattr(compiled, "_torchdynamo_orig_callable", None) if original is None else type(original).forward
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return [] if code is None else [code]


def _torch_compile_owner(compiled: Any) -> Any:
    """The wrapper around the backend that torch.compile made for this module or function, None for anything else."""
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    code = getattr(compiled, "__code__", None)
    if callback is None and hasattr(compiled, "_torchdynamo_orig_callable") and code is not None:
        closure = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True))
        callback = closure["callback"].cell_contents if "callback" in closure else None
    while callback is not None and not isinstance(callback, torch._TorchCompileWrapper):
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return callback
