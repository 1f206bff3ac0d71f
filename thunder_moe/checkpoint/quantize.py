"""Quantizes 16-bit or FP8 weights of a checkpoint, one expert or one group of dense layers at a time.
Called by convert; calls reader for the weights, thunder_moe.formats to quantize. It measures the quantization noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, log10

import torch

from thunder_moe.checkpoint.experts import ExpertWeights
from thunder_moe.checkpoint.files import TensorInfo
from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.registry import NumberFormat, dequantize
from thunder_moe.formats.weight import PackedWeight, joined


@dataclass
class _Noise:
    """Sums of squares of weights and of their errors."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, weight: torch.Tensor, packed: PackedWeight) -> None:
        """Add the signal and the noise of a weight (E, N, K)."""
        for expert in range(weight.shape[0]):
            one = packed.with_tensors(tensor[expert, None] for tensor in packed.tensors())
            exact = weight[expert].float()
            self.signal += exact.double().square().sum().item()
            self.noise += (dequantize(one, torch.float32)[0] - exact).double().square().sum().item()

    def decibels(self) -> float:
        """Return the signal to noise, infinite without noise."""
        return 10 * log10(self.signal / self.noise) if self.signal and self.noise else inf


def quantize_experts(
    checkpoint: Checkpoint,
    block: ExpertBlock,
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
) -> list[tuple[str, ExpertWeights, tuple[float, float]]]:
    """Quantize the experts of a layer on a device, to the codes and scales of `quantize_`.

    In NVFP4 each expert has a global scale, which its gate and up share, as other readers assume. A ValueError names
    file and tensor.

    Returns:
        (path, weights on the CPU, signal to quantization noise in decibels of gate and up, and of down), alone.
    """
    experts = block.experts()
    first = ("gate_up",) if ("gate_up", None) in block.modules else ("gate", "up") if block.gated else ("up",)
    results = []
    for parts in (first, ("down",)):
        noise, packed = _Noise(), []
        if block.is_fused:
            groups = [[block.modules[part, None]] for part in parts]
        else:
            groups = [[block.modules[part, expert] for part in parts] for expert in experts]
        example = checkpoint.float_info(groups[0][0])
        for modules in groups:
            infos = [checkpoint.float_info(module) for module in modules]
            for info in infos if not block.is_fused else ():
                shape = example.shape if len(example.shape) == 2 else (0, 0)
                info.require((*FLOATS, "F8_E4M3"), shape, f", as {example.name!r} has")
            weight = _rows(checkpoint, modules, device)
            if not block.is_fused:
                weight = weight[None]
            elif block.k_first():
                weight = weight.mT
            packed.append(quantize_tensor(weight, infos, number_format, scale_search))
            noise.add(weight, packed[-1])
            packed[-1] = packed[-1].to("cpu")
        if block.is_fused:
            whole = PackedWeight.concatenate(*packed)
        else:
            by_field = zip(*(expert.tensors() for expert in packed), strict=True)
            whole = packed[0].with_tensors(joined(tensors, 0) for tensors in by_field)
        bias = _bias(checkpoint, block, parts, whole, experts)
        if checkpoint.interleaved and parts == ("gate_up",):
            rows = (deinterleave(t.view(torch.uint8)).view(t.dtype) for t in (whole.qdata, whole.scale))
            whole = whole.with_tensors((*rows, *whole.tensors()[2:]))
            bias = bias if bias is None else deinterleave(bias)
        results.append((whole, bias, noise.decibels()))
    (gate_up, gate_up_bias, gate_up_noise), (down, down_bias, down_noise) = results
    block.require_sizes(gate_up.shape, down.shape)
    weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    return [(block.name, weights, (gate_up_noise, down_noise))]


def quantize_linears(
    checkpoint: Checkpoint,
    modules: dict[str, Module],
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
) -> list[tuple[str, PackedWeight, tuple[float, None]]]:
    """Quantize dense layers, in NVFP4 with one global scale.

    Returns:
        (path, weight (1, N, K) on the CPU, signal to noise in decibels and None) of each.
    """
    infos = [checkpoint.float_info(module) for module in modules.values()]
    weight = _rows(checkpoint, modules.values(), device)[None]
    packed = quantize_tensor(weight, infos, number_format, scale_search)
    results, begin = [], 0
    for path, info in zip(modules, infos, strict=True):
        rows = slice(begin, begin := begin + info.shape[0])
        noise = _Noise()
        noise.add(weight[:, rows], part := packed.rows(rows))
        results.append((path, part.to("cpu"), (noise.decibels(), None)))
    return results


def _rows(checkpoint: Checkpoint, modules: Iterable[Module], device: torch.device | str) -> torch.Tensor:
    """Return the rows of several weights in one tensor; dtypes that differ become float32."""
    weights = [checkpoint.read_float(module, device) for module in modules]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def quantize_tensor(
    weight: torch.Tensor, infos: list[TensorInfo], number_format: NumberFormat, scale_search: str | None
) -> PackedWeight:
    """Quantize a weight (E, N, K); errors name the tensor of its rows in the file, one of several only if E is 1.

    A `scale_search` is for weights in NVFP4.
    """
    try:
        search = scale_search if number_format.name == NVFP4.name else None
        packed: PackedWeight = number_format.quantize(weight, scale_search=search)
        return packed
    except ValueError as error:
        bad = [expert for expert, rows in enumerate(weight) if not bool(torch.isfinite(rows).all())]
        if not bad:
            raise infos[0].error(f"cannot be quantized: {error}") from error
        bad_info = infos[0]
        if len(infos) > 1:
            parts = zip(infos, weight[0].split([info.shape[0] for info in infos]), strict=True)
            bad_info = next(info for info, rows in parts if not bool(torch.isfinite(rows).all()))
        which = f" in experts {bad[:8]}" if len(weight) > 1 else ""  # a single expert is in the tensor's name
        raise bad_info.error(f"cannot be quantized: got NaN or Inf{which}, wanted finite values") from error


def _bias(
    checkpoint: Checkpoint, block: ExpertBlock, parts: tuple[str, ...], weight: PackedWeight, experts: range
) -> torch.Tensor | None:
    """Return the bias (E, N) in the order of the weight's rows; None if there is none."""
    modules = [block.modules[part, expert] for expert in (experts or [None]) for part in parts]
    infos = [module.fields["bias"] for module in modules if "bias" in module.fields]
    if not infos:
        return None
    if len(infos) != len(modules):
        raise infos[0].error(f"has a bias in {block.name}, where others have none")
    shape = (weight.shape[1] // len(parts),)
    for info in infos:
        info.require(FLOATS, (weight.shape[0], *shape) if block.is_fused else shape)
    return torch.cat([checkpoint.files.read(info.name) for info in infos], -1).view(weight.shape[:2]).clone()
