"""Tests that moe_executor does not change programs that write to tensors, switch the grad mode, or train out of its
sight.
Called by pytest; judged by the same program run eagerly, with weights that NVFP4 holds exactly.
"""

import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from differential.runtime import exact
from fast_cases import others_slow
from oracle import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_moe import RewriteWarning, moe_executor, rewrite_report
from thunder_moe.formats.nvfp4 import dequantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
FUSED, SINGLE, NONE = "nvfp4 + swiglu", "nvfp4", "16-bit"


def g(x, w, o):
    return torch._grouped_mm(x, w.mT, offs=o)


class Experts(nn.Module):
    """Two weights (E, N, K), and a forward that is given."""

    def __init__(self, body, trainable=False):
        super().__init__()
        self.a, self.b = (nn.Parameter(exact(4, 32, 64, seed), requires_grad=trainable) for seed in (1, 2))
        self.body = body

    def forward(self, x, o):
        return self.body(self, x, o)


def call(function, model, mode=torch.enable_grad):
    """Return what a call of a function returns, changes, and lets require a gradient; and the gradients."""
    model.zero_grad()
    leaf = torch.randn(8, 64, generator=torch.Generator().manual_seed(3)).to(BF16).requires_grad_()
    x, o = leaf.clone(), EVEN.clone()
    with mode():
        y = function(x, o)
    results = {"y": y.detach().clone(), "x": x.detach().clone(), "o": o.clone(), "a": model.a.detach().clone()}
    if y.requires_grad:
        y.float().square().sum().backward()
    grads = {"x": leaf.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}
    return results, {name: grad.clone() for name, grad in grads.items() if grad is not None}, y.requires_grad


def same(compiled, model, reference, mode=torch.enable_grad):
    """True if a call of `compiled`, which runs `model`, has the same effects as a call of `reference`."""
    (got, got_grads, got_required), (expected, expected_grads, required) = (
        call(compiled, model, mode),
        call(reference, reference, mode),
    )
    assert got_required == required
    assert got_grads.keys() == expected_grads.keys()
    for name, value in (got_grads | got).items():
        wanted = (expected_grads | expected)[name].float()
        assert relative_error(value.float(), wanted) < 0.02 or torch.equal(value.float(), wanted), name
    return True


def decisions(compiled):
    return [entry.decision for entry in rewrite_report(compiled)]


def check(body, wanted, reason="", *, trainable=False, mode=torch.enable_grad):
    """Check that a program computes under Thunder what it computes eagerly, with these decisions on its GEMMs."""
    model, reference = Experts(body, trainable), Experts(body, trainable)
    compiled = thunder.jit(model, executors=[moe_executor])
    for _ in range(2):  # the second call is a hit in the cache
        assert same(compiled, model, reference, mode)
    assert decisions(compiled) == wanted
    assert reason in rewrite_report(compiled).entries[0].reason
    return compiled


# ---- in-place changes of what GEMMs read


def changes_between(change):
    def body(self, x, o):
        y = g(x, self.a, o)
        change(x, o)
        return F.silu(y) * g(x, self.b, o)

    return body


def changes_before_the_product(change):
    def body(self, x, o):
        y, u = g(x, self.a, o), g(x, self.b, o)
        change(x, o)
        return F.silu(y) * u

    return body


def changes_afterwards(change):
    def body(self, x, o):
        y = F.silu(g(x, self.a, o)) * g(x, self.b, o)
        change(x, o)
        return y

    return body


def zero_a_view(x, o):
    x.view(-1)[3:200].zero_()


CHANGES = {
    "zero_": lambda x, o: x.zero_(),
    "mul_ of a column": lambda x, o: x[:, 0].mul_(4),
    "a view of a view": zero_a_view,
    "setitem": lambda x, o: x.__setitem__(0, 0.0),
}


@pytest.mark.parametrize("place", [changes_between, changes_before_the_product])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.covering(1)
def test_gemms_stay_before_a_change_of_their_rows(place, change, mode):
    if mode is torch.enable_grad and change is not CHANGES["zero_"]:
        pytest.skip("Thunder has no backward for changes of a part of an argument")
    check(place(change), [SINGLE, SINGLE], "not fused with its SwiGLU: the tensor of rows may be changed", mode=mode)


def test_gemms_stay_before_a_change_of_their_offsets():
    body = changes_between(lambda x, o: o.clamp_(5, 8))
    check(body, [SINGLE, SINGLE], "the tensor of offsets may be changed in place by clamp_", mode=torch.no_grad)


def test_a_change_of_the_output_of_a_gemm_is_seen():
    def body(self, x, o):
        y = g(x, self.a, o)
        u = g(x, self.b, o)
        y[0].mul_(2)
        return F.silu(y) * u

    check(body, [SINGLE, SINGLE], mode=torch.no_grad)


def test_changes_that_thunder_would_delay_are_refused():
    model = Experts(lambda self, x, o: (g(x, self.a, o), x[:, 0].mul_(4))[0])
    compiled = thunder.jit(model, executors=[moe_executor])
    with pytest.raises(NotImplementedError, match="makes an in-place change of the traced function in its backward"):
        call(compiled, model)
    assert same(compiled, model, model, torch.no_grad)


def test_a_question_about_a_tensor_changes_nothing():
    def body(self, x, o):
        return g(x if x.is_floating_point() else x.float(), self.a, o)

    check(body, [SINGLE])


def test_arguments_may_share_their_memory():
    model = Experts(None)

    def function(x, z, o):
        y = g(x, model.a, o)
        z.zero_()
        return F.silu(y) * g(x, model.b, o)

    x = torch.randn(8, 64).to(BF16)
    compiled = thunder.jit(function, executors=[moe_executor])
    with torch.no_grad():
        expected = function(*([x.clone()] * 2), EVEN)
        shared = x.clone()
        got = compiled(shared, shared, EVEN)
    assert torch.equal(got, expected)
    assert decisions(compiled) == [SINGLE, SINGLE]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_rows_that_change_afterwards_are_not_saved_for_a_backward(mode):
    wanted = [SINGLE] * 2 if mode is torch.enable_grad else [FUSED] * 2
    reason = "before its backward" if mode is torch.enable_grad else ""
    check(changes_afterwards(lambda x, o: x.zero_()), wanted, reason, mode=mode)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("change", [lambda x, o: x.zero_(), lambda x, o: o.sub_(1)], ids=["rows", "offsets"])
def test_operands_that_change_afterwards_are_saved_as_they_were(trainable, change):
    """Eager autograd refuses this backward, so that the reference leaves the change out."""
    model = Experts(lambda self, x, o: (g(x, self.a, o), change(x, o))[0], trainable)
    reference = Experts(lambda self, x, o: g(x, self.a, o), trainable)
    (got, grads, _), (expected, wanted, _) = (
        call(thunder.jit(model, executors=[moe_executor]), model),
        call(reference, reference),
    )
    assert relative_error(got["y"], expected["y"]) < 0.01
    assert grads.keys() == wanted.keys() == ({"x", "a"} if trainable else {"x"})
    for name, grad in grads.items():
        assert relative_error(grad, wanted[name]) < 0.02, name


@pytest.mark.parametrize("trainable", [True, False])
def test_arguments_that_change_beforehand_keep_their_gradients(trainable):
    def body(self, x, o):
        x.mul_(2)
        return F.silu(g(x, self.a, o)) * g(x, self.b, o)

    check(body, [NONE] * 2 if trainable else [FUSED] * 2, trainable=trainable)


# ---- changes of a weight by the program itself

WEIGHT_CHANGES = {
    "mul_": lambda w: w.mul_(2),
    "of an expert": lambda w: w[0].mul_(2),
    "of a row": lambda w: w[:, 0].mul_(-1),
    "copy_ to a view": lambda w: w.view(-1).copy_(-w.view(-1)),
    "of a transpose": lambda w: w.mT.mul_(-1),
    "of a detached one": lambda w: w.detach().mul_(2),
    "setitem": lambda w: w.__setitem__(1, -w[1]),
}


@pytest.mark.parametrize("change", WEIGHT_CHANGES.values(), ids=WEIGHT_CHANGES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("aliases", [True, False])
@pytest.mark.covering(1)
def test_changes_of_the_weight_in_the_program_are_seen(change, when, aliases):
    def body(self, x, o):
        if when == "before":
            change(self.a)
        y = g(x, self.a, o)
        if when == "after":
            change(self.a)
        return y + g(x, self.b, o)

    model, reference = Experts(body), Experts(body)
    # Without Thunder's own analysis of aliases, the weight keeps its name.
    compiled = thunder.jit(model, executors=[moe_executor], skip_inplace_alias_updates=not aliases)
    for _ in range(2):
        assert same(compiled, model, reference, torch.no_grad)
    assert decisions(compiled) == [NONE, SINGLE]
    assert "the weight may be changed in place by" in rewrite_report(compiled).entries[0].reason


def test_a_weight_that_shares_its_memory_with_what_changes_is_refused():
    model = Experts(None)

    def function(x, flat, o):
        flat.mul_(2)
        return g(x, model.a, o)

    compiled = thunder.jit(function, executors=[moe_executor])
    x = torch.randn(8, 64).to(BF16)
    with torch.no_grad():
        assert torch.equal(compiled(x, torch.ones(3), EVEN), g(x, model.a, EVEN))
        with pytest.raises(ValueError, match=r"weight of shape \(4, 32, 64\) shares its memory with a tensor that"):
            compiled(x, model.a.detach().view(-1), EVEN)


def test_a_weight_as_it_lies_and_transposed():
    model = Experts(None)
    model.a = nn.Parameter(torch.randn(4, 64, 64).to(BF16) / 8, requires_grad=False)
    model.a_fp4 = nn.Parameter(torch.ones(64, dtype=BF16), requires_grad=False)  # a name that we give, too

    def function(x, o):
        return torch._grouped_mm(g(x * model.a_fp4, model.a, o), model.a, offs=o)

    compiled = thunder.jit(function, executors=[moe_executor])
    x = torch.randn(8, 64).to(BF16)
    as_it_lies = dequantize(quantize(model.a), BF16)
    transposed = dequantize(quantize(model.a.mT), BF16).mT
    expected = torch._grouped_mm(g(x, as_it_lies, EVEN), transposed, offs=EVEN)
    assert relative_error(compiled(x, EVEN), expected) < 0.01


# ---- the grad mode


def no_grad_gate(self, x, o):
    with torch.no_grad():
        y = g(x, self.a, o)
    return F.silu(y) * g(x, self.b, o)


def no_grad_up(self, x, o):
    y = F.silu(g(x, self.a, o))
    with torch.no_grad():
        u = g(x, self.b, o)
    return y * u


def no_grad_silu(self, x, o):
    y, u = g(x, self.a, o), g(x, self.b, o)
    with torch.no_grad():
        y = F.silu(y)
    return y * u


def nested_modes(self, x, o):
    with torch.no_grad():
        y = g(x, self.a, o)
        with torch.enable_grad():
            u = g(x, self.b, o)
    return F.silu(y) * u


@pytest.mark.parametrize("body", [no_grad_gate, no_grad_up, no_grad_silu, nested_modes])
@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.covering(1)
def test_the_grad_mode_is_that_of_each_gemm(body, trainable, mode):
    modes = {no_grad_gate: (0, 1), no_grad_up: (1, 0), no_grad_silu: (1, 1), nested_modes: (0, 1)}[body]
    if mode is torch.no_grad:
        modes = (0, 1) if body is nested_modes else (0, 0)
    wanted = [NONE if trainable and on else SINGLE for on in modes]
    if mode is torch.no_grad and body is not nested_modes:
        wanted = [FUSED, FUSED]
    reason = "" if NONE in wanted or FUSED in wanted else "the grad mode changes between"
    check(body, wanted, reason, trainable=trainable, mode=mode)


def test_a_swiglu_within_one_mode_is_fused():
    def body(self, x, o):
        with torch.no_grad():
            y = F.silu(g(x, self.a, o)) * g(x, self.b, o)
        return y + x[:, :32]

    check(body, [FUSED, FUSED], trainable=True)


def test_enable_grad_under_no_grad_trains_in_16_bit():
    def body(self, x, o):
        with torch.enable_grad():
            return g(x, self.a, o)

    check(body, [NONE], "the weight is trainable", trainable=True, mode=torch.no_grad)
    check(body, [SINGLE], trainable=False, mode=torch.no_grad)


# ---- forwards that train with the grad mode off


class Call(torch.autograd.Function):
    """A forward with its backward, which runs the module again; gradients of its parameters go to them directly."""

    @staticmethod
    def forward(ctx, x, o, module):
        ctx.module = module
        ctx.save_for_backward(x, o)
        return module(x, o)

    @staticmethod
    def backward(ctx, grad):
        x, o = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x, o).backward(grad)
        return x.grad, None, None


FORWARDS = {
    "autograd.Function": lambda module: lambda x, o: Call.apply(x, o, module),
    "reentrant checkpoint": lambda module: lambda x, o: checkpoint(module, x, o, use_reentrant=True),
    "checkpoint": lambda module: lambda x, o: checkpoint(module, x, o, use_reentrant=False),
}


def swiglu(self, x, o):
    return F.silu(g(x, self.a, o)) * g(x, self.b, o)


# test_a_list_of_transforms_stays_as_it_was has autograd.Function; the other checkpoint leaves the grad mode on.
@pytest.mark.parametrize("name", others_slow(FORWARDS, ["reentrant checkpoint"], exhaustive=True))
def test_a_hidden_training_forward_runs_in_16_bit(name, count):
    model, reference = Experts(swiglu, trainable=True), Experts(swiglu, trainable=True)
    compiled = thunder.jit(model, executors=[moe_executor])
    function, expected = FORWARDS[name](compiled), FORWARDS[name](reference)
    steps = []
    for module, run in ((model, function), (reference, expected)):
        module.forward_again = run
        steps.append(call(run, module))
    for got, wanted in zip(steps[0][:2], steps[1][:2], strict=True):
        assert got.keys() == wanted.keys()
        assert all(relative_error(got[name], wanted[name]) < 0.02 or name == "o" for name in got)
    assert not count
    # Both modes are kept side by side: neither serves the other's calls.
    for times in (1, 2):
        with torch.no_grad():
            compiled(torch.randn(8, 64).to(BF16), EVEN)
        assert len(count) == 2 * times
        call(function, model)
        assert len(count) == 2 * times
    compilations = thunder.compile_stats(compiled).cache_misses
    call(function, model)
    assert thunder.compile_stats(compiled).cache_misses == compilations


def test_frozen_experts_of_a_hidden_training_forward_run_in_nvfp4():
    model = Experts(swiglu)
    compiled = thunder.jit(model, executors=[moe_executor])
    call(FORWARDS["reentrant checkpoint"](compiled), model)
    assert decisions(compiled) == [FUSED] * 4  # the forward, and once more with gradients


class Inside(torch.autograd.Function):
    """A forward that Thunder traces."""

    @staticmethod
    def forward(ctx, x, w, o):
        ctx.save_for_backward(x, w, o)
        return g(x, w, o)

    @staticmethod
    def backward(ctx, grad):
        _, w, o = ctx.saved_tensors
        return torch._grouped_mm(grad.contiguous(), w, offs=o), torch.zeros_like(w) + grad.sum(), None


@pytest.mark.skipif(not hasattr(torch.autograd.Function.apply, "__func__"), reason="Thunder cannot trace it here")
@pytest.mark.parametrize("trainable", [True, False])
def test_gemms_inside_of_an_autograd_function_stay_and_are_reported(trainable, count):
    reason = "the weight is trainable" if trainable else "it is a part of Inside"
    check(lambda self, x, o: Inside.apply(x, self.a, o), [NONE], reason, trainable=trainable)
    assert not count


# ---- optimizers and training forwards


@pytest.mark.parametrize(
    "options",
    [dict(fused=True), *others_slow([dict(), dict(foreach=True)], exhaustive=True)],
    ids=["fused", "", "foreach"],
)
def test_weights_are_as_they_were_trained(options):
    model, reference = Experts(swiglu, trainable=True), Experts(swiglu, trainable=True)
    compiled = thunder.jit(model, executors=[moe_executor])
    for _ in range(3):
        for module, function in ((model, compiled), (reference, reference)):
            call(function, module)
            for parameter in (module.a, module.b):
                parameter.grad = parameter.detach() * -1
            torch.optim.SGD([module.a, module.b], lr=1.0, **options).step()  # twice the weights: exact in NVFP4
        assert same(compiled, model, reference, torch.no_grad)
    assert decisions(compiled)[-2:] == [FUSED, FUSED]


@pytest.mark.parametrize("trains", [swiglu, no_grad_gate], ids=["all of it", "a part of it"])
def test_a_training_forward_declares_its_weights_changed(trains, count):
    model = Experts(trains, trainable=True)
    compiled = thunder.jit(model, executors=[moe_executor])
    x = torch.randn(8, 64).to(BF16)
    for _ in range(2):
        with torch.no_grad():
            assert relative_error(compiled(x, EVEN), model(x, EVEN)) < 0.02
        compiled(x, EVEN)
        model.a.data.mul_(2)  # leaves no trace
        model.b.data.mul_(-1)
        with torch.no_grad():
            assert relative_error(compiled(x, EVEN), model(x, EVEN)) < 0.02
    with torch.no_grad():
        before = len(count)
        compiled(x, EVEN)
        assert len(count) == before  # what is not trained is not packed again


def test_inference_mode_leaves_weights_that_change_and_train():
    model, reference = Experts(swiglu), Experts(swiglu)
    compiled = thunder.jit(model, executors=[moe_executor])
    x = torch.randn(8, 64).to(BF16)
    for factor in (1, 2, -1):
        with torch.no_grad():
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(factor)
        with torch.inference_mode():
            assert relative_error(compiled(x, EVEN), reference(x, EVEN)) < 0.02
    assert same(compiled, model, reference)


# ---- the caller's own list of transforms


@pytest.mark.parametrize("kind", [list, *others_slow([tuple], exhaustive=True)])
def test_a_list_of_transforms_stays_as_it_was(kind):
    from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

    given = kind([PrunePrologueChecks()])
    before = kind(given)
    x = torch.randn(8, 64).to(BF16)
    for trainable in (False, True):  # pruning has to leave our own checks
        model = Experts(swiglu, trainable)
        compiled = thunder.jit(model, executors=[moe_executor], transforms=given)
        assert thunder.list_transforms(compiled) == list(before)
        with torch.no_grad():
            assert relative_error(compiled(x, EVEN), model(x, EVEN)) < 0.02
        assert decisions(compiled) == [FUSED, FUSED]
        assert given == before
        call(FORWARDS["autograd.Function"](compiled), model)
        assert decisions(compiled)[2:4] == ([NONE] * 2 if trainable else [FUSED] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewriteWarning)
        assert thunder.jit(lambda x: x.sin(), transforms=given)(x) is not None


# ---- thunderfx: torch.compile(backend="thunder_moe", options={"thunder_moe.inner": "thunder"})


def by_thunderfx(model):
    return torch.compile(model, backend="thunder_moe", options={"thunder_moe.inner": "thunder"}, fullgraph=True)


@pytest.mark.parametrize(
    ("trainable", "body"),
    [
        (True, nested_modes),
        (False, changes_between(CHANGES["zero_"])),
        *others_slow([(True, swiglu), (True, no_grad_gate)], exhaustive=True),
        *others_slow([(False, swiglu), (False, no_grad_gate), (False, nested_modes)], exhaustive=True),
    ],
)
def test_thunderfx_needs_no_leave_for_gradients(trainable, body):
    model, reference = Experts(body, trainable), Experts(body, trainable)
    compiled = by_thunderfx(model)
    assert same(compiled, model, reference)
    wanted = {swiglu: [FUSED] * 2, no_grad_gate: [SINGLE] * 2, nested_modes: [SINGLE] * 2}.get(body, [SINGLE] * 2)
    if trainable:
        wanted = {swiglu: [NONE] * 2}.get(body, [SINGLE, NONE])
    assert decisions(compiled) == wanted
