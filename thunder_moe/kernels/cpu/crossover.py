"""Limits of rows per expert between the CPU backend's kernels: measured once per kind of machine, kept on disk.
Called by kernels/cpu/backend.py, which passes how to run a kernel; calls kernels/code_cache.py for the file.

The best kernel depends on the CPU: AVX512-BF16 multiplies few rows fast, a matrix unit (AMX) many. So the first product
of a dtype times each kernel on a small weight with one thread, kernels in turn, and takes the limits that cost least
over all numbers of rows. `limits_are(...)` sets limits by hand.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields

import torch

from thunder_moe.kernels import code_cache
from thunder_moe.kernels.forks import ForkLock

NEVER = 1 << 40
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
GEMVS = ("dots", "fma")
SLICES = ("slice", "slice_fp32")
FEW_ROWS = 32  # far beyond the crossover of any CPU
ROUNDS = 5
# Panels are taken where they tie with slices, because they gain more from a second thread: Zen 5, 256 rows of
# (1536, 2048), one thread 28.8 and 28.9 ms, two threads 14.3 and 16.5 ms.
TIE = 1.02

_LOGGER = logging.getLogger("thunder_moe")
_lock = ForkLock()
_known: dict[str, Limits] = {}
_forced: Limits | None = None


@dataclass(frozen=True)
class Limits:
    """Rows per expert at which kernels take over from each other; if several limits hold, the first of them counts.

    Attributes:
        gemv: an expert with at most that many rows takes a gemv kernel.
        fma: True for the gemv kernel with fp32 multiply-adds, False for the one with bf16 dot products.
        tiles: an expert with at most that many rows takes tiles of a matrix unit.
        panel: an expert with at least that many rows takes the panel kernel.
        mm: an expert with at least that many rows is dequantized and multiplied by torch.mm.
        fp32_slices: True if the slice kernel, which serves all other experts, computes in fp32 for bf16 rows, too;
            False for bf16 dot products.

    Raises:
        ValueError: a limit that is not a valid number of rows, with which no kernel would serve some rows.
    """

    gemv: int = 0
    panel: int = NEVER
    mm: int = NEVER
    fma: bool = False
    tiles: int = 0
    fp32_slices: bool = False

    def __post_init__(self) -> None:
        for name, least in (("gemv", 0), ("tiles", 0), ("panel", 1), ("mm", 1)):
            rows = getattr(self, name)
            if not least <= rows <= NEVER:
                raise ValueError(f"{name}: got {rows}, wanted rows from {least} to {NEVER}")


@contextlib.contextmanager
def limits_are(limits: Limits) -> Iterator[None]:
    """Set the limits of all dtypes and threads while the context is open, instead of the measured ones.

    A kernel that the CPU or the dtype lacks is never taken.
    """
    global _forced
    before, _forced = _forced, limits
    try:
        yield
    finally:
        _forced = before


def forced_limits() -> Limits | None:
    """Return the limits that an open `limits_are` sets."""
    return _forced


def limits_for(
    dtype: torch.dtype,
    kernels: Mapping[str, Limits],
    seconds: Callable[[torch.dtype, int, Limits], float],
    file: pathlib.Path,
    machine: str,
    format: str = "",
) -> Limits:
    """Return the limits for a dtype: already used in this process, else read from the file, else measured.

    Args:
        dtype: the dtype of the activations.
        kernels: name -> limits with which all rows take that kernel; exactly one of SLICES is among them.
        seconds: dtype, rows, limits -> the time of one product; math.inf where the kernel fails.
        file: the file that keeps limits, by machine and dtype.
        machine: the CPU's name.
        format: the weights' number format; "" for NVFP4.
    """
    # oneDNN's kernels may be absent, by a flag or an environment variable.
    name = f"{dtype}{' ' + format if format else ''}: {', '.join(sorted(kernels))}"
    limits = _known.get(name)
    if limits is None:
        with _lock:
            limits = _known.get(name)
            if limits is None:
                limits = _known[name] = _read_or_measure(name, dtype, kernels, seconds, file, machine)
    return limits


def _read_or_measure(
    name: str,
    dtype: torch.dtype,
    kernels: Mapping[str, Limits],
    seconds: Callable[[torch.dtype, int, Limits], float],
    file: pathlib.Path,
    machine: str,
) -> Limits:
    if len(kernels) == 1:
        return next(iter(kernels.values()))
    contents = _read(file)
    numbers = contents.get(machine, {}).get(name, [])
    if len(numbers) == len(fields(Limits)):
        gemv, panel, mm, fma, tiles, fp32_slices = numbers
        with contextlib.suppress(ValueError):  # of a file that was damaged
            return Limits(gemv, panel, mm, bool(fma), tiles, bool(fp32_slices))
    limits = best_limits(measure(dtype, kernels, seconds))
    _LOGGER.info("CPU kernels for %s on %s: %s", name, machine, limits)
    contents.setdefault(machine, {})[name] = list(astuple(limits))
    _write(file, contents)
    return limits


def measure(
    dtype: torch.dtype, kernels: Mapping[str, Limits], seconds: Callable[[torch.dtype, int, Limits], float]
) -> dict[int, dict[str, float]]:
    """Return rows -> kernel -> the least seconds of a few rounds; the kernels take turns in each round."""
    times: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        running = {
            name: limits for name, limits in kernels.items() if rows <= FEW_ROWS or not (limits.gemv or limits.tiles)
        }
        best = dict.fromkeys(running, math.inf)
        for _ in range(1 + ROUNDS):  # the first round also makes oneDNN's kernels
            for name, limits in running.items():
                best[name] = min(best[name], seconds(dtype, rows, limits))
        times[rows] = best
    return times


def best_limits(times: Mapping[int, Mapping[str, float]]) -> Limits:
    """Return the limits whose kernels take the least time, as the geometric mean over the measured numbers of rows."""
    rows = sorted(times)
    names = set().union(*times.values())
    many = next((name for name in ("panel", "mm") if name in names), None)
    # sums[kernel][i]: cost of the first i numbers of rows
    sums = {name: [0.0] for name in names}
    for name, row in itertools.product(names, rows):
        tie = TIE if many and name in SLICES else 1
        sums[name].append(sums[name][-1] + math.log(times[row].get(name, math.inf) * tie))
    none = [0.0] + [math.inf] * len(rows)
    most, best = range(len(rows) + 1), (math.inf, Limits())
    few, slices = [name for name in GEMVS if name in names] or [""], [name for name in SLICES if name in names]
    # The first `a` numbers of rows take a gemv kernel, the next up to `b` tiles, from `c` on `many`, all others slices.
    for gemv, wide, a, b, c in itertools.product(few, slices, most, most, most):
        if not a <= b <= c:
            continue
        costs = sums.get(gemv, none), sums.get("tiles", none), sums[wide], sums.get(many or "", none)
        ends = (0, a, b, c, len(rows))
        cost = sum(
            of[end] - of[start] for of, start, end in zip(costs, ends[:-1], ends[1:], strict=True) if end > start
        )
        if cost < best[0]:
            start = _between(rows, rows[c] if c < len(rows) else NEVER)
            panel, mm = (start, NEVER) if many == "panel" else (NEVER, start)
            tiles = rows[b - 1] if b > a else 0
            best = cost, Limits(rows[a - 1] if a else 0, panel, mm, gemv == "fma" and a > 0, tiles, wide == SLICES[1])
    return best[1]


def _between(rows: list[int], start: int) -> int:
    """Return the number of rows half way between the one measured before `start` and `start`."""
    if start == NEVER:
        return NEVER
    before = max((row for row in rows if row < start), default=start - 1)
    return (before + start + 1) // 2


def _read(file: pathlib.Path) -> dict[str, dict[str, list[int]]]:
    """Return machine -> dtype -> numbers, without the entries of a file that was damaged or is not this user's."""
    try:
        contents = json.loads(code_cache.read_own(file))
    except OSError:
        return {}
    except (ValueError, RecursionError) as error:  # brackets in brackets
        _LOGGER.warning("thunder_moe: %s is not used, CPU kernels are timed again: %s", file, error)
        return {}
    machines = contents.items() if isinstance(contents, dict) else ()
    return {
        machine: {name: numbers for name, numbers in dtypes.items() if _are_numbers(numbers)}
        for machine, dtypes in machines
        if isinstance(dtypes, dict)
    }


def _are_numbers(numbers: object) -> bool:
    return isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)


def _write(file: pathlib.Path, contents: Mapping[str, object]) -> None:
    """Write the file; a directory that cannot be written is not an error."""
    with contextlib.suppress(OSError):
        code_cache.replace(file, json.dumps(contents, indent=1).encode())
