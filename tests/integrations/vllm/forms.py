"""Rewrites a checkpoint of save_checkpoint into the other forms of NVFP4 that vLLM reads; the weights stay the same.
Called by the tests beside it; calls safetensors.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from thunder_moe.nvfp4 import NVFP4Weight, dequantize, quantize

Tensors = dict[str, torch.Tensor]
FP8_SCALE, FP8_INPUT_SCALE = 0.002, 0.016  # of `fp8_attention`


def _modules(tensors: Tensors) -> list[str]:
    """Paths of what is 4-bit: experts and dense layers."""
    return [name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")]


def _say(config: dict, format: str, group: dict) -> None:
    """Makes the quantization_config one of compressed-tensors with a single group."""
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": config["quantization_config"]["ignore"],
    }


def compressed_tensors(tensors: Tensors, config: dict) -> Tensors:
    """nvfp4-pack-quantized, as llm-compressor writes it: the global scale divides."""
    weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, dynamic=False)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": "nvfp4-pack-quantized"}
    _say(config, "nvfp4-pack-quantized", group)
    packed = {}
    modules = set(_modules(tensors))
    for name, tensor in tensors.items():
        if name.rpartition(".")[0] not in modules or name.endswith(".bias"):
            packed[name] = tensor
        elif name.endswith(".weight_scale_2"):
            packed[name.replace(".weight_scale_2", ".weight_global_scale")] = tensor.reciprocal().reshape(1)
        else:
            packed[re.sub(r"\.weight$", ".weight_packed", name)] = tensor
    return packed


def compressed_tensors_mxfp8(tensors: Tensors, config: dict) -> Tensors:
    """mxfp8-quantized of what is MXFP8 in ModelOpt's form: the same names; activations in MXFP8, too."""
    weights = dict(num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype="torch.uint8")
    group = {
        "targets": ["Linear"],
        "weights": weights | {"dynamic": False},
        "input_activations": weights | {"dynamic": True},
    }
    _say(config, "mxfp8-quantized", group)
    return tensors


def minimax_mxfp8(tensors: Tensors, config: dict) -> Tensors:
    """The method "mxfp8" of what is MXFP8 in ModelOpt's form, with names that all of vLLM's models load."""
    config["quantization_config"] = {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0", "ignored_layers": config["quantization_config"]["ignore"],
    }  # fmt: skip
    return tensors


def nvfp4(tensors: Tensors, config: dict) -> Tensors:
    """ModelOpt's NVFP4: with scales of 4-bit activations, which 16-bit activations have no use for."""
    config["quantization_config"]["quant_algo"] = "NVFP4"
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {
        "dynamic": False, "num_bits": 4, "type": "float", "group_size": 16,
    }  # fmt: skip
    return tensors | {f"{module}.input_scale": torch.tensor(0.01) for module in _modules(tensors)}


def fused(tensors: Tensors, config: dict) -> Tensors:
    """ModelOpt's own NVFP4 of Llama 4: a projection's experts in one tensor, K before N, with one global scale.

    Their weights are new ones, since the experts of the source have a global scale each."""
    nvfp4({}, config)
    packed = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d", name)}
    generator = torch.Generator().manual_seed(4)
    for name in tensors:
        if match := re.fullmatch(r"(.*\.experts)\.0\.down_proj\.weight", name):
            experts = sum(bool(re.fullmatch(rf"{match[1]}\.\d+\.down_proj\.weight", other)) for other in tensors)
            h, i = tensors[name].shape[0], 2 * tensors[name].shape[1]
            for projection, n, k in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
                weight = quantize(torch.empty(1, experts * n, k).normal_(0, k**-0.5, generator=generator))
                path = f"{match[1]}.{projection}"
                packed[path] = weight.qdata.view(experts, n, -1).mT.contiguous()
                packed[f"{path}_weight_scale"] = weight.scale.view(experts, n, -1).mT.contiguous()
                packed[f"{path}_weight_scale_2"] = weight.global_scale[0].clone()
                packed[f"{path}_input_scale"] = torch.tensor(0.01)
    return packed


def mixed(tensors: Tensors, config: dict) -> Tensors:
    """ModelOpt's MIXED_PRECISION, which names an algorithm for each layer."""
    entry = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    config["quantization_config"] |= {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": dict.fromkeys(_modules(tensors), entry),
    }
    return tensors


def fp8_attention(tensors: Tensors, config: dict) -> Tensors:
    """MIXED_PRECISION with attention in FP8: a scale per weight, and a static one of its inputs, which are FP8, too.

    Experts have scales of 4-bit activations, "NVFP4", and an entry per block; other layers are "W4A16_NVFP4"."""
    mixed(tensors, config)
    layers, packed = config["quantization_config"]["quantized_layers"], dict(tensors)
    for module in _modules(tensors):
        if ".self_attn." in module:
            fields = [packed.pop(f"{module}.{name}")[None] for name in ("weight", "weight_scale", "weight_scale_2")]
            weight = dequantize(NVFP4Weight(*fields), torch.float32)[0]
            packed[f"{module}.weight"] = (weight / FP8_SCALE).to(torch.float8_e4m3fn)
            packed[f"{module}.weight_scale"] = torch.tensor(FP8_SCALE)
            packed[f"{module}.input_scale"] = torch.tensor(FP8_INPUT_SCALE)
            layers[module] = {"quant_algo": "FP8"}
        elif ".experts." in module:
            packed[f"{module}.input_scale"] = torch.tensor(0.01)
            del layers[module]
            layers[module.partition(".experts.")[0] + ".experts"] = {"quant_algo": "NVFP4", "group_size": 16}
    return packed


def gate_and_up_apart(tensors: Tensors, config: dict) -> Tensors:
    """The global scale of up twice that of gate, of each expert; that of k twice those of q and v."""
    last = ("up_proj.weight_scale_2", "w3.weight_scale_2", "k_proj.weight_scale_2")
    return {name: tensor * 2 if name.endswith(last) else tensor for name, tensor in tensors.items()}


def rewrite(source: Path, destination: Path, form: Callable[[Tensors, dict], Tensors]) -> Path:
    """A copy of a checkpoint in another of the forms above."""
    shutil.copytree(source, destination)
    (destination / "hf_quant_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    tensors = form(load_file(source / "model.safetensors"), config)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    (destination / "config.json").write_text(json.dumps(config))
    return destination
