"""One NVFP4 copy of each 16-bit weight, however many graphs and compilers use it.
Called by compiled prologues; calls nvfp4.quantize.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch

from thunder_moe.nvfp4 import NVFP4Weight, quantize

__all__ = ["WEIGHT_CACHE", "WeightCache"]

Stamp = tuple[int | None, int, torch.device]


@dataclass
class _Entry:
    weights: tuple[weakref.ref[torch.Tensor], ...]
    stamps: tuple[Stamp, ...]
    packed: NVFP4Weight


class WeightCache:
    """Quantises on first use and again when a weight has changed.

    A weight is known by its identity; its version counter and address tell changes, in place (an optimiser step) or
    by assignment to ``.data``. Changed weights are quantised into the tensors that exist already, so that their
    addresses stay (CUDA graphs). Entries die with their weights. Tensors made under `torch.inference_mode` have no
    version counter: a change of theirs in place goes unseen.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple, _Entry] = {}
        self._lock = threading.RLock()

    def get(self, *weights: torch.Tensor, transposed: bool = False, interleaved: bool = False) -> NVFP4Weight:
        """The NVFP4 form of weights stacked along their rows.

        Args:
            weights: each (E, N, K), or (E, K, N) when transposed.
            transposed: K is the middle dimension.
            interleaved: gate and up are the even and odd rows of the weight: sort them into halves.

        Returns:
            (E, sum of N, K), layout "linear".

        Raises:
            ValueError: as `nvfp4.quantize`.
        """
        key = (transposed, interleaved, *map(id, weights))
        stamps = tuple(map(_stamp, weights))
        entry = self._entries.get(key)
        if entry is not None and entry.stamps == stamps and _same(entry, weights):
            return entry.packed
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not _same(entry, weights):
                entry = None  # an id that lives again in another tensor
            if entry is None or entry.stamps != stamps:
                entry = self._refresh(key, entry, weights, stamps)
            return entry.packed

    def _refresh(self, key, entry: _Entry | None, weights, stamps) -> _Entry:
        transposed, interleaved = key[:2]
        with torch.no_grad():
            parts = [weight.transpose(1, 2) if transposed else weight for weight in weights]
            if interleaved:
                parts = [torch.cat([part[:, 0::2], part[:, 1::2]], 1) for part in parts]
            packed = NVFP4Weight.concatenate(*map(quantize, parts))
            if entry is not None and entry.packed.shape == packed.shape and entry.packed.device == packed.device:
                for kept, new in zip(entry.packed.tensors(), packed.tensors(), strict=True):
                    kept.copy_(new)
                packed = entry.packed

        def forget(_) -> None:
            self._entries.pop(key, None)

        refs = tuple(weakref.ref(weight, forget) for weight in weights)
        new_entry = self._entries[key] = _Entry(refs, stamps, packed)
        return new_entry

    def __len__(self) -> int:
        return len(self._entries)


def _same(entry: _Entry, weights: tuple[torch.Tensor, ...]) -> bool:
    return all(ref() is weight for ref, weight in zip(entry.weights, weights, strict=True))


def _stamp(weight: torch.Tensor) -> Stamp:
    return None if weight.is_inference() else weight._version, weight.data_ptr(), weight.device


WEIGHT_CACHE = WeightCache()
