"""The operators f16a_nvfp4weight_moe_experts_lora, its MXFP8 form and moe_combine: values, gradients, opcheck, errors.
Called by pytest; calls the oracle.
"""

import oracle
import pytest
import torch
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error

from thunder_moe.formats.registry import FORMATS
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.ops.combine import moe_combine
from thunder_moe.ops.experts_lora import f16a_mxfp8weight_moe_experts_lora
from thunder_moe.ops.experts_lora import f16a_nvfp4weight_moe_experts_lora as experts_lora
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.route import moe_route

E, H, INNER, T, A, R = 5, 32, 64, 11, 2, 3
OPERATORS = {"nvfp4": experts_lora, "mxfp8": f16a_mxfp8weight_moe_experts_lora}
DECODED = {"nvfp4": oracle.dequantize, "mxfp8": oracle.dequantize_mxfp8}
GPT_OSS = dict(alpha=1.702, limit=1.5, up_shift=1.0)


def make_weights(format="nvfp4"):
    """Return weights of gate_up and down."""
    quantize = FORMATS[format].quantize
    gate_up = PackedWeight.concatenate(quantize(torch.randn(E, INNER, H) / 7), quantize(torch.randn(E, INNER, H) / 4))
    return gate_up, quantize(torch.randn(E, H, INNER) / 6)


def make(dtype, *, tokens=T, bias=True, sentinel=False, weights=None):
    """Return the operator's tensor arguments, and the dense float32 weights of gate_up and down without adapters."""
    gate_up, down = weights or make_weights()
    ids = (
        torch.stack([torch.randperm(E)[:A] for _ in range(tokens)]) if tokens else torch.empty(0, A, dtype=torch.int64)
    )
    if sentinel:
        ids[0, 1], ids[3, 0] = E, E
    leaves = [torch.randn(tokens, H, dtype=dtype), torch.rand(tokens, A)]
    leaves += [torch.randn(E, *shape, dtype=dtype) / 3 for shape in ((R, H), (2 * INNER, R), (R, INNER), (H, R))]
    leaves += [torch.randn(E, 2 * INNER), torch.randn(E, H)] if bias else [None, None]
    leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves]
    args = (leaves[0], ids, leaves[1], *operands(gate_up), *operands(down), *leaves[2:])
    return args, leaves, [DECODED[weight.format.name](*weight.tensors()) for weight in (gate_up, down)]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "bias", "on_input", "sentinel"),
    [({}, False, False, False), (GPT_OSS, True, False, True), ({}, False, True, True), (GPT_OSS, True, True, False)],
)
def test_values_and_gradients(dtype, format, form, bias, on_input, sentinel):
    weights = make_weights(format)
    args, leaves, (gate_up, down) = make(dtype, bias=bias, sentinel=sentinel, weights=weights)
    if form and dtype != torch.float32:
        form = {**form, "limit": 50.0}  # rounding moves values across a limit, where the gradient jumps
    form = dict(weight_on_input=on_input, **form)
    out, *kept = OPERATORS[format](*args, *(None,) * 3, **form)
    assert not any(each.requires_grad for each in kept)
    wide = [leaf if leaf is None else leaf.detach().float().requires_grad_() for leaf in leaves]
    hidden, scores, a1, b1, a2, b2, *biases = wide
    expected = oracle.moe_experts(hidden, args[1], scores, gate_up + b1 @ a1, down + b2 @ a2, *biases, **form)
    assert relative_error(out, expected) < KERNEL_TOLERANCE[dtype] * 1.5
    grad = torch.randn(T, H)
    given = [leaf for leaf in leaves if leaf is not None]
    actual = torch.autograd.grad(out, given, grad.to(dtype))
    expected = torch.autograd.grad(expected, [leaf for leaf in wide if leaf is not None], grad)
    for got, want in zip(actual, expected, strict=True):
        assert relative_error(got, want) < KERNEL_TOLERANCE[dtype] * 2.5


@pytest.mark.parametrize("half", [(2, 3), (4, 5)])
def test_one_adapter_alone(half):
    """One adapter works alone: gate and up's, or down's."""
    args, leaves, (gate_up, down) = make(torch.float32, bias=False)
    args = list(args)
    for other in {2, 3, 4, 5} - {*half}:
        args[7 + other] = None
    out, *_ = experts_lora(*args)
    a1, b1, a2, b2 = leaves[2:6]
    wide = (gate_up + b1 @ a1, down) if half == (2, 3) else (gate_up, down + b2 @ a2)
    expected = oracle.moe_experts(leaves[0], args[1], leaves[1], *wide)
    assert relative_error(out, expected) < 1e-5
    given = [leaves[0], *(leaves[each] for each in half)]
    pairs = zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(expected.sum(), given), strict=True)
    assert all(relative_error(got, want) < 1e-5 for got, want in pairs)


def test_no_tokens():
    args, leaves, _ = make(torch.float32, tokens=0)
    out, *_ = experts_lora(*args)
    assert out.shape == (0, H)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(grad.eq(0).all() for grad in grads)


@pytest.mark.parametrize("format", others_slow(FORMATS, ["nvfp4"], exhaustive=True))
def test_opcheck(opcheck, format):
    args, _, _ = make(torch.float32, weights=make_weights(format))
    opcheck(getattr(torch.ops.thunder_moe, f"f16a_{format}weight_moe_experts_lora").default, args, GPT_OSS)


def test_opcheck_of_combine(opcheck):
    args, _, _ = make(torch.float32)
    _, offsets, slot_row = moe_route(args[1], E)
    opcheck(torch.ops.thunder_moe.moe_combine.default, (torch.randn(T * A, 4, requires_grad=True), offsets, slot_row))


def test_combine():
    ids = torch.tensor([[0, 3], [E, 1], [2, 0]])
    _, offsets, slot_row = moe_route(ids, E)
    rows = torch.randn(6, 4)
    rows[int(offsets[-1]) :] = torch.nan
    rows.requires_grad_()
    out = moe_combine(rows, offsets, slot_row)
    picked = [[rows[row] for row in of_token if row >= 0] for of_token in slot_row.tolist()]
    expected = torch.stack([torch.stack(of_token).sum(0) for of_token in picked])
    assert relative_error(out, expected) < 1e-6
    grad = torch.randn(3, 4)
    (actual,) = torch.autograd.grad(out, rows, grad)
    (wanted,) = torch.autograd.grad(expected, rows, grad)
    assert torch.equal(actual, wanted)


def test_bad_input():
    args, _, _ = make(torch.float32)
    for position, value, what in (
        (9, args[9][:, :2], "gate_up_b: got .* wanted shape"),
        (10, None, "gate_up_b: got None, wanted both"),
        (11, args[11].double(), "down_a: got torch.float64"),
        (12, args[12][:4], "down_b: got .* wanted shape"),
    ):
        wrong = [*args]
        wrong[position] = value
        with pytest.raises(ValueError, match=what):
            experts_lora(*wrong)
