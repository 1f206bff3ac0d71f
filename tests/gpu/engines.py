"""Tiny checkpoints, vLLM engines on them and the numbers that they have to give.
Called by the tests of vLLM's engine beside it; calls save_checkpoint, load_checkpoint and vLLM.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import release_in_mxfp4

from thunder_moe import load_checkpoint, quantize_, save_checkpoint, use_backend

PROMPTS = [[(7 * i + 3 * j + 1) % 500 for j in range(17)] for i in range(4)]
NEW = 12
TOLERANCE = 0.08  # of log probabilities in bf16, whose top one is about 4 above the mean; on a CPU bf16 is 0.041 off


def written(path: Path, seed: int, format: str = "nvfp4", gpt_oss: bool = False, linears: bool = False) -> Path:
    """A checkpoint of `_model` in a number format, which is "mxfp4" for GPT-OSS alone.

    `linears`: attention's projections are in the format, too.
    """
    model = _model(seed, gpt_oss)
    of_attention = (lambda _, name: "self_attn" in name) if linears else False
    if format == "mxfp4":
        model.save_pretrained(path)
        return release_in_mxfp4(path, seed, highest=-5)
    return save_checkpoint(quantize_(model, format=format, linears=of_attention), path)


def in_16_bits(path: Path, seed: int) -> Path:
    """The checkpoint of the Qwen3-MoE that `written` quantizes."""
    _model(seed, gpt_oss=False).save_pretrained(path)
    return path


def _model(seed: int, gpt_oss: bool) -> Any:
    """Make 3 layers of Qwen3-MoE or GPT-OSS. They have 16 experts, and 8 run for each token.

    Where the router's last choices are nearly equal bf16 may take another expert than fp32. The last of 8 has so small
    a weight, with a router of doubled weights, that this changes no number beyond the tolerance.
    """
    from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        vocab_size=512, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts_per_tok=8, num_hidden_layers=3, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, initializer_range=0.06, dtype="bfloat16",
    )  # fmt: skip
    config = (
        GptOssConfig(**sizes, intermediate_size=128, num_local_experts=16, sliding_window=16)
        if gpt_oss
        else Qwen3MoeConfig(
            **sizes, intermediate_size=256, moe_intermediate_size=128, num_experts=16, norm_topk_prob=True
        )
    )
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(2)
            elif "bias" in name or "sinks" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


@contextlib.contextmanager
def engine(path: Path, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Any]:
    """vLLM's LLM of a checkpoint in bf16, which decodes in CUDA graphs; in this process, but for ranks and where
    `environment` says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("THUNDER_MOE_VLLM", "1")
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        if find_spec("flashinfer") is None:
            patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.model_executor.models import registry

        patch.setattr(registry, "_run_in_subprocess", lambda function: function())  # one import of vLLM less
        defaults: dict[str, Any] = dict(
            skip_tokenizer_init=True, seed=0, dtype="bfloat16", max_model_len=128, max_num_seqs=8,
            max_num_batched_tokens=256, enable_prefix_caching=False, attention_backend="TRITON_ATTN",
            kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.1,
            compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8]),
        )  # fmt: skip
        llm = LLM(str(path), **{**defaults, **options})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


def generated(llm: Any, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens of each prompt, and their log probabilities."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0
    )
    out = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    tokens = [list(request.outputs[0].token_ids) for request in out]
    values = [
        [position[token].logprob for token, position in zip(own, request.outputs[0].logprobs, strict=True)]
        for own, request in zip(tokens, out, strict=True)
    ]
    return tokens, values


@torch.no_grad()
def check(path: Path, tokens: list[list[int]], values: list[list[float]]) -> None:
    """The log probabilities are those of load_checkpoint in fp32, and the tokens its best ones."""
    model = load_checkpoint(path, dtype=torch.float32).eval()
    for prompt, new, given in zip(PROMPTS, tokens, values, strict=True):
        with use_backend("reference"):
            logits = model(torch.tensor([prompt + new]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        own = wanted.gather(1, torch.tensor(new)[:, None])[:, 0]
        error = (own - torch.tensor(given)).abs()
        assert error.max() < TOLERANCE, error
        assert (wanted.amax(-1) - own).max() < TOLERANCE


def experts_of(model: torch.nn.Module) -> set[str]:
    """The classes that run the model's experts."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return {type(method.moe_kernel.fused_experts).__name__ for method in methods if hasattr(method, "moe_kernel")}


def methods_of_attention(model: torch.nn.Module) -> set[str]:
    """The classes that run its projections."""
    return {
        type(module.quant_method).__name__
        for name, module in model.named_modules()
        if name.endswith(("qkv_proj", "o_proj"))
    }
