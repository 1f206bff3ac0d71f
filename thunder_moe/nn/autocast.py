"""The dtype in which modules of experts compute under autocast.
Called by the other files of nn, training, parallel and integrations.huggingface; calls torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has linears of x compute in; None if it is off."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # is_autocast_available is not traced before torch 2.13
        return None
    return torch.get_autocast_dtype(kind)


def autocast_rows(x: Tensor) -> Tensor:
    """Return rows in the dtype of autocast, if it is on."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)
