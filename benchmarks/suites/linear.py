"""Times dense layers, torch's linear in bf16 beside the operator with a packed weight, and finds its configurations.
Called by `python -m benchmarks linear`; calls thunder_moe.nn.linear, kernels.cuda and benchmarks/harness.

The layers come from Qwen3-30B-A3B and Llama-4-Scout; projections that read the same rows are one layer. A time is the
time per call of many calls in a row, each with other weights (so many that no cache holds them), like the layers of a
model: on CUDA one CUDA graph. `--format` is the weights' format. `--vllm` adds vLLM's kernels, Marlin and Humming, in
vLLM's own layers. `--tune` times the promising configurations of the CUDA kernels, and writes the fastest of each
layer and number of rows to configs.json; each result is compared with bf16 before. Points at which a kernel without
configurations runs are left out, and a line says which.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
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
from thunder_moe.formats.registry import FORMATS, dequantize_expert
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels import select
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import direct, nvrtc
from thunder_moe.kernels.cuda.configs import GemmConfig, Point, dense_candidates
from thunder_moe.kernels.cuda.operands import target
from thunder_moe.kernels.specs import GemmSpec, WeightSpec
from thunder_moe.ops.scaled_mm import dense_operands, f16a_mxfp8weight_scaled_mm, f16a_nvfp4weight_scaled_mm
from thunder_moe.progress import progress_bar

STEM, BASELINE = "linear", "bf16"
VLLM = {"vLLM Marlin": "marlin", "vLLM Humming": "humming"}  # column -> --linear-backend
ROWS = [1, 8, 16, 32, 64, 128, 256, 512, 2048]
TOLERANCE = 1e-2  # both sides round to bf16
Call = Callable[[], Any]
OPERATORS: dict[str, Callable[..., Tensor]] = {
    "nvfp4": f16a_nvfp4weight_scaled_mm,
    "mxfp8": f16a_mxfp8weight_scaled_mm,
}
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
        ImportError: with --vllm, vLLM is not installed.
        ValueError: with --vllm, vLLM cannot run one of its kernels.
        RuntimeError: a kernel computes something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    if not args.vllm:
        return _run(args)
    from benchmarks.harness.vllm_layers import one_process

    with torch.no_grad(), one_process(args.device):
        return _run(args)


def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    entries: list[dict[str, Any]] = []
    more: dict[str, Any] = {"tolerance": TOLERANCE}
    for name in progress_bar(args.layers, unit="layer"):
        n, k = LAYERS[name]
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=args.device).mul_(k**-0.5)
        packed = select.lay_out(select.quantize_to(args.format, weight[None]), "auto")
        weights, packs = _copies(weight), [packed.with_tensors(copy) for copy in _copies(*packed.tensors())]
        exact = _exact(packed)
        layers = _vllm_layers(packed, more) if args.vllm else {}
        for count in args.rows:
            x = torch.randn(count, k, dtype=torch.bfloat16, device=args.device)
            expected = x.float() @ exact.t()
            if args.tune is not None:
                spec = WeightSpec(packed.layout, packed.format.name, per_row_scale=False)
                if fixed := _fixed_kernel(GemmSpec(count, 1, n, k, x.dtype, spec, target(x.device))):
                    tqdm.write(f"{name} {count}: nothing to tune, {fixed} runs")
                    continue
                entries.append(_tuned(x, expected, packs, args))
                tqdm.write(f"{name} {count}: {entries[-1]['config']} {entries[-1]['us']} us")
                continue
            operators: list[Call] = [functools.partial(_operator, x, pack) for pack in packs]
            _check(operators[0](), expected, "the operator")
            calls: dict[str, list[Call]] = {
                BASELINE: [functools.partial(F.linear, x, *one) for one in weights],
                args.format: operators,
            }
            for column, own in layers.items():
                calls[column] = [functools.partial(layer, x) for layer in own]
                _check(calls[column][0](), expected, column)
            timings = _interleaved(calls, args)
            rows.append({"layer": name, "rows": count, **timed(timings, BASELINE)})
        if args.tune is not None:  # after each layer, so that a run that is stopped has written what it has measured
            _write(args.tune, entries)
    if args.tune is not None:
        print(f"wrote {args.tune}")
        return entries
    stem = STEM if args.format == "nvfp4" else f"{STEM}_{args.format}"
    stem = f"{stem}_vllm" if args.vllm else stem
    path = save(stem, args.device, rows, args.output, **more)
    image = plot(
        path,
        rows,
        "rows",
        panel=lambda row: row["layer"],
        label=lambda name, row: name,
        baseline=BASELINE,
        title=f"Dense layers with {args.format.upper()} weights, {args.device.type}",
    )
    print(make_table(rows, ("layer", "rows"), BASELINE), path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("linear", __doc__ or "", shapes=False, slow=False)
    result.add_argument("--layers", type=comma_list(one_of(LAYERS)), help=f"of: {', '.join(LAYERS)}")
    result.add_argument("--rows", type=comma_list(positive), default=ROWS, help="default: %(default)s")
    result.add_argument(
        "--format", type=one_of(FORMATS), default="nvfp4", help=f"of: {', '.join(FORMATS)} (default: %(default)s)"
    )
    result.add_argument("--vllm", action="store_true", help="time vLLM's Marlin and Humming, too")
    result.add_argument("--tune", type=writable_file, metavar="FILE", help="file of configurations to write (CUDA)")
    args = result.parse_args(argv)
    args.layers = args.layers or list(LAYERS if args.device.type == "cuda" else CPU_LAYERS)
    if args.vllm and args.tune is not None:
        result.error("argument --tune: not with --vllm")
    if args.tune is not None and args.device.type != "cuda":
        result.error("argument --tune: got a CPU, wanted --device cuda")
    return args


def _copies(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the tensors and copies of them, together more than a cache holds."""
    count = COLD_BYTES // sum(tensor.nbytes for tensor in tensors) + 1
    return [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in range(count - 1))]


def _vllm_layers(packed: PackedWeight, more: dict[str, Any]) -> dict[str, list[Callable[[Tensor], Any]]]:
    """Return vLLM's layers of a weight and copies by column; `more` gets vLLM's version and the kernels' names."""
    from benchmarks.harness.vllm_layers import VERSION, VLLMLinear

    linear, copies = packed.to_layout("linear"), COLD_BYTES // packed.nbytes + 1
    layers = {column: [VLLMLinear(linear, backend) for _ in range(copies)] for column, backend in VLLM.items()}
    more.update(vllm=VERSION, kernels={column: own[0].kernel for column, own in layers.items()})
    return {column: list(own) for column, own in layers.items()}


def _operator(x: Tensor, pack: PackedWeight) -> Tensor:
    return OPERATORS[pack.format.name](x, *dense_operands(pack), layout=pack.layout)


_CHECKED = slice(0, 1024)  # features: a head in float32 is large


def _exact(packed: PackedWeight) -> Tensor:
    """Return the first rows of the weight in float32."""
    rows = packed.to_layout("linear").rows(_CHECKED)
    out = torch.empty(rows.shape[1:], device=rows.device)
    dequantize_expert(rows, 0, out)
    return out


def _check(out: Tensor, expected: Tensor, what: object) -> None:
    error = relative_error(out[:, _CHECKED], expected)
    if error > TOLERANCE:
        raise RuntimeError(f"{what} is wrong: relative error {error:.2g} at {tuple(out.shape)}")


def _interleaved(calls: dict[str, list[Call]], args: argparse.Namespace) -> dict[str, Timing]:
    """Return the seconds of a call in a row of calls, candidates in turn."""
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
    """Return a function that runs the calls in a row and returns the seconds of one."""
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


def _fixed_kernel(spec: GemmSpec) -> str | None:
    """Return the name of the kernel that runs a dense layer with any configuration; None without one."""
    return direct.explain_mm(spec).splitlines()[0] if direct.serves_mm(spec) else None


def _tuned(x: Tensor, expected: Tensor, packs: list[PackedWeight], args: argparse.Namespace) -> dict[str, Any]:
    """Return an entry of configs.json: the fastest configuration for these rows."""
    rows, (_, n, k), capability = x.shape[0], packs[0].shape, torch.cuda.get_device_capability()
    configs = dense_candidates(rows, n, k, capability, packs[0].layout, packs[0].format.name)

    def compile_one(config: GemmConfig) -> None:
        expression = config.expression(torch.bfloat16, False, k)
        nvrtc.compile_files(config.sources, expression, capability, config.argument)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, configs))

    def seconds(config: GemmConfig, rounds: int) -> float:
        # One graph at a time: the graphs of all candidates together would hold all their results.
        clock = _clock([functools.partial(cuda.mm, x, pack, config=config) for pack in packs], args.device)
        return median(clock() for _ in range(rounds))

    first: dict[GemmConfig, float] = {}
    for config in configs:
        _check(cuda.mm(x, packs[0], config=config), expected, config)
        first[config] = seconds(config, 3)
    finalists = sorted(configs, key=lambda config: first[config])[:5]
    again = {config: median(seconds(config, 5) for _ in range(3)) for config in finalists}
    best = min(again, key=lambda config: again[config])
    point = Point(1, float(rows), n, k)
    return dict(
        capability=list(capability), swiglu=False, point=point, config=astuple(best), us=round(again[best] * 1e6, 2)
    )


def _write(file: Path, entries: list[dict[str, Any]]) -> None:
    """Adds the entries to a file of configurations, and removes old ones of the same points, layouts and formats.

    Beside one that serves a single weight alone another one stays: groups may come to the same point.
    """

    def key(entry: dict[str, Any]) -> Any:
        config = GemmConfig(*entry["config"])
        point = tuple(map(float, entry["point"]))
        return tuple(entry["capability"]), entry["swiglu"], point, config.layout, config.format

    def for_groups(entry: dict[str, Any]) -> bool:
        return bool(entry["config"][0] != "tiled_cluster")

    new = {key(entry): for_groups(entry) for entry in entries}
    content = json.loads(file.read_text()) if file.exists() else {"entries": []}
    gone = [entry for entry in content["entries"] if key(entry) in new and (new[key(entry)] or not for_groups(entry))]
    kept = [entry for entry in content["entries"] if entry not in gone]
    lines = ",\n".join(map(json.dumps, [*kept, *entries]))
    first = json.dumps(content["environment"] if "environment" in content else environment("cuda"))
    file.write_text(f'{{"environment": {first},\n"entries": [\n{lines}\n]}}\n')
