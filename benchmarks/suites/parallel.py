"""Times a Llama4MoE layer with NVFP4 experts on several GPUs, expert and tensor parallel, beside one GPU.
Called by `python -m benchmarks parallel`; calls thunder_moe.parallel and benchmarks/harness.

    one GPU              the whole layer with the tokens of all ranks
    EP exact             ExpertParallel(): exact sizes, the host waits for them; plain calls
    EP all_to_all        with a capacity: no synchronisation, in a CUDA graph
    EP all_gather        with a capacity, in a CUDA graph
    EP symmetric_memory  with a capacity, in a CUDA graph, on GPUs
    EP ..., 2 chunks     half of the tokens travel while the experts run the others
    TP                   TensorParallel(): each rank has the tokens of all, in a CUDA graph
    exchange ...         dispatch and combine of the same tokens alone, without experts

Every rank has `tokens` tokens, and all ranks together ranks * tokens. Scaling is the time of one GPU over ranks times
the time of the ranks: 1 is perfect. Before a round starts, all ranks wait for each other on their devices, after a
flush of L2; the slowest rank's time counts. Results are compared with the whole layer's before anything is timed.
On a CPU the ranks are processes with gloo, timed by plain calls.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import functools
import pathlib
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.harness.layers import TOLERANCE, build, hidden_states
from benchmarks.harness.ranks import on_ranks, parse_with_ranks
from benchmarks.harness.report import aligned, comma_list, parser, plot_lines, positive, relative_error, save
from benchmarks.harness.shapes import PARALLEL_SHAPES, SHAPES, MoEShape
from thunder_moe import Llama4MoE, quantize_
from thunder_moe.parallel import ExpertParallel, TensorParallel, expert_load
from thunder_moe.parallel.exchange import Exchange
from thunder_moe.parallel.styles import EXCHANGES

STEM = "parallel"
TOKENS = {"cpu": [1, 32, 256], "cuda": [1, 8, 64, 512, 1024, 2048, 4096, 8192]}
LEAST_TOKENS_OF_CHUNKS = 1024  # below, two halves take longer than the whole
_FLUSH_BYTES = 256 << 20
_ONE = "one GPU"


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a parallel layer computes something wrong.
        SystemExit: bad arguments.
    """
    result = parser("parallel", __doc__ or "", slow=False)
    result.add_argument(
        "--tokens", type=comma_list(positive), help=f"of each rank, comma-separated (default: {TOKENS})"
    )
    args = parse_with_ranks(result, argv)
    kind = args.device.type
    args.tokens = args.tokens or TOKENS[kind]
    args.shapes = args.shapes or ([SHAPES["small"]] if kind == "cpu" else list(PARALLEL_SHAPES))
    rows = on_ranks(_rows, args)
    path = save(STEM, args.device, rows, args.output, ranks=args.ranks, tolerance=TOLERANCE)
    print(_table(rows))
    print(path, _plot(path, rows, args.ranks), _plot_load(path, rows, args.ranks), sep="\n")
    return rows


def _rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of all shapes; runs in each process."""
    mesh, rows = init_device_mesh(device.type, (args.ranks,)), []
    for shape in args.shapes:
        layers = _Layers(shape, mesh, device)
        for tokens in args.tokens:
            rows.append(layers.measure(tokens, args))
            if mesh.get_local_rank() == 0:
                print(_table(rows[-1:]), flush=True)
        del layers
    return rows


class _Layers:
    """The whole layer of a shape and its parallel forms, which share no memory with it."""

    def __init__(self, shape: MoEShape, mesh: DeviceMesh, device: torch.device) -> None:
        self.shape, self.mesh, self.device = shape, mesh, device
        self.whole: Llama4MoE = quantize_(build(shape, device))
        parallel: Any = tuple(
            parallelize_module(copy.deepcopy(self.whole), mesh, style, src_data_rank=None)
            for style in (ExpertParallel(), TensorParallel())
        )
        self.expert, self.tensor = parallel

    @torch.no_grad()
    def measure(self, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        everybody = hidden_states(self.whole, ranks * tokens, self.device)
        own = everybody[:, rank * tokens : (rank + 1) * tokens].contiguous()
        wanted = self.whole(everybody)
        part = wanted[:, rank * tokens : (rank + 1) * tokens]
        left_out = {"all_to_all_8bit"}  # "all_to_all", without a recipe
        if self.device.type != "cuda":
            left_out.add("symmetric_memory")
        exchanges: dict[str, Exchange] = {
            "exact": EXCHANGES["all_to_all"](self.mesh, self.expert.exchange.experts),
            **{
                name: make(self.mesh, self.expert.exchange.experts, tokens)
                for name, make in EXCHANGES.items()
                if name not in left_out
            },
        }
        candidates: dict[str, tuple[Callable[[], Tensor], Tensor | None]] = {
            _ONE: (lambda: self.whole(everybody), wanted),
            "TP": (lambda: self.tensor(everybody), wanted),
        }
        for name, exchange in exchanges.items():
            candidates[f"EP {name}"] = (functools.partial(self._expert, exchange, 1, own), part)
            if name not in ("exact", "all_to_all") and tokens >= LEAST_TOKENS_OF_CHUNKS:
                halves = EXCHANGES[name](self.mesh, exchange.experts, -(-tokens // 2))
                candidates[f"EP {name}, 2 chunks"] = (functools.partial(self._expert, halves, 2, own), part)
            candidates[f"exchange {name}"] = (functools.partial(self._alone, exchange, own[0]), None)
        errors = {}
        for name, (run, expected) in candidates.items():
            if expected is None:
                run()
                continue
            errors[name] = _largest(relative_error(run(), expected), self.device)
            if errors[name] > TOLERANCE:
                raise RuntimeError(f"{name!r} is wrong: relative error {errors[name]:.2g} with {tokens} tokens")
        seconds = _measure({name: run for name, (run, _) in candidates.items()}, self.device, args)
        self._expert(exchanges["exact"], 1, own)  # the last step that it tells about
        (load,) = expert_load(self.expert, all_ranks=True).values()
        of_ranks = load.tokens[-1].unflatten(0, (ranks, -1)).sum(1)
        return {
            "shape": self.shape.name,
            "tokens": tokens,
            "seconds": seconds,
            "scaling": {name: seconds[_ONE] / (ranks * s) for name, s in seconds.items() if name in errors},
            "relative_error": errors,
            "rows_of_ranks": of_ranks.tolist(),
            "rows_of_experts": load.tokens[-1].tolist(),
        }

    def _expert(self, exchange: Exchange, chunks: int, x: Tensor) -> Tensor:
        self.expert.exchange, self.expert.chunks = exchange, chunks
        out: Tensor = self.expert(x)
        return out

    def _alone(self, exchange: Exchange, x: Tensor) -> Tensor:
        """Dispatch and combine, with the router's choice."""
        early = exchange.send(x)
        scores, ids, *_ = torch.ops.thunder_moe.moe_router(
            self.whole.router(x), top_k=self.whole.top_k, score="sigmoid", normalize=False, scores_dtype=torch.float32
        )
        sent = exchange.start(x, ids, scores, early)
        sent.receive_routing()
        return exchange.combine(sent.receive_rows(), sent)


def _measure(
    functions: dict[str, Callable[[], Tensor]], device: torch.device, args: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of each, interleaved in an order that all ranks have; of a round the slowest rank's."""
    runs: dict[str, Callable[[], Any]] = dict(functions)
    if device.type == "cuda":
        for name, function in functions.items():
            for _ in range(2):
                function()
            if not name.endswith("exact"):  # its sizes are the host's
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events
                    function()
                runs[name] = graph.replay
    clock = _Clock(device)
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    first = {name: clock(run) for name, run in runs.items()}
    longest = _largest(sum(first.values()), device)
    rounds = max(3, min(args.rounds, int(args.budget * len(runs) / longest)))
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            seconds[name].append(clock(runs[name]))
    every = torch.tensor(list(seconds.values()), device=device, dtype=torch.float64)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return {name: statistics.median(of_rounds) for name, of_rounds in zip(seconds, every.tolist(), strict=True)}


class _Clock:
    """Times a call after all ranks' devices have met."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.meeting = device, torch.zeros(1, device=device)
        self.flush = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            dist.barrier()
            begin = datetime.datetime.now()
            run()
            return (datetime.datetime.now() - begin).total_seconds()
        make: Any = torch.cuda.Event
        start, end = make(enable_timing=True), make(enable_timing=True)
        self.flush.zero_()
        dist.all_reduce(self.meeting)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def _largest(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values."""
    tensor = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = [["shape", *(row["shape"] for row in rows)], ["tokens of a rank", *(str(row["tokens"]) for row in rows)]]
    for key, header, text in (("seconds", "{} [us]", _microseconds), ("scaling", "scaling {}", "{:.2f}".format)):
        for name in dict.fromkeys(name for row in rows for name in row[key]):
            cells = [text(row[key][name]) if name in row[key] else "-" for row in rows]
            columns.append([header.format(name), *cells])
    return aligned(list(zip(*columns, strict=True)))


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f}"


def _plot(path: pathlib.Path, rows: Sequence[dict[str, Any]], ranks: int) -> pathlib.Path:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(row["shape"], {})
        for name, value in row["scaling"].items():
            if name != _ONE:
                lines.setdefault(name, []).append((row["tokens"], value))
    title = f"A layer with NVFP4 experts on {ranks} ranks: share of perfect scaling"
    return plot_lines(
        path.with_suffix(".png"), panels, x="tokens of a rank", y="one / (ranks * parallel)", reference=1.0,
        title=title, log=False,
    )  # fmt: skip


def _plot_load(path: pathlib.Path, rows: Sequence[dict[str, Any]], ranks: int) -> pathlib.Path:
    """Plot the rows of each expert with the most tokens of each shape, coloured by rank."""
    last = {row["shape"]: row for row in rows}
    figure, axes = plt.subplots(1, len(last), figsize=(4.6 * len(last), 3.2), squeeze=False, layout="constrained")
    for axis, row in zip(axes.flat, last.values(), strict=True):
        loads, share = row["rows_of_experts"], len(row["rows_of_experts"]) // ranks
        for rank in range(ranks):
            experts = range(rank * share, (rank + 1) * share)
            label = f"rank {rank}: {row['rows_of_ranks'][rank]} rows"
            axis.bar(experts, [loads[expert] for expert in experts], width=1.0, color=f"C{rank}", label=label)
        axis.set(title=f"{row['shape']}, {row['tokens']} tokens of a rank", xlabel="expert", ylabel="rows")
        axis.legend(fontsize=7)
    target = path.with_name(f"{path.stem}_load.png")
    figure.savefig(target, dpi=100)
    plt.close(figure)
    return target
