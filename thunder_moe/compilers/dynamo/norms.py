"""Finds RMS norms in graphs as dynamo gives them.
Called by decode_attention.py and add_norm.py; calls nodes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_moe.compilers.dynamo.nodes import calls, given, in_both_orders, same, value_of

__all__ = ["Norm", "is_number", "norm_of"]


@dataclass(frozen=True)
class Norm:
    """weight * (x.float() / rms(x)).to(dtype), over the last dimension.

    Attributes:
        source: x.
        weight: of the last dimension's size, in the dtype of x.
        epsilon: added to the mean of squares.
        nodes: the nodes from behind x to the product.
    """

    source: Any
    weight: Any
    epsilon: float
    nodes: frozenset[Any]


def norm_of(node: Any) -> Norm | None:
    """Return the norm whose result a node is; None for other nodes."""
    for weight, scaled in in_both_orders(node, "mul"):
        value = value_of(weight)
        if not isinstance(value, Tensor) or not calls(scaled, "cast"):
            continue
        product = given(scaled)["input"]
        for wide, factor in in_both_orders(product, "mul"):
            if not calls(wide, "cast") or not calls(factor, "rsqrt"):
                continue
            total = given(factor)["input"]
            summed = given(total) if calls(total, "add") else {}
            mean = summed.get("input")
            square = given(mean).get("input") if calls(mean, "mean") else None
            named = given(square) if calls(square, "pow") else {}
            source = given(wide)["input"]
            right = named.get("input") is wide and named.get("exponent") == 2
            right = right and given(mean).get("dim") in (-1, [-1], (-1,)) and given(mean).get("keepdim") is True
            right = right and same(value.shape, value_of(source).shape[-1:])
            same_dtype = value_of(scaled).dtype == value_of(source).dtype == value.dtype
            right = right and value_of(wide).dtype == value_of(factor).dtype == torch.float32
            if right and same_dtype and is_number(summed.get("other")):
                nodes = frozenset({node, scaled, product, wide, factor, total, mean, square})
                return Norm(source, weight, float(summed["other"]), nodes)
    return None


def is_number(value: Any) -> bool:
    """True for a Python number, and False for a truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
