"""Specs: what decides which kernels run for one kind of work, as frozen dataclasses without tensors.
Called by the modules of kernels/cuda and compilers/dynamo/add_norm.py; calls activations and routing (dataclasses).

A spec is printed and compared without a device: `Target` has what a device contributes. Legend: M rows, T tokens,
A experts of a token, E experts, H hidden_size, I intermediate_size, N output and K input features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.routing import RouterConfig


@dataclass(frozen=True)
class Target:
    """A CUDA device, and its properties that decide which kernels run.

    Attributes:
        device: the device, with an index.
        multiprocessors: their number.
        capability: the compute capability, such as (9, 0).
    """

    device: torch.device
    multiprocessors: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class WeightSpec:
    """A packed weight (E, N, K).

    Attributes:
        layout: the order of its bytes, one of `formats.layouts.LAYOUTS`.
        format: the name of its number format.
        per_row_scale: True if there is a global scale for each row instead of each expert.
    """

    layout: str
    format: str = "nvfp4"
    per_row_scale: bool = False


@dataclass(frozen=True)
class GemmSpec:
    """A grouped GEMM of 16-bit rows and packed weights.

    Attributes:
        rows, num_experts, k: M, of all experts together, E and K.
        n: N, rows of a weight; 2 I with an activation.
        dtype: the dtype of rows and result.
        weight: the packed weight.
        target: where it runs.
        top_k: the number of rows of a token, gathered by a row_slot; None if rows are already gathered.
        slot_scale, bias: the dtypes of these operands; None for no operand.
        activation: fused into the GEMM; None for the GEMM alone.
        batch_invariant: True if the order of a row's sums must not depend on the number of rows.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    dtype: torch.dtype
    weight: WeightSpec
    target: Target
    top_k: int | None = None
    slot_scale: torch.dtype | None = None
    bias: torch.dtype | None = None
    activation: SwiGLUConfig | None = None
    batch_invariant: bool = False

    @property
    def features(self) -> int:
        """Return the columns of the result."""
        return self.n if self.activation is None else self.n // 2


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts of a layer: route -> gate_up GEMM + activation -> down GEMM -> weighted sum per token.

    Attributes:
        tokens, top_k, num_experts, hidden_size, intermediate_size: T, A, E, H and I.
        dtype, ids, weights: the dtypes of tokens and result, of the expert ids, and of the routing weights.
        gate_up, down: the packed weights (E, 2I, H) and (E, H, I).
        activation: between the GEMMs.
        target: where it runs.
        gate_up_bias, down_bias: the dtypes of these operands; None for no operand.
        sorted: True if the order of the rows is given.
        weight_on_input: True if the routing weights multiply the experts' input, not their output.
        summed: False for the rows (M, H) before the sum.
        batch_invariant: as in `GemmSpec`.
    """

    tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    ids: torch.dtype
    weights: torch.dtype
    gate_up: WeightSpec
    down: WeightSpec
    activation: SwiGLUConfig
    target: Target
    gate_up_bias: torch.dtype | None = None
    down_bias: torch.dtype | None = None
    sorted: bool = False
    weight_on_input: bool = False
    summed: bool = True
    batch_invariant: bool = False

    @property
    def rows(self) -> int:
        """Return M."""
        return self.tokens * self.top_k

    @property
    def gate_up_gemm(self) -> GemmSpec:
        """Return the first GEMM."""
        return GemmSpec(
            self.rows, self.num_experts, 2 * self.intermediate_size, self.hidden_size, self.dtype, self.gate_up,
            self.target, self.top_k, self.weights if self.weight_on_input else None, self.gate_up_bias, self.activation,
            self.batch_invariant,
        )  # fmt: skip

    @property
    def down_gemm(self) -> GemmSpec:
        """Return the second GEMM."""
        return GemmSpec(
            self.rows, self.num_experts, self.hidden_size, self.intermediate_size, self.dtype, self.down, self.target,
            bias=self.down_bias, batch_invariant=self.batch_invariant,
        )  # fmt: skip


@dataclass(frozen=True)
class CombineSpec:
    """The weighted sum of each token's rows: (M, N) -> (T, N).

    Attributes:
        rows, tokens, top_k, n: M, T, A and N, all positive.
        dtype: the dtype of rows and result.
        weights: the dtype of the weights; None for no operand.
    """

    rows: int
    tokens: int
    top_k: int
    n: int
    dtype: torch.dtype
    weights: torch.dtype | None


@dataclass(frozen=True)
class RouterSpec:
    """A router: logits -> scores, expert ids and the order of the rows.

    Attributes:
        tokens, num_experts: T and E.
        form: how it scores and chooses.
        logits, scores: their dtypes.
        bias: the dtype of the bias of the choice; None for no operand.
        target: where it runs.
        hidden_size: H, if the router's linear layer is a part of it; else None.
        hidden: the dtype of the linear layer's operands, or None.
        linear_bias: True if the linear layer has a bias.
    """

    tokens: int
    num_experts: int
    form: RouterConfig
    logits: torch.dtype
    bias: torch.dtype | None
    scores: torch.dtype
    target: Target
    hidden_size: int | None = None
    hidden: torch.dtype | None = None
    linear_bias: bool = False


@dataclass(frozen=True)
class LinearSpec:
    """A grouped GEMM of weights that are not packed: (M, K) x (E, N, K) -> (M, N).

    Attributes:
        rows, num_experts, n, k: M, E, N and K, all positive.
        dtype: the dtype of rows, weight and result.
        target: where it runs.
        transposed: True if the weight is (E, K, N).
        wide_offsets: True if the offsets are int64, not int32.
        zero_tail: True if rows past the last end become zeros, instead of keeping their values.
        into: True if the result is written into a given tensor.
        rank: R of an adapter, whose product (M, R) x (E, N, R) is added; 0 for none.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    dtype: torch.dtype
    target: Target
    transposed: bool = False
    wide_offsets: bool = False
    zero_tail: bool = False
    into: bool = False
    rank: int = 0


@dataclass(frozen=True)
class DgradSpec:
    """The gradient of a grouped GEMM's rows: (M, N) x a packed weight (E, N, K) -> (M, K).

    Attributes:
        rows, num_experts, n, k: M, which is positive, E, N and K.
        dtype: the dtype of the gradients.
        weight: the packed weight.
        target: where it runs.
        rank: R of an adapter, whose product (M, R) x (E, R, K) is added; 0 for none.
    """

    rows: int
    num_experts: int
    n: int
    k: int
    dtype: torch.dtype
    weight: WeightSpec
    target: Target
    rank: int = 0
