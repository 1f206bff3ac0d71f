"""``thunder.compile(model, plugins="nvfp4-moe")``: whole models under Thunder's recipes equal thunder.jit with the
executor; what makes the name known, and what does not.
Called by pytest; calls tiny transformers models, and fresh interpreters for the order of imports.
"""

import pytest
import torch
from interpreters import OF_TRANSFORMERS, fresh_python
from oracle import relative_error

import thunder_moe

pytest.importorskip("transformers")

import thunder
import thunder.plugins
import thunder.recipes
from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import GroupedSwiGLU, RewriteWarning, moe_executor, rewrite_report
from thunder_moe.compilers.thunder.executor import NVFP4MoE, nvfp4_rewrite

thunder_moe.register("transformers").close()  # its entries, without the reader of compressed-tensors

BF16 = torch.bfloat16
# What thunder.compile is told besides the plugin.
RECIPES = {
    "default": lambda: {},
    "default by name": lambda: dict(recipe="default"),
    "Hugging Face": lambda: dict(recipe=thunder.recipes.HFTransformers()),
    "Hugging Face by name": lambda: dict(recipe="hf-transformers"),
}


def make_model(name, **options):
    config = tiny_config(name)
    config.num_hidden_layers = 1  # Thunder traces a second one as long as the first
    return tiny_model(name, BF16, config, **options).requires_grad_(False)


# ../../integrations/huggingface/test_thunder_cache.py has a Qwen3 under the recipe of Hugging Face.
@pytest.mark.parametrize(("name", "recipe"), [("llama4", "default")])
@pytest.mark.slow
@pytest.mark.exhaustive  # Thunder traces a whole model in ten seconds
def test_whole_models_are_right(name, recipe):
    """Models match the eager model with dequantized weights."""
    model = make_model(name)
    compiled = thunder.compile(model, **RECIPES[recipe](), plugins="nvfp4-moe")
    quantized = thunder_moe.quantize_(make_model(name))
    with torch.no_grad():
        logits = compiled(tokens(), use_cache=False).logits
        expected = thunder_moe.dequantize_(quantized)(tokens(), use_cache=False).logits
    assert relative_error(logits, expected) < 0.03
    report = rewrite_report(compiled)
    assert [entry.decision for entry in report] == ["nvfp4 + swiglu", "nvfp4"]
    rows = tokens().numel() * model.config.num_experts_per_tok
    assert {entry.gemm.rows for entry in report} == {rows}, "each token by its own experts"


def test_a_layer_with_the_default_recipe_equals_thunder_jit():
    layer = GroupedSwiGLU(4, 64, 32, dtype=BF16).requires_grad_(False)
    inputs = torch.randn(3, 64, dtype=BF16), torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    expected, compiled = thunder.jit(layer, executors=[moe_executor]), thunder.compile(layer, plugins="nvfp4-moe")
    assert torch.equal(compiled(*inputs), expected(*inputs))
    assert list(rewrite_report(compiled)) == list(rewrite_report(expected))
    assert {entry.decision for entry in rewrite_report(compiled)} == {"nvfp4 + swiglu", "nvfp4"}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_stands_ahead_of_the_recipe(recipe):
    plugin = thunder.plugins.get_plugin("nvfp4-moe")()
    assert type(plugin) is NVFP4MoE
    compiled = thunder.compile(make_model("qwen3_moe"), **recipe(), plugins=[plugin])
    transforms = thunder.list_transforms(compiled)
    assert transforms[0] is nvfp4_rewrite
    assert len(transforms) > 1, "the recipe has some too"
    # Before it, two that thunder.jit and the recipe make for lookasides.
    executors = [ex for ex in compiled._lc_cd.executors_list if type(ex).__name__ != "TemporaryExecutor"]
    assert executors[0] is moe_executor


def test_other_functions_warn_once():
    compiled = thunder.compile(torch.nn.Linear(4, 4), plugins="nvfp4-moe")
    with pytest.warns(RewriteWarning, match="rewrote no expert GEMM") as caught:
        compiled(torch.ones(1, 4))
    assert len([warning for warning in caught if warning.category is RewriteWarning]) == 1


def test_registering_makes_the_name_known_and_loads_nothing():
    code = """
import sys, thunder_moe
thunder_moe.register("thunder")
import thunder.plugins
print("nvfp4-moe" in thunder.plugins.get_plugin_names(), "thunder_moe.compilers.thunder.executor" in sys.modules)
print(type(thunder.plugins.get_plugin("nvfp4-moe")()).__name__)
"""
    assert fresh_python(code, OF_TRANSFORMERS).split() == ["True", "False", "NVFP4MoE"]


def test_the_executor_makes_the_name_known():
    code = """
import os
os.environ["THUNDER_MOE_AUTO_REGISTER"] = "0"
import thunder_moe, torch._dynamo
print("thunder_moe" in torch._dynamo.backends.registry._BACKENDS, "transformers" in __import__("sys").modules)
from thunder_moe import moe_executor
import thunder.plugins
print(thunder.jit(lambda x: x + 1, executors=[moe_executor])(torch.ones(1)).item())
print("nvfp4-moe" in thunder.plugins.get_plugin_names())
"""
    assert fresh_python(code, OF_TRANSFORMERS).splitlines() == ["False False", "2.0", "True"]
