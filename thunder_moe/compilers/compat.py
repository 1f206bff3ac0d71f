"""Cures for Thunder 0.2.6 on newer torch, each with the version that makes it unnecessary.
Called by thunder_executor and report before they import thunder; calls nothing of the package.
"""

from __future__ import annotations

import torch

__all__ = ["import_thunder"]

# Thunder 0.2.6 lists these Tensor methods by name when it is imported; torch 2.13 removed them (named tensors).
# Unnecessary from the first Thunder release that imports on torch 2.13.
_REMOVED_TENSOR_METHODS = ("rename", "has_names", "refine_names", "align_to", "align_as")


def import_thunder() -> None:
    """Makes ``import thunder`` work.

    Raises:
        ImportError: lightning-thunder is missing; the message names the extra to install.
    """
    for name in _REMOVED_TENSOR_METHODS:
        if not hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _removed(name))
    try:
        import thunder  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "thunder":
            raise
        raise ImportError("moe_executor needs lightning-thunder: pip install 'thunder_moe[thunder]'") from error


def _removed(name: str):
    def method(self, *args, **kwargs):
        raise RuntimeError(f"Tensor.{name}: named tensors were removed from torch {torch.__version__}")

    method.__name__ = name
    method.__qualname__ = f"Tensor.{name}"
    return method
