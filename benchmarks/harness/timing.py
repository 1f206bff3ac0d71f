"""The timing protocol of the benchmarks (`measure`, `measure_back_to_back`) and a description of the machine.
Called by benchmarks/suites and harness/roofline.py; calls torch.

The candidates of a comparison are interleaved: a round calls each of them once, in a newly shuffled order, so that a
machine that slows down slows all of them down. The median over the rounds is reported.

CPU:   warm-up -> rounds, each call timed by time.perf_counter; caches are as the previous candidate left them.
CUDA:  warm-up -> CUDA graph -> rounds, each replay between two events after a flush of the L2 cache. A candidate that
       cannot be captured is timed as plain calls, and its `Timing.method` says so; a candidate that replays CUDA graphs
       of its own (torch.compile with mode="reduce-overhead") is timed as plain calls without a capture. The host
       prepares such a call while the device still flushes, so that only launch overhead beyond the flush counts (H200:
       about 60 us).

`measure_back_to_back` times many calls in a row, caches are as the previous call left them: no flush, no capture.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import pathlib
import platform
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch

import thunder_moe

__all__ = ["Timing", "describe", "environment", "machine_name", "measure", "measure_back_to_back"]

# As triton.testing.do_bench: several times the largest L2 cache (H200: 50 MB).
_FLUSH_BYTES = 2**28


@dataclass(frozen=True)
class Timing:
    """The time of one candidate.

    Attributes:
        median: seconds per call.
        quartiles: the first and third, seconds.
        rounds: calls that were timed.
        method: "perf_counter", "cuda graph", "cuda events (not captured: ...)", "own cuda graph", "one call (slow)",
            or "... calls back to back".
    """

    median: float
    quartiles: tuple[float, float]
    rounds: int
    method: str


def measure(
    functions: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    warmup: int = 3,
    rounds: int = 50,
    min_rounds: int = 3,
    budget: float = 2.0,
    slow: float = 2.5,
    own_graphs: Collection[str] = (),
    before: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Times candidates, interleaved.

    Args:
        functions: name -> the call to time, without arguments. Its output is dropped.
        device: where they run.
        warmup: untimed calls of each candidate, fewer where they exceed the budget.
        rounds: most timed calls of each candidate.
        min_rounds: least timed calls of each candidate, regardless of the budget.
        budget: seconds after which a candidate is not called any more; the others go on.
        slow: seconds; a candidate whose first warm-up call takes longer is not timed again, that call is its Timing.
        own_graphs: names of candidates that replay CUDA graphs of their own: timed as plain calls.
        before: called before each call, outside of its time and of CUDA graphs.

    Returns:
        name -> Timing, in the order of `functions`.

    Raises:
        ValueError: there is nothing to time, or a number is out of range.
    """
    if not functions:
        raise ValueError("functions: got none, wanted at least one candidate")
    if not 1 <= min_rounds <= rounds:
        raise ValueError(f"min_rounds: got {min_rounds}, wanted 1 to rounds = {rounds}")
    if warmup < 1 or budget <= 0 or slow <= 0:
        raise ValueError(f"warmup, budget, slow: got {warmup}, {budget}, {slow}, wanted at least 1 and more than 0")
    device = torch.device(device)
    before = before or _nothing
    first_calls = {
        name: _warm_up(function, device, warmup, budget, slow, before) for name, function in functions.items()
    }
    clocks = {
        name: _clock(function, device, name in own_graphs, before)
        for name, function in functions.items()
        if first_calls[name] <= slow
    }
    seconds = _run_rounds({name: clock for name, (clock, _) in clocks.items()}, rounds, min_rounds, budget)
    timings = {name: _summary(seconds[name], method) for name, (_, method) in clocks.items()}
    return {name: timings.get(name) or _summary([first_calls[name]], "one call (slow)") for name in functions}


def measure_back_to_back(
    functions: Mapping[str, Callable[[], Any]],
    *,
    device: torch.device | str = "cpu",
    calls: int = 100,
    rounds: int = 20,
    budget: float = 2.0,
) -> dict[str, Timing]:
    """Times candidates in the steady state: each timing of a round is the mean of many calls of one candidate in a row.

    Args:
        functions: name -> the call to time, without arguments. Its output is dropped.
        device: where they run; on CUDA the calls lie between two events, without a synchronisation between them.
        calls: timed calls in a row, after a tenth as many untimed ones.
        rounds: most timings of each candidate, at least 3.
        budget: seconds after which a candidate is not called any more; the others go on.

    Returns:
        name -> Timing, seconds per call.
    """
    device = torch.device(device)
    clocks = {name: functools.partial(_seconds_in_a_row, fn, device, calls) for name, fn in functions.items()}
    for function in functions.values():
        _warm_up(function, device, 3, budget, budget)
    seconds = _run_rounds(clocks, max(3, rounds), 3, budget)
    return {name: _summary(seconds[name], f"{calls} calls back to back") for name in functions}


def _seconds_in_a_row(function: Callable[[], Any], device: torch.device, calls: int) -> float:
    for _ in range(-(-calls // 10)):
        function()
    if device.type != "cuda":
        start_seconds = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start_seconds) / calls
    start, end = _events()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls


def _run_rounds(
    clocks: Mapping[str, Callable[[], float]], rounds: int, min_rounds: int, budget: float
) -> dict[str, list[float]]:
    """Return the seconds of each call. A clock runs its candidate once; the budget is wall time, flushes included."""
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    spent = dict.fromkeys(clocks, 0.0)
    order = random.Random(0)
    for done in range(rounds):
        running = [name for name in clocks if done < min_rounds or spent[name] < budget]
        if not running:
            break
        for name in order.sample(running, len(running)):
            start = time.perf_counter()
            seconds[name].append(clocks[name]())
            spent[name] += time.perf_counter() - start
    return seconds


def _summary(seconds: list[float], method: str) -> Timing:
    if len(seconds) == 1:
        return Timing(seconds[0], (seconds[0], seconds[0]), 1, method)
    first, median, third = quantiles(seconds, n=4, method="inclusive")
    return Timing(median, (first, third), len(seconds), method)


def _nothing() -> None:
    pass


def _warm_up(
    function: Callable[[], Any],
    device: torch.device,
    calls: int,
    budget: float,
    slow: float,
    before: Callable[[], None] = _nothing,
) -> float:
    """Makes up to `calls` calls within the budget, only one if it is slow; returns the seconds of the first."""
    seconds: list[float] = []
    while len(seconds) < calls and sum(seconds) < budget and sum(seconds) <= slow:
        before()
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds[0]


def _clock(
    function: Callable[[], Any], device: torch.device, own_graph: bool, before: Callable[[], None] = _nothing
) -> tuple[Callable[[], float], str]:
    """Return a function that runs a candidate once and returns the seconds, and the name of the method."""
    if device.type != "cuda":
        return functools.partial(_cpu_seconds, function, before), "perf_counter"
    if own_graph:
        return functools.partial(_cuda_seconds, function, before), "own cuda graph"
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except Exception as error:  # any operation that a capture forbids: the method names it
        torch.cuda.synchronize()
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return functools.partial(_cuda_seconds, function, before), f"cuda events (not captured: {reason[:120]})"
    return functools.partial(_cuda_seconds, graph.replay, before), "cuda graph"


def _cpu_seconds(function: Callable[[], Any], before: Callable[[], None] = _nothing) -> float:
    before()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_seconds(run: Callable[[], Any], before: Callable[[], None] = _nothing) -> float:
    start, end = _events()
    before()
    _flush_buffer().zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    make: Callable[..., torch.cuda.Event] = torch.cuda.Event  # its constructor has no annotations
    return make(enable_timing=True), make(enable_timing=True)


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what a result depends on: machine and its load, versions, commit, command line, date."""
    device = torch.device(device)
    machine: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cpu_kind": _cpu_kind(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        machine["load_average"] = round(os.getloadavg()[0], 2)
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    versions = {
        "torch": torch.__version__,
        "thunder": _version("lightning-thunder"),
        "transformers": _version("transformers"),
        "thunder_moe": thunder_moe.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    return {
        "machine": machine,
        "device": str(device),
        "system": platform.platform(terse=True),
        "versions": versions,
        "commit": _commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def machine_name(device: torch.device) -> str:
    """Return the machine in the name of a report: "cuda", or of a CPU who made it and what multiplies bf16 there.

    As "cpu_intel_amx", "cpu_intel_avx512_bf16", "cpu_amd_avx512_bf16": reports of one kind say nothing about another.
    """
    if device.type != "cpu":
        return device.type
    vendor = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(_cpuinfo("vendor_id"))
    kind = _cpu_kind().lower().replace("-", "_").replace(" ", "_")
    return "_".join(filter(None, ("cpu", vendor, kind)))


def describe(device: torch.device) -> str:
    """Return the machine and the version of torch, in a line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_cpu_model()} with {_cpu_kind()}"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}"


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpu_kind() -> str:
    """Name the unit that multiplies bf16: "AMX", "AVX512-BF16", else the widest vectors, or the architecture."""
    kinds = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2", "bf16": "Arm BF16"}
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return next((kind for flag, kind in kinds.items() if flag in flags), platform.machine())


@functools.cache
def _cpuinfo(key: str) -> str:
    """Return the first value of a key that Linux tells; empty where there is none."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == key), "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this checkout, followed by "+changes" when files differ; None outside of git."""
    root = pathlib.Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        # New results do not change the code that was measured.
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--", ":/", ":/!benchmarks/results"],
            cwd=root, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if changes.stdout.strip() else "")
