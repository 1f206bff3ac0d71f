"""The name of huggingface.experts and huggingface.families in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls these and huggingface.forms alone.
"""

from torch import nn

from thunder_moe.integrations.huggingface.experts import (
    NVFP4Experts,
    expert_blocks,
    expert_weights,
    quantized_experts,
)
from thunder_moe.integrations.huggingface.families import FAMILIES, put_experts
from thunder_moe.integrations.huggingface.forms import has_experts, not_plain_experts

__all__ = [
    "NVFP4Experts",
    "check_place",
    "expert_blocks",
    "expert_weights",
    "has_experts",
    "not_plain_experts",
    "put_experts",
    "quantized_experts",
]


def check_place(parent: nn.Module, experts: nn.Module) -> None:
    """Raises what `quantized_experts` and `put_experts` would raise for experts in a layer, ahead of any change.

    Raises:
        ValueError: the experts have hooks or a forward of their own.
        TypeError: they are those of Llama 4 and the layer is not its own.
    """
    family = next((family for family in FAMILIES if family.match(experts)), FAMILIES[-1])
    reason = family.obstacle(experts)
    if reason is not None:
        raise ValueError(f"experts: cannot replace this {type(experts).__name__}: {reason}")
    family.check_place(parent, experts)
