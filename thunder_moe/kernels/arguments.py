"""Converts tensors to the pointers and dtype codes that compiled kernels, C++ and CUDA, take.
Called by kernels.cpu and kernels.cuda; calls torch alone.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

MaybeTensor = TypeVar("MaybeTensor", Tensor, "Tensor | None")
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def pointer(tensor: Tensor | None) -> int | None:
    """Return the address of the data, None for no tensor."""
    return None if tensor is None else tensor.data_ptr()


def as_kernel_float(tensor: MaybeTensor) -> MaybeTensor:
    """Return a contiguous tensor of a dtype that the kernels read."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor if tensor.dtype in DTYPE_CODES else tensor.float()).contiguous()


def dtype_code(tensor: Tensor | None) -> int:
    """Return the code of a dtype in `DTYPE_CODES`; 0 for no tensor, which kernels do not read."""
    return 0 if tensor is None else DTYPE_CODES[tensor.dtype]
