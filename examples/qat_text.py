"""Trains the byte model of llama4_moe_text.py plainly and with the values of NVFP4, and compares both in 4 bits.
Called by users: `python examples/qat_text.py --help`, and by recipes_text.py; calls llama4_moe_text.py and thunder_moe.

train a part of the steps -> the rest plainly | with prepare_qat_ -> quantize_ both -> held-out bits per byte. Both see
the same bytes. It reports which share of NVFP4's loss quantization-aware training wins back.
"""

from __future__ import annotations

import argparse
import copy
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
import torch.nn.functional as F
from llama4_moe_text import (
    BATCH,
    WINDOW,
    ByteModel,
    MasterAdamW,
    held_out_batches,
    read_bytes,
    source_files,
    split_files,
    windows,
)
from torch import Tensor

from thunder_moe import finish_qat_, prepare_qat_, quantize_
from thunder_moe.progress import progress_bar


def train(
    model: ByteModel, optimizer: MasterAdamW, text: Tensor, steps: range, seed: int, device: torch.device, label: str
) -> list[float]:
    """Runs some of the training's steps, each on bytes that its number chooses; returns their bits per byte."""
    bar = progress_bar(steps, desc=label, unit="step")
    losses: list[float] = []
    for step in bar:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        inputs, targets = windows(text, torch.randint(len(text) - WINDOW, (BATCH,), generator=generator), device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()) / math.log(2))
        bar.set_postfix(bits_per_byte=f"{statistics.fmean(losses[-20:]):.3f}", refresh=False)
    return losses


@torch.no_grad()
def bits_per_byte(model: ByteModel, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Held-out cross entropy in bits."""
    nats = [float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in batches]
    return statistics.fmean(nats) / math.log(2)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What quantization-aware training wins back of what NVFP4 loses.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=600, help=f"training steps, each of {BATCH * WINDOW:,} bytes")
    parser.add_argument("--qat-steps", type=int, default=450, help="of these the last, with the values of NVFP4")
    parser.add_argument("--seeds", type=int, default=1, help="runs, each with other weights and bytes")
    parser.add_argument("--hidden", type=int, default=32, help="hidden size, a multiple of 16")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where the JSON goes")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    if not 0 < args.qat_steps < args.steps:
        parser.error(f"--qat-steps: got {args.qat_steps}, wanted a number between 0 and --steps = {args.steps}")
    if args.hidden < 16 or args.hidden % 16:
        parser.error(f"--hidden: got {args.hidden}, wanted a positive multiple of 16 (the block of NVFP4)")
    if args.layers < 1 or args.seeds < 1:
        parser.error(f"--layers, --seeds: got {args.layers} and {args.seeds}, wanted at least 1")
    return args


def run(args: argparse.Namespace, seed: int, text: Tensor, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Run one comparison."""
    torch.manual_seed(seed)
    model = ByteModel(args.hidden, args.layers).to(args.device, torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), args.steps, peak_rate=5e-3)
    middle = args.steps - args.qat_steps
    train(model, optimizer, text, range(middle), seed, args.device, "both")
    aware, its_optimizer = copy.deepcopy((model, optimizer))
    prepare_qat_(aware)  # the parameters stay those of the optimizer
    rest = range(middle, args.steps)
    train(model, optimizer, text, rest, seed, args.device, "plain")
    train(aware, its_optimizer, text, rest, seed, args.device, "with the values of NVFP4")
    seen = bits_per_byte(aware, batches)
    bits = {"bf16": bits_per_byte(model, batches), "bf16, trained aware": bits_per_byte(finish_qat_(aware), batches)}
    bits |= {"NVFP4": bits_per_byte(quantize_(model), batches), "NVFP4, as training saw it": seen}
    bits["NVFP4, trained aware"] = bits_per_byte(quantize_(aware), batches)
    return bits


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs everything; returns the content of the JSON file."""
    started = time.perf_counter()
    args = parse(argv)
    train_files, held_out_files = split_files(source_files(Path(sysconfig.get_path("stdlib"))))
    text, batches = read_bytes(train_files), held_out_batches(read_bytes(held_out_files), args.device)
    runs = [run(args, seed, text, batches) for seed in range(args.seeds)]
    mean = {name: statistics.fmean(each[name] for each in runs) for name in runs[0]}
    gap = mean["NVFP4"] - mean["bf16"]
    closed = (mean["NVFP4"] - mean["NVFP4, trained aware"]) / gap
    for name, bits in mean.items():
        print(f"{name:28} {bits:.4f} bits per byte, {100 * (bits / mean['bf16'] - 1):+.3f} %")
    print(f"NVFP4 loses {gap:.4f} bits per byte; quantization-aware training wins back {closed:.0%} of that")
    numbers = {
        "bits_per_byte": mean,
        "runs": runs,
        "gap": gap,
        "share_won_back": closed,
        "options": {**vars(args), "device": str(args.device), "output": str(args.output)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - started,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "qat_text.json"
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    print(f"wrote {path} after {numbers['seconds']:.0f} s")
    return numbers


if __name__ == "__main__":
    main()
