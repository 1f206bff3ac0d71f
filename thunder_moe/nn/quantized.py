"""The modules of experts with packed weights: NVFP4GroupedLinear and NVFP4GroupedSwiGLU, for NVFP4 and MXFP8.
Called by users, nn.llama4, nn.lora and training, and, mostly through nn, by quantization, finetune, parallel and
integrations; calls the operators of ops, and packed for what 4-bit modules share.

Legend: M rows sorted by expert, E experts, H hidden_size, I intermediate_size, N out_features, K in_features.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.layouts import MODULE_LAYOUTS
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.grouped_linear import local_part
from thunder_moe.nn.packed import PackedModule
from thunder_moe.ops import grouped_linear, grouped_swiglu  # noqa: F401  (registers the operators)
from thunder_moe.ops.operator import operator_for

__all__ = [
    "MODULE_LAYOUTS",
    "NVFP4GroupedLinear",
    "NVFP4GroupedSwiGLU",
    "calls_only_its_class",
    "int32",
    "name_of_container",
    "weights_to_fuse",
]

Module = TypeVar("Module", bound=nn.Module)


class NVFP4GroupedLinear(PackedModule):
    """`GroupedLinear` with frozen 4-bit (or MXFP8) weights, kept as buffers, and a 16-bit (or float32) bias.

    `PackedModule` describes buffers, state dicts, moves, attributes and the other arguments.

    Args:
        weight: (E, N, K).
        bias: (E, N) or None; a parameter is kept as the same object.
    """

    options_of_training: tuple[tuple[str, bool], ...] = ()  # of the GroupedLinear that it stands for
    _sharded = False  # True if the bias is a DTensor; the buffers are this rank's own then

    @property
    def local_bias(self) -> Tensor | None:
        """Return the bias, or this rank's part of a DTensor."""
        return local_part(self.bias, self._sharded)

    def forward(self, x: Tensor, offsets: Tensor, bias_scale: Tensor | None = None) -> Tensor:
        """Multiply (M, K) rows sorted by expert, with offsets (E,) of row ends: -> (M, N).

        Rows past ``offsets[-1]`` are zero with a bias, undefined without; gradients are zero there.

        Args:
            bias_scale: floating point (M,), multiplies each row's bias.

        Raises:
            ValueError: as the operator; bias_scale without a bias.
        """
        (format, layout, tensors), offsets, x = self.read(), int32(offsets), autocast_rows(x)
        grouped_mm = operator_for("f16a_nvfp4weight_scaled_grouped_mm", format)
        out: Tensor = grouped_mm(x, *tensors, offsets, layout=layout)
        if self.bias is not None:
            out = torch.ops.thunder_moe.grouped_bias(out, offsets, self.local_bias, bias_scale)
        elif bias_scale is not None:
            raise ValueError("bias_scale: got a tensor without a bias to scale, wanted None")
        return out


class NVFP4GroupedSwiGLU(nn.Module):
    """`GroupedSwiGLU` with frozen 4-bit weights: one GEMM over [gate; up] with the activation in the same operator.

    A gate_up_proj with hooks or an overridden forward is called, and the activation follows.

    Args:
        gate_up_proj: (E, 2I, H), the gate's rows first.
        down_proj: (E, H, I).
    """

    def __init__(self, gate_up_proj: NVFP4GroupedLinear, down_proj: NVFP4GroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def _get_name(self) -> str:
        return name_of_container(self)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Run (M, H) rows sorted by expert, with offsets (E,) of row ends: -> (M, H)."""
        if not calls_only_its_class(self.gate_up_proj, NVFP4GroupedLinear):
            gate, up = self.gate_up_proj(x, offsets).chunk(2, -1)
            return self.down_proj(F.silu(gate) * up, offsets)
        (format, layout, tensors), x, offsets = self.gate_up_proj.read(), autocast_rows(x), int32(offsets)
        swiglu = operator_for("f16a_nvfp4weight_grouped_swiglu", format)
        out = self.down_proj(swiglu(x, *tensors, offsets, layout=layout), offsets)
        return out


def name_of_container(module: nn.Module) -> str:
    """Return the name in the representation of a model: the class's name, with the number format of the parts."""
    formats = {part.format_name for part in module.children() if isinstance(part, PackedModule)}
    return type(module).__name__.replace(NVFP4.name.upper(), formats.pop().upper() if len(formats) == 1 else "Packed")


def int32(offsets: Tensor) -> Tensor:
    """Return row ends as the operators of packed weights take them."""
    return offsets if offsets.dtype == torch.int32 else offsets.to(torch.int32)


def calls_only_its_class(module: nn.Module, cls: type[Module]) -> TypeGuard[Module]:
    """True if a call of a module runs the forward of `cls` and no hooks, so that an operator may replace the call."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) is cls and not hooks and "forward" not in vars(module)


def weights_to_fuse(experts: nn.Module) -> tuple[PackedWeight, PackedWeight] | None:
    """Return the weights (gate and up, down) of a `NVFP4GroupedSwiGLU`, for one operator that replaces its linears.

    None for other modules, for weights in two number formats, and if hooks or overridden forwards have to run."""
    if not calls_only_its_class(experts, NVFP4GroupedSwiGLU):
        return None
    gate_up: nn.Module = experts.gate_up_proj
    down: nn.Module = experts.down_proj
    if not (calls_only_its_class(gate_up, NVFP4GroupedLinear) and calls_only_its_class(down, NVFP4GroupedLinear)):
        return None
    if gate_up.format_name != down.format_name:
        return None
    return gate_up.read_weight(), down.read_weight()
