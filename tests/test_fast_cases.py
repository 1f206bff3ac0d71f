"""Tables whose cases are chosen: all values and pairs of values occur, in few cases; the others are exhaustive.
Called by pytest; calls tests/fast_cases.py.
"""

import itertools

import pytest
from fast_cases import covering

pytest_plugins = "pytester"
TABLE = [dict(zip("abc", case, strict=True)) for case in itertools.product(range(4), range(3), range(2))]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14)])
def test_every_combination_is_in_a_few_cases(strength, most):
    def combinations(cases):
        return {pair for case in cases for pair in itertools.combinations(sorted(case.items()), strength)}

    chosen = covering(TABLE, strength)
    assert combinations([TABLE[position] for position in chosen]) == combinations(TABLE)
    assert len(chosen) <= most
    assert covering(TABLE, strength) == chosen
    assert covering(TABLE[:1], strength) == {0}


def test_the_others_are_slow_and_exhaustive(pytester):
    pytester.makeconftest("from fast_cases import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n  slow\n  exhaustive\n  covering")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.covering(1)
        @pytest.mark.parametrize("a", "wxyz")
        @pytest.mark.parametrize("b", "xyz")
        def test_table(a, b): pass

        @pytest.mark.parametrize("a", "wxyz")
        def test_other(a): pass
    """)
    pytester.runpytest("-m", "not slow").assert_outcomes(passed=8, deselected=8)
    for mark in ("slow", "exhaustive"):
        pytester.runpytest("-m", mark).assert_outcomes(passed=8, deselected=8)
    pytester.runpytest().assert_outcomes(passed=16)
