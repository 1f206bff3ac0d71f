"""Caches the machine code of compiled kernels on disk, in ~/.cache/thunder_moe (or $XDG_CACHE_HOME/thunder_moe).
Called by kernels/cuda/nvrtc.py, kernels/host_code.py and kernels/cpu (crossover keeps its limits by read_own and
replace); calls the standard library alone.

The code runs with the rights of the process that loads it. So a file is used only if it belongs to this user, nobody
else may write it, and its checksum is right; any other is reported and written again. Callers get the bytes that were
checked, not the file, which another process may change. Writes are atomic, also when several processes write the same
file. Where no folder can be written, each process compiles its own kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

_DIGEST_BYTES = 32
_PATIENCE = 180.0  # seconds; a compile takes 10 to 60
_ABANDONED = 3600.0  # seconds; a write takes milliseconds
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # a pipe in place of a file would be waited for
_LOGGER = logging.getLogger("thunder_moe")
_unwritable: set[Path | None] = set()  # folders that this process has warned of


def folder() -> Path | None:
    """Return the folder of the cache; None without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):  # the XDG specification ignores a relative path, which would follow the working directory
        return Path(root) / "thunder_moe"
    try:
        return Path.home() / ".cache" / "thunder_moe"
    except RuntimeError:
        return None


def read(key: str, *, quiet: bool = False) -> bytes | None:
    """Return the content that `write` has stored under a key, or None; log a warning of a file that cannot be trusted.

    Args:
        key: a hash of everything that the content depends on, in hexadecimal.
        quiet: True to log nothing, for a caller that reads the file again before it compiles.
    """
    place = folder()
    if place is None:
        return None
    path = _file(place, key)
    try:
        kept = read_own(path)
        digest, content = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        if digest == _digest(key, content):
            return content
        reason = "it is damaged"
    except OSError:
        return None
    except ValueError as error:
        reason = str(error)
    if not quiet:
        _LOGGER.warning(
            "thunder_moe: the compiled kernels in %s are not used, they are compiled again: %s", path, reason
        )
    return None


def read_own(path: Path) -> bytes:
    """Return the content of a file that belongs to this user, who alone may write it. Never waits for a pipe.

    Raises:
        OSError: it cannot be read, or is not there.
        ValueError: it is another user's, or not a file; the message completes a sentence.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if not _is_ours_alone(status):
            raise ValueError("another user owns it or may write it")
        return file.read()


def replace(path: Path, content: bytes) -> None:
    """Write a file at once, so that no other process reads half of it.

    Raises:
        OSError: it cannot be written; nothing is left then.
    """
    _remove_leftovers(path.parent)
    handle, part = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _remove_leftovers(place: Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote."""
    for part in place.glob("*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.lstat().st_mtime > _ABANDONED:
                part.unlink()


def write(key: str, content: bytes) -> None:
    """Store `content` under a key; where that fails, warn once per folder and store nothing."""
    place = folder()
    try:
        if place is None:
            raise OSError("there is no home directory")
        place.mkdir(parents=True, exist_ok=True)
        replace(_file(place, key), _digest(key, content) + content)
    except OSError as error:
        if place not in _unwritable:
            _unwritable.add(place)
            where = "" if place is None else f" in {place}"
            warnings.warn(
                f"thunder_moe: compiled kernels cannot be cached{where} ({error}), every process compiles its own"
                " (a second or two for each CUDA kernel, about 20 s for the kernels of a CPU); set XDG_CACHE_HOME to a"
                " writable directory",
                stacklevel=2,
            )


@contextlib.contextmanager
def one_process(key: str, work: str) -> Iterator[None]:
    """Hold the lock of a key, so that other processes wait instead of doing the same work.

    The system drops the lock when its holder ends or is killed, and a forked process does not inherit it. If the folder
    cannot be written, or the file system has no locks (some network file systems), processes do not wait. Then each
    does the work itself; this is safe, because `write` is atomic. A process that has waited for `_PATIENCE` seconds,
    perhaps for a stopped holder, does the same. Threads of one process need a lock of their own.

    Args:
        key: as in `read`.
        work: completes the line "waiting for another process, which ...", logged before the process waits.
    """
    place = folder()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # POSIX alone

            if place is None:
                raise OSError
            place.mkdir(parents=True, exist_ok=True)
            path = _file(place, key).with_suffix(".lock")
            # Another's link or pipe in a shared folder is neither followed nor waited for.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | _NONBLOCK
            file = stack.enter_context(os.fdopen(os.open(path, flags, 0o600), "wb"))
            deadline = None
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by the system: it is held
                    if deadline is None:
                        deadline = time.monotonic() + _PATIENCE
                        _LOGGER.warning("thunder_moe: waiting for another process, which %s (it locks %s)", work, path)
                    if time.monotonic() > deadline:
                        _LOGGER.warning("thunder_moe: not waiting any longer: %s is still locked", path)
                        break
                    time.sleep(0.05)
        yield


def _file(place: Path, key: str) -> Path:
    return place / f"{key[:32]}.code"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _is_ours_alone(status: os.stat_result) -> bool:
    """True if a file belongs to this user, who alone may write it (POSIX; elsewhere the folder's permissions count)."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
