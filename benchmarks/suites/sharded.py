"""Times a 4-bit checkpoint on several GPUs by transformers' DistributedConfig beside one GPU: loads and decode steps.
Called by `python -m benchmarks sharded`; calls load_checkpoint, transformers and benchmarks/harness.

    one GPU        load_checkpoint(path, device=...)
    EP all_reduce  tp_size and ep_size are the number of processes: attention and experts in parts
    EP all_to_all  the same with ep_implementation="all_to_all", which waits for sizes in each layer
    TP             tp_size alone: each process has a share of the features of all experts

The checkpoint is random, of a model's own sizes with fewer layers, in the page cache. Memory of a load is a process's
peak above the level before it: on a GPU the memory that torch had allocated, on the host anonymous memory (not mapped
files). A decode step is one token for each text after a context in a static cache, in a CUDA graph if nothing waits for
the host. The first layer with experts has to give one GPU's result for the same rows. For the logits of a prompt, only
the error is reported, because roundings in bfloat16 let the routers of random weights choose other experts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.decode import DecodeStep, prefill
from benchmarks.harness.models import CONFIGS, REAL, build
from benchmarks.harness.ranks import on_ranks, parse_with_ranks
from benchmarks.harness.report import aligned, comma_list, one_of, parser, positive, relative_error, save
from benchmarks.suites.load import Peak
from thunder_moe import load_checkpoint, quantize_, save_checkpoint
from thunder_moe.integrations.huggingface.experts import NVFP4Experts

STEM = "sharded"
ONE = "one GPU"
TOLERANCE = 1e-2  # of a layer in bfloat16, whose sums have another order
_CONTEXT, _PROMPT = 512, 64


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table and writes JSON.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: several processes compute something else than one.
        SystemExit: bad arguments.
    """
    result = parser("sharded", __doc__ or "", shapes=False, limits=False)
    result.add_argument(
        "--model", type=one_of([*REAL, *CONFIGS]), default="qwen3-30b-a3b", help="(default: %(default)s)"
    )
    result.add_argument("--layers", type=positive, default=8, help="(default: %(default)s)")
    result.add_argument("--batches", type=comma_list(positive), default=[1, 16, 64], help="(default: %(default)s)")
    args = parse_with_ranks(result, argv)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        save_checkpoint(quantize_(build(args.model, args.device, layers=args.layers)), checkpoint)  # type: ignore[arg-type]
        if args.device.type == "cuda":
            torch.cuda.empty_cache()
        rows = on_ranks(_rows, args, str(checkpoint))
        size = sum(file.stat().st_size for file in checkpoint.iterdir())
    more = dict(model=args.model, layers=args.layers, ranks=args.ranks, context=_CONTEXT, bytes=size)
    path = save(STEM, args.device, rows, args.output, **more)
    print(f"{args.model}, {args.layers} layers: {size / 1e9:.2f} GB, {args.ranks} ranks")
    print(_table(rows), path, sep="\n")
    return rows


def _rows(args: argparse.Namespace, device: torch.device, checkpoint: str) -> list[dict[str, Any]]:
    """Return the rows of all ways; runs in each process."""
    dist.barrier()
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    both: dict[str, Any] = dict(tp_size=args.ranks, ep_size=args.ranks)
    ways: dict[str, dict[str, Any]] = {
        ONE: dict(device=str(device)),
        "EP all_reduce": dict(distributed_config=DistributedConfig(**both, ep_implementation="all_reduce")),
        "EP all_to_all": dict(distributed_config=DistributedConfig(**both, ep_implementation="all_to_all")),
        "TP": dict(distributed_config=DistributedConfig(tp_size=args.ranks)),
    }
    rows: list[dict[str, Any]] = []
    expected: tuple[Tensor, Tensor] | None = None
    for way, options in ways.items():
        peak = Peak(device.type)
        begin = time.perf_counter()
        model: Any = load_checkpoint(checkpoint, dtype=torch.bfloat16, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        row: dict[str, Any] = {"way": way, "seconds": time.perf_counter() - begin, **peak.stop()}
        prompt = torch.arange(1, 1 + _PROMPT, device=device)[None] * 31 % model.config.vocab_size
        logits, layer = prefill(model, prompt, _PROMPT).float(), _layer(model, device)
        expected = (logits, layer) if expected is None else expected
        row["relative_error"] = relative_error(layer, expected[1])
        row["error_of_logits"] = relative_error(logits, expected[0])
        row["same_tokens"] = float((logits.argmax(-1) == expected[0].argmax(-1)).float().mean())
        row["step_seconds"] = {}
        for batch in args.batches:
            row["step_seconds"][str(batch)] = _step(model, batch, device, way, args)
        if dist.get_rank() == 0:
            print(_table([row]), flush=True)
        rows.append(row)
        if row["relative_error"] > TOLERANCE:
            raise RuntimeError(f"{way!r} is wrong: relative error {row['relative_error']:.2g}")
        del model, logits, layer
        if device.type == "cuda":
            torch.cuda.empty_cache()
        dist.barrier()
    return rows


@torch.no_grad()
def _layer(model: Any, device: torch.device) -> Tensor:
    """Return the result of the first layer with experts for random rows."""
    name = next(name for name, module in model.named_modules() if isinstance(module, NVFP4Experts))
    block = model.get_submodule(name.rpartition(".")[0])
    rows = torch.randn(1, 256, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    out = block(rows.to(device, torch.bfloat16))
    first: Tensor = out[0] if isinstance(out, tuple) else out
    return first.float()


@torch.no_grad()
def _step(model: Any, batch: int, device: torch.device, way: str, args: argparse.Namespace) -> float:
    """Median seconds of a decode step; with several processes of the slowest one."""
    step = DecodeStep(model, batch, _CONTEXT)

    def run() -> Any:
        return step(model)

    for _ in range(3):
        run()
        step.rewind()
    call: Callable[[], Any] = run
    if device.type == "cuda" and way != "EP all_to_all":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events
            run()
        call = graph.replay
    seconds = []
    for _ in range(min(args.rounds, 20)):
        step.rewind()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median = torch.tensor(statistics.median(seconds), device=device, dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = [["", *(row["way"] for row in rows)], ["load [s]", *(f"{row['seconds']:.1f}" for row in rows)]]
    names = {"device_peak": "GPU peak [GB]", "device": "GPU [GB]", "host_peak": "host peak [GB]"}
    columns += [[name, *(f"{row[key] / 1e9:.2f}" for row in rows)] for key, name in names.items() if key in rows[0]]
    columns += [["error of a layer", *(f"{row['relative_error']:.1e}" for row in rows)]]
    columns += [["of logits", *(f"{row['error_of_logits']:.1e}" for row in rows)]]
    columns += [["same tokens", *(f"{row['same_tokens']:.2f}" for row in rows)]]
    for batch in rows[0]["step_seconds"]:
        steps = [row["step_seconds"][batch] for row in rows]
        columns += [[f"step of {batch} [us]", *(f"{seconds * 1e6:.0f}" for seconds in steps)]]
        columns += [[f"tokens/s of {batch}", *(f"{int(batch) / seconds:.0f}" for seconds in steps)]]
    return aligned(list(zip(*columns, strict=True)))
