"""Routers written in torch's operations under both compilers: which become moe_router, their numbers and gradients.
Called by pytest; judged by the same code in eager mode, and by the report. written_routers.py has the routers.
"""

import re

import pytest
import thunder
import torch
from both_compilers import compile_by
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
    for function in functions:
        yield pytest.param(f"dynamo-{inner}", function, id=f"dynamo-{function.__name__}")
        if function.__name__ not in UNTRACED:
            marks = () if function in OF_THUNDER else (pytest.mark.slow, pytest.mark.exhaustive)
            yield pytest.param("thunder", function, id=f"thunder-{function.__name__}", marks=marks)


def compiled(compiler, function):
    """Return (the compiled function, its report's routers); Thunder needs a grouped GEMM to rewrite anything."""
    if compiler != "thunder":
        fast = compile_by(compiler, function)
        return fast, lambda: rewrite_report(fast).routers

    def beside_a_gemm(logits, rows, weight, offsets):
        return *function(logits), torch._grouped_mm(rows, weight.mT, offsets)

    fast = thunder.jit(beside_a_gemm, executors=[moe_executor])
    gemm = (torch.randn(4, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), torch.tensor([2, 4], dtype=torch.int32))
    return lambda logits: fast(logits, *gemm)[:-1], lambda: rewrite_report(fast).routers


def dense(scores, ids):
    return torch.zeros(T, E).scatter(1, ids, scores.float())


@pytest.mark.parametrize(("compiler", "function"), list(cases(FUSED, "aot_eager")))
def test_a_written_router_with_its_gradient(compiler, function):
    fast, report = compiled(compiler, function)
    logits = torch.randn(T, E, requires_grad=True)
    again = logits.detach().requires_grad_()
    (scores, ids), (expected, expected_ids) = fast(logits), function(again)
    (entry,) = report()
    assert (entry.decision, entry.experts, entry.top_k, entry.tokens) == ("moe_router", E, A, T)
    assert relative_error(dense(scores, ids), dense(expected, expected_ids)) < 1e-6
    factor = torch.randn(E)
    (scores * factor[ids]).sum().backward()
    (expected * factor[expected_ids]).sum().backward()
    assert relative_error(logits.grad, again.grad) < 1e-5


# A trace is functional: a tensor that is changed in place is another one.
_DIFFERENT = {mask_changed: None}


@pytest.mark.parametrize(("compiler", "function"), list(cases(OTHERS, "eager")))
def test_other_code_computes_what_it_says(compiler, function):
    traced = compiler == "thunder"
    fast, report = compiled(compiler, function)
    logits = torch.randn(T, E, requires_grad=not traced)
    for actual, wanted in zip(fast(logits), function(logits), strict=True):
        assert actual.requires_grad == wanted.requires_grad
        assert torch.equal(actual, wanted) or relative_error(actual, wanted) < 4e-3
    fused = _DIFFERENT.get(function, OTHERS[function]) if traced else OTHERS[function]
    assert [entry.decision for entry in report()] == (
        [] if fused is None else ["moe_router" if fused else "as written"]
    )
    if fused is False:
        assert re.search("in place|grad mode|chooses 3 of the 2|read elsewhere", report()[0].reason)
