"""`AdaptableLinear`, the base of linears that LoRA adapters can be added to: reads state dicts of merged adapters.
Called by nn.packed, nn.linear and nn.grouped_linear, whose classes derive from it; calls torch alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class AdaptableLinear(nn.Module):
    """A linear that loads weights with merged adapters: the key ``lora_merged``, which names these, is expected."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        *_, unexpected_keys, _ = args
        if (key := f"{prefix}lora_merged") in unexpected_keys:
            unexpected_keys.remove(key)
