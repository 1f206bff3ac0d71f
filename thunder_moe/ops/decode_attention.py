"""decode_attention: the attention of one new token per text, from its projections on, with the write to the cache.
Called by compiled graphs, in place of the norms, the rotary embedding, the write to a static cache and torch's
attention; calls kernels.select.

Legend: B texts, Hq query heads, Hkv key heads, D numbers of a head, L tokens that the cache holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.formats.checks import require
from thunder_moe.kernels.select import select
from thunder_moe.ops.checks import ACTIVATION_DTYPES
from thunder_moe.ops.operator import operator


def _check(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, position: Tensor,
    mask: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    query_norm: Tensor | None = None, key_norm: Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    require(query.ndim == 3, "query", query, "shape (texts, heads, width)")
    require(query.dtype in ACTIVATION_DTYPES, "query", query, "dtype bfloat16, float16 or float32")
    (texts, heads, width), device = query.shape, query.device
    fits = key.ndim == 3 and (key.shape[0], key.shape[2]) == (texts, width) and key.shape[1] > 0
    require(fits and heads % key.shape[1] == 0, "key", key, f"shape ({texts}, a divisor of {heads}, {width})")
    shape = texts, key.shape[1], key_cache.shape[2] if key_cache.ndim == 4 else 1, width
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = dict(
        value=(value, (*key.shape,)), key_cache=(key_cache, shape), value_cache=(value_cache, shape)
    )
    for one, other, name in ((cos, sin, "cos"), (query_norm, key_norm, "query_norm")):
        if (one is None) != (other is None):
            raise ValueError(f"{name}: got {one if one is None else 'a tensor'} without its pair, wanted both or none")
    wanted |= dict(query_norm=(query_norm, (width,)), key_norm=(key_norm, (width,)))
    for name, (tensor, size) in {"key": (key, (*key.shape,)), **wanted}.items():
        if tensor is not None:
            ok = tuple(tensor.shape) == size and tensor.dtype == query.dtype and tensor.device == device
            require(ok, name, tensor, f"shape {size}, dtype {query.dtype}, on {device}")
    for name, angles in (("cos", cos), ("sin", sin)):
        if angles is not None and cos is not None:
            ok = _has_rows(angles, texts, width) and angles.dtype == query.dtype and angles.device == device
            ok = ok and angles.shape[0] == cos.shape[0]
            require(ok, name, angles, f"shape ({texts} or 1, {width}), as cos, dtype {query.dtype}, on {device}")
    require(width % 2 == 0 or cos is None, "query", query, "an even width, for the rotary embedding")
    ok = position.shape == (1,) and position.dtype == torch.int64 and position.device == device
    require(ok, "position", position, f"shape (1,), dtype int64, on {device}")
    if mask is not None:
        ok = _has_rows(mask, texts, shape[2]) and mask.device == device and mask.dtype in (torch.bool, query.dtype)
        require(ok, "mask", mask, f"shape ({texts} or 1, {shape[2]}), dtype bool or {query.dtype}, on {device}")


def _has_rows(tensor: Tensor, texts: int, width: int) -> bool:
    """True if a tensor is (texts or 1, 1, ..., 1, width)."""
    if tensor.ndim < 2:
        return False
    first, *middle, last = tensor.shape
    return first in (1, texts) and last == width and all(size == 1 for size in middle)


def _check_values(*operands: Any, **_: Any) -> None:
    key_cache, position = operands[3], operands[5]
    if position.device.type == "cpu":
        length = key_cache.shape[2]
        require(0 <= int(position) < length, "position", position, f"a number from 0 to {length - 1}")


def _no_gradient(*_: Any, **__: Any) -> tuple[()]:
    raise RuntimeError("decode_attention has no gradient; norms, rotary embedding and scaled_dot_product_attention do")


@operator(
    shapes=lambda query, *_, **__: (tuple(query.shape),),
    check=_check,
    check_values=_check_values,
    gradient=_no_gradient,
    saved=slice(0),
    mutates=("key_cache", "value_cache"),
)
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    mask: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    scale: float,
    prefetch: bool = False,
) -> Tensor:
    """Attend with one new token per text, for inference: a backward raises an error.

    RMS norms of the heads of query and key, the rotary embedding of both (``x * cos + rotate_half(x) * sin``), the
    write of key and value to the cache at `position`, and softmax(query key^T * scale + mask) value over the whole
    cache. Norms and embedding are rounded after each step as eager PyTorch rounds them. On CUDA devices of compute
    capability 9.0 and newer it is one kernel for 16-bit heads of 64 or 128 numbers, if at most 16 query heads share a
    key head. It skips tiles of 16 keys that the mask leaves out. Elsewhere the operator runs in plain torch.

    Args:
        query: (B, Hq, D) bfloat16, float16 or float32; the projection of the new tokens.
        key: (B, Hkv, D), of that dtype; Hkv divides Hq, and query heads h * Hq / Hkv on share key head h.
        value: (B, Hkv, D).
        key_cache: (B, Hkv, L, D), changed in place. It may share no memory with another argument.
        value_cache: (B, Hkv, L, D), changed in place; the same holds.
        position: int64 (1,), the place of the new tokens in the cache, below L.
        mask: (B or 1, L), also with dimensions of size 1 in between: bool (True: attend), or added to the scaled
            scores, in the dtype of query; None: attend to all L tokens. A text that attends to nothing gets zeros.
        cos: (B or 1, D), likewise, of the rotary embedding; None: there is none.
        sin: likewise, of as many rows as cos.
        query_norm: (D,), the weight of the norm of query heads; None: there is none.
        key_norm: (D,).
        epsilon: added to the mean of squares of the norms.
        scale: of the scores.
        prefetch: on CUDA, read the first keys and values before the kernel in front of this one has ended. It is right
            only if that kernel does not write the caches; compilers, which know it, set it.

    Returns:
        (B, Hq, D), contiguous.

    Raises:
        ValueError: a tensor has the wrong shape, dtype or device, a cache requires grad while gradients are enabled, or
            (on a CPU) position is outside of the cache. On CUDA such a position stops the device, as it does for
            ``index_copy_``.
    """
    kernel = select(query.device).decode_attention
    return kernel(
        query, key, value, key_cache, value_cache, position, mask, cos, sin, query_norm, key_norm, epsilon, scale
    )
