"""Tiny checkpoints for vLLM, what this package generates from them, and an engine of vLLM in this process.
Called by the tests beside it; calls tiny_models, save_checkpoint, load_checkpoint and vLLM.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import release_in_mxfp4
from tiny_models import VOCABULARY, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, Mxfp4Config

from thunder_moe import load_checkpoint, quantize_, save_checkpoint

PROMPTS = [[(7 * i + 3 * j + 1) % VOCABULARY for j in range(12)] for i in range(3)]
NEW_TOKENS = 16
# vLLM's attention on a CPU has no heads narrower than 32.
_WIDER = dict(
    hidden_size=128, mamba_n_heads=16, head_dim=32, v_head_dim=32, global_head_dim=32, attention_chunk_size=128
)
# Latent attention is there for DeepSeek's own sizes alone.
_LATENT = dict(
    hidden_size=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
    qk_head_dim=128,
    head_dim=64,
)
# What config.json has on the hub and vLLM needs, mostly nothing that transformers' configuration class knows.
_ON_THE_HUB: dict[str, dict[str, Any]] = {
    "afmoe": dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    "deepseek_v2": dict(topk_method="group_limited_greedy", scoring_func="softmax"),
    "deepseek_v3": dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    "glm4_moe_lite": dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    "hy_v3": dict(first_k_dense_replace=1, expert_hidden_dim=32, route_norm=True),
    "minimax_m2": dict(scoring_func="sigmoid", use_routing_bias=True),
    "llama4": dict(num_experts_per_tok=1),  # all that vLLM has weights on the experts' input for, and the hub
}


def config_for_vllm(name: str, **changes: Any) -> Any:
    """The tiny configuration of an architecture, with heads and chunks that vLLM has kernels for."""
    config = tiny_config(name)
    text = config.get_text_config()
    sizes = _LATENT if hasattr(text, "kv_lora_rank") else _WIDER
    for key, value in {**sizes, **changes}.items():
        if getattr(text, key, None) is not None:
            setattr(text, key, value)
    for key, value in _ON_THE_HUB.get(name, {}).items():
        setattr(text, key, value)
    return config


def export(
    name: str, path: Path, dtype: torch.dtype = torch.float32, *, dense: bool = False, head: bool = False,
    mirrored: bool = False, format: Any = "nvfp4",
    **changes: Any,
) -> Path:  # fmt: skip
    """Writes a quantized tiny model with save_checkpoint.

    Args:
        name: of an architecture.
        path: of the checkpoint.
        dtype: of the model.
        dense: all linears but the head are 4-bit, too.
        head: the head is, as well.
        format: of `quantize_`.
        mirrored: other weights, the rows of all matrices in reverse order.
        **changes: of the configuration.
    """
    model = tiny_model(name, dtype, config=config_for_vllm(name, **changes))
    if mirrored:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data = parameter.data.flip(-2)
    linears = (lambda _, path: head or "lm_head" not in path) if dense else False
    return save_checkpoint(quantize_(model, linears=linears, format=format), path)


def released_gpt_oss(path: Path, seed: int = 0, *, spread: bool = False, **changes: Any) -> Path:
    """Writes a tiny float32 GPT-OSS with experts as in OpenAI's release.

    Args:
        path: of the checkpoint.
        seed: of the experts.
        spread: as in `release_in_mxfp4`.
        **changes: of the configuration.
    """
    tiny_model("gpt_oss", torch.float32, config=config_for_vllm("gpt_oss", **changes)).save_pretrained(path)
    return release_in_mxfp4(path, seed, spread=spread)


def decoded_by_transformers(path: Path) -> Any:
    """The model of `released_gpt_oss` in float32; transformers decodes the experts to bfloat16, exactly."""
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True)).float()


def our_tokens(path: Path, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What load_checkpoint and greedy generate give for each prompt."""
    return generated(load_checkpoint(path), prompts, new_tokens)


@torch.no_grad()
def generated(model: Any, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """What greedy generate gives for each prompt."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@contextlib.contextmanager
def engine(path: Path, **options: Any) -> Iterator[Any]:
    """vLLM's LLM of a checkpoint, eager and in this process unless options say otherwise."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # a process per model class: half a minute each
    # vLLM's compiled rotary embedding on a CPU reads the keys of latent attention wrongly, with 16-bit experts too.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

    defaults: dict[str, Any] = dict(
        skip_tokenizer_init=True, dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=4,
        max_num_batched_tokens=128, seed=0,
    )  # fmt: skip
    llm = LLM(str(path), **{**defaults, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def their_tokens(llm: Any, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy tokens of an engine, all prompts at once."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=new_tokens, min_tokens=0, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(request.outputs[0].token_ids) for request in llm.generate(inputs, parameters, use_tqdm=False)]


def agreement(theirs: list[list[int]], ours: list[list[int]]) -> tuple[int, int]:
    """(tokens that are equal before the first difference, all tokens)."""
    equal = 0
    for a, b in zip(theirs, ours, strict=True):
        different = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += different[0] if different else len(b)
    return equal, sum(map(len, ours))
