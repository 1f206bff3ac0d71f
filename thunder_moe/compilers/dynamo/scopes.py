"""Dynamo's graph and the graphs nested in it (bodies of checkpoint, cond, ...), each of them a scope for rewrites.
Called by rewrite.py, the finders and huggingface/generation.py; calls effects.py.

    root:  w, x, o = placeholders;  y = tag_activation_checkpoint(body, x, w.mT, o)
    body:                           x, w_mT, o = placeholders; grouped_mm(x, w_mT, o)

A nested graph reads what is handed to it: `Scope.thread_into_subgraph` hands an input of the root through to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from thunder_moe.compilers.dynamo.effects import grad_modes, program_of, storages_of
from thunder_moe.compilers.dynamo.nodes import value_of
from thunder_moe.compilers.safety import Program

# The operands of a higher-order operator that the placeholders of its bodies stand for: from a position on, or the
# sequence at one.
_OPERANDS = {"tag_activation_checkpoint": slice(1, None), "wrap": slice(1, None), "cond": 3}


@dataclass(eq=False)
class Scope:
    """A graph whose GEMMs may be rewritten."""

    module: fx.GraphModule
    modes: dict[fx.Node, bool]  # the grad mode of each node
    parent: Scope | None = None  # the scope of the operator that calls it, None for the root
    call: fx.Node | None = None  # that operator
    bodies: list[Scope] = field(default_factory=list)  # all scopes that it calls, this one among them
    refusal: str | None = None  # why GEMMs in here are not rewritten; None if they may be
    # the forward or backward of an `autograd.Function`, whose grad mode tells nothing
    differentiates_itself: bool = False
    children: dict[fx.Node, list[Scope]] = field(default_factory=dict)
    _threaded: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def __post_init__(self) -> None:
        self.positions = {node: position for position, node in enumerate(self.graph.nodes)}

    @cached_property
    def program(self) -> Program:
        """Return the graph as steps, in the order of `positions`. Ask for it before anything is rewritten."""
        nested = {
            call: [(body.program, body.input_storages) for body in bodies] for call, bodies in self.children.items()
        }
        return program_of(self.graph, self.modes, self.value_of, nested)

    def reason_against_fusing(
        self,
        nodes: Collection[Any],
        result: fx.Node,
        read: Mapping[str, Any],
        *,
        handed_on: str = "an intermediate",
        ignored: Collection[int] = (),
        again: bool = False,
    ) -> str | None:
        """Return `Program.reason_against_fusing` of some nodes, where one operator gives the `result` of one of them.

        It reads the nodes `read` in their stead, by the name for the report, in its backward `again`; `handed_on` is
        the name of what the nodes hand to each other. Storages of weights are `ignored`.
        """
        again = again and self.modes[result]
        names = {storage: name for name, node in read.items() for storage in storages_of(value_of(node))}
        inner = dict.fromkeys(storages_of([value_of(node) for node in nodes if node is not result]), handed_on)
        storages = {storage: name for storage, name in {**inner, **names}.items() if storage not in ignored}
        positions = {self.positions[node] for node in nodes}
        return self.program.reason_against_fusing(positions, storages, names if again else None)

    @cached_property
    def input_storages(self) -> frozenset[int]:
        """Return the storages of the graph's inputs and attributes before a rewrite."""
        inputs = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        return storages_of([self.value_of(node) for node in inputs])

    def value_of(self, node: fx.Node) -> Any:
        value = value_of(node)
        return attribute(self.module, str(node.target)) if value is None and node.op == "get_attr" else value

    def origin(self, node: fx.Node) -> fx.Node | None:
        """Return the root's input that a node is or is a view of; None if it is neither or unknown."""
        scope = self
        while scope.parent is not None or node.op not in ("placeholder", "get_attr"):
            if node.op == "placeholder":
                outer, operands = scope.parent, _operands(scope.call)
                assert outer is not None
                assert operands is not None  # the scope refuses everything otherwise
                node, scope = operands[scope.graph.find_nodes(op="placeholder").index(node)], outer
                continue
            storages = storages_of(scope.value_of(node))
            sources = [each for each in node.all_input_nodes if storages & storages_of(scope.value_of(each))]
            if len(sources) != 1:
                return None
            (node,) = sources
        return node

    def after_rewrite(self) -> Scope:
        """Return the scope of this graph after a rewrite."""
        first = next(iter(self.graph.nodes))
        return replace(self, modes=grad_modes(self.graph, self.modes.get(first, True)))

    def thread_into_subgraph(self, node: fx.Node) -> fx.Node:
        """Return an input of the root as a node of this scope, through further operands of the calls between."""
        if self.parent is None:
            return node
        if node not in self._threaded:
            assert self.call is not None
            _append_operand(self.call, self.parent.thread_into_subgraph(node))
            for body in self.bodies:
                last = body.graph.find_nodes(op="placeholder")[-1]
                with body.graph.inserting_after(last):
                    body._threaded[node] = body.graph.placeholder(node.name)
                body._threaded[node].meta["example_value"] = node.meta["example_value"]
        return self._threaded[node]


def scopes_of(gm: fx.GraphModule, grad_enabled: bool) -> list[Scope]:
    """Return the scope of dynamo's graph, called in a grad mode, then the scopes of all graphs nested in it."""
    root = Scope(gm, grad_modes(gm.graph, grad_enabled))
    return [root, *_nested_in(root)]


def _nested_in(outer: Scope) -> list[Scope]:
    found: list[Scope] = []
    names = Counter(node.target for node in outer.graph.find_nodes(op="get_attr"))
    for node in outer.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        gets = [source for source in node.all_input_nodes if source.op == "get_attr"]
        modules = {get: attribute(outer.module, get.target) for get in gets}
        bodies: list[Scope] = []
        for get, module in modules.items():
            if not isinstance(module, fx.GraphModule):
                continue
            kind = _name_of(node)
            refusal = outer.refusal
            if refusal is None and not _takes_operands(node, module):
                refusal = f"it is inside {kind}, whose body is left as it is"
            if refusal is None and (len(get.users) > 1 or names[get.target] > 1):
                refusal = f"it is inside a body that is called from elsewhere too, not by {kind} alone"
            itself = outer.differentiates_itself or kind == "autograd_function_apply"
            modes = grad_modes(module.graph, outer.modes[node])
            bodies.append(Scope(module, modes, outer, node, bodies, refusal, itself))
        if bodies:
            outer.children[node] = bodies
        for body in bodies:
            found += [body, *_nested_in(body)]
    return found


def _name_of(call: fx.Node) -> str:
    """Return the name of a higher-order operator."""
    target: Any = call.target
    return str(target.name())


def _operands(call: Any) -> tuple[Any, ...] | None:
    """Return the operands that become the placeholders of the bodies; None for an unknown higher-order operator."""
    place = _OPERANDS.get(_name_of(call))
    return None if place is None else tuple(call.args[place])


def _takes_operands(call: fx.Node, body: fx.GraphModule) -> bool:
    operands = _operands(call)
    placeholders = body.graph.find_nodes(op="placeholder")
    return operands is not None and bool(placeholders) and len(operands) == len(placeholders)


def _append_operand(call: Any, operand: fx.Node) -> None:
    place = _OPERANDS[_name_of(call)]
    if isinstance(place, slice):
        call.args = (*call.args, operand)
    else:
        call.update_arg(place, (*call.args[place], operand))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph module of the same parameters, with graphs of its own and what dynamo says of its inputs:
    dynamo goes on using its own graph after the backend returns."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
        # Dynamo takes it out of its own graph: a weak reference to a parameter, which forbids to swap its tensor.
        copies[node].meta.pop("grapharg", None)
    new = fx.GraphModule(gm, graph)
    new.meta = gm.meta
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(gm, name):
            setattr(new, name, getattr(gm, name))
    for name in {node.target for node in graph.find_nodes(op="get_attr")}:
        nested = attribute(gm, name)
        if isinstance(nested, fx.GraphModule):
            *path, last = name.split(".")
            setattr(attribute(new, ".".join(path)), last, copy_of(nested))
    return new


def attribute(module: Any, name: str) -> Any:
    """Return what a get_attr node gets: ``module.a.b`` for "a.b"; the module itself for ""."""
    for part in filter(None, name.split(".")):
        module = getattr(module, part)
    return module
