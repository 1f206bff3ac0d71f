"""The four processes of the tests of parallelism.
Called by pytest; calls programs in the processes of the fixture `ranks`.
"""

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def run(ranks):
    """``run(function, *args)`` calls ``function(meshes, *args)`` in four processes -> the results by rank.

    With `first`, in the first ranks alone: both halves would compute the same with a mesh of two.
    """
    from programs import within

    def of_each(function, *args, first=4):
        return ranks(4)(within, first, function, *args)[:first]

    return of_each
