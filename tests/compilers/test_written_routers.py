"""Routers written in torch's operations under both compilers: which become moe_router, their numbers and gradients.
Called by pytest; judged by the same code in eager mode, and by the report. written_routers.py has the routers.
"""

import re

import pytest
import thunder
import torch
from both_compilers import compile_by
from fast_cases import others_slow
from oracle import relative_error
from written_routers import (
    FUSED,
    OTHERS,
    A,
    E,
    T,
    biased_in_place,
    by_groups,
    gpt_oss,
    ids_changed,
    logits_changed,
    longcat,
    mask_changed,
    mask_too,
    minimax,
    other_mode,
    wide_mask_too,
)

from thunder_moe import RewriteWarning, moe_executor, rewrite_report

pytestmark = pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")
# By Thunder 0.2.6: .values, .indices, softmax(x, -1, dtype), torch.special.softmax.
UNTRACED = ("by_best_of_groups", "moonlight", "olmoe", "special")
# Both compilers match by the same patterns; the others are of no trace of Thunder's own.
OF_THUNDER = (by_groups, gpt_oss, longcat, minimax)
OF_THUNDER += (biased_in_place, ids_changed, logits_changed, mask_changed, mask_too, other_mode, wide_mask_too)


def cases(functions, inner):
    """Return (compiler, the functions that it compiles into one graph)."""
    traced = [function for function in functions if function.__name__ not in UNTRACED]
    own = [function for function in traced if function in OF_THUNDER]
    others = [function for function in traced if function not in OF_THUNDER]
    cases = [
        (f"dynamo-{inner}", list(functions)),
        ("thunder", own),
        *others_slow([("thunder", others)], exhaustive=True),
    ]
    return pytest.mark.parametrize(("compiler", "functions"), cases, ids=[inner, "thunder", "thunder-others"])


def compiled(compiler, functions):
    """Return (the functions in one graph, its report's routers); Thunder needs a grouped GEMM to rewrite anything."""

    def together(logits):
        return [function(each) for function, each in zip(functions, logits, strict=True)]

    if compiler != "thunder":
        fast = compile_by(compiler, together)
        return fast, lambda: rewrite_report(fast).routers

    def beside_a_gemm(logits, rows, weight, offsets):
        return *together(logits), torch._grouped_mm(rows, weight.mT, offsets)

    fast = thunder.jit(beside_a_gemm, executors=[moe_executor])
    gemm = (torch.randn(4, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), torch.tensor([2, 4], dtype=torch.int32))
    return lambda logits: fast(logits, *gemm)[:-1], lambda: rewrite_report(fast).routers


def dense(scores, ids):
    return torch.zeros(T, E).scatter(1, ids, scores.float())


@cases(FUSED, "aot_eager")
def test_a_written_router_with_its_gradient(compiler, functions):
    fast, report = compiled(compiler, functions)
    logits = [torch.randn(T, E, requires_grad=True) for _ in functions]
    results, factor = fast(logits), torch.randn(E)
    assert len(report()) == len(functions)
    for function, entry, given, (scores, ids) in zip(functions, report(), logits, results, strict=True):
        again = given.detach().requires_grad_()
        expected, expected_ids = function(again)
        assert (entry.decision, entry.experts, entry.top_k, entry.tokens) == ("moe_router", E, A, T), function
        assert relative_error(dense(scores, ids), dense(expected, expected_ids)) < 1e-6, function
        (gradient,) = torch.autograd.grad((scores * factor[ids]).sum(), given, retain_graph=True)
        (expected * factor[expected_ids]).sum().backward()
        assert relative_error(gradient, again.grad) < 1e-5, function


# A trace is functional: a tensor that is changed in place is another one.
_DIFFERENT = {mask_changed: None}


@cases(OTHERS, "eager")
def test_other_code_computes_what_it_says(compiler, functions):
    traced = compiler == "thunder"
    fast, report = compiled(compiler, functions)
    logits = [torch.randn(T, E, requires_grad=not traced) for _ in functions]
    for function, given, results in zip(functions, logits, fast(logits), strict=True):
        for actual, wanted in zip(results, function(given), strict=True):
            assert actual.requires_grad == wanted.requires_grad, function
            assert torch.equal(actual, wanted) or relative_error(actual, wanted) < 4e-3, function
    entries = iter(report())
    for function in functions:
        fused = _DIFFERENT.get(function, OTHERS[function]) if traced else OTHERS[function]
        if fused is not None:
            entry = next(entries)
            assert entry.decision == ("moe_router" if fused else "as written"), function
        if fused is False:
            assert re.search("in place|grad mode|chooses 3 of the 2|read elsewhere", entry.reason), function
    assert not list(entries)
