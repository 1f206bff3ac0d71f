"""`PackedModule`, the base of modules with a packed weight, kept as buffers whose shapes encode the layout.
Base of the modules of nn.quantized and nn.linear; called by quantization, parallel and integrations.huggingface; calls
kernels.select for the layout that a device reads best, nn.snapshot and nn.adaptable.

Legend: E experts, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.checks import require, require_type
from thunder_moe.formats.layouts import LINEAR, layout_of_blocks, module_layouts
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.kernels.select import lay_out, resolve_layout
from thunder_moe.kernels.slow_paths import warn_once
from thunder_moe.nn.adaptable import AdaptableLinear
from thunder_moe.nn.snapshot import Reference, Snapshot, SnapshotPlace, alone, drop_snapshots
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import is_eager

# A single C call: other threads replace all buffers before or after it, never between two of them.
_buffers_of_weight: Callable[[Any], Any] = itemgetter(*NVFP4.fields)


class PackedModule(AdaptableLinear):
    """A module with one frozen packed weight, in NVFP4 or MXFP8, kept as buffers; `forward` is the subclass's.

    The shapes of qdata and scale encode their layout (`formats.layouts.block_shapes`; the shapes of dense layers lack
    the dimension of experts). So buffers that are passed around, replaced (``functional_call``) or kept from before
    carry their layout with their bytes. State dicts hold layout "linear" for every layout of the module, and load into
    every layout. A global scale per row loads into a module that has one for all rows, and the reverse. If the module
    is in another layout, its state dict holds converted copies: they do not follow the module, and modules that share
    a weight get a copy each.

    Args:
        weight: (E, N, K); kept in its layout if that is one of `layouts.module_layouts`, else in "linear".
        bias: (E, N), of a dense layer (N,), or None; a parameter is kept as the same object.
        weight_dtype: the dtype of the 16-bit weight that this one stands for; what `dequantize_` gives back. One for
            each where it stands for several stacked ones (gate and up).
        weight_requires_grad: True if that weight was trainable; likewise.
        auto_layout: True if the weights are laid out for the device that the module is moved to.
        part_features: out_features of each of the weights that it stands for; None: they share N evenly.

    Attributes:
        qdata, scale, global_scale: the tensors of the weight; the last is None in MXFP8. ``module.to(dtype)`` leaves
            them as they are.
        format_name: the name of the weight's number format, "nvfp4" or "mxfp8".
        weight_dtypes, weights_require_grad: tuples of the above.
        auto_layout: as above.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: nn.Parameter | None
    num_experts: int = 1
    format_name: str = NVFP4.name
    auto_layout: bool = False  # for modules pickled by versions without this choice
    _layout_to_be: str | None = None  # the layout after the scales follow the codes that were loaded
    _relaid: int = 0  # times that a buffer took another shape: torch.compile of torch < 2.13 guards no shape here
    _part_features: tuple[int, ...] | None = None  # None: evenly
    _sharding: Any = None  # the WeightSharding of parallel.shards, if this rank has a shard of the weight
    # For a weight that processes share by transformers' plans: (dim, index, count) of this one's part, dim 0 of
    # experts, 1 of out_features, 2 of in_features.
    process_part: tuple[int, int, int] | None = None
    _of_experts = True  # True if the buffers have the dimension of experts
    _place: SnapshotPlace | None = None

    def __init__(
        self,
        weight: PackedWeight,
        bias: Tensor | None = None,
        *,
        weight_dtype: torch.dtype | Sequence[torch.dtype] = torch.bfloat16,
        weight_requires_grad: bool | Sequence[bool] = False,
        auto_layout: bool = False,
        part_features: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        require_type("weight", weight, PackedWeight, "a packed weight, as `quantize` gives it")
        if not self._of_experts and weight.shape[0] != 1:
            raise ValueError(f"weight: got shape {weight.shape}, wanted (1, out_features, in_features)")
        self.num_experts, self.out_features, self.in_features = weight.shape
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
        self.auto_layout, self.format_name = auto_layout, weight.format.name
        layout = weight.layout if weight.layout in module_layouts(weight.format) else LINEAR
        for field in NVFP4.fields:  # fields that the format lacks are None
            self.register_buffer(field, None)
        self._buffers.update(zip(self.format.fields, self._own(weight.to_layout(layout)), strict=True))
        shape = weight.shape[:2] if self._of_experts else weight.shape[1:2]
        if bias is not None and bias.shape != shape:
            raise ValueError(f"bias: got shape {tuple(bias.shape)}, wanted {tuple(shape)}")
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
        self.register_parameter("bias", bias)

    @property
    def format(self) -> BlockFormat:
        """Return the number format of the weight; its `fields` are the names of the buffers."""
        return BLOCK_FORMATS[self.format_name]

    def _get_name(self) -> str:
        """Return the name in the representation of a model: the class's name, with the number format."""
        return type(self).__name__.replace(NVFP4.name.upper(), self.format_name.upper())

    @property
    def _weight_shape(self) -> tuple[int, int, int]:
        """Return (E, N, K)."""
        return self.num_experts, self.out_features, self.in_features

    def _own(self, weight: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of a weight as this module keeps them, always the same objects."""
        return weight.blocks if self._of_experts else weight.dense_blocks

    def _grouped(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of this module with the dimension of experts."""
        return tensors if self._of_experts else tuple(tensor[None] for tensor in tensors)

    @property
    def layout(self) -> str:
        """Return the layout of the weights, by the shapes of the buffers."""
        return layout_of_blocks(self.qdata, self.scale, self.format, of_experts=self._of_experts)

    @property
    def packed_weight(self) -> PackedWeight:
        """Return the weight (E, N, K) in its number format, which shares the buffers' memory."""
        return self._weight_of([getattr(self, field) for field in self.format.fields])

    def read(self) -> tuple[BlockFormat, str, tuple[Tensor, ...]]:
        """Return format and layout of the weight, and its tensors as the module's operator takes them, for one forward.

        In eager code they are a snapshot: `set_weight`, `to_layout_` and ``.to`` of other threads do not change them.
        """
        snapshot = self.snapshot() if is_eager() else None
        if snapshot is not None:
            return snapshot.weight.format, snapshot.weight.layout, snapshot.operands
        format = self.format
        layout, (codes, *others) = self._in_rows([getattr(self, field) for field in format.fields], format)
        return format, layout, (codes.transpose(-2, -1), *others)

    def read_weight(self) -> PackedWeight:
        """Return the weight for one forward, as `read` does."""
        snapshot = self.snapshot() if is_eager() else None
        return self.packed_weight if snapshot is None else snapshot.weight

    def snapshot(self) -> Snapshot | None:
        """Return the snapshot of the current weight; None for buffers without an address. Only for eager code."""
        try:  # nn.Module looks for buffers everywhere else before, at half a microsecond each
            qdata, scale, global_scale = _buffers_of_weight(self._buffers)
        except KeyError:  # parametrized
            return None
        if type(qdata) is not Tensor:
            return None
        place = self._place
        if place is not None:
            latest, of_global = place.latest, None if global_scale is None else global_scale.data_ptr()
            if (
                latest is not None
                and latest.addresses == (qdata.data_ptr(), scale.data_ptr(), of_global)
                and latest.references[0]() is qdata
            ):
                return latest
        return self._take_snapshot()

    @alone
    def _take_snapshot(self) -> Snapshot | None:
        place = self._place
        if place is None:
            place = self._place = SnapshotPlace()
        buffers = _buffers_of_weight(self._buffers)
        addresses = tuple([None if buffer is None else buffer.data_ptr() for buffer in buffers])
        if 0 in addresses:  # on "meta"
            return None
        tensors = [buffer for buffer in buffers if buffer is not None]
        weight = self._weight_of([tensor.detach() for tensor in tensors])
        references = tuple([Reference(tensor, place) for tensor in tensors])
        snapshot = Snapshot(addresses, weight, self._operands(weight), references)
        place.latest = snapshot
        return snapshot

    def _operands(self, weight: PackedWeight) -> tuple[Tensor, ...]:
        """Return the tensors of a weight as the operators of the module take them."""
        return operands(weight)

    def _in_rows(self, tensors: list[Tensor], format: BlockFormat) -> tuple[str, list[Tensor]]:
        """Return the layout of tensors with the buffers' shapes, and views of them with codes and scales in rows.

        The views lack the dimension of experts if the buffers do. A compiler traces each line for each weight.
        """
        qdata, scale, *others = tensors
        layout = layout_of_blocks(qdata, scale, format, of_experts=self._of_experts)
        compiles = torch.compiler.is_compiling()
        if compiles:
            assert self._relaid >= 0
        if layout == LINEAR:
            return layout, tensors
        if compiles:
            # An identity that fails for buffers of another rank: an exported program keeps this call, and the layout of
            # its buffers may change afterwards.
            qdata = qdata.permute(tuple(range(qdata.ndim)))
        rows = (self.num_experts, self.out_features) if self._of_experts else (self.out_features,)
        qdata = qdata.view(*rows, self.in_features // format.codes_per_byte)
        return layout, [qdata, scale.view(*rows, self.in_features // format.block_size), *others]

    def _weight_of(self, tensors: list[Tensor]) -> PackedWeight:
        """Return the weight (E, N, K) of tensors that are shaped as the buffers."""
        layout, rows = self._in_rows(tensors, self.format)
        return WEIGHTS[self.format_name].unchecked(*self._grouped(*rows), layout)

    @alone
    @torch.no_grad()
    def set_weight(self, weight: PackedWeight) -> None:
        """Take another weight of the same shape and number format, in its layout; the only way to change the buffers.

        The buffers get new memory, also in modules that are tied to this one. Detached aliases, such as a state dict's,
        keep the old bytes in the old shape.

        Raises:
            ValueError: the weight has another shape or format, or a layout that modules do not keep.
        """
        shape, layouts = self._weight_shape, module_layouts(self.format)
        if weight.format.name != self.format_name:
            raise ValueError(f"weight: got one in {weight.format.name}, wanted {self.format_name}, the module's format")
        if weight.shape != shape or weight.layout not in layouts:
            raise ValueError(
                f"weight: got shape {weight.shape} in layout {weight.layout!r}, wanted {shape} in one of {layouts}"
            )
        self._layout_to_be = None
        for buffer in self._replace(dict(zip(self.format.fields, self._own(weight), strict=True))):
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)  # a backward that waits for the old bytes fails

    def obstacle_to_narrow(self, dim: int, count: int, parts: int = 1) -> str | None:
        """Return why `narrow_` cannot cut the weight into `count` equal parts in its layout; None if it can."""
        if dim == 1 and self._part_features is not None:
            return f"it stands for weights of {self._part_features} out_features together"
        pieces = parts * count
        for tensor in self._grouped(*(getattr(self, field) for field in self.format.fields)):
            if tensor.ndim > dim and tensor.shape[dim] % pieces:
                size, unit = self._weight_shape[dim], self._weight_shape[dim] * pieces // tensor.shape[dim]
                name = ("num_experts", "out_features", "in_features")[dim]
                return f"it has {name}={size} in layout {self.layout!r}, wanted a multiple of {unit}"
        return None

    @alone
    @torch.no_grad()
    def narrow_(self, dim: int, index: int, count: int, parts: int = 1) -> None:
        """Keep one of `count` equal parts of the weight, in its layout, without unpacking it.

        Buffers in every layout have the shape (E, N or tiles of N, K or tiles of K, ...), so a contiguous part of the
        weight is a contiguous part of the buffers.

        Args:
            dim: 0 for experts, 1 for out_features, 2 for in_features.
            index: the part that is kept.
            count: the number of parts.
            parts: the number of weights stacked along `dim` (gate and up); the same part of each is kept.

        Raises:
            ValueError: the sizes do not allow it in this layout; `obstacle_to_narrow` says why.
        """
        obstacle = self.obstacle_to_narrow(dim, count, parts)
        if obstacle is not None:
            raise ValueError(f"weight: {obstacle}")
        axis = dim if self._of_experts else dim - 1
        for field in self.format.fields:
            buffer: Tensor = getattr(self, field)
            if buffer.ndim > axis:
                bits = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
                kept = bits.unflatten(axis, (parts, count, -1)).select(axis + 1, index).flatten(axis, axis + 1)
                self._buffers[field] = kept.clone(memory_format=torch.contiguous_format).view(buffer.dtype)
        self._relaid += 1
        sizes = [size // count if at == dim else size for at, size in enumerate(self._weight_shape)]
        self.num_experts, self.out_features, self.in_features = sizes

    def dequantized(self) -> list[Tensor]:
        """Return the 16-bit weights that it stands for, each (E, its rows, K) of its own dtype and contiguous."""
        linear = lay_out(self.packed_weight, LINEAR)
        sizes = self._part_features or (self.out_features // len(self.weight_dtypes),) * len(self.weight_dtypes)
        weights: list[Tensor] = []
        for end, size, dtype in zip(accumulate(sizes), sizes, self.weight_dtypes, strict=True):
            part = linear.rows(slice(end - size, end))
            other = dtype not in WEIGHT_DTYPES  # after .double(), say
            weights.append(dequantize(part, torch.float32 if other else dtype).to(dtype))
        return weights

    @alone
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout != LINEAR:
            linear = self._own(lay_out(self.packed_weight, LINEAR))
            destination[f"{prefix}qdata"], destination[f"{prefix}scale"] = linear[:2]

    @alone
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *options: Any
    ) -> None:
        if self._sharding is not None:
            state_dict = self._sharding.local_state_dict(self, state_dict, prefix)
        fields = self.format.fields
        state_dict = _by_bits(state_dict, prefix, self.format)
        given = [field for field in fields if f"{prefix}{field}" in state_dict]
        assign = local_metadata.get("assign_to_params_buffers", False)
        device, layout = self.qdata.device, self._layout_to_be or self.layout
        # Torch loads into (or assigns) all or some linear tensors; then these replace our buffers or are copied there.
        own = {field: getattr(self, field) for field in fields}
        for buffer in own.values():
            drop_snapshots(buffer)  # torch.utils.swap_tensors takes no tensor that has weak references
        self._buffers.update(zip(fields, self._own(lay_out(self.packed_weight, LINEAR)), strict=True))
        scale, (experts, n, _) = state_dict.get(f"{prefix}{NVFP4.fields[2]}"), self._weight_shape
        shapes = ((experts,), (experts, n)) if self._of_experts else ((), (n,))  # of all rows of an expert, or of each
        if isinstance(scale, Tensor) and not scale.is_meta and self.global_scale.shape != scale.shape in shapes:
            self._buffers[NVFP4.fields[2]] = torch.empty_like(scale, device=device)
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)
            loaded: tuple[Tensor, ...] = tuple(getattr(self, field) for field in fields)
            kind = WEIGHTS[self.format_name]
            weight = kind.unchecked(*self._grouped(*loaded), LINEAR)
            parted = "qdata" in given and "scale" not in given and _would_lose_codes(weight, layout)
            self._layout_to_be = layout if parted else None
            if layout != LINEAR and not parted:
                loaded = self._own(lay_out(kind(*weight.tensors()), layout))
        finally:
            self._buffers.update(own)
        for field, tensor in zip(fields, loaded, strict=True):
            if assign and field in given:
                self._buffers[field] = tensor
            elif tensor.shape != own[field].shape:
                self._replace({field: tensor})
            elif tensor is not own[field]:  # also codes of which only the scales are loaded: "tiled_64x64" clears some
                own[field].copy_(tensor)
        whole = len({getattr(self, field).device for field in fields}) == 1 and (
            "scale" in given or "qdata" not in given
        )
        if assign and whole:
            self._fit_device(device, self.qdata.device)

    @alone
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        # `to(dtype)` must not cast the format's own tensors, and tied modules must stay tied: move each in place.
        before, moved_to = self.qdata.device, {}
        if before.type == "cuda" and (target := fn(torch.empty(0, device=before)).device).type == "cpu":
            self._fit_device(before, target)  # a CPU takes seconds for what a GPU does in milliseconds
        own = [id(getattr(self, field)) for field in self.format.fields]
        parent: Any = super()
        parent._apply(lambda tensor: tensor if id(tensor) in own else fn(tensor), recurse)  # others of a subclass
        for field in self.format.fields:
            buffer = getattr(self, field).data
            bits = (
                buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
            )  # 8-bit floats: most casts spare integers
            moved = fn(bits)
            moved = moved if moved.dtype == bits.dtype else bits.to(moved.device)
            moved_to[field] = moved.view(buffer.dtype)
        self._replace(moved_to)
        empty = partial(torch.empty, 0, device=self.qdata.device)
        self.weight_dtypes = tuple(fn(empty(dtype=dtype)).dtype for dtype in self.weight_dtypes)
        self._fit_device(before, self.qdata.device)
        return self

    @alone
    def _replace(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """Give buffers the memory of tensors, by name, all at once for `read` of other threads; return the buffers."""
        replaced = []
        for field, tensor in tensors.items():
            buffer: Tensor = getattr(self, field)
            drop_snapshots(buffer)
            if buffer.shape != tensor.shape:
                self._relaid += 1
            if torch._has_compatible_shallow_copy_type(buffer, tensor):
                buffer.data = tensor
            else:  # between a real device and "meta"; nn.Module breaks ties there too
                self._buffers[field] = buffer = tensor
            replaced.append(buffer)
        return replaced

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        has_bias = f"{sizes}, bias={self.bias is not None}"
        sizes = f"num_experts={self.num_experts}, {sizes}" if self._of_experts else has_bias
        return f"{sizes}, {self.format_name}" + (f", layout={self.layout!r}" if self.layout != LINEAR else "")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_place"}

    def _fit_device(self, before: torch.device, device: torch.device) -> None:
        """Convert the weights to the layout of the device that they move to; warn if a fixed layout is slow."""
        layout, sizes = self.layout, (self.out_features, self.in_features)
        if device.type == "meta":
            return
        if self.auto_layout:
            wanted = resolve_layout("auto", device, *sizes, self.format)
            if wanted != layout:
                self.set_weight(lay_out(self.packed_weight, wanted))
        elif device != before and layout != LINEAR and layout != resolve_layout("auto", device, *sizes, self.format):
            warn_once(
                ("moved", layout, device.type),
                f"{self.format_name} weights in layout {layout!r} were moved to a {device.type!r} device, where kernels"
                " have to convert them at every call; to_layout_(model) lays them out for it",
            )


def _would_lose_codes(weight: PackedWeight, layout: str) -> bool:
    """True if a layout clears codes of a linear weight that has its codes, but not yet their scales, from a file."""
    if layout == LINEAR or weight.scale.is_meta:
        return layout != LINEAR and not weight.qdata.is_meta
    return bool((weight.scale.view(torch.uint8) == 0).any())


def _by_bits(state_dict: dict[str, Any], prefix: str, format: BlockFormat) -> dict[str, Any]:
    """Return a state dict whose packed weight has our dtypes: tensors that were saved as bytes are reinterpreted.

    Raises:
        ValueError: another dtype, which torch would convert by value, or a weight in another number format.
    """
    codes, *as_codes = format.code_dtypes
    as_codes += [torch.uint8] if codes != torch.uint8 else []
    dtypes = ((codes, tuple(as_codes)), (format.scale_dtype, (torch.uint8,)), (torch.float32, ()))
    state_dict = dict(state_dict)
    foreign = f"{prefix}{NVFP4.fields[2]}"
    if len(format.fields) == 2 and isinstance(state_dict.get(foreign), Tensor):
        raise ValueError(f"{foreign}: got a tensor of an nvfp4 weight, wanted an {format.name} weight, as the module's")
    for field, (dtype, same) in zip(format.fields, dtypes, strict=False):
        key = f"{prefix}{field}"
        tensor = state_dict.get(key)
        if isinstance(tensor, Tensor) and tensor.dtype != dtype:
            wanted = " or ".join(["dtype " + str(dtype).removeprefix("torch."), *map(str, same)])
            require(tensor.dtype in same, key, tensor, wanted)
            state_dict[key] = tensor.view(dtype)
    return state_dict
