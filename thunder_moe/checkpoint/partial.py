"""The working directory of a conversion beside its destination: locked, resumed, and renamed when all is written.
Called by convert; calls files, scratch and writer.

``<destination>.partial`` holds progress.json and the directory "checkpoint", which becomes the destination.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thunder_moe.checkpoint.files import read_json
from thunder_moe.checkpoint.scratch import lock
from thunder_moe.checkpoint.writer import require_absent, shard_paths, write_json

__all__ = ["PartialCheckpoint", "open_partial"]

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"


@dataclass
class PartialCheckpoint:
    """A checkpoint that is being written.

    Attributes:
        destination: what it becomes.
        directory: the working directory.
        state: what was done: "job", "done", "shards", "errors".
    """

    destination: Path
    directory: Path
    state: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """Where the files of the checkpoint go."""
        return self.directory / "checkpoint"

    def save(self, **state: Any) -> None:
        """Notes what was done."""
        self.state |= state
        write_json(self.directory / PROGRESS_NAME, self.state)

    def remove(self) -> None:
        """Removes everything."""
        shutil.rmtree(self.directory)

    def finish(self) -> None:
        """Renames the checkpoint, which is complete.

        Raises:
            FileExistsError: the destination has come into being meanwhile.
        """
        require_absent(self.destination)
        os.rename(self.checkpoint, self.destination)
        self.remove()


@contextmanager
def open_partial(destination: Path, job: dict[str, Any]) -> Iterator[PartialCheckpoint]:
    """The working directory, which no other conversion can open meanwhile: new, or that of an interrupted run.

    Args:
        destination: a path that does not exist.
        job: what must be the same to resume; JSON.

    Raises:
        FileExistsError: another conversion is at work there, or it holds another job.
    """
    directory = destination.with_name(f"{destination.name}.partial")
    with _locked(directory):
        require_absent(destination)
        progress = directory / PROGRESS_NAME
        state: dict[str, Any] = {"job": job}
        if progress.is_file():
            state = read_json(progress)
        elif any(entry.name != f"{PROGRESS_NAME}.unfinished" for entry in directory.iterdir()):
            raise FileExistsError(f"path: {directory} exists and is of no conversion; remove it to start anew")
        if state.get("job") != job:
            raise FileExistsError(f"path: {directory} is of another source or other options; remove it to start anew")
        partial = PartialCheckpoint(destination, directory, state)
        if not _resumable(partial):
            state = partial.state = {"job": job, "done": [], "shards": [], "errors": []}
        elif state["done"]:
            logger.info("%s: resuming after %d modules", directory, len(state["done"]))
        partial.save()
        partial.checkpoint.mkdir(exist_ok=True)
        _tidy(partial)
        yield partial


def _resumable(partial: PartialCheckpoint) -> bool:
    """Whether all shards that the state lists are there."""
    shards = partial.state.get("shards")
    return shards is not None and all(
        any(path.is_file() for path in shard_paths(partial.checkpoint, number, len(shards)))
        for number in range(len(shards))
    )


def _tidy(partial: PartialCheckpoint) -> None:
    """Removes what an interrupted run left beside its shards: half-written files of ours and of safetensors, copies."""
    shards = partial.state["shards"]
    kept = {path for number in range(len(shards)) for path in shard_paths(partial.checkpoint, number, len(shards))}
    for entry in list(partial.checkpoint.iterdir()):
        if entry in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Creates a directory if need be, and holds its lock, which ends with the process, however that ends.

    Raises:
        FileExistsError: another process, or another thread, has it.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = lock(directory)
            break
        except FileNotFoundError:  # the other conversion has just finished
            continue
        except BlockingIOError as error:
            raise FileExistsError(
                f"path: {directory} is being written by another conversion; wait for its end"
            ) from error
    if descriptor is None:
        logger.warning("%s cannot be locked: run one conversion at a time", directory)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
