"""Shared fixtures: seeds, routings with their edge rows, operator checks that know float8, a count of quantizations, a
GPU's preference of layouts, an order of ties.
Called by pytest; registers with torch.compile, for checkouts that are not installed, and with Thunder, which makes
`import thunder` work in all tests on torch >= 2.13.
"""

import dis
import functools
import gc
import hashlib
import importlib.util
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from fast_cases import pytest_collection_modifyitems  # noqa: F401  (a hook)
from processes import Ranks

from thunder_moe import register
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import layout_fits, layouts_of
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import select
from thunder_moe.kernels.cpu.backend import _cpu_flags

# Inductor's cache gives loops of one vector width to a process that compiles them for another, where they write past
# their buffers (torch 2.13): each kind of CPU has a folder of its own.
_KIND = hashlib.sha256(" ".join([torch.backends.cpu.get_cpu_capability(), *sorted(_cpu_flags())]).encode()).hexdigest()
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{_KIND[:12]}"))
)

register("torch", *(["thunder"] if importlib.util.find_spec("thunder") else []))

# Rows of each of four experts.
ROUTINGS = {
    "even": (4, 4, 4, 4),
    "ragged": (1, 7, 0, 3),
    "empty experts": (0, 5, 0, 0),
    "all on the last": (0, 0, 0, 9),
    "one token": (0, 1, 0, 0),
    "no rows": (0, 0, 0, 0),
}


def pytest_collection_finish():
    """Hides what importing has made from the garbage collector; from now on `_collected` alone starts full collections.

    They took half of the time of the compilers' tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 1_000_000)


@pytest.fixture(autouse=True)
def _collected():
    """Collects after a test that has made many objects, and hides those that are left: caches of torch and Thunder."""
    yield
    if gc.get_count()[2] >= 20:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed():
    """torch._dynamo times the guards of each graph behind a flush of the CPU's caches: 65 ms, for its log alone."""
    from torch._dynamo import guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _thunder_traces_faster(request):
    """Thunder interprets functions of its own to find each builtin, disassembles a function at each call of it, and
    waits for a thread that makes a frame for each traceback: more than half of the time in which it traces a model.

    Globals are found here by the call with which that interpretation ends; instructions and frames are kept. The whole
    matrix and the tests on a GPU run Thunder as it is.
    """
    if importlib.util.find_spec("thunder") is None or "not exhaustive" not in request.config.option.markexpr:
        yield
        return
    from thunder.core import interpreter
    from thunder.core.interpreter import InterpreterFrame, unwrap, wrap_const

    get_instructions, make_frame = dis.get_instructions, InterpreterFrame.get_or_make_python_frame
    find, item, frames = interpreter.globals_lookup, interpreter.MutMappingWrapperMethods.__getitem__, {}

    @functools.lru_cache(10_000)
    def instructions(code, **options):
        return tuple(get_instructions(code, **options))

    def python_frame(self):
        key = self.code, self.qualname, self.positions and self.positions.lineno
        return frames.get(key) or frames.setdefault(key, make_frame(self))

    def lookup(namespace, name):
        for space in (namespace, None):  # the globals, then the builtins
            space = item(namespace, wrap_const("__builtins__")) if space is None else space
            if type(unwrap(space)) is not dict or not isinstance(space, interpreter.WrappedValue):
                break
            if name.value in space.value:
                return item(space, name)
        return find(namespace, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dis, "get_instructions", lambda code, **options: iter(instructions(code, **options)))
        patch.setattr(InterpreterFrame, "get_or_make_python_frame", python_frame)
        patch.setattr(interpreter, "globals_lookup", lookup)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(params=ROUTINGS.values(), ids=ROUTINGS.keys())
def offsets(request) -> torch.Tensor:
    """int32 (4,) cumulative row ends."""
    return torch.tensor(request.param).cumsum(0).int()


@pytest.fixture
def opcheck(monkeypatch):
    """torch.library.opcheck, whose comparison of inputs before and after is taught to compare float8 by its bits."""
    allclose = torch.allclose

    def allclose_with_float8(a, b, *args, **kwargs):
        if a.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "allclose", allclose_with_float8)
    return torch.library.opcheck


@pytest.fixture
def count(monkeypatch):
    """The shapes of the weights that have been quantized."""
    calls = []

    def spy(weight):
        calls.append(tuple(weight.shape))
        return quantize(weight)

    monkeypatch.setattr(select, "quantize", spy)
    return calls


@pytest.fixture
def tiles(monkeypatch):
    """`preferred_layout` of a GPU of compute capability 9.0, on this CPU; the list of what it was asked."""
    asked = []

    def preferred(device, n, k, format=NVFP4):
        asked.append((device.type, n, k))
        tiles = "tiled_64x64" in layouts_of(format) and layout_fits(n, k, "tiled_64x64", format) is None
        return "tiled_64x64" if tiles else "linear"

    monkeypatch.setattr(select, "preferred_layout", preferred)
    return asked


def _topk(values, k, dim=-1, largest=True, sorted=True):
    ordered, indices = torch.sort(values, dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous()


@pytest.fixture(scope="module")
def ties_have_an_order():
    """torch.topk on CPUs takes the first of equal values, as this package's router does; torch leaves that open.

    In a 16-bit model the logits of two experts are often equal: of which tokens depends on how a CPU rounds before.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden")
            library.impl("topk", _topk, "CPU")
        yield


@pytest.fixture(scope="module")
def ranks():
    """Processes of a group by their number, `ranks(2)(function, *args)`, of gloo unless it is `ranks(2, "nccl")`; they
    live as long as a file's tests: each of gloo's groups has a thread that wakes up a hundred times a second, and tests
    leave hundreds of groups. After a test that has ended one there are new ones."""
    groups = {}

    def of(*key):
        if key in groups and not groups[key].alive:
            groups.pop(key).close()
        if key not in groups:
            groups[key] = Ranks(*key)
        return groups[key]

    yield of
    for group in groups.values():
        group.close()
