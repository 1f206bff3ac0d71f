"""Training blocks beside TransformerEngine's: `GroupedMLP` and its activations; re-exports alone.
Called by users, quantization and parallel; calls nn and the operators."""

from thunder_moe.training.activations import ScaledSReLU, ScaledSwiGLU
from thunder_moe.training.grouped_mlp import GroupedMLP, NVFP4GroupedMLP

__all__ = ["GroupedMLP", "NVFP4GroupedMLP", "ScaledSReLU", "ScaledSwiGLU"]
