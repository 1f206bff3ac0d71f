"""fast_generate on a GPU: the compiled step in a CUDA graph gives the tokens of the stock loop, and is used again.
Called by pytest -m gpu; calls thunder_moe and transformers. Attention is the plain one, whose sums have one order.
"""

import pytest
import torch
from tiny_models import tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from thunder_moe import fast_generate, quantize_

pytestmark = pytest.mark.gpu

PROMPT = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
OPTIONS = {
    "greedy": dict(do_sample=False),
    "penalty": dict(do_sample=False, repetition_penalty=1.5),
    "ends": dict(do_sample=False, eos_token_id=[*range(10, 20)]),
}


@pytest.fixture(scope="module")
def model():
    model = quantize_(tiny_model("qwen3_moe", torch.float32).cuda()).eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_the_stock_loop(model, name):
    prompt, mask = PROMPT.cuda(), (PROMPT != 0).long().cuda()
    options = dict(max_new_tokens=24, attention_mask=mask, **OPTIONS[name])
    with sdpa_kernel(SDPBackend.MATH):
        stock = model.generate(prompt, **options)
        for _ in range(2):
            assert torch.equal(model.generate(prompt, custom_generate=fast_generate, **options), stock)


def test_other_prompts_compile_nothing(model):
    with sdpa_kernel(SDPBackend.MATH):
        for length in (5, 3, 4):
            prompt = PROMPT[1:, :length].cuda()
            compiled = sum(torch._dynamo.utils.counters["stats"].values())
            ours = model.generate(prompt, max_new_tokens=12, do_sample=False, custom_generate=fast_generate)
            assert length == 5 or sum(torch._dynamo.utils.counters["stats"].values()) == compiled
            assert torch.equal(ours, model.generate(prompt, max_new_tokens=12, do_sample=False))


def test_draws_differ_between_replays(model):
    options = dict(max_new_tokens=40, do_sample=True, temperature=5.0, custom_generate=fast_generate)
    first, second = (model.generate(PROMPT[1:].cuda(), **options) for _ in range(2))
    assert not torch.equal(first, second)
    assert len(set(first[0].tolist())) > 5


def test_a_model_that_changes_is_captured_again():
    model = quantize_(tiny_model("qwen3_moe", torch.float32).cuda()).eval()
    prompt, options, seen = PROMPT[1:].cuda(), dict(max_new_tokens=12, do_sample=False), []
    with sdpa_kernel(SDPBackend.MATH):
        changes = lambda: None, lambda: model.lm_head.weight.data.neg_(), lambda: quantize_(model, linears="*_proj")
        for change in changes:
            change()
            seen.append(model.generate(prompt, custom_generate=fast_generate, **options))
            assert torch.equal(seen[-1], model.generate(prompt, **options))
        weight = model.model.embed_tokens.weight
        weight.data = weight.data.flip(0).contiguous()
        seen.append(model.generate(prompt, custom_generate=fast_generate, **options))
        assert torch.equal(seen[-1], model.generate(prompt, **options))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[2], seen[3])
