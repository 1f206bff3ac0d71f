"""The ValueError that names a tensor argument, what it was and what is wanted.
Called by formats, ops and nn; calls torch alone.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["mismatch", "require"]


def mismatch(name: str, tensor: Tensor, wanted: str) -> ValueError:
    """The error of an argument whose dtype, shape or device is not what is wanted."""
    return ValueError(f"{name}: got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, wanted {wanted}")


def require(ok: bool, name: str, tensor: Tensor, wanted: str) -> None:
    """Raises `mismatch` unless `ok`."""
    if not ok:
        raise mismatch(name, tensor, wanted)
