"""Runs a measurement in a process for each rank: of a GPU each with NCCL, on a CPU with gloo.
Called by suites/parallel.py and suites/sharded.py; calls torch.multiprocessing and torch.distributed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from benchmarks.harness.report import positive

__all__ = ["on_ranks", "parse_with_ranks"]

Rows = list[dict[str, Any]]


def parse_with_ranks(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parses arguments with --ranks, which the GPUs here limit.

    Args:
        parser: with --device; --ranks is added.
        argv: the arguments.

    Returns:
        The arguments.

    Raises:
        SystemExit: bad arguments.
    """
    parser.add_argument("--ranks", type=positive, default=2, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    if args.device.type == "cuda" and torch.cuda.device_count() < args.ranks:
        parser.error(f"argument --ranks: got {args.ranks}, wanted at most {torch.cuda.device_count()}, the GPUs here")
    return args


def on_ranks(function: Callable[..., Rows], args: argparse.Namespace, *more: Any) -> Rows:
    """Calls a function in `args.ranks` processes of a group.

    Args:
        function: of a module; called with args, the device of its rank, and `more`. The process group is there, and
            RANK, LOCAL_RANK and WORLD_SIZE are set.
        args: with device and ranks.
        more: further arguments, which are pickled.

    Returns:
        The rows of rank 0.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        spawn: Any = processes.spawn  # type: ignore[attr-defined]  # it is there
        spawn(_rank, (function, args, folder, more), nprocs=args.ranks)
        rows: Rows = torch.load(f"{folder}/rows.pt", weights_only=True)
    return rows


def _rank(
    rank: int, function: Callable[..., Rows], args: argparse.Namespace, folder: str, more: tuple[Any, ...]
) -> None:
    """Run one process."""
    # Multicast is not needed, and some hosts do not survive it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    cuda = args.device.type == "cuda"
    device = torch.device(f"cuda:{rank}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // args.ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks,
        timeout=datetime.timedelta(seconds=120), device_id=device if cuda else None,
    )  # fmt: skip
    rows = function(args, device, *more)
    if rank == 0:
        torch.save(rows, f"{folder}/rows.pt")
    dist.destroy_process_group()
