"""Launches compiled kernels at little host time: driver structs that are filled once, then patched at each launch.
Called by the other modules of kernels/cuda; calls nvrtc.py for the kernels, and cuLaunchKernelEx through ctypes.

A launch takes 3.9 us of an H200's host, 2.8 of them in the driver.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from thunder_moe.kernels.cuda import nvrtc

__all__ = [
    "Launcher",
    "allocator",
    "capture_of",
    "current_device",
    "current_stream",
    "is_capturing",
    "launcher",
    "packer",
    "tensor_map",
]

# Of the calling thread, as torch has them (a torch without CUDA has none): the index of the current device, the address
# of the current stream of a device, whether the current stream of the current device is being captured.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


def allocator(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """(shape, strides, dtype) -> an uninitialised tensor on the current device, in under half of `new_empty`'s time.

    What inductor allocates with. `device`: of the type that is meant.
    """
    from torch._C._dynamo import guards

    name = "_empty_strided_cuda" if device.type == "cuda" else "_empty_strided_cpu"

    def plain(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return cast("Callable[..., Tensor]", getattr(guards, name, plain))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gridDimX", "gridDimY", "gridDimZ")),
        *((name, ctypes.c_uint) for name in ("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")),
        *((name, ctypes.c_void_p) for name in ("hStream", "attrs")),
        ("numAttrs", ctypes.c_uint),
    )


class Launcher:
    """A kernel with a number of blocks; a call launches it. Safe to use from any thread.

    Args:
        kernel: its one parameter is a struct.
        blocks: of the grid.
        argument: the struct.
    """

    def __init__(self, kernel: nvrtc.Kernel, blocks: int, argument: type[ctypes.Structure]) -> None:
        self._kernel = kernel  # owns what the config points to
        self._device = kernel.device
        self._function = int(kernel.function)
        self._config = LaunchConfig.from_buffer_copy(ctypes.string_at(kernel.config.getPtr(), _CONFIG_BYTES))
        self._config.gridDimX = blocks
        self._pack_into = packer(argument).pack_into
        self._argument = ctypes.create_string_buffer(ctypes.sizeof(argument))
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument))
        self._addresses = ctypes.addressof(self._config), ctypes.addressof(self._parameters)
        self._launch, self._lock = _launch_function(), threading.Lock()

    def __call__(self, stream: int, *fields: Any) -> None:
        """Launches the kernel on a stream of its device, which has to be the current one.

        Args:
            stream: its address.
            fields: of the struct, in order, those of structs in it one by one; 0 for no pointer.
        """
        nvrtc.bind_context(self._device)
        config, parameters = self._addresses
        with self._lock:
            self._pack_into(self._argument, 0, *fields)
            self._config.hStream = stream
            status = self._launch(config, self._function, parameters, None)
        if status != 0:
            nvrtc.raise_error(status)

    def launch(self, stream: int, argument: ctypes.Structure) -> None:
        """The same with a struct that is filled in."""
        nvrtc.bind_context(self._device)
        config, parameters = self._addresses
        with self._lock:
            ctypes.memmove(self._argument, ctypes.addressof(argument), ctypes.sizeof(argument))
            self._config.hStream = stream
            status = self._launch(config, self._function, parameters, None)
        if status != 0:
            nvrtc.raise_error(status)


@functools.lru_cache(maxsize=4096)
def launcher(
    sources: tuple[Path, ...],
    expression: str,
    threads: int,
    shared_bytes: int,
    blocks: int,
    argument: type[ctypes.Structure],
    device: int,
    multiprocessors: int | None = None,
) -> Launcher:
    """The launcher of a kernel, which is compiled on first use.

    Args:
        sources, expression, threads, shared_bytes, argument, device: as in `nvrtc.kernel`.
        blocks: of the grid.
        multiprocessors: of the device, for persistent kernels: at most as many blocks are launched as run at once.
    """
    kernel = nvrtc.kernel(sources, expression, threads, shared_bytes, device, argument)
    if multiprocessors is not None:
        blocks = min(blocks, multiprocessors * kernel.blocks_per_multiprocessor)
    return Launcher(kernel, blocks, argument)


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, k: int, box_rows: int) -> bytes:
    """`TensorMap` of ptx.cuh: a matrix (rows, K) in boxes of box_rows rows by 64 k. It depends on these alone."""
    return nvrtc.tensor_map(address, rows, k, box_rows)


@functools.cache
def packer(argument: type[ctypes.Structure]) -> struct.Struct:
    """What packs the fields of a struct, in order, as the C++ compiler lays them out; structs in it are flattened.

    Fields whose names end in an underscore are padding and take no value.
    """
    packed = struct.Struct("@" + _format(argument))
    missing = ctypes.sizeof(argument) - packed.size
    return struct.Struct(packed.format + f"{missing}x")


def _format(argument: type[ctypes.Structure]) -> str:
    codes = ""
    for name, kind, *_ in argument._fields_:
        any_kind: Any = kind
        if name.endswith("_"):
            codes += f"{ctypes.sizeof(any_kind)}x"
        elif issubclass(kind, ctypes.Structure):
            codes += _format(kind)
        elif issubclass(kind, ctypes.Array):
            codes += f"{ctypes.sizeof(any_kind)}s"
        else:
            codes += any_kind._type_
    return codes


@functools.cache
def _launch_function() -> Any:
    """cuLaunchKernelEx(config, function, parameters, extra) -> status."""
    function = _driver().cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


def capture_of(stream: int) -> int:
    """A number for the capture that a stream takes part in, another one for each of the process; 0 for none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = _capture_function()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed != 0:
        nvrtc.raise_error(failed)
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@functools.cache
def _capture_function() -> Any:
    """cuStreamGetCaptureInfo_v2(stream, status*, id*, graph*, dependencies*, their number*) -> status."""
    function = _driver().cuStreamGetCaptureInfo_v2
    function.argtypes, function.restype = [ctypes.c_void_p] * 6, ctypes.c_int
    return function


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


_CONFIG_BYTES = ctypes.sizeof(LaunchConfig)
