"""A graph of dynamo, rewritten and compiled: `compile_graph`, for whichever compiler is to compile it.
Called by backend.py and thunder/thunderfx.py; calls rewrite.py, report.py and the compiler that it is given.

graph of dynamo -> rewrite, report -> compiler. The packed weights have the layout that the kernels of
their device read best, an argument of the operators. At each call the packed weights come from the cache, so one graph
serves all layers that share it, changed and replaced weights are seen, and addresses stay (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.inputs import Rewritten, local_inputs, take_local_shards
from thunder_moe.compilers.dynamo.nodes import traced_frame
from thunder_moe.compilers.dynamo.rewrite import rewrite
from thunder_moe.compilers.dynamo.scopes import copy_of
from thunder_moe.compilers.eligibility import Format, choosing_format
from thunder_moe.compilers.report import Graph, record
from thunder_moe.compilers.safety import is_hidden_training_forward
from thunder_moe.kernels.slow_paths import warn_once

# Why a call runs dynamo's graph unchanged, see `_runner`.
_THAWED = "a weight that was frozen when the graph was compiled requires a gradient"
_SHARED = "an input that the graph changes shares its memory with a packed weight or another input"
_HIDDEN = "the forward of an autograd.Function (or a reentrant checkpoint) trains the weight"


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]],
    *,
    owner: Any,
    format: Format | None,
    option: str,
    attention: bool | None = None,
    dynamic: bool | None = None,
    note: str = "",
) -> Callable[..., Any]:
    """Rewrite a graph, compile the result, and return the callable that runs in place of the graph.

    Args:
        compile_: compiles the rewritten graph for some inputs, and later perhaps the original one.
        owner: to whom `rewrite_report` attributes the graph.
        format, option: as `choosing_format` takes them; `attention` as `rewrite` does.
        note: what the report adds to the reason of each GEMM that is rewritten.
    """
    gm, examples, local = take_local_shards(gm, example_inputs)
    new = copy_of(gm)
    with choosing_format(option, format):
        rewritten, decisions, attended = rewrite(new, example_inputs, attention, local)
    decisions = [(gemm, to, reason if to == "16-bit" else reason + note) for gemm, to, reason in decisions]
    compiled = compile_(new, rewritten.inputs(example_inputs, examples))
    # Reports show no graph that could not be compiled.
    graph = record(owner, decisions, traced_frame(gm.graph), attended)
    if not decisions and not attended:
        return _runner(rewritten, graph, compiled) if local else compiled
    if not rewritten.packs:
        run = _runner(rewritten, graph, compiled) if rewritten.watched or local else compiled
        return graph.counted(rewritten.told_by, run)
    original = copy_of(gm)
    for module in original.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.clear()
    in_16_bit = torch.compile(original, backend=compile_, dynamic=dynamic)
    return graph.counted(rewritten.told_by, _runner(rewritten, graph, compiled, in_16_bit))


def _runner(
    rewritten: Rewritten, graph: Graph, compiled: Callable[..., Any], in_16_bit: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return the callable that replaces dynamo's graph: it maps the inputs, and runs the rewritten graph `compiled`.

    `in_16_bit`, dynamo's graph, runs calls that have to be recognized one by one; None if no weight is packed:

    - training forwards: dynamo guards on the grad mode alone, and before torch 2.13 not on what its parameters require;
    - an input that the graph changes shares its memory with a packed weight, or with another input where it did not;
    - a weight holds NaN or Inf.
    """
    trained, writes = bool(rewritten.trained), bool(rewritten.written)  # a look at either takes 0.1 us of a call

    def run(*given: Any) -> Any:
        hidden = is_hidden_training_forward()
        reason = None
        if in_16_bit is not None:
            trains = hidden or torch.is_grad_enabled() or rewritten.enables_grad
            thawed = trains and rewritten.thawed(given)
            shares = writes and rewritten.writes_read(given)
            if shares:
                warn_once("shared", f"{_SHARED}: such calls run in 16 bits")
            hides = hidden and rewritten.watched
            reason = _THAWED if thawed else _SHARED if shares else _HIDDEN if hides else None
        if reason is None:
            try:
                inputs = rewritten.inputs(given)
            except ValueError as error:  # torch.empty that was not loaded yet, say
                reason = str(error)
                warn_once(reason, f"{reason}: calls run in 16 bits until it holds others")
        if hidden or trained:
            rewritten.declare_trained(given, hidden=hidden)
        if reason is None or in_16_bit is None:
            return compiled(*inputs)
        graph.calls_of(given).in_16_bit[reason] += 1
        return in_16_bit(*local_inputs(given, rewritten.local))

    return run
