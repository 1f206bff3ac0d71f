"""The operator thunder_moe::f16a_nvfp4weight_scaled_grouped_mm: schema, fake, autograd, checks of its operands.
Called by nn and by compiled graphs; calls kernels.select. No arithmetic here.

Legend: M rows (tokens * top_k), E experts, N output features, K input features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from thunder_moe.formats.checks import require
from thunder_moe.formats.layouts import BLOCK_SIZE
from thunder_moe.formats.weight import NVFP4Weight, check_weight
from thunder_moe.kernels.select import select

__all__ = [
    "check_index_values",
    "check_offset_values",
    "check_operands",
    "check_optional",
    "f16a_nvfp4weight_scaled_grouped_mm",
    "operands",
    "refuse_forward_ad",
    "refuse_weight_gradients",
    "weight_from_operands",
]

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WEIGHT_NAMES = ("fp4_weight", "weight_scaling_factor", "weight_global_scale")


@torch.library.custom_op("thunder_moe::f16a_nvfp4weight_scaled_grouped_mm", mutates_args=())
def _grouped_mm(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    blockscale_offsets: Tensor | None = None,
    problem_sizes: Tensor | None = None,
    *,
    layout: str = "linear",
) -> Tensor:
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    refuse_forward_ad()
    check_operands(activation, *packed, offsets, layout)
    check_offset_values(offsets, activation.shape[0])
    kernel = select(activation.device).grouped_mm
    return kernel(activation, weight_from_operands(*packed, layout), offsets)


@_grouped_mm.register_fake
def _(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, blockscale_offsets=None,
      problem_sizes=None, *, layout="linear"):  # fmt: skip
    check_operands(activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    return activation.new_empty(activation.shape[0], fp4_weight.shape[2])


@torch.library.custom_op("thunder_moe::f16a_nvfp4weight_scaled_grouped_mm_dgrad", mutates_args=())
def _grouped_mm_dgrad(
    grad: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    *,
    layout: str = "linear",
) -> Tensor:
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    refuse_forward_ad()
    _check_dgrad(grad, *packed, offsets, layout)
    check_offset_values(offsets, grad.shape[0], "grad")
    kernel = select(grad.device).grouped_mm_dgrad
    return kernel(grad, weight_from_operands(*packed, layout), offsets)


@_grouped_mm_dgrad.register_fake
def _(grad, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, *, layout="linear"):
    _check_dgrad(grad, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)
    return grad.new_empty(grad.shape[0], 2 * fp4_weight.shape[1])


def _setup_context(ctx, inputs, keyword_only_inputs, output) -> None:
    refuse_weight_gradients(*inputs[1:4])
    ctx.save_for_backward(*inputs[1:5])
    ctx.layout = keyword_only_inputs["layout"]


def _backward(ctx, grad):
    dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad
    return dgrad(grad, *ctx.saved_tensors, layout=ctx.layout), None, None, None, None, None, None


def _dgrad_backward(ctx, grad):
    forward = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm
    return forward(grad, *ctx.saved_tensors, layout=ctx.layout), None, None, None, None


_grouped_mm.register_autograd(_backward, setup_context=_setup_context)
_grouped_mm_dgrad.register_autograd(_dgrad_backward, setup_context=_setup_context)


def f16a_nvfp4weight_scaled_grouped_mm(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    blockscale_offsets: Tensor | None = None,
    problem_sizes: Tensor | None = None,
    *,
    layout: str = "linear",
) -> Tensor:
    """Grouped GEMM of 16-bit activations with NVFP4 weights: ``out[rows of e] = activation[rows of e] @ w[e].T``.

    Differentiable in `activation`; the weights are frozen. Never synchronises with the host on CUDA.

    Args:
        activation: (M, K) bfloat16, float16 (or float32), rows sorted by expert.
        fp4_weight: (E, K // 2, N), the transposed view of qdata; uint8 or float4_e2m1fn_x2.
        weight_scaling_factor: float8_e4m3fn block scales, (E, N, K // 16) when linear.
        weight_global_scale: float32 (E,) or (E, N), the multiplier that decodes.
        offsets: int32 (E,), cumulative row ENDS; group 0 starts at row 0. Empty groups are legal.
        blockscale_offsets: read by nvFuser's CUTLASS kernel alone, which derives it when it is missing.
        problem_sizes: likewise.
        layout: of the weight, one of `thunder_moe.formats.layouts.LAYOUTS`.

    Returns:
        (M, N) in the activation's dtype; rows at or past ``offsets[-1]`` are undefined.

    Raises:
        ValueError: an operand has the wrong rank, shape, dtype or device; on a CPU also offsets that decrease or
            exceed M. The message names the argument, what it was and what is wanted.
    """
    return torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(
        activation, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, blockscale_offsets, problem_sizes,
        layout=layout,
    )  # fmt: skip


def operands(weight: NVFP4Weight) -> tuple[Tensor, Tensor, Tensor]:
    """(fp4_weight, weight_scaling_factor, weight_global_scale) of a weight, as the operators take them."""
    return weight.qdata.transpose(1, 2), weight.scale, weight.global_scale


def weight_from_operands(
    fp4_weight: Tensor, weight_scaling_factor: Tensor, weight_global_scale: Tensor, layout: str
) -> NVFP4Weight:
    """The inverse of `operands`, for operands that `check_operands` has passed."""
    qdata = fp4_weight.view(torch.uint8).transpose(1, 2)
    return NVFP4Weight.unchecked(qdata, weight_scaling_factor, weight_global_scale, layout)


def check_operands(
    activation: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    layout: str,
) -> None:
    """Checks everything that can be checked without data.

    Raises:
        ValueError: names the argument, what it was and what is wanted.
    """
    require(activation.ndim == 2, "activation", activation, "shape (rows, in_features)")
    k = activation.shape[1]
    require(k % BLOCK_SIZE == 0 and k > 0, "activation", activation, f"in_features a positive multiple of {BLOCK_SIZE}")
    require(fp4_weight.ndim == 3, "fp4_weight", fp4_weight, "shape (experts, in_features // 2, out_features)")
    wanted = f"in_features // 2 = {k // 2} in dim 1, by the activation"
    require(2 * fp4_weight.shape[1] == k, "fp4_weight", fp4_weight, wanted)
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    _check_rows_and_weight("activation", activation, *packed, offsets, layout)


def _check_dgrad(grad, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout) -> None:
    """`check_operands` for the gradient (M, N) in the place of the activation (M, K)."""
    require(fp4_weight.ndim == 3, "fp4_weight", fp4_weight, "shape (experts, in_features // 2, out_features)")
    n = fp4_weight.shape[2]
    require(grad.ndim == 2 and grad.shape[1] == n, "grad", grad, f"shape (rows, {n}), by fp4_weight")
    _check_rows_and_weight("grad", grad, fp4_weight, weight_scaling_factor, weight_global_scale, offsets, layout)


def _check_rows_and_weight(
    name: str,
    rows: Tensor,
    fp4_weight: Tensor,
    weight_scaling_factor: Tensor,
    weight_global_scale: Tensor,
    offsets: Tensor,
    layout: str,
) -> None:
    """Checks what `check_operands` and `_check_dgrad` have in common; `name` is what the operator calls the rows."""
    require(rows.dtype in ACTIVATION_DTYPES, name, rows, f"a dtype of {ACTIVATION_DTYPES}")
    packed = (fp4_weight, weight_scaling_factor, weight_global_scale)
    check_weight(*packed, layout, names=WEIGHT_NAMES, transposed=True)
    require(fp4_weight.device == rows.device, "fp4_weight", fp4_weight, f"device {rows.device}, that of {name}")
    experts = fp4_weight.shape[0]
    require(offsets.dtype == torch.int32, "offsets", offsets, "dtype int32")
    require(tuple(offsets.shape) == (experts,), "offsets", offsets, f"shape ({experts},), one row end per expert")
    require(offsets.device == rows.device, "offsets", offsets, f"device {rows.device}, that of {name}")


def check_optional(name: str, tensor: Tensor | None, shape: tuple[int, ...], activation: Tensor) -> None:
    """Checks an optional floating-point operand.

    Raises:
        ValueError: names the argument, what it was and what is wanted.
    """
    if tensor is None:
        return
    require(tuple(tensor.shape) == shape, name, tensor, f"shape {shape}")
    ok = tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2
    require(ok, name, tensor, "a floating-point dtype of 16 bits or more")
    require(tensor.device == activation.device, name, tensor, f"device {activation.device}, that of activation")


def check_offset_values(offsets: Tensor, rows: int, of: str = "activation") -> None:
    """On a CPU: ValueError when the offsets decrease, are negative or exceed the rows of the argument `of`. Elsewhere
    it would have to synchronise: kernels leave out what lies outside of the rows. 0.5 us for 8 experts, 8 us for 512.
    """
    if offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
    if ends[0] < 0 or ends != sorted(ends):
        raise ValueError(f"offsets: got {ends}, wanted cumulative row ends, at least 0, that never decrease")
    if ends[-1] > rows:
        raise ValueError(f"offsets: got a last row end of {ends[-1]}, wanted at most the {rows} rows of {of}")


def check_index_values(name: str, index: Tensor, least: int, end: int, of: str) -> None:
    """On a CPU: ValueError when a value is outside of [least, end). Elsewhere nothing, as `check_offset_values`.
    2 us for 8 values, 4 us for 65536."""
    if index.device.type != "cpu" or not index.numel():
        return
    low, high = (int(value) for value in torch.aminmax(index))
    if low < least or high >= end:
        bad = low if low < least else high
        raise ValueError(f"{name}: got a value of {bad}, wanted values from {least} to {end - 1}, {of}")


def refuse_forward_ad() -> None:
    """torch drops the tangents of custom operators without a word, or takes them for zeros: NotImplementedError."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(
            "NVFP4 operators have no forward-mode derivative (dual_level, torch.func.jvp, jacfwd); use reverse mode"
        )


def refuse_weight_gradients(fp4_weight: Tensor, weight_scaling_factor: Tensor, weight_global_scale: Tensor) -> None:
    """ValueError when a part of the weight requires a gradient, since it would get none."""
    packed = dict(weight_scaling_factor=weight_scaling_factor, weight_global_scale=weight_global_scale)
    for name, tensor in {"fp4_weight": fp4_weight, **packed}.items():
        if tensor.requires_grad:
            raise ValueError(f"{name}: got a tensor that requires a gradient, wanted a frozen one; use detach()")
