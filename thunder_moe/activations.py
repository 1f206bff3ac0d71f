"""The gated activations of experts (SwiGLU and its variants) and their gradient, in plain torch.
Called by kernels (the CPU and CUDA kernels compute the same), ops and integrations; calls routing.

Legend: M rows sorted by expert, E experts, I intermediate_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_moe.routing import expert_of_row

__all__ = ["SWIGLU", "SwiGLUConfig", "pre_activation", "swiglu"]


@dataclass(frozen=True)
class SwiGLUConfig:
    """``g * sigmoid(alpha * g) * (u + up_shift)`` with g = min(gate, limit), u = clamp(up, -limit, limit).

    The defaults are SwiGLU, ``silu(gate) * up``; GPT-OSS has alpha 1.702, limit 7 and up_shift 1.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def __str__(self) -> str:
        if self == SWIGLU:
            return "SwiGLU"
        return f"SwiGLU(alpha={self.alpha}, limit={self.limit}, up_shift={self.up_shift})"

    def clamp(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Clamp gate and up to the limit, if there is one."""
        if self.limit is None:
            return gate, up
        return gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the output for gate and up of one shape, in the same shape."""
        gate, up = self.clamp(gate, up)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.up_shift)

    def gradient(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the float32 gradient (M, 2I) of float32 gate_up (M, 2I), for the gradient (M, I) of the output."""
        raw_gate, raw_up = gate_up.chunk(2, -1)
        gate, up = self.clamp(raw_gate, raw_up)
        sigmoid = torch.sigmoid(self.alpha * gate)
        grad_gate = grad * (up + self.up_shift) * sigmoid * (1 + self.alpha * gate * (1 - sigmoid))
        grad_up = grad * gate * sigmoid
        if self.limit is not None:
            grad_gate = torch.where(raw_gate <= self.limit, grad_gate, 0)
            grad_up = torch.where(raw_up.abs() <= self.limit, grad_up, 0)
        return torch.cat([grad_gate, grad_up], -1)


SWIGLU = SwiGLUConfig()


def swiglu(
    gate_up: Tensor, offsets: Tensor, form: SwiGLUConfig, row_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Apply row_scale (M,), bias (E, 2I) and the activation in float32, (M, 2I) -> (M, I) in the input's dtype."""
    gate, up = pre_activation(gate_up, offsets, row_scale, bias).chunk(2, -1)
    return form(gate, up).to(gate_up.dtype)


def pre_activation(gate_up: Tensor, offsets: Tensor, row_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Apply row_scale (M,) and add bias (E, 2I), (M, 2I) -> float32 (M, 2I)."""
    gate_up = gate_up.float()
    if row_scale is not None:
        gate_up = gate_up * row_scale[:, None]
    if bias is not None:
        gate_up = gate_up + bias[expert_of_row(offsets, gate_up.shape[0])]
    return gate_up
