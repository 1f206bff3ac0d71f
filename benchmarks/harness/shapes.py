"""Has the sizes of MoE layers (of real models, and smaller ones for a CPU) and the rows of their GEMMs.
Called by benchmarks/suites and harness/{layers,report}.py; calls torch.

Each shape is one device's share of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CPU_SHAPES", "CUDA_SHAPES", "PARALLEL_SHAPES", "SHAPES", "Load", "MoEShape", "parse_shape"]


@dataclass(frozen=True)
class MoEShape:
    """Sizes of one MoE layer.

    Attributes:
        name: of the model; ``/4`` has a quarter of its experts, ``/ep8`` is one of 8 expert-parallel devices.
        hidden_size: H.
        intermediate_size: I of one routed expert.
        num_experts: E.
        top_k: routed experts per token.
        num_shared_experts: experts that see every token.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0

    def gemm(self, which: str) -> tuple[int, int, int]:
        """Return (E, N, K) of the expert GEMM "gate_up" or "down"."""
        if which == "down":
            return self.num_experts, self.hidden_size, self.intermediate_size
        return self.num_experts, 2 * self.intermediate_size, self.hidden_size


CUDA_SHAPES = (
    MoEShape("llama4-scout", 5120, 8192, 16, 1, num_shared_experts=1),
    MoEShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    MoEShape("mixtral-8x7b", 4096, 14336, 8, 2),
    # On one of 8 devices a token meets one of its 8 experts on average.
    MoEShape("deepseek-v3/ep8", 7168, 2048, 32, 1, num_shared_experts=1),
)
CPU_SHAPES = (
    MoEShape("qwen3-30b-a3b/4", 2048, 768, 32, 8),
    MoEShape("qwen3-30b-a3b/4-top1", 2048, 768, 32, 1),
    MoEShape("small", 512, 256, 8, 2),
)
# Whole layers, for several devices.
PARALLEL_SHAPES = (
    MoEShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    MoEShape("llama4-maverick", 5120, 8192, 128, 1, num_shared_experts=1),
    MoEShape("deepseek-v3", 7168, 2048, 256, 8, num_shared_experts=1),
)
SHAPES = {shape.name: shape for shape in (*CUDA_SHAPES, *CPU_SHAPES, *PARALLEL_SHAPES)}


@dataclass(frozen=True)
class Load:
    """The rows of one GEMM.

    Attributes:
        rows: M.
        offsets: int32 (E,), cumulative row ends.
        active_experts: experts that have rows.
    """

    rows: int
    offsets: Tensor
    active_experts: int

    @staticmethod
    def even(rows_per_expert: int, shape: MoEShape, device: torch.device) -> Load:
        """Return a load with the same number of rows for each expert."""
        experts = shape.num_experts
        offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows_per_expert
        return Load(experts * rows_per_expert, offsets, experts)

    @staticmethod
    def routed(tokens: int, shape: MoEShape, device: torch.device, seed: int = 0) -> Load:
        """Return tokens that a random router sends to their top_k experts."""
        logits = torch.randn(tokens, shape.num_experts, generator=torch.Generator().manual_seed(seed))
        counts = logits.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts)
        offsets = counts.cumsum(0).int().to(device)
        return Load(tokens * shape.top_k, offsets, int((counts > 0).sum()))


def parse_shape(name: str) -> MoEShape:
    """Return the shape of a name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in SHAPES:
        raise ValueError(f"shape: got {name!r}, wanted one of {', '.join(SHAPES)}")
    return SHAPES[name]
