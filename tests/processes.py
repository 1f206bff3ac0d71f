"""`Ranks`: processes of a gloo group that live as long as the tests of a file, so that each test of several processes
takes what its functions take. The fixture `ranks` of conftest.py gives those of a size.
Called by tests; calls multiprocessing's fork server, which imports torch once for all of them.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "thunder_moe.integrations.huggingface.checkpoint"])


class Ranks:
    """A group of processes on this machine.

    ``ranks(function, *args)`` calls ``function(*args)`` in each and returns the results by rank. The function is of a
    module that can be imported; arguments and results are pickled. Calls leave no state in the group's processes but
    what the function leaves there.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            pipe, far = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(far, rank, size, store, list(sys.path)), daemon=True)
            process.start()
            far.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def __call__(self, function, *args, timeout: float = 180.0) -> list:
        for pipe in self._pipes:
            pipe.send((list(sys.path), function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                self.close()
                failed = [answer for answer in answers if answer[0] == "error"]
                raise AssertionError(f"rank {rank} gave no answer in {timeout} s; others: {failed}")
            answers.append(pipe.recv())
        failed = [f"rank {rank}: {what}" for rank, (kind, what) in enumerate(answers) if kind == "error"]
        if failed:
            raise AssertionError("\n".join(failed))
        return [what for _, what in answers]

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


def _serve(pipe, rank: int, size: int, store: str, path: list[str]) -> None:
    """The life of a process: calls what it is sent, until the other end closes."""
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            sys.path[:], function, args = pipe.recv()
        except EOFError:
            return
        except Exception:  # the function cannot be imported
            pipe.send(("error", traceback.format_exc()))
            continue
        try:
            answer = ("result", function(*args))
        except Exception:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)
