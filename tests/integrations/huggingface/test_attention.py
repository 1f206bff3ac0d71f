"""The attention implementation "thunder_moe_sdpa": numbers against attention in float64, against "sdpa" and "eager".
Called by pytest; its function alone, then whole models, with padding and static caches, eager and compiled.
"""

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from interpreters import fresh_python
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from thunder_moe import fast_generate  # noqa: E402
from thunder_moe.integrations.huggingface import attention  # noqa: E402
from thunder_moe.integrations.huggingface.attention import NAME, grouped_sdpa_attention, grouped_sdpa_mask  # noqa: E402
from thunder_moe.kernels.attention import cudnn_groups_heads, cudnn_groups_heads_of  # noqa: E402

B, KEYS, WIDTH, HEADS = 3, 137, 16, 12
LIMIT = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
SUPPORTED = [name for name in ARCHITECTURES if name != "gpt_oss"]  # whose sinks SDPA does not have


def layer(key_heads):
    module = nn.Module()
    module.num_key_value_groups = HEADS // key_heads
    module.is_causal = True
    return module


def operands(key_heads, queries, dtype=torch.float32, value_width=WIDTH):
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(B, queries, HEADS, WIDTH, generator=generator).transpose(1, 2)  # as a model's projections lie
    key = torch.randn(B, key_heads, KEYS, WIDTH, generator=generator)
    value = torch.randn(B, key_heads, KEYS, value_width, generator=generator)
    return [tensor.to(dtype) for tensor in (query, key, value)]


def boolean_mask(batch, heads, rows):
    """A causal mask with padding on the left, and other lengths for other heads."""
    allowed = torch.arange(KEYS) <= torch.arange(KEYS - 5 - rows, KEYS - 5)[:, None]
    padding = 2 * torch.arange(batch)[:, None] + torch.arange(heads)
    return allowed & (torch.arange(KEYS) >= padding[:, :, None, None])


def in_float64(query, key, value, mask, scale=WIDTH**-0.5):
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.double().repeat_interleave(groups, 1) for tensor in (key, value))
    logits = query.double() @ key.mT * scale
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    return (logits.softmax(-1) @ value).transpose(1, 2)


def error(out, expected):
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def seen(monkeypatch):
    """The arguments of each call of SDPA."""
    calls = []
    sdpa = F.scaled_dot_product_attention

    def spy(query, key, value, **options):
        calls.append((query, key, value, options))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_masks_of_16_bit_queries(dtype):
    """The least float32 is less than 16 bits hold: a row of padding, all masked, has weights as with "sdpa", while
    infinities leave it none."""
    query, key, value = operands(4, 2, dtype)
    allowed = boolean_mask(B, 1, 2)
    allowed[1] = False
    for least in (torch.finfo(torch.float32).min, -1e9, -torch.inf):
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, least)
        out, _ = grouped_sdpa_attention(layer(4), query, key, value, mask)
        expected, _ = sdpa_attention_forward(layer(4), query, key, value, mask)
        assert error(out[::2], expected[::2].double()) < LIMIT[dtype]
        assert torch.equal(out[1] == 0, expected[1] == 0)


@pytest.mark.parametrize("queries", [1, 2, attention._MOST_QUERIES])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize(
    "sizes", [(B, 1, True), (1, 1, True), (B, HEADS, True), (1, HEADS, False), (B, 1, False)], ids=str
)
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_masks(queries, key_heads, sizes, dtype, seen):
    batch, heads, every_query = sizes
    mask = boolean_mask(batch, heads, queries if every_query else 1)
    query, key, value = operands(key_heads, queries, dtype)
    out, weights = grouped_sdpa_attention(layer(key_heads), query, key, value, mask)
    assert weights is None
    assert out.shape == (B, queries, HEADS, WIDTH)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert error(out, in_float64(query, key, value, mask)) < LIMIT[dtype]
    ((_, key_given, value_given, options),) = seen
    assert key_given is key
    assert value_given is value
    if mask.shape[1:3] == (1, 1):
        assert options["attn_mask"] is mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_added_masks_in_any_dtype(queries, dtype, seen):
    query, key, value = operands(4, queries, torch.bfloat16)
    mask = torch.where(boolean_mask(B, 1, queries), torch.randn(B, 1, queries, KEYS), -1e4).to(dtype)
    out, _ = grouped_sdpa_attention(layer(4), query, key, value, mask)
    assert error(out, in_float64(query, key, value, mask.bfloat16())) < LIMIT[torch.bfloat16]
    assert seen[0][3]["attn_mask"].dtype == torch.bfloat16


def test_values_of_another_width_and_a_scale():
    query, key, value = operands(4, 2, value_width=24)
    mask = boolean_mask(B, 1, 2)
    out, _ = grouped_sdpa_attention(layer(4), query, key, value, mask, scaling=0.1)
    assert error(out, in_float64(query, key, value, mask, scale=0.1)) < 1e-6


def test_gradients():
    mask, upstream = boolean_mask(B, 1, 3), torch.randn(B, 3, HEADS, WIDTH)
    gradients = []
    for function in (grouped_sdpa_attention, sdpa_attention_forward):
        inputs = [tensor.requires_grad_() for tensor in operands(4, 3)]
        gradients.append(torch.autograd.grad(function(layer(4), *inputs, mask)[0], inputs, upstream))
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs.double()) < 1e-5


@pytest.mark.parametrize("queries", [1, 3, 100])
def test_where_cudnn_groups_heads(monkeypatch, queries, seen):
    monkeypatch.setattr(attention, "_cudnn_groups_heads", lambda *_: True)
    query, key, value = operands(4, queries)
    mask = boolean_mask(B, HEADS, min(queries, 1 if queries == 100 else queries))
    out, _ = grouped_sdpa_attention(layer(4), query, key, value, mask)
    assert out.is_contiguous()
    assert error(out, in_float64(query, key, value, mask)) < 1e-6
    assert seen[0][1] is key


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 2, 33, 100])
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("how", ["eager", "compiled", "gradients"])
def test_on_cuda(queries, heads, dtype, how):
    mask = boolean_mask(B, heads, queries if queries < 33 else 1).cuda()
    inputs = [tensor.cuda().requires_grad_(how == "gradients") for tensor in operands(4, queries, dtype)]
    function = torch.compile(grouped_sdpa_attention, fullgraph=True) if how == "compiled" else grouped_sdpa_attention
    out, _ = function(layer(4), *inputs, mask)
    expected = in_float64(*inputs, mask)
    assert error(out, expected) < 5 * LIMIT[dtype]
    numbers = torch.zeros(mask.shape, device="cuda", dtype=dtype).masked_fill(~mask, -torch.inf)
    assert error(function(layer(4), *inputs, numbers)[0], expected) < 5 * LIMIT[dtype]
    if how == "gradients":
        upstream = torch.randn_like(out)
        ours = torch.autograd.grad(out, inputs, upstream)
        for one, other in zip(ours, torch.autograd.grad(expected, inputs, upstream.double()), strict=True):
            assert error(one, other.double()) < 20 * LIMIT[dtype]


@pytest.mark.gpu
def test_cudnn_is_asked_on_cuda():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's attention is torch's first choice on SM90")
    query, key, value = (tensor.cuda() for tensor in operands(4, 1, torch.bfloat16))
    mask = boolean_mask(B, 1, 1).cuda()
    assert cudnn_groups_heads(query, key, value, mask)
    sizes = torch.bfloat16, torch.bool, HEADS, 4, WIDTH, WIDTH, 1
    assert cudnn_groups_heads_of("cuda", *sizes)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not cudnn_groups_heads(query, key, value, mask)
    assert not cudnn_groups_heads(query.float(), key.float(), value.float(), mask)
    assert not cudnn_groups_heads_of("cpu", *sizes)


@pytest.mark.parametrize(
    ("queries", "kind"),
    [
        (3, "added float64"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(1, "bool"), (3, "bool"), (1, "added")]),
    ],
)
def test_under_thunder(queries, kind):
    """Thunder's dtypes are not torch's."""
    thunder = pytest.importorskip("thunder")
    query, key, value = operands(4, queries)
    mask = boolean_mask(B, 1, queries)
    if kind != "bool":
        mask = torch.where(mask, 0.5, -1e9).to(torch.float64 if "float64" in kind else torch.float32)
    module = layer(4)
    out = thunder.jit(lambda *given: grouped_sdpa_attention(module, *given)[0])(query, key, value, mask)
    assert error(out, in_float64(query, key, value, mask)) < 1e-6


def test_dropout(seen):
    query, key, value = operands(4, 1)
    grouped_sdpa_attention(layer(4), query, key, value, boolean_mask(B, 1, 1), dropout=0.25)
    assert seen[0][3]["dropout_p"] == 0.25


@pytest.mark.parametrize("case", ["no mask", "not causal", "long", "one head each", "position bias"])
def test_what_is_left_to_sdpa(case):
    queries = attention._MOST_QUERIES + 1 if case == "long" else 3
    key_heads = HEADS if case == "one head each" else 4
    mask = None if case in ("no mask", "not causal") else boolean_mask(B, 1, queries)
    options = {"is_causal": False} if case == "not causal" else {}
    if case == "position bias":
        options["position_bias"] = torch.randn(1, HEADS, queries, KEYS)
    given = (layer(key_heads), *operands(key_heads, queries), mask)
    assert torch.equal(grouped_sdpa_attention(*given, **options)[0], sdpa_attention_forward(*given, **options)[0])


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_refuses_what_sdpa_does_not_have(name):
    with pytest.raises(ValueError, match=f"{name}: .*eager"):
        grouped_sdpa_attention(layer(4), *operands(4, 1), None, **{name: 1.0})


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_refuses_keys_that_the_model_chose(name):
    given = layer(4), *operands(4, 1), boolean_mask(B, 1, 1)
    with pytest.raises(ValueError, match=f'{name}: .*use "sdpa"'):
        grouped_sdpa_attention(*given, **{name: torch.zeros(B, 1, 2, dtype=torch.int32)})
    assert torch.equal(grouped_sdpa_attention(*given, **{name: None})[0], grouped_sdpa_attention(*given)[0])


def test_models_with_an_indexer_refuse_it():
    config = pytest.importorskip("transformers.models.deepseek_v32.configuration_deepseek_v32").DeepseekV32Config(
        vocab_size=32, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=8, index_topk=4, index_n_heads=2, index_head_dim=16, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(ValueError, match='indices: .*use "sdpa"'):  # it would attend to all keys
        model(torch.ones(1, 9, dtype=torch.int64))


@pytest.fixture
def rolls(monkeypatch):
    """Short prompts are rolled, too."""
    monkeypatch.setattr(attention, "_FEWEST_ROLLED", 2)


STARTS, ENDS = torch.tensor([0, 5, 17])[:, None], torch.tensor([61, 70, 50])[:, None]
TEXT = (torch.arange(KEYS) >= STARTS) & (torch.arange(KEYS) < ENDS)


def mask_of_prompt(padding, queries=70, device="cpu", **changes):
    """The mask of a prompt in a static cache."""
    given = dict(
        batch_size=B, q_length=queries, kv_length=KEYS, q_offset=torch.tensor(0, device=device), device=device,
        attention_mask=padding.to(device), mask_function=masking_utils.causal_mask_function, dtype=torch.bfloat16,
    )  # fmt: skip
    return grouped_sdpa_mask(**given, **changes)


@pytest.mark.parametrize("key_heads", [1, 4, HEADS])
@pytest.mark.parametrize("ends", ["padding", "cache"])
def test_padded_prompts(key_heads, ends, rolls, seen):
    """Padding on both sides, or on the left and ones for the rest of the cache."""
    mask = mask_of_prompt(TEXT if ends == "padding" else torch.arange(KEYS) >= STARTS)
    text = TEXT[:, :70] if ends == "padding" else torch.arange(70) >= STARTS
    assert mask.shape == (B, 1, 70, KEYS)
    assert mask.dtype == torch.bool
    padding = torch.arange(70) < STARTS
    inputs = [tensor.requires_grad_() for tensor in operands(key_heads, 70, value_width=24)]
    out, _ = grouped_sdpa_attention(layer(key_heads), *inputs, mask, scaling=0.1)
    assert out.is_contiguous()
    assert out.isfinite().all()
    assert (out[padding] == 0).all()
    expected = in_float64(*inputs, mask | padding[:, None, :, None], scale=0.1)
    assert error(out[text], expected[text]) < LIMIT[torch.float32]
    upstream = torch.randn(out.shape) * (text | padding)[..., None, None]
    ours = torch.autograd.grad(out, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, upstream.double() * text[..., None, None])
    ((_, key, _, options),) = seen
    assert key.shape[2] == 70
    assert options["attn_mask"] is None
    assert options["is_causal"]
    for one, other in zip(ours, theirs, strict=True):
        assert error(one, other.double()) < 1e-6


@pytest.mark.parametrize("inference", [False, True])
def test_only_the_mask_itself_is_known(inference, rolls, seen):
    """Attend with the mask if a model has made another one of it."""
    query, key, value = operands(4, 70)
    with torch.inference_mode() if inference else contextlib.nullcontext():
        mask = mask_of_prompt(torch.arange(KEYS) >= STARTS)

        def is_masked(mask, *inputs, function=grouped_sdpa_attention):
            seen.clear()
            out, _ = function(layer(4), *inputs, mask)
            expected, text = in_float64(*inputs, mask), mask[:, 0].any(-1)
            assert error(out[text], expected[text]) < LIMIT[torch.float32]
            return seen[0][3]["attn_mask"] is not None

        assert not is_masked(mask, query, key, value)
        for other in (mask.clone(), mask[:, :, :, :], mask & True):
            assert is_masked(other, query, key, value)
        assert is_masked(mask[..., :70], query, key[:, :, :70], value[:, :, :70])
        compiled = torch.compile(grouped_sdpa_attention, backend="eager", fullgraph=True)
        assert is_masked(mask, query, key, value, function=compiled)
        assert not is_masked(mask, query, key, value)
        mask[2, :, :, 17:20] = False
        assert is_masked(mask, query, key, value)
    kept = len(attention._ROLLS)
    seen.clear()
    del mask, other
    gc.collect()
    assert len(attention._ROLLS) == kept - 1


PADDED_OTHERWISE = {
    "hole": dict(padding=TEXT & (torch.arange(KEYS) != 20)),
    "a text without tokens": dict(padding=TEXT & torch.tensor([[True], [True], [False]])),
    "short": dict(padding=TEXT[:, :69]),
    "window": dict(padding=TEXT, local_size=69),
    "short prompt": dict(padding=TEXT, queries=60),
    "asked for": dict(padding=TEXT, allow_is_causal_skip=False),
    "offset": dict(padding=TEXT, kv_offset=1),
}


@pytest.mark.parametrize("case", PADDED_OTHERWISE)
def test_other_padded_prompts_have_a_mask(case, monkeypatch):
    monkeypatch.setattr(attention, "_FEWEST_ROLLED", 70)
    mask = mask_of_prompt(**PADDED_OTHERWISE[case])
    assert mask is not None
    assert mask not in attention._ROLLS


def test_windows_as_long_as_a_padded_prompt(rolls):
    assert mask_of_prompt(TEXT, local_size=70) in attention._ROLLS


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_padded_prompts_on_cuda(dtype, gradients, rolls, seen):
    mask, text = mask_of_prompt(TEXT, device="cuda"), TEXT[:, :70].cuda()
    inputs = [tensor.cuda().requires_grad_(gradients) for tensor in operands(4, 70, dtype)]
    out, _ = grouped_sdpa_attention(layer(4), *inputs, mask)
    assert seen[0][3]["attn_mask"] is None
    assert out.isfinite().all()
    expected = in_float64(*inputs, mask | ~text[:, None, :, None])
    assert error(out[text], expected[text]) < 5 * LIMIT[dtype]
    if gradients:
        upstream = torch.randn_like(out) * text[..., None, None]
        ours = torch.autograd.grad(out, inputs, upstream)
        for one, other in zip(ours, torch.autograd.grad(expected, inputs, upstream.double()), strict=True):
            assert error(one, other.double()) < 20 * LIMIT[dtype]


@pytest.mark.parametrize("padding", [None, 11, 30, 40])
@pytest.mark.parametrize("offset", [(17, 0), (torch.tensor(17), 0), (torch.tensor([17]), 0), (23, 5)], ids=str)
def test_masks_of_one_new_token(padding, offset, monkeypatch):
    q_offset, kv_offset = offset
    given = dict(
        batch_size=3, q_length=1, kv_length=30, q_offset=q_offset, kv_offset=kv_offset, attention_mask=None,
        mask_function=masking_utils.causal_mask_function, allow_is_causal_skip=False, dtype=torch.bfloat16,
        use_vmap=False, device="cpu",
    )  # fmt: skip
    if padding is not None:
        given["attention_mask"] = torch.rand(3, padding, generator=torch.Generator().manual_seed(0)) < 0.8
    expected = masking_utils.sdpa_mask(**given)
    monkeypatch.setattr(attention, "sdpa_mask", None)  # not called
    mask = grouped_sdpa_mask(**given)
    assert mask.shape == (3, 1, 1, 30)
    assert mask.dtype == torch.bfloat16
    assert torch.equal(mask, torch.zeros(mask.shape).masked_fill(~expected, -torch.inf).bfloat16())
    assert expected.any()
    assert torch.equal(grouped_sdpa_mask(**given | dict(dtype=torch.float32)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        dict(q_length=4),
        dict(allow_is_causal_skip=True),
        dict(allow_is_bidirectional_skip=True),
        dict(mask_function=masking_utils.sliding_window_causal_mask_function(4)),
        dict(use_vmap=True),
        dict(local_size=4),
    ],
    ids=lambda changes: next(iter(changes)),  # a function's repr has its address, which differs between workers
)
def test_other_masks_are_those_of_sdpa(changes):
    given = dict(
        batch_size=2, q_length=1, kv_length=9, q_offset=5, kv_offset=0, attention_mask=torch.ones(2, 9) > 0,
        mask_function=masking_utils.causal_mask_function, allow_is_causal_skip=False, device="cpu",
    )  # fmt: skip
    mask, expected = (function(**{**given, **changes}) for function in (grouped_sdpa_mask, masking_utils.sdpa_mask))
    assert (mask is None and expected is None) or torch.equal(mask, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_that_the_model_asks_for(compiled):
    """A model that reads its mask itself does not let it be left out."""
    given = dict(batch_size=2, q_length=9, kv_length=9, allow_is_causal_skip=False)
    make = torch.compile(grouped_sdpa_mask, backend="eager", fullgraph=True) if compiled else grouped_sdpa_mask
    assert torch.equal(make(**given), masking_utils.sdpa_mask(**given))


def test_models_without_sdpa_refuse_it():
    with pytest.raises(ValueError, match="GptOss.*scaled_dot_product_attention"):
        tiny_model("gpt_oss").set_attn_implementation(NAME)


def models(name, dtype=torch.float32, layers=2, **changes):
    """A model with each of the attention implementations."""
    found = []
    for implementation in (NAME, "sdpa", "eager"):
        config = tiny_config(name, layers)
        for key, value in changes.items():
            setattr(config, key, value)
        found.append(tiny_model(name, dtype, config=config, attn_implementation=implementation))
        assert found[-1].config._attn_implementation == implementation
    return found


def generate(model, prompt, mask, **options):
    out = model.generate(
        prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_models(name, cache, rolls, seen):
    if (name, cache) == ("llama4", "static") and transformers.__version__.startswith("5.17."):
        pytest.skip("transformers 5.17 fails to make the masks of Llama 4 for a static cache")
    prompt = tokens()
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    ours, sdpa, eager = models(name)
    with torch.no_grad():
        results = [model(prompt, attention_mask=mask).logits[mask.bool()] for model in (ours, sdpa, eager)]
        assert error(results[0], results[1].double()) < 1e-5
        assert error(results[0], results[2].double()) < 1e-5
        seen.clear()
        sequences, logits = generate(ours, prompt, mask, cache_implementation=cache)
        given = {key.shape[1] for _, key, _, options in seen if options.get("attn_mask") is not None}
        assert given == {ours.config.num_key_value_heads}
        for other in (sdpa, eager):
            expected, expected_logits = generate(other, prompt, mask, cache_implementation=cache)
            assert torch.equal(sequences, expected)
            assert error(logits, expected_logits.double()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sliding_windows_in_16_bits(dtype):
    prompt = tokens()
    ours, sdpa, _ = models("mixtral", dtype, sliding_window=4)
    full = tiny_model("mixtral", dtype)
    with torch.no_grad():
        logits = [model(prompt, attention_mask=torch.ones_like(prompt)).logits.double() for model in (ours, sdpa, full)]
    assert error(logits[0], logits[1]) < 2e-2
    assert error(logits[0], logits[2]) > 0.1


OLD = transformers.__version__.startswith("5.7.")
ONES = torch.ones(2, 9, dtype=torch.int64)
PADDED = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
LONG = F.pad(PADDED, (0, 7), value=1)  # for a static cache of 16 tokens
HOLE = torch.tensor([[1] * 4 + [0] * 2 + [1] * 3, [1] * 9])
PACKED = torch.tensor([[*range(4), *range(5)]] * 2)
# (model, changes of its config, arguments, whether its eager and its compiled calls of attention have a mask)
PROMPTS = {
    "dynamic cache": ("qwen3_moe", {}, {}, False, False),
    "no cache": ("qwen3_moe", {}, dict(use_cache=False), False, True),
    "positions": ("qwen3_moe", {}, dict(use_cache=False, position_ids=torch.arange(9)[None]), False, True),
    "packed": ("qwen3_moe", {}, dict(use_cache=False, position_ids=PACKED), True, True),
    "ones": ("qwen3_moe", {}, dict(attention_mask=ONES), False, True),
    "ones behind": ("qwen3_moe", {}, dict(attention_mask=ONES, cache="new"), False, True),
    "left": ("qwen3_moe", {}, dict(attention_mask=PADDED), False, True),
    "left without a cache": ("deepseek_v3", {}, dict(attention_mask=PADDED, use_cache=False), False, True),
    "right": ("qwen3_moe", {}, dict(attention_mask=PADDED.flip(1)), False, True),
    "left and right": ("olmoe", {}, dict(attention_mask=PADDED & PADDED.flip(0, 1)), False, True),
    "left in a static cache": (
        "qwen3_moe",
        {},
        dict(attention_mask=LONG, cache="new"),
        False,
        True,
    ),
    "left in a filled static cache": ("qwen3_moe", {}, dict(attention_mask=PADDED, cache="filled"), True, True),
    "left in a window": ("mixtral", dict(sliding_window=9), dict(attention_mask=PADDED), False, True),
    "left in a shorter window": ("mixtral", dict(sliding_window=8), dict(attention_mask=PADDED), True, True),
    "left in a chunk": ("llama4", dict(attention_chunk_size=9), dict(attention_mask=PADDED), False, True),
    "hole": ("qwen3_moe", {}, dict(attention_mask=HOLE), True, True),
    "short": ("qwen3_moe", {}, dict(attention_mask=ONES[:, :7], cache="new"), True, True),
    "new static cache": ("qwen3_moe", {}, dict(cache="new"), False, False),
    "reset static cache": ("qwen3_moe", {}, dict(cache="reset"), False, True),
    "capacity": ("qwen3_moe", {}, dict(attention_mask=torch.ones(2, 16), cache="reset"), False, True),
    "filled static cache": ("qwen3_moe", {}, dict(cache="filled"), True, True),
    "window": ("mixtral", dict(sliding_window=9), {}, False, False),
    "window without a cache": ("mixtral", dict(sliding_window=9), dict(use_cache=False), False, True),
    "shorter window": ("mixtral", dict(sliding_window=8), {}, True, True),
    "shorter window without a cache": ("mixtral", dict(sliding_window=8), dict(use_cache=False), True, True),
    "chunk": ("llama4", dict(attention_chunk_size=9), {}, False, False),
    "chunk without a cache": ("llama4", dict(attention_chunk_size=9), dict(use_cache=False), False, True),
    "shorter chunk": ("llama4", dict(attention_chunk_size=8), {}, True, True),
}


def with_cache(model, cache=None, **options):
    """Arguments of a call with a static cache of 16 tokens: a new one, one that held a prompt, or one that holds 4."""
    if cache is not None:
        options["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=16)
        if cache != "new":
            model(tokens(length=4), past_key_values=options["past_key_values"])
        if cache == "reset":
            options["past_key_values"].reset()
    return options


def check_prompt(case, seen, compiled):
    name, changes, given, *masked = PROMPTS[case]
    if given.get("cache") and not compiled and OLD:
        pytest.skip("transformers 5.7 asks for a mask with every static cache")
    ours, sdpa, _ = models(name, layers=1, **changes)
    forward = torch.compile(ours, backend="eager", fullgraph=True) if compiled else ours
    with torch.no_grad():
        expected, options = sdpa(tokens(), **with_cache(sdpa, **given)).logits, with_cache(ours, **given)
        seen.clear()
        out = forward(tokens(), **options).logits
    rows = given.get("attention_mask", ONES)[:, :9].bool()
    assert error(out[:, : rows.shape[1]][rows], expected[:, : rows.shape[1]][rows].double()) < 1e-5
    ((_, key, _, options),) = seen
    assert (options["attn_mask"] is not None) == masked[compiled]
    if not masked[compiled]:
        assert (key.shape[2], options["is_causal"]) == (9, True)


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_without_a_mask(case, rolls, seen):
    check_prompt(case, seen, compiled=False)


# Compiled, what the mask holds is not looked at: one case of each kind of padding and cache.
COMPILED_PROMPTS = ["packed", "reset static cache"]
MORE_PROMPTS = [
    "chunk",
    "shorter window",
    "no cache",
    "ones",
    "dynamic cache",
    "left in a static cache",
    "new static cache",
]
MORE_PROMPTS += ["filled static cache", "window", "shorter chunk"]


@pytest.mark.parametrize("case", [*COMPILED_PROMPTS, *others_slow(MORE_PROMPTS, exhaustive=True)])
def test_compiled_prompts_without_a_mask(case, seen):
    check_prompt(case, seen, compiled=True)


# The export below has a window, too.
@pytest.mark.parametrize(
    ("name", "changes"), [("qwen3_moe", {}), *others_slow([("mixtral", dict(sliding_window=9))], exhaustive=True)]
)
@pytest.mark.slow
def test_compiled_prompts_of_any_length(name, changes, seen):
    ours, sdpa, _ = models(name, layers=1, **changes)
    forward = torch.compile(ours, backend="eager", fullgraph=True)
    with torch.no_grad():
        for length in (12, 9, 7):  # the second graph is of any length
            prompt = tokens(length=length)
            expected = sdpa(prompt).logits
            seen.clear()
            assert error(forward(prompt).logits, expected.double()) < 1e-5
            assert all((call["attn_mask"] is None) == (length <= 9 or not changes) for *_, call in seen)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, dict(cache_implementation="static"), dict(custom_generate=fast_generate)],
    ids=["dynamic", "static", "fast_generate"],
)
def test_prompts_of_generate(options, padded, rolls, seen):
    if options and OLD:
        pytest.skip("transformers 5.7 asks for a mask with every static cache")
    ours, sdpa, _ = models("qwen3_moe")
    for _ in range(2):  # the second call of fast_generate finds the cache of the first
        seen.clear()
        how = dict(attention_mask=PADDED if padded else ONES, max_new_tokens=3, do_sample=False)
        out = ours.generate(tokens(), **how, **options)
        assert torch.equal(out, sdpa.generate(tokens(), **how))
        prompts = [(key.shape[2], call["attn_mask"]) for query, key, _, call in seen[:2] if query.shape[2] == 9]
        assert prompts == [(9, None)] * 2


def test_steps_behind_padding_on_the_right(seen):
    ours, sdpa, _ = models("qwen3_moe")
    mask, steps = PADDED.flip(1), []
    positions = mask.sum(1, keepdim=True)
    with torch.no_grad():
        for model in (ours, sdpa):
            cache = model(tokens(), attention_mask=mask).past_key_values
            for step in range(2):
                options = dict(attention_mask=F.pad(mask, (0, step + 1), value=1), position_ids=positions + step)
                steps.append(model(tokens(length=1), past_key_values=cache, **options).logits)
    assert seen[0][3]["attn_mask"] is None
    for step, expected in zip(steps[:2], steps[2:], strict=True):
        assert error(step, expected.double()) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_training_with_padding(name, side, rolls, seen):
    mask, gradients = PADDED if side == "left" else PADDED.flip(1), []
    for model in models(name)[:2]:
        model.train().gradient_checkpointing_enable()
        options = dict(use_cache=False, labels=tokens().masked_fill(mask == 0, -100))
        seen.clear()
        model(tokens(), attention_mask=mask, **options).loss.backward()
        assert {call["attn_mask"] is None for *_, call in seen} == {not gradients}
        assert len(seen) == 4  # each layer twice
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for ours, theirs in zip(*gradients, strict=True):
        assert error(ours, theirs.double()) < 1e-5 or theirs.norm() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{}, dict(use_cache=False), dict(use_cache=False, position_ids=PACKED)], ids=str)
def test_prompts_on_cuda(given, seen):
    given = {name: value.cuda() if name == "position_ids" else value for name, value in given.items()}
    ours, sdpa = (model.cuda() for model in models("qwen3_moe", torch.bfloat16)[:2])
    with torch.no_grad():
        expected = sdpa(tokens().cuda(), **given).logits
        seen.clear()
        out = torch.compile(ours, backend="aot_eager", fullgraph=True)(tokens().cuda(), **given).logits
    assert error(out, expected.double()) < 2e-2
    assert {options.get("attn_mask") is None for *_, options in seen} == {not given}


@pytest.mark.parametrize("window", [9, *others_slow([None, 13], exhaustive=True)])
@pytest.mark.slow
def test_exported_for_any_length(window):
    ours, sdpa, _ = models("mixtral", layers=1, sliding_window=window)
    length = torch.export.Dim("length", min=2, max=100)
    options = dict(kwargs=dict(attention_mask=PADDED, use_cache=False), strict=False)
    shapes = dict(input_ids={1: length}, attention_mask={1: length}, use_cache=None)
    with torch.no_grad():
        exported = torch.export.export(Logits(ours), (tokens(),), **options, dynamic_shapes=shapes).module()
        for size in (2, 9, 12, 70):
            prompt, padding = tokens(length=size), torch.ones(2, size, dtype=torch.int64)
            padding[0, :1] = 0
            rows = padding.bool()
            out = exported(prompt, attention_mask=padding, use_cache=False)[rows]
            assert error(out, sdpa(prompt, attention_mask=padding).logits[rows].double()) < 1e-5


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, use_cache):
        return self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache).logits


def test_chosen_later():
    prompt, model = tokens(), tiny_model("qwen3_moe")
    mask = torch.ones_like(prompt)
    mask[1, :2] = 0
    with torch.no_grad():
        expected = model(prompt, attention_mask=mask).logits
        model.set_attn_implementation(NAME)
        assert error(model(prompt, attention_mask=mask).logits[mask.bool()], expected[mask.bool()].double()) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", *others_slow(["llama4"], exhaustive=True)])
@pytest.mark.exhaustive
def test_compiled_with_a_static_cache(name):
    prompt = tokens()
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    ours, sdpa, _ = models(name, layers=1)
    expected, expected_logits = generate(sdpa, prompt, mask, cache_implementation="static")
    ours.forward = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    sequences, logits = generate(ours, prompt, mask, cache_implementation="static")
    assert torch.equal(sequences, expected)
    assert error(logits, expected_logits.double()) < 1e-5


@pytest.mark.parametrize(
    "act",
    ["import transformers, thunder_moe", "import thunder_moe; thunder_moe.register('transformers')"],
)
@pytest.mark.exhaustive  # test_registration.py looks at these registries after both
def test_is_known_once_registered(act):
    code = (
        f"{act}\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS\n"
        f"print({NAME!r} in ALL_ATTENTION_FUNCTIONS, {NAME!r} in ALL_MASK_ATTENTION_FUNCTIONS)\n"
    )
    assert fresh_python(code).split() == ["True", "True"]
