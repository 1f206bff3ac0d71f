"""Executes the programs of many seeds in several processes.
Called by the runner; calls programs and execution. A module of its own: spawned processes cannot import ``__main__``.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import torch

from .execution import Outcome, check
from .programs import generate
from .runtime import tensors_on

__all__ = ["outcomes"]


def outcomes(
    seeds: range, compiler: str, disabled: frozenset[str], *, device: str, workers: int, minutes: float
) -> Iterator[tuple[int, Outcome]]:
    """The seeds and what came of them, as they end; none is started after so many minutes."""
    remaining, end = iter(seeds), time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (device,)) as pool:
        # Two for each worker: none of them waits, and few are left to do when the caller wants no more.
        first = itertools.islice(remaining, 2 * workers)
        pending = {pool.submit(_check, seed, compiler, disabled) for seed in first}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                    if time.monotonic() < end and (seed := next(remaining, None)) is not None:
                        pending.add(pool.submit(_check, seed, compiler, disabled))
        finally:
            pool.shutdown(cancel_futures=True)


def _start(device: str) -> None:
    torch.set_num_threads(1)
    tensors_on(device)


_done = itertools.count()


def _check(seed: int, compiler: str, disabled: frozenset[str]) -> tuple[int, Outcome]:
    outcome = check(generate(seed, disabled), compiler)
    if next(_done) % 25 == 0:  # what is there by now (modules, torch's caches) stays: no collection walks it
        gc.collect()
        gc.freeze()
    return seed, outcome
