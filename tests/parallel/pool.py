"""Four processes with gloo that run functions of `programs` for the tests. They are started once, from a process that
has imported torch: importing it costs seconds.
Called by conftest; calls torch.distributed.
"""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from typing import Any

RANKS = 4
TIMEOUT = 120  # seconds that a collective takes at most: a rank may compile while the others wait


@dataclass(frozen=True)
class Meshes:
    """The meshes of a process: all four, its half, its rank among all, and the same rank of both halves."""

    four: Any
    two: Any
    rank: int

    def of(self, ranks: int) -> Any:
        return {2: self.two, 4: self.four}[ranks]


def work(rank: int, path: str, pipe: Any) -> None:
    """Runs what comes through the pipe until None does."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS, timeout=timeout)
    four, halves = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "of"))
    meshes = Meshes(four, halves["of"], rank)
    pipe.send(("ready", None))
    while (task := pipe.recv()) is not None:
        function, arguments = task
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            pipe.send(("done", function(meshes, *arguments)))
        except Exception:
            pipe.send(("failed", traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """The processes. `run` calls a function in all of them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "thunder_moe.parallel", "programs"])
        self._folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, f"{self._folder.name}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for rank in range(RANKS):
            assert self.result(rank) is None

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """function(meshes, *arguments) in every process -> the results by rank."""
        self.start(function, *arguments)
        outcomes = []
        for rank in range(RANKS):
            try:
                outcomes.append(self.result(rank))
            except RankError as failure:
                outcomes.append(failure)
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                raise outcome
        return outcomes

    def start(self, function: Any, *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def result(self, rank: int) -> Any:
        if not self.pipes[rank].poll(2 * TIMEOUT):
            raise RankError(f"rank {rank} gave no answer in {2 * TIMEOUT} seconds")
        kind, value = self.pipes[rank].recv()
        if kind == "failed":
            raise RankError(f"rank {rank}:\n{value}")
        return value

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(OSError):
                    pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class RankError(Exception):
    """What a process raised."""
