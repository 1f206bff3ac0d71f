"""`ExpertsPart`: the part of a layer's experts that one rank has, as slices of experts and features.
Called by decode, reader and integrations; calls formats.layouts.

Legend: E experts, I intermediate_size, N output features, K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

from thunder_moe.formats.layouts import BLOCK_SIZE

__all__ = ["UNSHARDED", "ExpertsPart"]


@dataclass(frozen=True)
class ExpertsPart:
    """Whole experts (expert parallelism) or a part of each (tensor parallelism), or both.

    Ranks have equal shares, in their order. A share of the intermediate features is the same range of gate's rows, of
    up's rows and of down's columns.

    Attributes:
        expert_rank: index of this rank's share of the experts.
        expert_ranks: number of these shares.
        feature_rank: index of this rank's share of the intermediate features.
        feature_ranks: number of these shares.
    """

    expert_rank: int = 0
    expert_ranks: int = 1
    feature_rank: int = 0
    feature_ranks: int = 1

    @property
    def is_unsharded(self) -> bool:
        return self.expert_ranks == self.feature_ranks == 1

    def experts(self, count: int) -> slice:
        """Return this part's range of `count` experts.

        Raises:
            ValueError: the number of ranks does not divide the number of experts.
        """
        if count % self.expert_ranks:
            raise ValueError(
                f"ep_size: got {self.expert_ranks} for {count} experts, wanted a size that divides their number"
            )
        return _share(count, self.expert_rank, self.expert_ranks)

    def features(self, size: int, block: int = BLOCK_SIZE) -> slice:
        """Return this part's range of `size` intermediate features.

        Raises:
            ValueError: a share would split a block of `block` features, which have one scale.
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
