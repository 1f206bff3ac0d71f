"""Conversions of FP8 checkpoints: what is decoded, what is quantized, and what is said of broken ones.
Called by pytest; judged by compressed-tensors' own decoding (tests/data/fp8.safetensors) and a loop over elements.
"""

import json

import pytest
import torch
from checkpoint_files import DATA, assert_same_bits, edit_json, edit_tensors, load_tensors, stream
from safetensors.torch import load_file, save_file

from thunder_moe.checkpoint import Checkpoint, convert
from thunder_moe.formats.nvfp4 import quantize

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PATH, EXPERTS, HIDDEN, INTERMEDIATE = "model.layers.0.mlp.experts", 2, 32, 48
ATTENTION = "model.layers.0.self_attn"
BLOCK = (16, 32)


def groups(strategy, **more):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"g": {"weights": weights}},
    }


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*BLOCK]}
# Name -> (quantization_config, what a scale belongs to, its field, its dtype).
FORMS = {
    "DeepSeek": (DEEPSEEK, BLOCK, "weight_scale_inv", torch.float32),
    "DeepSeek, bfloat16 scales": (DEEPSEEK, BLOCK, "weight_scale_inv", BF16),
    "DeepSeek, scales E8M0": (DEEPSEEK, BLOCK, "weight_scale_inv", torch.float8_e8m0fnu),
    "DeepSeek, a scale per tensor": ({"quant_method": "fp8"}, None, "weight_scale_inv", torch.float32),
    "compressed-tensors, tensor": (groups("tensor"), None, "weight_scale", torch.float32),
    "compressed-tensors, channel": (groups("channel"), (1, 1000), "weight_scale", torch.float32),
    "compressed-tensors, block": (groups("block", block_structure=[*BLOCK]), BLOCK, "weight_scale", torch.float32),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "fp8"}, None, "weight_scale", torch.float32),
}  # fmt: skip


def random_fp8(shape, block, dtype, seed):
    """(weight, scale); `block`: rows and columns that share a scale, None: all do."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator).to(FP8)
    grid = [-(-size // part) for size, part in zip(shape[-2:], block, strict=True)] if block else []
    scale = 2.0 ** torch.randint(-9, -4, (*shape[:-2], *grid), generator=generator)
    if dtype != torch.float8_e8m0fnu:
        scale = scale * (1 + torch.rand(scale.shape, generator=generator))
    return weight, scale.to(dtype)


def decoded(weight, scale, block):
    """fp32: each element times the scale of its block."""
    if block is None:
        return weight.float() * scale.float()
    rows, columns = (torch.arange(size) // part for size, part in zip(weight.shape[-2:], block, strict=True))
    return weight.float() * scale.float()[..., rows[:, None], columns]


def make_source(directory, form):
    """(decoded weights by the paths of their modules, other tensors by their names)."""
    quantization, block, field, dtype = FORMS[form]
    directory.mkdir()
    shapes = {f"{PATH}.{e}.{name}_proj": (INTERMEDIATE, HIDDEN) for e in range(EXPERTS) for name in ("gate", "up")}
    shapes |= {f"{PATH}.{expert}.down_proj": (HIDDEN, INTERMEDIATE) for expert in range(EXPERTS)}
    shapes |= {f"{ATTENTION}.{name}_proj": (HIDDEN, HIDDEN) for name in "qk"}
    others = {"model.norm.weight": torch.randn(HIDDEN).to(BF16), "lm_head.weight": torch.randn(8, HIDDEN).to(BF16)}
    tensors, weights = dict(others), {}
    for seed, (path, shape) in enumerate(shapes.items()):
        weight, scale = random_fp8(shape, block, dtype, seed)
        tensors |= {f"{path}.weight": weight, f"{path}.{field}": scale}
        weights[path] = decoded(weight, scale, block)
    tensors[f"{ATTENTION}.q_proj.input_scale"] = torch.ones(())
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": quantization}))
    return weights, others


def stacked(weights, *names):
    return torch.stack([torch.cat([weights[f"{PATH}.{e}.{name}_proj"] for name in names]) for e in range(EXPERTS)])


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_quantized_and_the_rest_becomes_16_bit(tmp_path, form):
    weights, others = make_source(tmp_path / "source", form)
    (error,) = convert(tmp_path / "source", tmp_path / "out")
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.method == "modelopt"
    experts = checkpoint.read_experts(PATH)
    assert_same_bits(experts.gate_up, quantize(stacked(weights, "gate", "up")))
    assert_same_bits(experts.down, quantize(stacked(weights, "down")))
    assert 18 < error.gate_up < 22
    written = load_tensors(tmp_path / "out")
    for name in "qk":
        assert torch.equal(written[f"{ATTENTION}.{name}_proj.weight"], weights[f"{ATTENTION}.{name}_proj"].to(BF16))
    for name, tensor in others.items():
        assert torch.equal(written[name], tensor)
    assert not any("scale" in name for name in written if "experts" not in name)
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj"} <= set(ignore)


def test_linears_and_filter(tmp_path):
    weights, _ = make_source(tmp_path / "source", "DeepSeek")
    convert(tmp_path / "source", tmp_path / "out", linears=True)
    checkpoint = Checkpoint(tmp_path / "out")
    whole = quantize(torch.cat([weights[f"{ATTENTION}.{name}_proj"] for name in "qk"])[None])
    for number, name in enumerate("qk"):
        weight = checkpoint.read_dense_weight(f"{ATTENTION}.{name}_proj")
        assert torch.equal(weight.qdata[0], whole.qdata[0, HIDDEN * number : HIDDEN * (number + 1)])
    convert(tmp_path / "source", tmp_path / "dense", linears=True, ignore="*.experts")
    checkpoint, written = Checkpoint(tmp_path / "dense"), load_tensors(tmp_path / "dense")
    assert not checkpoint.experts
    assert len(checkpoint.dense) == 2
    for path, weight in weights.items():
        if "experts" in path:
            assert torch.equal(written[f"{path}.weight"], weight.to(BF16))


@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("field", ["scale_inv", "weight_scale_inv", "weight_scale"])
def test_fused_experts(tmp_path, field, k_first):
    (tmp_path / "source").mkdir()
    shapes = {"gate_up_proj": (EXPERTS, 2 * INTERMEDIATE, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INTERMEDIATE)}
    tensors, weights, block = {}, {}, BLOCK[::-1] if k_first else BLOCK
    for seed, (name, shape) in enumerate(shapes.items()):
        weight, scale = random_fp8(shape, block, torch.float32, seed)
        stored = (t.mT.contiguous() if k_first else t for t in (weight, scale))
        tensors |= zip((f"{PATH}.{name}", f"{PATH}.{name}_{field}"), stored, strict=True)
        weights[name] = decoded(weight, scale, block)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps({"quantization_config": DEEPSEEK}))
    convert(tmp_path / "source", tmp_path / "out")
    experts = Checkpoint(tmp_path / "out").read_experts(PATH)
    assert_same_bits(experts.gate_up, quantize(weights["gate_up_proj"]))
    assert_same_bits(experts.down, quantize(weights["down_proj"]))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_decodes_as_compressed_tensors(tmp_path, strategy):
    tensors = load_file(DATA.parent / "fp8.safetensors")
    own = {name.removeprefix(f"{strategy}."): t for name, t in tensors.items() if name.startswith(f"{strategy}.")}
    expected = own.pop("decoded")
    save_file({f"layer.{field}": tensor for field, tensor in own.items()}, tmp_path / "model.safetensors")
    config = groups(strategy, block_structure="16x32")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert torch.equal(Checkpoint(tmp_path).read_dense("layer", torch.float32), expected)


def test_decodes_as_transformers():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = random_fp8((48, 64), BLOCK, torch.float32, 0)
    if not hasattr(fp8, "_dequantize_fp8_weight"):
        pytest.skip("not in this transformers")
    theirs = fp8._dequantize_fp8_weight(weight, scale, list(BLOCK), torch.float32)
    assert torch.equal(decoded(weight, scale, BLOCK), theirs)


def test_fp8_experts_beside_4_bit_ones(tmp_path):
    """As automatic searches leave them: a conversion makes them 4-bit, a loader says what to do."""
    directory = tmp_path / "source"
    weights, _ = make_source(directory, "ModelOpt")
    convert(directory, tmp_path / "4bit")
    mixed = {
        name.replace("layers.0", "layers.1"): t
        for name, t in load_tensors(tmp_path / "4bit").items()
        if "experts" in name
    }
    edit_tensors(directory, lambda tensors: tensors.update(mixed))
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a": {"quant_algo": "FP8"}},
    }
    edit_json(directory / "config.json", lambda value: value.update(quantization_config=config))
    with pytest.raises(
        ValueError, match=rf"model.safetensors: tensor '{PATH}.0.\w+.weight' is FP8, .* thunder_moe convert"
    ):
        list(stream(Checkpoint(directory)))
    convert(directory, tmp_path / "out")
    out = Checkpoint(tmp_path / "out")
    assert len(out.experts) == 2
    assert_same_bits(out.read_experts(PATH).down, quantize(stacked(weights, "down")))
    assert_same_bits(out.read_experts(PATH.replace("0", "1")).down, out.read_experts(PATH).down)


GATE = f"{PATH}.1.gate_proj"
NAN = torch.full((INTERMEDIATE, HIDDEN), 0x7F, dtype=torch.uint8).view(FP8)
BROKEN = {
    "no scale": (lambda t: t.pop(f"{GATE}.weight_scale_inv"), rf"'{GATE}.weight' has no 'weight_scale' beside it"),
    "scale's shape": (
        lambda t: t.update({f"{GATE}.weight_scale_inv": torch.ones(2, 1)}),
        rf"'{GATE}.weight_scale_inv' has shape \(2, 1\), wanted \(3, 1\) for '{GATE}.weight' of shape \(48, 32\)",
    ),
    "a scale of the tensor": (
        lambda t: t.update({f"{GATE}.weight_scale_inv": torch.ones(())}),
        rf"'{GATE}.weight_scale_inv' has shape \(\), wanted \(3, 1\)",
    ),
    "scale's dtype": (
        lambda t: t.update({f"{GATE}.weight_scale_inv": torch.ones(3, 1, dtype=torch.int32)}),
        rf"'{GATE}.weight_scale_inv' has dtype I32",
    ),
    "NaN": (lambda t: t.update({f"{GATE}.weight": NAN}), rf"'{GATE}.weight' has NaN"),
    "negative scale": (
        lambda t: t.update({f"{GATE}.weight_scale_inv": torch.tensor([[1.0], [-1.0], [1.0]])}),
        rf"'{GATE}.weight_scale_inv' is not finite and positive",
    ),
    "two scales": (
        lambda t: t.update({f"{GATE}.weight_scale": torch.ones(())}),
        rf"'{GATE}.weight_scale' is not understood",
    ),
    "some 16-bit": (
        lambda t: (t.pop(f"{GATE}.weight_scale_inv"), t.update({f"{GATE}.weight": torch.zeros(48, 32, dtype=BF16)})),
        rf"'{GATE}.weight' belongs to {PATH}, where some weights are quantized and others not",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_tensors(tmp_path, edit, message):
    make_source(tmp_path / "source", "DeepSeek")
    edit_tensors(tmp_path / "source", edit)
    with pytest.raises(ValueError, match=rf"source/model.safetensors: tensor {message}"):
        convert(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


CONFIGS = {
    "fmt": (DEEPSEEK | {"fmt": "e5m2"}, "fmt: got 'e5m2', wanted 'e4m3'"),
    "expert_dtype": (DEEPSEEK | {"expert_dtype": "fp4"}, "expert_dtype: got 'fp4', wanted 'fp8'"),
    "block": (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size: got \[128\], wanted two positive numbers"),
    "strategy": (groups("group"), "strategy: got 'group' in 'g', wanted 'tensor', 'channel' or 'block'"),
    "type": (groups("tensor", type="int"), "weights: got .*'int'.* wanted symmetric ones of 8 bits"),
    "groups": (
        {"quant_method": "compressed-tensors", "config_groups": [1]},
        r"config_groups: got \[1\], wanted a JSON",
    ),
}


@pytest.mark.parametrize(("config", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configs_that_are_not_read(tmp_path, config, message):
    make_source(tmp_path / "source", "DeepSeek")
    edit_json(tmp_path / "source" / "config.json", lambda value: value.update(quantization_config=config))
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize("form", ["DeepSeek", "compressed-tensors, tensor", "ModelOpt"])
def test_loading_says_what_to_do(tmp_path, form):
    load_checkpoint = pytest.importorskip("thunder_moe.integrations.huggingface.checkpoint").load_checkpoint
    make_source(tmp_path / "source", form)
    with pytest.raises(ValueError, match=r"source.* FP8.*python -m thunder_moe convert"):
        load_checkpoint(tmp_path / "source")
