"""NVIDIA ModelOpt's NVFP4, which vLLM, SGLang and TensorRT-LLM read, and which this package writes.
Called by registry to read, by writer and convert to write; calls interface.

Legend: E experts, I intermediate_size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from thunder_moe.checkpoint.experts import ExpertsLayout, ExpertWeights
from thunder_moe.checkpoint.formats.interface import NVFP4Format, check_group_size, subdict
from thunder_moe.formats.gate_up import interleave
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.weight import NVFP4Weight

__all__ = ["MODELOPT", "ModelOpt"]

logger = logging.getLogger(__name__)

# Algorithms that are read; FP8 layers occur beside NVFP4 in MIXED_PRECISION.
ALGOS = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
LAYER_ALGOS = (*ALGOS, "FP8")
# The one that is written: 4-bit weights, 16-bit activations. "NVFP4" would need calibrated scales of activations.
QUANT_ALGO = "W4A16_NVFP4"


class ModelOpt(NVFP4Format):
    """NVFP4 and W4A16_NVFP4, per expert or fused, and MIXED_PRECISION of these with FP8 layers."""

    method = "modelopt"
    marker = "weight"
    fields = ("weight", "weight_scale", "weight_scale_2")

    def check(self, quantization: dict[str, Any]) -> None:
        algo = quantization.get("quant_algo")
        if _is_algo(algo, MIXED):
            for layer, entry in subdict(quantization, "quantized_layers").items():
                layer_algo = subdict({layer: entry}, layer).get("quant_algo")
                if not _is_algo(layer_algo, *LAYER_ALGOS):
                    raise ValueError(f"quant_algo: got {layer_algo!r} for layer {layer!r}, wanted one of {LAYER_ALGOS}")
                check_group_size(entry.get("group_size"))
        elif not _is_algo(algo, *ALGOS):
            raise ValueError(f"quant_algo: got {algo!r}, wanted one of {(*ALGOS, MIXED)}")
        check_group_size(quantization.get("group_size"))
        groups = subdict(quantization, "config_groups")
        for name in groups:
            weights = subdict(subdict(groups, name), "weights")
            if weights.get("num_bits") not in (8, "8"):
                check_group_size(weights.get("group_size"))

    def encode(
        self, path: str, weights: ExpertWeights, layout: ExpertsLayout, *, warns: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a block of experts as ModelOpt names them; reading them back gives the same bits.

        The fused form of ModelOpt has one global scale for all experts. Weights with several are written per expert;
        with biases or alternating rows, where nobody reads that, fused with all their global scales, which only this
        package reads (a warning says so). Another warning says where gate and up have different ones: engines take the
        gate's for both.

        Args:
            path: of the block, "model.layers.0.mlp.experts".
            weights: what to write, in any layout of formats.layouts.
            layout: the architecture's.
            warns: False for tensors that are not to be written.

        Raises:
            ValueError: the rows of one projection of one expert have several global scales.
        """
        weights = replace(weights, gate_up=weights.gate_up.to_layout("linear"), down=weights.down.to_layout("linear"))
        if not layout.fused:
            yield from _encode_per_expert(path, weights, layout.projections, warns)
            return
        scales = {"gate_up": _shared_scale(weights.gate_up), "down": _shared_scale(weights.down)}
        plain = weights.gate_up_bias is None and weights.down_bias is None and not layout.interleaved
        if plain and any(scale.ndim for scale in scales.values()):
            yield from _encode_per_expert(path, weights, layout.projections, warns)
            return
        yield from _encode_fused(path, weights, layout, scales, warns)

    def encode_dense(self, path: str, weight: NVFP4Weight) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of a dense layer's weight (1, N, K) as ModelOpt names them; read again they have the same bits.

        Raises:
            ValueError: its rows have several global scales.
        """
        weight = weight.to_layout("linear")
        global_scale = weight.row_global_scale()[0]
        if not bool((global_scale == global_scale[0]).all()):
            raise ValueError(f"weights: {path} has a global scale per row, which a ModelOpt checkpoint cannot hold")
        yield f"{path}.weight", weight.qdata[0]
        yield f"{path}.weight_scale", weight.scale[0]
        yield f"{path}.weight_scale_2", global_scale[0]

    def configs(self, ignore: list[str], producer: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(quantization_config of config.json, hf_quant_config.json); `ignore`: the modules with a 16-bit weight."""
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
        quantization_config = {
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
            "ignore": sorted(ignore),
            "quant_algo": QUANT_ALGO,
            "group_size": BLOCK_SIZE,
            "producer": producer,
            "quant_method": self.method,
        }
        quantization = {
            "quant_algo": QUANT_ALGO,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": sorted(ignore),
        }
        return quantization_config, {"producer": producer, "quantization": quantization}


MODELOPT = ModelOpt()


def _encode_per_expert(
    path: str, weights: ExpertWeights, projections: tuple[str, str, str], warns: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    experts, n, _ = weights.gate_up.shape
    gate, up, down = projections
    first, whole = (weights.gate_up, weights.gate_up_bias), slice(None)
    parts = (
        [(gate, slice(0, n // 2), *first), (up, slice(n // 2, n), *first)] if weights.gated else [(up, whole, *first)]
    )
    parts.append((down, whole, weights.down, weights.down_bias))
    scales = weights.gate_up.row_global_scale()
    apart = int((scales[:, 0] != scales[:, -1]).sum()) if weights.gated else 0
    if apart and warns:
        words = "other engines take the gate's for both, which changes their results"
        logger.warning("%s: gate and up of %d experts have different global scales; %s", path, apart, words)
    for expert in range(experts):
        for projection, rows, weight, bias in parts:
            name = f"{path}.{expert}.{projection}"
            global_scale = weight.row_global_scale()[expert, rows]
            if not bool((global_scale == global_scale[0]).all()):
                raise ValueError(f"weights: {name} has a global scale per row, which a ModelOpt checkpoint cannot hold")
            yield f"{name}.weight", weight.qdata[expert, rows]
            yield f"{name}.weight_scale", weight.scale.view(torch.uint8)[expert, rows].view(torch.float8_e4m3fn)
            yield f"{name}.weight_scale_2", global_scale[0]
            if bias is not None:
                yield f"{name}.bias", bias[expert, rows]


def _encode_fused(
    path: str, weights: ExpertWeights, layout: ExpertsLayout, scales: dict[str, torch.Tensor], warns: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    if not weights.gated:
        raise ValueError(f"weights: {path} has no gate, which the fused layout has beside the up projection")
    parts = (("gate_up", weights.gate_up, weights.gate_up_bias), ("down", weights.down, weights.down_bias))
    for part, weight, bias in parts:
        name, global_scale = f"{path}.{part}_proj", scales[part]
        qdata, scale = weight.qdata, weight.scale.view(torch.uint8)
        if global_scale.ndim and warns:
            logger.warning("%s: written with global scales of shape %s, wants one elsewhere", name, global_scale.shape)
        if part == "gate_up" and layout.interleaved:
            qdata, scale, bias = interleave(qdata), interleave(scale), bias if bias is None else interleave(bias)
            global_scale = interleave(global_scale) if global_scale.ndim == 2 else global_scale
        yield name, qdata.mT
        yield f"{name}_weight_scale", scale.mT.contiguous().view(torch.float8_e4m3fn)
        yield f"{name}_weight_scale_2", global_scale
        if bias is not None:
            yield f"{name}_bias", bias


def _shared_scale(weight: NVFP4Weight) -> torch.Tensor:
    """The global scale in as few numbers as hold it: (), or as the weight has it."""
    scale = weight.global_scale
    return scale.flatten()[0] if bool((scale == scale.flatten()[0]).all()) else scale


def _is_algo(word: Any, *algos: str) -> bool:
    """Whether a config's word is one of these; in lower case, too, as some writers have it."""
    return isinstance(word, str) and word.upper() in algos
