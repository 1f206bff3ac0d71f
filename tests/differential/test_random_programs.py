"""Random programs, compiled and eager: both agree, and most programs have a GEMM in NVFP4.
Called by pytest; calls programs, execution and workers. The fast set runs two programs per compiler except inductor
and thunderfx, ``make test-all`` one more with thunderfx, ``python -m tests.differential`` thousands.
"""

import os
import random
import re
import time
from types import SimpleNamespace

import pytest
import torch

from thunder_moe.formats.nvfp4 import dequantize, quantize

from . import execution, workers
from .execution import Outcome, check, script, shrink
from .programs import DISABLED, Program, Statement, generate
from .runtime import Run, exact, is_exact
from .workers import Settings, outcomes

FAST = range(2)  # seeds
MORE = range(2, 8)  # of one exhaustive test; `make test-programs` runs thousands
COMPILERS = ("dynamo-eager", "dynamo-aot", "thunder")
EXHAUSTIVE = [pytest.mark.slow, pytest.mark.exhaustive]
TESTS = [pytest.param(compiler, FAST, id=f"{compiler}-fast") for compiler in COMPILERS]
TESTS += [pytest.param(compiler, MORE, id=f"{compiler}-more", marks=EXHAUSTIVE) for compiler in COMPILERS]
TESTS += [pytest.param("thunderfx", range(1, 2), id="thunderfx", marks=pytest.mark.slow)]  # 0 takes four times as long
TESTS += [pytest.param("dynamo-inductor", range(2), id="dynamo-inductor", marks=EXHAUSTIVE)]


@pytest.mark.parametrize(("compiler", "seeds"), TESTS)
def test_compiled_programs_do_what_eager_ones_do(compiler, seeds):
    rewritten = 0
    for seed in seeds:
        program = generate(seed, frozenset(DISABLED[compiler]))
        outcome = check(program, compiler)
        assert not outcome.invalid, f"seed {seed} is no program: {outcome.details}\n{program.source()}"
        if outcome.failure is not None:
            smallest = script(shrink(program, compiler, attempts=100), compiler)
            pytest.fail(f"seed {seed}: {outcome.failure}\n{smallest}", pytrace=False)
        rewritten += outcome.rewritten > 0
    assert rewritten >= len(seeds) // 2


def _program(*updates: str) -> Program:
    program = Program(0, (2, 16))
    program.weights = [Statement("self.w0 = nn.Parameter(exact(2, 16, 16, 0), requires_grad=False)")]
    program.forward = [Statement("y = torch._grouped_mm(x, self.w0.mT, offs=o)"), Statement("out.append(y)")]
    calls = [Statement(f'run.call("no_grad", (2, 3), {seed})') for seed in range(2)]
    program.steps = [calls[0], *map(Statement, updates), calls[1]]
    return program


@pytest.mark.slow
def test_a_wrong_weight_is_found_and_shrunk():
    # A change that no compiler sees while nothing tells of it.
    unseen = "m.w0.data.view(torch.int16).numpy()[0] ^= -32768"
    program = _program("gc.collect()", unseen, "gc.collect()")
    outcome = check(program, "dynamo-eager")
    assert "call 1: output 0 has relative error" in outcome.failure
    smallest = shrink(program, "dynamo-eager")
    assert [step.text for step in smallest.steps] == [step.text for step in _program(unseen).steps]
    namespace = {}
    exec(script(smallest, "dynamo-eager").replace("run_source(", "found = (").replace(", **", ", "), namespace)
    assert "numpy" in namespace["SOURCE"]
    assert check(_program(), "dynamo-eager").failure is None


@pytest.mark.parametrize("replaced", [False, True])
def test_a_refusal_of_a_replaced_weight_counts_only_where_one_was_replaced(monkeypatch, replaced):
    def compiled(model, *_):
        first = iter([model])

        def run(*arguments):
            for function in first:
                return function(*arguments)
            raise ValueError("w0: it, or a module that holds it, was replaced after thunder.jit")

        return run

    monkeypatch.setattr(execution, "_compiled", compiled)
    update = "m.w0 = nn.Parameter(m.w0.detach(), requires_grad=False)" if replaced else "gc.collect()"
    outcome = check(_program(update), "thunder", ask_stock=False)
    assert (outcome.refused is not None, outcome.failure is None) == (replaced, replaced)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_optimizers_multiply_exactly(optimizer, options):
    if "fused" in options and optimizer in ("SGD", "RMSprop"):
        pytest.skip("RMSprop has no fused form; that of SGD does nothing to bfloat16 on a CPU (torch 2.13)")
    for factor in (2.0, 0.5, -1.0, -2.0):
        weight = torch.nn.Parameter(exact(2, 48, 32, 0))
        before = weight.detach().clone()
        Run(torch.nn.Module(), print, (2, 32), print).step(optimizer, weight, factor=factor, **options)
        assert torch.equal(weight.detach(), before * factor)


@pytest.mark.parametrize("k", [16, 32, 48, 64])
def test_weights_are_exact(k):
    weight = exact(3, 32, k, seed=k)
    assert torch.equal(dequantize(quantize(weight)), weight)
    assert is_exact(weight)
    assert is_exact(-2 * weight.flip(0))
    changed = weight.clone()
    changed[1, 2, 3] = 0.33
    assert not is_exact(changed)
    assert torch.equal(exact(3, 32, k, seed=k, transposed=True), weight.mT)


def test_programs_are_reproducible_and_vary():
    sources = [generate(seed).source() for seed in range(50)]
    random.seed(1)
    assert sources == [generate(seed).source() for seed in range(50)]
    assert len(set(sources)) == 50


def test_no_buffer_is_changed_unseen_as_a_trained_weight_may_be():
    changed = []
    for program in map(generate, range(1000, 1500)):
        for step in program.steps:
            if update := re.fullmatch(r"m\.(\w+)\.data\.mul_\(.*\)", step.text):
                changed.append(f'register_buffer("{update[1]}"' in program.source())
    assert changed
    assert not any(changed)


def test_a_crash_and_a_hang_are_failures_of_their_seeds(monkeypatch):
    def fails(program, compiler):
        if program.seed == 12:
            os.abort()
        if program.seed == 13:
            time.sleep(60)
        return Outcome()

    monkeypatch.setattr(workers, "check", fails)
    settings = Settings("dynamo-eager", frozenset(), limit=0.5)
    found = {f.seed: f.outcome.failure for f in outcomes(range(10, 15), settings, workers=2, seconds=60)}
    assert sorted(found) == list(range(10, 15))
    assert "exit code -6" in found[12]
    assert "exit code 1" in found[13]
    assert "in fails" in found[13]  # where it hangs
    assert [found[seed] for seed in (10, 11, 14)] == [None] * 3


def test_no_program_is_started_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(workers, "check", lambda program, compiler: time.sleep(0.1) or Outcome())
    found = list(outcomes(range(1000), Settings("dynamo-eager", frozenset()), workers=1, seconds=0.5))
    assert 1 <= len(found) <= 5


@pytest.mark.slow
def test_a_failure_is_told_when_the_time_is_over_while_it_shrinks(monkeypatch):
    monkeypatch.setattr(workers, "check", lambda program, compiler: Outcome(failure="wrong"))
    monkeypatch.setattr(workers, "shrink", lambda program, compiler, seconds: time.sleep(60))
    monkeypatch.setattr(workers, "GRACE", 0.1)
    finished, seconds = workers._Worker.finished, []

    def time_is_over(worker):
        assert finished(worker) is None  # it shrinks now
        seconds.append(61)

    monkeypatch.setattr(workers._Worker, "finished", time_is_over)
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: sum(seconds)))
    settings = Settings("dynamo-eager", frozenset(), shrinking=60)
    (found,) = outcomes(range(7, 8), settings, workers=1, seconds=60)
    assert (found.seed, found.outcome.failure) == (7, "wrong")
    assert "run_source(" in found.script
