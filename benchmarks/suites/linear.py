"""Times dense layers, torch's linear in bf16 beside the operator with an NVFP4 weight, and finds its configurations.
Called by `python -m benchmarks linear`; calls thunder_moe.nn.linear, kernels.cuda and benchmarks/harness.

The layers are those of Qwen3-30B-A3B and Llama-4-Scout, with the projections that read the same rows as one. A time is
that of a call in a row of calls, each with other weights (so many that no cache holds them), as the layers of a model
follow each other: on CUDA one CUDA graph. `--tune` times all configurations of the CUDA kernels that are worth it, and
writes the fastest of each layer and number of rows to configs.json; each result is compared with bf16 before.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.report import (
    comma_list,
    one_of,
    parser,
    plot,
    positive,
    relative_error,
    save,
    timed,
    writable_file,
)
from benchmarks.harness.report import table as make_table
from benchmarks.harness.timing import Timing, environment
from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize
from thunder_moe.kernels import select
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import nvrtc
from thunder_moe.kernels.cuda.configs import GemmConfig, Point, candidates
from thunder_moe.ops.scaled_mm import dense_operands, f16a_nvfp4weight_scaled_mm

STEM, BASELINE = "linear", "bf16"
ROWS = [1, 8, 16, 32, 64, 128, 512, 2048]
TOLERANCE = 1e-2  # both sides round to bf16
Call = Callable[[], Any]
COLD_BYTES = 150_000_000  # three times the L2 cache of an H200
# Model and layer: out_features, in_features.
LAYERS = {
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b o": (2048, 4096),
    "qwen3-30b-a3b head": (151936, 2048),
    "llama4-scout qkv": (7168, 5120),
    "llama4-scout o": (5120, 5120),
    "llama4-scout gate_up": (16384, 5120),
    "llama4-scout down": (5120, 8192),
    "llama4-scout head": (202048, 5120),
}
CPU_LAYERS = ("qwen3-30b-a3b qkv", "qwen3-30b-a3b o")


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Times the layers; prints the table, writes JSON and a plot, with --tune configurations.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a kernel computes something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    for name in tqdm(args.layers, unit="layer"):
        n, k = LAYERS[name]
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=args.device).mul_(k**-0.5)
        packed = select.lay_out(select.quantize(weight[None]), "auto")
        weights, packs = (
            _copies(weight),
            [replace(packed, qdata=a, scale=b, global_scale=c) for a, b, c in _copies(*packed.tensors())],
        )
        for count in args.rows:
            x = torch.randn(count, k, dtype=torch.bfloat16, device=args.device)
            if args.tune is not None:
                entries.append(_tuned(x, weight, packs, args))
                tqdm.write(f"{name} {count}: {entries[-1]['config']} {entries[-1]['us']} us")
                continue
            operators: list[Call] = [functools.partial(_operator, x, pack) for pack in packs]
            _check(operators[0](), x, packed)
            calls: dict[str, list[Call]] = {
                BASELINE: [functools.partial(F.linear, x, *one) for one in weights],
                "nvfp4": operators,
            }
            timings = _interleaved(calls, args)
            rows.append({"layer": name, "rows": count, **timed(timings, BASELINE)})
    if args.tune is not None:
        _write(args.tune, entries)
        print(f"wrote {args.tune}")
        return entries
    path = save(STEM, args.device, rows, args.output, tolerance=TOLERANCE)
    image = plot(
        path,
        rows,
        "rows",
        panel=lambda row: row["layer"],
        label=lambda name, row: name,
        baseline=BASELINE,
        title=f"Dense layers with NVFP4 weights, {args.device.type}",
    )
    print(make_table(rows, ("layer", "rows"), BASELINE), path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("linear", __doc__ or "", shapes=False)
    result.add_argument("--layers", type=comma_list(one_of(LAYERS)), help=f"of: {', '.join(LAYERS)}")
    result.add_argument("--rows", type=comma_list(positive), default=ROWS, help="default: %(default)s")
    result.add_argument("--tune", type=writable_file, metavar="FILE", help="file of configurations to write (CUDA)")
    args = result.parse_args(argv)
    args.layers = args.layers or list(LAYERS if args.device.type == "cuda" else CPU_LAYERS)
    if args.tune is not None and args.device.type != "cuda":
        result.error("argument --tune: got a CPU, wanted --device cuda")
    return args


def _copies(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """The tensors and copies of them, together more than a cache holds."""
    count = COLD_BYTES // sum(tensor.nbytes for tensor in tensors) + 1
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(count - 1))]


def _operator(x: Tensor, pack: NVFP4Weight) -> Tensor:
    return f16a_nvfp4weight_scaled_mm(x, *dense_operands(pack), layout=pack.layout)


def _check(out: Tensor, x: Tensor, packed: NVFP4Weight) -> None:
    rows = slice(0, 1024)  # a head in float32 is large
    linear = packed.to_layout("linear")
    part = NVFP4Weight(linear.qdata[:, rows], linear.scale[:, rows], linear.row_global_scale()[:, rows])
    error = relative_error(out[:, rows], x.float() @ dequantize(part, torch.float32)[0].t())
    if error > TOLERANCE:
        raise RuntimeError(f"the operator is wrong: relative error {error:.2g} at {packed.shape}, {x.shape[0]} rows")


def _interleaved(calls: dict[str, list[Call]], args: argparse.Namespace) -> dict[str, Timing]:
    """Seconds of a call in a row of calls, candidates in turn."""
    clocks = {name: _clock(each, args.device) for name, each in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    start = time.perf_counter()
    while len(next(iter(seconds.values()))) < args.rounds and time.perf_counter() - start < args.budget * len(clocks):
        for name, clock in clocks.items():
            seconds[name].append(clock())
    timings = {}
    for name, each in seconds.items():
        first, middle, third = quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        timings[name] = Timing(middle, (first, third), len(each), "a row of calls with other weights")
    return timings


def _clock(calls: list[Call], device: torch.device) -> Callable[[], float]:
    """A function that runs the calls in a row and returns the seconds of one."""
    calls = calls * (-(-4 // len(calls)))
    for call in calls[:2]:
        call()
    if device.type != "cuda":

        def host() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)

        return host
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3 / len(calls)

    return replay


def _tuned(x: Tensor, weight: Tensor, packs: list[NVFP4Weight], args: argparse.Namespace) -> dict[str, Any]:
    """An entry of configs.json: the fastest configuration for these rows."""
    rows, (n, k), capability = x.shape[0], weight.shape, torch.cuda.get_device_capability()
    point = Point(1, float(rows), n, k)
    configs = candidates(point, False, capability, packs[0].layout)

    def compile_one(config: GemmConfig) -> None:
        expression = config.expression(torch.bfloat16, False, k)
        nvrtc.compile_files(config.sources, expression, capability, config.argument)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, configs))
    calls: dict[GemmConfig, list[Call]] = {
        config: [functools.partial(cuda.mm, x, pack, config=config) for pack in packs] for config in configs
    }
    for each in calls.values():
        _check(each[0](), x, packs[0])
    best: tuple[float, GemmConfig] | None = None
    for config, each in calls.items():  # one after the other: graphs of all at once would hold all their results
        clock = _clock(each, args.device)
        seconds = median(clock() for _ in range(min(args.rounds, 7)))
        if best is None or seconds < best[0]:
            best = seconds, config
    assert best is not None
    return dict(
        capability=list(capability), swiglu=False, point=point, config=astuple(best[1]), us=round(best[0] * 1e6, 2)
    )


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    """Adds the entries to a file of configurations; those of the same points and layouts go."""

    def key(entry: dict[str, Any]) -> Any:
        config = GemmConfig(*entry["config"])
        return tuple(entry["capability"]), entry["swiglu"], tuple(map(float, entry["point"])), config.layout

    new = {key(entry) for entry in entries}
    content = json.loads(file.read_text()) if file.exists() else {"entries": []}
    kept = [entry for entry in content["entries"] if key(entry) not in new]
    lines = ",\n".join(map(json.dumps, [*kept, *entries]))
    first = json.dumps(content["environment"] if "environment" in content else environment("cuda"))
    file.write_text(f'{{"environment": {first},\n"entries": [\n{lines}\n]}}\n')
