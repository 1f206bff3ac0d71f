"""Measures the fastest configuration of the CUDA kernels per shape, and writes thunder_moe/kernels/cuda/configs.json.
Called by `python -m benchmarks tune` on a machine with a GPU; calls kernels.cuda and benchmarks/harness.

Every candidate's result is compared with bf16 torch._grouped_mm on the dequantized weights before it is timed. Its time
is the geometric mean over several random routings, because the number of tiles decides how evenly the blocks share
them. Entries of other devices, layouts and formats stay in the file.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.report import comma_list, one_of, parser, positive, relative_error, writable_file
from benchmarks.harness.shapes import CUDA_SHAPES, Load
from benchmarks.harness.timing import environment, measure
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import nvrtc
from thunder_moe.kernels.cuda.configs import FORMATS, LAYOUTS, MEASURED, GemmConfig, Point, candidates
from thunder_moe.kernels.select import quantize_to
from thunder_moe.progress import progress_bar

TOKENS = [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192]
TOLERANCE = 1e-2  # both sides round to bf16
WORTH_SHARING = 0.02  # least relative gain for which blocks share tiles: the gain varies with the number of tiles
GEMMS = ("gate_up", "gate_up_swiglu", "down")


def main(argv: Sequence[str]) -> None:
    """Times all candidates at all points and writes the fastest one of each point.

    Args:
        argv: the arguments behind the subcommand.

    Raises:
        RuntimeError: a candidate computes something wrong.
    """
    result = parser("tune", __doc__ or "")
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS)
    result.add_argument("--layouts", type=comma_list(one_of(LAYOUTS)), default=list(LAYOUTS), help=f"of: {LAYOUTS}")
    result.add_argument("--format", type=one_of(FORMATS), default="nvfp4", help=f"of: {FORMATS} (default: %(default)s)")
    result.add_argument("--routings", type=positive, default=2, help="random routings per point (default: %(default)s)")
    result.add_argument("--file", type=writable_file, default=MEASURED, help="file to write (default: %(default)s)")
    args = result.parse_args(argv)
    before = json.loads(args.file.read_text())["entries"] if args.file.exists() else []
    capability = torch.cuda.get_device_capability()
    entries: list[dict[str, Any]] = []
    for shape in args.shapes or CUDA_SHAPES:
        for which in GEMMS:
            swiglu = which == "gate_up_swiglu"
            experts, n, k = shape.gemm(which)
            generator = torch.Generator("cuda").manual_seed(0)
            weight = torch.randn(experts, n, k, dtype=torch.bfloat16, device="cuda", generator=generator).mul_(k**-0.5)
            linear = quantize_to(args.format, weight)
            weight = dequantize(linear)
            for layout in args.layouts:
                packed = linear.to_layout(layout)
                for tokens in args.tokens:
                    loads = [Load.routed(tokens, shape, torch.device("cuda"), seed) for seed in range(args.routings)]
                    point, config, seconds = _fastest(loads, weight, packed, swiglu, capability, args)
                    entry = dict(capability=list(capability), swiglu=swiglu, point=point, config=astuple(config))
                    entries.append(entry | dict(us=round(seconds * 1e6, 2)))
                    tqdm.write(f"{shape.name} {which} {layout} {tokens}: {astuple(config)} {seconds * 1e6:.1f} us")
    kept = [entry for entry in before if not _is_replaced(entry, capability, args)]
    lines = ",\n".join(map(json.dumps, [*kept, *entries]))
    args.file.write_text(f'{{"environment": {json.dumps(environment("cuda"))},\n"entries": [\n{lines}\n]}}\n')
    print(f"wrote {args.file}")


def _is_replaced(entry: dict[str, Any], capability: tuple[int, int], args: argparse.Namespace) -> bool:
    """True if an entry of the file has the device, a layout and the format that were measured."""
    config = GemmConfig(*entry["config"])
    of_device = tuple(entry["capability"]) == capability
    return of_device and config.layout in args.layouts and config.format == args.format


def _fastest(
    loads: list[Load],
    weight: Tensor,
    packed: PackedWeight,
    swiglu: bool,
    capability: tuple[int, int],
    args: argparse.Namespace,
) -> tuple[Point, GemmConfig, float]:
    """Return the point of the loads, the fastest configuration there, and its seconds."""
    experts, n, k = weight.shape
    rows = loads[0].rows
    live = min(rows, experts)
    point = Point(live, rows / live, n // 2 if swiglu else n, k)
    configs = candidates(point, swiglu, capability, packed.layout, packed.format.name)
    _compile(configs, swiglu, k)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    kernel = cuda.grouped_swiglu if swiglu else cuda.grouped_mm
    log_seconds = dict.fromkeys(configs, 0.0)
    for load in loads:
        wanted = torch._grouped_mm(x, weight.transpose(1, 2), load.offsets)
        if swiglu:
            gate, up = wanted.float().chunk(2, -1)
            wanted = torch.nn.functional.silu(gate) * up
        functions: dict[str, Callable[[], Any]] = {}
        for config in configs:
            call = functools.partial(kernel, x, packed, load.offsets, config=config)
            error = relative_error(call(), wanted)
            if error > TOLERANCE:
                raise RuntimeError(f"{config} is wrong: relative error {error:.2g} at {point}")
            functions[str(config)] = call
        timings = measure(
            functions,
            device="cuda",
            rounds=args.rounds,
            min_rounds=min(3, args.rounds),
            budget=args.budget,
            slow=args.slow,
        )
        for config in configs:
            log_seconds[config] += math.log(timings[str(config)].median) / len(loads)
    best = min(configs, key=log_seconds.__getitem__)
    alone = replace(best, stream_k=False)
    if log_seconds[alone] - log_seconds[best] < WORTH_SHARING:
        best = alone
    return point, best, math.exp(log_seconds[best])


def _compile(configs: list[Any], swiglu: bool, k: int) -> None:
    """Compiles the kernels in parallel into the cache, where the first calls find them."""
    capability = torch.cuda.get_device_capability()

    def one(config: Any) -> None:
        nvrtc.compile_files(config.sources, config.expression(torch.bfloat16, swiglu, k), capability, config.argument)

    with ThreadPoolExecutor() as pool:
        list(progress_bar(pool.map(one, configs), total=len(configs), desc="compiling", unit="kernel", leave=False))
