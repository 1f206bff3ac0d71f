"""Converts operands and devices to the forms that the CUDA kernels and their specs take.
Called by the other modules of kernels/cuda, and by compilers/dynamo/add_norm.py; calls kernels/arguments.py.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from thunder_moe.formats.weight import PackedWeight, WeightOperands
from thunder_moe.kernels.arguments import MaybeTensor, as_kernel_float
from thunder_moe.kernels.specs import Target, WeightSpec


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor contiguous and aligned to 16 bytes, as the kernels load; a copy only if it is not already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def aligned_float(tensor: MaybeTensor) -> MaybeTensor:
    """Return a tensor `aligned`, in a dtype that the kernels read."""
    return None if tensor is None else aligned(as_kernel_float(tensor))


def operands_of(weight: PackedWeight) -> WeightOperands:
    """Return the tensors of a weight as operators take them, aligned."""
    scale = weight.global_scale
    return WeightOperands(
        aligned(weight.qdata).mT, aligned(weight.scale), None if scale is None else aligned(scale), weight.format
    )


def weight_spec(weight: PackedWeight) -> WeightSpec:
    """Return the spec of a packed weight."""
    scale = weight.global_scale
    return WeightSpec(weight.layout, weight.format.name, scale is not None and scale.ndim == 2)


def target(device: torch.device) -> Target:
    """Return the device in the form that specs have."""
    return Target(device, *_device_facts(device))


@functools.cache
def _device_facts(device: torch.device) -> tuple[int, tuple[int, int]]:
    """Return (multiprocessors, compute capability)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, (properties.major, properties.minor)
