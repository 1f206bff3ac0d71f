"""Tiny random transformers models with experts, one per architecture, whose experts weigh enough for errors to show.
Called by the tests of integrations and examples; calls transformers.
"""

import torch
from torch import nn

VOCABULARY = 64
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
_ROUTING = dict(num_experts_per_tok=2, intermediate_size=32)
_COMMON = {**_SIZES, **_ROUTING, "max_position_embeddings": 128, "bos_token_id": 0, "pad_token_id": 0}
_LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
_DEEPSEEK = dict(
    n_routed_experts=8, n_group=2, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, num_key_value_heads=4
)
_LLAMA4 = dict(num_local_experts=8, intermediate_size_mlp=64, interleave_moe_layer_step=1, attention_chunk_size=64)

# Name of the configuration class in transformers, what it needs besides _COMMON, and the layers that have experts.
ARCHITECTURES: dict[str, tuple[str, dict, tuple[int, ...]]] = {
    "llama4": ("Llama4TextConfig", {**_LLAMA4, "head_dim": 16}, (0, 1)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=8, moe_intermediate_size=32, head_dim=16), (0, 1)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=8), (0, 1)),
    "olmoe": ("OlmoeConfig", dict(num_experts=8), (0, 1)),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, **_DEEPSEEK, "moe_intermediate_size": 32}, (1,)),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=8, head_dim=16), (0, 1)),
}


def tiny_config(name: str):
    """The configuration of one of `ARCHITECTURES`; no token ends a text."""
    import transformers

    config_class, own, _ = ARCHITECTURES[name]
    config = getattr(transformers, config_class)(**{**_COMMON, **own, "eos_token_id": None})
    return config


def tiny_model(name: str, dtype: torch.dtype = torch.float32, config=None, **options) -> nn.Module:
    """A model of one of `ARCHITECTURES`, the same at each call."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(name) if config is None else config
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1 or "bias" in path or "sinks" in path:
                # Llama 4's and GPT-OSS' experts are (E, K, N), all other weights have K last.
                transposed = parameter.ndim == 3 and name in ("llama4", "gpt_oss")
                std = parameter.shape[-2 if transposed else -1] ** -0.5 if "embed" not in path else 1.0
                parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """int64 (batch, length), the same at each call."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))
