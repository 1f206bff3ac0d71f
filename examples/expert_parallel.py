"""Spreads the experts of a Mixture-of-Experts layer over processes and compares it with one process.
Called by users: `torchrun --nproc-per-node 2 examples/expert_parallel.py`, on GPUs (nccl) if there are enough, else on
CPUs (gloo); calls thunder_moe.parallel.

one layer on every rank -> parallelize_module(layer, mesh, ExpertParallel() or TensorParallel()) -> its output and, in
16 bits, its gradients, compared with the whole layer's. A table has the errors, the times and each rank's memory.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_
from thunder_moe.parallel import ExpertParallel, TensorParallel, expert_load

# Relative Frobenius error of bf16 results that were added in another order.
TOLERANCE = 1e-2


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the comparison; rank 0 prints the table.

    Args:
        argv: command-line arguments, those of the process when None.

    Returns:
        The rows of the table.

    Raises:
        RuntimeError: a parallel layer computes something else than the whole one.
        SystemExit: bad arguments, or not started by torchrun.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("intermediate", 256), ("experts", 16), ("top-k", 2), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("no RANK in the environment: start with torchrun --nproc-per-node 2 examples/expert_parallel.py")
    mesh, device = start()
    rows = [row for quantized in (False, True) for row in compare(args, mesh, device, quantized)]
    if mesh.get_local_rank() == 0:
        print_table(rows, mesh, device)
    dist.destroy_process_group()  # in a `finally`, a rank that raises would wait for those that wait for it (nccl)
    return rows


def start() -> tuple[DeviceMesh, torch.device]:
    """Return the mesh of all ranks, and this rank's device."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    device = torch.device(f"cuda:{rank}" if kind == "cuda" else "cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return init_device_mesh(kind, (ranks,)), device


def compare(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device, quantized: bool) -> list[dict[str, Any]]:
    """Return the rows of 16-bit or 4-bit experts."""
    torch.manual_seed(0)  # every rank has the same weights and knows all tokens
    config = Llama4MoEConfig(args.hidden, args.intermediate, args.experts, top_k=args.top_k)
    whole = Llama4MoE(config, dtype=torch.bfloat16, device=device)
    whole = quantize_(whole) if quantized else whole
    ranks, rank = mesh.size(), mesh.get_local_rank()
    everybody = torch.randn(1, ranks * args.tokens, args.hidden, dtype=torch.bfloat16, device=device)
    own = everybody[:, rank * args.tokens : (rank + 1) * args.tokens]
    wanted, grads = run(whole, everybody)
    part = wanted[:, rank * args.tokens : (rank + 1) * args.tokens]
    styles: dict[str, tuple[ParallelStyle, Tensor, Tensor]] = {
        "EP, exact sizes": (ExpertParallel(), own, part),
        "EP, no synchronisation": (ExpertParallel(capacity=args.tokens), own, part),
        "EP, all-gather": (ExpertParallel(exchange="all_gather", capacity=args.tokens), own, part),
        "TP": (TensorParallel(), everybody, wanted),
    }
    name = "nvfp4" if quantized else "bf16"
    rows = [dict(experts=name, form="one rank", error=0.0, ms=milliseconds(whole, everybody), bytes=size(whole))]
    for form, (style, x, expected) in styles.items():
        layer = parallelize_module(copy.deepcopy(whole), mesh, style)
        out, own_grads = run(layer, x)
        errors = [relative_error(out, expected), *(relative_error(own_grads[key], grads[key]) for key in own_grads)]
        error = torch.tensor(max(errors), device=device)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        if not error <= TOLERANCE:
            raise RuntimeError(f"{form}, {name}: relative error {error:.2g}, wanted at most {TOLERANCE}")
        row = dict(experts=name, form=form, error=float(error), ms=milliseconds(layer, x), bytes=size(layer))
        if isinstance(style, ExpertParallel):
            (load,) = expert_load(layer, all_ranks=True).values()
            row["rows of ranks"] = load.tokens[-1].unflatten(0, (ranks, -1)).sum(1).tolist()
        rows.append(row)
    return rows


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the whole gradients of the 16-bit experts' weights."""
    out = layer(x)
    out.float().square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if "experts" in name and p.grad is not None}
    return out.detach(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def milliseconds(layer: nn.Module, x: Tensor) -> float:
    """Return the median of a few forwards."""

    def once() -> float:
        dist.barrier()
        synchronize(x.device)
        begin = time.perf_counter()
        layer(x)
        synchronize(x.device)
        return 1e3 * (time.perf_counter() - begin)

    with torch.no_grad():
        return statistics.median(once() for _ in range(7))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def size(layer: Llama4MoE | nn.Module) -> int:
    """Return the bytes of the routed experts that a rank keeps."""
    experts: Any = layer.routed_experts
    return sum(local(tensor).nbytes for tensor in (*experts.parameters(), *experts.buffers()))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def print_table(rows: Sequence[dict[str, Any]], mesh: DeviceMesh, device: torch.device) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "experts": lambda row: row["experts"],
        "form": lambda row: row["form"],
        "error": lambda row: f"{row['error']:.1e}",
        "ms": lambda row: f"{row['ms']:.2f}",
        "KB of experts": lambda row: f"{row['bytes'] / 1e3:.0f}",
        "rows of ranks": lambda row: str(row.get("rows of ranks", "")),
    }
    cells = [list(columns), *([text(row) for text in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"{mesh.size()} ranks on {device.type}")
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
