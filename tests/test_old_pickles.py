"""Models that version 0.1 pickled whole (torch.save(model)) load: the modules that their classes were in still exist.
Called by pytest; reads tests/data/model_0_1.pt, which version 0.1 wrote as `HOW` says.
"""

import importlib
from pathlib import Path

import pytest
import torch

from thunder_moe import GroupedSwiGLU, Llama4MoE, Llama4MoEConfig, NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.formats.weight import NVFP4Weight

HOW = """
bf16 = torch.bfloat16
moe = torch.nn.Sequential(Llama4MoE(Llama4MoEConfig(16, 16, 2, top_k=2), dtype=bf16))
layers = {"block": GroupedSwiGLU(2, 16, 16, dtype=bf16), "layer": torch.nn.Sequential(quantize_(moe)[0])}
model = torch.nn.ModuleDict(layers)
model.weight = NVFP4Weight(*moe[0].routed_experts.down_proj.nvfp4_weight.tensors())
x, offsets = torch.randn(1, 3, 16, dtype=bf16), torch.tensor([1, 3], dtype=torch.int32)
block, layer = model["block"](x[0], offsets), model["layer"](x)
torch.save(dict(model=model, x=x, offsets=offsets, block=block, layer=layer), "model_0_1.pt")
"""
# The classes that pickles of version 0.1 name, and where they are now.
MOVED = {
    "nn": {
        "GroupedLinear": "nn.grouped_linear", "GroupedSwiGLU": "nn.swiglu", "Llama4MoE": "nn.llama4",
        "Llama4MoEConfig": "nn.llama4", "SwiGLU": "nn.swiglu",
    },
    "nvfp4": {"NVFP4Weight": "formats.weight"},
    "nvfp4_modules": dict.fromkeys(["NVFP4GroupedLinear", "NVFP4GroupedSwiGLU"], "nn.quantized"),
}  # fmt: skip
MOVED_WITH_TRANSFORMERS = {
    "checkpoint.files": dict.fromkeys(["TensorFiles", "TensorInfo"], "checkpoint.files"),
    "checkpoint.formats": dict.fromkeys(["ExpertBlock", "ExpertsLayout", "Module"], "checkpoint.formats"),
    "checkpoint.reader": {"Checkpoint": "checkpoint.reader"},
    "integrations.experts_form": {"ExpertsForm": "integrations.huggingface.forms"},
    "integrations.hf_quantizer": dict.fromkeys(
        ["NVFP4CheckpointConfig", "NVFP4CheckpointQuantizer"], "integrations.huggingface.quantizer"
    ),
    "integrations.llama4": {"RoutedLlama4TextMoe": "integrations.huggingface.llama4"},
    "integrations.transformers": {"NVFP4Experts": "integrations.huggingface.experts"},
}


def test_a_model_of_version_0_1_computes_the_same():
    saved = torch.load(Path(__file__).parent / "data" / "model_0_1.pt", weights_only=False)
    block, (layer,) = saved["model"]["block"], saved["model"]["layer"]
    assert type(block) is GroupedSwiGLU
    assert type(layer) is Llama4MoE
    assert type(layer.routed_experts) is NVFP4GroupedSwiGLU
    assert layer.config == Llama4MoEConfig(16, 16, num_experts=2, top_k=2)
    assert type(saved["model"].weight) is NVFP4Weight
    torch.testing.assert_close(block(saved["x"][0], saved["offsets"]), saved["block"])
    torch.testing.assert_close(layer(saved["x"]), saved["layer"])
    new = Llama4MoE(Llama4MoEConfig(16, 16, 2))
    assert new.shared_expert.load_state_dict(layer.shared_expert.state_dict())


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_the_new_classes(old):
    assert_same(old, MOVED[old])


# All that modules of version 0.1 had in __all__ whose names moved; pickles name few of them, users maybe others.
ALL = {
    "nvfp4": "BLOCK_SIZE LAYOUTS WEIGHT_DTYPES NVFP4Weight dequantize quantize require scale_shape",
    "nvfp4_modules": "MODULE_LAYOUTS NVFP4GroupedLinear NVFP4GroupedSwiGLU calls_only_its_class weights_to_fuse",
    "integrations.experts_form": "ExpertsForm apply_gate form_of halves has_experts interleave not_plain_experts"
    " require_form stored_weights",
    "integrations.hf_quantizer": "METHOD NVFP4CheckpointConfig NVFP4CheckpointQuantizer register",
    "integrations.llama4": "Llama4TextMoe RoutedLlama4TextMoe check_layer run_routed",
    "integrations.transformers": "NVFP4Experts check_place expert_blocks expert_weights has_experts not_plain_experts"
    " put_experts quantized_experts",
}


@pytest.mark.parametrize("old", ALL)
def test_old_modules_have_all_that_they_had(old):
    if old.startswith("integrations"):
        pytest.importorskip("transformers")
    module = importlib.import_module(f"thunder_moe.{old}")
    new = {"fake_quantize"} if old == "nvfp4" else set()
    assert set(module.__all__) == set(ALL[old].split()) | new
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError):
        module.other  # noqa: B018


def test_old_functions_that_were_renamed_do_what_they_did():
    pytest.importorskip("transformers")
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    from thunder_moe.integrations.experts_form import halves, interleave
    from thunder_moe.integrations.transformers import check_place

    rows = torch.arange(12).view(1, 6, 2)
    assert torch.equal(halves(rows), rows[:, [0, 2, 4, 1, 3, 5]])
    assert torch.equal(interleave(halves(rows)), rows)
    sizes = dict(hidden_size=32, intermediate_size=16, intermediate_size_mlp=16, num_local_experts=2)
    layer = Llama4TextMoe(Llama4TextConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    check_place(layer, layer.experts)
    with pytest.raises(TypeError, match="Llama4TextMoe"):
        check_place(torch.nn.Sequential(), layer.experts)
    layer.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="experts: cannot replace this Llama4TextExperts: .*hook"):
        check_place(layer, layer.experts)


@pytest.mark.parametrize("old", MOVED_WITH_TRANSFORMERS)
def test_old_names_of_transformers_models(old):
    pytest.importorskip("transformers")
    assert_same(old, MOVED_WITH_TRANSFORMERS[old])


def assert_same(old, names):
    for name, new in names.items():
        old_class = getattr(importlib.import_module(f"thunder_moe.{old}"), name)
        assert old_class is getattr(importlib.import_module(f"thunder_moe.{new}"), name)


def test_a_model_in_the_layout_that_left_says_so():
    module = NVFP4GroupedLinear(quantize(torch.randn(2, 64, 64)))
    state = module.__getstate__() | {"_buffers": dict(module._buffers, qdata=module.qdata.view(2, 1, 2, 32, 32))}
    with pytest.raises(ValueError, match="pickled whole in layout 'humming'"):
        NVFP4GroupedLinear.__new__(NVFP4GroupedLinear).__setstate__(state)
