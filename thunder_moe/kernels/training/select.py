"""Which module runs the kernels of training on a device.
Called by ops.grouped_linear, ops.activation and kernels.gradients; calls kernels.training.reference.
"""

from __future__ import annotations

from types import ModuleType

import torch

from thunder_moe.kernels.training import reference

__all__ = ["training_kernels"]


def training_kernels(device: torch.device) -> ModuleType:
    """A module with the functions of `kernels.training.reference` for tensors on a device."""
    return reference
