"""The only dispatch: which backend runs an NVFP4 grouped GEMM on a device.
Called by ops, tests and benchmarks; calls kernels.cpu (compiled, CPUs) and kernels.reference (plain torch, anywhere).
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch

__all__ = ["BACKENDS", "select"]

# In order of preference; each has the devices that it serves (None: all).
BACKENDS: dict[str, tuple[str, ...] | None] = {"cpu": ("cpu",), "reference": None}


def select(device: torch.device, *, backend: str | None = None) -> ModuleType:
    """The kernel module for operands on a device.

    Args:
        device: where the operands are.
        backend: a name of `BACKENDS` to insist on; the best one available when None.

    Returns:
        A module with `grouped_mm`, `grouped_mm_dgrad` and `grouped_swiglu`, each
        ``(rows (M, .), NVFP4Weight, offsets int32 (E,)) -> (M, .)``.

    Raises:
        ValueError: the backend is unknown, does not serve the device, or cannot run here (the message says why).
    """
    if backend is None:
        return _best(device.type)
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {tuple(BACKENDS)}")
    devices = BACKENDS[backend]
    if devices is not None and device.type not in devices:
        raise ValueError(f"backend: got {backend!r} for a tensor on {device}, it runs on {devices}")
    module, reason = _load(backend)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} cannot run here: {reason}")
    return module


@functools.cache
def _best(device_type: str) -> ModuleType:
    for name, devices in BACKENDS.items():
        if devices is not None and device_type not in devices:
            continue
        module, reason = _load(name)
        if reason is None:
            return module
        warnings.warn(
            f"thunder_moe: the {name!r} kernels cannot run, slower plain-torch ones take their place: {reason}",
            stacklevel=2,
        )
    raise AssertionError("the reference runs everywhere")


@functools.cache
def _load(name: str) -> tuple[ModuleType, str | None]:
    module = importlib.import_module(f"thunder_moe.kernels.{name}")
    return module, module.unavailable_reason()
