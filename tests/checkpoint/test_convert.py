"""The conversion of 16-bit checkpoints: its result, its memory, interruptions, broken sources, and the command line.
Called by pytest; judged by nvfp4.quantize of each expert, and by tests/oracle.py.
"""

import io
import json
import runpy
import shutil
import sys
import weakref
from math import inf, log10

import pytest
import torch
from checkpoint_files import DATA, EXPORTS, assert_same_bits, bits, decoded, load_tensors, stream
from fast_cases import others_slow
from interpreters import fresh_python
from oracle import dequantize as oracle_dequantize
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_moe.__main__ import main
from thunder_moe.checkpoint import Checkpoint, convert
from thunder_moe.checkpoint.quantize import quantize_tensor
from thunder_moe.formats import mxfp8
from thunder_moe.formats.nvfp4 import quantize

QUANTIZE = "thunder_moe.checkpoint.quantize.quantize_tensor"

HIDDEN, INTERMEDIATE, EXPERTS = 32, 64, 4
BF16 = torch.bfloat16


def gate_up_down(layer):
    """Gate and up (E, I, H), down (E, H, I), bfloat16; each expert of a size of its own."""
    generator = torch.Generator().manual_seed(layer)
    shapes = ((EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
    size = 1 + torch.arange(EXPERTS)[:, None, None]
    return [(torch.randn(shape, generator=generator) * size * 0.02).to(BF16) for shape in shapes]


def per_expert(path, layer, names=("gate_proj", "up_proj", "down_proj")):
    return {
        f"{path}.{expert}.{name}.weight": weight[expert]
        for name, weight in zip(names, gate_up_down(layer), strict=True)
        for expert in range(EXPERTS)
    }


def fused(path, layer, *, transposed, interleaved=False, biases=False):
    gate, up, down = gate_up_down(layer)
    gate_up = torch.stack([gate, up], 2).flatten(1, 2) if interleaved else torch.cat([gate, up], 1)
    tensors = {f"{path}.gate_up_proj": gate_up, f"{path}.down_proj": down}
    if transposed:
        tensors = {name: tensor.mT.contiguous() for name, tensor in tensors.items()}
    if biases:
        tensors |= {f"{path}.gate_up_proj_bias": torch.randn(EXPERTS, 2 * INTERMEDIATE).to(BF16)}
        tensors |= {f"{path}.down_proj_bias": torch.randn(EXPERTS, HIDDEN).to(BF16)}
    return tensors


# Form -> (tensors of a layer, model_type, projections of one expert, whether the result is fused).
FORMS = {
    "per expert": (lambda path, layer: per_expert(path, layer), "qwen3_moe", ("gate_proj", "up_proj", "down_proj")),
    "w1, w3, w2": (lambda path, layer: per_expert(path, layer, ("w1", "w3", "w2")), "mixtral", ("w1", "w3", "w2")),
    "fused": (lambda path, layer: fused(path, layer, transposed=False), "x", ("gate_proj", "up_proj", "down_proj")),
    "Llama 4": (
        lambda path, layer: fused(path, layer, transposed=True), "llama4_text", ("gate_proj", "up_proj", "down_proj"),
    ),
    "GPT-OSS": (
        lambda path, layer: fused(path, layer, transposed=True, interleaved=True, biases=True), "gpt_oss", None,
    ),
}  # fmt: skip


def path_of(layer):
    return f"model.layers.{layer}.mlp.experts"


def make_source(directory, form="per expert", layers=3, shards=2):
    directory.mkdir()
    make, model_type, _ = FORMS[form]
    tensors = {
        "model.embed_tokens.weight": torch.randn(16, HIDDEN).to(BF16),
        "model.norm.weight": torch.randn(HIDDEN).to(BF16),
    }
    for layer in range(layers):
        tensors |= make(path_of(layer), layer)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN)
    names, weight_map = list(tensors), {}
    for number in range(shards):
        part = names[number::shards]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": HIDDEN}))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "weights.bin").write_text("not to be copied")
    return tensors


def files_of(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("scale_search", [None, "mse"])
@pytest.mark.parametrize("form", FORMS)
def test_converts(tmp_path, form, scale_search):
    tensors = make_source(tmp_path / "source", form)
    errors = convert(tmp_path / "source", tmp_path / "out", scale_search=scale_search, max_shard_size="20KB")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    projections = FORMS[form][2]
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.experts == [path_of(layer) for layer in range(3)]
    assert [error.name for error in errors] == checkpoint.experts
    for layer, error in enumerate(errors):
        gate, up, down = gate_up_down(layer)
        gate_up = torch.cat([gate, up], 1)
        weights = checkpoint.read_experts(path_of(layer))
        # An expert's gate and up share a global scale, as other readers assume.
        assert_same_bits(weights.gate_up, quantize(gate_up, scale_search=scale_search))
        assert_same_bits(weights.down, quantize(down, scale_search=scale_search))
        for decibels, packed, weight in ((error.gate_up, weights.gate_up, gate_up), (error.down, weights.down, down)):
            noise = (oracle_dequantize(*packed.tensors()) - weight.float()).double().square().sum()
            assert decibels == pytest.approx(10 * log10(weight.double().square().sum() / noise), abs=1e-3)
        assert error.nbytes == weights.nbytes
        if form == "GPT-OSS":
            bias = tensors[f"{path_of(layer)}.gate_up_proj_bias"]
            assert torch.equal(weights.gate_up_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))
    written = load_tensors(tmp_path / "out")
    for name, tensor in tensors.items():
        if "experts" not in name or name.endswith("bias"):
            assert torch.equal(written[name], tensor)
            assert written[name].dtype == tensor.dtype
    for layer in range(3):
        one = f"{path_of(layer)}.2.{projections[1]}.weight_scale_2" if projections else ""
        assert (one or f"{path_of(layer)}.gate_up_proj_weight_scale_2") in written
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_size"] == HIDDEN
    ignored = {"model.embed_tokens", "lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3))}
    assert set(config["quantization_config"]["ignore"]) == ignored
    names = {file.name for file in (tmp_path / "out").iterdir() if file.suffix != ".safetensors"}
    assert names == {"config.json", "hf_quant_config.json", "model.safetensors.index.json", "tokenizer.json"}


@pytest.mark.parametrize("form", FORMS)
def test_converts_to_mxfp8(tmp_path, form):
    tensors = make_source(tmp_path / "source", form)
    errors = convert(tmp_path / "source", tmp_path / "out", format="mxfp8", max_shard_size="30KB")
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.experts == [error.name for error in errors] == [path_of(layer) for layer in range(3)]
    for layer, error in enumerate(errors):
        gate, up, down = gate_up_down(layer)
        weights = checkpoint.read_experts(path_of(layer))
        assert error.nbytes == weights.nbytes
        pairs = (weights.gate_up, torch.cat([gate, up], 1), error.gate_up), (weights.down, down, error.down)
        for packed, weight, decibels in pairs:
            assert_same_bits(packed, mxfp8.quantize(weight))
            noise = (decoded(packed) - weight.float()).double().square().sum()
            assert decibels == pytest.approx(10 * log10(weight.double().square().sum() / noise), abs=1e-3)
        if form == "GPT-OSS":
            bias = tensors[f"{path_of(layer)}.gate_up_proj_bias"]
            assert torch.equal(weights.gate_up_bias, torch.cat([bias[:, 0::2], bias[:, 1::2]], 1))
    written, projections = load_tensors(tmp_path / "out"), FORMS[form][2]
    name = f"{path_of(1)}.2.{projections[2]}.weight" if projections else f"{path_of(1)}.down_proj"
    assert written[name].dtype == torch.float8_e4m3fn
    scale = written[f"{name}_scale" if projections else f"{name}_weight_scale"]
    assert scale.dtype == torch.uint8
    assert scale.shape == ((HIDDEN, INTERMEDIATE // 32) if projections else (EXPERTS, INTERMEDIATE // 32, HIDDEN))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_algo"], config["quant_method"]) == ("MXFP8", "modelopt")
    assert "config_groups" not in config
    ignored = {"model.embed_tokens", "lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(3))}
    assert set(config["ignore"]) == ignored
    hf_quant_config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert (hf_quant_config["quant_algo"], hf_quant_config["group_size"]) == ("MXFP8", 32)
    again = convert(tmp_path / "out", tmp_path / "again", linears=True)  # in NVFP4, which nothing is left for
    assert all(error.gate_up == error.down == inf for error in again)
    assert {name: bits(t).tolist() for name, t in load_tensors(tmp_path / "again").items()} == {
        name: bits(t).tolist() for name, t in written.items()
    }


def test_converts_to_both_formats(tmp_path, caplog):
    """Experts of each layer and linears in a format of their own, or in 16 bits; named as ModelOpt's exports do."""
    dense_source(tmp_path / "source")
    make_source(tmp_path / "more", layers=3)
    more = {name: t for name, t in load_tensors(tmp_path / "more").items() if "layers.0." not in name}
    save_file({**load_tensors(tmp_path / "source"), **more}, tmp_path / "source" / "model.safetensors")
    asked = []

    def format(module, path):
        asked.append(path)
        assert isinstance(module, torch.nn.Linear) != path.endswith(".experts")
        return format_of(path)

    def format_of(path):
        if "self_attn" in path:
            return "mxfp8" if path.endswith(("q_proj", "o_proj")) else "nvfp4"
        return {"0": "nvfp4", "1": "mxfp8", "2": None}[path.split(".")[2]]

    convert(tmp_path / "source", tmp_path / "out", format=format, linears=True)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith(f"{' and '.join(ATTENTION[:3])} are in NVFP4 and in MXFP8, which engines refuse")
    odd = "model.layers.0.odd_proj"  # its in_features are no blocks
    assert set(asked) == {*ATTENTION, *SHARED, odd, *map(path_of, range(3))}
    checkpoint = Checkpoint(tmp_path / "out")
    wanted = {path: name for path in set(asked) - {odd} if (name := format_of(path)) is not None}
    assert {path: checkpoint.number_format(path).name for path in (*checkpoint.experts, *checkpoint.dense)} == wanted
    tensors = load_tensors(tmp_path / "source")
    q, k, v, o = (tensors[f"{path}.weight"][None] for path in ATTENTION)
    for path, weight in zip((ATTENTION[0], ATTENTION[3]), (q, o), strict=True):
        assert_same_bits(checkpoint.read_dense_weight(path), mxfp8.quantize(weight))
    together = quantize(torch.cat([k, v], 1))  # of one format: they share a global scale
    assert_same_bits(checkpoint.read_dense_weight(ATTENTION[1]), together.rows(slice(0, k.shape[1])))
    assert_same_bits(checkpoint.read_experts(path_of(1)).down, mxfp8.quantize(gate_up_down(1)[2]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    algos = {"nvfp4": ("W4A16_NVFP4", 16), "mxfp8": ("MXFP8", 32)}
    layers = {path: (entry["quant_algo"], entry["group_size"]) for path, entry in config["quantized_layers"].items()}
    assert layers == {path: algos[name] for path, name in wanted.items()}
    assert f"{path_of(2)}.0.gate_proj" in config["ignore"]
    theirs = json.loads((DATA / "modelopt_mixed_qwen3_moe" / "config.json").read_text())["quantization_config"]
    assert config.keys() == theirs.keys()
    assert config["config_groups"].keys() == theirs["config_groups"].keys()
    assert theirs["quantized_layers"][path_of(0)] == config["quantized_layers"][path_of(1)]


def test_formats_that_are_none(tmp_path):
    make_source(tmp_path / "source")
    for format, error, message in (
        ("mxfp4", ValueError, r"format: got 'mxfp4', wanted one of \('nvfp4', 'mxfp8'\)"),
        (8, TypeError, "format: got 8, wanted one of"),
        (lambda module, path: "int8", ValueError, f"format: got 'int8' for '{path_of(0)}', wanted one of .* or None"),
        (lambda module, path: None, ValueError, "has no experts that filter, ignore and format take"),
    ):
        with pytest.raises(error, match=message):
            convert(tmp_path / "source", tmp_path / "out", format=format)
    for format in ("mxfp8", {"*": "mxfp8"}):
        with pytest.raises(ValueError, match="scale_search: got 'mse', wanted None: MXFP8"):
            convert(tmp_path / "source", tmp_path / "out", format=format, scale_search="mse")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_command_line_with_mxfp8(tmp_path, capsys):
    make_source(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--format", "mxfp8"]) == 0
    assert f"{path_of(2)}  " in capsys.readouterr().out
    assert Checkpoint(tmp_path / "out").number_format(path_of(2)).name == "mxfp8"


def test_experts_are_byte_for_byte_those_of_modelopt(tmp_path):
    export = "modelopt_qwen3_moe"
    (tmp_path / "source").mkdir()
    config = json.loads((DATA / export / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    shutil.copyfile(DATA / export / "source.safetensors", tmp_path / "source" / "model.safetensors")
    convert(tmp_path / "source", tmp_path / "out")
    ours, theirs = load_tensors(tmp_path / "out"), load_tensors(DATA / export)
    assert ours.keys() == {n for n in theirs if ".experts." in n and not n.endswith("input_scale")}
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert torch.equal(bits(tensor), bits(theirs[name]))


def test_mse_has_less_error(tmp_path):
    make_source(tmp_path / "source")
    usual, searched = (convert(tmp_path / "source", tmp_path / f"{s}", scale_search=s) for s in (None, "mse"))
    for one, other in zip(usual, searched, strict=True):
        assert other.gate_up > one.gate_up + 1
        assert other.down > one.down + 1


@pytest.mark.parametrize("linears", [None, False])
@pytest.mark.parametrize("export", EXPORTS)
def test_quantized_weights_are_taken_over_exactly(tmp_path, export, linears):
    errors = convert(DATA / export, tmp_path / "out", linears=linears)
    before, after = Checkpoint(DATA / export), Checkpoint(tmp_path / "out")
    kept = before.dense if linears is None else []
    assert {(error.gate_up, error.down) for error in errors} == {(inf, inf)} | {(inf, None) for _ in kept}
    one, other = (checkpoint.read_experts(checkpoint.experts[0]) for checkpoint in (before, after))
    assert_same_bits(one.gate_up, other.gate_up)
    assert_same_bits(one.down, other.down)
    assert set(after.dense) == set(kept)
    for name in kept:
        assert_same_bits(after.read_dense_weight(name), before.read_dense_weight(name))
    became = {*before.dense} - {*kept}
    for name in became:
        assert torch.equal(after.read(f"{name}.weight"), before.read_dense(name))
    assert set(after.others) == {*before.others, *(f"{name}.weight" for name in became)}
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert became <= set(ignore)
    assert not {*kept} & set(ignore)


def dense_source(directory):
    """A layer of experts beside dense layers of all kinds."""
    make_source(directory, layers=1, shards=1)
    file = directory / "model-00001-of-00001.safetensors"
    shapes = {
        **{
            f"model.layers.0.self_attn.{name}_proj": (n, 32) for name, n in (("q", 64), ("k", 32), ("v", 32), ("o", 32))
        },
        **{f"model.layers.0.mlp.shared_expert.{name}_proj": (48, 32) for name in ("gate", "up")},
        "model.layers.0.mlp.shared_expert.down_proj": (32, 48),
        "model.layers.0.mlp.shared_expert_gate": (1, 32),
        "model.layers.0.odd_proj": (16, 24),
        "vision_tower.layers.0.q_proj": (32, 32),
        "lm_head": (16, 32),
    }
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors |= {f"{name}.weight": torch.randn(shape).to(BF16) for name, shape in shapes.items()}
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.randn(64).to(BF16)
    save_file(tensors, directory / "model.safetensors")
    for old in (file, directory / "model.safetensors.index.json"):
        old.unlink()
    return tensors


ATTENTION = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
SHARED = [f"model.layers.0.mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]


def test_linears(tmp_path):
    source = dense_source(tmp_path / "source")
    errors = convert(tmp_path / "source", tmp_path / "out", linears=True)
    checkpoint, config = Checkpoint(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(checkpoint.dense) == {*ATTENTION, *SHARED}
    left = {f"model.layers.0.{name}" for name in ("mlp.shared_expert_gate", "mlp.gate", "odd_proj")}
    left |= {"model.embed_tokens", "vision_tower.layers.0.q_proj", "lm_head"}
    assert set(config["quantization_config"]["ignore"]) == left
    for name in left:
        assert torch.equal(checkpoint.read(f"{name}.weight"), source[f"{name}.weight"])
    assert torch.equal(checkpoint.read(f"{ATTENTION[0]}.bias"), source[f"{ATTENTION[0]}.bias"])
    for group in (ATTENTION[:3], ATTENTION[3:], SHARED[:2], SHARED[2:]):
        whole = quantize(torch.cat([source[f"{name}.weight"] for name in group])[None])
        begin = 0
        for name in group:
            weight, n = checkpoint.read_dense_weight(name), source[f"{name}.weight"].shape[0]
            assert torch.equal(weight.qdata[0], whole.qdata[0, begin : begin + n])
            assert torch.equal(bits(weight.scale[0]), bits(whole.scale[0, begin : begin + n]))
            assert torch.equal(weight.global_scale, whole.global_scale)
            begin += n
    dense = {error.name: error for error in errors if error.down is None}
    assert dense.keys() == {*ATTENTION, *SHARED}
    assert all(19 < error.gate_up < 22 for error in dense.values())
    assert [error.name for error in errors if error.down is not None] == ["model.layers.0.mlp.experts"]
    again = convert(tmp_path / "out", tmp_path / "again")
    assert all(error.gate_up == inf for error in again)
    assert load_tensors(tmp_path / "again").keys() == load_tensors(tmp_path / "out").keys()
    with pytest.raises(ValueError, match="linears: 'all' fits no dense layer of .*source, wanted"):
        convert(tmp_path / "source", tmp_path / "bad", linears="all")


def test_a_function_chooses_linears(tmp_path):
    dense_source(tmp_path / "source")
    asked = []

    def linears(module, path):
        assert isinstance(module, torch.nn.Linear)
        asked.append(path)
        return path in ("lm_head", ATTENTION[1])

    convert(tmp_path / "source", tmp_path / "out", linears=linears)
    assert set(Checkpoint(tmp_path / "out").dense) == {"lm_head", ATTENTION[1]}
    assert not any("gate" in path.split(".")[-1] and "gate_proj" not in path for path in asked)


def test_linears_of_a_checkpoint_without_experts(tmp_path):
    tensors = dense_source(tmp_path / "source")
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(kept, tmp_path / "source" / "model.safetensors")
    convert(tmp_path / "source", tmp_path / "out", linears=True)
    assert set(Checkpoint(tmp_path / "out").dense) == {*ATTENTION, *SHARED}


def test_command_line_with_linears(tmp_path, capsys):
    dense_source(tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--linears"]) == 0
    assert set(Checkpoint(tmp_path / "out").dense) == {*ATTENTION, *SHARED}
    assert f"{ATTENTION[0]}" in capsys.readouterr().out


def test_names_that_look_like_ours_are_not(tmp_path):
    tensors = make_source(tmp_path / "source")
    file = tmp_path / "source" / "model-00001-of-00002.safetensors"
    names = ("router.scale", "x.multiplier", "x.blocks", "x.scales", "y.input_scale", "z.k_scale", "alone")
    extra = {name: torch.randn(3) for name in names}
    save_file({**{name: tensor.clone() for name, tensor in load_file(file).items()}, **extra}, file)
    index = tmp_path / "source" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] |= dict.fromkeys(extra, file.name)
    index.write_text(json.dumps(value))
    convert(tmp_path / "source", tmp_path / "once")
    once = load_tensors(tmp_path / "once")
    for name, tensor in extra.items():
        assert torch.equal(once[name], tensor)
    convert(tmp_path / "once", tmp_path / "twice")
    twice = load_tensors(tmp_path / "twice")
    assert once.keys() - twice.keys() == {"z.k_scale"}  # of a quantized cache, in a quantized checkpoint
    assert all(torch.equal(bits(twice[name]), bits(once[name])) for name in twice)
    assert len(tensors) > 0


def test_layers_left_in_16_bits_stay_so(tmp_path):
    tensors = make_source(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "first")
    mixed = {**load_tensors(tmp_path / "first"), **per_expert("model.layers.9.mlp.experts", 9)}
    for file in (tmp_path / "first").glob("model*"):
        file.unlink()
    save_file(mixed, tmp_path / "first" / "model.safetensors")
    convert(tmp_path / "first", tmp_path / "second")
    name = "model.layers.9.mlp.experts.3.up_proj"
    assert torch.equal(load_tensors(tmp_path / "second")[f"{name}.weight"], mixed[f"{name}.weight"])
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert name in config["quantization_config"]["ignore"]
    assert len(tensors) > 0


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made by operators held at a time; views of mapped files do not count."""

    def __init__(self):
        super().__init__()
        self.live, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self.seen and func.namespace == "aten" and not func.is_view:
                self.seen.add(key)
                self.live += nbytes
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self._drop, key, nbytes)
        return out

    def _drop(self, key, nbytes):
        self.seen.discard(key)
        self.live -= nbytes


def test_stream_holds_one_layer(tmp_path):
    make_source(tmp_path / "source", layers=12)
    convert(tmp_path / "source", tmp_path / "out")
    layer = Checkpoint(tmp_path / "out").read_experts(path_of(0)).nbytes
    with LiveBytes() as memory:
        for _, value in stream(Checkpoint(tmp_path / "out")):
            del value
    assert layer <= memory.most < 2.5 * layer


def test_convert_holds_one_layer_and_one_shard(tmp_path):
    make_source(tmp_path / "source", layers=12)
    with LiveBytes() as memory:
        errors = convert(tmp_path / "source", tmp_path / "out", max_shard_size=1)
    result, one_expert = errors[0].nbytes, 3 * HIDDEN * INTERMEDIATE
    # Beside the layer: one expert as float32, a few times over while it is rounded, and one tensor to be written.
    assert result < memory.most < 2 * result + 40 * one_expert
    assert memory.most < 12 * result


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_resumes(tmp_path, monkeypatch, format):
    options = dict(format=format, max_shard_size="9KB")
    make_source(tmp_path / "source", layers=6)
    convert(tmp_path / "source", tmp_path / "whole", **options)
    calls = []
    original = quantize_tensor

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(QUANTIZE, interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "source", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").is_dir()
    # A part that was written after the last note of progress, and one that was not finished.
    (tmp_path / "out.partial" / "part-00099.unfinished").write_text("half")
    other = "mxfp8" if format == "nvfp4" else "nvfp4"
    with pytest.raises(FileExistsError, match=r"out.partial was begun with another value of formats; remove it"):
        convert(tmp_path / "source", tmp_path / "out", format=other, max_shard_size="9KB")
    errors = convert(tmp_path / "source", tmp_path / "out", **options)
    total = 6 * 2 * EXPERTS
    assert total < len(calls) < total + 30  # some of the first 30 are not made again
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert [error.name for error in errors] == [path_of(layer) for layer in range(6)]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("moment", others_slow(range(1, 40, 3), range(1, 40, 6), exhaustive=True))
def test_resumes_from_any_moment(tmp_path, monkeypatch, moment):
    """Stops at the n-th replaced or renamed file, which is where a crash could leave two files that disagree."""
    make_source(tmp_path / "source", layers=4)
    convert(tmp_path / "source", tmp_path / "whole", max_shard_size="9KB")
    import os

    calls = []
    for name in ("replace", "rename"):
        original = getattr(os, name)

        def stopping(*args, original=original):
            calls.append(args)
            if len(calls) == moment:
                raise OSError("disk full")
            return original(*args)

        monkeypatch.setattr(os, name, stopping)
    try:
        convert(tmp_path / "source", tmp_path / "out", max_shard_size="9KB")
    except OSError:
        assert not (tmp_path / "out").exists()
        calls.extend([()] * 1000)
        convert(tmp_path / "source", tmp_path / "out", max_shard_size="9KB")
    else:
        assert len(calls) < moment
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_another_job_is_not_resumed(tmp_path, monkeypatch):
    make_source(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(QUANTIZE, lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "source", tmp_path / "out")
    with pytest.raises(FileExistsError, match="another value of max_shard_size, scale_search; remove it"):
        convert(tmp_path / "source", tmp_path / "out", scale_search="mse", max_shard_size="9KB")
    with monkeypatch.context() as patch:
        patch.setattr("thunder_moe.__version__", "0.0.1")
        with pytest.raises(FileExistsError, match="another value of version"):
            convert(tmp_path / "source", tmp_path / "out")
    file = next((tmp_path / "source").glob("*.safetensors"))
    content = load_file(file)
    save_file({name: tensor.clone() * 2 for name, tensor in content.items()}, file)
    with pytest.raises(FileExistsError, match="another value of source's files"):
        convert(tmp_path / "source", tmp_path / "out")


def test_broken_sources_leave_nothing(tmp_path):
    make_source(tmp_path / "source")
    file = tmp_path / "source" / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    name = f"{path_of(2)}.1.up_proj.weight"

    def attempt(message):
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "source", tmp_path / "out", max_shard_size="9KB")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]

    file.write_bytes(content[:-1])
    attempt("model-00002-of-00002.safetensors: is truncated or no safetensors file")
    file.write_bytes(content)
    where = next(f for f in (tmp_path / "source").glob("*.safetensors") if name in load_file(f))
    original = {key: tensor.clone() for key, tensor in load_file(where).items()}
    cases = {
        rf"{where.name}: tensor '{name}' has dtype BF16 and shape \(7, 32\), wanted": torch.zeros(7, 32, dtype=BF16),
        rf"{where.name}: tensor '{name}' has dtype I64": torch.zeros(INTERMEDIATE, HIDDEN, dtype=torch.int64),
        rf"{where.name}: tensor .* cannot be quantized: got NaN or Inf, wanted": torch.full(
            (INTERMEDIATE, HIDDEN), torch.nan
        ).to(BF16),
    }
    for message, tensor in cases.items():
        save_file({**original, name: tensor}, where)
        attempt(message)
    save_file({key: tensor for key, tensor in original.items() if key != name}, where)
    index = tmp_path / "source" / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    attempt(f"{where.name}: has no tensor '{name}'")
    del value["weight_map"][name]
    index.write_text(json.dumps(value))
    attempt(rf"module '{path_of(2)}' lacks up_proj of expert 1 of 4")


def test_in_features_that_are_no_blocks(tmp_path):
    (tmp_path / "source").mkdir()
    tensors = {"l.experts.0.up_proj.weight": torch.zeros(8, 24), "l.experts.0.down_proj.weight": torch.zeros(24, 8)}
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    for format, size in (("nvfp4", 16), ("mxfp8", 32)):
        match = rf"tensor 'l.experts.0.up_proj.weight' cannot be quantized: .*multiple of {size}"
        with pytest.raises(ValueError, match=match):
            convert(tmp_path / "source", tmp_path / "out", format=format)


def test_what_cannot_be_converted(tmp_path):
    tensors = make_source(tmp_path / "source")
    with pytest.raises(FileExistsError, match="source exists already"):
        convert(tmp_path / "source", tmp_path / "source")
    with pytest.raises(ValueError, match="scale_search: got 'best', wanted None or one of"):
        convert(tmp_path / "source", tmp_path / "out", scale_search="best")
    with pytest.raises(ValueError, match=r"device: got 'abacus', which cannot be used here \(Expected one of cpu"):
        convert(tmp_path / "source", tmp_path / "out", device="abacus")
    with pytest.raises(FileNotFoundError, match="nothing is not a directory"):
        convert(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text("{}")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(ValueError, match="dense has no experts"):
        convert(tmp_path / "dense", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "source"]


def test_command_line(tmp_path, capsys, monkeypatch):
    make_source(tmp_path / "source")
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out")]
    assert main([*arguments, "--max-shard-size", "20KB"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["experts", "gate,", "up", "down", "MB"]
    errors = convert(tmp_path / "source", tmp_path / "again", scale_search="mse", max_shard_size="20KB")
    for line, error in zip(table[1:], errors, strict=False):
        assert line.split()[:5] == [error.name, f"{error.gate_up:.2f}", "dB", f"{error.down:.2f}", "dB"]
    assert table[-1] == f"wrote {tmp_path / 'out'}"
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")
    assert main(arguments) == 1
    assert f"error: destination: {tmp_path / 'out'} exists already" in capsys.readouterr().err
    assert main(["convert", str(DATA / "mxfp4_gpt_oss"), str(tmp_path / "exact")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["exact", "exact"]
    assert main(["convert", str(DATA / "mxfp4_gpt_oss"), str(tmp_path / "quiet"), "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    assert main(["convert", str(DATA / "mxfp4_gpt_oss"), str(tmp_path / "größer")]) == 0
    assert sys.stdout.buffer.getvalue().endswith(rb"gr\xf6\xdfer" + b"\n")


@pytest.mark.parametrize(("option", "search"), [((), "mse"), (("mse",), "mse"), (("none",), None)])
def test_the_command_line_searches_scales_by_default(tmp_path, option, search):
    make_source(tmp_path / "source")
    options = ["--quiet", *(("--scale-search", *option) if option else ())]
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), *options]) == 0
    convert(tmp_path / "source", tmp_path / "again", scale_search=search)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")


def test_output_that_nobody_can_read(tmp_path, capsys, monkeypatch):
    make_source(tmp_path / "source")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "the work is done, but standard output cannot be written ([Errno 28]" in said
    assert Checkpoint(tmp_path / "out").experts == [path_of(layer) for layer in range(3)]


def test_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["thunder_moe", "convert", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("thunder_moe", run_name="__main__")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for option in ("--scale-search {mse,none}", "--device", "--max-shard-size", "--quiet", "source", "destination"):
        assert option in text
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "a"])
    assert stopped.value.code == 2
    assert "destination" in capsys.readouterr().err


def test_interruption_is_said(tmp_path, monkeypatch, capsys):
    make_source(tmp_path / "source")
    monkeypatch.setattr(QUANTIZE, lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 130
    assert "interrupted; run the same command to resume" in capsys.readouterr().err


def test_works_without_transformers(tmp_path):
    make_source(tmp_path / "source")
    code = f"""
import sys
sys.modules.update(dict.fromkeys(["transformers", "thunder", "huggingface_hub"]))  # None: not there
from thunder_moe.checkpoint import Checkpoint, convert
convert({str(tmp_path / "source")!r}, {str(tmp_path / "out")!r})
print(Checkpoint({str(tmp_path / "out")!r}).experts)
"""
    assert fresh_python(code).strip() == str([path_of(layer) for layer in range(3)])
