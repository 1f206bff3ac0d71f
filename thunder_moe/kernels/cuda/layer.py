"""The experts of a layer as one chain of CUDA kernels, each of which starts before the one in front of it has ended.
Called by kernels/cuda/backend.py and bound.py; calls the launches of kernels/cuda/prepared.py.

[route] -> [gather] -> gate_up GEMM with SwiGLU -> down GEMM -> weighted combine

The kernels are those of the operators that do one step. What the chain adds is that everything else, such as
allocations and copies of misaligned operands, happens before the first GEMM. So the kernel in front of the down GEMM is
known, and it writes nothing but the rows that the down GEMM multiplies: that one counts its tiles and fills its stages
with weights while the gate_up GEMM still runs, and waits before it reads rows (`late_x` of grouped_mm.cuh;
`await_previous_kernel` of common.cuh says why all else that it reads has been written by then).
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_moe.kernels.by_parts import Order
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.cuda.prepared import CombineLaunch, GemmLaunch, RouteLaunch

__all__ = ["GEMMS", "LayerLaunch"]

Weight = tuple[Tensor, Tensor, Tensor | None]  # qdata, scale, global_scale
# Two threads may use one stream. Were a chain's GEMMs launched between another's, the two down GEMMs would follow each
# other, and begin with the same tile counter.
GEMMS = threading.Lock()


class LayerLaunch(NamedTuple):
    """The launches of a layer's experts, for operands of one kind.

    Attributes:
        route: where the order of rows is not given.
        gate_up: with SwiGLU.
        down: of the same number of rows.
        combine: with late_rows.
        weight_on_input: whether the router's weights multiply the experts' input.
        device: the index of the operands' device.
    """

    route: RouteLaunch | None
    gate_up: GemmLaunch
    down: GemmLaunch
    combine: CombineLaunch
    weight_on_input: bool
    device: int

    def __call__(
        self,
        hidden_states: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        order: Order | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Tokens (T, H), ids and weights (T, A) -> (T, H), in `out` where it is given; all operands contiguous."""
        if launch.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(
                    hidden_states, expert_ids, expert_weights, gate_up, down, gate_up_bias, down_bias, order, out
                )  # fmt: skip
        if order is None:
            assert self.route is not None
            order = self.route(expert_ids)
        rows = self.rows(hidden_states, expert_weights, gate_up, down, gate_up_bias, down_bias, order)
        return self.combine(rows, order[2], None if self.weight_on_input else expert_weights, out)

    def rows(
        self,
        hidden_states: Tensor,
        expert_weights: Tensor,
        gate_up: Weight,
        down: Weight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        order: Order,
    ) -> Tensor:
        """The chain without its end: rows (M, H), sorted by expert."""
        if launch.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.rows(hidden_states, expert_weights, gate_up, down, gate_up_bias, down_bias, order)
        row_slot, offsets, _ = order
        on_input = expert_weights if self.weight_on_input else None
        first = self.gate_up.prepare(hidden_states, *gate_up, offsets, row_slot, on_input, gate_up_bias)
        second = self.down.prepare(first.out, *down, offsets, None, None, down_bias, late_x=True)
        with GEMMS:
            self.gate_up.launch(first)
            self.down.launch(second)
        return second.out
