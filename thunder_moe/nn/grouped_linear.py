"""`GroupedLinear`: one linear map per expert, as a single grouped GEMM.
Called by users, nn.swiglu, quantize and integrations.huggingface; calls torch's grouped GEMM, which compilers rewrite.

Legend: M rows sorted by expert, E experts, N out_features, K in_features. `offsets` is int32 (E,): cumulative row ENDS,
group 0 starts at row 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.checks import require

__all__ = ["GroupedLinear", "require_at_least"]


class GroupedLinear(nn.Module):
    """One linear map per expert, without bias: rows of expert e are multiplied by ``weight[e].T``.

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        dtype: of the weight, torch's default when None.
        device: of the weight, torch's default when None.

    Attributes:
        weight: parameter (E, N, K), initialised as `torch.nn.Linear` does: U(-K**-0.5, K**-0.5).
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_experts=num_experts, in_features=in_features, out_features=out_features)
        for name, size in sizes.items():
            require_at_least(1, name, size)
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """(M, K) rows sorted by expert, offsets (E,) row ends -> (M, N); rows past ``offsets[-1]`` are undefined.

        Raises:
            ValueError: x or offsets has the wrong rank, size, dtype or device.
        """
        _check_rows(x, offsets, self.weight)
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"


def _check_rows(x: Tensor, offsets: Tensor, weight: Tensor) -> None:
    """The checks of `GroupedLinear.forward`; conditions on sizes and dtypes alone, so that compilers trace through."""
    experts, _, k = weight.shape
    require(x.ndim == 2 and x.shape[1] == k, "x", x, f"shape (rows, in_features = {k})")
    require(x.dtype == weight.dtype, "x", x, f"dtype {weight.dtype}, that of the weight")
    require(x.device == weight.device, "x", x, f"device {weight.device}, that of the weight")
    # While Thunder traces, a dtype is one of its own; its symbol for the grouped GEMM checks it then.
    require(
        offsets.dtype == torch.int32 or not isinstance(offsets.dtype, torch.dtype), "offsets", offsets, "dtype int32"
    )
    wanted = f"shape ({experts},), one row end per expert"
    require(offsets.ndim == 1 and offsets.shape[0] == experts, "offsets", offsets, wanted)
    require(offsets.device == x.device, "offsets", offsets, f"device {x.device}, that of x")


def require_at_least(least: int, name: str, size: int) -> None:
    """Raises the ValueError of a size that is not an integer of at least `least`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        raise ValueError(f"{name}: got {size!r}, wanted an integer of at least {least}")
