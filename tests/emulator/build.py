"""Builds CUDA kernels for this CPU with cuda_emulator.h, and caches the builds by content, between runs and processes.
Called by tests/kernels/conftest.py; calls the C++ compiler, and kernels/cuda/nvrtc.py for the checks of structs.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from thunder_moe.kernels import code_cache
from thunder_moe.kernels.cuda import nvrtc

HEADER = Path(__file__).with_name("cuda_emulator.h")
WARNINGS = ("-Wno-unknown-pragmas", "-Wno-psabi")
# Two files of tests, nothing built and all built, on 2 cores of an AMD EPYC: -O1 55 and 15 s, -O2 83 and 11 s, -O0 64
# and 21 s.
OPTIONS = (
    "-std=c++17",
    "-O1",
    "-march=native",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fPIC",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
)
_UNUSED_DAYS = 30  # after which a build is removed


def compiler() -> str | None:
    return shutil.which("c++")


@functools.cache
def library(sources: tuple[Path, ...], expression: str, argument: type[ctypes.Structure]) -> ctypes.CDLL:
    """A library whose `run(argument, blocks, threads, adversary)` launches the kernel that a C++ expression names.

    Args:
        sources: the files of the kernel's source, in their order.
        expression: names the kernel.
        argument: the struct that it takes.
    """
    # The struct is copied: ctypes aligns none to 64 bytes, as one of them has to be.
    program = f"""{"".join(file.read_text() for file in sources)}
{nvrtc.struct_checks(argument)}
extern "C" void run(const void* bytes, int blocks, int threads, Adversary worst) {{
  {argument.__name__} argument;
  std::memcpy(&argument, bytes, sizeof argument);
  adversary = worst;
  launch(blocks, threads, [&] {{ {expression}(argument); }});
}}
"""
    built = _folder() / f"{_key(program)}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            source, output = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
            source.write_text(program)
            _compile("-shared", "-include", str(_precompiled_header()), str(source), "-o", str(output))
            os.replace(output, built)  # whole or not at all, also when several processes build the same
    os.utime(built)
    return ctypes.CDLL(str(built))


@functools.cache
def _precompiled_header() -> Path:
    """A copy of the emulator with its precompiled form beside it, where the compiler looks for that."""
    place = _folder() / f"{_key('')}.header"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            copy = Path(scratch, "header", HEADER.name)
            copy.parent.mkdir()
            copy.write_text(HEADER.read_text())
            _compile("-x", "c++-header", str(copy), "-o", f"{copy}.gch")
            try:
                os.replace(copy.parent, place)
            except OSError:  # another process was faster
                assert place.exists()
    os.utime(place)
    return place / HEADER.name


def _compile(*arguments: str) -> None:
    run = subprocess.run([str(compiler()), *OPTIONS, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@functools.cache
def _folder() -> Path:
    """The cache's folder; builds that nothing has used for long are removed."""
    root = code_cache.folder()
    assert root is not None
    folder = root / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process builds here, and removes what it has no use for
            if time.time() - old.stat().st_mtime > _UNUSED_DAYS * 86400:
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
    return folder


def _key(program: str) -> str:
    """A hash of all that a build depends on: text, options, compiler, and the CPU's instruction sets."""
    return hashlib.sha256("\0".join([program, *OPTIONS, _environment()]).encode()).hexdigest()[:32]


@functools.cache
def _environment() -> str:
    version = subprocess.run([str(compiler()), "--version"], capture_output=True, text=True, check=True).stdout
    native = [
        str(compiler()),
        *OPTIONS,
        "-E",
        "-dM",
        "-x",
        "c++",
        os.devnull,
    ]  # the macros of what -march=native is here
    macros = subprocess.run(native, capture_output=True, text=True, check=True).stdout
    return "\0".join([str(compiler()), version, macros, HEADER.read_text()])
