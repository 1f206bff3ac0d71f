"""Locked directories for files that move to their path when they are complete; removes directories of killed processes.
Called by checkpoint.writer, checkpoint.partial, kernels.host_code, and saving and lora_files of huggingface; calls
nothing of the package.

The lock of a directory (flock) ends with the process that holds it, so that an unlocked directory is a leftover.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

logger = logging.getLogger(__name__)


def lock(directory: Path, *, wait: bool = False) -> int | None:
    """Locks a directory until the returned descriptor is closed; returns None if the file system has no locks.

    Args:
        directory: an existing directory.
        wait: waits until another process or thread releases the lock.

    Raises:
        BlockingIOError: another process or thread holds the lock, and `wait` is False.
        FileNotFoundError: the directory does not exist, or was replaced meanwhile.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(descriptor), directory.stat()):
            return descriptor
        raise FileNotFoundError(f"{directory}: was replaced while it was locked")
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        raise
    except OSError as error:
        logger.info("%s cannot be locked (%s)", directory, error)
        os.close(descriptor)
        return None


@contextmanager
def scratch_directory(path: Path, place: Path, work: str = "save") -> Iterator[Path]:
    """Makes a hidden directory in `place` for files that will move to `path`, and removes it at the end of the block.

    Args:
        path: the final path; the directory is named after it, for `remove_leftovers`.
        place: the directory to make it in.
        work: a word for the work, which is in the name, too.
    """
    descriptor = None
    while True:
        directory = Path(mkdtemp(prefix=_prefix(path, work), dir=place))
        try:
            descriptor = lock(directory)
            break
        except (BlockingIOError, FileNotFoundError):  # another process just took it for a leftover
            continue
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def move_files(source: Path, directory: Path, last: str, is_stale: Callable[[str], bool] = lambda name: False) -> None:
    """Moves the files of a scratch directory into a directory, and removes the files of earlier work there.

    The file `last` goes first and comes last: an interruption never leaves a mixture of two works that loads.

    Args:
        source: holds files alone; it is empty afterwards.
        directory: an existing directory on the same file system.
        last: the name of one of the files.
        is_stale: returns whether a file of this name is removed if `source` has none of it.
    """
    names = {file.name for file in source.iterdir()}
    descriptor = lock(directory, wait=True)  # another one that moves its files there would mix them with these
    try:
        _move_files(source, directory, last, is_stale, names)
    except KeyboardInterrupt:  # half of both works would be lost, where a few names are to be changed
        _move_files(source, directory, last, is_stale, names)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _move_files(source: Path, directory: Path, last: str, is_stale: Callable[[str], bool], names: set[str]) -> None:
    """Moves the files that are not moved yet."""
    if not (source / last).exists():
        return
    (directory / last).unlink(missing_ok=True)
    for name in sorted(names - {last}):
        if (source / name).exists():
            os.replace(source / name, directory / name)
    for file in directory.iterdir():
        if file.name not in names and is_stale(file.name):
            file.unlink()
    os.replace(source / last, directory / last)


def remove_leftovers(path: Path, work: str = "save") -> None:
    """Removes scratch directories that killed processes left for `path`, beside it or inside; a warning names each.

    Directories that a running process has locked stay.

    Args:
        path: as in `scratch_directory`.
        work: as in `scratch_directory`.
    """
    path = path.resolve()
    for place in (path.parent, path):
        try:
            names = sorted(os.listdir(place))
        except OSError:  # missing, or not readable
            continue
        for name in names:
            left = place / name
            if not name.startswith(_prefix(path, work)) or left.is_symlink() or not left.is_dir():
                continue
            descriptor = None
            try:
                descriptor = lock(left)
                if descriptor is None:
                    raise OSError("it cannot be locked")
                nbytes = sum(file.stat().st_size for file in left.rglob("*") if file.is_file())
                shutil.rmtree(left)
            except (BlockingIOError, FileNotFoundError):
                continue
            except OSError as error:
                logger.warning("%s: left by another %s; remove it if none is running (%s)", left, work, error)
            else:
                logger.warning("%s: removed %.3g GB that an interrupted %s had left", left, nbytes / 1e9, work)
            finally:
                if descriptor is not None:
                    os.close(descriptor)


def _prefix(path: Path, work: str) -> str:
    return f".{path.resolve().name}.thunder_moe_{work}."
