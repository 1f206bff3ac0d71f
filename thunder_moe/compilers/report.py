"""Reports of the compile-time rewrite: `rewrite_report(compiled)`, and the warning when nothing was rewritten.
Called by users, and by dynamo/ and thunder/, which record here; calls thunder.compile_data.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from thunder_moe.compilers.eligibility import Decision, GroupedGemm


class RewriteWarning(UserWarning):
    """Warns of a compilation in which no expert GEMM was rewritten."""


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
    """One call of scaled_dot_product_attention in a graph of torch.compile: of new tokens, or with repeated keys."""

    graph: int  # which of the function's graphs, 0 for the first one compiled
    heads: int  # the number of heads of the query
    key_heads: int  # the number of heads of keys and values, before they are repeated
    head_dim: int  # width of a head of the keys
    keys: int | None  # their number, None if it varies from call to call
    # "fused" (the operator `decode_attention`), "grouped" (the heads of a group read the same keys), or "repeated"
    decision: str
    reason: str
    where: str | None = None  # file:line of the call, where the compiler tells


@dataclass(frozen=True)
class RouterEntry:
    """One router in a graph of torch.compile: softmax and top-k."""

    graph: int  # which of the function's graphs, 0 for the first one compiled
    experts: int  # E
    top_k: int  # the experts of a token
    tokens: int | None  # T, None if it varies from call to call
    decision: str  # "moe_router" or "as written"
    reason: str
    where: str | None = None  # file:line of the call of torch.topk, where the compiler tells


Others = AttentionEntry | RouterEntry


@dataclass(frozen=True)
class GraphCalls:
    """Counts how often a graph of torch.compile ran with the weights of the compiled module or function.

    Attributes:
        graph: which of the function's graphs, 0 for the first one compiled.
        calls: how often it was called, since these weights have their present memory.
        in_16_bit: how many of these calls ran the program as written, by reason.
    """

    graph: int
    calls: int
    in_16_bit: Mapping[str, int]

    def __str__(self) -> str:
        declined = "".join(f"; {count} in 16 bits: {reason}" for reason, count in self.in_16_bit.items())
        return f"graph {self.graph}: calls: {self.calls}{declined}"


@dataclass(frozen=True)
class RewriteReport:
    """The grouped GEMMs of all graphs of a compiled function; prints as a table.

    Attributes:
        entries: the grouped GEMMs, over which it iterates too.
        attention: attention of new tokens that became one operator, and attention that repeats keys and values, or
            would have without the rewrite.
        routers: softmax and top-k that `moe_router` computes, or could.
        calls: the calls of each graph of torch.compile with entries. A call that is not among them ran another program:
            in `torch.func` transforms, for one, or inside of a function that another backend compiles.
    """

    entries: tuple[RewriteEntry, ...]
    attention: tuple[AttentionEntry, ...] = ()
    routers: tuple[RouterEntry, ...] = ()
    calls: tuple[GraphCalls, ...] = ()

    @property
    def rewritten(self) -> tuple[RewriteEntry, ...]:
        """Return the entries that run in NVFP4."""
        return tuple(entry for entry in self.entries if entry.rewritten)

    def __iter__(self) -> Iterator[RewriteEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        gemms = [
            (e.graph, e.gemm.weight or "?", f"{e.gemm.experts} x {e.gemm.out_features} x {e.gemm.in_features}",
             e.gemm.rows, e.decision, _at(e.reason, e.gemm.where))
            for e in self.entries
        ]  # fmt: skip
        attention = [
            (a.graph, f"{a.heads} / {a.key_heads} x {a.head_dim}", a.keys, a.decision, _at(a.reason, a.where))
            for a in self.attention
        ]
        routers = [
            (r.graph, f"{r.experts} / {r.top_k}", r.tokens, r.decision, _at(r.reason, r.where)) for r in self.routers
        ]
        tables = [
            _table(("graph", "weight", "experts x out x in", "rows", "decision", "reason"), gemms),
            _table(("graph", "heads / key heads x width", "keys", "attention", "reason"), attention),
            _table(("graph", "experts / top-k", "tokens", "router", "reason"), routers),
        ]
        uncounted = "not counted: calls in torch.func transforms and functions of other backends, which run as written"
        tables += ["\n".join([*map(str, self.calls), uncounted])] if self.calls else []
        return "\n\n".join(["no grouped GEMM was compiled"] * (not gemms) + list(filter(None, tables)))


def _at(reason: str, where: str | None) -> str:
    return reason if where is None else f"{reason} ({where})"


def _table(head: tuple[str, ...], entries: Sequence[tuple[Any, ...]]) -> str:
    """Return a table, "" if it has no entries; a size that varies is None."""
    rows = [head, *(["varies" if cell is None else str(cell) for cell in entry] for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) if entries else ""


@dataclass
class Calls:
    """The calls of a graph with one model's weights: their number, and how many ran in 16 bits, by reason."""

    storage: Any = None  # keeps the weak reference, whose callback forgets the weight
    count: int = 0
    in_16_bit: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Graph:
    """One graph."""

    entries: list[RewriteEntry]  # its grouped GEMMs
    frame: tuple[str, int] | None = None  # the line of the code where it was traced (torch.compile)
    others: tuple[Others, ...] = ()  # its attention and routers
    # the position among the inputs of a weight that tells apart the models that share the graph
    told_by: int | None = None
    all_calls: Calls | None = None  # the calls of a graph without such an input
    calls: dict[int, Calls] = field(default_factory=dict)  # by the id of that weight

    def counted(self, told_by: int | torch.Tensor | None, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable of the graph, which counts its calls from now on. 0.15 us (Zen 5).

        `told_by` is the position of a weight among the inputs, a weight that the graph holds, or None without one.
        """
        if isinstance(told_by, int):
            self.told_by = told_by
        else:
            self.all_calls = Calls() if told_by is None else self._calls_with(told_by)
        position: Any = told_by
        all_calls, known = self.all_calls, self.calls.get

        def counted(*given: Any) -> Any:
            calls = all_calls or known(id(given[position])) or self.calls_of(given)
            calls.count += 1
            return run(*given)

        return counted

    def calls_of(self, given: Sequence[Any]) -> Calls:
        """Return the calls with the weight that is among these inputs."""
        return self._calls_with(given[self.told_by]) if self.told_by is not None else self.all_calls or Calls()

    def _calls_with(self, weight: torch.Tensor) -> Calls:
        """Return the calls with a weight, which are forgotten with its memory: its id may then be another weight's."""
        key, calls = id(weight), self.calls
        if key not in calls:
            calls[key] = Calls(weakref.ref(weight.untyped_storage(), lambda _: calls.pop(key, None)))
        return calls[key]


# id(owner) -> a weak reference to the owner of a compiled function, and its graphs. An owner is Thunder's compile data,
# or torch.compile's wrapper of a backend (which compares by value and has no hash).
_GRAPHS: dict[int, tuple[weakref.ref[Any], list[Graph]]] = {}


def _graphs_of(owner: Any) -> list[Graph]:
    """Return the list of an owner's graphs."""
    if owner is None:
        return []
    key = id(owner)
    if key not in _GRAPHS:
        _GRAPHS[key] = weakref.ref(owner), []
        weakref.finalize(owner, _GRAPHS.pop, key, None)
    return _GRAPHS[key][1]


def record(
    owner: Any, decisions: list[Decision], frame: tuple[str, int] | None = None, others: Sequence[Others] = ()
) -> Graph:
    """Keep what was decided on the grouped GEMMs of an owner's graph, and on others; warn while nothing was rewritten.

    The owner (see _GRAPHS) is None if it is unknown. `frame` is the line that a graph which functions may share was
    traced from.
    """
    graphs = _graphs_of(owner)
    entries = [RewriteEntry(0, *decision) for decision in decisions]
    # A fragment beside the experts does not deserve a warning.
    silent = not entries and any(entry.rewritten for graph in graphs for entry in graph.entries)
    graphs.append(new := Graph(entries, frame, tuple(others)))
    if silent or any(entry.rewritten for entry in entries):
        return new
    names: dict[str, list[str]] = {}
    for entry in entries:
        names.setdefault(entry.reason, []).append(entry.gemm.weight or "a weight")
    why = "; ".join(f"{_some(weights)}: {reason}" for reason, weights in names.items())
    why = why or "the graph has no call of torch.nn.functional.grouped_mm"
    warnings.warn(f"thunder_moe rewrote no expert GEMM: {why}", RewriteWarning, stacklevel=2)
    return new


def _some(names: list[str]) -> str:
    """Return at most four of these names."""
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def rewrite_report(compiled: Callable[..., Any]) -> RewriteReport:
    """List each grouped GEMM of a compiled module or function: sizes, decision, reason.

    torch.compile shares graphs: of two modules of one class, or two functions of the same code, that are compiled with
    the same options. The report has the graphs that ran with the weights of this module, or of the modules that this
    function closes over. Two compiled copies of one module have one report, and so have compiled copies of a function
    that gets its model as an argument.

    Args:
        compiled: what ``thunder.jit(..., executors=[moe_executor])``, ``thunderfx(..., executors=[moe_executor])`` or
            ``torch.compile(..., backend="thunder_moe")`` returned, called at least once.

    Raises:
        ValueError: compiled is neither, or was not called yet.
    """
    if "thunder.dynamo" in sys.modules:
        from thunder.dynamo.compiler import ThunderFXCompiledObject

        compiled = compiled._func if isinstance(compiled, ThunderFXCompiledObject) else compiled
    original: Any = getattr(compiled, "_orig_mod", getattr(compiled, "_torchdynamo_orig_callable", None))
    # A method that the class has compiled has one owner for all its instances.
    instance = compiled.__self__ if inspect.ismethod(compiled) else None
    if isinstance(compiled, torch.nn.Module) and compiled._compiled_call_impl is not None:
        original, compiled = compiled, compiled._compiled_call_impl  # of module.compile(), in place
    elif instance is not None:
        original = functools.partial(original, instance)
    owner = _torch_compile_owner(compiled)
    if owner is None and "thunder" in sys.modules:
        import thunder

        owner = thunder.compile_data(compiled)
    if owner is None:
        raise ValueError(f"compiled: got {type(compiled).__name__}, wanted what thunder.jit or torch.compile returned")
    # thunderfx's compiler is the backend that torch.compile wraps, and serves one function.
    owner = next((each for each in (owner, getattr(owner, "compiler_fn", None)) if id(each) in _GRAPHS), owner)
    tensors = _tensors(original)
    found = _graphs_run_by(owner, original, tensors, is_owned=instance is None)
    if not found:
        raise ValueError("compiled: not called yet, or compiled without thunder_moe; call it once, then ask again")
    others = [replace(entry, graph=number) for number, graph in enumerate(found) for entry in graph.others]
    return RewriteReport(
        tuple(replace(entry, graph=number) for number, graph in enumerate(found) for entry in graph.entries),
        tuple(entry for entry in others if isinstance(entry, AttentionEntry)),
        tuple(entry for entry in others if isinstance(entry, RouterEntry)),
        tuple(_calls(number, graph, tensors) for number, graph in enumerate(found) if graph.calls or graph.all_calls),
    )


def _calls(number: int, graph: Graph, tensors: set[int]) -> GraphCalls:
    """Return the calls of a graph with these tensors, all its calls where it met none of them."""
    known = dict(graph.calls)
    calls = [known[key] for key in known.keys() & tensors] or list(known.values()) or [graph.all_calls or Calls()]
    in_16_bit = sum((each.in_16_bit for each in calls), Counter[str]())
    return GraphCalls(number, sum(each.count for each in calls), dict(in_16_bit))


def _graphs_run_by(owner: Any, original: Any, tensors: set[int], *, is_owned: bool) -> list[Graph]:
    """Return the graphs of an owner, and related graphs of other torch.compile calls with the same options.

    Related are graphs that were called with these tensors, and graphs of the same code without weights."""
    own = list(_GRAPHS[id(owner)][1]) if id(owner) in _GRAPHS and is_owned else []
    if not isinstance(owner, torch._TorchCompileWrapper):
        return own
    lines = {(code.co_filename, line) for code in _codes(original) for _, _, line in code.co_lines()}
    same = [graph for known, graphs in list(_GRAPHS.values()) if known() == owner for graph in graphs]
    # A graph of other code may come from the same module compiled by itself, or from a part behind a graph break.
    of_code = [graph for graph in same if graph.frame in lines and graph not in own]
    met = [graph for graph in same if tensors & set(graph.calls)]
    no_weight = [graph for graph in of_code if graph.told_by is None and not graph.calls]
    found = own + [graph for graph in of_code if graph in met or graph in no_weight or not tensors]
    return found if any(graph.entries for graph in found) else found + [g for g in met if g not in found]


def _tensors(original: Any) -> set[int]:
    """Return the ids of the tensors that a module holds, or that a function, a method or a partial closes over."""
    if isinstance(original, functools.partial):
        closed = tree_leaves([original.args, original.keywords])
        return {*_tensors(original.func), *itertools.chain.from_iterable(map(_tensors, closed))}
    if isinstance(original, torch.Tensor):
        return {id(original)}
    if isinstance(original, torch.nn.Module):
        held = [vars(part) | part._parameters | part._buffers for part in original.modules()]
        return {id(value) for values in held for value in values.values() if isinstance(value, torch.Tensor)}
    if inspect.ismethod(original):
        return _tensors(original.__self__)
    cells = (getattr(original, "__closure__", None) or ()) if inspect.isfunction(original) else ()
    closed = tree_leaves([cell.cell_contents for cell in cells])
    kinds = (torch.Tensor, torch.nn.Module, functools.partial)
    return set(itertools.chain.from_iterable(_tensors(each) for each in closed if isinstance(each, kinds)))


def _codes(original: Any) -> list[CodeType]:
    """Return the code that torch.compile traces for a module or function."""
    while isinstance(original, functools.partial):
        original = original.func
    function = type(original).forward if isinstance(original, torch.nn.Module) else original
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return [] if code is None else [code]


def _torch_compile_owner(compiled: Any) -> Any:
    """Return the wrapper of the backend that torch.compile made for a module or function, None for anything else."""
    callback = getattr(getattr(compiled, "dynamo_ctx", None), "callback", None)
    code = getattr(compiled, "__code__", None)
    if callback is None and hasattr(compiled, "_torchdynamo_orig_callable") and code is not None:
        closure = dict(zip(code.co_freevars, compiled.__closure__ or (), strict=True))
        callback = closure["callback"].cell_contents if "callback" in closure else None
    return torch_compile_wrapper(callback)


def torch_compile_wrapper(callback: Any) -> Any:
    """Return the wrapper that torch.compile made of a backend, behind dynamo's own; None for another callback."""
    while callback is not None and not isinstance(callback, torch._TorchCompileWrapper):
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return callback
