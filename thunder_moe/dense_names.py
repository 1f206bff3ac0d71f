"""What the names of dense layers say: which route, which belong to encoders of images and sound, which are linears of a
decoder, and which of those engines compute at once.
Called by dense_linears and checkpoint; calls nothing of the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["READ_TOGETHER", "is_embedding", "is_encoder", "is_linear", "is_router", "sharing_scale"]

# What routes: a changed choice of experts is no error of rounding, and the layer is small.
_ROUTERS = re.compile(r"(^|[._])(router|gate|gating|wg)($|\.)")
# Encoders of other things than text see many rows at once, where 4-bit weights gain nothing.
_ENCODERS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|multi_modal|multimodal|mm)([._]|$)")
_LINEARS = re.compile(r"(^|[._])(\w*_proj(_with_mqa)?|w[123qkvo]|wqkv|qkv|fc[12]|query_key_value)$")
# Linears whose weight the models' code reads itself: DeepSeek's indexer its dtype, Mamba's kernels all of it.
_READ_BY_CODE = re.compile(r"(^|[._])(weights_proj|dt_proj|(mixer|mamba)\.out_proj)$")
_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens\w*|embed_positions|embed_in|\w*embeddings?|wte|wpe)$")
# Names of siblings that read the same rows, and so share a global scale in the checkpoints of all engines.
READ_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq", "wk", "wv"),
)  # fmt: skip


def sharing_scale(names: Iterable[str]) -> list[list[int]]:
    """Groups the positions of siblings that share a global scale, because engines merge them; a sibling of another name
    is a group of its own."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, name in enumerate(names):
        together = next((each for each in READ_TOGETHER if name in each), (name,))
        groups.setdefault(together, []).append(position)
    return list(groups.values())


def is_router(name: str) -> bool:
    """Whether the name of a module is that of a router or gate."""
    return _ROUTERS.search(name) is not None


def is_embedding(name: str) -> bool:
    """True if the name of a module is that of a table of embeddings, which has a matrix and is not a linear."""
    return _EMBEDDINGS.search(name) is not None


def is_encoder(name: str) -> bool:
    """Whether the name of a module says that it belongs to an encoder of images or sound, or to what joins it."""
    return _ENCODERS.search(name) is not None


def is_linear(name: str) -> bool:
    """Whether linears of attention, dense MLPs and shared experts have names such as this; not the head."""
    return _LINEARS.search(name) is not None and _READ_BY_CODE.search(name) is None
