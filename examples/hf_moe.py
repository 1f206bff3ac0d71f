"""Quantizes the experts of a Hugging Face model to NVFP4, compiles it and generates text.
Called by users (`python examples/hf_moe.py --help` for the options) and by tests/test_examples.py.
Calls transformers, thunder_moe.quantize_ and torch.compile. Speed: `python -m benchmarks model`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

    from thunder_moe import quantize_
except ImportError as error:
    raise ImportError(f"this example needs pip install 'thunder_moe[transformers]': {error}") from error


def load(directory: Path | None, device: str) -> tuple[Any, Any]:
    """Return (bf16 model, tokenizer) of a directory; without one a small random Qwen3-MoE and None."""
    auto: Any = AutoModelForCausalLM  # its methods have no annotations
    if directory is not None:
        model = auto.from_pretrained(directory, dtype=torch.bfloat16)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(directory)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        num_experts=16, num_experts_per_tok=4, intermediate_size=256, moe_intermediate_size=128,
        bos_token_id=0, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return auto.from_config(config, dtype=torch.bfloat16).to(device).eval(), None


def generate(model: Any, prompt: Tensor, tokens: int) -> Tensor:
    """Greedy text behind a prompt. A static cache keeps the shapes of all steps equal, so that they share a graph."""
    mask = torch.ones_like(prompt)
    options = dict(max_new_tokens=tokens, do_sample=False, cache_implementation="static", disable_compile=True)
    text: Tensor = model.generate(prompt, attention_mask=mask, **options)
    return text[:, prompt.shape[1] :]


def mebibytes(model: nn.Module) -> float:
    """Return the size of the parameters and buffers of a model."""
    return sum({id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}.values()) / 2**20


def main(argv: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Generates with the bf16 model, with the quantized one, and with that one compiled.

    Args:
        argv: command-line arguments, those of the process when None.

    Returns:
        "bf16", "nvfp4" and "nvfp4 compiled" -> the generated tokens, int64 (1, new tokens).
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory of a model (default: a small Qwen3-MoE, random weights)")
    parser.add_argument("--prompt", default="The capital of France is", help="with --model (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.model is not None and not args.model.is_dir():
        parser.error(f"--model: got {str(args.model)!r}, wanted the directory of a model")

    model, tokenizer = load(args.model, args.device)
    ids = tokenizer(args.prompt, return_tensors="pt").input_ids if tokenizer else torch.arange(1, 9)[None]
    prompt = ids.to(args.device)
    print(f"bf16: {mebibytes(model):,.1f} MiB")
    texts = {"bf16": generate(model, prompt, args.new_tokens)}

    quantize_(model)  # in place: the experts of all layers
    print(f"NVFP4 experts: {mebibytes(model):,.1f} MiB")
    texts["nvfp4"] = generate(model, prompt, args.new_tokens)

    model.forward = torch.compile(model.forward, fullgraph=True, backend=args.backend)  # generate calls forward
    texts["nvfp4 compiled"] = generate(model, prompt, args.new_tokens)

    for name, text in texts.items():
        print(f"{name}: {tokenizer.decode(text[0]) if tokenizer else text[0].tolist()}")
    return texts


if __name__ == "__main__":
    main()
