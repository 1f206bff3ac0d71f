"""The attention of new tokens in graphs of torch.compile: found in transformers' models, left where it is another.
Called by pytest; judged by the same model, uncompiled.
"""

import contextlib
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from tiny_models import tiny_config, tiny_model, tokens
from transformers import StaticCache

import thunder_moe.integrations.huggingface.attention  # noqa: F401  (registers "thunder_moe_sdpa")
from thunder_moe import rewrite_report

pytestmark = pytest.mark.filterwarnings("ignore:thunder_moe rewrote no expert GEMM")
ON_CPU = {"thunder_moe.attention": True, "thunder_moe.inner": "aot_eager"}
MODELS = ON_CPU | {"thunder_moe.inner": "eager"}  # whose graphs take twice as long with aot_eager


def step_of(name, attention, *, layers=2, padded=False, texts=2, **options):
    """Return a decode step, its arguments, and a function that makes another cache behind the same prompt."""
    model = tiny_model(name, config=tiny_config(name, layers), attn_implementation=attention, **options)
    model.requires_grad_(False)
    ids = tokens(texts, 9)
    mask = torch.ones(texts, 32, dtype=torch.long)
    mask[0, :3] = 0
    mask = mask if padded else None

    def step(token, position, cache):
        options = dict(position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True)
        return model(token, **options).logits

    def prompt():
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        return cache

    return step, (ids[:, -1:], torch.full((texts, 1), 9)), prompt


# What comes before the cache: norms of heads and a rotary embedding; an embedding; norms of whole rows and an
# embedding; an embedding of complex numbers; heads of keys and values that differ in width.
FUSED = {"qwen3_moe": True, "olmoe": True, "llama4": True, "deepseek_v3": False, "mixtral": True}


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *zip(FUSED, ["thunder_moe_sdpa", "sdpa"], strict=False),
        *others_slow(product(FUSED, ["sdpa", "thunder_moe_sdpa"]), exhaustive=True),
    ],
)
def test_models(name, attention):
    step, arguments, prompt = step_of(name, attention, layers=1, padded=name == "olmoe")
    compiled = torch.compile(step, backend="thunder_moe", fullgraph=True, options=MODELS)
    caches = prompt(), prompt()
    with torch.no_grad():
        for _ in range(2):
            actual, wanted = compiled(*arguments, caches[0]), step(*arguments, caches[1])
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys)
        torch.testing.assert_close(one.values, other.values)
    decisions = {entry.decision for entry in rewrite_report(compiled).attention}
    assert decisions == {"fused"} if FUSED[name] else "fused" not in decisions


def test_prompts_are_left():
    model = tiny_model("qwen3_moe", config=tiny_config("qwen3_moe", 1), attn_implementation="sdpa")
    model.requires_grad_(False)
    compiled = torch.compile(model, backend="thunder_moe", fullgraph=True, options=MODELS)
    with torch.no_grad():
        compiled(tokens(2, 9), past_key_values=StaticCache(config=tiny_config("qwen3_moe"), max_cache_len=32))
    assert "fused" not in [entry.decision for entry in rewrite_report(compiled).attention]


B, H, D, L = 2, 2, 64, 16


def attend(query, key, value, keys, values, position, mask, *, between=None, causal=False, write=None, **options):
    q, k, v = (each.view(B, 1, -1, D).transpose(1, 2) for each in (query, key, value))
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    seen = None if between is None else between(keys, values)
    if write is not None:
        write(query)
    out = F.scaled_dot_product_attention(q, keys, values, mask, is_causal=causal, enable_gqa=True, **options)
    return out if seen is None else (out, seen)


def arguments(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = (B, 1, 4 * D), (B, 1, H * D), (B, 1, H * D), (B, H, L, D), (B, H, L, D)
    mask = (torch.arange(L) <= 7).expand(B, 1, 1, L)
    return [*(torch.randn(size, generator=generator).to(dtype) for size in sizes), torch.tensor([7]), mask]


def decisions_of(function, given=None):
    """Return what `entries_of` a function decide."""
    return [entry.decision for entry in entries_of(function, given)]


def entries_of(function, given=None):
    """Compile a function, compare it with itself, and return the report's entries of its attention."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="thunder_moe", fullgraph=True, options=ON_CPU)
    results = []
    for call in (compiled, function):
        own = [each.clone() for each in given or arguments()]
        with torch.no_grad():
            results.append((call(*own), own))
    torch.testing.assert_close(*results)
    return rewrite_report(compiled).attention


def test_a_plain_block():
    (entry,) = entries_of(attend)
    assert (entry.decision, entry.reason) == ("fused", "cache and attention are one kernel")


@pytest.mark.parametrize(
    "options",
    [
        dict(between=lambda keys, values: keys.sum()),  # reads the cache that is written later
        dict(between=lambda keys, values: values.add_(1)),
        dict(write=lambda query: query.zero_()),  # a view of it has been taken
    ],
    ids=["read", "written twice", "query changed"],
)
def test_other_programs_are_left(options):
    assert "fused" not in decisions_of(lambda *given: attend(*given, **options))


def test_a_scale_of_zero():
    assert decisions_of(lambda *given: attend(*given, scale=0.0)) == ["fused"]


def test_autocast_is_left():
    def step(*given):
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*given)

    assert "fused" not in decisions_of(step)


def test_heads_that_are_broadcast_are_left():
    def step(query, key, value, keys, values, position, mask):
        q, k, v = (each.view(B, 1, -1, D).transpose(1, 2) for each in (query, key, value))
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return F.scaled_dot_product_attention(q.view(B, 1, 4, D), keys, values, mask)

    assert "fused" not in decisions_of(step)


def test_a_query_in_the_cache_is_left():
    """It is written before it is read."""

    def step(query, key, value, keys, *others):
        return attend(keys[:, :, 7], key, value, keys, *others)

    assert "fused" not in decisions_of(step)


def test_caches_that_overlap_are_left():
    def step(query, key, value, keys, values, position, mask):
        both = torch.cat([keys, values], 1)
        keys, values = both[:, :H], both[:, 1 : 1 + H]
        q, k, v = (each.view(B, 1, -1, D).transpose(1, 2) for each in (query, key, value))
        values.index_copy_(2, position, v)
        keys.index_copy_(2, position, k)
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    assert "fused" not in decisions_of(step)


def embedded(query, key, value, keys, values, position, mask, weight, cos, sin):
    def heads(x, *, norm):
        x, wide = x.view(B, 1, -1, D), x.view(B, 1, -1, D).float()
        if not norm:
            return x.transpose(1, 2)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = (weight * wide.to(x.dtype)).transpose(1, 2)
        return x * cos + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin

    keys.index_copy_(2, position, heads(key, norm=True))
    values.index_copy_(2, position, heads(value, norm=False))
    return F.scaled_dot_product_attention(heads(query, norm=True), keys, values, mask, enable_gqa=True)


@pytest.mark.parametrize(
    ("sizes", "decision"),
    [(((D,), (B,), (B,)), ["fused"]), (((1,), (1,), (1,)), ["fused"]), (((D,), (1,), (B,)), [])],
    ids=["each number", "one weight", "cos of one text"],
)
def test_weights_and_angles_of_other_shapes(sizes, decision):
    weight, cos, sin = (torch.rand(*size, generator=torch.Generator().manual_seed(1)) for size in sizes)
    cos, sin = (each.view(-1, 1, 1, 1).repeat(1, 1, 1, D) for each in (cos, sin))
    assert decisions_of(embedded, [*arguments(), weight, cos, sin]) == decision


def test_a_mask_of_each_head_is_left():
    given = arguments()
    given[-1] = given[-1].expand(B, 4, 1, L).clone()
    assert "fused" not in decisions_of(attend, given)


def test_a_rotary_embedding_of_half_the_width_is_left():
    def rotated(query, key, value, keys, values, position, mask):
        cos, sin = torch.rand(2, B, 1, 1, D // 2, generator=torch.Generator().manual_seed(0)).unbind()
        q = query.view(B, 1, -1, D).transpose(1, 2)
        turned, rest = q[..., : D // 2], q[..., D // 2 :]
        low, high = turned[..., : D // 4], turned[..., D // 4 :]
        q = torch.cat([turned * cos + torch.cat((-high, low), -1) * sin, rest], -1)
        k, v = (each.view(B, 1, -1, D).transpose(1, 2) for each in (key, value))
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    with contextlib.suppress(torch._dynamo.exc.Unsupported):
        assert "fused" not in decisions_of(rotated)


def test_gradients_are_left():
    given = [each.requires_grad_(each.is_floating_point()) for each in arguments()[:3]] + arguments()[3:]
    compiled = torch.compile(attend, backend="thunder_moe", fullgraph=True, options=ON_CPU)
    compiled(*given[:3], *(each.clone() for each in given[3:]))
    assert "fused" not in [entry.decision for entry in rewrite_report(compiled).attention]
