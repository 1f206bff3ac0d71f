"""The torch.compile backend on attention that repeats keys and values: what is rewritten, its numbers, what is left.
Called by pytest; judged by attention in float64, by the report, and by the sizes that SDPA is given.
"""

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow

from thunder_moe import RewriteWarning, rewrite_report
from thunder_moe.compilers.dynamo import attention as rewrite

B, HEADS, KEY_HEADS, KEYS, WIDTH = 3, 8, 2, 21, 16
GROUP = HEADS // KEY_HEADS
pytestmark = pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")


def by_expand(keys):
    batch, heads, length, width = keys.shape
    keys = keys[:, :, None, :, :].expand(batch, heads, GROUP, length, width)
    return keys.reshape(batch, heads * GROUP, length, width)


def by_unsqueeze(keys):
    batch, heads, length, width = keys.shape
    return keys.unsqueeze(2).expand(-1, -1, GROUP, -1, -1).reshape(batch, heads * GROUP, length, width)


def by_interleave(keys):
    return torch.repeat_interleave(keys, GROUP, dim=1)


def by_interleave_method(keys):
    return keys.repeat_interleave(repeats=GROUP, dim=-3)


def attention(repeat=by_expand, **options):
    def forward(query, keys, values, mask=None):
        out = F.scaled_dot_product_attention(query, repeat(keys), repeat(values), attn_mask=mask, **options)
        return out.transpose(1, 2).reshape(query.shape[0], -1)

    return forward


def operands(dtype=torch.float32, tokens=1, batch=B, keys=KEYS):
    generator = torch.Generator().manual_seed(0)
    sizes = (batch, tokens, HEADS, WIDTH), (batch, KEY_HEADS, keys, WIDTH), (batch, KEY_HEADS, keys, WIDTH)
    query, key, value = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return query.transpose(1, 2), key, value


def in_float64(query, key, value, mask=None):
    key, value = (tensor.double().repeat_interleave(GROUP, 1) for tensor in (key, value))
    logits = query.double() @ key.mT * WIDTH**-0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    return (logits.softmax(-1) @ value).transpose(1, 2).flatten(1)


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


def compiled(function, wanted=True, inner="aot_eager", **options):
    own = {"thunder_moe.inner": inner, "thunder_moe.attention": wanted}
    return torch.compile(function, backend="thunder_moe", fullgraph=True, options=own, **options)


def decision(function):
    (entry,) = rewrite_report(function).attention
    return entry.decision, entry.reason


@pytest.fixture
def key_heads(monkeypatch):
    """Return the number of key heads of each SDPA that the inner compiler "counting" gets to see."""
    seen = []

    def counting(gm, inputs):
        for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
            seen.append(node.args[1].meta["example_value"].shape[1])
        return gm

    torch._dynamo.register_backend(counting, name="counting")
    yield seen
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")


def mask_of(kind, batch=B, keys=KEYS):
    generator = torch.Generator().manual_seed(1)
    heads = HEADS if kind.startswith("heads") else 1
    allowed = torch.rand(batch, heads, 1, keys, generator=generator) < 0.7
    allowed[..., 0] = True
    if kind.endswith("added"):
        return torch.where(allowed, torch.randn(allowed.shape, generator=generator), -1e9)
    return allowed[:1] if kind == "one batch" else allowed


@pytest.mark.covering(1)
@pytest.mark.parametrize("repeat", [by_expand, by_unsqueeze, by_interleave, by_interleave_method])
@pytest.mark.parametrize("kind", ["bool", "one batch", "heads", "added", "heads added", None])
def test_numbers(repeat, kind, key_heads):
    given = (*operands(), None if kind is None else mask_of(kind))
    function = compiled(attention(repeat), inner="counting")
    assert error(function(*given), in_float64(*given)) < 1e-6
    assert key_heads == [KEY_HEADS]
    assert decision(function) == ("grouped", "4 heads read the same keys")


@pytest.mark.parametrize("inner", ["aot_eager", *others_slow(["inductor"], exhaustive=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inner_compilers_in_16_bits(inner, dtype):
    given = (*operands(dtype), mask_of("bool"))
    function = compiled(attention(), inner=inner)
    assert error(function(*given), in_float64(*given)) < 5e-3
    assert decision(function)[0] == "grouped"


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", ["bool", "heads added"])
def test_where_cudnn_groups_heads(monkeypatch, tokens, kind, key_heads):
    monkeypatch.setattr(rewrite, "_groups_by_cudnn", lambda *_: True)
    given = (*operands(tokens=tokens), mask_of(kind))
    function = compiled(attention(), inner="counting")
    assert error(function(*given), in_float64(*given)) < 1e-6
    assert key_heads == [KEY_HEADS]
    assert decision(function)[0] == "grouped"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("kind", ["bool", "heads", "added", "heads added"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_cuda(tokens, kind, dtype):
    mask = mask_of(kind)
    given = [
        tensor.cuda() for tensor in (*operands(dtype, tokens), mask if mask.dtype == torch.bool else mask.to(dtype))
    ]
    function = compiled(attention(), wanted=None, inner="inductor")
    with torch.no_grad():
        assert error(function(*given), in_float64(*given)) < (1e-5 if dtype == torch.float32 else 5e-3)
    in_16_bits = dtype != torch.float32 and torch.cuda.get_device_capability() == (9, 0)
    assert decision(function)[0] == ("grouped" if in_16_bits or tokens == 1 else "repeated")


def test_dynamic_sizes():
    function = compiled(attention())
    for batch, keys in ((3, 21), (5, 40), (2, 33)):
        given = (*operands(batch=batch, keys=keys), mask_of("bool", batch, keys))
        for tensor, dims in zip(given, (0, (0, 2), (0, 2), (0, 3)), strict=True):
            torch._dynamo.mark_dynamic(tensor, dims)
        assert error(function(*given), in_float64(*given)) < 1e-6
    (entry,) = rewrite_report(function).attention
    assert (entry.decision, entry.keys) == ("grouped", None)


def test_gradients():
    mask, gradients = mask_of("bool"), []
    for function in (compiled(attention()), attention()):
        inputs = [tensor.requires_grad_() for tensor in operands()]
        gradients.append(torch.autograd.grad(function(*inputs, mask).square().sum(), inputs))
    for ours, expected in zip(*gradients, strict=True):
        assert error(ours, expected.double()) < 1e-5


def test_a_cache_that_is_written_before_and_after():
    def step(query, keys, values, mask, at):
        keys.index_copy_(2, at, query[:, ::GROUP])
        out = F.scaled_dot_product_attention(query, by_expand(keys), by_expand(values), attn_mask=mask)
        keys.mul_(2)
        return out.transpose(1, 2).flatten(1)

    at = torch.tensor([4])
    ours, expected = ([tensor.clone() for tensor in operands()] for _ in range(2))
    function, mask = compiled(step), mask_of("bool")
    out = function(*ours, mask, at)
    expected[1].index_copy_(2, at, expected[0][:, ::GROUP])
    assert error(out, in_float64(*expected, mask)) < 1e-6
    assert torch.equal(ours[1], 2 * expected[1])
    assert decision(function)[0] == "grouped"


def change_between(query, keys, values, mask):
    many, all_values = by_expand(keys), by_expand(values)
    values.mul_(2)
    return F.scaled_dot_product_attention(query, many, all_values, attn_mask=mask).transpose(1, 2).flatten(1)


def added_to(query, keys, values, mask):
    many = by_expand(keys)
    many.add_(1)
    return F.scaled_dot_product_attention(query, many, by_expand(values), attn_mask=mask).transpose(1, 2).flatten(1)


def causal(query, keys, values, mask):
    return attention(is_causal=True)(query, keys, values)


def other_heads(query, keys, values, mask):
    keys = keys[:, :, None].expand(B, KEY_HEADS, GROUP, KEYS, WIDTH).transpose(1, 2)
    return F.scaled_dot_product_attention(query, keys.reshape(B, HEADS, KEYS, WIDTH), by_expand(values))


LEFT = {
    "changed": (change_between, "the values may be changed in place by mul_"),
    "copy changed": (added_to, "the repeated keys may be changed in place by "),
    "causal": (causal, "it is causal"),
    "dropout": (attention(dropout_p=0.5), "at random"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case):
    program, reason = LEFT[case]
    given, expected = ([*operands(), mask_of("bool")] for _ in range(2))
    function = compiled(program)
    out = function(*given)
    if case != "dropout":
        assert torch.equal(out, program(*expected))
    assert decision(function)[0] == "repeated"
    assert reason in decision(function)[1]


def test_more_than_one_token_is_left():
    given = operands(tokens=2)
    function = compiled(attention())
    assert torch.equal(function(*given), attention()(*given))
    assert decision(function) == ("repeated", "it has more than one new token, and is not cuDNN's")


def test_other_orders_of_heads_are_no_repetition():
    function = compiled(other_heads)
    given = (*operands(), None)
    assert torch.equal(function(*given), other_heads(*given))
    assert rewrite_report(function).attention == ()


def test_grouping_of_its_own_is_left():
    def program(query, keys, values):
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    function = compiled(program)
    assert torch.equal(function(*operands()), program(*operands()))
    assert rewrite_report(function).attention == ()


def test_a_mask_of_another_dtype_is_left():
    """cuDNN of torch 2.11 takes a float32 mask of 16-bit queries for one of 16 bits."""
    function = compiled(attention())
    given = (*operands(torch.bfloat16), mask_of("added"))
    assert torch.equal(function(*given), attention()(*given))
    assert decision(function) == ("repeated", "its mask is torch.float32, the query torch.bfloat16")


def test_off_and_on_by_device():
    given = (*operands(), mask_of("bool"))
    expected = attention()(*given)
    off, default = (compiled(attention(), wanted) for wanted in (False, None))
    assert torch.equal(off(*given), expected)
    assert rewrite_report(off).attention == ()
    assert torch.equal(default(*given), expected)
    assert decision(default) == ("repeated", "it runs on cpu")


def test_report_prints_it():
    function = compiled(attention())
    function(*operands(), mask_of("bool"))
    assert "8 / 2 x 16" in str(rewrite_report(function))
    assert "grouped" in str(rewrite_report(function))
    assert "test_repeated_attention.py:" in str(rewrite_report(function))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thunder_moe.attention": "yes"}, "got 'yes', wanted True, False or None"),
        ({"thunder_moe.attention": True, "thunder_moe.inner": "thunder"}, "got True with the inner compiler 'thunder'"),
        ({"thunder_moe.attentoin": True}, "got 'thunder_moe.attentoin'"),
    ],
)
def test_options(options, message):
    with pytest.raises(Exception, match=message):
        torch.compile(attention(), backend="thunder_moe", options=options)(*operands())
