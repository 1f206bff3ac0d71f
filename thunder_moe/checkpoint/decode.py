"""Decodes the experts of a layer to `ExpertWeights`, from any format.
Called by reader; calls formats.registry for what reads a module, and files.

Legend: E experts, N output features, K input features, I intermediate_size, H hidden_size.
"""

from __future__ import annotations

import torch

from thunder_moe.checkpoint.experts import ExpertWeights
from thunder_moe.checkpoint.files import TensorFiles
from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.formats.registry import format_of
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.weight import NVFP4Weight

__all__ = ["decode_dense", "decode_dense_weight", "decode_experts"]


def decode_experts(files: TensorFiles, block: ExpertBlock, interleaved: bool) -> ExpertWeights:
    """The experts of one layer, on the CPU, in memory of their own.

    Args:
        files: where the tensors are.
        block: their names.
        interleaved: the rows of a fused gate_up projection alternate.

    Raises:
        ValueError: a tensor is missing or has the wrong dtype, shape or values; names file and tensor.
    """
    experts = block.experts()
    if block.is_fused:
        weights = _decode_fused(files, block, interleaved)
    else:
        gate_up, gate_up_bias = _stack(files, block, ("gate", "up") if block.gated else ("up",), experts)
        down, down_bias = _stack(files, block, ("down",), experts)
        weights = ExpertWeights(gate_up, down, gate_up_bias, down_bias)
    num_experts, n, k = weights.gate_up.shape
    wanted = (num_experts, k, n // 2 if block.gated else n)
    if weights.down.shape != wanted:
        (info, *_) = (module.any() for (part, _), module in block.modules.items() if part == "down")
        raise info.error(f"belongs to down projections of shape {weights.down.shape}, gate and up want {wanted}")
    return weights


def decode_dense(files: TensorFiles, module: Module, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The weight (N, K) of a 4-bit module that is no expert."""
    return format_of(module).read_dense(files, module, dtype, device)


def decode_dense_weight(files: TensorFiles, module: Module, device: torch.device | str) -> NVFP4Weight:
    """The weight (1, N, K) of a 4-bit module that is no expert, in memory of its own."""
    weight = format_of(module).read_dense_weight(files, module)
    scale = weight.scale.view(torch.uint8).to(device, copy=True).view(torch.float8_e4m3fn)
    return NVFP4Weight(weight.qdata.to(device, copy=True), scale, weight.global_scale.to(device, copy=True))


def _stack(
    files: TensorFiles, block: ExpertBlock, parts: tuple[str, ...], experts: range
) -> tuple[NVFP4Weight, torch.Tensor | None]:
    """The stacked rows of these projections, for all experts: (E, len(parts) * N, K), and their biases."""
    form = format_of(block.modules[parts[0], 0])
    first = form.infos(block.modules[parts[0], 0], 2)[0]
    n, half = first.shape
    shape = (len(experts), len(parts), n)
    qdata = torch.empty(*shape, half, dtype=torch.uint8)
    scale = torch.empty(*shape, 2 * half // BLOCK_SIZE, dtype=torch.uint8)
    global_scale = torch.empty(shape[:2], dtype=torch.float32)
    biases: list[torch.Tensor] = []
    for expert in experts:
        for index, part in enumerate(parts):
            module = block.modules[part, expert]
            infos = form.infos(module, 2)
            infos[0].require(("U8",), (n, half), f", as {first.name!r} has")
            at = (expert, index)
            qdata[at], scale[at], row_scale = form.read(files, infos)
            global_scale[at] = row_scale.reshape(())
            if "bias" in module.fields:
                module.fields["bias"].require(FLOATS, (n,))
                biases.append(files.read(module.fields["bias"].name))
    if len(biases) not in (0, len(experts) * len(parts)):
        raise first.error(f"belongs to {block.name}, where some experts have a bias and others have none")
    rows = len(parts) * n
    alike = bool((global_scale == global_scale[:, :1]).all())
    global_scale = global_scale[:, 0].clone() if alike else global_scale.repeat_interleave(n, 1)
    scale = scale.view(torch.float8_e4m3fn).view(len(experts), rows, -1)
    weight = NVFP4Weight(qdata.view(len(experts), rows, half), scale, global_scale)
    return weight, torch.stack(biases).view(len(experts), rows) if biases else None


def _decode_fused(files: TensorFiles, block: ExpertBlock, interleaved: bool) -> ExpertWeights:
    """One tensor per projection holds all experts."""
    _check_orders(block)
    weights: dict[str, NVFP4Weight] = {}
    biases: dict[str, torch.Tensor] = {}
    for (part, _), module in block.modules.items():
        alternates = interleaved and part == "gate_up"
        weights[part] = _decode_fused_weight(files, module, alternates)
        if "bias" in module.fields:
            info = module.fields["bias"]
            info.require(FLOATS, weights[part].shape[:2])
            bias = files.read(info.name)
            biases[part] = deinterleave(bias) if alternates else bias.clone()
    if "gate_up" not in weights:
        weights["gate_up"] = NVFP4Weight.concatenate(weights["gate"], weights["up"])
        if "gate" in biases and "up" in biases:
            biases["gate_up"] = torch.cat([biases["gate"], biases["up"]], 1)
    return ExpertWeights(weights["gate_up"], weights["down"], biases.get("gate_up"), biases.get("down"))


def _check_orders(block: ExpertBlock) -> None:
    """Raises unless the projections of fused experts have the same order of dimensions, which their scales show."""
    orders = {}
    for module in block.modules.values():
        infos = format_of(module).infos(module, 3)
        orders[infos[1].shape[1] * 8 == infos[0].shape[1]] = infos[1]
    if len(orders) > 1:
        message = f"has shape {orders[False].shape}, where {orders[True].name!r} shows that in_features come first"
        raise orders[False].error(message)


def _decode_fused_weight(files: TensorFiles, module: Module, alternates: bool) -> NVFP4Weight:
    """One projection of all experts, (E, N, K), the gate's rows first."""
    form = format_of(module)
    infos = form.infos(module, 3)
    qdata, scale, global_scale = form.read(files, infos)
    if qdata.shape[1] == 8 * scale.shape[1]:  # (E, K // 2, N): the scales are an eighth of the bytes along K
        qdata, scale = qdata.mT, scale.mT
    experts, n, _ = qdata.shape
    if global_scale.numel() in (1, experts):
        global_scale = global_scale.reshape(-1).expand(experts)
    elif global_scale.shape != (experts, n):
        raise infos[-1].error(f"has shape {infos[-1].shape}, wanted (), {(experts,)} or {(experts, n)}")
    if alternates:
        qdata, scale = deinterleave(qdata), deinterleave(scale)
        global_scale = deinterleave(global_scale) if global_scale.ndim == 2 else global_scale
    # Until here views of the mapped file, or one projection at most.
    qdata, scale, global_scale = (t.clone(memory_format=torch.contiguous_format) for t in (qdata, scale, global_scale))
    return NVFP4Weight(qdata, scale.view(torch.float8_e4m3fn), global_scale)
