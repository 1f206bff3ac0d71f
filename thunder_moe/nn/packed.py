"""`NVFP4Module`, the base of modules that keep an NVFP4 weight: buffers whose shapes encode the layout, in state dicts,
casts and moves.
Called by nn.quantized and nn.linear; calls kernels.select for the layout that a device reads best.

Legend: E experts, N out_features, K in_features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import LINEAR, MODULE_LAYOUTS, layout_of_blocks
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, WEIGHT_DTYPES, dequantize
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.select import lay_out, resolve_layout
from thunder_moe.kernels.slow_paths import warn_once

__all__ = ["NVFP4Module"]

_FIELDS = ("qdata", "scale", "global_scale")


class NVFP4Module(nn.Module):
    """A module with one frozen 4-bit weight, kept as buffers; `forward` is the subclass's.

    The shapes of qdata and scale encode their layout (`formats.layouts.block_shapes`; those of dense layers lack the
    dimension of experts): buffers that are passed around, replaced (``functional_call``) or kept from before always
    carry their layout with their bytes. State dicts hold layout "linear" whatever the module's, and load into any: they
    are converted on the way. Those of a module in another layout are copies then, which do not follow the module, and
    where modules share weights, one each.

    Args:
        weight: (E, N, K); kept in its layout if that is one of `MODULE_LAYOUTS`, else in "linear".
        weight_dtype: of the 16-bit weight that this one stands for; what `dequantize_` gives back. One for each where
            it stands for several, whose rows are stacked (gate and up).
        weight_requires_grad: whether that weight was trainable; likewise.
        auto_layout: whether the weights are laid out for the device that the module is moved to.
        part_features: out_features of each of the weights that it stands for; None: they share N evenly.

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
    _relaid: int = 0  # times that a buffer took another shape: torch.compile of torch < 2.13 guards no shape here
    _part_features: tuple[int, ...] | None = None  # None: evenly
    _of_experts = True  # whether the buffers have the dimension of experts

    def __init__(
        self,
        weight: NVFP4Weight,
        *,
        weight_dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
        weight_requires_grad: bool | Sequence[bool] = False,
        auto_layout: bool = False,
        part_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        _, self.out_features, self.in_features = weight.shape
        dtypes, grads = weight_dtype, weight_requires_grad
        self.weight_dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        self.weights_require_grad = (grads,) if isinstance(grads, bool) else tuple(grads)
        parts = len(self.weight_dtypes)
        if part_features is not None:
            self._part_features = tuple(part_features)
            if len(self._part_features) != parts or sum(self._part_features) != self.out_features:
                raise ValueError(
                    f"part_features: got {self._part_features} for {parts} weight_dtype, wanted as many that add up to"
                    f" the {self.out_features} out_features"
                )
        if parts != len(self.weights_require_grad) or (part_features is None and self.out_features % parts):
            raise ValueError(
                f"weight_dtype: got {dtypes} with weight_requires_grad {grads}, wanted one of each for every one of"
                f" the weights that share the {self.out_features} out_features evenly"
            )
        self.auto_layout = auto_layout
        layout = weight.layout if weight.layout in MODULE_LAYOUTS else LINEAR
        for field, tensor in zip(_FIELDS, self._own(weight.to_layout(layout)), strict=True):
            self.register_buffer(field, tensor)

    @property
    def _weight_shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        raise NotImplementedError

    def _own(self, weight: NVFP4Weight) -> tuple[Tensor, ...]:
        """The tensors of a weight as this module keeps them, always the same objects."""
        return weight.blocks if self._of_experts else weight.dense_blocks

    def _grouped(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors of this module with the dimension of experts."""
        return tensors if self._of_experts else tuple(tensor[None] for tensor in tensors)

    @property
    def layout(self) -> str:
        """The layout of the weights, by the shapes of the buffers."""
        qdata, scale = self._grouped(self.qdata, self.scale)
        return layout_of_blocks(qdata, scale)

    @property
    def nvfp4_weight(self) -> NVFP4Weight:
        """The weight (E, N, K), which shares the buffers' memory."""
        buffers: Any = self._buffers
        try:  # nn.Module looks for buffers everywhere else before, at half a microsecond each
            tensors = buffers["qdata"], buffers["scale"], buffers["global_scale"]
        except KeyError:  # parametrized
            tensors = self.qdata, self.scale, self.global_scale
        qdata, scale, global_scale = tensors if self._of_experts else self._grouped(*tensors)
        layout = layout_of_blocks(qdata, scale)
        if torch.compiler.is_compiling():
            assert self._relaid >= 0
        if layout != LINEAR:
            if torch.compiler.is_compiling():
                # An identity that fails for buffers of another rank: an exported program keeps these calls, and the
                # layout of its buffers may change afterwards.
                dims = tuple(range(qdata.ndim))
                qdata, scale = qdata.permute(dims), scale.permute(dims)
            rows = self._weight_shape[:2]
            qdata = qdata.view(*rows, self.in_features // 2)
            scale = scale.view(*rows, self.in_features // BLOCK_SIZE)
        return NVFP4Weight.unchecked(qdata, scale, global_scale, layout)

    @torch.no_grad()
    def set_weight(self, weight: NVFP4Weight) -> None:
        """Takes another weight of the same shape, in its layout; the only way to change the buffers.

        The buffers become other memory, and modules that are tied to this one have them too. Detached aliases, as of a
        state dict, keep the old bytes in the old shape.

        Raises:
            ValueError: the weight has another shape, or a layout that is not one of `MODULE_LAYOUTS`.
        """
        shape = self._weight_shape
        if weight.shape != shape or weight.layout not in MODULE_LAYOUTS:
            raise ValueError(
                f"weight: got shape {weight.shape} in layout {weight.layout!r}, wanted {shape} in one of"
                f" {MODULE_LAYOUTS}"
            )
        self._layout_to_be = None
        for field, tensor in zip(_FIELDS, self._own(weight), strict=True):
            buffer = self._replace(field, tensor)
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)  # a backward that waits for the old bytes fails

    def dequantized(self) -> list[Tensor]:
        """The 16-bit weights that it stands for, each (E, its rows, K) of its own dtype and contiguous."""
        linear = self.nvfp4_weight.to_layout(LINEAR)
        global_scale = linear.row_global_scale()
        sizes = self._part_features or (self.out_features // len(self.weight_dtypes),) * len(self.weight_dtypes)
        weights: list[Tensor] = []
        for end, size, dtype in zip(accumulate(sizes), sizes, self.weight_dtypes, strict=True):
            rows = slice(end - size, end)
            part = NVFP4Weight(linear.qdata[:, rows], linear.scale[:, rows], global_scale[:, rows])
            other = dtype not in WEIGHT_DTYPES  # after .double(), say
            weights.append(dequantize(part, torch.float32 if other else dtype).to(dtype))
        return weights

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        _refuse_plain_save(sys._getframe(1))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != LINEAR:
            linear = self._own(self.nvfp4_weight.to_layout(LINEAR))
            destination[f"{prefix}qdata"], destination[f"{prefix}scale"] = linear[:2]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *options: Any
    ) -> None:
        state_dict = _by_bits(state_dict, prefix)
        given = [field for field in _FIELDS if f"{prefix}{field}" in state_dict]
        assign = local_metadata.get("assign_to_params_buffers", False)
        device, layout = self.qdata.device, self._layout_to_be or self.layout
        # Torch loads into (or assigns) linear tensors, all or some; then their contents go where ours are.
        own = {field: getattr(self, field) for field in _FIELDS}
        self._buffers.update(zip(_FIELDS, self._own(self.nvfp4_weight.to_layout(LINEAR)), strict=True))
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)
            loaded: tuple[Tensor, ...] = (self.qdata, self.scale, self.global_scale)
            qdata, scale, global_scale = self._grouped(*loaded)
            weight = NVFP4Weight.unchecked(qdata, scale, global_scale, LINEAR)
            parted = "qdata" in given and "scale" not in given and _would_lose_codes(weight, layout)
            self._layout_to_be = layout if parted else None
            if layout != LINEAR and not parted:
                loaded = self._own(lay_out(NVFP4Weight(*weight.tensors()), layout))
        finally:
            self._buffers.update(own)
        for field, tensor in zip(_FIELDS, loaded, strict=True):
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NVFP4Module:
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
        if buffer.shape != tensor.shape:
            self._relaid += 1
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


def _refuse_plain_save(frame: FrameType | None) -> None:
    """Raises where the save_pretrained of transformers itself asks for a state dict: it would write the 4-bit tensors
    by names that ``from_pretrained`` does not load. Models that `quantize_` got as a whole have one of their own."""
    while frame is not None:
        code, home = frame.f_code, frame.f_globals.get("__name__")
        if code.co_name == "save_pretrained" and home == "transformers.modeling_utils":
            model = frame.f_locals.get("self")
            if not getattr(model, "_hf_peft_config_loaded", False):  # else it saves the adapters alone
                raise ValueError(
                    f"save_pretrained: this {type(model).__name__} holds 4-bit modules that were put into a part of it;"
                    " save it with thunder_moe.save_checkpoint(model, path)"
                )
            return
        frame = frame.f_back


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
