"""The 4-bit modules, NVFP4GroupedLinear and NVFP4GroupedSwiGLU; the shapes of their buffers encode the layout.
Called by users, nn.llama4, grouped_experts and integrations.huggingface; calls the package's operators, and
kernels.select for the layout that a device reads best.

Legend: M rows sorted by expert, E experts, H hidden_size, I intermediate_size, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LINEAR, MODULE_LAYOUTS, layout_of_blocks
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, WEIGHT_DTYPES, dequantize
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.select import lay_out, resolve_layout
from thunder_moe.kernels.slow_paths import warn_once
from thunder_moe.ops import grouped_swiglu  # noqa: F401  (registers the operator)
from thunder_moe.ops.grouped_mm import operands

__all__ = ["MODULE_LAYOUTS", "NVFP4GroupedLinear", "NVFP4GroupedSwiGLU", "calls_only_its_class", "weights_to_fuse"]

_FIELDS = ("qdata", "scale", "global_scale")
Module = TypeVar("Module", bound=nn.Module)


class NVFP4GroupedLinear(nn.Module):
    """`GroupedLinear` with frozen 4-bit weights, kept as buffers.

    The shapes of qdata and scale encode their layout (`formats.layouts.block_shapes`): buffers that are passed around,
    replaced (``functional_call``) or kept from before always carry their layout with their bytes. State dicts hold
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
        layout = weight.layout if weight.layout in MODULE_LAYOUTS else LINEAR
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
        if layout != LINEAR:
            if torch.compiler.is_compiling():
                # An identity that fails for buffers of another rank: an exported program keeps these calls, and the
                # layout of its buffers may change afterwards.
                dims = tuple(range(qdata.ndim))
                qdata, scale = qdata.permute(dims), scale.permute(dims)
            rows = (self.num_experts, self.out_features)
            qdata = qdata.view(*rows, self.in_features // 2)
            scale = scale.view(*rows, self.in_features // BLOCK_SIZE)
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
        linear = self.nvfp4_weight.to_layout(LINEAR)
        global_scale = linear.row_global_scale()
        step, weights = self.out_features // len(self.weight_dtypes), []
        for index, dtype in enumerate(self.weight_dtypes):
            rows = slice(index * step, (index + 1) * step)
            part = NVFP4Weight(linear.qdata[:, rows], linear.scale[:, rows], global_scale[:, rows])
            other = dtype not in WEIGHT_DTYPES  # after .double(), say
            weights.append(dequantize(part, torch.float32 if other else dtype).to(dtype))
        return weights

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N)."""
        weight = self.nvfp4_weight
        grouped_mm = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm
        out: Tensor = grouped_mm(x, *operands(weight), offsets, layout=weight.layout)
        return out

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != LINEAR:
            linear = self.nvfp4_weight.to_layout(LINEAR)
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
        self._buffers.update(zip(_FIELDS, self.nvfp4_weight.to_layout(LINEAR).tensors(), strict=True))
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)
            weight = NVFP4Weight.unchecked(self.qdata, self.scale, self.global_scale, LINEAR)
            parted = "qdata" in given and "scale" not in given and _would_lose_codes(weight, layout)
            self._layout_to_be = layout if parted else None
            if layout != LINEAR and not parted:
                weight = lay_out(NVFP4Weight(*weight.tensors()), layout)
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
            parent: Any = super()
            parent._apply(fn, recurse)  # other tensors of a subclass
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
        self._buffers[field] = tensor  # between a real device and "meta"; nn.Module breaks ties there too
        return tensor

    def _fit_device(self, before: torch.device) -> None:
        """Converts the weights to the layout of the device that they were moved to; with a fixed layout that is slow
        there, warns."""
        device, layout, sizes = self.qdata.device, self.layout, (self.out_features, self.in_features)
        if device.type == "meta":
            return
        if self.auto_layout:
            wanted = resolve_layout("auto", device, *sizes)
            if wanted != layout:
                self.set_weight(lay_out(self.nvfp4_weight, wanted))
        elif device != before and layout != LINEAR and layout != resolve_layout("auto", device, *sizes):
            warn_once(
                ("moved", layout, device.type),
                f"4-bit weights in layout {layout!r} were moved to a {device.type!r} device, where kernels have to"
                " convert them at every call; to_layout_(model) lays them out for it",
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of earlier versions have the layout as an attribute, and one weight_dtype.
        state = dict(state)
        layout = state.pop("layout", LINEAR)
        for old, name in (("weight_dtype", "weight_dtypes"), ("weight_requires_grad", "weights_require_grad")):
            if old in state:
                state[name] = (state.pop(old),)
        parent: Any = super()
        parent.__setstate__(state)
        if (layout == LINEAR and self.qdata.ndim == 5) or layout == "humming":
            raise ValueError(
                "layout: this model was pickled whole in layout 'humming', which version 0.2.0 no longer has; in the"
                " version that saved it, save its state_dict, or the model after to_layout_(model, 'linear')"
            )
        if layout != LINEAR and self.qdata.ndim == 3:
            weight = NVFP4Weight.unchecked(self.qdata, self.scale, self.global_scale, layout)
            for field, tensor in zip(_FIELDS, weight.blocks, strict=True):
                self._replace(field, tensor)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, nvfp4" + (f", layout={self.layout!r}" if self.layout != LINEAR else "")


class NVFP4GroupedSwiGLU(nn.Module):
    """`GroupedSwiGLU` with frozen 4-bit weights: one GEMM over [gate; up] with the activation in the same operator.

    A gate_up_proj that has hooks or a forward of its own is called, and the activation follows.

    Args:
        gate_up_proj: (E, 2I, H), the gate's rows first.
        down_proj: (E, H, I).
    """

    def __init__(self, gate_up_proj: NVFP4GroupedLinear, down_proj: NVFP4GroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, H) rows sorted by expert, offsets (E,) row ends -> (M, H)."""
        if not calls_only_its_class(self.gate_up_proj, NVFP4GroupedLinear):
            gate, up = self.gate_up_proj(x, offsets).chunk(2, -1)
            out: Tensor = self.down_proj(F.silu(gate) * up, offsets)
            return out
        gate_up = self.gate_up_proj.nvfp4_weight
        swiglu = torch.ops.thunder_moe.f16a_nvfp4weight_grouped_swiglu
        out = self.down_proj(swiglu(x, *operands(gate_up), offsets, layout=gate_up.layout), offsets)
        return out


def calls_only_its_class(module: nn.Module, cls: type[Module]) -> TypeGuard[Module]:
    """Whether a call of a module runs the forward of `cls` and no hooks, so that an operator may replace the call."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is cls and not hooks and "forward" not in vars(module)


def weights_to_fuse(experts: nn.Module) -> tuple[NVFP4Weight, NVFP4Weight] | None:
    """The weights (gate and up, down) of a `NVFP4GroupedSwiGLU`, for an operator that does what it and its linears do;
    None for other modules, and where hooks or forwards of their own have to run."""
    if not calls_only_its_class(experts, NVFP4GroupedSwiGLU):
        return None
    gate_up: nn.Module = experts.gate_up_proj
    down: nn.Module = experts.down_proj
    if not (calls_only_its_class(gate_up, NVFP4GroupedLinear) and calls_only_its_class(down, NVFP4GroupedLinear)):
        return None
    return gate_up.nvfp4_weight, down.nvfp4_weight


def _would_lose_codes(weight: NVFP4Weight, layout: str) -> bool:
    """Whether a layout clears codes of a linear weight that has its codes, but not yet their scales, from a file."""
    if layout == LINEAR or weight.scale.is_meta:
        return layout != LINEAR and not weight.qdata.is_meta
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
