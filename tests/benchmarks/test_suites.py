"""Every subcommand of `python -m benchmarks`: --help, a tiny run on the CPU, results on disk, wrong kernels refused.
Called by pytest; calls benchmarks/__main__.py, harness/layers.py and, in one test, a process of its own.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import FORKS

from benchmarks.__main__ import COMMANDS, main
from benchmarks.harness import layers, models
from benchmarks.harness.report import writable_file
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.timing import describe, machine_name
from benchmarks.suites import engine, generate, linear, load, router, training
from thunder_moe.kernels import dense, reference, training_reference
from thunder_moe.kernels.specs import Target

ROOT = Path(__file__).resolve().parents[2]
HERE = machine_name(torch.device("cpu"))
TINY = ["--device", "cpu", "--shapes", "small", "--rounds", "3", "--budget", "0.05"]
LAYER_COLUMNS = [
    "eager bf16", "thunder bf16", "compile bf16", "eager nvfp4", "thunder nvfp4", "compile nvfp4",
    "quantize_ + compile",
]  # fmt: skip
COMPILE_COLUMNS = ["eager bf16", "compile bf16", "compile nvfp4", "quantize_ + compile nvfp4"]
thunder = pytest.mark.filterwarnings("ignore:transformer_engine module not found")


@thunder
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: python -m benchmarks {command} [-h]")
    assert "Called by" not in text


def test_the_entry_lists_its_commands_and_imports_no_suite():
    code = "import sys, benchmarks.__main__ as m\ntry: m.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(re.search(rf"\n    {command}\s", run.stdout) for command in COMMANDS)
    assert run.stdout.endswith("False\n")
    run = subprocess.run([sys.executable, "-m", "benchmarks", "gem"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert "invalid choice: 'gem'" in run.stderr


def test_generate_runs_end_to_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    tiny = {"qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, moe_intermediate_size=32, head_dim=16))}
    monkeypatch.setattr(models, "CONFIGS", tiny)
    shape = ["--layers", "1", "--rounds", "1", "--new", "3", "--prompts", "4"]
    columns = ["bf16 eager", "quantize_ fast", "quantize_ linears static"]
    rows = main(["generate", "--device", "cpu", *shape, "--columns", ",".join(columns), "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"generate_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [row["column"] for row in rows] == columns
    assert all(row["equal_tokens"] == 1.0 and row["tokens_per_second"] > 0 for row in rows)
    assert (tmp_path / f"generate_{HERE}.png").exists()
    printed = capsys.readouterr().out
    assert "qwen3_moe, attention thunder_moe_sdpa\n" in printed
    assert "| quantize_ fast" in printed


def test_an_interrupt_of_generate_keeps_what_was_measured(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    measure, seconds = generate._measure, iter([1.0])

    def interrupted(*arguments):
        row = measure(*arguments)
        if next(seconds, None) is None:
            raise KeyboardInterrupt
        return row

    tiny = {"qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, moe_intermediate_size=32, head_dim=16))}
    monkeypatch.setattr(models, "CONFIGS", tiny)
    monkeypatch.setattr(generate, "_measure", interrupted)
    shape = ["--layers", "1", "--rounds", "1", "--new", "2", "--prompts", "4,5", "--columns", "bf16 eager"]
    arguments = ["generate", "--device", "cpu", *shape, "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="interrupted: 1 of 2 cells were not measured"):
        main(arguments)
    file = tmp_path / f"generate_{HERE}.json"
    assert [row["prompt"] for row in json.loads(file.read_text())["rows"]] == [4]
    before = file.read_bytes()
    with pytest.raises(SystemExit, match="interrupted before a cell was measured"):
        main(arguments)
    assert file.read_bytes() == before


def test_generate_says_which_attention_it_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    tiny = {"gpt_oss": ("GptOssConfig", dict(num_local_experts=4, intermediate_size=32, head_dim=16))}
    monkeypatch.setattr(models, "CONFIGS", tiny)
    arguments = ["generate", "--device", "cpu", "--model", "gpt_oss", "--layers", "1", "--rounds", "1", "--new", "2"]
    arguments += ["--prompts", "4", "--columns", "bf16 eager", "--output", str(tmp_path)]
    main(arguments)
    assert "gpt_oss, attention eager\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*arguments, "--attention", "thunder_moe_sdpa"])
    assert "--attention: got thunder_moe_sdpa for gpt_oss, which has no SDPA; wanted eager" in capsys.readouterr().err


def test_load_runs_end_to_end(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")

    def measured(way, directory, device):  # without a process
        load.worker(way, directory, device.type)
        return {"way": way, **json.loads(capsys.readouterr().out.splitlines()[-1])}

    monkeypatch.setattr(load, "_measured", measured)
    tiny = {"qwen3_moe": ("Qwen3MoeConfig", dict(num_experts=4, moe_intermediate_size=32, head_dim=16))}
    monkeypatch.setattr(models, "CONFIGS", tiny)
    rows = main(["load", "--model", "qwen3_moe", "--device", "cpu", "--layers", "1", "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"load_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [(row["round"], row["way"]) for row in rows] == [(round, way) for round in (0, 1) for way in load.WAYS]
    assert all(row["seconds"] > 0 and row["host_peak"] >= row["host"] for row in rows)
    assert len({row["state"] for row in rows}) == 2
    digests = itertools.count()
    monkeypatch.setattr(load, "_digest", lambda model: str(next(digests)))
    with pytest.raises(RuntimeError, match="load: the two ways to quantize gave different models"):
        main(["load", "--model", "qwen3_moe", "--device", "cpu", "--layers", "1", "--output", str(tmp_path)])


def test_the_peak_of_a_load_counts_its_end(monkeypatch):
    looks = itertools.count(1)
    monkeypatch.setattr(load, "_anonymous", lambda: next(looks) * 1000)  # grows from each look to the next
    found = load.Peak("cpu").stop()
    assert found["host_peak"] == found["host"] > 0


@pytest.fixture
def _forked_ranks(monkeypatch):
    """The processes of ranks import little."""
    start = functools.partial(torch.multiprocessing.start_processes, start_method=FORKS.get_start_method())
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_forked_ranks")
def test_sharded_runs_end_to_end(tmp_path):
    pytest.importorskip("transformers", "5.23")
    small = ["--model", "qwen3_moe", "--device", "cpu", "--layers", "1", "--batches", "1,2", "--rounds", "1"]
    rows = main(["sharded", *small, "--output", str(tmp_path)])
    assert json.loads((tmp_path / f"sharded_{HERE}.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert [row["way"] for row in rows] == ["one GPU", "EP all_reduce", "EP all_to_all", "TP"]
    assert all(row["relative_error"] < 2e-2 and set(row["step_seconds"]) == {"1", "2"} for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_ranks")
def test_parallel_runs_end_to_end(tmp_path):
    rows = main(["parallel", *TINY, "--tokens", "1,5", "--output", str(tmp_path)])
    assert json.loads((tmp_path / f"parallel_{HERE}.json").read_text())["rows"] == json.loads(json.dumps(rows))
    for suffix in ("", "_load"):
        assert (tmp_path / f"parallel_{HERE}{suffix}.png").read_bytes().startswith(b"\x89PNG")
    forms = ["exact", "all_to_all", "all_gather"]
    for row, tokens in zip(rows, (1, 5), strict=True):
        assert row["tokens"] == tokens
        assert row["seconds"].keys() == {
            "one GPU",
            "TP",
            *(f"{what} {form}" for what in ("EP", "exchange") for form in forms),
        }
        assert sum(row["rows_of_ranks"]) == sum(row["rows_of_experts"]) == 2 * tokens * SHAPES["small"].top_k
        assert max(row["relative_error"].values()) < layers.TOLERANCE


def test_router_runs_end_to_end(tmp_path):
    arguments = ["--device", "cpu", "--rounds", "3", "--budget", "0.05", "--tokens", "2,40", "--output", str(tmp_path)]
    rows = main(["router", *arguments])
    assert json.loads((tmp_path / f"router_{HERE}.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert (tmp_path / f"router_{HERE}.png").read_bytes().startswith(b"\x89PNG")
    assert [(row["router"], row["tokens"]) for row in rows] == [
        (name, count) for name in router.ROUTERS for count in (2, 40)
    ]
    assert all({"torch", "torch + moe_route", "moe_router"} == set(row["seconds"]) for row in rows)


def test_routers_that_choose_others_are_refused(tmp_path, monkeypatch):
    wrong = dataclasses.replace(router.ROUTERS["mixtral-8x7b"], options=dict(top_k=2, normalize=False, scale=0.5))
    monkeypatch.setitem(router.ROUTERS, "mixtral-8x7b", wrong)
    with pytest.raises(RuntimeError, match="mixtral-8x7b: the sums of scores differ by"):
        main(["router", "--device", "cpu", "--routers", "mixtral-8x7b", "--output", str(tmp_path)])


def test_training_runs_end_to_end(tmp_path, monkeypatch):
    parts = "dgrad,wgrad,main_grad,bias,activation,recipes,checks"
    arguments = ["--device", "cpu", "--rounds", "3", "--budget", "0.05", "--rows", "40", "--output", str(tmp_path)]
    monkeypatch.setattr(training, "MICROBATCHES", 2)
    rows = main(["training", *arguments, "--parts", parts, "--routings", "even"])
    content = json.loads((tmp_path / f"training_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert content["checks"] == {"small": {"bias gradients are the same bits": "100 runs"}}
    assert {row["part"] for row in rows} | {"checks"} == set(parts.split(","))
    assert "fp8, weights rounded once" in next(row for row in rows if row["of"] == "2 microbatches")["times_faster"]
    assert all("thunder_moe" in row["bandwidth_share"] for row in rows if row["part"] in ("bias", "activation"))
    assert (tmp_path / f"training_{HERE}.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(training_reference, "bias_grad", lambda grad, *_: torch.zeros(4, grad.shape[1]))
    with pytest.raises(RuntimeError, match="the bias gradient is wrong"):
        main(["training", *arguments, "--parts", "bias"])


def test_gemm_of_mxfp8_has_a_report_of_its_own(tmp_path):
    arguments = ["--backends", "reference", "--rows-per-expert", "1", "--gemms", "down", "--format", "mxfp8"]
    (row,) = main(["gemm", *TINY, *arguments, "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"gemm_mxfp8_{HERE}.json").read_text())
    assert content["bits_per_weight"] == 8.25
    assert content["rows"] == [json.loads(json.dumps(row))]


def test_gemm_runs_end_to_end(tmp_path, capsys):
    arguments = ["--backends", "reference", "--rows-per-expert", "1,2", "--gemms", "gate_up_swiglu,down"]
    rows = main(["gemm", *TINY, *arguments, "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"gemm_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [(row["gemm"], row["rows_per_expert"]) for row in rows] == [
        (gemm, count) for gemm in ("gate_up_swiglu", "down") for count in (1, 2)
    ]
    assert all({"bf16", "reference"} == set(row["seconds"]) for row in rows)
    assert content["flops_per_second"] > 0
    assert content["read_bytes_per_second"] > 0
    assert content["summary"]
    assert "peers" not in content
    for name in (f"gemm_{HERE}.png", f"gemm_{HERE}_roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "x reference" in out
    assert f"measured on {describe(torch.device('cpu'))}" in out


@pytest.mark.parametrize(("format", "stem"), [("nvfp4", "linear"), ("mxfp8", "linear_mxfp8")])
def test_linear_runs_end_to_end(tmp_path, capsys, monkeypatch, format, stem):
    monkeypatch.setitem(linear.LAYERS, "qwen3-30b-a3b o", (64, 128))
    monkeypatch.setattr(linear, "COLD_BYTES", 100_000)
    arguments = ["--device", "cpu", "--layers", "qwen3-30b-a3b o", "--rows", "1,3", "--rounds", "3"]
    arguments += ["--format", format]
    rows = main(["linear", *arguments, "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"{stem}_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [(row["layer"], row["rows"]) for row in rows] == [("qwen3-30b-a3b o", 1), ("qwen3-30b-a3b o", 3)]
    assert all({"bf16", format} == set(row["seconds"]) for row in rows)
    assert f"x {format}" in capsys.readouterr().out
    monkeypatch.setattr(linear, "_operator", lambda x, pack: torch.zeros(x.shape[0], 64))
    with pytest.raises(RuntimeError, match="the operator is wrong"):
        main(["linear", *arguments, "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        main(["linear", *arguments, "--tune", str(tmp_path / "configs.json")])


def test_layers_that_no_configuration_changes_are_not_tuned(tmp_path, capsys, monkeypatch):
    h100 = Target(torch.device("cuda", 0), 132, (9, 0))
    monkeypatch.setattr(linear, "target", lambda device: h100)
    monkeypatch.setattr(linear, "_tuned", lambda x, *_: dict(point=[1, x.shape[0]], config=["tiled_mma"], us=1))
    monkeypatch.setattr(linear, "_write", lambda file, entries: None)
    monkeypatch.setattr(linear, "COLD_BYTES", 100_000)
    monkeypatch.setattr(linear.select, "lay_out", lambda weight, layout: weight.to_layout("tiled_64x64"))
    monkeypatch.setitem(linear.LAYERS, "small", (64, 128))
    options = dict(device=torch.device("cpu"), layers=["small"], rows=[1, 8, 9], format="nvfp4", vllm=False)
    entries = linear._run(argparse.Namespace(**options, tune=tmp_path / "configs.json"))
    assert [entry["point"] for entry in entries] == [[1, 9]]
    assert "small 8: nothing to tune, mm_tiled_direct<" in capsys.readouterr().out


def test_tuned_configurations_of_linears_replace_those_of_the_same_points(tmp_path):
    file = tmp_path / "configs.json"
    old, other, new = (
        dict(
            capability=[9, 0],
            swiglu=False,
            point=[1, rows, 64, 64],
            config=["tiled_mma", 1, 1, 1, 1, depth, False],
            us=1,
        )
        for rows, depth in ((1.0, 1), (8.0, 1), (1.0, 2))
    )
    file.write_text(json.dumps({"environment": {"a": 1}, "entries": [old, other]}))
    linear._write(file, [new])
    assert json.loads(file.read_text()) == {"environment": {"a": 1}, "entries": [other, new]}
    # Groups may come to the same points, and have no use for a configuration of one weight alone.
    alone = dict(new, config=["tiled_cluster", 1, 1, 1, 1, 1, False, 2])
    linear._write(file, [alone])
    assert json.loads(file.read_text())["entries"] == [other, new, alone]
    linear._write(file, [dict(alone, us=2)])
    assert json.loads(file.read_text())["entries"] == [other, new, dict(alone, us=2)]
    linear._write(file, [old])
    assert json.loads(file.read_text())["entries"] == [other, old]


@pytest.mark.parametrize(("format", "name"), [("nvfp4", "linear_cuda"), ("mxfp8", "linear_mxfp8_cuda")])
def test_where_layers_are_said_to_be_slower_is_where_they_were(format, name):
    for row in json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["rows"]:
        limit = dense.slower_from("tiled_64x64", *linear.LAYERS[row["layer"]], format)
        times = row["times_faster"][format]
        assert times > 0.995 or (row["rows"] >= limit.rows and times >= 1 / (1 + limit.percent / 100)), row


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(lambda out: torch.zeros_like(out), id="zeros"),
        pytest.param(lambda out: out * float("nan"), id="nan"),
        pytest.param(lambda out: out.roll(1, 0), id="rows moved by one"),
        pytest.param(lambda out: out * 1.01, id="one percent off"),
    ],
)
def test_gemm_refuses_a_wrong_kernel(tmp_path, monkeypatch, garbage):
    right = reference.grouped_mm
    monkeypatch.setattr(reference, "grouped_mm", lambda *operands: garbage(right(*operands)))
    arguments = ["--backends", "reference", "--tokens", "3", "--gemms", "down", "--output", str(tmp_path)]
    with pytest.raises(RuntimeError, match="backend 'reference' is wrong: relative error"):
        main(["gemm", *TINY, *arguments])
    assert not list(tmp_path.iterdir()), "a wrong kernel leaves no result"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt-5"], "'gpt-5', wanted one of llama4-scout, "),
        (["--tokens", "0"], "'0', wanted an integer of at least 1"),
        (["--device", "tpu"], "'tpu', wanted cpu or cuda"),
        (["--budget", "-1"], "wanted a number of seconds above 0"),
        (["--backends", "cublas"], "'cublas', wanted one of"),
        (["--gemms", "up"], "'up', wanted one of gate_up"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["gemm", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["engine", "generate", "host", "linear", "load", "model", "parallel", "sharded"])
def test_limits_that_a_suite_does_not_keep_are_refused(capsys, command):
    for limit in ("--slow",) if command in ("linear", "model", "parallel") else ("--budget", "--slow"):
        with pytest.raises(SystemExit):
            main([command, limit, "1"])
        assert f"unrecognized arguments: {limit} 1" in capsys.readouterr().err


def test_each_column_of_an_engine_gets_its_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = engine._arguments(["--device", "cpu", "--gpus", "0,0,1,1,0"])
    assert [options["gpu"] for options in engine._options(args)] == ["0", "0", "1", "1", "0"]
    assert {options["gpu"] for options in engine._options(engine._arguments(["--device", "cpu"]))} == {None}
    for gpus in ("0,1", "0,0,0,0,2"):
        with pytest.raises(SystemExit):
            main(["engine", "--gpus", gpus])
        assert f"got {gpus}, wanted one of 0, 1 for each of the 5 columns" in capsys.readouterr().err


@thunder
@pytest.mark.exhaustive  # each column compiles
def test_layer_runs_end_to_end(tmp_path, capsys):
    rows = main(["layer", *TINY, "--tokens", "3", "--parts", "experts", "--output", str(tmp_path)])
    assert [(row["tokens"], row["part"]) for row in rows] == [(3, "experts")]
    assert all(list(row["seconds"]) == LAYER_COLUMNS for row in rows)
    content = json.loads((tmp_path / f"layer_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    size = content["expert_weight_bytes"]["small"]
    assert size["bf16"] > 3 * size["nvfp4"]
    assert (tmp_path / f"layer_{HERE}.png").exists()
    assert "thunder nvfp4" in capsys.readouterr().out


@thunder
def test_layer_runs_the_chosen_columns(tmp_path, capsys):
    arguments = ["--tokens", "2", "--parts", "layer", "--columns", "eager nvfp4", "--output", str(tmp_path)]
    (row,) = main(["layer", *TINY, *arguments])
    assert list(row["seconds"]) == ["eager bf16", "eager nvfp4"]
    with pytest.raises(SystemExit):
        main(["layer", "--columns", "compile nvfp8"])
    assert "'compile nvfp8', wanted one of eager bf16, thunder bf16" in capsys.readouterr().err


@pytest.mark.slow
def test_compile_overhead_runs_end_to_end(tmp_path, capsys):
    rows = main(["compile", *TINY, "--tokens", "3", "--calls", "2", "--output", str(tmp_path)])
    assert [row["column"] for row in rows] == COMPILE_COLUMNS
    # router, gate, up, down; gate and up are one in NVFP4; quantize_: moe_linear_router, the experts
    assert [row["kernels"] for row in rows] == [4, 4, 3, 2]
    for row in rows:
        assert row["kernel_seconds"] > 0
        assert row["gap_seconds"] == row["call"]["median"] - row["kernel_seconds"]
        assert row["latency"]["median"] > 0
    content = json.loads((tmp_path / f"compile_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert (tmp_path / f"compile_{HERE}.png").read_bytes().startswith(b"\x89PNG")
    assert "quantize_ + compile nvfp4" in capsys.readouterr().out


def test_host_times_operators_and_layers(tmp_path, capsys):
    rows = main(["host", "--device", "cpu", "--tokens", "2", "--rounds", "1", "--output", str(tmp_path)])
    content = json.loads((tmp_path / f"host_{HERE}.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [row["call"] for row in rows] == [
        "torch._grouped_mm",
        *("scaled_grouped_mm", "grouped_swiglu", "grouped_mm_combine", "moe_route", "scaled_grouped_mm_dgrad"),
        *("gradient: torch._grouped_mm", "gradient: scaled_grouped_mm"),
        *(f"{part}: {name}" for part in ("experts", "block") for name in ("bf16", "bf16 batched_mm", "quantize_")),
    ]
    assert all(0 < row["microseconds"]["least"] <= row["microseconds"]["median"] for row in rows)
    assert "experts: quantize_" in capsys.readouterr().out


def test_check_refuses_what_a_column_does_not_say():
    cpu = torch.device("cpu")
    layer = layers.build(SHAPES["small"], cpu)
    x = layers.hidden_states(layer, 3, cpu)
    bf16 = layers.Variant.eager(layer, nvfp4=False)
    wanted = bf16("layer", x)
    assert layers.check("bf16", bf16, "layer", (x,), wanted) == 0
    with pytest.raises(RuntimeError, match="'bf16' is wrong: relative error"):
        layers.check("bf16", bf16, "layer", (x,), wanted * 1.02)
    nvfp4 = layers.Variant.compile(layer, nvfp4=True, backend="thunder_moe")
    quick = torch.compile(layer, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"})
    kept = dataclasses.replace(nvfp4, run={"layer": quick}, grad=True)
    layer.requires_grad_()
    with pytest.raises(RuntimeError, match=r"(?s)wanted 3 of 3 expert GEMMs in NVFP4, compiled was.*trainable"):
        with pytest.warns(match="trainable"):
            layers.check("nvfp4", kept, "layer", (x,), wanted)


@pytest.mark.parametrize("command", ["gemm", "layer", "model", "compile"])
def test_results_that_cannot_be_written_are_refused_before_any_is_measured(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--device", "cpu", "--output", str(output)])
        assert stopped.value.code == 2
        assert f"--output: got '{output}', wanted a folder; {tmp_path / 'file'} is a file" in capsys.readouterr().err
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit):
        main([command, "--device", "cpu", "--output", str(tmp_path / "folder")])
    assert f"wanted a folder that can be written; {tmp_path} cannot" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    assert writable_file(str(tmp_path / "configs.json")) == tmp_path / "configs.json"
    for wrong in (tmp_path, tmp_path / "missing" / "configs.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="wanted a file in a folder that is there"):
            writable_file(str(wrong))
