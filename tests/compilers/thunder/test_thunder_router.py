"""moe_router under Thunder: the operator with its gradient, a layer of transformers whose router runs it, and experts
behind a router written in torch's operations (../test_written_routers.py has all of these).
Called by pytest; judged by eager execution.
"""

import pytest
import torch
import written_routers
from oracle import relative_error
from written_routers import E, T

from thunder_moe import moe_executor, moe_experts, quantize_, rewrite_report
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


@pytest.mark.slow
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
