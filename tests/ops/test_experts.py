"""moe_route, the gather and combine forms of the operators, and moe_experts: results, gradients, opcheck, bad input.
Called by pytest; judged by tests/oracle.py.
"""

import itertools

import pytest
import torch
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, dequantize, moe_experts, relative_error
from torch.autograd import forward_ad

from thunder_moe import moe_experts as experts_op
from thunder_moe import moe_route
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels.select import BACKENDS, select, use_backend
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.grouped_mm_combine import f16a_nvfp4weight_grouped_mm_combine
from thunder_moe.ops.grouped_swiglu import f16a_nvfp4weight_grouped_swiglu
from thunder_moe.ops.operator import OPERATORS

E, H, INNER, T, A = 5, 48, 32, 7, 2
DTYPES = list(KERNEL_TOLERANCE)
swiglu_backward = OPERATORS["f16a_nvfp4weight_grouped_swiglu"].backward
combine_backward = OPERATORS["f16a_nvfp4weight_grouped_mm_combine"].backward
GPT_OSS = dict(alpha=1.702, limit=1.5, up_shift=1.0)


def make():
    """Return (gate_up, down), and the float32 weights that they stand for."""
    gate_up = NVFP4Weight.concatenate(quantize(torch.randn(E, INNER, H)), quantize(torch.randn(E, INNER, H) * 2))
    down = quantize(torch.randn(E, H, INNER))
    return (gate_up, down), [dequantize(*weight.tensors()) for weight in (gate_up, down)]


def make_routing(tokens=T, top_k=A, experts=E):
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) if tokens else torch.empty(0, top_k)
    return ids.long(), torch.rand(tokens, top_k)


def test_experts_that_processes_share():
    """The option is a hint for kernels that does not change results."""
    (gate_up, down), _ = make()
    x, (ids, weights) = torch.randn(T, H), make_routing()
    wanted = experts_op(x, ids, weights, gate_up, down)
    assert torch.equal(experts_op(x, ids, weights, gate_up, down, expert_ranks=4), wanted)
    x.requires_grad_()
    assert experts_op(x, ids, weights, gate_up, down, expert_ranks=4).sum().backward() is None
    assert x.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="expert_ranks: got 0, wanted at least 1"):
        experts_op(x, ids, weights, gate_up, down, expert_ranks=0)


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


@pytest.mark.parametrize("dynamic", [*others_slow([False], exhaustive=True), True])
def test_compiles_whole(dynamic):
    weights, _ = make()

    def layer(hidden, ids, scores):
        return experts_op(hidden, ids, scores, *weights)

    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (T, 11):
        ids, scores = make_routing(tokens)
        hidden = torch.randn(tokens, H)
        assert torch.equal(compiled(hidden, ids, scores), layer(hidden, ids, scores))


def test_one_graph_serves_any_number_of_tokens():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    weights, exact = make()
    compiled = torch.compile(experts_op, backend=count, fullgraph=True, dynamic=True)
    for tokens in (4, 5, 9):
        hidden_states, (ids, weight) = torch.randn(tokens, H), make_routing(tokens)
        out = compiled(hidden_states, ids, weight, *weights)
        assert relative_error(out, moe_experts(hidden_states, ids, weight, *exact)) < KERNEL_TOLERANCE[torch.float32]
    assert len(graphs) == 1


def test_opcheck(opcheck):
    weights, _ = make()
    ids, scores = make_routing()
    ops = torch.ops.thunder_moe
    opcheck(ops.moe_route.default, (ids, E))
    row_slot, offsets, slot_row = moe_route(ids, E)
    hidden = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    gathered = (hidden, *operands(weights[0]), offsets, row_slot, scores.requires_grad_(), torch.randn(E, 2 * INNER))
    opcheck(ops.f16a_nvfp4weight_grouped_swiglu.default, gathered, GPT_OSS)
    rows = torch.randn(T * A, INNER, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(E, H, requires_grad=True)
    opcheck(
        ops.f16a_nvfp4weight_grouped_mm_combine.default, (rows, *operands(weights[1]), offsets, slot_row, scores, bias)
    )


def test_opcheck_of_the_whole_layer(opcheck):
    weights, _ = make()
    ids, scores = make_routing()
    biases = torch.randn(E, 2 * INNER, requires_grad=True), torch.randn(E, H, requires_grad=True)
    hidden = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True)
    args = (hidden, ids, scores.requires_grad_(), *operands(weights[0]), *operands(weights[1]), *biases)
    operator = torch.ops.thunder_moe.f16a_nvfp4weight_moe_experts.default
    opcheck(operator, args, GPT_OSS)
    of_a_router = (*args, *moe_route(ids, E)), dict(weight_on_input=True)
    opcheck(operator, *of_a_router, test_utils=("test_schema", "test_faketensor"))


def test_weights_get_no_gradient():
    weights, _ = make()
    ids, scores = make_routing()
    for position, name in ((5, "gate_up_global_scale"), (8, "down_global_scale")):
        args = [torch.randn(T, H), ids, scores, *operands(weights[0]), *operands(weights[1])]
        args[position] = args[position].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"{name}: got a tensor that requires a gradient"):
            torch.ops.thunder_moe.f16a_nvfp4weight_moe_experts(*args)


def by_the_operators(hidden, ids, scores, gate_up, down, gate_up_bias, down_bias, weight_on_input, form):
    row_slot, offsets, slot_row = moe_route(ids, E)
    on_input, on_output = (scores, None) if weight_on_input else (None, scores)
    rows = f16a_nvfp4weight_grouped_swiglu(
        hidden, *operands(gate_up), offsets, row_slot, on_input, gate_up_bias, **form
    )
    return f16a_nvfp4weight_grouped_mm_combine(rows, *operands(down), offsets, slot_row, on_output, down_bias)


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_equals_its_operators(backend, dtype, weight_on_input):
    weights, _ = make()
    ids, scores = make_routing()
    ids[3, 1], ids[5] = E, -1
    hidden, biases = torch.randn(T, H, dtype=dtype), (torch.randn(E, 2 * INNER), torch.randn(E, H))
    given = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True), weight_on_input=weight_on_input, **GPT_OSS)
    with use_backend(backend):
        expected = by_the_operators(hidden, ids, scores, *weights, *biases, weight_on_input, GPT_OSS)
        for order in (None, moe_route(ids, E)):
            assert torch.equal(experts_op(hidden, ids, scores, *weights, order=order, **given), expected)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
def test_any_of_the_gradients(wanted):
    """The requested gradients equal the gradients of the operators one after the other."""
    weights, _ = make()
    ids, scores = make_routing()
    leaves = [torch.randn(T, H), scores, torch.randn(E, 2 * INNER), torch.randn(E, H)]
    for on_input in (False, True):
        results = []
        for function in (
            lambda h, s, g, d, on=on_input: experts_op(
                h, ids, s, *weights, gate_up_bias=g, down_bias=d, order=moe_route(ids, E), weight_on_input=on
            ),
            lambda h, s, g, d, on=on_input: by_the_operators(h, ids, s, *weights, g, d, on, {}),
        ):
            given = [leaf.clone().requires_grad_(each) for leaf, each in zip(leaves, wanted, strict=True)]
            out = function(*given)
            assert out.requires_grad == any(wanted)
            if any(wanted):
                out.square().sum().backward()
            results.append([leaf.grad for leaf in given])
        for actual, expected, each in zip(*results, wanted, strict=True):
            assert (actual is not None) == each
            assert not each or relative_error(actual, expected) < 1e-5


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
    with pytest.raises(ValueError, match="expert_ids: .*wanted less than 2\\*\\*31 ids"):
        moe_route(ids[:1, :1].expand(2**20, 2**11), E)
    for dtype in (torch.float8_e4m3fn, torch.int32):
        with pytest.raises(ValueError, match="bias: .*a floating-point dtype of 16 bits or more"):
            swiglu(hidden, *gate_up, offsets, row_slot, None, torch.zeros(E, 2 * INNER, dtype=dtype))
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
    with pytest.raises(ValueError, match="expert_weights: .*as expert_ids has"):
        experts_op(hidden, ids, scores[:1], *weights)


def test_experts_refuse_operands_that_do_not_fit():
    (gate_up, down), _ = make()
    ids, scores = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    good = dict(hidden_states=torch.randn(T, H), expert_ids=ids, expert_weights=scores, gate_up=gate_up, down=down)
    bad = [
        (dict(hidden_states=torch.randn(1, T, H)), r"hidden_states: .*wanted shape \(tokens, hidden_size\)"),
        (dict(hidden_states=torch.randn(T, H + 16)), "hidden_states: .*wanted 48 in dim 1, by gate_up"),
        (dict(hidden_states=torch.randn(2 * T, H)), r"expert_ids: .*wanted shape \(14, top_k\), 14 being the tokens"),
        (dict(hidden_states=torch.randn(T // 2, H)), r"expert_ids: .*wanted shape \(3, top_k\)"),
        (dict(hidden_states=torch.randn(T, H, dtype=torch.float64)), "hidden_states: .*wanted a dtype of"),
        (dict(hidden_states=torch.ones(T, H, dtype=torch.int64)), "hidden_states: .*wanted a dtype of"),
        (dict(hidden_states=torch.empty(T, H, device="meta")), "expert_ids: .*wanted device meta"),
        (dict(expert_ids=ids[0]), r"expert_ids: .*wanted shape \(7, top_k\)"),
        (dict(expert_ids=ids[:-1], expert_weights=scores[:-1]), r"expert_ids: .*wanted shape \(7, top_k\)"),
        (dict(expert_ids=ids.to(torch.uint8)), "expert_ids: .*wanted dtype int32 or int64"),
        (dict(expert_ids=ids.bool()), "expert_ids: .*wanted dtype int32 or int64"),
        (dict(expert_weights=scores[:1]), r"expert_weights: .*wanted shape \(7, 2\), as expert_ids has"),
        (dict(expert_weights=scores.long()), "expert_weights: .*wanted a floating-point dtype"),
        (dict(down=gate_up), r"down: got shape \(5, 64, 48\), wanted \(5, 48, 32\), by gate_up of shape \(5, 64, 48\)"),
        (dict(gate_up=quantize(torch.randn(E, 3, H))), "gate_up: got shape .*wanted an even out_features"),
        (dict(gate_up_bias=torch.randn(E, INNER)), r"bias: .*wanted shape \(5, 64\)"),
        (dict(limit=0.0), "limit: got 0.0, wanted a positive number"),
        (dict(limit=float("nan")), "limit: got nan, wanted a positive number"),
        (dict(order=(row_slot, None, slot_row)), "offsets: got None, wanted all of .* or none"),
        (dict(order=(row_slot[1:], offsets, slot_row)), r"row_slot: .*wanted int32 of shape \(14,\)"),
        (dict(order=(row_slot, offsets.long(), slot_row)), r"offsets: .*wanted int32 of shape \(5,\)"),
        (dict(order=(row_slot, offsets, slot_row.flatten())), r"slot_row: .*wanted int32 of shape \(7, 2\)"),
        (dict(order=(row_slot, offsets, slot_row.to("meta"))), "slot_row: .*wanted device cpu"),
        (dict(order=(row_slot, offsets + 1, slot_row)), "offsets: got a last row end of 15, wanted at most the 14"),
        (dict(order=(row_slot + 1, offsets, slot_row)), "row_slot: got a value of 14, wanted values from 0 to 13"),
        (dict(order=(row_slot, offsets, slot_row - 2)), "slot_row: got a value of -2, wanted values from -1 to 13"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            experts_op(**{**good, **change})
    with pytest.raises(TypeError, match="down: got Tensor, wanted an NVFP4Weight"):
        experts_op(**{**good, "down": torch.randn(E, H, INNER)})


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 0), (0, 2), (3, 0), (3, 1)])
def test_nothing_to_do(backend, tokens, top_k):
    """Without tokens or slots, or if all slots are sentinels, results and gradients are zeros."""
    (gate_up, down), _ = make()
    leaves = [torch.randn(tokens, H), torch.rand(tokens, top_k), torch.randn(E, 2 * INNER), torch.randn(E, H)]
    hidden, scores, *biases = (leaf.requires_grad_() for leaf in leaves)
    ids = torch.full((tokens, top_k), -1)
    for on_input in (False, True):
        with use_backend(backend):
            options = dict(gate_up_bias=biases[0], down_bias=biases[1], weight_on_input=on_input)
            out = experts_op(hidden, ids, scores, gate_up, down, **options)
            out.sum().backward()
        assert torch.equal(out, torch.zeros(tokens, H))
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
def test_weights_without_rows(backend):
    """N = 0 gives results without columns; E = 0 and K = 0 are errors when a weight is made or used."""
    empty = operands(quantize(torch.randn(2, 0, 48)))
    offsets, ops = torch.tensor([2, 5], dtype=torch.int32), torch.ops.thunder_moe
    slots = torch.zeros(3, 1, dtype=torch.int32)
    x = torch.randn(5, 48, requires_grad=True)
    with use_backend(backend):
        outputs = [
            ops.f16a_nvfp4weight_scaled_grouped_mm(x, *empty, offsets),
            ops.f16a_nvfp4weight_grouped_swiglu(x, *empty, offsets, None, None, torch.randn(2, 0)),
            ops.f16a_nvfp4weight_grouped_mm_combine(x, *empty, offsets, slots, None, torch.randn(2, 0)),
        ]
        assert [tuple(out.shape) for out in outputs] == [(5, 0), (5, 0), (3, 0)]
        for out in outputs:
            (grad,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(grad, torch.zeros(5, 48))
    for shape, message in (((0, 32, 48), "at least one expert"), ((2, 32, 0), "in_features a positive multiple of 16")):
        experts, n, k = shape
        with pytest.raises(ValueError, match=f"weight: .*wanted {message}"):
            quantize(torch.randn(shape))
        qdata, scale = torch.zeros(experts, n, k // 2, dtype=torch.uint8), torch.zeros(experts, n, k // 16)
        scale, global_scale = scale.to(torch.float8_e4m3fn), torch.ones(experts)
        with pytest.raises(ValueError, match=f"qdata: .*wanted {message}"):
            NVFP4Weight(qdata, scale, global_scale)
        packed = (qdata.transpose(1, 2), scale, global_scale)
        with pytest.raises(ValueError, match=f"(activation|fp4_weight): .*wanted {message}"):
            ops.f16a_nvfp4weight_scaled_grouped_mm(torch.randn(5, k), *packed, offsets[:experts])


BAD_OFFSETS = {
    "negative": ([-1, 2, 4, 6, 8], "offsets: got .*-1.*wanted cumulative row ends"),
    "decreasing": ([2, 5, 4, 6, 8], "offsets: got .*never decrease"),
    "beyond": ([2, 4, 6, 8, 15], "offsets: got a last row end of 15, wanted at most the 14 rows of "),
}


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
def test_refuses_values_out_of_range(backend):
    """Forward and backward refuse them, also the backward functions and operators that Thunder calls directly."""
    weights, _ = make()
    ids, scores = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    ops = torch.ops.thunder_moe
    hidden, rows, grad = torch.randn(T, H), torch.randn(T * A, INNER), torch.randn(T, H)
    gate_up, down = (operands(weight) for weight in weights)
    calls = [
        lambda o, r, s: ops.f16a_nvfp4weight_grouped_swiglu(hidden, *gate_up, o, r, scores),
        lambda o, r, s: swiglu_backward(rows, hidden, *gate_up, o, r, scores, needs=(True, True, True)),
        lambda o, r, s: ops.f16a_nvfp4weight_grouped_mm_combine(rows, *down, o, s, scores),
        lambda o, r, s: combine_backward(grad, rows, *down, o, s, scores, needs=(False, False, True)),
        lambda o, r, s: ops.f16a_nvfp4weight_scaled_grouped_mm(rows, *down, o),
        lambda o, r, s: ops.f16a_nvfp4weight_scaled_grouped_mm_dgrad(torch.randn(T * A, H), *down, o),
    ]
    with use_backend(backend):
        for call in calls:
            for values, message in BAD_OFFSETS.values():
                with pytest.raises(ValueError, match=message):
                    call(torch.tensor(values, dtype=torch.int32), row_slot, slot_row)
        for bad in (-1, T * A, 2**31 - 1, -(2**31)):
            wrong = row_slot.clone()
            wrong[5] = bad
            for call in calls[:2]:
                with pytest.raises(
                    ValueError, match=f"row_slot: got a value of {bad}, wanted values from 0 to 13, the sl"
                ):
                    call(offsets, wrong, slot_row)
        for bad in (-2, T * A, 2**31 - 1, -(2**31)):
            wrong = slot_row.clone()
            wrong[2, 1] = bad
            for call in calls[2:4]:
                with pytest.raises(
                    ValueError, match=f"slot_row: got a value of {bad}, wanted values from -1 to 13, the r"
                ):
                    call(offsets, row_slot, wrong)
        # Rows past the experts' rows are undefined, so that no slot may have one.
        fewer = offsets.clamp_max(13)
        with pytest.raises(ValueError, match="slot_row: got a value of 13, wanted values from -1 to 12"):
            calls[2](fewer, row_slot, slot_row)


def test_backward_functions_check_the_gradient():
    weights, _ = make()
    ids, _ = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    gate_up, down = (operands(weight) for weight in weights)
    hidden, rows = torch.randn(T, H), torch.randn(T * A, INNER)
    with pytest.raises(ValueError, match=r"grad: .*wanted shape \(14, 32\)"):
        swiglu_backward(torch.randn(T * A, 2 * INNER), hidden, *gate_up, offsets, row_slot)
    with pytest.raises(ValueError, match=r"grad: .*wanted shape \(7, 48\)"):
        combine_backward(torch.randn(T, INNER), rows, *down, offsets, slot_row)
    dgrad = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm_dgrad
    with pytest.raises(ValueError, match=r"grad: .*wanted shape \(rows, 48\), by fp4_weight"):
        dgrad(torch.randn(T * A, 2 * H), *down, offsets)
    with pytest.raises(ValueError, match="grad: .*wanted a dtype of"):
        dgrad(torch.randn(T * A, H).double(), *down, offsets)


def test_gradients_of_rows_that_several_slots_share():
    """Any slot_row and row_slot are differentiated, not only the permutations that moe_route gives."""
    weights, exact = make()
    offsets = torch.tensor([1, 3, 3, 4, 6], dtype=torch.int32)
    row_slot = torch.tensor([3, 0, 3, 3, 5, 1], dtype=torch.int32)
    slot_row = torch.tensor([[2, 2], [0, 2], [-1, 5]], dtype=torch.int32)
    scores = torch.rand(3, 2)
    expert = torch.tensor([0, 1, 1, 3, 4, 4])
    results = []
    for fused in (True, False):
        hidden, scale, weight = (
            torch.randn(3, H, generator=torch.Generator().manual_seed(1)),
            scores.clone(),
            scores.clone(),
        )
        leaves = [leaf.requires_grad_() for leaf in (hidden, scale, weight)]
        if fused:
            rows = f16a_nvfp4weight_grouped_swiglu(hidden, *operands(weights[0]), offsets, row_slot, scale)
            out = f16a_nvfp4weight_grouped_mm_combine(rows, *operands(weights[1]), offsets, slot_row, weight)
        else:
            x = hidden[row_slot // 2] * scale.flatten()[row_slot][:, None]
            gate, up = torch.einsum("mk,mnk->mn", x, exact[0][expert]).chunk(2, -1)
            rows = torch.einsum("mk,mnk->mn", torch.nn.functional.silu(gate) * up, exact[1][expert])
            out = (rows[slot_row] * (weight * (slot_row >= 0))[..., None]).sum(1)
        out.square().sum().backward()
        results.append((out, *(leaf.grad for leaf in leaves)))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


def views(tensor):
    """Return views of the same numbers: strided by 2, transposed in memory, and not at the start of a storage."""
    large = torch.full([2 * size for size in tensor.shape], 7).to(tensor.dtype)
    halves = large[tuple(slice(None, None, 2) for _ in tensor.shape)]
    halves.copy_(tensor)
    shifted = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
    return halves, tensor.mT.contiguous().mT if tensor.ndim > 1 else halves, shifted


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
@pytest.mark.parametrize("gathered", [False, True])
def test_operands_of_any_strides(backend, gathered):
    weights, _ = make()
    ids, scores = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    swiglu, combine = f16a_nvfp4weight_grouped_swiglu, f16a_nvfp4weight_grouped_mm_combine
    gate_up, down = (operands(weight) for weight in weights)
    first = [torch.randn(T, H), offsets, row_slot, scores, torch.randn(E, 2 * INNER)]
    if not gathered:
        first[0], first[2], first[3] = torch.randn(T * A, H), None, torch.rand(T * A)
    second = [torch.randn(T * A, INNER), offsets, slot_row, scores, torch.randn(E, H)]
    for operator, packed, (x, *others) in ((swiglu, gate_up, first), (combine, down, second)):
        with use_backend(backend):
            expected = operator(x, *packed, *others)
            for view in range(3):
                strided = [None if tensor is None else views(tensor)[view] for tensor in (x, *others)]
                actual = operator(strided[0], *packed, *strided[1:])
                assert relative_error(actual, expected) < 1e-6
            one = torch.rand(1).expand(others[2].shape)  # the same scale for all
            expected = operator(x, *packed, *others[:2], one.clone())
            assert torch.equal(operator(x, *packed, *others[:2], one), expected)


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(backend, dtype, autocast):
    weights, _ = make()
    ids, scores = make_routing()
    hidden, grad = torch.randn(T, H, dtype=dtype), torch.randn(T, H, dtype=dtype) / 8
    results = []
    for enabled in (False, True):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden, scores)]
        with use_backend(backend), torch.autocast("cpu", autocast, enabled=enabled):
            out = experts_op(leaves[0], ids, leaves[1], *weights)
            out.backward(grad)
        results.append((out, *(leaf.grad for leaf in leaves)))
    for plain, under_autocast in zip(*results, strict=True):
        assert torch.equal(plain, under_autocast)


def test_refuses_derivatives_that_it_has_not():
    """torch would silently drop tangents, and give a weight no gradient."""
    weights, _ = make()
    ids, _ = make_routing()
    row_slot, offsets, slot_row = moe_route(ids, E)
    ops = torch.ops.thunder_moe
    hidden, rows = torch.randn(T, H), torch.randn(T * A, INNER)
    operators = [
        (ops.f16a_nvfp4weight_grouped_swiglu, hidden, weights[0], (offsets, row_slot)),
        (ops.f16a_nvfp4weight_grouped_mm_combine, rows, weights[1], (offsets, slot_row)),
        (ops.f16a_nvfp4weight_scaled_grouped_mm, rows, weights[1], (offsets,)),
        (ops.f16a_nvfp4weight_scaled_grouped_mm_dgrad, torch.randn(T * A, H), weights[1], (offsets,)),
    ]
    for operator, x, weight, others in operators:
        fp4, scale, global_scale = operands(weight)
        message = "operators of experts have no forward-mode derivative"
        with pytest.raises(NotImplementedError, match=message):
            torch.func.jvp(
                lambda x, call=operator, rest=(fp4, scale, global_scale, *others): call(x, *rest), (x,), (x,)
            )
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
            operator(forward_ad.make_dual(x, x), fp4, scale, global_scale, *others)
        learned = global_scale.clone().requires_grad_()
        with pytest.raises(
            ValueError, match="weight_global_scale: got a tensor that requires a gradient, wanted a fro"
        ):
            operator(x, fp4, scale, learned, *others)
        with torch.no_grad():
            operator(x, fp4, scale, learned, *others)


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
