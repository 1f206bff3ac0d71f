"""Chooses the launch of `decode_attention`: the kernel of src/decode_attention.cu, and the size of its clusters.
Called by operators.py beside it, and by compilers/dynamo/decode_attention.py (`unserved_reason`); calls chain.py.

Legend: B texts, Hq query heads, Hkv key heads, D numbers of a head, L tokens that the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder_moe.kernels.cuda.arguments import DecodeAttentionArguments
from thunder_moe.kernels.cuda.chain import ChainBuilder
from thunder_moe.kernels.cuda.configs import COMMON
from thunder_moe.kernels.cuda.nvrtc import instance
from thunder_moe.kernels.cuda.operands import target

SOURCES = (COMMON, COMMON.with_name("ptx.cuh"), COMMON.with_name("decode_attention.cu"))
WIDTHS = (64, 128)  # D
MOST_GROUPS = 16  # query heads that share a key head
_WARPS = 9  # of a block: eight take keys of the cache, one the new key
_KEYS = 16  # of a tile
# The most blocks of a cluster. H100, 32 heads that share 4 of 128, us by clusters of 2, 4, 8 and 16: batch 1, 513 keys
# 8.0, 6.0, 5.4, 5.8; 2,049 keys 17.0, 11.0, 8.2, 7.0; 8,193 keys 51.9, 28.8, 17.3, 13.5. Batch 8, 513 keys 9.3, 12.9,
# 16.4, because clusters of 4 that fill the device do not all run at once (1: 11.1). cuDNN's attention alone takes 9.3,
# 10.2, 16.4, and 11.6.
_MOST_SPLITS, _LONG_SPLITS, _LONG = 8, 16, 2048
_INVARIANT_PAIRS = 16  # of a text and a key head, in the batch-invariant mode: clusters of 4 on an H100


def unserved_reason(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> str | None:
    """Return why the kernel does not serve attention of these sizes; None if it does."""
    if device.type == "cuda" and target(device).capability < (9, 0):
        return f"compute capability {target(device).capability}, below (9, 0)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype}"
    if width not in WIDTHS:
        return f"heads of {width} numbers, not {' or '.join(map(str, WIDTHS))}"
    if heads // key_heads > MOST_GROUPS:
        return f"{heads // key_heads} query heads that share a key head, more than {MOST_GROUPS}"
    return None


def append_decode_attention(
    chain: ChainBuilder, samples: Sequence[Any], places: Sequence[Any], epsilon: float, scale: float, prefetch: bool,
    batch_invariant: bool,
) -> None:  # fmt: skip
    """Append the kernel, and declare its result (B, Hq, D) and the caches, which it writes.

    Args:
        chain: the chain.
        samples: the operator's arguments, which the kernel serves.
        places: their addresses.
        epsilon, scale, prefetch: the operator's options.
        batch_invariant: True if the blocks that share the keys of a text must not depend on the number of texts.
    """
    query, key, value, key_cache, _, _, mask, cos, *_ = samples
    (texts, heads, width), (key_heads, length) = query.shape, key_cache.shape[1:3]
    groups = heads // key_heads
    out = chain.result(query.shape, query.dtype)
    for place in places[3:5]:
        chain.result_in(place, key_cache.shape, query.dtype)
    pairs = _INVARIANT_PAIRS if batch_invariant else texts * key_heads
    splits = _splits(pairs, length, target(query.device).multiprocessors)
    tiles = -(-groups // 8)
    strides = [each.stride(0) for each in (query, key, value)]
    strides += [0 if each is None or each.shape[0] < texts else each.stride(0) for each in (mask, cos)]
    fields = (
        *places[:6], *places[6:11], out, *strides, key_heads, groups, length,
        mask is not None and mask.dtype == torch.bool, prefetch, epsilon, scale,
    )  # fmt: skip
    name = instance("decode_attention", query.dtype == torch.bfloat16, width, tiles, splits)
    shared, blocks = _shared_bytes(width, tiles, splits), texts * key_heads * splits
    chain.launch(SOURCES, name, 32 * _WARPS, shared, blocks, DecodeAttentionArguments, fields)


def _splits(pairs: int, length: int, multiprocessors: int) -> int:
    """Return the blocks that share the keys of a text and a key head: a power of two, so that all run at once."""
    most = min(_LONG_SPLITS if length > _LONG else _MOST_SPLITS, -(-length // _KEYS))
    splits = 1
    while 2 * splits <= min(most, multiprocessors * 3 // 4 // pairs):
        splits *= 2
    return splits


def _shared_bytes(width: int, tiles: int, splits: int) -> int:
    """Return the shared memory of a block, whose parts the kernel lists."""
    queries = 8 * tiles
    operands = queries * (width + 8) * 2 + 2 * width * 2
    sums = _WARPS * queries * 4 * (2 + width + 2)
    return operands + sums + queries * width * 4 + splits * queries * 16 + 16
