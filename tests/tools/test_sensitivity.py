"""The loss of a model with each block of experts alone in each number format, and the choice within a budget.
Called by pytest; judged by `quantize_`, by trying all choices, and by the 16-bit model.
"""

import itertools
import json
import logging
import math
import os
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCABULARY, save_model_and_text, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from thunder_moe import load_checkpoint, quantize_
from thunder_moe.__main__ import main
from thunder_moe.tools.sensitivity import BlockLoss, Sensitivity, choose_formats, load_formats, measure_sensitivity
from thunder_moe.tools.sensitivity.formats_file import format_of_path, read_sensitivity, write
from thunder_moe.tools.sensitivity.measure import WIDE

NAMES = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def windows(rows=3, length=17):
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def loss_of(model, text):
    logits = model(input_ids=text).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).double(), text[:, 1:].flatten()).item()


def bytes_of(model):
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_losses_and_bytes_are_those_of_quantize_and_the_model_is_unchanged():
    """GPT-OSS: transposed weights, gate and up in turns, biases."""
    model, text = tiny_model("gpt_oss").train(), windows()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measure_sensitivity(model, text)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    base = loss_of(model.eval(), text)
    assert found.loss == pytest.approx(base, abs=1e-6)
    assert found.tokens == 3 * 16
    assert [block.name for block in found.blocks] == NAMES
    for block, format in itertools.product(found.blocks, ("nvfp4", "mxfp8")):
        other = tiny_model("gpt_oss")
        saved = bytes_of(other)
        quantize_(other, format=lambda _, name, block=block, format=format: format if name == block.name else None)
        increase = loss_of(other, text) - base
        assert abs(increase) > 2e-5  # to be told from rounding
        assert block.increase[format] == pytest.approx(increase, abs=2e-6)
        assert block.nbytes["16-bit"] - block.nbytes[format] == saved - bytes_of(other)
    assert found.other_bytes + sum(block.nbytes["16-bit"] for block in found.blocks) == bytes_of(model)
    assert found.blocks[0].increase["16-bit"] == 0


def test_standard_error_is_over_windows():
    model, text = tiny_model("qwen3_moe", torch.bfloat16), windows(4)
    found = measure_sensitivity(model, text).blocks[0]
    quantized = quantize_(tiny_model("qwen3_moe"), filter=lambda module, name: name == NAMES[0])
    plain = tiny_model("qwen3_moe")
    changes = torch.tensor([loss_of(quantized, row[None]) - loss_of(plain, row[None]) for row in text])
    assert found.error["nvfp4"] == pytest.approx((changes.std() / 2).item(), rel=0.3)  # bf16 against float32


def test_an_error_puts_the_weights_back():
    model = tiny_model("qwen3_moe")
    before = [parameter.clone() for parameter in model.parameters()]
    calls = itertools.count()

    def fail(*_):
        if next(calls) == 2 * 3 + 1:  # in the second format of the first block
            raise KeyboardInterrupt

    model.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, windows())
    assert all(map(torch.equal, model.parameters(), before))
    assert next(calls) == 8


def random_blocks(generator, count):
    blocks = []
    for i in range(count):
        size = generator.choice([64, 64, 64, 96, 1000])
        nbytes = {"16-bit": 32 * size, "nvfp4": 9 * size, "mxfp8": 16 * size + size // 2}
        increase = {"16-bit": 0.0, "nvfp4": generator.uniform(-0.1, 1), "mxfp8": generator.uniform(-0.02, 0.1)}
        if generator.random() < 0.2:
            del nbytes["mxfp8"], increase["mxfp8"]
        blocks.append(BlockLoss(f"blocks.{i}.experts", nbytes, increase, dict.fromkeys(increase, 0.0)))
    return Sensitivity(2.0, 100, 5000, tuple(blocks))


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all(seed):
    generator = random.Random(seed)
    found = random_blocks(generator, 6)
    every = []
    for formats in itertools.product(*(block.nbytes for block in found.blocks)):
        pairs = list(zip(found.blocks, formats, strict=True))
        nbytes = found.other_bytes + sum(block.nbytes[format] for block, format in pairs)
        every.append((sum(block.increase[format] for block, format in pairs), nbytes))
    least, most = min(size for _, size in every), max(size for _, size in every)
    for budget in (least, generator.randint(least, most), generator.randint(least, most), most):
        choice = choose_formats(found, budget / 1e9)
        assert choice.nbytes <= budget
        assert choice.increase == pytest.approx(min(loss for loss, size in every if size <= budget), abs=1e-12)
        own = [(b, choice.formats[b.name] or "16-bit") for b in found.blocks]
        assert choice.nbytes == found.other_bytes + sum(block.nbytes[format] for block, format in own)
        assert choice.increase == pytest.approx(sum(block.increase[format] for block, format in own))


def test_many_blocks_are_quick_and_a_budget_too_small_is_named():
    found = random_blocks(random.Random(0), 90)
    assert len(choose_formats(found, 6e-4).formats) == 90
    least = 5000 + sum(block.nbytes["nvfp4"] for block in found.blocks)
    with pytest.raises(ValueError, match=r"budget: got 1e-05 GB, wanted 0\.000\d+ GB or more") as raised:
        choose_formats(found, 1e-5)
    wanted = float(str(raised.value).split("wanted ")[1].split()[0])
    assert least <= wanted * 1e9 < 1.01 * least
    assert set(choose_formats(found, wanted).formats.values()) <= {"nvfp4"} or wanted * 1e9 > least


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (lambda: nn.Linear(2, 2), windows(), "found no .* to quantize in Linear"),
        (lambda: tiny_model("qwen3_moe"), windows(1), r"windows: got torch.int64 \(1, 17\), wanted .* two or more"),
        (lambda: quantize_(tiny_model("qwen3_moe")), windows(), "quantized already"),
    ],
)
def test_bad_input(make, text, message):
    with pytest.raises(ValueError, match=message):
        measure_sensitivity(make(), text)


def test_a_loss_that_is_not_finite_is_named():
    model = tiny_model("qwen3_moe")
    with torch.no_grad():
        model.lm_head.weight[0] = torch.inf
    with pytest.raises(ValueError, match=r"its loss in 16 bits is .* in window 0, wanted a finite number"):
        measure_sensitivity(model, windows())


def test_tied_blocks_are_named():
    model = tiny_model("qwen3_moe")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ValueError, match=f"'{NAMES[1]}' and '{NAMES[0]}' share a weight"):
        measure_sensitivity(model, windows())


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("sensitivity")
    save_model_and_text(folder)
    return folder


def arguments(folder, *more, output="out"):
    text = ["--data", str(folder / "text.txt"), "--context", "16", "--tokens", "64"]
    return ["sensitivity", str(folder / "model"), *text, "--output", str(folder / output), *more]


def test_the_command(folder, capsys):
    """Measured once with a budget; then another budget, without measuring; then `quantize_` and `convert` take it."""
    sizes = bytes_of(tiny_model("qwen3_moe"))
    assert main(arguments(folder, "--budget", str(sizes / 1e9))) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert "of 60 tokens" in out  # four rows of 16, whose first is not predicted
    content = json.loads((folder / "out.json").read_text())
    assert content["tokens"] == 60
    assert content["bytes"] <= sizes
    best = sum(min(block["increase"].values()) for block in content["blocks"])
    assert content["predicted_increase"] == pytest.approx(best)
    assert abs(content["measured_increase"] - best) < 0.05
    assert (folder / "out.png").stat().st_size > 10_000

    small = quantize_(tiny_model("qwen3_moe"))
    budget = str((bytes_of(small) + 1) / 1e9)
    again = ["sensitivity", str(folder / "out.json"), "--output", str(folder / "small"), "--no-plot"]
    assert main([*again, "--budget", budget]) == 0
    assert not (folder / "small.png").exists()
    choice = load_formats(folder / "small.json")
    model = quantize_(tiny_model("qwen3_moe"), format=choice, linears=lambda module, name: name.endswith("o_proj"))
    assert [layer.mlp.experts.gate_up_proj.format_name for layer in model.model.layers] == ["nvfp4"] * 2
    assert model.model.layers[0].self_attn.o_proj.format_name == "nvfp4"

    assert (
        main(["sensitivity", str(folder / "out.json"), "--budget", "1e-6", "--no-plot", "--output", str(folder / "no")])
        == 1
    )
    assert "budget: got 1e-06 GB, wanted 0.000" in capsys.readouterr().err


def test_the_command_measures_what_filter_and_ignore_take(folder, capsys):
    sizes = str(bytes_of(tiny_model("qwen3_moe")) / 1e9)
    for options in (["--filter", "model.layers.1"], ["--ignore", "*.layers.0.*"]):
        assert main(arguments(folder, "--no-plot", "--budget", sizes, *options, output="one")) == 0
        out = capsys.readouterr().out
        assert NAMES[1] in out
        assert NAMES[0] not in out
        assert "increase" in out.splitlines()[0]
        content = json.loads((folder / "one.json").read_text())
        assert list(content["formats"]) == NAMES[1:]
        assert abs(content["measured_increase"] - content["predicted_increase"]) < 1e-4
        assert main(["sensitivity", str(folder / "one.json"), "--no-plot", *options]) == 1
        assert f"{options[0]}: got ['" in capsys.readouterr().err
    assert main(arguments(folder, "--no-plot", "--ignore", "layers.0")) == 1
    assert "ignore: 'layers.0' fits no module of Qwen3MoeForCausalLM" in capsys.readouterr().err


def write_formats(path, **formats):
    path.write_text(json.dumps({"formats": {NAMES[int(name[1])]: format for name, format in formats.items()}}))
    return str(path)


def test_quantize_takes_both_formats_of_a_file(tmp_path):
    file = write_formats(tmp_path / "formats.json", _0="mxfp8", _1=None)
    model = quantize_(tiny_model("qwen3_moe"), format=load_formats(file))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert first.gate_up_proj.format_name == "mxfp8"
    assert isinstance(second.gate_up_proj, nn.Parameter)
    file = write_formats(tmp_path / "one.json", _0="mxfp8")
    with pytest.raises(ValueError, match=f"one.json' has none for '{NAMES[1]}'.*it has '{NAMES[0]}'"):
        quantize_(tiny_model("qwen3_moe"), format=load_formats(file))


def test_convert_takes_the_formats(folder, tmp_path, capsys):
    file = write_formats(tmp_path / "formats.json", _0=None, _1="nvfp4")
    convert = ["convert", str(folder / "model"), str(tmp_path / "out")]
    assert main([*convert, "--formats", file, "--linears"]) == 0
    table = capsys.readouterr().out
    assert NAMES[1] in table
    assert NAMES[0] not in table
    assert "model.layers.0.self_attn.o_proj" in table  # the file says nothing of dense layers
    file = write_formats(tmp_path / "one.json", _1="nvfp4")
    assert main(["convert", str(folder / "model"), str(tmp_path / "other"), "--formats", file]) == 1
    assert f"--formats: {file!r} has none for '{NAMES[0]}'" in capsys.readouterr().err
    (tmp_path / "two.json").write_text('{"formats": {"model.layers.0.moe": "mxfp8", "model.layers.1.moe": "mxfp8"}}')
    assert (
        main(["convert", str(folder / "model"), str(tmp_path / "other"), "--formats", str(tmp_path / "two.json")]) == 1
    )
    assert f"two.json' has none for '{NAMES[0]}'" in capsys.readouterr().err
    file = write_formats(tmp_path / "no_nvfp4.json", _0=None, _1="mxfp8")  # no weight has scales to search
    assert main(["convert", str(folder / "model"), str(tmp_path / "mxfp8"), "--formats", file, "--quiet"]) == 0


@pytest.mark.parametrize("calibrate", [False, True])
def test_the_default_scale_search_needs_no_nvfp4_among_what_is_chosen(folder, tmp_path, calibrate):
    file = write_formats(tmp_path / "formats.json", _0="nvfp4", _1="mxfp8")
    options = ["--formats", file, "--filter", NAMES[1], "--quiet"]
    if calibrate:
        options += ["--calibrate", str(folder / "text.txt"), "--tokens", "64", "--context", "16"]
    convert = ["convert", str(folder / "model"), str(tmp_path / "out"), *options]
    assert main([*convert, "--scale-search", "mse"]) == 1  # nobody asked for the default
    assert main(convert) == 0


def test_convert_takes_both_formats(folder, tmp_path):
    file = write_formats(tmp_path / "formats.json", _0="nvfp4", _1="mxfp8")
    options = ["--formats", file, "--format", "mxfp8", "--linears", "--quiet"]
    assert main(["convert", str(folder / "model"), str(tmp_path / "out"), *options]) == 0
    loaded = load_checkpoint(tmp_path / "out")
    chosen = load_formats(file)

    def format_of(module, name):  # --format is of what the file does not name
        return "mxfp8" if isinstance(module, nn.Linear) else chosen(module, name)

    def linears(module, name):
        return "self_attn" in name

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    wanted = quantize_(model, format=format_of, linears=linears, scale_search="mse").state_dict()
    found = loaded.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.ndim else True, name


def test_blocks_of_checkpoints_with_other_names():
    formats = {"model.layers.1.mlp.experts": None, "model.layers.11.mlp.experts": "nvfp4"}
    assert format_of_path(formats, "model.layers.1.block_sparse_moe.experts") is None
    assert format_of_path(formats, "language_model.model.layers.11.feed_forward.experts") == "nvfp4"
    for path in ("model.layers.2.mlp.experts", "model.layers.1.mlp.shared_experts"):
        with pytest.raises(KeyError):
            format_of_path(formats, path)
    with pytest.raises(KeyError):
        format_of_path({"a.1.experts": None, "b.1.experts": "nvfp4"}, "c.1.experts")


def test_a_model_without_a_tokenizer(folder, tmp_path, capsys):
    """transformers makes a tokenizer without a vocabulary of the files that are not there."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text())
    assert main(arguments(tmp_path, "--no-plot")) == 1
    assert "wanted the model's tokenizer files beside its weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere.txt"], "--data: no file 'nowhere.txt', wanted a text file"),
        (
            ["--context", "80", "--tokens", "160"],
            "has 100 tokens, wanted 160 or more: a longer text, or a smaller --context",
        ),
        (["--context", "1"], "--context: got 1, wanted 2 to 128"),
        (["--context", "129"], "--context: got 129, wanted 2 to 128"),
        (["--tokens", "31"], "--tokens: got 31, wanted 32 or more"),
        (["--budget", "-1"], "--budget: got -1.0, wanted gigabytes above 0"),
        (["--budget", "nan"], "--budget: got nan"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--device", "meta"], "--device: got 'meta', which cannot be used here"),
        (["--output", "nowhere/out"], "--output: no folder"),
        (["--output", ""], "--output: got '.', wanted a name without suffix"),
    ],
)
def test_bad_arguments(folder, more, message, capsys):
    assert main(arguments(folder, *more)) == 1
    assert message in capsys.readouterr().err


def test_bad_models_and_files(folder, tmp_path, capsys, monkeypatch):
    def message(*line):
        assert main(list(line)) == 1
        return capsys.readouterr().err

    text, output = ["--data", str(folder / "text.txt")], ["--output", str(tmp_path / "out")]
    assert "error: MODEL: nowhere is not a directory, and" in message("sensitivity", "nowhere", *text, *output)
    assert "--data: wanted a text file" in message("sensitivity", str(folder / "model"), *output)
    (tmp_path / "a.json").write_text('{"blocks": [], "loss": 1}')
    assert "a.json' has no measurement" in message("sensitivity", str(tmp_path / "a.json"), *output)
    (tmp_path / "b.json").write_text("{")
    said = message("sensitivity", str(tmp_path / "b.json"), *output)
    assert f"error: MODEL: {tmp_path / 'b.json'}: is not JSON" in said
    with pytest.raises(ValueError, match=r"a\.json' has no formats; .*--budget GB` adds them"):
        load_formats(tmp_path / "a.json")
    with pytest.raises(ValueError, match="has 'int4' for"):
        load_formats(write_formats(tmp_path / "c.json", _0="int4"))
    (tmp_path / "list.json").write_text('{"formats": {"a": ["nvfp4"]}}')
    with pytest.raises(ValueError, match=r"has \['nvfp4'\] for 'a'"):
        load_formats(tmp_path / "list.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="deep.json: is not JSON"):
        load_formats(tmp_path / "deep.json")
    with pytest.raises(FileNotFoundError, match="no file"):
        load_formats(tmp_path / "d.json")
    (tmp_path / "folder.json").mkdir()
    line = arguments(folder, "--output", str(tmp_path / "folder"), "--no-plot")
    assert "folder.json' is a folder, wanted another name" in message(*line)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root, who writes everywhere
        assert "cannot be written" in message(*arguments(folder, "--no-plot"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'thunder_moe[bench]', or give --no-plot" in message(*arguments(folder))


def _spoil(content, *path, value):
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("loss",), None),
        (("loss",), math.nan),
        (("tokens",), "64"),
        (("other_bytes",), -1),
        (("blocks",), "abc"),
        (("blocks", 0, "name"), "b"),
        (("blocks", 0, "name"), 1),
        (("blocks", 0, "nbytes"), [1]),
        (("blocks", 0, "nbytes", "nvfp4"), "1"),
        (("blocks", 0, "increase", "nvfp4"), math.nan),
        (("blocks", 0, "increase", "nvfp4"), math.inf),
        (("blocks", 0, "error"), {}),
    ],
)
def test_spoiled_measurements(tmp_path, path, value):
    numbers = {WIDE: 0.0, "nvfp4": 0.5}
    blocks = tuple(BlockLoss(name, {WIDE: 4, "nvfp4": 1}, numbers, numbers) for name in "ab")
    file = tmp_path / "found.json"
    write(file, Sensitivity(1.0, 64, 10, blocks), model="m")
    found, more = read_sensitivity(file)
    assert found == Sensitivity(1.0, 64, 10, blocks)
    assert more == {"model": "m"}
    content = json.loads(file.read_text())
    _spoil(content, *path, value=value)
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="found.json' has no measurement"):
        read_sensitivity(file)


def test_a_measurement_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "found.json"
    file.write_text("an earlier one")
    numbers = {WIDE: 0.0, "nvfp4": 0.5}
    found = Sensitivity(1.0, 64, 10, (BlockLoss("a", {WIDE: 4, "nvfp4": 1}, numbers, numbers),))
    (tmp_path / "found.json.unfinished").mkdir()  # so that the new one cannot be written
    with pytest.raises(OSError, match=r"found\.json\.unfinished"):
        write(file, found)
    assert file.read_text() == "an earlier one"


def test_a_full_disk_loses_no_measurement(tmp_path, capsys):
    numbers = {WIDE: 0.0, "nvfp4": 0.5}
    found = Sensitivity(1.0, 64, 10, (BlockLoss("a", {WIDE: 4, "nvfp4": 1}, numbers, numbers),))
    write(tmp_path / "found.json", found, model="m")
    (tmp_path / "full.json.unfinished").symlink_to("/dev/full")
    command = ["sensitivity", str(tmp_path / "found.json"), "--no-plot", "--output"]
    assert main([*command, str(tmp_path / "full")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: --output: [Errno 28] No space left on device")
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    (tmp_path / "found.json").write_text(said[1])
    assert main([*command, str(tmp_path / "again")]) == 0
    assert read_sensitivity(tmp_path / "again.json") == (found, {"model": "m"})


@pytest.fixture(autouse=True)
def plain_logging():
    """`main` sets handlers up."""
    handlers = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = handlers
