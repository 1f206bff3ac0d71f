"""Caches the machine code of compiled kernels on disk, in ~/.cache/thunder_moe (or $XDG_CACHE_HOME/thunder_moe).
Called by kernels/cuda/nvrtc.py; calls the standard library alone.

The code runs with the rights of the process that loads it. So a file is used only if it belongs to this user, nobody
else may write it, and its checksum is right; any other counts as missing and is written again. Writes are atomic, also
when several processes write the same file. Where no folder can be written, each process compiles its own kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

__all__ = ["folder", "read", "write"]

_DIGEST_BYTES = 32
_unwritable: set[Path] = set()  # folders that this process has warned of


def folder() -> Path | None:
    """The folder of the cache; None where there is no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "thunder_moe"
    try:
        return Path.home() / ".cache" / "thunder_moe"
    except RuntimeError:
        return None


def read(key: str) -> bytes | None:
    """The content that `write` has stored under a key, or None.

    Args:
        key: a hash of everything that the content depends on, in hexadecimal.
    """
    place = folder()
    if place is None:
        return None
    try:
        with open(_file(place, key), "rb") as file:
            if not _is_ours_alone(os.fstat(file.fileno())):
                return None
            digest, content = file.read(_DIGEST_BYTES), file.read()
    except OSError:
        return None
    return content if digest == _digest(key, content) else None


def write(key: str, content: bytes) -> None:
    """Stores `content` under a key; where that fails, warns once per folder and stores nothing."""
    place = folder()
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f"{key[:32]}.", suffix=".part", dir=place)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(key, content) + content)
            os.replace(part, _file(place, key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        if place not in _unwritable:
            _unwritable.add(place)
            warnings.warn(
                f"thunder_moe: compiled CUDA kernels cannot be cached in {place} ({error}), every process compiles its"
                " own (a second or two for each kernel); set XDG_CACHE_HOME to a writable directory",
                stacklevel=2,
            )


def _file(place: Path, key: str) -> Path:
    return place / f"{key[:32]}.cubin"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _is_ours_alone(status: os.stat_result) -> bool:
    """Whether a file belongs to this user, who alone may write it (POSIX; elsewhere the folder's permissions count)."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
