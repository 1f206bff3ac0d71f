"""The driver's functions behind launches: configurations, streams, tensor maps, and single launches.
Called by the other modules of kernels/cuda; calls nvrtc.py for the kernels, and the CUDA driver through ctypes.

What runs at every forward is launched by chains (chain.py), which take less of the host.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.cuda import nvrtc

# torch's functions for the calling thread (None in a torch without CUDA): the index of the current device, the address
# of a device's current stream, True if the current device's current stream is being captured.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gridDimX", "gridDimY", "gridDimZ")),
        *((name, ctypes.c_uint) for name in ("blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes")),
        *((name, ctypes.c_void_p) for name in ("hStream", "attrs")),
        ("numAttrs", ctypes.c_uint),
    )


def config_of(kernel: nvrtc.Kernel, blocks: int, multiprocessors: int | None) -> bytes:
    """Return the CUlaunchConfig of a kernel, which points to attributes that the kernel owns; the arguments are as in
    `ChainBuilder.launch`."""
    if multiprocessors is not None:
        blocks = min(blocks, multiprocessors * kernel.blocks_per_multiprocessor)
    config = LaunchConfig.from_buffer_copy(ctypes.string_at(kernel.config.getPtr(), ctypes.sizeof(LaunchConfig)))
    config.gridDimX = blocks
    return bytes(config)


def launch(
    sources: tuple[Path, ...],
    expression: str,
    threads: int,
    shared_bytes: int,
    blocks: int,
    argument: ctypes.Structure,
    device: torch.device,
    multiprocessors: int | None = None,
) -> None:
    """Launch a kernel once, with a filled struct, on the current stream of a device.

    The arguments are as in `ChainBuilder.launch`.
    """
    index: Any = device.index
    if current_device() != index:
        with torch.cuda.device(index):
            return launch(sources, expression, threads, shared_bytes, blocks, argument, device, multiprocessors)
    kernel = nvrtc.kernel(sources, expression, threads, shared_bytes, index, type(argument))
    config = LaunchConfig.from_buffer_copy(config_of(kernel, blocks, multiprocessors))
    config.hStream = current_stream(index)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
    nvrtc.bind_context(index)
    status = _LAUNCH(launch_address())(ctypes.addressof(config), int(kernel.function), parameters, None)
    if status != 0:
        nvrtc.raise_error(status)


@functools.lru_cache(maxsize=4096)
def tensor_map(address: int, rows: int, k: int, box_rows: int) -> bytes:
    """Return the `TensorMap` of ptx.cuh for a matrix (rows, K) in boxes of box_rows rows by 64 k."""
    return nvrtc.tensor_map(address, rows, k, box_rows)


def map_of(matrix: Tensor, rows: int, k: int, box_rows: int) -> Any:
    """Return the `tensor_map` of a matrix as a field of an argument struct."""
    return (ctypes.c_byte * 128).from_buffer_copy(tensor_map(matrix.data_ptr(), rows, k, box_rows))


_LAUNCH = ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


@functools.cache
def launch_address() -> int:
    """Return the address of cuLaunchKernelEx(config, function, parameters, extra) -> status."""
    address = ctypes.cast(_driver().cuLaunchKernelEx, ctypes.c_void_p).value
    assert address is not None
    return address


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream takes part in, unique in the process; 0 for none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = _capture_function()(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed != 0:
        nvrtc.raise_error(failed)
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE


@functools.cache
def _capture_function() -> Any:
    """Return cuStreamGetCaptureInfo_v2(stream, status*, id*, graph*, dependencies*, their number*) -> status."""
    function = _driver().cuStreamGetCaptureInfo_v2
    function.argtypes, function.restype = [ctypes.c_void_p] * 6, ctypes.c_int
    return function


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
