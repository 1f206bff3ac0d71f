"""MXFP8 checkpoints: what is said of broken files and configs, and of what is not read; parts of their weights.
Called by pytest; judged by the exports of nvidia-modelopt and compressed-tensors in tests/data, and by the oracle.
"""

import json
import math

import pytest
import torch
from checkpoint_files import (
    DATA,
    assert_same_bits,
    bits,
    copy_export,
    decoded,
    edit_json,
    edit_tensors,
    expected_experts,
    load_tensors,
)
from oracle import decode_e4m3
from safetensors.torch import load_file, save_file

from thunder_moe import f16a_mxfp8weight_scaled_grouped_mm
from thunder_moe.__main__ import main
from thunder_moe.checkpoint import Checkpoint, ExpertsLayout, ExpertWeights, convert, write_checkpoint
from thunder_moe.checkpoint.experts import ExpertsPart
from thunder_moe.checkpoint.formats.interface import has_e4m3_nan
from thunder_moe.formats import mxfp8, nvfp4

MIXED, OTHER = "modelopt_mixed_qwen3_moe", "compressed_tensors_mxfp8_qwen3_moe"
PATH = "model.layers.0.mlp.experts"
UP = f"{PATH}.2.up_proj"
NOT_ALIKE = rf"'{UP}.\w+' belongs to {PATH}, where some weights are MXFP8 and others not"
FUSED = ExpertsLayout(fused=True, interleaved=True)


def experts(gated=True, biases=False):
    generator = torch.Generator().manual_seed(3)
    gate_up = mxfp8.quantize(torch.randn(4, 128 if gated else 64, 32, generator=generator))
    down = mxfp8.quantize(torch.randn(4, 32, 64, generator=generator))
    bias = torch.randn(4, 128, generator=generator), torch.randn(4, 32, generator=generator)
    return ExpertWeights(gate_up, down, *(bias if biases else ()))


def all_of(checkpoint):
    return [checkpoint.read_experts(name) for name in checkpoint.experts] + [
        checkpoint.read_dense_weight(name) for name in checkpoint.dense
    ]


def put(name, value):
    """Sets the byte of one element."""
    return lambda tensors: bits(tensors[name]).view(tensors[name].shape).__setitem__((1, 0), value)


def reshape(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


# What is broken -> (the change of the tensors, the message).
FAULTS = {
    "NaN": (put(f"{UP}.weight", 0x7F), rf"tensor '{UP}.weight' has NaN, wanted finite values"),
    "NaN with a sign": (put(f"{UP}.weight", 0xFF), rf"tensor '{UP}.weight' has NaN, wanted finite values"),
    "scale that is NaN": (put(f"{UP}.weight_scale", 255), rf"tensor '{UP}.weight_scale' has the byte 255"),
    "scale beyond the kernels": (
        put(f"{UP}.weight_scale", 167),
        rf"tensor '{UP}.weight_scale' has the byte 167, a scale of 2\*\*40, wanted at most 166",
    ),
    "the largest number": (put(f"{UP}.weight_scale", 254), rf"tensor '{UP}.weight_scale' has the byte 254"),
    "scales of 16": (
        reshape(f"{UP}.weight_scale", lambda t: torch.cat([t, t], 1)),
        rf"tensor '{UP}.weight_scale' has shape \(64, 2\), wanted one scale for every 32 bytes of",
    ),
    "scales of too few rows": (reshape(f"{UP}.weight_scale", lambda t: t[1:]), r"weight_scale' has shape \(63, 1\)"),
    "no scales": (lambda t: t.pop(f"{UP}.weight_scale"), NOT_ALIKE),
    "no weight": (lambda t: t.pop(f"{UP}.weight"), NOT_ALIKE),
    "codes of another dtype": (reshape(f"{UP}.weight", lambda t: t.to(torch.float8_e5m2)), NOT_ALIKE),
    "float scales": (reshape(f"{UP}.weight_scale", lambda t: t.float()), NOT_ALIKE),
    "one more tensor": (
        lambda t: t.update({f"{UP}.zero_point": torch.zeros(1)}), rf"tensor '{UP}.zero_point' is not understood",
    ),
    "an expert of another size": (
        lambda t: t.update({name: t[name][:32] for name in (f"{UP}.weight", f"{UP}.weight_scale")}),
        rf"tensor '{UP}.weight' .*wanted .*64, 32",
    ),
    "no expert": (
        lambda t: [t.pop(f"{UP}.{field}") for field in ("weight", "weight_scale")],
        f"'{PATH}' lacks up_proj of expert 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), FAULTS.values(), ids=FAULTS)
def test_broken_files(tmp_path, edit, message, capsys):
    copy = copy_export(tmp_path, MIXED)
    edit_tensors(copy, edit)
    with pytest.raises(ValueError, match=rf"model.safetensors: .*{message}"):
        all_of(Checkpoint(copy))
    assert main(["convert", str(copy), str(tmp_path / "out"), "--quiet"]) == 1
    assert "error: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


def test_the_scales_that_kernels_decode(tmp_path):
    """From the least to the largest that a file may have, a GEMM gives finite numbers; nothing larger is written."""
    copy = copy_export(tmp_path, MIXED)
    edit_tensors(copy, lambda tensors: bits(tensors[f"{UP}.weight_scale"]).view(-1)[:2].copy_(torch.tensor([0, 166])))
    weight = next(each.gate_up for each in all_of(Checkpoint(copy)) if each.gate_up.format.name == "mxfp8")
    assert {0, 166} <= set(bits(weight.scale).flatten().tolist())
    x, offsets = torch.ones(3, weight.shape[2], dtype=torch.bfloat16), torch.arange(1, 4, dtype=torch.int32)
    out = f16a_mxfp8weight_scaled_grouped_mm(x, weight.qdata.mT, weight.scale, offsets)
    assert out.isfinite().all()
    large = mxfp8.quantize(torch.full((1, 32, 32), 2.0**50))
    with pytest.raises(ValueError, match=r"weights: x.weight_scale has the byte 169, .* wanted at most 166 \(2\*\*39"):
        write_checkpoint(tmp_path / "out", {}, [("x", large)])


def test_a_conversion_of_weights_beyond_the_kernels(tmp_path):
    (tmp_path / "source").mkdir()
    name = f"{PATH}.1.up_proj.weight"
    names = [f"{PATH}.{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up", "down")]
    save_file({each: torch.full((32, 32), 2.0 ** (60 * (each == name))) for each in names},
              tmp_path / "source" / "model.safetensors")  # fmt: skip
    (tmp_path / "source" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"weights: {name}_scale has the byte .*, wanted at most 166"):
        convert(tmp_path / "source", tmp_path / "out", format="mxfp8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_every_byte_that_is_nan():
    for byte in range(256):
        for others in (0x00, 0x80, 0x7E, 0xFE):
            codes = torch.full((3, 5), others, dtype=torch.uint8)
            codes[1, 2] = byte
            assert has_e4m3_nan(codes) == has_e4m3_nan(codes.mT) == math.isnan(decode_e4m3(byte))
    assert not has_e4m3_nan(torch.empty(0, 4, dtype=torch.uint8))


def test_nan_of_dense_layers_and_of_all_experts(tmp_path):
    copy, name = copy_export(tmp_path, OTHER), "model.layers.0.self_attn.o_proj.weight"
    file = next(file.name for file in copy.glob("*.safetensors") if name in load_file(file))
    edit_tensors(copy, put(name, 0xFF), file)
    with pytest.raises(ValueError, match=rf"{file}: tensor '{name}' has NaN"):
        all_of(Checkpoint(copy))
    write_checkpoint(tmp_path / "fused", {"model_type": "gpt_oss"}, [(PATH, experts())], layout=FUSED)
    edit_tensors(tmp_path / "fused", lambda tensors: bits(tensors[f"{PATH}.down_proj_weight_scale"]).fill_(255))
    with pytest.raises(ValueError, match=rf"tensor '{PATH}.down_proj_weight_scale' has the byte 255, which is NaN"):
        Checkpoint(tmp_path / "fused").read_experts(PATH)


def test_both_formats_in_one_block_are_refused(tmp_path):
    copy = copy_export(tmp_path, MIXED)
    packed = nvfp4.quantize(torch.randn(1, 64, 32))

    def edit(tensors):
        tensors |= {f"{UP}.weight": packed.qdata[0], f"{UP}.weight_scale": packed.scale[0]}
        tensors[f"{UP}.weight_scale_2"] = packed.global_scale[0]

    edit_tensors(copy, edit)
    with pytest.raises(ValueError, match=NOT_ALIKE):
        Checkpoint(copy).read_experts(PATH)
    weights = ExpertWeights(nvfp4.quantize(torch.randn(2, 128, 32)), mxfp8.quantize(torch.randn(2, 32, 64)))
    with pytest.raises(ValueError, match=f"weights: {PATH} has gate and up in nvfp4, down in mxfp8, wanted one format"):
        write_checkpoint(tmp_path / "out", {}, [(PATH, weights)])


def weights_of(quantization):
    return quantization["config_groups"]["group_0"]["weights"]


CONFIGS = {
    "not said": (MIXED, lambda q: q.update(quant_algo="NVFP4"), "is MXFP8, which the quantization_config does not say"),
    "layers that do not say it": (
        MIXED, lambda q: q["quantized_layers"].pop(PATH), "is MXFP8, which the quantization_config does not say",
    ),
    "blocks of 16": (
        MIXED, lambda q: q["quantized_layers"][PATH].update(group_size=16), "group_size: got 16, wanted 32",
    ),
    "group_size": (OTHER, lambda q: weights_of(q).update(group_size=64), "group_size: got 64 in 'group_0', wanted 32"),
    "type": (OTHER, lambda q: weights_of(q).update(type="int"), "type: got 'int' in 'group_0', wanted 'float'"),
    "format": (OTHER, lambda q: q.update(format="mxfp4-pack-quantized"), "format: got 'mxfp4-pack-quantized' in"),
}  # fmt: skip


@pytest.mark.parametrize(("export", "edit", "message"), CONFIGS.values(), ids=CONFIGS)
def test_configs(tmp_path, export, edit, message):
    copy = copy_export(tmp_path, export)
    edit_json(copy / "config.json", lambda config: edit(config["quantization_config"]))
    with pytest.raises(ValueError, match=message):
        Checkpoint(copy)


def test_scales_as_e8m0(tmp_path):
    """Their own dtype, where a writer has it."""
    copy = copy_export(tmp_path, MIXED)

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale") and ".experts." in name]:
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    edit_tensors(copy, edit)
    one, other = (Checkpoint(path).read_experts(PATH) for path in (copy, DATA / MIXED))
    assert_same_bits(one.gate_up, other.gate_up)
    assert_same_bits(one.down, other.down)


MINIMAX = {
    "quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [1, 32],
    "scale_fmt": "ue8m0", "ignored_layers": ["lm_head"],
}  # fmt: skip
# As MiniMax writes it, in ModelOpt's names (as vLLM takes it), and in transformers' words with either dtype of scales.
FORMS = {
    "MiniMax": (MINIMAX, "weight_scale_inv", torch.uint8),
    "little said": ({"quant_method": "mxfp8"}, "weight_scale", torch.uint8),
    "transformers": ({**MINIMAX, "quant_method": "fp8"}, "weight_scale_inv", torch.float8_e8m0fnu),
    "transformers, bytes": ({**MINIMAX, "quant_method": "fp8"}, "weight_scale_inv", torch.uint8),
}


def as_mxfp8(tmp_path, quantization, field, dtype):
    """The export of compressed-tensors under another name: its config and the scales' names and dtype."""
    copy = copy_export(tmp_path, OTHER)
    edit_json(copy / "config.json", lambda config: config.update(quantization_config=quantization))
    tensors = load_tensors(copy)
    for file in copy.glob("model*.safetensors*"):
        file.unlink()
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[f"{name.removesuffix('weight_scale')}{field}"] = tensors.pop(name).view(dtype)
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(("quantization", "field", "dtype"), FORMS.values(), ids=FORMS)
def test_the_method_mxfp8(tmp_path, quantization, field, dtype):
    checkpoint, wanted = Checkpoint(as_mxfp8(tmp_path, quantization, field, dtype)), Checkpoint(DATA / OTHER)
    assert checkpoint.method == "mxfp8"
    assert checkpoint.dense
    for name in wanted.experts:
        one, other = checkpoint.read_experts(name), wanted.read_experts(name)
        assert_same_bits(one.gate_up, other.gate_up)
        assert_same_bits(one.down, other.down)
    for name in wanted.dense:
        assert_same_bits(checkpoint.read_dense_weight(name), wanted.read_dense_weight(name))
    convert(checkpoint.path, tmp_path / "out")
    for name in wanted.experts:
        assert_same_bits(Checkpoint(tmp_path / "out").read_experts(name).down, wanted.read_experts(name).down)


def test_scales_in_floats_are_not_mxfp8(tmp_path):
    """FP8 in blocks of MXFP8's size, which a conversion decodes."""
    copy = as_mxfp8(tmp_path, {"quant_method": "fp8", "weight_block_size": [1, 32]}, "weight_scale_inv", torch.uint8)
    weights = load_tensors(copy)

    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu).float()

    edit_tensors(copy, edit)
    assert Checkpoint(copy).method == "fp8"
    convert(copy, tmp_path / "out", format="mxfp8")
    out = load_tensors(tmp_path / "out")
    expected, _ = expected_experts(OTHER)
    assert torch.equal(decoded(Checkpoint(tmp_path / "out").read_experts(PATH).gate_up), expected)
    assert f"{UP}.weight_scale" in out
    assert f"{UP}.weight_scale_inv" in weights


METHOD = {
    "blocks": (
        {"weight_block_size": [32, 32]},
        r"weight_block_size: got \[32, 32\] in a config of MXFP8, wanted \[1, 32",
    ),
    "scales": ({"scale_fmt": "float"}, "scale_fmt: got 'float' in a config of MXFP8, wanted 'ue8m0'"),
    "codes": ({"fmt": "e5m2"}, "fmt: got 'e5m2' in a config of MXFP8, wanted 'e4m3'"),
    "experts": ({"moe_quant_algo": "NVFP4"}, "moe_quant_algo: got 'NVFP4' in a config of MXFP8, wanted 'MXFP8'"),
}


@pytest.mark.parametrize(("change", "message"), METHOD.values(), ids=METHOD)
def test_what_the_method_mxfp8_cannot_say(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Checkpoint(as_mxfp8(tmp_path, {**MINIMAX, **change}, "weight_scale_inv", torch.uint8))


def test_what_files_of_the_method_mxfp8_cannot_have(tmp_path):
    copy = as_mxfp8(tmp_path, MINIMAX, "weight_scale_inv", torch.uint8)
    tensors = load_tensors(copy)
    for change, message in (
        ({f"{UP}.weight_scale_inv": bits(tensors[f"{UP}.weight_scale_inv"]).clone().fill_(255)}, "has the byte 255"),
        ({f"{UP}.weight_scale": tensors[f"{UP}.weight_scale_inv"].clone()}, "weight_scale_inv' is not understood"),
        ({f"{PATH}.w13_weight": tensors[f"{UP}.weight"].clone()}, "w13_weight' is FP8, and by its name of no module"),
        ({f"{UP}.weight": tensors[f"{UP}.weight"].view(torch.uint8)}, "wanted F8_E4M3|others not|says 'mxfp8'"),
    ):
        save_file({**tensors, **change}, copy / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            all_of(Checkpoint(copy))


@pytest.mark.parametrize("k_first", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_all_experts_in_one_tensor(tmp_path, caplog, interleaved, k_first):
    weights = experts(biases=True)
    config = {"model_type": "gpt_oss" if interleaved else "x"}
    layout = ExpertsLayout(fused=True, interleaved=interleaved)
    write_checkpoint(tmp_path / "out", config, [(PATH, weights)], layout=layout)
    said = [record.getMessage() for record in caplog.records]
    assert said == interleaved * [
        f"{PATH}.{part}_proj: written in MXFP8 as one tensor of all experts, which other engines do not read"
        for part in ("gate_up", "down")
    ]
    names = set(load_tensors(tmp_path / "out"))
    assert (f"{PATH}.down_proj_weight_scale" in names) == interleaved
    if interleaved and not k_first:  # both orders are read

        def turn(tensors):
            for name in [name for name in tensors if not name.endswith("bias")]:
                tensors[name] = tensors[name].view(torch.uint8).mT.contiguous().view(tensors[name].dtype)

        edit_tensors(tmp_path / "out", turn)
    checkpoint = Checkpoint(tmp_path / "out")
    back = checkpoint.read_experts(PATH)
    assert_same_bits(back.gate_up, weights.gate_up)
    assert_same_bits(back.down, weights.down)
    assert torch.equal(back.gate_up_bias, weights.gate_up_bias)
    parts = [checkpoint.read_experts(PATH, part=ExpertsPart(feature_rank=rank, feature_ranks=2)) for rank in (0, 1)]
    gate_up, down = decoded(weights.gate_up), decoded(weights.down)
    for rank, part in enumerate(parts):
        own = slice(32 * rank, 32 * rank + 32)
        assert torch.equal(decoded(part.down), down[..., own])
        assert torch.equal(decoded(part.gate_up), torch.cat([gate_up[:, :64][:, own], gate_up[:, 64:][:, own]], 1))


def test_scales_along_out_features_are_refused(tmp_path):
    """As nvidia-modelopt 0.47 exports fused experts, K first and blocks along N: MXFP8 of another matrix."""
    shapes = {"gate_up_proj": (3, 32, 128), "down_proj": (3, 64, 32)}  # hidden 32, intermediate 64
    tensors = {}
    for name, (count, k, n) in shapes.items():
        packed = mxfp8.quantize(torch.randn(count, k, n))
        tensors[f"{PATH}.{name}"], tensors[f"{PATH}.{name}_weight_scale"] = packed.qdata, packed.scale.view(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"'{PATH}.down_proj_weight_scale' .*wanted them along in_features"):
        Checkpoint(tmp_path).read_experts(PATH)


@pytest.mark.parametrize("export", [MIXED, OTHER])
def test_parts(export):
    """What each of two ranks reads of experts and of a dense layer; blocks of 32 cannot be shared by four."""
    gate_up, down = expected_experts(export)
    checkpoint = Checkpoint(DATA / export)
    for rank in (0, 1):
        own = slice(32 * rank, 32 * rank + 32)
        part = checkpoint.read_experts(PATH, part=ExpertsPart(feature_rank=rank, feature_ranks=2))
        assert torch.equal(decoded(part.down), down[..., own])
        assert torch.equal(decoded(part.gate_up), torch.cat([gate_up[:, :64][:, own], gate_up[:, 64:][:, own]], 1))
    with pytest.raises(ValueError, match="tp_size: got 4 for experts of 64 intermediate features.*multiples of 32"):
        checkpoint.read_experts(PATH, part=ExpertsPart(feature_ranks=4))
    part = checkpoint.read_experts(PATH, part=ExpertsPart(expert_rank=1, expert_ranks=3))
    assert torch.equal(decoded(part.down), down[1:2])
    if export == OTHER:
        with pytest.raises(ValueError, match="o_proj.weight' is shared by 2 processes, wanted shares of blocks of 32"):
            checkpoint.read_dense_weight("model.layers.0.self_attn.o_proj", part=(2, 0, 2))
