"""Compiles C++ for this machine on first use and loads it from the checked cache of compiled kernels.
Called by kernels/cpu/backend.py and kernels/cuda/chain.py; calls the C++ compiler, kernels/code_cache.py and scratch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from thunder_moe.kernels import code_cache
from thunder_moe.scratch import remove_leftovers, scratch_directory

T = TypeVar("T")


def compiler() -> list[str]:
    """Return the command of the C++ compiler: the environment's CXX, by default c++.

    Raises:
        ValueError: CXX is empty, or has a quote without its end.
    """
    text, problem = os.environ.get("CXX") or "c++", "blanks alone"
    try:
        words = shlex.split(text)
    except ValueError as error:
        words, problem = [], str(error)
    if not words:
        wanted = "the command of a C++ compiler, such as 'g++' or 'ccache g++'; unset it for 'c++'"
        raise ValueError(f"CXX: got {text!r} ({problem}) in the environment, wanted {wanted}")
    return words


def key_of(parts: Sequence[str]) -> str:
    """Return a hash of what a library depends on: these parts, the compiler and the machine's architecture."""
    return hashlib.sha256("\0".join([*parts, platform.machine(), *compiler()]).encode()).hexdigest()


def load(what: str, parts: Sequence[str], compile: Callable[[], bytes], open: Callable[[str], T]) -> T:
    """Load a library from the cache, after compiling it if it is not there; one process compiles, the others wait.

    Args:
        what: completes the line "compiling ...", which is logged.
        parts: everything that the library depends on, as in `key_of`.
        compile: the content of the library.
        open: loads the library from a path; the file is removed afterwards.

    Raises:
        RuntimeError: there is no compiler, or it failed; the message is the compiler's.
        ValueError: the environment's CXX is not a command.
    """
    key = key_of(parts)
    kept = code_cache.read(key, quiet=True)
    if kept is not None:
        with contextlib.suppress(ImportError, OSError, AttributeError):  # of another build of this version of torch
            return _open(kept, open)
    with code_cache.one_process(key, f"compiles {what}"):
        library = code_cache.read(key)  # by the process that was waited for
        if library is not None and library != kept:
            return _open(library, open)
        command = compiler()[0]
        if shutil.which(command) is None:
            raise RuntimeError(f"no C++ compiler found: {command!r} is not on PATH; install g++ or clang, or set CXX")
        logging.getLogger("thunder_moe").warning("thunder_moe: compiling %s", what)
        library = compile()
        loaded = _open(library, open)
        code_cache.write(key, library)
        return loaded


def compile_library(sources: Sequence[Path], options: Sequence[str], libraries: Sequence[str]) -> bytes:
    """Return a shared library, whose sources are compiled side by side, each with these options of the compiler.

    Raises:
        RuntimeError: the compiler failed; the message is the compiler's.
    """
    with _build_directory() as directory:
        objects = [f"{directory}/{source.stem}.o" for source in sources]
        pairs = zip(sources, objects, strict=True)
        commands = [[*compiler(), *options, "-c", str(source), "-o", made] for source, made in pairs]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(_run, commands):
                pass
        library = directory / "library.so"
        _run([*compiler(), "-shared", *objects, *libraries, "-o", str(library)])
        return library.read_bytes()


@contextlib.contextmanager
def _build_directory() -> Iterator[Path]:
    """Make a directory for one build, and remove it afterwards; also remove leftovers of this user's killed builds."""
    place = Path(tempfile.gettempdir())
    # Some file systems do not show one machine the locks of another.
    builds = place / f"thunder_moe_{getattr(os, 'getuid', int)()}_{platform.node()}"
    remove_leftovers(builds, "build")
    with scratch_directory(builds, place, "build") as directory:
        yield directory


def _run(command: list[str]) -> None:
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if run.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed with status {run.returncode}:\n{run.stderr}")


def _open(library: bytes, open: Callable[[str], T]) -> T:
    """Load a library from memory or a file of this process alone, which nobody can change while its code runs."""
    if hasattr(os, "memfd_create"):  # Linux: also where disks are full, or may not hold code that runs
        with contextlib.suppress(OSError, ImportError):  # of ctypes, and of Python's loader of extensions
            memory = os.memfd_create("thunder_moe")  # stays open: the next one would get its path
            try:
                with os.fdopen(memory, "wb", closefd=False) as file:
                    file.write(library)
                return open(f"/proc/self/fd/{memory}")
            except BaseException:
                os.close(memory)
                raise
    with _build_directory() as directory:
        place = directory / "library.so"
        place.write_bytes(library)
        return open(str(place))
