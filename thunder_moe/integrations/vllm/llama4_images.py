"""Extend vLLM's Llama 4 of images and text by the reader of fused experts.
Called by vLLM for checkpoints that configs claims; calls llama4. vLLM's class needs torchvision.
"""

from __future__ import annotations

from vllm.model_executor.models.mllama4 import Llama4ForConditionalGeneration

from thunder_moe.integrations.vllm.llama4 import PerExpert


class ThunderLlama4ForConditionalGeneration(PerExpert, Llama4ForConditionalGeneration):  # type: ignore[misc]
    """vLLM's model, whose own loader gives tensor-parallel ranks other rows of block scales than of weights."""
