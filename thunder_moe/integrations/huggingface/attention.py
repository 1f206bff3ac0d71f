"""transformers' attention implementation "thunder_moe_sdpa": masked attention without copies of keys and values.
Called by transformers, once registration has imported it; calls torch's scaled_dot_product_attention and transformers'
"sdpa".

Legend: B batch, Hq query heads, Hkv key heads, G = Hq // Hkv heads of a group, Q new tokens, L keys, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface
except ImportError as error:
    raise ImportError(
        "thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'"
    ) from error

__all__ = ["NAME", "grouped_sdpa_attention"]

NAME = "thunder_moe_sdpa"
# The mask is repeated for the heads of a group, keys and values are not: that pays while there are few new tokens.
_MOST_QUERIES = 16


def grouped_sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention implementation "thunder_moe_sdpa": the numbers of transformers' "sdpa", with its masks.

    With a mask (so with every static cache, and with padding) "sdpa" copies keys and values once for each head of a
    group. Here the heads of a group are further rows of the query, (B, Hkv, G * Q, D), and keys and values stay as they
    are. Without a mask, for long prompts, and for models whose heads have keys of their own, it calls "sdpa".

    Args:
        module: the attention layer.
        query: (B, Hq, Q, D).
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, Dv).
        attention_mask: (B or 1, 1 or Hq, Q or 1, L), bool (True: attend) or added to the logits; None for none.
        dropout: probability.
        scaling: of the logits; None for D ** -0.5.
        is_causal: where there is no mask; None for the layer's own.
        **kwargs: what else "sdpa" takes.

    Returns:
        (B, Q, Hq, Dv), contiguous, and None in place of the probabilities.

    Raises:
        ValueError: a soft cap of the logits or attention sinks, which SDPA does not have.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f'{name}: got one, attn_implementation="{NAME}" has none; use "eager" or "flex_attention"')
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype):
        # cuDNN of torch 2.11 takes a float32 mask of 16-bit queries for one of 16 bits.
        attention_mask = attention_mask.to(query.dtype)
    groups, queries = query.shape[1] // key.shape[1], query.shape[2]
    own = kwargs.get("position_bias") is None and kwargs.get("cache") is None and not kwargs.get("output_attentions")
    if attention_mask is None or attention_mask.ndim != 4 or groups == 1 or queries > _MOST_QUERIES or not own:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    out = F.scaled_dot_product_attention(
        _heads_as_rows(query, groups),
        key,
        value,
        attn_mask=_mask_of_rows(attention_mask, groups, queries),
        dropout_p=dropout,
        scale=scaling,
    )
    out = out.reshape(query.shape[0], query.shape[1], queries, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _heads_as_rows(query: Tensor, groups: int) -> Tensor:
    """(B, Hq, Q, D) -> (B, Hkv, G * Q, D)"""
    batch, heads, queries, width = query.shape
    return query.reshape(batch, heads // groups, groups * queries, width)


def _mask_of_rows(mask: Tensor, groups: int, queries: int) -> Tensor:
    """(B or 1, 1 or Hq, Q or 1, L) -> (B or 1, 1 or Hkv, G * Q or 1, L)"""
    batch, heads, rows, keys = mask.shape
    if heads == 1:
        if rows == 1:
            return mask
        return mask[:, :, None].expand(batch, 1, groups, rows, keys).reshape(batch, 1, groups * rows, keys)
    return mask.expand(batch, heads, queries, keys).reshape(batch, heads // groups, groups * queries, keys)


AttentionInterface.register(NAME, grouped_sdpa_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
