"""The operators' launches, prepared once for operands of one kind: a call allocates, packs pointers and launches.
Called by kernels/cuda/backend.py, and through its `PREPARED` by operators; calls plan.py, launch.py and workspace.py.

Every class here holds what shapes, dtypes and a device decide, and takes contiguous tensors of those; they may lie at
any address. Calls run on the current stream of that device. Legend: M rows, E experts, N output and K input features.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thunder_moe.activations import GLU, SWIGLU
from thunder_moe.kernels.arguments import DTYPE_CODES
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.cuda.arguments import (
    CombineArguments,
    DequantizeArguments,
    GatherArguments,
    RouteArguments,
    RowStartsArguments,
    TmaGemmArguments,
)
from thunder_moe.kernels.cuda.configs import COMMON, GemmConfig
from thunder_moe.kernels.cuda.linear import (
    MAX_EXPERTS,
    kernel_for,
    linear_launch,
    packed_is_faster,
    packed_launch,
    torch_is_faster,
)
from thunder_moe.kernels.cuda.plan import CACHE_LINE, GemmPlan, plan_gemm
from thunder_moe.kernels.cuda.workspace import semaphore_pool

__all__ = [
    "CombineLaunch",
    "CombinedLaunch",
    "DgradLaunch",
    "Gemm",
    "GemmLaunch",
    "RouteLaunch",
    "combine_launch",
    "dequantize_kernel",
    "dgrad_launch",
    "gemm_launch",
    "route_launch",
]

ELEMENTWISE_THREADS = 256
ELEMENTWISE_BLOCKS = 1 << 20  # at most: threads loop over items
DEQUANTIZE = (COMMON, COMMON.with_name("dequantize.cu"))
ROUTE = (COMMON, COMMON.with_name("route.cu"))
_ROUTE_THREADS = 256
_ROUTE_SLOTS = 2048  # of a block; a single block takes up to twice as many
_ALIGNED = 256  # bytes: of the parts of a tensor that several kernels write
_GATHER_BLOCKS = 8  # of `gather_rows` on a multiprocessor, as many as run at once
_COMBINE_SLOTS = 8  # at most: slots that a thread of `combine` loads at once
_FEW_SUMS = 1 << 18  # of `combine`: up to so many go to smaller blocks, which are spread over more multiprocessors


class Gemm(NamedTuple):
    """A grouped GEMM that is ready: `GemmLaunch.launch` launches its kernels and nothing else.

    Attributes:
        out: (M, N), rounded up to an even number of columns.
        gather: fields of the struct of the kernel that gathers the rows, if there is one.
        fields: of the GEMM's struct.
        kept: tensors whose addresses these hold.
    """

    out: Tensor
    gather: tuple[int, ...] | None
    fields: tuple[Any, ...]
    kept: tuple[Tensor | None, ...]


class GemmLaunch:
    """A grouped GEMM, with SwiGLU where there is a `form`: the kernel of `plan_gemm`.

    Args:
        rows: M, of all experts together.
        num_experts: E.
        n: N, rows of a weight; 2 I for SwiGLU.
        k: K.
        top_k: rows of a token, which are gathered by a row_slot; None where rows are given as they are.
        dtype: of the rows.
        layout: of the weight, one of `configs.LAYOUTS`.
        per_row: whether there is a global scale for each row of a weight.
        slot_scale: the dtype of that operand; None for no operand.
        bias: likewise.
        form: of the activation; None for the GEMM alone.
        device: where the operands are.
        facts: (multiprocessors, compute capability) of the device.
        config: in place of the one that is best.
        format: of the weight, one of `configs.FORMATS`.

    Attributes:
        layout: of the weight that it reads.
        launcher: of the GEMM's kernel.
        alone: whether that is all there is: no rows are gathered, nothing is cut off.
        maps_rows: whether it takes a tensor map, which is made of the address of the rows.
        reads_early: whether it can make use of `late_x`.
        out_bytes, sums_bytes: of the result and of the partial sums.

    Raises:
        ValueError: as `plan_gemm`.
    """

    def __init__(
        self,
        rows: int,
        num_experts: int,
        n: int,
        k: int,
        top_k: int | None,
        dtype: torch.dtype,
        layout: str,
        per_row: bool,
        slot_scale: torch.dtype | None,
        bias: torch.dtype | None,
        form: GLU | None,
        device: torch.device,
        facts: tuple[int, tuple[int, int]],
        config: GemmConfig | None,
        format: str = "nvfp4",
    ) -> None:
        multiprocessors, capability = facts
        gathered, scaled = top_k is not None, slot_scale is not None
        plan = plan_gemm(
            rows, num_experts, n, k, form is not None, gathered, scaled, dtype, layout, multiprocessors, capability,
            format, config,
        )  # fmt: skip
        self.layout = plan.config.layout
        self._device, self._index = device, device.index
        self._features = n if form is None else n // 2
        self._shape = rows, self._features + self._features % 2  # the kernels store pairs
        self._empty, self._strides, self._dtype = launch.allocator(device), (self._shape[1], 1), dtype
        self.launcher = self._launcher(plan, None if plan.config.kernel == "tiled_cluster" else multiprocessors)
        self._workspace, self._partial_sums, self._read_once = plan.workspace, plan.partial_sums, plan.read_once
        self.out_bytes, self.sums_bytes = 2 * self._shape[0] * self._shape[1], 4 * plan.partial_sums
        self.reads_early = plan.config.kernel in ("tiled_mma", "tiled_cluster")
        self._row_sums = 4 * plan.row_sums
        form = form or SWIGLU
        self._numbers = (
            rows, num_experts, n, k, top_k or 1, per_row, _code(slot_scale), _code(bias),
            form.alpha, -1.0 if form.limit is None else form.limit, form.up_shift,
        )  # fmt: skip
        self._map_rows = None  # of the tensor map of kernels that take one
        if plan.config.argument is TmaGemmArguments:
            self._map_rows = rows, k, 8 * plan.config.token_blocks
        self._gather = None
        if plan.gather is not None:
            name, shape = plan.gather
            self._gather_shape, self._gather_numbers = shape, (rows, k, top_k or 1)
            # Blocks that loop take 62 us, one for every 256 items 108, where half of 65536 rows of 2048 are of experts
            # elsewhere; 116 against 133 where none are (H200).
            most = _GATHER_BLOCKS * multiprocessors if name == "gather_rows" else ELEMENTWISE_BLOCKS
            items = shape[0] * shape[1] // 8
            self._gather = elementwise_launcher(plan.sources, name, items, GatherArguments, self._index, most)
        self.alone = self._gather is None and self._shape[1] == self._features
        self.maps_rows = self._map_rows is not None

    def __call__(
        self,
        activation: Tensor,
        qdata: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        offsets: Tensor | None,
        row_slot: Tensor | None,
        slot_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """(M, K) rows, or (T, K) tokens with row_slot -> (M, N), or (M, I) for SwiGLU.

        qdata is contiguous as (E, N, K // 2), of MXFP8 (E, N, K), in whatever view; without offsets there is one
        group of all rows. MXFP8 has no global_scale.
        """
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(activation, qdata, scale, global_scale, offsets, row_slot, slot_scale, bias)
        gemm = self.prepare(activation, qdata, scale, global_scale, offsets, row_slot, slot_scale, bias)
        self.launch(gemm)
        return gemm.out if self._features == self._shape[1] else gemm.out[:, : self._features].contiguous()

    def prepare(
        self,
        activation: Tensor,
        qdata: Tensor,
        scale: Tensor,
        global_scale: Tensor | None,
        offsets: Tensor | None,
        row_slot: Tensor | None,
        slot_scale: Tensor | None,
        bias: Tensor | None,
        *,
        late_x: bool = False,
    ) -> Gemm:
        """What precedes the launch on the current device, which has to be the operands'.

        late_x: the GEMM will be launched right behind another one, which writes the activation and no other operand.
        Where its kernel makes use of that, both run at once for a while, so they get workspaces apart.
        """
        late_x = late_x and self.reads_early
        x, codes, scales = activation.data_ptr(), qdata.data_ptr(), scale.data_ptr()
        globals_ = 0 if global_scale is None else global_scale.data_ptr()
        if (x | codes | scales | globals_) & 15:
            # The kernels load 16 bytes at a time. The copies live until the kernel is launched, on the same stream.
            activation, qdata, scale = map(_aligned, (activation, qdata, scale))
            x, codes, scales = map(Tensor.data_ptr, (activation, qdata, scale))
            if global_scale is not None:
                global_scale = _aligned(global_scale)
                globals_ = global_scale.data_ptr()
        out = self._empty(self._shape, self._strides, self._dtype)
        slots = 0 if row_slot is None else row_slot.data_ptr()
        partial_sums = tile_counter = 0
        sums = rows = gather = None
        workspace = self.take_workspace(late_x)
        if workspace is not None:
            tile_counter = workspace.data_ptr()
            if self._partial_sums:
                sums = self._empty((self._partial_sums,), (1,), torch.float32)
                partial_sums = sums.data_ptr()
        if self._gather is not None:
            rows = self._empty(self._gather_shape, (self._gather_shape[1], 1), self._dtype)
            end = 0 if offsets is None else offsets.data_ptr() + 4 * (offsets.shape[0] - 1)
            gather = x, slots, rows.data_ptr(), end, *self._gather_numbers
            x = rows.data_ptr()
        fields = self.fields(
            x, codes, scales, globals_, 0 if offsets is None else offsets.data_ptr(), slots,
            0 if slot_scale is None else slot_scale.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), partial_sums, tile_counter, late_x,
        )  # fmt: skip
        kept = (
            activation, qdata, scale, global_scale, offsets, row_slot, slot_scale, bias, workspace, sums, rows
        )  # fmt: skip
        return Gemm(out, gather, fields, kept)

    def _launcher(self, plan: GemmPlan, multiprocessors: int | None) -> launch.Launcher:
        return launch.launcher(
            plan.sources, plan.expression, plan.threads, plan.shared_bytes, plan.blocks, plan.config.argument,
            self._index, multiprocessors,
        )  # fmt: skip

    def take_workspace(self, late_x: bool) -> Tensor | None:
        """Zeros of the current stream for a launch; None for a kernel that needs none."""
        return semaphore_pool(self._device).take(self._workspace, overlapping=late_x) if self._workspace else None

    def fields(
        self, x: int, qdata: int, scale: int, global_scale: int, offsets: int, row_slot: int, slot_scale: int,
        bias: int, out: int, partial_sums: int, workspace: int, late_x: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Of the GEMM's struct, from the addresses of what it reads and writes; 0 for none."""
        first = () if self._map_rows is None else (launch.tensor_map(x, *self._map_rows),)
        semaphores = workspace + 4 * CACHE_LINE if partial_sums else 0
        row_sums = workspace + self._row_sums if self._row_sums else 0
        return (
            *first, x, qdata, scale, global_scale, offsets, row_slot, slot_scale, bias, out, partial_sums, semaphores,
            row_sums, *self._numbers, workspace, self._read_once, late_x,
        )  # fmt: skip

    def launch(self, gemm: Gemm) -> None:
        """Launches the kernels of what `prepare` has made."""
        stream = launch.current_stream(self._index)
        if self._gather is not None and gemm.gather is not None:
            self._gather(stream, *gemm.gather)
        self.launcher(stream, *gemm.fields)


class CombineLaunch:
    """The weighted sum per token of rows (M, N): -> (T, N).

    Args:
        rows: M, positive.
        tokens: T, positive.
        top_k: A.
        n: N, positive.
        dtype: of the rows.
        slot_weight: the dtype of that operand; None for no operand.
        device: where the operands are.
        late_rows: the kernel that is launched right before wrote the rows, and none of the other operands.

    Attributes:
        launcher: of the kernel.
        index: of the device.
        result: its shape, strides and dtype.
        empty: allocates it.
        numbers: the last fields of the kernel's struct.
    """

    def __init__(
        self, rows: int, tokens: int, top_k: int, n: int, dtype: torch.dtype, slot_weight: torch.dtype | None,
        device: torch.device, late_rows: bool,
    ) -> None:  # fmt: skip
        self.index, self.result = device.index, ((tokens, n), (n, 1), dtype)
        self.empty = launch.allocator(device)
        self.numbers = rows, tokens, top_k, n, _code(slot_weight), late_rows
        bf16, slots = str(dtype == torch.bfloat16).lower(), min(1 << (top_k - 1).bit_length(), _COMBINE_SLOTS)
        threads = ELEMENTWISE_THREADS if tokens * n > _FEW_SUMS else 64
        self.launcher = launch.launcher(
            ROUTE, f"combine<{bf16}, {slots}>", threads, 0, tokens * -(-n // (8 * threads)), CombineArguments,
            self.index,
        )  # fmt: skip

    def __call__(self, rows: Tensor, slot_row: Tensor, slot_weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Rows (M, N), slot_row int32 (T, A) and slot_weight (T, A) -> (T, N), in `out` where it is given."""
        index = self.index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(rows, slot_row, slot_weight, out)
        out = self.empty(*self.result) if out is None else out
        weight = 0 if slot_weight is None else slot_weight.data_ptr()
        self.launcher(
            launch.current_stream(index), rows.data_ptr(), slot_row.data_ptr(), weight, out.data_ptr(), *self.numbers
        )
        return out


class RouteLaunch:
    """The sort of slots by expert.

    Args:
        shape: (T, A) of the ids, both positive.
        num_experts: E, at most `backend.MAX_EXPERTS`.
        dtype: of the ids, int32 or int64.
        device: where they are.
    """

    def __init__(self, shape: tuple[int, int], num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        slots, buckets = shape[0] * shape[1], num_experts + 1
        whole = -(-slots // _ROUTE_THREADS) * _ROUTE_THREADS
        per_block = whole if whole <= 2 * _ROUTE_SLOTS else _ROUTE_SLOTS
        blocks = -(-slots // per_block)
        self._index, self._empty = device.index, launch.allocator(device)
        vectors = (((length,), (1,), torch.int32) for length in (slots, num_experts))
        self._row_slot, self._offsets = vectors
        self._slot_row = (shape, (shape[1], 1), torch.int32)
        self._counts = blocks * buckets if blocks > 1 else 0
        self._numbers = slots, num_experts, dtype == torch.int64, per_block
        shared_bytes = 4 * _ROUTE_THREADS // 32 * buckets
        self._launchers = [
            launch.launcher(ROUTE, name, _ROUTE_THREADS, shared_bytes, blocks, RouteArguments, self._index)
            for name in ("route_count", "route_scatter")[0 if blocks > 1 else 1 :]
        ]

    def __call__(self, expert_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, A) -> row_slot int32 (M,), offsets int32 (E,), slot_row int32 (T, A)."""
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(expert_ids)
        empty = self._empty
        row_slot, offsets, slot_row = empty(*self._row_slot), empty(*self._offsets), empty(*self._slot_row)
        counts = 0
        if self._counts:
            workspace = empty((self._counts,), (1,), torch.int32)
            counts = workspace.data_ptr()
        stream = launch.current_stream(index)
        for launcher in self._launchers:
            launcher(
                stream, expert_ids.data_ptr(), counts, row_slot.data_ptr(), offsets.data_ptr(), slot_row.data_ptr(),
                *self._numbers,
            )  # fmt: skip
        return row_slot, offsets, slot_row


class CombinedLaunch:
    """A grouped GEMM and the weighted sum per token of its rows, from addresses, with one tensor for all between.

    Args:
        gemm: whose kernel is all there is of it (`alone`).
        combine: of the GEMM's rows, with late_rows.
    """

    def __init__(self, gemm: GemmLaunch, combine: CombineLaunch) -> None:
        self._gemm, self._combine = gemm, combine
        self._index, self._empty, self._result = combine.index, combine.empty, combine.result
        self._sums = -(-gemm.out_bytes // _ALIGNED) * _ALIGNED  # where the partial sums begin
        self._memory = ((self._sums + gemm.sums_bytes,), (1,), torch.uint8)

    def __call__(
        self, activation: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor,
        slot_row: Tensor, slot_weight: Tensor | None = None, bias: Tensor | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """(M, K) rows -> (T, N); operands as in `GemmLaunch` and `CombineLaunch`."""
        gemm, index = self._gemm, self._index
        x, codes, scales = activation.data_ptr(), qdata.data_ptr(), scale.data_ptr()
        globals_ = 0 if global_scale is None else global_scale.data_ptr()
        if (x | codes | scales | globals_) & 15 or launch.current_device() != index:
            rows = gemm(activation, qdata, scale, global_scale, offsets, None, None, bias)
            return self._combine(rows, slot_row, slot_weight)
        memory, out = self._empty(*self._memory), self._empty(*self._result)
        rows_at = memory.data_ptr()
        workspace = gemm.take_workspace(False)
        fields = gemm.fields(
            x, codes, scales, globals_, offsets.data_ptr(), 0, 0, 0 if bias is None else bias.data_ptr(), rows_at,
            gemm.sums_bytes and rows_at + self._sums, 0 if workspace is None else workspace.data_ptr(), False,
        )  # fmt: skip
        stream = launch.current_stream(index)
        gemm.launcher(stream, *fields)
        self._combine.launcher(
            stream, rows_at, slot_row.data_ptr(), 0 if slot_weight is None else slot_weight.data_ptr(),
            out.data_ptr(), *self._combine.numbers,
        )  # fmt: skip
        return out


class DgradLaunch:
    """The gradient of a grouped GEMM's 16-bit rows: the weights of experts with rows are dequantized, then multiplied;
    the GEMM decodes NVFP4 weights in tiles, where that is faster, on compute capability 9.0.

    Args:
        rows: M, positive.
        num_experts: E.
        n: N.
        k: K.
        dtype: of the gradients.
        tiled: whether the weights are in layout "tiled_64x64", else in "linear".
        per_row: whether there is a global scale for each row of a weight.
        device: where the operands are.
        facts: (multiprocessors, compute capability) of the device.
        format: of the weights, one of `configs.FORMATS`.
        rank: R of an adapter whose product is added by the same kernel, one that `linear.serves_rank` serves; on
            compute capability 9.0.
    """

    def __init__(
        self, rows: int, num_experts: int, n: int, k: int, dtype: torch.dtype, tiled: bool, per_row: bool,
        device: torch.device, facts: tuple[int, tuple[int, int]], format: str = "nvfp4", rank: int = 0,
    ) -> None:  # fmt: skip
        self._index, self._empty = device.index, launch.allocator(device)
        self._weight, self._out = ((num_experts, n, k), (n * k, k, 1), dtype), ((rows, k), (k, 1), dtype)
        self._packed = self._row_starts = self._multiply = None
        serves = tiled and format == "nvfp4" and facts[1] == (9, 0) and num_experts <= MAX_EXPERTS
        if serves and packed_is_faster(rows / num_experts):
            self._packed = packed_launch(rows, num_experts, n, k, dtype, per_row, rank, device, facts, None)
            return
        self._numbers = num_experts * n, 1 if per_row else n, k, n
        self._dequantize = elementwise_launcher(
            DEQUANTIZE, dequantize_kernel(format, tiled, dtype), num_experts * n * k // 16, DequantizeArguments,
            self._index,
        )  # fmt: skip
        if n % 8 == 0 and not rank and torch_is_faster(dtype, facts[1], rows / num_experts):
            self._starts = num_experts, rows
            self._row_starts = launch.launcher(ROUTE, "row_starts", 32, 0, 1, RowStartsArguments, self._index)
        else:
            kernel = "wgmma" if rank else kernel_for(dtype, k, n, facts[1], 0)
            self._multiply = linear_launch(
                rows, num_experts, k, n, dtype, True, False, False, kernel, device, facts, None, rank
            )

    def __call__(
        self, grad: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, *adapter: Tensor
    ) -> Tensor:
        """(M, N) -> (M, K); qdata is contiguous, with the rows of the weight in order, in whatever view.

        adapter: with `rank` (M, R) and (E, R, K), contiguous and aligned to 16 bytes.
        """
        index = self._index
        if launch.current_device() != index:
            with torch.cuda.device(index):
                return self(grad, qdata, scale, global_scale, offsets, *adapter)
        rows, codes, scales = grad.data_ptr(), qdata.data_ptr(), scale.data_ptr()
        if (rows | codes | scales) & 15:
            grad, qdata, scale = map(_aligned, (grad, qdata, scale))
            rows, codes, scales = grad.data_ptr(), qdata.data_ptr(), scale.data_ptr()
        ends, globals_ = offsets.data_ptr(), 0 if global_scale is None else global_scale.data_ptr()
        if self._packed is not None:
            out = self._empty(*self._out)
            self._packed(rows, codes, scales, globals_, ends, out.data_ptr(), *map(Tensor.data_ptr, adapter))
            return out
        weight = self._empty(*self._weight)
        address, stream = weight.data_ptr(), launch.current_stream(index)
        self._dequantize(stream, codes, scales, globals_, address, ends, *self._numbers)
        if self._multiply is not None:
            out = self._empty(*self._out)
            self._multiply(rows, address, ends, out.data_ptr(), *map(Tensor.data_ptr, adapter))
            return out
        assert self._row_starts is not None
        starts = offsets.new_empty(self._starts[0] + 1)  # torch's grouped GEMM trusts its offsets: these are clamped
        self._row_starts(stream, ends, starts.data_ptr(), *self._starts)
        return torch._grouped_mm(grad.detach(), weight, starts[1:])


gemm_launch = functools.lru_cache(maxsize=4096)(GemmLaunch)
combine_launch = functools.lru_cache(maxsize=4096)(CombineLaunch)
dgrad_launch = functools.lru_cache(maxsize=4096)(DgradLaunch)
route_launch = functools.lru_cache(maxsize=4096)(RouteLaunch)


def dequantize_kernel(format: str, tiled: bool, dtype: torch.dtype) -> str:
    """The C++ name of the kernel of `DEQUANTIZE` for a format of weights and a dtype of the result."""
    name = "dequantize" if format == "nvfp4" else f"dequantize_{format}"
    return f"{name}{'_tiled' * tiled}<{str(dtype == torch.bfloat16).lower()}>"


def elementwise_blocks(items: int, most: int = ELEMENTWISE_BLOCKS) -> int:
    """The blocks of `ELEMENTWISE_THREADS` threads that loop over `items`."""
    return min(-(-items // ELEMENTWISE_THREADS), most)


def elementwise_launcher(
    sources: tuple[Path, ...],
    expression: str,
    items: int,
    argument: type[ctypes.Structure],
    device: int,
    most: int = ELEMENTWISE_BLOCKS,
) -> launch.Launcher:
    """The launcher of a kernel whose threads loop over `items`, of `most` blocks at most."""
    blocks = elementwise_blocks(items, most)
    return launch.launcher(sources, expression, ELEMENTWISE_THREADS, 0, blocks, argument, device)


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.preserve_format)


def _code(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else DTYPE_CODES[dtype]
