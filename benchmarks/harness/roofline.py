"""Roofline of expert GEMMs: the device's measured limits, the least time of a GEMM (floor), shares of it, peers' files.
Called by suites/{gemm,roofline}.py; calls harness/{timing,report}.py.

The floor of a GEMM with packed weights is the larger of its memory time (weights of the experts that have rows, 4.5
bits each in NVFP4, 16-bit rows in and out) and the time of its floating-point operations. A candidate's share is floor
over median: 1 is optimal. bf16 is compared with the same floor. It cannot reach it, because its weights are 3.6 times
larger than in NVFP4. More than 1 is possible if weights stay in a cache, as on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.harness.report import plot_lines
from benchmarks.harness.timing import measure
from thunder_moe.formats.registry import FORMATS

__all__ = ["Limits", "missing", "panels", "plot_shares", "read_peers", "summary"]

# Bytes that are read, and the size of the square matrices that are multiplied, to measure the limits.
SIZES = {"cuda": (2**32, 8192), "cpu": (2**29, 2048)}
# Keys of a peers' file -> labels.
PEERS = {
    "bf16": "bf16",
    "marlin": "Marlin (vLLM)",
    "ogs": "matmul_ogs (triton_kernels)",
    "humming": "Humming",
    "ours": "thunder_moe",
}
Points = dict[str, list[tuple[float, float]]]


def read_bandwidth(device: torch.device, **how: Any) -> float:
    """Return the bytes per second at which a device reads a large int64 tensor, to sum it up; `how` as in `measure`."""
    data = torch.empty(SIZES[device.type][0] // 8, dtype=torch.int64, device=device).random_()
    (read,) = measure({"read": data.sum}, device=device, **how).values()
    return data.nbytes / read.median


@dataclass(frozen=True)
class Limits:
    """A device's limits, `read_bytes_per_second` and `flops_per_second` of a dense product; the bits of a weight."""

    read_bytes_per_second: float
    flops_per_second: float
    bits_per_weight: float = FORMATS["nvfp4"].bits_per_weight

    @staticmethod
    def measured(
        device: torch.device, *, bits_per_weight: float = FORMATS["nvfp4"].bits_per_weight, **how: Any
    ) -> Limits:
        """Times the sum of a large int64 tensor, and a bf16 product (on a CPU fp32 if that is faster for 256 rows).

        Args:
            device: to measure.
            bits_per_weight: of the format.
            how: arguments of `timing.measure`.
        """
        size = SIZES[device.type][1]
        dtype = torch.bfloat16
        if device.type == "cpu":  # without instructions for bf16, a product of 2048 rows takes a minute
            products = {str(each): _product(256, each, device) for each in (torch.bfloat16, torch.float32)}
            bf16, fp32 = (timing.median for timing in measure(products, device=device, **how).values())
            dtype = torch.bfloat16 if bf16 < fp32 else torch.float32
        (product,) = measure({"product": _product(size, dtype, device)}, device=device, **how).values()
        return Limits(read_bandwidth(device, **how), 2 * size**3 / product.median, bits_per_weight)

    def __str__(self) -> str:
        read, flops = self.read_bytes_per_second, self.flops_per_second
        return f"measured limits: read {read / 1e9:,.4g} GB/s, dense product {flops / 1e12:.3g} TFLOP/s"

    def floor_seconds(self, *, experts: int, n: int, k: int, rows: int, outputs: int) -> float:
        """Return the least time of a GEMM of (rows, k) with `experts` weights (n, k) that writes (rows, outputs)."""
        traffic = experts * n * k * self.bits_per_weight / 8 + rows * (k + outputs) * 2
        return max(traffic / self.read_bytes_per_second, 2 * rows * n * k / self.flops_per_second)


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    return functools.partial(torch.mm, *(torch.randn(size, size, dtype=dtype, device=device) for _ in range(2)))


def summary(rows: Sequence[dict[str, Any]], x: str) -> list[dict[str, Any]]:
    """Geometric means over the shapes, of "all" GEMMs together and then of each.

    Args:
        rows: each has "gemm", row[x], and "times_faster" and "floor_share" by candidate.
        x: the key to group by, "tokens" or "rows_per_expert".

    Returns:
        Rows of "gemm", x, "times_faster" and "floor_share". A candidate's mean is over the rows that have it.
    """
    chosen = {"all": rows, **{gemm: _where(rows, "gemm", gemm) for gemm in _values(rows, "gemm")}}
    return [{"gemm": gemm, **mean} for gemm, some in chosen.items() for mean in _means(some, x)]


def missing(peers: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line on each peer that some rows lack: its means are over fewer rows than the others'."""
    names = dict.fromkeys(name for row in peers for name in row["floor_share"])
    counts = {name: sum(name not in row["floor_share"] for row in peers) for name in names}
    return [f"peers: {name} is missing in {count} of {len(peers)} rows" for name, count in counts.items() if count]


def panels(rows: Sequence[dict[str, Any]], x: str, peers: Sequence[dict[str, Any]] = ()) -> dict[str, Points]:
    """Return panels for `report.plot_lines`, in percent of the floor: each shape, all shapes, and the peers ("tokens").

    Each line is a candidate's geometric mean over the rows of its panel.
    """
    result = {shape: _points(_where(rows, "shape", shape), x) for shape in _values(rows, "shape")}
    result["geometric mean"] = _points(rows, x)
    if peers:
        result["GEMM alone, geometric mean"] = _points(peers, "tokens")
        for gemm in _values(peers, "gemm"):
            result[f"GEMM alone, {gemm}, geometric mean"] = _points(_where(peers, "gemm", gemm), "tokens")
    return result


def plot_shares(path: pathlib.Path, lines: dict[str, Points], x: str, title: str) -> pathlib.Path:
    """Draws `panels` to a PNG, the floor as a dashed line, and returns its path."""
    return plot_lines(path, lines, x=x, y="share of the floor [%]", reference=100, title=title, log=False)


def read_peers(text: str) -> list[dict[str, Any]]:
    """Read an argparse argument: rows of a JSON file with other kernels' times, as `summary` and `panels` take them.

    The file is a list of {"shape", "gemm", "tokens", "floor", and any of PEERS}, times in microseconds.
    """
    try:
        rows = json.loads(pathlib.Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise argparse.ArgumentTypeError(f"{text}: got no rows, wanted a JSON list of them")
    try:
        return [_peers_row(row) for row in rows]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _peers_row(row: Any) -> dict[str, Any]:
    times = {key: row.get(key) for key in PEERS if row.get(key) is not None} if isinstance(row, dict) else {}
    if not times:
        raise ValueError(f"got {row!r:.200}, wanted an object with a time of one of {', '.join(PEERS)}")
    if not isinstance(row.get("shape"), str) or row.get("gemm") not in ("gate_up", "down"):
        raise ValueError(f"got {row!r:.200}, wanted a shape's name and the gemm gate_up or down")
    numbers = {"tokens": row.get("tokens"), "floor": row.get("floor"), **times}
    for key, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"{key}: got {value!r} in {row!r:.200}, wanted a number above 0")
    faster = {PEERS[key]: row["bf16"] / time for key, time in times.items() if "bf16" in times and key != "bf16"}
    share = {PEERS[key]: row["floor"] / time for key, time in times.items()}
    return {**{key: row[key] for key in ("shape", "gemm", "tokens")}, "times_faster": faster, "floor_share": share}


def _values(rows: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _where(rows: Sequence[dict[str, Any]], key: str, value: Any) -> list[dict[str, Any]]:
    return [row for row in rows if row[key] == value]


def _means(rows: Sequence[dict[str, Any]], x: str) -> list[dict[str, Any]]:
    return [
        {x: size, **{key: _geometric_means(_where(rows, x, size), key) for key in ("times_faster", "floor_share")}}
        for size in sorted(_values(rows, x))
    ]


def _geometric_means(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row[key])
    return {name: geometric_mean(row[key][name] for row in rows if name in row[key]) for name in names}


def _points(rows: Sequence[dict[str, Any]], x: str) -> Points:
    result: Points = {}
    for mean in _means(rows, x):
        for name, share in mean["floor_share"].items():
            result.setdefault(name, []).append((mean[x], 100 * share))
    return result
