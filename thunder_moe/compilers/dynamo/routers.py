"""Finds routers written in torch's operations, and puts `moe_router` in their place.
Called by rewrite.py; calls routers.py for what they look like, scopes.py, sites.py, and safety.py for the operations
between.

    values, ids = softmax(logits, float32).topk(A);  values / values.sum(-1, keepdim=True)
    = scores, ids, _, _, _ = moe_router(logits, top_k=A, ...)

torch.topk is two launches, and no compiler fuses it with what is around it. The choice is the same but for equal
probabilities, of which torch.topk takes any. Legend: T tokens, E experts, A = top_k.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_moe.compilers.dynamo.dense_experts import Routing
from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.sites import calls, user_line
from thunder_moe.compilers.eligibility import EXPERTS
from thunder_moe.compilers.report import RouterEntry
from thunder_moe.compilers.routers import ROUTER_DTYPES, RouterMatch, limits_of_kernels, match_router
from thunder_moe.compilers.safety import Program
from thunder_moe.ops.experts import moe_experts  # noqa: F401  (registers the operator)
from thunder_moe.ops.route import moe_route  # noqa: F401  (registers the operator)
from thunder_moe.ops.router import moe_router  # noqa: F401  (registers the operator)

__all__ = ["Router", "call_router", "dense_router", "find_routers", "fuse_router", "share_orders"]

_OPS = torch.ops.thunder_moe
aten = torch.ops.aten
_TOPK = {torch.topk, aten.topk.default, "topk"}
_ROUTE, _ROUTER = ({operation, operation.default} for operation in (_OPS.moe_route, _OPS.moe_router))
_EXPERTS = {each for name in EXPERTS for operation in (getattr(_OPS, name),) for each in (operation, operation.default)}
_SAME_IDS = {
    torch.reshape,
    aten.view.default,
    aten.reshape.default,
    "view",
    "reshape",
    "flatten",
    "unsqueeze",
    "contiguous",
}
_CLAMP = {torch.clamp, aten.clamp.default, "clamp"}

# Kind of an operation (see `routers.RouterGraph`) -> the names of its arguments, and the functions and methods that are
# of it. Of softmax's, the third is a stack level in F.softmax and the dtype in the others; neither matters here.
_KINDS: dict[str, tuple[tuple[str, ...], set[Any]]] = {
    "softmax": (
        ("input", "dim", "dtype", "_stacklevel"),
        {F.softmax, torch.softmax, aten.softmax.int, aten._softmax.default, "softmax"},
    ),
    "sigmoid": (("input",), {torch.sigmoid, F.sigmoid, torch.special.expit, aten.sigmoid.default, "sigmoid"}),
    "topk": (("input", "k", "dim", "largest", "sorted"), _TOPK),
    "max": (
        ("input", "dim", "keepdim"),
        {torch.max, torch.amax, aten.max.dim, aten.amax.default, "max", "amax"},
    ),
    "sum": (("input", "dim", "keepdim", "dtype"), {torch.sum, aten.sum.dim_IntList, "sum"}),
    "add": (("input", "other"), {operator.add, operator.iadd, torch.add, aten.add.Tensor, "add", "add_"}),
    "div": (
        ("input", "other"),
        {operator.truediv, operator.itruediv, torch.div, torch.true_divide, aten.div.Tensor, "div", "div_"},
    ),
    "mul": (("input", "other"), {operator.mul, operator.imul, torch.mul, aten.mul.Tensor, "mul", "mul_"}),
    "gather": (("input", "dim", "index"), {torch.gather, aten.gather.default, "gather"}),
    "scatter": (
        ("input", "dim", "index", "value"),
        {torch.scatter, aten.scatter.value, aten.scatter_.value, "scatter", "scatter_"},
    ),
    "zeros": (("input",), {torch.zeros_like, torch.zeros, aten.zeros_like.default, "new_zeros"}),
    "masked_fill": (
        ("input", "mask", "value"),
        {torch.masked_fill, aten.masked_fill.Scalar, "masked_fill", "masked_fill_"},
    ),
    "where": (("condition", "input", "other"), {torch.where, aten.where.self, aten.where.ScalarOther}),
    "not": (
        ("input",),
        {operator.invert, operator.inv, torch.bitwise_not, torch.logical_not, "bitwise_not", "logical_not"},
    ),
    "nonzero": (("input", "other"), {operator.gt, operator.ne, torch.gt, torch.ne, "gt", "ne"}),
    "repeat_interleave": (
        ("input", "repeats", "dim"),
        {torch.repeat_interleave, aten.repeat_interleave.self_int, "repeat_interleave"},
    ),
    "clamp": (("input", "min", "max"), {torch.clamp, torch.clamp_min, aten.clamp.default, "clamp", "clamp_min"}),
    "detach": (("input",), {torch.detach, aten.detach.default, "detach"}),
    "cast": (("input",), {"to", "type", "type_as", "float", "half", "bfloat16", "bool", aten._to_copy.default}),
    "view": (
        ("input",),
        {torch.reshape, torch.unsqueeze, torch.flatten, torch.unflatten, "view", "reshape", "unsqueeze", "flatten"}
        | {"unflatten", "contiguous", aten.view.default, aten.reshape.default, aten.unsqueeze.default},
    ),
    "expand": (("input",), {"expand", "expand_as", aten.expand.default}),
}  # fmt: skip
_KIND_OF = {target: kind for kind, (_, targets) in _KINDS.items() for target in targets}
_IN_PLACE = {operator.iadd, operator.itruediv, operator.imul, aten.scatter_.value}
_IN_PLACE |= {name for name in _KIND_OF if isinstance(name, str) and name.endswith("_")}
_BY_RESULT = ("cast", "view", "expand", "zeros")  # judged by their results, whatever else they are given
_NAMES = {"self": "input", "axis": "dim", "src": "value", "keepdims": "keepdim"}


class _Graph:
    """A graph of dynamo as a `RouterGraph`: operations and tensors are its nodes."""

    def __init__(self, scope: Scope) -> None:
        self.positions = scope.positions

    def maker(self, tensor: Any) -> Any:
        if calls(tensor, {operator.getitem}) and self._is_result(tensor):
            return tensor.args[0]
        return tensor

    def _is_result(self, node: Any) -> bool:
        source, index = node.args
        return isinstance(index, int) and self.kind(source) in ("topk", "max")

    def kind(self, operation: Any) -> str:
        if not isinstance(operation, fx.Node) or operation.op not in ("call_function", "call_method"):
            return ""
        if self._named(operation) is None:
            return ""
        return _KIND_OF.get(operation.target, "view")

    def _named(self, node: Any) -> dict[str, Any] | None:
        """The arguments of a node by name; None where there are others than its kind has."""
        kind = _KIND_OF.get(node.target)
        if kind is None:
            return {"input": node.args[0]} if _inserts_dims(node) else None
        names = _KINDS[kind][0]
        if kind in _BY_RESULT:
            return {"input": node.args[0]} if node.args else None
        if node.target is F.softmax:  # its third argument is a stack level
            names = ("input", "dim", "_stacklevel", "dtype")
        if len(node.args) > len(names):
            return None
        named = dict(zip(names, node.args, strict=False))
        named |= {_NAMES.get(name, name): value for name, value in node.kwargs.items()}
        if kind == "add" and named.get("alpha", 1) == 1:
            named.pop("alpha", None)
        return named if named.keys() <= set(_KINDS[kind][0]) else None

    def given(self, operation: Any) -> dict[str, Any]:
        named = self._named(operation) if self.kind(operation) else None
        return {name: self._as_read(value, operation) for name, value in (named or {}).items()}

    def _as_read(self, value: Any, reader: fx.Node) -> Any:
        """The node that made what a tensor holds when a node reads it: one that changed it in place before."""
        if not isinstance(value, fx.Node):
            return value
        before = self.positions.get(reader, -1)
        writers = [
            user
            for user in value.users
            if user.target in _IN_PLACE and user.args[0] is value and self.positions.get(user, before) < before
        ]
        if writers:
            return self._as_read(max(writers, key=self.positions.__getitem__), reader)
        if calls(value, {operator.getitem}) and self._is_result(value):
            index: Any = value.args[1]
            return self.result(value.args[0], index) or value
        return value

    def result(self, operation: Any, index: int = 0) -> Any:
        if self.kind(operation) not in ("topk", "max") or isinstance(value_of(operation), Tensor):
            return operation
        if not all(calls(user, {operator.getitem}) for user in operation.users):
            return None
        return next((user for user in operation.users if user.args[1] == index), None)

    def readers(self, tensor: Any) -> set[Any]:
        same = [tensor]
        if calls(tensor, {operator.getitem}) and self._is_result(tensor):
            same = [user for user in tensor.args[0].users if user.args[1:] == tensor.args[1:]]
        return {user for node in same for user in node.users}

    def example(self, tensor: Any) -> Any:
        value = value_of(tensor)
        return value if isinstance(value, Tensor) else None


def _inserts_dims(node: Any) -> bool:
    """Whether a node is ``x[:, None]`` or another index that takes all of a tensor."""
    if not calls(node, {operator.getitem}) or not isinstance(value_of(node.args[0]), Tensor):
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is ... or each == slice(None) for each in index)


@dataclass(eq=False)
class Router:
    """A router of a graph.

    Attributes:
        match: what it consists of.
        scope: the graph that it is in.
        place: the node before which `moe_router` goes.
        nodes: what it replaces, in order.
    """

    match: RouterMatch
    scope: Scope
    place: fx.Node
    nodes: list[Any]

    @property
    def options(self) -> dict[str, Any]:
        """Of `moe_router`."""
        return {**self.match.options, "scores_dtype": value_of(self.match.scores).dtype}


def find_routers(scope: Scope) -> list[tuple[Router, RouterEntry]]:
    """The routers of a graph as dynamo gives it to a backend, with example values; `decision` says which are to be
    fused."""
    found = []
    graph = _Graph(scope)
    for node in scope.graph.nodes:
        if not calls(node, _TOPK) or (graph.result(node, 1) is None and graph.result(node) is None):
            continue
        match = match_router(graph, node)
        if match is None:
            continue
        router = _router(scope, match)
        logits = value_of(match.logits)
        reason = scope.refusal or _reason(scope, router)
        decision = ("as written", reason) if reason is not None else ("moe_router", match.summary)
        tokens = logits.shape[0] if isinstance(logits.shape[0], int) else None
        sizes = int(logits.shape[1]), int(match.options["top_k"]), tokens
        found.append((router, RouterEntry(0, *sizes, *decision, where=user_line(node))))
    return found


def _router(scope: Scope, match: RouterMatch) -> Router:
    nodes = {*match.operations}
    for node in match.operations:  # tensors that are parts of a result
        if _KIND_OF.get(node.target) in ("topk", "max"):
            nodes |= {user for user in node.users if calls(user, {operator.getitem})}
    place = match.top_k
    if scope.modes[place] != scope.modes[match.takes]:  # the choice alone is made without gradients
        place = match.takes
    return Router(match, scope, place, sorted(nodes, key=scope.positions.__getitem__))


def dense_router(scope: Scope, routing: Routing) -> tuple[Router, RouterEntry] | None:
    """The router of experts that run on all tokens, whose choice is scattered to all experts before the sigmoid; None
    where it is to stay as written."""
    graph, positions, program = _Graph(scope), scope.positions, scope.program
    _, indices, values = routing.operands
    top_k = graph.maker(values)
    if graph.kind(top_k) != "topk" or graph.maker(indices) is not top_k or graph.result(top_k) is not values:
        return None
    given, dtypes = graph.given(top_k), [value_of(node).dtype for node in (values, *routing.scores)]
    whole = given.get("dim", -1) in (-1, 1) and given.get("largest", True) is True and isinstance(given.get("k"), int)
    # Rounded once: to float32 and back around the sigmoid.
    sigmoid = next(place for place, node in enumerate(routing.scores) if graph.kind(node) == "sigmoid")
    wide, narrow = set(dtypes[1 : sigmoid + 2]), set(dtypes[sigmoid + 1 : -1])
    if not whole or not wide <= {dtypes[0], torch.float32} or not narrow <= {torch.float32, dtypes[-1]}:
        return None
    if len({scope.modes[node] for node in (top_k, *routing.scores)}) > 1 or len(wide) > 1:
        return None
    options = dict(top_k=given["k"], score="sigmoid", normalize=False)
    last = routing.scores[-1]
    match = RouterMatch(top_k, top_k, given["input"], scores=last, operations={top_k: None}, options=options)
    router = Router(match, scope, top_k, [top_k])
    handed_on = dict.fromkeys(storages_of([value_of(indices), value_of(values)]), "the scores")
    reason = (
        scope.refusal
        or _reason(scope, router)
        or program.reason_against_reading_later(positions[top_k], positions[routing.rows], handed_on)
    )
    if reason is not None:
        return None
    logits = value_of(match.logits)
    tokens = logits.shape[0] if isinstance(logits.shape[0], int) else None
    sizes = int(logits.shape[1]), given["k"], tokens
    return router, RouterEntry(0, *sizes, "moe_router", match.summary, where=user_line(top_k))


def call_router(router: Router) -> tuple[fx.Node, fx.Node]:
    """Puts the scores and the ids of `moe_router` before a router's place."""
    match, graph = router.match, router.place.graph
    with graph.inserting_before(router.place):
        bias = match.bias
        if bias is not None and value_of(bias).ndim == 2:
            bias = graph.call_method("squeeze", (bias, 0))
        call = graph.call_function(_OPS.moe_router.default, (match.logits, bias), router.options)
        scores, ids = (graph.call_function(operator.getitem, (call, part)) for part in range(2))
    scores.meta = dict(match.scores.meta)
    ids.meta = dict(next(user for user in match.top_k.users if user.args[1] == 1).meta)
    return scores, ids


def fuse_router(router: Router) -> None:
    """Puts `moe_router` in the place of one of `find_routers`."""
    match, graph = router.match, router.place.graph
    scores, ids = call_router(router)
    match.scores.replace_all_uses_with(scores)
    for part in [user for user in match.top_k.users if user.args[1] == 1]:
        part.replace_all_uses_with(ids)
        graph.erase_node(part)
    for node in reversed(router.nodes):
        if not node._erased and not node.users and not _is_read_changed(node, router.scope.positions):
            graph.erase_node(node)


def _is_read_changed(node: Any, positions: dict[fx.Node, int]) -> bool:
    """Whether a node changes a tensor in place that another one reads behind it."""
    if node.target not in _IN_PLACE:
        return False
    return any(positions.get(user, -1) > positions[node] for user in node.args[0].users)


def share_orders(graph: fx.Graph, program: Program) -> None:
    """Lets calls of `moe_route`, and experts that sort by themselves, read the order of rows of the `moe_router` whose
    ids they are given.

    Args:
        graph: behind all other rewrites.
        program: of the graph before them.
    """
    for node in graph.nodes:
        if calls(node, _EXPERTS) and len(node.args) in (12, 14) and node.args[-3:] == (None, None, None):
            given, experts = node.args[1], value_of(node.args[3]).shape[0]
            call = _router_of(given, experts, program)
            if call is not None:
                with graph.inserting_before(node):
                    order = [graph.call_function(operator.getitem, (call, part)) for part in (2, 3, 4)]
                    if _source_of_ids(given, experts) is not given:  # slot_row has the shape of the ids
                        order[2] = graph.call_method("view_as", (order[2], given))
                node.args = (*node.args[:-3], *order)
            continue
        if (
            not calls(node, _ROUTE)
            or len(node.args) != 2
            or not all(calls(user, {operator.getitem}) for user in node.users)
        ):
            continue
        given, experts = node.args
        call = _router_of(given, experts, program)
        if call is None:
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                part = graph.call_function(operator.getitem, (call, 2 + user.args[1]))
                if user.args[1] == 2 and _source_of_ids(given, experts) is not given:  # the shape of the ids
                    part = graph.call_method("view_as", (part, given))
            part.meta = dict(user.meta)
            user.replace_all_uses_with(part)
            graph.erase_node(user)
        graph.erase_node(node)


def _router_of(given: Any, experts: Any, program: Program) -> Any:
    """The call of `moe_router` whose ids these are, unchanged; None for others."""
    ids = _source_of_ids(given, experts)
    call: Any = ids.args[0] if calls(ids, {operator.getitem}) and ids.args[1] == 1 else None
    logits = value_of(call.args[0]) if calls(call, _ROUTER) else None
    return None if logits is None or logits.shape[1] != experts or _is_changed(program, ids) else call


def _source_of_ids(ids: Any, experts: Any) -> Any:
    """The node whose numbers these are, in the same order, when it has ids of so many experts."""
    while isinstance(ids, fx.Node) and ids.args:
        named = {**dict(zip(("input", "min", "max"), ids.args, strict=False)), **ids.kwargs}
        within = calls(ids, _CLAMP) and (named.get("min"), named.get("max")) == (0, experts - 1)
        if not within and not calls(ids, _SAME_IDS):
            break
        ids = ids.args[0]
    return ids


def _is_changed(program: Program, ids: fx.Node) -> bool:
    storages = storages_of(value_of(ids))
    return not storages or any(step.changes(storages) for step in program.steps)


def _reason(scope: Scope, router: Router) -> str | None:
    """Why a router stays as it is. The gates, in order."""
    match, positions, program = router.match, scope.positions, scope.program
    logits, scores = value_of(match.logits), value_of(match.scores)
    if not isinstance(logits, Tensor) or logits.dtype not in ROUTER_DTYPES or logits.device.type not in ("cpu", "cuda"):
        return "its logits are no tensor of 16 or 32 bits on a CPU or CUDA device"
    if is_in_a_function_transform(logits) or is_traceable_wrapper_subclass(logits):
        return "its logits are of a function transform or a subclass of Tensor"
    if scores.dtype not in ROUTER_DTYPES:
        return f"its scores are {scores.dtype}"
    if match.bias is not None and value_of(match.bias).device != logits.device:
        return "its bias is on another device"
    reason = limits_of_kernels(logits, match.options)
    if reason is not None:
        return reason
    own = set(router.nodes)
    for node in own:
        if node.target in _IN_PLACE and not set(node.args[0].users) <= own:
            return f"{node.args[0].name}, which it changes in place, is read elsewhere"
    if router.place is not match.top_k:
        ids = [user for part in match.top_k.users if part.args[1] == 1 for user in part.users]
        if any(positions[user] < positions[router.place] for user in ids):
            return "its ids are read before its scores, in another grad mode"
    replaced = {positions[node] for node in own}
    of_gradient = {positions[node] for node in own & set(match.operations) if node not in match.choosing}
    read = dict.fromkeys(storages_of(logits), "the logits")
    later = dict(read)
    if match.bias is not None:
        read |= dict.fromkeys(storages_of(value_of(match.bias)), "the bias")
    handed_on = dict.fromkeys(storages_of([value_of(node) for node in own]), "the scores")
    differentiable = scope.modes[match.takes] and logits.requires_grad
    return program.reason_against_fusing(
        replaced, handed_on | read, later if differentiable else None, differentiated=of_gradient
    )
