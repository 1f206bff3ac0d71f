"""Trains a byte-level Qwen3-MoE of transformers and measures what each way to 4 and 8 bits costs it.
Called by users: `python examples/accuracy.py --help`; calls transformers, thunder_moe and, for the plot, matplotlib.

The text is the sources and documentation of installed packages, split by file: training, calibration, held out.
train for some minutes -> copies of the model, each quantized another way -> quantization-aware training -> table, JSON
and plot.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from thunder_moe import add_lora_, calibrate_, finish_qat_, prepare_qat_, quantize_, simulate_w4a4
from thunder_moe.progress import progress_bar
from thunder_moe.tools.divergence import Divergence, measure_divergence
from thunder_moe.tools.sensitivity import choose_formats, measure_sensitivity

SUFFIXES = {".py", ".md", ".rst", ".txt"}
LONGEST_FILE = 500_000  # bytes; longer ones are tables
TRAINING_SHARE = 0.4  # of the time
QAT_SHARE = 12  # steps of training for one step of quantization-aware training
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Size(NamedTuple):
    """Sizes of the model and its data: `text` in bytes, `windows` to calibrate on, and as many to measure on."""

    hidden: int
    layers: int
    experts: int
    top_k: int
    intermediate: int
    head: int
    context: int
    batch: int
    rate: float
    text: int
    windows: int
    minutes: float


LARGE = Size(512, 12, 64, 8, 256, 64, 512, 64, 1.5e-3, 200_000_000, 192, 6)  # 315 million parameters
SMALL = Size(64, 3, 8, 2, 64, 32, 128, 16, 5e-3, 20_000_000, 192, 2)  # 0.4 million


# ---- text


def read_text(limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes (uint8) of files in a shuffled order: for training, calibration, and held out (1/32 each)."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = {path for root in roots for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file()}
    ordered = sorted(files)
    random.Random(0).shuffle(ordered)
    parts: tuple[list[bytes], ...] = ([], [], [])
    total = number = 0
    for path in ordered:
        if total < limit and path.stat().st_size <= LONGEST_FILE:
            parts[{8: 1, 24: 2}.get(number % 32, 0)].append(content := path.read_bytes())
            total, number = total + len(content), number + 1
    training, calibration, held_out = (
        torch.frombuffer(bytearray(b"\0".join(part) or b"\0"), dtype=torch.uint8) for part in parts
    )
    return training, calibration, held_out


def windows_of(text: Tensor, number: int, context: int) -> Tensor:
    """Return int64 (at most `number`, context), parts of a text without overlap in a shuffled order."""
    whole = text[: len(text) // context * context].view(-1, context)
    return whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[:number]].long()


# ---- model and training


def make_model(size: Size) -> Qwen3MoeForCausalLM:
    """Return an untrained model whose tokens are bytes."""
    options: dict[str, Any] = dict(
        vocab_size=256, hidden_size=size.hidden, moe_intermediate_size=size.intermediate, head_dim=size.head,
        num_hidden_layers=size.layers, num_attention_heads=size.hidden // size.head,
        num_key_value_heads=size.hidden // size.head, num_experts=size.experts, num_experts_per_tok=size.top_k,
        norm_topk_prob=True, max_position_embeddings=size.context, router_aux_loss_coef=0.01,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options)).bfloat16()


class MasterAdamW:
    """AdamW on float32 copies of bfloat16 parameters, which would round small updates away; or on float32 ones."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.masters = [parameter.detach().float() for parameter in parameters]
        self.adamw = torch.optim.AdamW(self.masters, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.param_groups[0]["lr"] = rate
        self.adamw.step()
        torch._foreach_copy_(self.parameters, self.masters)


def train(
    model: Any, text: Tensor, size: Size, label: str, rate: float, *, seconds: float = math.inf, steps: int = 10**9,
    teacher: Any = None,
) -> list[float]:  # fmt: skip
    """Trains until the time or the steps are used up, the rate first up, then down to 0.

    Args:
        model: its parameters are trained on their device; on a CPU in float32, which is faster there.
        text: uint8 (bytes,).
        size: of the batches.
        label: of the progress bar.
        rate: the largest one.
        seconds: to train at most.
        steps: to take at most.
        teacher: None: the next byte is the target; else the probabilities of this model are.

    Returns:
        The loss of each step in bits per byte.
    """
    device, generator, losses = model.device, torch.Generator().manual_seed(1 if steps < 10**9 else 0), list[float]()
    optimizer = MasterAdamW([*(model.float() if device.type == "cpu" else model).parameters()])
    start, done = time.perf_counter(), 0.0
    model.train()
    bar = progress_bar(desc=label, unit="step", total=steps if math.isinf(seconds) else None)
    with bar:
        while done < 1:
            at = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
            ids = text[at + torch.arange(size.context + 1)].to(device).long()
            out = model(ids[:, :-1], output_router_logits=True)
            logits = out.logits.float().flatten(0, 1)
            if teacher is None:
                loss = F.cross_entropy(logits, ids[:, 1:].flatten())
            else:
                with torch.no_grad():
                    wanted = F.log_softmax(teacher(ids[:, :-1]).logits.float().flatten(0, 1), -1)
                loss = F.kl_div(F.log_softmax(logits, -1), wanted, reduction="batchmean", log_target=True)
            torch.autograd.backward(loss + model.config.router_aux_loss_coef * out.aux_loss)
            optimizer.step(rate * min(1.0, max((len(losses) + 1) / 50, 20 * done)) * (1 + math.cos(math.pi * done)) / 2)
            losses.append(float(loss.detach()) / math.log(2))
            done = max((time.perf_counter() - start) / seconds, len(losses) / steps)
            bar.set_postfix(bits_per_byte=f"{losses[-1]:.4f}", done=f"{min(done, 1):.0%}", refresh=False)
            bar.update()
    model.bfloat16().eval()
    return losses


# ---- ways to 4 and 8 bits


@torch.no_grad()
def four_over_six_(model: Any) -> None:
    """Rounds experts in place as "Four Over Six" (arXiv 2512.02010): the largest weight of a block becomes 6 or 4.

    The values are stored in bfloat16, which changes them by less than a hundredth of the error.
    """
    for weight in (parameter for parameter in model.parameters() if parameter.ndim == 3):  # (E, N, K)
        for expert in weight:
            blocks = expert.float().unflatten(-1, (-1, 16))
            amax, whole = blocks.abs().amax(-1, keepdim=True), expert.abs().amax().float() / (6 * 256)
            rounded = []
            for top in (6, 4):
                scale = (amax / (top * whole)).to(torch.float8_e4m3fn).float() * whole
                values = torch.tensor(E2M1, device=weight.device)
                edges = (values[1:] + values[:-1]) / 2
                codes = torch.bucketize((blocks.abs() / scale.clamp_min(1e-30)).clamp_max(6), edges)
                rounded.append(values[codes] * blocks.sign() * scale)
            errors = [(each - blocks).square().sum(-1, keepdim=True) for each in rounded]
            expert.copy_(torch.where(errors[0] <= errors[1], rounded[0], rounded[1]).flatten(-2))


def w4a4_(model: Any) -> None:
    """Quantizes experts, whose activations each call of the model rounds to NVFP4 too, as Blackwell's GEMMs do."""
    forward = quantize_(model, scale_search="mse").forward

    def simulated(*args: Any, **kwargs: Any) -> Any:
        with simulate_w4a4():
            return forward(*args, **kwargs)

    model.forward = simulated


def mixed_formats(model: Any, windows: Tensor) -> dict[str, str | None]:
    """Return the formats of a model that has 0.4 of the bytes which lie between NVFP4 and MXFP8 in all blocks."""
    found = measure_sensitivity(model, windows, progress=True)
    four, eight = (sum(block.nbytes[name] for block in found.blocks) for name in ("nvfp4", "mxfp8"))
    return choose_formats(found, (found.other_bytes + four + 0.4 * (eight - four)) / 1e9).formats


def ways_of(calibration: Sequence[Tensor], formats: Any) -> dict[str, Callable[[Any], Any]]:
    """Return name -> what makes a 16-bit model this quantized one, in place."""
    mse: dict[str, Any] = {"scale_search": "mse"}
    dense: dict[str, Any] = mse | {"linears": "*_proj"}
    return {
        "NVFP4": lambda model: quantize_(model),
        "NVFP4, Four Over Six": four_over_six_,
        "NVFP4, mse": lambda model: quantize_(model, **mse),
        "NVFP4, mse, calibrated": lambda model: calibrate_(model, calibration, **mse),
        "NVFP4, mse, W4A4 simulated": w4a4_,
        "NVFP4 and MXFP8, mse": lambda model: quantize_(model, formats, **mse),
        "NVFP4 and MXFP8, mse, calibrated": lambda model: calibrate_(model, calibration, formats, **mse),
        "MXFP8": lambda model: quantize_(model, "mxfp8"),
        "MXFP8, calibrated": lambda model: calibrate_(model, calibration, "mxfp8"),
        "NVFP4 and dense layers, mse": lambda model: quantize_(model, **dense),
        "NVFP4 and dense layers, mse, calibrated": lambda model: calibrate_(model, calibration, **dense),
        "NVFP4, dense layers and head, mse": lambda model: quantize_(model, **mse, linears=["*_proj", "lm_head"]),
    }


def trained_further(model: Any, text: Tensor, size: Size, steps: int, rate: float) -> dict[str, Any]:
    """Return models that train some steps more, on the same bytes: 16-bit, with NVFP4's values, and with adapters."""
    options: dict[str, Any] = {"rate": rate, "steps": steps}
    plain, aware, distilled = (copy.deepcopy(model) for _ in range(3))
    train(plain, text, size, "trained on in bf16", **options)
    for each, name, teacher in ((aware, "QAT", None), (distilled, "QAT by distillation", model)):
        prepare_qat_(each, scale_search="mse")
        train(each, text, size, name, teacher=teacher, **options)
        quantize_(finish_qat_(each), scale_search="mse")
    adapted = add_lora_(quantize_(copy.deepcopy(model), scale_search="mse"), rank=8, alpha=16)
    train(adapted, text, size, "LoRA by distillation", teacher=model, **options)
    return {
        "bf16, trained on": plain,
        "NVFP4, mse, trained on": quantize_(copy.deepcopy(plain), scale_search="mse"),
        "NVFP4, mse, QAT": aware,
        "NVFP4, mse, QAT by distillation": distilled,
        "NVFP4, mse, LoRA by distillation": adapted,
    }


# ---- results


@torch.no_grad()
def bits_per_byte(model: Any, windows: Tensor) -> tuple[float, float]:
    """Return the mean of the windows' losses in bits, and its standard error."""
    losses = []
    for window in windows:
        row = window[None].to(model.device)
        losses.append(F.cross_entropy(model(row).logits[0, :-1].float(), row[0, 1:]).double() / math.log(2))
    all_losses = torch.stack(losses)
    return all_losses.mean().item(), (all_losses.std() / len(losses) ** 0.5).item()


def nbytes(model: Any) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def table(base: tuple[float, float], found: Sequence[Divergence], sizes: dict[str, int]) -> str:
    """Return the results in Markdown; in brackets are standard errors."""
    lines = [
        "| experts | MB | bits per byte | against bf16, 10^-3 bits | KL to bf16, 10^-3 nats | KL against NVFP4 |"
        " same top-1 byte |",
        "|---|---|---|---|---|---|---|",
        f"| bf16 | {sizes['bf16'] / 1e6:.1f} | {base[0]:.4f} ({base[1]:.4f}) | | | | |",
    ]
    for each in found:
        more, error = (1e3 * value / math.log(2) for value in each.increase)
        kl, change = ([1e3 * value for value in pair] for pair in (each.kl, each.kl_change))
        lines.append(
            f"| {each.name} | {sizes[each.name] / 1e6:.1f} | {base[0] + more / 1e3:.4f} | {more:+.2f} ({error:.2f})"
            f" | {kl[0]:.3f} ({kl[1]:.3f}) | {change[0]:+.3f} ({change[1]:.3f})"
            f" | {each.agreement[0]:.2%} ({each.agreement[1]:.2%}) |"
        )
    return "\n".join(lines)


def plot(found: Sequence[Divergence], path: Path) -> None:
    """Draw the KL divergences and the increases of the loss as bars with standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.35 * len(found) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [each.name for each in found]
    kl, more = (
        [(1e3 * a, 1e3 * b) for a, b in pairs] for pairs in zip(*((e.kl, e.increase) for e in found), strict=True)
    )
    left.barh(names, [a for a, _ in kl], xerr=[b for _, b in kl], color="C0")
    left.set(xscale="log", xlabel="KL to bf16, 10^-3 nats per byte")
    right.barh(names, [a / math.log(2) for a, _ in more], xerr=[b / math.log(2) for _, b in more], color="C1")
    right.set(xlabel="bits per byte beyond bf16, 10^-3")
    left.invert_yaxis()
    figure.savefig(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level mixture of experts and measure what NVFP4 and MXFP8 cost it, in several ways."
    )
    parser.add_argument("--small", action="store_true", help="0.4 million parameters for a CPU instead of 315 million")
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"of the run, about; {TRAINING_SHARE * 100:.0f} %% train ({LARGE.minutes}, --small: {SMALL.minutes})",
    )
    parser.add_argument("--steps", type=int, help="of training, instead of minutes")
    parser.add_argument(
        "--qat-steps", type=int, help=f"of quantization-aware training; 0: none (default: steps / {QAT_SHARE})"
    )
    parser.add_argument("--output", type=Path, default=Path("out"), metavar="DIR", help="where JSON and plot go (out)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    args = parser.parse_args(argv)
    if args.minutes is None:
        args.minutes = (SMALL if args.small else LARGE).minutes
    for name, least in (("minutes", 1e-3), ("steps", 1), ("qat_steps", 0)):
        if (value := getattr(args, name)) is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')}: got {value}, wanted at least {least:g}")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs everything; returns the content of the JSON file, which is written after each part."""
    started = time.perf_counter()
    args = parse(argv)
    size = SMALL if args.small else LARGE
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "accuracy.json"

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {what}", flush=True)

    text, calibration_text, held_out_text = read_text(size.text)
    say(f"{len(text) / 1e6:.1f} MB to train on, {len(held_out_text) / 1e6:.1f} MB held out")
    calibration, held_out = (windows_of(part, size.windows, size.context) for part in (calibration_text, held_out_text))
    torch.manual_seed(args.seed)
    model: Any = make_model(size).to(args.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{parameters / 1e6:.1f} million parameters")
    limit: dict[str, Any] = {"steps": args.steps} if args.steps else {"seconds": TRAINING_SHARE * 60 * args.minutes}
    losses = train(model, text, size, "training", size.rate, **limit)
    model.requires_grad_(False)
    seen = len(losses) * size.batch * size.context
    say(f"{len(losses)} steps, {seen / 1e6:.1f} MB; the last {losses[-1]:.4f} bits per byte")

    base, formats = bits_per_byte(model, held_out), mixed_formats(model, calibration[:32])
    numbers: dict[str, Any] = {
        "options": {**vars(args), "device": str(args.device), "output": str(args.output)},
        "size": {**size._asdict(), "parameters": parameters, "steps": len(losses), "bytes_seen": seen},
        "bf16_bits_per_byte": base, "training_bits_per_byte": losses, "formats": formats, "seconds": {},
        "machine": torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else platform.machine(),
        "versions": {each.__name__: each.__version__ for each in (torch, transformers)},
    }  # fmt: skip
    models, found = {}, list[Divergence]()
    for name, way in ways_of(calibration.to(args.device).split(16), formats).items():
        models[name], start = copy.deepcopy(model), time.perf_counter()
        way(models[name])
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        numbers["seconds"][name] = time.perf_counter() - start
        say(f"{name}: {numbers['seconds'][name]:.1f} s")
    sizes = {name: nbytes(each) for name, each in models.items()} | {"bf16": nbytes(model)}
    sizes["NVFP4, Four Over Six"] = sizes["NVFP4"]  # its values are in bf16 here

    def report(more: list[Divergence]) -> None:
        found.extend(more)
        numbers["models"] = [{**asdict(each), "nbytes": sizes[each.name]} for each in found]
        numbers["total_seconds"] = time.perf_counter() - started
        path.write_text(json.dumps(numbers, indent=1) + "\n")
        print(table(base, found, sizes), flush=True)
        try:
            plot(found, path.with_suffix(".png"))
        except ImportError as error:
            say(f"no plot: {error}")
        say(f"wrote {path}")

    report(measure_divergence(model, models, held_out, progress=True))
    steps = len(losses) // QAT_SHARE if args.qat_steps is None else args.qat_steps
    if steps:
        first = {"NVFP4": models["NVFP4"]}  # what differences are taken from
        models.clear()
        further = trained_further(model.requires_grad_(True), text, size, steps, size.rate / 10)
        sizes |= {name: nbytes(each) for name, each in further.items()}
        beside = measure_divergence(further["bf16, trained on"], dict([*further.items()][1:]), held_out, progress=True)
        numbers |= {"qat_steps": steps, "beside_trained_on": [asdict(each) for each in beside]}
        for each in beside:
            more, error = (1e3 * value / math.log(2) for value in each.increase)
            say(f"{each.name}: {more:+.2f} ({error:.2f}) 10^-3 bits per byte against bf16, trained on")
        report(measure_divergence(model, first | further, held_out, progress=True)[1:])
    return numbers


if __name__ == "__main__":
    main()
