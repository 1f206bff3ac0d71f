"""Reports of compiled objects that share graphs, and of calls that ran the program as written.
Called by pytest; judged by what the calls computed.
"""

import gc
import weakref

import pytest
import thunder
import torch
import torch.nn.functional as F
from both_compilers import compile_by, decisions
from oracle import relative_error
from torch import nn

from thunder_moe import moe_executor, rewrite_report
from thunder_moe.compilers.dynamo.backend import thunder_moe_backend

# A graph that trains rewrites nothing, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")

OPTIONS = dict(backend="thunder_moe", options={"thunder_moe.inner": "eager"})
ROWS = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
OFFSETS = torch.tensor([4, 8], dtype=torch.int32)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32, dtype=torch.bfloat16) / 6)

    def forward(self, rows, offsets):
        return F.grouped_mm(rows, self.weight.mT, offs=offsets)


class Decorated(Experts):
    @torch.compile(**OPTIONS)
    def forward(self, rows, offsets):
        return F.grouped_mm(rows, self.weight.mT, offs=offsets)


def in_place(module):
    module.compile(**OPTIONS)
    return module


WAYS = {
    "module": lambda: torch.compile(Experts(), **OPTIONS),
    "in place": lambda: in_place(Experts()),
    "bound method": lambda: torch.compile(Experts().forward, **OPTIONS),
    "closure": lambda: (lambda model: torch.compile(lambda *args: model(*args) * 2, **OPTIONS))(Experts()),
    "decorated": lambda: Decorated().forward,
    "thunder": lambda: thunder.jit(Experts(), executors=[moe_executor]),
}


def modules(compiled):
    """The module that a compiled object runs."""
    for found in (compiled, getattr(compiled, "__self__", None), getattr(compiled, "_model", None)):
        if isinstance(found, nn.Module):
            return found
    original = compiled._torchdynamo_orig_callable
    return getattr(original, "__self__", None) or original.__closure__[0].cell_contents


@pytest.mark.parametrize("way", WAYS)
def test_models_of_one_class_have_reports_of_their_own(way):
    frozen, trainable, again, never = (WAYS[way]() for _ in range(4))
    for compiled in (frozen, again, never):
        modules(compiled).requires_grad_(False)
    for compiled in (frozen, trainable, again, again):
        compiled(ROWS, OFFSETS)
    assert [decisions(compiled) for compiled in (frozen, trainable, again)] == [["nvfp4"], ["16-bit"], ["nvfp4"]]
    with pytest.raises(ValueError, match="not called yet"):
        rewrite_report(never)
    if way != "thunder":
        assert [call.calls for each in (frozen, trainable, again) for call in rewrite_report(each).calls] == [1, 1, 2]
        assert "graph 0: calls: 2" in str(rewrite_report(again))


def test_a_module_and_a_function_around_it_are_two():
    module = Experts().requires_grad_(False)
    alone, around = torch.compile(module, **OPTIONS), torch.compile(lambda *args: module(*args) + 1, **OPTIONS)
    alone(ROWS, OFFSETS)
    around(ROWS, OFFSETS)
    around(ROWS, OFFSETS)
    assert [[each.calls for each in rewrite_report(compiled).calls] for compiled in (alone, around)] == [[1], [2]]


def test_parts_behind_a_graph_break_are_of_the_model_that_ran_them():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

        def forward(self, rows, offsets):
            torch._dynamo.graph_break()
            return self.experts(rows, offsets)

    first, second, never = (torch.compile(Broken().requires_grad_(False), **OPTIONS) for _ in range(3))
    for compiled in (first, second):
        compiled(ROWS, OFFSETS)
        assert decisions(compiled) == ["nvfp4"]
    with pytest.raises(ValueError, match="not called yet"):
        rewrite_report(never)


def test_a_report_keeps_nothing_alive_and_outlives_nobody():
    first, second = (torch.compile(Experts().requires_grad_(False), **OPTIONS) for _ in range(2))
    first(ROWS, OFFSETS)
    second(ROWS, OFFSETS)
    weight = weakref.ref(first.weight.untyped_storage())
    del first
    gc.collect()
    assert weight() is None
    assert decisions(second) == ["nvfp4"]
    assert [call.calls for call in rewrite_report(second).calls] == [1]


def test_calls_inside_of_a_transform_are_not_among_the_calls_of_a_graph():
    """torch runs them eagerly, and all calls of the same code that follow: `fullgraph=True` makes them an error."""
    whole, broken = compile_by("dynamo-eager", Experts().requires_grad_(False)), WAYS["module"]().requires_grad_(False)
    with pytest.raises(Exception, match="functorch"):
        torch.func.vmap(whole, in_dims=(0, None))(ROWS[None], OFFSETS)
    broken(ROWS, OFFSETS)
    torch.func.vmap(broken, in_dims=(0, None))(ROWS[None], OFFSETS)
    assert [call.calls for call in rewrite_report(broken).calls] == [1]
    assert "not counted: calls in torch.func transforms" in str(rewrite_report(broken))


def test_a_backend_that_hands_its_graphs_on_has_a_report():
    def backend(graph, inputs):
        return thunder_moe_backend(graph, inputs, options={"thunder_moe.inner": "eager"})

    compiled = torch.compile(Experts().requires_grad_(False), backend=backend)
    compiled(ROWS, OFFSETS)
    assert decisions(compiled) == ["nvfp4"]


def test_calls_that_ran_in_16_bits_are_counted_with_their_reason():
    module = Experts()
    compiled = torch.compile(module, **OPTIONS)

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return compiled(rows.detach(), OFFSETS)

        @staticmethod
        def backward(ctx, grad):
            return grad

    with torch.no_grad():
        compiled(ROWS, OFFSETS)
    out = Reentrant.apply(ROWS.clone().requires_grad_())
    assert relative_error(out, module(ROWS, OFFSETS)) < 1e-3
    (calls,) = rewrite_report(compiled).calls
    assert calls.calls == 2
    assert list(calls.in_16_bit.values()) == [1]
    assert "calls: 2; 1 in 16 bits: the forward of an autograd.Function" in str(rewrite_report(compiled))


def test_a_graph_that_failed_to_compile_is_in_no_report_of_another_function():
    def failing_once(gm, inputs):
        if fails:
            raise RuntimeError(fails.pop())
        return gm

    def compiled(module):
        def function(rows, offsets):
            return module(rows, offsets)

        return torch.compile(function, backend="thunder_moe", options={"thunder_moe.inner": failing_once})

    fails, (first, second) = ["no compiler"], [compiled(Experts().requires_grad_(False)) for _ in range(2)]
    with pytest.raises(Exception, match="no compiler"):
        first(ROWS, OFFSETS)
    second(ROWS, OFFSETS)
    assert len(rewrite_report(second)) == 1
