"""Shared fixtures: seeds, routings with their edge rows, operator checks that know float8, a count of quantizations, a
GPU's preference of layouts, an order of ties.
Called by pytest; registers with torch.compile, for checkouts that are not installed, and with Thunder, which makes
`import thunder` work in all tests on torch >= 2.13.
"""

import gc
import hashlib
import importlib.util
import os
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from compiler_speed import collect_if_many, hide_from_collector, speed_up_compilers
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


gc.disable()  # the imports of tests leave nothing to collect, and it took a third of their time


def pytest_collection_finish():
    gc.enable()
    hide_from_collector()


def pytest_fixture_setup(request):
    """Only where tests are left out: the whole matrix runs the compilers without these patches.

    Before each fixture, since one of a module may compile, and another one import the compiler.
    """
    if "not exhaustive" in request.config.option.markexpr or "not slow" in request.config.option.markexpr:
        speed_up_compilers()


@pytest.fixture(autouse=True)
def _few_objects():
    yield
    collect_if_many()


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
