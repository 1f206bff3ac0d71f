"""``python -m thunder_moe convert --calibrate``: its checkpoint, its options and its errors.
Called by pytest; judged by `calibrate_` and by `convert` without a text.
"""

import logging
import re
import shutil

import pytest
import torch
from fast_cases import others_slow
from tiny_models import save_model_and_text, tiny_model
from transformers import AutoTokenizer

from thunder_moe import calibrate_, load_checkpoint
from thunder_moe.__main__ import main
from thunder_moe.quantization import kept_layers


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


@pytest.mark.parametrize("options", [(), *others_slow([(("--format", "mxfp8", "--linears"),)], exhaustive=True)])
def test_a_killed_calibration_resumes(folder, capsys, monkeypatch, options):
    """After the first layer, the second is half-written: it is made again, the first is not."""
    name = f"resumed{len(options)}"
    assert run(folder, f"{name}_whole", "--quiet", *options) == 0
    calls, save = [], kept_layers.save_file

    def killed(content, path):
        if calls:
            path.write_bytes(b"half of a layer")
            raise KeyboardInterrupt
        calls.append(path)
        save(content, path)

    with monkeypatch.context() as patch:
        patch.setattr(kept_layers, "save_file", killed)
        assert run(folder, name, *options) == 130
    assert "run the same command to resume" in capsys.readouterr().err
    assert run(folder, name, "--scale-search", "none", "--ignore", "model.layers.0", *options) == 1
    changed = "formats" if options else "formats, scale_search"
    assert f"{name}.partial was begun with another value of {changed}; remove it" in capsys.readouterr().err
    assert run(folder, name, *options, "--tokens", "48") == 1
    assert "was begun with another value of batches; remove it" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(kept_layers, "save_file", lambda content, path: (calls.append(path), save(content, path)))
        assert run(folder, name, *options) == 0
    assert len(calls) == 2
    assert len(set(calls)) == 2
    said = capsys.readouterr().out
    assert "model.layers.0.mlp.experts.down_proj " in said
    whole, resumed = ({p.name: p.read_bytes() for p in (folder / n).iterdir()} for n in (f"{name}_whole", name))
    assert whole == resumed
    assert not (folder / f"{name}.partial").exists()


def test_a_damaged_layer_is_an_error(folder, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("thunder_moe.integrations.huggingface.checkpoint.save_checkpoint", interrupt)
        assert run(folder, "damaged") == 130
    file = next((folder / "damaged.partial").rglob("part-00001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert run(folder, "damaged") == 1
    assert f"{file} is damaged, or of another version; remove" in capsys.readouterr().err
    shutil.rmtree(folder / "damaged.partial")


def interrupt(*args, **options):
    raise KeyboardInterrupt


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
