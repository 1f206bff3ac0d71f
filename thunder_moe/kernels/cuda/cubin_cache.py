"""Keeps the machine code of compiled kernels between processes, in ~/.cache/thunder_moe (or $XDG_CACHE_HOME).
Called by kernels.nvrtc; calls nothing of ours.

The code runs with the rights of whoever loads it. So a file is used only if it belongs to this user, nobody else may
write it, and its checksum is right; any other counts as missing and is written anew. Files appear whole or not at all,
also when processes write the same one at once. Without a place to write to, each process compiles for itself.
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
_unwritable: set[Path] = set()  # that this process has warned of


def folder() -> Path | None:
    """Where the files are; None where there is no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "thunder_moe"
    try:
        return Path.home() / ".cache" / "thunder_moe"
    except RuntimeError:
        return None


def read(key: str) -> bytes | None:
    """What `write` has kept under a key, or None.

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
    """Keeps `content` under a key. Where that fails it warns, once for each folder, and nothing is kept."""
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
                f"thunder_moe: compiled CUDA kernels cannot be kept in {place} ({error}), every process compiles its"
                " own (a second or two for each kernel); set XDG_CACHE_HOME to a directory that can be written",
                stacklevel=2,
            )


def _file(place: Path, key: str) -> Path:
    return place / f"{key[:32]}.cubin"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _is_ours_alone(status: os.stat_result) -> bool:
    """Whether a file belongs to this user, and only it may write it (POSIX; elsewhere the directory's rights count)."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
