"""Proves that a mask of dynamo's graph is the causal one in every call: query i reads the keys 0 to i.
Called by attention.py; calls effects.py, and runs the part of the graph that makes the mask.

A mask that is computed from sizes alone is the same in all calls: it is computed here, once. So transformers asks of
each prompt without a cache where other texts begin in its `position_ids`, although it has made them by arange itself.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thunder_moe.compilers.dynamo.effects import grad_modes, program_of, storages_of
from thunder_moe.compilers.dynamo.nodes import value_of

__all__ = ["is_causal_mask"]

# What masks are made of: same inputs, same numbers. All functions are torch's or the operators of Python.
_PURE = {
    "add", "and_", "arange", "cumsum", "diff", "eq", "expand", "floordiv", "ge", "getitem", "gt", "le", "lt", "ne",
    "new_ones", "ones", "or_", "reshape", "sub", "to", "tril", "unsqueeze", "view", "zeros",
}  # fmt: skip
_MOST = 2**30  # elements of the mask: a few GB of memory while the graph is compiled


def is_causal_mask(mask: fx.Node) -> bool:
    """True if a mask is (B, H, Q, L), bool, and lets query i read the keys 0 to i alone, in all calls of the graph.

    Args:
        mask: a node with an example value.
    """
    value = value_of(mask)
    if not isinstance(value, Tensor) or value.dtype != torch.bool or value.ndim != 4 or value.device.type == "meta":
        return False
    nodes = _made_from_sizes(mask)
    if nodes is None or value.numel() > _MOST:
        return False
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[mask])
    with unset_fake_temporarily(), torch.no_grad():
        made = fx.Interpreter(fx.GraphModule({}, graph)).run()
        causal = torch.ones(made.shape[2:], dtype=torch.bool, device=made.device).tril()
        return torch.equal(made, causal.expand_as(made))


def _made_from_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that compute a mask, in order; None if it depends on an input, or if any node changes it."""
    needed, waiting = set[fx.Node](), [mask]
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        value, target = value_of(node), node.target
        name = str(target if node.op == "call_method" else getattr(target, "__name__", ""))
        known = node.op == "call_method" or target in (getattr(torch, name, None), getattr(operator, name, None))
        if name not in _PURE or not known or not isinstance(value, Tensor):
            return None
        needed.add(node)
        waiting += node.all_input_nodes
    storages = storages_of([value_of(node) for node in needed])
    program = program_of(mask.graph, grad_modes(mask.graph, True), value_of, {})
    if program.writer(storages) is not None:
        return None
    return [node for node in mask.graph.nodes if node in needed]
