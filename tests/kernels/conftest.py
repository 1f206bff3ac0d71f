"""The CUDA backend on a CPU, its kernels run by the emulator: the fixtures `emulator`, `adversary` and `emulated`.
Called by pytest for the tests of kernels; calls emulator/build.py.
"""

import ctypes

import pytest
import torch
from emulator import build

from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import launch, linear, nvrtc, operands, workspace


class Adversary(ctypes.Structure):
    """`Adversary` of cuda_emulator.h."""

    _fields_ = (
        ("late_result", ctypes.c_void_p),
        ("late_bytes", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("late_copies", "late_products", "order")),
    )


class MatrixMap(ctypes.Structure):
    """`TensorMap` of cuda_emulator.h."""

    _fields_ = (
        ("matrix", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "k", "box_rows")),
        ("unused", ctypes.c_int64 * 12),
    )


@pytest.fixture(scope="session")
def emulator():
    """launch(sources, expression, threads, blocks, argument, adversary): runs a kernel of .cu files on this CPU."""
    if build.compiler() is None:
        pytest.skip("no C++ compiler")

    def run(sources, expression, threads, blocks, argument, adversary):
        library = build.library(sources, expression, type(argument))
        library.run(ctypes.byref(argument), blocks, threads, adversary)

    return run


@pytest.fixture(scope="session")
def adversary():
    """Return the emulated device's order of threads and delays; a test that changes it restores it."""
    return Adversary(late_copies=1, late_products=1, order=2)


def late_result(argument):
    """Return (address, bytes) of what a kernel takes for the result of the kernel before it; (None, 0) for none."""
    argument = getattr(argument, "gemm", argument)
    if getattr(argument, "x_from_previous_kernel", False):
        return argument.x, 2 * argument.rows * argument.k
    if getattr(argument, "prefetch", False):  # a row of the router, or the beginning of the query
        router = getattr(argument, "router", None)
        return (argument.query, 128) if router is None else (argument.x, 2 * router.tokens * argument.hidden_size)
    if getattr(argument, "rows_from_previous_kernel", False):
        return argument.rows, 2 * argument.num_rows * argument.n
    return None, 0


@pytest.fixture
def emulated(emulator, adversary, monkeypatch):
    """Return the backend on a device of three multiprocessors that run one block each."""

    kernels, errors = [], []

    class Kernel:
        blocks_per_multiprocessor = 1

        def __init__(self, sources, expression, threads, shared_bytes, device, argument):
            kernels.append((sources, expression, threads, argument))
            self.function, self.config, self.launch_config = len(kernels), self, launch.LaunchConfig()

        def getPtr(self):  # noqa: N802 (as cuda.bindings has it)
            return ctypes.addressof(self.launch_config)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    def run(config, function, parameters, extra):
        try:
            sources, expression, threads, struct = kernels[function - 1]
            argument = struct.from_buffer_copy(ctypes.string_at(parameters[0], ctypes.sizeof(struct)))
            adversary.late_result, adversary.late_bytes = late_result(argument)
            blocks = launch.LaunchConfig.from_address(config).gridDimX
            emulator(sources, expression, threads, blocks, argument, adversary)
        except BaseException as error:  # which ctypes would print and drop
            errors.append(error)
            return 1
        return 0

    def raise_error(status):
        raise errors.pop()

    chains.clear()
    for cached in (linear.prepare_linear, launch.tensor_map):
        cached.cache_clear()
    monkeypatch.setattr(launch, "launch_address", lambda: ctypes.cast(run, ctypes.c_void_p).value)
    monkeypatch.setattr(nvrtc, "kernel", Kernel)
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: None)
    monkeypatch.setattr(nvrtc, "raise_error", raise_error)
    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(launch, "current_stream", lambda device: 1)
    monkeypatch.setattr(workspace, "_is_capturing", lambda device: False)
    monkeypatch.setattr(workspace, "_filled", lambda size, device: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(workspace, "_POOLS", {})
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *matrix: bytes(MatrixMap(*matrix)))
    monkeypatch.setattr(operands, "_device_facts", lambda device: (3, (8, 0)))
