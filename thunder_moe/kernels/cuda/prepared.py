"""Describes what each kind of work launches: `append_*` append kernels on addresses to a chain.
Called by operators.py beside it; calls plan.py, linear.py and chain.py.

Operands are contiguous, and aligned to 16 bytes where kernels load 16 bytes at a time. Legend: M rows, T tokens,
A experts of a token, E experts, N output and K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_moe.activations import SWIGLU
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda.arguments import (
    CombineArguments,
    DequantizeArguments,
    GatherArguments,
    LowRankGemmArguments,
    RouteArguments,
    RowStartsArguments,
    TmaGemmArguments,
)
from thunder_moe.kernels.cuda.chain import Address, Chain, ChainBuilder, Field, TensorMap
from thunder_moe.kernels.cuda.configs import COMMON, TILED, GemmConfig
from thunder_moe.kernels.cuda.linear import (
    MAX_EXPERTS,
    append_linear,
    append_packed_linear,
    kernel_for,
    packed_is_faster,
    torch_is_faster,
)
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.plan import CACHE_LINE, GemmPlan
from thunder_moe.kernels.specs import CombineSpec, DgradSpec, ExpertsSpec, GemmSpec, LinearSpec

ELEMENTWISE_THREADS = 256
ELEMENTWISE_BLOCKS = 1 << 20  # at most: threads loop over items
DEQUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"))
ROUTE = (COMMON, COMMON.with_name("route.cu"))
DGRAD = COMMON.with_name("tiled_dgrad.cu")
_ROUTE_THREADS = 256
_ROUTE_SLOTS = 2048  # of a block; a single block takes up to twice as many
_GATHER_BLOCKS = 8  # of `gather_rows` on a multiprocessor, as many as run at once
_COMBINE_SLOTS = 8  # at most: slots that a thread of `combine` loads at once
_FEW_SUMS = 1 << 18  # of `combine`: up to so many go to smaller blocks, which are spread over more multiprocessors


class Weight(NamedTuple):
    """The addresses of a packed weight's tensors; no global_scale in a format without."""

    qdata: Address
    scale: Address
    global_scale: Address | None


class Order(NamedTuple):
    """The addresses of row_slot int32 (M,), offsets int32 (E,) and slot_row int32 (T, A)."""

    row_slot: Address
    offsets: Address
    slot_row: Address


class Adapter(NamedTuple):
    """The addresses of the operands of a LoRA adapter: inner (M, R) and b (E, N, R), and R.

    transposed: the weight beside it is (E, K, N).
    """

    inner: Address
    b: Address
    rank: int
    transposed: bool = False


# ---- GEMMs


def append_gemm(
    chain: ChainBuilder, spec: GemmSpec, plan: GemmPlan, x: Address, weight: Weight, offsets: Address | None,
    row_slot: Address | None = None, slot_scale: Address | None = None, bias: Address | None = None, *,
    out: Address | None = None, after_gemm: bool = False, adapter: Adapter | None = None, prefetch: bool = False,
) -> Address:  # fmt: skip
    """Append a grouped GEMM: (M, K) rows, or (T, K) tokens with row_slot -> (M, columns_of(spec)).

    Args:
        plan: `plan_gemm` of the spec.
        weight: in the layout of the plan's configuration.
        offsets: row ends; None for one group of all rows.
        row_slot, slot_scale, bias: operands that the spec has, or None.
        out: where the result goes; None for scratch memory.
        after_gemm: True if the launch before is another GEMM, which writes x and no other operand. A kernel that
            exploits this starts while the other one still runs, so they get different semaphores.
        adapter: an adapter whose product is added before rows are rounded; its kernel is "tiled_wgmma", without
            stream-K.
        prefetch: the launch before does not write the weight. Clusters, which have no semaphores, then
            read it early.
    """
    config, multiprocessors = plan.config, spec.target.multiprocessors
    late = after_gemm and config.kernel in ("tiled_mma", "tiled_cluster")
    late = late or (prefetch and config.kernel == "tiled_cluster")
    if out is None:
        out = chain.scratch(2 * spec.rows * columns_of(spec))
    counter = semaphores = row_sums = sums = None
    if plan.workspace:
        counter = chain.semaphores(plan.workspace, overlapping=late)
        row_sums = counter.plus(4 * plan.row_sums) if plan.row_sums else None
        if plan.partial_sums:
            sums, semaphores = chain.scratch(4 * plan.partial_sums), counter.plus(4 * CACHE_LINE)
    if plan.gather is not None:
        x = _append_gather(chain, spec, plan, x, offsets, row_slot)
    form = spec.activation or SWIGLU
    fields: tuple[Field, ...] = (
        x, *weight, offsets, row_slot, slot_scale, bias, out, sums, semaphores, row_sums,
        spec.rows, spec.num_experts, spec.n, spec.k, spec.top_k or 1, spec.weight.per_row_scale,
        _code(spec.slot_scale), _code(spec.bias), form.alpha, -1.0 if form.limit is None else form.limit, form.up_shift,
        counter, plan.read_once, plan.row_tiles, late,
    )  # fmt: skip
    sources, expression, argument = plan.sources, plan.expression, config.argument
    if argument is TmaGemmArguments:
        rows_map = TensorMap(x, spec.rows, spec.k, 8 * config.token_blocks)
        fields = (rows_map, *fields)
        if adapter is not None:
            argument, expression = LowRankGemmArguments, _with_adapter(spec, config, adapter)
            sources = (*sources, DGRAD) if adapter.transposed else sources
            inner_map = TensorMap(adapter.inner, spec.rows, adapter.rank, rows_map.box_rows)
            fields = (rows_map, inner_map, *fields[1:], adapter.b, adapter.rank)
    at_once = None if config.kernel == "tiled_cluster" else multiprocessors
    chain.launch(sources, expression, plan.threads, plan.shared_bytes, plan.blocks, argument, fields, at_once)
    return out


def columns_of(spec: GemmSpec) -> int:
    """Return the columns of the result's memory: the kernels store pairs."""
    return spec.features + spec.features % 2


def _append_gather(
    chain: ChainBuilder, spec: GemmSpec, plan: GemmPlan, x: Address, offsets: Address | None, row_slot: Address | None
) -> Address:
    """Append the kernel that gathers the rows beforehand, for GEMMs that read them in order."""
    assert plan.gather is not None
    name, (rows, columns) = plan.gather
    gathered = chain.scratch(2 * rows * columns)
    end = None if offsets is None else offsets.plus(4 * (spec.num_experts - 1))
    fields = x, row_slot, gathered, end, spec.rows, spec.k, spec.top_k or 1
    # Blocks that loop take 62 us, one block for every 256 items 108, if half of 65536 rows of 2048 belong to experts
    # elsewhere; 116 against 133 if none do (H200).
    most = _GATHER_BLOCKS * spec.target.multiprocessors if name == "gather_rows" else ELEMENTWISE_BLOCKS
    blocks = elementwise_blocks(rows * columns // 8, most)
    chain.launch(plan.sources, name, ELEMENTWISE_THREADS, 0, blocks, GatherArguments, fields)
    return gathered


def _with_adapter(spec: GemmSpec, config: GemmConfig, adapter: Adapter) -> str:
    """Return the C++ name of the kernel that adds an adapter's product."""
    name = "low_rank_tiled_dgrad" if adapter.transposed else "low_rank_tiled_wgmma"
    numbers = config.token_blocks, config.row_blocks, config.warps_n, config.depth, config.stages
    return instance(name, spec.dtype == torch.bfloat16, *numbers, -(-adapter.rank // 16))


# ---- the order of rows, and the sum per token


def append_route(
    chain: ChainBuilder, shape: tuple[int, int], num_experts: int, ids: Address, wide: bool, order: Order
) -> None:
    """Append the sort of assignments by expert into `order`, from ids (T, A) of this shape, int64 where `wide`, else
    int32; E is at most `MAX_EXPERTS`."""
    slots, buckets = shape[0] * shape[1], num_experts + 1
    whole = -(-slots // _ROUTE_THREADS) * _ROUTE_THREADS
    per_block = whole if whole <= 2 * _ROUTE_SLOTS else _ROUTE_SLOTS
    blocks = -(-slots // per_block)
    counts = chain.scratch(4 * blocks * buckets) if blocks > 1 else None
    fields = ids, counts, *order, slots, num_experts, wide, per_block
    for name in ("route_count", "route_scatter")[0 if blocks > 1 else 1 :]:
        shared_bytes = 4 * _ROUTE_THREADS // 32 * buckets
        chain.launch(ROUTE, name, _ROUTE_THREADS, shared_bytes, blocks, RouteArguments, fields)


def order_results(chain: ChainBuilder, shape: tuple[int, int], num_experts: int) -> Order:
    """Return row_slot, offsets and slot_row from the chain."""
    vectors = [chain.result((size,), torch.int32) for size in (shape[0] * shape[1], num_experts)]
    return Order(vectors[0], vectors[1], chain.result(shape, torch.int32))


def _order_in_scratch(chain: ChainBuilder, shape: tuple[int, int], num_experts: int) -> Order:
    rows = shape[0] * shape[1]
    return Order(*(chain.scratch(4 * size) for size in (rows, num_experts, rows)))


def append_combine(
    chain: ChainBuilder, spec: CombineSpec, rows: Address, slot_row: Address, slot_weight: Address | None, out: Address,
    *, rows_from_previous_kernel: bool,
) -> None:  # fmt: skip
    """Append the weighted sum per token of rows (M, N): -> (T, N).

    rows_from_previous_kernel: True if the kernel launched right before writes the rows and no other operand.
    """
    tokens, top_k, n = spec.tokens, spec.top_k, spec.n
    slots = min(1 << (top_k - 1).bit_length(), _COMBINE_SLOTS)
    name = instance("combine", spec.dtype == torch.bfloat16, slots)
    threads = ELEMENTWISE_THREADS if tokens * n > _FEW_SUMS else 64
    sizes = spec.rows, tokens, top_k, n
    fields = rows, slot_row, slot_weight, out, *sizes, _code(spec.weights), rows_from_previous_kernel
    blocks = tokens * -(-n // (8 * threads))
    chain.launch(ROUTE, name, threads, 0, blocks, CombineArguments, fields)


# ---- the experts of a layer


class ExpertsOperands(NamedTuple):
    """The addresses of a layer's operands; None for an operand that the spec leaves out."""

    hidden_states: Address
    expert_ids: Address
    expert_weights: Address
    gate_up: Weight
    down: Weight
    gate_up_bias: Address | None
    down_bias: Address | None
    order: Order | None


def append_experts(
    chain: ChainBuilder, spec: ExpertsSpec, plans: tuple[GemmPlan, GemmPlan], operands: ExpertsOperands, out: Address
) -> None:
    """Append [route] -> [gather] -> gate_up GEMM with activation -> down GEMM -> weighted sum per token.

    Each kernel may start before the one in front of it has ended. The kernel in front of the down GEMM writes nothing
    but the rows that this GEMM multiplies. So it counts its tiles and fills its stages with weights while the gate_up
    GEMM still runs, and waits before it reads rows (`x_from_previous_kernel` of grouped_mm.cuh). The comment at
    `await_previous_kernel` of common.cuh says why all other operands have been written by then.

    Args:
        spec: the spec of the layer; its sizes are positive and its features are even.
        plans: `plan_gemm` of the two GEMMs.
        out: the result, (T, H), or the rows (M, H) where the spec says that they are not summed.
    """
    first, second = spec.gate_up_gemm, spec.down_gemm
    shape, order = (spec.tokens, spec.top_k), operands.order
    if order is None:
        order = _order_in_scratch(chain, shape, spec.num_experts)
        append_route(chain, shape, spec.num_experts, operands.expert_ids, spec.ids == torch.int64, order)
    weights = operands.expert_weights
    on_input, on_output = (weights, None) if spec.weight_on_input else (None, weights)
    inner = append_gemm(
        chain, first, plans[0], operands.hidden_states, operands.gate_up, order.offsets, order.row_slot, on_input,
        operands.gate_up_bias,
    )  # fmt: skip
    rows = append_gemm(
        chain, second, plans[1], inner, operands.down, order.offsets, bias=operands.down_bias,
        out=None if spec.summed else out, after_gemm=True,
    )  # fmt: skip
    if spec.summed:
        weights_of_sum = None if spec.weight_on_input else spec.weights
        summed = CombineSpec(spec.rows, spec.tokens, spec.top_k, spec.hidden_size, spec.dtype, weights_of_sum)
        append_combine(chain, summed, rows, order.slot_row, on_output, out, rows_from_previous_kernel=True)


# ---- the gradient of rows


def append_dgrad(
    chain: ChainBuilder, spec: DgradSpec, grad: Address, weight: Weight, offsets: Address,
    adapter: Adapter | None = None,
) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None:  # fmt: skip
    """Append the gradient of a grouped GEMM's rows, (M, N) -> (M, K), and declare its result.

    On compute capability 9.0 the GEMM decodes NVFP4 weights in tiles, if that is faster. Otherwise the weights of
    experts with rows are dequantized, then multiplied.

    Returns:
        None; or, if torch's grouped GEMM is faster, a function that computes the gradient from the incoming one and the
        chain's results: the weights and the starts of the experts' rows.
    """
    target, (rows, experts, n, k) = spec.target, (spec.rows, spec.num_experts, spec.n, spec.k)
    tiled = spec.weight.layout == TILED
    serves = tiled and spec.weight.format == "nvfp4" and target.capability == (9, 0) and experts <= MAX_EXPERTS
    if serves and packed_is_faster(rows / experts):
        out = chain.result((rows, k), spec.dtype)
        append_packed_linear(chain, spec, grad, weight, offsets, out, adapter)
        return None
    by_torch = n % 8 == 0 and not spec.rank and torch_is_faster(spec.dtype, target.capability, rows / experts)
    if by_torch:
        values = chain.result((experts, n, k), spec.dtype)
    else:
        values = chain.scratch(spec.dtype.itemsize * experts * n * k)
    fields = *weight, values, offsets, experts * n, 1 if spec.weight.per_row_scale else n, k, n
    expression = dequantize_kernel(spec.weight.format, tiled, spec.dtype)
    blocks = elementwise_blocks(experts * n * k // 16)
    chain.launch(DEQUANTIZE, expression, ELEMENTWISE_THREADS, 0, blocks, DequantizeArguments, fields)
    if by_torch:
        starts = chain.result((experts + 1,), torch.int32)
        chain.launch(ROUTE, "row_starts", 32, 0, 1, RowStartsArguments, (offsets, starts, experts, rows))
        # torch's grouped GEMM trusts its offsets: these are clamped.
        return lambda grad, made: torch._grouped_mm(grad.detach(), made[0], offs=made[1][1:])
    linear = LinearSpec(rows, experts, k, n, spec.dtype, target, transposed=True, rank=spec.rank)
    kernel = "wgmma" if spec.rank else kernel_for(spec.dtype, k, n, target.capability, 0)
    out = chain.result((rows, k), spec.dtype)
    append_linear(chain, linear, kernel, grad, values, offsets, out, adapter)
    return None


def finished(chain: Chain, finish: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None) -> Callable[..., Tensor]:
    """Return a function that runs a chain, then `finish` on its first operand and its results, unless it gave None."""
    if finish is None:
        return chain

    def run(grad: Tensor, *operands: Tensor | None, **options: object) -> Tensor | None:
        made = chain(grad, *operands, **options)
        return None if made is None else finish(grad, made)

    return run  # type: ignore[return-value]


def dequantize_kernel(format: str, tiled: bool, dtype: torch.dtype) -> str:
    """Return the C++ name of the kernel of `DEQUANTIZE` for a format of weights and a dtype of the result."""
    name = "dequantize" if format == "nvfp4" else f"dequantize_{format}"
    return instance(name + "_tiled" * tiled, dtype == torch.bfloat16)


def elementwise_blocks(items: int, most: int = ELEMENTWISE_BLOCKS) -> int:
    """Return the blocks of `ELEMENTWISE_THREADS` threads that loop over `items`."""
    return min(-(-items // ELEMENTWISE_THREADS), most)


def _code(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else DTYPE_CODES[dtype]
