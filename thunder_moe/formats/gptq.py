"""GPTQ inside a block-scaled format: rounds weights column by column, and feeds each error back into later columns.
Called by formats.nvfp4 and formats.mxfp8; calls plain torch and checks.

H = X^T X -> damped -> factor U of its inverse -> per block of columns: earlier errors subtracted -> scales -> codes.
The order of the columns is the weight's own, so that any reader of the format reads the result.

Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thunder_moe.formats.checks import require, require_type

__all__ = ["DAMPING", "check_hessian", "quantize_with_feedback"]

DAMPING = 0.01  # of the mean of a Hessian's diagonal, which is added to the diagonal
_ASYMMETRY = 1e-3  # of the largest entry; sums of products in float32 stay far below
_CHUNK_NUMBERS = 2**27  # float32 numbers of the experts that are rounded at a time: half a gigabyte
_REMEDY = "wanted X^T X of finite rows, summed in float32"


def check_hessian(hessian: Tensor, weight: Tensor) -> Tensor:
    """Return a Hessian as (E, K, K), or raise an error if it does not fit a weight (E, N, K) or is not X^T X."""
    require_type("hessian", hessian, Tensor, "a tensor (experts, in_features, in_features)")
    experts, _, k = weight.shape
    fits = tuple(hessian.shape) in ((experts, k, k), (k, k)) and hessian.device == weight.device
    wanted = f"shape {(experts, k, k)}, or {(k, k)} for all experts, on {weight.device}, as the weight has"
    require(fits and hessian.dtype == torch.float32, "hessian", hessian, f"dtype float32 (.float()), {wanted}")
    hessian = hessian.detach().expand(experts, k, k)
    for expert, own in enumerate(hessian):  # one by one: temporaries of one expert
        largest = own.abs().amax()
        if not bool(torch.isfinite(largest)):
            raise ValueError(f"hessian: got NaN or Inf in expert {expert}, {_REMEDY}")
        if bool((own - own.mT).abs().amax() > _ASYMMETRY * largest):
            raise ValueError(f"hessian: got one that is not symmetric in expert {expert}, {_REMEDY}")
    return hessian


def quantize_with_feedback(
    weight: Tensor,
    hessian: Tensor,
    global_scale: Tensor,
    block_size: int,
    choose_scale: Callable[[Tensor, Tensor], Tensor],
    round_column: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 (E, N, K) and scales (E, N, K / block_size) that make tr((W - Q) H (W - Q)^T) small.

    Args:
        weight: (E, N, K), K a multiple of `block_size`.
        hessian: (E, K, K), as `check_hessian` returns it.
        global_scale: float32 (E,), passed on to the functions.
        block_size: columns that share a scale in a row.
        choose_scale: (block (E, N, block_size) float32, global_scale (E, 1)) -> scale (E, N).
        round_column: (column (E, N) float32, scale, global_scale) -> codes uint8 and their float32 values, both (E, N).
    """
    experts, n, k = weight.shape
    codes, scales = torch.empty(experts, k, n, dtype=torch.uint8, device=weight.device), []  # a column is contiguous
    step = max(1, _CHUNK_NUMBERS // (k * (n + 2 * k)))
    for begin in range(0, experts, step):
        chunk = slice(begin, min(begin + step, experts))
        factor = torch.stack([_inverse_factor(own, begin + at) for at, own in enumerate(hessian[chunk])])
        columns, own_global = weight[chunk].transpose(1, 2), global_scale[chunk, None]
        errors = torch.zeros(columns.shape, dtype=torch.float32, device=weight.device)  # [e, K, N]
        of_chunk = []
        for start in range(0, k, block_size):
            stop = start + block_size
            block = columns[:, start:stop] - factor[:, :start, start:stop].mT @ errors[:, :start]
            of_chunk.append(choose_scale(block.transpose(1, 2), own_global))
            for at in range(start, stop):
                column = block[:, at - start]
                codes[chunk, at], values = round_column(column, of_chunk[-1], own_global)
                errors[:, at] = (column - values) / factor[:, at, at, None]
                block[:, at - start + 1 :] -= factor[:, at, at + 1 : stop, None] * errors[:, at, None]
        scales.append(torch.stack(of_chunk, -1))
    return codes.transpose(1, 2), torch.cat(scales)


def _inverse_factor(hessian: Tensor, expert: int) -> Tensor:
    """Return the upper U with U^T U = (H + damping)^-1, of a Hessian (K, K).

    A column without rows has the damping alone, and no error reaches it or leaves it: it is rounded to nearest.
    """
    # H = R R^T with an upper R, by Cholesky in reversed order, and U = R^-1: more accurate than factoring the inverse.
    mean = hessian.diagonal().mean()
    damped = hessian.clone()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1.0))  # 1: all zeros
    root, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if int(info) or bool(mean < 0):
        raise ValueError(f"hessian: got one that is not positive semidefinite in expert {expert}, {_REMEDY}")
    factor: Tensor = torch.linalg.solve_triangular(root.flip(0, 1), damped.zero_().fill_diagonal_(1), upper=True)
    return factor
