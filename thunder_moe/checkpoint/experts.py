"""The experts of a layer for reader and writer: their weights in one form, and their layout in the checkpoint.
Called by all of checkpoint and by integrations; calls formats.weight.

Legend: E experts, I intermediate_size, H hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.formats.weight import PackedWeight

__all__ = ["ExpertWeights", "ExpertsLayout"]


@dataclass(frozen=True)
class ExpertsLayout:
    """The names and the layout of experts in checkpoints of an architecture.

    Attributes:
        fused: one tensor per projection for all experts, K before N, like ModelOpt's GPT-OSS and Llama 4. Engines read
            all architectures but GPT-OSS expert by expert, too.
        interleaved: the rows of the fused gate_up projection alternate (GPT-OSS).
        projections: names of gate, up and down of one expert; not used when fused.
    """

    fused: bool = False
    interleaved: bool = False
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts of one layer, in one form for all checkpoint formats.

    Attributes:
        gate_up: (E, 2I, H), the gate's rows first; (E, I, H) for experts without a gate.
        down: (E, H, I).
        gate_up_bias: (E, 2I) in the checkpoint's dtype, in the order of gate_up's rows, or None.
        down_bias: (E, H), or None.
    """

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> ExpertWeights:
        """Copy the weights to another device."""
        biases = (bias if bias is None else bias.to(device) for bias in (self.gate_up_bias, self.down_bias))
        return ExpertWeights(self.gate_up.to(device), self.down.to(device), *biases)

    @property
    def gated(self) -> bool:
        """True if gate_up holds gate and up projections, not just up."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        biases = sum(bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + biases
