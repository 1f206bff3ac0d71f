"""Times loads of a 16-bit checkpoint into 4 bits, and what they need of memory: quantized after the load and in it.
Called by `python -m benchmarks load`; calls transformers, quantize_ and benchmarks/harness, each load in a new process.

    16 bits            from_pretrained alone
    quantize_          quantize_(from_pretrained(path))
    ThunderMoeConfig   from_pretrained(path, quantization_config=ThunderMoeConfig())

The checkpoint is random, of a model's own sizes with fewer layers, under the names of the hub. The host's peak counts
anonymous memory (not mapped files) above the level before the load. A GPU's peak counts the memory that torch had
allocated. The files are in the page cache. The two quantized models have to be the same bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.models import CONFIGS, REAL, build
from benchmarks.harness.report import aligned, one_of, parser, positive, save

STEM = "load"
WAYS = ("16 bits", "quantize_", "ThunderMoeConfig")
ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table and writes JSON.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        SystemExit: bad arguments.
        RuntimeError: a load failed, or the two quantized models differ.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as directory:
        model: Any = build(args.model, args.device, layers=args.layers)
        sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
        model.save_pretrained(directory, max_shard_size="1GB")
        del model
        for number in range(args.rounds):
            for way in WAYS:
                rows.append(_measured(way, directory, args.device) | {"round": number})
    states = {row["way"]: row["state"] for row in rows}
    if states["quantize_"] != states["ThunderMoeConfig"]:
        raise RuntimeError("load: the two ways to quantize gave different models")
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    more = dict(model=args.model, layers=args.layers, bytes=sum(sizes.values()), bytes_of_experts=experts)
    path = save(STEM, args.device, rows, args.output, **more)
    print(
        f"{args.model}, {args.layers} layers: {more['bytes'] / 1e9:.2f} GB in 16 bits, {experts / 1e9:.2f} of experts"
    )
    print(_table(rows), path, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("load", __doc__ or "", shapes=False, limits=False)
    result.add_argument(
        "--model", type=one_of([*REAL, *CONFIGS]), default="qwen3-30b-a3b", help="(default: %(default)s)"
    )
    result.add_argument("--layers", type=positive, default=4, help="(default: %(default)s)")
    result.set_defaults(rounds=2)
    return result.parse_args(argv)


def _measured(way: str, directory: str, device: torch.device) -> dict[str, Any]:
    """Measure a load in a process of its own."""
    code = f"from benchmarks.suites.load import worker; worker({way!r}, {directory!r}, {device.type!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"load: {way} ended with status {run.returncode}: {run.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {"way": way, **row}


def worker(way: str, directory: str, device: str) -> None:
    """Loads once and prints a row as JSON."""
    import transformers

    from thunder_moe import ThunderMoeConfig, quantize_

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    warm = nn.Sequential(nn.Linear(64, 64, device=device, dtype=torch.bfloat16))
    quantize_(warm, linears=lambda module, name: True)  # what is compiled or loaded once
    options: dict[str, Any] = dict(dtype=torch.bfloat16)
    if device != "cpu":
        options["device_map"] = device
    if way == "ThunderMoeConfig":
        options["quantization_config"] = ThunderMoeConfig()
    peak = Peak(device)
    start = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    if way == "quantize_":
        quantize_(model)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    row = {"seconds": seconds, **peak.stop(), "state": _digest(model)}
    print(json.dumps(row))


class Peak:
    """Measures the peak memory above the level at its creation, and the memory in use at the end."""

    def __init__(self, device: str) -> None:
        self.device, self.most, self.before, self._ends = device, 0, _anonymous(), False
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends:
            self.most = max(self.most, _anonymous())
            time.sleep(0.002)

    def stop(self) -> dict[str, int]:
        self._ends = True
        self._thread.join()
        now = _anonymous()  # may be more than at any look before
        found = {"host_peak": max(self.most, now) - self.before, "host": now - self.before}
        if self.device != "cpu":
            found |= {"device_peak": torch.cuda.max_memory_allocated(), "device": torch.cuda.memory_allocated()}
        return found


def _anonymous() -> int:
    """Return the bytes of this process' own memory, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
    return found.hexdigest()


def _table(rows: Sequence[dict[str, Any]]) -> str:
    places = [key for key in ("host", "device") if key in rows[0]]
    cells = [["way", "seconds", *(f"{place} {what} [GB]" for place in places for what in ("peak", "after"))]]
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        sizes = [max(row[key] for row in own) for place in places for key in (f"{place}_peak", place)]
        cells.append([way, f"{min(row['seconds'] for row in own):.2f}", *(f"{size / 1e9:.2f}" for size in sizes)])
    return aligned(cells)
