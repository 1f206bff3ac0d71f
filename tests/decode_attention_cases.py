"""Calls of decode_attention, and what they compute in float64, written out: it shares nothing with the package.
Called by tests/ops/test_decode_attention.py and tests/kernels/cuda/test_cuda_decode_attention.py.
"""

import math

import torch

CASES = {  # texts, heads, key heads, width, length, options
    "qwen3": (1, 32, 4, 128, 100, {}),
    "mixtral": (2, 8, 2, 128, 70, dict(norms=False, mask="bool")),
    "llama 4, no embedding": (1, 10, 2, 128, 33, dict(norms=False, rope=False)),
    "16 heads a key": (1, 32, 2, 64, 50, {}),
    "one head, no mask": (3, 2, 2, 64, 16, dict(mask=None, position=15)),
    "first token": (2, 6, 2, 64, 40, dict(position=0)),
    "batch": (5, 8, 2, 128, 300, dict(position=299)),
}


def oracle(query, key, value, key_cache, value_cache, position, mask, cos, sin, query_norm, key_norm, epsilon, scale):
    """Return the result and the caches in float64; the new key is rounded as often as the operator rounds it."""
    dtype = query.dtype

    def prepared(x, weight):
        if weight is not None:
            wide = x.double()
            x = (wide / (wide.square().mean(-1, keepdim=True) + epsilon).sqrt()).to(dtype) * weight
        if cos is None:
            return x
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    q, k = prepared(query, query_norm), prepared(key, key_norm)
    keys, values = key_cache.clone(), value_cache.clone()
    keys[:, :, int(position)], values[:, :, int(position)] = k, value
    groups = query.shape[1] // key.shape[1]
    wide = keys.double().repeat_interleave(groups, 1)
    scores = torch.einsum("bhd,bhld->bhl", q.double(), wide) * scale
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=torch.double, device=mask.device)
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask.double()
        scores = scores + bias[:, None]
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhl,bhld->bhd", weights, values.double().repeat_interleave(groups, 1)), keys, values


def make(
    device, dtype, texts, heads, key_heads, width, length, *, position=None, mask="numbers", norms=True, rope=True
):
    generator = torch.Generator().manual_seed(heads * width + length)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    position = length * 2 // 3 if position is None else position
    angles = torch.rand(texts, width // 2, generator=generator) * 6
    cos, sin = ((f(angles).repeat(1, 2)).to(dtype).to(device) for f in (torch.cos, torch.sin))
    attended = (torch.arange(length) <= position).repeat(texts, 1)
    attended[1:, : min(5, position)] = False  # padding on the left
    if mask == "numbers":
        mask = torch.zeros(texts, length, dtype=dtype).masked_fill(~attended, -math.inf)
        mask[:, position] = 0.5
    elif mask == "bool":
        mask = attended
    return [
        numbers(texts, heads, width), numbers(texts, key_heads, width) * 3, numbers(texts, key_heads, width),
        numbers(texts, key_heads, length, width), numbers(texts, key_heads, length, width),
        torch.tensor([position], device=device), None if mask is None else mask.to(device),
        *((cos, sin) if rope else (None, None)),
        *((numbers(width), numbers(width)) if norms else (None, None)), 1e-6, width**-0.5,
    ]  # fmt: skip
