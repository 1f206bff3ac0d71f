"""The same filter, ignore, linears and format in quantize_, ThunderMoeConfig and convert: bit for bit the same weights.
Called by pytest; test_selection.py says what the options mean.
"""

import json
import logging
import re

import pytest
import torch
from checkpoint_files import bits
from tiny_models import tiny_model

transformers = pytest.importorskip("transformers")

from thunder_moe import ThunderMoeConfig, load_checkpoint, plan_quantization, quantize_  # noqa: E402
from thunder_moe.__main__ import main  # noqa: E402
from thunder_moe.checkpoint import convert  # noqa: E402
from thunder_moe.integrations.huggingface import quantizer  # noqa: E402

BF16 = torch.bfloat16
CASES = {
    "a layer": dict(filter="model.layers.1", linears="*_proj"),
    "all but a layer": dict(ignore="model.layers.0.*", linears="*_proj"),
    "experts alone": dict(filter="*.experts", linears="*_proj"),
    "dense layers alone": dict(ignore=["*.experts", "lm_head"], linears="*_proj"),
    "the head": dict(filter=["lm_head", "*.experts"], linears="lm_head"),
    "a regular expression": dict(filter=r"re:.*layers\.(?!0\.)", linears="*_proj", ignore=["*.o_proj", "lm_head"]),
    "names of experts, too": dict(ignore=["*.0.*", "re:.*[kv]_proj"], linears="*_proj"),
    "formats": dict(
        filter=["*.layers.1.*", "*.q_proj"],
        linears="*_proj",
        format={"*.layers.1.mlp": "MXFP8", "*.v_proj": None, "*.self_attn": "mxfp8", "*": "nvfp4"},
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    paths = {}

    def save(name):
        if name not in paths:
            paths[name] = tmp_path_factory.mktemp(name)
            tiny_model(name, BF16).save_pretrained(paths[name], max_shard_size="60KB")
        return type(tiny_model(name, BF16)), paths[name]

    return save


def assert_same(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(bits(tensor), bits(second[name])), name


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_entry_points_agree(source, tmp_path, name, options):
    cls, path = source(name)
    wanted = quantize_(cls.from_pretrained(path, dtype=BF16), **options)
    packed = [key for key in wanted.state_dict() if key.endswith("qdata")]
    assert packed
    config = ThunderMoeConfig.from_dict(json.loads(ThunderMoeConfig(**options).to_json_string()))
    assert_same(cls.from_pretrained(path, dtype=BF16, quantization_config=config), wanted)
    if any(".experts." in key for key in packed):  # load_checkpoint is for 4-bit experts
        convert(path, tmp_path / "out", **options)
        assert_same(load_checkpoint(tmp_path / "out", device="cpu"), wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("option", ["filter", "ignore", "linears", "format"])
@pytest.mark.parametrize("pattern", ["", "re:", "*.act_fn", "model.rotary_emb", "*.layernorm"])
def test_entry_points_refuse_the_same_patterns(source, tmp_path, option, pattern):
    """Empty ones, typos, and names of modules without weights, which a checkpoint does not have."""
    cls, path = source("qwen3_moe")
    options = {option: {pattern: "mxfp8"} if option == "format" else ["*", pattern]}
    match = (
        f"{option}: got '{pattern}', wanted" if pattern in ("", "re:") else rf"{option}: '{re.escape(pattern)}' fits no"
    )
    model = cls.from_pretrained(path, dtype=BF16)
    for call in (
        lambda: quantize_(model, **options),
        lambda: plan_quantization(model, **options),
        lambda: cls.from_pretrained(path, dtype=BF16, quantization_config=ThunderMoeConfig(**options)),
        lambda: convert(path, tmp_path / "out", **options),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_list_of_all_modules_with_weights_serves_each_entry_point(source, tmp_path):
    cls, path = source("qwen3_moe")
    model = cls.from_pretrained(path, dtype=BF16)
    ignore = ["*.layers.1", "lm_head", "*.q_norm", "*.mlp.gate", "model.norm", "*.embed_tokens", "*.q_proj"]
    quantize_(model, ignore=ignore, linears="*")
    assert_same(
        cls.from_pretrained(
            path, dtype=BF16, quantization_config=ThunderMoeConfig(modules_to_not_convert=ignore, linears="*")
        ),
        model,
    )
    convert(path, tmp_path / "out", ignore=ignore, linears="*")
    assert_same(load_checkpoint(tmp_path / "out", device="cpu"), model)
    quantize_(model, ignore=["lm_head", "model.layers.0.self_attn.k_proj"])  # now a part of a 4-bit weight


def test_the_command_line(source, tmp_path, capsys):
    cls, path = source("qwen3_moe")
    command = ["convert", str(path), str(tmp_path / "out"), "--linears", "--format", "MXFP8", "--quiet"]
    assert main([*command, "--filter", "model.layers.1", "--filter", "*.q_proj", "--ignore", "*.v_proj"]) == 0
    same = dict(filter=["model.layers.1", "*.q_proj"], ignore="*.v_proj", linears="*_proj", format="mxfp8")
    wanted = quantize_(cls.from_pretrained(path, dtype=BF16), **same)
    assert_same(load_checkpoint(tmp_path / "out", device="cpu"), wanted)
    assert main(["convert", str(path), str(tmp_path / "no"), "--ignore", "*.experts.3.*"]) == 1
    error = capsys.readouterr().err
    assert "ignore: '*.experts.3.*' fits no module of" in error  # a block is converted as one
    assert "'model.layers.*.mlp.experts'" in error
    assert main(["convert", str(path), str(tmp_path / "no"), "--filter", "lm_head"]) == 1
    assert (
        "filter: 'lm_head' fits modules of another kind, or converted already, wanted experts of"
        in capsys.readouterr().err
    )


def test_tables_of_embeddings_are_no_dense_layers(source, tmp_path):
    _, path = source("qwen3_moe")
    convert(path, tmp_path / "out", linears="*")
    loaded = load_checkpoint(tmp_path / "out", device="cpu")
    assert type(loaded.model.embed_tokens) is torch.nn.Embedding
    assert type(loaded.lm_head).__name__ == "NVFP4Linear"
    with pytest.raises(ValueError, match=r"linears: '\*embed_tokens' fits modules of another kind"):
        convert(path, tmp_path / "no", linears="*embed_tokens")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_expert_with_nan_is_named(tmp_path, name):
    model = tiny_model(name, BF16)
    for parameter, value in model.named_parameters():
        if parameter == "model.layers.0.mlp.experts.down_proj":
            value.data[3, 1, 2] = torch.nan
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"experts\.3\.down_proj.* got NaN or Inf, |got NaN or Inf in experts \[3\]"):
        convert(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ValueError, match=r"mlp.experts' has NaN or Inf in a weight of experts \[3\]"):
        type(model).from_pretrained(tmp_path / "source", dtype=BF16, quantization_config=ThunderMoeConfig())


def test_the_name_of_quantized_checkpoints_is_not_that_of_a_load(source):
    cls, path = source("qwen3_moe")
    with pytest.raises(ValueError, match=r"quant_method: got 'thunder_moe', .* wanted ThunderMoeConfig\(...\)"):
        cls.from_pretrained(path, quantization_config={"quant_method": "thunder_moe"})


def test_the_bar_says_what_is_loaded(source, tmp_path, monkeypatch):
    _, path = source("qwen3_moe")
    labels = []
    own = quantizer.progress_bar
    monkeypatch.setattr(quantizer, "progress_bar", lambda **options: labels.append(options["desc"]) or own(**options))
    formats = {"nvfp4": "NVFP4", "mxfp8": "MXFP8"}
    for format in formats:
        convert(path, tmp_path / format, format=format)
        load_checkpoint(tmp_path / format, device="cpu")
    convert(path, tmp_path / "both", format={"*.0.*": "mxfp8"})
    load_checkpoint(tmp_path / "both", device="cpu")
    assert labels == ["loading NVFP4 weights", "loading MXFP8 weights", "loading MXFP8 and NVFP4 weights"]


def test_nothing_is_said_of_what_the_user_declined(source, caplog):
    cls, path = source("qwen3_moe")
    caplog.set_level(logging.WARNING, "thunder_moe")
    quantize_(cls.from_pretrained(path, dtype=BF16), ignore="model.layers.0", linears="*")
    assert "stays" not in caplog.text


def test_a_warning_names_what_is_packed_in_the_source(source, tmp_path, caplog):
    _, path = source("qwen3_moe")
    convert(path, tmp_path / "packed", filter="model.layers.1", linears="*.o_proj")
    assert not caplog.text
    convert(tmp_path / "packed", tmp_path / "again", ignore="model.layers.1.mlp")
    assert "copied whatever filter and ignore say: model.layers.1.mlp.experts\n" in caplog.text
    assert load_checkpoint(tmp_path / "again", device="cpu").model.layers[1].mlp.experts.down_proj.qdata.numel()
