"""The torch.compile backend on routers written in torch's operations: the operators of the graph, and experts behind.
Called by pytest; judged by the same code in eager mode. ../test_written_routers.py has gradients and what is left.
"""

import pytest
import torch
import torch.nn.functional as F
from both_compilers import by_dynamo as compiled
from fast_cases import others_slow
from oracle import relative_error
from written_routers import FUSED, A, E, T, by_groups, qwen

from thunder_moe import RewriteWarning, moe_experts, rewrite_report
from thunder_moe.formats.nvfp4 import quantize

pytestmark = pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")


@pytest.fixture
def targets():
    """Return the names of what the inner compiler "listing" gets to see."""
    seen = []

    def listing(gm, inputs):
        nodes = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        for node in nodes:
            seen.append((str(node.target), dict(node.kwargs)))
            if "moe_experts" in str(node.target) and node.args[11:] == (None, None, None):
                seen.append(("thunder_moe.moe_route.in_the_experts", {}))
        return gm

    torch._dynamo.register_backend(listing, name="listing")
    yield seen
    del torch._dynamo.backends.registry._COMPILER_FNS["listing"]


def routing(targets):
    """Return the routing operators among them."""
    return [name.split(".")[1] for name, _ in targets if name.startswith("thunder_moe.moe_rout")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_is_one_operator(dtype, targets):
    logits = torch.randn(T, E).to(dtype)
    fast = compiled(lambda logits: [function(logits) for function in FUSED], "listing")
    results, entries = fast(logits), rewrite_report(fast).routers
    around = ("getitem", "squeeze", "grad_enabled")  # of a bias of two dimensions, and of a choice without gradients
    operators = [target for target in targets if not any(other in target[0] for other in around)]
    for (function, wanted), (scores, ids), entry, (name, options) in zip(
        FUSED.items(), results, entries, operators, strict=True
    ):
        assert (entry.decision, entry.experts, entry.top_k) == ("moe_router", E, A), function
        assert name == "thunder_moe.moe_router.default"
        assert {key: options[key] for key in wanted} == wanted, function
        expected, expected_ids = function(logits)
        assert scores.dtype == expected.dtype, function
        ours, theirs = (
            torch.zeros(T, E).scatter(1, i, s.float()) for i, s in ((ids, scores), (expected_ids, expected))
        )
        assert relative_error(ours, theirs) < (1e-6 if scores.dtype == torch.float32 else 4e-3), function


@pytest.mark.parametrize("function", [qwen, by_groups], ids=lambda function: function.__name__)
@pytest.mark.parametrize("inner", ["aot_eager", *others_slow(["inductor"], exhaustive=True)])
def test_varying_tokens(function, inner):
    gate = torch.nn.Linear(16, E)

    def layer(x):
        return function(gate(x))

    fast = compiled(layer, inner, dynamic=True)
    for tokens in (5, 9):
        x = torch.randn(tokens, 16)
        (scores, ids), (expected, expected_ids) = fast(x), layer(x)
        order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
        assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
        assert relative_error(scores.gather(1, order), expected.gather(1, expected_order)) < 1e-5
    assert rewrite_report(fast).routers[0].tokens is None
    assert "moe_router" in str(rewrite_report(fast))


def test_a_choice_by_bits_stays():
    """Bits of negative numbers, taken for integers, are in the other order."""

    def by_bits(logits):
        scores = logits.sigmoid()
        ids = (scores - torch.linspace(2, 3, E)).view(torch.int32).topk(A, dim=-1)[1]
        return scores.gather(1, ids), ids

    logits, fast = torch.randn(T, E), compiled(by_bits)
    for result, expected in zip(fast(logits), by_bits(logits), strict=True):
        assert torch.equal(result, expected)
    assert not rewrite_report(fast).routers


def test_too_many_experts_stay():
    fast = compiled(lambda logits: F.softmax(logits, -1).topk(2))
    fast(torch.randn(2, 600))
    (entry,) = rewrite_report(fast).routers
    assert (entry.decision, entry.reason) == ("as written", "no kernel serves more than 512 experts")


def test_experts_behind_it_take_its_order(targets):
    gate_up, down = quantize(torch.randn(E, 64, 32)), quantize(torch.randn(E, 32, 32))

    def layer(x, router):
        scores, ids = qwen(x @ router)
        return moe_experts(x, ids, scores, gate_up, down)

    x, router = torch.randn(T, 32), torch.randn(32, E)
    fast = compiled(layer, "listing")
    assert relative_error(fast(x, router), layer(x, router)) < 1e-5
    assert routing(targets) == ["moe_router"]


def test_gathered_products_take_its_order(targets):
    """transformers decodes by batched products; their ids are the router's, reshaped and clamped."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up = torch.nn.Parameter(torch.randn(E, 64, 32).bfloat16(), requires_grad=False)
            self.down = torch.nn.Parameter(torch.randn(E, 32, 32).bfloat16(), requires_grad=False)

        def forward(self, x, router):
            scores, ids = qwen(x @ router)
            flat = ids.reshape(-1).clamp(0, E - 1)
            rows = x.repeat_interleave(A, 0)
            gate, up = torch.bmm(self.gate_up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
            rows = torch.bmm(self.down[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
            return (rows * scores.reshape(-1, 1)).view(-1, A, 32).sum(1)

    x, router, layer = torch.randn(T, 32).bfloat16(), torch.randn(32, E).bfloat16(), Layer()
    with torch.no_grad():
        fast = compiled(layer, "listing")
        assert relative_error(fast(x, router), layer(x, router)) < 0.2  # 4-bit weights
    assert routing(targets) == ["moe_router"]
    assert "thunder_moe.f16a_nvfp4weight_grouped_mm_combine.default" in [name for name, _ in targets]


def test_changed_ids_are_sorted(targets):
    gate_up, down = quantize(torch.randn(E, 64, 32)), quantize(torch.randn(E, 32, 32))

    def layer(x, router):
        scores, ids = qwen(x @ router)
        ids.add_(1).remainder_(E)
        return moe_experts(x, ids, scores, gate_up, down)

    x, router = torch.randn(T, 32), torch.randn(32, E)
    fast = compiled(layer, "listing")
    assert relative_error(fast(x, router), layer(x, router)) < 1e-5
    assert routing(targets) == ["moe_router", "moe_route"]


def test_a_router_that_divides_in_place_leaves_nothing_behind(targets):
    """Mixtral's, whose scores experts read through a view: of the operator's result, not of what is divided."""

    def layer(logits):
        scores, ids = torch.softmax(logits, -1).topk(A, -1)
        scores /= scores.sum(-1, keepdim=True)
        return scores.reshape(-1)[ids.reshape(-1).argsort()]

    logits = torch.randn(T, E)
    fast = compiled(layer, "listing")
    assert relative_error(fast(logits), layer(logits)) < 1e-5
    assert routing(targets) == ["moe_router"]
    assert not [name for name, _ in targets if "topk" in name or "idiv" in name or "itruediv" in name]


def test_experts_of_mixtral_take_its_order(targets):
    """Their call of sort is gone with the layer that one operator replaces: it has changed nothing."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    model = tiny_model("mixtral", torch.bfloat16).requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    layer, x = model.model.layers[0].mlp, torch.randn(2, 9, 64).bfloat16()
    fast = compiled(layer, "listing")
    assert relative_error(fast(x), layer(x)) < 0.25  # 4-bit weights
    assert routing(targets) == ["moe_router"]
