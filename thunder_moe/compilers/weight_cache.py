"""One NVFP4 copy of each 16-bit weight, however many graphs and compilers use it.
Called by the prologue or runner of compiled graphs, at every call; calls nvfp4.quantize when a weight has changed.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch

from thunder_moe.nvfp4 import NVFP4Weight, quantize
from thunder_moe.ops.grouped_mm import operands

__all__ = ["WEIGHT_CACHE", "WeightCache"]

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
        return self._entry(weights, transposed, interleaved).packed

    def operands(
        self, *weights: torch.Tensor, transposed: bool = False, interleaved: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same as the operators take it: (fp4_weight, weight_scaling_factor, weight_global_scale)."""
        return self._entry(weights, transposed, interleaved).operands

    def _entry(self, weights: tuple[torch.Tensor, ...], transposed: bool, interleaved: bool) -> _Entry:
        # On the path of every call: 1.3 us for one weight (Zen 5).
        key = (transposed, interleaved, *map(id, weights))
        stamps = tuple(map(_stamp, weights))
        entry = self._entries.get(key)
        if entry is not None and entry.stamps == stamps and _same(entry, weights):
            return entry
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not _same(entry, weights):
                entry = None  # an id that lives again in another tensor
            if entry is None or entry.stamps != stamps:
                entry = self._refresh(key, entry, weights, stamps)
            return entry

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
        new_entry = self._entries[key] = _Entry(refs, stamps, packed, operands(packed))
        return new_entry

    def __len__(self) -> int:
        return len(self._entries)


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
