"""``python -m thunder_moe convert --calibrate``: its checkpoint, its options and its errors.
Called by pytest; judged by `calibrate_` and by `convert` without a text.
"""

import logging
import re

import pytest
import torch
from tiny_models import save_model_and_text, tiny_model
from transformers import AutoTokenizer

from thunder_moe import calibrate_, load_checkpoint
from thunder_moe.__main__ import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrated")
    save_model_and_text(folder)
    return folder


@pytest.fixture(autouse=True)
def plain_logging():
    """`main` sets handlers up."""
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers


def run(folder, output, *more):
    text = ["--calibrate", str(folder / "text.txt"), "--context", "16", "--tokens", "64"]
    return main(["convert", str(folder / "model"), str(folder / output), *text, *more])


def test_the_checkpoint_is_of_a_calibrated_model(folder, capsys):
    assert run(folder, "out", "--scale-search", "mse") == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.experts.down_proj " in out
    assert f"wrote {folder / 'out'}" in out
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    windows = torch.tensor(tokenizer((folder / "text.txt").read_text()).input_ids[:64]).view(4, 16)
    model = tiny_model("qwen3_moe")
    calibrate_(model, windows.split(1), scale_search="mse")
    loaded = load_checkpoint(folder / "out", device="cpu").state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_dense_layers_are_those_of_convert(folder):
    assert run(folder, "linears", "--linears", "--ignore", "model.layers.0.self_attn", "--quiet") == 0
    source, ignored = str(folder / "model"), "model.layers.0.self_attn"
    assert main(["convert", source, str(folder / "plain"), "--linears", "--ignore", ignored, "--quiet"]) == 0
    calibrated, plain = (load_checkpoint(folder / name, device="cpu").state_dict() for name in ("linears", "plain"))
    assert calibrated.keys() == plain.keys()
    assert "lm_head.weight" in plain
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in calibrated.items())


@pytest.mark.parametrize(
    ("output", "more", "message"),
    [
        ("model", (), "error: destination: .* exists already"),
        ("new", ("--calibrate", "none.txt"), "error: --calibrate: no file 'none.txt', wanted a text file"),
        ("new", ("--format", "mxfp8", "--scale-search", "mse"), "error: scale_search: got 'mse', wanted None: MXFP8"),
        ("new", ("--max-shard-size", "much"), "error: max_shard_size: "),
    ],
)
def test_errors_leave_nothing(folder, capsys, output, more, message):
    before = sorted(path.name for path in folder.iterdir())
    assert run(folder, output, *more) == 1
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in folder.iterdir()) == before
