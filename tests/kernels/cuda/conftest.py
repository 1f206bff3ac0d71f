"""Emulated devices of the tests of CUDA kernels: the fixtures `hopper` and `layout`.
Called by pytest for the tests beside it; builds on the fixtures of tests/kernels/conftest.py.
"""

import pytest

from thunder_moe.kernels.cuda import backend as cuda


@pytest.fixture
def hopper(emulated, monkeypatch):
    """The emulated device has compute capability 9.0."""
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (9, 0)))


@pytest.fixture(params=["linear", "tiled_64x64"])
def layout(request):
    """Of weights; on a device whose kernels read it."""
    request.getfixturevalue("emulated" if request.param == "linear" else "hopper")
    return request.param
