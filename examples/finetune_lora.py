"""Tunes the byte model of llama4_moe_text.py to English prose by LoRA on its experts, in bf16 and in NVFP4.
Called by users: `make finetune`, `python examples/finetune_lora.py --help`; calls llama4_moe_text.py, thunder_moe.

train on the standard library -> quantize_ -> add_lora_ -> tune on the prose of pydoc_data/topics.py -> held-out bits
per byte of other topics, before and after, and the memory of the experts. Both see the same bytes.
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
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from llama4_moe_text import (
    BATCH,
    WINDOW,
    ByteModel,
    MasterAdamW,
    bits_per_byte,
    expert_bytes,
    held_out_batches,
    machine,
    read_bytes,
    source_files,
    split_files,
    windows,
)
from matplotlib.figure import Figure
from torch import Tensor, nn

from thunder_moe import add_lora_, merge_lora_, quantize_
from thunder_moe.finetune.lora import lora_parameters
from thunder_moe.progress import progress_bar


def prose() -> tuple[Tensor, Tensor]:
    """Return the texts of Python's help topics as uint8: those to tune on, and each eighth one, which is held out."""
    names = sorted(topics)
    parts = [[name for at, name in enumerate(names) if (at % 8 == 4) == held_out] for held_out in (False, True)]
    joined = ("\0".join(topics[name] for name in part).encode() for part in parts)
    tune, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in joined)
    return tune, held_out


def train(
    model: nn.Module, parameters: list[nn.Parameter], text: Tensor, steps: int, rate: float, seed: int, label: str
) -> list[float]:
    """Take steps of AdamW on some parameters with bytes that each step's number chooses; return each loss in bits."""
    optimizer = MasterAdamW(parameters, steps, peak_rate=rate)
    device, losses = parameters[0].device, []
    for step in progress_bar(range(steps), desc=label, unit="step"):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        inputs, targets = windows(text, torch.randint(len(text) - WINDOW, (BATCH,), generator=generator), device)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()) / math.log(2))
    return losses


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Tune a small language model of code to prose, by LoRA on experts of 16 and of 4 bits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=500, help=f"of training, each of {BATCH * WINDOW:,} bytes")
    parser.add_argument("--tune-steps", type=int, default=150, help="of tuning, likewise")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; alpha is twice that")
    parser.add_argument("--hidden", type=int, default=64, help="hidden size, a multiple of 16")
    parser.add_argument("--layers", type=int, default=2, help="number of blocks")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the bytes")
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where the plot and JSON go")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N")
    args = parser.parse_args(argv)
    for name in ("steps", "tune_steps", "rank", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}, wanted at least 1")
    if args.hidden < 16 or args.hidden % 16:
        parser.error(f"--hidden: got {args.hidden}, wanted a positive multiple of 16 (the block of NVFP4)")
    return args


def tune(
    model: ByteModel, args: argparse.Namespace, text: Tensor, batches: list[tuple[Tensor, Tensor]], label: str
) -> dict[str, Any]:
    """Adds adapters to the experts and trains them; the numbers of a column."""
    before = bits_per_byte(model, batches)
    torch.manual_seed(args.seed)
    add_lora_(model, args.rank, 2 * args.rank)
    adapters = list(lora_parameters(model))
    losses = train(model, adapters, text, args.tune_steps, 5e-3, args.seed + 1, label)
    trained = 4 * sum(parameter.numel() for parameter in adapters)
    return dict(
        bits_before=before,
        bits_per_byte=bits_per_byte(model, batches),
        expert_bytes=expert_bytes(model),
        adapter_bytes=trained,
        training_bytes=3 * trained,  # the gradient, and the two averages of AdamW
        losses=losses,
    )


def plot(columns: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot loss curves of the tuning, bits per byte and the experts' memory."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    curve, bits, memory = figure.subplots(1, 3)
    for name, column in columns.items():
        losses = column["losses"]
        if losses:
            curve.plot([statistics.fmean(losses[max(0, at - 9) : at + 1]) for at in range(len(losses))], label=name)
    curve.set(title="Tuning (mean of 10 steps)", xlabel="step", ylabel="bits per byte")
    curve.legend()
    for panel, title, key, factor, form in (
        (bits, "Held-out bits per byte of prose", "bits_per_byte", 1.0, "{:.3f}"),
        (memory, "Expert weights in memory, KiB", "expert_bytes", 2.0**-10, "{:,.0f}"),
    ):
        heights = [column[key] * factor for column in columns.values()]
        panel.bar_label(panel.bar(list(columns), heights, color=["0.6", "C0", "C1", "C2"]), fmt=form, fontsize=9)
        panel.set_title(title, fontsize=10)
        panel.tick_params(axis="x", labelsize=8)
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs everything; returns the content of the JSON file."""
    started = time.perf_counter()
    args = parse(argv)
    code = read_bytes(split_files(source_files(Path(sysconfig.get_path("stdlib"))))[0])
    text, held_out = prose()
    batches = held_out_batches(held_out, args.device)
    torch.manual_seed(args.seed)
    model = ByteModel(args.hidden, args.layers).to(args.device, torch.bfloat16)
    train(model, list(model.parameters()), code, args.steps, 5e-3, args.seed, "training on code")

    packed = quantize_(copy.deepcopy(model))
    untuned: dict[str, Any] = dict(
        bits_per_byte=bits_per_byte(model, batches), expert_bytes=expert_bytes(model), losses=[]
    )
    columns: dict[str, dict[str, Any]] = {"bf16": untuned | dict(adapter_bytes=0, training_bytes=0)}
    columns["bf16 LoRA"] = tune(model, args, text, batches, "bf16 LoRA")
    columns["NVFP4 LoRA"] = tune(packed, args, text, batches, "NVFP4 LoRA")
    errors = merge_lora_(packed)
    merged: dict[str, Any] = dict(
        bits_per_byte=bits_per_byte(packed, batches), expert_bytes=columns["NVFP4 LoRA"]["expert_bytes"]
    )
    columns["NVFP4, merged"] = merged | dict(adapter_bytes=0, training_bytes=0, losses=[])

    print(f"{'':16}{'bits per byte':>14}{'experts, KiB':>14}{'adapters, KiB':>15}{'their training, KiB':>21}")
    for name, column in columns.items():
        sizes = (column[f"{what}_bytes"] / 1024 for what in ("expert", "adapter", "training"))
        print(f"{name:16}{column['bits_per_byte']:14.4f}{next(sizes):14,.0f}{next(sizes):15,.0f}{next(sizes):21,.0f}")
    print(f"merging rounds by {statistics.fmean(errors.values()):.2f} times what the adapters add")
    numbers = {
        "columns": columns,
        "machine": machine(args.device),
        "options": {**vars(args), "device": str(args.device), "output": str(args.output)},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seconds": time.perf_counter() - started,
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "finetune_lora.json"
    path.write_text(json.dumps(numbers, indent=2) + "\n")
    plot(columns, path.with_suffix(".png"))
    print(f"wrote {path} and {path.with_suffix('.png').name} after {numbers['seconds']:.0f} s")
    return numbers


if __name__ == "__main__":
    main()
