"""Times training steps of LoRA on the experts of Qwen3-30B-A3B's layers: NVFP4 weights here, bf16 weights as in PEFT.
Called by hand on a GPU, `python -m benchmarks.lora`; calls transformers and finetune.lora. docs/finetuning.md shows it.

PEFT's ``target_parameters`` adds the product of the adapters to the whole stack of weights at each forward,
``baddbmm(W, B, A)`` in a parametrization. "peft" here does the same, registered once, so that it compiles. Weights are
random, the loss is on the last hidden states (no head), the optimizer is AdamW on the adapters. Each measurement prints
a line. Attention is torch's, causal without a mask. transformers makes a mask while torch.compile traces it; this takes
4.4 ms more for a layer's 16384 tokens, with either kind of weights (`--masked`).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thunder_moe import quantize_, register
from thunder_moe.finetune.lora import add_lora_, lora_parameters

RANK, ALPHA = 16, 32
_FIRST = 3  # steps that compile, warm up and record CUDA graphs
CAUSAL = "causal_sdpa"


def _causal_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Map (B, heads, length, head_dim) each -> (B, length, heads, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(CAUSAL, _causal_attention)
    AttentionMaskInterface.register(CAUSAL, lambda *args, **options: None)


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


# transformers' class of the configuration, what differs from its defaults
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        dict(
            vocab_size=32000, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
            max_position_embeddings=32768,
        ),
    ),
    "mixtral-8x7b": ("MixtralConfig", {}),
    "gpt-oss-20b": ("GptOssConfig", dict(num_hidden_layers=24, num_local_experts=32)),
}  # fmt: skip


def make(name: str, way: str, layers: int | None, masked: bool = False) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return the layers of a model without a head, all where None, and the parameters of their adapters; masked: by
    transformers' attention, which GPT-OSS has always."""
    import transformers

    hf: Any = transformers
    _register_attention()
    config_class, sizes = MODELS[name]
    config = getattr(hf, config_class)(**sizes)
    if layers is not None:
        config = getattr(hf, config_class)(**{**sizes, "num_hidden_layers": layers})
    with torch.device("cuda"):
        torch.manual_seed(0)
        implementation = "grouped_mm" if way == "peft" else None
        options = {} if implementation is None else dict(experts_implementation=implementation)
        if not masked and name != "gpt-oss-20b":
            options["attn_implementation"] = CAUSAL
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


def measure(
    name: str, way: str, layers: int | None, tokens: int, compiled: str | None, checkpoint: bool, rounds: int,
    masked: bool,
) -> dict[str, Any]:  # fmt: skip
    """Times steps; the memory is torch's, in GB."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    model: Any
    model, adapters = make(name, way, layers, masked)
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
        register("torch")  # the backend "thunder_moe"
        run = torch.compile(model, backend="thunder_moe" if way == "nvfp4" else "inductor", mode=compiled)
    torch.cuda.reset_peak_memory_stats()
    times, begin = [], time.perf_counter()
    for step in range(rounds + _FIRST):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.compiler.cudagraph_mark_step_begin()
        loss = run(input_ids=ids, use_cache=False).last_hidden_state.float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= _FIRST:
            times.append(time.perf_counter() - start)
        else:
            first = time.perf_counter() - begin
    step_ms = statistics.median(times) * 1e3
    return dict(
        model=name, way=way, layers=model.config.num_hidden_layers, tokens=tokens, compiled=compiled,
        checkpoint=checkpoint, masked=masked, step_ms=round(step_ms, 2), tokens_per_s=round(tokens / step_ms * 1e3),
        weights_gb=round(weights, 2), experts_gb=round(experts / 1e9, 2),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2), first_steps_s=round(first, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="all, if not given")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--ways", nargs="+", default=["nvfp4", "peft"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--compiled", nargs="?", const="default", choices=("default", "reduce-overhead"), help="the mode"
    )
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--masked", action="store_true")
    args = parser.parse_args()
    for tokens in args.tokens:
        for way in args.ways:
            try:
                row = measure(
                    args.model, way, args.layers, tokens, args.compiled, args.checkpoint, args.rounds, args.masked
                )
            except torch.OutOfMemoryError:
                row = dict(
                    model=args.model,
                    way=way,
                    layers=args.layers,
                    tokens=tokens,
                    compiled=args.compiled,
                    out_of_memory=True,
                )
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
