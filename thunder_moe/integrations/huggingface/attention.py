"""transformers' attention implementation "thunder_moe_sdpa": masked attention without copies of keys and values, and
prompts without a mask. Called by transformers, once quantizer has imported it; calls torch's
scaled_dot_product_attention, transformers' "sdpa", and kernels/attention.py.

Legend: B batch, Hq query heads, Hkv key heads, G = Hq // Hkv heads of a group, Q new tokens, L keys, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.import_utils import is_tracing

from thunder_moe.kernels.attention import cudnn_groups_heads, cudnn_groups_heads_of

NAME = "thunder_moe_sdpa"
# As rows of the query, the heads of a group need the mask repeated, keys and values not: H200, 32 heads that share 4 of
# 128, batch 8, 576 keys: 54 us instead of 133 for 64 new tokens, 167 instead of 172 for 256.
_MOST_QUERIES = 64
# Padded prompts of so many tokens are rolled to the left. On an H100, 8 texts of 512 tokens take as long as with a mask
# (0.13 ms of attention in a layer), 8 texts of 1024 tokens two thirds of it (0.30 ms).
_FEWEST_ROLLED = 1024
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

    Eager prompts with padding on the left are rolled until each text begins at token 0, attend causally without the
    mask, and are rolled back. What attends to nothing is zero, as with "sdpa".

    Args:
        module: the attention layer.
        query: (B, Hq, Q, D); key (B, Hkv, L, D), value (B, Hkv, L, Dv).
        attention_mask: (B or 1, 1 or Hq, Q or 1, L), bool (True: attend) or added to the logits; None for none.
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
    roll = _roll_of(query, key, attention_mask) if own else None
    if roll is not None:
        query, key, value = (roll.left(each[:, :, :queries]) for each in (query, key, value))
        attention_mask, is_causal = None, True
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
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return out if roll is None else roll.back(out), None


def grouped_sdpa_mask(**given: Any) -> Tensor | None:
    """Make the mask that transformers' `sdpa_mask` makes of the same arguments, or None where none is needed.

    A prompt needs none if each text begins with the first token, no token is cached, and all of it is in one window or
    chunk. Causality hides padding on the right from the text. `sdpa_mask` makes a mask for such padding, in compiled
    prompts (transformers 5.17), for an `attention_mask` that covers a static cache, and for windows that are as long as
    the prompt. `grouped_sdpa_attention` knows the masks of prompts in which texts begin later.

    For one new token behind a static cache it takes a third of the operations of `sdpa_mask`, and 16-bit models get the
    numbers that are added to the logits, 0 and -inf. SDPA would convert a bool mask to them in every layer: 1.2 us of a
    layer of a compiled decode step on an H200, and launches of an eager one.

    Returns:
        (B, 1, Q, L), bool (True: attend) or 16-bit numbers to add; or None.
    """
    if given["q_length"] > 1:
        starts = _starts_of(given)
        if starts is not None and not any(starts):
            return None
        given["allow_is_causal_skip"] = False  # `sdpa_mask` would look again for a part of these cases
        if starts is not None and len(starts) == given["batch_size"] and given["q_length"] >= _FEWEST_ROLLED:
            return _mask_of_later_starts(given, starts)
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


def _starts_of(given: dict[str, Any]) -> list[int] | None:
    """Return where the texts of a prompt begin, if each token reads all keys from there to its own; None if not.

    Padding may be in front of a text and behind it, where causality hides it, but not inside. There may be neither a
    past, nor a window to leave, nor a text without tokens. [] and [0] say that all texts begin with the first token.

    Tensors that say so are read once, which waits for the GPU, and not while anything traces or captures.
    """
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return None  # an exported graph may be given one new token, which reads all keys, and any number behind it
    queries, window, past = given["q_length"], given.get("local_size"), given.get("q_offset", 0)
    padding: Tensor | None = given.get("attention_mask")
    if not given.get("allow_is_causal_skip", True) or given.get("kv_offset", 0) != 0:
        return None
    if window is not None and queries > window:
        return None
    if not isinstance(past, Tensor) and past != 0:
        return None
    if padding is not None and padding.shape[1] < queries:
        return None
    facts = [each for each in (past, padding) if isinstance(each, Tensor)]
    if not facts:
        return []
    if is_tracing(facts[0]):
        return None
    starts = torch.zeros(1, dtype=torch.int64, device=facts[0].device)
    if padding is not None:  # causality hides the keys behind the new tokens
        text = padding[:, :queries].bool()
        begins = text & ~F.pad(text, (1, 0))[:, :-1]
        starts = torch.where(begins.sum(1) == 1, begins.int().argmax(1), -1)
    if isinstance(past, Tensor):  # the number of tokens in a static cache
        starts = torch.where(past == 0, starts, -1)
    found: list[int] = starts.tolist()
    return found if min(found) >= 0 else None


@torch.inference_mode(False)  # tensors of inference mode do not count their changes
def _mask_of_later_starts(given: dict[str, Any], starts: list[int]) -> Tensor:
    """Make the mask of a prompt, and keep what replaces it in `grouped_sdpa_attention`.

    Models may slice the mask, change or combine it: what they make of it is not known there, and stays a mask.
    """
    mask = sdpa_mask(**given)
    assert mask is not None
    texts, queries = torch.arange(len(starts), device=mask.device), given["q_length"]
    places = torch.arange(queries, device=mask.device) + torch.tensor(starts, device=mask.device)[:, None]
    order = (texts[:, None] * queries + places % queries).flatten()
    _ROLLS[mask] = _Roll(mask._version, order, order.argsort(), order[(places >= queries).flatten()])
    return mask


class _Roll(NamedTuple):
    """Orders of the (B * Q) tokens of a prompt."""

    version: int  # the changes of the mask when it was made
    order: Tensor  # moves the texts to the left, and the padding in front of them to the end
    inverse: Tensor  # moves them back
    padding: Tensor  # the tokens in front of the texts

    def left(self, tokens: Tensor) -> Tensor:
        """Convert (B, H, Q, D) -> (B, H, Q, D)"""
        tokens = tokens.transpose(1, 2)
        rolled = _reordered(tokens.flatten(0, 1), self.order, self.inverse)
        return rolled.view(tokens.shape).transpose(1, 2)

    def back(self, tokens: Tensor) -> Tensor:
        """Convert (B, Q, H, D) -> (B, Q, H, D)"""
        texts = _reordered(tokens.flatten(0, 1), self.inverse, self.order)
        return texts.index_fill_(0, self.padding, 0).view(tokens.shape)


_ROLLS = WeakTensorKeyDictionary()


def _roll_of(query: Tensor, key: Tensor, mask: Any) -> _Roll | None:
    """Return what replaces a mask; None: it is not of `_mask_of_later_starts`, has changed, or is of other tokens."""
    if torch.compiler.is_compiling() or not isinstance(mask, Tensor):
        return None
    roll: _Roll | None = _ROLLS.get(mask)
    # A captured graph may be replayed with other numbers in the mask.
    if roll is None or roll.version != mask._version or is_tracing(mask):
        return None
    return roll if mask.shape == (len(query), 1, query.shape[2], key.shape[2]) else None


class _Reorder(torch.autograd.Function):
    """Put rows into another order. The gradient of indexing alone would add rows, not copy them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _reordered(gradient, *ctx.saved_tensors), None, None


def _reordered(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    if not (rows.requires_grad and torch.is_grad_enabled()):
        return rows[order]  # takes less time on the host
    reordered: Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return reordered


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
