"""thunder_moe: compiler plugin for PyTorch that runs the expert GEMMs of Mixture-of-Experts models in NVFP4.
What users import; each name loads its module on first use, so that `import thunder_moe` costs little more than torch.
"""

import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thunder_moe.checkpoint.convert import convert
    from thunder_moe.compilers.report import RewriteReport, RewriteWarning, rewrite_report
    from thunder_moe.compilers.thunder.executor import moe_executor
    from thunder_moe.finetune.lora import add_lora_, remove_lora_, use_lora_
    from thunder_moe.finetune.merge import merge_lora_, unmerge_lora_
    from thunder_moe.finetune.qat import finish_qat_, prepare_qat_
    from thunder_moe.finetune.recipes import prepare_8bit_training_, round_weights_once
    from thunder_moe.formats.weight import MXFP8Weight, NVFP4Weight
    from thunder_moe.integrations.huggingface.checkpoint import load_checkpoint, save_checkpoint
    from thunder_moe.integrations.huggingface.configs import ThunderMoeConfig
    from thunder_moe.integrations.huggingface.generation import fast_generate
    from thunder_moe.integrations.huggingface.lora import get_peft_model, load_peft_model
    from thunder_moe.integrations.huggingface.lora_files import load_lora_, save_lora
    from thunder_moe.integrations.huggingface.norms import fuse_norms_
    from thunder_moe.integrations.thunder_layers import from_thunder
    from thunder_moe.kernels.select import simulate_w4a4, use_backend
    from thunder_moe.nn import (
        GroupedLinear,
        GroupedSwiGLU,
        Llama4MoE,
        Llama4MoEConfig,
        NVFP4GroupedLinear,
        NVFP4GroupedSwiGLU,
        NVFP4Linear,
        SwiGLU,
        per_expert_state_dict,
    )
    from thunder_moe.nn.batch_invariant import batch_invariant
    from thunder_moe.ops.decode_attention import decode_attention
    from thunder_moe.ops.experts import f16a_mxfp8weight_moe_experts, f16a_nvfp4weight_moe_experts, moe_experts
    from thunder_moe.ops.grouped_mm import f16a_mxfp8weight_scaled_grouped_mm, f16a_nvfp4weight_scaled_grouped_mm
    from thunder_moe.ops.grouped_mm_combine import (
        f16a_mxfp8weight_grouped_mm_combine,
        f16a_nvfp4weight_grouped_mm_combine,
    )
    from thunder_moe.ops.grouped_swiglu import f16a_mxfp8weight_grouped_swiglu, f16a_nvfp4weight_grouped_swiglu
    from thunder_moe.ops.route import moe_route
    from thunder_moe.ops.router import moe_linear_router, moe_router
    from thunder_moe.ops.scaled_mm import f16a_mxfp8weight_scaled_mm, f16a_nvfp4weight_scaled_mm
    from thunder_moe.quantization.calibrate import calibrate_
    from thunder_moe.quantization.quantize import dequantize_, plan_quantization, quantize_, to_layout_
    from thunder_moe.quantization.refresh import refresh_
    from thunder_moe.registration import register, unregister
    from thunder_moe.routing import offsets_from_splits
    from thunder_moe.tools.sensitivity import load_formats
    from thunder_moe.training import GroupedMLP, NVFP4GroupedMLP, ScaledSReLU, ScaledSwiGLU

__version__ = "0.3.0"

_HOMES = {
    "checkpoint": ("convert",),
    "compilers.report": ("RewriteReport", "RewriteWarning", "rewrite_report"),
    "compilers.thunder.executor": ("moe_executor",),
    "integrations.huggingface.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "integrations.huggingface.generation": ("fast_generate",),
    "integrations.huggingface.lora": ("get_peft_model", "load_peft_model"),
    "integrations.huggingface.lora_files": ("load_lora_", "save_lora"),
    "integrations.huggingface.norms": ("fuse_norms_",),
    "integrations.huggingface.quantizer": ("ThunderMoeConfig",),
    "integrations.thunder_layers": ("from_thunder",),
    "kernels.select": ("simulate_w4a4", "use_backend"),
    "finetune.lora": ("add_lora_", "remove_lora_", "use_lora_"),
    "finetune.merge": ("merge_lora_", "unmerge_lora_"),
    "nn": (
        "GroupedLinear", "GroupedSwiGLU", "Llama4MoE", "Llama4MoEConfig", "NVFP4GroupedLinear", "NVFP4GroupedSwiGLU",
        "NVFP4Linear", "SwiGLU", "per_expert_state_dict",
    ),
    "nn.batch_invariant": ("batch_invariant",),
    "formats.weight": ("MXFP8Weight", "NVFP4Weight"),
    "ops.experts": ("f16a_mxfp8weight_moe_experts", "f16a_nvfp4weight_moe_experts", "moe_experts"),
    "ops.grouped_mm": ("f16a_mxfp8weight_scaled_grouped_mm", "f16a_nvfp4weight_scaled_grouped_mm"),
    "ops.grouped_mm_combine": ("f16a_mxfp8weight_grouped_mm_combine", "f16a_nvfp4weight_grouped_mm_combine"),
    "ops.grouped_swiglu": ("f16a_mxfp8weight_grouped_swiglu", "f16a_nvfp4weight_grouped_swiglu"),
    "ops.route": ("moe_route",),
    "ops.scaled_mm": ("f16a_mxfp8weight_scaled_mm", "f16a_nvfp4weight_scaled_mm"),
    "ops.decode_attention": ("decode_attention",),
    "ops.router": ("moe_linear_router", "moe_router"),
    "finetune.qat": ("finish_qat_", "prepare_qat_"),
    "finetune.recipes": ("prepare_8bit_training_", "round_weights_once"),
    "quantization.calibrate": ("calibrate_",),
    "quantization.quantize": ("dequantize_", "plan_quantization", "quantize_", "to_layout_"),
    "quantization.refresh": ("refresh_",),
    "registration": ("register", "unregister"),
    "routing": ("offsets_from_splits",),
    "tools.sensitivity": ("load_formats",),
    "training": ("GroupedMLP", "NVFP4GroupedMLP", "ScaledSReLU", "ScaledSwiGLU"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "GroupedLinear", "GroupedMLP", "GroupedSwiGLU", "Llama4MoE", "Llama4MoEConfig", "MXFP8Weight", "NVFP4GroupedLinear",
    "NVFP4GroupedMLP", "NVFP4GroupedSwiGLU", "NVFP4Linear", "NVFP4Weight", "RewriteReport", "RewriteWarning",
    "ScaledSReLU", "ScaledSwiGLU", "SwiGLU", "ThunderMoeConfig", "add_lora_", "batch_invariant", "calibrate_",
    "convert", "decode_attention", "dequantize_",
    "f16a_mxfp8weight_grouped_mm_combine", "f16a_mxfp8weight_grouped_swiglu", "f16a_mxfp8weight_moe_experts",
    "f16a_mxfp8weight_scaled_grouped_mm", "f16a_mxfp8weight_scaled_mm", "f16a_nvfp4weight_grouped_mm_combine",
    "f16a_nvfp4weight_grouped_swiglu", "f16a_nvfp4weight_moe_experts", "f16a_nvfp4weight_scaled_grouped_mm",
    "f16a_nvfp4weight_scaled_mm", "fast_generate", "finish_qat_", "from_thunder", "fuse_norms_", "get_peft_model",
    "load_checkpoint", "load_formats", "load_lora_", "load_peft_model", "merge_lora_", "moe_executor", "moe_experts",
    "moe_linear_router", "moe_route", "moe_router", "offsets_from_splits", "per_expert_state_dict", "plan_quantization",
    "prepare_8bit_training_", "prepare_qat_", "quantize_", "refresh_", "register", "remove_lora_", "rewrite_report",
    "round_weights_once", "save_checkpoint", "save_lora", "simulate_w4a4", "to_layout_", "unmerge_lora_", "unregister",
    "use_backend", "use_lora_",
]  # fmt: skip


# What needs a package that may be absent: `import *` leaves it out then, and its own import says what to install.
_OPTIONAL = [name for name, home in _HOME.items() if home.startswith(("integrations.huggingface", "compilers.thunder"))]
_ALL = __all__
if not TYPE_CHECKING:
    del __all__  # `__getattr__` computes it


def _available() -> list[str]:
    """Return `__all__` without the names whose package is absent or too old."""
    names = list(_ALL)
    for name in _OPTIONAL:
        try:
            __getattr__(name)
        except ImportError:
            names.remove(name)
    return names


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _available()
    if name not in _HOME:
        near = difflib.get_close_matches(name, _ALL, n=1)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}" + (f". Did you mean: {near[0]!r}?" if near else "")
        )
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_ALL])


importlib.import_module(f"{__name__}.registration").on_import()
