"""Reading checkpoints: real exports against what their own libraries decode, and what is said of broken files.
Called by pytest; judged by tests/oracle.py and the weights that tests/data/make_checkpoints.py kept.
"""

import json

import pytest
import torch
from checkpoint_files import (
    ATTENTION,
    DATA,
    EXPORTS,
    assert_same_bits,
    copy_export,
    decoded,
    edit_json,
    edit_tensors,
    expected_experts,
    experts_path,
    load_expected,
    load_tensors,
    stream,
)
from safetensors.torch import load_file

from thunder_moe.checkpoint import Checkpoint, ExpertWeights, convert
from thunder_moe.checkpoint.experts import ExpertsPart
from thunder_moe.checkpoint.files import TensorFiles


@pytest.mark.parametrize("export", EXPORTS)
def test_decodes_as_the_exporting_library(export):
    checkpoint = Checkpoint(DATA / export)
    assert checkpoint.experts == [experts_path(export)]
    weights = checkpoint.read_experts(checkpoint.experts[0])
    gate_up, down = expected_experts(export)
    # compressed-tensors divides by its global scale, which is off by a rounding.
    tolerance = dict(rtol=1e-6 if export.startswith("compressed") else 0, atol=0)
    torch.testing.assert_close(decoded(weights.gate_up), gate_up, **tolerance)
    torch.testing.assert_close(decoded(weights.down), down, **tolerance)
    assert weights.gated

    expected = load_expected(export)
    assert set(checkpoint.dense) == dense_modules(export)
    for name in checkpoint.dense:
        torch.testing.assert_close(checkpoint.read_dense(name, torch.float32), expected[f"{name}.weight"], **tolerance)
        assert torch.equal(checkpoint.read_dense(name), checkpoint.read_dense(name, torch.float32).bfloat16())
        assert checkpoint.is_4_bit(name)
        assert torch.equal(decoded(checkpoint.read_dense_weight(name))[0], checkpoint.read_dense(name, torch.float32))


@pytest.mark.parametrize("export", EXPORTS)
def test_the_default_dtype_makes_no_difference(export):
    """transformers' from_pretrained makes the model's dtype torch's default while it builds."""
    checkpoint = Checkpoint(DATA / export)
    expected = checkpoint.read_experts(checkpoint.experts[0])
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = checkpoint.read_experts(checkpoint.experts[0])
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_bits(got.gate_up, expected.gate_up)
    assert_same_bits(got.down, expected.down)


def dense_modules(export):
    names = ("gate_proj", "up_proj", "down_proj") if export == "modelopt_llama4" else ()
    shared = {f"model.layers.0.feed_forward.shared_expert.{name}" for name in names}
    return set() if export.startswith("mxfp4") else ATTENTION | shared


@pytest.mark.parametrize("export", EXPORTS)
def test_stream_gives_everything_once(export):
    checkpoint, tensors = Checkpoint(DATA / export), load_tensors(DATA / export)
    streamed = list(stream(checkpoint))
    assert len({name for name, _ in streamed}) == len(streamed)
    seen = dict(streamed)
    assert isinstance(seen.pop(checkpoint.experts[0]), ExpertWeights)
    for name in checkpoint.dense:
        assert_same_bits(seen.pop(name), checkpoint.read_dense_weight(name))
    old = dict(stream(checkpoint, linears=False))
    assert old.keys() - dict(streamed).keys() == {f"{name}.weight" for name in checkpoint.dense}
    assert all(old[f"{name}.weight"].dtype == torch.bfloat16 for name in checkpoint.dense)
    for name, tensor in seen.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])
    left = {name for name in tensors if "experts" not in name and not name.endswith("scale")} - seen.keys()
    owned = ("weight", "weight_packed", "weight_scale_2")
    assert left <= {f"{module}.{field}" for module in checkpoint.dense for field in owned}


def test_global_scales_of_gate_and_up():
    ours = Checkpoint(DATA / "compressed_tensors_qwen3_moe").read_experts("model.layers.0.mlp.experts").gate_up
    assert ours.global_scale.shape == (3, 128)
    tensors = load_tensors(DATA / "compressed_tensors_qwen3_moe")
    for expert in range(3):
        for rows, name in ((slice(0, 64), "gate_proj"), (slice(64, 128), "up_proj")):
            divisor = tensors[f"model.layers.0.mlp.experts.{expert}.{name}.weight_global_scale"]
            assert torch.equal(ours.global_scale[expert, rows], divisor.reciprocal().expand(64))
    one = Checkpoint(DATA / "modelopt_qwen3_moe").read_experts("model.layers.0.mlp.experts").gate_up
    assert one.global_scale.shape == (3,)


def test_biases_follow_their_rows():
    tensors, path = load_tensors(DATA / "mxfp4_gpt_oss"), "model.layers.0.mlp.experts"
    weights = Checkpoint(DATA / "mxfp4_gpt_oss").read_experts(path)
    bias = tensors[f"{path}.gate_up_proj_bias"]
    assert torch.equal(weights.gate_up_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))
    assert torch.equal(weights.down_bias, tensors[f"{path}.down_proj_bias"])
    as_stored = not_interleaved(DATA / "mxfp4_gpt_oss").read_experts(path)
    assert torch.equal(as_stored.gate_up_bias, bias)


def not_interleaved(path):
    checkpoint = Checkpoint(path)
    checkpoint.interleaved = False
    return checkpoint


def test_hf_quant_config_alone_is_enough(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    edit_json(copy / "config.json", lambda config: config.pop("quantization_config"))
    assert_same_bits(
        Checkpoint(copy).read_experts("model.layers.0.mlp.experts").down,
        Checkpoint(DATA / "modelopt_qwen3_moe").read_experts("model.layers.0.mlp.experts").down,
    )


def test_fp8_beside_nvfp4(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    name = "model.layers.0.self_attn.q_proj"
    weight = torch.randn(32, 32).to(torch.float8_e4m3fn)

    def edit(tensors):
        del tensors[f"{name}.weight_scale_2"]
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = weight, torch.tensor(0.25)

    edit_tensors(copy, edit)
    layers = {name: {"quant_algo": "FP8"}, "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    edit_json(copy / "config.json", lambda config: config.update(quantization_config=mixed))
    assert torch.equal(Checkpoint(copy).read_dense(name, torch.float32), weight.float() * 0.25)


def test_experts_without_a_gate(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    edit_tensors(copy, lambda tensors: [tensors.pop(name) for name in list(tensors) if "gate_proj" in name])
    path = "model.layers.0.mlp.experts"
    weights, gated = Checkpoint(copy).read_experts(path), Checkpoint(DATA / "modelopt_qwen3_moe").read_experts(path)
    assert not weights.gated
    assert torch.equal(decoded(weights.gate_up), decoded(gated.gate_up)[:, 64:])


def test_device(tmp_path):
    weights = Checkpoint(DATA / "modelopt_gpt_oss").read_experts("model.layers.0.mlp.experts", device="meta")
    assert {t.device.type for t in (*weights.gate_up.tensors(), weights.gate_up_bias, weights.down_bias)} == {"meta"}


def read_all(path):
    return list(stream(Checkpoint(path)))


UP = "model.layers.0.mlp.experts.1.up_proj"
Q = "model.layers.0.self_attn.q_proj"
NOT_A_NUMBER = torch.full((64, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
TENSOR_ERRORS = {
    "no scale": (lambda t: t.pop(f"{UP}.weight_scale"), rf"'{UP}.weight' has no 'weight_scale' beside it"),
    "no multiplier": (lambda t: t.pop(f"{UP}.weight_scale_2"), rf"'{UP}.\w+' has no 'weight_scale_2' beside it"),
    "no weight": (lambda t: t.pop(f"{UP}.weight"), rf"'{UP}.\w+' has no 'weight' beside it"),
    "no scale of a dense one": (lambda t: t.pop(f"{Q}.weight_scale"), rf"'{Q}.weight' has no 'weight_scale' beside it"),
    "scale's shape": (
        lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"][:32]}),
        rf"'{UP}.weight_scale' has shape \(32, 2\), wanted one scale for every 8 bytes of '{UP}.weight'",
    ),
    "weight's shape": (
        lambda t: t.update({name: t[name][:32] for name in (f"{UP}.weight", f"{UP}.weight_scale")}),
        rf"'{UP}.weight' has dtype U8 and shape \(32, 16\), wanted U8 of shape \(64, 16\), as '.*gate_proj.weight' has",
    ),
    "dtype": (
        lambda t: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale"].float()}),
        rf"'{UP}.weight_scale' has dtype F32 and shape \(64, 2\), wanted F8_E4M3",
    ),
    "NaN": (lambda t: t.update({f"{UP}.weight_scale": NOT_A_NUMBER}), rf"'{UP}.weight_scale' has NaN"),
    "global scale 0": (
        lambda t: t.update({f"{UP}.weight_scale_2": torch.zeros(())}),
        rf"'{UP}.weight_scale_2' is not finite and positive",
    ),
    "global scale's shape": (
        lambda t: t.update({f"{UP}.weight_scale_2": torch.ones(2)}),
        rf"'{UP}.weight_scale_2' has dtype F32 and shape \(2,\)",
    ),
    "an expert is 16-bit": (
        lambda t: (
            [t.pop(f"{UP}.{n}") for n in ("weight_scale", "weight_scale_2", "input_scale")]
            and t.update({f"{UP}.weight": torch.zeros(64, 32, dtype=torch.bfloat16)})
        ),
        rf"'{UP}.weight' belongs to model.layers.0.mlp.experts, where some weights are quantized and others not",
    ),
    "an expert is missing": (
        lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.0.mlp.experts.1.up_proj")],
        r"module 'model.layers.0.mlp.experts' lacks up_proj of expert 1 of 3",
    ),
    "a projection is missing": (
        lambda t: [t.pop(name) for name in list(t) if "down_proj" in name],
        r"module 'model.layers.0.mlp.experts' has the projections \['gate_proj', 'up_proj'\]",
    ),
    "sizes do not fit": (
        lambda t: t.update(
            {
                name: t[name][:16]
                for name in list(t)
                if "experts" in name and "down_proj" in name and name.endswith(("weight", "weight_scale"))
            }
        ),
        r"'.*down_proj.*' belongs to down projections of shape \(3, 16, 64\), gate and up want \(3, 32, 64\)",
    ),
    "a router of integers": (
        lambda t: t.update({"model.layers.0.mlp.gate.weight": torch.ones(3, 32, dtype=torch.int64)}),
        r"'model.layers.0.mlp.gate.weight' has dtype I64, wanted F32, BF16 or F16 of a weight that is not quantized",
    ),
    "not understood": (
        lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(32)}),
        rf"'{UP}.pre_quant_scale' is not understood",
    ),
}


@pytest.mark.parametrize(("edit", "message"), TENSOR_ERRORS.values(), ids=TENSOR_ERRORS)
def test_inconsistent_tensors(tmp_path, edit, message):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    edit_tensors(copy, edit)
    with pytest.raises(ValueError, match=rf"modelopt_qwen3_moe/model.safetensors: (tensor )?{message}"):
        read_all(copy)


FUSED = "model.layers.0.mlp.experts"
FUSED_ERRORS = {
    "no scale": (lambda t: t.pop(f"{FUSED}.down_proj_weight_scale"), "has no 'weight_scale' beside it"),
    "several multipliers": (
        lambda t: t.update({f"{FUSED}.down_proj_weight_scale_2": torch.ones(2)}),
        r"down_proj_weight_scale_2' has shape \(2,\), wanted \(\), \(3,\) or \(3, 32\)",
    ),
    "bias": (
        lambda t: t.update({f"{FUSED}.down_proj_bias": torch.ones(3, 7)}),
        r"down_proj_bias' has dtype F32 and shape \(3, 7\), wanted F32 or BF16 or F16 of shape \(3, 32\)",
    ),
    "scale's shape": (
        lambda t: t.update({f"{FUSED}.down_proj_weight_scale": t[f"{FUSED}.down_proj_weight_scale"][:, :3]}),
        r"down_proj_weight_scale' has shape \(3, 3, 32\)",
    ),
}


@pytest.mark.parametrize(("edit", "message"), FUSED_ERRORS.values(), ids=FUSED_ERRORS)
def test_inconsistent_fused_tensors(tmp_path, edit, message):
    copy = copy_export(tmp_path, "modelopt_gpt_oss")
    edit_tensors(copy, edit)
    with pytest.raises(ValueError, match=f"model.safetensors: tensor '{FUSED}.*{message}"):
        read_all(copy)


@pytest.mark.parametrize("dropped", [(), ("up",), ("gate", "up")])
def test_biases_of_gate_and_up_in_two_tensors(tmp_path, dropped):
    copy = copy_export(tmp_path, "modelopt_gpt_oss")
    whole = not_interleaved(copy).read_experts(FUSED)

    def split(tensors):
        for field in ("", "_weight_scale", "_weight_scale_2", "_bias"):
            tensor = tensors.pop(f"{FUSED}.gate_up_proj{field}")
            for name, part in zip(
                ("gate", "up"), tensor.chunk(2, -1) if tensor.ndim else (tensor, tensor), strict=True
            ):
                tensors[f"{FUSED}.{name}_proj{field}"] = part.clone()
        del tensors[f"{FUSED}.gate_up_proj_input_scale"]
        for name in dropped:
            del tensors[f"{FUSED}.{name}_proj_bias"]

    edit_tensors(copy, split)
    if len(dropped) == 1:
        with pytest.raises(
            ValueError, match=f"model.safetensors: tensor .* {FUSED}, where one of gate and up has a bias"
        ):
            read_all(copy)
        return
    parts = not_interleaved(copy).read_experts(FUSED)
    assert_same_bits(parts.gate_up.share_global_scale(), whole.gate_up)
    assert (parts.gate_up_bias is None) if dropped else torch.equal(parts.gate_up_bias, whole.gate_up_bias)


CONFIG_ERRORS = {
    "quant_algo": (
        "modelopt_qwen3_moe",
        lambda q: q.update(quant_algo="NVFP4_AWQ"),
        r"quant_algo: got 'NVFP4_AWQ', wanted one of \('NVFP4', 'W4A16_NVFP4', 'MXFP8', 'MIXED_PRECISION'\)",
    ),
    "mixed": (
        "modelopt_qwen3_moe",
        lambda q: q.update(quant_algo="MIXED_PRECISION", quantized_layers={"a.b": {"quant_algo": "W8A8"}}),
        r"quant_algo: got 'W8A8' for layer 'a.b'",
    ),
    "group_size": (
        "modelopt_qwen3_moe",
        lambda q: q["config_groups"]["group_0"]["weights"].update(group_size=32),
        "group_size: got 32, wanted 16",
    ),
    "quant_method": (
        "modelopt_qwen3_moe",
        lambda q: q.update(quant_method="gptq"),
        "quant_method: got 'gptq', wanted 'modelopt', 'compressed-tensors', 'mxfp8' or 'mxfp4'",
    ),
    "format": (
        "compressed_tensors_qwen3_moe",
        lambda q: q.update(format="pack-quantized"),
        "format: got 'pack-quantized' in 'group_0', wanted 'nvfp4-pack-quantized'",
    ),
    "no groups": (
        "compressed_tensors_qwen3_moe",
        lambda q: q.update(config_groups={}),
        "config_groups: got none",
    ),
}


@pytest.mark.parametrize(("export", "edit", "message"), CONFIG_ERRORS.values(), ids=CONFIG_ERRORS)
def test_unknown_quantization(tmp_path, export, edit, message):
    copy = copy_export(tmp_path, export)
    edit_json(copy / "config.json", lambda config: edit(config["quantization_config"]))
    with pytest.raises(ValueError, match=message):
        Checkpoint(copy)


def test_quantized_without_a_config(tmp_path):
    copy = copy_export(tmp_path, "mxfp4_gpt_oss")
    edit_json(copy / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match="is quantized, but neither config.json nor hf_quant_config.json says how"):
        Checkpoint(copy)


def test_truncated_file(tmp_path):
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    file = copy / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 100, 3):
        file.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"^{file}: is truncated or no safetensors file"):
            Checkpoint(copy)


def test_inconsistent_index(tmp_path):
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    index = copy / "model.safetensors.index.json"
    edit_json(index, lambda value: value["weight_map"].update(ghost="model-00001-of-00002.safetensors"))
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002.safetensors: has no tensor 'ghost', which .*index.json"
    ):
        Checkpoint(copy)
    edit_json(index, lambda value: value["weight_map"].update(ghost="model-00003-of-00002.safetensors"))
    with pytest.raises(FileNotFoundError, match="names model-00003-of-00002.safetensors for tensor 'ghost'"):
        Checkpoint(copy)
    index.write_text("{}")
    with pytest.raises(ValueError, match="got no 'weight_map'"):
        Checkpoint(copy)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json: is not JSON"):
        Checkpoint(copy)


@pytest.mark.parametrize("same", [True, False])
def test_two_shards_that_hold_the_same_tensor(tmp_path, same):
    """Which of them is meant cannot be known, so neither is taken, even if they agree."""
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name, shard in index.items() if shard == first)
    tensor = load_file(copy / first)[name]
    edit_tensors(copy, lambda tensors: tensors.update({name: tensor if same else torch.zeros_like(tensor)}), second)
    message = rf"{second}: tensor '{name}' is also in .*{first}, wanted in one file only"
    with pytest.raises(ValueError, match=message):
        Checkpoint(copy)
    with pytest.raises(ValueError, match=message):
        convert(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no/where is not a directory"):
        Checkpoint("no/where")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors.index.json nor model.safetensors"):
        Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="is a file, wanted the directory of a checkpoint"):
        Checkpoint(tmp_path / "config.json")


def test_a_model_in_the_local_hub_cache(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    copy_export(tmp_path, "modelopt_qwen3_moe").rename(snapshot)
    refs = tmp_path / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert Checkpoint("someone/tiny").path == snapshot
    with pytest.raises(
        FileNotFoundError, match="someone/else is not a directory, and the local Hugging Face cache has no"
    ):
        Checkpoint("someone/else")


PARTS = [
    ExpertsPart(expert_rank=1, expert_ranks=3),
    ExpertsPart(feature_rank=0, feature_ranks=2),
    ExpertsPart(expert_rank=2, expert_ranks=3, feature_rank=1, feature_ranks=2),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("export", EXPORTS)
def test_reads_a_part_of_the_experts_and_nothing_else(export, part, monkeypatch):
    checkpoint = Checkpoint(DATA / export)
    whole = checkpoint.read_experts(checkpoint.experts[0])
    read = []
    own_read = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda *args: read.append(own_read(*args)) or read[-1])
    got = checkpoint.read_experts(checkpoint.experts[0], part=part)

    experts, features = part.experts(whole.down.shape[0]), part.features(whole.down.shape[2])
    size = whole.down.shape[2]
    rows = [*range(features.start, features.stop), *range(size + features.start, size + features.stop)]
    gate_up, down = decoded(whole.gate_up)[experts][:, rows], decoded(whole.down)[experts][..., features]
    assert torch.equal(decoded(got.gate_up), gate_up)
    assert torch.equal(decoded(got.down), down)
    if whole.down_bias is not None:
        assert torch.equal(got.gate_up_bias, whole.gate_up_bias[experts][:, rows])
        assert torch.equal(got.down_bias, whole.down_bias[experts] if part.feature_rank == 0 else 0 * got.down_bias)
    codes = sum(tensor.nbytes for tensor in read if tensor.dtype == torch.uint8)
    assert codes <= (got.gate_up.nbytes + got.down.nbytes)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (ExpertsPart(expert_ranks=2), "ep_size: got 2 for 3 experts, wanted a size that divides"),
        (ExpertsPart(feature_ranks=8), "tp_size: got 8 for experts of 64 intermediate features, wanted a size whose"),
    ],
)
def test_refuses_ranks_that_cannot_share_evenly(part, message):
    for export in ("modelopt_qwen3_moe", "modelopt_llama4"):
        checkpoint = Checkpoint(DATA / export)
        with pytest.raises(ValueError, match=message):
            checkpoint.read_experts(checkpoint.experts[0], part=part)


@pytest.mark.parametrize(("dim", "index"), [(1, 0), (1, 1), (2, 1)])
def test_reads_a_part_of_a_dense_weight_and_nothing_else(dim, index, monkeypatch):
    checkpoint = Checkpoint(DATA / "compressed_tensors_qwen3_moe")
    name = next(name for name in checkpoint.dense if name.endswith("o_proj"))
    whole = decoded(checkpoint.read_dense_weight(name))
    read = []
    own_read = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda *args: read.append(own_read(*args)) or read[-1])
    got = checkpoint.read_dense_weight(name, part=(dim, index, 2))
    assert torch.equal(decoded(got), whole.chunk(2, dim)[index])
    assert sum(tensor.nbytes for tensor in read) == got.nbytes
