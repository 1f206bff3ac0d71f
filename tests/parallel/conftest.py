"""The four processes of the tests of parallelism.
Called by pytest; calls programs in the processes of the fixture `ranks`.
"""

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def run(ranks):
    """``run(function, *args)`` calls ``function(meshes, *args)`` in four processes -> the results by rank."""
    from programs import within

    def of_each(function, *args):
        return ranks(4)(within, function, *args)

    return of_each
