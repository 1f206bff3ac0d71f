"""Operators bound to a module's weights: a call allocates, fills the structs of its kernels and launches them.
Called by integrations.huggingface and nn.linear through kernels/select.py, for eager inference at the least host time;
calls backend.py for the launches, and those of layer.py, prepared.py and router.py.

What the operators do at every call, such as looking up the launches by all operands, happens here once for given
weights and a number of tokens. Legend: T tokens, A = top_k, M = T * A rows, E experts, H hidden_size,
I intermediate_size, N and K output and input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_moe.activations import GLU
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.by_parts import Order, PackedOrder
from thunder_moe.kernels.cuda import backend, launch
from thunder_moe.kernels.cuda.configs import TILED
from thunder_moe.kernels.cuda.layer import GEMMS, LayerLaunch
from thunder_moe.kernels.cuda.prepared import GemmLaunch, gemm_launch
from thunder_moe.kernels.cuda.router import linear_router_launch, router_launch, serves_linear, unserved_reason
from thunder_moe.routing import RouterForm

__all__ = [
    "FORMATS",
    "BoundExperts",
    "BoundLinear",
    "Chain",
    "Weights",
    "bind_experts",
    "bind_linear",
    "bind_linear_router",
    "bind_router",
]

FORMATS = backend.FORMATS
_ALIGNED = 256  # bytes: of the parts of a chain's memory
_MAX_KINDS = 256  # of calls that bound experts remember


class Weights(NamedTuple):
    """Addresses, multiples of 16; those of gate_up and down are of qdata, scale and global_scale. 0 for no bias, and
    for the global scale of a format without."""

    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]
    gate_up_bias: int
    down_bias: int


class Chain:
    """The kernels of `LayerLaunch` behind a router, from addresses.

    Args:
        layer: without a gather kernel or a tensor map in its GEMMs, as plans for few rows have none.
        weights: addresses.
    """

    def __init__(self, layer: LayerLaunch, weights: Weights) -> None:
        self.layer, self._empty, self._out = layer, layer.combine.empty, layer.combine.result
        self._gate_up, self._down, self._gate_up_bias, self._down_bias = weights
        begins, end = [], 0  # bytes: gate_up's result and partial sums, those of down
        for gemm in (layer.gate_up, layer.down):
            for size in (gemm.out_bytes, gemm.sums_bytes):
                begins.append(end)
                end += -(-size // _ALIGNED) * _ALIGNED
        self._inner, self._inner_sums, self._rows, self._rows_sums = begins
        self._memory = ((end,), (1,), torch.uint8)

    def __call__(self, hidden_states: Tensor, expert_weights: Tensor, order: tuple[int, int, int]) -> Tensor:
        """Contiguous (T, H) and (T, A), and the addresses of row_slot, offsets and slot_row -> (T, H)."""
        layer = self.layer
        gate_up, down, combine = layer.gate_up, layer.down, layer.combine
        row_slot, offsets, slot_row = order
        weight = expert_weights.data_ptr()
        on_input, on_output = (weight, 0) if layer.weight_on_input else (0, weight)
        memory, out = self._empty(*self._memory), self._empty(*self._out)
        base = memory.data_ptr()
        inner, rows = base + self._inner, base + self._rows
        late = down.reads_early
        first, second = gate_up.take_workspace(False), down.take_workspace(late)
        of_gate_up = gate_up.fields(
            hidden_states.data_ptr(), *self._gate_up, offsets, row_slot, on_input, self._gate_up_bias, inner,
            gate_up.sums_bytes and base + self._inner_sums, 0 if first is None else first.data_ptr(), False,
        )  # fmt: skip
        of_down = down.fields(
            inner, *self._down, offsets, 0, 0, self._down_bias, rows, down.sums_bytes and base + self._rows_sums,
            0 if second is None else second.data_ptr(), late,
        )  # fmt: skip
        stream = launch.current_stream(layer.device)
        with GEMMS:
            gate_up.launcher(stream, *of_gate_up)
            down.launcher(stream, *of_down)
        combine.launcher(stream, rows, slot_row, on_output, out.data_ptr(), *combine.numbers)
        return out


class BoundExperts:
    """`moe_experts` for given weights, on operands that need no conversion.

    Args:
        launches: (hidden_states, expert_ids, expert_weights) -> the launches for operands of that kind, which have
            passed the operator's checks; None where some have to be converted or gathered first.
        weights: whose memory the caller keeps alive.
        device: of the weights.
    """

    def __init__(
        self,
        launches: Callable[[Tensor, Tensor, Tensor], LayerLaunch | None],
        weights: Weights,
        device: torch.device,
    ) -> None:
        self._launches, self._weights, self._index = launches, weights, device.index
        self._chains: dict[Any, Chain | None] = {}  # None: for the operator

    def __call__(
        self, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor, order: PackedOrder | Order | None
    ) -> Tensor | None:
        """What the operator gives for (T, H), (T, A) and (T, A), bit for bit; None where only it can tell.

        The first call for operands of a kind is the operator's, which checks them: `learn` makes the next ones quick.
        `order`: that of the ids, where it is known, as a router has left it.
        """
        chain = self._chains.get(_kind(hidden_states, expert_ids, expert_weights))
        if (
            chain is None
            or launch.current_device() != self._index
            or not (hidden_states.is_contiguous() and expert_ids.is_contiguous() and expert_weights.is_contiguous())
            or hidden_states.data_ptr() & 15
        ):
            return None
        if isinstance(order, PackedOrder):
            return chain(hidden_states, expert_weights, order.addresses)
        if order is None:
            assert chain.layer.route is not None
            order = chain.layer.route(expert_ids)
        row_slot, offsets, slot_row = order
        if not (row_slot.is_contiguous() and offsets.is_contiguous() and slot_row.is_contiguous()):
            return None
        return chain(hidden_states, expert_weights, (row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr()))

    def learn(self, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> None:
        """Makes calls with operands of the kind of these quick, for which the operator has just run."""
        kind = _kind(hidden_states, expert_ids, expert_weights)
        if kind in self._chains:
            return
        layer = self._launches(hidden_states, expert_ids, expert_weights)
        if len(self._chains) >= _MAX_KINDS:
            self._chains.clear()
        self._chains[kind] = None if layer is None else Chain(layer, self._weights)


class BoundLinear:
    """`f16a_nvfp4weight_scaled_mm` for a given weight, on rows that need no conversion.

    Args:
        launch_of: rows (..., K) -> the launch for their number, dtype and device, which have passed the operator's
            checks; None where they have to be converted first.
        weight: addresses of qdata, scale and global_scale, whose memory the caller keeps alive.
        bias: likewise; 0 for none.
        features: N.
        device: of the weight.
    """

    def __init__(
        self,
        launch_of: Callable[[Tensor], GemmLaunch | None],
        weight: tuple[int, int, int],
        bias: int,
        features: int,
        device: torch.device,
    ) -> None:
        self._launch_of, self._weight, self._bias = launch_of, weight, bias
        self._features, self._index = features, device.index
        self._known: dict[Any, tuple[GemmLaunch, Any, tuple[Any, ...]] | None] = {}  # None: for the operator

    def __call__(self, x: Tensor) -> Tensor | None:
        """What the operator gives for (..., K), bit for bit; None where only it can tell, as in `BoundExperts`."""
        known = self._known.get((x.shape, x.dtype, x.device))
        if known is None or launch.current_device() != self._index or not x.is_contiguous():
            return None
        gemm, empty, result = known
        address = x.data_ptr()
        if address & 15:
            return None
        out: Tensor = empty(*result)
        workspace, sums = gemm.take_workspace(False), None
        if gemm.sums_bytes:
            sums = empty((gemm.sums_bytes,), (1,), torch.uint8)
        fields = gemm.fields(
            address, *self._weight, 0, 0, 0, self._bias, out.data_ptr(), 0 if sums is None else sums.data_ptr(),
            0 if workspace is None else workspace.data_ptr(), False,
        )  # fmt: skip
        gemm.launcher(launch.current_stream(self._index), *fields)
        return out

    def learn(self, x: Tensor) -> None:
        """Makes calls with rows like these quick, for which the operator has just run."""
        kind = x.shape, x.dtype, x.device
        if kind in self._known:
            return
        gemm = self._launch_of(x)
        if len(self._known) >= _MAX_KINDS:
            self._known.clear()
        known = None
        if gemm is not None:
            shape = (*x.shape[:-1], self._features)
            known = gemm, launch.allocator(x.device), (shape, torch.empty(shape, device="meta").stride(), x.dtype)
        self._known[kind] = known


def bind_linear(weight: PackedWeight, bias: Tensor | None) -> BoundLinear | None:
    """`f16a_nvfp4weight_scaled_mm` bound to a weight (1, N, K) and a bias (N,); None where they have to be converted at
    every call."""
    tensors = *weight.tensors(), *(() if bias is None else (bias,))
    device, (_, n, k), layout, per_row = weight.device, weight.shape, weight.layout, backend._per_row(weight)
    format = weight.format.name
    of_bias = None if bias is None else bias.dtype
    if layout not in (LINEAR, TILED) or not _addressable(tensors, device) or of_bias not in (None, *DTYPE_CODES):
        return None

    def launch_of(x: Tensor) -> GemmLaunch | None:
        rows = x.numel() // k
        if x.dtype == torch.float32 or rows == 0 or x.device != device:
            return None
        facts = backend._device_facts(device)
        gemm = gemm_launch(
            rows, 1, n, k, None, x.dtype, layout, per_row, None, of_bias, None, device, facts, None, format
        )
        return gemm if gemm.layout == layout and gemm.alone else None

    return BoundLinear(launch_of, _addresses(weight), 0 if bias is None else bias.data_ptr(), n, device)


def _addresses(weight: PackedWeight) -> tuple[int, int, int]:
    """Of qdata, scale and global_scale; 0 for the last of a format without."""
    global_scale = weight.global_scale
    return weight.qdata.data_ptr(), weight.scale.data_ptr(), 0 if global_scale is None else global_scale.data_ptr()


def _addressable(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether kernels can read all tensors where they lie."""
    return all(tensor.device == device and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def bind_experts(
    gate_up: PackedWeight, down: PackedWeight, gate_up_bias: Tensor | None, down_bias: Tensor | None,
    weight_on_input: bool, form: GLU,
) -> BoundExperts | None:  # fmt: skip
    """`moe_experts` bound to its weights; None where they have to be converted at every call."""
    biases = gate_up_bias, down_bias
    tensors = *gate_up.tensors(), *down.tensors(), *(bias for bias in biases if bias is not None)
    device, features, experts = gate_up.device, down.shape[2], gate_up.shape[0]
    if (
        not {gate_up.layout, down.layout} <= {LINEAR, TILED}
        or (gate_up.layout == TILED and features % 64 != 0)
        or experts > backend.MAX_EXPERTS
        or not _addressable(tensors, device)
        or not all(bias is None or bias.dtype in DTYPE_CODES for bias in biases)
    ):
        return None
    of_weights = (
        gate_up.layout, down.layout, backend._per_row(gate_up), backend._per_row(down),
        None if gate_up_bias is None else gate_up_bias.dtype, None if down_bias is None else down_bias.dtype,
        experts, features, True, weight_on_input, form, (None, None), (gate_up.format.name, down.format.name),
    )  # fmt: skip

    def launches(hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> LayerLaunch | None:
        read = hidden_states.dtype != torch.float32 and expert_ids.numel() > 0 and expert_weights.dtype in DTYPE_CODES
        if not read or hidden_states.device != device:
            return None
        layer = backend.layer_launch(hidden_states, expert_ids, expert_weights, *of_weights)
        same = (layer.gate_up.layout, layer.down.layout) == (gate_up.layout, down.layout)
        fit = all(each.alone and not each.maps_rows for each in (layer.gate_up, layer.down))
        return layer if same and fit else None

    of_biases = [0 if bias is None else bias.data_ptr() for bias in biases]
    weights = Weights(_addresses(gate_up), _addresses(down), *of_biases)
    return BoundExperts(launches, weights, device)


def bind_router(logits: Tensor, bias: Tensor | None, form: RouterForm, scores_dtype: torch.dtype) -> Any:
    """The launches (`RouterLaunch.packed`) for contiguous logits (T, E) and bias (E,) like these; None where there are
    none."""
    tokens, experts = logits.shape
    if bias is not None and ((bias.shape, bias.device) != ((experts,), logits.device) or not bias.is_contiguous()):
        return None
    known = all(tensor is None or tensor.dtype in DTYPE_CODES for tensor in (logits, bias))
    if tokens == 0 or not known or unserved_reason(experts, form) is not None or not logits.is_contiguous():
        return None
    dtype = None if bias is None else bias.dtype
    return router_launch((tokens, experts), form, logits.dtype, dtype, scores_dtype, logits.device)


def bind_linear_router(
    hidden: Tensor, weight: Tensor, linear_bias: Tensor | None, bias: Tensor | None, form: RouterForm,
    logits_dtype: torch.dtype, scores_dtype: torch.dtype,
) -> Any:  # fmt: skip
    """The launch (`LinearRouterLaunch.packed`) for contiguous rows (T, H), weight (E, H), linear_bias and bias (E,)
    like these; None where there is none."""
    (tokens, size), (experts, k), device, dtype = hidden.shape, weight.shape, hidden.device, hidden.dtype
    for vector, dtypes in ((linear_bias, (dtype,)), (bias, tuple(DTYPE_CODES))):
        if vector is None:
            continue
        if (vector.shape, vector.device) != ((experts,), device) or vector.dtype not in dtypes:
            return None
        if not vector.is_contiguous():
            return None
    contiguous = hidden.is_contiguous() and weight.is_contiguous()
    if (k, weight.dtype, weight.device) != (size, dtype, device) or not contiguous:
        return None
    shape = tokens, experts
    if dtype not in DTYPE_CODES or not serves_linear(shape, size, form, dtype):
        return None
    of_bias = None if bias is None else bias.dtype
    args = shape, size, form, dtype, linear_bias is not None, of_bias, logits_dtype, scores_dtype, device
    return linear_router_launch(*args)


def _kind(hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> tuple[Any, ...]:
    return (
        hidden_states.shape, hidden_states.dtype, expert_ids.shape, expert_ids.dtype, expert_weights.shape,
        expert_weights.dtype, hidden_states.device,
    )  # fmt: skip
