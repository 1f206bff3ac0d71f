"""Local tensors of DTensors as inputs of a graph: `take_local_shards` rewrites the graph, `local_inputs` maps a call.
Called by compiled_graph.py and inputs.py; calls nodes.py and scopes.py.

The graph reads ``to_local()`` alone of a DTensor that is a weight of `thunder_moe.parallel`. The local tensor in its
place is a plain weight to the rewrite, and to compilers that know no DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from thunder_moe.compilers.dynamo.nodes import static_example, value_of
from thunder_moe.compilers.dynamo.scopes import copy_of
from thunder_moe.weight_cache import local_data

__all__ = ["local_inputs", "take_local_shards"]


def take_local_shards(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Sequence[Any], frozenset[int]]:
    """Return a graph that takes local tensors, its example inputs, and the positions of these tensors.

    They replace DTensors if the graph reads nothing of them but ``to_local()``. Without such DTensors, graph and inputs
    are returned unchanged."""
    pairs = enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    local = frozenset(at for at, (node, value) in pairs if local_data(value) is not value and _reads_local_alone(node))
    if not local:
        return gm, inputs, local
    gm, inputs = copy_of(gm), list(inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for at in sorted(local):
        node, value = placeholders[at], inputs[at]
        # Compilers give symbolic sizes to tensors that dynamo does not know, and to bases of views.
        inputs[at] = local_data(value).data.requires_grad_(value.requires_grad)
        node.meta["static_example"], _ = static_example(inputs[at], node.name)  # the fake mode has a weak reference
        for user in list(node.users):
            node.meta["example_value"] = value_of(user)  # whose storage its views have
            user.replace_all_uses_with(node)
            gm.graph.erase_node(user)
    gm.recompile()
    return gm, inputs, local


def _reads_local_alone(node: fx.Node) -> bool:
    """True if ``to_local()`` without arguments is all that reads a node."""
    calls = [(user.op, user.target, user.args, user.kwargs) for user in node.users]
    return bool(calls) and all(call == ("call_method", "to_local", (node,), {}) for call in calls)


def local_inputs(given: Sequence[Any], local: frozenset[int]) -> Sequence[Any]:
    """Return the inputs of a graph, with local tensors at the positions `local`; gradients reach the DTensors."""
    return [value.to_local() if at in local else value for at, value in enumerate(given)] if local else given
