"""Training steps of LoRA on the experts of Qwen3-30B-A3B's layers: NVFP4 weights here, bf16 weights in PEFT's manner.
Called by hand on a GPU, `python -m benchmarks.lora`; calls transformers, thunder_moe.lora. docs/finetuning.md shows it.

PEFT's ``target_parameters`` adds the product of the adapters to the whole stack of weights at each forward,
``baddbmm(W, B, A)`` in a parametrization, and so does "peft" here, registered once, so that it compiles. Weights are
random, the loss is on the last hidden states (no head), the optimizer is AdamW on the adapters. A line per measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thunder_moe import quantize_
from thunder_moe.lora import add_lora_, lora_parameters

RANK, ALPHA = 16, 32


class PeftManner(nn.Module):
    """The weight (E, N, K) plus scaling * B (E, N, r) A (E, r, K), for all experts at each access."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        experts, n, k = weight.shape
        options: dict[str, Any] = dict(device=weight.device, dtype=torch.float32)
        self.a = nn.Parameter(torch.empty(experts, RANK, k, **options).uniform_(-(k**-0.5), k**-0.5))
        self.b = nn.Parameter(torch.zeros(experts, n, RANK, **options))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.baddbmm(weight, self.b.to(weight.dtype), self.a.to(weight.dtype), alpha=ALPHA / RANK)


def make(way: str, layers: int) -> tuple[nn.Module, list[nn.Parameter]]:
    """The layers without a head, and the parameters of their adapters."""
    import transformers

    hf: Any = transformers

    config = hf.Qwen3MoeConfig(
        vocab_size=32000, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.manual_seed(0)
        implementation = "grouped_mm" if way == "peft" else None
        options = {} if implementation is None else dict(experts_implementation=implementation)
        model: Any = hf.AutoModel.from_config(config, dtype=torch.bfloat16, **options)
    model.requires_grad_(False)
    if way == "nvfp4":
        quantize_(model)
        add_lora_(model, RANK, ALPHA)
        return model, list(lora_parameters(model))
    for module in list(model.modules()):
        if "gate_up_proj" in module._parameters:
            for name in ("gate_up_proj", "down_proj"):
                parametrize.register_parametrization(module, name, PeftManner(getattr(module, name)))
    adapters = [p for module in model.modules() if isinstance(module, PeftManner) for p in module.parameters()]
    for parameter in adapters:
        parameter.requires_grad_()
    return model, adapters


def measure(way: str, layers: int, tokens: int, compiled: bool, checkpoint: bool, rounds: int) -> dict[str, Any]:
    """Times steps; the memory is torch's, in GB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    model: Any
    model, adapters = make(way, layers)
    weights = torch.cuda.memory_allocated() / 1e9
    experts = sum(b.numel() * b.element_size() for n, b in model.named_buffers() if "experts" in n)
    experts += sum(
        p.numel() * p.element_size() for n, p in model.named_parameters() if "experts" in n and not p.requires_grad
    )
    model.train()
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    optimizer = torch.optim.AdamW(adapters, lr=1e-4, fused=True)
    ids = torch.randint(32000, (tokens // 2048, 2048), device="cuda")
    run: Any = model
    if compiled:
        run = torch.compile(model, backend="thunder_moe" if way == "nvfp4" else "inductor")
    torch.cuda.reset_peak_memory_stats()
    times, begin = [], time.perf_counter()
    for step in range(rounds + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run(input_ids=ids, use_cache=False).last_hidden_state.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= 2:
            times.append(time.perf_counter() - start)
        else:
            first = time.perf_counter() - begin
    step_ms = statistics.median(times) * 1e3
    return dict(
        way=way, layers=layers, tokens=tokens, compiled=compiled, checkpoint=checkpoint, step_ms=round(step_ms, 2),
        tokens_per_s=round(tokens / step_ms * 1e3), weights_gb=round(weights, 2), experts_gb=round(experts / 1e9, 2),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2), two_first_steps_s=round(first, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--ways", nargs="+", default=["nvfp4", "peft"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    args = parser.parse_args()
    for tokens in args.tokens:
        for way in args.ways:
            try:
                row = measure(way, args.layers, tokens, args.compiled, args.checkpoint, args.rounds)
            except torch.OutOfMemoryError:
                row = dict(way=way, layers=args.layers, tokens=tokens, compiled=args.compiled, out_of_memory=True)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
