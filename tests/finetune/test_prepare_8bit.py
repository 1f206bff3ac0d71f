"""prepare_8bit_training_ on this package's modules, on models of transformers, and what it refuses.
Called by pytest; judged by the fp64 loops of tests/oracle.py, and by modules that were made with a recipe.
"""

import copy

import pytest
import torch
from oracle import RecipeLinear, relative_error
from tiny_models import tiny_config, tiny_model

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    offsets_from_splits,
    prepare_8bit_training_,
    prepare_qat_,
    quantize_,
)
from thunder_moe.integrations.huggingface.experts import expert_blocks


def test_modules_of_this_package():
    model = torch.nn.ModuleList([GroupedMLP(2, 32, 64), GroupedSwiGLU(2, 32, 64), GroupedLinear(2, 32, 32)])
    plain, x, ends = copy.deepcopy(model), torch.randn(7, 32), offsets_from_splits([3, 4])
    assert prepare_8bit_training_(model, "fp8") is model
    made = GroupedMLP(2, 32, 64, recipe="fp8")
    made.load_state_dict(model[0].state_dict())
    assert torch.equal(model[0](x, ends), made(x, ends))
    assert repr(model).count("recipe='fp8'") == 6
    prepare_8bit_training_(model, None)
    assert repr(model) == repr(plain)
    for got, wanted in zip(model, plain, strict=True):
        assert torch.equal(got(x, ends), wanted(x, ends))


def test_a_layer_trains():
    moe = Llama4MoE(Llama4MoEConfig(hidden_size=32, intermediate_size=64, num_experts=4, top_k=2))
    plain, x = copy.deepcopy(moe), torch.randn(1, 9, 32)
    out, wanted = prepare_8bit_training_(moe, "mxfp8")(x), plain(x)
    assert 1e-3 < relative_error(out, wanted) < 0.1
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in moe.parameters())


def experts64(block, hidden, ids, weights, recipe):
    """Return a block's result in fp64 by an 8-bit recipe, with the block's own gate and biases."""
    order = ids.flatten().argsort(stable=True)
    expert = ids.flatten()[order]
    ends = torch.bincount(expert, minlength=block.num_experts).cumsum(0)
    rows = hidden[order // ids.shape[1]]
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(block, name)
        rows = RecipeLinear.apply(rows, weight.mT if block.is_transposed else weight, ends, recipe)
        rows = rows + getattr(block, f"{name}_bias")[expert] if block.has_bias else rows
        rows = block._apply_gate(rows) if name == "gate_up_proj" else rows
    rows = rows * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, order // ids.shape[1], rows)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_transformers(name, recipe):
    model = tiny_model(name, torch.float32).train()
    block = next(iter(expert_blocks(model).values()))
    prepare_8bit_training_(model, recipe)
    hidden = torch.randn(6, block.down_proj.shape[2 if block.is_transposed else 1])
    choice = torch.rand(6, block.num_experts).topk(2)
    twin, exact = copy.deepcopy(block).double(), hidden.double().requires_grad_()
    wanted = experts64(twin, exact, choice.indices, choice.values.double(), recipe)
    hidden.requires_grad_()
    out = block(hidden, choice.indices, choice.values)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    pairs = [(out, wanted), (hidden.grad, exact.grad)]
    pairs += [(ours.grad, theirs.grad) for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True)]
    for got, expected in pairs:
        assert relative_error(got, expected) < 1e-5


def test_a_model_of_transformers_and_the_way_back():
    model, ids = tiny_model("qwen3_moe", torch.bfloat16, experts_implementation="grouped_mm"), torch.arange(5)[None]
    plain = model(ids).logits
    prepare_8bit_training_(model, "fp8")
    rounded = model(ids).logits
    assert 1e-4 < relative_error(rounded, plain) < 0.2
    with torch.autocast("cpu", torch.bfloat16):
        prepare_8bit_training_(tiny_model("qwen3_moe", torch.float32), "fp8")(ids).logits.sum().backward()
    assert torch.equal(prepare_8bit_training_(model, None)(ids).logits, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")
@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=pytest.mark.exhaustive), "thunder_moe"])
def test_a_compiled_model_of_transformers(backend):
    model, ids = tiny_model("qwen3_moe", torch.float32, tiny_config("qwen3_moe", 1)), torch.arange(5)[None]
    prepare_8bit_training_(model, "fp8")
    options = {"thunder_moe.inner": "aot_eager"} if backend == "thunder_moe" else None
    compiled = torch.compile(model.requires_grad_(False), backend=backend, fullgraph=True, options=options)
    assert relative_error(compiled(ids).logits, model(ids).logits) < 1e-5


def test_what_is_refused():
    with pytest.raises(ValueError, match="recipe: got 'fp4', wanted one of"):
        prepare_8bit_training_(GroupedMLP(2, 8, 8), "fp4")
    with pytest.raises(ValueError, match=r"recipe: got 'fp8' for torch.float16, wanted bfloat16 or float32"):
        prepare_8bit_training_(GroupedMLP(2, 8, 8, dtype=torch.float16), "fp8")
    for model in (torch.nn.Linear(8, 8), quantize_(torch.nn.Sequential(GroupedMLP(2, 32, 32)))):
        with pytest.raises(ValueError, match="model: found no experts in 16 bits in .*, wanted GroupedLinear"):
            prepare_8bit_training_(model, "fp8")

    class OwnForward(GroupedLinear):
        def forward(self, x, offsets):
            return torch.nn.functional.grouped_mm(x, self.weight.mT, offs=offsets)

    mixed = torch.nn.ModuleList([GroupedLinear(2, 8, 8), OwnForward(2, 8, 8)])
    with pytest.raises(ValueError, match="'1' cannot have an 8-bit recipe: OwnForward has a forward of its own"):
        prepare_8bit_training_(mixed, "fp8")
    assert "recipe" not in repr(mixed)
    llama4 = tiny_model("llama4", torch.bfloat16)
    with pytest.raises(ValueError, match="Llama4TextExperts does not have transformers' experts interface"):
        prepare_8bit_training_(llama4, "fp8")
    parametrized = prepare_qat_(tiny_model("qwen3_moe", torch.bfloat16))
    with pytest.raises(ValueError, match="its weights are parametrized; call prepare_8bit_training_ before"):
        prepare_8bit_training_(parametrized, "fp8")
    own = tiny_model("qwen3_moe", torch.bfloat16)
    for block in expert_blocks(own).values():
        block.__class__ = type("OwnExperts", (type(block),), {"forward": lambda self, hidden, *_: hidden})
    with pytest.raises(ValueError, match="OwnExperts has a forward of its own, which does not ask for an experts impl"):
        prepare_8bit_training_(own, "fp8")
