"""Quantises the experts of a Hugging Face model to NVFP4, compiles it, generates; memory and speed beside bf16.
Called by users (`python examples/hf_moe.py --help` for the options) and by tests/test_examples.py.
Calls thunder_moe.quantize_, transformers and torch.compile.

config with random weights, or a model's directory -> bf16: eager, compiled -> quantize_: eager, compiled -> table
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from thunder_moe import quantize_
    from thunder_moe.integrations.huggingface.experts import expert_blocks
except ImportError as error:
    raise ImportError(f"this example needs pip install 'thunder_moe[transformers]': {error}") from error

# Small models of well-known architectures: class of the configuration, and what it needs besides SIZES.
SIZES: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
    num_experts_per_tok=4, intermediate_size=512, max_position_embeddings=2048,
    bos_token_id=0, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=32, moe_intermediate_size=256, head_dim=64)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": ("OlmoeConfig", dict(num_experts=32, intermediate_size=256)),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(n_routed_experts=32, moe_intermediate_size=256, n_group=4, topk_group=2, first_k_dense_replace=1,
             kv_lora_rank=64, q_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32),
    ),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=32, intermediate_size=256, head_dim=64)),
    "llama4": (
        "Llama4TextConfig",
        dict(num_local_experts=16, num_experts_per_tok=1, intermediate_size_mlp=512, head_dim=64,
             interleave_moe_layer_step=1),
    ),
}  # fmt: skip
COLUMNS = {
    "bf16_eager": "bf16 eager",
    "bf16_compiled": "bf16 compiled",
    "nvfp4_eager": "NVFP4 eager",
    "nvfp4_compiled": "NVFP4 compiled",
}


# ---- model and prompt


def load(args: argparse.Namespace) -> tuple[nn.Module, Tensor, Any]:
    """(model in bf16, prompt (batch, length) int64, tokenizer or None)."""
    if args.model is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(args.device).eval()
        prompt = tokenizer([args.prompt] * args.batch, return_tensors="pt").input_ids
        return model, prompt.to(args.device), tokenizer
    if args.config in CONFIGS:
        config_class, own = CONFIGS[args.config]
        config = getattr(transformers, config_class)(**{**SIZES, **own})
    else:
        config = AutoConfig.from_pretrained(args.config).get_text_config()
        config.eos_token_id = None  # random weights end no text
    if args.layers is not None:
        config.num_hidden_layers = args.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: args.layers]
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    prompt = torch.randint(1, config.vocab_size, (args.batch, args.prompt_tokens), device=args.device)
    return model, prompt, None


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each once."""
    return sum({id(t): t.nbytes for t in [*module.parameters(), *module.buffers()]}.values())


def set_forward(model: nn.Module, forward: Callable | None) -> None:
    """Makes `generate` call another forward, or its class' own again."""
    vars(model).pop("forward", None)
    if forward is not None:
        vars(model)["forward"] = forward


# ---- measurements


def generate(model: nn.Module, prompt: Tensor, tokens: int) -> Tensor:
    """Greedy text behind the prompt, (batch, length + tokens), with a cache of fixed size."""
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static")
    # generate would compile by itself on a GPU; here the caller decides.
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), disable_compile=True, **options)


def seconds(function: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """The median time of a call, after one that does not count."""
    times = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def measure(model: nn.Module, prompt: Tensor, args: argparse.Namespace) -> tuple[dict[str, float], Tensor]:
    """(numbers of one column, the generated tokens)."""
    text = generate(model, prompt, args.new_tokens)
    first = seconds(lambda: generate(model, prompt, 1), args.device, args.rounds)
    whole = seconds(lambda: generate(model, prompt, args.new_tokens), args.device, args.rounds)
    numbers = {
        "prompt_tokens_per_second": prompt.numel() / first,
        "new_tokens_per_second": prompt.shape[0] * (args.new_tokens - 1) / max(whole - first, 1e-9),
    }
    return numbers, text[:, prompt.shape[1] :]


@torch.no_grad()
def last_logits(model: nn.Module, prompt: Tensor) -> Tensor:
    return model(prompt, logits_to_keep=1).logits.float()


def compiler(device: torch.device) -> tuple[str, dict[str, Any]]:
    """(name, options of torch.compile): inductor where it works, else aot_eager; says why."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
        return "inductor", dict(mode="reduce-overhead") if device.type == "cuda" else {}
    except Exception as error:  # whatever a missing C++ compiler or Triton raises
        print(f"torch.compile cannot use inductor here ({str(error).splitlines()[0]}): aot_eager takes its place")
        return "aot_eager", dict(backend="aot_eager")


# ---- output


def table(columns: dict[str, dict[str, float]], labels: dict[str, str]) -> str:
    rows = [["", *labels.values()]]
    for title, key, scale, digits in (
        ("weights in memory, MiB", "model_bytes", 2**-20, 1),
        ("of which experts, MiB", "expert_bytes", 2**-20, 1),
        ("prompt, tokens per second", "prompt_tokens_per_second", 1.0, 0),
        ("generation, tokens per second", "new_tokens_per_second", 1.0, 1),
    ):
        rows.append([title, *(f"{columns[name][key] * scale:,.{digits}f}" for name in labels)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Quantise the experts of a Hugging Face Mixture-of-Experts model to NVFP4, compile it, generate, "
        "and compare memory and speed with bf16.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = ", ".join(CONFIGS)
    parser.add_argument(
        "--config", default="qwen3_moe", help=f"random weights: a small model ({names}), or config.json"
    )
    parser.add_argument("--model", type=Path, help="directory of a model with its weights, instead of --config")
    parser.add_argument("--layers", type=int, help="with --config: another number of layers")
    parser.add_argument("--prompt", default="The capital of France is", help="with --model")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="with --config: length of the random prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--batch", type=int, default=1, help="texts at once")
    parser.add_argument("--rounds", type=int, default=3, help="timed calls, of which the median counts")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and prompt")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the numbers there, as JSON")
    args = parser.parse_args(argv)
    least = dict(layers=1, prompt_tokens=1, new_tokens=2, batch=1, rounds=1)
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            parser.error(f"--{name.replace('_', '-')}: got {value}, wanted at least {bound}")
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model: got {str(args.model)!r}, wanted the directory of a model")
    if args.config not in CONFIGS and not Path(args.config).exists():
        parser.error(f"--config: got {args.config!r}, wanted one of {names}, or a path to config.json")
    try:
        torch.empty(0, device=args.device)
        args.device = torch.device(args.device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built without CUDA
        parser.error(f"--device: cannot use {args.device!r}: {str(error).splitlines()[0]}")
    return args


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs everything; returns what the JSON holds."""
    started = time.perf_counter()
    args = parse(argv)
    if args.device.type == "cpu" and TorchVersion(torch.__version__) < (2, 11):
        raise SystemExit(
            "on a CPU this needs torch 2.11: torch.compile of 2.10 cannot trace transformers' bf16 experts"
        )
    torch.manual_seed(args.seed)
    model, prompt, tokenizer = load(args)
    blocks = expert_blocks(model)
    if not blocks:
        raise SystemExit(f"{type(model).__name__} has no experts that thunder_moe knows")
    backend, options = compiler(args.device)
    parameters, kind = sum(p.numel() for p in model.parameters()), type(next(iter(blocks.values()))).__name__
    print(f"model  {type(model).__name__}, {parameters:,} parameters, {len(blocks)} layers of {kind}")
    print(f"       {args.batch} x {prompt.shape[1]} prompt tokens, {args.new_tokens} to generate, on {args.device}")
    names = [*blocks]
    del blocks  # they hold the 16-bit weights
    labels: dict[str, str] = {}
    columns: dict[str, dict[str, float]] = {}
    texts: dict[str, Tensor] = {}
    before = last_logits(model, prompt)
    for name, label in COLUMNS.items():
        if name == "nvfp4_eager":
            torch._dynamo.reset()  # nothing compiled may keep the 16-bit weights
            quantize_(model)
        compiled = name.endswith("compiled")
        set_forward(model, torch.compile(model.forward, fullgraph=True, **options) if compiled else None)
        start = time.perf_counter()
        columns[name], texts[name] = measure(model, prompt, args)
        columns[name] |= {"model_bytes": tensor_bytes(model)}
        columns[name] |= {"expert_bytes": sum(tensor_bytes(model.get_submodule(path)) for path in names)}
        labels[name] = label if not compiled or backend == "inductor" else f"{label} ({backend})"
        print(f"       {labels[name]} measured in {time.perf_counter() - start:.0f} s")
    set_forward(model, None)
    after = last_logits(model, prompt)
    error = ((after - before).norm() / before.norm()).item()
    same = (texts["nvfp4_eager"] == texts["bf16_eager"]).long().cumprod(-1).sum(-1).float().mean().item()
    print(f"\n{table(columns, labels)}\n")
    print(f"NVFP4 changes the next token's logits by {100 * error:.1f} % (relative Frobenius norm)")
    print(f"and leaves the first {same:.1f} of {args.new_tokens} greedy tokens as they are in bf16")
    if args.model is None:
        print("(with random weights, whose next tokens are close calls)")
    if tokenizer is not None:
        for name in ("bf16_eager", "nvfp4_eager"):
            print(f"{COLUMNS[name]}: {args.prompt}{tokenizer.decode(texts[name][0])}")
    numbers = {
        "columns": columns,
        "labels": labels,
        "relative_error_of_logits": error,
        "first_tokens_as_bf16": same,
        "tokens": {name: text.tolist() for name, text in texts.items()},
        "options": {name: str(value) for name, value in vars(args).items()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - started,
    }  # fmt: skip
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(numbers, indent=2) + "\n")
    print(f"{numbers['seconds']:.0f} s on {torch.get_num_threads()} threads")
    return numbers


if __name__ == "__main__":
    main()
