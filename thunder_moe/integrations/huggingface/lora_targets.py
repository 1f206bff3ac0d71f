"""List the 4-bit linears of a model that can have adapters, and the names that PEFT and its files have for them.
Called by huggingface.lora, lora_files and saving; calls finetune.lora, and nothing of PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from thunder_moe.finetune.lora import lora_linears
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.nn.linear import is_packed_dense

PREFIX = "base_model.model."  # of a PeftModel's names


@dataclass(frozen=True)
class Target:
    """A 4-bit linear that can have an adapter."""

    name: str  # the name of the parameter of experts, or of the dense layer, in the 16-bit model
    path: str  # the name of the linear in the quantized model
    linear: Any  # the linear
    experts: str = ""  # the name of the block of experts; "" for a dense layer
    module: NVFP4Experts | None = None  # the experts; None for a dense layer
    swapped: bool = False  # PEFT takes the weight (E, K, N) for (E, N, K), so that its A is our B (Llama 4)
    interleaved: bool = False  # the rows of gate and up take turns

    @property
    def block(self) -> str:
        return self.experts or self.name

    @property
    def is_down(self) -> bool:
        return self.module is not None and self.linear is self.module.down_proj

    @property
    def num_experts(self) -> int:
        count: int = self.linear.num_experts if self.experts else 1
        return count


def targets(model: nn.Module) -> list[Target]:
    """Return the 4-bit linears of a model: first the experts', gate and up before down, then the dense layers."""
    found, dense = [], []
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Experts):
            form = module.form
            swapped = form.transposed and not getattr(module, "is_transposed", False)
            for parameter in ("gate_up_proj" if form.gated else "up_proj", "down_proj"):
                own = parameter if parameter == "down_proj" else "gate_up_proj"
                interleaved = form.interleaved and own == "gate_up_proj"
                place, linear = f"{name}.{own}", getattr(module, own)
                found.append(Target(f"{name}.{parameter}", place, linear, name, module, swapped, interleaved))
        elif is_packed_dense(module):
            dense.append(Target(name, name, module))
    return found + dense


def is_named(key: str, names: Any) -> bool:
    """True if PEFT's rule for lists takes a name: it is one of them, or ends with one behind a dot."""
    return any(key == name or key.endswith(f".{name}") for name in names or ())


def blocks_of(model: nn.Module) -> dict[str, list[Target]]:
    """Return the targets by the name of their experts; a dense layer is a block of its own."""
    blocks: dict[str, list[Target]] = {}
    for target in targets(model):
        blocks.setdefault(target.block, []).append(target)
    return blocks


def place_of(name: str, blocks: Mapping[str, list[Target]]) -> tuple[str | None, str]:
    """Return the block that a name belongs to and the rest of the name: "", "base_layer", "3.gate_proj", ..."""
    for block, (target, *_) in blocks.items():
        starts = [block]
        if target.experts:
            layer, _, last = block.rpartition(".")
            parent, _, own = layer.rpartition(".")
            known = dict.fromkeys((own, "mlp", "block_sparse_moe", "feed_forward"))
            starts = [".".join(part for part in (parent, each, last) if part) for each in known]
            starts += [start.replace("language_model.", "") for start in starts]
        for start in starts:
            if f"{name}.".startswith(f"{start}."):
                return block, name.removeprefix(start).removeprefix(".")
    return None, ""


def refuse_left_out(model: Any, configs: Mapping[str, Any]) -> None:
    """Raise a ValueError where stock PEFT has left out 4-bit layers that its configuration means.

    These are experts among its target_parameters, and dense layers where it has adapted each 16-bit one, as for
    "all-linear". PEFT's layers are taken out of the model again; its parameters stay frozen.
    """
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "base_layer")}
    if not wrapped or lora_linears(model) or all(hasattr(each, "left_out_on_purpose") for each in configs.values()):
        return
    named = [name for config in configs.values() for name in getattr(config, "target_parameters", None) or ()]
    packed = targets(model)
    left = [target.name for target in packed if target.experts and is_named(target.name, named)]
    head, inside = model.get_output_embeddings(), tuple(f"{name}." for name in wrapped)
    others = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    if all(name.startswith(inside) for name in others):
        left += [target.name for target in packed if not target.experts and target.linear is not head]
    if not left:
        return
    for name, module in wrapped.items():
        while hasattr(module, "base_layer"):
            module = module.base_layer
        if not name.endswith(".base_layer"):
            model.set_submodule(name, module)
    model._hf_peft_config_loaded = False  # transformers' add_adapter has set it, and save_pretrained would read it
    raise ValueError(
        f"peft: got {len(left)} 4-bit layers, {left[0]} and others, which PEFT does not know and leaves without"
        f" adapters, beside {next(iter(wrapped))}; wanted thunder_moe.get_peft_model(model, LoraConfig(...)) with a new"
        " configuration, or load_peft_model(model, path) for files"
    )
