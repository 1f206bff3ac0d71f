"""Tiny random transformers models with experts, one per architecture, whose experts weigh enough for errors to show.
Called by the tests of integrations and examples; calls transformers. `ARCHITECTURES` are those of most tests, `OTHERS`
those whose names, tied heads, biases or layers are special: for what is cheap enough to run over all.
"""

import random

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

_SHARED = dict(moe_intermediate_size=32, n_shared_experts=1, head_dim=16)
_GLM = {**_SHARED, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_QWEN = dict(num_experts=8, moe_intermediate_size=32, head_dim=16)
_LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32,
)  # fmt: skip
_FULL = dict(layer_types=["full_attention", "full_attention"])
_GRANITE = dict(num_local_experts=8, shared_intermediate_size=32)
_MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16)
_VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4,
               deepstack_visual_indexes=[0], num_position_embeddings=16)  # fmt: skip
OTHERS: dict[str, tuple[str, dict, tuple[int, ...]]] = {
    "afmoe": ("AfmoeConfig", {**_QWEN, **_FULL, "num_shared_experts": 1, "num_dense_layers": 1}, (1,)),
    "cohere2_moe": ("Cohere2MoeConfig", {**_QWEN, "tie_word_embeddings": True}, (0, 1)),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, **_DEEPSEEK, "moe_intermediate_size": 32}, (1,)),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**_LATENT, **_DEEPSEEK, "moe_intermediate_size": 32, "index_n_heads": 2, "index_head_dim": 16,
         "index_topk": 16},
        (1,),
    ),
    "dots1": ("Dots1Config", _GLM, (1,)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        dict(moe_num_experts=8, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=32, moe_layer_start_index=1,
             moe_layer_end_index=1, head_dim=16, tie_word_embeddings=True),
        (1,),
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**_QWEN, "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        (1,),
    ),
    "flex_olmo": ("FlexOlmoConfig", dict(num_experts=8), (0, 1)),
    "gemma4": (
        "Gemma4TextConfig",
        {**_QWEN, **_FULL, "top_k_experts": 2, "enable_moe_block": True, "global_head_dim": 16,
         "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "tie_word_embeddings": True},
        (0, 1),
    ),
    "glm4_moe": ("Glm4MoeConfig", _GLM, (1,)),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_LATENT, **_DEEPSEEK, "n_group": 1, "moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse"]},
        (1,),
    ),
    "granitemoe": ("GraniteMoeConfig", dict(num_local_experts=8), (0, 1)),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig", {**_GRANITE, **_MAMBA, "layer_types": ["mamba", "attention"]}, (0, 1),
    ),
    "granitemoeshared": ("GraniteMoeSharedConfig", _GRANITE, (0, 1)),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", dict(num_experts=8, moe_topk=2, head_dim=16), (0, 1)),
    "hy_v3": ("HYV3Config", _QWEN, (1,)),
    "jamba": (
        "JambaConfig",
        dict(num_experts=8, expert_layer_offset=1, expert_layer_period=2, attn_layer_offset=1, attn_layer_period=2,
             mamba_dt_rank=16, use_mamba_kernels=False),
        (1,),
    ),
    "laguna": ("LagunaConfig", _QWEN, (1,)),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        dict(layer_types=["conv", "full_attention"], num_experts=8, moe_intermediate_size=32, num_dense_layers=1,
             tie_word_embeddings=True),
        (1,),
    ),
    "mellum": ("MellumConfig", _QWEN, (0, 1)),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        dict(n_routed_experts=8, moe_intermediate_size=32, head_dim=16, v_head_dim=16),
        (1,),
    ),
    "minimax": (
        "MiniMaxConfig",
        dict(layer_types=["linear_attention", "full_attention"], num_local_experts=8, head_dim=16),
        (0, 1),
    ),
    "minimax_m2": ("MiniMaxM2Config", dict(num_local_experts=8, head_dim=16, rotary_dim=8), (0, 1)),
    "nemotron_h": (
        "NemotronHConfig",
        {**_GLM, "layers_block_type": ["mamba", "moe", "attention"], "moe_shared_expert_intermediate_size": 32,
         "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16},
        (1,),
    ),
    "phimoe": ("PhimoeConfig", dict(num_local_experts=8), (0, 1)),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(num_experts=8, moe_intermediate_size=32, shared_expert_intermediate_size=32, decoder_sparse_step=1),
        (0, 1),
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_QWEN, **_LINEAR}, (0, 1)),
    "qwen3_next": ("Qwen3NextConfig", {**_QWEN, **_LINEAR}, (0, 1)),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {"text_config": {**_QWEN, "tie_word_embeddings": False}, "vision_config": _VISION},
        (0, 1),
    ),
    "solar_open": ("SolarOpenConfig", {**_SHARED, "n_routed_experts": 8}, (0, 1)),
}  # fmt: skip


def tiny_config(name: str, layers: int = 2):
    """The configuration of one of `ARCHITECTURES` or `OTHERS`; no token ends a text.

    A single layer, which halves the time of a compilation, has experts in all `ARCHITECTURES`.
    """
    import transformers

    config_class, own, _ = (ARCHITECTURES | OTHERS)[name]
    text = {**_COMMON, **own.get("text_config", own), "eos_token_id": None, "num_hidden_layers": layers}
    if layers == 1 and "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 0
    options = {**own, "text_config": text} if "text_config" in own else text
    return getattr(transformers, config_class)(**options)


def tiny_model(name: str, dtype: torch.dtype = torch.float32, config=None, **options) -> nn.Module:
    """A model of one of `ARCHITECTURES` or `OTHERS`, the same at each call."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = tiny_config(name) if config is None else config
    auto = AutoModelForImageTextToText if "text_config" in (ARCHITECTURES | OTHERS)[name][1] else AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype, **options).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1 or path.endswith(("bias", "sinks", "A_log")) or "_bias" in path:
                # Llama 4's and GPT-OSS' experts are (E, K, N), all other weights have K last.
                transposed = parameter.ndim == 3 and name in ("llama4", "gpt_oss")
                std = parameter.shape[-2 if transposed else -1] ** -0.5 if "embed" not in path else 1.0
                parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))
    return model


def tokens(batch: int = 2, length: int = 9) -> torch.Tensor:
    """int64 (batch, length), the same at each call."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def save_model_and_text(folder) -> None:
    """Saves a tiny model with a tokenizer as folder/model, and 100 of its words as folder/text.txt."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", *(f"w{i}" for i in range(1, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / "model")
    tiny_model("qwen3_moe").save_pretrained(folder / "model")
    generator = random.Random(1)
    (folder / "text.txt").write_text(" ".join(f"w{generator.randint(1, VOCABULARY - 1)}" for _ in range(100)))
