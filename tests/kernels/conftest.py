"""Runs the backends' CUDA sources on a CPU, by emulator/cuda_emulator.h: the fixtures `emulator` and `emulated`.
Called by pytest for the tests beside it.
"""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import nvrtc, workspace

EMULATOR = Path(__file__).parents[1] / "emulator"


class Adversary(ctypes.Structure):
    """`Adversary` of cuda_emulator.h."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("late_copies", "late_products", "order"))


class MatrixMap(ctypes.Structure):
    """`TensorMap` of cuda_emulator.h."""

    _fields_ = (
        ("matrix", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "k", "box_rows")),
        ("unused", ctypes.c_int64 * 12),
    )


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """launch(sources, expression, threads, blocks, argument, adversary): runs a kernel of .cu files on this CPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder, libraries = tmp_path_factory.mktemp("cuda"), {}

    def build(sources: tuple[Path, ...], expression: str, argument: type[ctypes.Structure]) -> ctypes.CDLL:
        name = hashlib.sha256(f"{sources}{expression}".encode()).hexdigest()[:16]
        program = folder / f"{name}.cpp"
        includes = "\n".join(f'#include "{file}"' for file in (EMULATOR / "cuda_emulator.h", *sources))
        program.write_text(f"""{includes}
{nvrtc.struct_checks(argument)}
extern "C" void run(const {argument.__name__}* argument, int blocks, int threads, Adversary worst) {{
  adversary = worst;
  launch(blocks, threads, [&] {{ {expression}(*argument); }});
}}
""")
        library = program.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        subprocess.run([compiler, *options, str(program), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    def run(sources, expression, threads, blocks, argument, adversary):
        if (sources, expression) not in libraries:
            libraries[sources, expression] = build(sources, expression, type(argument))
        libraries[sources, expression].run(ctypes.byref(argument), blocks, threads, adversary)

    return run


@pytest.fixture(scope="session")
def adversary():
    """What the emulated device chooses where hardware is free; a test may change it (and puts it back)."""
    return Adversary(late_copies=1, late_products=1, order=2)


@pytest.fixture
def emulated(emulator, adversary, monkeypatch):
    """The backend on a device of three multiprocessors that run one block each."""

    def launch(sources, expression, threads, shared_bytes, blocks, argument, device, multiprocessors=None):
        emulator(sources, expression, threads, min(blocks, multiprocessors or blocks), argument, adversary)

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(workspace, "_is_capturing", lambda device: False)
    monkeypatch.setattr(workspace, "_filled", lambda size, device: torch.zeros(size, dtype=torch.int32))
    monkeypatch.setattr(workspace, "_POOLS", {})
    monkeypatch.setattr(nvrtc, "tensor_map", lambda *matrix: bytes(MatrixMap(*matrix)))
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (8, 0)))
