"""`calibrate_`: the modules of quantize_ with codes that fit the rows which each expert gets; ties, memory, bad input.
Called by pytest; judged by `nvfp4.quantize` with Hessians made here, by products in float64, and by `quantize_`.
"""

import copy
import json
import weakref
from dataclasses import asdict

import pytest
import torch
from fast_cases import others_slow
from tiny_models import ARCHITECTURES, OTHERS, VOCABULARY, tiny_config, tiny_model
from torch import nn
from torch.utils._pytree import tree_map_only

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    ScaledSwiGLU,
    calibrate_,
    load_checkpoint,
    quantize_,
    save_checkpoint,
)
from thunder_moe.dense_names import is_encoder, is_linear
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.quantization import calibrate, kept_layers

EXPERTS, K = 4, 32


class Blocks(nn.Module):
    """The modules of this package, one behind the other."""

    def __init__(self):
        super().__init__()
        self.swiglu, self.wide = GroupedSwiGLU(EXPERTS, 64, 32), GroupedSwiGLU(EXPERTS, 64, 32)
        self.mlp = GroupedMLP(EXPERTS, 64, 32, activation=ScaledSwiGLU())

    def forward(self, x, offsets, scales):
        return self.wide(self.mlp(self.swiglu(x, offsets), offsets, scales), offsets)


class Grouped(nn.Module):
    """Rows sorted by expert, and their ends, through one GroupedLinear."""

    def __init__(self):
        super().__init__()
        self.inner = GroupedLinear(EXPERTS, K, 24)

    def forward(self, x, offsets):
        return self.inner(x, offsets)


def moe(layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Llama4MoE(Llama4MoEConfig(64, 32, EXPERTS, top_k=2)) for _ in range(layers)))


def tokens(seed, rows=2, length=60):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def test_hessians_are_of_the_rows_of_each_expert():
    """Expert 1 has no row, 2 and 3 fewer than in_features; sums of small integers are exact."""
    model, generator = Grouped(), torch.Generator().manual_seed(4)
    weight = model.inner.weight.detach().clone()
    counts = torch.tensor([[48, 0, 8, 0], [64, 0, 0, 8]])
    batches = [torch.randint(-3, 4, (int(row.sum()), K), generator=generator).float() for row in counts]
    inputs = [dict(x=rows, offsets=row.cumsum(0).to(torch.int32)) for rows, row in zip(batches, counts, strict=True)]
    parts = [x.split(row.tolist()) for x, row in zip(batches, counts, strict=True)]
    rows = [torch.cat(of_expert) for of_expert in zip(*parts, strict=True)]
    assert all(x.any(-1).all() for x in rows)
    own = torch.stack([x.T @ x for x in rows])
    missing = (K - counts.sum(0)).clamp_min(0)
    assert missing.tolist() == [0, 32, 24, 24]
    hessian = own + missing[:, None, None] * (own.sum(0) / 128)
    assert torch.allclose(hessian[1], K * own.sum(0) / 128)  # the layer's
    found = calibrate_(model, inputs)
    wanted = quantize(weight, hessian=hessian)
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(model.inner.packed_weight.tensors(), wanted.tensors(), strict=True)
    )
    assert not torch.equal(wanted.qdata, quantize(weight).qdata)
    (of_weight,) = found.weights
    assert (of_weight.name, of_weight.rows, of_weight.fewest) == ("inner.weight", 128, 0)
    for packed, error in ((wanted, of_weight.calibrated), (quantize(weight), of_weight.rounded)):
        pairs = [
            (x.double() @ w.double().T, x.double() @ (w - q).double().T)
            for x, w, q in zip(rows, weight, dequantize(packed, torch.float32), strict=True)
        ]
        output, noise = (torch.cat(each).norm() for each in zip(*pairs, strict=True))
        assert error == pytest.approx((noise / output).item(), rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("scale_search", [None, pytest.param("mse", marks=pytest.mark.exhaustive)])
def test_models_of_transformers(name, scale_search):
    """Grouped GEMMs; transposed weights with biases; all experts on all tokens. Dense layers, some of them stacked."""
    plain, batches, held_out = tiny_model(name, torch.bfloat16), [tokens(1), tokens(2)], tokens(3)
    options = dict(linears="*_proj", scale_search=scale_search)
    model = copy.deepcopy(plain)
    found = calibrate_(model, batches, **options)
    rounded = quantize_(copy.deepcopy(plain), **options)
    assert {n: (x.shape, x.dtype) for n, x in model.state_dict().items()} == {
        n: (x.shape, x.dtype) for n, x in rounded.state_dict().items()
    }
    assert [type(module) for module in model.modules()] == [type(module) for module in rounded.modules()]
    assert all(each.calibrated < 0.95 * each.rounded for each in found.weights)
    experts = [each for each in found.weights if ".experts." in each.name]
    assert [each.rows for each in experts] == [2 * 2 * 120] * 4  # two experts a token
    with torch.no_grad():
        for text, factor in ((batches[0], 1), (held_out, 1.1)):
            errors = [(each(text).logits - plain(text).logits).float().norm().item() for each in (model, rounded)]
            assert errors[0] < factor * errors[1]


def test_a_layer_sees_the_rows_of_quantized_layers():
    """Hessians of the second layer are of rows that the 4-bit first layer makes."""
    model, other, x = moe(), moe(), torch.randn(2, 30, 64)
    calibrate_(model, [x])
    calibrate_(other, [x], filter="0")
    calibrate_(other, [x])
    assert same_bits(model.state_dict(), other.state_dict())
    apart = moe()
    calibrate_(apart, [x], filter="1")
    assert not torch.equal(apart[1].routed_experts.down_proj.qdata, model[1].routed_experts.down_proj.qdata)


def deep(layers=4):
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    return tiny_model("qwen3_moe", config=config)


def counted(model):
    """Return the numbers of runs of a model's layers, which go on."""
    runs = [0] * len(model.model.layers)
    for number, layer in enumerate(model.model.layers):

        def count(*_, number=number):
            runs[number] += 1

        layer.mlp.register_forward_hook(count)
    return runs


def copied(layer, args, kwargs):
    return tree_map_only(torch.Tensor, torch.clone, (args, kwargs))


def break_chain(model):
    """Let layers take copies of their inputs, so that no results are stored from layer to layer."""
    for layer in model.model.layers:
        layer.register_forward_pre_hook(copied, with_kwargs=True)


@pytest.mark.parametrize("device", [None, pytest.param("cpu", marks=pytest.mark.exhaustive)])
def test_layers_run_on_stored_results(device):
    batches, options = [tokens(1), tokens(2)], dict(linears=["*_proj", "lm_head"])
    chain, passes = deep(), deep()
    runs, runs_of_passes = counted(chain), counted(passes)
    break_chain(passes)
    said = calibrate_(chain, batches, device=device, **options)
    assert said == calibrate_(passes, batches, **options)
    assert same_bits(chain.state_dict(), passes.state_dict())
    # Two runs for the checks, one of a layer in 16 bits on each batch, and one in 4 bits; the head stops behind all.
    assert runs == [2 + 2 * 2] * 4
    assert max(runs_of_passes) > 8


def test_moves_to_the_device_do_not_grow_with_the_batches(monkeypatch):
    moves, to = [], nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda module, device: (moves.append(module), to(module, device))[1])
    counts = []
    for batches in (1, 2):
        moves.clear()
        calibrate_(deep(3), [tokens(n) for n in range(batches)], linears=["*_proj", "lm_head"], device="cpu")
        counts.append(len(moves))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("device", [pytest.param(None, marks=pytest.mark.exhaustive), "cpu"])
def test_resumes_layer_by_layer(tmp_path, monkeypatch, device):
    batches, options = [tokens(1), tokens(2)], dict(linears=["*_proj", "lm_head"], device=device)
    whole, resumed = deep(), deep()
    said, calls, save = calibrate_(whole, batches, **options), [], kept_layers.save_file

    def killed(content, path):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(path)
        save(content, path)

    with monkeypatch.context() as patch:
        patch.setattr(kept_layers, "save_file", killed)
        with pytest.raises(KeyboardInterrupt):
            calibrate_(deep(), batches, destination=tmp_path / "out", **options)
    runs = counted(resumed)
    assert calibrate_(resumed, batches, destination=tmp_path / "out", **options) == said
    assert same_bits(whole.state_dict(), resumed.state_dict())
    assert max(runs) <= 2 + 2 * 2


def test_a_device_needs_layers_in_a_row():
    model = deep()
    break_chain(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="device: got 'cpu', but the layers of .* do not run one after the other"):
        calibrate_(model, [tokens(1)], device="cpu")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="device: got 'cpu', but the layers of .* do not run one after the other"):
        calibrate_(Grouped(), [dict(x=torch.randn(8, K), offsets=torch.tensor([2, 4, 6, 8]))], device="cpu")


def test_layers_that_change_their_input_or_read_others_are_run_again():
    for change in (
        lambda model, layer, args: args[0].add_(0.0),
        lambda model, layer, args: None if layer is model.model.layers[0] else args[0].add_(model.seen),
    ):
        models = [deep(3), deep(3)]
        for model in models:
            model.seen = 0.0
            for layer in model.model.layers:
                layer.register_forward_pre_hook(
                    lambda layer, args, model=model, change=change: change(model, layer, args)
                )

            def see(layer, args, out, model=model):
                model.seen = float(out.flatten()[0])

            model.model.layers[0].mlp.register_forward_hook(see)
        break_chain(models[1])
        assert calibrate_(models[0], [tokens(1), tokens(2)]) == calibrate_(models[1], [tokens(1), tokens(2)])
        assert same_bits(*(model.state_dict() for model in models))


def test_a_move_to_another_device_is_not_a_use():
    weight = torch.randn(1, 8, 16)
    with calibrate._Watch([calibrate._Weight("gate_up", weight, False)]):
        assert weight.to("meta").is_meta
        with pytest.raises(ValueError, match="it reads 'gate_up' by aten._to_copy"):
            weight.double()


@pytest.mark.gpu
def test_a_model_in_main_memory_is_calibrated_on_a_gpu():
    on_gpu, in_memory = deep().cuda(), deep()
    said = calibrate_(on_gpu, [tokens(1).cuda()], linears=["*_proj"])
    others = calibrate_(in_memory, [tokens(1)], linears=["*_proj"], device="cuda")
    assert {tensor.device.type for tensor in in_memory.state_dict().values()} == {"cpu"}
    for one, other in zip(said.weights, others.weights, strict=True):
        assert one.calibrated == pytest.approx(other.calibrated, rel=0.02)


def test_is_repeatable_and_keeps_modes():
    results = []
    for _ in range(2):
        model = tiny_model("qwen3_moe").train()
        calibrate_(model, iter([dict(input_ids=tokens(1)), tokens(2)]), linears="*_proj")
        assert all(module.training for module in model.modules())
        assert not model.model.layers[0]._forward_hooks
        results.append(model.state_dict())
    assert same_bits(*results)


def test_autocast_changes_nothing():
    inside, outside = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    with torch.autocast("cpu", torch.bfloat16):
        calibrate_(inside, [tokens(1)])
    calibrate_(outside, [tokens(1)])
    assert same_bits(inside.state_dict(), outside.state_dict())


def test_ways_to_compute_experts_agree():
    found = []
    for implementation in ("eager", "grouped_mm"):
        model = tiny_model("qwen3_moe")
        model.set_experts_implementation(implementation)
        found.append(calibrate_(model, [tokens(1)]).weights)
    for a, b in zip(*found, strict=True):
        assert (a.name, a.rows, a.fewest) == (b.name, b.rows, b.fewest)
        assert a.calibrated == pytest.approx(b.calibrated, rel=0.05)


def test_modules_of_ours_and_both_formats():
    torch.manual_seed(0)
    model, options = Blocks(), {"format": {"wide": "mxfp8", "*": "nvfp4"}}
    batch = dict(
        x=torch.randn(60, 64), offsets=torch.tensor([15, 15, 40, 60], dtype=torch.int32), scales=torch.rand(60)
    )
    other = copy.deepcopy(model)
    rounded = quantize_(copy.deepcopy(model), **options)
    found = calibrate_(model, [batch], **options)
    assert [each.name for each in found.weights] == [
        *(f"{name}.{part}_proj.weight" for name in ("swiglu", "wide") for part in ("gate", "up", "down")),
        *(f"mlp.{part}_proj.weight" for part in ("gate_up", "down")),
    ]
    assert all((each.rows, each.fewest) == (60, 0) and each.calibrated < 0.9 * each.rounded for each in found.weights)
    assert {name: x.dtype for name, x in model.state_dict().items()} == {
        name: x.dtype for name, x in rounded.state_dict().items()
    }
    assert not same_bits(model.wide.state_dict(), rounded.wide.state_dict())
    # A subclass has no fused activation, and the same rows.
    other.mlp.activation = type("Own", (ScaledSwiGLU,), {})()
    apart = calibrate_(other, [batch], **options)
    assert [each.calibrated for each in apart.weights] == pytest.approx(
        [each.calibrated for each in found.weights], rel=0.02
    )


def test_frees_each_layer_before_the_next():
    model, alive = moe(3), []
    dead = [weakref.ref(block.routed_experts.gate_proj.weight) for block in model]
    model.register_forward_pre_hook(lambda *_: alive.append(sum(weight() is not None for weight in dead)))
    calibrate_(model, [torch.randn(1, 30, 64)])
    assert alive == [3, 3, 3, 3, 3, 2, 1]  # a pass that checks, one for each layer that compares, and calibrates
    assert all(weight() is None for weight in dead)


def test_the_report_prints_and_is_json():
    found = calibrate_(moe(1), [torch.randn(2, 30, 64)])
    head, *lines = str(found).splitlines()
    assert head.split() == ["weight", "rows", "fewest", "rounded", "calibrated"]
    assert [line.split()[0] for line in lines] == [
        f"0.routed_experts.{name}_proj.weight" for name in ("gate", "up", "down")
    ]
    assert json.loads(json.dumps(asdict(found)))["weights"][2]["rows"] == 120


# Kinds of layers that `test_models_of_transformers` lacks: experts beside dense layers, of Mamba, a vision model.
KINDS_OF_LAYERS = ["deepseek_v3", "jamba", "qwen3_vl_moe"]


@pytest.mark.parametrize(
    "name",
    [
        *others_slow(KINDS_OF_LAYERS),
        *others_slow(sorted((ARCHITECTURES | OTHERS).keys() - set(KINDS_OF_LAYERS)), exhaustive=True),
    ],
)
def test_every_architecture(name):
    found = calibrate_(tiny_model(name), [tokens(1, length=30)], linears=decoder_linear)
    assert len(found.weights) >= 5
    assert all(each.calibrated < each.rounded for each in found.weights)
    passes = tiny_model(name)
    for layer in passes.modules():
        if type(layer).__name__.endswith(("DecoderLayer", "Block")):
            layer.register_forward_pre_hook(copied, with_kwargs=True)
    assert calibrate_(passes, [tokens(1, length=30)], linears=decoder_linear) == found


def decoder_linear(linear, name):
    return is_linear(name) and not is_encoder(name) and linear.in_features % 16 == 0


@pytest.mark.slow
def test_files_give_the_same_logits(tmp_path):
    model = tiny_model("qwen3_moe", torch.bfloat16)
    calibrate_(model, [tokens(1)], linears="*_proj")
    save_checkpoint(model, tmp_path / "saved")
    loaded = load_checkpoint(tmp_path / "saved", device="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2)).logits, model(tokens(2)).logits)


def unchanged(model, before):
    return same_bits(model.state_dict(), before) and not any(
        "NVFP4" in type(module).__name__ for module in model.modules()
    )


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "batches: got list of nothing, wanted a list of tensors"),
        (["text"], {}, r"batches: got list of \['str'\], wanted a list of tensors"),
        (tokens(1), {}, r"batches: got one Tensor, wanted a list of tensors \(windows.split\(8\)\) or mappings"),
        (
            [tokens(1)],
            {"format": lambda module, name: None},
            "model: found no experts .* declined",
        ),
        ([tokens(1)], {"scale_search": "all"}, "scale_search: got 'all'"),
        ([tokens(1)], {"ignore": "*nothing"}, "ignore: "),
    ],
)
def test_bad_arguments(batches, options, message):
    model = tiny_model("qwen3_moe")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        calibrate_(model, batches, **options)
    assert unchanged(model, before)


def test_weights_that_cannot_be_calibrated():
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("batched_mm")  # copies the weights of each row
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"model: it reads 'model.layers.0.mlp.experts.gate_up_proj' by aten.index"):
        calibrate_(model, [tokens(1)])
    assert unchanged(model, before)
    model = moe()
    model[1].routed_experts.down_proj.weight = model[0].routed_experts.down_proj.weight
    with pytest.raises(ValueError, match="model: '1.routed_experts' and '0.routed_experts' share a weight"):
        calibrate_(model, [torch.randn(1, 30, 64)])
    model = moe()
    model[0].unused = GroupedLinear(2, 32, 32)
    with pytest.raises(
        ValueError, match="batches: no row reached '0.unused.weight', wanted inputs that do, or it among"
    ):
        calibrate_(model, [torch.randn(1, 30, 64)])
    assert calibrate_(model, [torch.randn(1, 30, 64)], ignore="0.unused").weights


def test_models_that_have_nothing_to_calibrate():
    with pytest.raises(TypeError, match="model: got str, wanted a torch.nn.Module"):
        calibrate_("model", [tokens(1)])
    quantized = quantize_(nn.ModuleList([GroupedSwiGLU(EXPERTS, 64, 32)]))  # it has no parameters
    with pytest.raises(ValueError, match="model: found no .* to quantize in ModuleList"):
        calibrate_(quantized, [tokens(1)])


def test_rows_that_are_not_finite():
    rows = torch.randn(1, 30, 64)
    rows[0, 3, 5] = float("nan")
    with pytest.raises(ValueError, match="batches: rows of '0.routed_experts.gate_proj.weight' have NaN or Inf"):
        calibrate_(moe(), [rows])
