"""Models of Hugging Face choose experts by torch.topk: where two are as good, the first one, as this package's router.
Called by pytest; calls the fixture `ties_have_an_order` of tests/conftest.py.

What the fast set shows, once each:
- architectures with names or layers of their own through quantize_, save_checkpoint and load_checkpoint;
  each of `ARCHITECTURES` through one of the other ways to save, load, convert and quantize on load at least;
- every experts class of transformers, and a router of each row of the table, against its own forward;
- each export of another library, each refusal and each option; each place where an offloaded tensor may be;
- one model compiled by torch.compile, and blocks with each way to call the backend; two kinds of experts under Thunder;
- each layout of several processes and each architecture in one of them.
Other architectures, routers and norms, all pairs of layouts, and whole models compiled are exhaustive.
"""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _ties_have_an_order(ties_have_an_order):
    pass
