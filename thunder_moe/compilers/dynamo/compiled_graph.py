"""A graph of dynamo, rewritten and compiled: `compile_graph`, for whichever compiler is to compile it.
Called by backend.py and thunder/thunderfx.py; calls rewrite.py, report.py and the compiler that it is given.

graph of dynamo -> rewrite, report -> compiler. The layout of the packed weights is that which the kernels of
their device read best, an argument of the operators. At each call the packed weights come from the cache, so one graph
serves all layers that share it, changed and replaced weights are seen, and addresses stay (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.rewrite import Rewritten, rewrite
from thunder_moe.compilers.dynamo.scopes import copy_of
from thunder_moe.compilers.dynamo.sites import traced_frame
from thunder_moe.compilers.eligibility import Format, choosing_format
from thunder_moe.compilers.report import record
from thunder_moe.compilers.safety import is_hidden_training_forward

__all__ = ["compile_graph"]


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
    """Rewrites a graph and compiles the result.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs; parameters are the real ones.
        compile_: compiles a graph for inputs; it gets the rewritten graph, and later maybe the original one.
        owner: to whom `rewrite_report` attributes the graph.
        format: the number format of the weights, or a function that names one.
        option: the name of the option that gave the format, for errors.
        attention: whether attention that repeats keys and values is rewritten; None: on CUDA.
        dynamic: as torch.compile's.
        note: what the report adds to the reason of each GEMM that is rewritten.

    Returns:
        What runs in place of the graph.
    """
    new = copy_of(gm)
    with choosing_format(option, format):
        rewritten, decisions, attended = rewrite(new, example_inputs, attention)
    decisions = [(gemm, to, reason if to == "16-bit" else reason + note) for gemm, to, reason in decisions]
    record(owner, decisions, traced_frame(gm.graph), attended)
    compiled = compile_(new, rewritten.inputs(example_inputs))
    if not rewritten.packs:
        return _runner(rewritten, compiled) if rewritten.watched else compiled
    original = copy_of(gm)
    for module in original.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.clear()
    return _runner(rewritten, compiled, torch.compile(original, backend=compile_, dynamic=dynamic))


def _runner(
    rewritten: Rewritten, compiled: Callable[..., Any], in_16_bit: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The callable that replaces dynamo's graph.

    Args:
        rewritten: how the inputs become those of the rewritten graph.
        compiled: the rewritten graph.
        in_16_bit: dynamo's graph, for calls that nothing but a look at each can tell from others: training forwards
            (dynamo guards on the grad mode alone, and before torch 2.13 not on what its parameters require), and those
            given an input that the graph changes and that shares its memory with a packed weight, or with another input
            where it did not before. None where no weight is packed.
    """

    def run(*given: Any) -> Any:
        hidden = is_hidden_training_forward()
        if in_16_bit is not None:
            trains = hidden or torch.is_grad_enabled() or rewritten.enables_grad
            thawed = trains and rewritten.is_thawed(given)
            if thawed:
                rewritten.declare_thawed(given)
            shares = rewritten.writes_read(given)
            if shares:
                rewritten.declare_shared()
            if thawed or shares or (hidden and rewritten.watched):
                rewritten.declare_trained(given, hidden=hidden)
                return in_16_bit(*given)
        inputs = rewritten.inputs(given)
        rewritten.declare_trained(given, hidden=hidden)
        return compiled(*inputs)

    return run
