"""moe_router, moe_linear_router: results against the oracle, ties, NaN, gradients, opcheck, graphs, bad input.
Called by pytest; judged by tests/oracle.py and by autograd of plain torch.
"""

import functools

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from oracle import router as oracle
from router_forms import FORMS, make_router

from thunder_moe import moe_linear_router, moe_route, moe_router
from thunder_moe.kernels.select import BACKENDS, use_backend
from thunder_moe.ops.operator import OPERATORS
from thunder_moe.routing import RouterConfig, choose_experts, router_gradient

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
ON_CPU = [name for name, devices in BACKENDS.items() if not devices or "cpu" in devices]


def form_of(options):
    return RouterConfig(**{name: value for name, value in options.items() if name != "scores_dtype"})


def expected(logits, bias, options):
    return oracle(logits, bias, **{name: value for name, value in options.items() if name != "scores_dtype"})


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_matches_the_oracle(backend, name, dtype):
    logits, bias, options = make_router(name, 37, dtype)
    with use_backend(backend):
        scores, ids, row_slot, offsets, slot_row = moe_router(logits, bias, **options)
    wanted_scores, wanted_ids = expected(logits, bias, options)
    assert torch.equal(ids, wanted_ids)
    wanted = options.get("scores_dtype", dtype)
    assert scores.dtype == wanted
    assert relative_error(scores, wanted_scores) < TOLERANCE[wanted]
    for actual, order in zip((row_slot, offsets, slot_row), moe_route(ids, logits.shape[1]), strict=True):
        assert torch.equal(actual, order)
        assert actual.dtype == torch.int32


def test_ties_go_to_the_lower_index():
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, -0.0, 0.0], [0.0] * 6, [-torch.inf] * 5 + [0.0]])
    for options in (dict(), dict(score="sigmoid"), dict(num_groups=1), dict(normalize=False)):
        ids = moe_router(logits, top_k=4, **options)[1]
        assert ids.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [5, 0, 1, 2]]
    # Scores that round to the same number are ties with a bias, and none without: the logits decide.
    near = torch.tensor([[20.0, 21.0, 22.0]])
    assert moe_router(near, top_k=2, score="sigmoid")[1].tolist() == [[2, 1]]
    assert moe_router(near, torch.zeros(3), top_k=2, score="sigmoid")[1].tolist() == [[0, 1]]
    # Groups 0 and 1 are equal.
    ids = moe_router(torch.tensor([[1.0, 2, 2, 1, 0, 0]]), top_k=2, num_groups=3, top_groups=1)[1]
    assert ids.tolist() == [[1, 0]]


def test_nan_is_above_all_numbers_and_ids_stay_valid():
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, inf, -nan, 1.0, -inf], [nan] * 6, [-inf] * 6])
    scores, ids, *_ = moe_router(logits, top_k=3, score="sigmoid", normalize=False)
    assert ids.tolist() == [[1, 3, 2], [0, 1, 2], [0, 1, 2]]
    assert scores.isnan().tolist() == [[True, True, False], [True] * 3, [False] * 3]
    scores, ids, *_ = moe_router(logits, top_k=3)
    assert ids[:2].tolist() == [[1, 3, 2], [0, 1, 2]]
    assert bool(scores.isnan().all())
    ids = moe_router(logits, torch.zeros(6), top_k=2, score="sigmoid", num_groups=3, top_groups=1)[1]
    assert ids.tolist() == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("name", FORMS)
def test_gradient_of_float64(name):
    """The plain definition passes gradcheck, and the operator's gradient equals its autograd gradient."""
    logits, bias, options = make_router(name, 3, torch.float64)
    form = form_of(options)

    def scores(x):
        return form.weigh(choose_experts(x, bias, form)[0])

    logits.requires_grad_()
    if logits.shape[1] <= 64:
        assert torch.autograd.gradcheck(scores, (logits,), eps=1e-7, atol=1e-6)
    grad = torch.randn(3, options["top_k"], dtype=torch.float64)
    (wanted,) = torch.autograd.grad(scores(logits), logits, grad)
    ids = choose_experts(logits, bias, form)[1]
    assert torch.allclose(router_gradient(grad, logits.detach(), ids, form), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_gradient_of_the_operator(name, dtype):
    logits, bias, options = make_router(name, 9, dtype)
    wide = logits.double().requires_grad_()
    form = form_of(options)
    scores, ids, *_ = moe_router(logits.requires_grad_(), None if bias is None else bias.requires_grad_(), **options)
    grad = torch.randn(scores.shape).to(scores.dtype)
    scores.backward(grad)
    form.weigh(form.scores(wide).gather(-1, ids)).backward(grad.double())
    assert logits.grad.dtype == dtype
    assert bias is None or bias.grad is None
    if float(wide.grad.norm()) > 1e-9:  # one expert's score is always 1
        assert relative_error(logits.grad, wide.grad) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    "name",
    others_slow(["qwen3", "deepseek_v3", "masked with zero", "ernie", "llama4"], ["deepseek_v3"], exhaustive=True),
)
def test_opcheck(name):
    logits, bias, options = make_router(name, 4)
    op = torch.ops.thunder_moe.moe_router.default
    torch.library.opcheck(op, (logits.requires_grad_(), bias), options)
    half = logits.detach().bfloat16().requires_grad_()
    torch.library.opcheck(op, (half, bias), options | dict(scores_dtype=torch.float16))


def test_compiled_with_other_numbers_of_tokens():
    def layer(x):
        scores, ids, row_slot, offsets, slot_row = moe_router(x * 2, top_k=3, scores_dtype=torch.float32)
        return scores.float().sum() + row_slot.sum() + (ids * slot_row).sum() + offsets[0]

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        logits = torch.randn(tokens, 16, requires_grad=True)
        out = compiled(logits)
        out.backward()
        again = logits.detach().requires_grad_()
        layer(again).backward()
        assert torch.equal(out, layer(again))
        assert torch.allclose(logits.grad, again.grad)


def test_no_tokens():
    results = moe_router(torch.empty(0, 8), torch.zeros(8), top_k=2)
    assert [tuple(result.shape) for result in results] == [(0, 2), (0, 2), (0,), (8,), (0, 2)]
    assert results[3].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.randn(2, 3, 4)), r"logits: got torch.float32 \(2, 3, 4\)"),
        (dict(logits=torch.randn(2, 8).double()), "logits: got torch.float64"),
        (dict(bias=torch.zeros(7)), r"bias: got torch.float32 \(7,\) on cpu, wanted shape \(8,\)"),
        (dict(bias=torch.zeros(8, dtype=torch.int32)), "bias: got torch.int32"),
        (dict(top_k=0), "top_k: got 0, wanted 1 to 8, the experts"),
        (dict(top_k=9), "top_k: got 9, wanted 1 to 8, the experts"),
        (dict(num_groups=4, top_groups=1, top_k=3), "top_k: got 3, wanted 1 to 2, the experts of top_groups groups"),
        (dict(num_groups=3), "num_groups: got 3, wanted a divisor of the 8 experts"),
        (dict(num_groups=2, top_groups=3), "top_groups: got 3, wanted 1 to num_groups = 2"),
        (dict(num_groups=4, top_groups=2, group_best=3), "group_best: got 3, wanted 1 to 2"),
        (dict(score="tanh"), "score: got 'tanh', wanted one of"),
        (dict(epsilon=-1.0), "epsilon: got -1.0, wanted a finite number, at least 0"),
        (dict(scale=float("nan")), "scale: got nan, wanted a finite number"),
        (dict(scores_dtype=torch.float64), "scores_dtype: got torch.float64"),
    ],
)
def test_bad_input(change, message):
    arguments = dict(logits=torch.randn(2, 8), bias=None, top_k=2) | change
    with pytest.raises(ValueError, match=message):
        moe_router(arguments.pop("logits"), arguments.pop("bias"), **arguments)


def test_the_description_has_the_dtypes_of_the_results():
    logits, bias, options = make_router("mixtral", 3, torch.bfloat16)
    described = OPERATORS["moe_router"].dtypes(logits, bias, **options)
    assert [result.dtype for result in moe_router(logits, bias, **options)] == [*described]


def make_linear(tokens, dtype, experts=24, hidden_size=40):
    hidden, weight = torch.randn(tokens, hidden_size).to(dtype), (torch.randn(experts, hidden_size) / 4).to(dtype)
    return hidden, weight, torch.randn(experts).to(dtype)


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_linear_layer_in_front(backend, dtype, wide):
    hidden, weight, linear_bias = make_linear(7, dtype)
    bias = torch.randn(24)
    options = dict(top_k=3, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    given = dict(logits_dtype=torch.float32, scores_dtype=torch.float32) if wide else {}
    for added, correction in ((None, None), (linear_bias, bias)):
        with use_backend(backend):
            *results, logits = moe_linear_router(hidden, weight, added, correction, **options, **given)
            exact = hidden.double() @ weight.double().T + (0 if added is None else added.double())
            assert logits.dtype == (torch.float32 if wide else dtype)
            assert relative_error(logits, exact) < (2e-6 if wide else TOLERANCE[dtype])
            scores_dtype = given.get("scores_dtype", dtype)
            again = moe_router(logits, correction, **options, scores_dtype=scores_dtype)
        for result, other in zip(results, again, strict=True):
            assert torch.equal(result, other)
            assert result.dtype == other.dtype


@pytest.mark.parametrize("result", [0, 5])
@pytest.mark.parametrize("learns", ["hidden", "weight"])
def test_a_linear_layer_and_a_router_say_that_they_have_no_gradient(learns, result):
    hidden, weight = torch.randn(5, 48), torch.randn(8, 48)
    {"hidden": hidden, "weight": weight}[learns].requires_grad_()
    call = functools.partial(moe_linear_router, hidden, weight, top_k=2)
    loss = call()[result].sum()
    with pytest.raises(RuntimeError, match="moe_linear_router has no gradient"):
        loss.backward()
    with pytest.raises(RuntimeError, match="moe_linear_router has no gradient"):
        torch.compile(call, backend="aot_eager")()
    with torch.no_grad():
        assert not call()[result].requires_grad


def test_the_linear_router_passes_opcheck():
    hidden, weight, linear_bias = make_linear(5, torch.bfloat16)
    op = torch.ops.thunder_moe.moe_linear_router.default
    for given in (dict(top_k=2), dict(top_k=3, logits_dtype=torch.float32, scores_dtype=torch.float16)):
        torch.library.opcheck(op, (hidden, weight), given)
        torch.library.opcheck(op, (hidden, weight, linear_bias, torch.zeros(24)), given)


def test_the_linear_router_compiled_with_other_numbers_of_tokens():
    def route(hidden, weight):
        return moe_linear_router(hidden, weight, top_k=2)

    compiled = torch.compile(route, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 6):
        hidden, weight, _ = make_linear(tokens, torch.bfloat16)
        for result, other in zip(compiled(hidden, weight), route(hidden, weight), strict=True):
            assert torch.equal(result, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(hidden_states=torch.randn(2, 3, 40)), r"hidden_states: got torch.float32 \(2, 3, 40\)"),
        (dict(weight=torch.randn(24, 41)), r"weight: got torch.float32 \(24, 41\) .*wanted shape \(experts, 40\)"),
        (dict(weight=torch.randn(24, 40).half()), "weight: got torch.float16"),
        (dict(linear_bias=torch.randn(23)), "linear_bias: got torch.float32"),
        (dict(linear_bias=torch.randn(24).half()), "linear_bias: got torch.float16"),
        (dict(bias=torch.randn(23)), "bias: got torch.float32"),
        (dict(top_k=25), "top_k: got 25, wanted 1 to 24"),
        (dict(logits_dtype=torch.float16), "logits_dtype: got torch.float16, wanted torch.float32, float32 or None"),
        (dict(scores_dtype=torch.float64), "scores_dtype: got torch.float64"),
    ],
)
def test_bad_input_of_the_linear_router(change, message):
    hidden, weight, _ = make_linear(2, torch.float32)
    given = dict(hidden_states=hidden, weight=weight, linear_bias=None, bias=None, top_k=2) | change
    with pytest.raises(ValueError, match=message):
        moe_linear_router(**given)
