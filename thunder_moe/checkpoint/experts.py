"""The experts of a layer for reader and writer: their weights in one form, their layout in the checkpoint, and the part
of them that one rank has. Called by all of checkpoint and by integrations; calls formats.

Legend: E experts, I intermediate_size, H hidden_size, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.weight import PackedWeight


@dataclass(frozen=True)
class ExpertsLayout:
    """The names and the layout of experts in checkpoints of an architecture."""

    # One tensor per projection for all experts, K before N, like ModelOpt's GPT-OSS and Llama 4. Engines read all
    # architectures but GPT-OSS expert by expert, too
    fused: bool = False
    interleaved: bool = False  # the rows of the fused gate_up projection alternate (GPT-OSS)
    # Names of gate, up and down of one expert; not used when fused
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts of one layer, in one form for all checkpoint formats."""

    gate_up: PackedWeight  # (E, 2I, H), the gate's rows first; (E, I, H) for experts without a gate
    down: PackedWeight  # (E, H, I)
    # (E, 2I) in the checkpoint's dtype, in the order of gate_up's rows, or None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None  # (E, H), or None

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


@dataclass(frozen=True)
class ExpertsPart:
    """Whole experts (expert parallelism) or a part of each (tensor parallelism), or both.

    Ranks have equal shares, in their order. A share of the intermediate features is the same range of gate's rows, of
    up's rows and of down's columns.
    """

    expert_rank: int = 0  # index of this rank's share of the experts
    expert_ranks: int = 1  # number of these shares
    feature_rank: int = 0  # index of this rank's share of the intermediate features
    feature_ranks: int = 1  # number of these shares

    @property
    def is_unsharded(self) -> bool:
        return self.expert_ranks == self.feature_ranks == 1

    def experts(self, count: int) -> slice:
        """Return this part's range of `count` experts, which the number of ranks has to divide."""
        if count % self.expert_ranks:
            raise ValueError(
                f"ep_size: got {self.expert_ranks} for {count} experts, wanted a size that divides their number"
            )
        return _share(count, self.expert_rank, self.expert_ranks)

    def features(self, size: int, block: int = BLOCK_SIZE) -> slice:
        """Return this part's range of `size` intermediate features.

        A share that would split a block of `block` features, which have one scale, is a ValueError.
        """
        if self.feature_ranks > 1 and size % (self.feature_ranks * block):
            raise ValueError(
                f"tp_size: got {self.feature_ranks} for experts of {size} intermediate features, wanted a size whose"
                f" shares of them are multiples of {block}, the features that share a scale"
            )
        return _share(size, self.feature_rank, self.feature_ranks)

    def rows(self, n: int, parts: int) -> list[slice]:
        """Return the slices of the first projection's `n` rows for this rank.

        The projection stacks `parts` weights (gate and up, or up alone); the result has a slice for each."""
        if self.feature_ranks == 1:
            return [slice(0, n)]
        size = n // parts
        own = self.features(size)
        return [slice(part * size + own.start, part * size + own.stop) for part in range(parts)]


UNSHARDED = ExpertsPart()


def _share(size: int, rank: int, ranks: int) -> slice:
    share = size // ranks
    return slice(rank * share, (rank + 1) * share)
