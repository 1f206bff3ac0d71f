"""Chooses a format for each block with the least increase of the loss within a budget of bytes.
Called by command and users; calls measure for its dataclasses.

This is a multiple-choice knapsack, solved exactly: block by block, it keeps the Pareto front of bytes and loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from thunder_moe.tools.sensitivity.measure import WIDE, BlockLoss, Sensitivity


@dataclass(frozen=True)
class Choice:
    """A format for each block.

    Attributes:
        formats: name -> format; None stays 16-bit.
        nbytes: of the whole model.
        increase: the sum of the blocks' own increases of the loss, in nats per token.
    """

    formats: dict[str, str | None]
    nbytes: int
    increase: float


class _Partial(NamedTuple):
    """A choice for the first blocks: its bytes and loss, the format of the last block, the choice for the others."""

    nbytes: int
    increase: float
    format: str = ""
    before: _Partial | None = None


def choose_formats(found: Sensitivity, budget: float) -> Choice:
    """Return the formats with the least sum of increases of the loss within a budget; of equal sums the smallest model.

    The minimum of the sum is exact. The sum itself assumes that increases add up: each block was measured with all
    others in 16 bits. An increase below 0 counts as measured.

    Args:
        found: the blocks, with the increases and the bytes of each format.
        budget: gigabytes (10^9 bytes) that all parameters and buffers of the model may take.

    Raises:
        ValueError: the budget is below the size of the smallest model; the message gives that size.
    """
    least = found.other_bytes + sum(min(block.nbytes.values()) for block in found.blocks)
    limit = budget * 1e9 + 0.5  # restores a number of bytes that was divided by 1e9
    if not limit >= least:  # NaN, too
        raise ValueError(
            f"budget: got {budget:g} GB, wanted {_rounded_up(least)} GB or more: the model with each block in its"
            f" smallest format ({found.other_bytes / 1e9:.3f} GB of it are not weights of experts)"
        )
    rest = least - found.other_bytes
    best = [_Partial(found.other_bytes, 0.0)]
    for block in found.blocks:
        rest -= min(block.nbytes.values())
        longer = [
            _Partial(partial.nbytes + nbytes, partial.increase + block.increase[format], format, partial)
            for format, nbytes in block.nbytes.items()
            for partial in best
            if partial.nbytes + nbytes + rest <= limit
        ]
        best = _undominated(longer)
    last = min(best, key=lambda partial: partial.increase)
    return Choice(_formats(last, found.blocks), last.nbytes, last.increase)


def _undominated(partials: list[_Partial]) -> list[_Partial]:
    """Return the Pareto front of size and loss; at most (n + 1)(n + 2) / 2 of n blocks of one size."""
    kept: list[_Partial] = []
    for partial in sorted(partials, key=lambda partial: (partial.nbytes, partial.increase)):
        if not kept or partial.increase < kept[-1].increase:
            kept.append(partial)
    return kept


def _formats(last: _Partial, blocks: tuple[BlockLoss, ...]) -> dict[str, str | None]:
    formats: dict[str, str | None] = {}
    partial = last
    for block in reversed(blocks):
        formats[block.name] = None if partial.format == WIDE else partial.format
        assert partial.before is not None
        partial = partial.before
    return dict(reversed(formats.items()))


def _rounded_up(nbytes: int) -> str:
    """Return gigabytes, rounded up to three digits or to as many as a small model needs."""
    digits = 3
    while nbytes and -(-nbytes * 10**digits // 10**9) < 100 and digits < 9:
        digits += 1
    return f"{-(-nbytes * 10**digits // 10**9) / 10**digits:.{digits}f}"
