"""Recognizes dense layers by their names: routers, embeddings, encoders of images and sound, the decoder's linears; and
lists linears that read the same tensor, by the names that engines merge and by class of transformers.
Called by dense_linears, checkpoint, the command line and quantizer of huggingface; calls nothing of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Routers stay 16-bit: they are small, and their rounding would change the choice of experts.
_ROUTERS = re.compile(r"(^|[._])(router|gate|gating|wg)($|\.)")
# Encoders of other things than text see many rows at once, where 4-bit weights gain nothing.
_ENCODERS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|multi_modal|multimodal|mm)([._]|$)")
_LINEARS = re.compile(r"(^|[._])(\w*_proj(_with_mqa)?|w[123qkvo]|wqkv|qkv|fc[12]|query_key_value)$")
# Linears whose weight is read by the code of the models: DeepSeek's indexer and T5's blocks read its dtype, Mamba's
# kernels and HunYuan's gate the whole weight.
_READ_BY_CODE = re.compile(r"(^|[._])(weights_proj|dt_proj|(mixer|mamba)\.out_proj|(DenseReluDense|mlp)\.wo|gate\.wg)$")
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens\w*|embed_positions|embed_in|\w*embeddings?|wte|wpe)$")
# Names of siblings that read the same rows. Engines merge them, so that they share a global scale in checkpoints.
READ_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
)  # fmt: skip

_QKV, _GATE_UP = READ_TOGETHER[:2]
_CLASSES = {
    _QKV: """
        cohere2_moe.Cohere2MoeAttention dots1.Dots1Attention ernie4_5_moe.Ernie4_5_MoeAttention
        exaone_moe.ExaoneMoeAttention flex_olmo.FlexOlmoAttention glm4_moe.Glm4MoeAttention gpt_oss.GptOssAttention
        granitemoe.GraniteMoeAttention granitemoehybrid.GraniteMoeHybridAttention
        granitemoeshared.GraniteMoeSharedAttention hunyuan_v1_moe.HunYuanMoEV1Attention hy_v3.HYV3Attention
        jamba.JambaAttention lfm2_moe.Lfm2MoeAttention llama.LlamaAttention llama4.Llama4TextAttention
        mellum.MellumAttention mimo_v2_flash.MiMoV2FlashAttention minimax.MiniMaxAttention
        minimax_m2.MiniMaxM2Attention mistral.MistralAttention mixtral.MixtralAttention nemotron_h.NemotronHAttention
        olmoe.OlmoeAttention phimoe.PhimoeAttention qwen2.Qwen2Attention qwen2_moe.Qwen2MoeAttention
        qwen3.Qwen3Attention qwen3_5_moe.Qwen3_5MoeAttention qwen3_moe.Qwen3MoeAttention
        qwen3_next.Qwen3NextAttention qwen3_vl_moe.Qwen3VLMoeTextAttention solar_open.SolarOpenAttention
    """,
    (*_QKV, "gate_proj"): "afmoe.AfmoeAttention",
    (*_QKV, "g_proj"): "laguna.LagunaAttention",
    ("q_a_proj", "kv_a_proj_with_mqa"): "deepseek_v32.DeepseekV32Attention",
    ("qkv_proj", "output_gate"): "minimax.MiniMaxLightningAttention",
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"): "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
    ("in_proj_qkvz", "in_proj_ba"): "qwen3_next.Qwen3NextGatedDeltaNet",
    _GATE_UP: """
        afmoe.AfmoeMLP deepseek_v2.DeepseekV2MLP deepseek_v3.DeepseekV3MLP deepseek_v32.DeepseekV32MLP dots1.Dots1MLP
        ernie4_5_moe.Ernie4_5_MoeMLP exaone_moe.ExaoneMoeMLP gemma4.Gemma4TextMLP glm4_moe.Glm4MoeMLP
        glm4_moe_lite.Glm4MoeLiteMLP hunyuan_v1_moe.HunYuanMoEV1MLP hy_v3.HYV3MLP jamba.JambaMLP laguna.LagunaMLP
        llama.LlamaMLP llama4.Llama4TextMLP mimo_v2_flash.MiMoV2FlashMLP mistral.MistralMLP qwen2.Qwen2MLP
        qwen2_moe.Qwen2MoeMLP qwen3.Qwen3MLP qwen3_moe.Qwen3MoeMLP qwen3_5_moe.Qwen3_5MoeMLP qwen3_next.Qwen3NextMLP
        solar_open.SolarOpenMLP
    """,
    ("w1", "w3"): "lfm2_moe.Lfm2MoeMLP",
}
# Module and name of a class -> the linears that each of its calls runs once, in this order, on its unchanged input (the
# first argument, or `hidden_states`).
READ_TOGETHER_BY: dict[tuple[str, str], tuple[str, ...]] = {
    ("thunder_moe.nn.swiglu", "SwiGLU"): _GATE_UP,
    **{
        (f"transformers.models.{model}.modeling_{model}", name): linears
        for linears, classes in _CLASSES.items()
        for model, _, name in (row.partition(".") for row in classes.split())
    },
}


def read_together(cls: type) -> tuple[str, ...]:
    """Return the linears of a class that read the same tensor, by `READ_TOGETHER_BY`.

    The class that defines the forward is looked up. The result is empty if it is not listed, or if another module has
    replaced its forward."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    own = vars(owner)["forward"].__module__ == owner.__module__
    return READ_TOGETHER_BY.get((owner.__module__, owner.__qualname__), ()) if own else ()


def sharing_scale(names: Iterable[str]) -> list[list[int]]:
    """Group the positions of siblings that engines merge, which share a global scale. Others are groups of one."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, name in enumerate(names):
        merged = next((names for names in READ_TOGETHER if name in names), (name,))
        groups.setdefault(merged, []).append(position)
    return list(groups.values())


def is_router(name: str) -> bool:
    """True if a module is a router or gate by its name."""
    return _ROUTERS.search(name) is not None


def is_embedding(name: str) -> bool:
    """True if a module is an embedding by its name: it has a matrix like a linear."""
    return _EMBEDDINGS.search(name) is not None


def is_encoder(name: str) -> bool:
    """True if a module belongs, by its name, to an encoder of images or sound, or connects one to the decoder."""
    return _ENCODERS.search(name) is not None


def is_read_by_code(name: str) -> bool:
    """True if the code of models reads the weight of linears of this name, so that it has to stay 16-bit."""
    return _READ_BY_CODE.search(name) is not None


def is_linear(name: str) -> bool:
    """True for names of linears of attention, dense MLPs and shared experts; False for the head."""
    return _LINEARS.search(name) is not None and not is_read_by_code(name)
