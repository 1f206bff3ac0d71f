"""Thunder with a cache of keys and values: a prompt, then decoding; caches whose changes Thunder loses are refused.
Called by pytest; judged by eager models with dequantized weights, and by eager caches.
"""

import copy
import inspect
import warnings

import pytest
import torch
from oracle import relative_error
from torch import nn

transformers = pytest.importorskip("transformers")

import thunder  # noqa: E402
from tiny_models import tiny_config, tiny_model, tokens  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.cache_utils import StaticLayer  # noqa: E402

from thunder_moe import dequantize_, moe_executor, quantize_, register, rewrite_report  # noqa: E402
from thunder_moe.kernels import slow_paths  # noqa: E402

register("transformers").close()  # its entries, without the reader of compressed-tensors

BF16, FLOAT = torch.bfloat16, torch.float32
STEPS, LENGTH = 8, 24
# The tokens go past the end of a chunk.
CHUNKS = dict(num_hidden_layers=1, layer_types=["chunked_attention"], no_rope_layers=[1], attention_chunk_size=12)
ONE = dict(num_hidden_layers=1)  # Thunder traces a second one as long as the first


def jit(model):
    return thunder.jit(model, executors=[moe_executor])


def by_recipe(model):
    return thunder.compile(model, recipe="hf-transformers", plugins="nvfp4-moe")


def make_cache(config, dtype=FLOAT, static=True):
    """A cache that has its tensors; `static`: in layers that count their tokens in a tensor."""
    cache = StaticCache(config=config, max_cache_len=LENGTH)
    if static:
        cache.layers = [StaticLayer(LENGTH) for _ in cache.layers]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(2, config.num_key_value_heads, width, dtype, torch.device("cpu"))
    return cache


@pytest.mark.parametrize(
    ("name", "changes", "dtype", "compile_", "tolerance"),
    [
        ("llama4", CHUNKS, FLOAT, jit, 1e-4),
        # Rewritten by the executor, not swapped beforehand.
        ("qwen3_moe", ONE, BF16, by_recipe, 0.03),
    ],
    ids=["llama4", "qwen3_moe rewritten"],
)
@pytest.mark.exhaustive  # Thunder traces a whole model twice
def test_decoding_behind_a_prompt_equals_eager_and_compiles_twice(name, changes, dtype, compile_, tolerance):
    config = tiny_config(name)
    for key, value in changes.items():
        setattr(config, key, value)
    ours = dict(experts_implementation="thunder_moe", attn_implementation="thunder_moe_sdpa")
    rewritten = ours if dtype == BF16 else {}
    model = tiny_model(name, dtype, config, **rewritten).requires_grad_(False)
    oracle = dequantize_(quantize_(tiny_model(name, dtype, config)))
    compiled = compile_(model if rewritten else quantize_(model))
    cache, eager_cache = make_cache(config, dtype), make_cache(config, dtype, static=False)
    step = tokens()
    with torch.no_grad():
        for _ in range(1 + STEPS):
            logits = compiled(step, past_key_values=cache, use_cache=True).logits
            expected = oracle(step, past_key_values=eager_cache, use_cache=True).logits
            assert relative_error(logits, expected) < tolerance
            step = expected[:, -1:].argmax(-1)
    assert thunder.cache_misses(compiled) == 2, "the prompt and one step"
    assert cache.get_seq_length() == tokens().shape[1] + STEPS
    assert [entry.decision for entry in rewrite_report(compiled)] == ["nvfp4 + swiglu", "nvfp4"] * 2


class Layer(nn.Module):
    """A decoder layer whose cache goes by position: its keyword depends on transformers' version."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.keyword = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"

    def forward(self, hidden, mask, rotations, cache):
        return self.layer(hidden, attention_mask=mask, position_embeddings=rotations, **{self.keyword: cache})


def test_a_layer_decodes_behind_a_prompt_as_eager_and_compiles_twice():
    config = tiny_config("qwen3_moe", layers=1)
    model = quantize_(tiny_model("qwen3_moe", config=config, attn_implementation="thunder_moe_sdpa"))
    rotary = model.model.rotary_emb
    layer, oracle = (Layer(each.model.layers[0]) for each in (model, dequantize_(copy.deepcopy(model))))
    compiled = jit(layer)
    cache, eager_cache = make_cache(config), make_cache(config, static=False)
    begin = 0
    with torch.no_grad():
        for length in (9, *[1] * STEPS):
            hidden, positions = torch.randn(2, length, 64), torch.arange(begin, begin + length)
            mask = torch.arange(LENGTH) <= positions[None, None, :, None]
            given = hidden, mask, rotary(hidden, positions[None])
            assert relative_error(compiled(*given, cache), oracle(*given, eager_cache)) < 1e-4
            begin += length
    assert thunder.cache_misses(compiled) == 2, "the prompt and one step"
    assert cache.get_seq_length() == 9 + STEPS
    assert [entry.decision for entry in rewrite_report(compiled)] == ["nvfp4 + swiglu", "nvfp4"] * 2


def update(states, cache):
    return cache.update(states, states, 0)[0] * 1


def update_two(states, cache):
    return cache.update(states, states, 0)[0] - cache.update(states, 2 * states, 1)[1]


def states(length):
    return torch.randn(1, 2, length, 16)


@pytest.mark.parametrize("window", [None, 6], ids=["static", "sliding"])
def test_a_cache_is_changed_as_by_eager(window, monkeypatch):
    monkeypatch.setattr(slow_paths, "_warned", set())
    config = tiny_config("mixtral")
    config.sliding_window = window
    first, second = ([StaticCache(config=config, max_cache_len=8) for _ in range(2)] for _ in range(2))
    for cache in first + second:
        cache.early_initialization(1, 2, 16, FLOAT, torch.device("cpu"))
    compiled = jit(update_two)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ours, eager in (first, first, second):  # a prompt, another one after a reset, one with another cache
            ours.reset()
            eager.reset()
            for length in (4, 1, 1, 1, 1):
                new = states(length)
                assert torch.equal(compiled(new, ours), update_two(new, eager))
                for one, other in zip(ours.layers, eager.layers, strict=True):
                    assert torch.equal(one.values, other.values)
                assert ours.get_seq_length() == eager.get_seq_length()
    slow = [warning for warning in caught if "compiles every step" in str(warning.message)]
    assert len(slow) == (window is not None)
    assert thunder.cache_misses(compiled) == (2 if window is None else 5)


def without_tensors():
    return StaticCache(config=tiny_config("mixtral"), max_cache_len=8)


def offloaded():
    cache = without_tensors()
    cache.early_initialization(1, 2, 16, FLOAT, torch.device("cpu"))
    cache.offloading = True  # its streams need a GPU
    return cache


def filled():
    cache = DynamicCache(config=tiny_config("mixtral"))
    update(states(3), cache)
    return cache


REFUSED = {
    without_tensors: r"StaticCache without tensors.*early_initialization\(batch_size",
    offloaded: "StaticCache with offloading.*early_initialization",
    filled: "DynamicCache with DynamicLayer.*StaticCache",
}


@pytest.mark.parametrize(("make", "message"), REFUSED.items(), ids=[make.__name__ for make in REFUSED])
def test_caches_whose_changes_would_be_lost_are_refused(make, message):
    cache = make()
    with pytest.raises(NotImplementedError, match=message):
        jit(update)(states(1), cache)
    cache.offloading = False
    update(states(1), cache)  # eager takes it


def test_a_cache_that_the_model_makes_is_refused():
    def fills_its_own(states):
        return update(states, DynamicCache())

    with pytest.raises(NotImplementedError, match="the model makes a DynamicCache.*use_cache=False"):
        jit(fills_its_own)(states(2))
    fills_its_own(states(2))


def test_other_executors_see_nothing_of_it():
    new = states(2)
    compiled = thunder.jit(update, executors=thunder.get_default_executors())
    assert torch.equal(compiled(new, without_tensors()), update(new, without_tensors()))
