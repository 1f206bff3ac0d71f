"""Maps the inputs of dynamo's graph to the rewritten graph's, at each call: packed weights replace 16-bit ones,
and local tensors replace DTensors.
Made by rewrite.py, called by compiled_graph.py; calls weight_cache.py, which packs, and scopes.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe import weight_cache
from thunder_moe.compilers.dynamo.effects import storages_of
from thunder_moe.compilers.dynamo.nodes import static_example, value_of
from thunder_moe.compilers.dynamo.scopes import Scope, copy_of
from thunder_moe.compilers.dynamo.sites import Weights
from thunder_moe.kernels.slow_paths import warn_once


@dataclass(frozen=True, eq=False)
class WeightInput:
    """A packed weight among the inputs of a rewritten graph, and the weights that it is made of: positions among the
    inputs of dynamo's graph, or tensors that this graph holds. `layout` and `format` describe the packed weight;
    `nodes` are the operators' weight arguments in the rewritten graph."""

    names: str
    weights: tuple[int | Tensor, ...]
    transposed: bool
    interleaved: int
    layout: str
    format: str
    nodes: tuple[fx.Node, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Return the operators' keyword arguments that are about the weight."""
        return dict(layout=self.layout)

    def operator(self, stem: str) -> Any:
        """Return the operator that takes the weight, by the end of its name."""
        return getattr(torch.ops.thunder_moe, f"f16a_{self.format}weight_{stem}").default

    def example(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the operators' weight arguments; of zeros where a weight that is not loaded yet holds NaN or Inf."""
        with contextlib.suppress(ValueError):
            return self(inputs)
        zeros = [torch.zeros_like(weight_cache.local_data(weight)) for weight in _given(self.weights, inputs)]
        return replace(self, weights=tuple(zeros))(())

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the operators' weight arguments."""
        return weight_cache.operands(
            *_given(self.weights, inputs),
            transposed=self.transposed,
            interleaved=self.interleaved,
            layout=self.layout,
            format=self.format,
            names=self.names,
        )


def memory_of_inputs(root: Scope, weights: Weights) -> dict[str, Any]:
    """Return `written`, `compared` and `aliases` of a graph that is not rewritten yet."""
    inputs = [(at, node) for at, node in enumerate(root.graph.find_nodes(op="placeholder")) if node in weights.tensors]
    storages = {at: storages_of(root.value_of(node)) for at, node in inputs}
    together = frozenset[int]().union(*storages.values())
    changing = [step for step in root.program.steps if step.changes(together)]
    written = {at for at, own in storages.items() if any(step.changes(own) for step in changing)}
    compared = tuple(at for at, node in inputs if at in written or not weights.is_static(node))
    aliases = frozenset((a, b) for a, b in combinations(compared, 2) if storages[a] & storages[b])
    return dict(written=frozenset(written), compared=compared, aliases=aliases)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """The inputs of a rewritten graph: the kept inputs of dynamo's graph (`given` below), then the packed weights."""

    kept: list[int]  # positions
    packs: list[WeightInput]
    trained: tuple[int | Tensor, ...]  # weights that stay 16-bit because they are being trained
    # all weights that require a gradient; they are being trained if a forward hides its grad mode
    watched: tuple[int | Tensor, ...]
    frozen: tuple[int | Tensor, ...]  # packed weights that require no gradient
    enables_grad: bool  # gradients are disabled outside of the graph and enabled at the GEMM of a packed weight
    # the weight that identifies the calling model among the models that share the graph; None without one
    told_by: int | Tensor | None
    written: frozenset[int] = frozenset()  # positions of the inputs that the graph or one nested in it changes in place
    compared: tuple[int, ...] = ()  # `written`, and the positions of all other inputs but parameters and buffers
    # pairs of `compared` that shared their memory when the graph was analysed, the lower position first
    aliases: frozenset[tuple[int, int]] = frozenset()
    local: frozenset[int] = frozenset()  # positions of the DTensors that the graph takes local shards of

    def inputs(self, given: Sequence[Any], examples: Sequence[Any] | None = None) -> list[Any]:
        """Return the inputs; where the graph is compiled for `examples`, of zeros where weights cannot be packed yet.

        `examples` are `given` with the local tensors that the graph takes."""
        packed = [tensor for pack in self.packs for tensor in (pack if examples is None else pack.example)(given)]
        taken = local_inputs(given, self.local) if examples is None else examples
        return [taken[position] for position in self.kept] + packed

    def writes_read(self, given: Sequence[Any]) -> bool:
        """True if an input that the graph changes in place shares its memory with a packed weight, which is then out of
        date. Also True if it shares its memory with another input, but did not when the graph was analysed. Dynamo
        guards on neither."""
        owners: dict[int, list[int]] = {}
        written, aliases = self.written, self.aliases
        for position in self.compared:
            for storage in _storages_of(given[position]):
                others = owners.setdefault(storage, [])
                for other in others:
                    if (other, position) not in aliases and not written.isdisjoint((other, position)):
                        return True
                others.append(position)
        weights = (weight for pack in self.packs for weight in _given(pack.weights, given))
        return any(
            not written.isdisjoint(owners.get(storage, ())) for weight in weights for storage in _storages_of(weight)
        )

    def thawed(self, given: Sequence[Any]) -> bool:
        """True if packed weights that were frozen require a gradient now: then it tells the user and the cache. Dynamo
        before torch 2.13 does not check parameters again while their module keeps them."""
        weights = [weight for weight in _given(self.frozen, given) if weight.requires_grad]
        if weights:
            warn_once(
                "thawed",
                "a weight that was frozen when its graph was compiled requires a gradient now, and this torch does not"
                " compile the graph again: it runs in 16 bits; torch._dynamo.reset() has it compiled anew",
            )
            weight_cache.changed(*weights)
        return bool(weights)

    def declare_trained(self, given: Sequence[Any], *, hidden: bool) -> None:
        """Tell the weight cache that weights may change after this forward."""
        weight_cache.changed(*_given(self.watched if hidden else self.trained, given))


def _storages_of(value: Any) -> Collection[int]:
    """Return `storages_of` a value, 5 times faster for plain tensors: this is asked at every call."""
    if type(value) in (Tensor, torch.nn.Parameter):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            return (value.untyped_storage()._cdata,)
    return storages_of(value)


def _given(weights: Sequence[int | Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    return [inputs[weight] if isinstance(weight, int) else weight for weight in weights]


# ---- DTensors: of the weights of `thunder_moe.parallel` the graph reads ``to_local()`` alone. The local tensor in the
# place of one is a plain weight to the rewrite, and to compilers that know no DTensors.


def take_local_shards(
    gm: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Sequence[Any], frozenset[int]]:
    """Return a graph that takes local tensors, its example inputs, and the positions of these tensors.

    They replace DTensors if the graph reads nothing of them but ``to_local()``. Without such DTensors, graph and inputs
    are returned unchanged."""
    pairs = enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    sharded = [(at, node) for at, (node, value) in pairs if weight_cache.local_data(value) is not value]
    local = frozenset(at for at, node in sharded if _reads_local_alone(node))
    if not local:
        return gm, inputs, local
    gm, inputs = copy_of(gm), list(inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for at in sorted(local):
        node, value = placeholders[at], inputs[at]
        # Compilers give symbolic sizes to tensors that dynamo does not know, and to bases of views.
        inputs[at] = weight_cache.local_data(value).data.requires_grad_(value.requires_grad)
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
