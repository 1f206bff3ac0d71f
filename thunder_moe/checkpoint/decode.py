"""The tensors of a module of a checkpoint as `NVFP4Weight`s, whatever format they lie in.
Called by reader; calls files to read, mxfp4 and nvfp4.

Legend: E experts, N output features, K input features, I intermediate_size, H hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.formats import ExpertBlock, Module
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.mxfp4 import mxfp4_to_nvfp4
from thunder_moe.formats.nvfp4 import BLOCK_SIZE, dequantize
from thunder_moe.formats.weight import NVFP4Weight

__all__ = ["ExpertWeights", "decode_dense", "decode_experts"]

_FLOATS = ("F32", "BF16", "F16")
_E4M3_NAN = 0x7F


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of the experts of one layer, in one form whatever the checkpoint's.

    Attributes:
        gate_up: (E, 2I, H), the gate's rows first; (E, I, H) for experts without a gate.
        down: (E, H, I).
        gate_up_bias: (E, 2I) in the checkpoint's dtype, in the order of gate_up's rows, or None.
        down_bias: (E, H), or None.
    """

    gate_up: NVFP4Weight
    down: NVFP4Weight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same on another device."""
        biases = (bias if bias is None else bias.to(device) for bias in (self.gate_up_bias, self.down_bias))
        return ExpertWeights(self.gate_up.to(device), self.down.to(device), *biases)

    @property
    def gated(self) -> bool:
        """Whether gate_up holds gates and ups, not ups alone."""
        return self.gate_up.shape[1] == 2 * self.down.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        biases = sum(bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + biases


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
    """The weight (N, K) of a module that is no expert, dequantized from NVFP4, or from FP8 with one scale."""
    if "weight" in module.fields and module.fields["weight"].dtype == "F8_E4M3":
        info, scale_info = module.require("weight", "scale")
        value = _scalar(files, scale_info).to(device)
        return (files.read(info.name).to(device).float() * value).to(dtype)
    qdata, bits, global_scale = _read_nvfp4(files, _nvfp4_infos(module, 2))
    weight = NVFP4Weight(qdata[None], bits.view(torch.float8_e4m3fn)[None], global_scale.reshape(1))
    return dequantize(weight.to(device), dtype)[0]


def _stack(
    files: TensorFiles, block: ExpertBlock, parts: tuple[str, ...], experts: range
) -> tuple[NVFP4Weight, torch.Tensor | None]:
    """The rows of these projections one below the other, for all experts: (E, len(parts) * N, K), and their biases."""
    first, _, _ = _nvfp4_infos(block.modules[parts[0], 0], 2)
    n, half = first.shape
    shape = (len(experts), len(parts), n)
    qdata = torch.empty(*shape, half, dtype=torch.uint8)
    scale = torch.empty(*shape, 2 * half // BLOCK_SIZE, dtype=torch.uint8)
    global_scale = torch.empty(shape[:2])
    biases: list[torch.Tensor] = []
    for expert in experts:
        for index, part in enumerate(parts):
            module = block.modules[part, expert]
            infos = _nvfp4_infos(module, 2)
            infos[0].require(("U8",), (n, half), f", as {first.name!r} has")
            at = (expert, index)
            qdata[at], scale[at], row_scale = _read_nvfp4(files, infos)
            global_scale[at] = row_scale.reshape(())
            if "bias" in module.fields:
                module.fields["bias"].require(_FLOATS, (n,))
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
    weights: dict[str, NVFP4Weight] = {}
    biases: dict[str, torch.Tensor] = {}
    for (part, _), module in block.modules.items():
        alternates = interleaved and part == "gate_up"
        weights[part] = _decode_fused_weight(files, module, alternates)
        if "bias" in module.fields:
            info = module.fields["bias"]
            info.require(_FLOATS, weights[part].shape[:2])
            bias = files.read(info.name)
            biases[part] = deinterleave(bias) if alternates else bias.clone()
    if "gate_up" not in weights:
        weights["gate_up"] = NVFP4Weight.concatenate(weights["gate"], weights["up"])
        if "gate" in biases and "up" in biases:
            biases["gate_up"] = torch.cat([biases["gate"], biases["up"]], 1)
    return ExpertWeights(weights["gate_up"], weights["down"], biases.get("gate_up"), biases.get("down"))


def _decode_fused_weight(files: TensorFiles, module: Module, alternates: bool) -> NVFP4Weight:
    """One projection of all experts, (E, N, K), the gate's rows first."""
    if "blocks" in module.fields:
        blocks, scales = module.require("blocks", "scales")
        blocks.require(("U8",), (*scales.shape, 16))
        scales.require(("U8", "F8_E8M0"), blocks.shape[:3])
        try:
            exact = mxfp4_to_nvfp4(files.read(blocks.name), files.read(scales.name).view(torch.uint8))
        except ValueError as error:
            raise scales.error(f"cannot become NVFP4: {error}") from error
        qdata, scale, global_scale = exact.qdata, exact.scale.view(torch.uint8), exact.global_scale
    else:
        infos = _nvfp4_infos(module, 3)
        qdata, scale, global_scale = _read_nvfp4(files, infos)
        if qdata.shape[1] == 8 * scale.shape[1]:  # (E, K // 2, N): the scales are an eighth of the bytes along K
            qdata, scale = qdata.mT, scale.mT
        experts, n, _ = qdata.shape
        if global_scale.numel() in (1, experts):
            global_scale = global_scale.reshape(-1).expand(experts)
        elif global_scale.shape != (experts, n):
            raise infos[2].error(f"has shape {infos[2].shape}, wanted (), {(experts,)} or {(experts, n)}")
    if alternates:
        qdata, scale = deinterleave(qdata), deinterleave(scale)
        global_scale = deinterleave(global_scale) if global_scale.ndim == 2 else global_scale
    # Until here views of the mapped file, or one projection at most.
    qdata, scale, global_scale = (t.clone(memory_format=torch.contiguous_format) for t in (qdata, scale, global_scale))
    return NVFP4Weight(qdata, scale.view(torch.float8_e4m3fn), global_scale)


def _nvfp4_infos(module: Module, rank: int) -> list[TensorInfo]:
    """[codes, block scales, global scale] of an NVFP4 module: there, and of dtypes and shapes that fit each other."""
    ours = ("packed", "scale", "divisor") if "packed" in module.fields else ("weight", "scale", "multiplier")
    weight, scale, global_scale = infos = module.require(*ours)
    weight.require(("U8",), None)
    scale.require(("F8_E4M3",), None)
    global_scale.require(_FLOATS, None if rank == 3 else (1,) * len(global_scale.shape))
    fits = []
    if len(weight.shape) == rank:
        *experts, n, k = weight.shape
        fits = [(*experts, n, k // 8)] * (k % 8 == 0) + [(*experts, n // 8, k)] * (rank == 3 and n % 8 == 0)
    if scale.shape not in fits:
        words = f"one scale for every 8 bytes of {weight.name!r}, which has shape {weight.shape}"
        raise scale.error(f"has shape {scale.shape}, wanted {words}")
    return infos


def _read_nvfp4(files: TensorFiles, infos: list[TensorInfo]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and bits of the block scales, as views of the file, and the float32 multiplier that decodes."""
    weight, scale, global_scale = (files.read(info.name) for info in infos)
    bits, global_scale = scale.view(torch.uint8), global_scale.float()
    if bool(((bits & _E4M3_NAN) == _E4M3_NAN).any()):
        raise infos[1].error("has NaN, wanted finite scales")
    if infos[2].name.endswith("weight_global_scale"):  # the encode scale
        global_scale = global_scale.reciprocal()
    if not bool((torch.isfinite(global_scale) & (global_scale > 0)).all()):
        raise infos[2].error("is not finite and positive, wanted the scale of a whole tensor")
    return weight, bits, global_scale


def _scalar(files: TensorFiles, info: TensorInfo) -> torch.Tensor:
    """A scale of a whole tensor, 0-d float32."""
    info.require(_FLOATS, (1,) if info.shape else ())
    return files.read(info.name).float().reshape(())
