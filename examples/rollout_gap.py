"""Trains a language model and writes with 4-bit copies of it, and reports how far their log-probabilities are apart.
Called by users: `python examples/rollout_gap.py DIR`, on a model of small_moe.py with held_out.txt; calls transformers
and thunder_moe.

In reinforcement learning the model that writes texts ("rollouts") is not the one that is trained on them. Here the
rollout models take the trainer's weights by `refresh_` after each round of training; one of them never does. Writes
DIR/rollout_gap.json and rollout_gap.png.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from thunder_moe import quantize_, refresh_
from thunder_moe.progress import progress_bar

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # isort: skip

# Name -> the arguments of `quantize_`; None: a 16-bit copy, whose gap is the bfloat16 rounding of a float32 trainer.
ROLLOUTS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "mxfp8": dict(format="mxfp8"),
    "nvfp4, mse": dict(scale_search="mse"),
    "nvfp4": {},
    "nvfp4, never refreshed": {},
}
CONTEXT = 64


def log_probabilities(model: Any, rows: Tensor) -> Tensor:
    """Return the log-probability of each token but the first, float32 (rows, tokens - 1)."""
    logits = model(rows[:, :-1]).logits.float()
    return -F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


@torch.no_grad()
def gap(trainer: Any, rollout: Any, prompts: Tensor, new: int) -> dict[str, float]:
    """Let the rollout model write texts, and compare its log-probabilities of its tokens with the trainer's.

    Returns:
        "mean": of |difference|, in nats per token; "kl": an estimate of KL(rollout || trainer) by E[r - 1 - log r] with
        r = trainer's probability over the rollout's (Schulman, "Approximating KL divergence"); "clipped": the share of
        tokens with r outside of 0.8 to 1.2, whose gradient PPO clips.
    """
    rows = rollout.generate(
        prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=new, max_new_tokens=new, do_sample=True,
        top_k=0, pad_token_id=0,
    )  # fmt: skip
    ours, wanted = (log_probabilities(model, rows)[:, -new:].double() for model in (rollout, trainer))
    log_ratio = wanted - ours
    ratio = log_ratio.exp()
    return {
        "mean": float(log_ratio.abs().mean()),
        "kl": float((ratio - 1 - log_ratio).mean()),
        "clipped": float(((ratio < 0.8) | (ratio > 1.2)).double().mean()),
    }


def train(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, steps: int, generator: torch.Generator) -> None:
    """Take steps of next-token prediction, which stand for any training."""
    for _ in progress_bar(range(steps), unit="step"):
        starts = torch.randint(len(ids) - CONTEXT, (8,), generator=generator)
        loss = -log_probabilities(model, ids[starts[:, None] + torch.arange(CONTEXT + 1)]).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the KL estimate of each rollout model over the rounds."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in ROLLOUTS:
        points = [(row["round"], row["kl"]) for row in rows if row["rollout"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xlabel="round of training", ylabel="KL(rollout || trainer), nats per token", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Train and measure; return a row for each round and rollout model."""
    parser = argparse.ArgumentParser(
        description="Report the gap of log-probabilities between a trainer and its 4-bit rollout models.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a model with tokenizer and held_out.txt")
    parser.add_argument("--rounds", type=int, default=5, help="of training, each followed by a refresh")
    parser.add_argument("--steps", type=int, default=20, help="of training in a round")
    parser.add_argument("--texts", type=int, default=64, help="that a rollout model writes in a round")
    parser.add_argument("--new", type=int, default=64, help="tokens of such a text")
    args = parser.parse_args(argv)
    for name in ("rounds", "steps", "texts", "new"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, wanted at least 1")
    torch.manual_seed(0)
    trainer = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.directory)
    text = (args.directory / "held_out.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    if len(ids) <= CONTEXT:
        parser.error(f"{args.directory}: held_out.txt has {len(ids)} tokens, wanted more than {CONTEXT}")
    rollouts = {}
    for name, options in ROLLOUTS.items():
        model = copy.deepcopy(trainer).bfloat16()
        rollouts[name] = model if options is None else quantize_(model, **options)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-4)
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(args.rounds + 1):
        if number:
            train(trainer, optimizer, ids, args.steps, generator)
        weights = trainer.state_dict()
        prompts = ids[torch.randint(len(ids) - 8, (args.texts,), generator=generator)[:, None] + torch.arange(8)]
        for name, model in rollouts.items():
            options = ROLLOUTS[name]
            if options is None:
                model.load_state_dict(weights)
            elif "never" not in name:
                refresh_(model, weights, scale_search=options.get("scale_search"))
            rows.append({"round": number, "rollout": name, **gap(trainer, model, prompts, args.new)})
    print("| rollout | mean difference, nats | KL, nats per token | clipped by PPO |\n|---|---|---|---|")
    for row in rows[-len(rollouts) :]:
        print(f"| {row['rollout']} | {row['mean']:.4f} | {row['kl']:.5f} | {row['clipped']:.1%} |")
    (args.directory / "rollout_gap.json").write_text(
        json.dumps({"options": vars(args), "rows": rows}, default=str) + "\n"
    )
    plot(rows, args.directory / "rollout_gap.png")
    return rows


if __name__ == "__main__":
    main()
