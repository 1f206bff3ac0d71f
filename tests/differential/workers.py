"""Executes the programs of many seeds in several processes, each with one thread, any of which may crash or hang.
Called by the runner; calls programs and execution. On a CPU the processes are forks of the caller, which has imported
and compiled everything once.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._inductor.config as inductor

from .execution import Outcome, check, script, shrink
from .programs import generate
from .runtime import tensors_on

__all__ = ["Finished", "Settings", "outcomes"]

GRACE = 15  # seconds that programs get to end when the time is over
LIFETIME = 250  # programs of one process


@dataclass(frozen=True)
class Settings:
    """What every process is told.

    Attributes:
        compiler: one of `execution.COMPILERS`.
        disabled: features that are left out.
        device: of the tensors.
        limit: seconds of a program, after which its process ends.
        shrinking: seconds to shrink a program that fails; 0: none.
    """

    compiler: str
    disabled: frozenset[str]
    device: str = "cpu"
    limit: float = 120
    shrinking: float = 0


@dataclass
class Finished:
    """The outcome of a seed's program, its features, CPU seconds (compilers it started included), and a script of it
    where it failed."""

    seed: int
    outcome: Outcome
    features: frozenset[str]
    seconds: float
    script: str = ""


def outcomes(seeds: range, settings: Settings, *, workers: int, seconds: float) -> Iterator[Finished]:
    """Yields what came of each seed as it ends; none is started after so many seconds."""
    start, remaining, threads = time.monotonic(), iter(seeds), torch.get_num_threads()
    torch.set_num_threads(1)
    inductor.compile_threads = 1  # no pool of processes for each of ours
    forked = torch.device(settings.device).type == "cpu"
    tensors_on(settings.device)
    if forked:
        check(generate(0, settings.disabled), settings.compiler)
        gc.collect()
        gc.freeze()  # no collection walks the modules, nor copies their memory
    context: Any = multiprocessing.get_context("fork" if forked else "spawn")
    busy = {worker.pipe: worker for worker in (_Worker(context, settings) for _ in range(workers))}
    try:
        for worker in list(busy.values()):
            if not worker.begin(remaining):
                busy.pop(worker.pipe).end()
        while busy:
            left = start + seconds + GRACE - time.monotonic()
            if left < 0:
                yield from [worker.failed for worker in busy.values() if worker.failed is not None]
                return
            for pipe in wait(list(busy), timeout=min(left, 1e6)):
                worker = busy[pipe]  # type: ignore[index]
                finished = worker.finished()
                if finished is not None:
                    yield finished
                if worker.running:
                    continue
                over = time.monotonic() > start + seconds
                if worker.programs >= LIFETIME or not worker.process.is_alive():
                    busy.pop(worker.pipe).end()
                    if over:
                        continue
                    worker = _Worker(context, settings)
                    busy[worker.pipe] = worker
                if over or not worker.begin(remaining):
                    busy.pop(worker.pipe).end()
    finally:
        for worker in busy.values():
            worker.end()
        gc.unfreeze()
        torch.set_num_threads(threads)


class _Worker:
    """A process that executes one program after the other."""

    def __init__(self, context: Any, settings: Settings) -> None:
        self.settings, self.programs = settings, 0
        self.running: int | None = None
        self.failed: Finished | None = None  # while the process shrinks it
        self._traceback = tempfile.NamedTemporaryFile("r", prefix="differential-")  # noqa: SIM115
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, settings, self._traceback.name, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def begin(self, seeds: Iterator[int]) -> bool:
        """Starts the program of the next seed, if there is one."""
        self.running = next(seeds, None)
        if self.running is not None:
            self.pipe.send(self.running)
        return self.running is not None

    def finished(self) -> Finished | None:
        """Returns the result of the running program, None if its shrunk form is still to come."""
        assert self.running is not None
        try:
            result: Finished = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            result = self.failed or self._crashed(self.running)
        if self.failed is None and result.outcome.failure and self.settings.shrinking and self.process.is_alive():
            self.failed = result
            return None
        self.running = self.failed = None
        self.programs += 1
        return result

    def _crashed(self, seed: int) -> Finished:
        program = generate(seed, self.settings.disabled)
        failure = f"the process ended with exit code {self.process.exitcode}\n{self._traceback.read()}"
        text = script(program, self.settings.compiler, self.settings.device)
        return Finished(seed, Outcome(failure=failure), frozenset(program.features), self.settings.limit, text)

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self._traceback.close()


def _serve(pipe: Connection, settings: Settings, traceback: str, parent: int) -> None:
    """Executes the programs of the seeds that come through a pipe, until its other end is closed."""
    torch.set_num_threads(1)
    inductor.compile_threads = 1
    tensors_on(settings.device)
    with open(traceback, "w") as file:
        faulthandler.enable(file)
        while os.getppid() == parent:
            if not pipe.poll(5):
                continue
            try:
                seed = pipe.recv()
            except EOFError:
                return
            start = _cpu_seconds()
            faulthandler.dump_traceback_later(settings.limit, exit=True, file=file)
            program = generate(seed, settings.disabled)
            outcome = check(program, settings.compiler)
            seconds = _cpu_seconds() - start
            source = script(program, settings.compiler, settings.device) if outcome.failure else ""
            pipe.send(Finished(seed, outcome, frozenset(program.features), seconds, source))
            if outcome.failure and settings.shrinking:
                faulthandler.dump_traceback_later(settings.limit + settings.shrinking, exit=True, file=file)
                smallest = shrink(program, settings.compiler, seconds=settings.shrinking)
                source = script(smallest, settings.compiler, settings.device)
                pipe.send(Finished(seed, outcome, frozenset(program.features), seconds, source))
            faulthandler.cancel_dump_traceback_later()
            if seed % 25 == 0:
                gc.collect()


def _cpu_seconds() -> float:
    return sum(os.times()[:4])
