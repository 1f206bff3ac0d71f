"""The MoE layer sizes that the benchmarks run: real models, and reduced ones that a CPU finishes.
Called by the bench_*.py scripts; calls nothing.

Each shape is one device's share of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU_SHAPES", "CUDA_SHAPES", "SHAPES", "MoEShape", "parse_shape"]


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
        """(E, N, K) of the expert GEMM "gate_up" or "down"."""
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
SHAPES = {shape.name: shape for shape in (*CUDA_SHAPES, *CPU_SHAPES)}


def parse_shape(name: str) -> MoEShape:
    """The shape of a name.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in SHAPES:
        raise ValueError(f"shape: got {name!r}, wanted one of {', '.join(SHAPES)}")
    return SHAPES[name]
