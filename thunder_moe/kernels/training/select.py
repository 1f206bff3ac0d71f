"""Which module runs the kernels of training on a device.
Called by ops.grouped_linear, ops.activation and kernels.gradients; calls kernels.select, kernels.training.reference and
kernels.cuda.training.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from thunder_moe.kernels.select import chosen_backend, runs_on_cuda
from thunder_moe.kernels.training import reference

__all__ = ["training_kernels"]


def training_kernels(device: torch.device) -> ModuleType:
    """A module with the functions of `kernels.training.reference` for tensors on a device.

    On CUDA `kernels.cuda.training`, where its kernels can run and no other backend has been asked for.
    """
    if device.type == "cuda" and chosen_backend() != "reference" and runs_on_cuda(device):
        return importlib.import_module("thunder_moe.kernels.cuda.training")
    return reference
