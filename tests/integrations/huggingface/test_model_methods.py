"""Methods of transformers models that 4-bit modules concern: new tokens, numbers of parameters, casts.
Called by pytest; compares with the same model in 16 bits, or after `dequantize_`.
"""

import copy

import pytest
import torch
from oracle import relative_error
from tiny_models import VOCABULARY, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import add_lora_, dequantize_, load_checkpoint, quantize_  # noqa: E402
from thunder_moe.nn.linear import NVFP4Linear  # noqa: E402

WAYS = ("quantize_", "loaded")


def everything(module, name):
    return True


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


@pytest.fixture(params=WAYS)
def model(request, tmp_path):
    """With a 4-bit head, in float32."""
    model = quantize_(tiny_model("qwen3_moe"), linears=everything)
    if request.param == "quantize_":
        return model
    model.save_pretrained(tmp_path / "model")
    return load_checkpoint(tmp_path / "model")


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [dict(new_num_tokens=VOCABULARY + 5), dict(pad_to_multiple_of=48)])
def test_new_tokens(model, tmp_path, caplog, options):
    wanted = dequantize_(copy.deepcopy(model))
    for each in (model, wanted):
        torch.manual_seed(0)
        each.resize_token_embeddings(**options, mean_resizing=False)
    size = options.get("new_num_tokens", 96)
    assert "lm_head is 16-bit from now on" in caplog.text
    assert type(model.lm_head) is torch.nn.Linear
    assert isinstance(model.model.layers[0].self_attn.o_proj, NVFP4Linear)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == model.lm_head.out_features == size
    assert torch.equal(model.lm_head.weight, wanted.lm_head.weight)
    assert relative_error(logits(model), logits(wanted)) < 1e-5
    model(torch.full((1, 3), VOCABULARY)).logits.square().mean().backward()
    assert model.lm_head.weight.grad[VOCABULARY:].any()
    model.save_pretrained(tmp_path / "resized")
    assert torch.equal(logits(load_checkpoint(tmp_path / "resized")), logits(model))


def test_the_size_that_is_there(model):
    before = logits(model)
    for options in ({}, dict(new_num_tokens=VOCABULARY), dict(pad_to_multiple_of=16)):
        assert model.resize_token_embeddings(**options) is model.get_input_embeddings()
    assert isinstance(model.lm_head, NVFP4Linear)
    assert torch.equal(logits(model), before)


def test_a_head_that_cannot_be_replaced_is_refused_first(model):
    add_lora_(model, rank=2, alpha=4, linears=everything)
    before = logits(model)
    with pytest.raises(ValueError, match=r"model: lm_head cannot be replaced by a 16-bit module"):
        model.resize_token_embeddings(VOCABULARY + 5)
    assert torch.equal(logits(model), before)


def test_new_tokens_where_nothing_else_is_4_bit():
    model = quantize_(tiny_model("qwen3_moe"), filter="lm_head", linears="lm_head")
    model.resize_token_embeddings(VOCABULARY + 5)
    assert logits(model).shape[-1] == VOCABULARY + 5


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "gpt_oss", "nemotron_h", "gemma4"])
def test_numbers_of_parameters(name):
    model = tiny_model(name)
    counts = [model.num_parameters(exclude_embeddings=without) for without in (False, True)]
    quantize_(model, linears=everything)
    assert [model.num_parameters(exclude_embeddings=without) for without in (False, True)] == counts
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable < counts[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("cast", "dtype"), [("half", torch.float16), ("float", torch.float32)])
def test_casts(model, cast, dtype):
    codes = model.lm_head.qdata.clone()
    assert getattr(model, cast)() is model
    assert {parameter.dtype for parameter in model.parameters()} == {logits(model).dtype} == {dtype}
    assert torch.equal(model.lm_head.qdata, codes)
    assert relative_error(logits(model), logits(dequantize_(copy.deepcopy(model)))) < (0.1 if cast == "half" else 1e-5)
