"""The rounded weights that `finetune.recipes.round_weights_once` keeps for the products of 8-bit recipes.
Called by kernels.recipes and cuda.recipes, which ask `rounded` at each product, and by finetune.recipes, which calls
`keep` and `drop`; calls slow_paths.

A product finds its weight by address, shape and strides, so compiled graphs need not know of it. The address belongs to
no other tensor, because what is kept holds the weight's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.slow_paths import warn_once

Function = Callable[..., tuple[Any, ...]]
Key = tuple[Any, ...]


class _Kept:
    """The result of a function for a weight, and the version counters that the weight had."""

    def __init__(self, parameter: Tensor, weight: Tensor, function: Function, options: tuple[Any, ...]) -> None:
        self.parameter, self.weight = parameter, weight.detach()
        self.versions = parameter._version, weight._version  # functions of a DTensor raise its own counter alone
        self.captured = _capturing(weight)
        self.result = function(weight, *options)
        self.stream = torch.cuda.current_stream(weight.device) if weight.is_cuda else None
        self.ready = None if self.stream is None else self.stream.record_event()

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if the weight has been changed since."""
        now = self.parameter._version, self.weight._version
        if now != self.versions or self.weight.data_ptr() != weight.data_ptr():
            raise RuntimeError(
                f"round_weights_once: a weight of shape {tuple(weight.shape)} was changed in place inside of the block,"
                " wanted changes after its end; enter it again for the new weights"
            )

    def read(self) -> tuple[Any, ...]:
        """Return the result, for use on the current stream."""
        if self.stream is not None and self.ready is not None:
            stream = torch.cuda.current_stream(self.stream.device)
            if stream != self.stream:
                stream.wait_event(self.ready)
                for tensor in self.result:
                    if tensor is not None:
                        tensor.record_stream(stream)
        return self.result


_KEPT: dict[Key, _Kept] = {}


def rounded(function: Function, weight: Tensor, *options: Any) -> tuple[Any, ...]:
    """Return function(weight, *options), or what is kept of it.

    Raises:
        RuntimeError: the weight has been changed in place since it was kept.
    """
    if not _KEPT:
        return function(weight, *options)
    kept = _KEPT.get(_key(function, weight, options))
    what = "a tensor that is not a parameter of the model (autocast, fully_shard and parametrizations make new ones)"
    if kept is not None:
        kept.check(weight)
        if kept.captured == _capturing(weight):
            return kept.read()
        what = "a weight in a CUDA graph whose capture does not contain the whole block"
    warn_once(("rounded", what), f"round_weights_once: {what} is rounded at each product, as without it")
    return function(weight, *options)


def keep(parameter: Tensor, weight: Tensor, function: Function, *options: Any) -> Key | None:
    """Keep function(weight, *options) for `rounded`: -> the key for `drop`, or None if it is kept already.

    Args:
        parameter: whose memory `weight` is a view of; itself, or a DTensor.
    """
    key = _key(function, weight, options)
    if key in _KEPT:
        return None
    _KEPT[key] = _Kept(parameter, weight, function, options)
    return key


def drop(key: Key) -> None:
    """Free what `keep` has kept."""
    _KEPT.pop(key, None)


def _key(function: Function, weight: Tensor, options: tuple[Any, ...]) -> Key:
    return function, options, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype


def _capturing(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.is_current_stream_capturing()
