"""The safety analysis that both compilers share: what may be fused or packed ahead of a call, and why not.
Called by pytest.
"""

import pytest
import torch

from thunder_moe.compilers.safety import Program, Step, is_hidden_training_forward

X, A, B, Y, U, OTHER = "x", "a", "b", "y", "u", "other"
GATE = Step("gate", reads=frozenset({X, A}))
UP = Step("up", reads=frozenset({X, B}))
MUL = Step("mul", reads=frozenset({Y, U}))
STORAGES = {X: "the rows", Y: "gate's output"}


def writes(storage, name="zero_"):
    return Step(name, frozenset({storage}), frozenset({storage}))


def reason(*steps):
    program = Program(steps)
    return program.reason_against_fusing([i for i, step in enumerate(steps) if step in (GATE, UP, MUL)], STORAGES)


def test_fuses_where_nothing_happens_in_between():
    assert reason(GATE, UP, MUL) is None
    assert reason(writes(X), GATE, writes(OTHER), Step("cos", frozenset({X})), UP, MUL, writes(X)) is None


@pytest.mark.parametrize("place", [1, 2])
def test_declines_a_change_of_what_is_read(place):
    steps = [GATE, UP, MUL]
    steps.insert(place, writes(X))
    assert reason(*steps) == "the rows may be changed in place by zero_ between gate and mul"
    steps[place] = writes(Y, "relu_")
    assert reason(*steps) == "gate's output may be changed in place by relu_ between gate and mul"
    steps[place] = Step("mystery", opaque=True)
    assert "may be changed in place by mystery" in reason(*steps)


def test_declines_a_change_of_the_grad_mode():
    off = Step("gate", GATE.reads, grad_enabled=False)
    program = Program([off, UP, MUL])
    assert program.reason_against_fusing((0, 1, 2), STORAGES) == "the grad mode changes between gate and mul"
    around = Program([GATE, Step("cos", grad_enabled=False), UP, MUL])  # of a step that takes no part
    assert around.reason_against_fusing((0, 2, 3), STORAGES) is None


def test_what_the_replaced_steps_write_is_the_callers_business():
    program = Program([GATE, writes(X), UP])
    assert program.reason_against_fusing((0, 1, 2), STORAGES) is None


def test_declines_a_change_of_what_the_backward_reads_again():
    program = Program([GATE, UP, MUL, writes(X)])
    assert program.reason_against_fusing((0, 1, 2), STORAGES) is None
    reason = "the rows may be changed in place by zero_ after mul, before its backward"
    assert program.reason_against_fusing((0, 1, 2), STORAGES, {X: "the rows"}) == reason


def test_reading_later():
    program = Program([Step("topk"), writes(Y), GATE])
    assert program.reason_against_reading_later(0, 2, {X: "the experts"}) is None
    assert "by zero_ between topk and gate" in program.reason_against_reading_later(0, 2, {Y: "the experts"})
    assert program.reason_against_reading_later(0, 2, {Y: "the experts"}, ignored=(1,)) is None


def test_packing_wants_a_weight_that_no_step_changes():
    program = Program([GATE, UP, MUL, writes(A, "mul_")])
    assert program.reason_against_packing({A}) == "the weight may be changed in place by mul_ in the same graph"
    assert program.reason_against_packing({B}) is None
    assert "set_" in Program([Step("set_", opaque=True)]).reason_against_packing({B})


def test_tells_a_hidden_training_forward_from_inference():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(is_hidden_training_forward())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.ones(2, requires_grad=True)
    Function.apply(x)
    with torch.no_grad():
        Function.apply(x)
        seen.append(is_hidden_training_forward())
    with torch.inference_mode():
        seen.append(is_hidden_training_forward())
    torch.utils.checkpoint.checkpoint(lambda x: seen.append(is_hidden_training_forward()) or x, x, use_reentrant=True)
    assert seen == [True, True, False, False, True]
    assert not is_hidden_training_forward()
