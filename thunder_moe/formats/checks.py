"""The errors that name an argument, what it was and what is wanted.
Called by everything that users call; calls torch alone.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["mismatch", "require", "require_module", "require_type"]


def mismatch(name: str, tensor: Tensor, wanted: str) -> ValueError:
    """The error of an argument whose dtype, shape or device is not what is wanted."""
    return ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, wanted {wanted}")


def require(ok: bool, name: str, tensor: Tensor, wanted: str) -> None:
    """Raises `mismatch` unless `ok`."""
    if not ok:
        raise mismatch(name, tensor, wanted)


def require_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises the TypeError of an argument that is not of a type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {wanted}")


def require_module(model: object) -> None:
    """Raises the TypeError of an argument `model` that is no module."""
    require_type("model", model, nn.Module, "a torch.nn.Module")
