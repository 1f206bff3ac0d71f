"""moe_route, the gather and combine forms of the operators, and moe_experts: results, gradients, opcheck, bad input.
Called by pytest; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, moe_experts, relative_error

from thunder_moe import moe_experts as experts_op
from thunder_moe import moe_route
from thunder_moe.kernels.select import BACKENDS, select, use_backend
from thunder_moe.nvfp4 import NVFP4Weight, quantize
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.grouped_mm_combine import f16a_nvfp4weight_grouped_mm_combine
from thunder_moe.ops.grouped_swiglu import f16a_nvfp4weight_grouped_swiglu

E, H, INNER, T, A = 5, 48, 32, 7, 2
DTYPES = list(KERNEL_TOLERANCE)
GPT_OSS = dict(alpha=1.702, limit=1.5, up_shift=1.0)


def make():
    """(gate_up, down), and the float32 weights that they stand for."""
    gate_up = NVFP4Weight.concatenate(quantize(torch.randn(E, INNER, H)), quantize(torch.randn(E, INNER, H) * 2))
    down = quantize(torch.randn(E, H, INNER))
    return (gate_up, down), [dequantize(*weight.tensors()) for weight in (gate_up, down)]


def make_routing(tokens=T, top_k=A, experts=E):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    return ids.long(), torch.rand(tokens, top_k)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (7, 2, 5), (300, 8, 128), (0, 2, 5), (50, 3, 512)])
def test_route_sorts_the_slots(tokens, top_k, experts, dtype):
    ids = torch.randint(-1, experts + 1, (tokens, top_k)).to(dtype)  # -1 and `experts` are sentinels
    row_slot, offsets, slot_row = moe_route(ids, experts)
    flat = ids.flatten().tolist()
    slots = [slot for expert in range(experts) for slot, of in enumerate(flat) if of == expert]
    lost = [slot for slot, of in enumerate(flat) if not 0 <= of < experts]
    assert row_slot.tolist() == slots + lost
    counts = [flat.count(expert) for expert in range(experts)]
    assert offsets.tolist() == torch.tensor(counts).cumsum(0).tolist()
    row_of = {slot: row for row, slot in enumerate(slots)}
    assert slot_row.flatten().tolist() == [row_of.get(slot, -1) for slot in range(len(flat))]
    assert [tensor.dtype for tensor in (row_slot, offsets, slot_row)] == [torch.int32] * 3


@pytest.mark.parametrize("backend", [name for name, devices in BACKENDS.items() if not devices or "cpu" in devices])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_oracle(backend, dtype, form, weight_on_input, bias):
    weights, exact = make()
    ids, scores = make_routing()
    ids[3, 1], ids[5] = E, -1  # sentinels; token 5 has no expert at all
    hidden = torch.randn(T, H, dtype=dtype)
    biases = (torch.randn(E, 2 * INNER), torch.randn(E, H)) if bias else (None, None)
    options = dict(weight_on_input=weight_on_input, **form)
    with use_backend(backend):
        out = experts_op(hidden, ids, scores, *weights, gate_up_bias=biases[0], down_bias=biases[1], **options)
    expected = moe_experts(hidden, ids, scores, *exact, *biases, **options)
    assert out.dtype == dtype
    assert out[5].count_nonzero() == 0
    assert relative_error(out, expected) < 1.5 * KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (1, 5), (40, 1)])
def test_edges(tokens, top_k):
    weights, exact = make()
    ids, scores = make_routing(tokens, top_k)
    hidden = torch.randn(tokens, H)
    out = experts_op(hidden, ids, scores, *weights)
    assert relative_error(out, moe_experts(hidden, ids, scores, *exact, None, None)) < 1e-5


@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_gradients(form, weight_on_input):
    weights, exact = make()
    ids, scores = make_routing()
    ids[3, 1], ids[5] = E, -1
    leaves = [torch.randn(T, H), scores, torch.randn(E, 2 * INNER), torch.randn(E, H)]
    grad = torch.randn(T, H)
    results = []
    for function, matrices in ((experts_op, weights), (moe_experts, exact)):
        hidden, weight, gate_up_bias, down_bias = (leaf.clone().requires_grad_() for leaf in leaves)
        biases = dict(gate_up_bias=gate_up_bias, down_bias=down_bias)
        out = function(hidden, ids, weight, *matrices, **biases, weight_on_input=weight_on_input, **form)
        out.backward(grad)
        results.append((hidden.grad, weight.grad, gate_up_bias.grad, down_bias.grad))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_gradients_ignore_undefined_rows():
    """Sentinels' rows are undefined: here they are NaN, and no gradient may show it."""
    weights, _ = make()
    ids = torch.tensor([[0, E], [1, 2]])
    scores = torch.rand(2, 2, requires_grad=True)
    _, offsets, slot_row = moe_route(ids, E)
    rows = torch.randn(4, INNER)
    rows[3] = torch.nan
    rows.requires_grad_()
    out = f16a_nvfp4weight_grouped_mm_combine(rows, *operands(weights[1]), offsets, slot_row, scores)
    out.sum().backward()
    assert bool(out.isfinite().all() & scores.grad.isfinite().all() & rows.grad.isfinite().all())
    assert rows.grad[3].count_nonzero() == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    weights, _ = make()

    def layer(hidden, ids, scores):
        return experts_op(hidden, ids, scores, *weights)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (T, 11):
        ids, scores = make_routing(tokens)
        hidden = torch.randn(tokens, H)
        assert torch.equal(compiled(hidden, ids, scores), layer(hidden, ids, scores))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(opcheck, dtype):
    weights, _ = make()
    ids, scores = make_routing()
    ops = torch.ops.thunder_moe
    opcheck(ops.moe_route.default, (ids, E))
    row_slot, offsets, slot_row = moe_route(ids, E)
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    gathered = (hidden, *operands(weights[0]), offsets, row_slot, scores.requires_grad_(), torch.randn(E, 2 * INNER))
    opcheck(ops.f16a_nvfp4weight_grouped_swiglu.default, gathered, GPT_OSS)
    rows = torch.randn(T * A, INNER, dtype=dtype, requires_grad=True)
    bias = torch.randn(E, H, requires_grad=True)
    opcheck(
        ops.f16a_nvfp4weight_grouped_mm_combine.default, (rows, *operands(weights[1]), offsets, slot_row, scores, bias)
    )


def test_refuses():
    weights, _ = make()
    ids, scores = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    hidden, rows = torch.randn(T, H), torch.randn(T * A, INNER)
    gate_up, down = (operands(weight) for weight in weights)
    swiglu, combine = f16a_nvfp4weight_grouped_swiglu, f16a_nvfp4weight_grouped_mm_combine
    with pytest.raises(ValueError, match="expert_ids: .*dtype int32 or int64"):
        moe_route(ids.float(), E)
    with pytest.raises(ValueError, match="expert_ids: .*shape \\(tokens, top_k\\)"):
        moe_route(ids[0], E)
    with pytest.raises(ValueError, match="num_experts: got 0"):
        moe_route(ids, 0)
    with pytest.raises(ValueError, match="row_slot: .*wanted dtype int32"):
        swiglu(hidden, *gate_up, offsets, row_slot.long())
    with pytest.raises(ValueError, match="row_slot: .*wanted shape \\(top_k \\* 7,\\)"):
        swiglu(hidden, *gate_up, offsets, row_slot[:-1])
    with pytest.raises(ValueError, match="slot_scale: .*wanted shape \\(7, 2\\)"):
        swiglu(hidden, *gate_up, offsets, row_slot, scores[:, :1])
    with pytest.raises(ValueError, match="bias: .*wanted shape \\(5, 64\\)"):
        swiglu(hidden, *gate_up, offsets, row_slot, scores, torch.randn(E, INNER))
    with pytest.raises(ValueError, match="limit: got -1"):
        swiglu(hidden, *gate_up, offsets, row_slot, limit=-1.0)
    with pytest.raises(ValueError, match="slot_row: .*wanted shape \\(tokens, top_k\\)"):
        combine(rows, *down, offsets, slot_row.flatten())
    with pytest.raises(ValueError, match="slot_weight: .*a floating-point dtype"):
        combine(rows, *down, offsets, slot_row, ids)
    with pytest.raises(ValueError, match="expert_weights: .*that of expert_ids"):
        experts_op(hidden, ids, scores[:1], *weights)


def test_use_backend_insists():
    with use_backend("reference"):
        assert select(torch.device("cpu")).__name__.endswith("reference")
    with pytest.raises(ValueError, match="backend: got 'marlin', wanted one of"), use_backend("marlin"):
        pass


def test_activation_of_extreme_values():
    """The CPU's own exponential: large magnitudes of both signs, NaN and infinities come out as torch's."""
    gate = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 200.0, 1e30, torch.nan, torch.inf])
    weight = quantize(torch.eye(16).repeat(1, 2, 1))  # gate and up of row x: x itself
    exact = dequantize(*weight.tensors())[0, 0, 0]
    rows = torch.zeros(len(gate), 16)
    rows[:, 3] = gate
    out = f16a_nvfp4weight_grouped_swiglu(rows, *operands(weight), torch.tensor([len(gate)], dtype=torch.int32))
    y = gate * exact
    assert torch.allclose(out[:, 3], torch.nn.functional.silu(y) * y, rtol=1e-5, atol=1e-30, equal_nan=True)
