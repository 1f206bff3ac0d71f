"""The cache of 4-bit copies of 16-bit weights, which all graphs and compilers share.
Called by compiled graphs at every call, compilers, integrations.huggingface and quantization.refresh; calls
kernels.select to quantize a weight that has changed, and for the layout that a device reads best (`stacked_layout`).

A copy is kept in an attribute of its weight (of the first one, if several are stacked), and dies with it. It is valid
while its weights have the same storage, view of it and version counter. It also becomes invalid by events that may
change weights without a trace there: a step of a `torch.optim` optimizer, a training forward (`changed`), `refresh_`.
Changed weights are quantized into the existing tensors, so that their addresses stay (CUDA graphs). docs/weights.md
lists the changes that are detected.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4
from thunder_moe.formats.nvf_cutlass import from_nvf_cutlass
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.kernels import select
from thunder_moe.kernels.forks import ForkLock
from thunder_moe.kernels.slow_paths import warn_once
from thunder_moe.ops import grouped_mm

_Tensors = tuple[torch.Tensor, ...]
_Recipe = tuple[Any, ...]  # a name of `_MAKERS`, then further arguments of that function

_COPIES = "_thunder_moe_copies"  # the attribute of a weight that holds its `_Copies`
_MARK = "_thunder_moe_mark"  # the attribute of a storage with its `_Mark`, until a declared change removes it
_REFERENCE = attrgetter(f"{_COPIES}.reference")
_LOCK = ForkLock()  # held while a copy is made, not by the lookup of one that is up to date


class _Mark:
    """Marks a storage until a change of it is declared, and counts new copies of the same memory."""

    memory: tuple[Any, ...] = ()
    copies: int = 0


@dataclass
class _Entry:
    states: tuple[tuple[Any, ...], ...]  # `_state` of each weight before it was read; empty: the copy is invalid
    packed: PackedWeight
    operands: _Tensors


class _Copies:
    """Holds the copies of a weight, alone or with others stacked behind it.

    `copy.copy` and `torch.utils.swap_tensors` may attach it to another tensor, where it is ignored. Files and deep
    copies get an empty dictionary in its place, which ``torch.load(weights_only=True)`` accepts.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.owner = id(weight)  # a weak reference to the weight would forbid `torch.utils.swap_tensors`
        self.entries: dict[tuple[Any, ...], _Entry] = {}  # by the recipe, then `reference` of the other weights' copies
        self.reference = weakref.ref(self)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()


def get(
    *weights: torch.Tensor,
    transposed: bool = False,
    interleaved: int = 0,
    layout: str = LINEAR,
    format: str = NVFP4.name,
) -> PackedWeight:
    """Return the packed form of weights stacked along their rows.

    Args:
        weights: each (E, N, K), or (E, K, N) when transposed.
        transposed: K is the middle dimension.
        interleaved: gate and up alternate in blocks of that many rows; gate's rows come first in the result. 0: no.
        layout: of the result, one of `formats.layouts.LAYOUTS`.
        format: of the result, the name of a number format.

    Returns:
        (E, sum of N, K). In layout "swizzled_128x4", for nvFuser's kernel, the rows of each weight are padded with
        zeros to a multiple of 128, and stacked weights share one global scale per expert.

    Raises:
        ValueError: as `formats.nvfp4.quantize`, or the stacked weight does not fit the layout.
    """
    return _entry(weights, ("quantize", transposed, interleaved, layout, format)).packed


def operands(
    *weights: torch.Tensor,
    transposed: bool = False,
    interleaved: int = 0,
    layout: str = LINEAR,
    format: str = NVFP4.name,
    names: str = "a weight",
) -> _Tensors:
    """Return the weight of `get` as operands: (fp4_weight, weight_scaling_factor, weight_global_scale).

    In MXFP8 they are (fp8_weight, weight_scaling_factor). In layout "swizzled_128x4" fp4_weight is float4_e2m1fn_x2.

    Raises:
        ValueError: as `get`, with the names of the weights.
    """
    try:
        return _entry(weights, ("quantize", transposed, interleaved, layout, format)).operands
    except ValueError as error:
        raise ValueError(f"cannot quantize {names}: {error}") from error


def swizzled(
    qdata: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, parts: int = 1
) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an `NVFP4Weight` in layout "linear" as `operands` gives them in layout "swizzled_128x4".

    Args:
        qdata, scale, global_scale: of the weight; tensors that need no padding share its memory.
        parts: number of weights that are stacked in it (gate and up: 2); each is padded separately.
    """
    return _entry((qdata, scale, global_scale), ("swizzle", parts)).operands


def of_nvf_cutlass(
    fp4_weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], str]:
    """Return a weight of Thunder's nvf_cutlass operators (`from_nvf_cutlass`) as of `operands`, and its layout."""
    entry = _entry((fp4_weight, scale, global_scale), ("nvf_cutlass",))
    return entry.operands, entry.packed.layout


def changed(*weights: torch.Tensor) -> None:
    """Declare copies of these weights, and of all that share their storage, out of date.

    They are made again when they are next used. Compiled graphs call this for weights that take part in a training
    forward, because an optimizer may then change them without a trace. Takes 0.15 us for a weight (Zen 5).
    """
    for weight in weights:
        vars(local_data(weight).untyped_storage()).pop(_MARK, None)


def refresh(weights: Iterable[torch.Tensor]) -> None:
    """Make all copies of these weights again, now and at the same addresses.

    A copy is made at its next use instead if a weight has another shape now, or is stacked with a weight that is not
    among these.
    """
    weights = list(weights)
    changed(*weights)
    given = {copies.reference: weight for weight in weights if (copies := _copies(weight))}
    for reference, weight in given.items():
        copies = reference()
        for (recipe, *others), entry in list(copies.entries.items()) if copies else ():
            parts = [part for part in (weight, *map(given.get, others)) if part is not None]
            if [_state(part)[:2] for part in parts] == [state[:2] for state in entry.states]:
                _entry(tuple(parts), recipe)


def _entry(weights: _Tensors, recipe: _Recipe) -> _Entry:
    # This is on the path of every call: 1.3 us for one weight (Zen 5).
    entry = _find_valid(weights, recipe)
    if entry is None:
        with _LOCK:
            entry = _find_valid(weights, recipe) or _make_copy(weights, recipe)
    return entry


def _find_valid(weights: _Tensors, recipe: _Recipe) -> _Entry | None:
    """Return the copy of the weights if it exists and is up to date."""
    try:
        key = recipe, *map(_REFERENCE, weights[1:])
        entry = getattr(weights[0], _COPIES).entries.get(key)
    except AttributeError:  # a weight has no copies yet
        return None
    return entry if entry is not None and entry.states == tuple(map(_state, weights)) else None


def _copies(weight: torch.Tensor) -> _Copies | None:
    copies = getattr(weight, _COPIES, None)
    return copies if getattr(copies, "owner", None) == id(weight) else None


def _state(weight: torch.Tensor) -> tuple[Any, ...]:
    """Return the observable state of a weight; equal states mean equal content, but for changes without a trace."""
    data = local_data(weight)
    try:
        # Functions of a DTensor raise its own counter alone, functions of its local tensor that one's.
        version = weight._version if data is weight else (weight._version, data._version)
    except RuntimeError:  # an inference tensor has no version counter
        version = None
    # An object compares by identity: without a mark no copy is up to date.
    mark = getattr(data.untyped_storage(), _MARK, None) or object()
    return data.shape, data.dtype, data.stride(), data.data_ptr(), version, mark, id(weight)


def _make_copy(weights: _Tensors, recipe: _Recipe) -> _Entry:
    """Make the copy of the weights, in the tensors of the previous copy if they fit."""
    _watch_optimizers()
    for weight in weights:
        if _copies(weight) is None:
            setattr(weight, _COPIES, _Copies(weight))
    first, *others = filter(None, map(_copies, weights))
    entries, key = first.entries, (recipe, *[other.reference for other in others])
    previous = entries.get(key)
    data = tuple(map(local_data, weights))
    # The states are taken before the weights are read, so that a change meanwhile makes the copy out of date.
    mark, *_ = [vars(weight.untyped_storage()).setdefault(_MARK, _Mark()) for weight in data]
    states = tuple(map(_state, weights))
    old_addresses, addresses = (
        [state[3] for state in taken] for taken in (previous.states if previous else (), states)
    )
    if recipe[0] == "swizzle" and old_addresses != addresses:
        previous = None  # it may share the old memory of its weights, which the cache must not write
    # The copies are normal tensors under inference mode, too: later calls write to them, and save them for a backward.
    with torch.inference_mode(False), torch.no_grad():
        packed = _MAKERS[recipe[0]](data, *recipe[1:])
        if previous is not None and (previous.packed.shape, previous.packed.device) == (packed.shape, packed.device):
            previous.states = ()  # invalid if this is interrupted
            for old, new in zip(previous.packed.tensors(), packed.tensors(), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
            packed = previous.packed
        given = grouped_mm.operands(packed)
        if packed.layout == SWIZZLED_128X4:
            given = packed.qdata.view(torch.float4_e2m1fn_x2).transpose(1, 2), *given[1:]
    for other, entry in list(entries.items()):
        # The weight has moved to a device that may need another layout, or a weight that was stacked with it has died.
        if entry.packed.device != packed.device or None in [reference() for reference in other[1:]]:
            del entries[other]
    if previous is None:
        memory = recipe, *[state[:5] for state in states]
        mark.copies = mark.copies + 1 if mark.memory == memory else 1
        mark.memory = memory
        if mark.copies == 3:
            warn_once(
                _COPIES,
                f"a weight of shape {tuple(data[0].shape)} was quantized for a third tensor of the same memory:"
                " pass the same nn.Parameter at each call, not a new one or a new view",
            )
    entry = entries[key] = _Entry(states, packed, given)
    return entry


@cache
def _watch_optimizers() -> None:
    """Have every `torch.optim` optimizer declare its parameters changed after a step.

    This is the only hook of the cache. A fused optimizer does not raise the version counter of a parameter, so that
    nothing else shows its step; frozen weights may view the storage of its parameters.
    """

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for group in optimizer.param_groups:
            stepped = (p for p in group["params"] if p.requires_grad or p.grad is not None)
            changed(*(p for p in stepped if p.layout is torch.strided))  # sparse parameters have no storage

    register_optimizer_step_post_hook(after_step)


def local_data(weight: Any) -> Any:
    """Return the local tensor of a DTensor, without its gradient, and anything else unchanged."""
    return getattr(weight, "_local_tensor", weight)


def pad_rows(n: int) -> int:
    """Return the rows of a weight in layout "swizzled_128x4": n rounded up to a multiple of 128."""
    return -(-n // 128) * 128


def stacked_layout(
    *weights: Any, transposed: bool, device: torch.device | None = None, format: BlockFormat = NVFP4
) -> str:
    """Return the layout that the default kernels read best of the weights of `get`, which only need to have a shape.

    The device is the first tensor's, or the given one."""
    rows, columns = (2, 1) if transposed else (1, 2)
    n, k = sum(int(weight.shape[rows]) for weight in weights), int(weights[0].shape[columns])
    return select.preferred_layout(weights[0].device if device is None else device, n, k, format)


def _quantize(weights: _Tensors, transposed: bool, interleaved: int, layout: str, format: str) -> PackedWeight:
    parts = [weight.transpose(1, 2) if transposed else weight for weight in weights]
    if interleaved:
        parts = [deinterleave(part, int(interleaved)) for part in parts]
    if layout == SWIZZLED_128X4:
        return _quantize_together(parts).to_layout(layout)
    pack = select.quantize if format == NVFP4.name else partial(select.quantize_to, format)
    stacked: PackedWeight = PackedWeight.concatenate(*map(pack, parts))
    return select.lay_out(stacked, layout)


def _swizzle(weights: _Tensors, parts: int) -> NVFP4Weight:
    # Detached, because an entry that held its weight would keep it alive.
    qdata, scale, global_scale = (tensor.detach() for tensor in weights)
    n = qdata.shape[1] // parts
    if n != pad_rows(n):
        qdata, scale = (
            pad(tensor.view(torch.uint8).reshape(len(tensor), parts, n, -1), (0, 0, 0, pad_rows(n) - n)).flatten(1, 2)
            for tensor in (qdata, scale)
        )
        scale = scale.view(torch.float8_e4m3fn)
    return NVFP4Weight(qdata, scale, global_scale).to_layout(SWIZZLED_128X4)


def _quantize_together(parts: list[torch.Tensor]) -> NVFP4Weight:
    """Quantize weights (E, N1, K), (E, N2, K), ..., each padded by `pad_rows`, as one with one global scale per expert.

    It goes expert by expert, so that it holds a 16-bit copy of one expert only."""
    experts = []
    for rows in zip(*(part.unbind(0) for part in parts), strict=True):
        padded = [pad(part, (0, 0, 0, pad_rows(len(part)) - len(part))) for part in rows]
        experts.append(select.quantize(torch.cat(padded)[None]))
    scale = torch.cat([expert.scale.view(torch.uint8) for expert in experts]).view(torch.float8_e4m3fn)
    return NVFP4Weight(
        torch.cat([expert.qdata for expert in experts]), scale, torch.cat([expert.global_scale for expert in experts])
    )


def _convert(weights: _Tensors) -> PackedWeight:
    return select.lay_out(from_nvf_cutlass(*weights), "auto")


_MAKERS: dict[str, Callable[..., PackedWeight]] = dict(quantize=_quantize, swizzle=_swizzle, nvf_cutlass=_convert)
