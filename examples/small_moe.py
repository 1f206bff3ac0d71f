"""Trains a small Qwen3-MoE of transformers on the standard library's sources and saves it with a tokenizer.
Called by users: `python examples/small_moe.py DIR`; calls transformers, tokenizers, thunder_moe's
progress bar and llama4_moe_text.py for the text.

It writes into DIR a model of a few megabytes that `from_pretrained` reads, and held_out.txt, sources that training has
not seen. It serves commands that need a model: `python -m thunder_moe sensitivity DIR --data DIR/held_out.txt`.
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama4_moe_text import source_files, split_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from thunder_moe.progress import progress_bar

BATCH, CONTEXT, VOCABULARY = 16, 128, 512


def read(files: Sequence[Path]) -> str:
    """Return all files in one text."""
    return "\n\n".join(path.read_bytes().decode("utf-8", "replace") for path in files)


def make_tokenizer(text: str) -> Any:
    """Byte pairs of a text, behind all 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    wrapped: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
    return wrapped


def make_model(layers: int, hidden: int) -> Qwen3MoeForCausalLM:
    """Return an untrained model with eight experts of `hidden` features; a token uses two of them."""
    options: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=hidden, moe_intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, head_dim=32, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=4 * CONTEXT, output_router_logits=True,
        router_aux_loss_coef=0.01, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**options))


def train(model: Qwen3MoeForCausalLM, ids: Tensor, steps: int, seed: int) -> float:
    """Take steps of AdamW, the rate first up, then down; return the mean loss of the last ten, in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in progress_bar(range(steps), unit="step"):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,), generator=generator)
        rows = ids[starts[:, None] + torch.arange(CONTEXT + 1)]
        out = model(rows[:, :-1])
        loss = F.cross_entropy(out.logits.flatten(0, 1), rows[:, 1:].flatten())
        torch.autograd.backward(loss + model.config.router_aux_loss_coef * out.aux_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / len(losses[-10:])


def main(argv: Sequence[str] | None = None) -> float:
    """Trains and saves; returns the last loss."""
    parser = argparse.ArgumentParser(
        description="Train a small Qwen3-MoE on the standard library and save it with a tokenizer.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where the model, the tokenizer and the text go")
    parser.add_argument("--steps", type=int, default=400, help=f"of training, each of {BATCH * CONTEXT:,} tokens")
    parser.add_argument("--layers", type=int, default=6, help="decoder layers, each with a block of experts")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the text")
    args = parser.parse_args(argv)
    for name in ("steps", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, wanted at least 1")
    if args.hidden < 32 or args.hidden % 32:
        parser.error(f"--hidden: got {args.hidden}, wanted a positive multiple of 32")
    parts = split_files(source_files(Path(sysconfig.get_path("stdlib"))))
    text, held_out = map(read, parts)
    tokenizer = make_tokenizer(text)
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    torch.manual_seed(args.seed)
    model = make_model(args.layers, args.hidden)
    loss = train(model, ids, args.steps, args.seed)
    model.config.output_router_logits = False
    model.bfloat16().save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    (args.directory / "held_out.txt").write_text(held_out, encoding="utf-8")
    print(f"trained on {len(ids):,} tokens, last loss {loss:.3f} nats per token; wrote {args.directory}")
    return loss


if __name__ == "__main__":
    main()
