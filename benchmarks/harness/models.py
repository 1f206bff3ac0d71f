"""Builds Hugging Face models with experts: of real sizes, small ones, from a config.json, or from a checkpoint.
Called by suites/{model,generate,inference,load,sharded}.py and harness/{column,decode}.py; calls transformers.

Random models are made layer by layer: one whose 16-bit weights do not fit can be quantized while it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

try:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
except ImportError as error:
    raise ImportError(f"whole models need pip install 'thunder_moe[transformers]': {error}") from error

from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from thunder_moe import Llama4MoE, register

register("torch", "transformers")  # the backend "thunder_moe", and "thunder_moe_sdpa" for one

__all__ = [
    "CONFIGS",
    "REAL",
    "build",
    "config_of",
    "has_sdpa",
    "num_experts",
    "skeleton",
    "use_llama4_moe",
    "use_transformers_moe",
]

_AUTO: Any = AutoModelForCausalLM  # its methods have no annotations

# Real models by name: class of the configuration, and its arguments.
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        dict(vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
             num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
             norm_topk_prob=True, max_position_embeddings=40960, rms_norm_eps=1e-6),
    ),
    "mixtral-8x7b": (
        "MixtralConfig",
        dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
             num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
             sliding_window=None),
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        dict(vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
             num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128),
    ),
    "llama-4-scout": (
        "Llama4TextConfig",
        dict(vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
             num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_local_experts=16,
             num_experts_per_tok=1, interleave_moe_layer_step=1),
    ),
    "llama-4-maverick": (
        "Llama4TextConfig",
        dict(vocab_size=202048, hidden_size=5120, intermediate_size=8192, intermediate_size_mlp=16384,
             num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_local_experts=128,
             num_experts_per_tok=1, interleave_moe_layer_step=2, use_qk_norm=False),
    ),
}  # fmt: skip
# Small models of the same and other architectures: class of the configuration, and its arguments besides SIZES.
SIZES: dict[str, Any] = dict(
    vocab_size=4096, hidden_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    num_experts_per_tok=4, intermediate_size=512, max_position_embeddings=2048,
)  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=32, moe_intermediate_size=256, head_dim=64)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": ("OlmoeConfig", dict(num_experts=32, intermediate_size=256)),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(n_routed_experts=32, moe_intermediate_size=256, n_group=4, topk_group=2, first_k_dense_replace=1,
             kv_lora_rank=64, q_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
             num_key_value_heads=8),
    ),
    "gpt_oss": ("GptOssConfig", dict(num_local_experts=32, intermediate_size=256, head_dim=64)),
    "llama4": (
        "Llama4TextConfig",
        dict(num_local_experts=16, num_experts_per_tok=1, intermediate_size_mlp=512, head_dim=64,
             interleave_moe_layer_step=1),
    ),
}  # fmt: skip


def config_of(source: str, layers: int | None = None) -> PretrainedConfig:
    """Return the configuration of a name in REAL or CONFIGS, or of a path; no token ends a text.

    Args:
        source: the name, the path of a config.json, or the directory of a checkpoint.
        layers: another number of layers.
    """
    if source in REAL or source in CONFIGS:
        config_class, own = REAL.get(source) or CONFIGS[source]
        ends = dict(bos_token_id=0, pad_token_id=0, eos_token_id=None)
        sizes = {} if source in REAL else SIZES
        config: PretrainedConfig = getattr(transformers, config_class)(**{**sizes, **ends, **own})
    else:
        config = AutoConfig.from_pretrained(source).get_text_config()
        config.eos_token_id = None  # random weights end no text
    if layers is not None:
        config.num_hidden_layers = min(layers, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def num_experts(config: PretrainedConfig) -> int:
    """Return the number of experts of a layer, by whichever name the configuration has."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return int(next(getattr(config, name) for name in names if getattr(config, name, None)))


def skeleton(source: str, layers: int | None = None) -> nn.Module:
    """Return the bf16 model on the "meta" device; takes the arguments of `config_of`."""
    with torch.device("meta"):
        model: nn.Module = _AUTO.from_config(config_of(source, layers), dtype=torch.bfloat16)
    return model


def has_sdpa(source: str) -> bool:
    """True if transformers runs a model with scaled_dot_product_attention, not with "eager" attention alone."""
    model: Any = skeleton(source, 1)
    return bool(model.config._attn_implementation != "eager")


def build(
    source: str,
    device: torch.device,
    *,
    layers: int | None = None,
    attention: str = "sdpa",
    seed: int = 0,
    change: Callable[[nn.Module], None] | None = None,
    finish: Callable[[nn.Module, str], None] | None = None,
) -> nn.Module:
    """Return a frozen bf16 model in eval mode: a checkpoint's weights where `source` has them, else random ones.

    Args:
        source: a name in REAL or CONFIGS, the path of a config.json, or the directory of a checkpoint.
        device: of the weights.
        layers: another number of layers, for random weights. Layer i has the same weights whatever their number.
        attention: transformers' name of the attention; "eager" in its place for models that have no SDPA (GPT-OSS).
        seed: of random weights.
        change: called with the model before it has random weights; it may replace modules, as `use_llama4_moe` does.
        finish: called with each decoder layer and its name once it has its weights, then with the model and "". It may
            replace modules inside. A layer's 16-bit weights that it drops are freed before the next layer is made.
    """
    model: nn.Module
    if checkpoint := Path(source).is_dir():
        model = _AUTO.from_pretrained(source, dtype=torch.bfloat16).to(device)
    else:
        model = skeleton(source, layers)
    if change is not None:
        change(model)
    model.eval().requires_grad_(False)
    if attention != "sdpa":
        model.set_attn_implementation(attention)  # type: ignore[operator]
    for index, (name, layer) in enumerate(_layers(model)):
        if not checkpoint:
            _fill(layer, device, seed + 1 + index)
        if finish is not None:
            finish(layer, name)
    if not checkpoint:
        _fill(model, device, seed)
    if finish is not None:
        finish(model, "")
    return model


def use_llama4_moe(model: nn.Module) -> None:
    """Replace Llama 4's layers of experts by this package's `Llama4MoE`, as Thunder's benchmark does by its own."""
    for layer in _layers_with(model, Llama4TextMoe):
        layer.feed_forward = Llama4MoE.from_transformers(layer.feed_forward)
        layer.is_moe_layer = False  # transformers' layer also returns the router's logits, which nobody reads


def use_transformers_moe(model: nn.Module) -> None:
    """Undo `use_llama4_moe`, with the weights that the layers have now."""
    for layer in _layers_with(model, Llama4MoE):
        config: Any = model.config
        block_class: Any = Llama4TextMoe  # its constructor has no annotations
        with torch.device("meta"):
            stock = block_class(config)
        state = layer.feed_forward.state_dict()
        gate, up, down = (state.pop(f"routed_experts.{name}_proj.weight") for name in ("gate", "up", "down"))
        state["experts.gate_up_proj"], state["experts.down_proj"] = torch.cat([gate, up], 1).mT, down.mT
        stock.load_state_dict(state, assign=True)
        layer.feed_forward, layer.is_moe_layer = stock.eval().requires_grad_(False), True


def _layers_with(model: nn.Module, block: type[nn.Module]) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(getattr(layer, "feed_forward", None), block)]


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the decoder layers with their names."""
    name, layers = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    return ((f"{name}.{index}", layer) for index, layer in layers.named_children())


def _fill(module: nn.Module, device: torch.device, seed: int) -> None:
    """Gives tensors on the "meta" device values: weights random ones, norms 1, biases 0, rotary tables theirs."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for part in list(module.modules()):
        for name, child in part.named_children():
            if type(child).__name__.endswith("RotaryEmbedding"):  # its buffers are computed from the configuration
                setattr(part, name, type(child)(child.config).to(device))
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_meta:
                data = torch.empty_like(parameter, device=device)
                if parameter.ndim > 1:
                    data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
                else:
                    data.fill_(float("Norm" in type(part).__name__ and name == "weight"))
                setattr(part, name, nn.Parameter(data, requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(part, name, torch.zeros_like(buffer, device=device))
