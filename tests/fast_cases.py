"""Which cases of a large table always run: few that together have all values, or all pairs, of its parameters.
Called by tests/conftest.py for tests marked `covering`, and by tables that name their fast rows; calls pytest.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def others_slow(rows: Iterable[Any], fast: Container[Any] = (), *, exhaustive: bool = False) -> list[Any]:
    """Marks rows of a table, or single values, slow unless their first value is in `fast`.

    Args:
        exhaustive: mark them exhaustive, too.
    """
    rows = [row if isinstance(row, tuple) else (row,) for row in rows]
    marks = [pytest.mark.slow, *([pytest.mark.exhaustive] if exhaustive else [])]
    return [pytest.param(*row, marks=() if row[0] in fast else marks) for row in rows]


def one_of_each(rows: Iterable[tuple[Any, ...]], fast: Container[Any] = ()) -> list[Any]:
    """Marks rows as others_slow does; of several rows with the same slow first value, all but the first are exhaustive,
    too."""
    seen: set[Any] = set()
    marked = []
    for row in rows:
        marked += others_slow([row], fast, exhaustive=row[0] in seen)
        seen.add(row[0])
    return marked


def covering(cases: Sequence[Mapping[str, int]], strength: int) -> set[int]:
    """Chooses cases greedily until every combination of `strength` parameters' values that some case has is chosen.

    Args:
        cases: for each case the value of every parameter, as an integer that is the same for the same value.
        strength: 1 for all values, 2 for all pairs.

    Returns:
        The positions of the chosen cases.
    """
    has = [set(combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing, chosen = set().union(*has), set()
    while missing:
        best = max(range(len(cases)), key=lambda position: len(has[position] & missing))
        chosen.add(best)
        missing -= has[best]
    return chosen


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of a test with `covering(strength)` that are not chosen exhaustive; exhaustive tests are slow."""
    tables: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") is not None:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in tables.values():
        marker = table[0].get_closest_marker("covering")
        # The objects of the parametrize lists: pytest's own indices count the cases.
        cases = [{name: id(value) for name, value in item.callspec.params.items()} for item in table]
        fast = covering(cases, *marker.args)
        for position, item in enumerate(table):
            if position not in fast:
                item.add_marker(pytest.mark.exhaustive)
    for item in items:
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.slow)
