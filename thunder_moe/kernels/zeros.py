"""Zeros on a CUDA device, through which the blocks of a kernel that share work tell each other how far they are.
Called by kernels.cuda and kernels.humming; calls torch alone.

A kernel finds its row all zeros and leaves it so. Kernels that may run at once need different rows: each stream has its
own, and so has every call that a CUDA graph captures, since graphs are replayed on any stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ROW_SIZE", "Zeros", "zeros_of"]

ROW_SIZE = 2048  # as many as humming.layer.HummingLayer keeps for its locks
_SIZE = 1024 * ROW_SIZE


class Zeros:
    """int32 zeros on a device, given out in rows.

    Args:
        device: where they are.
        size: how many.

    Attributes:
        start: int32 (1,), the row at which the first expert starts.
    """

    def __init__(self, device: torch.device, size: int = _SIZE) -> None:
        self.start = torch.zeros(1, dtype=torch.int32, device=device)
        self._device = device
        self._all = torch.zeros(size, dtype=torch.int32, device=device)
        self._used = 0
        self._of_stream: dict[int, Tensor] = {}

    def row(self, size: int = ROW_SIZE) -> Tensor:
        """int32 (at least `size`,) for a kernel that is launched, or captured, on the current stream.

        Args:
            size: how many, at most `ROW_SIZE`; a multiple of 32, a cache line.
        """
        stream = torch.cuda.current_stream(self._device).cuda_stream
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            if stream in self._of_stream:
                return self._of_stream[stream]
            size = ROW_SIZE  # for whatever the stream's next kernels need
        if self._used + size > self._all.numel():  # one more launch, in a graph at every replay
            return torch.zeros_like(self._all[:size])
        row, self._used = self._all[self._used : self._used + size], self._used + size
        if not capturing:
            self._of_stream[stream] = row
        return row


_ZEROS: dict[torch.device, Zeros] = {}


def zeros_of(device: torch.device) -> Zeros:
    """The zeros of a device."""
    zeros = _ZEROS.get(device)
    if zeros is not None:
        return zeros
    if torch.cuda.is_current_stream_capturing():  # a graph's memory goes with the graph, which sets it at every replay
        return Zeros(device, ROW_SIZE)
    return _ZEROS.setdefault(device, Zeros(device))
