"""NVFP4Linear: results, state dicts, moves, copies and bad input; stacks of linears that read the same rows.
Called by pytest; judged by tests/oracle.py.
"""

import copy
import io
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from dense_calls import DenseCalls as Calls
from oracle import KERNEL_TOLERANCE, dequantize, relative_error
from torch import nn

from thunder_moe import NVFP4Linear, to_layout_
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.nn import MODULE_LAYOUTS
from thunder_moe.nn.linear import NVFP4LinearPart, NVFP4LinearStack


def saved_and_loaded(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


DTYPES = list(KERNEL_TOLERANCE)


def make(n=64, k=128, *, bias=True, dtype=torch.float32, layout="linear"):
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    return NVFP4Linear.from_linear(linear, layout=layout), linear


def exact(module):
    return dequantize(*module.packed_weight.to_layout("linear").tensors())[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
def test_computes_what_linear_does(dtype, bias, layout):
    module, linear = make(bias=bias, dtype=dtype, layout=layout)
    assert module.layout == layout
    for lead in ((), (3,), (2, 0), (2, 5)):
        x = torch.randn(*lead, 128, dtype=dtype)
        out = module(x)
        assert out.shape == (*lead, 64)
        assert out.dtype == dtype
        expected = x.float() @ exact(module).T + (linear.bias.float() if bias else 0)
        assert relative_error(out, expected) < KERNEL_TOLERANCE[dtype]
    assert relative_error(exact(module), linear.weight) < 0.11
    assert module.bias is linear.bias


def test_gradients_of_input_and_bias():
    module, _ = make()
    x = torch.randn(2, 5, 128, requires_grad=True)
    module(x).sum().backward()
    assert relative_error(x.grad, exact(module).sum(0).expand(2, 5, 128)) < 1e-5
    assert torch.equal(module.bias.grad, torch.full((64,), 10.0))
    assert [name for name, _ in module.named_parameters()] == ["bias"]


def test_takes_non_contiguous_input_and_compiles():
    module, _ = make()
    x = torch.randn(128, 5, 2).permute(2, 1, 0)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
@pytest.mark.parametrize("other", MODULE_LAYOUTS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_into_either_layout(layout, other, assign):
    (source, _), (target, _) = make(layout=layout), make(layout=other)
    state = source.state_dict()
    assert {key: tuple(tensor.shape) for key, tensor in state.items()} == {
        "bias": (64,), "qdata": (64, 64), "scale": (64, 8), "global_scale": (),
    }  # fmt: skip
    target.load_state_dict(state, assign=assign)
    assert target.layout == other
    x = torch.randn(3, 128)
    assert relative_error(target(x), source(x)) < 1e-6
    again = target.state_dict()
    assert all(
        torch.equal(again[key].view(torch.uint8), tensor.view(torch.uint8))
        for key, tensor in state.items()
        if tensor.ndim
    )


def test_a_module_without_data_loads():
    source, _ = make()
    target = copy.deepcopy(source).to("meta")
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 128)
    assert torch.equal(target(x), source(x))
    with pytest.raises(RuntimeError, match="size mismatch for qdata"):
        make(32)[0].load_state_dict(source.state_dict())


@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
def test_copies_casts_and_pickles(layout):
    module, _ = make(layout=layout)
    x = torch.randn(3, 128)
    for other in (copy.deepcopy(module), saved_and_loaded(module)):
        assert torch.equal(other(x), module(x))
        assert other.layout == layout
    before = module.qdata.clone()
    module.to(torch.bfloat16)
    assert module.bias.dtype == torch.bfloat16
    assert (module.qdata.dtype, module.scale.dtype, module.global_scale.dtype) == (
        torch.uint8, torch.float8_e4m3fn, torch.float32,
    )  # fmt: skip
    assert torch.equal(module.qdata, before)
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert module.to_linears()[0].weight.dtype == torch.bfloat16


def test_a_module_of_layout_auto_follows_its_device_and_stays_tied(monkeypatch):
    weight = quantize(torch.randn(1, 64, 128))
    model = nn.ModuleList(NVFP4Linear(weight, auto_layout=True) for _ in range(2))
    x = torch.randn(3, 128)
    expected = model[0](x)
    monkeypatch.setattr("thunder_moe.nn.packed.resolve_layout", lambda *_: "tiled_64x64")
    model.to(torch.bfloat16).to(torch.float32)
    assert [module.layout for module in model] == ["tiled_64x64"] * 2
    assert model[0].qdata.data_ptr() == model[1].qdata.data_ptr()
    assert relative_error(model[1](x), expected) < 1e-6


def test_set_weight_and_to_layout():
    module, _ = make()
    x = torch.randn(3, 128)
    expected = module(x)
    holder = nn.Sequential(module)
    to_layout_(holder, "tiled_64x64")
    assert module.layout == "tiled_64x64"
    assert module.qdata.shape == (1, 2, 2048)
    assert relative_error(module(x), expected) < 1e-6
    module.set_weight(quantize(torch.ones(1, 64, 128)))
    assert relative_error(module(x), x.sum(-1, keepdim=True).expand(3, 64) + module.bias) < 1e-5
    with pytest.raises(ValueError, match=r"weight: got shape \(1, 32, 128\)"):
        module.set_weight(quantize(torch.ones(1, 32, 128)))


@pytest.mark.parametrize("bias", [False, True])
def test_several_linears_as_one_and_back(bias):
    linears = [nn.Linear(64, n, bias=bias, dtype=torch.bfloat16) for n in (48, 16, 16)]
    linears[0].weight.requires_grad_(False)
    stack = NVFP4Linear.from_linear(*linears)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    assert stack.global_scale.shape == ()
    whole = dequantize(*quantize(torch.cat([linear.weight for linear in linears])[None]).tensors())[0]
    expected = x.float() @ whole.T + (torch.cat([linear.bias for linear in linears]) if bias else 0)
    assert relative_error(stack(x), expected) < KERNEL_TOLERANCE[torch.bfloat16]
    for back, linear, rows in zip(stack.to_linears(), linears, whole.split([48, 16, 16]), strict=True):
        assert torch.equal(back.weight, rows.bfloat16())
        assert back.weight.requires_grad == linear.weight.requires_grad
        assert (back.bias is None) == (not bias)
        assert back.bias is None or torch.equal(back.bias, linear.bias)


def test_representation():
    assert repr(make()[0]) == "NVFP4Linear(in_features=128, out_features=64, bias=True, nvfp4)"
    assert "bias=False, nvfp4, layout='tiled_64x64'" in repr(make(bias=False, layout="tiled_64x64")[0])


def test_refuses():
    weight = quantize(torch.randn(1, 64, 128))
    with pytest.raises(ValueError, match=r"weight: got shape \(2, 64, 128\), wanted \(1, out_features, in_features\)"):
        NVFP4Linear(quantize(torch.randn(2, 64, 128)))
    with pytest.raises(ValueError, match=r"bias: got shape \(32,\), wanted \(64,\)"):
        NVFP4Linear(weight, torch.zeros(32))
    with pytest.raises(ValueError, match="linears: got 1 with a bias among 2"):
        NVFP4Linear.from_linear(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    with pytest.raises(ValueError, match="part_features: got "):
        NVFP4Linear(weight, part_features=(32,))
    with pytest.raises(ValueError, match="wanted shape"):
        make()[0](torch.randn(3, 64))


class Attention(nn.Module):
    """Three linears that read the same rows, as a stack."""

    def __init__(self):
        super().__init__()
        self.linears = [nn.Linear(64, n) for n in (64, 32, 16)]
        self.qkv = NVFP4LinearStack.from_linear(*self.linears)
        self.q, self.k, self.v = (NVFP4LinearPart(self.qkv, index) for index in range(3))
        self.qkv.share_in(self)

    def forward(self, x, y=None, between=lambda x: None):
        q = self.q(x)
        between(x)
        return q, self.k(x if y is None else y), self.v(x if y is None else y)

    def expected(self, *inputs):
        weights = exact(self.qkv).split([64, 32, 16])
        return [x @ w.T + linear.bias for x, w, linear in zip(inputs, weights, self.linears, strict=True)]


def same(actual, expected):
    return all(relative_error(a, e) < 1e-5 for a, e in zip(actual, expected, strict=True))


def test_a_stack_computes_once():
    model, x, y = Attention(), torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    for inputs, calls in (((x,), 1), ((y,), 1), ((x, y), 3), ((x.clone().requires_grad_(),), 1)):
        with Calls() as seen:
            out = model(*inputs)
        assert seen.count == calls
        assert model.qkv.once.held is None
        assert same(out, model.expected(inputs[0], inputs[-1], inputs[-1]))
    sum(part.sum() for part in model(x.requires_grad_())).backward()
    assert relative_error(x.grad, exact(model.qkv).sum(0).expand(2, 3, 64)) < 1e-5
    with torch.inference_mode(), Calls() as seen:
        out = model(torch.ones(2, 64))
    assert seen.count == 1
    assert same(out, model.expected(*[torch.ones(2, 64)] * 3))


def test_a_stack_never_uses_the_result_of_another_state():
    model, x = Attention(), torch.randn(3, 64)
    with torch.no_grad():
        q, k, v = model(x, between=lambda x: x.add_(1))
        assert same([q, k, v], model.expected(x - 1, x, x))
    leaf = torch.randn(3, 64)
    with torch.no_grad():
        q, k, _ = model(leaf, between=lambda x: torch.set_grad_enabled(True))
    assert (q.requires_grad, k.requires_grad) == (False, True)


@pytest.mark.parametrize("inference", [False, True])
def test_parts_that_are_called_by_hand_compute_by_themselves(inference):
    model = Attention()
    with torch.inference_mode(inference):
        x = torch.randn(3, 64)
        model(x)
        model.q(x)
        x.mul_(2)
        assert same([model.k(x), model.v(x), model.v(x)], [*model.expected(x, x, x)[1:], model.expected(x, x, x)[2]])


def test_each_part_takes_its_result_once():
    """A caller may change a result in place, and call the part again."""

    class Twice(Attention):
        def forward(self, x):
            self.q(x).zero_()
            return self.q(x), self.v(x), self.k(x)

    model, x = Twice(), torch.randn(3, 64)
    with torch.no_grad(), Calls() as seen:
        q, v, k = model(x)
    assert seen.count == 2
    assert same([q, k, v], model.expected(x, x, x))


def test_a_result_goes_with_its_last_part():
    class Watched(Attention):
        def forward(self, x):
            return *super().forward(x), self.qkv.once.held

    assert Watched()(torch.randn(3, 64))[-1] is None


def test_a_module_with_backward_hooks_computes_nothing_in_vain():
    model, x = Attention(), torch.randn(3, 64, requires_grad=True)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    with Calls() as seen:
        q, k, v = model(x)
    assert seen.count == 3
    (q.sum() + k.sum() + v.sum()).backward()
    assert relative_error(x.grad, exact(model.qkv).sum(0).expand(3, 64)) < 1e-5


def test_nothing_waits_behind_a_call_that_raised():
    def fail(x):
        raise RuntimeError("stop")

    model, x = Attention(), torch.randn(3, 64)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="stop"):
            model(x, between=fail)
        x = x.clone()
        assert model.qkv.once.held is None


def test_threads_that_share_a_stack_compute_their_own_rows():
    """The second begins when the first has called one part, and goes on when the first has ended."""
    model, inputs = Attention(), [torch.randn(3, 64) for _ in range(2)]
    begun, ended = threading.Event(), threading.Event()

    def run(x, between):
        with torch.no_grad():
            return model(x, between=between)

    def first_waits(_):
        pool.submit(run, inputs[1], second_waits).add_done_callback(results.append)
        assert begun.wait(30)

    def second_waits(_):
        begun.set()
        assert ended.wait(30)

    results = []
    with ThreadPoolExecutor(1) as pool:
        found = run(inputs[0], first_waits)
        ended.set()
    for parts, x in zip((found, results[0].result()), inputs, strict=True):
        assert same(parts, model.expected(x, x, x))


def test_threads_with_one_input_keep_their_own_modes():
    """The second thread, under autocast, begins a call with the same tensor between two parts of the first."""
    model, x, begun, ended = Attention(), torch.randn(3, 64), threading.Event(), threading.Event()

    def second():
        def waits(_):
            begun.set()
            assert ended.wait(30)

        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(x, between=waits)

    def first_waits(_):
        results.append(pool.submit(second))
        assert begun.wait(30)

    results = []
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        found = model(x, between=first_waits)
        ended.set()
    assert same(found, model.expected(x, x, x))
    assert {part.dtype for part in results[0].result()} == {torch.bfloat16}


@torch.no_grad()
def test_a_mode_that_changes_between_parts_counts():
    model, x = Attention(), torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        parts = model(x, between=lambda _: torch.set_autocast_enabled("cpu", True))
    assert [part.dtype for part in parts] == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("parts", [False, True])
def test_code_that_changes_the_input_between_parts_is_seen_in_compiled_graphs(parts):
    model, x = Attention(), torch.randn(3, 64)

    def function(x):
        q = model.q(x)
        x.mul_(2)
        if parts:
            torch._dynamo.graph_break()
        return q, model.k(x), model.v(x)

    with torch.no_grad():
        results = torch.compile(function, fullgraph=not parts, backend="eager")(x.clone())
    assert same(results, model.expected(x, 2 * x, 2 * x))


def test_a_hook_that_changes_the_input_is_seen():
    model, x = Attention(), torch.randn(3, 64)

    def hook(module, inputs, output):
        inputs[0].add_(1)

    def before(module, inputs):
        inputs[0].add_(1)

    for inference in (False, True):
        handle = model.k.register_forward_hook(hook)
        for function in (model, torch.compile(model, fullgraph=True, backend="eager")):
            with torch.no_grad(), torch.inference_mode(inference):
                changed = x.clone()
                q, k, v = function(changed)
                assert relative_error(changed, x + 1) < 1e-6
                assert same((q, k, v), model.expected(x, x, x + 1))
        handle.remove()
        handle = model.register_forward_pre_hook(before)  # behind that of the stack
        with torch.no_grad(), torch.inference_mode(inference):
            assert same(model(x.clone()), model.expected(*[x + 1] * 3))
        handle.remove()


@pytest.mark.parametrize("of_class", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_forward_that_is_replaced_may_change_the_input(of_class):
    class Replaced(Attention):
        pass

    model, x = Replaced(), torch.randn(3, 64)

    def forward(self, x):
        x.mul_(2)
        return self.q(x), self.k(x), self.v(x)

    if of_class:
        Replaced.forward = forward
    else:
        model.forward = types.MethodType(forward, model)
    for inference in (False, True):
        for function in (model, torch.compile(model, fullgraph=True, backend="eager")):
            with torch.no_grad(), torch.inference_mode(inference):
                assert same(function(x.clone()), model.expected(*[2 * x] * 3))


def test_hooks_of_accelerate_leave_a_stack_shared():
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = Attention(), torch.randn(3, 64)
    hooks.add_hook_to_module(model, hooks.ModelHook())
    for _ in range(2):
        with Calls() as seen:
            assert same(model(x), model.expected(x, x, x))
        assert seen.count == 1
        hooks.remove_hook_from_module(model)


def test_a_compiled_stack_is_one_call_and_leaves_nothing_behind():
    calls = []

    def backend(graph, _):
        calls.append(sum("scaled_mm" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    model, x = Attention(), torch.randn(2, 3, 64)
    compiled = torch.compile(nn.Sequential(model), fullgraph=True, backend=backend)
    with torch.no_grad():
        assert same(compiled(x), model.expected(x, x, x))
        assert same(compiled(x + 1), model.expected(x + 1, x + 1, x + 1))
    assert calls == [1]
    # With gradients it may be in the body of a checkpoint, which may not change Python objects.
    assert same(compiled(x), model.expected(x, x, x))
    assert calls == [1, 3]
    assert model.qkv.once.held is None


def test_a_stack_is_copied_pickled_and_moved_as_one():
    model, x = Attention(), torch.randn(2, 64)
    expected = model(x)
    assert set(model.state_dict()) == {f"qkv.{name}" for name in ("qdata", "scale", "global_scale", "bias")}
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        assert other.q.stack is other.qkv
        with Calls() as seen:
            assert same(other(x), expected)
        assert seen.count == 1
        other.register_forward_hook(lambda module, inputs, output: None)  # its id is no other hook's
        assert len(other._forward_hooks) == 2
        other.qkv.set_weight(quantize(torch.zeros(1, 112, 64)))
        assert other.q(x).abs().sum() < model.q(x).abs().sum()
    assert same(model.to(torch.float64).to(torch.float32)(x), expected)


@pytest.mark.exhaustive  # Thunder traces the modules, which other compilers' tests compare
def test_thunder_computes_the_parts_of_a_stack():
    pytest.importorskip("thunder_moe.compilers.thunder.executor")
    import thunder

    from thunder_moe import moe_executor

    model, x = Attention(), torch.randn(2, 3, 64, requires_grad=True)
    compiled = thunder.jit(model, executors=[moe_executor])
    with pytest.warns(UserWarning, match="rewrote no expert GEMM"):
        out = compiled(x)
    assert same(out, model.expected(x, x, x))
    assert str(thunder.last_traces(compiled)[-1]).count("= f16a_nvfp4weight_scaled_mm(") == 3
    sum(part.sum() for part in out).backward()
    assert relative_error(x.grad, torch.autograd.grad(sum(p.sum() for p in model(x)), x)[0]) < 1e-5


def test_float_rows_of_a_weight_with_row_scales():
    weight = quantize(torch.randn(1, 32, 64))
    module = NVFP4Linear(NVFP4Weight(weight.qdata, weight.scale, torch.rand(1, 32) + 0.5))
    assert module.global_scale.shape == (32,)
    x = torch.randn(4, 64)
    assert relative_error(module(x), x @ exact(module).T) < 1e-5
