"""The CUDA router on a CPU: its own source run by the emulator, against the plain-torch definition.
Called by pytest; judged by `thunder_moe.routing.router`, which has an oracle of its own (tests/ops/test_router.py).
"""

import itertools

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from router_forms import FORMS, make_router

from thunder_moe import routing
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import operators, workspace
from thunder_moe.kernels.cuda import router as routers
from thunder_moe.routing import RouterConfig
from thunder_moe.routing import router as plain

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}


def check(logits, bias, options):
    options = dict(options)
    dtype = options.pop("scores_dtype", logits.dtype)
    form = RouterConfig(**options)
    actual, wanted = (run(logits, bias, form, dtype) for run in (cuda.router, plain))
    assert relative_error(actual[0], wanted[0]) < TOLERANCE[dtype]
    for result, other in zip(actual, wanted, strict=True):
        assert (result.dtype, result.shape) == (other.dtype, other.shape)
    for result, other in zip(actual[1:], wanted[1:], strict=True):
        assert torch.equal(result, other)


TOKENS = [1, 13, 40]
FAST = [("deepseek_v3", 1), ("qwen3", 13), ("masked with zero", 40)]
IN_TURNS = list(zip(FORMS, itertools.cycle(TOKENS)))
OTHERS = [row for row in itertools.product(FORMS, TOKENS) if row not in IN_TURNS]


@pytest.mark.parametrize(("name", "tokens"), [*FAST, *others_slow(IN_TURNS), *others_slow(OTHERS, exhaustive=True)])
def test_all_forms(emulated, name, tokens):
    dtype = torch.float32 if tokens == 13 else torch.bfloat16
    check(*make_router(name, tokens, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_16_bit_logits(emulated, dtype, scores_dtype):
    logits, bias, options = make_router("masked with zero", 20, dtype)
    check(logits, bias.to(dtype), options | dict(scores_dtype=scores_dtype))
    logits, _, options = make_router("gpt_oss", 20, dtype)
    check(logits[:, ::1], None, options | dict(scores_dtype=scores_dtype))
    check(logits.t().contiguous().t(), None, options | dict(scores_dtype=scores_dtype))


@pytest.mark.parametrize("tokens", others_slow([2, 9, 16, 17, 40, 300], [9]))
def test_every_plan_sorts_stably(emulated, tokens, monkeypatch):
    """There are few experts, so that warps and blocks share them, and few tokens per block, so that there are many
    blocks."""
    monkeypatch.setattr(routers, "_BLOCKS", ((2**31, 5),))
    monkeypatch.setattr(routers, "_CHOOSE", ((200, 512), (2**31, 1024)))
    logits, _, _ = make_router("mixtral", tokens)
    check(logits, None, dict(top_k=3))
    check(torch.zeros(tokens, 300), None, dict(top_k=32))


def test_ties_nan_and_infinities(emulated):
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[0.0, nan, inf, -nan, 1.0, -inf, -0.0, 0.0], [nan] * 8, [-inf] * 8, [0.0] * 8])
    for options, dtype in itertools.product(
        (
            dict(top_k=4),
            dict(top_k=4, score="sigmoid"),
            dict(top_k=4, normalize=False),
            dict(top_k=2, score="sigmoid", num_groups=4, top_groups=2, least_sum=0.1),
            dict(top_k=2, score="sigmoid", num_groups=4, top_groups=2, mask_to_zero=True, normalize=False),
        ),
        (torch.float32, torch.bfloat16, torch.float16),
    ):
        for bias in (None, torch.tensor([0.0, -1.0, 2.0, 0.0, nan, 0.0, -2.0, -2.0])):
            form = RouterConfig(**options)
            actual, wanted = (run(logits.to(dtype), bias, form, torch.float32) for run in (cuda.router, plain))
            assert torch.allclose(actual[0], wanted[0], rtol=1e-6, equal_nan=True)
            for result, other in zip(actual[1:], wanted[1:], strict=True):
                assert torch.equal(result, other)


def test_what_no_kernel_serves_runs_in_plain_torch(emulated, monkeypatch):
    monkeypatch.setattr(operators, "run", None)
    with pytest.warns(UserWarning, match="no CUDA kernel serves a router with more than 512 experts"):
        check(torch.randn(3, 600), None, dict(top_k=3))
    with pytest.warns(UserWarning, match="more than 32 experts per token"):
        check(torch.randn(3, 64), None, dict(top_k=33))
    check(torch.empty(0, 8), None, dict(top_k=2))


def check_linear(tokens, hidden_size, options, dtype, experts=16, linear_bias=False, bias=None, logits_dtype=None):
    x, weight = torch.randn(tokens, hidden_size).to(dtype), (torch.randn(experts, hidden_size) / 8).to(dtype)
    linear_bias = torch.randn(experts).to(dtype) if linear_bias else None
    form, logits_dtype = RouterConfig(**options), logits_dtype or dtype
    *actual, logits = cuda.linear_router(x, weight, linear_bias, bias, form, logits_dtype, dtype)
    exact = x.double() @ weight.double().T + (0 if linear_bias is None else linear_bias.double())
    assert logits.dtype == logits_dtype
    assert relative_error(logits, exact) < TOLERANCE[logits_dtype]
    for result, other in zip(actual, cuda.router(logits, bias, form, dtype), strict=True):
        assert torch.equal(result, other)  # of the logits that it returns


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        (3, torch.bfloat16),
        *others_slow([(1, torch.float16)]),
        *others_slow([(1, torch.bfloat16), (3, torch.float16)], exhaustive=True),
    ],
)
def test_linear_layer_and_router_in_one_kernel(emulated, tokens, dtype, monkeypatch):
    monkeypatch.setattr(routing, "LINEAR_ROUTER_TOKENS", 4)
    monkeypatch.setattr(routing, "router_logits", None)
    check_linear(tokens, 264, dict(top_k=4), dtype)
    check_linear(tokens, 64, dict(top_k=3), dtype, experts=37, linear_bias=True, logits_dtype=torch.float32)
    form = dict(top_k=2, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    check_linear(tokens, 1032, form, dtype, bias=torch.randn(16), logits_dtype=torch.float32)
    assert not workspace.semaphore_pool(torch.device("cpu"))._zeros.any()


def test_more_tokens_take_a_linear_layer_of_torch(emulated, monkeypatch):
    monkeypatch.setattr(routers, "append_linear_router", None)
    check_linear(routing.LINEAR_ROUTER_TOKENS + 1, 64, dict(top_k=4), torch.bfloat16)
    check_linear(1, 68, dict(top_k=2), torch.float16)
    check_linear(0, 64, dict(top_k=2), torch.float16)
    check_linear(1, 64, dict(top_k=2), torch.float32)


def test_weights_read_early_give_the_same_bits(emulated):
    """The emulator hides the rows until the kernel waits for them."""
    x, weight = torch.randn(2, 2056).bfloat16(), torch.randn(40, 2056).bfloat16()
    options = vars(RouterConfig(4)) | dict(logits_dtype=None, scores_dtype=None)
    results = [operators.run("moe_linear_router", x, weight, prefetch=early, **options) for early in (False, True)]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "dtype"),
    [
        (1, 2056, torch.bfloat16),
        (3, 264, torch.bfloat16),
        *others_slow([(2, 2056, torch.float16)]),
        *others_slow([(2, 2056, torch.bfloat16), (1, 2056, torch.float16), (3, 264, torch.float16)], exhaustive=True),
    ],
)
def test_norm_of_a_sum_in_front(emulated, tokens, hidden_size, dtype):
    x, residual = torch.randn(2, tokens, hidden_size).to(dtype)
    norm_weight, weight = torch.randn(hidden_size).to(dtype), (torch.randn(37, hidden_size) / 8).to(dtype)
    form = RouterConfig(4)
    *actual, total, rows = cuda.add_norm_linear_router(
        x, residual, norm_weight, 1e-6, weight, None, None, form, torch.float32, dtype
    )
    assert torch.equal(total, x + residual)
    wide = total.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    assert relative_error(rows, wanted) < TOLERANCE[dtype]
    for result, other in zip(
        actual, cuda.linear_router(rows, weight, None, None, form, torch.float32, dtype), strict=True
    ):
        assert torch.equal(result, other)  # of the rows that it returns
    options = vars(form) | dict(logits_dtype=torch.float32, scores_dtype=None, norm_epsilon=1e-6)
    early = operators.run("add_norm_linear_router", x, residual, norm_weight, weight, prefetch=True, **options)
    for result, other in zip((*actual, total, rows), early, strict=True):
        assert torch.equal(result, other)
