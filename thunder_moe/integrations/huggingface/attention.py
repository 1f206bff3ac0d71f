"""transformers' attention implementation "thunder_moe_sdpa": masked attention without copies of keys and values.
Called by transformers, once quantizer has imported it; calls torch's scaled_dot_product_attention, transformers'
"sdpa", and kernels/attention.py.

Legend: B batch, Hq query heads, Hkv key heads, G = Hq // Hkv heads of a group, Q new tokens, L keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing

from thunder_moe.kernels.attention import cudnn_groups_heads, cudnn_groups_heads_of

__all__ = ["NAME", "grouped_sdpa_attention", "grouped_sdpa_mask"]

NAME = "thunder_moe_sdpa"
# As rows of the query, the heads of a group need the mask repeated, keys and values not: H200, 32 heads that share 4 of
# 128, batch 8, 576 keys: 54 us instead of 133 for 64 new tokens, 167 instead of 172 for 256.
_MOST_QUERIES = 64
# The names under which models hand on what their indexers chose: DeepSeek-V3.2, GLM-MoE-DSA, ...; MiniMax-M3.
_CHOSEN_KEYS = ("indices", "block_indices")


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
    """Compute the numbers of transformers' "sdpa", with its masks: the attention implementation "thunder_moe_sdpa".

    With a mask (so with every static cache, and with padding) "sdpa" copies keys and values once for each head of a
    group. Here they are not copied: where cuDNN runs attention (H100 and newer, 16 bits) and no gradients are needed,
    it groups the heads; elsewhere the heads of a group are further rows of the query, (B, Hkv, G * Q, D), for up to 64
    new tokens. Without a mask, and for models whose heads have keys of their own, it calls "sdpa".

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
        ValueError: a soft cap of the logits or attention sinks, which SDPA does not have; keys that the model chooses
            for each query, which it puts into the mask of "eager" and "sdpa" alone.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f'{name}: got one, attn_implementation="{NAME}" has none; use "eager" or "flex_attention"')
    for name in _CHOSEN_KEYS:
        if kwargs.get(name) is not None:
            raise ValueError(
                f'{name}: got them, attn_implementation="{NAME}" attends to all keys of the mask; use "sdpa"'
            )
    queries = query.shape[2]
    own = kwargs.get("position_bias") is None and kwargs.get("cache") is None and not kwargs.get("output_attentions")
    if attention_mask is not None and attention_mask.is_floating_point() and attention_mask.dtype != query.dtype:
        # cuDNN of torch 2.11 takes a float32 mask of 16-bit queries for one of 16 bits. Finite numbers stay finite: a
        # row of padding that attends to nothing keeps its weights.
        least = torch.finfo(query.dtype).min
        finite = attention_mask.clamp_min(least).to(query.dtype)
        attention_mask = torch.where(attention_mask == -torch.inf, -torch.inf, finite)
    masked = attention_mask is not None and attention_mask.ndim == 4 and query.shape[1] > key.shape[1]
    out = _grouped(query, key, value, attention_mask, dropout, scaling) if masked and own else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and own and causal and 1 < queries < key.shape[2]:
        # A prompt in a static cache: transformers 5.7 hands over all of the cache, which no fused kernel takes.
        key, value = key[:, :, :queries], value[:, :, :queries]
    if out is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    return out.transpose(1, 2).contiguous(), None


def grouped_sdpa_mask(**given: Any) -> Tensor | None:
    """Make the mask that transformers' `sdpa_mask` makes, or None where attention's causal form needs none.

    A prompt needs none if no text is padded, no token is cached, and all of it is in one window or chunk. `sdpa_mask`
    makes one all the same in compiled prompts (transformers 5.17), for an `attention_mask` that covers a static cache,
    and for windows that are as long as the prompt.

    For one new token behind a static cache it takes a third of the operations of `sdpa_mask`, and 16-bit models get the
    numbers that are added to the logits, 0 and -inf. SDPA would convert a bool mask to them in every layer: 1.2 us of a
    layer of a compiled decode step on an H200, and launches of an eager one.

    Args:
        **given: the arguments of `sdpa_mask`.

    Returns:
        (B, 1, Q, L), bool (True: attend) or 16-bit numbers to add; or None where none is needed.
    """
    if given["q_length"] > 1:
        if _is_causal(given):
            return None
        given["allow_is_causal_skip"] = False  # `sdpa_mask` would look again for a part of these cases
    plain = (
        given.get("mask_function") is causal_mask_function and not given.get("use_vmap") and not given.get("local_size")
    )
    skips = given.get("allow_is_causal_skip", True) or given.get("allow_is_bidirectional_skip", False)
    padding: Tensor | None = given.get("attention_mask")
    offset = given.get("kv_offset", 0)
    known = padding is None or (padding.dtype == torch.bool and padding.shape[0] == given["batch_size"])
    if given.get("q_length") != 1 or skips or not plain or not known or not isinstance(offset, int):
        mask: Tensor | None = sdpa_mask(**given)
        return mask
    end = offset + given["kv_length"]
    attended: Tensor = torch.arange(offset, end, device=given.get("device", "cpu")) <= given.get("q_offset", 0)
    if padding is not None:
        attended = F.pad(padding, (0, max(0, end - padding.shape[1])))[:, offset:end] & attended
    attended = attended.expand(given["batch_size"], -1)[:, None, None]
    dtype = given.get("dtype")
    if dtype not in (torch.bfloat16, torch.float16):
        return attended
    return attended.new_zeros(attended.shape, dtype=dtype).masked_fill_(~attended, -torch.inf)


def _is_causal(given: dict[str, Any]) -> bool:
    """True if query i of a prompt reads the keys 0 to i: there is neither padding, nor a past, nor a window to leave.

    Tensors that say so are read once, which waits for the GPU, and not while anything traces or captures.
    """
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False  # an exported graph may be given one new token, which reads all keys, and any number behind it
    queries, window, start = given["q_length"], given.get("local_size"), given.get("q_offset", 0)
    padding: Tensor | None = given.get("attention_mask")
    if not given.get("allow_is_causal_skip", True) or given.get("kv_offset", 0) != 0:
        return False
    if window is not None and queries > window:
        return False
    facts = []
    if isinstance(start, Tensor):  # the number of tokens in a static cache
        facts.append(start == 0)
    elif start != 0:
        return False
    if padding is not None:  # causality hides the keys behind the new tokens
        if padding.shape[1] < queries:
            return False
        facts.append(padding[:, :queries])
    return not facts or (not is_tracing(facts[0]) and bool(torch.stack([fact.all() for fact in facts]).all()))


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, scaling: float | None
) -> Tensor | None:
    """Return (B, Hq, Q, Dv), without copies of keys and values; None where repeating them is as fast."""
    (batch, heads, queries, width), key_heads = query.shape, key.shape[1]
    options: dict[str, Any] = dict(dropout_p=dropout, scale=scaling)
    if _cudnn_groups_heads(query, key, value, mask, dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True, **options)
    if not isinstance(queries, int) or queries > _MOST_QUERIES:  # torch.export: any number
        return None
    groups = heads // key_heads
    rows = query.reshape(batch, key_heads, groups * queries, width)
    mask = _mask_of_rows(mask, groups, queries)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, **options)
    return out.reshape(batch, heads, queries, value.shape[-1])


def _cudnn_groups_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> bool:
    differentiable = query.requires_grad or key.requires_grad or value.requires_grad
    if query.device.type != "cuda" or (differentiable and torch.is_grad_enabled()):
        return False
    if not torch.compiler.is_compiling():
        return cudnn_groups_heads(query, key, value, mask, dropout)
    if dropout != 0 or not torch.compiler.is_dynamo_compiling():  # Thunder cannot ask
        return False
    return _cudnn_groups_heads_of(
        str(query.device), query.dtype, mask.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3],
        1 if query.shape[2] == 1 else 2,
    )  # fmt: skip


_constant: Any = torch.compiler.assume_constant_result
_cudnn_groups_heads_of: Callable[..., bool] = _constant(cudnn_groups_heads_of)


def _mask_of_rows(mask: Tensor, groups: int, queries: int) -> Tensor:
    """Convert (B or 1, 1 or Hq, Q or 1, L) -> (B or 1, 1 or Hkv, G * Q or 1, L)"""
    batch, heads, rows, keys = mask.shape
    if heads == 1:
        if rows == 1:
            return mask
        return mask[:, :, None].expand(batch, 1, groups, rows, keys).reshape(batch, 1, groups * rows, keys)
    return mask.expand(batch, heads, queries, keys).reshape(batch, heads // groups, groups * queries, keys)


AttentionInterface.register(NAME, grouped_sdpa_attention)
AttentionMaskInterface.register(NAME, grouped_sdpa_mask)
