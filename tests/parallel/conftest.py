"""The processes of the tests of parallelism.
Called by pytest; calls pool.
"""

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def ranks():
    """Four processes with gloo, one of which a test may end; see pool.Pool."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parent))
    from pool import Pool

    pool = Pool()
    yield pool
    pool.close()
