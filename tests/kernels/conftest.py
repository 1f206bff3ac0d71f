"""Runs the backends' CUDA sources on a CPU, by cuda_emulator.h: the fixtures `emulator` and `emulated`.
Called by pytest for the tests beside it.
"""

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from thunder_moe.kernels import cuda

HERE = Path(__file__).parent
_ARGUMENTS = {
    "route": "RouteArguments",
    "combi": "CombineArguments",
    "dequa": "DequantizeArguments",
    "swigl": "SwigluArguments",
}


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """launch(sources, expression, threads, blocks, argument): runs a kernel of .cu files on this CPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder, libraries = tmp_path_factory.mktemp("cuda"), {}

    def build(sources: tuple[Path, ...], expression: str) -> ctypes.CDLL:
        name = hashlib.sha256(f"{sources}{expression}".encode()).hexdigest()[:16]
        program = folder / f"{name}.cpp"
        argument = _ARGUMENTS.get(expression[:5], "Arguments")
        includes = "\n".join(f'#include "{file}"' for file in (HERE / "cuda_emulator.h", *sources))
        program.write_text(f"""{includes}
extern "C" void run(const {argument}* argument, int blocks, int threads) {{
  launch(blocks, threads, [&] {{ {expression}(*argument); }});
}}
""")
        library = program.with_suffix(".so")
        options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
        subprocess.run([compiler, *options, str(program), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    def run(sources, expression, threads, blocks, argument):
        if (sources, expression) not in libraries:
            libraries[sources, expression] = build(sources, expression)
        libraries[sources, expression].run(ctypes.byref(argument), blocks, threads)

    return run


@pytest.fixture
def emulated(emulator, monkeypatch):
    """The backend on a device of three multiprocessors that run one block each."""

    def launch(sources, expression, threads, shared_bytes, blocks, argument, device, multiprocessors=None):
        emulator(sources, expression, threads, min(blocks, multiprocessors or blocks), argument)

    monkeypatch.setattr(cuda, "_launch", launch)
    monkeypatch.setattr(cuda, "_device_facts", lambda device: (3, (8, 0)))
