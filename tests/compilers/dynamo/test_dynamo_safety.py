"""Under the torch.compile backend, side effects, grad modes, changed weights and nested graphs give what eager mode
gives: values, gradients, mutations and requires_grad. Called by pytest; judged by the module itself in eager mode, with
weights that are exact in NVFP4.
"""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from oracle import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_moe import RewriteWarning, rewrite_report
from thunder_moe.compilers.dynamo.backend import thunder_moe_backend
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.kernels import slow_paths

BF16 = torch.bfloat16
ENDS = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
SINGLE, FUSED, WIDE = ["nvfp4"], ["nvfp4 + swiglu"] * 2, ["16-bit"]

pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")


class Block(nn.Module):
    """Two weights (4, 64, 64) and a forward ``body(self, x, buf, o)``, to try programs."""

    def __init__(self, body, *, exact=True):
        super().__init__()
        for name in "ab":
            weight = torch.randn(4, 64, 64, dtype=BF16) / 8
            for _ in range(2 if exact else 0):  # the second time changes next to nothing
                weight = dequantize(quantize(weight), BF16)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
        self.register_buffer("view_of_a", self.a.data[0])  # of its own in a deep copy
        self.body = body

    def forward(self, x, buf, o):
        return self.body(self, x, buf, o)


def mm(x, weight, o):
    return torch._grouped_mm(x, weight.mT, offs=o)


def program(code):
    scope = {}
    lines = "".join(f"    {line}\n" for line in code.strip().split("; "))
    exec(f"def body(self, x, buf, o):\n{lines}", globals(), scope)
    return scope["body"]


def run(function, module, *, x_grad, context):
    """Return all effects of a call and its backward: (values, requires_grad)."""
    torch.manual_seed(1)
    leaf = torch.randn(8, 64, dtype=BF16, requires_grad=x_grad)
    x, buf, o = leaf.clone(), torch.zeros(8, 64, dtype=BF16), ENDS.clone()
    module.zero_grad()
    with context():
        out = function(x, buf, o)
    if out.requires_grad:
        out.float().square().sum().backward()
    seen = {"out": out, "x": x, "buf": buf, "o": o, "x.grad": leaf.grad, **dict(module.named_parameters())}
    seen |= {f"{name}.grad": parameter.grad for name, parameter in module.named_parameters()}
    return {name: None if value is None else value.detach().clone() for name, value in seen.items()}, out.requires_grad


def compare(body, inner, *, train="", x_grad=True, context=torch.enable_grad, calls=1, tolerance=0.012, **options):
    """Compare with eager mode; return the report."""
    module = Block(body)
    for name in train:
        getattr(module, name).requires_grad_()
    eager = copy.deepcopy(module)
    function = torch.compile(
        module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner}, **options
    )
    for _ in range(calls):
        expected, expected_requires_grad = run(eager, eager, x_grad=x_grad, context=context)
        got, requires_grad = run(function, module, x_grad=x_grad, context=context)
        assert requires_grad == expected_requires_grad
        for name, value in expected.items():
            assert (got[name] is None) == (value is None), name
            assert value is None or relative_error(got[name], value) < tolerance, name
    return list(rewrite_report(function))


INNERS = pytest.mark.parametrize("inner", ["eager", "aot_eager"])

# ---- what a fusion would move


@INNERS
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x.zero_()", "the rows may be changed in place by zero_"),
        ("x[2:].mul_(2)", "the rows may be changed in place by mul_"),
        ("x.view(-1)[3:] += 1", "the rows may be changed in place by iadd"),
        ("torch.add(x, 1, out=x)", "the rows may be changed in place by add"),
        ("torch._foreach_neg_([buf, x])", "the rows may be changed in place by _foreach_neg_"),
        ("F.hardtanh(x, -0.1, 0.1, True)", "the rows may be changed in place by hardtanh"),
        ("o[:2] -= 1", "the offsets may be changed in place by isub"),
        ("torch.sub(o[:3], 1, out=o[:3])", "the offsets may be changed in place by sub"),
        ("checkpoint(lambda x: x.mul_(2), x, use_reentrant=False)", "the rows may be changed in place by tag_activ"),
    ],
    ids=str,
)
@pytest.mark.covering(1)
def test_a_swiglu_is_not_fused_past_a_change_of_what_it_reads(inner, code, reason):
    report = compare(program(f"y = mm(x, self.a, o); {code}; return F.silu(y) * mm(x, self.b, o)"), inner, x_grad=False)
    assert [entry.decision for entry in report] == SINGLE * 2
    assert all(reason in entry.reason for entry in report)
    later = program(f"y = mm(x, self.a, o); u = mm(x, self.b, o); {code}; return F.silu(y) * u")
    report = compare(later, inner, x_grad=False)
    assert [entry.decision for entry in report] == SINGLE * 2


@INNERS
def test_a_swiglu_is_fused_past_changes_of_something_else(inner):
    body = program("y = mm(x, self.a, o); buf.copy_(x); F.relu(buf, inplace=True); return F.silu(y) * mm(x, self.b, o)")
    assert [entry.decision for entry in compare(body, inner)] == FUSED


@INNERS
def test_a_swiglu_is_fused_past_another_grad_mode_of_something_else(inner):
    def body(self, x, buf, o):
        y = mm(x, self.a, o)
        with torch.no_grad():
            buf = buf.cos()
        return F.silu(y) * mm(x, self.b, o) + buf

    assert [entry.decision for entry in compare(body, inner)] == FUSED


@INNERS
def test_rows_that_change_before_the_backward_reads_them_again(inner):
    body = program("y = F.silu(mm(x, self.a, o)) * mm(x, self.b, o); x.mul_(2); return y + x.detach()")
    report = compare(body, inner)
    assert [entry.decision for entry in report] == SINGLE * 2
    assert "the rows may be changed in place by mul_ after mul, before its backward" in report[0].reason
    assert [entry.decision for entry in compare(body, inner, x_grad=False)] == FUSED


@INNERS
def test_a_product_into_a_given_tensor_is_written_there(inner):
    body = program("y = F.silu(mm(x, self.a, o)); torch.mul(y, mm(x, self.b, o), out=buf); return buf + 1")
    assert [entry.decision for entry in compare(body, inner, x_grad=False)] == SINGLE * 2


# ---- grad modes


def no_grad_gate(self, x, buf, o):
    with torch.no_grad():
        gate = mm(x, self.a, o)
    return F.silu(gate) * mm(x, self.b, o)


def inference_gate(self, x, buf, o):
    with torch.inference_mode():
        gate = F.silu(mm(x, self.a, o))
    return gate.clone() * mm(x, self.b, o)


def gradients_again(self, x, buf, o):
    with torch.no_grad():
        with torch.enable_grad():
            y = mm(x, self.a, o)
        z = mm(x, self.b, o)
    return y + z


@torch.enable_grad()
def always_differentiable(self, x, buf, o):
    return mm(x, self.a, o) * 2


@INNERS
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("train", ["", "a", "b"])
@pytest.mark.parametrize("body", [no_grad_gate, inference_gate, gradients_again, always_differentiable])
@pytest.mark.covering(1)
def test_each_gemm_has_its_own_grad_mode(inner, body, train, context):
    report = compare(body, inner, train=train, context=context)
    off = {no_grad_gate: "a", inference_gate: "a", gradients_again: "b", always_differentiable: "b"}[body]
    if context is torch.no_grad and body in (no_grad_gate, inference_gate):
        off = "ab"
    for entry in report:
        assert entry.rewritten == (entry.gemm.weight not in train or entry.gemm.weight in off)


def test_a_swiglu_is_not_fused_over_two_grad_modes():
    report = compare(no_grad_gate, "eager")
    assert [entry.decision for entry in report] == SINGLE * 2
    assert all("the grad mode changes between" in entry.reason for entry in report)


class Straight(torch.autograd.Function):
    """Calls a function, whose gradient it takes for the identity's."""

    @staticmethod
    def forward(ctx, function, x, buf, o):
        return function(x, buf, o)

    @staticmethod
    def backward(ctx, grad):
        return None, grad, None, None


@pytest.mark.parametrize("inner", ["eager", "aot_eager", *others_slow(["inductor"], exhaustive=True)])
@pytest.mark.parametrize("first", ["inference", "training"])
@pytest.mark.covering(1)
def test_a_training_forward_under_no_grad_is_one(inner, first):
    module = Block(program("return F.silu(mm(x, self.a, o)) * mm(x, self.b, o)"), exact=False).requires_grad_()
    eager = copy.deepcopy(module)
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner})
    reentrant = functools.partial(checkpoint, function, use_reentrant=True)
    through_function = functools.partial(Straight.apply, function)
    steps = [reentrant, through_function, reentrant]
    if first == "inference":
        with torch.no_grad():
            x = torch.randn(8, 64, dtype=BF16)
            assert relative_error(function(x, x, ENDS), eager(x, x, ENDS)) > 0.05
    for step in steps:
        of_eager = functools.partial(step.func, eager, *step.args[1:], **step.keywords) if step is reentrant else None
        of_eager = of_eager or functools.partial(Straight.apply, eager)
        expected, _ = run(of_eager, eager, x_grad=True, context=torch.enable_grad)
        got, requires_grad = run(step, module, x_grad=True, context=torch.enable_grad)
        assert requires_grad
        for name, value in expected.items():
            assert (got[name] is None) == (value is None), name
            assert value is None or relative_error(got[name], value) < 0.012, name
    reasons = {entry.reason for entry in rewrite_report(function)}
    if first == "training":
        assert any("the forward of an autograd.Function (or a reentrant checkpoint)" in reason for reason in reasons)


def test_a_custom_function_inside_the_graph():
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, o):
            ctx.save_for_backward(x, weight, o)
            return mm(x, weight, o)

        @staticmethod
        def backward(ctx, grad):
            x, weight, o = ctx.saved_tensors
            grad = grad.contiguous()
            return torch._grouped_mm(grad, weight, offs=o), torch._grouped_mm(grad.t(), x, offs=o), None

    def body(self, x, buf, o):
        return Product.apply(x, self.a, o)

    for train in ("", "a"):
        report = compare(body, "aot_eager", train=train)
        assert [entry.decision for entry in report] == WIDE * 2
        word = "forward of an autograd.Function" if train else "inside autograd_function_apply, whose body is left"
        assert all(word in entry.reason for entry in report)


def test_a_training_forward_declares_its_weights_changed():
    module = Block(program("return mm(x, self.a, o)")).requires_grad_()
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"})
    x = torch.randn(8, 64, dtype=BF16)
    for training in (functools.partial(function), functools.partial(checkpoint, function, use_reentrant=True)):
        with torch.no_grad():
            before = function(x, x, ENDS)
        training(x.clone().requires_grad_(), x, ENDS).sum().backward()
        module.a.data.mul_(2)  # leaves no trace
        with torch.no_grad():
            assert relative_error(function(x, x, ENDS), 2 * before) < 0.012


# ---- weights that the graph changes


@INNERS
@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("self.a[0].mul_(2)", "mul_"),
        ("self.a[:, 0].add_(1)", "add_"),
        ("self.a.view(-1).copy_(self.b.view(-1))", "copy_"),
        ("self.a.detach().mul_(2)", "mul_"),
        ("torch._foreach_mul_([x, self.a], 2)", "_foreach_mul_"),
        ("torch.mul(self.b, 2, out=self.a)", "mul"),
        ("self.a[1:2] = 3", "setitem"),
        ("self.a.mT.unbind(0)[1].zero_()", "zero_"),
        ("F.relu(self.a, True)", "relu"),
        ("torch.ops.aten.mul_.Tensor(self.a, self.b)", "aten.mul_"),
        ("F.batch_norm(x, self.a[0, 0], buf[0], training=True)", "batch_norm"),
        ("checkpoint(lambda x: x + self.a.mul_(2)[0, 0], x, use_reentrant=False)", "mul_"),
    ],
    ids=str,
)
@pytest.mark.covering(1)
def test_a_weight_that_the_graph_changes_stays_16_bit(inner, code, name):
    report = compare(program(f"{code}; return mm(x, self.a, o) + mm(x, self.b, o)"), inner, x_grad=False)
    by_weight = {entry.gemm.weight: entry for entry in report}
    assert by_weight["a"].reason == f"the weight may be changed in place by {name} in the same graph"
    assert by_weight["b"].rewritten


def test_a_weight_that_changes_through_another_input():
    results = []
    for disable in (True, False):
        torch.manual_seed(2)
        module = Block(program("self.view_of_a.mul_(2); return mm(x, self.a, o)"))
        x = torch.randn(8, 64, dtype=BF16)
        options = {"thunder_moe.inner": "eager"}
        function = torch.compile(module, backend="thunder_moe", fullgraph=True, options=options, disable=disable)
        results.append([function(x, x, ENDS) for _ in range(2)])
    for ours, expected in zip(*results[::-1], strict=True):
        assert torch.equal(ours, expected)
    assert "may be changed in place by mul_" in next(iter(rewrite_report(function))).reason


@pytest.mark.parametrize("inner", ["eager", *others_slow(["inductor"], exhaustive=True)])
def test_a_weight_that_changes_through_an_argument_of_a_later_call(inner):
    module = Block(program("x.mul_(2); return mm(x, self.a, o)"))
    eager = copy.deepcopy(module)
    compiled = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner})
    x = torch.randn(8, 64, dtype=BF16)
    compiled(x.clone(), x, ENDS)
    assert [entry.decision for entry in rewrite_report(compiled)] == SINGLE
    for _ in range(2):
        got, expected = compiled(module.a.data[0, :8], x, ENDS), eager(eager.a.data[0, :8], x, ENDS)
        assert relative_error(got, expected) < 0.01
        assert torch.equal(module.a, eager.a)


TWO = program("return mm(x, self.a, o) + 3 * mm(x, self.b, o)")


@pytest.mark.parametrize("body", [TWO, lambda *given: checkpoint(TWO, *given, use_reentrant=False)], ids=["", "nested"])
def test_weights_that_share_their_memory_in_the_first_module_alone(body):
    tied, other = Block(body), Block(body)
    tied.b.data = tied.a.data
    function = torch.compile(
        lambda module, x: module(x, x, ENDS), backend="thunder_moe", fullgraph=True,
        options={"thunder_moe.inner": "eager"},
    )  # fmt: skip
    x = torch.randn(8, 64, dtype=BF16)
    for module in (tied, other):
        assert relative_error(function(module, x), module(x, x, ENDS)) < 0.01
    assert [entry.decision for entry in rewrite_report(function)] == SINGLE * 2


def test_a_weight_that_shares_its_memory_with_an_argument_in_the_first_call_alone():
    module = Block(program("return mm(x, buf, o) + 3 * mm(x, self.a, o)"))
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"})
    x, other = torch.randn(8, 64, dtype=BF16), torch.randn(4, 64, 64, dtype=BF16)
    for weight in (module.a.detach(), other):
        assert relative_error(function(x, weight, ENDS), module(x, weight, ENDS)) < 0.01


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_rows_that_share_their_memory_with_a_changed_input_of_a_later_call(inner, monkeypatch):
    monkeypatch.setattr(slow_paths, "_warned", set())
    module = Block(program("gate = mm(x, self.a, o); buf.mul_(2); return F.silu(gate) * mm(x, self.b, o)"))
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner})
    x, apart = torch.randn(8, 64, dtype=BF16), torch.ones(8, 64, dtype=BF16)
    for shares in (False, True, False):
        given, expected = x.clone(), x.clone()
        buffers = [each.view(8, 64) if shares else apart.clone() for each in (given, expected)]
        with pytest.warns(UserWarning, match="shares its memory") if shares else contextlib.nullcontext():
            actual = function(given, buffers[0], ENDS)
        error = relative_error(actual, module(expected, buffers[1], ENDS))
        assert error < 0.01
        assert torch.equal(given, expected)
    assert [entry.decision for entry in rewrite_report(function)] == FUSED


# ---- forms of the weight


@INNERS
@pytest.mark.parametrize(
    "form",
    [
        "self.a.mT.mT.mT",
        "self.a.mT.detach()",
        "self.a.to(x.dtype).mT",
        "self.a.contiguous().mT",
        "self.a[:].view(4, 64, 64).mT",
    ],
)
@pytest.mark.covering(1)
def test_views_of_a_trainable_weight_stay_16_bit(inner, form):
    (entry,) = compare(program(f"return torch._grouped_mm(x, {form}, offs=o)"), inner, train="a")
    assert (entry.decision, "trainable" in entry.reason) == ("16-bit", True)


# ---- nested graphs

NESTED = {
    "checkpoint": ("return checkpoint(lambda x: mm(x, self.a, o), x, use_reentrant=False)", SINGLE),
    "checkpoint, reentrant": ("return checkpoint(lambda x: mm(x, self.a, o), x, use_reentrant=True)", SINGLE),
    "checkpointed SwiGLU": (
        "return checkpoint(lambda x: F.silu(mm(x, self.a, o)) * mm(x, self.b, o), x, use_reentrant=False)",
        FUSED,
    ),
    "checkpoint in checkpoint": (
        "inner = lambda x: mm(x, self.a, o); middle = lambda x: checkpoint(inner, x, use_reentrant=False); "
        "return checkpoint(lambda x: middle(x) + mm(x, self.b, o), x, use_reentrant=False)",
        SINGLE * 2,
    ),
    "inside and outside": (
        "y = mm(x, self.a, o); return y + checkpoint(lambda x: mm(x, self.a, o), x, use_reentrant=False)",
        SINGLE * 2,
    ),
    "grad modes inside": (
        "return checkpoint(lambda x: no_grad_gate(self, x, buf, o), x, use_reentrant=False)",
        SINGLE * 2,
    ),
    "cond": (
        "return torch.cond(x.sum() > 0, lambda x: mm(x, self.a, o), lambda x: mm(x, self.b, o), (x,))",
        SINGLE * 2,
    ),
    # The gradients of both branches need the same strides.
    "cond of a transposed weight": (
        "return torch.cond(x.sum() > 0, lambda x: mm(x, self.a.mT, o), lambda x: mm(x, self.b, o), (x,))",
        SINGLE * 2,
    ),
}


@INNERS
@pytest.mark.parametrize("train", ["", "ab"])
@pytest.mark.parametrize("name", NESTED)
@pytest.mark.covering(1)
def test_gemms_in_nested_graphs(inner, train, name):
    code, decisions = NESTED[name]
    report = compare(program(code), inner, train=train)
    assert {entry.gemm.weight for entry in report} <= {"a", "b"}
    if not train:
        assert [entry.decision for entry in report] == decisions
    elif name == "grad modes inside":
        assert {entry.gemm.weight: entry.decision for entry in report} == {"a": "nvfp4", "b": "16-bit"}
    else:
        assert {entry.decision for entry in report} == set(WIDE)
        assert all("trainable" in entry.reason for entry in report)


@pytest.mark.parametrize("name", ["checkpoint", "checkpointed SwiGLU", "cond"])
@pytest.mark.exhaustive  # inductor gets the graphs that aot_eager gets
def test_nested_graphs_with_inductor(name):
    code, decisions = NESTED[name]
    assert [entry.decision for entry in compare(program(code), "inductor", calls=2)] == decisions


@INNERS
@pytest.mark.parametrize("name", ["cond", "checkpoint"])
@pytest.mark.covering(1)
def test_expanded_gradients_in_nested_graphs(inner, name):
    module = Block(program(NESTED[name][0])).requires_grad_()
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner})
    x = torch.randn(8, 64, dtype=BF16, requires_grad=True)
    function(x, x, ENDS).sum().backward()  # torch's own backward fails here with "Invalid strides"
    used = module.a if module.a.grad is not None and module.a.grad.any() else module.b
    assert relative_error(x.grad, used.sum(1).repeat_interleave(2, 0)) < 0.012


def test_weights_change_between_calls_of_a_nested_graph():
    module = Block(program(NESTED["checkpoint in checkpoint"][0]))
    function = torch.compile(module, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"})
    x = torch.randn(8, 64, dtype=BF16)
    for _ in range(3):
        assert relative_error(function(x, x, ENDS), module(x, x, ENDS)) < 0.012
        module.a.mul_(-2)


@pytest.mark.skipif(torch.__version__.startswith(("2.10.", "2.11.", "2.12.")), reason="tried on torch 2.13 alone")
@pytest.mark.parametrize("trainable", [False, True])
def test_data_that_another_graph_writes_is_seen(trainable):
    """aot_autograd makes the write a change of its input, which raises the version; eager code raises none."""
    weight, x = Block(None).a.requires_grad_(trainable), torch.randn(8, 64, dtype=BF16)
    options = dict(backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "aot_eager"})
    read = torch.compile(lambda x: mm(x, weight, ENDS), **options)
    write = torch.compile(lambda: weight.data.mul_(-2), **options)
    for _ in range(3):
        with torch.no_grad():
            assert relative_error(read(x), mm(x, weight, ENDS)) < 0.012
        write()


def test_a_loop_is_left_alone_and_reported():
    from torch._higher_order_ops.while_loop import while_loop

    def body(self, x, buf, o):
        count = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, mm(y, self.a, o)), (count, x))[1]

    (entry,) = compare(body, "eager", x_grad=False)
    assert (entry.decision, entry.reason) == ("16-bit", "it is inside while_loop, whose body is left as it is")


@INNERS
def test_function_transforms_are_left_alone_and_reported(inner):
    body = program("return torch.func.grad(lambda x: mm(x, self.a, o).float().square().sum())(x)")
    (entry,) = compare(body, inner, x_grad=False, tolerance=0.02)
    assert (entry.decision, entry.reason) == ("16-bit", "it is inside a torch.func transform")


@INNERS
def test_side_effects_of_nodes_that_only_a_replaced_one_read(inner):
    """An in-place operation is kept though the weight's chain is erased."""
    body = program("x.add_(1); buf.add_(1); return mm(x, self.a, o) + mm(buf.add_(1), self.b, o)")
    assert [entry.decision for entry in compare(body, inner, x_grad=False)] == SINGLE * 2


@pytest.mark.parametrize("mark", [True, False])
def test_other_numbers_of_rows_in_nested_graphs(mark):
    module = Block(program(NESTED["checkpointed SwiGLU"][0]))
    function = torch.compile(
        module, backend="thunder_moe", fullgraph=True, dynamic=None if mark else True,
        options={"thunder_moe.inner": "aot_eager"},
    )  # fmt: skip
    for rows in (8, 12, 20):
        x, o = torch.randn(rows, 64, dtype=BF16), ENDS * rows // 8
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        assert relative_error(function(x, x, o.int()), module(x, x, o.int())) < 0.012
    assert {entry.graph for entry in rewrite_report(function)} == {0}


def test_a_warning_still_tells_that_nothing_was_rewritten():
    with pytest.warns(RewriteWarning, match="may be changed in place by mul_"):
        compare(program("self.a.mul_(2); return mm(x, self.a, o)"), "eager", x_grad=False)


def test_what_torch_does_not_keep_for_a_backward_may_change_before_it():
    body = program("y = mm(x, self.a, o); x.zero_(); return y")
    assert [entry.decision for entry in compare(body, "eager", x_grad=False)] == SINGLE

    def zeroed_later(self, x, buf, o):
        y = mm(x, self.a, o)
        with torch.no_grad():
            self.a[0].zero_()
        return y

    (entry,) = compare(zeroed_later, "eager", train="a", x_grad=False)
    assert "may be changed in place by zero_" in entry.reason


def test_what_thunder_hands_to_inductor_is_in_4_bits():
    code = "return mm(x, self.a, o) + checkpoint(lambda x: mm(x, self.b, o), x, use_reentrant=False)"
    report = compare(program(code), "thunder", x_grad=False)
    assert [entry.decision for entry in report] == ["nvfp4", "nvfp4"]


@pytest.mark.parametrize("mode", ["outside", "inside"])
def test_a_graph_whose_frozen_weight_requires_a_gradient_now(mode):
    """Dynamo before torch 2.13 calls such a graph without compiling it again."""
    weight = nn.Parameter(torch.randn(2, 32, 64).bfloat16(), requires_grad=False)
    calls = []

    def backend(gm, inputs):
        graph = thunder_moe_backend(gm, inputs, options={"thunder_moe.inner": "eager"})

        def run(*given):
            calls.append((graph, given))
            return graph(*given)

        return run

    rows, offsets = torch.randn(5, 64).bfloat16(), torch.tensor([2, 5], dtype=torch.int32)

    def gemm():
        with torch.enable_grad() if mode == "inside" else contextlib.nullcontext():
            return torch._grouped_mm(rows, weight.mT, offs=offsets)

    function = torch.compile(gemm, backend=backend, fullgraph=True)
    with torch.set_grad_enabled(mode == "outside"):
        four_bit = function()
    ((graph, given),) = calls
    weight.requires_grad_()
    if mode == "outside":
        with torch.no_grad():
            assert torch.equal(graph(*given)[0], four_bit)
    with torch.set_grad_enabled(mode == "outside"):
        (out,) = graph(*given)
    out.backward(torch.ones_like(out))
    gradient, weight.grad = weight.grad, None
    expected = torch._grouped_mm(rows, weight.mT, offs=offsets)
    expected.backward(torch.ones_like(expected))
    assert torch.equal(out, expected)
    assert torch.equal(gradient, weight.grad)
