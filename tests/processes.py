"""`Ranks`: processes of a group that live as long as the tests of a file, so that each test of several processes
takes what its functions take. The fixture `ranks` of conftest.py gives those of a size.
Called by tests; calls multiprocessing's fork server `FORKS`, which imports torch once for all of them.
"""

import datetime
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from compiler_speed import collect_if_many, hide_from_collector, speed_up_compilers

# A process has one fork server, so that what all of its tests' processes import is listed here.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "thunder_moe.parallel",
        "thunder_moe.integrations.huggingface.checkpoint",
        "thunder_moe.compilers.dynamo.backend",
        "thunder_moe.__main__",
        "torch._inductor.compile_fx",
        "pytest",
        "checkpoint_files",
    ]
)
_SPAWN = multiprocessing.get_context("spawn")  # CUDA does not survive a fork of a process that asked for its devices
# A rank may compile while the others wait, and the first call imports, on a machine with much else to do.
COLLECTIVE = 300.0  # seconds that a collective takes at most
CALL = 600.0
_GRACE = 3.0  # seconds that the others have once one has failed


class Ranks:
    """A group of processes on this machine; with "nccl", each has the GPU of its rank.

    ``ranks(function, *args)`` calls ``function(*args)`` in each and returns the results by rank. The function is of a
    module that can be imported; arguments and results are pickled. Calls leave no state in the group's processes but
    what the function leaves there. A call that fails in one ends them all: the others may wait for it in a collective.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size = size
        context = FORKS if backend == "gloo" else _SPAWN
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, far = context.Pipe()
            process = context.Process(
                target=_serve, args=(far, rank, size, store, backend, list(sys.path)), daemon=True
            )
            process.start()
            far.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def __call__(self, function, *args, timeout: float = CALL) -> list:
        self.start(function, *args)
        answers: list = [None] * self.size
        missing = dict(zip(self._pipes, range(self.size), strict=True))
        end = time.monotonic() + timeout
        while missing and (ready := wait(missing, max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = missing.pop(pipe)
                answers[rank] = self._receive(rank)
                if answers[rank][0] == "error":
                    end = min(end, time.monotonic() + _GRACE)
        for rank in missing.values():
            answers[rank] = ("error", "no answer")
        failed = [f"rank {rank}: {what}" for rank, (kind, what) in enumerate(answers) if kind == "error"]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [what for _, what in answers]

    def start(self, function, *args) -> None:
        """Has each process call a function; `result` waits for what it gives in one of them."""
        for pipe in self._pipes:
            pipe.send((list(sys.path), function, args))

    def result(self, rank: int, timeout: float = CALL):
        if not self._pipes[rank].poll(timeout):
            raise AssertionError(f"rank {rank} gave no answer in {timeout} s")
        kind, what = self._receive(rank)
        if kind == "error":
            raise AssertionError(f"rank {rank}: {what}")
        return what

    def _receive(self, rank: int) -> tuple:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return "error", f"ended with status {self._processes[rank].exitcode}"

    def as_of_torchrun(self, function, *args) -> list:
        """Calls a function that makes a process group itself and ends it, as under torchrun, and ends this one."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        try:
            return self(_without_group, port, function, args)
        finally:
            self.close()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _without_group(port: int, function, args: tuple):
    import torch.distributed as dist

    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return function(*args)


def _serve(pipe, rank: int, size: int, store: str, backend: str, path: list[str]) -> None:
    """The life of a process: calls what it is sent, until the other end closes."""
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not needed, and some hosts do not survive it
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=COLLECTIVE)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout, device_id=device
    )
    hide_from_collector()
    while True:
        try:
            sys.path[:], function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # the function cannot be imported
            pipe.send(("error", traceback.format_exc()))
            continue
        speed_up_compilers()
        try:
            answer = ("result", function(*args))
        except Exception:
            answer = ("error", traceback.format_exc())
        collect_if_many()
        pipe.send(answer)
