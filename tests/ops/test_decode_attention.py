"""The operator decode_attention on a CPU: results, changes of the cache, opcheck and bad input.
Called by pytest; judged by the float64 of decode_attention_cases.py.
"""

import pytest
import torch
from decode_attention_cases import CASES, make, oracle
from oracle import relative_error

from thunder_moe.ops.decode_attention import decode_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def call(operands, **changed):
    *tensors, epsilon, scale = operands
    return decode_attention(*tensors, **dict(epsilon=epsilon, scale=scale) | changed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_float64(case, dtype):
    *sizes, options = CASES[case]
    operands = make("cpu", dtype, *sizes, **options)
    versions = [cache._version for cache in operands[3:5]]
    wanted, keys, values = oracle(*operands)
    assert relative_error(call(operands), wanted) < TOLERANCE[dtype]
    assert relative_error(operands[3], keys) < TOLERANCE[dtype] / 10
    assert torch.equal(operands[4], values)
    assert all(cache._version > version for cache, version in zip(operands[3:5], versions, strict=True))


def test_a_text_that_attends_to_nothing_gets_zeros():
    operands = make("cpu", torch.float32, 2, 4, 2, 64, 10, mask="bool")
    operands[6][1] = False
    assert torch.equal(call(operands)[1], torch.zeros(4, 64))


@pytest.mark.parametrize(("norms", "rope", "mask"), [(True, True, "numbers"), (False, False, None)])
def test_opcheck(opcheck, norms, rope, mask):
    *tensors, epsilon, scale = make("cpu", torch.float32, 2, 4, 2, 64, 10, norms=norms, rope=rope, mask=mask)
    opcheck(torch.ops.thunder_moe.decode_attention.default, tuple(tensors), dict(epsilon=epsilon, scale=scale))


def test_a_backward_is_an_error():
    operands = make("cpu", torch.float32, 1, 4, 2, 64, 10)
    operands[0].requires_grad_()
    with pytest.raises(RuntimeError, match="decode_attention has no gradient"):
        call(operands).sum().backward()


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize(("place", "name"), [(3, "key_cache"), (4, "value_cache")])
def test_a_cache_that_requires_grad_is_an_error(place, name, leaf):
    operands = make("cpu", torch.float32, 1, 4, 2, 64, 10)
    operands[place].requires_grad_()
    before = operands[place].detach().clone()
    for run in (call, torch.compile(call, backend="aot_eager")):
        changed = [*operands]
        changed[place] = operands[place] if leaf else operands[place] * 1
        with pytest.raises(Exception, match=f"{name}: got a tensor that requires grad"):
            run(changed)
        assert torch.equal(changed[place], before)
    with torch.no_grad():
        call(operands)
    assert not torch.equal(operands[place], before)


@pytest.mark.parametrize(
    ("place", "name", "bad"),
    [
        (0, "query", lambda x: x[0]),
        (1, "key", lambda x: x[:, :, :8]),
        (1, "key", lambda x: torch.cat([x, x[:, :1]], 1)),
        (2, "value", lambda x: x[:, :1]),
        (3, "key_cache", lambda x: x.bfloat16()),
        (4, "value_cache", lambda x: x[:, :, :-1]),
        (5, "position", lambda x: x.int()),
        (5, "position", lambda x: x + 10),
        (5, "position", lambda x: x - 100),
        (6, "mask", lambda x: x[:, :-1]),
        (6, "mask", lambda x: x.double()),
        (7, "cos", lambda x: x[:, :2]),
        (7, "cos", lambda x: x[0, 0]),
        (8, "cos", lambda x: None),
        (9, "query_norm", lambda x: x[:2]),
        (10, "query_norm", lambda x: None),
    ],
)
def test_bad_input_is_named(place, name, bad):
    operands = make("cpu", torch.float32, 2, 4, 2, 64, 10)
    before = operands[3].clone()
    operands[place] = bad(operands[place])
    with pytest.raises(ValueError, match=f"^{name}: got"):
        call(operands)
    if place != 3:
        assert torch.equal(operands[3], before)


@pytest.mark.slow
def test_thunder_refuses_it():
    """Its symbols change no argument: it would move or drop the write to the cache."""
    thunder = pytest.importorskip("thunder")
    from thunder_moe import moe_executor

    *tensors, epsilon, scale = make("cpu", torch.float32, 2, 4, 2, 64, 10)

    def step(*given):
        return decode_attention(*given, epsilon=epsilon, scale=scale)

    jitted = thunder.jit(step, executors=[moe_executor])
    with pytest.raises(RuntimeError, match=r"thunder_moe.decode_attention is not registered"):
        jitted(*tensors)
