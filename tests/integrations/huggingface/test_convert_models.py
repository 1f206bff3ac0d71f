"""Quantization of each architecture's 16-bit checkpoint by three ways, in memory, while it loads and on disk: the same
codes and scales, byte for byte. Called by pytest; `quantize_` itself is judged by test_hf_experts.py.
"""

import pytest
import torch
from checkpoint_files import bits
from fast_cases import others_slow
from tiny_models import ARCHITECTURES, OTHERS, tiny_model, tokens

from thunder_moe import ThunderMoeConfig, load_checkpoint, quantize_
from thunder_moe.checkpoint import convert
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack

# Tied, of other names, without a gate, transposed; a gate that reads q's rows, a linear whose weight the model reads.
SPECIAL = ("gemma4", "granitemoe", "nemotron_h", "qwen3_vl_moe", "afmoe", "deepseek_v32")
NAMES = [
    *others_slow(ARCHITECTURES, ("llama4", "qwen3_moe", "deepseek_v3"), exhaustive=True),
    *SPECIAL,
    *others_slow(sorted(OTHERS.keys() - {*SPECIAL}), exhaustive=True),
]


def logits_of(model):
    with torch.no_grad():
        return model.eval()(tokens(batch=1)).logits


def assert_same_state(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(bits(tensor), bits(second[name])), name


@pytest.mark.parametrize("name", NAMES)
def test_one_quantization_by_three_ways(tmp_path, name):
    model = tiny_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", linears=True)
    converted = load_checkpoint(tmp_path / "out")
    linears = [
        path
        for path, module in converted.named_modules()
        if isinstance(module, NVFP4Linear | NVFP4LinearPart) and not isinstance(module, NVFP4LinearStack)
    ]
    assert linears
    loaded = type(model).from_pretrained(tmp_path / "source", quantization_config=ThunderMoeConfig(linears=linears))
    quantize_(model, linears=lambda module, path: path in linears)
    assert_same_state(loaded, model)
    assert_same_state(converted, model)
    assert torch.equal(logits_of(converted), logits_of(model))
