"""Compiles CUDA C++ at run time and loads it: NVRTC and the driver through cuda-bindings, which CUDA torch installs.
Called by chain.py, launch.py and backend.py beside it; calls cuda.bindings, and kernels/code_cache.py to keep cubins.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

from thunder_moe.kernels import code_cache

_OPTIONS = ("--std=c++17", "--device-as-default-execution-space")  # the latter for generic lambdas
_thread = threading.local()


class Kernel:
    """A compiled kernel on one device; its one parameter is a struct by value. chain.py launches it.

    Args:
        function: of cuda.bindings.driver.
        device: the index of the device.
        threads: the number of threads of a block.
        shared_bytes: dynamic shared memory of a block.
        overlap: programmatic dependent launch: the kernel may start while the one before it in the stream still runs,
            and waits for its results itself (`await_previous_kernel` of common.cuh). Needs SM90.

    Attributes:
        function, device: as above.
        config: a CUlaunchConfig of one block.
        blocks_per_multiprocessor: the number of its blocks that run at once on a multiprocessor.
    """

    def __init__(self, function: Any, device: int, threads: int, shared_bytes: int, *, overlap: bool) -> None:
        from cuda.bindings import driver

        self.function, self.device = function, device
        self.config = launch_config(threads, shared_bytes, overlap)
        if shared_bytes > 0:  # together with static shared memory it may exceed the 48 KiB that need no attribute
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, limit, shared_bytes))
        if overlap:  # SM90: clusters of up to 16 blocks
            large = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _check(driver.cuFuncSetAttribute(function, large, 1))
        (self.blocks_per_multiprocessor,) = _check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared_bytes)
        )


def instance(template: str, *parameters: Any) -> str:
    """Return the C++ name of a kernel that a template makes of these numbers and flags."""
    return f"{template}<{', '.join(str(each).lower() for each in parameters)}>"


def launch_config(threads: int, shared_bytes: int, overlap: bool) -> Any:
    """Return a CUlaunchConfig of one-dimensional blocks; the number of blocks and the stream are set at each launch."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def tensor_map(address: int, rows: int, k: int, box_rows: int) -> bytes:
    """Return the 128 bytes of a tensor map (SM90): 16-bit numbers (rows, k) in boxes of box_rows by 64, 128-byte
    swizzle.

    Args:
        address: the address on the device, a multiple of 16.
        rows: the number of rows of the matrix.
        k: numbers in a row, a multiple of 8.
        box_rows: at most 256.
    """
    from cuda.bindings import driver

    (result,) = _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            2,
            address,
            [driver.cuuint64_t(k), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(2 * k)],
            [driver.cuuint32_t(64), driver.cuuint32_t(box_rows)],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(result.getPtr(), 128)


def missing_reason() -> str | None:
    """Return None if kernels can be compiled, else a sentence that says what is missing."""
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401

        _check(nvrtc.nvrtcVersion())
    except Exception as error:  # a missing package, or a missing library, which raises errors of its own
        return f"CUDA kernels cannot be compiled: {error}; pip install cuda-bindings nvidia-cuda-nvrtc"
    return None


def bind_context(device: int) -> None:
    """Make the primary context of a device current in this thread, if no context is current.

    The driver's functions need one. torch makes it current with a thread's first call of the CUDA runtime; a thread
    whose memory comes from torch's caching allocator may never make one. It is called under
    `torch.cuda.device(device)`, which from then on switches between the contexts of devices.
    """
    if getattr(_thread, "has_context", False):  # at every launch
        return
    from cuda.bindings import driver

    (current,) = _check(driver.cuCtxGetCurrent())
    if int(current) == 0:
        (ordinal,) = _check(driver.cuDeviceGet(device))
        (context,) = _check(driver.cuDevicePrimaryCtxRetain(ordinal))
        _check(driver.cuCtxSetCurrent(context))
    _thread.has_context = True


@functools.cache
def kernel(
    sources: tuple[Path, ...],
    expression: str,
    threads: int,
    shared_bytes: int,
    device: int,
    argument: type[ctypes.Structure],
) -> Kernel:
    """Return the kernel that a C++ expression names, such as ``gemm<true, 4>``, compiled once and loaded on a device.

    Args:
        sources, expression: as of `compile_files`.
        threads: the number of threads of a block.
        shared_bytes: dynamic shared memory of a block.
        device: its index.
        argument: the struct that the kernel takes.
    """
    from cuda.bindings import driver

    with torch.cuda.device(device):
        torch.cuda.init()
        bind_context(device)
        capability = torch.cuda.get_device_capability(device)
        cubin, name = compile_files(sources, expression, capability, argument)
        (module,) = _check(driver.cuModuleLoadData(cubin))
        (function,) = _check(driver.cuModuleGetFunction(module, name.encode()))
        return Kernel(function, device, threads, shared_bytes, overlap=capability >= (9, 0))


def compile_files(
    sources: tuple[Path, ...], expression: str, capability: tuple[int, int], argument: type[ctypes.Structure]
) -> tuple[bytes, str]:
    """Run `compile_cubin` on the text of the files, and the `struct_checks` of the kernel's argument, for devices of a
    compute capability such as (9, 0)."""
    major, minor = capability
    # The suffix "a" enables the instructions of SM90 alone, such as wgmma.
    architecture = f"sm_{major}{minor}" + "a" * (capability == (9, 0))
    text = "".join(file.read_text() for file in sources)
    return compile_cubin(text + struct_checks(argument), expression, architecture)


@functools.cache
def struct_checks(structure: type[ctypes.Structure]) -> str:
    """Return C++ assertions that the struct of the same name has the same fields at the same offsets.

    Fields with a trailing underscore in their names are padding, without a name in C++. common.cuh defines OFFSET_OF.
    """
    name = structure.__name__
    lines = [f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "the size of {name}");']
    for field, kind, *_ in structure._fields_:
        if field.endswith("_"):
            continue
        at = getattr(structure, field)
        place = f"OFFSET_OF({name}, {field}) == {at.offset} && sizeof({name}::{field}) == {at.size}"
        lines.append(f'static_assert({place}, "{name}.{field}");')
        if issubclass(kind, ctypes.Structure):
            lines.append(struct_checks(kind))
    return "\n".join(["", *lines, ""])


def compile_cubin(source: str, expression: str, architecture: str) -> tuple[bytes, str]:
    """Return (cubin, mangled name of the kernel) for an architecture such as "sm_90".

    Raises:
        RuntimeError: the source does not compile; the message is the compiler's log.
    """
    from cuda.bindings import nvrtc

    version = _check(nvrtc.nvrtcVersion())
    key = hashlib.sha256("\0".join([source, expression, architecture, *_OPTIONS, str(version)]).encode()).hexdigest()
    kept = code_cache.read(key)
    if kept is None:
        logging.getLogger("thunder_moe").info("compiling %s for %s (a second or two, once)", expression, architecture)
        name, cubin = _compile(source, expression, architecture)
        kept = name + b"\0" + cubin
        code_cache.write(key, kept)
    name, _, cubin = kept.partition(b"\0")
    return cubin, name.decode()


def _compile(source: str, expression: str, architecture: str) -> tuple[bytes, bytes]:
    """Return (mangled name, cubin)."""
    from cuda.bindings import nvrtc

    (program,) = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"thunder_moe.cu", 0, [], []))
    try:
        _check(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        options = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in _OPTIONS)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
            log = b" " * size
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{expression} for {architecture}: {log.rstrip(bytes(1)).decode()}")
        (size,) = _check(nvrtc.nvrtcGetCUBINSize(program))
        cubin = b" " * size
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        (name,) = _check(nvrtc.nvrtcGetLoweredName(program, expression.encode()))
        return name, cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def raise_error(status: int) -> NoReturn:
    """Raise RuntimeError for a status of the driver other than success."""
    from cuda.bindings import driver

    raise RuntimeError(f"CUresult: {driver.CUresult(status).name}")


def _check(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the results of a function of cuda-bindings without the status, which comes first."""
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"{type(status).__name__}: {status.name}")
    return tuple(values)
