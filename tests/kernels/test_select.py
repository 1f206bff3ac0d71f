"""The dispatch: preference, overrides and errors of kernels.select.
Called by pytest.
"""

import pytest
import torch

from thunder_moe.kernels import cpu, reference
from thunder_moe.kernels import select as module
from thunder_moe.kernels.select import select

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh():
    for function in (module._best, module._load):
        function.cache_clear()
    yield
    for function in (module._best, module._load):
        function.cache_clear()


def test_prefers_the_compiled_kernels_on_a_cpu():
    if cpu.unavailable_reason() is not None:
        pytest.skip(cpu.unavailable_reason())
    assert select(CPU) is cpu
    assert select(CPU, backend="reference") is reference


def test_other_devices_get_the_reference():
    assert select(torch.device("meta")) is reference


def test_falls_back_with_a_warning_that_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "no C++ compiler was found")
    with pytest.warns(UserWarning, match="slower plain-torch ones.*no C\\+\\+ compiler was found"):
        assert select(CPU) is reference
    with pytest.raises(ValueError, match="'cpu' cannot run here: no C\\+\\+ compiler was found"):
        select(CPU, backend="cpu")


def test_refuses():
    with pytest.raises(ValueError, match="backend: got 'marlin', wanted one of"):
        select(CPU, backend="marlin")
    with pytest.raises(ValueError, match="backend: got 'cpu' for a tensor on cuda"):
        select(torch.device("cuda"), backend="cpu")
