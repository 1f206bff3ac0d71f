"""`SwiGLU`, the dense feed-forward block, and `GroupedSwiGLU`, the same with one set of weights per expert.
Called by users, nn.llama4 and, through nn, by quantization, parallel and integrations.thunder_layers; calls
nn.grouped_linear.

Legend: M rows sorted by expert, E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.nn.grouped_linear import GroupedLinear, require_at_least, require_weight_dtype


class SwiGLU(nn.Module):
    """Dense feed-forward block: ``down_proj(silu(gate_proj(x)) * up_proj(x))``, (..., H) -> (..., H)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, "hidden_size", hidden_size)
        require_at_least(1, "intermediate_size", intermediate_size)
        require_weight_dtype(dtype)
        options: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, **options)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedSwiGLU(nn.Module):
    """The experts of a layer: `SwiGLU` with one set of weights per expert.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        dtype: the dtype of the weights.
        device: the device of the weights.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, "hidden_size", hidden_size)
        require_at_least(1, "intermediate_size", intermediate_size)
        options: dict[str, Any] = dict(dtype=dtype, device=device)
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size, **options)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, **options)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Run (M, H) rows sorted by expert, with offsets (E,) of row ends: -> (M, H)."""
        return self.down_proj(F.silu(self.gate_proj(x, offsets)) * self.up_proj(x, offsets), offsets)
