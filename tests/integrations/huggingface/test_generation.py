"""fast_generate: the tokens of transformers' own loop for each way to end a text, and the reason where that loop runs.
Called by pytest; calls thunder_moe and transformers. tests/gpu/test_gpu_generation.py has the CUDA graphs.
"""

import contextlib
import functools
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from tiny_models import tiny_config, tiny_model
from transformers import (
    CompileConfig,
    DynamicCache,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from thunder_moe import fast_generate, quantize_
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.integrations.huggingface import generation
from thunder_moe.ops.scaled_mm import dense_operands

PROMPT = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7], [0, 9, 8, 7, 6, 5, 4]])
PADDED = (PROMPT != 0).long()


@pytest.fixture(scope="module")
def model():
    model = quantize_(tiny_model("qwen3_moe", torch.float32)).eval()
    model.generation_config.pad_token_id = 0
    return model


def both(model, *args, seed=0, **options):
    results = []
    for generate in ({}, {"custom_generate": fast_generate}):
        torch.manual_seed(seed)
        results.append(model.generate(*args, **options, **generate))
    return results


OPTIONS = {
    "greedy": {},
    "penalty": dict(repetition_penalty=1.5),
    "sampled": dict(do_sample=True, temperature=0.7, top_k=20, top_p=0.9),
    "min_p": dict(do_sample=True, min_p=0.05),
    "ends": dict(eos_token_id=[*range(10, 20)]),
    "not_before": dict(eos_token_id=[*range(1, 64, 2)], min_new_tokens=6),
    "not_shorter": dict(eos_token_id=[*range(1, 64, 2)], min_length=10),
    "several": dict(do_sample=True, num_return_sequences=2),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_the_stock_loop(model, name, padded, caplog):
    options = dict(do_sample=False) | OPTIONS[name] | (dict(attention_mask=PADDED) if padded else {})
    stock, ours = both(model, PROMPT, max_new_tokens=20, **options)
    assert torch.equal(ours, stock)
    assert "own loop" not in caplog.text


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "llama4"])
def test_models_with_windows_and_chunks(name):
    model = quantize_(tiny_model(name, torch.float32)).eval()
    model.generation_config.pad_token_id = 0
    stock, ours = both(model, PROMPT, attention_mask=PADDED, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, stock)


def test_texts_end_at_different_lengths(model):
    free = model.generate(PROMPT, attention_mask=PADDED, max_new_tokens=24, do_sample=False)[:, PROMPT.shape[1] :]
    ends = [int(free[0, 2]), int(free[1, 9])]
    stock, ours = both(model, PROMPT, attention_mask=PADDED, max_new_tokens=24, do_sample=False, eos_token_id=ends)
    assert torch.equal(ours, stock)
    assert (ours[:, -1] == 0).any()


def test_a_cache_serves_prompts_of_other_lengths(model):
    for length in (7, 3, 6, 1):
        stock, ours = both(model, PROMPT[1:2, :length], max_new_tokens=9, do_sample=False)
        assert torch.equal(ours, stock)


def test_a_vocabulary_that_changes():
    model = tiny_model("qwen3_moe", torch.float32).eval()
    for size in (None, 80, 50):
        if size is not None:
            model.resize_token_embeddings(size)
        stock, ours = both(model, PROMPT, max_new_tokens=6, do_sample=False, repetition_penalty=1.5)
        assert torch.equal(ours, stock)


def test_nan_of_an_earlier_prompt_are_gone():
    model = tiny_model("qwen3_moe", torch.float32).eval()
    wanted = model.generate(PROMPT[1:2, :3], max_new_tokens=9, do_sample=False)
    embedding = model.get_input_embeddings().weight.data
    before = embedding.clone()
    embedding[7] = torch.nan
    model.generate(PROMPT[1:2], max_new_tokens=9, do_sample=False, custom_generate=fast_generate)
    embedding.copy_(before)
    ours = model.generate(PROMPT[1:2, :3], max_new_tokens=9, do_sample=False, custom_generate=fast_generate)
    assert torch.equal(ours, wanted)


class Ends(StoppingCriteria):
    """Ends a text behind a token, as a stop string does: the graph knows nothing of it."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores, **options):
        return input_ids[:, -1] == self.token


def test_other_criteria(model):
    free = model.generate(PROMPT, max_new_tokens=16, do_sample=False)
    criteria = StoppingCriteriaList([Ends(int(free[1, 12]))])
    options = dict(max_new_tokens=16, do_sample=False, stopping_criteria=criteria)
    stock, ours = both(model, PROMPT[1:2], **options)
    assert torch.equal(ours, stock)
    assert ours.shape[1] < free.shape[1]
    stock, ours = both(model, PROMPT, eos_token_id=[63], **options)
    assert torch.equal(ours, stock)


def test_a_shorter_length_among_the_criteria(model):
    criteria = StoppingCriteriaList([MaxLengthCriteria(PROMPT.shape[1] + 3)])
    stock, ours = both(model, PROMPT, max_new_tokens=16, do_sample=False, stopping_criteria=criteria)
    assert torch.equal(ours, stock)
    assert ours.shape[1] == PROMPT.shape[1] + 3


def test_max_time(model):
    ours = model.generate(PROMPT, max_new_tokens=16, do_sample=False, max_time=1e-9, custom_generate=fast_generate)
    assert ours.shape[1] == PROMPT.shape[1] + 1


class Streamer:
    def __init__(self) -> None:
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens.append(value.clone())

    def end(self):
        self.ended = True


def test_streamers(model):
    """They receive what generate gives a streamer of its own, the prompt first."""
    stock, ours = Streamer(), Streamer()
    generate = functools.partial(fast_generate, streamer=ours)  # generate(streamer=) does not reach a function
    for options in ({}, dict(no_repeat_ngram_size=2)):  # the last one runs in transformers' loop
        options = dict(max_new_tokens=5, do_sample=False) | options
        model.generate(PROMPT[1:2], streamer=stock, **options)
        model.generate(PROMPT[1:2], custom_generate=generate, **options)
        assert ours.ended
        assert len(ours.tokens) == len(stock.tokens)
        assert all(torch.equal(*pair) for pair in zip(ours.tokens, stock.tokens, strict=True))


def test_a_streamer_that_generates(model):
    """Its call is like the one that it is in, and has a cache of its own."""
    other, inner = PROMPT[1:2].flip(1), []

    class Generates(Streamer):
        def put(self, value):
            super().put(value)
            if len(self.tokens) == 4:
                inner.append(model.generate(other, max_new_tokens=8, do_sample=False, custom_generate=fast_generate))

    generate = functools.partial(fast_generate, streamer=Generates())
    ours = model.generate(PROMPT[1:2], max_new_tokens=8, do_sample=False, custom_generate=generate)
    for made, prompt in ((ours, PROMPT[1:2]), (inner[0], other)):
        assert torch.equal(made, model.generate(prompt, max_new_tokens=8, do_sample=False))


def test_calls_in_and_out_of_inference_mode():
    model = quantize_(tiny_model("qwen3_moe", torch.float32)).eval()
    wanted = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            ours = model.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=fast_generate)
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(num_beams=2), "the generation mode is beam_search"),
        (dict(no_repeat_ngram_size=2), "NoRepeatNGramLogitsProcessor is not known here"),
        (dict(use_cache=False), "use_cache=False"),
        (dict(encoder_repetition_penalty=1.2), "EncoderRepetitionPenaltyLogitsProcessor is not known here"),
    ],
)
def test_the_stock_loop_runs_what_is_not_known(model, options, reason, caplog):
    stock, ours = both(model, PROMPT, max_new_tokens=4, do_sample=False, **options)
    assert torch.equal(ours, stock)
    assert f"fast_generate: transformers' own loop runs: {reason}" in caplog.text


def test_a_cache_of_the_caller_holds_the_tokens(model, caplog):
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    stock, ours = (
        model.generate(PROMPT, max_new_tokens=4, do_sample=False, past_key_values=cache, **options)
        for cache, options in zip(caches, ({}, {"custom_generate": fast_generate}), strict=True)
    )
    assert torch.equal(ours, stock)
    if not hasattr(caches[0], "_is_user_defined"):
        pytest.skip("this transformers does not mark caches of the caller's")
    assert caches[1].get_seq_length() == caches[0].get_seq_length() > 0
    assert "the call gets a cache, which is to hold its tokens" in caplog.text


def test_a_cache_of_another_kind_is_not_replaced(model, monkeypatch, caplog):
    """`generate` makes an offloaded cache before it calls a function, which needs a GPU: the test's makes none."""
    stock = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", lambda *args, **options: None)
    options = dict(max_new_tokens=4, do_sample=False, cache_implementation="offloaded")
    ours = model.generate(PROMPT, custom_generate=fast_generate, **options)
    assert torch.equal(ours, stock)
    assert "cache_implementation is 'offloaded'" in caplog.text


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="wants a group of processes")
def test_processes_that_share_weights_make_the_same_steps(caplog):
    model = tiny_model("qwen3_moe", torch.float32).eval()
    stock = model.generate(PROMPT, max_new_tokens=4, do_sample=False)
    model._is_fsdp_managed_module = True  # as transformers marks a model that FSDP shards
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = model.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=fast_generate)
    finally:
        dist.destroy_process_group()
    assert torch.equal(ours, stock)
    assert "several processes generate in step (synced_gpus)" in caplog.text


def test_more_than_tokens(model, caplog):
    stock, ours = both(model, PROMPT, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, stock.sequences)
    assert "return_dict_in_generate=True asks for more than the tokens" in caplog.text


def test_no_room_for_tokens(model):
    ours = model.generate(PROMPT, max_length=8, do_sample=False, custom_generate=fast_generate)
    assert ours.shape == (3, 8)


def one_layer(name):
    """To compile: a second one takes as long to trace."""
    return tiny_model(name, torch.float32, tiny_config(name, layers=1))


def test_a_compiled_step_sees_changes_of_the_model():
    model = one_layer("qwen3_moe").eval()
    options = dict(max_new_tokens=6, do_sample=False, compile_config=CompileConfig(backend="eager", mode=None))
    before, ours = both(model, PROMPT, **options)
    assert torch.equal(ours, before)
    quantize_(model)
    model.model.layers[0].mlp.experts.down_proj.global_scale.mul_(-3)
    after, ours = both(model, PROMPT, **options)
    assert torch.equal(ours, after)
    assert not torch.equal(after, before)


def caches():
    gc.collect()
    return sum(isinstance(each, StaticCache) for each in gc.get_objects())


def test_compiled_steps_of_any_number():
    """torch's limit is of one step, and nothing that it keeps holds a cache."""
    model, before = one_layer("mixtral").eval(), caches()
    options = dict(max_new_tokens=4, do_sample=False, compile_config=CompileConfig(backend="eager", mode=None))
    with torch._dynamo.config.patch(recompile_limit=1):
        for texts in (1, 2):
            stock = model.generate(PROMPT[1:2].expand(texts, -1), max_new_tokens=4, do_sample=False)
            ours = model.generate(PROMPT[1:2].expand(texts, -1), custom_generate=fast_generate, **options)
            assert torch.equal(ours, stock)
    assert caches() == before + 2
    del model
    assert caches() == before


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_old_objects_are_not_collected_while_the_step_compiles(fails):
    found, before = [], gc.get_threshold()

    def backend(graph, inputs):
        found.append(gc.get_threshold())
        if fails:
            raise ZeroDivisionError
        return graph

    model = one_layer("mixtral").eval()
    options = dict(do_sample=False, compile_config=CompileConfig(backend=backend, mode=None))
    with pytest.raises(Exception, match="ZeroDivisionError") if fails else contextlib.nullcontext():
        model.generate(PROMPT[1:2], max_new_tokens=3, custom_generate=fast_generate, **options)
    assert found == [(*before[:2], 2**31 - 1)]
    assert gc.get_threshold() == before


def test_memory_goes_with_the_model():
    model = quantize_(tiny_model("qwen3_moe", torch.float32)).eval()
    model.generate(PROMPT, max_new_tokens=3, do_sample=False, custom_generate=fast_generate)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("fills", [False, True])
def test_inductors_kernels_overlap_where_none_is_a_fill(fills, monkeypatch):
    """A kernel that reads nothing does not wait for the kernel in front."""
    weight = dense_operands(quantize(torch.randn(1, 64, 64)))
    found = []

    def step(x, length):
        y = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_mm(x, *weight)
        mask = y.new_zeros(1, 64).masked_fill_(torch.arange(64) > length, -1.0)
        return y + mask + (y.new_zeros(64) if fills else 0)

    def backend(graph, inputs):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
            found.append(generation._options_of(graph))
        return graph

    torch.compile(step, backend=backend, fullgraph=True)(torch.randn(1, 64), torch.tensor(3))
    assert found == [{} if fills else {"triton.enable_pdl": True}]
