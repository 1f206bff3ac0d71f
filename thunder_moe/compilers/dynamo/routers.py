"""Finds routers written in torch's operations, and puts `moe_router` in their place.
Called by rewrite.py; calls scopes.py, sites.py, and safety.py for the operations between.

    values, ids = softmax(logits, float32).topk(A)      then any of  values / values.sum(-1, keepdim=True) [+ epsilon]
    values, ids = logits.topk(A); softmax(values)                    * scale,  .to(dtype)
    = scores, ids, _, _, _ = moe_router(logits, top_k=A, ...)

torch.topk is two launches, and no compiler fuses it with what is around it. The choice is the same but for equal
probabilities, of which torch.topk takes any. Legend: T tokens, E experts, A = top_k.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thunder_moe.compilers.dynamo.effects import is_in_a_function_transform, storages_of
from thunder_moe.compilers.dynamo.scopes import Scope, value_of
from thunder_moe.compilers.dynamo.sites import calls, user_line
from thunder_moe.compilers.report import RouterEntry
from thunder_moe.compilers.safety import Program
from thunder_moe.ops.experts import moe_experts  # noqa: F401  (registers the operator)
from thunder_moe.ops.route import moe_route  # noqa: F401  (registers the operator)
from thunder_moe.ops.router import moe_router  # noqa: F401  (registers the operator)

__all__ = ["Router", "find_routers", "fuse_router", "share_orders"]

_OPS = torch.ops.thunder_moe
aten = torch.ops.aten
_SOFTMAX = {F.softmax, torch.softmax, aten.softmax.int, aten._softmax.default, "softmax"}
_TOPK = {torch.topk, aten.topk.default, "topk"}
_SUM = {torch.sum, aten.sum.dim_IntList, "sum"}
_ADD = {operator.add, operator.iadd, torch.add, aten.add.Tensor, "add"}
_DIV = {operator.truediv, operator.itruediv, torch.div, aten.div.Tensor, "div", "div_"}
_MUL = {operator.mul, operator.imul, torch.mul, aten.mul.Tensor, "mul"}
_ROUTE, _ROUTER, _EXPERTS = (
    {operation, operation.default} for operation in (_OPS.moe_route, _OPS.moe_router, _OPS.f16a_nvfp4weight_moe_experts)
)
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
_CAST = {"to", "type", "type_as", "float", "half", "bfloat16"}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_EXPERTS, _MAX_TOP_K = 512, 32  # of the CUDA kernels
_LAST = (-1, 1)


@dataclass(eq=False)
class Router:
    """A router of a graph.

    Attributes:
        top_k: its call of torch.topk.
        logits: (T, E).
        scores: the node with the final scores (T, A).
        nodes: what it consists of, in order.
        options: of `moe_router`.
    """

    top_k: fx.Node
    logits: Any
    scores: Any
    nodes: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def find_routers(scope: Scope) -> list[tuple[Router, RouterEntry]]:
    """The routers of a graph as dynamo gives it to a backend, with example values; `decision` says which are to be
    fused."""
    found = []
    for node in scope.graph.nodes:
        router = _router_at(node) if calls(node, _TOPK) else None
        if router is None:
            continue
        logits = value_of(router.logits)
        reason = scope.refusal or _reason(scope, router)
        decision = ("as written", reason) if reason is not None else ("moe_router", "softmax and top-k in one operator")
        tokens = logits.shape[0] if isinstance(logits.shape[0], int) else None
        sizes = int(logits.shape[1]), int(router.options["top_k"]), tokens
        found.append((router, RouterEntry(0, *sizes, *decision, where=user_line(node))))
    return found


def fuse_router(router: Router) -> None:
    """Puts `moe_router` in the place of one of `find_routers`."""
    graph = router.top_k.graph
    with graph.inserting_before(router.top_k):
        call = graph.call_function(_OPS.moe_router.default, (router.logits,), router.options)
        scores, ids = (graph.call_function(operator.getitem, (call, part)) for part in range(2))
    scores.meta = dict(router.scores.meta)
    router.scores.replace_all_uses_with(scores)
    for part in [user for user in router.top_k.users if user.args[1] == 1]:
        ids.meta = dict(part.meta)
        part.replace_all_uses_with(ids)
        graph.erase_node(part)
    for node in reversed(router.nodes):
        if not node.users:
            graph.erase_node(node)


def share_orders(graph: fx.Graph, program: Program) -> None:
    """Lets calls of `moe_route`, and experts that sort by themselves, read the order of rows of the `moe_router` whose
    ids they are given.

    Args:
        graph: behind all other rewrites.
        program: of the graph before them.
    """
    for node in graph.nodes:
        if calls(node, _EXPERTS) and len(node.args) == 14 and node.args[11:] == (None, None, None):
            given, experts = node.args[1], value_of(node.args[3]).shape[0]
            call = _router_of(given, experts, program)
            if call is not None:
                with graph.inserting_before(node):
                    order = [graph.call_function(operator.getitem, (call, part)) for part in (2, 3, 4)]
                    if _source_of_ids(given, experts) is not given:  # slot_row has the shape of the ids
                        order[2] = graph.call_method("view_as", (order[2], given))
                node.args = (*node.args[:11], *order)
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


def _router_at(top_k: Any) -> Router | None:
    """The router whose choice is a call of torch.topk."""
    named = {**dict(zip(("input", "k", "dim", "largest", "sorted"), top_k.args, strict=False)), **top_k.kwargs}
    named.setdefault("input", named.pop("self", None))
    known = named.keys() <= {"input", "k", "dim", "largest", "sorted"} and isinstance(named.get("k"), int)
    source: Any = named.get("input")
    compared = value_of(source)
    if not known or named.get("dim", -1) not in _LAST or named.get("largest", True) is not True:
        return None
    if not isinstance(compared, Tensor) or compared.ndim != 2 or not isinstance(compared.shape[1], int):
        return None
    if not all(calls(user, {operator.getitem}) for user in top_k.users):
        return None
    parts = [user for user in top_k.users if user.args[1] == 0]
    if len(parts) != 1:
        return None
    (values,) = parts
    router = Router(top_k, source, values, [], dict(top_k=named["k"], normalize=False))
    if calls(source, _SOFTMAX):
        logits = _softmax_of(source)
        if logits is None or compared.dtype != torch.float32:
            return None  # rounded to 16 bits before the choice
        router.logits, router.nodes = logits, [source, top_k, values]
    else:
        softmax = next(iter(values.users))
        if len(values.users) != 1 or not calls(softmax, _SOFTMAX) or _softmax_of(softmax) is not values:
            return None
        router.nodes, router.scores, router.options["normalize"] = [top_k, values, softmax], softmax, True
    _follow(router)
    if calls(router.logits, {"float"}) and len(router.logits.args) == 1:
        wide, router.logits = router.logits, router.logits.args[0]
        router.nodes.insert(0, wide)
    router.options["scores_dtype"] = value_of(router.scores).dtype
    return router


def _softmax_of(node: Any) -> Any:
    """The argument of a softmax along the last of two dimensions; None for other ones."""
    named = {**dict(zip(("input", "dim", "dtype"), node.args, strict=False)), **node.kwargs}
    if node.target is F.softmax:  # its third argument is a stack level
        named = {**dict(zip(("input", "dim", "_stacklevel", "dtype"), node.args, strict=False)), **node.kwargs}
    named.setdefault("input", named.pop("self", None))
    return named["input"] if named.get("dim") in _LAST and value_of(node).ndim == 2 else None


def _follow(router: Router) -> None:
    """Adds what is done to the scores: normalization, a scale, a cast at last."""
    users = set(router.scores.users)
    sums: Any = next((user for user in users if calls(user, _SUM)), None)
    if not router.options["normalize"] and sums is not None and len(users) == 2:
        total, epsilon, nodes = sums, 0.0, [sums]
        after: Any = next(iter(sums.users), None)
        if calls(after, _ADD) and len(after.args) == 2 and isinstance(after.args[1], float) and not after.kwargs:
            total, epsilon = after, after.args[1]
            nodes.append(after)
        (divided,) = users - {sums}
        named = dict(zip(("input", "dim", "keepdim"), sums.args, strict=False)) | sums.kwargs
        dims = named.get("dim")
        whole = (dims in _LAST or dims in ([-1], (-1,), [1], (1,))) and named.get("keepdim") is True
        right = calls(divided, _DIV) and tuple(divided.args) == (router.scores, total) and not divided.kwargs
        alone = set(sums.users) == {nodes[1] if len(nodes) > 1 else divided} and set(total.users) == {divided}
        if whole and right and alone and "dtype" not in named and epsilon >= 0:
            router.nodes += [*nodes, divided]
            router.options |= dict(normalize=True, epsilon=epsilon)
            router.scores = divided
    while len(router.scores.users) == 1:
        (user,) = router.scores.users
        before, after = value_of(router.scores), value_of(user)
        if calls(user, _MUL) and not user.kwargs and len(user.args) == 2 and user.args[0] is router.scores:
            if not isinstance(user.args[1], float) or before.dtype != torch.float32 or "scale" in router.options:
                return
            router.options["scale"] = user.args[1]
        elif calls(user, _CAST) and user.args[0] is router.scores and before.dtype == torch.float32:
            if not isinstance(after, Tensor) or after.dtype not in _DTYPES or after.device != before.device:
                return
        else:
            return
        router.nodes.append(user)
        router.scores = user


def _reason(scope: Scope, router: Router) -> str | None:
    """Why a router stays as it is. The gates, in order."""
    logits = value_of(router.logits)
    if not isinstance(logits, Tensor) or logits.dtype not in _DTYPES or logits.device.type not in ("cpu", "cuda"):
        return "its logits are no tensor of 16 or 32 bits on a CPU or CUDA device"
    if is_in_a_function_transform(logits) or is_traceable_wrapper_subclass(logits):
        return "its logits are of a function transform or a subclass of Tensor"
    if value_of(router.scores).dtype not in _DTYPES:
        return f"its scores are {value_of(router.scores).dtype}"
    experts, top_k = logits.shape[1], router.options["top_k"]
    if experts > _MAX_EXPERTS or top_k > _MAX_TOP_K:
        return f"it chooses {top_k} of {experts}; the kernels, up to {_MAX_TOP_K} of {_MAX_EXPERTS}"
    if not 1 <= top_k <= experts:
        return f"it chooses {top_k} of {experts}"
    positions = {scope.positions[node] for node in router.nodes}
    read = dict.fromkeys(storages_of(logits), "the logits")
    own = dict.fromkeys(storages_of([value_of(node) for node in router.nodes]), "the scores")
    differentiable = scope.modes[router.top_k] and logits.requires_grad
    return scope.program.reason_against_fusing(positions, own | read, read if differentiable else None)
