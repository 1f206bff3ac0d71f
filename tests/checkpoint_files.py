"""The committed exports of tests/data/checkpoints, what their own libraries decode, and ways to break a copy of them.
Called by the tests of checkpoints; calls safetensors.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from oracle import dequantize as oracle_dequantize
from oracle import dequantize_mxfp8
from safetensors.torch import load_file, save_file

DATA = Path(__file__).parent / "data" / "checkpoints"
EXPORTS = sorted(path.name for path in DATA.iterdir())
EXPERTS = {
    "modelopt_mixtral": "model.layers.0.block_sparse_moe.experts",
    "modelopt_llama4": "model.layers.0.feed_forward.experts",
}
PROJECTIONS = {"modelopt_mixtral": ("w1", "w3", "w2")}
ATTENTION = {f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"}


def experts_path(export):
    return EXPERTS.get(export, "model.layers.0.mlp.experts")


def stream(checkpoint, **options):
    """Yields (name, value) of all modules and tensors."""
    checkpoint.require_4_bit_experts()
    for name, (_, read) in checkpoint.units(**options).items():
        yield name, read()


def load_tensors(directory):
    tensors = {}
    for file in directory.glob("model*.safetensors"):
        tensors |= load_file(file)
    return tensors


def release_in_mxfp4(directory, seed=0, *, highest=-4, spread=False):
    """Gives a saved 16- or 32-bit GPT-OSS the form of OpenAI's release: random MXFP4 experts, all else unchanged.

    A projection's `_blocks` are uint8 (experts, rows, blocks of 32, 16), two E2M1 codes a byte, the low nibble first.
    `_scales` are uint8 (experts, rows, blocks), 2**(scale - 127), here of four exponents up to `highest`. Rows of gate
    and up alternate. `spread`: every fifth row of expert 1 is 2**20 times smaller, so that no global scale is right for
    all rows.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator)
        scales = torch.randint(124 + highest, 128 + highest, (experts, n, k // 32), generator=generator)
        if spread:
            scales[1, ::5] -= 20
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = codes.to(torch.uint8), scales.to(torch.uint8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def assert_same_bits(actual, expected):
    for one, other in zip(actual.tensors(), expected.tensors(), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(bits(one), bits(other))


def decoded(weight):
    return (dequantize_mxfp8 if weight.global_scale is None else oracle_dequantize)(*weight.tensors())


def load_expected(export):
    """fp32 weights by name, as the exporting library decodes them."""
    with np.load(DATA / export / "expected.npz") as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def expected_experts(export):
    """fp32 (E, 2I, H) and (E, H, I), as the exporting library decodes its own tensors."""
    expected, path = load_expected(export), experts_path(export)
    if f"{path}.down_proj" in expected:
        gate_up, down = expected[f"{path}.gate_up_proj"], expected[f"{path}.down_proj"]
        if export.startswith("mxfp4"):  # as the model holds it, (E, K, N)
            gate_up, down = gate_up.mT, down.mT
        if "gpt_oss" in export:
            gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], 1)
        return gate_up, down
    gate, up, down = PROJECTIONS.get(export, ("gate_proj", "up_proj", "down_proj"))
    parts = {name: [expected[f"{path}.{expert}.{name}.weight"] for expert in range(3)] for name in (gate, up, down)}
    return torch.cat([torch.stack(parts[gate]), torch.stack(parts[up])], 1), torch.stack(parts[down])


def copy_export(tmp_path, export):
    return Path(shutil.copytree(DATA / export, tmp_path / export))


def edit_json(path, edit):
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def edit_tensors(directory, edit, file="model.safetensors"):
    # Bytes, because a mapped file must not be written over.
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / file).items()}
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)


def files_of(directory):
    """Name -> bytes."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def plain_source(directory, layers=1):
    """A 16-bit checkpoint in two shards: experts (3, 48, 32) and (3, 32, 48), routers, an embedding, a tokenizer."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (16, 32)}
    for layer in range(layers):
        path = f"model.layers.{layer}.mlp"
        shapes[f"{path}.gate.weight"] = (3, 32)
        for expert in range(3):
            shapes |= {f"{path}.experts.{expert}.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
            shapes[f"{path}.experts.{expert}.down_proj.weight"] = (32, 48)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    weight_map = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = dict(list(tensors.items())[number - 1 :: 2])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"model_type": "x"}))
    (directory / "tokenizer.json").write_text("{}")
    return tensors
