"""Models of Hugging Face choose experts by torch.topk: where two are as good, the first one, as this package's router.
Called by pytest; calls the fixture `ties_have_an_order` of tests/conftest.py.
"""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _ties_have_an_order(ties_have_an_order):
    pass
