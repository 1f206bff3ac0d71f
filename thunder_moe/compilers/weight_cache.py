"""One NVFP4 copy of each 16-bit weight, however many graphs and compilers use it.
Called by the prologue or runner of compiled graphs, at every call; calls nvfp4 when a weight has changed. Compilers
ask it for the layout (`stacked_layout`), which is an argument of the operators and part of their graphs.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from thunder_moe.kernels import select
from thunder_moe.nvfp4 import NVFP4Weight, quantize
from thunder_moe.ops.grouped_mm import operands

__all__ = ["WEIGHT_CACHE", "WeightCache", "pad_rows", "stacked_layout"]

# Version counter and address: addresses of a process are unique across its devices.
Stamp = tuple[int | None, int]


@dataclass
class _Entry:
    weights: tuple[weakref.ref[torch.Tensor], ...]
    stamps: tuple[Stamp, ...]
    packed: NVFP4Weight
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WeightCache:
    """Quantises on first use and again when a weight has changed.

    A weight is known by its identity; its version counter and address tell changes, in place (an optimiser step) or
    by assignment to ``.data``. Changed weights are quantised into the tensors that exist already, so that their
    addresses stay (CUDA graphs). Entries die with their weights, or when these have moved to another device. Tensors
    made under `torch.inference_mode` have no version counter: a change of theirs in place goes unseen.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple, _Entry] = {}
        self._lock = threading.RLock()

    def get(
        self,
        *weights: torch.Tensor,
        transposed: bool = False,
        interleaved: bool = False,
        layout: str = "linear",
    ) -> NVFP4Weight:
        """The NVFP4 form of weights stacked along their rows.

        Args:
            weights: each (E, N, K), or (E, K, N) when transposed.
            transposed: K is the middle dimension.
            interleaved: gate and up are the even and odd rows of the weight: sort them into halves.
            layout: of the result, one of `nvfp4.LAYOUTS`.

        Returns:
            (E, sum of N, K). In layout "swizzled_128x4" it is what nvFuser's kernel wants: the rows of each weight are
            padded with zeros to a multiple of 128, and stacked weights share one global scale per expert.

        Raises:
            ValueError: as `nvfp4.quantize`, or the stacked weight does not fit the layout.
        """
        return self._entry(weights, "quantize", transposed, interleaved, layout).packed

    def operands(
        self,
        *weights: torch.Tensor,
        transposed: bool = False,
        interleaved: bool = False,
        layout: str = "linear",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as the operators take it: (fp4_weight, weight_scaling_factor, weight_global_scale).

        In layout "swizzled_128x4" fp4_weight is float4_e2m1fn_x2.
        """
        return self._entry(weights, "quantize", transposed, interleaved, layout).operands

    def swizzled(
        self, qdata: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, *, parts: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors of an `NVFP4Weight` in layout "linear" as `operands` gives them in layout "swizzled_128x4".

        Args:
            qdata, scale, global_scale: of the weight; what needs no padding is shared.
            parts: how many weights are stacked in it (gate and up: 2); each is padded by itself.
        """
        return self._entry((qdata, scale, global_scale), "swizzle", parts).operands

    def _entry(self, weights: tuple[torch.Tensor, ...], *recipe) -> _Entry:
        # On the path of every call: 1.3 us for one weight (Zen 5).
        key = (*recipe, *map(id, weights))
        stamps = tuple(map(_stamp, weights))
        entry = self._entries.get(key)
        if entry is not None and entry.stamps == stamps and _same(entry, weights):
            return entry
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not _same(entry, weights):
                entry = None  # an id that lives again in another tensor
            if entry is None or entry.stamps != stamps:
                entry = self._refresh(key, entry, weights, stamps, recipe)
            return entry

    def _refresh(self, key, entry: _Entry | None, weights, stamps, recipe) -> _Entry:
        with torch.no_grad():
            packed = _swizzle(weights, *recipe[1:]) if recipe[0] == "swizzle" else _quantize(weights, *recipe[1:])
            if entry is not None and entry.packed.shape == packed.shape and entry.packed.device == packed.device:
                for kept, new in zip(entry.packed.tensors(), packed.tensors(), strict=True):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)
                packed = entry.packed

        def forget(_) -> None:
            self._entries.pop(key, None)

        refs = tuple(weakref.ref(weight, forget) for weight in weights)
        fp4_weight, scale, global_scale = operands(packed)
        if packed.layout == "swizzled_128x4":
            fp4_weight = packed.qdata.view(torch.float4_e2m1fn_x2).transpose(1, 2)
        ids = key[-len(weights) :]
        for other, kept_entry in list(self._entries.items()):
            if other[-len(weights) :] == ids and kept_entry.packed.device != packed.device:
                self._entries.pop(other, None)  # the weights have moved, and want another layout here
        new_entry = self._entries[key] = _Entry(refs, stamps, packed, (fp4_weight, scale, global_scale))
        return new_entry

    def __len__(self) -> int:
        return len(self._entries)


def pad_rows(n: int) -> int:
    """The rows of a weight in layout "swizzled_128x4": n rounded up to a multiple of 128."""
    return -(-n // 128) * 128


def stacked_layout(*weights: Any, transposed: bool, device: torch.device | None = None) -> str:
    """The layout that the default kernels read best of weights stacked along their rows, see `WeightCache.get`.

    Args:
        weights: tensors, or others with a shape.
        transposed: each is (E, K, N), not (E, N, K).
        device: of the weights; when None it is that of the tensors.
    """
    rows, columns = (2, 1) if transposed else (1, 2)
    n, k = sum(int(weight.shape[rows]) for weight in weights), int(weights[0].shape[columns])
    return select.preferred_layout(weights[0].device if device is None else device, n, k)


def _quantize(weights: tuple[torch.Tensor, ...], transposed: bool, interleaved: bool, layout: str) -> NVFP4Weight:
    parts = [weight.transpose(1, 2) if transposed else weight for weight in weights]
    if interleaved:
        parts = [torch.cat([part[:, 0::2], part[:, 1::2]], 1) for part in parts]
    if layout == "swizzled_128x4":
        return _quantize_together(parts).to_layout(layout)
    return NVFP4Weight.concatenate(*map(quantize, parts)).to_layout(layout)


def _swizzle(weights: tuple[torch.Tensor, ...], parts: int) -> NVFP4Weight:
    # Detached: an entry that held its weight would keep it alive.
    qdata, scale, global_scale = (tensor.detach() for tensor in weights)
    n = qdata.shape[1] // parts
    if n != pad_rows(n):
        qdata, scale = (
            pad(tensor.view(torch.uint8).unflatten(1, (parts, n)), (0, 0, 0, pad_rows(n) - n)).flatten(1, 2)
            for tensor in (qdata, scale)
        )
        scale = scale.view(torch.float8_e4m3fn)
    return NVFP4Weight(qdata, scale, global_scale).to_layout("swizzled_128x4")


def _quantize_together(parts: list[torch.Tensor]) -> NVFP4Weight:
    """Weights (E, N1, K), (E, N2, K), ..., each padded by `pad_rows`, as one with one global scale per expert.

    An expert at a time: the 16-bit copy that it takes is one expert's."""
    experts = []
    for rows in zip(*(part.unbind(0) for part in parts), strict=True):
        padded = [pad(part, (0, 0, 0, pad_rows(len(part)) - len(part))) for part in rows]
        experts.append(quantize(torch.cat(padded)[None]))
    scale = torch.cat([expert.scale.view(torch.uint8) for expert in experts]).view(torch.float8_e4m3fn)
    return NVFP4Weight(
        torch.cat([expert.qdata for expert in experts]), scale, torch.cat([expert.global_scale for expert in experts])
    )


def _same(entry: _Entry, weights: tuple[torch.Tensor, ...]) -> bool:
    for ref, weight in zip(entry.weights, weights, strict=True):  # noqa: SIM110  (a loop is faster than all())
        if ref() is not weight:
            return False
    return True


def _stamp(weight: torch.Tensor) -> Stamp:
    try:
        return weight._version, weight.data_ptr()
    except RuntimeError:  # an inference tensor has no version counter
        return None, weight.data_ptr()


WEIGHT_CACHE = WeightCache()
