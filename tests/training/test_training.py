"""Training blocks in eager mode: GroupedLinear, ScaledSwiGLU, ScaledSReLU and GroupedMLP, their gradients, buffers,
main_grad, delayed weight gradients, state dicts and bad input.
Called by pytest; judged by the fp64 loops of tests/oracle.py.
"""

import copy
import io
import itertools
import pickle
from functools import partial

import oracle
import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from oracle import relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    offsets_from_splits,
    per_expert_state_dict,
)

SPLITS = {
    "with empty ones": (5, 0, 11, 0),
    "none": (0, 0, 0, 0),
    "first": (9, 0, 0, 0),
    "middle": (0, 9, 0, 0),
    "last empty": (3, 4, 2, 0),
    "even": (4, 4, 4, 4),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
PAD = 3
GPT_OSS = dict(alpha=1.702, limit=7.0, up_shift=1.0)


@pytest.fixture(params=SPLITS.values(), ids=SPLITS.keys())
def ends(request):
    return offsets_from_splits(request.param)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def padded(tensor, live):
    """Return the tensor with NaN in the rows past the end."""
    with torch.no_grad():
        tensor[live:] = float("nan")
    return tensor


def copies(*tensors):
    """Return fp64 leaves of the same values, without NaN."""
    return [None if t is None else t.detach().double().nan_to_num().requires_grad_(t.requires_grad) for t in tensors]


def check(got, exact, dtype, rows=None):
    """Check that the relative error is within tolerance, and rows past the end are zeros."""
    assert got.dtype == dtype
    if rows is not None:
        assert got[rows:].eq(0).all()
    assert got.isfinite().all()
    assert relative_error(got, exact) < TOLERANCE[dtype] or exact.eq(0).all()
    if exact.eq(0).all():
        assert got.eq(0).all()


# ---- offsets


def test_offsets_from_splits():
    for splits in ([5, 0, 11, 0], torch.tensor([5, 0, 11, 0]), torch.tensor([5, 0, 11, 0], dtype=torch.int16)):
        offsets = offsets_from_splits(splits)
        assert offsets.tolist() == [5, 5, 16, 16]
        assert offsets.dtype == torch.int32
    assert offsets_from_splits([1, 2], device="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([1, -2], "splits: got -2 among them, wanted rows per expert, at least 0"),
        (torch.tensor([1, -2]), "splits: got -2"),
        ([1.5, 2], "splits: got 1.5 among them, wanted integers"),
        (torch.tensor([1.5, 2]), "splits: got torch.float32 .*wanted integers"),
        (torch.tensor([[1, 2]]), r"splits: got torch.int64 \(1, 2\), wanted integers \(num_experts,\)"),
        ([], "splits: got none"),
        ([2**31 - 1, 1], "splits: got a sum of 2147483648, wanted at most 2147483647"),
        (torch.tensor([2**31 - 1, 1]), "splits: got a sum of 2147483648"),
    ],
)
def test_offsets_from_splits_refuses(splits, message):
    with pytest.raises(ValueError, match=message):
        offsets_from_splits(splits)


# ---- GroupedLinear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True, "scaled"])
def test_grouped_linear(ends, dtype, with_bias):
    live = int(ends[-1])
    linear = GroupedLinear(4, 24, 13, bias=bool(with_bias), dtype=dtype)
    x = padded(leaf(live + PAD, 24, dtype=dtype), live)
    scale = padded(leaf(live + PAD), live) if with_bias == "scaled" else None
    out = linear(x, ends.long() if with_bias else ends, scale)
    grad = padded(torch.randn(live + PAD, 13).to(dtype), live)
    out.backward(grad)
    leaves = copies(x, linear.weight, linear.bias, scale)
    exact = oracle.trained_linear(leaves[0], leaves[1], ends, *leaves[2:])
    exact.backward(grad.double().nan_to_num())
    check(out, exact, dtype, live)
    check(x.grad, leaves[0].grad, dtype, live)
    check(linear.weight.grad, leaves[1].grad, dtype)
    assert linear.weight.grad[torch.diff(ends, prepend=torch.zeros(1)) == 0].eq(0).all()
    if with_bias:
        check(linear.bias.grad, leaves[2].grad, dtype)
    if scale is not None:
        check(scale.grad, leaves[3].grad, torch.float32, live)


def test_any_strides_and_expanded_gradients():
    linear = GroupedLinear(3, 10, 7)
    x = leaf(10, 12)
    offsets = offsets_from_splits([2, 0, 8])
    linear(x.t()[:10, :10], offsets).sum().backward()
    (twin, weight) = copies(x, linear.weight)
    oracle.trained_linear(twin.t()[:10, :10], weight, offsets).sum().backward()
    check(x.grad, twin.grad, torch.float32)
    check(linear.weight.grad, weight.grad, torch.float32)


def test_one_group_is_linear():
    grouped, linear = GroupedLinear(1, 12, 9, bias=True), nn.Linear(12, 9)
    assert grouped.bias.abs().max() <= 12**-0.5
    grouped.load_state_dict({"weight": linear.weight[None].detach(), "bias": linear.bias[None].detach()})
    x = leaf(6, 12)
    twin = x.detach().clone().requires_grad_()
    grouped(x, offsets_from_splits([6])).sum().backward()
    linear(twin).sum().backward()
    assert relative_error(x.grad, twin.grad) < 1e-6
    assert relative_error(grouped.weight.grad[0], linear.weight.grad) < 1e-6
    assert relative_error(grouped.bias.grad[0], linear.bias.grad) < 1e-6


@pytest.mark.parametrize("frozen", list(itertools.product([False, True], repeat=4)))
def test_frozen_parts(frozen):
    ends, linear = offsets_from_splits([5, 0, 3]), GroupedLinear(3, 8, 6, bias=True)
    x, scale = leaf(9, 8), leaf(9)
    parts = dict(x=x, weight=linear.weight, bias=linear.bias, scale=scale)
    for part, is_frozen in zip(parts.values(), frozen, strict=True):
        part.requires_grad_(not is_frozen)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = linear(x, ends, scale)
    assert out.requires_grad == (not all(frozen))
    if all(frozen):
        return
    assert any(t.data_ptr() == x.data_ptr() for t in saved) == (not frozen[1])
    assert any(t.data_ptr() == linear.weight.data_ptr() for t in saved) == (not frozen[0])
    out.pow(2).sum().backward()
    leaves = copies(*parts.values())
    oracle.trained_linear(leaves[0], leaves[1], ends, *leaves[2:]).pow(2).sum().backward()
    for part, twin, is_frozen in zip(parts.values(), leaves, frozen, strict=True):
        assert (part.grad is None) == is_frozen
        if not is_frozen:
            check(part.grad, twin.grad, torch.float32)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_autocast(kind):
    ends = offsets_from_splits([5, 0, 3])
    module = GroupedLinear(3, 16, 16, bias=True) if kind == "linear" else GroupedMLP(3, 16, 16, bias=True)
    reference = nn.Linear(16, 16)
    x = leaf(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out, like = module(x, ends), reference(x)
    assert out.dtype == like.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {x.grad.dtype} == {torch.float32}
    exact = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    module(x, ends).sum().backward()
    for name, parameter in module.named_parameters():
        assert relative_error(exact[name], parameter.grad) < 2e-2


def test_second_derivatives_are_refused():
    linear, x = GroupedLinear(2, 4, 4), leaf(4, 4)
    (grad,) = torch.autograd.grad(linear(x, offsets_from_splits([2, 2])).pow(2).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        grad.sum().backward()


# ---- buffers


@pytest.mark.parametrize("make", [partial(GroupedLinear, 3, 8, 8, bias=True), partial(GroupedMLP, 3, 8, 6, bias=True)])
def test_buffers(make):
    module, ends = make(), offsets_from_splits([4, 0, 2])
    out, grad_input = torch.full((8, 8), 5.0), torch.full((8, 8), 6.0)
    for _ in range(2):  # they serve again
        x, scales = leaf(8, 8), torch.rand(8)
        twin = x.detach().clone().requires_grad_()
        result = module(x * 1, ends, scales, out=out, grad_input=grad_input)
        exact = module(twin, ends, scales)
        assert result.data_ptr() == out.data_ptr()
        assert result.requires_grad
        assert not out.requires_grad
        assert out[6:].eq(5).all()
        assert torch.equal(out[:6], exact[:6])
        result[:6].pow(2).sum().backward()
        exact.pow(2).sum().backward()
        assert not grad_input.requires_grad
        assert torch.equal(grad_input[:6], twin.grad[:6])
        assert grad_input[6:].eq(6).all()
        module.zero_grad()


def test_a_gradient_of_a_leaf_survives_the_next_use_of_its_buffer():
    linear, ends, buffer = GroupedLinear(2, 4, 4), offsets_from_splits([2, 2]), torch.empty(4, 4)
    x = leaf(4, 4)
    for factor in (1, 2):
        (factor * linear(x, ends, grad_input=buffer)).sum().backward()
    twin = x.detach().clone().requires_grad_()
    (3 * linear(twin, ends)).sum().backward()
    assert relative_error(x.grad, twin.grad) < 1e-6


def test_a_buffer_that_a_backward_still_reads_may_not_be_written():
    first, second, ends = GroupedLinear(2, 4, 4), GroupedLinear(2, 4, 4), offsets_from_splits([2, 2])
    buffer = torch.empty(4, 4)
    loss = second(first(leaf(4, 4), ends, out=buffer), ends).sum()
    first(leaf(4, 4), ends, out=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_layers_share_a_buffer_for_the_gradients_of_their_inputs():
    # 512 columns: GEMMs of few write their result after the last read.
    first, second, ends = GroupedLinear(1, 512, 512), GroupedLinear(1, 512, 512), offsets_from_splits([64])
    x, buffer = leaf(64, 512), torch.empty(64, 512)
    twin = x.detach().clone().requires_grad_()
    second(first(x, ends, grad_input=buffer), ends, grad_input=buffer).sum().backward()
    second(first(twin, ends), ends).sum().backward()
    assert relative_error(x.grad, twin.grad) < 1e-6


def test_buffers_on_the_meta_device():
    with torch.device("meta"):
        linear, x, ends = GroupedLinear(2, 4, 4), torch.empty(4, 4), torch.empty(2, dtype=torch.int32)
        assert linear(x, ends, out=torch.empty(4, 4)).is_meta


@pytest.mark.parametrize("name", ["out", "grad_input"])
@pytest.mark.parametrize("operand", ["weight", "bias", "bias_scale"])
def test_buffers_in_the_memory_of_operands_are_refused(name, operand):
    linear, ends, x = GroupedLinear(2, 4, 4, bias=True), offsets_from_splits([2, 2]), leaf(4, 4)
    memory = torch.rand(32)
    scale = memory[:4]
    buffer = {"weight": linear.weight.detach()[0], "bias_scale": memory[:16].view(4, 4)}.get(operand, memory[16:])
    if operand == "bias":
        linear.bias = torch.nn.Parameter(memory[16:24].view(2, 4))
        buffer = memory[16:].view(4, 4)
    with pytest.raises(ValueError, match=f"{name}: got memory that {operand} is in"):
        linear(x, ends, scale, **{name: buffer})


@pytest.mark.parametrize("name", ["out", "grad_input"])
def test_bad_buffers(name):
    linear, ends, x = GroupedLinear(2, 4, 4), offsets_from_splits([2, 2]), leaf(4, 4)
    bad = {
        r"wanted shape \(4, 4\)": torch.empty(3, 4),
        "wanted dtype torch.float32": torch.empty(4, 4).half(),
        "wanted device cpu": torch.empty(4, 4, device="meta"),
        "wanted a contiguous tensor": torch.empty(4, 4).t(),
        "wanted a plain one": torch.empty(4, 4, requires_grad=True),
        "memory that x is in": x.detach(),
        "got list": [1],
    }
    for message, buffer in bad.items():
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            linear(x, ends, **{name: buffer})


# ---- main_grad


@pytest.mark.parametrize("make", [partial(GroupedLinear, 3, 8, 8), partial(GroupedMLP, 3, 8, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad(make, dtype):
    module, ends = make(dtype=dtype, accumulate_into_main_grad=True), offsets_from_splits([4, 0, 2])
    plain = make(dtype=dtype)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(8, 8).to(dtype)
    for parameter in module.parameters():
        parameter.main_grad = torch.full(parameter.shape, 2.0)
    module(x, ends).sum().backward()
    plain(x, ends).sum().backward()
    for parameter, twin in zip(module.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None
        assert relative_error(parameter.main_grad - 2, twin.grad) < TOLERANCE[dtype]
        assert parameter.main_grad[1].eq(2).all()
        parameter.main_grad.fill_(float("nan"))
        parameter.overwrite_main_grad = True
        parameter.grad_added_to_main_grad = False
    module(x, ends).sum().backward()
    for parameter, twin in zip(module.parameters(), plain.parameters(), strict=True):
        assert relative_error(parameter.main_grad, twin.grad) < TOLERANCE[dtype]
        assert parameter.main_grad[1].eq(0).all()
        assert parameter.grad_added_to_main_grad
        assert parameter.grad.eq(0).all()


def test_main_grad_is_not_rounded_to_the_dtype_of_the_weight():
    linear = GroupedLinear(1, 4, 4, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(1, 4, 4)
    x = torch.randn(300, 4).bfloat16()
    linear(x, offsets_from_splits([300])).sum().backward()
    exact = x.double().sum(0).expand(4, 4)
    assert relative_error(linear.weight.main_grad[0], exact) < 1e-6


@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_in_the_dtype_of_the_weight(delay):
    linear = GroupedLinear(3, 4, 6, dtype=torch.bfloat16, accumulate_into_main_grad=True, delay_wgrad=delay)
    linear.weight.main_grad = torch.zeros(3, 6, 4, dtype=torch.bfloat16)
    ends, x = offsets_from_splits([4, 0, 2]), torch.randn(6, 4).bfloat16()
    grads = torch.randn(2, 6, 6).bfloat16()
    wanted = torch.stack(
        [g.double().T @ r.double() for g, r in zip(grads.sum(0).split([4, 0, 2]), x.split([4, 0, 2]), strict=True)]
    )
    for grad in grads:
        linear(x, ends).backward(grad)
        linear.backward_dw()
    assert relative_error(linear.weight.main_grad, wanted) < 1e-2
    assert linear.weight.grad is None
    linear.weight.overwrite_main_grad = True
    linear(x, ends).backward(grads[0])
    linear.backward_dw()
    once = torch.stack(
        [g.double().T @ r.double() for g, r in zip(grads[0].split([4, 0, 2]), x.split([4, 0, 2]), strict=True)]
    )
    assert relative_error(linear.weight.main_grad, once) < 4e-3


def test_main_grad_is_needed_by_a_gradient_alone():
    linear, ends = GroupedLinear(2, 4, 4, accumulate_into_main_grad=True), offsets_from_splits([2, 2])
    x = leaf(4, 4)
    with torch.no_grad():
        linear(x, ends)
    out = linear(x, ends)
    for bad, message in (
        (None, "main_grad: got None"),
        (torch.zeros(2, 4, 3), r"main_grad: got .*wanted shape \(2, 4, 4\)"),
        (torch.zeros(2, 4, 4).bfloat16(), "main_grad: got torch.bfloat16.*wanted dtype torch.float32$"),
        (torch.zeros(2, 4, 4).mT, "main_grad: got strides"),
    ):
        linear.weight.main_grad = bad
        with pytest.raises(ValueError, match=message):
            out.sum().backward(retain_graph=True)
    linear.weight.requires_grad_(False)
    linear(x, ends).sum().backward()
    assert x.grad is not None


# ---- delayed weight gradients


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("schedule", ["fbwfbw", "fbfbww", "ffbbww", "fbfbwfbww", "wfbww"])
@pytest.mark.parametrize("make", [partial(GroupedLinear, 3, 8, 8, bias=True), partial(GroupedMLP, 3, 8, 6, bias=True)])
def test_delayed_weight_gradients(make, schedule, main_grad):
    module, plain = make(delay_wgrad=True, accumulate_into_main_grad=main_grad), make()
    plain.load_state_dict(module.state_dict())
    weights = [parameter for parameter in module.parameters() if parameter.ndim == 3]
    fired = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter))
        if main_grad:
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    ends, waiting, losses, done = offsets_from_splits([4, 0, 2]), 0, [], 0
    for step in schedule:
        if step == "f":
            x = torch.randn(8, 8)
            losses.append(module(x, ends).pow(2).sum())
            plain(x, ends).pow(2).sum().backward()
        elif step == "b":
            losses.pop(0).backward()
            waiting += 1
        else:
            module.backward_dw()
            done += waiting > 0
            waiting = max(waiting - 1, 0)
        assert module.need_backward_dw() == (waiting > 0)
        assert len(fired) == done * len(weights)
    assert waiting == 0
    for (name, parameter), twin in zip(module.named_parameters(), plain.parameters(), strict=True):
        got = parameter.main_grad if main_grad and parameter.ndim == 3 else parameter.grad
        assert relative_error(got, twin.grad) < 1e-5, name


def test_what_waits_is_checked_and_not_copied():
    linear, ends, buffer = GroupedLinear(2, 4, 4, delay_wgrad=True), offsets_from_splits([2, 2]), torch.empty(4, 4)
    x = torch.randn(4, 4)
    linear(x, ends).sum().backward()
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert not other.need_backward_dw()
        assert torch.equal(other.weight, linear.weight)
        assert other.delay_wgrad
    x += 1
    with pytest.raises(RuntimeError, match="the rows of a weight gradient that waits were changed in place"):
        linear.backward_dw()
    linear = GroupedLinear(2, 4, 4, delay_wgrad=True)
    second = GroupedLinear(2, 4, 4)
    for _ in range(2):  # the gradient that waits is in a buffer that is written again
        second(linear(x, ends), ends, grad_input=buffer).sum().backward()
    with pytest.raises(RuntimeError, match="the gradient of a weight gradient that waits were changed"):
        linear.backward_dw()
    linear = GroupedLinear(2, 4, 4, delay_wgrad=True)
    linear(x, ends).sum().backward()
    linear.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="weight: got a frozen one, whose gradient waits"):
        linear.backward_dw()


def test_a_backward_for_others_leaves_main_grad_alone():
    linear, ends = GroupedLinear(2, 4, 4, accumulate_into_main_grad=True), torch.tensor([2, 4])
    plain = GroupedLinear(2, 4, 4)
    plain.load_state_dict(linear.state_dict())
    weight = linear.weight
    weight.main_grad = torch.zeros(2, 4, 4)
    x = leaf(4, 4)
    twin = x.detach().clone().requires_grad_()
    expected, of_weight = torch.autograd.grad(plain(twin, ends).pow(2).sum(), [twin, plain.weight])
    (got,) = torch.autograd.grad(linear(x, ends).pow(2).sum(), x)
    linear(x, ends).pow(2).sum().backward(inputs=[x])
    assert torch.equal(got, expected)
    assert torch.equal(x.grad, expected)
    (got,) = torch.autograd.grad(linear(x, ends).pow(2).sum(), weight)  # returned
    assert torch.equal(got, of_weight)
    assert not weight.main_grad.any()
    for inputs in (None, [weight], [x, weight]):
        linear(x, ends).pow(2).sum().backward(inputs=inputs)
    assert relative_error(weight.main_grad, 3 * of_weight) < 1e-6
    assert weight.grad is None


def test_gradients_that_wait_go_to_the_parameters_of_a_functional_call():
    linear, ends = GroupedLinear(2, 4, 4, delay_wgrad=True), offsets_from_splits([2, 2])
    given = (2 * linear.weight.detach()).requires_grad_()
    x = torch.randn(4, 4)
    torch.func.functional_call(linear, dict(weight=given), (x, ends)).pow(2).sum().backward()
    with torch.no_grad():
        linear.backward_dw()
    assert linear.weight.grad is None
    twin = given.detach().clone().requires_grad_()
    oracle.trained_linear(x, twin, ends).pow(2).sum().backward()
    assert relative_error(given.grad, twin.grad) < 1e-5


# ---- activations


@pytest.mark.parametrize("module", [ScaledSwiGLU(), ScaledSReLU()], ids=["swiglu", "srelu"])
@pytest.mark.parametrize("shape", [(0,), (6,), (2, 3, 0), (0, 4), (2, 0, 4)])
def test_activations_of_any_rank_and_of_nothing(module, shape):
    y = leaf(*shape)
    scales = torch.randn(shape[:-1]).requires_grad_()
    out = module(y, scales)
    gate, up = y.double().chunk(2, -1) if isinstance(module, ScaledSwiGLU) else (None, None)
    exact = torch.nn.functional.silu(gate) * up if gate is not None else y.double().relu().square()
    assert out.shape == exact.shape
    assert torch.allclose(out.double(), exact * scales.double()[..., None], atol=1e-6)
    out.sum().backward()
    assert (y.grad.shape, scales.grad.shape) == (y.shape, scales.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [None, 1, 2, 32])
@pytest.mark.parametrize("form", [{}, GPT_OSS, dict(limit=0.5)], ids=["plain", "gpt-oss", "limit"])
@pytest.mark.parametrize("scaled", [False, True])
def test_scaled_swiglu(dtype, interleave, form, scaled):
    y = (3 * torch.randn(2, 5, 128)).to(dtype).requires_grad_()
    scales = leaf(2, 5) if scaled else None
    out = ScaledSwiGLU(interleave, **form)(y, scales)
    grad = torch.randn(2, 5, 64).to(dtype)
    out.backward(grad)
    twin, factors = copies(y, scales)
    exact = oracle.scaled_swiglu(twin, factors, interleave, **form)
    exact.backward(grad.double())
    check(out, exact, dtype)
    check(y.grad, twin.grad, dtype)
    if scaled:
        check(scales.grad, factors.grad, torch.float32)


def test_gradients_pass_where_gate_and_up_equal_the_limit():
    y = torch.tensor([[2.0, -2.0], [2.0, 2.0], [2.5, 2.5], [-9.0, -2.5]], requires_grad=True)
    ScaledSwiGLU(limit=2.0)(y).sum().backward()
    assert y.grad.ne(0).tolist() == [[True, True], [True, True], [False, False], [True, False]]


def test_activations_are_rounded_once_and_keep_little():
    y, scales = leaf(4, 256, dtype=torch.bfloat16), leaf(4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = ScaledSwiGLU()(y, scales)
    assert {t.data_ptr() for t in saved} == {y.data_ptr(), scales.data_ptr()}
    # To bfloat16 from float32, which is itself within half a unit of the exact one.
    assert (out.double() - oracle.scaled_swiglu(y, scales)).abs().le(out.abs() * 2**-8 * 1.001 + 1e-30).all()
    ScaledSReLU()(y, scales).float().sum().backward()
    assert (scales.grad.dtype, y.grad.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
def test_results_have_the_strides_of_the_operators_fakes(kind):
    y, scales, ends = torch.randn(16, 6).t(), torch.rand(6), offsets_from_splits([2, 0, 2])
    ops = torch.ops.thunder_moe
    grad = torch.randn(16 if kind == "srelu" else 8, 6).t()
    for factors, offsets in itertools.product((None, scales), (None, ends)):
        assert ops.scaled_activation(y, factors, offsets, kind=kind).is_contiguous()
        needs = True, factors is not None
        assert ops.scaled_activation_backward(grad, y, factors, offsets, *needs, kind=kind)[0].is_contiguous()
    assert ops.grouped_bias(y, ends).is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_srelu(dtype):
    y, scales = leaf(7, 16, dtype=dtype), leaf(7)
    out = ScaledSReLU()(y, scales)
    grad = torch.randn(7, 16).to(dtype)
    out.backward(grad)
    twin, factors = copies(y, scales)
    exact = twin.relu() ** 2 * factors[:, None]
    exact.backward(grad.double())
    check(out, exact, dtype)
    check(y.grad, twin.grad, dtype)
    check(scales.grad, factors.grad, torch.float32)


# ---- GroupedMLP


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [None, 2])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_mlp(ends, dtype, interleave, with_bias, scaled):
    live = int(ends[-1])
    mlp = GroupedMLP(4, 12, 10, bias=with_bias, activation=ScaledSwiGLU(interleave, **GPT_OSS), dtype=dtype)
    x = padded(leaf(live + PAD, 12, dtype=dtype), live)
    scales = padded(leaf(live + PAD), live) if scaled else None
    out = mlp(x, ends, scales)
    grad = padded(torch.randn(live + PAD, 12).to(dtype), live)
    out.backward(grad)
    parameters = (mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.bias)
    twin, factors, *others = copies(x, scales, *parameters)
    exact = oracle.trained_mlp(twin, ends, *others, scales=factors, interleave=interleave, **GPT_OSS)
    exact.backward(grad.double().nan_to_num())
    tolerant = partial(check, dtype=dtype)
    tolerant(out, exact, rows=live)
    tolerant(x.grad, twin.grad, rows=live)
    for parameter, other in zip(parameters, others, strict=True):
        if parameter is not None:
            tolerant(parameter.grad, other.grad)
    if scaled:
        assert scales.grad[live:].eq(0).all()
        assert relative_error(scales.grad, factors.grad) < TOLERANCE[dtype] or live == 0


@pytest.mark.parametrize("activation", [None, ScaledSReLU(), nn.Identity()], ids=["swiglu", "srelu", "own"])
def test_grouped_mlp_is_its_parts(activation):
    class Own(nn.Module):
        gated = False

        def forward(self, y, scales=None):
            return y.tanh() if scales is None else y.tanh() * scales[:, None]

    activation = Own() if isinstance(activation, nn.Identity) else activation
    mlp, ends = GroupedMLP(3, 8, 6, bias=True, activation=activation), offsets_from_splits([4, 0, 2])
    x, scales = padded(leaf(8, 8), 6), padded(leaf(8), 6)
    mlp(x, ends, scales)[:6].pow(2).sum().backward()
    grads = [x.grad, scales.grad, *(parameter.grad for parameter in mlp.parameters())]
    x.grad = scales.grad = None
    mlp.zero_grad()
    rows = mlp.activation(mlp.gate_up_proj(x, ends), scales)
    mlp.down_proj(rows, ends, scales)[:6].pow(2).sum().backward()
    parts = [x.grad, scales.grad, *(parameter.grad for parameter in mlp.parameters())]
    for got, exact in zip(grads, parts, strict=True):
        assert relative_error(got.nan_to_num(), exact.nan_to_num()) < 1e-6
    assert x.grad[6:].eq(0).all()


def test_grouped_mlp_keeps_its_input_and_gate_up_alone():
    mlp, ends = GroupedMLP(3, 8, 6, bias=True), offsets_from_splits([4, 0, 2])
    x, saved = leaf(7, 8), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        mlp(x, ends, leaf(7))
    per_row = sorted(tuple(t.shape) for t in saved if t.is_floating_point() and t.shape[:1] == (7,))
    assert per_row == [(7,), (7, 8), (7, 12)]


@pytest.mark.parametrize("frozen", list(itertools.product([False, True], repeat=6)))
def test_frozen_parts_of_grouped_mlp(frozen):
    mlp, ends = GroupedMLP(3, 8, 6, bias=True), offsets_from_splits([4, 0, 2])
    x, scales = leaf(6, 8), leaf(6)
    leaves = [x, scales, mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.bias]
    for part, is_frozen in zip(leaves, frozen, strict=True):
        part.requires_grad_(not is_frozen)
    out = mlp(x, ends, scales)
    if all(frozen):
        assert not out.requires_grad
        return
    out.pow(2).sum().backward()
    twin, factors, *others = copies(*leaves)
    oracle.trained_mlp(twin, ends, *others, scales=factors).pow(2).sum().backward()
    for part, other, is_frozen in zip(leaves, (twin, factors, *others), frozen, strict=True):
        assert (part.grad is None) == is_frozen
        if not is_frozen:
            check(part.grad, other.grad, torch.float32)


def test_grouped_mlp_with_hooks_calls_its_parts():
    mlp, ends = GroupedMLP(3, 8, 6), offsets_from_splits([4, 0, 2])
    x, seen = torch.randn(6, 8), []
    exact = mlp(x, ends)
    mlp.down_proj.register_forward_hook(lambda *args: seen.append("down"))
    mlp.activation.register_forward_hook(lambda *args: seen.append("activation"))
    assert relative_error(mlp(x, ends), exact) < 1e-6
    assert seen == ["activation", "down"]


# ---- state dicts, copies, wrappers of the backward


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(assign):
    mlp = GroupedMLP(3, 8, 6, bias=True)
    per_expert = per_expert_state_dict(nn.ModuleDict(dict(mlp=mlp)))
    assert list(per_expert)[:4] == [f"mlp.gate_up_proj.weight{e}" for e in range(3)] + ["mlp.gate_up_proj.bias0"]
    assert per_expert["mlp.down_proj.bias2"].shape == (8,)
    extra = {f"{name}_extra_state": torch.ones(1) for name in ("mlp.", "mlp.down_proj.", "mlp.activation.")}
    for state in (nn.ModuleDict(dict(mlp=mlp)).state_dict(), per_expert | extra):
        other = nn.ModuleDict(dict(mlp=GroupedMLP(3, 8, 6, bias=True)))
        other.load_state_dict(state, assign=assign)
        for parameter, twin in zip(other.parameters(), mlp.parameters(), strict=True):
            assert torch.equal(parameter, twin)
            assert parameter.requires_grad
    assert sorted(other.state_dict()) == sorted(nn.ModuleDict(dict(mlp=mlp)).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_missing_expert_is_a_missing_key(dtype):
    mlp, other = GroupedMLP(3, 8, 6, bias=True, dtype=dtype), GroupedMLP(3, 8, 6, bias=True)
    before = copy.deepcopy(other.state_dict())
    state = per_expert_state_dict(mlp)
    del state["down_proj.weight1"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "down_proj.weight1"'):
        other.load_state_dict(state)
    for assign in (False, True):
        other = GroupedMLP(3, 8, 6, bias=True)
        other.load_state_dict(before)
        found = other.load_state_dict(state, strict=False, assign=assign)
        assert found.missing_keys == ["down_proj.weight1"]
        assert not found.unexpected_keys
        assert torch.equal(other.down_proj.weight[::2], mlp.down_proj.weight[::2].float())
        assert torch.equal(other.down_proj.weight[1], before["down_proj.weight"][1])
        assert torch.equal(other.gate_up_proj.weight.float(), mlp.gate_up_proj.weight.float())
    with torch.device("meta"):
        empty = GroupedMLP(3, 8, 6, bias=True)
    assert "down_proj.weight1" in empty.load_state_dict(state, strict=False, assign=True).missing_keys
    assert empty.down_proj.weight.is_meta
    assert torch.equal(empty.gate_up_proj.weight, mlp.gate_up_proj.weight)


def test_a_state_dict_that_does_not_fit_loads_nothing():
    mlp, other = GroupedMLP(3, 8, 6, bias=True), GroupedMLP(3, 8, 6, bias=True)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r"got both gate_up_proj.weight and gate_up_proj.weight0"):
        other.load_state_dict(mlp.state_dict() | per_expert_state_dict(mlp))
    misshapen = per_expert_state_dict(mlp) | {"down_proj.weight1": torch.zeros(3, 3)}
    with pytest.raises(ValueError, match=r"got down_proj.weight1 of shape \(3, 3\), wanted \(8, 6\)"):
        other.load_state_dict(misshapen)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])
    with pytest.raises(RuntimeError, match="Unexpected key.*bias0"):
        GroupedLinear(3, 8, 12).load_state_dict(per_expert_state_dict(mlp.gate_up_proj))


def test_a_shared_module_has_one_tensor_per_expert_under_each_name():
    linear = GroupedLinear(2, 4, 4)
    model = nn.ModuleDict(dict(a=linear, b=linear))
    state = per_expert_state_dict(model)
    assert list(state) == ["a.weight0", "a.weight1", "b.weight0", "b.weight1"]
    model.load_state_dict(state)


def test_copies_pickles_and_meta():
    mlp = GroupedMLP(3, 8, 6, bias=True, activation=ScaledSwiGLU(2, limit=3))
    ends, x = offsets_from_splits([4, 0, 2]), torch.randn(6, 8)
    stream = io.BytesIO()
    torch.save(mlp, stream)
    stream.seek(0)
    for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp)), torch.load(stream, weights_only=False)):
        assert torch.equal(other(x, ends), mlp(x, ends))
    with torch.device("meta"):
        empty = GroupedMLP(3, 8, 6, bias=True)
    empty.to_empty(device="cpu")
    for linear in (empty.gate_up_proj, empty.down_proj):
        linear.reset_parameters()
        assert linear.weight.abs().max() <= linear.in_features**-0.5
        assert linear.bias.abs().max() <= linear.in_features**-0.5


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("wrapper", ["checkpoint", "reentrant", "save_on_cpu"])
def test_checkpoint_and_save_on_cpu(wrapper, delay, main_grad):
    mlp = GroupedMLP(3, 8, 6, bias=True, delay_wgrad=delay, accumulate_into_main_grad=main_grad)
    x, scales, ends = leaf(8, 8), leaf(8), offsets_from_splits([4, 0, 2])

    def run(call):
        mlp.zero_grad()
        for parameter in mlp.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)
        x.grad = scales.grad = None
        call().pow(2).sum().backward()
        mlp.backward_dw()
        of_parameters = [p.main_grad if main_grad and p.ndim == 3 else p.grad for p in mlp.parameters()]
        return [x.grad, scales.grad, *of_parameters]

    exact = run(lambda: mlp(x, ends, scales))
    if wrapper == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            got = run(lambda: mlp(x, ends, scales))
    else:
        got = run(lambda: checkpoint(mlp, x, ends, scales, use_reentrant=wrapper == "reentrant"))
    for a, b in zip(got, exact, strict=True):
        assert torch.equal(a, b)


def test_fully_shard():
    dist = torch.distributed
    mlp, ends, x = GroupedMLP(4, 8, 6, bias=True), offsets_from_splits([2, 0, 3, 1]), torch.randn(6, 8)
    plain = copy.deepcopy(mlp)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.distributed.fsdp.fully_shard(mlp, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        for module in (mlp, plain):
            module(x, ends).pow(2).sum().backward()
        for sharded, parameter in zip(mlp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(sharded.grad.full_tensor(), parameter.grad)
    finally:
        dist.destroy_process_group()


# ---- bad input


def test_bad_input():
    linear, x, ends = GroupedLinear(2, 4, 4), torch.randn(6, 4), torch.tensor([2, 6])
    biased, mlp = GroupedLinear(2, 4, 4, bias=True), GroupedMLP(2, 4, 4)
    bad = [
        (lambda: linear(x, ends[:1]), r"offsets: got .*\(1,\).*wanted shape \(2,\)"),
        (lambda: linear(x, ends.float()), "offsets: got torch.float32.*wanted dtype int32 or int64"),
        (lambda: linear(x, torch.tensor([6, 2])), r"offsets: got \[6, 2\], wanted cumulative row ends"),
        (lambda: linear(x, torch.tensor([-1, 2])), r"offsets: got \[-1, 2\]"),
        (lambda: linear(x, torch.tensor([2, 7])), "offsets: got a last row end of 7, wanted at most the 6 rows of x"),
        (lambda: linear(x, torch.tensor([2, 2**40])), "offsets: got a last row end of 1099511627776"),
        (lambda: linear(x, ends, torch.rand(6)), "bias_scale: got a tensor without a bias"),
        (lambda: biased(x, ends, torch.rand(5)), r"bias_scale: got .*\(5,\).*wanted shape \(6,\)"),
        (lambda: biased(x, ends, torch.ones(6).int()), "bias_scale: got torch.int32.*wanted a floating-point dtype"),
        (lambda: mlp(x, ends, torch.rand(6, 1)), r"scales: got .*\(6, 1\).*wanted shape \(6,\)"),
        (lambda: mlp(x, ends, torch.ones(6).long()), "scales: got torch.int64.*wanted a floating-point dtype"),
        (lambda: mlp(x[:, :3], ends), r"x: got .*\(6, 3\).*wanted shape \(rows, in_features = 4\)"),
        (lambda: ScaledSwiGLU()(torch.tensor(1.0)), "y: got .*wanted at least one dimension"),
        (lambda: ScaledSReLU()(torch.tensor(1.0)), "y: got .*wanted at least one dimension"),
        (lambda: ScaledSwiGLU()(torch.randn(2, 3)), "y: got 3 columns, wanted a multiple of 2"),
        (
            lambda: ScaledSwiGLU(32)(torch.randn(2, 96)),
            "y: got 96 columns, wanted a multiple of 64.*glu_interleave_size",
        ),
        (lambda: ScaledSwiGLU()(torch.randn(2, 4), torch.rand(3)), r"scales: got .*\(3,\).*wanted shape \(2,\)"),
        (lambda: ScaledSwiGLU()(torch.randn(2, 4), torch.ones(2).int()), "scales: got torch.int32"),
        (lambda: ScaledSwiGLU(0), "glu_interleave_size: got 0"),
        (lambda: ScaledSwiGLU(limit=0), "limit: got 0, wanted a positive number"),
        (lambda: ScaledSwiGLU(limit=-1.0), "limit: got -1.0"),
        (lambda: GroupedMLP(2, 4, 6, activation=ScaledSwiGLU(4)), "intermediate_size: got 6, wanted a multiple of"),
        (lambda: GroupedMLP(2, 4, 0), "intermediate_size: got 0"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()


def test_grouped_swiglu_trains_with_padding():
    block, ends = GroupedSwiGLU(3, 8, 6), offsets_from_splits([4, 0, 2])
    x = padded(leaf(8, 8), 6)
    block(x, ends).sum().backward()
    assert x.grad[6:].eq(0).all()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())
