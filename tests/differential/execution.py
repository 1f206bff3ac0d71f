"""Executes a random program eagerly and compiled, compares what both did, and shrinks one that fails.
Called by the test and the runner; calls programs, runtime and the compilers under test.
"""

from __future__ import annotations

import copy
import linecache
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe import moe_executor, refresh_, register, rewrite_report
from thunder_moe.compilers.thunder_compat import original_thunderfx

from .programs import Program, Statement
from .runtime import Call, Run, checkpoint, device, exact, gc, is_exact

register("torch")  # the backend "thunder_moe", of a checkout that is not installed too

__all__ = ["COMPILERS", "Outcome", "check", "run_source", "script", "shrink"]

COMPILERS = ("dynamo-eager", "dynamo-aot", "dynamo-inductor", "thunder", "thunderfx")
_BACKENDS = {"dynamo-eager": "eager", "dynamo-aot": "aot_eager", "dynamo-inductor": "inductor"}
# Relative Frobenius error of one tensor: bfloat16 rounds at other places; a stale or unscaled weight is far beyond.
TOLERANCE = 0.02
# Where that is exceeded: times the error that one more rounding of each GEMM's output would make.
NOISE_TOLERANCE = 3
# Features for which a frozen weight may stay 16-bit; the report then says why.
EXCUSES = {"detach", "no-op to", "mT.mT.mT", "mT.contiguous()", "changed weights", "autograd.Function"}
# Errors by which thunder_moe refuses a program that it, or Thunder, would run wrongly. They say what to do instead.
REPLACED = "was replaced after thunder.jit"
REFUSALS = (
    "shares its memory with a tensor that the compiled function",
    "in its backward instead of its forward",
    REPLACED,
)
# Errors that mean that the program itself is not one: of a shrunk program whose definitions are gone.
_INVALID = (NameError, AttributeError, SyntaxError)


@dataclass
class Outcome:
    """What came of a program.

    Attributes:
        failure: None when compiled and eager execution agree.
        gemms: numbers of grouped GEMMs in the report, by decision.
        invalid: eager execution failed.
        refused: the one of `REFUSALS` that ended it.
        stock_fails: how the compiler fails without thunder_moe, where both fail.
        eager_raised: eager execution raised in a call.
        details: of what is no failure.
    """

    failure: str | None = None
    gemms: Counter[str] = field(default_factory=Counter)
    invalid: bool = False
    refused: str | None = None
    stock_fails: str | None = None
    eager_raised: bool = False
    details: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> int:
        return self.gemms.total() - self.gemms["16-bit"]


def check(program: Program, compiler: str, *, ask_stock: bool = True, noise_runs: int = 30) -> Outcome:
    """Executes a program eagerly and by a compiler. A failure that the compiler has without thunder_moe, too, is no
    failure of ours: `stock_fails`; `ask_stock`: find out; `noise_runs`: samples of rounding before a value is wrong."""
    source = program.source()
    try:
        expected = _execute(program, source, lambda model: model)
    except _INVALID as error:
        return Outcome(invalid=True, details=[repr(error)])
    outcome = _compare(program, source, compiler, expected, noise_runs)
    if ask_stock and outcome.failure is not None and not outcome.failure.startswith("report"):
        stock = _compare(program, source, compiler, expected, noise_runs, stock=True)
        # No error of the compiler's own excuses a wrong number.
        if stock.failure is not None and (_raised(outcome) or not _raised(stock)):
            reason = _reason(outcome.failure)
            if _reason(stock.failure) != reason:
                reason = f"{reason} | alone: {_reason(stock.failure)}"
            return Outcome(stock_fails=reason, details=[outcome.failure, stock.failure])
    return outcome


def _compare(
    program: Program, source: str, compiler: str, expected: Run, noise_runs: int, stock: bool = False
) -> Outcome:
    torch._dynamo.reset()
    outcome = Outcome(eager_raised=any(call.raised or call.backward_raised for call in expected.calls))
    functions: list[Any] = []
    before: list[tuple[nn.Module, dict[str, int]]] = []

    def compile_(model: nn.Module) -> Callable:
        before.append((model, _identities(model)))
        functions.append(_compiled(model, compiler, program, stock))
        return functions[-1]

    if stock and compiler.startswith("thunder"):
        source = source.replace("torch._grouped_mm(", "loop_grouped_mm(").replace("F.grouped_mm(", "loop_grouped_mm(")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = _execute(program, source, compile_)
    last = actual.calls[-1].raised or ""
    outcome.refused = next((refusal for refusal in REFUSALS if refusal in last), None)
    if outcome.refused == REPLACED:
        name = last.split(": ")[1]
        if all(_identities(model).get(name) == tensors.get(name) for model, tensors in before):
            outcome.refused = None  # a false alarm
    if outcome.refused:  # what was done before that has to be right
        actual.calls.pop()
        del expected.calls[len(actual.calls) :]
    if "cond(" in source:  # torch.cond gives weights of the branch that does not run gradients of zeros
        for ours, theirs in zip(actual.calls, expected.calls, strict=False):
            for name in ours.tensors.keys() - theirs.tensors.keys():
                if not ours.tensors[name].any():
                    del ours.tensors[name]
    differences = list(_differences(expected, actual))
    if any("relative error" in difference for difference in differences):
        noisy = re.sub(
            r"(torch\._|F\.)grouped_mm\(|torch\.bmm\(", lambda call: f"noisy({call[0][:-1]}, ", program.source()
        )
        runs: list[Run] = []
        # Signs at a threshold (of relu_, masked_fill_) flip in few of them.
        while len(runs) < noise_runs and any("relative error" in difference for difference in differences):
            runs += [_execute(program, noisy, lambda model: model) for _ in range(3)]
            differences = list(_differences(expected, actual, runs))
    if not stock:
        differences += _unreported(program, source, compiler, functions[0], outcome)
    if differences:
        outcome.failure = "\n".join(differences)
    return outcome


def _compiled(model: nn.Module, compiler: str, program: Program, stock: bool) -> Callable:
    if compiler == "thunder":
        import thunder

        return thunder.jit(model, executors=[]) if stock else thunder.jit(
            model, executors=[moe_executor], moe_format=program.format
        )  # fmt: skip
    function: Any = model
    if program.entry == "function":

        def function(*arguments: Tensor) -> Any:
            return model(*arguments)

    options: dict[str, Any] = dict(fullgraph=program.fullgraph, dynamic=program.dynamic)
    if compiler == "thunderfx":
        from thunder.dynamo import ThunderCompiler, thunderfx

        if not stock:
            return thunderfx(function, executors=[moe_executor], moe_format=program.format, **options)
        # Thunder's own does not run on torch 2.12 and newer without this.
        return torch.compile(function, backend=partial(original_thunderfx, ThunderCompiler(executors=[])), **options)
    inner = _BACKENDS[compiler]
    if stock:
        return torch.compile(function, backend=inner, **options)
    chosen = {"thunder_moe.inner": inner, "thunder_moe.format": program.format}
    return torch.compile(function, backend="thunder_moe", options=chosen, **options)


def _execute(program: Program, source: str, compile_: Callable[[nn.Module], Callable]) -> Run:
    """A run of the program, up to the first call whose forward raises."""
    filename = f"<program {program.seed}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    eager = compile_.__name__ == "<lambda>"
    names = dict(
        torch=torch, nn=nn, F=F, checkpoint=checkpoint, copy=copy, exact=exact, gc=gc,
        loop_grouped_mm=_loop_grouped_mm,
        cond=_eager_cond if eager else torch.cond, noisy=_noisy,
    )  # fmt: skip
    exec(compile(source, filename, "exec"), names)

    def make(model: nn.Module | None = None) -> tuple[nn.Module, Callable]:
        if model is None:
            with device():
                model = names["Model"]()
        return model, _Checked(model) if eager else compile_(model)

    run = Run(*make(), program.sizes, refresh_, make)
    try:
        names["drive"](run)
    except _INVALID:
        if eager:
            raise
        _note(run)
    except Exception:
        _note(run)
    return run


def _identities(model: nn.Module) -> dict[str, int]:
    """The tensors that a module holds, by name."""
    options: dict[str, Any] = dict(remove_duplicate=False)
    held = [*model.named_parameters(**options), *model.named_buffers(**options)]
    return {name: id(tensor) for name, tensor in held}


def _note(run: Run) -> None:
    """Keeps where a run has ended: in a call, or in what changes weights between two."""
    if run.calls and run.calls[-1].raised is not None:
        run.calls[-1].raised += "\n" + traceback.format_exc(limit=-4)
    else:
        run.calls.append(Call(raised="between calls: " + traceback.format_exc(limit=-4)))


@dataclass
class _Checked:
    """A model whose weights have to be exact, without which eager execution is no oracle."""

    model: nn.Module

    def __call__(self, *arguments: Tensor) -> Any:
        for name, weight in [*self.model.named_parameters(), *self.model.named_buffers()]:
            transposed = any(re.match(r"[ltc]*k\d", part) for part in name.split("."))
            assert weight.ndim != 3 or is_exact(weight.mT if transposed else weight), f"{name} is not exact in NVFP4"
        return self.model(*arguments)


def _eager_cond(condition: Tensor, true: Callable, false: Callable, arguments: tuple) -> Any:
    return (true if condition else false)(*arguments)


def _noisy(product: Callable[..., Tensor], *operands: Tensor, **options: Tensor) -> Tensor:
    """A product whose values are off by about what a rounding to bfloat16 changes."""
    out = product(*operands, **options)
    return out * (1 + torch.empty_like(out, requires_grad=False).uniform_(-1, 1) / 128)


def _loop_grouped_mm(rows: Tensor, mat_b: Tensor, offs: Tensor) -> Tensor:
    """torch._grouped_mm by operators that every compiler knows."""
    number = torch.arange(rows.shape[0], device=rows.device)[:, None]  # [M, 1]
    out = torch.zeros(rows.shape[0], mat_b.shape[2], dtype=rows.dtype, device=rows.device)
    for expert in range(mat_b.shape[0]):
        inside = number < offs[expert]
        if expert:
            inside = inside & (number >= offs[expert - 1])
        out = torch.where(inside, rows @ mat_b[expert], out)
    return out


def _differences(expected: Run, actual: Run, noisy: Sequence[Run] = ()) -> Iterator[str]:
    for number, (ours, theirs) in enumerate(zip(actual.calls, expected.calls, strict=False)):
        if theirs.backward_raised and "inplace operation" in (ours.raised or ""):
            return  # ahead of time, the backward is part of the compilation
        if (theirs.raised or "").startswith("between calls"):
            return  # swap_tensors refuses what eager execution still holds
        if bool(ours.raised) != bool(theirs.raised):
            yield f"call {number}: raised {ours.raised}, eagerly {theirs.raised}"
            return
        if ours.raised:
            return
        if ours.backward_raised and not theirs.backward_raised:
            yield f"call {number}: the backward raised {ours.backward_raised}"
            return
        for name, value in theirs.tensors.items():
            if name not in ours.tensors:
                yield f"call {number}: {name} is missing"
            elif (error := _error(ours.tensors[name], value)) > TOLERANCE:
                noise = [_error(run.calls[number].tensors[name], value) for run in noisy]
                if noise and error <= NOISE_TOLERANCE * max(noise):
                    continue
                yield f"call {number}: {name} has relative error {error:.3g}"
        if not theirs.backward_raised:
            for name in ours.tensors.keys() - theirs.tensors.keys():
                yield f"call {number}: {name} is there, eagerly it is not"
        for name, value in theirs.requires_grad.items():
            if ours.requires_grad.get(name) != value:
                yield f"call {number}: requires_grad of {name} is {ours.requires_grad.get(name)}, eagerly {value}"
    if len(expected.calls) != len(actual.calls):
        yield f"{len(actual.calls)} calls, eagerly {len(expected.calls)}"


def _error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error; Inf where shape, dtype or the places of Inf and NaN differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return float("inf")
    difference, size = (torch.where(finite, t, 0.0).norm().item() for t in (actual - expected, expected))
    return difference / size if size else (float("inf") if difference else 0.0)


def _unreported(program: Program, source: str, compiler: str, function: Any, outcome: Outcome) -> list[str]:
    """Grouped GEMMs that the report does not list, or that stay 16-bit though nothing speaks against NVFP4."""
    try:
        entries = list(rewrite_report(function))
    except ValueError:
        return [] if outcome.eager_raised or outcome.refused else ["report: there is none"]
    outcome.gemms.update(entry.decision for entry in entries)
    problems = [f"report: {entry.gemm.weight} has no reason" for entry in entries if not entry.reason]
    if outcome.eager_raised or outcome.refused:
        return problems
    if not program.features & EXCUSES:
        gradients = any(name in source for name in ('"train"', '"frozen inputs"', "enable_grad", "set_grad_enabled"))
        problems += [
            f"report: {entry.gemm.weight} stays 16-bit: {entry.reason}"
            for entry in entries
            if not entry.rewritten
            and not ("trainable" in entry.reason and gradients)
            and not ("in place" in entry.reason and any("changed" in name for name in program.features))
        ]
    if compiler != "thunder":
        listed = {entry.gemm.where for entry in entries}
        problems += [
            f"report: line {number} is missing: {line.strip()}"
            for number, line in enumerate(source.splitlines(), 1)
            if "grouped_mm(" in line and f"<program {program.seed}>:{number}" not in listed and "(grad," not in line
        ]
    return problems


def shrink(program: Program, compiler: str, attempts: int = 300, seconds: float = float("inf")) -> Program:
    """The program without the statements that its failure does not need, as far as so many attempts tell."""
    end = time.monotonic() + seconds
    kind, smaller = _kind(check(program, compiler, ask_stock=False, noise_runs=3)), _smaller(program)
    for _ in range(attempts):
        candidate = next(smaller, None)
        if candidate is None or time.monotonic() > end:
            break
        if _kind(check(candidate, compiler, ask_stock=False, noise_runs=3)) == kind:
            program, smaller = candidate, _smaller(candidate)
    return program


def _raised(outcome: Outcome) -> bool:
    first = (outcome.failure or "").split("\n")[0]
    return "raised" in first and "raised None" not in first


def _reason(failure: str) -> str:
    """The first line of a failure without what differs from program to program."""
    if "between calls" in failure:  # then the last line of the traceback
        failure = "between calls: " + failure.split(", eagerly None")[0].strip().splitlines()[-1]
    line = failure.replace(" raised:\n", " raised: ").split("\n")[0].split(" while tracing")[0]
    for pattern, text in ((r"^call \d+: ", ""), (r"\d+(\.\d+)?(e[-+]\d+)?", "N"), (r"\b[a-z]+N\b", "NAME")):
        line = re.sub(pattern, text, line)
    return line[:200]


def _kind(outcome: Outcome) -> str | None:
    """What sort of failure an outcome is; None for none."""
    if outcome.failure is None:
        return None
    first = outcome.failure.splitlines()[0]
    for sort in ("raised", "relative error", "requires_grad", "missing", "stays 16-bit", "there is none"):
        if sort in first:
            return first.split(":")[0][:6] + sort
    return first


def _smaller(program: Program) -> Iterator[Program]:
    """Copies of a program that lack one statement, or the head of one block, the last ones first."""
    for part in ("steps", "forward", "methods", "definitions", "weights"):
        for path in reversed(list(_paths(getattr(program, part)))):
            smaller = copy.deepcopy(program)
            statements = getattr(smaller, part)
            for index in path[:-1]:
                statements = statements[index].body
            body = statements.pop(path[-1]).body
            yield smaller
            if body and part in ("forward", "steps"):
                unwrapped = copy.deepcopy(smaller)
                statements = getattr(unwrapped, part)
                for index in path[:-1]:
                    statements = statements[index].body
                statements[path[-1] : path[-1]] = copy.deepcopy(body)
                yield unwrapped


def _paths(statements: list[Statement]) -> Iterator[tuple[int, ...]]:
    for index, statement in enumerate(statements):
        yield (index,)
        for path in _paths(statement.body or []):
            yield (index, *path)


def script(program: Program, compiler: str, device: str = "cpu") -> str:
    """A script that runs the program by itself, from the root of the repository."""
    fields = {name: getattr(program, name) for name in ("seed", "sizes", "fullgraph", "format", "dynamic", "entry")}
    return (
        f"# {', '.join(sorted(program.features))}\n"
        "import sys\n\n"
        'sys.path.insert(0, "tests")\n'
        "from differential.execution import run_source\n"
        "from differential.runtime import tensors_on\n\n"
        f'tensors_on("{device}")\n'
        f"SOURCE = '''\n{program.source()}'''\n"
        f'run_source(SOURCE, "{compiler}", **{fields})\n'
    )


def run_source(source: str, compiler: str, **fields: Any) -> None:
    """Runs the source of a program and prints what differs."""
    program = Program(**fields)
    program.source = lambda: source  # type: ignore[method-assign]
    outcome = check(program, compiler)
    print(outcome.failure or outcome)
