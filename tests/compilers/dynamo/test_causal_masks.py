"""The torch.compile backend on attention with a causal mask: which masks become ``is_causal=True``, and the numbers.
Called by pytest; judged by attention with the mask itself, in eager mode.
"""

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import RewriteWarning, register

B, HEADS, T, WIDTH = 2, 3, 7, 8
pytestmark = pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")


def causal(query, given):
    places = torch.arange(query.shape[2])
    return (places[None, :] <= places[:, None]).expand(B, 1, -1, -1)


def tril(query, given):
    return torch.ones(B, 1, T, T, dtype=torch.bool).tril()


def one_text(query, given):
    """As transformers finds packed texts, without any."""
    places = torch.arange(T).unsqueeze(0)
    texts = (torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return causal(query, given) & (texts[:, None, :, None] == texts[:, None, None, :])


def wide_window(query, given):
    places = torch.arange(T)
    return causal(query, given) & (places[None, :] > places[:, None] - T)


def window(query, given):
    places = torch.arange(T)
    return causal(query, given) & (places[None, :] > places[:, None] - (T - 1))


def bidirectional(query, given):
    return torch.ones(B, 1, T, T, dtype=torch.bool)


def of_an_input(query, given):
    return causal(query, given) & given[:, None, None]


def of_a_random_number(query, given):
    return causal(query, given) & (torch.rand(T, T) < 2)


def changed(query, given):
    mask = torch.ones(B, 1, T, T, dtype=torch.bool).tril()
    mask[:, 0, 1:, 0].data.copy_(given[:, 1:])  # .data hides the change from the tensor's version
    return mask


def added(query, given):
    return torch.zeros(B, 1, T, T).masked_fill(~causal(query, given), -torch.inf)


MASKS = [causal, tril, one_text, wide_window]
OTHERS = [window, bidirectional, of_an_input, of_a_random_number, changed, added]


def operands(length=T):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, B, HEADS, length, WIDTH, generator=generator)
    return query, key, value, torch.arange(T) + torch.tensor([[0], [1]]) > 0


@pytest.fixture
def seen():
    """Return (has a mask, is_causal) of each SDPA that the inner compiler "counting" gets to see."""
    found = []

    def counting(gm, inputs):
        for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
            found.append((node.kwargs.get("attn_mask") is not None, node.kwargs.get("is_causal", False)))
        return gm

    torch._dynamo.register_backend(counting, name="counting")
    yield found
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")


def check(make, seen, expected, wanted=True, **options):
    def attention(query, key, value, given):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=make(query, given), **options)

    own = {"thunder_moe.inner": "counting", "thunder_moe.attention": wanted}
    function = torch.compile(attention, backend="thunder_moe", fullgraph=True, options=own)
    for flip in (False, True):  # another value of the input
        *qkv, given = operands()
        given = given.flip(1) if flip else given
        assert torch.allclose(function(*qkv, given), attention(*qkv, given), atol=1e-6)
    assert seen == [expected]


@pytest.mark.parametrize("make", MASKS)
def test_causal_masks_are_taken(make, seen):
    check(make, seen, (False, True))


@pytest.mark.parametrize("make", OTHERS)
def test_other_masks_stay(make, seen):
    check(make, seen, (True, False))


@pytest.mark.parametrize("wanted", [False, None])
def test_the_option(wanted, seen):
    check(causal, seen, (True, False), wanted=wanted)


def test_a_scale(seen):
    check(causal, seen, (False, True), scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["thunder_moe_sdpa", *others_slow(["sdpa"], exhaustive=True)])
def test_a_model_of_transformers(attention, seen):
    """transformers makes a mask for a prompt without a cache, because position_ids may pack texts."""
    pytest.importorskip("transformers")
    register("transformers").close()  # its entries, without the reader of compressed-tensors
    model = tiny_model("qwen3_moe", config=tiny_config("qwen3_moe", 1), attn_implementation=attention)
    model.requires_grad_(False)
    own = {
        "thunder_moe.inner": "counting",
        "thunder_moe.attention": True,
        "thunder_moe.format": lambda gemm, name: None,
    }
    forward = torch.compile(model, backend="thunder_moe", fullgraph=True, options=own)
    prompt = tokens(length=70)  # "thunder_moe_sdpa" rearranges the mask of up to 64
    with torch.no_grad():
        out, expected = (each(prompt, use_cache=False).logits for each in (forward, model))
        packed = torch.tensor([[*range(30), *range(40)]] * 2)
        outs = [each(prompt, use_cache=False, position_ids=packed).logits for each in (forward, model)]
    assert torch.allclose(out, expected, atol=1e-5)
    assert torch.allclose(*outs, atol=1e-5)
    assert seen == [(False, True), (True, False)]


def test_lengths_that_vary(seen):

    def attention(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=causal(query, None))

    own = {"thunder_moe.inner": "counting", "thunder_moe.attention": True}
    function = torch.compile(attention, backend="thunder_moe", fullgraph=True, dynamic=True, options=own)
    for length in (5, 9):
        *qkv, _ = operands(length)
        assert torch.allclose(function(*qkv), attention(*qkv), atol=1e-6)
    assert seen == [(True, False)]
