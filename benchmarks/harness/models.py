"""Hugging Face models with experts for the model suite: small random ones, a config.json, or a real checkpoint.
Called by suites/model.py; calls transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
except ImportError as error:
    raise ImportError(f"whole models need pip install 'thunder_moe[transformers]': {error}") from error

__all__ = ["CONFIGS", "config_of", "load"]

# Small models of well-known architectures: class of the configuration, and its arguments besides SIZES.
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


def config_of(source: str, layers: int | None = None) -> PretrainedConfig:
    """The configuration of a name in CONFIGS, or of a path to config.json; no token ends a text.

    Args:
        source: the name or path.
        layers: another number of layers.
    """
    if source in CONFIGS:
        config_class, own = CONFIGS[source]
        config: PretrainedConfig = getattr(transformers, config_class)(**{**SIZES, **own})
    else:
        config = AutoConfig.from_pretrained(source).get_text_config()
        config.eos_token_id = None  # random weights end no text
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def load(source: str, device: torch.device, layers: int | None = None) -> nn.Module:
    """A bf16 model in eval mode, without gradients: a checkpoint's weights where `source` has them, else random ones.

    Args:
        source: a name in CONFIGS, the path of a config.json, or the directory of a checkpoint.
        device: of the weights.
        layers: another number of layers, for random weights.
    """
    auto: Any = AutoModelForCausalLM  # its methods have no annotations
    model: nn.Module
    if Path(source).is_dir():
        model = auto.from_pretrained(source, dtype=torch.bfloat16)
        return model.to(device).eval().requires_grad_(False)
    with torch.device(device):
        model = auto.from_config(config_of(source, layers), dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model
