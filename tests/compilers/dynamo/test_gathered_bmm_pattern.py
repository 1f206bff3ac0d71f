"""Batched products with the weights of each row's expert, as transformers' "batched_mm": rewritten by the torch.compile
backend, or declined where another result could come of it. Called by pytest; judged by a loop over the rows in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from both_compilers import by_dynamo as compiled
from both_compilers import decisions
from oracle import relative_error
from torch import nn

from thunder_moe import RewriteWarning, rewrite_report
from thunder_moe.formats.nvfp4 import dequantize, quantize

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 64, 32, 2
FUSED, APART = ["nvfp4 + swiglu", "nvfp4"], ["nvfp4", "nvfp4"]


class Selected(nn.Module):
    """The router and the experts, in steps that a test can replace."""

    def __init__(self, transposed=False, biases=False, **steps):
        super().__init__()
        self.transposed = transposed
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        for name, (n, k) in (("gate_up", (2 * INTERMEDIATE, HIDDEN)), ("down", (HIDDEN, INTERMEDIATE))):
            shape = (EXPERTS, k, n) if transposed else (EXPERTS, n, k)
            setattr(self, name, nn.Parameter(torch.randn(shape) * k**-0.5))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, n)) if biases else None)
        for name, step in steps.items():
            setattr(self, name, step.__get__(self))
        self.to(BF16).requires_grad_(False)

    def ids(self, logits):
        return torch.topk(logits, TOP_K, dim=-1)[1].reshape(-1)

    def product(self, rows, name, ids):
        selected = getattr(self, name)[ids]
        if self.transposed:
            out = torch.bmm(rows.unsqueeze(1), selected).squeeze(1)
        else:
            out = torch.bmm(selected, rows.unsqueeze(-1)).squeeze(-1)
        bias = getattr(self, f"{name}_bias")
        if bias is not None:
            out.add_(bias[ids])
        return out

    def activate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def experts(self, rows, ids):
        return self.product(self.activate(self.product(rows, "gate_up", ids)), "down", ids)

    def forward(self, x):
        ids = self.ids(self.router(x))
        return self.experts(x.repeat_interleave(TOP_K, dim=0), ids).view(-1, TOP_K, HIDDEN).sum(1)


def expected(module, x, ids=None):
    """Compute with the NVFP4 values of its weights, row by row."""
    weights = {}
    for name in ("gate_up", "down"):
        weight = getattr(module, name).mT if module.transposed else getattr(module, name)
        weights[name] = dequantize(quantize(weight.contiguous())).double()
    ids = torch.topk(module.router(x), TOP_K, dim=-1)[1] if ids is None else ids
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, experts in enumerate(ids):
        for expert in experts:
            y = weights["gate_up"][expert] @ x[token].double()
            y = y if module.gate_up_bias is None else y + module.gate_up_bias[expert].double()
            y = weights["down"][expert] @ (F.silu(y[:INTERMEDIATE]) * y[INTERMEDIATE:])
            out[token] += y if module.down_bias is None else y + module.down_bias[expert].double()
    return out


@pytest.mark.covering(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rewrites(transposed, biases, tokens):
    module, x = Selected(transposed, biases), torch.randn(tokens, HIDDEN, dtype=BF16)
    function = compiled(module)
    assert relative_error(function(x), expected(module, x)) < 0.01
    assert decisions(function) == (APART if biases else FUSED)
    sizes = [
        (entry.gemm.experts, entry.gemm.out_features, entry.gemm.in_features) for entry in rewrite_report(function)
    ]
    assert sizes == [(EXPERTS, 2 * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)]


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_on_cuda(transposed, biases, tokens):
    module, x = Selected(transposed, biases), torch.randn(tokens, HIDDEN, dtype=BF16)
    function = torch.compile(module.cuda(), backend="thunder_moe", fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            out = function(x.cuda())
        # the CPU's router could choose otherwise at ties
        ids = torch.topk(module.router(x.cuda()), TOP_K, dim=-1)[1].cpu()
    assert relative_error(out.cpu(), expected(module.cpu(), x, ids)) < 0.01
    assert decisions(function) == (APART if biases else FUSED)


def test_one_graph_for_all_token_counts():
    module = Selected()
    function = compiled(module, dynamic=True)
    for tokens in (3, 9, 17):
        x = torch.randn(tokens, HIDDEN, dtype=BF16)
        assert relative_error(function(x), expected(module, x)) < 0.01
    assert decisions(function) == FUSED


def clamped(self, logits):
    return torch.topk(logits, TOP_K, dim=-1)[1].reshape(-1).clamp(0, EXPERTS - 1)


def to_tensor(self, logits):
    return torch.topk(logits, TOP_K, dim=-1).indices.flatten().contiguous()


@pytest.mark.parametrize("ids", [clamped, to_tensor])
def test_ids(ids):
    module, x = Selected(ids=ids), torch.randn(4, HIDDEN, dtype=BF16)
    function = compiled(module)
    assert relative_error(function(x), expected(module, x)) < 0.01
    assert decisions(function) == FUSED


def read_twice(self, rows, ids):
    hidden = self.activate(self.product(rows, "gate_up", ids))
    return self.product(hidden, "down", ids) + 0 * hidden.sum()


def other_ids(self, rows, ids):
    hidden = self.activate(self.product(rows, "gate_up", ids))
    return self.product(hidden, "down", ids.reshape(-1))


def changed_between(self, rows, ids):
    hidden = self.product(rows, "gate_up", ids)
    rows.mul_(2)
    return self.product(self.activate(hidden), "down", ids)


@pytest.mark.parametrize("experts", [read_twice, other_ids, changed_between])
def test_rewrites_without_the_swiglu(experts):
    module, x = Selected(experts=experts), torch.randn(4, HIDDEN, dtype=BF16)
    function = compiled(module, "eager")
    assert relative_error(function(x), expected(module, x)) < 0.01
    assert decisions(function) == APART


def negative(self, logits):
    return torch.topk(logits, TOP_K, dim=-1)[1].reshape(-1) - EXPERTS


def of_some(self, logits):
    return torch.topk(logits[:, :4], TOP_K, dim=-1)[1].reshape(-1)


def given(self, logits):
    return torch.arange(logits.shape[0] * TOP_K) % EXPERTS


def over_tokens(self, logits):
    return torch.topk(logits, TOP_K, dim=0)[1].reshape(-1)


def changed_in_place(self, logits):
    return torch.topk(logits, TOP_K, dim=-1)[1].sub_(EXPERTS).reshape(-1)


def changed_through_a_view(self, logits):
    ids = torch.topk(logits, TOP_K, dim=-1)[1]
    flat = ids.view(-1)
    ids[:, 1:] -= EXPERTS
    return flat


def clamped_above(self, logits):
    return (torch.topk(logits, TOP_K, dim=-1)[1].reshape(-1) - 2).clamp(max=EXPERTS - 1)


@pytest.mark.parametrize(
    "ids", [negative, of_some, given, over_tokens, changed_in_place, changed_through_a_view, clamped_above]
)
def test_leaves_ids_that_are_no_top_k(ids):
    module, x = Selected(ids=ids), torch.randn(EXPERTS, HIDDEN, dtype=BF16)
    function = compiled(module, "eager")
    with pytest.warns(RewriteWarning, match="each row's expert, which no top-k over all experts chose"):
        out = function(x)
    assert torch.equal(out, module(x))
    assert decisions(function) == ["16-bit", "16-bit"]


def test_leaves_rows_that_change_before_the_product():
    def product(self, rows, name, ids):
        column = rows.unsqueeze(-1)
        selected = getattr(self, name)[ids]
        rows.add_(1)
        return torch.bmm(selected, column).squeeze(-1)

    module, x = Selected(product=product), torch.randn(4, HIDDEN, dtype=BF16)
    function = compiled(module)
    with pytest.warns(RewriteWarning, match="may be changed in place by add_"):
        out = function(x)
    assert torch.equal(out, module(x))


def test_weights_that_train_stay():
    module, x = Selected(), torch.randn(4, HIDDEN, dtype=BF16)
    module.down.requires_grad_(True)
    function = compiled(module)
    out = function(x)
    assert decisions(function) == ["nvfp4", "16-bit"]
    out.float().square().sum().backward()
    assert module.down.grad.abs().sum() > 0


def test_gradient_of_the_tokens():
    module, x = Selected(), torch.randn(4, HIDDEN, dtype=BF16)
    gradients = []
    for weights in (module, Selected()):
        if weights is not module:
            weights.load_state_dict(module.state_dict())
            for name in ("gate_up", "down"):
                getattr(weights, name).copy_(dequantize(quantize(getattr(module, name))))
        tokens = x.clone().requires_grad_(True)
        function = compiled(weights) if weights is module else weights
        (gradient,) = torch.autograd.grad(function(tokens).float().square().sum(), tokens)
        gradients.append(gradient)
    assert relative_error(*gradients) < 0.02
