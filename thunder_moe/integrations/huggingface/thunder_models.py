"""Lookasides of moe_executor that let Thunder trace whole models of transformers, and refuse the caches of keys and
values whose changes it would lose.
Imported by compilers/thunder/lookasides.py once transformers' output capturing or caches are imported; calls it.

Models keep what they collect (``output_hidden_states=True``) in a context variable, which takes a global instead while
torch.compile traces. Thunder 0.2.6 traces that branch and fails on the change of the global. The lookasides are the
variable's own methods: they set and reset it while Thunder traces, and leave nothing in the trace.

Of several attributes that a traced function sets on one object, Thunder 0.2.6 keeps the first alone. A cache that makes
its tensors in its first update, or new ones at each step, is wrong afterwards, mostly without an error. Static layers
that have their tensors change them in place, which Thunder keeps.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.cache_utils import Cache, DynamicCache, StaticLayer, StaticSlidingWindowLayer
from transformers.utils.output_capturing import CompileableContextVar as _Variable

from thunder_moe.compilers.thunder.lookasides import same_code, trace
from thunder_moe.kernels.slow_paths import warn_once

_UPDATES = ("update", "update_conv_state", "update_recurrent_state", "update_indexer")
_STATIC = (StaticLayer, StaticSlidingWindowLayer)


def _check(cache: Any) -> None:
    """Warn if Thunder would compile every step. Raise a NotImplementedError if it would lose the changes of a step."""
    kinds = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _STATIC})
    if kinds or not cache.layers or cache.offloading:
        _refuse(f"got a {type(cache).__name__} with " + ("offloading" if cache.offloading else " and ".join(kinds)))
    if not all(layer.is_initialized for layer in cache.layers):
        raise NotImplementedError(
            f"cache: got a {type(cache).__name__} without tensors, and Thunder loses those that its first step makes: "
            "call cache.early_initialization(batch_size, num_heads, head_dim, dtype, device) first, with the number of "
            "heads that keys and values have"
        )
    if any(layer.is_sliding for layer in cache.layers):
        warn_once(
            ("thunder", StaticSlidingWindowLayer),
            "Thunder compiles every step of decoding anew, as StaticSlidingWindowLayer counts tokens in Python: before "
            "early_initialization, set cache.layers = [StaticLayer(max_cache_len) for _ in cache.layers] with "
            "transformers.cache_utils.StaticLayer, which compiles once and gives the same numbers",
        )


def _refuse(got: str) -> NoReturn:
    raise NotImplementedError(
        f"cache: {got}, whose changes Thunder loses: pass a transformers.StaticCache after its early_initialization, "
        "or use_cache=False"
    )


def _checked(update: Any) -> Any:
    stock = same_code(update)

    def call(cache: Cache, *args: Any, **kwargs: Any) -> Any:
        _check(cache)
        return trace(stock, cache, *args, **kwargs)

    return call


_updates = [getattr(Cache, name, None) for name in _UPDATES]
LOOKASIDES: dict[Any, Any] = {update: _checked(update) for update in _updates if update is not None}
LOOKASIDES[DynamicCache.__init__] = lambda *_, **__: _refuse("got none, and the model makes a DynamicCache")
LOOKASIDES |= {method: method for method in (_Variable.get, _Variable.set, _Variable.reset)}
