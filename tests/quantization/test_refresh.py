"""refresh_ of a quantized model with the 16-bit weights of a trainer: bits, addresses, compiled graphs, FSDP2, errors.
Called by pytest; calls thunder_moe.refresh_, and quantize_ of the trained model as the judge.
"""

import copy
import weakref

import pytest
import torch
from torch import nn

from thunder_moe import (
    GroupedMLP,
    Llama4MoE,
    Llama4MoEConfig,
    per_expert_state_dict,
    quantize_,
    refresh_,
    to_layout_,
    weight_cache,
)
from thunder_moe.formats import layouts
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.nn.packed import PackedModule
from thunder_moe.quantization import refresh
from thunder_moe.quantization.layer_chain import numbered_layers

BF16 = torch.bfloat16
EXPERTS = "2.routed_experts.gate_proj.weight"


def trained(model):
    """Return a copy of a model with other weights and buffers."""
    result = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in result.state_dict().items():
            tensor.add_(torch.randn(tensor.shape) * (0.3 if "bias" in name else 0.02))
    return result


def llama4_moe():
    return Llama4MoE(Llama4MoEConfig(hidden_size=64, intermediate_size=64, num_experts=4)).to(BF16)


def require_same(model, judge):
    ours, wanted = model.state_dict(), judge.state_dict()
    assert list(ours) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (ours[name], tensor))), name


OPTIONS = {
    "experts": {},
    "linears": dict(linears=["*_proj", "lm_head"]),
    "mse": dict(linears=["*self_attn*"], scale_search="mse"),
    "mxfp8": dict(format="mxfp8", linears=["*_proj"]),
    "mixed": dict(format={"*.layers.0.*": "mxfp8"}, linears=["*.layers.0.*", "lm_head"], layout="linear"),
    "some": dict(filter="*.layers.1.*"),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "gpt_oss", "mixtral"])
@pytest.mark.covering(1)
def test_models_of_transformers_take_a_trainers_weights(name, options):
    pytest.importorskip("transformers")
    from tiny_models import tiny_model, tokens

    base = tiny_model(name, BF16)
    trainer = trained(base)
    model = quantize_(base, **options)
    addresses = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
    judge = quantize_(copy.deepcopy(trainer), **options)
    assert refresh_(model, trainer.state_dict(), scale_search=options.get("scale_search")) is model
    require_same(model, judge)
    assert {key: tensor.data_ptr() for key, tensor in model.state_dict().items()} == addresses
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, judge(tokens()).logits)


@pytest.mark.parametrize("layout", ["auto", "linear", "tiled_64x64"])
def test_modules_of_this_package(layout):
    for base in (
        nn.Sequential(nn.Linear(64, 64, dtype=BF16), llama4_moe()),
        nn.ModuleDict({"experts": GroupedMLP(4, 64, 64, bias=True, dtype=BF16)}),
    ):
        trainer = trained(base)
        model, judge = (quantize_(copy.deepcopy(each), layout=layout) for each in (base, trainer))
        refresh_(model, trainer.state_dict())
        require_same(model, judge)
        weights = {key: tensor.float() for key, tensor in base.state_dict().items()}
        refresh_(model, weights)  # and back, from float32
        require_same(model, quantize_(copy.deepcopy(base), layout=layout))
        refresh_(model, per_expert_state_dict(trainer))
        require_same(model, judge)


def test_weights_in_tiles_are_not_converted_to_another_layout(monkeypatch):
    """It would take half of a minute per layer on a GPU, for numbers that are replaced."""
    trainer = trained(base := llama4_moe())
    model = to_layout_(quantize_(base), "tiled_64x64")
    judge = to_layout_(quantize_(copy.deepcopy(trainer)), "tiled_64x64")
    with monkeypatch.context() as patch:
        patch.setattr(layouts, "from_tiled", None)
        refresh_(model, trainer.state_dict())
    assert {part.layout for part in model.modules() if isinstance(part, PackedModule)} == {"tiled_64x64"}
    require_same(model, judge)


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (["model.layers.0.mlp.experts.1", "model.layers.12.q", "lm_head"], ["model.layers.0", "model.layers.12", None]),
        (["0.model.layers.0.mlp", "0.model.layers.1.mlp", "0.lm_head"], ["0.model.layers.0", "0.model.layers.1", None]),
        (["0.layers.0.experts.0", "0.layers.0.experts.1"], ["0.layers.0", "0.layers.0"]),
        (["0.experts", "1.experts"], ["0", "1"]),
        (["0.experts", "0.shared"], ["0", "0"]),
        (["10.experts", "1.layer2.experts"], ["10", "1"]),
        (["experts"], [None]),
    ],
)
def test_layers_by_their_numbers(names, layers):
    assert [numbered_layers(names).get(name) for name in names] == layers


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["shared", "cast"])
def test_one_layer_at_a_time_has_memory(monkeypatch, dtype):
    """Also of a model in a Sequential. Weights that need no cast are not copied at all, and none is changed."""
    base = nn.Sequential(nn.ModuleDict({"layers": nn.ModuleList([llama4_moe(), llama4_moe()])}))
    trainer = trained(base)
    weights = {name: tensor.to(dtype) for name, tensor in trainer.state_dict().items()}
    before, model, taken, seen = copy.deepcopy(weights), quantize_(base), [], []
    refresh_layer, load = refresh._refresh_layer, refresh._load

    def watch_layer(layer, *args):
        assert all(block.copy.down_proj.weight.is_meta for block in layer.blocks)
        assert all(each() is None for each in taken)  # of the layers before
        taken.extend(weakref.ref(block.copy) for block in layer.blocks)
        refresh_layer(layer, *args)

    def watch_load(block):
        load(block)
        given = weights[f"{block.names[0]}.down_proj.weight"]
        seen.append(block.copy.down_proj.weight.data_ptr() == given.data_ptr())

    monkeypatch.setattr(refresh, "_refresh_layer", watch_layer)
    monkeypatch.setattr(refresh, "_load", watch_load)
    refresh_(model, weights)
    require_same(model, quantize_(trainer))
    assert seen == [dtype == BF16] * 2
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


class Transposing(nn.Module):
    """A module whose checkpoints have its weight transposed, by its own load or by a hook."""

    def __init__(self, by_hook=False, **children):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=BF16))
        self._modules.update(children)
        if by_hook:
            self.register_load_state_dict_pre_hook(lambda module, state, prefix, *args: module.transpose(state, prefix))

    def transpose(self, state, prefix):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].T


class TransposingByItself(Transposing):
    def _load_from_state_dict(self, state, prefix, *args):
        super()._load_from_state_dict(dict(state) | {f"{prefix}weight": state[f"{prefix}weight"].T}, prefix, *args)


@pytest.mark.parametrize("make", [TransposingByItself, lambda **children: Transposing(True, **children)])
def test_modules_that_change_what_they_load(make):
    weight = torch.randn(8, 8, dtype=BF16)
    base = nn.Sequential(nn.ModuleDict({"moe": llama4_moe(), "own": make()}), make())
    state, model = trained(base).state_dict(), quantize_(base)
    refresh_(model, state | {"0.own.weight": weight, "1.weight": weight})
    assert torch.equal(model[0]["own"].weight, weight.T)
    assert torch.equal(model[1].weight, weight.T)
    around = quantize_(nn.ModuleDict({"layers": nn.ModuleList([make(moe=llama4_moe())])}))
    with pytest.raises(ValueError, match=r"model: layers\.0 holds quantized modules and changes what they load"):
        refresh_(around, {})


@pytest.mark.parametrize("prefix", ["", "attention."])
def test_dense_layers_that_share_a_scale_outside_of_numbered_layers(prefix):
    linears = nn.ModuleDict({name: nn.Linear(64, 64, dtype=BF16) for name in ("q_a_proj", "kv_a_proj_with_mqa")})
    base = linears if not prefix else nn.ModuleDict({"attention": linears})
    trainer = trained(base)
    with torch.no_grad():
        trainer.get_parameter(f"{prefix}q_a_proj.weight").mul_(3)
    model, judge = (quantize_(each, linears="*") for each in (base, copy.deepcopy(trainer)))
    require_same(refresh_(model, trainer.state_dict()), judge)


def test_a_model_without_data():
    weights = llama4_moe().state_dict()
    with pytest.raises(ValueError, match="model: routed_experts is on the meta device or offloaded"):
        refresh_(quantize_(llama4_moe()).to("meta"), weights)
    model = quantize_(llama4_moe())
    model.router.to("meta")
    with pytest.raises(ValueError, match=r"model: router\.weight is on the meta device or offloaded"):
        refresh_(model, weights)


def test_a_compiled_graph_reads_the_new_weights():
    base = llama4_moe()
    trainer = trained(base)
    compiled = torch.compile(quantize_(base), backend="aot_eager", fullgraph=True)
    rows = torch.randn(2, 5, 64, dtype=BF16)
    with torch.no_grad():
        before = compiled(rows)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert refresh_(compiled, trainer.state_dict()) is compiled
            after = compiled(rows)
        wanted = quantize_(trainer)(rows)
    assert not torch.equal(before, after)
    assert torch.equal(after, wanted)


def test_captured_graphs_read_copies_of_the_weights_that_stay_in_16_bits():
    model = quantize_(nn.Sequential(llama4_moe(), llama4_moe()), filter="1")
    weight = model[0].routed_experts.gate_proj.weight.requires_grad_(False)
    copied = weight_cache.get(weight)  # of a compiled graph; the replay of a CUDA graph asks for no other
    weights = trained(nn.Sequential(llama4_moe(), llama4_moe())).state_dict()
    refresh_(model, weights)
    assert torch.equal(copied.qdata, quantize(weights["0.routed_experts.gate_proj.weight"]).qdata)


def test_models_with_hooks_of_accelerate():
    hooks = pytest.importorskip("accelerate.hooks")
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    base = tiny_model("qwen3_moe", BF16)
    trainer = trained(base)
    for layer in base.model.layers:
        hooks.add_hook_to_module(layer.mlp.experts, hooks.AlignDevicesHook(execution_device="cpu"))
    require_same(refresh_(quantize_(base), trainer.state_dict()), quantize_(trainer))


def test_tied_experts_and_heads_stay_tied():
    shared = llama4_moe()
    base = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"moe": shared}), nn.ModuleDict({"moe": shared})])})
    trainer = trained(base)
    model = quantize_(base)
    refresh_(model, trainer.state_dict())
    assert model["layers"][0]["moe"] is model["layers"][1]["moe"]
    require_same(model, quantize_(trainer))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda weights: weights.pop("0.weight"), ValueError, r"weights: missing 0.weight; unknown none; wanted"),
        (lambda weights: weights.update(other=weights["0.weight"]), ValueError, "missing none; unknown other;"),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if name[0] == "1"],
            ValueError,
            r"missing 1\.router\.weight, .*; unknown none",
        ),
        (lambda weights: weights.update({"0.weight": torch.zeros(3)}), RuntimeError, r"0.weight: got shape \(3,\)"),
        (lambda weights: weights.pop("1.router.weight"), ValueError, r"missing 1\.router\.weight;"),
        (
            lambda weights: weights["1.router.weight"].resize_(1),
            RuntimeError,
            r"weights: 1.router.weight: got shape \(1,\), wanted",
        ),
        (lambda weights: weights.pop(EXPERTS), ValueError, f"missing {EXPERTS}; unknown none"),
        (lambda weights: weights.update(other=weights.pop(EXPERTS)), ValueError, f"missing {EXPERTS}; unknown other"),
        (
            lambda weights: weights.update({EXPERTS: weights[EXPERTS][:1]}),
            RuntimeError,
            r"(?s)weights: 2.routed_experts: .*gate_proj.weight",
        ),
        (lambda weights: weights.update({EXPERTS: None}), TypeError, f"{EXPERTS}: got NoneType, wanted a tensor"),
        (lambda weights: weights[EXPERTS].fill_(torch.nan), ValueError, r"weights: 2.routed_experts: .*NaN"),
    ],
    ids=[
        "missing",
        "unknown",
        "no layer",
        "shape",
        "missing in a layer",
        "shape in a layer",
        "no experts",
        "other experts",
        "shape of experts",
        "no tensor",
        "nan",
    ],
)
def test_bad_weights(change, error, message):
    base = nn.Sequential(nn.Linear(64, 64, dtype=BF16), llama4_moe(), llama4_moe())
    weights = trained(base).state_dict()
    model = quantize_(base)
    before = copy.deepcopy(model)
    change(weights)
    with pytest.raises(error, match=message):
        refresh_(model, weights)
    first = 2 if "NaN" in message else 0  # the layers before NaN are new
    require_same(model[first:], before[first:])


def test_names_of_a_compiled_trainer_are_an_error_of_one_line():
    base = nn.Sequential(*[llama4_moe() for _ in range(12)])
    weights = torch.compile(base).state_dict()
    with pytest.raises(ValueError, match=r"unknown _orig_mod\..*'_orig_mod\.'") as error:
        refresh_(quantize_(copy.deepcopy(base)), weights)
    assert len(str(error.value)) < 1000


def test_bad_models_and_options():
    model = llama4_moe()
    with pytest.raises(ValueError, match="model: found nothing quantized in Llama4MoE"):
        refresh_(model, model.state_dict())
    with pytest.raises(TypeError, match="weights: got Llama4MoE, wanted a state dict"):
        refresh_(quantize_(llama4_moe()), model)
    with pytest.raises(ValueError, match="scale_search: got 'mse' without weights"):
        refresh_(model, scale_search="mse")
    mxfp8 = quantize_(llama4_moe(), "mxfp8")
    for scale_search in ("mse", "other"):
        with pytest.raises(ValueError, match=f"scale_search: got {scale_search!r}"):
            refresh_(mxfp8, model.state_dict(), scale_search=scale_search)
    hooked = nn.Sequential(quantize_(llama4_moe()))
    hooked[0].routed_experts.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match="model: 0.routed_experts .* cannot take weights: it has forward hooks"):
        refresh_(hooked, {f"0.{key}": tensor for key, tensor in model.state_dict().items()})


def of_a_sharded_trainer():
    """Run on each rank: refresh from the DTensors of FSDP2, and compare with whole weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64, dtype=BF16), llama4_moe())
    trainer = trained(base)
    judge = quantize_(copy.deepcopy(trainer))
    model = quantize_(base)
    fully_shard(trainer, mesh=init_device_mesh("cpu", (2,)))
    weights = trainer.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in weights.values())
    refresh_(model, weights)
    require_same(model, judge)


def test_weights_of_fsdp2(ranks):
    ranks(2)(of_a_sharded_trainer)
