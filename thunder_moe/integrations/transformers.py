"""The name of huggingface.experts and huggingface.families in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls these alone.
"""

from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks
from thunder_moe.integrations.huggingface.families import put_experts

__all__ = ["NVFP4Experts", "expert_blocks", "put_experts"]
