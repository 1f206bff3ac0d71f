"""`ScaledSwiGLU` and `ScaledSReLU`: activations of expert blocks, times a factor per row, computed in float32.
Called by users and grouped_mlp; calls the operator of ops.activation.

Legend: ... any leading dimensions, D columns, I intermediate_size.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require, require_type
from thunder_moe.nn.grouped_linear import require_at_least
from thunder_moe.ops.activation import ActivationForm
from thunder_moe.ops.grouped_linear import check_row_scale, is_floating


class _ScaledActivation(nn.Module):
    """A parameter-free activation module; `form` says which activation it computes."""

    gated: bool  # True if it halves the columns

    def __init__(self, form: ActivationForm) -> None:
        super().__init__()
        self.form = form

    def forward(self, y: Tensor, scales: Tensor | None = None) -> Tensor:
        """Activate (..., D) -> (..., I) in y's dtype.

        Args:
            scales: floating point (...), multiplies each row; keeps its dtype, as does its gradient.

        Raises:
            ValueError: y of integers, without a dimension, or with columns that do not make gate and up; scales of
                another shape, or of integers.
        """
        require(is_floating(y), "y", y, "a floating-point dtype")
        require(y.ndim >= 1, "y", y, "at least one dimension, of columns")
        leading = tuple(y.shape[:-1])
        check_row_scale("scales", scales, leading, y)
        self.form.check(y.shape[-1])
        rows = y if y.ndim == 2 else y[None] if y.ndim == 1 else y.flatten(0, -2)  # reshape(-1, 0) is ambiguous
        factors = scales if scales is None or y.ndim == 2 else scales.reshape(-1)
        out: Tensor = torch.ops.thunder_moe.scaled_activation(rows, factors, None, **self.form.options)
        return out if y.ndim == 2 else out.reshape(*leading, out.shape[-1])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *options: Any
    ) -> None:
        state_dict = {name: value for name, value in state_dict.items() if name != f"{prefix}_extra_state"}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)


class ScaledSwiGLU(_ScaledActivation):
    """``g * sigmoid(alpha * g) * (u + up_shift) * scales`` with g = min(gate, limit), u = clamp(up, -limit, limit).

    It computes in float32 and rounds once; only y and scales are kept for the backward. Gradients pass where gate or up
    equals the limit. The defaults are SwiGLU, ``silu(gate) * up``; GPT-OSS has alpha 1.702, limit 7 and up_shift 1.

    Args:
        glu_interleave_size: s, if gate and up alternate every s columns: they are the two parts of
            ``y.reshape(..., D // (2 * s), 2, s).transpose(-3, -2)``. None: the gate's half of the columns comes first.
        alpha: factor of the gate in the sigmoid.
        limit: the positive limit of gate and up; None for no limit.
        up_shift: added to up.

    Raises:
        ValueError: an interleave size that is not a positive integer, a limit that is not positive, NaN or Inf.
        TypeError: an option is not a number.
    """

    gated = True

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        alpha: float = 1.0,
        limit: float | None = None,
        up_shift: float = 0.0,
    ) -> None:
        if glu_interleave_size is not None:
            require_at_least(1, "glu_interleave_size", glu_interleave_size)
        for name, value in dict(alpha=alpha, up_shift=up_shift, limit=0.0 if limit is None else limit).items():
            require_type(name, value, SupportsFloat, "a number")
        if not (isfinite(alpha) and isfinite(up_shift)):
            raise ValueError(f"alpha, up_shift: got {alpha} and {up_shift}, wanted finite numbers")
        if limit is not None and not limit > 0:
            raise ValueError(f"limit: got {limit}, wanted a positive number or None")
        limit = None if limit is None else float(limit)
        super().__init__(ActivationForm("swiglu", float(alpha), limit, float(up_shift), glu_interleave_size))

    def extra_repr(self) -> str:
        form = self.form
        named = dict(glu_interleave_size=form.interleave, alpha=form.alpha, limit=form.limit, up_shift=form.up_shift)
        defaults = dict(glu_interleave_size=None, alpha=1.0, limit=None, up_shift=0.0)
        return ", ".join(f"{name}={value}" for name, value in named.items() if value != defaults[name])


class ScaledSReLU(_ScaledActivation):
    """``relu(y)**2 * scales``, computed in float32 and rounded once; D = I. Only y and scales are kept for the
    backward."""

    gated = False

    def __init__(self) -> None:
        super().__init__(ActivationForm("srelu"))
