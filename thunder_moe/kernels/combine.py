"""`combine_rows`: the sum of each token's rows, by the CUDA kernel of the NVFP4 operators or in plain torch.
Called by ops.combine and parallel.exchange; calls kernels.cuda.backend and routing.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from thunder_moe.kernels.select import chosen_backend, runs_on_cuda
from thunder_moe.routing import combine

__all__ = ["combine_rows"]


def combine_rows(rows: Tensor, offsets: Tensor, slot_row: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows (M, N), slot_row int32 (T, A) -> (T, N) in the rows' dtype, contiguous and in `out` where it is given,
    summed in float32; -1: no row."""
    served = rows.is_cuda and chosen_backend() != "reference" and runs_on_cuda(rows.device)
    if served and rows.dtype in (torch.bfloat16, torch.float16):
        rows = rows.contiguous()
        rows = rows.clone() if rows.data_ptr() % 16 else rows  # the kernel reads eight columns at a time
        backend = importlib.import_module("thunder_moe.kernels.cuda.backend")
        summed: Tensor = backend.combine(rows, slot_row, None, out=out)
        return summed
    sums = combine(rows, offsets, slot_row, None, None)
    return sums if out is None else out.copy_(sums)
