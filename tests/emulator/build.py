"""Builds CUDA kernels for this CPU with cuda_emulator.h and .cpp; caches builds by content, between runs and processes.
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

HEADER, SOURCE = (Path(__file__).with_name(f"cuda_emulator.{suffix}") for suffix in ("h", "cpp"))
# Two files of tests, nothing built and all built, on 2 cores of an AMD EPYC: -O1 19 and 10 s, -O2 20 and 11 s, -O0 19
# and 13 s.
OPTIONS = (
    "-std=c++17",
    "-O1",
    "-march=native",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fPIC",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    *(["-fuse-ld=gold"] if shutil.which("ld.gold") else []),  # links in 0.04 s, GNU ld in 0.17 s
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
  const auto kernel = [](const void* argument) {{ {expression}(*static_cast<const {argument.__name__}*>(argument)); }};
  launch(blocks, threads, kernel, &argument, worst);
}}
"""
    built = _folder() / f"{_key(program)}.so"
    if not built.exists():
        with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
            source, output = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
            source.write_text(program)
            header, scheduler = _emulator()
            _compile("-shared", "-include", str(header), str(source), str(scheduler), "-o", str(output))
            os.replace(output, built)  # whole or not at all, also when several processes build the same
    os.utime(built)
    return ctypes.CDLL(str(built))


@functools.cache
def _emulator() -> tuple[Path, Path]:
    """The emulator's header, its precompiled form beside it, where the compiler looks for that; its compiled source."""
    place = _folder() / f"{_key('')}.emulator"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            copy = Path(scratch, "emulator", HEADER.name)
            copy.parent.mkdir()
            copy.write_text(HEADER.read_text())
            _compile("-x", "c++-header", str(copy), "-o", f"{copy}.gch")
            _compile("-c", "-fvisibility=hidden", str(SOURCE), "-o", str(copy.with_suffix(".o")))
            try:
                os.replace(copy.parent, place)
            except OSError:  # another process was faster
                assert place.exists()
    os.utime(place)
    return place / HEADER.name, (place / HEADER.name).with_suffix(".o")


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
    return "\0".join([str(compiler()), version, macros, HEADER.read_text(), SOURCE.read_text()])
