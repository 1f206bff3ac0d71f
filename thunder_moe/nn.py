"""Mixture-of-Experts modules: GroupedLinear, SwiGLU, GroupedSwiGLU, Llama4MoE, and the NVFP4 forms of the grouped ones.
Called by users and by quantize; calls torch's grouped GEMM, or the package's operators once a module is quantised.

Legend: T tokens, M = T * top_k rows sorted by expert, E experts, H hidden_size, I intermediate_size,
N out_features, K in_features. `offsets` is int32 (E,): cumulative row ENDS, group 0 starts at row 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.kernels.select import resolve_layout
from thunder_moe.kernels.slow_paths import warn_once
from thunder_moe.nvfp4 import BLOCK_SIZE, NVFP4Weight, dequantize, require
from thunder_moe.nvfp4_layouts import layout_of_blocks
from thunder_moe.ops import grouped_swiglu  # noqa: F401  (registers the operator)
from thunder_moe.ops.experts import moe_experts
from thunder_moe.ops.grouped_mm import operands

if TYPE_CHECKING:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

__all__ = [
    "MODULE_LAYOUTS",
    "GroupedLinear",
    "GroupedSwiGLU",
    "Llama4MoE",
    "Llama4MoEConfig",
    "NVFP4GroupedLinear",
    "NVFP4GroupedSwiGLU",
    "SwiGLU",
]

# Layouts of `nvfp4.LAYOUTS` that modules keep their weights in; nvFuser's route lays its own out.
MODULE_LAYOUTS = ("linear", "humming", "tiled_64x64")
_FIELDS = ("qdata", "scale", "global_scale")


class GroupedLinear(nn.Module):
    """One linear map per expert, without bias: rows of expert e are multiplied by ``weight[e].T``.

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        dtype: of the weight, torch's default when None.
        device: of the weight, torch's default when None.

    Attributes:
        weight: parameter (E, N, K), initialised as `torch.nn.Linear` does: U(-K**-0.5, K**-0.5).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_experts=num_experts, in_features=in_features, out_features=out_features)
        for name, size in sizes.items():
            _require_positive(name, size)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N); rows past ``offsets[-1]`` are undefined.

        Raises:
            ValueError: x or offsets has the wrong rank, size, dtype or device.
        """
        _check_rows(x, offsets, self.weight)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


class SwiGLU(nn.Module):
    """Dense feed-forward block: ``down_proj(silu(gate_proj(x)) * up_proj(x))``, (..., H) -> (..., H)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedSwiGLU(nn.Module):
    """The experts of a layer: `SwiGLU` with one set of weights per expert.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, H) rows sorted by expert, offsets (E,) row ends -> (M, H)."""
        return self.down_proj(F.silu(self.gate_proj(x, offsets)) * self.up_proj(x, offsets), offsets)


class NVFP4GroupedLinear(nn.Module):
    """`GroupedLinear` with frozen 4-bit weights, kept as buffers.

    The shapes of qdata and scale tell their layout (`nvfp4_layouts.block_shapes`), so whoever holds the buffers, puts
    others in their place (``functional_call``) or keeps older ones has the layout with the bytes. State dicts hold
    layout "linear" whatever the module's, and load into any: they are converted on the way. Those of a module in
    another layout are copies then, which do not follow the module, and where modules share weights, one each.

    Args:
        weight: (E, N, K); kept in its layout if that is one of `MODULE_LAYOUTS`, else in "linear".
        weight_dtype: of the 16-bit weight that this one stands for; what `dequantize_` gives back. One for each where
            it stands for several of the same size, whose rows are stacked (gate and up).
        weight_requires_grad: whether that weight was trainable; likewise.
        auto_layout: whether the weights are laid out for the device that the module is moved to.

    Attributes:
        qdata, scale, global_scale: the tensors of the `NVFP4Weight`. ``module.to(dtype)`` leaves them as they are.
        weight_dtypes, weights_require_grad: tuples of the above.
        auto_layout: as above.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    auto_layout: bool = False  # of modules pickled before there was a choice
    _layout_to_be: str | None = None  # once the scales have been loaded whose codes were

    def __init__(
        self,
        weight: NVFP4Weight,
        *,
        weight_dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
        weight_requires_grad: bool | Sequence[bool] = False,
        auto_layout: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.out_features, self.in_features = weight.shape
        dtypes, grads = weight_dtype, weight_requires_grad
        self.weight_dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        self.weights_require_grad = (grads,) if isinstance(grads, bool) else tuple(grads)
        if len(self.weight_dtypes) != len(self.weights_require_grad) or self.out_features % len(self.weight_dtypes):
            raise ValueError(
                f"weight_dtype: got {dtypes} with weight_requires_grad {grads}, wanted one of each for every one of"
                f" the weights that share the {self.out_features} out_features evenly"
            )
        self.auto_layout = auto_layout
        layout = weight.layout if weight.layout in MODULE_LAYOUTS else "linear"
        for field, tensor in zip(_FIELDS, weight.to_layout(layout).blocks, strict=True):
            self.register_buffer(field, tensor)

    @property
    def layout(self) -> str:
        """The layout of the weights, by the shapes of the buffers."""
        return layout_of_blocks(self.qdata, self.scale)

    @property
    def nvfp4_weight(self) -> NVFP4Weight:
        qdata, scale = self.qdata, self.scale
        layout = layout_of_blocks(qdata, scale)
        if layout != "linear":
            # The permutation does nothing, or fails for buffers of another rank: an exported program keeps these calls
            # and the buffers, whose layout may change afterwards.
            rows, dims = (self.num_experts, self.out_features), tuple(range(qdata.ndim))
            qdata = qdata.permute(dims).view(*rows, self.in_features // 2)
            scale = scale.permute(dims).view(*rows, self.in_features // BLOCK_SIZE)
        return NVFP4Weight.unchecked(qdata, scale, self.global_scale, layout)

    @torch.no_grad()
    def set_weight(self, weight: NVFP4Weight) -> None:
        """Takes another weight of the same shape, in its layout; the only way to change the buffers.

        The buffers become other memory, and modules that are tied to this one have them too. Detached aliases, as of a
        state dict, keep the old bytes in the old shape.

        Raises:
            ValueError: the weight has another shape, or a layout that is not one of `MODULE_LAYOUTS`.
        """
        shape = (self.num_experts, self.out_features, self.in_features)
        if weight.shape != shape or weight.layout not in MODULE_LAYOUTS:
            raise ValueError(
                f"weight: got shape {weight.shape} in layout {weight.layout!r}, wanted {shape} in one of"
                f" {MODULE_LAYOUTS}"
            )
        self._layout_to_be = None
        for field, tensor in zip(_FIELDS, weight.blocks, strict=True):
            buffer = self._replace(field, tensor)
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)  # a backward that waits for the old bytes fails

    def dequantized(self) -> list[Tensor]:
        """The 16-bit weights that it stands for, each (E, N / their number, K) of its own dtype and contiguous."""
        linear = self.nvfp4_weight.to_layout("linear")
        global_scale = linear.row_global_scale()
        step, weights = self.out_features // len(self.weight_dtypes), []
        for index, dtype in enumerate(self.weight_dtypes):
            rows = slice(index * step, (index + 1) * step)
            part = NVFP4Weight(linear.qdata[:, rows], linear.scale[:, rows], global_scale[:, rows])
            wide = dtype not in (torch.bfloat16, torch.float16, torch.float32)  # after .double(), say
            weights.append(dequantize(part, torch.float32 if wide else dtype).to(dtype))
        return weights

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N)."""
        weight = self.nvfp4_weight
        grouped_mm = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm
        return grouped_mm(x, *operands(weight), offsets, layout=weight.layout)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != "linear":
            linear = self.nvfp4_weight.to_layout("linear")
            destination[f"{prefix}qdata"], destination[f"{prefix}scale"] = linear.qdata, linear.scale

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *options: Any
    ) -> None:
        state_dict = _by_bits(state_dict, prefix)
        given = [field for field in _FIELDS if f"{prefix}{field}" in state_dict]
        assign = local_metadata.get("assign_to_params_buffers", False)
        device, layout = self.qdata.device, self._layout_to_be or self.layout
        # Torch loads into (or assigns) linear tensors, all or some; then their contents go where ours are.
        own = {field: getattr(self, field) for field in _FIELDS}
        self._buffers.update(zip(_FIELDS, self.nvfp4_weight.to_layout("linear").tensors(), strict=True))
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)
            weight = NVFP4Weight.unchecked(self.qdata, self.scale, self.global_scale, "linear")
            parted = "qdata" in given and "scale" not in given and _would_lose_codes(weight, layout)
            self._layout_to_be = layout if parted else None
            if layout != "linear" and not parted:
                weight = NVFP4Weight(*weight.tensors()).to_layout(layout)
        finally:
            self._buffers.update(own)
        for field, tensor in zip(_FIELDS, weight.blocks, strict=True):
            if assign and field in given:
                self._buffers[field] = tensor
            elif tensor.shape != own[field].shape:
                self._replace(field, tensor)
            elif tensor is not own[field]:  # also codes of which only the scales are loaded: "tiled_64x64" clears some
                own[field].copy_(tensor)
        whole = len({getattr(self, field).device for field in _FIELDS}) == 1 and (
            "scale" in given or "qdata" not in given
        )
        if assign and whole:
            self._fit_device(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4GroupedLinear:
        # `to(dtype)` must not cast the format's own tensors, and tied modules must stay tied: move each in place.
        before = self.qdata.device
        own = {field: self._buffers.pop(field) for field in _FIELDS}
        try:
            super()._apply(fn, recurse)  # whatever else a subclass has
        finally:
            self._buffers.update(own)
        for field in _FIELDS:
            buffer = getattr(self, field).data
            bits = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer  # scales: most casts spare integers
            moved = fn(bits)
            moved = moved if moved.dtype == bits.dtype else bits.to(moved.device)
            self._replace(field, moved.view(buffer.dtype))
        empty = partial(torch.empty, 0, device=self.qdata.device)
        self.weight_dtypes = tuple(fn(empty(dtype=dtype)).dtype for dtype in self.weight_dtypes)
        self._fit_device(before)
        return self

    def _replace(self, field: str, tensor: Tensor) -> Tensor:
        buffer: Tensor = getattr(self, field)
        if torch._has_compatible_shallow_copy_type(buffer, tensor):
            buffer.data = tensor
            return buffer
        self._buffers[field] = tensor  # between a real device and "meta"; nn.Module unties there too
        return tensor

    def _fit_device(self, before: torch.device) -> None:
        """Lays the weights out for the device that they were moved to, or tells who asked for a layout that it is slow
        there."""
        device, layout, sizes = self.qdata.device, self.layout, (self.out_features, self.in_features)
        if device.type == "meta":
            return
        if self.auto_layout:
            wanted = resolve_layout("auto", device, *sizes)
            if wanted != layout:
                self.set_weight(self.nvfp4_weight.to_layout(wanted))
        elif device != before and layout != "linear":
            read_as_it_is = layout == "humming" and device.type == "cuda"
            if not read_as_it_is and layout != resolve_layout("auto", device, *sizes):
                warn_once(
                    ("moved", layout, device.type),
                    f"4-bit weights in layout {layout!r} were moved to a {device.type!r} device, where kernels have to"
                    " convert them at every call; to_layout_(model) lays them out for it",
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of earlier versions have the layout as an attribute, and one weight_dtype.
        state = dict(state)
        layout = state.pop("layout", "linear")
        for old, name in (("weight_dtype", "weight_dtypes"), ("weight_requires_grad", "weights_require_grad")):
            if old in state:
                state[name] = (state.pop(old),)
        super().__setstate__(state)
        if layout != "linear" and self.qdata.ndim == 3:
            weight = NVFP4Weight.unchecked(self.qdata, self.scale, self.global_scale, layout)
            for field, tensor in zip(_FIELDS, weight.blocks, strict=True):
                self._replace(field, tensor)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, nvfp4" + (f", layout={self.layout!r}" if self.layout != "linear" else "")


class NVFP4GroupedSwiGLU(nn.Module):
    """`GroupedSwiGLU` with frozen 4-bit weights: one GEMM over [gate; up] with the activation in the same operator.

    Args:
        gate_up_proj: (E, 2I, H), the gate's rows first.
        down_proj: (E, H, I).
    """

    def __init__(self, gate_up_proj: NVFP4GroupedLinear, down_proj: NVFP4GroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, H) rows sorted by expert, offsets (E,) row ends -> (M, H)."""
        gate_up = self.gate_up_proj.nvfp4_weight
        swiglu = torch.ops.thunder_moe.f16a_nvfp4weight_grouped_swiglu
        return self.down_proj(swiglu(x, *operands(gate_up), offsets, layout=gate_up.layout), offsets)


@dataclass(frozen=True)
class Llama4MoEConfig:
    """Sizes of a `Llama4MoE`.

    Attributes:
        hidden_size: H.
        intermediate_size: I of each routed expert, and of each shared one.
        num_routed_experts: E.
        num_shared_experts: experts that see every token, run as one of num_shared_experts * I; 0 for none.
        top_k: routed experts per token.

    Raises:
        ValueError: a size is not positive, or top_k exceeds num_routed_experts.
    """

    hidden_size: int
    intermediate_size: int
    num_routed_experts: int
    num_shared_experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive(field.name, getattr(self, field.name), least=int(field.name != "num_shared_experts"))
        if self.top_k > self.num_routed_experts:
            raise ValueError(f"top_k: got {self.top_k}, wanted at most num_routed_experts = {self.num_routed_experts}")


class Llama4MoE(nn.Module):
    """The Mixture-of-Experts feed-forward block of Llama 4.

    router -> top_k -> rows sorted by expert, times sigmoid(router logit) -> routed experts -> sum per token; plus the
    shared expert

    Traceable by Thunder and by ``torch.compile(fullgraph=True)``; never synchronises with the host.

    Args:
        config: the sizes.
        dtype: of the weights, torch's default when None.
        device: of the weights.
    """

    def __init__(
        self,
        config: Llama4MoEConfig,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.num_experts, self.top_k = config.num_routed_experts, config.top_k
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.router = nn.Linear(hidden, self.num_experts, bias=False, **options)
        self.routed_experts = GroupedSwiGLU(self.num_experts, hidden, intermediate, **options)
        shared = config.num_shared_experts
        self.shared_expert: SwiGLU | None = SwiGLU(hidden, shared * intermediate, **options) if shared else None

    @classmethod
    def from_transformers(cls, module: Llama4TextMoe) -> Llama4MoE:
        """Copies the weights of a transformers `Llama4TextMoe` exactly.

        Raises:
            TypeError: module is not a `Llama4TextMoe`, or one of a subclass.
            ValueError: its activation is not SiLU, or its forward or that of one of its parts was replaced.
            ImportError: transformers is missing.
        """
        try:
            from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
        except ImportError as error:
            raise ImportError(
                "from_transformers needs transformers: pip install 'thunder_moe[transformers]'"
            ) from error
        from thunder_moe.replaceable import has_own_forward

        if type(module) is not Llama4TextMoe:
            raise TypeError(f"module: got {type(module).__name__}, wanted transformers' Llama4TextMoe")
        for name, part in (("module", module), *((f"module.{name}", part) for name, part in module.named_children())):
            if not has_own_forward(part):
                raise ValueError(f"{name}: its forward was replaced, wanted that of {type(part).__name__}")
        probes = torch.linspace(-10, 10, 41, device="cpu", dtype=torch.float32)
        for name, act_fn in (
            ("experts.act_fn", module.experts.act_fn),
            ("shared_expert.activation_fn", module.shared_expert.activation_fn),
        ):
            if not torch.allclose(act_fn(probes), F.silu(probes)):
                raise ValueError(f"module.{name}: got {act_fn}, wanted SiLU")
        gate_up, down = module.experts.gate_up_proj, module.experts.down_proj  # (E, H, 2I), (E, I, H)
        experts, intermediate, hidden = down.shape
        config = Llama4MoEConfig(hidden, intermediate, experts, top_k=module.top_k)
        moe = cls(config, dtype=down.dtype, device=down.device)
        gate, up = gate_up.chunk(2, -1)
        state = {f"shared_expert.{name}": tensor for name, tensor in module.shared_expert.state_dict().items()}
        state |= {"router.weight": module.router.weight, "routed_experts.down_proj.weight": down.mT}
        state |= {"routed_experts.gate_proj.weight": gate.mT, "routed_experts.up_proj.weight": up.mT}
        moe.load_state_dict(state)
        moe.requires_grad_(down.requires_grad)
        return moe.train(module.training)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H).

        Raises:
            ValueError: hidden_states has the wrong rank or hidden size.
        """
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            shape = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states: got shape {shape}, wanted (batch, sequence, {self.config.hidden_size})")
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        out_TH = self.run_routed_experts(x_TH)
        if self.shared_expert is not None:
            out_TH = out_TH + self.shared_expert(x_TH)
        return out_TH.reshape(hidden_states.shape)

    def run_routed_experts(self, x_TH: Tensor) -> Tensor:
        """(T, H) -> (T, H): the routed experts alone, weighted by the router."""
        logits_TA, ids_TA = self.router(x_TH).topk(self.top_k, dim=-1)  # A = top_k
        if isinstance(self.routed_experts, NVFP4GroupedSwiGLU):
            weights = self.routed_experts.gate_up_proj.nvfp4_weight, self.routed_experts.down_proj.nvfp4_weight
            return moe_experts(x_TH, ids_TA, torch.sigmoid(logits_TA.float()), *weights, weight_on_input=True)
        order_M, offsets_E = sort_by_expert(ids_TA.reshape(-1), self.num_experts)
        weight_M = torch.sigmoid(logits_TA.float()).to(x_TH.dtype).reshape(-1)[order_M]
        rows_MH = x_TH[order_M // self.top_k] * weight_M[:, None]
        inverse_M = invert(order_M)
        out_MH = self.routed_experts(rows_MH, offsets_E)[inverse_M]
        return out_MH if self.top_k == 1 else out_MH.reshape(-1, self.top_k, x_TH.shape[-1]).sum(1)


def sort_by_expert(ids_M: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """`moe_route` in what Thunder and torch.compile trace of torch itself, for 16-bit experts.

    Args:
        ids_M: int64 (M,), the expert of each slot.
        num_experts: E.

    Returns:
        (order, offsets): the slot of each row, sorted by expert, stably; int32 (E,) row ends.
    """
    order_M = torch.argsort(ids_M, stable=True)
    ones_M = torch.ones_like(ids_M, dtype=torch.int32)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_M.device).scatter_add(0, ids_M, ones_M)
    return order_M, torch.cumsum(counts_E, 0, dtype=torch.int32)


def invert(order_M: Tensor) -> Tensor:
    """The inverse of a permutation, int64 (M,): by a scatter, one kernel, where a second sort is several."""
    return torch.zeros_like(order_M).scatter(0, order_M, torch.arange(order_M.shape[0], device=order_M.device))


def _check_rows(x: Tensor, offsets: Tensor, weight: Tensor) -> None:
    """The checks of `GroupedLinear.forward`; conditions on sizes and dtypes alone, so that compilers trace through."""
    experts, _, k = weight.shape
    require(x.ndim == 2 and x.shape[1] == k, "x", x, f"shape (rows, in_features = {k})")
    require(x.dtype == weight.dtype, "x", x, f"dtype {weight.dtype}, that of the weight")
    require(x.device == weight.device, "x", x, f"device {weight.device}, that of the weight")
    # While Thunder traces, a dtype is one of its own; its symbol for the grouped GEMM checks it then.
    require(
        offsets.dtype == torch.int32 or not isinstance(offsets.dtype, torch.dtype), "offsets", offsets, "dtype int32"
    )
    wanted = f"shape ({experts},), one row end per expert"
    require(offsets.ndim == 1 and offsets.shape[0] == experts, "offsets", offsets, wanted)
    require(offsets.device == x.device, "offsets", offsets, f"device {x.device}, that of x")


def _would_lose_codes(weight: NVFP4Weight, layout: str) -> bool:
    """Whether a layout clears codes of a linear weight that has its codes, but not yet their scales, from a file."""
    if layout == "linear" or weight.scale.is_meta:
        return layout != "linear" and not weight.qdata.is_meta
    return bool((weight.scale.view(torch.uint8) == 0).any())


def _by_bits(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A state dict whose 4-bit weight has our dtypes: bytes that were saved as such are taken as they are.

    Raises:
        ValueError: another dtype, which torch would convert by value.
    """
    bytes_of = {"qdata": (torch.float4_e2m1fn_x2,), "scale": (torch.uint8,), "global_scale": ()}
    state_dict = dict(state_dict)
    for (field, same), dtype in zip(bytes_of.items(), (torch.uint8, torch.float8_e4m3fn, torch.float32), strict=True):
        key = f"{prefix}{field}"
        tensor = state_dict.get(key)
        if isinstance(tensor, Tensor) and tensor.dtype != dtype:
            wanted = " or ".join(["dtype " + str(dtype).removeprefix("torch."), *map(str, same)])
            require(tensor.dtype in same, key, tensor, wanted)
            state_dict[key] = tensor.view(dtype)
    return state_dict


def _require_positive(name: str, size: int, *, least: int = 1) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{name}: got {size!r}, wanted an integer of at least {least}")
