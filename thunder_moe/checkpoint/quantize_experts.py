"""Quantizes the 16-bit or FP8 experts of a checkpoint, one expert at a time, and measures the error.
Called by convert and quantize_linears; calls float_weights to read, thunder_moe.formats to quantize.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log10

import torch

from thunder_moe.checkpoint.experts import ExpertWeights
from thunder_moe.checkpoint.files import TensorInfo
from thunder_moe.checkpoint.float_weights import FloatWeights
from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.modules import ExpertBlock
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.registry import NumberFormat, dequantize
from thunder_moe.formats.weight import PackedWeight, joined

__all__ = ["Noise", "QuantizedExperts", "quantize_experts", "quantize_tensor"]


@dataclass(frozen=True)
class QuantizedExperts:
    """The quantized experts of one layer.

    Attributes:
        weights: on the CPU.
        gate_up_error: signal to quantization noise in decibels, of gate and up.
        down_error: signal to quantization noise in decibels, of the down projection.
    """

    weights: ExpertWeights
    gate_up_error: float
    down_error: float


@dataclass
class Noise:
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
    floats: FloatWeights,
    block: ExpertBlock,
    interleaved: bool,
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
) -> QuantizedExperts:
    """Quantizes the experts of a layer, to the codes and scales of `quantize_`.

    In NVFP4 each expert has a global scale, which its gate and up share, as other readers assume.

    Args:
        floats: where the weights are.
        block: their names.
        interleaved: the rows of a fused gate_up projection alternate.
        number_format: the number format.
        device: where to quantize.
        scale_search: as in `nvfp4.quantize`.

    Raises:
        ValueError: a tensor is missing, has the wrong dtype or shape, or cannot be quantized; names file and tensor.
    """
    experts = block.experts()
    first = ("gate_up",) if ("gate_up", None) in block.modules else ("gate", "up") if block.gated else ("up",)
    results = []
    for parts in (first, ("down",)):
        noise = Noise()
        if block.is_fused:
            packed = [_fused(floats, block, part, number_format, device, scale_search, noise) for part in parts]
            weight = PackedWeight.concatenate(*packed)
        else:
            weight = _per_expert(floats, block, parts, experts, number_format, device, scale_search, noise)
        bias = _bias(floats, block, parts, weight, experts)
        if interleaved and parts == ("gate_up",):
            rows = (deinterleave(t.view(torch.uint8)).view(t.dtype) for t in (weight.qdata, weight.scale))
            weight = weight.with_tensors((*rows, *weight.tensors()[2:]))
            bias = bias if bias is None else deinterleave(bias)
        results.append((weight, bias, noise.decibels()))
    (gate_up, gate_up_bias, gate_up_error), (down, down_bias, down_error) = results
    wanted = (gate_up.shape[0], gate_up.shape[2], gate_up.shape[1] // (2 if block.gated else 1))
    if down.shape != wanted:
        (info, *_) = (module.any_info() for (part, _), module in block.modules.items() if part == "down")
        raise info.error(f"belongs to down projections of shape {down.shape}, gate and up want {wanted}")
    return QuantizedExperts(ExpertWeights(gate_up, down, gate_up_bias, down_bias), gate_up_error, down_error)


def _per_expert(
    floats: FloatWeights,
    block: ExpertBlock,
    parts: tuple[str, ...],
    experts: range,
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
    noise: Noise,
) -> PackedWeight:
    """Return these projections stacked, (E, len(parts) * N, K), with one global scale per expert."""
    first = floats.info(block.modules[parts[0], 0])
    packed = []
    for expert in experts:
        modules = [block.modules[part, expert] for part in parts]
        infos = [floats.info(module) for module in modules]
        for info in infos:
            wanted = first.shape if len(first.shape) == 2 else (0, 0)
            info.require((*FLOATS, "F8_E4M3"), wanted, f", as {first.name!r} has")
        weight = torch.cat([floats.read(module, device) for module in modules])[None]
        packed.append(quantize_tensor(weight, infos, number_format, scale_search))
        noise.add(weight, packed[-1])
        packed[-1] = packed[-1].to("cpu")
    by_field = zip(*(expert.tensors() for expert in packed), strict=True)
    return packed[0].with_tensors(joined(tensors, 0) for tensors in by_field)


def _fused(
    floats: FloatWeights,
    block: ExpertBlock,
    part: str,
    number_format: NumberFormat,
    device: torch.device | str,
    scale_search: str | None,
    noise: Noise,
) -> PackedWeight:
    """Return one projection (E, N, K) that is stored as one tensor."""
    module = block.modules[part, None]
    info = floats.info(module)
    weight = floats.read(module, device)
    weight = weight.mT if block.k_first() else weight
    packed = quantize_tensor(weight, [info], number_format, scale_search)
    noise.add(weight, packed)
    return packed.to("cpu")


def quantize_tensor(
    weight: torch.Tensor, infos: list[TensorInfo], number_format: NumberFormat, scale_search: str | None
) -> PackedWeight:
    """Quantize a weight; errors name the tensor in the file.

    Args:
        weight: (E, N, K).
        infos: the tensors that its rows are from; several only if E is 1.
        number_format: the number format.
        scale_search: for weights in NVFP4.
    """
    try:
        packed: PackedWeight = number_format.quantize(
            weight, scale_search=scale_search if number_format.name == NVFP4.name else None
        )
        return packed
    except ValueError as error:
        begin, bad_info = 0, infos[0]
        for info in infos if len(infos) > 1 else []:
            rows = weight[0, begin : (begin := begin + info.shape[0])]
            if not bool(torch.isfinite(rows).all()):
                bad_info = info
                break
        bad = [expert for expert, rows in enumerate(weight) if not bool(torch.isfinite(rows).all())]
        if not bad:
            raise bad_info.error(f"cannot be quantized: {error}") from error
        which = f" in experts {bad[:8]}" if len(weight) > 1 else ""  # a single expert is in the tensor's name
        raise bad_info.error(f"cannot be quantized: got NaN or Inf{which}, wanted finite values") from error


def _bias(
    floats: FloatWeights, block: ExpertBlock, parts: tuple[str, ...], weight: PackedWeight, experts: range
) -> torch.Tensor | None:
    """Return the bias (E, N) in the order of the weight's rows; None if there is none."""
    modules = [block.modules[part, expert] for expert in (experts or [None]) for part in parts]
    infos = [module.fields["bias"] for module in modules if "bias" in module.fields]
    if not infos:
        return None
    if len(infos) != len(modules):
        raise infos[0].error(f"has a bias in {block.name}, where others have none")
    for info in infos:
        info.require(
            FLOATS,
            (weight.shape[0], weight.shape[1] // len(parts)) if block.is_fused else (weight.shape[1] // len(parts),),
        )
    return torch.cat([floats.files.read(info.name) for info in infos], -1).view(weight.shape[:2]).clone()
