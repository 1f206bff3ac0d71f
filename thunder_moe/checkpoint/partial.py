"""The working directory of a conversion beside its destination: locked, resumed, and renamed when it is complete.
Called by convert and quantization.kept_layers; calls files, scratch and writer.

``<destination>.partial`` holds progress.json and the directory "checkpoint", which becomes the destination. The next
run detects damage by checksums (CRC-32) of progress.json's content and of each finished shard.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_moe.checkpoint.files import read_json
from thunder_moe.checkpoint.writer import require_absent, shard_paths, write_json
from thunder_moe.scratch import lock

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"
_READ_BYTES = 1 << 24


@dataclass
class PartialCheckpoint:
    """A checkpoint that is being written in a directory; `state` has its "job", "done", "shards" and "errors"."""

    destination: Path
    directory: Path
    state: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """Return the directory of the checkpoint's files."""
        return self.directory / "checkpoint"

    def save(self, **state: Any) -> None:
        """Save the progress, with the checksums of new shards."""
        self.state |= state
        for number, shard in enumerate(self.state["shards"]):
            if "crc32" not in shard:
                shard["crc32"] = _checksum(self.shard(number))
        write_json(self.directory / PROGRESS_NAME, {"state": self.state, "crc32": _checksum_of(self.state)})

    def shard(self, number: int) -> Path:
        """Return the current path of a finished shard."""
        part, final = shard_paths(self.checkpoint, number, len(self.state["shards"]))
        return final if final.is_file() else part

    def remove(self) -> None:
        """Remove the working directory."""
        shutil.rmtree(self.directory)

    def finish(self) -> None:
        """Rename the complete checkpoint to its destination; a FileExistsError if that exists by now."""
        require_absent(self.destination, "destination")
        os.rename(self.checkpoint, self.destination)
        self.remove()


def partial_path(destination: Path) -> Path:
    """Return the working directory of a conversion to a destination."""
    return destination.with_name(f"{destination.name}.partial")


@contextmanager
def open_partial(destination: Path, job: dict[str, Any]) -> Iterator[PartialCheckpoint]:
    """Open the working directory, new or of an interrupted run; no other conversion can open it meanwhile.

    An interrupted run resumes if its `job`, a description in JSON, and the version are equal.

    Raises:
        FileExistsError: another conversion has the directory open, or it holds another job.
        ValueError: progress.json or a finished shard was damaged; names the file and what to do.
    """
    from thunder_moe import __version__  # versions may quantize differently

    directory, job = partial_path(destination), job | {"version": __version__}
    with _locked(directory):
        require_absent(destination, "destination")
        progress = directory / PROGRESS_NAME
        new: dict[str, Any] = {"job": job, "done": [], "shards": [], "errors": []}
        state = _read_progress(progress) if progress.is_file() else new
        if state is new and any(entry.name != f"{PROGRESS_NAME}.unfinished" for entry in directory.iterdir()):
            raise FileExistsError(f"destination: {directory} exists and is of no conversion; remove it to start anew")
        begun = state.get("job", {})
        if other := sorted(name for name in begun.keys() | job.keys() if begun.get(name) != job.get(name)):
            raise FileExistsError(
                f"destination: {directory} was begun with another value of {', '.join(other)}; remove it to start anew"
            )
        partial = PartialCheckpoint(destination, directory, state)
        files = [partial.shard(number) for number in range(len(state["shards"]))]
        if not all(file.is_file() for file in files):
            logger.warning("%s lacks a shard that was finished: the conversion starts anew", directory)
            partial.state = new
        for file, shard in zip(files, partial.state["shards"], strict=False):
            if _checksum(file) != shard["crc32"]:
                raise _damaged(file, directory)
        if done := partial.state["done"]:
            logger.info("%s: resuming after %d modules or layers", directory, len(done))
        partial.save()
        partial.checkpoint.mkdir(exist_ok=True)
        # Files that an interrupted run left beside its shards: half-written ones, and copied companions.
        shards = range(len(partial.state["shards"]))
        kept = {path for number in shards for path in shard_paths(partial.checkpoint, number, len(shards))}
        for entry in {*partial.checkpoint.iterdir()} - kept:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        yield partial


def _read_progress(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file)
    except ValueError as error:
        raise _damaged(file, file.parent) from error
    state: Any = content.get("state")
    if not isinstance(state, dict) or _checksum_of(state) != content.get("crc32"):
        raise _damaged(file, file.parent)
    return state


def _damaged(file: Path, directory: Path) -> ValueError:
    return ValueError(f"destination: {file} is damaged, or of another version; remove {directory} to start anew")


def _checksum_of(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state).encode())


def _checksum(file: Path) -> int:
    """Return the CRC-32 of a file, read in pieces (7 GB/s from memory)."""
    checksum = 0
    with file.open("rb") as content:
        while piece := content.read(_READ_BYTES):
            checksum = zlib.crc32(piece, checksum)
    return checksum


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Create a directory if necessary, and hold its lock, which the system releases when the process ends.

    A FileExistsError says that another process or thread holds it, or that the path is a link or a file.
    """
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise FileExistsError(
            f"destination: {directory} is a link or a file, wanted a directory for unfinished work; remove it, or"
            " choose another destination"
        )
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = lock(directory)
            break
        except FileNotFoundError:  # the other conversion has just finished
            continue
        except BlockingIOError as error:
            raise FileExistsError(
                f"destination: {directory} is being written by another conversion; wait for its end"
            ) from error
    if descriptor is None:
        logger.warning("%s cannot be locked: run one conversion at a time", directory)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
