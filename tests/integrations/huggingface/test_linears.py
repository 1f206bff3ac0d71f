"""Dense layers of transformers' models in 4 bits: which become so, what is stacked, generation, gradients.
Called by pytest; judged by the model with the dequantized weights.
"""

import copy

import pytest
import torch
from dense_calls import DenseCalls
from oracle import relative_error
from tiny_models import ARCHITECTURES, tiny_model, tokens

from thunder_moe import NVFP4Linear, dequantize_, quantize_
from thunder_moe.nn.linear import NVFP4LinearPart, NVFP4LinearStack

QKV_O = {"q_proj": NVFP4LinearPart, "k_proj": NVFP4LinearPart, "v_proj": NVFP4LinearPart, "o_proj": NVFP4Linear}


def everything(module, name):
    return True


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name):
    model, ids = tiny_model(name), tokens()
    plain = {key: type(module) for key, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantize_(model, linears=everything)
    with torch.no_grad(), DenseCalls() as calls:
        out = model(ids).logits
    attention = model.model.layers[1].self_attn
    if name != "deepseek_v3":
        assert {key: type(attention.get_submodule(key)) for key in QKV_O} == QKV_O
        assert type(attention.qkv_proj) is NVFP4LinearStack
    assert type(model.lm_head) is NVFP4Linear
    kinds = [type(module) for module in model.modules()]
    # A part is computed by its stack; only routers are left.
    assert calls.count == kinds.count(NVFP4Linear) + kinds.count(NVFP4LinearStack)
    assert not any(type(module) is torch.nn.Linear for module in model.modules())
    back = dequantize_(copy.deepcopy(model))
    assert {key: type(module) for key, module in back.named_modules() if isinstance(module, torch.nn.Linear)} == plain
    with torch.no_grad():
        assert relative_error(back(ids).logits, out) < 1e-4


def test_shared_experts_are_stacked():
    for name, path in (("llama4", "feed_forward.shared_expert"), ("deepseek_v3", "mlp.shared_experts")):
        model = quantize_(tiny_model(name), linears=everything)
        shared = model.model.layers[1].get_submodule(path)
        assert type(shared.gate_up_proj) is NVFP4LinearStack
        assert type(shared.down_proj) is NVFP4Linear


def test_a_tied_head_stays_tied():
    from tiny_models import tiny_config

    config = tiny_config("qwen3_moe")
    config.tie_word_embeddings = True
    model = quantize_(tiny_model("qwen3_moe", config=config), linears=everything)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.tie_weights()
    assert torch.isfinite(model(tokens()).logits).all()


def test_generates_what_the_dequantized_model_does():
    model = quantize_(tiny_model("qwen3_moe"), linears=everything)
    back = dequantize_(copy.deepcopy(model))
    ids = tokens()
    assert torch.equal(
        model.generate(ids, max_new_tokens=6, do_sample=False), back.generate(ids, max_new_tokens=6, do_sample=False)
    )


def test_peft_says_that_it_does_not_know_4_bit_linears():
    peft = pytest.importorskip("peft")
    model = quantize_(tiny_model("qwen3_moe"), linears=everything)
    with pytest.raises(ValueError, match="NVFP4LinearPart"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
