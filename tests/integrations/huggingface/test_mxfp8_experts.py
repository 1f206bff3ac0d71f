"""transformers' models with experts and dense layers in MXFP8, or in both formats.
Called by pytest; judged by the model of the dequantized weights.
"""

import copy

import pytest
import torch
from oracle import relative_error

transformers = pytest.importorskip("transformers", minversion="5.7")
from tiny_models import tiny_model, tokens  # noqa: E402

from thunder_moe import dequantize_, quantize_, rewrite_report, save_checkpoint  # noqa: E402
from thunder_moe.nn.packed import NVFP4Module  # noqa: E402


def formats(model):
    return {module.format_name for module in model.modules() if isinstance(module, NVFP4Module)}


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "llama4", "qwen3_moe"])
def test_every_form_of_experts(architecture):
    model = tiny_model(architecture)
    quantized = quantize_(copy.deepcopy(model), format="mxfp8", linears=lambda module, name: "q_proj" in name)
    assert formats(quantized) == {"mxfp8"}
    assert "MXFP8Experts(" in repr(quantized)
    ids = tokens()
    with torch.no_grad():
        out, exact = quantized(ids).logits, model(ids).logits
        state = quantized.state_dict()
        again = quantize_(tiny_model(architecture), format="mxfp8", linears=lambda module, name: "q_proj" in name)
        again.load_state_dict(state)
        assert torch.equal(again(ids).logits, out)
        dequantized = dequantize_(quantized)(ids).logits
    tolerance = 2e-2 if out.dtype == torch.bfloat16 else 1e-4
    assert relative_error(out, dequantized) < tolerance, "the error of the kernels"
    assert relative_error(out, exact) < 0.2, "the error of the format"


def test_both_formats_compile_and_report():
    model = tiny_model("mixtral")

    def first_in_mxfp8(name, module):
        return "mxfp8" if "layers.0." in name else "nvfp4"

    quantized = quantize_(copy.deepcopy(model), format=first_in_mxfp8)
    assert formats(quantized) == {"nvfp4", "mxfp8"}
    ids = tokens()
    compiled = torch.compile(quantized, backend="thunder_moe", options={"thunder_moe.inner": "eager"}, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(ids).logits, quantized(ids).logits) < 1e-2
    found = {entry.decision for entry in rewrite_report(compiled)}
    assert found == {"nvfp4", "nvfp4 + swiglu", "mxfp8", "mxfp8 + swiglu"}


def test_files_are_refused(tmp_path):
    quantized = quantize_(tiny_model("mixtral"), format="mxfp8")
    for save in (lambda: save_checkpoint(quantized, tmp_path / "a"), lambda: quantized.save_pretrained(tmp_path / "b")):
        with pytest.raises(ValueError, match=r"experts.gate_up_proj' has a weight in mxfp8, wanted nvfp4"):
            save()
    assert not any(tmp_path.glob("*/*"))
