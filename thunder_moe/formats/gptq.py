"""GPTQ inside a block-scaled format: rounds weights column by column, and feeds each error back into later columns.
Called by formats.nvfp4 and formats.mxfp8; calls plain torch and checks.

H = X^T X -> damped -> factor U of its inverse -> per block of columns: earlier errors subtracted -> scales -> codes
-> twice for each column, with the same scales: the code that is best beside the codes of all other columns
The order of the columns is the weight's own, so that any reader of the format reads the result.

Legend: E experts, N output features, K input features of the GEMM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thunder_moe.formats.checks import require, require_type

DAMPING = 0.01  # of the mean of a Hessian's diagonal, which is added to the diagonal
_SWEEPS = 2  # of coordinate descent behind GPTQ
_COLUMNS = 64  # whose products with the changes of all columns are one GEMM in a sweep
_ASYMMETRY = 1e-3  # of the largest entry; sums of products in float32 stay far below
# float32 numbers of the experts that are rounded at a time: half a gigabyte on a CPU, eight on a GPU, where a column of
# few experts is shorter than its launches.
_CHUNK_NUMBERS = {"cpu": 2**27, "cuda": 2**31}
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


Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Round = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def quantize_with_feedback(
    weight: Tensor, hessian: Tensor, global_scale: Tensor, block_size: int, choose_scale: Choose, round_column: Round
) -> tuple[Tensor, Tensor]:
    """Return codes uint8 (E, N, K) and scales (E, N, K / block_size) that make tr((W - Q) H (W - Q)^T) small.

    Args:
        weight: (E, N, K), K a multiple of `block_size`.
        hessian: (E, K, K), as `check_hessian` returns it.
        global_scale: float32 (E,), passed on to `choose_scale`.
        block_size: columns that share a scale in a row.
        choose_scale: (block (E, N, block_size) float32, global_scale (E, 1)) -> scale (E, N), and what a code of 1
            stands for, float32 (E, N).
        round_column: (column (E, N) float32, the latter) -> codes uint8 and their float32 values, both (E, N).
    """
    experts, n, k = weight.shape
    codes, scales = torch.empty(experts, k, n, dtype=torch.uint8, device=weight.device), []  # a column is contiguous
    numbers = _CHUNK_NUMBERS.get(weight.device.type, _CHUNK_NUMBERS["cuda"])
    step = max(1, numbers // (2 * k * (n + k)))
    for begin in range(0, experts, step):
        chunk = slice(begin, min(begin + step, experts))
        columns, own_hessian, own_global = weight[chunk].transpose(1, 2), hessian[chunk], global_scale[chunk, None]
        factor = torch.stack([_inverse_factor(own, begin + at) for at, own in enumerate(own_hessian)])
        chosen, changes = _feed_back(columns, factor, own_global, block_size, choose_scale, round_column, codes[chunk])
        del factor
        for _ in range(_SWEEPS):
            _descend(columns, own_hessian, [unit for _, unit in chosen], round_column, changes, codes[chunk])
        scales.append(torch.stack([scale for scale, _ in chosen], -1))
    return codes.transpose(1, 2), torch.cat(scales)


def _feed_back(
    columns: Tensor, factor: Tensor, global_scale: Tensor, block_size: int, choose_scale: Choose, round_column: Round,
    codes: Tensor,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:  # fmt: skip
    """Round the columns (E, K, N) of weights by GPTQ into `codes`, and choose the scales of blocks.

    Returns:
        What `choose_scale` gave for each block, and the changes Q - W, float32 (E, K, N).
    """
    errors = torch.zeros(columns.shape, dtype=torch.float32, device=columns.device)
    changes, chosen = torch.empty_like(errors), list[tuple[Tensor, Tensor]]()
    for start in range(0, columns.shape[1], block_size):
        stop = start + block_size
        block = columns[:, start:stop] - factor[:, :start, start:stop].mT @ errors[:, :start]
        chosen.append(choose_scale(block.transpose(1, 2), global_scale))
        for at in range(start, stop):
            column = block[:, at - start]
            codes[:, at], values = round_column(column, chosen[-1][1])
            torch.sub(values, columns[:, at], out=changes[:, at])
            torch.div(column - values, factor[:, at, at, None], out=errors[:, at])
            block[:, at - start + 1 :] -= factor[:, at, at + 1 : stop, None] * errors[:, at, None]
    return chosen, changes


def _descend(
    columns: Tensor, hessian: Tensor, units: list[Tensor], round_column: Round, changes: Tensor, codes: Tensor
) -> None:
    """Round each column once more, while the others keep their values; updates the results of `_feed_back`.

    This is coordinate descent, as in QuantEase (https://arxiv.org/abs/2309.01885). Where all columns but k are fixed,
    the sum is least at W_k - sum_{j != k} (Q - W)_j H_jk / H_kk, and least on the grid at the nearest value to that. So
    no step makes it larger.
    """
    k, block_size = hessian.shape[1], hessian.shape[1] // len(units)
    diagonal = hessian.diagonal(dim1=1, dim2=2)[..., None]
    damped = diagonal + damping(hessian)[:, None, None]
    for start in range(0, k, _COLUMNS):
        stop = min(start + _COLUMNS, k)
        products = hessian[:, start:stop] @ changes
        for at in range(start, stop):
            of_others = products[:, at - start] - diagonal[:, at] * changes[:, at]
            column = columns[:, at] - of_others / damped[:, at]
            codes[:, at], values = round_column(column, units[at // block_size])
            change = values - columns[:, at]
            difference = (change - changes[:, at])[:, None]
            products[:, at - start + 1 :] += hessian[:, at + 1 : stop, at, None] * difference
            changes[:, at] = change


def damping(hessian: Tensor) -> Tensor:
    """Return what is added to the diagonals of Hessians (..., K, K): (...)."""
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.where(mean > 0, DAMPING * mean, 1.0)  # 1: all zeros


def _inverse_factor(hessian: Tensor, expert: int) -> Tensor:
    """Return the upper U with U^T U = (H + damping)^-1, of a Hessian (K, K).

    A column without rows has the damping alone, and no error reaches it or leaves it: it is rounded to nearest.
    """
    # H = R R^T with an upper R, by Cholesky in reversed order, and U = R^-1: more accurate than factoring the inverse.
    damped = hessian.clone()
    damped.diagonal().add_(damping(hessian))
    root, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if int(info) or bool(hessian.diagonal().mean() < 0):
        raise ValueError(f"hessian: got one that is not positive semidefinite in expert {expert}, {_REMEDY}")
    return torch.linalg.solve_triangular(root.flip(0, 1), damped.zero_().fill_diagonal_(1), upper=True)
