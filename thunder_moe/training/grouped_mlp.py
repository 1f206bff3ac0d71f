"""`GroupedMLP`: the experts of a layer for training, two grouped GEMMs with a scaled activation between them; and
`NVFP4GroupedMLP`, the same with 4-bit weights.
Called by users and quantization.grouped_experts; calls nn.grouped_linear, activations and the operators of
ops.grouped_linear, ops.activation and, with 4-bit weights, ops.grouped_swiglu.

x (M, H) -> gate_up_proj -> (M, 2I) -> activation * scales (M,) -> (M, I) -> down_proj, bias * scales -> (M, H)

Legend: M rows sorted by expert, E experts, H hidden_size, I intermediate_size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_type
from thunder_moe.nn.autocast import autocast_rows
from thunder_moe.nn.expert_states import check_experts
from thunder_moe.nn.grouped_linear import GroupedLinear, autocast, refuse_traced, require_at_least, run_into
from thunder_moe.nn.quantized import NVFP4GroupedLinear, calls_only_its_class, int32, name_of_container
from thunder_moe.ops.activation import ActivationForm
from thunder_moe.ops.grouped_linear import check_row_scale
from thunder_moe.ops.operator import operator_for
from thunder_moe.training.activations import ScaledSReLU, ScaledSwiGLU


class GroupedMLP(nn.Module):
    """The experts of a layer: ``down_proj(activation(gate_up_proj(x)) * scales)``, each projection one grouped GEMM.

    The scales multiply an expert's whole result, including the bias of its down projection: with the router's weights,
    the sum of a token's rows is the layer's output. For the backward, the input and the output of gate_up_proj are
    kept, and the rows between activation and down_proj are computed again.

    Args:
        num_experts: E.
        hidden_size: H.
        intermediate_size: I.
        bias: True for a bias in both projections.
        activation: called with the output of gate_up_proj and the scales; None for a `ScaledSwiGLU`. gate_up_proj has
            2I out_features, or I if the activation has a false attribute `gated`, like `ScaledSReLU`.
        dtype: of the parameters.
        device: of the parameters.
        accumulate_into_main_grad: for both projections, as in `GroupedLinear`.
        delay_wgrad: for both projections, as in `GroupedLinear`.
        recipe: for both projections, as in `GroupedLinear`; the activation itself is computed in float32.

    Raises:
        ValueError: a size that is not a positive integer, one that the activation's interleave size does not divide.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        recipe: str | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, "hidden_size", hidden_size)
        require_at_least(1, "intermediate_size", intermediate_size)
        options: dict[str, Any] = dict(
            bias=bias,
            dtype=dtype,
            device=device,
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad=delay_wgrad,
            recipe=recipe,
        )
        activation = ScaledSwiGLU() if activation is None else activation
        require_type("activation", activation, nn.Module, "a module, such as ScaledSwiGLU(), or None for that")
        interleave = activation.form.interleave if isinstance(activation, ScaledSwiGLU) else None
        if interleave is not None and intermediate_size % interleave:
            raise ValueError(
                f"intermediate_size: got {intermediate_size}, wanted a multiple of glu_interleave_size={interleave}"
            )
        columns = 2 * intermediate_size if getattr(activation, "gated", True) else intermediate_size
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, columns, **options)
        self.activation = activation
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, **options)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        scales: Tensor | None = None,
        *,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """Run (M, H) rows sorted by expert, with offsets (E,) of row ends: -> (M, H).

        Rows past ``offsets[-1]`` may hold anything: results and gradients are zero there.

        Args:
            scales: floating point (M,), multiplies each row of the result; keeps its dtype, as does its gradient.
            out: as in `GroupedLinear.forward`, a buffer (M, H).
            grad_input: likewise.

        Raises:
            ValueError: as `GroupedLinear.forward`; scales of another shape, or of integers.
        """
        gate_up, down = self.gate_up_proj, self.down_proj
        check_row_scale("scales", scales, tuple(x.shape[:1]), x)
        form = own_form(self.activation)
        y = gate_up(x, offsets) if grad_input is None else gate_up(x, offsets, grad_input=grad_input)
        if form is None or not calls_only_its_class(down, GroupedLinear):
            rows = self.activation(y, scales)
            options: dict[str, Any] = {} if out is None else dict(out=out)
            if down.bias is not None and scales is not None:
                options["bias_scale"] = scales
            return down(rows, offsets, **options)
        if out is None and not down._writes():
            weight, bias = down.local_parameters()
            rows, weight = autocast(y, weight)
            result = torch.ops.thunder_moe.activated_grouped_linear(
                rows, weight, offsets, scales, bias, down.recipe, **form.options
            )
            return result
        refuse_traced(down, y, out=out)
        result = run_into(down, y, offsets, scales, out, None, form)
        return result

    def backward_dw(self) -> None:
        """Compute the oldest waiting weight gradient of either projection; do nothing if none waits.

        Raises:
            ValueError, RuntimeError: as `GroupedLinear.backward_dw`.
        """
        for linear in self._linears():
            linear.backward_dw()

    def need_backward_dw(self) -> bool:
        """True if a weight gradient waits for `backward_dw`."""
        return any(linear.need_backward_dw() for linear in self._linears())

    def _linears(self) -> list[GroupedLinear]:
        """Return the 16-bit projections."""
        return [linear for linear in (self.down_proj, self.gate_up_proj) if isinstance(linear, GroupedLinear)]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *options: Any
    ) -> None:
        for name in ("gate_up_proj", "down_proj"):  # before the first of them loads
            child = self.get_submodule(name)
            if isinstance(child, GroupedLinear):
                check_experts(state_dict, f"{prefix}{name}.", child)
        state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}_extra_state"}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)


class NVFP4GroupedMLP(nn.Module):
    """`GroupedMLP` with frozen 4-bit weights: gradients reach x, the scales and the biases.

    A SwiGLU with the gate's columns first is fused into the gate-and-up GEMM; other activations follow it.

    Args:
        gate_up_proj: (E, 2I, H), or (E, I, H) for an activation that halves no columns; its rows in the order that the
            activation reads.
        activation: as in `GroupedMLP`.
        down_proj: (E, H, I).
    """

    def __init__(self, gate_up_proj: NVFP4GroupedLinear, activation: nn.Module, down_proj: NVFP4GroupedLinear) -> None:
        super().__init__()
        self.gate_up_proj, self.activation, self.down_proj = gate_up_proj, activation, down_proj

    def _get_name(self) -> str:
        return name_of_container(self)

    def forward(self, x: Tensor, offsets: Tensor, scales: Tensor | None = None) -> Tensor:
        """Run (M, H) rows sorted by expert, with offsets (E,) of row ends: -> (M, H), zeros past the last row end.

        Args:
            scales: floating point (M,), multiplies each row of the result.

        Raises:
            ValueError: as `GroupedMLP.forward`.
        """
        ops, ends, form = torch.ops.thunder_moe, int32(offsets), own_form(self.activation)
        x = autocast_rows(x)
        check_row_scale("scales", scales, tuple(x.shape[:1]), x)
        gate_up: nn.Module = self.gate_up_proj
        down: nn.Module = self.down_proj
        by_operators = form is not None and calls_only_its_class(down, NVFP4GroupedLinear)
        early = None if by_operators else scales  # the factors that the rows of the down projection have already
        fusible = form is not None and form.kind == "swiglu" and form.interleave is None
        if fusible and form is not None and calls_only_its_class(gate_up, NVFP4GroupedLinear):
            format, layout, tensors = gate_up.read()
            rows = operator_for("f16a_nvfp4weight_grouped_swiglu", format)(
                x, *tensors, ends, None, None, gate_up.local_bias,
                layout=layout, alpha=form.alpha, limit=form.limit, up_shift=form.up_shift,
            )  # fmt: skip
            rows = rows if early is None else ops.grouped_bias(rows, ends, None, None, early)
        elif form is not None:
            rows = ops.scaled_activation(gate_up(x, ends), early, ends, **form.options)
        else:
            rows = self.activation(gate_up(x, ends), early)
        if by_operators:
            format, layout, tensors = self.down_proj.read()
            grouped_mm = operator_for("f16a_nvfp4weight_scaled_grouped_mm", format)
            out = grouped_mm(rows, *tensors, ends, layout=layout)
            out = ops.grouped_bias(out, ends, self.down_proj.local_bias, None, scales)
        else:
            out = down(rows, ends, scales) if self.down_proj.bias is not None else down(rows, ends)
            out = ops.grouped_bias(out, ends)
        return out


def own_form(activation: nn.Module) -> ActivationForm | None:
    """Return the form of an activation of this package without customization; None for others: no operator has them."""
    for cls in (ScaledSwiGLU, ScaledSReLU):
        if calls_only_its_class(activation, cls):
            return activation.form
    return None
