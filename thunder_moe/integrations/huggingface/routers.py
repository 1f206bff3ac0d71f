"""Routers of transformers' models in one operator, where probes prove that it computes the same.
Called by families with the layer whose experts become 4-bit; calls ops.router, and the router's own forward to compare.

The operator is `moe_linear_router` in inference on CUDA, else `moe_router` behind the router's linear layer.

A router is a module of transformers that returns (logits (T, E), scores (T, A), ids (T, A)) for hidden states. It keeps
its class' name for isinstance (hooks that record logits go by it), its parameters and its hooks: only the forward is
another one, and that runs the own one wherever it is not known to compute the same.

Legend: T tokens, A = top_k, E experts, H hidden_size, P probes.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.integrations.huggingface.accelerate_hooks import HOOK_ATTRIBUTES, unhooked
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.nn.linear import traced_by_thunder
from thunder_moe.ops import router as _router  # noqa: F401  (registers the operator)
from thunder_moe.ops.operator import operator_for
from thunder_moe.replaceable import has_own_forward
from thunder_moe.routing import LINEAR_ROUTER_TOKENS, RouterForm

__all__ = [
    "KNOWN_CODE",
    "FusedRouter",
    "RouterCall",
    "RowOrders",
    "fuse_routers",
    "fused_call",
    "has_only_settings",
    "is_one_operator",
    "probe_copy",
    "restore_routers",
    "routers_of",
    "settings_of",
]

_LOGGER = logging.getLogger("thunder_moe")
_TORCH_STATE = frozenset(vars(nn.Module()))
KNOWN_CODE = "transformers.models."
_OWN_STATE = _TORCH_STATE | {*HOOK_ATTRIBUTES}
# Attributes of routers with the numbers of a form.
_SCALES = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
_SUMS = ("norm_min",)
_EPSILONS = ("norm_topk_prob_eps",)
_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
_DEFAULTS = {field.name: field.default for field in fields(RouterForm)}  # those of moe_router
Order = tuple[Tensor, Tensor, Tensor]


class RowOrders:
    """Hands the order of rows from a layer's router to its experts, so that they need not sort the same ids again.

    The experts take it only for the very tensor of ids that the router returned, unchanged; else they sort. Graphs with
    gradients have none of it: the body of a checkpoint may not change a Python object.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, int | str, Order] | None = None

    def put(self, ids: Tensor, order: Order, router: nn.Module) -> None:
        """Keeps the order of a router's result, that of the `moe_router` called last, until the experts take it."""
        if not torch.compiler.is_compiling():
            self._last = None if ids.is_inference() else (ids, ids._version, order)
        elif not torch.is_grad_enabled() and not router._forward_hooks:  # a graph does not show what hooks change
            self._last = (ids, _traced_ids("") if torch.compiler.is_dynamo_compiling() else 0, order)

    def take(self, ids: Tensor, num_experts: int) -> Order | None:
        """The order of these ids, if it is known."""
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
    """Runs while dynamo traces: the ids of the graph's last `moe_router`, or those that are `known`, by the graph, the
    node's name and how often the trace has changed them in place so far; "" where the graph has none."""
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
    """How a router becomes a linear layer and a `moe_router`.

    Attributes:
        form: of the router.
        wide: the linear layer runs in float32.
        logits_float: the logits are float32 behind a linear layer in the dtype of the hidden states.
        scores_float: the scores are float32, else in the dtype of the hidden states.
        bias: path of the correction bias in the module; "" where it is the second argument; None without one.
        flattens: takes hidden states of more than two dimensions, too.
        settings: numbers and strings in the module when it was compared, on which the comparison relies.
    """

    form: RouterForm
    wide: bool
    logits_float: bool
    scores_float: bool
    bias: str | None
    flattens: bool
    settings: tuple[tuple[str, Any], ...]

    def holds(self, router: Any, hidden_states: Tensor, biases: int) -> bool:
        """Whether the router still has the settings of the comparison, and these arguments are of its kind."""
        # Not by a list of dtypes: Thunder's proxies have dtypes of its own.
        if hidden_states.dtype == torch.float64 or (not self.wide and hidden_states.dtype != router.weight.dtype):
            return False
        if biases != (self.bias == "") or not (self.flattens or hidden_states.ndim == 2):
            return False
        if autocast_dtype(hidden_states) is not None:
            return False
        for name, value in self.settings:  # noqa: SIM110  (a generator would take as long again)
            if getattr(router, name, None) != value:
                return False
        return True

    def logits(self, router: Any, hidden_TH: Tensor) -> Tensor:
        """(T, H) -> (T, E)."""
        weight, bias = _linear_of(router)
        if self.wide:
            if bias is None and _takes_16_bits(hidden_TH, weight):
                return torch.mm(hidden_TH, weight.t(), out_dtype=torch.float32)
            return F.linear(hidden_TH.float(), weight.float(), None if bias is None else bias.float())
        logits = F.linear(hidden_TH, weight, bias)
        return logits.float() if self.logits_float else logits


def _linear_of(router: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a router's linear layer."""
    if "parametrizations" in router._modules or "weight" not in router._parameters:
        return router.weight, getattr(router, "bias", None)
    # nn.Module's own look-up takes half a microsecond, a vain one two.
    return router._parameters["weight"], router._parameters.get("bias", router._buffers.get("bias"))


def is_one_operator(hidden_TH: Tensor, weight: Any) -> bool:
    """True if `moe_linear_router` is to compute the logits, too: in inference on CUDA, where it saves a launch.

    A compiled graph may get few tokens later; in eager code more of them are a linear layer and `moe_router`.
    """
    if torch.is_grad_enabled() or traced_by_thunder() or not hidden_TH.is_cuda:
        return False
    if not torch.compiler.is_compiling() and hidden_TH.shape[0] > LINEAR_ROUTER_TOKENS:
        return False
    return hidden_TH.dtype == weight.dtype and hidden_TH.dtype in (torch.bfloat16, torch.float16)


def _takes_16_bits(hidden_TH: Tensor, weight: Tensor) -> bool:
    """Whether a float32 product of 16-bit tensors is to be made without float32 copies, in eager inference alone.

    Products of 16-bit numbers are exact in float32: only the order of the sum differs. A router of DeepSeek-V3
    (256, 7168) on an H200 at 1 / 32 / 1024 tokens takes 5.8 / 6.7 / 12 us so, and 12 / 25 / 122 with copies.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not hidden_TH.is_cuda:
        return False
    return hidden_TH.dtype == weight.dtype and hidden_TH.dtype in (torch.bfloat16, torch.float16)


class FusedRouter(nn.Module):
    """The forward of routers that run `moe_router`; `_fused_class` mixes it into a router's own class."""

    own_class: type[nn.Module]
    router_call: RouterCall
    router_options: dict[str, Any]  # `router_call.form` as those of moe_router, but for defaults
    row_orders: RowOrders

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """(..., H) -> logits (T, E), scores (T, A), ids int64 (T, A)."""
        call = self.router_call
        if options or not call.holds(self, hidden_states, len(args)):
            return super().forward(hidden_states, *args, **options)
        hidden_TH = hidden_states if hidden_states.ndim == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
        bias = None if call.bias is None else args[0] if call.bias == "" else _at(self, call.bias)
        bias = bias if bias is None or bias.ndim == 1 else bias.reshape(-1)
        dtype = torch.float32 if call.scores_float else hidden_states.dtype
        weight, linear_bias = _linear_of(self)
        if not call.logits_float and is_one_operator(hidden_TH, weight):
            logits_dtype = torch.float32 if call.wide else hidden_TH.dtype
            scores, ids, row_slot, offsets, slot_row, logits = operator_for("moe_linear_router")(
                hidden_TH, weight, linear_bias, bias, logits_dtype=logits_dtype, scores_dtype=dtype,
                **self.router_options,
            )  # fmt: skip
        else:
            logits = call.logits(self, hidden_TH)
            scores, ids, row_slot, offsets, slot_row = operator_for("moe_router")(
                logits, bias, scores_dtype=dtype, **self.router_options
            )
        self.row_orders.put(ids, (row_slot, offsets, slot_row), self)
        return logits, scores, ids

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (self.own_class,), self.__dict__


@functools.cache
def _fused_class(own_class: Any) -> Any:
    name = f"Fused{own_class.__name__}"
    return type(name, (FusedRouter, own_class), {"own_class": own_class, "__module__": __name__})


def _unpickled(own_class: Any) -> Any:
    fused = _fused_class(own_class)
    return fused.__new__(fused)


def routers_of(layer: nn.Module) -> list[nn.Module]:
    """The children of a layer that may be routers: of transformers, with a weight (E, H) and a top_k."""
    found = []
    for child in layer.children():
        weight = child._parameters.get("weight")
        own = type(child).__module__.startswith(KNOWN_CODE)
        known = own and weight is not None and weight.ndim == 2 and isinstance(getattr(child, "top_k", None), int)
        if known or isinstance(child, FusedRouter):
            found.append(child)
    return found


def fuse_routers(layer: nn.Module, orders: RowOrders) -> bool:
    """`fuse_router` for the routers of a layer; whether its experts can take the order of rows from one."""
    fused = [fuse_router(router, orders) for router in routers_of(layer)]
    # Code of others may change the ids in place between router and experts, which a compiler's trace would not show.
    return any(fused) and type(layer).__module__.startswith(KNOWN_CODE)


def restore_routers(layer: nn.Module) -> None:
    """`restore_router` for the routers of a layer."""
    for router in routers_of(layer):
        restore_router(router)


def fuse_router(router: nn.Module, orders: RowOrders) -> bool:
    """Makes a router run `moe_router`, if probes show that it computes one of its forms.

    Args:
        router: one of `routers_of`; its class becomes a subclass of its own, everything else stays as it is.
        orders: where it leaves the order of rows.

    Returns:
        Whether it does now.
    """
    kind: Any = type(router)
    attributes: dict[str, Any] = {"row_orders": orders}
    if not isinstance(router, FusedRouter):
        call = fused_call(router)
        if call is None:
            return False
        with unhooked(router):
            router.__class__ = _fused_class(kind)
        # An option costs half a microsecond of a call, also one that has its default.
        options = {name: value for name, value in asdict(call.form).items() if value != _DEFAULTS.get(name)}
        attributes |= {"router_call": call, "router_options": options}
    elif kind is not _fused_class(kind.own_class):  # somebody has made a class of it
        return False
    vars(router).update(attributes)
    return True


def restore_router(router: nn.Module) -> None:
    """Gives a fused router its own class again."""
    kind: Any = type(router)
    if issubclass(kind, FusedRouter) and kind is _fused_class(kind.own_class):
        for name in ("router_call", "router_options", "row_orders"):
            vars(router).pop(name, None)
        with unhooked(router):
            router.__class__ = kind.own_class


def fused_call(router: nn.Module) -> RouterCall | None:
    """How `moe_router` computes what a router does, or None; the same for all routers of equal class and settings."""
    others = [name for name, value in vars(router).items() if name not in _OWN_STATE and not _is_setting(value)]
    if vars(router).get("_compiled_call_impl") is not None or not has_own_forward(router):
        return None
    plain = all(type(parameter) is nn.Parameter for parameter in router.parameters())
    if not plain or any(name[0] != "_" for name in others):
        return None  # what it takes from its other attributes, a configuration say, may change
    tensors = tuple((name, tensor.shape) for name, tensor in _tensors(router))
    key = (
        type(router),
        tensors,
        tuple((name, type(child)) for name, child in router.named_modules()),
        settings_of(router),
    )
    if key not in _CALLS:
        try:
            _CALLS[key] = _compare(router)
        except Exception as error:  # a forward with other arguments, results or needs than a router's
            _LOGGER.debug("%s stays as it is: %s: %s", type(router).__name__, type(error).__name__, error)
            _CALLS[key] = None
        call = _CALLS[key]
        does = "keeps its own operations" if call is None else f"runs moe_router, {call.form}"
        _LOGGER.info("router %s %s", type(router).__name__, does)
    return _CALLS[key]


_CALLS: dict[Any, RouterCall | None] = {}


def has_only_settings(module: nn.Module) -> bool:
    """Whether a module has no attributes of its own but those of `settings_of` and what torch and accelerate keep."""
    return all(_is_setting(value) for name, value in vars(module).items() if name not in _OWN_STATE)


def settings_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """Numbers and strings of a module; `training` is none of them, since both values are compared."""
    own = ((name, value) for name, value in vars(module).items() if name not in _OWN_STATE)
    return tuple(sorted((name, value) for name, value in own if _is_setting(value) and name[0] != "_"))


def _is_setting(value: Any) -> bool:
    return isinstance(value, int | float | str | bool | None)


def _tensors(router: nn.Module) -> list[tuple[str, Tensor]]:
    return [*router.named_parameters(), *router.named_buffers()]


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def probe_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module of the same class and attributes with zeros of a dtype on the CPU in the place of its tensors."""
    new = type(module).__new__(type(module))
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        if name not in _OWN_STATE:
            vars(new)[name] = value
    for name, child in module._modules.items():
        new.register_module(name, None if child is None else probe_copy(child, dtype))
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        zeros = None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device="cpu")
        if name in module._parameters:
            new.register_parameter(name, None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        else:
            new.register_buffer(name, zeros)
    return new


@dataclass
class _Seen:
    """What a router's own forward gave for probes."""

    logits: Tensor
    scores: Tensor
    ids: Tensor
    correction: Tensor | None
    more: list[Tensor]  # arguments behind the hidden states


@torch.inference_mode(False)
@torch.no_grad()
def _compare(router: nn.Module) -> RouterCall | None:
    """The first call that agrees with the router's own forward at all probes, in bfloat16 and in float32."""
    names = {name for name, _ in _tensors(router)}
    biases = [name for name in names - {"weight", "bias"} if name.endswith("bias")]
    if not names <= {"weight", "bias", *biases} or len(biases) > 1:
        return None  # tensors whose part is not known
    bias = biases[0] if biases else None
    arguments = [*inspect.signature(type(router).forward).parameters][2:]  # behind self and hidden_states
    if arguments:
        if bias is not None or len(arguments) > 1 or not arguments[0].endswith("bias"):
            return None
        bias = ""
    half, full = (_see(router, dtype, bias) for dtype in (torch.bfloat16, torch.float32))
    if half is None or full is None:
        return None
    (probe, hidden, seen), (_, _, seen_full) = half, full
    flattens = _flattens(probe, hidden, seen[-1])
    scores_float = seen[0].scores.dtype == torch.float32
    if seen[0].scores.dtype not in (torch.float32, torch.bfloat16) or seen_full[0].scores.dtype != torch.float32:
        return None
    # The kinds of a linear layer differ in bfloat16.
    for wide, logits_float in ((False, False), (True, False), (False, True)):
        call = RouterCall(
            RouterForm(seen[0].ids.shape[1]), wide, logits_float, scores_float, bias, flattens, settings_of(router)
        )
        logits = call.logits(probe, hidden)
        if all(one.logits.dtype == logits.dtype and torch.equal(one.logits, logits) for one in seen):
            break
    else:
        return None
    agree = (form for form in _forms(router, seen + seen_full) if all(_agrees(form, one) for one in seen + seen_full))
    form = next(agree, None)
    return None if form is None else replace(call, form=form)


def _see(router: nn.Module, dtype: torch.dtype, bias: str | None) -> tuple[Any, Tensor, list[_Seen]] | None:
    """A copy of the router whose hidden states are its logits (before a bias), probes of it, and what it gives."""
    probe: Any = probe_copy(router, dtype)
    experts, hidden_size = probe.weight.shape
    # Near the identity: exact in float32, rounded in 16 bits.
    eye = torch.eye(experts, dtype=torch.float32, device="cpu")
    probe.weight = nn.Parameter((eye + 2**-9 * eye.roll(1, 0)).to(dtype), requires_grad=False)
    for name, value in settings_of(router):
        if value == hidden_size and name in ("hidden_dim", "hidden_size"):
            setattr(probe, name, experts)
    generator = torch.Generator("cpu").manual_seed(0)
    hidden = _probes(experts, generator).to(dtype)
    around = torch.randn(experts, generator=generator, device="cpu", dtype=torch.float32)
    if getattr(probe, "bias", None) is not None:
        probe.bias.copy_(around)
    # The correction: none, of both signs, so negative that experts with 0 would win, and in the order of the experts.
    corrections = [torch.zeros_like(around), 0.5 * around, around - 6.0, around.sort().values]
    seen = []
    for correction, training in itertools.product(corrections[: 1 if bias is None else None], (False, True)):
        stored: Tensor | None = None
        more: list[Tensor] = []
        if bias == "":
            stored = correction.to(dtype)
            more = [stored]
        elif bias is not None:
            target = _at(probe, bias)
            target.copy_(correction.reshape(target.shape))
            stored = target.reshape(-1).clone()
        logits, scores, ids = probe.train(training)(hidden.clone(), *more)
        shape = (len(hidden), ids.shape[-1])
        if (logits.shape, scores.shape, ids.shape, ids.dtype) != (hidden.shape, shape, shape, torch.int64):
            return None
        seen.append(_Seen(logits, scores, ids, stored, more))
    return probe, hidden, seen


def _flattens(probe: Any, hidden: Tensor, seen: _Seen) -> bool:
    """Whether hidden states in another shape gave the same."""
    try:
        results = probe(hidden.clone().unflatten(0, (2, -1)), *seen.more)
    except Exception:  # of any kind: it does not
        return False
    same = zip(results, (seen.logits, seen.scores, seen.ids), strict=True)
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in same)


def _probes(experts: int, generator: torch.Generator) -> Tensor:
    """(P, E): logits of several magnitudes, and some whose sigmoids are as small as an epsilon in their sum."""
    shift = torch.tensor([0.0] * 32 + [-10.0, -14.0, -18.0, -30.0, -44.0, -46.0, -48.0, -50.0] * 2, device="cpu")
    scale = torch.tensor([0.3, 1.0, 2.0, 8.0] + [1.0] * 2, device="cpu").repeat_interleave(8)
    logits = torch.randn(len(shift), experts, generator=generator, device="cpu", dtype=torch.float32)
    return logits * scale[:, None] + shift[:, None]


def _forms(router: Any, seen: list[_Seen]) -> Iterator[RouterForm]:
    """The forms that choose as seen and whose numbers are attributes of the router, the simplest first."""
    top_k, experts = seen[0].ids.shape[1], seen[0].logits.shape[1]
    settings = dict(settings_of(router))
    groups: list[dict[str, Any]] = [{}]
    for names in _GROUPS:
        total, kept = (settings.get(name) for name in names)
        if isinstance(total, int) and isinstance(kept, int) and 1 <= kept < total and experts % total == 0:
            for best, to_zero in itertools.product((2, 1), (False, True)):
                if best <= experts // total and top_k <= experts // total * kept:
                    groups.append(dict(num_groups=total, top_groups=kept, group_best=best, mask_to_zero=to_zero))
    scales, sums, epsilons = (
        sorted({*known, *(float(settings.get(name) or known[0]) for name in names)})
        for known, names in (((1.0, 1.0 / top_k), _SCALES), ((0.0,), _SUMS), ((0.0, 1e-20, 1e-6), _EPSILONS))
    )
    for score, group in itertools.product(("softmax", "sigmoid"), groups):
        form = RouterForm(top_k, score, **group)
        if not all(_chooses(form, one) for one in seen):
            continue
        for scale in scales:
            yield replace(form, normalize=False, scale=scale)
            for least_sum, epsilon in itertools.product(sums, epsilons):
                yield replace(form, scale=scale, least_sum=least_sum, epsilon=epsilon)


def _chooses(form: RouterForm, seen: _Seen) -> bool:
    """Whether the form chooses what was seen, but for the order, and for experts that are equal to rounding."""
    choice = form.choice(form.scores(seen.logits), seen.correction)
    best = choice.topk(form.top_k, dim=-1).values
    own = choice.gather(-1, seen.ids).sort(dim=-1, descending=True).values
    distinct = bool(seen.ids.sort(dim=-1).values.diff(dim=-1).ne(0).all())
    return distinct and torch.allclose(own, best, rtol=1e-5, atol=1e-30)


def _agrees(form: RouterForm, seen: _Seen) -> bool:
    """Whether the form gives the scores seen: of 16 bits, nearly always the very same."""
    scores = form.weigh(form.scores(seen.logits).gather(-1, seen.ids)).to(seen.scores.dtype)
    if scores.dtype == torch.float32:
        return torch.allclose(seen.scores, scores, rtol=1e-5, atol=0.0)
    same = float((seen.scores == scores).float().mean())
    return same > 0.98 and torch.allclose(seen.scores.float(), scores.float(), rtol=2**-7, atol=0.0)
