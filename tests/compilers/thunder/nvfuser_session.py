"""A Blackwell GPU with nvFuser, as far as Thunder can tell: fixtures that run CUDA traces' fusions on CPU tensors.
Called by test_nvfuser and test_nvfuser_checker; calls nvfuser_emulator.

With nvFuser installed (`make test-nvfuser`) the fusions are nvFuser's own; otherwise a stand-in records them.
PYTEST_DONT_REWRITE (tests import it before pytest does)
"""

import importlib.util
import re
import sys

import pytest
import thunder
import torch
from fast_cases import others_slow
from looseversion import LooseVersion
from nvfuser_emulator import run, stand_in
from torch.overrides import TorchFunctionMode

from thunder_moe import moe_executor
from thunder_moe.compilers import thunder_compat
from thunder_moe.compilers.thunder import nvfuser as route

from thunder.transforms.prune_prologue_checks import PrunePrologueChecks  # isort: skip

CUDA = torch.device("cuda", 0)
VERSION = "0.2.36"
REAL = importlib.util.find_spec("nvfuser_direct") is not None


@pytest.fixture(scope="module")
def implementation():
    """Thunder's nvFuser executor, on the real library or on the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        if not REAL:
            patch.setitem(sys.modules, "nvfuser_direct", stand_in(VERSION))
        import nvfuser_direct  # noqa: F401
        import thunder.executors.nvfuserex as thunder_nvfuser

        had_alias = "nvfuser" in sys.modules
        if thunder_nvfuser.nvfuserex is None:  # there is no GPU, and Thunder has not looked further
            patch.setattr(thunder_nvfuser, "nvfuser_version", lambda: LooseVersion(VERSION))
            thunder_compat.alias_nvfuser()
        import thunder.executors.nvfuserex_impl as implementation

        yield implementation
        if not had_alias:
            sys.modules.pop("nvfuser", None)


@pytest.fixture
def fusions(implementation, monkeypatch):
    """Simulate a GPU of capability 10.0 with nvFuser 0.2.36; return the text of every fusion that runs on it."""
    texts: list[str] = []

    def execute(self, args, **options):
        texts.append(text_of(self))
        return run(texts[-1], args)

    monkeypatch.setattr(implementation.FusionDefinition, "execute", execute, raising=False)
    monkeypatch.setattr(route, "nvfuserex", implementation.ex)
    set_gpu(monkeypatch, implementation)
    route.register()
    return texts


def text_of(definition) -> str:
    """Return the definition as text, with the output dtype of CUTLASS GEMMs, which nvFuser's own text leaves out."""
    text = repr(definition)
    if not REAL:
        return text
    for tensor in definition.fusion.vals():
        if tensor.is_tensor():
            name = f"tv{re.match('T([0-9]+)', str(tensor))[1]}"
            text = re.sub(rf"( {name} = fd.ops.cutlass_nvfp4_grouped_mm\(.*)\)", rf"\1, {tensor.dtype()})", text)
    return text


def set_gpu(monkeypatch, implementation, capability=(10, 0), version=VERSION):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    for module in (route, implementation):
        monkeypatch.setattr(module, "nvfuser_version", lambda: LooseVersion(version))


class OnCpu(TorchFunctionMode):
    """Runs what was traced for CUDA on CPU tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == CUDA:
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def run_as_cuda(model, *inputs, executors, **options):
    """Compile a model for CUDA tensors and run it on their CPU stand-ins: (output, compiled model)."""
    for tensor in (*inputs, *model.parameters(), *model.buffers()):
        tensor._thunder_device = CUDA  # what Thunder takes for the tensor's device
    transforms = [PrunePrologueChecks(prune_all_checks=True)]  # they would see the CPU
    compiled = thunder.jit(model, executors=executors, transforms=transforms, **options)
    with OnCpu():
        return compiled(*inputs), compiled


@pytest.fixture(params=["moe first", *others_slow(["nvFuser first"], exhaustive=True)])
def executors(request, implementation):
    executors = [moe_executor, implementation.ex]
    return executors if request.param == "moe first" else executors[::-1]
