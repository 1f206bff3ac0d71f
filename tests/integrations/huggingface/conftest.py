"""Models of Hugging Face choose experts by torch.topk: where two are as good, the first one, as this package's router.
Called by pytest; calls the fixture `ties_have_an_order` of tests/conftest.py.

What the fast set shows, once each:
- every architecture of tests/tiny_models.py through quantize_, save_checkpoint and load_checkpoint;
  `ARCHITECTURES` and the special ones through the other ways to save, load, convert and quantize on load;
- every experts class of transformers, and every router, against its own forward, with gradients;
- each export of another library, each refusal and each option; each place where an offloaded tensor may be;
- one model compiled with each way to call the backend, two kinds of experts under Thunder;
- each layout of several processes and each architecture in one of them.
Other architectures, all pairs of layouts, other models compiled, and Llama 4 trained under Thunder are slow.
"""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _ties_have_an_order(ties_have_an_order):
    pass
