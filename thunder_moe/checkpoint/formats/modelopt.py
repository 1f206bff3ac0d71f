"""NVIDIA ModelOpt's NVFP4 and MXFP8, which vLLM, SGLang and TensorRT-LLM read, and which this package writes.
Called by registry to read, by writer and integrations.huggingface.state_dicts to write; calls interface.

Legend: E experts, I intermediate_size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from thunder_moe.checkpoint.experts import ExpertsLayout, ExpertWeights
from thunder_moe.checkpoint.formats.interface import CheckpointFormat, check_group_size, subdict, wrong_values
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.gate_up import interleave
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight

logger = logging.getLogger(__name__)

# Algorithms that are read; FP8 layers occur beside NVFP4 in MIXED_PRECISION.
ALGOS = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
MXFP8_ALGO = "MXFP8"
LAYER_ALGOS = (*ALGOS, "FP8", MXFP8_ALGO)
# The one that is written: 4-bit weights, 16-bit activations. "NVFP4" would need calibrated scales of activations.
QUANT_ALGO = "W4A16_NVFP4"


class ModelOpt(CheckpointFormat):
    """NVFP4 and W4A16_NVFP4, per expert or fused, MXFP8 per expert, and MIXED_PRECISION of these and FP8 layers."""

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
                check_group_size(entry.get("group_size"), _block_size(layer_algo))
        elif not _is_algo(algo, *ALGOS, MXFP8_ALGO):
            raise ValueError(f"quant_algo: got {algo!r}, wanted one of {(*ALGOS, MXFP8_ALGO, MIXED)}")
        check_group_size(quantization.get("group_size"), _block_size(algo))
        groups = subdict(quantization, "config_groups")
        for name in groups:
            weights = subdict(subdict(groups, name), "weights")
            if weights.get("num_bits") not in (8, "8"):
                check_group_size(weights.get("group_size"))

    def has_mxfp8(self, quantization: dict[str, Any]) -> bool:
        algos = [quantization.get("quant_algo")]
        if _is_algo(algos[0], MIXED):
            layers = subdict(quantization, "quantized_layers")
            algos = [subdict(layers, layer).get("quant_algo") for layer in layers]
        return any(_is_algo(algo, MXFP8_ALGO) for algo in algos)

    def encode(
        self, path: str, weights: ExpertWeights, layout: ExpertsLayout, *, warns: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a block of experts by ModelOpt's names; reading restores the same bits.

        The fused form of ModelOpt has one global scale for all experts. Weights with several are written per expert.
        With biases or alternating rows nobody reads that, so that they are written fused with all their global scales,
        which only this package reads. A warning names blocks whose gate and up have different global scales, because
        engines take the gate's for both. MXFP8 weights are written per expert; with alternating rows they are written
        fused, which only this package reads. `warns` is False if the tensors will not be written.

        Raises:
            ValueError: the rows of one projection of one expert have several global scales, or the two weights have
                different number formats.
        """
        if weights.gate_up.format is not weights.down.format:
            names = (weights.gate_up.format.name, weights.down.format.name)
            raise ValueError(f"weights: {path} has gate and up in {names[0]}, down in {names[1]}, wanted one format")
        weights = replace(weights, gate_up=weights.gate_up.to_layout("linear"), down=weights.down.to_layout("linear"))
        scales = {"gate_up": _shared_scale(weights.gate_up), "down": _shared_scale(weights.down)}
        several = any(scale is not None and scale.ndim for scale in scales.values())
        has_bias = weights.gate_up_bias is not None or weights.down_bias is not None
        is_nvfp4 = weights.down.format is NVFP4
        if layout.fused and (layout.interleaved or (is_nvfp4 and (has_bias or not several))):
            yield from _encode_fused(path, weights, layout, scales, warns)
        else:
            yield from _encode_per_expert(path, weights, layout.projections, warns)

    def encode_dense(self, path: str, weight: PackedWeight) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a dense layer's weight (1, N, K) by ModelOpt's names; reading restores the same bits.

        Rows with several global scales are a ValueError.
        """
        weight = weight.to_layout("linear")
        if not isinstance(weight, NVFP4Weight):
            yield f"{path}.weight", weight.qdata[0]
            yield f"{path}.weight_scale", weight.scale.view(torch.uint8)[0]
            return
        global_scale = weight.row_global_scale()[0]
        bits = global_scale.view(torch.int32)  # integers, so that NaN equals itself
        if not bool((bits == bits[0]).all()):
            raise ValueError(f"weights: {path} has a global scale per row, which a ModelOpt checkpoint cannot hold")
        yield f"{path}.weight", weight.qdata[0]
        yield f"{path}.weight_scale", weight.scale[0]
        yield f"{path}.weight_scale_2", global_scale[0]

    def check_values(self, name: str, tensor: torch.Tensor) -> None:
        """Raise a ValueError if readers do not accept the values of a tensor of `encode` or `encode_dense`."""
        is_scale = name.endswith(("weight_scale", "weight_scale_2"))
        if not is_scale and tensor.itemsize > 1:  # a bias
            return
        if (wrong := wrong_values(tensor, is_scale)) is not None:
            raise ValueError(
                f"weights: {name} {wrong}; quantize the 16-bit weights again, or load those that were saved"
            )

    def configs(
        self, ignore: list[str], producer: dict[str, str], formats: Mapping[str, BlockFormat]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (quantization_config of config.json, hf_quant_config.json) for a producer, its name and version.

        They list the modules to `ignore`, which are 16-bit, and the formats of the quantized blocks of experts and
        dense layers, by path.
        """
        kinds = [form for form in (NVFP4, MXFP8) if form in formats.values()] or [NVFP4]
        own: dict[str, Any] = {"quant_algo": _algo(kinds[0])}
        groups: dict[str, Any] = {}
        size: dict[str, Any] = {"group_size": kinds[0].block_size}
        if len(kinds) > 1:
            layers = {
                path: {"quant_algo": _algo(form), "group_size": form.block_size} for path, form in formats.items()
            }
            own, size = {"quant_algo": MIXED, "quantized_layers": layers}, {}
        for number, form in enumerate(kinds if NVFP4 in kinds else []):  # ModelOpt has no groups of MXFP8 alone
            bits = 8 // form.codes_per_byte
            weights = {"dynamic": False, "num_bits": bits, "type": "float", "group_size": form.block_size}
            targets = ["Linear"] if len(kinds) == 1 else [path for path, each in formats.items() if each is form]
            groups[f"group_{number}"] = {"weights": weights, "targets": targets}
        quantization_config = {
            **({"config_groups": groups} if groups else {}),
            "ignore": sorted(ignore),
            **own,
            **(size if groups else {}),
            "producer": producer,
            "quant_method": self.method,
        }
        quantization = {**own, "kv_cache_quant_algo": None, **size, "exclude_modules": sorted(ignore)}
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
    apart = 0
    if weights.gated and isinstance(weights.gate_up, NVFP4Weight):
        scales = weights.gate_up.row_global_scale()
        apart = int((scales[:, 0] != scales[:, -1]).sum())
    if apart and warns:
        words = "other engines take the gate's for both, which changes their results"
        logger.warning("%s: gate and up of %d experts have different global scales; %s", path, apart, words)
    for expert in range(experts):
        for projection, rows, weight, bias in parts:
            name = f"{path}.{expert}.{projection}"
            part = weight.rows(rows)
            yield from MODELOPT.encode_dense(name, part.with_tensors(t[expert, None] for t in part.tensors()))
            if bias is not None:
                yield f"{name}.bias", bias[expert, rows]


def _encode_fused(
    path: str, weights: ExpertWeights, layout: ExpertsLayout, scales: dict[str, torch.Tensor | None], warns: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    if not weights.gated:
        raise ValueError(f"weights: {path} has no gate, which the fused layout has beside the up projection")
    parts = (("gate_up", weights.gate_up, weights.gate_up_bias), ("down", weights.down, weights.down_bias))
    for part, weight, bias in parts:
        name, global_scale = f"{path}.{part}_proj", scales[part]
        qdata, scale = weight.qdata.view(torch.uint8), weight.scale.view(torch.uint8)
        if global_scale is None and warns:
            logger.warning("%s: written in MXFP8 as one tensor of all experts, which other engines do not read", name)
        if part == "gate_up" and layout.interleaved:
            qdata, scale, bias = interleave(qdata), interleave(scale), bias if bias is None else interleave(bias)
            if global_scale is not None and global_scale.ndim == 2:
                global_scale = interleave(global_scale)
        yield name, qdata.mT.contiguous().view(weight.qdata.dtype)
        stored = torch.uint8 if global_scale is None else torch.float8_e4m3fn
        yield f"{name}_weight_scale", scale.mT.contiguous().view(stored)
        if global_scale is not None:
            yield f"{name}_weight_scale_2", global_scale
        if bias is not None:
            yield f"{name}_bias", bias


def _shared_scale(weight: PackedWeight) -> torch.Tensor | None:
    """Return the global scale as () if all its numbers are equal, else in full; None if the format has none."""
    scale = weight.global_scale
    if scale is None:
        return None
    return scale.flatten()[0] if bool((scale == scale.flatten()[0]).all()) else scale


def _algo(form: BlockFormat) -> str:
    """Return ModelOpt's quant_algo for weights in a number format, with 16-bit activations if there is one."""
    return MXFP8_ALGO if form is MXFP8 else QUANT_ALGO


def _block_size(algo: Any) -> int:
    return MXFP8.block_size if _is_algo(algo, MXFP8_ALGO) else BLOCK_SIZE


def _is_algo(word: Any, *algos: str) -> bool:
    """True if a quant_algo of a config is one of these, in upper or lower case."""
    return isinstance(word, str) and word.upper() in algos
