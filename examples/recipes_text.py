"""Trains the byte model of llama4_moe_text.py in bf16 and by the 8-bit recipes, and compares the losses.
Called by users: `python examples/recipes_text.py --help`; calls llama4_moe_text.py and qat_text.py beside it and
thunder_moe.

the same weights and bytes -> train with products of experts in bf16 | "mxfp8" | "fp8" -> loss curves, held-out bits per
byte of each. On a CPU the recipes have the numbers of 8 bits, not their speed.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from llama4_moe_text import (
    BATCH,
    WINDOW,
    ByteModel,
    MasterAdamW,
    held_out_batches,
    read_bytes,
    source_files,
    split_files,
)
from matplotlib.figure import Figure
from qat_text import bits_per_byte, train
from torch import Tensor

from thunder_moe import prepare_8bit_training_

RECIPES = {"bf16": None, "mxfp8": "mxfp8", "fp8": "fp8"}
SMOOTHED = 25  # steps of a point of a curve


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Losses of training in bf16 and by the 8-bit recipes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=600, help=f"training steps, each of {BATCH * WINDOW:,} bytes")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each recipe, each with other weights and bytes")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 16")
    parser.add_argument("--layers", type=int, default=2, help="number of blocks")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where plot and JSON go")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    for name in ("steps", "seeds", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, wanted at least 1")
    if args.hidden < 16 or args.hidden % 16:
        parser.error(f"--hidden: got {args.hidden}, wanted a positive multiple of 16")
    return args


def smoothed(run: dict[str, Any]) -> Tensor:
    """Means of `SMOOTHED` losses each."""
    losses = torch.tensor(run["losses"])
    return losses[: len(losses) // SMOOTHED * SMOOTHED].view(-1, SMOOTHED).mean(1)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss curves, and under them the differences to bf16: a line for each recipe and seed."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    of_bf16 = {run["seed"]: smoothed(run) for run in runs if run["recipe"] == "bf16"}
    for run in runs:
        losses, name = smoothed(run), run["recipe"]
        steps = [SMOOTHED * (each + 0.5) for each in range(len(losses))]
        style: dict[str, Any] = {"color": f"C{[*RECIPES].index(name)}", "label": name if run["seed"] == 0 else None}
        above.plot(steps, losses, alpha=0.7, **style)
        if name != "bf16":
            below.plot(steps, 100 * (losses / of_bf16[run["seed"]] - 1), alpha=0.7, **style)
    above.set(ylabel="bits per byte")
    below.set(xlabel="step", ylabel="% more than bf16")
    below.axhline(0, color="black", linewidth=0.8)
    above.legend()
    below.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs everything; returns the content of the JSON file."""
    started = time.perf_counter()
    args = parse(argv)
    train_files, held_out_files = split_files(source_files(Path(sysconfig.get_path("stdlib"))))
    text, batches = read_bytes(train_files), held_out_batches(read_bytes(held_out_files), args.device)
    runs: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for name, recipe in RECIPES.items():
            torch.manual_seed(seed)
            model = ByteModel(args.hidden, args.layers).to(args.device, torch.bfloat16)
            prepare_8bit_training_(model, recipe)
            optimizer = MasterAdamW(model.parameters(), args.steps, peak_rate=5e-3)
            losses = train(model, optimizer, text, range(args.steps), seed, args.device, f"{name}, seed {seed}")
            bits = bits_per_byte(prepare_8bit_training_(model, None), batches)
            runs.append({"recipe": name, "seed": seed, "held_out": bits, "losses": losses})
    summary: dict[str, dict[str, float]] = {}
    of_bf16 = [run["held_out"] for run in runs if run["recipe"] == "bf16"]
    for name in RECIPES:
        held_out = [run["held_out"] for run in runs if run["recipe"] == name]
        more = [100 * (each / other - 1) for each, other in zip(held_out, of_bf16, strict=True)]
        error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.nan
        means = {"bits_per_byte": statistics.fmean(held_out), "percent_more": statistics.fmean(more)}
        summary[name] = means | {"standard_error": error}
        print(
            f"{name:6} {summary[name]['bits_per_byte']:.4f} held-out bits per byte,"
            f" {summary[name]['percent_more']:+.2f} ± {error:.2f} % beside bf16"
        )
    numbers = {
        "summary": summary,
        "runs": runs,
        "options": {**vars(args), "device": str(args.device), "output": str(args.output)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - started,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "recipes_text.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n")
    plot(runs, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png')} after {numbers['seconds']:.0f} s")
    return numbers


if __name__ == "__main__":
    main()
