"""Writing checkpoints: bit for bit what was read, in ModelOpt's own names; shards, configs, and nothing half-written.
Called by pytest; judged by the exports of nvidia-modelopt in tests/data.
"""

import json

import pytest
import torch
from checkpoint_files import DATA, EXPORTS, assert_same_bits, bits, copy_export, edit_json, load_tensors, stream
from safetensors.torch import load_file

from thunder_moe.checkpoint import Checkpoint, ExpertsLayout, ExpertWeights, write_checkpoint
from thunder_moe.checkpoint.writer import parse_size
from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.formats.nvfp4 import LAYOUTS as LAYOUTS_OF_WEIGHTS
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize

LAYOUTS = {
    "per expert": ExpertsLayout(),
    "w1, w3, w2": ExpertsLayout(projections=("w1", "w3", "w2")),
    "fused": ExpertsLayout(fused=True),
    "fused, alternating": ExpertsLayout(fused=True, interleaved=True),
}

FUSED = LAYOUTS["fused, alternating"]


def make_experts(*, biases=False, gated=True, one_scale=False):
    """Experts (4, 64, 32) and (4, 32, 32 or 64), gate and up with global scales of their own."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator) * (1 + torch.rand(shape[0], 1, 1, generator=generator))

    def pack(weight):
        packed = quantize(weight.reshape(1, -1, weight.shape[2]) if one_scale else weight)
        parts = (packed.qdata, packed.scale.view(torch.uint8))
        qdata, scale = (part.view(*weight.shape[:2], -1) for part in parts)
        return NVFP4Weight(qdata, scale.view(torch.float8_e4m3fn), packed.global_scale.expand(4).contiguous())

    gate_up = pack(random(4, 64, 32))
    if gated and not one_scale:
        gate_up = NVFP4Weight.concatenate(pack(random(4, 32, 32)), pack(random(4, 32, 32) * 3))
    down = pack(random(4, 32, 32 if gated else 64))
    bias = (torch.randn(4, 64, generator=generator).bfloat16(), torch.randn(4, 32, generator=generator).bfloat16())
    return ExpertWeights(gate_up, down, *(bias if biases else ()))


def config_of(layout):
    return {"model_type": "gpt_oss" if layout.interleaved else "other"}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "biases"])
@pytest.mark.parametrize("one_scale", [False, True], ids=["scales", "one scale"])
def test_round_trip_is_bit_exact(tmp_path, layout, biases, one_scale):
    experts = make_experts(biases=biases, one_scale=one_scale)
    others = {"model.norm.weight": torch.randn(32), "lm_head.weight": torch.randn(16, 32).bfloat16()}
    tensors = [("model.layers.0.mlp.experts", experts), *others.items()]
    write_checkpoint(tmp_path / "out", config_of(layout), tensors, layout=layout, max_shard_size=4000)
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.method == "modelopt"
    back = checkpoint.read_experts("model.layers.0.mlp.experts")
    assert_same_bits(back.gate_up, experts.gate_up)
    assert_same_bits(back.down, experts.down)
    for one, other in ((back.gate_up_bias, experts.gate_up_bias), (back.down_bias, experts.down_bias)):
        assert (one is None) == (other is None) == (not biases)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))
    assert set(checkpoint.others) == set(others)
    for name, tensor in others.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype


def test_every_layout_of_weights_is_written_the_same(tmp_path):
    weights = quantize(torch.randn(2, 128, 128)), quantize(torch.randn(2, 128, 64))
    for name in LAYOUTS_OF_WEIGHTS:
        experts = ExpertWeights(*(weight.to_layout(name) for weight in weights))
        write_checkpoint(tmp_path / name, {}, [("layers.0.experts", experts)])
    for name in LAYOUTS_OF_WEIGHTS:
        for file in ("model.safetensors", "config.json", "hf_quant_config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "linear" / file).read_bytes()
    assert_same_bits(Checkpoint(tmp_path / "tiled_64x64").read_experts("layers.0.experts").gate_up, weights[0])


def test_experts_without_a_gate(tmp_path):
    experts = make_experts(gated=False)
    write_checkpoint(tmp_path / "out", {}, [("layers.0.experts", experts)])
    back = Checkpoint(tmp_path / "out").read_experts("layers.0.experts")
    assert not back.gated
    assert_same_bits(back.gate_up, experts.gate_up)
    with pytest.raises(ValueError, match="layers.0.experts has no gate, which the fused layout has"):
        write_checkpoint(tmp_path / "two", {}, [("layers.0.experts", make_experts(gated=False, one_scale=True))],
                         layout=ExpertsLayout(fused=True))  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("export", EXPORTS)
def test_writes_what_modelopt_writes(tmp_path, export):
    """ModelOpt's experts come out under the same names, with the same bits; other formats in the same form."""
    checkpoint = Checkpoint(DATA / export)
    layout = checkpoint.layout(checkpoint.experts[0])
    if export == "modelopt_llama4":  # elsewhere written per expert
        assert layout == ExpertsLayout()
        layout = ExpertsLayout(fused=True)
    write_checkpoint(tmp_path / "out", checkpoint.config, stream(checkpoint), layout=layout)
    written = load_file(tmp_path / "out" / "model.safetensors")
    experts = {name: tensor for name, tensor in written.items() if "experts." in name and "shared" not in name}
    if export.startswith("modelopt"):
        original = load_tensors(DATA / export)
        wanted = {n for n in original if "experts." in n and "shared" not in n and not n.endswith("input_scale")}
        assert experts.keys() == wanted
        for name, tensor in experts.items():
            assert tensor.dtype == original[name].dtype
            assert tensor.shape == original[name].shape
            assert torch.equal(bits(tensor), bits(original[name]))
    one, other = (c.read_experts(c.experts[0]) for c in (checkpoint, Checkpoint(tmp_path / "out")))
    assert_same_bits(one.gate_up, other.gate_up)
    assert_same_bits(one.down, other.down)


def test_configs(tmp_path):
    checkpoint = Checkpoint(DATA / "modelopt_mixtral")  # W4A16_NVFP4, as ours
    write_checkpoint(tmp_path / "out", checkpoint.config, stream(checkpoint), extra={"a.txt": "text"})
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", checkpoint.path))
    quantization, original = ours.pop("quantization_config"), theirs.pop("quantization_config")
    assert ours == theirs
    assert quantization["config_groups"] == original["config_groups"]
    assert quantization["quant_algo"] == original["quant_algo"] == "W4A16_NVFP4"
    assert quantization["quant_method"] == original["quant_method"] == "modelopt"
    assert set(quantization["ignore"]) == set(original["ignore"])
    write_checkpoint(tmp_path / "old", checkpoint.config, stream(checkpoint, linears=False))
    old = json.loads((tmp_path / "old" / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(old) == {*original["ignore"], *(f"model.layers.0.self_attn.{n}_proj" for n in "qkvo")}
    hf_quant_config = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    assert hf_quant_config["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": quantization["ignore"],
    }
    assert (tmp_path / "out" / "a.txt").read_text() == "text"


def test_a_nested_quantization_config_goes(tmp_path):
    config = {"text_config": {"model_type": "x", "quantization_config": {"quant_method": "modelopt"}}}
    write_checkpoint(tmp_path / "out", config, [("layers.0.experts", make_experts())])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"] == {"model_type": "x"}
    assert "quantization_config" in config["text_config"]


def test_shards(tmp_path):
    tensors = {f"layers.{number}.weight": torch.full((10, 10), float(number)) for number in range(7)}  # 400 bytes each
    tensors["big.weight"] = torch.zeros(1000)
    write_checkpoint(tmp_path / "out", {}, [("experts", make_experts()), *tensors.items()], max_shard_size=1000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    count = len(files)
    assert [file.name for file in files] == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    total = 0
    for file in files:
        content = load_file(file)
        nbytes = sum(tensor.nbytes for tensor in content.values())
        assert nbytes <= 1000 or len(content) == 1
        assert all(index["weight_map"][name] == file.name for name in content)
        total += nbytes
    assert index["metadata"]["total_size"] == total
    for name, tensor in tensors.items():
        assert torch.equal(Checkpoint(tmp_path / "out").read(name), tensor)


def test_tensors_that_share_memory_are_written_apart(tmp_path):
    base = torch.randn(8, 4)
    tensors = [("experts", make_experts()), ("a.weight", base), ("b.weight", base), ("c.weight", base[2:5].T)]
    write_checkpoint(tmp_path / "out", {}, tensors)
    for name, tensor in tensors[1:]:
        assert torch.equal(Checkpoint(tmp_path / "out").read(name), tensor)


def test_fused_scales_that_only_we_read_are_said(tmp_path, caplog):
    layout = LAYOUTS["fused, alternating"]
    write_checkpoint(tmp_path / "one", {}, [("experts", make_experts(one_scale=True))], layout=layout)
    assert not caplog.records
    write_checkpoint(tmp_path / "two", {}, [("experts", make_experts())], layout=layout)
    (record,) = caplog.records
    assert "_proj_weight_scale_2 and 1 more have a global scale for each expert" in record.message


def test_refuses_to_overwrite(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="out exists already; remove it or choose another"):
        write_checkpoint(tmp_path / "out", {}, [("experts", make_experts())])
    assert list((tmp_path / "out").iterdir()) == []


def test_leaves_nothing_after_an_error(tmp_path):
    def tensors():
        yield "experts", make_experts()
        assert len(list(tmp_path.iterdir())) == 1
        assert not (tmp_path / "out").exists()
        yield "a", torch.zeros(3)
        yield "a", torch.zeros(3)

    with pytest.raises(ValueError, match="tensors: got 'a' twice"):
        write_checkpoint(tmp_path / "out", {}, tensors(), max_shard_size=100)
    assert list(tmp_path.iterdir()) == []


def test_the_next_save_leaves_one_that_is_running(tmp_path, caplog):
    def tensors():
        yield "a", torch.zeros(3)
        (running,) = tmp_path.iterdir()
        write_checkpoint(tmp_path / "out", {}, [("b", torch.ones(3))])
        assert running.exists()

    with pytest.raises(FileExistsError, match="out exists already"):
        write_checkpoint(tmp_path / "out", {}, tensors(), max_shard_size=1)
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["b"], torch.ones(3))


def test_a_scale_per_row_has_no_form(tmp_path):
    experts = make_experts()
    down = NVFP4Weight(experts.down.qdata, experts.down.scale, torch.rand(4, 32) + 1)
    with pytest.raises(ValueError, match=r"x.experts.0.down_proj has a global scale per row"):
        write_checkpoint(tmp_path / "out", {}, [("x.experts", ExpertWeights(experts.gate_up, down))])
    assert list(tmp_path.iterdir()) == []


# What is invalid -> (format, tensor of the packed weight, its value there, end of the tensor's name, what is said).
INVALID = {
    "a code": (mxfp8, "qdata", 0x7F, "", "has NaN, wanted finite values"),
    "a code with a sign": (mxfp8, "qdata", 0xFF, "", "has NaN, wanted finite values"),
    "a scale of 32": (mxfp8, "scale", 0xFF, "_scale", "has the byte 255, which is NaN, wanted at most 166"),
    "a large scale": (mxfp8, "scale", 167, "_scale", r"has the byte 167, a scale of 2\*\*40, wanted at most 166"),
    "a scale of 16": (nvfp4, "scale", 0x7F, "_scale", "has NaN or negative numbers, wanted scales"),
    "a negative scale": (nvfp4, "scale", 0x81, "_scale", "has NaN or negative numbers, wanted scales"),
    "a global scale": (nvfp4, "global_scale", float("nan"), "_scale_2", "is not finite and positive"),
    "a global scale of 0": (nvfp4, "global_scale", 0.0, "_scale_2", "is not finite and positive"),
}


@pytest.mark.parametrize(("form", "part", "value", "end", "wrong"), INVALID.values(), ids=INVALID)
def test_what_no_reader_takes_is_not_written(tmp_path, form, part, value, end, wrong):
    gate_up, down, dense = (form.quantize(torch.randn(4, n, k)) for n, k in ((128, 32), (32, 64), (64, 32)))
    write_checkpoint(tmp_path / "good", {}, [("x.experts", ExpertWeights(gate_up, down))])
    experts = ("x.experts", ExpertWeights(gate_up, down))
    for weight, item, name in (
        (down, experts, "x.experts.3.down_proj.weight"),
        (dense, ("x.dense", dense.with_tensors(t[3:] for t in dense.tensors())), "x.dense.weight"),
    ):
        tensor = getattr(weight, part)
        (tensor if tensor.itemsize > 1 else tensor.view(torch.uint8))[3] = value
        with pytest.raises(ValueError, match=f"weights: {name}{end} {wrong}.*; quantize the 16-bit weights again"):
            write_checkpoint(tmp_path / "out", {}, [("fine", torch.full((4,), torch.nan)), item])
    with pytest.raises(ValueError, match=f"weights: x.experts.down_proj{end and f'_weight{end}'} {wrong}"):
        write_checkpoint(tmp_path / "out", config_of(FUSED), [experts], layout=FUSED)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_sizes():
    assert [parse_size(size) for size in (7, "7", "30KB", "1.5 mb", "5GB")] == [7, 7, 30_000, 1_500_000, 5_000_000_000]
    for size in ("5 apples", "", "-1GB", 0, "nanGB"):
        with pytest.raises(ValueError, match="max_shard_size: got .*, wanted bytes or a size like '5GB'"):
            parse_size(size)


def test_permissions_are_the_usual_ones(tmp_path):
    write_checkpoint(tmp_path / "out", {}, [("experts", make_experts())])
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "file").write_text("")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode
    for file in (tmp_path / "out").iterdir():
        assert file.stat().st_mode == (tmp_path / "usual" / "file").stat().st_mode


def test_a_copy_that_lost_its_index_is_not_silently_partial(tmp_path):
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    edit_json(copy / "model.safetensors.index.json", lambda index: index["weight_map"].pop("lm_head.weight"))
    assert "lm_head.weight" in Checkpoint(copy).files  # what lies in a shard is read, whatever the index lists
