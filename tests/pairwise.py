"""Pairwise tables of parameters: every two values of different parameters meet in some row, in far fewer rows than the
product. Called by tests, for parametrize; calls itertools alone.
"""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value per parameter, greedily as few as cover all pairs; the same rows in the same order every time.

    Args:
        parameters: the values of each, at least two parameters, none empty.

    Raises:
        ValueError: fewer than two parameters, or one without values.
    """
    if len(parameters) < 2 or not all(parameters):
        raise ValueError(f"parameters: got {[len(values) for values in parameters]} values, wanted two or more lists")
    sizes = [range(len(values)) for values in parameters]
    missing = {
        (i, a, j, b): None  # a dict keeps its order
        for i, j in itertools.combinations(range(len(sizes)), 2)
        for a, b in itertools.product(sizes[i], sizes[j])
    }
    rows = []
    while missing:
        i, a, j, b = next(iter(missing))
        row = {i: a, j: b}
        for k in range(len(sizes)):
            if k not in row:
                row[k] = max(sizes[k], key=lambda value, k=k: sum(pair in missing for pair in _pairs(row, k, value)))
        indices = [row[k] for k in range(len(sizes))]
        for (i, a), (j, b) in itertools.combinations(enumerate(indices), 2):
            missing.pop((i, a, j, b), None)
        rows.append(tuple(values[index] for values, index in zip(parameters, indices, strict=True)))
    return rows


def _pairs(row: dict[int, int], k: int, value: int) -> list[tuple[int, int, int, int]]:
    """The pairs of a parameter's value with those that a row has already."""
    return [(k, value, other, row[other]) if k < other else (other, row[other], k, value) for other in row]
