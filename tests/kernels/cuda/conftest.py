"""Emulated devices of the tests of CUDA kernels: the fixtures `hopper`, `chains`, `layout` and `device`.
Called by pytest for the tests beside it; builds on the fixtures of tests/kernels/conftest.py.

A configuration costs the emulator 0.6 s to build, so the fast tests share the few of `FAST` in emulated_gemms.py. The
fast set has of each source of kernels:

- the grouped GEMMs (split, staged, wgmma, tiled_mma, tiled_wgmma) and the cluster GEMM: the oracle with edge rows, the
  smallest K and a K that is not a multiple of a stage; SwiGLU; the whole routing table with the default configurations;
- of each: reads beyond the operands, offsets and slots out of range, another number of blocks, orders of threads and
  late copies, more blocks than work; stream-K of many rows and of one row; rows that come late;
- MXFP8: a linear and a tiled kernel of each kind of product, its extremes, both of its dequantizers;
- routers: one block, several blocks, groups of experts, 16-bit logits, ties and NaN, the linear layer in one kernel;
- training: activations, biases, each kind of product (any dtype, mma, wgmma) forwards, transposed and for weights;
- adapters: product, gradients of rows and of weights, gather; the quantizer and the dequantizer byte for byte;
- whole layers and operators: equal to their parts, and to their first call;
- the batch-invariant mode: a dense layer, a router, equal bits of configurations, the configurations of all shapes.

Each dtype occurs in it, not with each kernel. The slow set has the pairwise tables of configurations, sizes and dtypes,
kernels with a wait removed (test_layer.py), and NVRTC for every compute capability (test_nvrtc.py).
"""

import pytest
import torch
from emulated_gemms import emulate_device

from thunder_moe.kernels import select
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.ops import operator


@pytest.fixture
def hopper(emulated, monkeypatch):
    """Give the emulated device compute capability 9.0."""
    emulate_device(monkeypatch, 3)


@pytest.fixture
def chains(emulated, monkeypatch):
    """Operators on this CPU run the CUDA kernels, after the first call by chains: those that ran without one."""
    for name in ("_best", "_load"):
        monkeypatch.setattr(select, name, getattr(select, name).__wrapped__)
    monkeypatch.setattr(select, "BACKENDS", {"cuda": ("cpu",), "reference": None})
    monkeypatch.setitem(select._KNOWN, "cuda", ("cpu",))
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: None)
    for module in (select, operator):
        monkeypatch.setattr(module, "has_chains", lambda device: True)
    for described in operator.OPERATORS.values():
        monkeypatch.setattr(described, "_mru", ())
    unprepared, compute = [], operator.Operator._compute

    def counted(self, *args, **options):
        unprepared.append(self.name)
        return compute(self, *args, **options)

    monkeypatch.setattr(operator.Operator, "_compute", counted)
    return unprepared


@pytest.fixture(params=["linear", "tiled_64x64"])
def layout(request):
    """Return the layout of weights; the device's kernels read it."""
    request.getfixturevalue("emulated" if request.param == "linear" else "hopper")
    return request.param


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Return the device that runs the kernels: the CPU in the emulator, or a GPU."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        return "cuda"
    request.getfixturevalue("emulated")
    return "cpu"
