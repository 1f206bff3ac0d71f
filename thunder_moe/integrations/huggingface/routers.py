"""Routers of transformers' models in one operator, of the classes that `router_table` lists.
Called by families with the layer whose experts become 4-bit; calls router_table, class_swap and ops.router.

The operator is `moe_linear_router` in inference on CUDA and in graphs of inference, else `moe_router` behind the
router's linear layer.

A router is a module of transformers that returns (logits (T, E), scores (T, A), ids (T, A)) for hidden states.

Legend: T tokens, A = top_k, E experts, H hidden_size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.integrations.huggingface.class_swap import OtherMethods
from thunder_moe.integrations.huggingface.known_code import key, runs_class_forward, tell_decision, unknown_version
from thunder_moe.integrations.huggingface.router_table import ROUTERS, RouterKind
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.nn.linear_router import is_one_operator
from thunder_moe.ops import router as _router  # noqa: F401  (registers the operator)
from thunder_moe.ops.operator import operator_for
from thunder_moe.quantization.replaceable import HOOK_ATTRIBUTES
from thunder_moe.routing import RouterConfig

KNOWN_CODE = "transformers.models."
OWN_STATE = frozenset({*vars(nn.Module()), *HOOK_ATTRIBUTES})  # attributes that are torch's or accelerate's
_DEFAULTS = {field.name: field.default for field in fields(RouterConfig)}  # the defaults of moe_router
Order = tuple[Tensor, Tensor, Tensor]


class RowOrders:
    """Hand the order of rows from a layer's router to its experts, so that they need not sort the same ids again.

    The experts take it only for the very tensor of ids that the router returned, unchanged; else they sort. Graphs with
    gradients have none of it: the body of a checkpoint may not change a Python object.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, int | str, Order] | None = None

    def put(self, ids: Tensor, order: Order, router: nn.Module) -> None:
        """Keep the order that the last `moe_router` returned for a router's ids, until the experts take it."""
        if not torch.compiler.is_compiling():
            self._last = None if ids.is_inference() else (ids, ids._version, order)
        elif not torch.is_grad_enabled() and not router._forward_hooks:  # a graph does not show what hooks change
            self._last = (ids, _traced_ids("") if torch.compiler.is_dynamo_compiling() else 0, order)

    def take(self, ids: Tensor, num_experts: int) -> Order | None:
        """Return the order of these ids, if it is known."""
        compiles = torch.compiler.is_compiling()
        if compiles and torch.is_grad_enabled():
            return None
        last, self._last = self._last, None
        if last is None or last[0] is not ids:
            return None
        order = last[2]
        if order[1].shape[0] != num_experts:
            return None
        if torch.compiler.is_dynamo_compiling():
            same = isinstance(last[1], str) and last[1] == _traced_ids(last[1])
        else:
            same = compiles or last[1] == ids._version
        return order if same else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": None}


def _ids_in_graph(known: str) -> str:
    """Return what names the ids of the graph's last `moe_router`, or the `known` ones, while dynamo traces: the graph,
    the node and how often the trace has changed them in place; "" where the graph has none."""
    graph = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.graph
    for node in reversed(graph.nodes):
        if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in _ROUTERS:
            found = f"{id(graph)} {node.name} "
            if known.startswith(found) or not known:
                return f"{found}{node.meta['example_value']._version}"
    return ""


_ROUTERS = tuple(
    target
    for operation in (torch.ops.thunder_moe.moe_router, torch.ops.thunder_moe.moe_linear_router)
    for target in (operation, operation.default)
)
_constant: Any = torch.compiler.assume_constant_result
_traced_ids: Callable[[str], str] = _constant(_ids_in_graph)


@dataclass(frozen=True)
class RouterCall:
    """Compute what a router does by a linear layer and `moe_router`.

    The form was read from numbers and strings in the module, its `settings`; the kind is of its class.
    """

    form: RouterConfig
    kind: RouterKind
    settings: tuple[tuple[str, Any], ...]

    def holds(self, router: Any, hidden_states: Tensor, biases: int) -> bool:
        """True if the router still has its settings, and these arguments are of its kind."""
        kind = self.kind
        # Not by a list of dtypes: Thunder's proxies have dtypes of its own.
        if hidden_states.dtype == torch.float64 or (not kind.wide and hidden_states.dtype != router.weight.dtype):
            return False
        if biases != (kind.bias == "") or not (kind.flattens or hidden_states.ndim == 2):
            return False
        if autocast_dtype(hidden_states) is not None:
            return False
        for name, value in self.settings:  # noqa: SIM110  (a generator would take as long again)
            if getattr(router, name, None) != value:
                return False
        return True

    def logits(self, router: Any, hidden_TH: Tensor) -> Tensor:
        """Map (T, H) -> (T, E)."""
        weight, bias = _linear_of(router)
        if self.kind.wide:
            if bias is None and _takes_16_bits(hidden_TH, weight):
                return torch.mm(hidden_TH, weight.t(), out_dtype=torch.float32)
            return F.linear(hidden_TH.float(), weight.float(), None if bias is None else bias.float())
        logits = F.linear(hidden_TH, weight, bias)
        return logits.float() if self.kind.logits_float else logits


def _linear_of(router: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a router's linear layer."""
    if "parametrizations" in router._modules or "weight" not in router._parameters:
        return router.weight, getattr(router, "bias", None)
    # nn.Module's own look-up takes half a microsecond, a vain one two.
    return router._parameters["weight"], router._parameters.get("bias", router._buffers.get("bias"))


def _takes_16_bits(hidden_TH: Tensor, weight: Tensor) -> bool:
    """True if a float32 product of 16-bit tensors needs no float32 copies: in eager inference on CUDA.

    Products of 16-bit numbers are exact in float32: only the order of the sum differs. A router of DeepSeek-V3
    (256, 7168) on an H200 at 1 / 32 / 1024 tokens takes 5.8 / 6.7 / 12 us so, and 12 / 25 / 122 with copies.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not hidden_TH.is_cuda:
        return False
    return hidden_TH.dtype == weight.dtype and hidden_TH.dtype in (torch.bfloat16, torch.float16)


class FusedRouter(OtherMethods):
    """Run `moe_router` in the place of a router's own forward, where it is known to compute the same."""

    added = ("router_call", "router_options", "row_orders")
    router_call: RouterCall
    router_options: dict[str, Any]  # `router_call.form` as options of moe_router, without defaults
    row_orders: RowOrders

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Map (..., H) -> logits (T, E), scores (T, A), ids int64 (T, A)."""
        call, kind = self.router_call, self.router_call.kind
        if options or not call.holds(self, hidden_states, len(args)):
            return super().forward(hidden_states, *args, **options)
        hidden_TH = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
        bias = None if kind.bias is None else args[0] if kind.bias == "" else _at(self, kind.bias)
        if bias is not None and bias.device != hidden_states.device:
            # It is offloaded: accelerate loads it in the forward of the child that has it, which only this calls.
            return super().forward(hidden_states, *args)
        bias = bias if bias is None or bias.ndim == 1 else bias.reshape(-1)
        dtype = torch.float32 if kind.scores_float else hidden_states.dtype
        weight, linear_bias = _linear_of(self)
        if (torch.compiler.is_compiling() or not kind.logits_float) and is_one_operator(hidden_TH, weight):
            logits_dtype = torch.float32 if kind.wide else hidden_TH.dtype
            scores, ids, row_slot, offsets, slot_row, logits = operator_for("moe_linear_router")(
                hidden_TH, weight, linear_bias, bias, logits_dtype=logits_dtype, scores_dtype=dtype,
                **self.router_options,
            )  # fmt: skip
            logits = logits.float() if kind.logits_float else logits
        else:
            logits = call.logits(self, hidden_TH)
            scores, ids, row_slot, offsets, slot_row = operator_for("moe_router")(
                logits, bias, scores_dtype=dtype, **self.router_options
            )
        self.row_orders.put(ids, (row_slot, offsets, slot_row), self)
        return logits, scores, ids


def routers_of(layer: nn.Module) -> list[nn.Module]:
    """Return the children of a layer that may be routers: of transformers, with a weight (E, H) and a top_k."""
    found = []
    for child in layer.children():
        weight = child._parameters.get("weight")
        own = type(child).__module__.startswith(KNOWN_CODE)
        known = own and weight is not None and weight.ndim == 2 and isinstance(getattr(child, "top_k", None), int)
        if known or isinstance(child, FusedRouter):
            found.append(child)
    return found


def fuse_routers(layer: nn.Module, orders: RowOrders) -> bool:
    """Call `fuse_router` for the routers of a layer; True if its experts can take the order of rows from one."""
    fused = [fuse_router(router, orders) for router in routers_of(layer)]
    # Code of others may change the ids in place between router and experts, which a compiler's trace would not show.
    return any(fused) and type(layer).__module__.startswith(KNOWN_CODE)


def restore_routers(layer: nn.Module) -> None:
    """Undo `fuse_routers`."""
    for router in routers_of(layer):
        FusedRouter.take_off(router)


def fuse_router(router: nn.Module, orders: RowOrders) -> bool:
    """Make a router run `moe_router` and leave the order of rows, if the table has its class; True if it does now."""
    attributes: dict[str, Any] = {"row_orders": orders}
    if not isinstance(router, FusedRouter):
        if (call := fused_call(router)) is None:
            return False
        # An option costs half a microsecond of a call, also one that has its default.
        options = {name: value for name, value in asdict(call.form).items() if value != _DEFAULTS.get(name)}
        attributes |= {"router_call": call, "router_options": options}
    elif not FusedRouter.is_on(router):
        return False
    FusedRouter.put_on(router, **attributes)
    return True


def fused_call(router: nn.Module) -> RouterCall | None:
    """Return how `moe_router` computes what a router does, by the table of `router_table`; None where it does not."""
    kind, form, why = ROUTERS.get(key(type(router))), None, None
    plain = all(type(parameter) is nn.Parameter for parameter in router.parameters())
    if kind is not None and plain and runs_class_forward(router):
        why = unknown_version(kind.since)
        form = kind.form(router) if why is None else None
    tell_decision("router", type(router), "moe_router", form, why)
    return None if form is None or kind is None else RouterCall(form, kind, settings_of(router))


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Return the numbers and strings of a module, but for `training`."""
    own = ((name, value) for name, value in vars(module).items() if name not in OWN_STATE)
    return tuple(sorted((name, value) for name, value in own if is_setting(value) and name[0] != "_"))


def is_setting(value: Any) -> bool:
    """True for a number or a string."""
    return isinstance(value, int | float | str | bool | None)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
