"""Thunder's operator nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm on our kernels: the operator
thunder_moe::nvf_cutlass_scaled_grouped_mm, which takes the same arguments.
Called by dynamo/rewrite.py and thunder/lookasides.py, which put it in the place of Thunder's; calls weight_cache.

Legend: M rows, E experts, N output features, K input features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from thunder_moe import weight_cache
from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import SWIZZLED_128X4
from thunder_moe.formats.weight import WeightOperands
from thunder_moe.ops.checks import check_offset_values, check_operands
from thunder_moe.ops.grouped_mm import f16a_nvfp4weight_scaled_grouped_mm
from thunder_moe.ops.operator import OPERATORS, operator

NAME = "nvf_cutlass_scaled_grouped_mm"  # of our operator


def _shapes(activation: Tensor, weight: WeightOperands, *_: Tensor) -> tuple[tuple[int, int]]:
    return ((activation.shape[0], weight.codes.shape[2]),)


def _check(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, blockscale_offsets: Tensor, problem_sizes: Tensor
) -> None:
    require(activation.dtype == torch.bfloat16, "activation", activation, "dtype bfloat16, as Thunder's result has")
    if weight.codes.ndim == 3:
        experts = weight.codes.shape[0]
        which = ", the first row of each expert (Thunder's Llama4MoE leaves one out: convert it by from_thunder)"
        require(offsets.shape == (experts,), "offsets", offsets, f"shape ({experts},){which}")
        shape = f"shape ({experts},), one per expert"
        require(blockscale_offsets.shape == (experts,), "blockscale_offsets", blockscale_offsets, shape)
        sizes = f"shape ({experts}, 3): rows, out_features, in_features"
        require(problem_sizes.shape == (experts, 3), "problem_sizes", problem_sizes, sizes)
    check_operands(activation, weight, offsets, SWIZZLED_128X4)


def _check_values(activation: Tensor, weight: WeightOperands, offsets: Tensor, *_: Tensor) -> None:
    if offsets.device.type == "cpu" and offsets[0] != 0:
        raise ValueError(f"offsets: got {offsets.tolist()}, wanted the first row of each expert, 0 for the first one")
    check_offset_values(offsets, activation.shape[0])


def _gradient(grad: Tensor, **_: Any) -> tuple[Tensor]:
    # The weight's tensors are other objects in a backward, so the cache would lay them out again at each call.
    raise NotImplementedError(
        "nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm has no gradient: call the model under torch.no_grad(), or"
        " convert its experts by thunder_moe.from_thunder"
    )


@operator(
    shapes=_shapes,
    check=_check,
    check_values=_check_values,
    gradient=_gradient,
    differentiable=("activation",),
    saved=slice(0),
)
def nvf_cutlass_scaled_grouped_mm(
    activation: Tensor, weight: WeightOperands, offsets: Tensor, blockscale_offsets: Tensor, problem_sizes: Tensor
) -> Tensor:
    """Compute Thunder's ``nvf_cutlass::f16a_nvfp4weight_scaled_grouped_mm``, with activations in 16 bits.

    ``out[rows of e] = activation[rows of e] @ w[e].T`` with ``w = e2m1 * scale / global_scale``, for each expert e. The
    weight is laid out for our kernels at its first call, and again after a change; pass the same tensors at each call.

    Args:
        activation: bfloat16 (M, K), rows sorted by expert.
        fp4_weight: (E, K // 2, N), float4_e2m1fn_x2 or uint8.
        weight_scaling_factor: float8_e4m3fn (E, N, K // 16), in the order "swizzled_128x4".
        weight_global_scale: float32 (E,), the encode scale.
        offsets: int32 (E,), the first row of each expert. The last one has all rows to the end.
        blockscale_offsets: (E,); nobody reads it.
        problem_sizes: (E, 3); nobody reads it.

    Returns:
        bfloat16 (M, N).

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device; on a CPU also offsets that decrease, exceed M
            or do not begin at 0.
        NotImplementedError: in a backward.
    """
    tensors, layout = weight_cache.of_nvf_cutlass(*weight.tensors)
    ends = torch.cat([offsets[1:], offsets.new_full((1,), activation.shape[0])])
    return f16a_nvfp4weight_scaled_grouped_mm(activation, *tensors, ends, layout=layout)


def theirs() -> Any:
    """Return Thunder's operator, if somebody has registered it with the arguments of ours (later than 0.2.6)."""
    packet = getattr(torch.ops.nvf_cutlass, "f16a_nvfp4weight_scaled_grouped_mm", None)
    arguments = [] if packet is None else [argument.name for argument in packet.default._schema.arguments]
    return packet if arguments == [*OPERATORS[NAME].signature.parameters] else None


def positional(*args: Any, **options: Any) -> tuple[Any, ...]:
    """Return the arguments of a call of Thunder's operator, all by position."""
    return OPERATORS[NAME].signature.bind(*args, **options).args


def replace_calls(gm: fx.GraphModule) -> None:
    """Replace Thunder's operator by ours in a graph and its nested graphs."""
    packet = theirs()
    ours = getattr(torch.ops.thunder_moe, NAME).default
    for module in gm.modules() if packet is not None else ():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op == "call_function" and node.target in (packet, packet.default):
                node.target, node.args, node.kwargs = ours, positional(*node.args, **node.kwargs), {}
