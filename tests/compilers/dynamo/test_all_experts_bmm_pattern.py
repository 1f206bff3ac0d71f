"""Experts that run on all tokens, as transformers' Llama 4 does: rewritten to routed ones by the torch.compile backend,
or declined where another result could come of it. Called by pytest; judged by the module itself in fp32.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from both_compilers import by_dynamo as compiled
from both_compilers import decisions
from fast_cases import others_slow
from oracle import relative_error
from torch import nn

from thunder_moe import RewriteWarning, rewrite_report
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.kernels import select

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 32


class Dense(nn.Module):
    """The experts and the router of transformers' Llama 4, in steps that a test can replace."""

    def __init__(self, top_k=2, intermediate=INTERMEDIATE, **steps):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * intermediate) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, intermediate, HIDDEN) * intermediate**-0.5)
        for name, step in steps.items():
            setattr(self, name, step.__get__(self))
        self.to(BF16).requires_grad_(False)

    def scores(self, logits):
        values, indices = torch.topk(logits, self.top_k, dim=1)
        scattered = torch.full_like(logits, float("-inf")).scatter_(1, indices, values)
        return torch.sigmoid(scattered.float()).to(scattered.dtype)

    def rows(self, x, scores):
        return x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)

    def activate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return up * F.silu(gate)

    def total(self, y):
        return y.view(-1, HIDDEN).reshape(EXPERTS, -1, HIDDEN).sum(dim=0)

    def forward(self, x):
        logits = self.router(x)
        rows = self.rows(x, self.scores(logits)).view(EXPERTS, -1, HIDDEN)
        y = torch.bmm(self.activate(torch.bmm(rows, self.gate_up_proj)), self.down_proj)
        return self.total(y), logits


class Fixed(nn.Module):
    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


def decoded(module, dtype=torch.float32):
    module = copy.deepcopy(module).to(dtype)
    for weight in (module.gate_up_proj, module.down_proj):
        weight.data.copy_(dequantize(quantize(weight.mT.to(BF16)), dtype).mT)
    return module


def rows(tokens=9):
    return torch.randn(tokens, HIDDEN, dtype=BF16)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", *others_slow(["inductor"], exhaustive=True)])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.covering(1)
def test_rewrites(inner, top_k):
    module, x = Dense(top_k), rows()
    function = compiled(module, inner)
    out, logits = function(x)
    exact = decoded(module)
    exact.router = Fixed(logits.float())  # or rounding could turn a choice
    assert relative_error(out, exact(x.float())[0]) < 0.01
    assert torch.equal(logits, module(x)[1])
    assert decisions(function) == ["nvfp4 + swiglu", "nvfp4"]
    assert [entry.gemm.weight for entry in rewrite_report(function)] == ["gate_up_proj", "down_proj"]


def test_weights_are_packed_in_the_layout_that_the_device_prefers(tiles):
    module, x = Dense(intermediate=64), rows()
    out = compiled(module)(x)[0]
    assert set(tiles) == {("cpu", 128, 64), ("cpu", 64, 64)}
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "preferred_layout", lambda *weight: "linear")
        assert torch.equal(compiled(module)(x)[0], out)


def test_one_block_behind_another():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Dense(), Dense()

        def forward(self, x):
            return self.second(self.first(x)[0])[0]

    module, x = Two(), rows()
    function = compiled(module)
    out = function(x)
    assert len(rewrite_report(function).rewritten) == 4
    between = compiled(module.first)(x)[0]
    assert torch.equal(out, compiled(module.second)(between)[0])


def test_no_batched_gemm_is_left():
    targets = []

    def spy(gm, inputs):
        targets.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    torch._dynamo.register_backend(spy, name="spy_dense_experts")
    function = compiled(Dense(), "spy_dense_experts")
    function(rows())
    assert not [target for target in targets if re.search("bmm|repeat|scatter|topk|sigmoid", target)]
    operators = [target for target in targets if "thunder_moe" in target]
    assert operators == ["thunder_moe.moe_router.default", "thunder_moe.f16a_nvfp4weight_moe_experts.default"]
    (router,) = rewrite_report(function).routers
    assert (router.decision, router.experts, router.top_k) == ("moe_router", EXPERTS, 2)
    assert all("one operator" in entry.reason for entry in rewrite_report(function))


def test_results_of_another_width():
    module = Dense(total=lambda self, y: y.view(EXPERTS, -1, 48).sum(dim=0))
    module.down_proj = nn.Parameter(torch.randn(EXPERTS, INTERMEDIATE, 48, dtype=BF16), requires_grad=False)
    function, x = compiled(module), rows()
    with pytest.warns(RewriteWarning, match="its results have 48 columns, its rows 64"):
        assert torch.equal(function(x)[0], module(x)[0])


def test_other_numbers_of_tokens_and_changed_weights():
    module = Dense()
    function = compiled(module, dynamic=True)
    for tokens in (9, 4, 1, 33):
        x = rows(tokens)
        assert relative_error(function(x)[0], decoded(module, BF16)(x)[0]) < 0.01
    with torch.no_grad():
        module.down_proj.mul_(3)
    assert relative_error(function(x)[0], decoded(module, BF16)(x)[0]) < 0.01


def test_gradients_reach_tokens_and_router():
    module, x = Dense(), rows()
    module.router.requires_grad_(True)
    grads = []
    for function in (compiled(module), decoded(module, BF16)):
        ours = x.clone().requires_grad_()
        owner = getattr(function, "_orig_mod", function)
        owner.router.weight.grad = None
        function(ours)[0].float().square().sum().backward()
        grads.append((ours.grad, owner.router.weight.grad))
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < 0.03


def other_scatter(self, logits):
    values, indices = logits.topk(self.top_k)
    scattered = torch.scatter(torch.full_like(logits, fill_value=float("-inf")), -1, indices, values)
    return scattered.sigmoid()


def other_rows(self, x, scores):
    return scores.t().reshape(-1, 1) * x.repeat((EXPERTS, 1))


def other_total(self, y):
    return torch.sum(y, 0)


def other_activation(self, gate_up):
    half = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :half]) * gate_up[..., half:]


def test_other_ways_to_write_it():
    steps = dict(scores=other_scatter, rows=other_rows, total=other_total, activate=other_activation)
    modules, x = [Dense(**{name: step}) for name, step in steps.items()], rows()
    function = compiled(lambda x: [module(x)[0] for module in modules], "eager")
    for name, out, module in zip(steps, function(x), modules, strict=True):
        assert relative_error(out, decoded(module, BF16)(x)[0]) < 0.01, name
    assert len(rewrite_report(function).rewritten) == 2 * len(steps)


def scatter_into_zeros(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=1)
    return torch.sigmoid(torch.full_like(logits, 0.0).scatter_(1, indices, values))  # 0.5 where it did not choose


def softmax(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=1)
    return torch.full_like(logits, float("-inf")).scatter_(1, indices, values).softmax(-1)


def no_top_k(self, logits):
    indices = logits.argsort(-1)[:, : self.top_k]
    values = logits.gather(1, indices)
    return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, indices, values))


def along_the_tokens(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=0)
    return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(0, indices, values))


def reduced(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=1)
    scattered = torch.full_like(logits, float("-inf"))
    return torch.sigmoid(scattered.scatter_(1, indices, values, reduce="add"))


def top_tokens(self, logits):
    values, indices = torch.topk(logits, dim=0, k=1)
    values, indices = values.expand_as(logits)[:, :1], indices.expand_as(logits)[:, :1]
    return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, indices, values))


def changed_later(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=1)
    scattered = torch.full_like(logits, float("-inf")).scatter_(1, indices, values)
    scattered.clamp_(min=-1.0)
    return torch.sigmoid(scattered)


def seen_elsewhere(self, logits):
    values, indices = torch.topk(logits, self.top_k, dim=1)
    full = torch.full_like(logits, float("-inf"))
    self.seen = full
    return torch.sigmoid(full.scatter_(1, indices, values))


def shifted(self, logits):
    return Dense.scores(self, logits) + 0.5


def interleaved(self, x, scores):
    return x.repeat_interleave(EXPERTS, 0) * scores.reshape(-1, 1)


def unscaled(self, x, scores):
    return x.repeat(EXPERTS, 1) + scores.transpose(0, 1).reshape(-1, 1)


def gelu(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return up * F.gelu(gate)


def biased(self, gate_up):
    gate, up = (gate_up + 1).chunk(2, dim=-1)
    return up * F.silu(gate)


def mean(self, y):
    return y.mean(0)


def over_tokens(self, y):
    return y.sum(1)


def largest(self, y):
    return y.sum(0) + y.amax(0)


DECLINED = [
    (dict(scores=scatter_into_zeros), "not scattered into -inf alone"),
    (dict(scores=softmax), "not a sigmoid, 0 at -inf"),
    (dict(scores=no_top_k), "do not come from a top-k"),
    (dict(scores=along_the_tokens), "not scattered along the experts"),
    (dict(scores=reduced), "not scattered along the experts"),
    (dict(scores=top_tokens), "do not come from a top-k"),
    (dict(scores=changed_later), "an intermediate may be changed in place by clamp_"),
    (dict(scores=seen_elsewhere), "not scattered into -inf alone"),
    (dict(scores=shifted), "not a sigmoid, 0 at -inf"),
    (dict(rows=interleaved), "its rows are not tokens times scores"),
    (dict(rows=unscaled), "its rows are not tokens times scores"),
    (dict(activate=gelu), "without a SwiGLU"),
    (dict(activate=biased), "without a SwiGLU"),
    (dict(total=mean), "not summed over the experts"),
    (dict(total=over_tokens), "not summed over the experts"),
    (dict(total=largest), "not summed over the experts"),
    (dict(intermediate=24), "down_proj: in_features 24 is not a multiple of 16"),
]


def test_declines_with_its_reason():
    modules, x = [Dense(**steps) for steps, _ in DECLINED], rows(EXPERTS)
    function = compiled(lambda x: [module(x) for module in modules], "eager")
    with pytest.warns(RewriteWarning, match="down_proj: in_features 24 is not a multiple of 16"):
        outs = function(x)
    entries = list(rewrite_report(function))
    assert len(entries) == 2 * len(DECLINED)
    for number, (module, out, (_, reason)) in enumerate(zip(modules, outs, DECLINED, strict=True)):
        torch.testing.assert_close(out, module(x), rtol=0, atol=0)
        for entry in entries[2 * number :][:2]:
            assert entry.decision == "16-bit"
            assert reason in entry.reason


def test_trains_as_it_is():
    module, x = Dense().requires_grad_(True), rows()
    function = compiled(module)
    with pytest.warns(RewriteWarning, match="gate_up_proj: the weight is trainable"):
        function(x)[0].float().square().sum().backward()
    assert module.gate_up_proj.grad.norm() > 0
    with torch.no_grad():
        assert relative_error(function(x)[0], decoded(module, BF16)(x)[0]) < 0.01


class ChangedTokens(Dense):
    def rows(self, x, scores):
        repeated = x.repeat(EXPERTS, 1)
        x.add_(1)
        return repeated * scores.transpose(0, 1).reshape(-1, 1)


class LateChangedTokens(Dense):
    def forward(self, x):
        self.x = x
        return super().forward(x)

    def total(self, y):
        self.x.add_(1)
        return super().total(y)


@pytest.mark.parametrize("kind", [ChangedTokens, LateChangedTokens])
def test_tokens_changed_in_place_are_not_taken_for_the_old_ones(kind):
    module, x = kind(), rows()
    with pytest.warns(RewriteWarning, match="the tokens may be changed in place by add_"):
        out = compiled(module, "eager")(x.clone())
    assert torch.equal(out[0], module(x.clone())[0])


def test_experts_changed_in_place_are_not_taken_for_a_top_k():
    def scores(self, logits):
        values, indices = torch.topk(logits, self.top_k, dim=1)
        indices.zero_()  # now the values meet at one expert, where the last one counts
        return torch.sigmoid(torch.full_like(logits, float("-inf")).scatter_(1, indices, values))

    module, x = Dense(scores=scores), rows()
    with pytest.warns(RewriteWarning, match="the experts may be changed in place by zero_"):
        compiled(module, "eager")(x)


def test_a_batched_gemm_that_is_no_expert_is_reported():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 16, dtype=BF16), requires_grad=False)

        def forward(self, x):
            return torch.bmm(x, self.weight)

    function, x = compiled(Heads()), torch.randn(4, 3, 16, dtype=BF16)
    with pytest.warns(RewriteWarning, match="without a SwiGLU"):
        function(x)
    (entry,) = rewrite_report(function)
    assert (entry.gemm.weight, entry.decision) == ("weight", "16-bit")


def test_tokens_that_change_before_the_backward_reads_them_again():
    class Later(Dense):
        def forward(self, x):
            out = super().forward(x)
            x.add_(1)
            return out

    module, leaf = Later(), rows().requires_grad_()
    with pytest.warns(RewriteWarning, match="the tokens may be changed in place by add_ after sum"):
        compiled(module, "eager")(leaf * 1)[0].float().sum().backward()
    ours, leaf.grad = leaf.grad, None
    module(leaf * 1)[0].float().sum().backward()
    assert relative_error(ours, leaf.grad) < 0.01
