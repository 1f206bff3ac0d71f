"""The dispatch: preference, overrides and errors of kernels.select.
Called by pytest.
"""

import shutil
import sys

import pytest
import torch

from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_, simulate_w4a4
from thunder_moe.kernels import reference, training_reference
from thunder_moe.kernels import select as module
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import nvrtc, training
from thunder_moe.kernels.select import preferred_layout, resolve_layout, select, training_kernels, use_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh():
    for function in (module._best, module._load):
        function.cache_clear()
    yield
    for function in (module._best, module._load):
        function.cache_clear()


@pytest.mark.skipif(sys.platform == "win32" or shutil.which("c++") is None, reason="no C++ compiler")
def test_the_kernels_compile_where_there_is_a_compiler():
    """The tests of the kernels are skipped where they cannot run; this one fails instead."""
    assert cpu.unavailable_reason() is None


def test_prefers_the_compiled_kernels_on_a_cpu():
    if cpu.unavailable_reason() is not None:
        pytest.skip(cpu.unavailable_reason())
    assert select(CPU) is cpu
    assert select(CPU, backend="reference") is reference


def test_other_devices_get_the_reference():
    assert select(torch.device("meta")) is reference


def test_falls_back_with_a_warning_that_says_why(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable_reason", lambda device=None: "no C++ compiler was found")
    with pytest.warns(UserWarning, match="slower plain-torch ones.*no C\\+\\+ compiler was found"):
        assert select(CPU) is reference
    with pytest.raises(ValueError, match="'cpu' cannot run here: no C\\+\\+ compiler was found"):
        select(CPU, backend="cpu")


def test_each_device_has_its_own_answer(monkeypatch):
    """The kernels serve one of two GPUs of a machine, with either of them current."""
    gpus, current = [torch.device("cuda", i) for i in range(2)], [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    capability = {0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda device=None: capability[current[0] if device is None or device.index is None else device.index],
    )
    monkeypatch.setattr(nvrtc, "missing_reason", lambda: None)
    with pytest.warns(UserWarning, match=r"cannot run on cuda:1,.*compute capability \(7, 5\)"):
        assert select(gpus[1]) is reference
    assert select(gpus[0]) is cuda
    assert select(gpus[0], backend="cuda") is cuda
    with pytest.raises(ValueError, match="'cuda' cannot run here"):
        select(gpus[1], backend="cuda")
    assert [preferred_layout(gpu, 64, 64) for gpu in gpus] == ["linear", "tiled_64x64"][::-1]
    assert select(torch.device("cuda")) is reference
    current[0] = 0
    assert select(torch.device("cuda")) is cuda


def test_preferred_layout(monkeypatch):
    gpu = torch.device("cuda", 0)
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: None)
    assert preferred_layout(gpu, 128, 192) == "tiled_64x64"
    assert preferred_layout(gpu, 96, 192) == "linear"
    assert preferred_layout(gpu, 128, 96) == "linear"
    for other in (CPU, torch.device("meta")):
        assert preferred_layout(other, 128, 192) == "linear"
    with use_backend("reference"):
        assert preferred_layout(gpu, 128, 192) == "tiled_64x64"
    assert resolve_layout("auto", gpu, 128, 192) == "tiled_64x64"
    assert resolve_layout("swizzled_128x4", gpu, 128, 192) == "swizzled_128x4"
    for capability[0] in ((8, 0), (8, 9), (10, 0), (12, 0)):
        assert preferred_layout(gpu, 128, 192) == "linear"


def test_nothing_is_preferred_to_linear_where_our_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: "NVRTC is missing")
    assert preferred_layout(torch.device("cuda", 0), 128, 192) == "linear"


def test_kernels_of_training(monkeypatch):
    """A device's kernels of training run for any chosen backend, except the reference."""
    gpu, reason = torch.device("cuda", 0), [None]
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: reason[0])
    assert (training_kernels(gpu), training_kernels(CPU)) == (training, training_reference)
    for name in ("cpu", "cuda", "w4a4"):
        with use_backend(name):
            assert (training_kernels(gpu), training_kernels(CPU)) == (training, training_reference)
    with use_backend("reference"):
        assert (training_kernels(gpu), training_kernels(CPU)) == (training_reference, training_reference)
    module._load.cache_clear()
    reason[0] = "NVRTC is missing"
    assert training_kernels(gpu) is training_reference


def test_refuses():
    with pytest.raises(ValueError, match="backend: got 'marlin', wanted one of"):
        select(CPU, backend="marlin")
    with pytest.raises(ValueError, match="backend: got 'cpu' for a tensor on cuda"):
        select(torch.device("cuda"), backend="cpu")


def test_simulate_w4a4_rounds_the_rows_of_compiled_models_too():
    moe = quantize_(torch.nn.Sequential(Llama4MoE(Llama4MoEConfig(64, 32, 4), dtype=torch.bfloat16)))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    plain, compiled_plain = moe(x), compiled(x)
    with simulate_w4a4():
        rounded, compiled_rounded = moe(x), compiled(x)
    assert torch.equal(plain, compiled_plain)
    assert torch.equal(rounded, compiled_rounded)
    assert not torch.equal(plain, rounded)
    assert torch.equal(moe(x), plain), "it ends with the block"
