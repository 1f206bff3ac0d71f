"""Random damage to checkpoints: what is read is what the files say, or an error that names the file; never a crash.
Called by pytest. Seeds are fixed; more: ``for seed in range(...): damage(...)``.
"""

import json
import random
import re

import pytest
import torch
from checkpoint_files import DATA, EXPORTS, bits, copy_export, edit_json, edit_tensors, experts_path, stream
from safetensors.torch import load_file, save_file

from thunder_moe.checkpoint import Checkpoint, ExpertWeights

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.int64)


def snapshot(path):
    """Name -> bytes of the tensors that are read."""
    found = {}
    for name, value in stream(Checkpoint(path)):
        if isinstance(value, ExpertWeights):
            parts = [*value.gate_up.tensors(), *value.down.tensors(), value.gate_up_bias, value.down_bias]
        else:
            parts = [value] if isinstance(value, torch.Tensor) else value.tensors()
        found[name] = [None if part is None else bits(part).clone() for part in parts]
    return found


def same(one, other):
    return len(one) == len(other) and all(
        a is b is None or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def damage_tensor(dice, tensor):
    """Another dtype, shape or values; the same bytes seen otherwise."""
    changes = [
        lambda: tensor.float().clamp(-100, 100).to(dice.choice(DTYPES)),
        lambda: tensor.reshape(-1)[: tensor.numel() // 2].clone(),
        lambda: tensor.reshape(-1)[:1].reshape(()).clone(),
        lambda: tensor[None].clone(),
        lambda: tensor.expand(2, *tensor.shape).clone(),
        lambda: tensor.mT.contiguous() if tensor.ndim > 1 else tensor[None].clone(),
        lambda: tensor.narrow(0, 0, tensor.shape[0] // 2).clone() if tensor.ndim else tensor[None].clone(),
        lambda: torch.full(tensor.shape, float("nan")).to(tensor.dtype),
        lambda: torch.full(tensor.shape, -1.0).to(tensor.dtype),
    ]
    return dice.choice(changes)()


def damage(dice, directory):
    """Changes one thing; returns the name of the tensor that it was done to, None where any may be hit."""
    files = sorted(directory.glob("model*.safetensors"))
    file, how = dice.choice(files), dice.choice(["bytes", "cut", "tensor", "tensor", "tensor", "drop", "config"])
    if how == "bytes":
        content = bytearray(file.read_bytes())
        for _ in range(dice.choice([1, 3])):
            content[dice.randrange(8 + int.from_bytes(content[:8], "little") % len(content))] = dice.randrange(256)
        file.write_bytes(content)
    elif how == "cut":
        content = file.read_bytes()
        file.write_bytes(content[: dice.randrange(len(content))] if dice.random() < 0.7 else content + b"more")
    elif how == "config":
        value = dice.choice([None, 3, "x", [], {}, [None], {"a": None}, True])

        def edit(config):
            quantization = config["quantization_config"]
            quantization[dice.choice([*quantization])] = value

        edit_json(directory / "config.json", edit)
    else:
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        name = dice.choice([*tensors])
        damaged = damage_tensor(dice, tensors.pop(name))
        save_file(tensors | ({name: damaged} if how == "tensor" else {}), file)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            weight_map = {name: file.name for file in files for name in load_file(file)}
            index.write_text(json.dumps({"weight_map": weight_map}))
        return name
    return None


@pytest.mark.parametrize("export", EXPORTS)
def test_random_damage(tmp_path, export):
    whole, dice, outcomes = snapshot(DATA / export), random.Random(export), []
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        directory = copy_export(tmp_path / str(number), export)
        hit = damage(dice, directory)
        try:
            found = snapshot(directory)
            said = None
        except (ValueError, FileNotFoundError) as error:
            said = str(error)
        outcomes.append("read" if said is None else "error")
        if said is not None:
            assert hit is None or str(directory) in said
            continue
        for name in whole.keys() | found.keys():
            changed = name not in found or name not in whole or not same(found[name], whole[name])
            assert not changed or hit is None or hit.startswith(name), (name, hit)
    assert outcomes.count("error") >= 5


GLOBAL = {"negative": -1.0, "NaN": float("nan"), "infinite": float("inf"), "zero": 0.0}
FIELDS = {"modelopt_mixtral": "weight_scale_2", "compressed_tensors_qwen3_moe": "weight_global_scale"}


@pytest.mark.parametrize("value", GLOBAL.values(), ids=GLOBAL)
@pytest.mark.parametrize("export", FIELDS)
def test_global_scales(tmp_path, export, value):
    copy = copy_export(tmp_path, export)
    file = sorted(copy.glob("model*.safetensors"))[-1]
    names = [name for name in load_file(file) if name.endswith(FIELDS[export])]
    for name in (names[0], names[-1]):  # of experts and of a dense layer
        edit_tensors(copy, lambda tensors, name=name: tensors[name].fill_(value), file.name)
        with pytest.raises(ValueError, match=rf"{file.name}: tensor '{re.escape(name)}' is not finite and positive"):
            list(stream(Checkpoint(copy)))
        edit_tensors(copy, lambda tensors, name=name: tensors[name].fill_(1.0), file.name)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
@pytest.mark.parametrize("export", ["modelopt_mixtral", "modelopt_llama4", "compressed_tensors_qwen3_moe"])
def test_block_scales(tmp_path, export, value):
    """A sign would be read by some kernels and dropped by others."""
    copy = copy_export(tmp_path, export)
    file = sorted(copy.glob("model*.safetensors"))[0]
    name = next(name for name in load_file(file) if name.endswith("weight_scale"))

    def edit(tensors):
        scale = tensors[name].float()
        scale.view(-1)[-1] = value
        tensors[name] = scale.to(torch.float8_e4m3fn)

    edit_tensors(copy, edit, file.name)
    with pytest.raises(ValueError, match=rf"{file.name}: tensor '{re.escape(name)}' has NaN or negative numbers"):
        list(stream(Checkpoint(copy)))


def test_scales_of_another_order_of_dimensions(tmp_path):
    copy, path = copy_export(tmp_path, "modelopt_llama4"), experts_path("modelopt_llama4")
    name = f"{path}.down_proj_weight_scale"

    def edit(tensors):
        tensors[name] = tensors[name].view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)

    edit_tensors(copy, edit)
    with pytest.raises(
        ValueError, match=rf"tensor '{name}' has shape .* shows that in_features come first|'{name}' has"
    ):
        Checkpoint(copy).read_experts(path)


def test_two_formats_in_one_checkpoint(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    other = load_file(DATA / "compressed_tensors_qwen3_moe" / "model-00001-of-00002.safetensors")
    other |= load_file(DATA / "compressed_tensors_qwen3_moe" / "model-00002-of-00002.safetensors")
    path = "model.layers.0.self_attn.q_proj"

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            del tensors[name]
        tensors |= {name: tensor for name, tensor in other.items() if name.startswith(f"{path}.")}
        return tensors

    edit_tensors(copy, lambda tensors: tensors.update(edit(tensors)))
    message = rf"'{path}.\w+' is of the form of 'compressed-tensors', the quantization_config says 'modelopt'"
    with pytest.raises(ValueError, match=message):
        Checkpoint(copy)


def test_a_quantized_cache_changes_no_weight(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    before = snapshot(copy)
    scales = {f"model.layers.0.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    edit_tensors(copy, lambda tensors: tensors.update(scales))
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(kv_cache_quant_algo="FP8"))
    after = snapshot(copy)
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)


TRANSFORMS = {"R1": {"apply": [{"location": "weight_output"}]}, "R4": {"apply": [{"location": "input"}]}}


def test_transforms_of_compressed_tensors(tmp_path):
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")

    def transform(*names):
        groups = {"config_groups": {name: TRANSFORMS[name] for name in names}}
        edit_json(copy / "config.json", lambda config: config["quantization_config"].update(transform_config=groups))

    transform("R1")  # part of the weights already
    assert Checkpoint(copy).method == "compressed-tensors"
    transform("R1", "R4")
    with pytest.raises(
        ValueError, match="transform_config: got 'R4' at 'input', wanted none that the model would have"
    ):
        Checkpoint(copy)
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(
        transform_config=None, sparsity_config={"format": "sparse-24-bitmask"}))  # fmt: skip
    with pytest.raises(ValueError, match="sparsity_config: got the format 'sparse-24-bitmask', wanted 'dense'"):
        Checkpoint(copy)


MISSING = ("lm_head.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight")


def test_tensors_that_the_model_needs(tmp_path):
    """Transformers gives them random numbers, with a warning."""
    load_checkpoint = pytest.importorskip("thunder_moe.integrations.huggingface.checkpoint").load_checkpoint
    whole = load_file(DATA / "modelopt_qwen3_moe" / "model.safetensors")
    dense = [name for name in whole if name.startswith("model.layers.0.self_attn.k_proj.")]
    experts = [name for name in whole if ".experts." in name]
    for number, names in enumerate([[MISSING[0]], [MISSING[1]], [MISSING[2]], dense, experts]):
        (tmp_path / str(number)).mkdir()
        copy = copy_export(tmp_path / str(number), "modelopt_qwen3_moe")
        edit_tensors(copy, lambda tensors, names=names: [tensors.pop(name) for name in names])
        path = re.escape(names[0].rpartition(".")[0]) if names not in (experts,) else "model.layers.0.mlp.experts"
        with pytest.raises(ValueError, match=rf"path: .*modelopt_qwen3_moe lacks .*{path}"):
            load_checkpoint(copy)
    (tmp_path / "shape").mkdir()
    copy = copy_export(tmp_path / "shape", "modelopt_qwen3_moe")
    edit_tensors(copy, lambda tensors: tensors.update({MISSING[1]: torch.ones(7)}))
    # Transformers' own error, or ours where its versions let it pass.
    with pytest.raises((RuntimeError, ValueError), match=r"mismatch|model.norm.weight has shape \(7,\), the model's"):
        load_checkpoint(copy)


def test_fp8_experts_are_refused_by_all_loaders(tmp_path):
    """Transformers itself would take the FP8 numbers without their scales."""
    transformers = pytest.importorskip("transformers")
    load_checkpoint = pytest.importorskip("thunder_moe.integrations.huggingface.checkpoint").load_checkpoint
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")

    def edit(tensors):
        for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
            n, half = tensors[name].shape
            tensors[name] = torch.ones(n, 2 * half).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.tensor(0.5)
            del tensors[f"{name}_scale_2"]

    edit_tensors(copy, edit)
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    edit_json(copy / "config.json", lambda config: config.update(quantization_config=mixed))
    for load in (load_checkpoint, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"experts.*weight' is FP8, wanted 4-bit experts; `python -m thunder_moe"):
            load(copy)
