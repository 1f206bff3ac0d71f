"""Kernels bound to a layer's weights: equal to the operators bit for bit, for eager calls of Hugging Face's blocks.
Called by pytest; the kernels run by the emulator.
"""

import pytest
import torch
from emulated_gemms import make

from thunder_moe.activations import GLU
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.by_parts import PackedOrder
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import bound
from thunder_moe.routing import RouterForm, route

E, A, H, INNER = 4, 2, 256, 64


@pytest.fixture
def weights(layout):
    gate_up, _ = make(E, 2 * INNER, H, halves=2)
    down, _ = make(E, H, INNER)
    return gate_up.to_layout(layout), down.to_layout(layout)


def inputs(tokens, dtype=torch.bfloat16):
    ids = torch.randint(-1, E + 1, (tokens, A))
    return torch.randn(tokens, H, dtype=dtype), ids, torch.rand(tokens, A)


def packed(ids):
    order = PackedOrder(ids, *ids.shape, E)
    for tensor, values in zip(order.tensors(), route(ids, E), strict=True):
        tensor.copy_(values)
    return order


@pytest.mark.parametrize("known", [False, True], ids=["routed", "known order"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_experts_equal_the_backend(weights, biased, known):
    biases = (torch.randn(E, 2 * INNER, dtype=torch.bfloat16), torch.randn(E, H)) if biased else (None, None)
    form, on_input = (GLU(1.702, 1.5, 1.0), True) if biased else (GLU(1.0, None, 0.0), False)
    run = bound.bind_experts(*weights, *biases, on_input, form)
    for tokens in (1, 5):
        args = inputs(tokens)
        order = packed(args[1]) if known else None
        assert run(*args, order) is None
        run.learn(*args)
        expected = cuda.moe_experts(*args, *weights, *biases, None, on_input, form)
        assert torch.equal(run(*args, order), expected)
        if known:
            assert torch.equal(run(*args, order.tensors()), expected)


def test_operands_that_the_operator_has_to_check_or_convert_are_left_to_it(weights):
    run = bound.bind_experts(*weights, None, None, False, GLU(1.0, None, 0.0))
    hidden, ids, scores = inputs(5)
    run.learn(hidden, ids, scores)
    assert run(hidden, ids, scores, None) is not None
    assert run(hidden.to(torch.float16), ids, scores, None) is None
    assert run(hidden, ids.int(), scores, None) is None
    assert run(hidden, ids, scores[:, :1], None) is None
    assert run(hidden[:3], ids, scores, None) is None
    assert run(hidden.t().contiguous().t(), ids, scores, None) is None
    assert run(hidden, ids, scores.t().contiguous().t(), None) is None
    assert run(torch.cat([hidden.flatten()[:1], hidden.flatten()])[1:].view(5, H), ids, scores, None) is None
    run.learn(hidden.float(), ids, scores)
    assert run(hidden.float(), ids, scores, None) is None


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_routers_equal_the_backend(emulated, tokens, biased):
    logits, bias = torch.randn(tokens, 40), torch.randn(40) if biased else None
    form = RouterForm(4, "sigmoid", num_groups=4, top_groups=2, scale=2.5)
    run = bound.bind_router(logits, bias, form, torch.bfloat16)
    scores, ids, order = run.packed(logits, bias)
    wanted = cuda.router(logits, bias, form, torch.bfloat16)
    assert all(map(torch.equal, (scores, ids, *order.tensors()), wanted))


@pytest.mark.parametrize("biased", [False, True])
def test_packed_routers_with_a_linear_layer_equal_the_backend(emulated, biased):
    hidden, weight = torch.randn(1, 64, dtype=torch.bfloat16), torch.randn(40, 64, dtype=torch.bfloat16)
    biases = (torch.randn(40, dtype=torch.bfloat16), torch.randn(40)) if biased else (None, None)
    args = RouterForm(4, "sigmoid", scale=2.5), torch.float32, torch.bfloat16
    run = bound.bind_linear_router(hidden, weight, *biases, *args)
    scores, ids, order, logits = run.packed(hidden, weight, *biases)
    wanted = cuda.linear_router(hidden, weight, *biases, *args)
    assert all(map(torch.equal, (scores, ids, *order.tensors(), logits), wanted))
    shifted = torch.cat([hidden.flatten()[:1], hidden.flatten()])[1:].view(1, 64)
    assert run.packed(shifted, weight, *biases) is None
    for others in ((hidden.half(), weight), (hidden, weight[:, :56]), (hidden.repeat(200, 1), weight)):
        assert bound.bind_linear_router(*others, *biases, *args) is None
    assert bound.bind_linear_router(hidden, weight, None, torch.randn(39), *args) is None


def test_weights_that_have_to_be_converted_are_left_to_the_operator(emulated):
    gate_up, down = (make(E, n, k)[0] for n, k in ((2 * INNER, H), (H, INNER)))
    form = GLU(1.0, None, 0.0)
    assert bound.bind_experts(gate_up.to_layout("swizzled_128x4"), down, None, None, False, form) is None
    assert bound.bind_experts(gate_up, down, torch.randn(E, 2 * INNER).double(), None, False, form) is None
    codes = down.qdata.flatten()
    moved = NVFP4Weight(torch.cat([codes[:3], codes])[3:].view(down.qdata.shape), down.scale, down.global_scale)
    assert bound.bind_experts(gate_up, moved, None, None, False, form) is None
