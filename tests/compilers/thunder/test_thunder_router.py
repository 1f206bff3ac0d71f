"""moe_router under Thunder: the operator with its gradient, a layer of transformers whose router runs it, and routers
written in torch's operations, which become it.
Called by pytest; judged by eager execution.
"""

import pytest
import torch
import written_routers
from oracle import relative_error
from written_routers import FUSED, OTHERS, A, E, T

from thunder_moe import RewriteWarning, moe_executor, moe_experts, quantize_, rewrite_report
from thunder_moe.formats.nvfp4 import quantize

pytest.importorskip("transformers")

import thunder
from tiny_models import tiny_model


def test_the_operator_and_its_gradient():
    def scores(logits, bias):
        scores, ids, *order = torch.ops.thunder_moe.moe_router(
            logits, bias, top_k=2, score="sigmoid", scale=2.0, scores_dtype=logits.dtype
        )
        return scores, ids, order[0]

    jitted = thunder.jit(scores, executors=[moe_executor])
    logits, bias = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True), torch.randn(8)
    with pytest.warns(UserWarning, match="rewrote no expert GEMM"):
        actual = jitted(logits, bias)
    again = logits.detach().requires_grad_()
    expected = scores(again, bias)
    grad = torch.randn(5, 2).bfloat16()
    actual[0].backward(grad)
    expected[0].backward(grad)
    for result, other in zip((*actual, logits.grad), (*expected, again.grad), strict=True):
        assert torch.equal(result, other)


def test_the_operator_with_a_linear_layer():
    def choose(hidden, weight):
        return torch.ops.thunder_moe.moe_linear_router(hidden, weight, top_k=2, logits_dtype=torch.float32)

    hidden, weight = torch.randn(5, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    with pytest.warns(UserWarning, match="rewrote no expert GEMM"):
        actual = thunder.jit(choose, executors=[moe_executor])(hidden, weight)
    for result, other in zip(actual, choose(hidden, weight), strict=True):
        assert torch.equal(result, other)
        assert result.dtype == other.dtype


def test_a_layer_of_transformers():
    model = quantize_(tiny_model("qwen3_moe"))
    layer = model.model.layers[0].mlp
    hidden = torch.randn(2, 3, 64)
    with torch.no_grad():
        jitted = thunder.jit(layer, executors=[moe_executor, *thunder.get_default_executors()])
        assert relative_error(jitted(hidden), layer(hidden)) < 1e-6
    trace = str(thunder.last_traces(jitted)[-1])
    assert "moe_router(" in trace
    assert "moe_route(" not in trace
    assert layer.experts.row_orders._last is None


UNTRACED = ("by_best_of_groups", "moonlight", "olmoe")  # by Thunder 0.2.6: .values, .indices, softmax(x, -1, dtype)


def jitted(function):
    """A function beside a grouped GEMM, compiled; without one nothing is rewritten."""

    def beside_a_gemm(logits, rows, weight, offsets):
        return *function(logits), torch._grouped_mm(rows, weight.mT, offsets)

    compiled = thunder.jit(beside_a_gemm, executors=[moe_executor])
    gemm = (torch.randn(4, 16).bfloat16(), torch.randn(2, 16, 16).bfloat16(), torch.tensor([2, 4], dtype=torch.int32))

    def run(logits):
        return compiled(logits, *gemm)[:-1]

    run.report = lambda: rewrite_report(compiled).routers
    return run


def dense(scores, ids):
    return torch.zeros(T, E).scatter(1, ids, scores.float())


@pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")
@pytest.mark.parametrize(
    "function", [each for each in FUSED if each.__name__ not in UNTRACED], ids=lambda function: function.__name__
)
def test_a_written_router_with_its_gradient(function):
    fast = jitted(function)
    logits = torch.randn(T, E, requires_grad=True)
    again = logits.detach().requires_grad_()
    (scores, ids), (expected, expected_ids) = fast(logits), function(again)
    (entry,) = fast.report()
    assert (entry.decision, entry.experts, entry.top_k, entry.tokens) == ("moe_router", E, A, T)
    assert relative_error(dense(scores, ids), dense(expected, expected_ids)) < 1e-6
    factor = torch.randn(E)
    (scores * factor[ids]).sum().backward()
    (expected * factor[expected_ids]).sum().backward()
    assert relative_error(logits.grad, again.grad) < 1e-5


# A trace is functional: a tensor that is changed in place is another one.
_DIFFERENT = {"mask_too": True, "mask_changed": None}


@pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")
@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_other_code_computes_what_it_says(function):
    fast = jitted(function)
    logits = torch.randn(T, E)
    for actual, wanted in zip(fast(logits), function(logits), strict=True):
        assert torch.equal(actual, wanted) or relative_error(actual, wanted) < 4e-3
    fused = _DIFFERENT.get(function.__name__, OTHERS[function])
    decisions = [entry.decision for entry in fast.report()]
    assert decisions == ([] if fused is None else ["moe_router" if fused else "as written"])


def test_experts_behind_it_take_its_order():
    gate_up, down = quantize(torch.randn(E, 64, 32)), quantize(torch.randn(E, 32, 32))

    def layer(x, router):
        scores, ids = written_routers.minimax(x @ router)
        return moe_experts(x, ids, scores, gate_up, down)

    compiled = thunder.jit(layer, executors=[moe_executor])
    x, router = torch.randn(T, 32), torch.randn(32, E)
    assert relative_error(compiled(x, router), layer(x, router)) < 1e-5
    trace = str(thunder.last_traces(compiled)[-1])
    assert "moe_router(" in trace
    assert "moe_route(" not in trace
    assert "moe_router" in str(rewrite_report(compiled))


def test_a_layer_of_llama4(moe, x):
    with torch.no_grad():
        compiled = thunder.jit(moe, executors=[moe_executor])
        assert relative_error(compiled(x), moe(x)) < 0.2  # 4-bit weights
    assert [entry.decision for entry in rewrite_report(compiled).routers] == ["moe_router"]
    assert "topk" not in str(thunder.last_traces(compiled)[-1])
