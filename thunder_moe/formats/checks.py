"""Errors that name an argument, its value and the wanted one.
Called by everything that users call; calls torch alone.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn


def mismatch(name: str, tensor: Tensor, wanted: str) -> ValueError:
    """Return the error for an argument with a wrong dtype, shape or device."""
    return ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, wanted {wanted}")


def require(ok: bool, name: str, tensor: Tensor, wanted: str) -> None:
    """Raises `mismatch` unless `ok`."""
    if not ok:
        raise mismatch(name, tensor, wanted)


def require_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises a TypeError if an argument has another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {wanted}")


def require_device(argument: str, device: torch.device | str) -> torch.device:
    """Return a device, after a check that tensors on it can be made and read; raises a ValueError if not."""
    try:
        found = torch.device(device)
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{argument}: got {str(device)!r}, which cannot be used here ({reason})") from error
    return found


def require_module(model: object) -> None:
    """Raises a TypeError if the argument `model` is not a module."""
    require_type("model", model, nn.Module, "a torch.nn.Module")


def require_path(argument: str, path: object) -> None:
    """Raises a TypeError if an argument is neither a string nor a path."""
    require_type(argument, path, (str, os.PathLike), "a string or a pathlib.Path")
