"""Hugging Face models with quantized experts: against the same models with dequantized weights, which stock
transformers runs; gradients, sentinels, tied weights, state dicts, and what is refused. Called by pytest.
"""

import copy
import gc
import io
import logging
import re
import weakref
from functools import partial

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

transformers = pytest.importorskip("transformers")

from experts_classes import experts_classes, make_experts  # noqa: E402

from thunder_moe import (  # noqa: E402
    GroupedLinear,
    add_lora_,
    batch_invariant,
    dequantize_,
    quantize_,
    rewrite_report,
)
from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize, quantize  # noqa: E402
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks  # noqa: E402
from thunder_moe.integrations.huggingface.forms import form_of  # noqa: E402
from thunder_moe.nn import MODULE_LAYOUTS  # noqa: E402

BF16 = torch.bfloat16
ALL = list(ARCHITECTURES)


def quantized_and_decoded(model, **options):
    quantized = quantize_(copy.deepcopy(model), **options)
    return quantized, dequantize_(copy.deepcopy(quantized))


def nvfp4_experts(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Experts)}


def parent_of(model, name):
    return model.get_submodule(name.rpartition(".")[0])


@torch.no_grad()
def logits(model, ids=None):
    return model(tokens() if ids is None else ids).logits


@pytest.mark.covering(1)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ALL)
def test_model_equals_the_stock_one_with_dequantized_weights(name, format):
    model = tiny_model(name)
    quantized, decoded = quantized_and_decoded(model, format=format)
    layers = [int(re.search(r"\d+", path).group()) for path in nvfp4_experts(quantized)]
    assert layers == [*ARCHITECTURES[name][2]]
    assert not expert_blocks(quantized)
    assert f"{format.upper()}Experts(" in repr(quantized)
    assert relative_error(logits(quantized), logits(decoded)) < 1e-5
    least, most = {"nvfp4": (0.01, 0.5), "mxfp8": (0.001, 0.2)}[format]
    assert least < relative_error(logits(quantized), logits(model)) < most


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_layers_agree_to_rounding_in_16_bits(name, dtype):
    # Layer by layer, on the same input: over a whole model one rounding more can turn a router's choice.
    quantized, decoded = quantized_and_decoded(tiny_model(name, dtype))
    for path in nvfp4_experts(quantized):
        x = torch.randn(2, 9, 64, dtype=dtype)
        outs = []
        for model in (quantized, decoded):
            out = parent_of(model, path)(x.clone())
            outs.append(out[0] if isinstance(out, tuple) else out)
        assert outs[0].dtype == dtype
        assert relative_error(outs[0], outs[1]) < {BF16: 1e-2, torch.float16: 2e-3}[dtype]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.exhaustive  # test_generate.py compiles whole models, one of them in the fast set
def test_compiles_without_a_graph_break(name):
    quantized, decoded = quantized_and_decoded(tiny_model(name, config=tiny_config(name, layers=1)))
    compiled = torch.compile(quantized, fullgraph=True, backend="eager", dynamic=True)
    for length in (9, 5):
        ids = tokens(length=length)
        assert relative_error(logits(compiled, ids), logits(decoded, ids)) < 1e-5


@pytest.mark.slow
def test_compiles_with_inductor():
    quantized, decoded = (model.model.layers[0].mlp for model in quantized_and_decoded(tiny_model("qwen3_moe")))
    hidden = torch.randn(2, 9, 64)
    with torch.no_grad():
        assert relative_error(torch.compile(quantized, fullgraph=True)(hidden), decoded(hidden)) < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_inputs_and_routers(name):
    quantized, decoded = (model.train() for model in quantized_and_decoded(tiny_model(name)))
    grads = []
    for model in (quantized, decoded):
        model(tokens()).logits.square().mean().backward()
        grads.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    ours, theirs = grads
    trained = {path for path in theirs if ".experts." not in path}
    assert trained == {path for path in ours if ".experts." not in path}
    routers = {path for path in trained if re.search(r"router|mlp\.gate\.|feed_forward\.gate", path)}
    assert len(routers) >= len(ARCHITECTURES[name][2])
    for path in trained:
        assert relative_error(ours[path], theirs[path]) < 1e-4, path
        assert theirs[path].norm() > 0 or path not in routers
    if name == "gpt_oss":
        bias, ours_bias = (
            theirs["model.layers.0.mlp.experts.gate_up_proj_bias"],
            "model.layers.0.mlp.experts.gate_up_bias",
        )
        halves = torch.cat([bias[:, 0::2], bias[:, 1::2]], 1)
        assert relative_error(ours[ours_bias], halves) < 1e-4


# Every experts class of transformers.


def routing(tokens=7, experts=6, top_k=2):
    ids = torch.rand(tokens, experts).argsort(-1)[:, :top_k]
    return torch.randn(tokens, 64), ids, torch.rand(tokens, top_k)


def swapped(experts):
    """(NVFP4Experts, the stock module with dequantized weights)."""
    quantized, decoded = quantized_and_decoded(nn.ModuleDict({"experts": experts}))
    return quantized["experts"], decoded["experts"]


@pytest.mark.parametrize(("module", "name"), [*experts_classes()])
def test_every_experts_class_of_transformers(module, name):
    experts = make_experts(module, name)
    quantized, decoded = swapped(experts)
    assert type(decoded) is type(experts)
    assert decoded.state_dict().keys() == experts.state_dict().keys()
    inputs = routing()
    with torch.no_grad():
        assert relative_error(quantized(*inputs), decoded(*inputs)) < 1e-5
        assert relative_error(quantized(*inputs), experts(*inputs)) > 0.02


KINDS = {
    "fused": ("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"),
    "fused with limits": ("transformers.models.deepseek_v4.modeling_deepseek_v4", "DeepseekV4Experts"),
    "biases, in turns": ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"),
    "own gate": ("transformers.models.gemma4.modeling_gemma4", "Gemma4TextExperts"),
    "no gate": ("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts"),
    "own norm": ("transformers.models.muse_spark.modeling_muse_spark", "MuseSparkExperts"),
}


# Compiled, two kinds are in the fast set.
COMPILED = [
    kind if kind in ("fused", "own gate") else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS
]


@pytest.mark.parametrize(
    ("kind", "changes", "form"),
    [
        ("fused", {}, "fused SwiGLU"),
        ("fused", dict(hidden_act="gelu"), "own gate"),
        ("fused", dict(hidden_act="quick_gelu"), "fused SwiGLU(alpha=1.702, limit=None, up_shift=0.0)"),
        ("fused with limits", {}, "fused SwiGLU(alpha=1.0, limit=1.5, up_shift=0.0)"),
        ("fused with limits", dict(swiglu_limit=200.0), "fused SwiGLU(alpha=1.0, limit=200.0, up_shift=0.0)"),
        ("biases, in turns", {}, "fused SwiGLU(alpha=1.702, limit={limit}, up_shift=1.0)"),
        ("own gate", {}, "own gate"),
        ("no gate", {}, "own activation"),
        ("own norm", {}, "fused SwiGLU, own norm"),
    ],
)
def test_form_of_an_activation(kind, changes, form):
    experts = make_experts(*KINDS[kind], **changes)
    assert str(form_of(experts)) == form.format(limit=getattr(experts, "limit", None))
    quantized, decoded = swapped(experts)
    inputs = routing()
    assert relative_error(quantized(*inputs), decoded(*inputs)) < 1e-5


def test_an_overridden_gate_is_not_taken_for_the_classs_own():
    class Halved(type(make_experts(*KINDS["fused"]))):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, -1)
            return self.act_fn(gate) * up / 2

    experts = make_experts(*KINDS["fused"])
    experts.__class__ = Halved
    assert str(form_of(experts)) == "own gate"
    quantized, decoded = swapped(experts)
    decoded.config._experts_implementation = "grouped_mm"  # its eager loop does not call _apply_gate
    inputs = routing()
    assert relative_error(quantized(*inputs), decoded(*inputs)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["some", "all", "no tokens"])
def test_sentinels_contribute_nothing(kind, rows):
    quantized, decoded = swapped(make_experts(*KINDS[kind]))
    x, ids, weights = routing(tokens=0 if rows == "no tokens" else 7)
    live = torch.rand(ids.shape) < 0.6 if rows == "some" else torch.zeros(ids.shape, dtype=torch.bool)
    expected = decoded(x, torch.where(live, ids, 0), weights * live) if rows == "some" else torch.zeros_like(x)
    for sentinel in (6, 11, -1):
        ours = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        out = quantized(ours[0], torch.where(live, ids, sentinel), ours[1])
        assert out.shape == x.shape
        assert relative_error(out, expected) < 1e-5
        out.square().sum().backward()
        assert all(
            tensor.grad.isfinite().all() for tensor in (*ours, *quantized.parameters()) if tensor.grad is not None
        )
        assert not ours[1].grad[~live].any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind(kind):
    quantized, decoded = swapped(make_experts(*KINDS[kind]))
    x, ids, weights = routing()
    grads = []
    for experts in (quantized, decoded):
        ours = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        experts(ours[0], ids, ours[1]).square().sum().backward()
        grads.append([tensor.grad for tensor in ours])
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < 1e-4


@pytest.mark.parametrize("kind", others_slow(KINDS, ("fused",), exhaustive=True))
def test_every_kind_compiles(kind):
    quantized, decoded = swapped(make_experts(*KINDS[kind]))
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (7, 3):
        inputs = routing(count)
        assert relative_error(compiled(*inputs), decoded(*inputs)) < 1e-5


# Layouts other than "linear".


def wide_model(name, dtype=torch.float32):
    """Sizes that fit every layout."""
    config = tiny_config(name)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    return tiny_model(name, dtype, config=config)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3_moe", "tiled_64x64"), ("gpt_oss", "tiled_64x64"), ("llama4", "tiled_64x64")],
)
@pytest.mark.slow
def test_layouts_compute_the_same(name, layout):
    model = wide_model(name)
    linear, other = (quantize_(copy.deepcopy(model), layout=each) for each in ("linear", layout))
    for experts in nvfp4_experts(other).values():
        assert experts.gate_up_proj.layout == experts.down_proj.layout == layout
    assert torch.equal(logits(other), logits(linear))
    assert torch.equal(logits(copy.deepcopy(other).to(BF16)), logits(copy.deepcopy(linear).to(BF16)))
    if name == "qwen3_moe":
        hidden, blocks = torch.randn(2, 5, 128), (model.model.layers[0].mlp for model in (linear, other))
        compiled = [torch.compile(block, fullgraph=True, backend="aot_eager") for block in blocks]
        assert torch.equal(*(block(hidden) for block in compiled))
    state = {key: tensor.view(torch.uint8) for key, tensor in linear.state_dict().items()}
    assert all(torch.equal(tensor.view(torch.uint8), state[key]) for key, tensor in other.state_dict().items())
    decoded = dequantize_(linear).state_dict()
    for key, tensor in dequantize_(other).state_dict().items():
        assert torch.equal(tensor, decoded[key]), key


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_the_same_in_every_layout(kind):
    config = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=128, moe_hidden_size=128)
    experts = make_experts(*KINDS[kind], **config)
    _, ids, weights = routing()
    x = torch.randn(7, 128)
    results = []
    for layout in MODULE_LAYOUTS:
        module = quantize_(nn.ModuleList([copy.deepcopy(experts)]), layout=layout)[0]
        assert module.gate_up_proj.layout == module.down_proj.layout == layout
        results.append(module(x, ids, weights))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_auto_takes_the_preferred_layout_where_it_fits(tiles, name):
    model = wide_model(name)
    linear = quantize_(copy.deepcopy(model), layout="linear")
    quantized = quantize_(model)
    assert {("cpu", 128, 128), ("cpu", 128, 64)} == set(tiles)
    for experts in nvfp4_experts(quantized).values():
        assert experts.gate_up_proj.layout == experts.down_proj.layout == "tiled_64x64"
    assert torch.equal(logits(quantized), logits(linear))


def test_the_experts_implementation_takes_the_preferred_layout(tiles):
    model = wide_model("qwen3_moe", BF16).requires_grad_(False)
    model.set_experts_implementation("thunder_moe")
    out = logits(model)
    assert {("cpu", 128, 128), ("cpu", 128, 64)} == set(tiles)
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(out, logits(quantize_(model)))


def test_a_layout_that_does_not_fit_is_refused():
    model = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match=r"got 'tiled_64x64' for 'model.layers.0.mlp.experts', .* in_features 32"):
        quantize_(model, layout="tiled_64x64")
    assert len(expert_blocks(model)) == 2


# Model surgery.


def test_another_model_of_the_same_config_stays_as_it_is():
    config = tiny_config("qwen3_moe")
    first, second = (tiny_model("qwen3_moe", config=config) for _ in range(2))
    assert first.config is second.config
    implementation, before = config._experts_implementation, logits(second)
    quantize_(first)
    assert config._experts_implementation == implementation
    assert torch.equal(logits(second), before)
    assert len(expert_blocks(second)) == 2


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, "nvfp4") for name in ("qwen3_moe", "gpt_oss", "llama4")]
    + [(name, "mxfp8") for name in ("mixtral", "gpt_oss", "llama4")],
)
def test_state_dict_pickle_and_deepcopy(name, format):
    options = dict(format=format, linears=lambda module, path: "q_proj" in path)
    source, target = quantize_(tiny_model(name), **options), quantize_(tiny_model(name), **options)
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.flatten().view(torch.uint8).zero_()
    state = io.BytesIO()
    torch.save(source.state_dict(), state)
    state.seek(0)
    assert not torch.equal(logits(source), logits(target))
    target.load_state_dict(torch.load(state))
    assert torch.equal(logits(source), logits(target))
    whole = io.BytesIO()
    torch.save(source, whole)
    whole.seek(0)
    for other in (torch.load(whole, weights_only=False), copy.deepcopy(source)):
        assert torch.equal(logits(source), logits(other))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_shards_round_trip(name, tmp_path):
    from safetensors.torch import load_file

    source, target = quantize_(tiny_model(name, BF16)), quantize_(tiny_model(name, BF16))
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.view(torch.uint8).zero_()
    source.save_pretrained(tmp_path, max_shard_size="40KB", save_original_format=False)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    for shard in shards:
        assert not target.load_state_dict(load_file(shard), strict=False).unexpected_keys
    assert torch.equal(logits(source), logits(target))


def test_tied_modules_and_weights_stay_tied():
    model = tiny_model("gpt_oss")
    first, second = (layer.mlp for layer in model.model.layers)
    for name, parameter in first.experts.named_parameters():
        setattr(second.experts, name, parameter)
    quantize_(model)
    assert first.experts is not second.experts
    for a, b in zip(first.experts.buffers(), second.experts.buffers(), strict=True):
        assert a is b
    assert first.experts.gate_up_bias is second.experts.gate_up_bias
    dequantize_(model)
    for a, b in zip(first.experts.parameters(), second.experts.parameters(), strict=True):
        assert a is b
    second.experts = first.experts  # one module in two places
    quantize_(model)
    assert first.experts is second.experts
    assert isinstance(first.experts, NVFP4Experts)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_projection_that_is_elsewhere_too(name):
    model = quantize_(tiny_model(name))
    experts = model.model.layers[1].mlp.experts
    both = nn.ModuleDict({"gate_up": experts.gate_up_proj, "down": experts.down_proj, "model": model})
    expected = logits(copy.deepcopy(model))
    dequantize_(both)
    experts = model.model.layers[1].mlp.experts
    assert type(experts).__module__.startswith("transformers.")
    assert relative_error(logits(model), expected) < 1e-5
    for alias, weight in ((both["gate_up"], experts.gate_up_proj), (both["down"], experts.down_proj)):
        assert type(alias) is GroupedLinear
        if name == "qwen3_moe":  # GPT-OSS has them transposed, and gate and up in turns
            assert alias.weight is weight
    down = experts.down_proj.mT if name == "gpt_oss" else experts.down_proj
    assert torch.equal(both["down"].weight, down)


def test_weights_tied_to_modules_of_this_package_stay_tied():
    model = tiny_model("qwen3_moe", BF16)
    experts = model.model.layers[0].mlp.experts
    linears = nn.ModuleList()
    for weight in (experts.gate_up_proj, experts.down_proj):
        count, n, k = weight.shape
        linears.append(GroupedLinear(count, k, n, device="meta"))
        linears[-1].weight = weight
    for both in (nn.ModuleList([linears, model]), nn.ModuleList([model, linears])):
        quantize_(both)
        experts = model.model.layers[0].mlp.experts
        assert isinstance(experts, NVFP4Experts)
        for linear, projection in zip(linears, (experts.gate_up_proj, experts.down_proj), strict=True):
            assert linear.qdata is projection.qdata
            assert linear.scale is projection.scale
        dequantize_(both)
        experts = model.model.layers[0].mlp.experts
        for linear, weight in zip(linears, (experts.gate_up_proj, experts.down_proj), strict=True):
            assert linear.weight is weight
            assert weight.dtype == BF16


@pytest.mark.parametrize("name", ALL)
def test_dequantize_gives_the_stock_model_back(name):
    model = tiny_model(name)
    frozen = next(iter(expert_blocks(model).values()))
    frozen.requires_grad_(False)
    decoded = quantized_and_decoded(model)[1]
    assert [type(m) for m in decoded.modules()] == [type(m) for m in model.modules()]
    assert {k: v.shape for k, v in decoded.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    grads = [{path: p.requires_grad for path, p in m.named_parameters()} for m in (decoded, model)]
    assert grads[0] == grads[1]
    twice = dequantize_(quantize_(copy.deepcopy(decoded)))
    assert relative_error(logits(twice), logits(decoded)) < 1e-5
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), decoded.parameters(), strict=True))


def test_frees_the_16_bit_weights():
    model = tiny_model("gpt_oss", BF16)
    dead = [weakref.ref(p) for block in expert_blocks(model).values() for p in (block.gate_up_proj, block.down_proj)]
    before = model.get_memory_footprint()
    quantize_(model)
    gc.collect()
    assert all(ref() is None for ref in dead)
    assert model.get_memory_footprint() < 0.7 * before


def test_casting_leaves_the_format_alone():
    model = quantize_(tiny_model("gpt_oss"))
    before = [buffer.view(torch.uint8).clone() for m in nvfp4_experts(model).values() for buffer in m.buffers()]
    model.to(BF16)
    after = [buffer.view(torch.uint8) for m in nvfp4_experts(model).values() for buffer in m.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.model.layers[0].mlp.experts.gate_up_bias.dtype == BF16
    assert logits(model).dtype == BF16
    assert dequantize_(model).model.layers[0].mlp.experts.down_proj.dtype == BF16


def test_modes_survive():
    model = quantize_(tiny_model("qwen3_moe").train())
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in quantize_(tiny_model("qwen3_moe").eval()).modules())


def test_llama4_still_gives_its_router_logits():
    quantized, decoded = quantized_and_decoded(tiny_model("llama4"))
    with torch.no_grad():
        outs = [model.model(tokens(), output_router_logits=True) for model in (quantized, decoded)]
    assert len(outs[0].router_logits or ()) == len(outs[1].router_logits or ())
    for ours, theirs in zip(outs[0].router_logits or (), outs[1].router_logits or (), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_llama4_routes_to_several_experts(activation):
    config = tiny_config("llama4")
    config.num_experts_per_tok, config.hidden_act = 3, activation
    quantized, decoded = quantized_and_decoded(tiny_model("llama4", config=config))
    assert relative_error(logits(quantized), logits(decoded)) < 1e-5


def test_tells_what_became_of_each_layer(caplog):
    with caplog.at_level(logging.INFO, logger="thunder_moe"):
        quantize_(tiny_model("gpt_oss", BF16))
    assert [record.message for record in caplog.records if "quantizing" in record.message] == [
        f"quantizing experts: model.layers.{layer}.mlp.experts GptOssExperts -> NVFP4Experts(GptOssExperts, 8 experts, "
        "fused SwiGLU(alpha=1.702, limit=7.0, up_shift=1.0)), 0.1 -> 0.0 MiB"
        for layer in (0, 1)
    ]


def test_filter_chooses_layers():
    model = quantize_(tiny_model("mixtral"), filter=lambda module, name: "layers.1" in name)
    assert list(nvfp4_experts(model)) == ["model.layers.1.mlp.experts"]
    assert logits(model).isfinite().all()


def test_from_weights_on_a_module_without_data():
    model = tiny_model("gpt_oss")
    block = model.model.layers[0].mlp.experts
    with torch.device("meta"):
        empty = type(block)(model.config)
    gate_up = block.gate_up_proj.detach().mT
    rows = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
    bias = torch.cat([block.gate_up_proj_bias[:, 0::2], block.gate_up_proj_bias[:, 1::2]], 1)
    weights = (quantize(rows), quantize(block.down_proj.detach().mT), bias, block.down_proj_bias)
    experts = NVFP4Experts.from_weights(empty, *weights)
    x = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    assert torch.equal(experts(*x), quantize_(copy.deepcopy(model)).model.layers[0].mlp.experts(*x))
    for index, wanted in ((0, "gate_up: got shape"), (1, "down: got shape")):
        wrong = [*weights]
        wrong[index] = quantize(torch.randn(8, 16, 32))
        with pytest.raises(ValueError, match=wanted):
            NVFP4Experts.from_weights(empty, *wrong)
    with pytest.raises(ValueError, match=r"gate_up_bias: got shape None, wanted \(8, 64\)"):
        NVFP4Experts.from_weights(empty, *weights[:2])
    with pytest.raises(TypeError, match="got Linear, wanted an experts module"):
        NVFP4Experts.from_weights(nn.Linear(2, 2), *weights[:2])


def test_scales_per_row_are_exact():
    """Gate and up of a checkpoint may have global scales of their own."""
    block = tiny_model("qwen3_moe").model.layers[0].mlp.experts
    gate, up = (quantize(part.contiguous()) for part in block.gate_up_proj.detach().chunk(2, 1))
    down = quantize(block.down_proj.detach())
    experts = NVFP4Experts.from_weights(block, NVFP4Weight.concatenate(gate, up), down)
    stock = copy.deepcopy(block)
    with torch.no_grad():
        stock.gate_up_proj.copy_(torch.cat([dequantize(part, torch.float32) for part in (gate, up)], 1))
        stock.down_proj.copy_(dequantize(down, torch.float32))
        x = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
        assert relative_error(experts(*x), stock(*x)) < 1e-5


def test_refuses_and_leaves_the_model_unchanged():
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    broken = tiny_model("qwen3_moe")
    broken.model.layers[1].mlp.experts.down_proj.data[0, 0, 0] = float("nan")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    wrapped = tiny_model("qwen3_moe")
    for block in expert_blocks(wrapped).values():
        block.forward = partial(block.forward)
    odd = tiny_config("mixtral")
    odd.intermediate_size = 24
    once = quantize_(tiny_model("qwen3_moe"))
    moved = tiny_model("llama4")
    moved.model.layers[1].feed_forward = nn.ModuleDict({"experts": moved.model.layers[1].feed_forward.experts})
    bad = [
        (dense, ValueError, "found no experts of transformers, or .* to quantize in LlamaForCausalLM"),
        (once, ValueError, "quantized already, or all declined by the filter or ignored; it has NVFP4Experts"),
        (broken, ValueError, "'model.layers.1.mlp.experts' has NaN or Inf"),
        (empty, ValueError, "is on the meta device"),
        (wrapped, ValueError, r"layers.1.mlp.experts \(Qwen3MoeExperts\): something .* has wrapped its forward"),
        (tiny_model("mixtral", config=odd), ValueError, "has in_features 24, wanted a multiple of 16"),
        (moved, TypeError, "the parent of Llama 4's experts is a ModuleDict, wanted Llama4TextMoe"),
        (tiny_model("olmoe").model.layers[0].mlp.experts, ValueError, "got a bare OlmoeExperts"),
    ]
    for model, error, message in bad:
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(error, match=message):
            quantize_(model)
        assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(ValueError, match="found no NVFP4 modules"):
        dequantize_(dense)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_hooks_of_accelerate_survive(name):
    """A model spread over devices: each module has a hook that brings its inputs to its device."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen = []

    class Hook(hooks.AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return super().pre_forward(module, *args, **kwargs)

    model = tiny_model(name)
    expected = logits(quantize_(copy.deepcopy(model)))
    for module in model.modules():
        if module is not model:
            hooks.add_hook_to_module(module, Hook(execution_device="cpu"))
    quantize_(model)
    assert relative_error(logits(model), expected) < 1e-6  # behind a hook Llama 4's router keeps its own operations
    assert seen.count("NVFP4Experts") == len(ARCHITECTURES[name][2])
    decoded = dequantize_(model)
    seen.clear()
    assert relative_error(logits(decoded), expected) < 1e-5
    assert "NVFP4Experts" not in seen
    assert len([kind for kind in seen if kind.endswith("Experts")]) == len(ARCHITECTURES[name][2])


# The experts implementation "thunder_moe".


WITH_INTERFACE = [name for name in ALL if name != "llama4"]


@pytest.mark.parametrize("name", WITH_INTERFACE)
def test_implementation_quantizes_once(name, count):
    model = tiny_model(name, BF16, experts_implementation="thunder_moe")
    quantized = quantize_(tiny_model(name, BF16))
    assert torch.equal(logits(model), logits(quantized))
    layers = len(ARCHITECTURES[name][2])
    assert len(count) == 2 * layers
    logits(model)
    assert len(count) == 2 * layers
    block = next(iter(expert_blocks(model).values()))
    with torch.no_grad():
        block.down_proj.mul_(2)
    before = logits(quantized)
    assert not torch.equal(logits(model), before)
    assert len(count) == 2 * layers + 1


def test_implementation_trains_in_16_bits(count):
    model = tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe").train()
    stock = tiny_model("qwen3_moe", BF16, experts_implementation="grouped_mm").train()
    for one in (model, stock):
        one(tokens()).logits.float().square().mean().backward()
    assert not count
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    model.zero_grad()
    for block in expert_blocks(model).values():
        block.requires_grad_(False)
    model(tokens()).logits.float().square().mean().backward()
    assert len(count) == 4
    assert model.model.layers[0].mlp.gate.weight.grad.norm() > 0


def test_implementation_trains_in_16_bits_under_reentrant_checkpointing(count):
    model = tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe").train()
    block = next(iter(expert_blocks(model).values()))
    hidden = torch.randn(6, block.gate_up_proj.shape[-1], dtype=BF16, requires_grad=True)
    choice = torch.rand(6, block.num_experts).topk(2)
    inputs = (hidden, choice.indices, choice.values.to(BF16))
    plain = block(*inputs)
    assert torch.equal(checkpoint(block, *inputs, use_reentrant=True), plain)
    assert not count
    with torch.no_grad():
        assert not torch.equal(block(*inputs), plain)
    assert len(count) == 2


def test_implementation_sees_what_changes_after_a_training_forward():
    model = tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe")
    logits(model)
    model(tokens()).logits.float().square().mean().backward()
    for parameter in model.parameters():
        parameter.data.mul_(-3)  # leaves no trace in the parameter
    assert torch.equal(logits(model), logits(quantize_(copy.deepcopy(model))))


def test_implementation_sees_another_activation_or_gate():
    model = tiny_model("qwen3_moe", experts_implementation="thunder_moe").requires_grad_(False)
    logits(model)
    for change in (
        lambda experts: setattr(experts, "act_fn", nn.GELU()),
        lambda experts: setattr(experts, "_apply_gate", lambda gate_up: 2 * gate_up.chunk(2, -1)[0].relu()),
    ):
        for experts in expert_blocks(model).values():
            change(experts)
        out = logits(model)
        model.set_experts_implementation("grouped_mm")
        assert relative_error(out, logits(dequantized_experts(model))) < 1e-4
        model.set_experts_implementation("thunder_moe")


ACTIVATIONS = {
    "act_fn": lambda experts: setattr(experts, "act_fn", nn.GELU()),
    "limit": lambda experts: setattr(experts, "limit", 0.5),
    "alpha": lambda experts: setattr(experts, "alpha", 1.1),
    "gate": lambda experts: setattr(experts, "_apply_gate", lambda rows: rows[..., ::2].relu() * rows[..., 1::2]),
}


SET_AFTERWARDS = [("qwen3_moe", "act_fn"), ("llama4", "act_fn"), ("qwen3_moe", "gate")]
SET_AFTERWARDS += [("gpt_oss", change) for change in ("limit", "alpha", "gate")]


@pytest.mark.parametrize(("name", "change"), SET_AFTERWARDS)
@pytest.mark.parametrize("way", ["eager", "adapted", pytest.param("compiled", marks=pytest.mark.exhaustive)])
def test_an_activation_that_is_set_after_quantize_is_what_runs(name, change, way):
    quantized, decoded = quantized_and_decoded(tiny_model(name, config=tiny_config(name, layers=1)))
    if way == "adapted":
        add_lora_(quantized, 4, 8)  # which adds nothing yet
    for experts in nvfp4_experts(quantized).values() if way == "compiled" else ():
        experts.compile(backend="eager", fullgraph=True)
    before = logits(quantized)
    for model in (quantized, decoded):
        for path in nvfp4_experts(quantized):
            ACTIVATIONS[change](model.get_submodule(path))
    assert relative_error(logits(decoded), before) > 0.01
    assert relative_error(logits(quantized), logits(decoded)) < 1e-5


def dequantized_experts(model):
    """A copy with the weights that 4 bits stand for, whatever else its experts have."""
    copied = copy.deepcopy(model)
    for experts in expert_blocks(copied).values():
        for parameter in (experts.gate_up_proj, experts.down_proj):
            parameter.data.copy_(dequantize(quantize(parameter.data), parameter.dtype))
    return copied


def test_implementation_runs_parametrised_weights_in_16_bits(count):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model = tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe").requires_grad_(False)
    logits(model)
    for name, experts in zip(("gate_up_proj", "down_proj"), expert_blocks(model).values(), strict=True):
        nn.utils.parametrize.register_parametrization(experts, name, Doubled())
    seen = len(count)
    out = logits(model)
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(out, logits(model))
    assert len(count) == seen


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="on torch 2.10 and a CPU, transformers looks at addresses, which dynamo cannot trace",
)
def test_implementation_with_the_backend_and_with_another():
    layer = (
        tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe").requires_grad_(False).model.layers[0].mlp
    )
    hidden = torch.randn(2, 9, 64, dtype=BF16)
    compiled = torch.compile(layer, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "aot_eager"})
    assert relative_error(compiled(hidden), layer(hidden)) < 0.02
    assert [entry.decision for entry in rewrite_report(compiled)] == ["nvfp4 + swiglu", "nvfp4"]
    torch._dynamo.reset()
    with pytest.raises(Exception, match="got backend 'eager' for a model of experts_implementation=\"thunder_moe\""):
        torch.compile(layer, backend="eager", fullgraph=True)(hidden)


def test_implementation_asked_of_from_pretrained(tmp_path):
    tiny_model("qwen3_moe", BF16).save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path, dtype=BF16, experts_implementation="thunder_moe")
    quantized = quantize_(load(tmp_path, dtype=BF16))
    assert model.config._experts_implementation == "thunder_moe"
    assert torch.equal(logits(model), logits(quantized))


@pytest.mark.parametrize("kind", COMPILED)
def test_implementation_under_thunder(kind):
    import thunder

    from thunder_moe import moe_executor

    experts = make_experts(*KINDS[kind]).to(BF16).requires_grad_(False)
    experts.config._experts_implementation = "thunder_moe"
    x, ids, weights = routing()
    function = thunder.jit(experts, executors=[moe_executor])
    out = function(x.to(BF16), ids, weights.to(BF16))
    expected = swapped(experts)[0](x.to(BF16), ids, weights.to(BF16))
    assert relative_error(out, expected) < 0.01
    assert len(rewrite_report(function).rewritten) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")
@pytest.mark.parametrize("kind", others_slow(KINDS, ("fused",), exhaustive=True))
def test_experts_with_an_8_bit_recipe_under_thunder(kind):
    import thunder

    from thunder_moe import moe_executor, prepare_8bit_training_

    experts = prepare_8bit_training_(make_experts(*KINDS[kind]), "fp8")
    function = thunder.jit(experts, executors=[moe_executor])
    x, ids, weights = routing()
    out, expected = function(x, ids, weights), experts(x, ids, weights)
    assert relative_error(out, expected) < 1e-5
    (of_compiled,) = torch.autograd.grad(out.sum(), experts.down_proj)
    assert relative_error(of_compiled, torch.autograd.grad(expected.sum(), experts.down_proj)[0]) < 1e-5


@pytest.mark.parametrize(
    "kind", others_slow(["fused", "biases, in turns", "no gate"], ("biases, in turns",), exhaustive=True)
)
@pytest.mark.slow
def test_quantized_experts_under_thunder(kind):
    import thunder

    from thunder_moe import moe_executor

    experts = swapped(make_experts(*KINDS[kind]))[0]
    function = thunder.jit(experts, executors=[moe_executor])
    results, (x, ids, weights) = [], routing()
    for run in (experts, function):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        out = run(leaves[0], ids, leaves[1])
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        results.append((out, *(leaf.grad for leaf in leaves)))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5
    assert [entry.reason.split()[-1] for entry in rewrite_report(function)] == ["beforehand"] * 2


@pytest.mark.parametrize("kind", COMPILED)
def test_implementation_compiled_with_sentinels(kind):
    experts = make_experts(*KINDS[kind]).to(BF16).requires_grad_(False)
    experts.config._experts_implementation = "thunder_moe"
    experts._is_expert_parallel = True
    x, ids, weights = routing()
    ids[torch.rand(ids.shape) < 0.4] = 6
    inputs = x.to(BF16), ids, weights.to(BF16)
    function = torch.compile(experts, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "aot_eager"})
    out = function(*inputs)
    assert out.isfinite().all()
    assert relative_error(out, experts(*inputs)) < 0.01
    assert len(rewrite_report(function).rewritten) == 2


def test_implementation_leaves_other_models_alone():
    other = tiny_model("qwen3_moe", BF16)
    before = logits(other)
    tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe")
    assert torch.equal(logits(other), before)


class TestBatchInvariance:
    """`batch_invariant()` around layers of transformers; attention and norms of whole models are torch's."""

    FAMILIES = ("qwen3_moe", "llama4", "afmoe", "hunyuan_v1_moe", "lfm2_moe", "qwen2_moe", "phimoe")

    @pytest.mark.parametrize("name", FAMILIES)
    @torch.no_grad()
    def test_layers(self, name):
        """Also routers that keep their own operations, and shared experts with their gates, which are 16-bit layers."""
        model = quantize_(tiny_model(name))
        layer = next(each for each in model.modules() if any(isinstance(c, NVFP4Experts) for c in each.children()))
        hidden = torch.randn(1, 65, 64)

        def run(tokens):
            out = layer(tokens)
            return (out[0] if isinstance(out, tuple) else out).reshape(-1, 64)

        with batch_invariant():
            whole = run(hidden)
            for some in (slice(3, 4), slice(64, 65), slice(3, 10)):
                assert torch.equal(run(hidden[:, some]), whole[some])
        torch.testing.assert_close(whole, run(hidden), rtol=1e-3, atol=1e-5)

    def test_what_is_refused(self):
        trained = tiny_model("qwen3_moe", BF16, experts_implementation="thunder_moe")
        adapted = add_lora_(quantize_(tiny_model("qwen3_moe")), rank=2, alpha=2)
        for model, reason in (
            (trained, "experts that train in transformers' 16-bit code"),
            (adapted, "LoRA adapters of experts"),
        ):
            with batch_invariant(), pytest.raises(ValueError, match=f"batch_invariant: {reason}"):
                model(tokens())
