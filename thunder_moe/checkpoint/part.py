"""`ExpertsPart`: what one rank has of the experts of a layer, and what that means for the tensors of a checkpoint.
Called by decode, reader and integrations; calls files.

Legend: E experts, I intermediate_size, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thunder_moe.checkpoint.files import TensorFiles
from thunder_moe.formats.layouts import BLOCK_SIZE

__all__ = ["WHOLE", "CutFiles", "ExpertsPart"]

Index = tuple[slice, ...]


@dataclass(frozen=True)
class ExpertsPart:
    """Whole experts (expert parallelism) or a part of each (tensor parallelism), or both.

    Ranks have equal shares, in their order. Of the intermediate features each rank has those of gate and of up apart,
    and the same ones of down's input.

    Attributes:
        expert_rank: which share of the experts.
        expert_ranks: of how many.
        feature_rank: which share of the intermediate features.
        feature_ranks: of how many.
    """

    expert_rank: int = 0
    expert_ranks: int = 1
    feature_rank: int = 0
    feature_ranks: int = 1

    @property
    def is_whole(self) -> bool:
        return self.expert_ranks == self.feature_ranks == 1

    def experts(self, count: int) -> slice:
        """Return this part's range of `count` experts.

        Raises:
            ValueError: the ranks cannot share them evenly.
        """
        if count % self.expert_ranks:
            raise ValueError(
                f"ep_size: got {self.expert_ranks} for {count} experts, wanted a size that divides their number"
            )
        return _share(count, self.expert_rank, self.expert_ranks)

    def features(self, size: int, block: int = BLOCK_SIZE) -> slice:
        """Return this part's range of `size` intermediate features.

        Raises:
            ValueError: a share would not be whole blocks of `block` features, which have one scale.
        """
        if size % (self.feature_ranks * block):
            raise ValueError(
                f"tp_size: got {self.feature_ranks} for experts of {size} intermediate features, wanted a size whose"
                f" shares of them are multiples of {block}, the features that share a scale"
            )
        return _share(size, self.feature_rank, self.feature_ranks)

    def rows(self, n: int, parts: int) -> list[slice]:
        """Rows of the first projection, which stacks `parts` (gate and up, or up alone), part by part."""
        if self.feature_ranks == 1:
            return [slice(0, n)]
        size = n // parts
        own = self.features(size)
        return [slice(part * size + own.start, part * size + own.stop) for part in range(parts)]


WHOLE = ExpertsPart()


class CutFiles:
    """`TensorFiles` with some tensors cut: only this part of them is read.

    Args:
        files: the files.
        cuts: name of a tensor -> pieces of it, which are stacked along a dimension -> that dimension.
    """

    def __init__(self, files: TensorFiles, cuts: Mapping[str, tuple[list[Index], int]]) -> None:
        self.files, self.cuts = files, cuts

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, as `TensorFiles.read`, cut to this part."""
        if name not in self.cuts:
            return self.files.read(name)
        indices, dim = self.cuts[name]
        pieces = [self.files.read(name, index) for index in indices]
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.view(torch.uint8) for piece in pieces], dim)


def _share(size: int, rank: int, ranks: int) -> slice:
    share = size // ranks
    return slice(rank * share, (rank + 1) * share)
