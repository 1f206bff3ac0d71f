"""``python -m thunder_moe convert --report`` and `measure_conversion`: errors of modules, divergence, files, bad input.
Called by pytest; judged by forward passes of the 16-bit model with dequantized weights, and by `measure_divergence`.
"""

import copy
import json
import logging

import pytest
import torch
from fast_cases import others_slow
from tiny_models import save_model_and_text, tiny_model
from transformers import AutoTokenizer

from thunder_moe import dequantize_, load_checkpoint, quantize_
from thunder_moe.__main__ import main
from thunder_moe.tools.conversion import measure_conversion
from thunder_moe.tools.divergence import measure_divergence

MODULES = ("model.layers.0.mlp.experts", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.experts")


@pytest.fixture
def plain_logging():
    """`main` sets handlers up."""
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers


def errors_of_a_module(model, weights, name, windows):
    """||output - 16-bit output|| / ||16-bit output|| of each window, by the 16-bit module with other weights."""
    module, found = model.get_submodule(name), []
    other = copy.deepcopy(module)
    other.load_state_dict(weights.get_submodule(name).state_dict())

    def compare(_, args, output):
        got = other(*args)
        got, output = (got[0], output[0]) if isinstance(output, tuple) else (got, output)
        found.append(((got - output).norm() / output.norm()).item())

    handle = module.register_forward_hook(compare)
    with torch.no_grad():
        for window in windows:
            model(window[None])
    handle.remove()
    return torch.tensor(found)


def test_errors_of_modules_and_of_the_model():
    model = tiny_model("qwen3_moe", torch.float32)
    windows = torch.randint(1, 60, (3, 12), generator=torch.Generator().manual_seed(0))
    converted = quantize_(copy.deepcopy(model), linears="*_proj", ignore="lm_head")
    found = measure_conversion(model, converted, windows)
    assert len(found.modules) == 2 + 2 * 4
    assert found.divergence == measure_divergence(model, {"converted": converted}, windows)[0]
    weights = dequantize_(copy.deepcopy(converted))
    for name in MODULES:
        wanted = errors_of_a_module(model, weights, name, windows)
        mean, error = found.modules[name]
        assert mean == pytest.approx(wanted.mean().item(), rel=2e-3)
        assert error == pytest.approx(wanted.std().item() / 3**0.5, rel=2e-2)
        assert 0.02 < mean < 0.3
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="converted: found no quantized modules in Qwen3MoeForCausalLM"):
        measure_conversion(model, model, windows)
    with pytest.raises(
        ValueError, match="reference: got a model whose .*mlp.experts .* are quantized, wanted the 16-bit"
    ):
        measure_conversion(converted, converted, windows)  # all errors would be 0
    with pytest.raises(ValueError, match=r"reference: got a model without 'model.layers.0.self_attn.q_proj'"):
        measure_conversion(model.lm_head, converted, windows)


def test_layers_of_llama_4_stand_for_their_experts():
    model = tiny_model("llama4", torch.float32)
    windows = torch.randint(1, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    converted = quantize_(copy.deepcopy(model))
    found = measure_conversion(model, converted, windows)
    assert [*found.modules] == ["model.layers.0.feed_forward", "model.layers.1.feed_forward"]
    weights = dequantize_(copy.deepcopy(converted))
    for name, (mean, _) in found.modules.items():
        assert mean == pytest.approx(errors_of_a_module(model, weights, name, windows).mean().item(), rel=2e-3)


@pytest.mark.parametrize("calibrated", [*others_slow([False], exhaustive=True), True])
def test_the_command(tmp_path, capsys, plain_logging, calibrated):
    pytest.importorskip("matplotlib")
    save_model_and_text(tmp_path)
    text, other = str(tmp_path / "held_out.txt"), str(tmp_path / "text.txt")
    words = (tmp_path / "text.txt").read_text().split()
    (tmp_path / "held_out.txt").write_text(" ".join(reversed(words)))
    command = ["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--context", "16", "--tokens", "64"]
    calibrate = ["--calibrate", other] if calibrated else []
    assert main([*command, "--report", str(tmp_path / "none.txt"), *calibrate]) == 1
    assert "error: --report: no file" in capsys.readouterr().err
    if calibrated:
        assert main([*command, "--report", other, *calibrate]) == 1
        assert "error: --report: got " in (said := capsys.readouterr().err)
        assert "wanted a text that it has not seen" in said
    assert not (tmp_path / "out").exists()
    assert main([*command, "--report", text, "--linears", *calibrate]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}\n" in said
    assert f"wrote {tmp_path / 'out.report.json'} and {tmp_path / 'out.report.png'}" in said
    assert (tmp_path / "out.report.png").stat().st_size > 1000
    content = json.loads((tmp_path / "out.report.json").read_text())
    assert {*MODULES} <= content["modules"].keys()
    assert (content["windows"], content["length"], content["text"]) == (4, 16, text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    windows = torch.tensor(tokenizer((tmp_path / "held_out.txt").read_text()).input_ids[:64]).view(4, 16)
    loaded = load_checkpoint(tmp_path / "out", device="cpu")
    (wanted,) = measure_divergence(tiny_model("qwen3_moe"), {"converted": loaded}, windows)
    assert content["divergence"]["kl"] == pytest.approx([*wanted.kl], rel=1e-3)
    for line in str(wanted.kl[0])[:6], MODULES[0]:
        assert line in said
