"""The timing protocol: candidates interleaved, budgets, calls in a row, and the table that marks what differs.
Called by pytest; calls benchmarks/harness/{timing,report}.py.
"""

import itertools
import json

import pytest
import torch

from benchmarks.harness import report, timing
from benchmarks.harness.timing import Timing, describe, environment, machine_name, measure, measure_back_to_back


class Clock:
    """Time that passes only where a test lets it, so that a busy machine changes no result."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_measure_times_candidates_in_turns(clock):
    calls = []

    def wait(seconds):
        calls.append(seconds)
        clock.sleep(seconds)

    timings = measure({"slow": lambda: wait(0.01), "fast": lambda: wait(0.0001)}, rounds=5, budget=30)
    assert list(timings) == ["slow", "fast"]
    for name, seconds in (("slow", 0.01), ("fast", 0.0001)):
        assert (timings[name].median, *timings[name].quartiles) == pytest.approx([seconds] * 3)
        assert (timings[name].rounds, timings[name].method) == (5, "perf_counter")
    timed = calls[-10:]
    assert all(len(set(timed[i : i + 2])) == 2 for i in range(0, 10, 2)), "each round calls each candidate once"


def test_measure_gives_the_median_and_quartiles(clock):
    seconds = iter([9.0, 9.0, 9.0, 1.0, 5.0, 2.0, 4.0, 3.0])  # three calls to warm up
    timings = measure({"one": lambda: clock.sleep(next(seconds))}, rounds=5, budget=100, slow=100)
    assert timings["one"] == Timing(3.0, (2.0, 4.0), 5, "perf_counter")


def test_measure_stops_at_the_budget_but_not_before_the_least_rounds(clock):
    slow, fast = lambda: clock.sleep(0.02), lambda: clock.sleep(0.0002)
    timings = measure({"slow": slow, "fast": fast}, rounds=40, min_rounds=2, budget=0.01)
    assert timings["slow"].rounds == 2
    assert timings["fast"].rounds == 40, "a candidate within its budget goes on"


def test_measure_calls_a_very_slow_function_once(clock):
    calls = []
    timings = measure({"slow": lambda: (calls.append(1), clock.sleep(0.02))}, slow=0.01)
    assert timings["slow"].method == "one call (slow)"
    assert len(calls) == timings["slow"].rounds == 1


@pytest.mark.parametrize("options", [dict(rounds=2, min_rounds=3), dict(min_rounds=0), dict(warmup=0), dict(budget=0)])
def test_measure_refuses_numbers_out_of_range(options):
    with pytest.raises(ValueError, match=r"got .* wanted"):
        measure({"nothing": lambda: None}, **options)
    with pytest.raises(ValueError, match="functions: got none"):
        measure({})


def test_back_to_back_calls_are_timed_per_call(clock):
    calls = []

    def wait(name, seconds):
        calls.append(name)
        clock.sleep(seconds)

    functions = {"slow": lambda: wait("slow", 0.004), "fast": lambda: wait("fast", 0.0001)}
    timings = measure_back_to_back(functions, calls=10, rounds=4, budget=30)
    assert timings["slow"].median == pytest.approx(0.004)
    assert timings["fast"].median == pytest.approx(0.0001)
    for name, found in timings.items():
        assert (found.rounds, found.method) == (4, "10 calls back to back")
        assert calls.count(name) == 3 + 4 * (1 + 10)
    changes = sum(first != second for first, second in itertools.pairwise(calls))
    assert changes < 10, "a round's calls of one candidate are in a row"


def test_table_marks_what_was_not_timed_as_the_rest():
    timings = {
        "bf16": Timing(2e-3, (1.9e-3, 2.1e-3), 9, "cuda graph"),
        "slow": Timing(4.0, (4.0, 4.0), 1, "one call (slow)"),
        "eager": Timing(1e-3, (0.5e-3, 1.5e-3), 9, "cuda events (not captured: a reason)"),
        "compile": Timing(3e-3, (3e-3, 3e-3), 9, "own cuda graph"),
    }
    lines = report.table([{"tokens": 8, **report.timed(timings, "bf16")}], ("tokens",), "bf16").splitlines()
    assert lines[0].split("  ")[0] == "tokens"
    assert len({len(line) for line in lines[:3]}) == 1, "aligned"
    for cell in ("2.00", "4000 (one call)", "1.00 (no graph)", "3.00 (own graph)", "0.000500"):
        assert cell in lines[2]
    assert "NOISY: 1 of 4 timings" in lines[-1]


def test_environment_names_what_a_result_depends_on():
    found = environment()
    assert found["versions"]["torch"]
    assert found["versions"]["thunder_moe"]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["command"].startswith("python ")
    json.dumps(found)


@pytest.mark.parametrize(
    ("vendor", "flags", "kind", "name"),
    [
        ("GenuineIntel", "sse2 avx2 avx512f avx512_bf16 amx_bf16", "AMX", "cpu_intel_amx"),
        ("GenuineIntel", "sse2 avx2 avx512f avx512_bf16", "AVX512-BF16", "cpu_intel_avx512_bf16"),
        ("AuthenticAMD", "sse2 avx2 avx512f avx512_bf16", "AVX512-BF16", "cpu_amd_avx512_bf16"),
        ("AuthenticAMD", "sse2 avx2", "AVX2", "cpu_amd_avx2"),
        ("", "asimd bf16", "Arm BF16", "cpu_arm_bf16"),
    ],
)
def test_reports_of_each_kind_of_cpu_have_a_name_of_their_own(vendor, flags, kind, name, monkeypatch):
    words = {"flags": flags, "model name": "A CPU", "vendor_id": vendor}
    monkeypatch.setattr("benchmarks.harness.timing._cpuinfo", words.get)
    assert machine_name(torch.device("cpu")) == name
    assert machine_name(torch.device("cuda")) == "cuda"
    assert f"A CPU with {kind}, " in describe(torch.device("cpu"))
    assert environment()["machine"]["cpu_kind"] == kind
