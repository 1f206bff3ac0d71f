"""transformers' models with experts and dense layers in MXFP8, or in both formats.
Called by pytest; judged by the model of the dequantized weights.
"""

import copy
import json

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.7")
from tiny_models import tiny_model, tokens  # noqa: E402

from thunder_moe import load_checkpoint, quantize_, rewrite_report, save_checkpoint  # noqa: E402
from thunder_moe.checkpoint import convert  # noqa: E402
from thunder_moe.nn.packed import PackedModule  # noqa: E402


def formats(model):
    return {module.format_name for module in model.modules() if isinstance(module, PackedModule)}


def test_both_formats_compile_and_report():
    model = tiny_model("mixtral")

    def first_in_mxfp8(module, name):
        return "mxfp8" if "layers.0." in name else "nvfp4"

    quantized = quantize_(copy.deepcopy(model), format=first_in_mxfp8)
    assert formats(quantized) == {"nvfp4", "mxfp8"}
    ids = tokens()
    compiled = torch.compile(quantized, backend="thunder_moe", options={"thunder_moe.inner": "eager"}, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(ids).logits, quantized(ids).logits) < 1e-2
    found = {entry.decision for entry in rewrite_report(compiled)}
    assert found == {"nvfp4", "nvfp4 + swiglu", "mxfp8", "mxfp8 + swiglu"}


def mixed(module, name):
    """Experts of a layer in each format, linears in both."""
    return "mxfp8" if ("layers.0." in name and "experts" in name) or "o_proj" in name else "nvfp4"


def same_states(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert tensor.shape == second[name].shape
        whole = tensor.ndim == 0 or tensor.itemsize > 1
        assert torch.equal(*(t if whole else t.view(torch.uint8) for t in (tensor, second[name]))), name


@pytest.mark.parametrize(
    ("architecture", "format"),
    [
        *((name, mixed) for name in ("mixtral", "gpt_oss", "llama4")),
        *others_slow([("deepseek_v3", mixed), ("qwen3_moe", "mxfp8")], exhaustive=True),
    ],
)
def test_files_hold_the_same_bits(tmp_path, architecture, format):
    names = tuple(f"{name}_proj" for name in "qkvo")
    model = quantize_(tiny_model(architecture), format=format, linears=lambda module, name: name.endswith(names))
    save_checkpoint(model, tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    config = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == ("MXFP8" if format == "mxfp8" else "MIXED_PRECISION")
    for back in (
        load_checkpoint(tmp_path / "a"),
        load_checkpoint(tmp_path / "b"),
        type(model).from_pretrained(tmp_path / "a"),
    ):
        same_states(model, back)
        assert formats(back) == formats(model)
    with torch.no_grad():
        assert torch.equal(back(tokens()).logits, model(tokens()).logits)
    dequantized = load_checkpoint(tmp_path / "a", linears=False)
    assert {type(layer.self_attn.o_proj) for layer in dequantized.model.layers} == {nn.Linear}


def test_state_dicts_by_the_names_of_files(tmp_path):
    """load_state_dict takes the tensors of a checkpoint, too."""
    from safetensors.torch import load_file

    model = quantize_(tiny_model("mixtral"), format=mixed, linears=lambda module, name: "self_attn" in name)
    save_checkpoint(model, tmp_path / "a")
    other = tiny_model("mixtral")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other = quantize_(other, format=mixed, linears=lambda module, name: "self_attn" in name)
    other.load_state_dict(load_file(tmp_path / "a" / "model.safetensors"))
    same_states(model, other)


def test_convert_makes_what_quantize_makes(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", format=mixed)
    model = type(tiny_model("qwen3_moe")).from_pretrained(tmp_path / "source")
    same_states(load_checkpoint(tmp_path / "out"), quantize_(model, format=mixed))
