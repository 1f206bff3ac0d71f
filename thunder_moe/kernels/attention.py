"""Tells if torch's attention reads grouped heads' keys without repeating them; `decode_attention` in plain torch.
Called by compilers/dynamo/attention.py, integrations/huggingface/attention.py and the backends; calls torch.

scaled_dot_product_attention(enable_gqa=True) with a mask runs cuDNN where torch prefers it (SM90 and SM100), otherwise
plain PyTorch, which repeats the keys. H200, 32 heads that share 4 key heads of width 128, one new token, 576 keys, at
batch 1 / 32 / 128: enable_gqa by cuDNN 12 / 16 / 53 us, the heads of a group as rows of the query 22 / 25 / 71,
repeated keys 26 / 402 / 1529.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import SDPBackend

from thunder_moe.kernels.batch_invariance import refuse


def cudnn_groups_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float = 0.0) -> bool:
    """True if ``scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)`` is going to run cuDNN.

    Args:
        query: (B, Hq, Q, D), not a fake tensor.
        key: (B, Hkv, L, D).
        value: (B, Hkv, L, Dv).
        mask: (B or 1, Hq or 1, Q or 1, L).
        dropout: probability.
    """
    if query.device.type != "cuda":
        return False
    choice: int = torch._fused_sdp_choice(query, key, value, mask, dropout, False, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


def cudnn_groups_heads_of(
    device: str, dtype: torch.dtype, mask_dtype: torch.dtype, heads: int, key_heads: int, width: int, value_width: int,
    queries: int,
) -> bool:  # fmt: skip
    """Return `cudnn_groups_heads` for tensors of these sizes (Hq, Hkv, D, Dv and Q); compilers ask without tensors."""
    if torch.device(device).type != "cuda":
        return False
    with unset_fake_temporarily(), torch.no_grad():
        query = torch.empty(1, queries, heads, width, device=device, dtype=dtype).transpose(1, 2)
        key = torch.empty(1, key_heads, 64, width, device=device, dtype=dtype)
        value = torch.empty(1, key_heads, 64, value_width, device=device, dtype=dtype)
        mask = torch.empty(1, 1, queries, 64, device=device, dtype=mask_dtype)
        return cudnn_groups_heads(query, key, value, mask)


def decode_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor,
    mask: Tensor | None, cos: Tensor | None, sin: Tensor | None, query_norm: Tensor | None, key_norm: Tensor | None,
    epsilon: float, scale: float,
) -> Tensor:  # fmt: skip
    """Attend with one new token per text, in plain torch; the operator `decode_attention` has the arguments."""
    refuse("decode_attention in plain torch", "use the model's own attention")
    if query_norm is not None and key_norm is not None:
        query, key = _rms_norm(query, query_norm, epsilon), _rms_norm(key, key_norm, epsilon)
    if cos is not None and sin is not None:
        cos, sin = (angles.reshape(len(angles), 1, -1) for angles in (cos, sin))
        query, key = (each * cos + _rotated(each) * sin for each in (query, key))
    key_cache.index_copy_(2, position, key[:, :, None])
    value_cache.index_copy_(2, position, value[:, :, None])
    grouped = query.unflatten(1, (key.shape[1], -1))
    bias = None if mask is None else mask.reshape(len(mask), 1, 1, -1)
    out = F.scaled_dot_product_attention(grouped, key_cache, value_cache, bias, scale=scale)
    return out.flatten(1, 2)


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / rms(x), rounded to the dtype of x, times weight: as transformers' norms of heads do."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def _rotated(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)
