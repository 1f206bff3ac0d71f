"""The benchmarks' protocol and scripts: candidates in order, results on disk, wrong kernels refused.
Called by pytest; calls benchmarks/timing.py, report.py, layers.py and the bench_*.py scripts.
"""

import dataclasses
import itertools
import json
import time

import pytest
import torch

from thunder_moe.kernels import reference

pytest.importorskip("matplotlib")
TINY = ["--device", "cpu", "--shapes", "small", "--rounds", "3", "--budget", "0.05"]


def test_measure_orders_a_slow_and_a_fast_function(load):
    measure = load("timing").measure
    calls = []

    def wait(seconds):
        calls.append(seconds)
        time.sleep(seconds)

    timings = measure({"slow": lambda: wait(0.01), "fast": lambda: wait(0.0001)}, rounds=5, budget=30)
    assert list(timings) == ["slow", "fast"]
    assert timings["fast"].median < timings["slow"].median
    for timing in timings.values():
        assert timing.quartiles[0] <= timing.median <= timing.quartiles[1]
        assert (timing.rounds, timing.method) == (5, "perf_counter")
    timed = calls[-10:]
    assert all(len(set(timed[i : i + 2])) == 2 for i in range(0, 10, 2)), "each round calls each candidate once"


def test_measure_stops_at_the_budget_but_not_before_the_least_rounds(load):
    measure = load("timing").measure
    timings = measure({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=40, min_rounds=2, budget=0.01)
    assert timings["slow"].rounds == 2
    assert timings["fast"].rounds == 40, "a candidate within its budget goes on"


def test_measure_calls_a_very_slow_function_once(load):
    calls = []
    timings = load("timing").measure({"slow": lambda: (calls.append(1), time.sleep(0.02))}, slow=0.01)
    assert timings["slow"].method == "one call (slow)"
    assert len(calls) == timings["slow"].rounds == 1


@pytest.mark.parametrize("options", [dict(rounds=2, min_rounds=3), dict(min_rounds=0), dict(warmup=0), dict(budget=0)])
def test_measure_refuses_numbers_out_of_range(load, options):
    with pytest.raises(ValueError, match=r"got .* wanted"):
        load("timing").measure({"nothing": lambda: None}, **options)
    with pytest.raises(ValueError, match="functions: got none"):
        load("timing").measure({})


def test_back_to_back_calls_are_timed_per_call(load):
    calls = []

    def wait(name, seconds):
        calls.append(name)
        time.sleep(seconds)

    functions = {"slow": lambda: wait("slow", 0.004), "fast": lambda: wait("fast", 0.0001)}
    timings = load("timing").measure_back_to_back(functions, calls=10, rounds=4, budget=30)
    assert 0.004 < timings["slow"].median < 0.03
    assert timings["fast"].median < timings["slow"].median
    for name, timing in timings.items():
        assert (timing.rounds, timing.method) == (4, "10 calls back to back")
        assert calls.count(name) == 3 + 4 * (1 + 10)
    changes = sum(first != second for first, second in itertools.pairwise(calls))
    assert changes < 10, "a round's calls of one candidate are in a row"


def test_table_marks_what_was_not_timed_as_the_rest(load):
    report, timing = load("report"), load("timing").Timing
    timings = {
        "bf16": timing(2e-3, (1.9e-3, 2.1e-3), 9, "cuda graph"),
        "slow": timing(4.0, (4.0, 4.0), 1, "one call (slow)"),
        "eager": timing(1e-3, (0.5e-3, 1.5e-3), 9, "cuda events (not captured: a reason)"),
        "compile": timing(3e-3, (3e-3, 3e-3), 9, "own cuda graph"),
    }
    lines = report.table([{"tokens": 8, **report.timed(timings, "bf16")}], ("tokens",), "bf16").splitlines()
    assert lines[0].split("  ")[0] == "tokens"
    assert len({len(line) for line in lines[:3]}) == 1, "aligned"
    for cell in ("2.00", "4000 (one call)", "1.00 (no graph)", "3.00 (own graph)", "0.000500"):
        assert cell in lines[2]
    assert "NOISY: 1 of 4 timings" in lines[-1]


def test_environment_names_what_a_result_depends_on(load):
    environment = load("timing").environment()
    assert environment["versions"]["torch"]
    assert environment["versions"]["thunder_moe"]
    assert environment["machine"]["threads"] == torch.get_num_threads()
    assert environment["command"].startswith("python ")
    json.dumps(environment)


def test_grouped_mm_runs_end_to_end(load, tmp_path, capsys):
    arguments = ["--backends", "reference", "--rows-per-expert", "1,2", "--gemms", "gate_up_swiglu,down"]
    rows = load("bench_grouped_mm").main([*TINY, *arguments, "--output", str(tmp_path)])
    content = json.loads((tmp_path / "bench_grouped_mm_cpu.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert [(row["gemm"], row["rows_per_expert"]) for row in rows] == [
        (gemm, count) for gemm in ("gate_up_swiglu", "down") for count in (1, 2)
    ]
    assert all({"bf16", "reference"} == set(row["seconds"]) for row in rows)
    assert content["flops_per_second"] > 0
    assert content["read_bytes_per_second"] > 0
    assert content["summary"]
    assert "peers" not in content
    for name in ("bench_grouped_mm_cpu.png", "bench_grouped_mm_cpu_roofline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "x reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(lambda out: torch.zeros_like(out), id="zeros"),
        pytest.param(lambda out: out * float("nan"), id="nan"),
        pytest.param(lambda out: out.roll(1, 0), id="rows moved by one"),
        pytest.param(lambda out: out * 1.01, id="one percent off"),
    ],
)
def test_grouped_mm_refuses_a_wrong_kernel(load, tmp_path, monkeypatch, garbage):
    right = reference.grouped_mm
    monkeypatch.setattr(reference, "grouped_mm", lambda *operands: garbage(right(*operands)))
    arguments = ["--backends", "reference", "--tokens", "3", "--gemms", "down", "--output", str(tmp_path)]
    with pytest.raises(RuntimeError, match="backend 'reference' is wrong: relative error"):
        load("bench_grouped_mm").main([*TINY, *arguments])
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
def test_bad_arguments_are_named(load, capsys, arguments, message):
    with pytest.raises(SystemExit):
        load("bench_grouped_mm").main(arguments)
    assert message in capsys.readouterr().err


@pytest.fixture
def moe_layer(load):
    pytest.importorskip("thunder_moe.compilers.thunder.executor", exc_type=ImportError)
    return load("bench_moe_layer")


@pytest.mark.filterwarnings("ignore:transformer_engine module not found")
def test_moe_layer_runs_end_to_end(moe_layer, tmp_path, capsys):
    rows = moe_layer.main([*TINY, "--tokens", "1,3", "--parts", "experts", "--output", str(tmp_path)])
    assert [(row["tokens"], row["part"]) for row in rows] == [(1, "experts"), (3, "experts")]
    assert all(list(row["seconds"]) == list(moe_layer.COLUMNS) for row in rows)
    content = json.loads((tmp_path / "bench_moe_layer_cpu.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    size = content["expert_weight_bytes"]["small"]
    assert size["bf16"] > 3 * size["nvfp4"]
    assert (tmp_path / "bench_moe_layer_cpu.png").exists()
    assert "thunder nvfp4" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:transformer_engine module not found")
def test_moe_layer_runs_the_chosen_columns(moe_layer, tmp_path, capsys):
    arguments = ["--tokens", "2", "--parts", "layer", "--columns", "eager nvfp4", "--output", str(tmp_path)]
    (row,) = moe_layer.main([*TINY, *arguments])
    assert list(row["seconds"]) == ["eager bf16", "eager nvfp4"]
    with pytest.raises(SystemExit):
        moe_layer.main(["--columns", "compile nvfp8"])
    assert "'compile nvfp8', wanted one of eager bf16, thunder bf16" in capsys.readouterr().err


def test_compile_overhead_runs_end_to_end(load, tmp_path, capsys):
    benchmark = load("bench_compile_overhead")
    rows = benchmark.main([*TINY, "--tokens", "3", "--calls", "2", "--output", str(tmp_path)])
    assert [row["column"] for row in rows] == list(benchmark.COLUMNS)
    # router, gate, up, down; gate and up are one in NVFP4; quantize_ adds the routing
    assert [row["kernels"] for row in rows] == [4, 4, 3, 4]
    for row in rows:
        assert row["kernel_seconds"] > 0
        assert row["gap_seconds"] == row["call"]["median"] - row["kernel_seconds"]
        assert row["latency"]["median"] > 0
    content = json.loads((tmp_path / "bench_compile_overhead_cpu.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    assert (tmp_path / "bench_compile_overhead_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert "quantize_ + compile nvfp4" in capsys.readouterr().out


def test_check_refuses_what_a_column_does_not_say(load):
    layers = load("layers")
    cpu = torch.device("cpu")
    layer = layers.build(load("shapes").SHAPES["small"], cpu)
    x = layers.hidden_states(layer, 3, cpu)
    bf16 = layers.Variant.eager(layer, nvfp4=False)
    wanted = bf16("layer", x)
    assert layers.check("bf16", bf16, "layer", (x,), wanted) == 0
    with pytest.raises(RuntimeError, match="'bf16' is wrong: relative error"):
        layers.check("bf16", bf16, "layer", (x,), wanted * 1.02)
    nvfp4 = layers.Variant.compile(layer, nvfp4=True, backend="thunder_moe")
    kept = dataclasses.replace(nvfp4, grad=True)
    layer.requires_grad_()
    with pytest.raises(RuntimeError, match=r"(?s)wanted 3 of 3 expert GEMMs in NVFP4, compiled was.*trainable"):
        with pytest.warns(match="trainable"):
            layers.check("nvfp4", kept, "layer", (x,), wanted)
