"""Splits the time of a Llama4MoE layer's call into kernels and the gap between them, eager and under torch.compile.
Called by `python -m benchmarks compile` and `make bench`; calls torch.profiler and benchmarks/harness.

    eager bf16                 the layer unchanged
    compile bf16               torch.compile(layer), frozen
    compile nvfp4              torch.compile(layer, backend="thunder_moe"), frozen: its expert GEMMs are rewritten
    quantize_ + compile nvfp4  torch.compile(quantize_(layer))

call     microseconds in the steady state, many calls in a row: device time where the host runs ahead, else host time
latency  wall time in microseconds of one call on an idle device, until it has finished
kernels  by torch.profiler. CUDA: everything that ran on the device, copies included. CPU: the self time of operators
         that do GEMMs, with the profiler's overhead; routing and inductor's own loops count as gap
gap      call - kernels

On CUDA mode="reduce-overhead", on a CPU the default mode; each graph is compiled for its number of tokens. All columns
are compared with eager execution before anything is timed; `rewrite_report` has to confirm "compile nvfp4".
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from benchmarks.harness.layers import TOLERANCE, Variant, build, check, hidden_states
from benchmarks.harness.report import aligned, comma_list, parser, positive, save, stacked_bars
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.timing import measure, measure_back_to_back
from thunder_moe import Llama4MoE, dequantize_, quantize_
from thunder_moe.progress import progress_bar

STEM = "compile"
COLUMNS = ("eager bf16", "compile bf16", "compile nvfp4", "quantize_ + compile nvfp4")
TOKENS = [1, 32]
DEFAULT_SHAPES = {"cpu": ["qwen3-30b-a3b/4", "small"], "cuda": ["llama4-scout", "qwen3-30b-a3b"]}
CPU_GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm", "thunder_moe::")
PROFILED_CALLS = 10


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON, one for each column of a shape and number of tokens.

    Raises:
        RuntimeError: a column computes something wrong, or was not compiled to what it says.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    if args.device.type == "cuda":  # it sees the kernels of a graph only if it was started before the capture
        _kernels(lambda: torch.ones(1, device=args.device), args.device)
    rows: list[dict[str, Any]] = []
    with progress_bar(total=len(args.shapes) * len(args.tokens), unit="row") as bar:
        for shape in args.shapes:
            layer = build(shape, args.device)
            quantized = quantize_(copy.deepcopy(layer))
            exact = {False: layer, True: dequantize_(copy.deepcopy(quantized))}
            for tokens in args.tokens:
                bar.set_description(f"{shape.name} {tokens}")
                found = _run(_variants(layer, quantized), exact, hidden_states(layer, tokens, args.device), args)
                rows += [{"shape": shape.name, "tokens": tokens, "column": name, **row} for name, row in found.items()]
                bar.update()
            del layer, quantized, exact
    path = save(STEM, args.device, rows, args.output, tolerance=TOLERANCE, calls_in_a_row=args.calls)
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['shape']}, tokens: {row['tokens']}", {})
        panel[row["column"]] = {"kernels": row["kernel_seconds"] * 1e6, "gap": row["gap_seconds"] * 1e6}
    title = f"One call of a Llama4MoE layer, {args.device.type}"
    image = stacked_bars(path, panels, axis_label="microseconds per call, steady state", title=title)
    print(_table(rows), path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("compile", __doc__ or "")
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help=f"(default: {TOKENS})")
    result.add_argument("--calls", type=positive, help="timed back to back (default: 100 on CUDA, 10 on a CPU)")
    args = result.parse_args(argv)
    args.calls = args.calls or (100 if args.device.type == "cuda" else 10)
    args.shapes = args.shapes or [SHAPES[name] for name in DEFAULT_SHAPES[args.device.type]]
    return args


def _variants(layer: Llama4MoE, quantized: Llama4MoE) -> dict[str, Variant]:
    """Return the columns, not compiled yet; they share their weights."""
    torch.compiler.reset()  # or the graphs of all rows add up to torch's recompile limit
    variants = (
        Variant.eager(layer, nvfp4=False),
        Variant.compile(layer, nvfp4=False, dynamic=False),
        Variant.compile(layer, nvfp4=True, backend="thunder_moe", dynamic=False),
        Variant.compile(quantized, nvfp4=True, dynamic=False),
    )
    return dict(zip(COLUMNS, variants, strict=True))


def _run(
    variants: dict[str, Variant], exact: dict[bool, Llama4MoE], x: Tensor, args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Compiles and checks every column, then times and profiles them."""
    with torch.no_grad():
        wanted = {nvfp4: layer(x) for nvfp4, layer in exact.items()}
    errors = {name: check(name, variant, "layer", (x,), wanted[variant.nvfp4]) for name, variant in variants.items()}
    calls = {name: functools.partial(variant, "layer", x) for name, variant in variants.items()}
    steady = measure_back_to_back(calls, device=args.device, calls=args.calls, rounds=args.rounds, budget=args.budget)
    finished = {name: functools.partial(_finish, call, x.device) for name, call in calls.items()}
    latency = measure(finished, rounds=args.rounds, min_rounds=min(3, args.rounds), budget=args.budget, slow=args.slow)
    result = {}
    for name, call in calls.items():
        seconds, count = _kernels(call, args.device)
        result[name] = {
            "call": asdict(steady[name]),
            "latency": asdict(latency[name]),
            "kernel_seconds": seconds,
            "kernels": count,
            "gap_seconds": steady[name].median - seconds,
            "relative_error": errors[name],
        }
    return result


def _finish(call: Callable[[], Any], device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _kernels(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Return (seconds in kernels, number of kernels) of one call, means over a few."""
    on_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU
    for _ in range(2):  # the first run pays for starting the profiler
        with profile(activities=[activity], acc_events=True) as profiler:
            for _ in range(PROFILED_CALLS):
                call()
            if on_cuda:
                torch.cuda.synchronize(device)
    counted = [event for event in profiler.events() if (_on_device(event) if on_cuda else _is_gemm(event))]
    if on_cuda:
        microseconds, count = sum(event.time_range.elapsed_us() for event in counted), len(counted)
    else:  # torch._grouped_mm calls aten::mm for each expert: one kernel
        microseconds, count = sum(event.self_cpu_time_total for event in counted), sum(map(_is_outermost, counted))
    if not count:
        raise RuntimeError("torch.profiler saw no kernel")
    return microseconds * 1e-6 / PROFILED_CALLS, count / PROFILED_CALLS


def _on_device(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation and not event.name.startswith("##")


def _is_gemm(event: FunctionEvent) -> bool:
    return event.name.startswith(CPU_GEMMS)


def _is_outermost(event: FunctionEvent) -> bool:
    parent = event.cpu_parent
    while parent is not None and not _is_gemm(parent):
        parent = parent.cpu_parent
    return parent is None


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [["shape", "tokens", "column", "call [us]", "latency [us]", "kernels [us]", "gap [us]", "kernels per call"]]
    for row in rows:
        seconds = (row["call"]["median"], row["latency"]["median"], row["kernel_seconds"], row["gap_seconds"])
        cells.append([
            row["shape"], str(row["tokens"]), row["column"], *(f"{value * 1e6:.1f}" for value in seconds),
            f"{row['kernels']:g}",
        ])  # fmt: skip
    return aligned(cells)
