"""Layers in the form of transformers 5.17, which sets rows of ids at or past the number of experts to zero: one
operator where the graph proves that there are none, elsewhere what eager computes.
Called by pytest; judged by the oracle's loop over tokens, and by the same module eagerly with the decoded weights.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from both_compilers import by_dynamo as compiled
from both_compilers import decisions
from oracle import moe_experts, relative_error
from test_fused_moe_pattern import BF16, A, E, Experts, H, T

from thunder_moe import rewrite_report
from thunder_moe.formats.nvfp4 import dequantize, quantize

FUSED, APART = ["nvfp4 + swiglu", "nvfp4"], ["nvfp4", "nvfp4"]
pytestmark = pytest.mark.filterwarnings("error:erase_node")


class Masked(Experts):
    """Experts as "grouped_mm" of transformers 5.17 runs them, in steps that a test can replace."""

    def scores(self, x):
        return F.softmax(self.gate(x), -1, dtype=torch.float32).topk(A, -1)

    def route(self, x):
        values, ids = self.scores(x)
        values /= values.sum(-1, keepdim=True)
        return values.to(x.dtype), ids

    def mask(self, ids):
        return (ids >= E).unsqueeze(-1)

    def bound(self, ids):
        ids.clamp_(max=E - 1)

    def mask_rows(self, rows, mask):
        rows.masked_fill_(mask, 0.0)
        return rows

    def mask_result(self, y, mask):
        return y.masked_fill(mask, 0.0)

    def product(self, rows, weight, offsets):
        return torch._grouped_mm(rows, weight.mT, offs=offsets)

    def outside(self, out, ids, mask):
        return out

    def forward(self, x):
        return self.experts(x, *self.route(x))

    def experts(self, x, weights, ids):
        weights, ids = weights.reshape(-1), ids.reshape(-1)
        ids, order = torch.sort(ids)
        rows, weights = x[order // A], weights[order]
        counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
        offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
        mask = self.mask(ids)
        self.bound(ids)
        rows = self.mask_rows(rows, mask)
        y = self.mask_result(self.product(rows, self.gate_up, offsets), mask)
        gate, up = y.chunk(2, -1)
        y = self.mask_result(self.product(F.silu(gate) * up, self.down, offsets), mask)
        y = y * weights.unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.size(0), device=order.device)
        return self.outside(y[inverse].view(-1, A, H).sum(dim=1).to(x.dtype), ids, mask)


def decoded(module):
    module = copy.deepcopy(module)
    for weight in (module.gate_up, module.down):
        weight.data.copy_(dequantize(quantize(weight.data)))
    return module


def expected(module, x):
    """Return the oracle's result; sentinels count nothing."""
    weights, ids = module.route(x)
    weights = torch.where(ids < E, weights.float(), 0.0)
    rounded = decoded(copy.deepcopy(module).float())
    return moe_experts(x, ids.clamp(max=E - 1), weights, rounded.gate_up, rounded.down)


def is_whole(function):
    return all("experts of the layer in one operator" in entry.reason for entry in rewrite_report(function))


def of_modules(self, x):
    """Return ids like a module that hands them to functions: int32, clamped."""
    values, ids = Masked.route(self, x)
    return values, ids.to(torch.int32).clamp(0, E - 1)


FORMS = {
    "transformers": {},
    "no bound": dict(bound=lambda self, ids: None),
    "a higher limit": dict(
        mask=lambda self, ids: (ids >= E + 1).unsqueeze(1), bound=lambda self, ids: ids.clamp_(max=E)
    ),
    "any number": dict(mask_result=lambda self, y, mask: torch.masked_fill(y, mask, 1)),
    "a clamp": dict(route=of_modules),
}


def together(modules, x, inner="eager", **options):
    """Compile modules into one graph, each with an input of its own; check that all do what they do eagerly."""
    function = compiled(lambda given: {name: module(given[name]) for name, module in modules.items()}, inner, **options)
    ours, theirs = ({name: x.clone() for name in modules} for _ in range(2))
    outs = function(ours)
    for name, module in modules.items():
        assert relative_error(outs[name], decoded(module)(theirs[name])) < 1e-2, name
        assert torch.equal(ours[name], theirs[name]), name
    return function, outs


def test_masks_of_nothing_are_dropped():
    modules, x = {name: Masked(**steps) for name, steps in FORMS.items()}, torch.randn(T, H, dtype=BF16)
    function, outs = together(modules, x, "aot_eager")
    assert decisions(function) == FUSED * len(FORMS)
    assert is_whole(function)
    for name, module in modules.items():
        assert relative_error(outs[name], expected(module, x)) < 1e-2, name


@pytest.mark.covering(1)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("detached", [False, True])
def test_gradients(tokens, detached):
    """Gradients equal eager's; a mask that takes the gradient away still does so."""

    def mask_result(self, y, mask):
        with torch.set_grad_enabled(not detached):
            return y.masked_fill(mask, 0.0)

    module = Masked(mask_result=mask_result)
    inputs = [torch.randn(tokens, H, dtype=BF16, requires_grad=True)]
    inputs.append(inputs[0].detach().requires_grad_())
    function, grad = compiled(module), torch.randn(tokens, H, dtype=BF16)
    outs = [run(x) for run, x in zip((function, decoded(module)), inputs, strict=True)]
    for out in outs:
        out.backward(grad)
    assert is_whole(function) is not detached
    assert relative_error(*outs) < 1e-2
    assert relative_error(*(x.grad for x in inputs)) < 2e-2


def test_one_graph_for_all_numbers_of_tokens():
    module = Masked()
    function = compiled(module, dynamic=True)
    for tokens in (3, 9, 17):
        x = torch.randn(tokens, H, dtype=BF16)
        assert relative_error(function(x), expected(module, x)) < 1e-2
    assert decisions(function) == FUSED
    assert is_whole(function)


def sentinels_by_fill(self, x):
    values, ids = Masked.route(self, x)
    return values, ids.masked_fill(ids >= 6, E)


def sentinels_in_place(self, x):
    values, ids = Masked.route(self, x)
    ids.masked_fill_(ids >= 6, E)
    return values, ids


def sentinels_by_index(self, x):
    values, ids = Masked.route(self, x)
    ids.view(-1)[::4] = E
    return values, ids


def of_more_logits(self, x):
    scores = torch.cat([self.gate(x), -self.gate(x)], -1).float().softmax(-1)
    values, ids = scores.topk(A, -1)
    return values.to(x.dtype), ids


def over_tokens(self, x):
    scores = torch.cat([self.gate(x), -self.gate(x)])[:, :A].float().softmax(0)
    values, ids = scores.topk(E, 0)
    return values.to(x.dtype), ids


def order(self, x):
    values, ids = Masked.route(self, x)
    return values, ids.reshape(-1).sort()[1].view(ids.shape)


def best_numbers(self, x):
    values, ids = Masked.route(self, x)
    return values, (ids + 3).topk(A, -1)[0]


def clamped_above(self, x):
    values, ids = Masked.route(self, x)
    return values, (ids + 3).clamp(0, E)


def shifted(self, x):
    values, ids = Masked.route(self, x)
    return values, ids + 3


def of_other_bits(self, x):
    values, ids = Masked.route(self, x)
    halves = ids.reshape(-1).view(torch.int32).sort()[0]
    return values, halves.view(torch.int64).view(ids.shape).contiguous()


SENTINELS = {
    "by masked_fill": sentinels_by_fill,
    "by masked_fill_": sentinels_in_place,
    "by an index": sentinels_by_index,
    "of more logits": of_more_logits,
    "over tokens": over_tokens,
    "the order of a sort": order,
    "the values of a top-k": best_numbers,
    "of a clamp": clamped_above,
    "of a sum": shifted,
    "of other bits": of_other_bits,
}


def test_sentinels_count_nothing():
    modules, x = {name: Masked(route=route) for name, route in SENTINELS.items()}, torch.randn(E, H, dtype=BF16)
    function, outs = together(modules, x)
    assert decisions(function) == APART * len(SENTINELS)
    for name, module in modules.items():
        assert (module.route(x)[1] >= E).any(), name
        assert relative_error(outs[name], expected(module, x)) < 1e-2, name


def test_ids_that_the_graph_is_given_keep_their_masks():
    module = Masked()
    function = compiled(module.experts)
    ids = torch.stack([torch.randperm(E + 1)[:A] for _ in range(T)])
    ids[0, 0] = E
    for given in (torch.arange(T * A).view(T, A) % E, ids, torch.full((T, A), E)):
        x, weights = torch.randn(T, H, dtype=BF16), torch.rand(T, A, dtype=BF16)
        out = function(x, weights, given)
        assert relative_error(out, decoded(module).experts(x, weights, given)) < 1e-2
    assert decisions(function) == APART


def fill_with_a_tensor(self, y, mask):
    return y.masked_fill(mask, torch.zeros((), dtype=y.dtype))


def wider(self, y, mask):
    return y.masked_fill(mask.unsqueeze(0), 0.0)[0]


def read_before_and_after(self, y, mask):
    return y.masked_fill(mask, 0.0) + y


def changed_later(self, y, mask):
    masked = y.masked_fill(mask, 0.0)
    masked[1] = 2.0
    return masked


def changed_before(self, y, mask):
    masked = y.masked_fill(mask, 0.0)
    y[1] = 2.0
    return masked


def changed_mask(self, y, mask):
    mask[::2] = True
    return y.masked_fill(mask, 0.0)


def changed_ids(self, ids):
    mask = (ids >= E).unsqueeze(-1)
    ids[1] = E
    return mask | (ids >= E).unsqueeze(-1)


OTHERS = {
    "a tensor": dict(mask_result=fill_with_a_tensor),
    "more dims": dict(mask_result=wider),
    "read before and after": dict(mask_result=read_before_and_after),
    "a result changed in place": dict(mask_result=changed_later),
    "a source changed in place": dict(mask_result=changed_before),
    "a mask changed in place": dict(mask_result=changed_mask),
    "ids changed in place": dict(mask=changed_ids),
    "a lower limit": dict(mask=lambda self, ids: (ids >= E - 2).unsqueeze(-1)),
    "a float limit": dict(mask=lambda self, ids: (ids >= E - 2.5).unsqueeze(-1)),
    "the other side": dict(mask=lambda self, ids: (ids.le(E - 3)).unsqueeze(-1)),
    "a size": dict(mask=lambda self, ids: (ids >= ids.shape[0] // A - 4).unsqueeze(-1)),
    "a lower bound": dict(
        bound=lambda self, ids: ids.clamp_(4, E - 1), outside=lambda self, out, ids, mask: out + ids[:T, None]
    ),
    "a bound that bites": dict(
        bound=lambda self, ids: ids.clamp_(max=2), outside=lambda self, out, ids, mask: out + ids[-T:, None]
    ),
}


@pytest.mark.parametrize("names", [OTHERS.keys() - {"a size"}, {"a size"}], ids=["numbers", "a size"])
def test_other_masks_do_what_they_say(names):
    torch.manual_seed(1)  # no ties between experts, of which torch's top-k may choose either
    modules = {name: Masked(**steps) for name, steps in OTHERS.items() if name in names}
    function, _ = together(modules, torch.randn(T, H, dtype=BF16), dynamic="a size" in names)
    whole = ["experts of the layer in one operator" in entry.reason for entry in rewrite_report(function)]
    assert len(whole) == 2 * len(modules)
    for number, name in enumerate(modules):
        assert "bound" in name or not all(whole[2 * number :][:2]), name


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_mask_read_elsewhere_stays(inner):
    def outside(self, out, ids, mask):
        return out, ids, mask, out.masked_fill(mask[::A], -1.0)

    module, x = Masked(outside=outside), torch.randn(T, H, dtype=BF16)
    function = compiled(module, inner)
    results, wanted = function(x), decoded(module)(x)
    assert decisions(function) == FUSED
    assert all(map(torch.equal, results[1:3], wanted[1:3]))
    assert torch.equal(results[3], results[0])
    assert results[3].data_ptr() != results[0].data_ptr()
    assert relative_error(results[0], wanted[0]) < 1e-2


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_results_are_not_what_they_were_made_of(inner):
    """A masked copy of what is given, or returned too, stays a copy."""
    module = Masked()

    def program(logits, x, out):
        mask, scalar = logits.topk(1, -1)[1] >= E, logits[0, 0].topk(1)[1] >= 1
        source = x * 2
        copies = source.masked_fill(mask, 0.0), x.masked_fill(mask, 0.0), x.masked_fill(scalar, 0.0)
        return out.masked_fill_(mask, 0.0), source, *copies, module(x)

    logits, x, out = torch.randn(T, E), torch.randn(T, H, dtype=BF16), torch.randn(T, H)
    wanted, results = program(logits, x, out.clone()), compiled(program, inner)(logits, x, out)
    assert all(map(torch.equal, results[:-1], wanted[:-1]))
    assert relative_error(results[-1], decoded(module)(x)) < 1e-2
    assert len({result.data_ptr() for result in (*results, x)}) == 7
    assert results[0].data_ptr() == out.data_ptr()


CALLERS = {
    "by the graph": lambda given, weight, mask: weight.exp().masked_fill(mask, 0.0).mul_(2) + 1,
    "the result": lambda given, weight, mask: weight.exp().masked_fill(mask, 0.0),
    "what was given": lambda given, weight, mask: given.masked_fill(mask, 0.0) * weight,
}


@pytest.mark.parametrize("name", CALLERS)
def test_changes_before_a_backward(name):
    """A backward reads no tensor that is changed in place, as in eager."""
    module, x = Masked(), torch.randn(T, H, dtype=BF16)

    def program(logits, given, weight):
        return CALLERS[name](given, weight, logits.topk(1, -1)[1] >= E), module(x)

    logits, given, weight = torch.randn(T, E), torch.randn(T, H), torch.randn(T, H, requires_grad=True)
    gradients = []
    for function in (program, compiled(program, "eager")):
        changed = given.clone()
        out, _ = function(logits, changed, weight)
        (out if name == "the result" else changed).mul_(2)
        gradients += torch.autograd.grad(out.sum(), weight)
    assert torch.equal(*gradients)
