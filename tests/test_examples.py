"""The examples with tiny sizes: their numbers, files and error messages, and llama4_moe_text's split of the text.
Called by pytest; calls the examples' main, and functions of theirs.
"""

import copy
import importlib.util
import json
import math
import re
import sysconfig
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_models import save_model_and_text, tiny_model
from torch.torch_version import TorchVersion

from thunder_moe import GroupedSwiGLU

pytest.importorskip("matplotlib", reason="the example needs pip install 'thunder_moe[bench]'")

LAYERS, STEPS = 1, 4


def load_example(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("llama4_moe_text")


@pytest.fixture(scope="module")
def output(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("example") / "made" / "by_the_example"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operations this small gain nothing from more, and lose much on a busy machine
    try:
        with pytest.MonkeyPatch.context() as patch:
            few_batches(patch, example, 10)
            patch.setattr(example, "inner_compiler", lambda device: "aot_eager")  # Inductor compiles for half a minute
            patch.setattr(example, "generate", lambda *_: b"")  # for one row, which Thunder traces again
            sizes = ["--steps", str(STEPS), "--hidden", "32", "--layers", str(LAYERS)]
            example.main([*sizes, "--output", str(directory)])
    finally:
        torch.set_num_threads(threads)
    return directory


@pytest.fixture(scope="module")
def numbers(output: Path) -> dict:
    return json.loads((output / "llama4_moe_text.json").read_text())


@pytest.mark.slow
def test_all_columns_are_reported(example: ModuleType, numbers: dict) -> None:
    assert list(numbers["columns"]) == list(example.COLUMNS)
    for column in numbers["columns"].values():
        assert math.isfinite(column["bits_per_byte"])
        assert column["tokens_per_second"] > 0
    assert numbers["held_out_bytes"] >= 50_000
    assert numbers["machine"] == example.machine(torch.device("cpu")) != ""
    assert len(numbers["training_bits_per_byte"]) == STEPS
    assert numbers["training_bits_per_byte"][-1] < numbers["training_bits_per_byte"][0]


@pytest.mark.slow
def test_gemms_rewritten(numbers: dict) -> None:
    columns = numbers["columns"]
    assert (columns["thunder_bf16"]["gemms"], columns["thunder_bf16"]["gemms_rewritten"]) == (3 * LAYERS, 0)
    for name in ("thunder_nvfp4", "compile_nvfp4"):
        assert (columns[name]["gemms"], columns[name]["gemms_rewritten"]) == (3 * LAYERS, 3 * LAYERS), name


@pytest.mark.slow
def test_columns_agree(numbers: dict) -> None:
    """4-bit weights cost little, the three ways to them nothing, and Thunder computes what eager does."""
    bits = {name: column["bits_per_byte"] for name, column in numbers["columns"].items()}
    assert bits["thunder_bf16"] == pytest.approx(bits["eager_bf16"], rel=2e-3)
    assert bits["thunder_nvfp4"] == pytest.approx(bits["thunder_bf16"], rel=2e-2)
    assert bits["thunder_nvfp4"] != bits["thunder_bf16"]
    assert bits["compile_nvfp4"] == pytest.approx(bits["thunder_nvfp4"], rel=2e-3)
    assert bits["thunder_nvfp4_quantize_"] == pytest.approx(bits["thunder_nvfp4"], rel=1e-4)
    assert abs(bits["thunder_mxfp8_quantize_"] / bits["thunder_bf16"] - 1) < 5e-3
    assert bits["thunder_mxfp8_quantize_"] != bits["thunder_bf16"]
    relative = 100 * (bits["thunder_nvfp4"] / bits["thunder_bf16"] - 1)
    assert numbers["nvfp4_loss_relative_to_bf16_percent"] == pytest.approx(relative)
    bf16 = numbers["columns"]["thunder_bf16"]["bits_per_byte"]
    assert list(numbers["with_dense_layers"]) == ["attention and shared experts", "these and the head"]
    for quality in numbers["with_dense_layers"].values():
        assert quality["bits_per_byte"] == pytest.approx(bf16, rel=0.05)
        assert quality["loss_relative_to_bf16_percent"] == pytest.approx(100 * (quality["bits_per_byte"] / bf16 - 1))


@pytest.mark.slow
def test_expert_bytes(example: ModuleType, numbers: dict) -> None:
    """Two bytes a weight, or half a byte, a scale per 16 weights, and the float32 multipliers."""
    weights = LAYERS * example.EXPERTS * 3 * 32 * 64
    multipliers = 4 * LAYERS * example.EXPERTS * (2 * 64 + 1)  # a row of gate and up, an expert of down
    columns = numbers["columns"]
    assert columns["thunder_bf16"]["expert_bytes_held"] == 2 * weights
    assert columns["thunder_nvfp4_quantize_"]["expert_bytes_held"] == weights // 2 + weights // 16 + multipliers
    assert columns["thunder_mxfp8_quantize_"]["expert_bytes_held"] == weights + weights // 32
    for name in ("thunder_nvfp4", "compile_nvfp4"):
        assert columns[name]["expert_bytes_read"] == columns["thunder_nvfp4_quantize_"]["expert_bytes_held"]


@pytest.mark.parametrize("works", [True, False])
def test_inner_compiler_is_inductor_where_it_works(
    example: ModuleType, works: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile(function, **options):
        if not works:
            raise RuntimeError("No working C++ compiler found\nand more")
        return function

    monkeypatch.setattr(torch, "compile", compile)
    assert example.inner_compiler(torch.device("cpu")) == ("inductor" if works else "aot_eager")
    assert ("(No working C++ compiler found)" in capsys.readouterr().out) is not works


@pytest.mark.slow
def test_files_are_written(output: Path) -> None:
    assert sorted(path.name for path in output.iterdir()) == ["llama4_moe_text.json", "llama4_moe_text.png"]
    assert (output / "llama4_moe_text.png").read_bytes().startswith(b"\x89PNG")


def test_no_file_is_in_both_splits(example: ModuleType) -> None:
    files = example.source_files(Path(sysconfig.get_path("stdlib")))
    train, held_out = example.split_files(files)
    assert len(set(train) | set(held_out)) == len(train) + len(held_out) == len(files)
    assert sum(path.stat().st_size for path in held_out) > example.HELD_OUT_BYTES


def test_source_files_skip_what_is_not_the_librarys(example: ModuleType, tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "a/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert [path.relative_to(tmp_path).as_posix() for path in example.source_files(tmp_path)] == ["a/z.py", "b.py"]


def test_a_python_without_sources_is_named(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="without most sources of its standard library"):
        example.main(["--output", str(tmp_path)])


def test_generate_looks_at_the_last_window_alone(example: ModuleType) -> None:
    def next_is_one_more(text: torch.Tensor) -> torch.Tensor:
        assert text.shape == (1, example.WINDOW)
        return 1e4 * torch.nn.functional.one_hot((text + 1) % 256, 256).float()

    made = example.generate(next_is_one_more, b"abc", 150, torch.device("cpu"), seed=0)
    assert made == bytes(range(ord("a"), ord("a") + 153))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: got 0, wanted at least 1"),
        (["--steps", "many"], "invalid int value: 'many'"),
        (["--hidden", "100"], "--hidden: got 100, wanted a positive multiple of 32"),
        (["--hidden", "0"], "--hidden: got 0, wanted a positive multiple of 32"),
        (["--layers", "-1"], "--layers: got -1, wanted at least 1"),
        (["--seed", "-1"], "--seed: got -1, wanted a number between"),
        (["--device", "abacus"], "--device: cannot use 'abacus'"),
        (["--device", "cuda:99"], "--device: cannot use 'cuda:99'"),
        (["--output", str(Path(__file__))], "--output: cannot make the directory"),
    ],
)
def test_wrong_arguments_say_what_is_wanted(
    example: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# examples/hf_moe.py


@pytest.fixture(scope="module")
def hf_moe() -> ModuleType:
    pytest.importorskip("transformers", reason="the example needs pip install 'thunder_moe[transformers]'")
    if TorchVersion(torch.__version__) < (2, 11):
        pytest.skip("torch.compile of torch 2.10 cannot trace transformers' bf16 experts on a CPU")
    return load_example("hf_moe")


@pytest.mark.exhaustive
def test_hf_moe_generates_three_ways(hf_moe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    texts = hf_moe.main(["--new-tokens", "4", "--device", "cpu", "--backend", "eager"])
    assert [(name, *text.shape) for name, text in texts.items()] == [
        ("bf16", 1, 4), ("nvfp4", 1, 4), ("nvfp4 compiled", 1, 4),
    ]  # fmt: skip
    assert torch.equal(texts["nvfp4"], texts["nvfp4 compiled"])
    sizes = [float(size.replace(",", "")) for size in re.findall(r"([0-9.,]+) MiB", capsys.readouterr().out)]
    experts = 2 * 16 * 3 * 256 * 128  # layers, experts, projections
    # Two bytes a weight, or half a byte, a scale per 16 weights, and two float32 multipliers an expert.
    assert sizes[0] - sizes[1] == pytest.approx((experts * (2 - 9 / 16) - 2 * 16 * 2 * 4) / 2**20, abs=0.11)


def test_hf_moe_runs_a_model_of_a_directory(
    hf_moe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "the", "experts", "of", "a", "layer"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    arguments = ["--prompt", "the experts of a layer", "--new-tokens", "3", "--device", "cpu", "--backend", "eager"]
    texts = hf_moe.main(["--model", str(tmp_path), *arguments])
    assert texts["nvfp4 compiled"].shape == (1, 3)
    assert torch.equal(texts["nvfp4"], texts["nvfp4 compiled"])
    assert "nvfp4 compiled: " in capsys.readouterr().out


def test_hf_moe_names_a_missing_directory(hf_moe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        hf_moe.main(["--model", "nowhere"])
    assert stopped.value.code == 2
    assert "--model: got 'nowhere', wanted the directory of a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "mode", ["eager", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("dynamo", "thunder"))]
)
def test_the_demos_model_trains_with_grouped_mlp_to_the_same_loss(example: ModuleType, mode: str) -> None:
    args = Namespace(steps=6, seed=0, device=torch.device("cpu"))
    text = torch.randint(32, 127, (4000,), dtype=torch.uint8)
    model = example.ByteModel(32, 1)
    other = example.with_grouped_mlp(copy.deepcopy(model))
    assert not any(isinstance(module, GroupedSwiGLU) for module in other.modules())
    expected = example.train(model, model, text, args)
    compiled = other
    if mode == "dynamo":
        options = {"thunder_moe.inner": "aot_eager"}
        compiled = torch.compile(other, backend="thunder_moe", fullgraph=True, options=options)
    elif mode == "thunder":
        compiled = example.thunder.jit(other, executors=[example.moe_executor])
    losses = example.train(compiled, other, text, args)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]


def few_batches(monkeypatch: pytest.MonkeyPatch, example: ModuleType, number: int) -> None:
    """Has an example judge by the first batches of held-out text alone."""
    all_batches = example.held_out_batches
    monkeypatch.setattr(example, "held_out_batches", lambda text, device: all_batches(text, device)[:number])


# examples/qat_text.py


@pytest.mark.slow
def test_quantization_aware_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))  # it imports the other example
    example = load_example("qat_text")
    few_batches(monkeypatch, example, 1)
    arguments = ["--steps", "4", "--qat-steps", "2", "--hidden", "32", "--layers", "1", "--output", str(tmp_path)]
    numbers = example.main(arguments)
    assert json.loads((tmp_path / "qat_text.json").read_text())["bits_per_byte"] == numbers["bits_per_byte"]
    bits = numbers["bits_per_byte"]
    assert all(math.isfinite(value) for value in bits.values())
    assert bits["NVFP4, trained aware"] == pytest.approx(bits["NVFP4, as training saw it"], abs=0.02)
    assert bits["bf16"] != bits["NVFP4"]
    with pytest.raises(SystemExit):
        example.main(["--steps", "4", "--qat-steps", "4"])


# examples/recipes_text.py


@pytest.mark.slow
def test_training_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    example = load_example("recipes_text")
    few_batches(monkeypatch, example, 1)
    sizes = ["--steps", "3", "--seeds", "2", "--hidden", "32", "--layers", "1"]
    numbers = example.main([*sizes, "--output", str(tmp_path)])
    assert json.loads((tmp_path / "recipes_text.json").read_text())["summary"] == numbers["summary"]
    assert (tmp_path / "recipes_text.png").stat().st_size > 1000
    losses = {(run["recipe"], run["seed"]): run["losses"] for run in numbers["runs"]}
    assert len(losses) == 6
    assert losses["bf16", 0] != losses["bf16", 1]
    for recipe in ("mxfp8", "fp8"):
        assert losses[recipe, 0] != losses["bf16", 0]
        assert losses[recipe, 0] == pytest.approx(losses["bf16", 0], rel=0.05)
    with pytest.raises(SystemExit):
        example.main(["--seeds", "0"])


# examples/finetune_lora.py


@pytest.fixture
def finetune_lora(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")  # it imports its neighbour
    return load_example("finetune_lora")


@pytest.mark.slow
def test_finetune_lora(finetune_lora: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = finetune_lora
    few_batches(monkeypatch, example, 4)
    sizes = ["--steps", "6", "--tune-steps", "12", "--hidden", "32", "--layers", "1", "--rank", "4"]
    numbers = example.main([*sizes, "--output", str(tmp_path)])
    columns = numbers["columns"]
    assert list(columns) == ["bf16", "bf16 LoRA", "NVFP4 LoRA", "NVFP4, merged"]
    for name in ("bf16 LoRA", "NVFP4 LoRA"):
        assert columns[name]["bits_per_byte"] < columns[name]["bits_before"] - 0.01
    assert columns["NVFP4 LoRA"]["expert_bytes"] * 3 < columns["bf16"]["expert_bytes"]
    assert json.loads((tmp_path / "finetune_lora.json").read_text())["columns"].keys() == columns.keys()
    assert (tmp_path / "finetune_lora.png").stat().st_size > 0
    tune, held_out = example.prose()
    assert len(held_out) > 50_000
    assert bytes(held_out[:200]) not in bytes(tune)


def test_finetune_lora_refuses_sizes(finetune_lora: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        finetune_lora.main(["--rank", "0"])
    assert "--rank: got 0, wanted at least 1" in capsys.readouterr().err


# examples/small_moe.py


@pytest.fixture
def small_moe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    pytest.importorskip("transformers")
    return load_example("small_moe")


def test_small_moe(small_moe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = small_moe.source_files(Path(sysconfig.get_path("stdlib")))[:40]
    monkeypatch.setattr(small_moe, "source_files", lambda root: files)
    loss = small_moe.main([str(tmp_path), "--steps", "3", "--layers", "1", "--hidden", "32"])
    assert 5 < loss < 7  # ln(512) = 6.24
    model, tokenizer = (kind.from_pretrained(tmp_path) for kind in (AutoModelForCausalLM, AutoTokenizer))
    text = (tmp_path / "held_out.txt").read_text(encoding="utf-8")
    ids = tokenizer(text[:500]).input_ids
    assert tokenizer.decode(ids) == text[:500]
    assert max(ids) < model.config.vocab_size == 512
    with torch.no_grad():
        own = model(torch.tensor([ids[:64]]), labels=torch.tensor([ids[:64]])).loss
    assert 4 < float(own) < 7
    with pytest.raises(SystemExit):
        small_moe.main([str(tmp_path), "--hidden", "48"])


# examples/calibrate.py


def test_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model_and_text(tmp_path)
    (tmp_path / "text.txt").rename(tmp_path / "model" / "held_out.txt")
    example = load_example("calibrate")
    arguments = [str(tmp_path / "model"), "--context", "8", "--linears", "*_proj"]
    found = example.main(arguments)
    assert [each.name for each in found] == ["rounded", "mse", "calibrated", "calibrated, mse"]
    assert found[0].kl_change == (0, 0)
    content = json.loads((tmp_path / "model" / "calibrate.json").read_text())
    assert content["rows"] == [6, 6]
    assert content["models"][2]["kl"] == [*found[2].kl]
    assert all(weight["calibrated"] < weight["rounded"] for weight in content["weights"])
    assert "calibrated, mse" in capsys.readouterr().out
    example.main([*arguments, "--text", str(tmp_path / "model" / "held_out.txt")])
    assert json.loads((tmp_path / "model" / "calibrate.json").read_text())["rows"] == [12, 6]
    for options in (["--rows", "1"], ["--context", "40"]):
        with pytest.raises(SystemExit):
            example.main([str(tmp_path / "model"), *options])


# examples/rollout_gap.py


def test_rollout_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model_and_text(tmp_path)
    text = (tmp_path / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "model" / "held_out.txt").write_text(text * 2, encoding="utf-8")
    example = load_example("rollout_gap")
    rows = example.main([str(tmp_path / "model"), "--rounds", "1", "--steps", "30", "--texts", "8", "--new", "16"])
    kl = {(row["round"], row["rollout"]): row["kl"] for row in rows}
    assert kl[0, "nvfp4"] > kl[0, "bf16"] >= 0
    assert kl[1, "nvfp4, never refreshed"] > 3 * kl[1, "nvfp4"]
    assert json.loads((tmp_path / "model" / "rollout_gap.json").read_text())["rows"] == rows
    assert (tmp_path / "model" / "rollout_gap.png").stat().st_size > 1000
    assert "| nvfp4 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main([str(tmp_path / "model"), "--rounds", "0"])


# examples/accuracy.py


def test_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    example = load_example("accuracy")
    for number in range(64):
        (tmp_path / f"{number}.py").write_text(f"x = {number:02}\n" * 40)
    (tmp_path / "long.txt").write_text("x" * 600_000)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    sizes = dict(hidden=32, layers=1, experts=4, head=16, intermediate=32, context=8, batch=1, windows=4)
    monkeypatch.setattr(example, "SMALL", example.SMALL._replace(**sizes))
    assert [len(text) for text in example.read_text(10**6)] == [60 * 280 + 59, 2 * 280 + 1, 2 * 280 + 1]
    numbers = example.main(["--small", "--steps", "2", "--qat-steps", "1", "--output", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "accuracy.json").read_text())["models"] == json.loads(
        json.dumps(numbers["models"])
    )
    assert (tmp_path / "out" / "accuracy.png").stat().st_size > 1000
    found = {each["name"]: each for each in numbers["models"]}
    assert len(found) == 17
    assert found["NVFP4"]["kl_change"] == (0, 0)
    assert found["NVFP4 and dense layers, mse"]["nbytes"] < found["NVFP4"]["nbytes"] < found["MXFP8"]["nbytes"]
    assert all(math.isfinite(value) for each in found.values() for value in each["increase"])
    said = capsys.readouterr().out
    assert said.count("| NVFP4, mse, QAT by distillation |") == 1
    assert said.count(" 10^-3 bits per byte against bf16, trained on") == 4
    beside = {each["name"]: each["increase"][0] for each in numbers["beside_trained_on"]}
    for name, increase in beside.items():
        wanted = found[name]["increase"][0] - found["bf16, trained on"]["increase"][0]
        assert increase == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(SystemExit):
        example.main(["--steps", "0"])
    assert "--steps: got 0, wanted at least 1" in capsys.readouterr().err


def test_four_over_six_of_the_example() -> None:
    """Its error on normal weights is the one that tests/formats/test_nvfp4.py has, too."""
    model = torch.nn.ParameterList([torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0))])
    before = model[0].detach().clone()
    load_example("accuracy").four_over_six_(model)
    assert ((model[0].detach() - before).norm() / before.norm()).item() == pytest.approx(0.0873, rel=0.01)
