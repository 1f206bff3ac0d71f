"""The cache of 4-bit copies of 16-bit weights: one copy of each, whichever graphs and compilers use it.
Called by compiled graphs at every call, compilers, integrations.huggingface and users (`refresh_`); calls
formats.nvfp4 when a weight has changed, kernels.select for the layout that a device reads best (`stacked_layout`).
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn.functional import pad
from torch.optim.optimizer import register_optimizer_step_post_hook

from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.layouts import LINEAR, SWIZZLED_128X4
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.kernels import select
from thunder_moe.kernels.forks import ForkLock
from thunder_moe.ops.grouped_mm import operands

__all__ = ["WEIGHT_CACHE", "WeightCache", "pad_rows", "refresh_", "stacked_layout"]

Model = TypeVar("Model", bound=torch.nn.Module)
_Key = tuple[Any, ...]  # the recipe of a copy, then the ids of its weights


@dataclass(frozen=True)
class _State:
    """What can be observed of a weight: equal states mean equal content, except for changes that leave no trace."""

    storage: weakref.ref[torch.UntypedStorage]
    epoch: int
    version: int | None  # None for an inference tensor, which has no version counter
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _Entry:
    states: tuple[_State, ...]
    generation: int  # of the cache, when the epochs were last found to be those of `states`
    packed: PackedWeight
    operands: tuple[torch.Tensor, ...]
    heirs: tuple[weakref.ref[torch.UntypedStorage], ...] = ()  # the storages of living weights that got other data


class WeightCache:
    """Quantizes on first use and again when a weight may have changed.

    A copy is used only while its weights have the same storage, view of it and version counter, and while nothing is
    known to have changed them without a trace there: a step of a `torch.optim` optimizer, a training forward
    (`changed`), `refresh_`. Changed weights are quantized into the tensors that exist already, so that their addresses
    stay (CUDA graphs). docs/weights.md lists which changes are seen.

    Weights are known by their `id`, without a weak reference, which would forbid `torch.utils.swap_tensors`. An id that
    lives again in another tensor is found out by the storage. Copies of weights that have died are dropped by the next
    full garbage collection or before the next copy is made.
    """

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        # How often a storage that an entry reads was declared changed, by the storage's address as an object.
        self._epochs: dict[int, int] = {}
        self._generation = 0  # counts all changes of _epochs
        self._lock = ForkLock()
        self._orphans = False  # a storage has died
        self._watching = False

    def get(
        self,
        *weights: torch.Tensor,
        transposed: bool = False,
        interleaved: int = 0,
        layout: str = LINEAR,
        format: str = NVFP4.name,
    ) -> PackedWeight:
        """The packed form of weights stacked along their rows.

        Args:
            weights: each (E, N, K), or (E, K, N) when transposed.
            transposed: K is the middle dimension.
            interleaved: gate and up take turns of that many rows of the weight: sort them into halves.
            layout: of the result, one of `formats.layouts.LAYOUTS`.
            format: of the result, the name of a number format.

        Returns:
            (E, sum of N, K). In layout "swizzled_128x4" it is what nvFuser's kernel wants: the rows of each weight are
            padded with zeros to a multiple of 128, and stacked weights share one global scale per expert.

        Raises:
            ValueError: as `formats.nvfp4.quantize`, or the stacked weight does not fit the layout.
        """
        return self._entry(weights, "quantize", transposed, interleaved, layout, format).packed

    def operands(
        self,
        *weights: torch.Tensor,
        transposed: bool = False,
        interleaved: int = 0,
        layout: str = LINEAR,
        format: str = NVFP4.name,
    ) -> tuple[torch.Tensor, ...]:
        """The same as the operators take it: (fp4_weight, weight_scaling_factor, weight_global_scale), in MXFP8
        (fp8_weight, weight_scaling_factor).

        In layout "swizzled_128x4" fp4_weight is float4_e2m1fn_x2.
        """
        return self._entry(weights, "quantize", transposed, interleaved, layout, format).operands

    def swizzled(
        self, qdata: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, parts: int = 1
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of an `NVFP4Weight` in layout "linear" as `operands` gives them in layout "swizzled_128x4".

        Args:
            qdata, scale, global_scale: of the weight; what needs no padding is shared.
            parts: how many weights are stacked in it (gate and up: 2); each is padded by itself.
        """
        return self._entry((qdata, scale, global_scale), "swizzle", parts).operands

    def changed(self, *weights: torch.Tensor) -> None:
        """Declares copies of these weights, and of all that share their storage, out of date: they are made again when
        they are next used. Compiled graphs call it for weights that take part in a training forward, since what then
        changes them may leave no trace. 0.25 us for a weight (Zen 5)."""
        for weight in weights:
            address = weight.untyped_storage()._cdata
            if address in self._epochs:
                self._epochs[address] += 1
                self._generation += 1

    def refresh(self, weights: Iterable[torch.Tensor]) -> None:
        """Makes all copies of these weights again, now and at the same addresses; those of weights that have another
        shape now when they are next used."""
        by_id = {id(weight): weight for weight in weights}
        self.changed(*by_id.values())
        for key in list(self._entries):
            entry = self._entries.get(key)
            if entry is None:
                continue
            count = len(entry.states)
            found = [by_id.get(identity) for identity in key[-count:]]
            parts = tuple(
                weight
                for weight, state in zip(found, entry.states, strict=True)
                # An id may live again in a tensor of another kind, say in a bias.
                if weight is not None and (weight.shape, weight.dtype) == (state.shape, state.dtype)
            )
            if len(parts) == count:
                self._entry(parts, *key[:-count])

    def _entry(self, weights: tuple[torch.Tensor, ...], *recipe: Any) -> _Entry:
        # On the path of every call: 1.3 us for one weight (Zen 5).
        key = (*recipe, *map(id, weights))
        entry = self._entries.get(key)
        if entry is not None and self._is_current(entry, weights):
            return entry
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or not self._is_current(entry, weights):
                entry = self._refresh(key, entry, weights, recipe)
            return entry

    def _is_current(self, entry: _Entry, weights: tuple[torch.Tensor, ...]) -> bool:
        for weight, state in zip(weights, entry.states, strict=True):
            if (
                state.storage() is not weight.untyped_storage()
                or state.version != _version(weight)
                or state.address != weight.data_ptr()
                or state.strides != weight.stride()
                or state.shape != weight.shape
                or state.dtype != weight.dtype
            ):
                return False
        generation = self._generation
        if entry.generation != generation:
            if any(
                self._epochs.get(weight.untyped_storage()._cdata) != state.epoch
                for weight, state in zip(weights, entry.states, strict=True)
            ):
                return False
            entry.generation = generation
        return True

    def _state(self, weight: torch.Tensor) -> _State:
        storage = weight.untyped_storage()
        reference = weakref.ref(storage, self._forget(storage._cdata))
        epoch = self._epochs.setdefault(storage._cdata, 0)
        return _State(
            reference, epoch, _version(weight), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
        )

    def _refresh(
        self, key: _Key, entry: _Entry | None, weights: tuple[torch.Tensor, ...], recipe: tuple[Any, ...]
    ) -> _Entry:
        if not self._watching:
            self._watch()
        if entry is None:
            self._drop_dead()
        # Taken before the weights are read: what changes them meanwhile makes the copy out of date.
        generation = self._generation
        states = tuple(map(self._state, weights))
        # Normal tensors under inference mode too: later calls write to them, and save them for a backward.
        with torch.inference_mode(False), torch.no_grad():
            packed: PackedWeight
            packed = _swizzle(weights, *recipe[1:]) if recipe[0] == "swizzle" else _quantize(weights, *recipe[1:])
            if entry is not None and entry.packed.shape == packed.shape and entry.packed.device == packed.device:
                for kept, new in zip(entry.packed.tensors(), packed.tensors(), strict=True):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)
                packed = entry.packed
            given = operands(packed)
            if packed.layout == SWIZZLED_128X4:
                given = packed.qdata.view(torch.float4_e2m1fn_x2).transpose(1, 2), *given[1:]
        ids = key[-len(weights) :]
        for other in list(self._entries):
            kept_entry = self._entries.get(other)
            if kept_entry is not None and other[-len(weights) :] == ids and kept_entry.packed.device != packed.device:
                self._entries.pop(other, None)  # the weights have moved, and want another layout here
        new_entry = self._entries[key] = _Entry(states, generation, packed, given)
        return new_entry

    def _forget(self, address: int) -> Callable[[Any], None]:
        """The callback of a freed storage, called at any time in any thread: takes no lock, iterates over nothing."""
        cache = weakref.ref(self)

        def forget(_: Any) -> None:
            known = cache()
            if known is not None:
                known._orphans = True
                known._epochs.pop(address, None)

        return forget

    def _drop_dead(self) -> None:
        """Drops the copies of weights that have died. A storage has also died when a living weight got other data: the
        copies of such weights stay, for their addresses."""
        if not self._orphans:
            return
        self._orphans = False
        orphans = []
        for key in list(self._entries):  # the keys are listed at once; the garbage collector may run at any time
            entry = self._entries.get(key)
            if entry is not None and any(state.storage() is None for state in entry.states):
                orphans.append((key, entry))
        if not orphans:
            return
        # Some 0.1 s for a million objects. By type(), which asks no proxy for its __class__.
        alive = {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
        for key, entry in orphans:
            identities = key[-len(entry.states) :]
            if not all(identity in alive for identity in identities):
                self._entries.pop(key, None)
                continue
            storages = [alive[identity].untyped_storage() for identity in identities]
            entry.heirs = tuple(weakref.ref(storage, self._forget(storage._cdata)) for storage in storages)

    def _watch(self) -> None:
        """Has every `torch.optim` optimizer declare its parameters changed (fused ones leave no trace in them), and the
        garbage collector drop the copies of dead weights."""
        self._watching = True
        cache = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            known = cache()
            if known is None or torch.compiler.is_compiling():
                return
            for group in optimizer.param_groups:
                known.changed(*(p for p in group["params"] if p.requires_grad or p.grad is not None))

        def after_collection(phase: str, info: dict[str, int]) -> None:
            known = cache()
            if known is not None and known._orphans and phase == "stop" and info["generation"] == 2:
                known._drop_dead()

        gc.callbacks.append(after_collection)
        weakref.finalize(self, gc.callbacks.remove, after_collection)
        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def __len__(self) -> int:
        return len(self._entries)


def refresh_(model: Model) -> Model:
    """Quantizes the 4-bit copies of a model's weights again, after a change that leaves no trace.

    Compiled graphs keep a 4-bit copy beside each frozen 16-bit weight, and make it again when they see the weight
    change. Writes through ``parameter.data`` or NumPy, and collectives of torch.distributed, cannot be seen: call this
    after them. docs/weights.md lists what is seen. Copies keep their addresses, so captured CUDA graphs read them.

    Args:
        model: a module, compiled or not; its parameters and buffers are meant, and all that share their storage.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module.
        ValueError: as `formats.nvfp4.quantize`, of a weight that holds NaN or Inf now.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, wanted a torch.nn.Module")
    WEIGHT_CACHE.refresh(itertools.chain(model.parameters(), model.buffers()))
    return model


def pad_rows(n: int) -> int:
    """The rows of a weight in layout "swizzled_128x4": n rounded up to a multiple of 128."""
    return -(-n // 128) * 128


def stacked_layout(
    *weights: Any, transposed: bool, device: torch.device | None = None, format: BlockFormat = NVFP4
) -> str:
    """The layout that the default kernels read best of weights stacked along their rows, see `WeightCache.get`.

    Args:
        weights: tensors, or others with a shape.
        transposed: each is (E, K, N), not (E, N, K).
        device: of the weights; when None it is that of the tensors.
        format: of the packed weight.
    """
    rows, columns = (2, 1) if transposed else (1, 2)
    n, k = sum(int(weight.shape[rows]) for weight in weights), int(weights[0].shape[columns])
    return select.preferred_layout(weights[0].device if device is None else device, n, k, format)


def _quantize(
    weights: tuple[torch.Tensor, ...], transposed: bool, interleaved: int, layout: str, format: str
) -> PackedWeight:
    parts = [weight.transpose(1, 2) if transposed else weight for weight in weights]
    if interleaved:
        parts = [deinterleave(part, int(interleaved)) for part in parts]
    if layout == SWIZZLED_128X4:
        return _quantize_together(parts).to_layout(layout)
    pack = select.quantize if format == NVFP4.name else partial(select.quantize_to, format)
    stacked: PackedWeight = PackedWeight.concatenate(*map(pack, parts))
    return select.lay_out(stacked, layout)


def _swizzle(weights: tuple[torch.Tensor, ...], parts: int) -> NVFP4Weight:
    # Detached: an entry that held its weight would keep it alive.
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
    """Weights (E, N1, K), (E, N2, K), ..., each padded by `pad_rows`, as one with one global scale per expert.

    An expert at a time: the 16-bit copy that it takes is one expert's."""
    experts = []
    for rows in zip(*(part.unbind(0) for part in parts), strict=True):
        padded = [pad(part, (0, 0, 0, pad_rows(len(part)) - len(part))) for part in rows]
        experts.append(select.quantize(torch.cat(padded)[None]))
    scale = torch.cat([expert.scale.view(torch.uint8) for expert in experts]).view(torch.float8_e4m3fn)
    return NVFP4Weight(
        torch.cat([expert.qdata for expert in experts]), scale, torch.cat([expert.global_scale for expert in experts])
    )


def _version(weight: torch.Tensor) -> int | None:
    try:
        return weight._version
    except RuntimeError:
        return None


WEIGHT_CACHE = WeightCache()
