"""Zeroed int32 semaphores and counters on a CUDA device, for synchronization between the blocks of a kernel.
Called by kernels/cuda/chain.py; calls launch.py for the current stream.

A kernel finds its slice of the workspace all zeros and leaves it so. Kernels that may run at the same time need
different slices: each stream has its own, and in each CUDA graph, which is replayed on any stream, each of the streams
that were captured.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from thunder_moe.kernels.cuda import launch

STREAM_SIZE = 2048  # int32 that each stream gets, enough for most kernels
_SIZE = 1024 * STREAM_SIZE


class SemaphorePool:
    """int32 zeros on a device, handed out in slices; safe to use from any thread.

    Args:
        device: where they are.
        zeros: the whole workspace; later reads on any stream have to see zeros.
    """

    def __init__(self, device: torch.device, zeros: Tensor) -> None:
        self._device = device
        self._zeros = zeros
        self._used = 0
        # (stream, True if kernels overlap) -> the slice, and the capture that it belongs to.
        self._of_stream: dict[tuple[int, bool], Tensor] = {}
        self._of_capture: dict[tuple[int, bool], tuple[int, Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, size: int = STREAM_SIZE, *, overlapping: bool = False) -> Tensor:
        """Return int32 (at least `size`,) for a kernel that is launched, or captured, on the device's current stream.

        Args:
            size: a multiple of 32, a cache line.
            overlapping: the kernel uses the slice before the one in front of it in the stream has ended, so it gets
                another slice than that kernel, which must not be overlapping, too.
        """
        stream = launch.current_stream(self._device.index), overlapping
        capture = launch.capture_of(stream[0]) if _is_capturing(self._device) else 0
        if capture == 0:
            semaphores = self._of_stream.get(stream)
        else:  # the last graph of a stream: nothing is captured into an earlier one any more
            owner, semaphores = self._of_capture.get(stream, (0, None))
            semaphores = semaphores if owner == capture else None
        if semaphores is not None and semaphores.numel() >= size:
            return semaphores
        if capture == 0:  # graphs may be many, and small
            size = max(size, STREAM_SIZE)  # enough for most later kernels of the stream, too
        with self._lock:
            if self._used + size <= self._zeros.numel():
                semaphores, self._used = self._zeros[self._used : self._used + size], self._used + size
                if capture == 0:
                    self._of_stream[stream] = semaphores
                else:
                    self._of_capture[stream] = capture, semaphores
                return semaphores
        # The pool is empty: one more launch per call, or per replay of a graph.
        return torch.zeros(size, dtype=torch.int32, device=self._device)


_POOLS: dict[torch.device, SemaphorePool] = {}
_LOCK = threading.Lock()


def semaphore_pool(device: torch.device) -> SemaphorePool:
    """Return the pool of a device, which has an index."""
    pool = _POOLS.get(device)
    if pool is not None:
        return pool
    if _is_capturing(device):  # memory of the graph's pool must not outlive it: an empty pool, zeros at every replay
        return SemaphorePool(device, torch.zeros(0, dtype=torch.int32, device=device))
    with _LOCK:
        if device not in _POOLS:
            _POOLS[device] = SemaphorePool(device, _zeros_from_own_thread(_SIZE, device))
        return _POOLS[device]


def _zeros_from_own_thread(size: int, device: torch.device) -> Tensor:
    """Return permanent int32 zeros that every stream sees.

    They are allocated in another thread, so that neither the caller's memory pool (the warm-up of a CUDA graph) nor its
    inference mode applies. The host waits for the side stream that fills them.
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
    """True if the current stream of `device` is being captured; torch's function asks about the current device."""
    if launch.current_device() == device.index:
        return bool(launch.is_capturing())
    with torch.cuda.device(device):
        return bool(launch.is_capturing())
