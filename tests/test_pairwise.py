"""Pairwise tables: all pairs are there, in few rows. Called by pytest."""

import itertools

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (3, 1, 2), (8, 5, 2), (10, 4, 2, 2), (3, 3, 3, 3, 3)], ids=str)
def test_every_pair_is_in_some_row(sizes):
    parameters = [[f"{number}.{value}" for value in range(size)] for number, size in enumerate(sizes)]
    rows = pairwise(*parameters)
    for first, second in itertools.combinations(range(len(sizes)), 2):
        found = {(row[first], row[second]) for row in rows}
        assert found == set(itertools.product(parameters[first], parameters[second]))
    two_largest = sorted(sizes)[-2:]
    assert two_largest[0] * two_largest[1] <= len(rows) <= 2 * two_largest[0] * two_largest[1]
    assert len(set(rows)) == len(rows)


def test_values_need_not_be_hashable_and_rows_do_not_change():
    assert pairwise([[1], [2]], [{}, {}]) == [([1], {}), ([1], {}), ([2], {}), ([2], {})]
    assert pairwise("ab", "cd", "ef") == pairwise("ab", "cd", "ef")


@pytest.mark.parametrize("parameters", [(), ([1, 2],), ([1], [])], ids=str)
def test_a_table_without_rows_is_refused(parameters):
    with pytest.raises(ValueError, match="parameters: got"):
        pairwise(*parameters)
