"""Zeroed int32 counters and flags on a CUDA device, through which the blocks of a kernel synchronise.
Called by kernels.cuda; calls torch alone.

A kernel finds its row all zeros and leaves it so. Kernels that may run at once need different rows: each stream has its
own, and so has every call that a CUDA graph captures, since graphs are replayed on any stream.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["ROW_SIZE", "Zeros", "zeros_of"]

ROW_SIZE = 2048
_SIZE = 1024 * ROW_SIZE


class Zeros:
    """int32 zeros on a device, given out in rows; any thread may ask for one.

    Args:
        device: where they are.
        zeros: all of them, zero for whoever reads them from now on, on whatever stream.
    """

    def __init__(self, device: torch.device, zeros: Tensor) -> None:
        self._device = device
        self._all = zeros
        self._used = 0
        self._of_stream: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def row(self, size: int = ROW_SIZE) -> Tensor:
        """int32 (at least `size`,) for a kernel that is launched, or captured, on the device's current stream.

        Args:
            size: how many; a multiple of 32, a cache line.
        """
        capturing = _is_capturing(self._device)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if not capturing:
            row = self._of_stream.get(stream)
            if row is not None and row.numel() >= size:
                return row
            size = max(size, ROW_SIZE)  # for whatever the stream's next kernels need
        with self._lock:
            if self._used + size <= self._all.numel():
                row, self._used = self._all[self._used : self._used + size], self._used + size
                if not capturing:
                    self._of_stream[stream] = row
                return row
        # One more launch, in a graph at every replay.
        return torch.zeros(size, dtype=torch.int32, device=self._device)


_ZEROS: dict[torch.device, Zeros] = {}
_LOCK = threading.Lock()


def zeros_of(device: torch.device) -> Zeros:
    """The zeros of a device, which has an index."""
    zeros = _ZEROS.get(device)
    if zeros is not None:
        return zeros
    if _is_capturing(device):  # nothing may be allocated for longer than the graph: it sets its zeros at every replay
        return Zeros(device, torch.zeros(0, dtype=torch.int32, device=device))
    with _LOCK:
        if device not in _ZEROS:
            _ZEROS[device] = Zeros(device, _in_a_thread_of_its_own(_SIZE, device))
        return _ZEROS[device]


def _in_a_thread_of_its_own(size: int, device: torch.device) -> Tensor:
    """int32 zeros that are there for every stream, and for good.

    Neither the memory pool that the caller may allocate from (the warm-up of a CUDA graph) nor its inference mode
    reaches into another thread. The host waits for the stream that fills them, which has nothing else to do.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_filled, size, device).result()


def _filled(size: int, device: torch.device) -> Tensor:
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        zeros = torch.zeros(size, dtype=torch.int32, device=device)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
    return zeros


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of a device is being captured; torch's own question is about the current device."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
