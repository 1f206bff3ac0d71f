"""Layers whose experts become one operator under the torch.compile backend: grouped and batched products with routing,
gather and weighted sum in torch's operations; and code that nearly is one.
Called by pytest; judged by the same module with the decoded weights, eagerly.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from oracle import relative_error
from torch import nn

from thunder_moe import Llama4MoE, Llama4MoEConfig, RewriteWarning, rewrite_report
from thunder_moe.formats.nvfp4 import dequantize, quantize

T, A, E, H, I = 7, 3, 8, 32, 48  # noqa: E741
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings(f"ignore::{RewriteWarning.__module__}.{RewriteWarning.__qualname__}")


class Experts(nn.Module):
    """A router's and experts' weights, frozen in bf16; `steps` replace methods."""

    def __init__(self, **steps):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.down = nn.Parameter(torch.randn(E, H, I) * I**-0.5)
        for name, step in steps.items():
            setattr(self, name, step.__get__(self))
        self.to(BF16).requires_grad_(False)


class Grouped(Experts):
    """Experts as transformers' "grouped_mm" runs them, in steps that a test can replace."""

    def route(self, x):
        values, ids = F.softmax(self.gate(x), -1, dtype=torch.float32).topk(A, -1)
        return (values / values.sum(-1, keepdim=True)).to(x.dtype), ids

    def order(self, ids):
        return torch.sort(ids)[1]

    def offsets(self, ids):
        counts = torch.histc(torch.sort(ids)[0].float(), bins=E, min=0, max=E - 1)
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def rows(self, x, order, weights):
        return x[order // A]

    def activate(self, both):
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def weigh(self, y, order, weights):
        return y * weights[order].unsqueeze(-1)

    def inverse(self, order):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        return inverse

    def total(self, y, inverse, weights):
        return y[inverse].view(-1, A, H).sum(dim=1)

    def forward(self, x):
        weights, ids = self.route(x)
        weights, ids = weights.reshape(-1), ids.reshape(-1)
        order, offsets = self.order(ids), self.offsets(ids)
        rows = self.rows(x, order, weights)
        y = self.activate(torch._grouped_mm(rows, self.gate_up.mT, offs=offsets))
        y = self.weigh(torch._grouped_mm(y, self.down.mT, offs=offsets), order, weights)
        return self.total(y, self.inverse(order), weights).to(x.dtype)


class Batched(Grouped):
    """Experts as transformers' "batched_mm" runs them."""

    def forward(self, x):
        weights, ids = self.route(x)
        weights, ids = weights.reshape(-1), ids.reshape(-1)
        y = torch.bmm(self.gate_up[ids], x.repeat_interleave(A, dim=0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.down[ids], self.activate(y).unsqueeze(-1)).squeeze(-1)
        return (y * weights.unsqueeze(-1)).view(-1, A, H).sum(dim=1).to(x.dtype)


def decoded(module):
    module = copy.deepcopy(module)
    for weight in (module.gate_up, module.down):
        weight.data.copy_(dequantize(quantize(weight.data), BF16))
    return module


@pytest.fixture
def operators():
    """Return the names of the package's operators that the inner compiler "listing" sees."""
    seen = []

    def listing(gm, inputs):
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        seen.extend(str(node.target).split(".")[1] for node in nodes if "thunder_moe." in str(node.target))
        return gm

    torch._dynamo.register_backend(listing, name="listing")
    yield seen
    del torch._dynamo.backends.registry._COMPILER_FNS["listing"]


def compiled(module, inner="listing", **options):
    return torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner}, **options)


WHOLE = ["moe_router", "f16a_nvfp4weight_moe_experts"]
_FP32 = dict(route=lambda self, x: F.softmax(self.gate(x), -1, dtype=torch.float32).topk(A, -1))
FORMS = {
    "transformers": {},
    "float32 weights": _FP32,
    "stable argsort": dict(order=lambda self, ids: torch.argsort(ids, stable=True)),
    "argsort inverse": dict(inverse=lambda self, order: order.argsort()),
    "scatter inverse": dict(
        inverse=lambda self, order: torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0]))
    ),
    "bincount": dict(offsets=lambda self, ids: torch.bincount(ids, minlength=E).cumsum(0, dtype=torch.int32)),
    "counts of int32": dict(
        offsets=lambda self, ids: torch.cumsum(
            torch.zeros(E, dtype=torch.int32).scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32)),
            0,
            dtype=torch.int32,
        )
    ),
    "index_select": dict(rows=lambda self, x, order, weights: x.index_select(0, order // A)),
    "keywords": dict(
        order=lambda self, ids: torch.sort(input=ids, dim=0, descending=False)[1],
        offsets=lambda self, ids: torch.cumsum(torch.bincount(input=ids, minlength=E), dim=0, dtype=torch.int32),
        rows=lambda self, x, order, weights: torch.index_select(
            input=x, dim=0, index=torch.floor_divide(input=order, other=A)
        ),
        activate=lambda self, both: torch.mul(
            input=F.silu(input=torch.chunk(input=both, chunks=2, dim=-1)[0]), other=both[..., I:]
        ),
        weigh=lambda self, y, order, weights: torch.mul(input=torch.unsqueeze(input=weights[order], dim=1), other=y),
        total=lambda self, y, inverse, weights: torch.sum(input=y[inverse].view(-1, A, H), dim=1),
    ),
    "weights on input": dict(
        rows=lambda self, x, order, weights: x[order // A] * weights[order][:, None],
        weigh=lambda self, y, order, weights: y,
    ),
    "weights behind the inverse": dict(
        weigh=lambda self, y, order, weights: y,
        total=lambda self, y, inverse, weights: (y[inverse] * weights[:, None]).view(-1, A, H).sum(1),
    ),
}


def together(modules):
    """Compile modules into one graph, each with an input of its own; check that all do what they do eagerly."""
    function = compiled(lambda inputs: {name: module(inputs[name]) for name, module in modules.items()})
    ours, theirs = ({name: torch.ones(T, H, dtype=BF16) for name in modules} for _ in range(2))
    for name in modules:
        theirs[name].copy_(ours[name].normal_())
    outs = function(ours)
    for name, module in modules.items():
        assert relative_error(outs[name], decoded(module)(theirs[name])) < 1e-2, name
        assert torch.equal(ours[name], theirs[name]), name
    return function


@pytest.mark.parametrize("kind", [Grouped, Batched])
def test_the_experts_of_a_layer_are_one_operator(kind, operators):
    """The other forms are of grouped GEMMs."""
    modules = {name: kind(**steps) for name, steps in FORMS.items() if kind is Grouped or not set(steps) - {"route"}}
    fast = together(modules)
    assert operators == WHOLE * len(modules)
    assert [entry.decision for entry in rewrite_report(fast)] == ["nvfp4 + swiglu", "nvfp4"] * len(modules)
    assert all("one operator" in entry.reason for entry in rewrite_report(fast))


@pytest.mark.parametrize("kind", [Grouped, *others_slow([Batched], exhaustive=True)])
def test_gradients_and_varying_tokens(kind):
    module = kind()
    module.gate.requires_grad_()
    other = decoded(module)
    fast = compiled(module, "aot_eager", dynamic=True)
    for tokens in (5, 9):
        inputs = [torch.randn(tokens, H, dtype=BF16).requires_grad_()]
        inputs.append(inputs[0].detach().requires_grad_())
        grad = torch.randn(tokens, H).to(BF16)
        for run, x in zip((fast, other), inputs, strict=True):
            run(x).backward(grad)
        assert relative_error(inputs[0].grad, inputs[1].grad) < 2e-2
        assert relative_error(module.gate.weight.grad, other.gate.weight.grad) < 2e-2
    assert all("one operator" in entry.reason for entry in rewrite_report(fast))


def test_llama4_moe(operators):
    for top_k in (1, 2):
        module = Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=top_k), dtype=BF16).requires_grad_(False)
        fast = compiled(module)
        fast(torch.randn(2, 3, 64, dtype=BF16))
        assert operators == WHOLE
        operators.clear()


def other_ids(self, ids):
    return Grouped.offsets(self, ids.flip(0))


def changed_tokens(self, x, order, weights):
    rows = x[order // A]
    x.mul_(2.0)
    return rows


def changed_weights(self, y, order, weights):
    out = y * weights[order].unsqueeze(-1)
    weights.zero_()
    return out


def changed_inverse(self, order):
    inverse = Grouped.inverse(self, order)
    inverse[:2] = inverse[:2].flip(0)
    return inverse


def read_twice(self, y, order, weights):
    return y * weights[order].unsqueeze(-1) + y


def without_gradients(self, y, inverse, weights):
    with torch.no_grad():
        return Grouped.total(self, y, inverse, weights)


OTHERS = {
    "offsets of other ids": dict(offsets=lambda self, ids: Grouped.offsets(self, (ids + 1) % E)),
    "order of other ids": dict(order=lambda self, ids: torch.sort(ids.flip(0))[1]),
    "descending": dict(order=lambda self, ids: torch.sort(ids, descending=True)[1]),
    "order for inverse": dict(inverse=lambda self, order: order + 0),
    "no inverse": dict(total=lambda self, y, inverse, weights: y.view(-1, A, H).sum(1)),
    "weights not in order": dict(weigh=lambda self, y, order, weights: y * weights.unsqueeze(-1)),
    "weights twice": dict(
        rows=lambda self, x, order, weights: x[order // A] * weights[order][:, None],
    ),
    "other tokens": dict(rows=lambda self, x, order, weights: x[order // (A + 1)]),
    "a mean": dict(total=lambda self, y, inverse, weights: y[inverse].view(-1, A, H).mean(1)),
    "a sum of others": dict(total=lambda self, y, inverse, weights: y[inverse].view(A, -1, H).sum(0)),
    "fewer bins": dict(
        offsets=lambda self, ids: F.pad(
            torch.cumsum(torch.histc(ids.float(), bins=E - 1, min=0, max=E - 2), 0, dtype=torch.int32), (0, 1), value=21
        )
    ),
    "numbers in another order": dict(
        inverse=lambda self, order: torch.zeros_like(order).scatter(0, order, torch.arange(order.shape[0] - 1, -1, -1))
    ),
    "tokens changed": dict(rows=changed_tokens),
    "weights changed": dict(weigh=changed_weights),
    "inverse changed": dict(inverse=changed_inverse),
    "results read twice": dict(weigh=read_twice),
    "ids of no top-k": dict(
        route=lambda self, x: (self.gate(x)[:, :A].sigmoid(), self.gate(x)[:, :A].abs().long() % E)
    ),
}


def test_other_code_computes_what_it_says(operators):
    fast = together({name: Grouped(**steps) for name, steps in OTHERS.items()})
    assert len(rewrite_report(fast)) == 2 * len(OTHERS)
    assert "f16a_nvfp4weight_moe_experts" not in operators
    assert all(
        "one operator" not in entry.reason.replace("SwiGLU in one operator", "") for entry in rewrite_report(fast)
    )


def test_a_change_of_grad_mode_is_kept(operators):
    module, x = Grouped(total=without_gradients), torch.randn(T, H, dtype=BF16, requires_grad=True)
    assert not compiled(module)(x).requires_grad
    assert "f16a_nvfp4weight_moe_experts" not in operators
