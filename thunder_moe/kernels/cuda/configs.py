"""Chooses the CUDA kernel of a grouped GEMM and its template parameters: the best measured ones, else by rule.
Called by the other modules of kernels/cuda, and by benchmarks/suites/{tune,linear}.py, which write configs.json; calls
arguments.py.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from thunder_moe.formats.layouts import LINEAR, TILED_64X64
from thunder_moe.kernels.cuda.arguments import GemmArguments, TmaGemmArguments
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.specs import GemmSpec

COMMON = Path(__file__).with_name("src") / "common.cuh"  # in front of every kernel's source
MEASURED = Path(__file__).with_name("configs.json")
CHUNK = 128  # k of a step of the kernels of "linear" weights
TILED = TILED_64X64
LAYOUTS = (LINEAR, TILED)  # that the kernels read
FORMATS = ("nvfp4", "mxfp8")  # of weights: each has a header in src
_TILED_FILES = ("pipeline.cuh", "tile_scheduler.cuh")
_FILES = {
    "split": ("grouped_mm.cu",),
    "staged": ("grouped_mm.cu",),
    "wgmma": ("wgmma.cuh", "grouped_mm_wgmma.cu"),
    "tiled_mma": (*_TILED_FILES, "tiled_mma.cu"),
    "tiled_wgmma": ("wgmma.cuh", *_TILED_FILES, "tiled_wgmma.cu"),
    "tiled_cluster": ("wgmma.cuh", "pipeline.cuh", "tiled_cluster.cu"),
}
# For "tiled_mma": blocks of 64 weight rows of a warpgroup, warpgroups along N and K, blocks of 64 k of each per stage.
_TILED_MMA_SPLITS = (
    (1, 1, 3, 2), (1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 4), (1, 2, 1, 4), (1, 2, 2, 1), (1, 2, 2, 4), (2, 1, 2, 2),
    (2, 1, 2, 4), (2, 1, 3, 2), (2, 1, 4, 1), (2, 1, 4, 2), (2, 2, 1, 4), (2, 2, 2, 2), (4, 1, 2, 2), (4, 1, 4, 1),
)  # fmt: skip
# For "tiled_wgmma": blocks of 8 tokens; blocks of 64 weight rows of a warpgroup, warpgroups, blocks of 64 k of a stage,
# for up to 12 blocks of tokens and for more; the most blocks of accumulators that registers hold, by warpgroups.
_TILED_WGMMA_TOKENS = (2, 4, 6, 8, 9, 10, 12, 14, 16, 18, 20, 22, 24, 32)
_TILED_WGMMA_SMALL = (
    (1, 2, 2), (1, 2, 4), (1, 3, 2), (1, 3, 4), (1, 4, 2), (1, 4, 4),
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 3, 1), (2, 3, 2),
)  # fmt: skip
_TILED_WGMMA_LARGE = ((1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 3, 2), (2, 2, 1))
_TILED_WGMMA_SUMS = {2: 44, 3: 24, 4: 12}
# For "tiled_wgmma" in the batch-invariant mode: tiles have 16 tokens if experts have at most so many rows on average;
# such a tile's blocks of 64 weight rows of a warpgroup, and warpgroups.
_FEW_IN_ORDER = 4
_IN_ORDER_SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3))
# For "tiled_cluster": warpgroups along N and K, blocks of 64 k of each per stage; the most blocks of 8 tokens that
# registers hold, by warpgroups; clusters of 1, 2, ... blocks that run at once on the 132 multiprocessors of an H200.
_TILED_CLUSTER_SPLITS = (
    (1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 1), (1, 2, 2), (1, 2, 4), (1, 4, 2), (2, 1, 1), (2, 1, 2), (2, 1, 4),
    (2, 1, 8), (2, 2, 2), (3, 1, 1), (3, 1, 2), (3, 1, 4), (3, 1, 8), (4, 1, 1), (4, 1, 2), (4, 1, 4),
)  # fmt: skip
_TILED_CLUSTER_TOKENS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24)
_TILED_CLUSTER_SUMS = {
    "nvfp4": {1: 24, 2: 24, 3: 16, 4: 16},
    "mxfp8": {1: 24, 2: 16, 3: 16, 4: 8},  # beyond, up to twice the time (H200)
}
# The fewest stages: with 2 of MXFP8 a layer of (7168, 5120) takes 51 to 64 us at 256 rows, with more 36 to 41 (H200).
_TILED_CLUSTER_STAGES = {"nvfp4": 2, "mxfp8": 3}
_CLUSTERS = (132, 66, 39, 30, 22, 17, 15, 15)
_MAX_CLUSTER_ROWS = 512  # beyond, the tensor cores are the limit, and "tiled_wgmma" is as fast
_MAX_STREAM_K = 1 << 20  # `TileScheduler` multiplies the stages of two rounds of tiles by blocks, in int32
_SHARED_BYTES = 227 << 10  # of a block on SM90
BLOCK_BYTES = {"nvfp4": 2048 + 256, "mxfp8": 4096 + 128}  # codes and scales of 64 x 64 weights, tiled
_ROW_BYTES = {"nvfp4": 16 + 4, "mxfp8": 32 + 4}  # of a thread's part of a row in a stage of "wgmma"
_TABLES_BYTES = 8704  # static shared memory of kernels of tiled weights: where tiles and rows of 1,024 experts start
# Blocks of 8 tokens, blocks of 64 weight rows of a warpgroup, warpgroups: what registers allow.
_WGMMA_SHAPES = ((8, 1, 4), (8, 2, 1), (8, 2, 2), (8, 2, 3), (16, 1, 2), (16, 1, 3), (16, 2, 1), (16, 2, 2), (24, 1, 2))


@dataclass(frozen=True)
class GemmConfig:
    """A grouped GEMM kernel and its template parameters.

    Attributes:
        kernel: "split" (few rows per expert), "staged" (more of them), both by mma.sync, or "wgmma" (SM90); for weights
            in layout "tiled_64x64" (SM90) "tiled_mma", "tiled_wgmma", or where there is one group "tiled_cluster".
        token_blocks: C, blocks of 8 tokens of a tile.
        row_blocks: R, blocks of weight rows of a warp (16) or warpgroup (64); 2 for SwiGLU.
        warps_n: warps along N; warpgroups for all but "split" and "staged".
        warps_k: warps, or warpgroups, along K; 1 but for "split", "tiled_mma" and "tiled_cluster".
        depth: chunks of weights in flight (1, 2 or 4) for "split", stages of tokens for "staged" and "wgmma"; blocks of
            64 k of a warpgroup in a stage for "tiled_mma" and "tiled_cluster", of a stage for "tiled_wgmma"; for the
            latter two K has to be a multiple of a stage.
        stream_k: for kernels of tiled weights: True if blocks share tiles when some blocks would have none.
        splits: for "tiled_cluster", the number of blocks in a cluster; they share the K of a tile.
        format: the number format of the weights, one of `FORMATS`.
    """

    kernel: str
    token_blocks: int
    row_blocks: int
    warps_n: int
    warps_k: int
    depth: int
    stream_k: bool = False
    splits: int = 1
    format: str = "nvfp4"

    @property
    def sources(self) -> tuple[Path, ...]:
        """Return the files that make up the kernel's source."""
        files = "ptx.cuh", f"{self.format}.cuh", "grouped_mm.cuh", *_FILES[self.kernel]
        return COMMON, *(COMMON.with_name(file) for file in files)

    @property
    def argument(self) -> type[ctypes.Structure]:
        """Return the struct that the kernel takes."""
        return TmaGemmArguments if self.kernel in ("tiled_wgmma", "tiled_cluster") else GemmArguments

    @property
    def layout(self) -> str:
        """Return the layout of weights that the kernel reads."""
        return TILED if self.kernel.startswith("tiled") else LINEAR

    @property
    def parts_of_k(self) -> int:
        """Return the number of equal parts of K whose sums are added at the end, 0 for kernels of another order.

        All configurations of a layout with the same number add the products of a row in the same order.
        "tiled_wgmma" whose blocks share no tiles, and "tiled_cluster" with one warpgroup along K: a warpgroup
        multiplies 64 features by a part, 16 k at a time from the first on, into one accumulator in the tensor core;
        clusters then add the parts in their order. Blocks of tokens and of weight rows, stages and warpgroups along N
        only say which features and tokens it takes. "split" with one warp along K, and "staged": a warp does so, 128 k
        at a time, in the order of k of `multiply` in grouped_mm.cuh. All end in `store` of that header. "wgmma" and
        "tiled_mma" have other orders within 128 k and 64 k.
        """
        if self.kernel == "tiled_wgmma":
            return int(not self.stream_k)
        if self.kernel not in ("split", "staged", "tiled_cluster") or self.warps_k > 1:
            return 0
        return self.splits

    @property
    def threads(self) -> int:
        if self.kernel in ("tiled_mma", "tiled_cluster"):  # and the producer warp
            return 128 * self.warps_n * self.warps_k + 32
        if self.kernel == "tiled_wgmma":  # and the producer warpgroup
            return 128 * (self.warps_n + 1)
        return (128 if self.kernel == "wgmma" else 32) * self.warps_n * self.warps_k

    @property
    def stages(self) -> int:
        """Return the stages of the pipeline of tiled weights' kernels: as many as shared memory holds."""
        return min(12, (_SHARED_BYTES - _TABLES_BYTES - self._other_bytes) // self._stage_bytes)

    @property
    def least_k(self) -> int:
        """Return the least K that gives work to every warp along K."""
        return self.warps_k * CHUNK if self.layout != TILED else self.splits * self.warps_k * self.depth * 64

    def fitted(self, k: int) -> GemmConfig:
        """Return the configuration adapted to K: stages that divide it, no stream-K where an int32 would overflow."""
        fitted = self
        if self.kernel in ("tiled_wgmma", "tiled_cluster"):
            fitted = replace(self, depth=math.gcd(self.depth, max(k // 64 // self.warps_k, 1)))
        return replace(fitted, stream_k=False) if k > _MAX_STREAM_K else fitted

    def serves(self, num_experts: int, k: int) -> bool:
        """False for "tiled_cluster" where there are groups, or a K that does not go round its warpgroups."""
        if self.kernel != "tiled_cluster":
            return True
        return num_experts == 1 and k % (64 * self.warps_k) == 0 and k >= self.fitted(k).least_k

    @property
    def partial_sums(self) -> int:
        """Return the number of float32 accumulators of a tile, which blocks that share it exchange."""
        return self.warps_n * self.row_blocks * self.token_blocks * 512

    @property
    def _stage_bytes(self) -> int:
        """Return the bytes of a stage: weights, tokens ("tiled_mma" pads a row by 16 bytes), footer."""
        blocks, k_blocks = self.warps_n * self.row_blocks, self.warps_k * self.depth
        padding, align = (16, 128) if self.kernel == "tiled_mma" else (0, 1024)
        footer = 16 if self.kernel == "tiled_cluster" else 48  # `StageBarriers`, `StageFooter`
        tokens = 8 * self.token_blocks * (128 * k_blocks + padding)
        return -(-(blocks * k_blocks * BLOCK_BYTES[self.format] + tokens + footer) // align) * align

    @property
    def _other_bytes(self) -> int:
        """Return the bytes for the alignment of the stages, and for what lies behind them.

        Behind the stages lie, for "tiled_mma", partial sums of warpgroups along K, twice; for "tiled_wgmma", one more
        footer, and scales of rows for SwiGLU.
        """
        if self.kernel == "tiled_wgmma":
            return 1024 + 64 + (1024 * self.warps_n if self.row_blocks == 2 else 0)
        if self.kernel == "tiled_cluster":
            parts = self.splits * self.warps_k
            owned = -(-self.token_blocks // parts)
            return 1024 + 64 + 2048 * self.warps_n * self.warps_k * owned * (parts - 1)
        share = 128 * 4 * 4 * self.row_blocks * self.token_blocks if self.warps_k > 1 else 0
        return 1024 + 2 * self.warps_n * self.warps_k * share

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of dynamic shared memory: chunks of 8 * token_blocks tokens, 128 16-bit numbers each.

        "wgmma" also needs codes and scales of each thread and row of weights, and 1 KiB for alignment.
        """
        if self.layout == TILED:
            return self.stages * self._stage_bytes + self._other_bytes
        chunk = 8 * self.token_blocks * 2 * CHUNK
        if self.kernel == "split":  # two segments
            return 2 * chunk * max(4 * self.warps_k, 8 // self.token_blocks)
        if self.kernel == "staged":
            return self.depth * chunk
        return self.depth * (chunk + _ROW_BYTES[self.format] * 2 * self.row_blocks * self.threads) + 1024

    def tile_features(self, swiglu: bool) -> int:
        """Return the output features of a tile."""
        return self.warps_n * (16 if self.kernel in ("split", "staged") else 64) * (1 if swiglu else self.row_blocks)

    def padding(self, rows: float) -> float:
        """Return the tokens in the tiles for so many rows, relative to the rows."""
        return math.ceil(rows / (8 * self.token_blocks)) * 8 * self.token_blocks / rows

    def clusters(self, point: Point) -> int:
        """Return the number of clusters that "tiled_cluster" launches at a point; 0 for other kernels."""
        tiles = -(-math.ceil(point.rows) // (8 * self.token_blocks)) * -(-point.features // self.tile_features(False))
        return tiles if self.kernel == "tiled_cluster" else 0

    def expression(self, dtype: torch.dtype, swiglu: bool, k: int, scaled: bool = False) -> str:
        """Return the C++ name of the kernel; `scaled`: with a slot_scale."""
        tiled = self.layout == TILED
        flags = [scaled if tiled else k % CHUNK == 0]
        sizes = [self.token_blocks, self.row_blocks, self.warps_n, self.depth]
        if self.kernel in ("split", "tiled_mma"):
            sizes.insert(3, self.warps_k)
        if self.kernel == "tiled_mma":
            flags.append(k % (64 * self.warps_k * self.depth) == 0)
        if tiled:
            sizes += [self.stream_k, self.stages]
        if self.kernel == "tiled_cluster":
            numbers = self.token_blocks, self.warps_n, self.warps_k, self.depth, self.splits
            return instance("mm_tiled_cluster", dtype == torch.bfloat16, *numbers, self.stages)
        name = "grouped_mm" if self.kernel == "split" else f"grouped_mm_{self.kernel}"
        return instance(name, dtype == torch.bfloat16, swiglu, *flags, *sizes)


class Point(NamedTuple):
    """The shape that decides the choice of a configuration.

    Attributes:
        live: experts that can have rows, min(M, E).
        rows: M / live.
        features: output features, I for SwiGLU.
        k: K.
    """

    live: int
    rows: float
    features: int
    k: int

    def distance(self, other: Point) -> float:
        """Sum of squared ratios, as powers of two; the rows per expert count most, they decide the shape of a tile."""
        ratios = [math.log2(mine / theirs) for mine, theirs in zip(self, other, strict=True)]
        return ratios[0] ** 2 + 4 * ratios[1] ** 2 + ratios[2] ** 2 + ratios[3] ** 2


def choose_config(spec: GemmSpec) -> GemmConfig:
    """Return the configuration of the nearest measured point, or one by rule on devices without any.

    A single weight of a shape that was not measured takes clusters by an estimate: the number of its tiles that run at
    once decides, and a near shape may differ in that. A batch-invariant GEMM takes a configuration with the
    `invariant_parts` of K.
    """
    rows, num_experts, features, k = spec.rows, spec.num_experts, spec.features, spec.k
    swiglu, capability = spec.activation is not None, spec.target.capability
    layout, format = spec.weight.layout, spec.weight.format
    live = max(min(rows, num_experts), 1)
    point = Point(live, max(rows, 1) / live, features, k)
    measured = [entry for entry in _measured(capability, swiglu, layout, format) if entry[1].serves(num_experts, k)]
    parts = invariant_parts(spec) if spec.batch_invariant else 0
    if parts:
        measured = [entry for entry in measured if entry[1].parts_of_k == parts and layout == TILED]
    alone = num_experts == 1 and not swiglu and layout == TILED and capability == (9, 0) and rows <= _MAX_CLUSTER_ROWS
    clusters = [at for at, config in measured if config.kernel == "tiled_cluster"]
    if parts > 1 or (alone and (parts or not any(at.features == features and at.k == k for at in clusters))):
        cluster = _fastest_cluster(-(-max(rows, 1) // 8) * 8, features, k, format, parts)
        if cluster is not None:
            return cluster
        # More tiles than run at once: only kernels whose blocks take several tiles in turn.
        measured = [entry for entry in measured if entry[1].kernel != "tiled_cluster"]
    if parts and layout == TILED and point.rows <= (_FEW_IN_ORDER if measured else 16):
        return _few_rows_in_order(point, swiglu, spec.target.multiprocessors, format)
    if measured:
        # If one tile held an expert's rows in the measurement, it should here, too: a second one reads the weights
        # again. Every warp along K should have work. Clusters that ran at once there should do so here. With many rows
        # of one weight, a tile should not be emptier.
        fits = [
            (at, config)
            for at, config in measured
            if not at.rows <= 8 * config.token_blocks < point.rows
            and config.least_k <= max(k, CHUNK)
            and config.clusters(point) <= max(config.clusters(at), _CLUSTERS[config.splits - 1])
            and not (num_experts == 1 and rows > 128 and config.padding(rows) > 1.25 * config.padding(at.rows))
        ]
        # If a point has both, the configuration for a single weight is the faster one.
        order = [(at.distance(point), config.kernel != "tiled_cluster", config) for at, config in fits or measured]
        return min(order, key=lambda entry: entry[:2])[2].fitted(k)
    if layout == TILED:
        return replace(_by_rule_tiled(point), format=format).fitted(k)
    return replace(_by_rule(point, swiglu, spec.target.multiprocessors, capability, parts == 1), format=format)


def invariant_parts(spec: GemmSpec) -> int:
    """Return the parts of K of a batch-invariant GEMM, which depend on the weight alone.

    Two for a single weight with so few features that blocks of 64 of them leave multiprocessors without work. By the
    estimate of `_cluster_time`, us at 8 and 128 rows with one part, two, and the fastest number: (2048, 4096) 9.3, 6.4,
    5.2 and 11.9, 8.0, 8.0; (4096, 14336) 28.0, 17.7, 15.0 and 37.1, 28.0, 27.7.
    """
    alone = spec.num_experts == 1 and spec.activation is None and spec.weight.layout == TILED
    few = -(-spec.n // 64) <= _CLUSTERS[1] and spec.k >= 1024 and spec.k % 256 == 0
    return 2 if alone and few else 1


def most_shared_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of shared memory that a block may take: what Ada and consumer Blackwell have, on SM90 more."""
    return _SHARED_BYTES if capability == (9, 0) else 99 << 10


def candidates(
    point: Point, swiglu: bool, capability: tuple[int, int], layout: str = LINEAR, format: str = "nvfp4"
) -> list[GemmConfig]:
    """Return the configurations worth timing at a point: winners on an H200, and "staged" for devices without wgmma."""
    row_blocks = (2,) if swiglu else (1, 2)
    if layout == TILED:
        return list(_tiled_candidates(point, swiglu, format)) if capability == (9, 0) else []
    found = []
    if point.rows <= 48:
        warps = ((8, 1), (4, 1), (2, 1), (4, 2), (2, 2))
        for c, r, (warps_n, warps_k), depth in itertools.product((1, 2, 4), row_blocks, warps, (2, 4)):
            if warps_k * CHUNK <= point.k and c * r <= 4 and 4 * c < max(5, 2 * point.rows) and point.rows <= 16 * c:
                found.append(GemmConfig("split", c, r, warps_n, warps_k, depth, format=format))
    if capability == (9, 0):
        for (c, r, groups), depth in itertools.product(_WGMMA_SHAPES, (3, 4)):
            if point.rows > 12 and 4 * c <= max(point.rows, 32) and r in row_blocks:
                found.append(GemmConfig("wgmma", c, r, groups, 1, depth, format=format))
    elif point.rows > 8:
        for c, r, warps_n, depth in itertools.product((2, 4, 8), row_blocks, (4, 8), (3, 4)):
            found.append(GemmConfig("staged", c, r, warps_n, 1, depth, format=format))
    return [config for config in found if config.shared_bytes <= most_shared_bytes(capability)]


def dense_candidates(
    rows: int, n: int, k: int, capability: tuple[int, int], layout: str = LINEAR, format: str = "nvfp4"
) -> list[GemmConfig]:
    """Return `candidates` for rows (M, K) and one weight (N, K), and the likeliest that only one weight can take."""
    found = candidates(Point(1, float(rows), n, k), False, capability, layout, format)
    if layout == TILED and capability == (9, 0):
        found += sorted(_cluster_candidates(rows, n, k, format), key=lambda config: _cluster_time(config, n, k))[:40]
    return found


def _cluster_candidates(rows: int, n: int, k: int, format: str, parts: int = 0) -> Iterator[GemmConfig]:
    """Return the configurations whose blocks all run at once.

    With `parts`, only configurations with as many `parts_of_k`. With several parts these include configurations whose
    blocks run in turns, because no other kernel serves several parts.
    """
    least = next((c for c in _TILED_CLUSTER_TOKENS if 8 * c >= rows), 0)
    tokens = {least, *(c for c in (8, 12, 16, 24) if 8 * c < rows and (rows <= 512 or parts > 1))} - {0}
    for c, (warps_n, warps_k, depth), splits in itertools.product(sorted(tokens), _TILED_CLUSTER_SPLITS, range(1, 9)):
        # Few tokens want deep stages; many tokens leave no room for them.
        deep = (2 if c < 12 else 1) <= warps_k * depth <= (8 if c <= 4 else 4)
        if not deep or c > _TILED_CLUSTER_SUMS[format][warps_n * warps_k]:
            continue
        config = GemmConfig("tiled_cluster", c, 1, warps_n, warps_k, depth, splits=splits, format=format)
        if parts <= 1 and config.clusters(Point(1, rows, n, k)) > _CLUSTERS[splits - 1]:
            continue
        # Above so many sums ptxas serializes the products (its warning C7512).
        if parts and (config.parts_of_k != parts or k % (64 * depth * splits) != 0 or c * warps_n > 48):
            continue
        if config.stages >= _TILED_CLUSTER_STAGES[format] and config.fitted(k) == config and config.serves(1, k):
            yield config


@functools.lru_cache(maxsize=4096)
def _fastest_cluster(rows: int, n: int, k: int, format: str, parts: int = 0) -> GemmConfig | None:
    """Return the candidate of `_cluster_candidates` with the least estimated time; None without one."""

    def time(config: GemmConfig) -> float:
        turns = -(-config.clusters(Point(1, rows, n, k)) // _CLUSTERS[config.splits - 1])
        return turns * _cluster_time(config, n, k)

    return min(_cluster_candidates(rows, n, k, format, parts), key=time, default=None)


def _cluster_time(config: GemmConfig, n: int, k: int) -> float:
    """Return the microseconds on an H200 of a "tiled_cluster" whose blocks all run at once, in a row of calls.

    Fitted to 664 timings of four layers at 8 to 256 rows, 9 % off (rms). For a layer that the fit had not seen, its
    choice was the fastest at 17 of 23 points, and at most 17 % slower at the others. For MXFP8, with its bytes, its
    choice among ten took 3 % more than the fastest at 29 points of five layers, at most 17 %.
    """
    c, groups, parts = config.token_blocks, config.warps_n * config.warps_k, config.splits * config.warps_k
    # Blocks of 64 rows by 64 k that a thread block multiplies, and the sums that it sends.
    units = groups * config.depth * -(-k // (64 * config.warps_k * config.depth * config.splits))
    sent = groups * c * (parts - 1) / parts
    multiply = units * (0.0359 + 0.0058 * c + 0.0437 / groups + 0.0285 / min(config.depth, 4))
    return 2.77 + multiply + 0.0835 * sent + 0.0764e-6 * n * k * (BLOCK_BYTES[config.format] / BLOCK_BYTES["nvfp4"])


def _tiled_candidates(point: Point, swiglu: bool, format: str) -> Iterator[GemmConfig]:
    row_blocks = (2,) if swiglu else (1, 2, 4)
    # Blocks of weight rows of a warpgroup, warpgroups along N and along K, blocks of 64 k of each in a stage.
    splits = [shape for shape in _TILED_MMA_SPLITS if shape[0] in row_blocks and shape[2] * shape[3] * 64 <= point.k]
    for c, (r, warps_n, warps_k, depth) in itertools.product((1, 2, 4), splits):
        if point.rows <= 8 * c and point.rows > (0, 0, 2, 0, 12)[c] and c * r <= 8:
            config = GemmConfig("tiled_mma", c, r, warps_n, warps_k, depth, format=format)
            if config.stages < 3:
                continue
            yield config
            yield replace(config, stream_k=True)
    for c in _TILED_WGMMA_TOKENS:
        if point.rows <= 5 or not max(6, 0.9 * min(point.rows, 128)) <= 8 * c <= max(2.5 * point.rows, 48):
            continue
        for r, groups, depth in _TILED_WGMMA_SMALL if c <= 12 else _TILED_WGMMA_LARGE:
            config = GemmConfig("tiled_wgmma", c, r, groups, 1, depth, format=format)
            fits = c * r <= _TILED_WGMMA_SUMS[groups] and config.stages >= 3
            if fits and r in row_blocks and point.k % (64 * depth) == 0:
                yield config
                if point.live == 1:  # there are few tiles
                    yield replace(config, stream_k=True)


@functools.cache
def _measured(
    capability: tuple[int, int], swiglu: bool, layout: str, format: str = "nvfp4"
) -> list[tuple[Point, GemmConfig]]:
    """Return the entries of configs.json for a device, a layout and a format."""
    if not MEASURED.exists():
        return []
    entries = json.loads(MEASURED.read_text())["entries"]
    wanted = [entry for entry in entries if tuple(entry["capability"]) == capability and entry["swiglu"] == swiglu]
    found = [(Point(*entry["point"]), GemmConfig(*entry["config"])) for entry in wanted]
    return [(point, config) for point, config in found if (config.layout, config.format) == (layout, format)]


def _by_rule_tiled(point: Point) -> GemmConfig:
    """Return a configuration that won on an H200 at many shapes, for shapes that were not measured."""
    if point.rows <= 16:
        return GemmConfig("tiled_mma", 1 if point.rows <= 8 else 2, row_blocks=2, warps_n=1, warps_k=2, depth=2)
    blocks = 6 if point.rows <= 48 else 10 if point.rows <= 80 else 16
    return GemmConfig("tiled_wgmma", blocks, row_blocks=2, warps_n=2, warps_k=1, depth=2 if blocks <= 12 else 1)


def _few_rows_in_order(point: Point, swiglu: bool, multiprocessors: int, format: str) -> GemmConfig:
    """Return the "tiled_wgmma" for few rows per expert whose blocks take the least time by the estimate of
    `_cluster_time`, in as many rounds as the device needs."""
    found = []
    for (r, groups), depth in itertools.product(_IN_ORDER_SHAPES, (4, 2, 1)):
        config = GemmConfig("tiled_wgmma", 2, r, groups, 1, depth, format=format).fitted(point.k)
        if config.stages >= 3 and (r == 2 or not swiglu):
            rounds = -(-point.live * -(-point.features // config.tile_features(swiglu)) // multiprocessors)
            unit = 0.0359 + 0.0058 * config.token_blocks + 0.0437 / groups + 0.0285 / min(config.depth, 4)
            found.append((rounds * r * groups * unit, config))
    return min(found, key=lambda entry: entry[0])[1]


def _by_rule(
    point: Point, swiglu: bool, multiprocessors: int, capability: tuple[int, int], in_order: bool = False
) -> GemmConfig:
    """Choose by the rows per expert and the warps that fill the device; this estimate was not measured."""
    if capability == (9, 0) and point.rows > 32 and not in_order:
        return GemmConfig("wgmma", 8 if point.rows <= 96 else 16, row_blocks=2, warps_n=2, warps_k=1, depth=4)
    if point.rows > 16:
        return GemmConfig("staged", 4 if point.rows <= 32 else 8, row_blocks=2, warps_n=8, warps_k=1, depth=3)
    row_blocks = 2 if swiglu else 1
    # Split K over as many warps as it takes to keep about 16 warps busy on each multiprocessor, four chunks each.
    tiles = -(-point.features // 16) * point.live
    blocks = 1 if point.rows <= 8 else 2
    warps_k, most = 1, 1 if in_order else 4 // blocks
    while warps_k < most and tiles * warps_k < 16 * multiprocessors and 8 * warps_k * CHUNK <= point.k:
        warps_k *= 2
    return GemmConfig("split", blocks, row_blocks, warps_n=4 // warps_k, warps_k=warps_k, depth=2)
