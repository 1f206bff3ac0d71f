"""The benchmarks' protocol and scripts: candidates in order, results on disk, wrong kernels refused.
Called by pytest; calls benchmarks/timing.py, report.py, bench_grouped_mm.py and bench_moe_layer.py.
"""

import importlib
import json
import pathlib
import time

import pytest
import torch

from thunder_moe.kernels import reference

pytest.importorskip("matplotlib")
BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ["--device", "cpu", "--shapes", "small", "--rounds", "3", "--budget", "0.05"]


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/, which is no package. One thread: on a busy machine two wait for each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)


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


def test_table_marks_what_was_not_timed_as_the_rest(load):
    report, timing = load("report"), load("timing").Timing
    timings = {
        "bf16": timing(2e-3, (1.9e-3, 2.1e-3), 9, "cuda graph"),
        "slow": timing(4.0, (4.0, 4.0), 1, "one call (slow)"),
        "eager": timing(1e-3, (0.5e-3, 1.5e-3), 9, "cuda events (not captured: a reason)"),
    }
    lines = report.table([{"tokens": 8, **report.timed(timings, "bf16")}], ("tokens",), "bf16").splitlines()
    assert lines[0].split("  ")[0] == "tokens"
    assert len({len(line) for line in lines[:3]}) == 1, "aligned"
    for cell in ("2.00", "4000 (one call)", "1.00 (no graph)", "0.000500"):
        assert cell in lines[2]
    assert "NOISY: 1 of 3 timings" in lines[-1]


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
    assert (tmp_path / "bench_grouped_mm_cpu.png").read_bytes().startswith(b"\x89PNG")
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


@pytest.mark.filterwarnings("ignore:transformer_engine module not found")
def test_moe_layer_runs_end_to_end(load, tmp_path, capsys):
    pytest.importorskip("thunder_moe.compilers.thunder_executor", exc_type=ImportError)
    rows = load("bench_moe_layer").main([*TINY, "--tokens", "1,3", "--parts", "experts", "--output", str(tmp_path)])
    assert [(row["tokens"], row["part"]) for row in rows] == [(1, "experts"), (3, "experts")]
    content = json.loads((tmp_path / "bench_moe_layer_cpu.json").read_text())
    assert content["rows"] == json.loads(json.dumps(rows))
    size = content["expert_weight_bytes"]["small"]
    assert size["bf16"] > 3 * size["nvfp4"]
    assert (tmp_path / "bench_moe_layer_cpu.png").exists()
    assert "thunder nvfp4" in capsys.readouterr().out
