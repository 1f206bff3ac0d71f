"""The predicate that both compilers share: every gate, and its reason.
Called by pytest.
"""

from dataclasses import replace

import pytest
import torch

from thunder_moe.compilers.eligibility import GroupedGemm, decline_reason, swaps_last_dims

GOOD = GroupedGemm("w", 4, 32, 64, 8, torch.bfloat16, torch.bfloat16, needs_grad=False)


def test_accepts():
    assert decline_reason(GOOD) is None
    assert decline_reason(replace(GOOD, out_dtype=torch.bfloat16)) is None
    assert decline_reason(replace(GOOD, weight_dtype=torch.float16, activation_dtype=torch.float16)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(weight=None), "not a parameter or buffer"),
        (dict(weight_dtype=torch.float32, activation_dtype=torch.float32), "weight is torch.float32"),
        (dict(activation_dtype=torch.float16), "rows are torch.float16"),
        (dict(in_features=72), "in_features 72 is not a multiple of 16"),
        (dict(out_dtype=torch.float32), "out_dtype torch.float32"),
        (dict(needs_grad=True), "trainable: freeze it"),
        (dict(hidden_training=True), "forward of an autograd.Function"),
        (dict(changed="the weight may be changed in place by mul_"), "may be changed in place by mul_"),
    ],
)
def test_declines(change, reason):
    assert reason in decline_reason(replace(GOOD, **change))


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (lambda w: w, False),
        (lambda w: w.detach(), False),
        (lambda w: w.mT, True),
        (lambda w: w.mT.mT.mT, True),
        (lambda w: w.permute(0, 2, 1).swapaxes(1, 2), False),
        (lambda w: w.to(torch.bfloat16).contiguous()[:].view_as(w), False),
        (lambda w: w[:, :16], None),
        (lambda w: w[1:], None),
        (lambda w: w.view(torch.float16), None),
        (lambda w: w.float(), None),
        (lambda w: w.transpose(0, 1), None),
        (lambda w: w.view(4, 64, 32), None),
        (lambda w: w.flatten(1), None),
        (lambda w: torch._neg_view(w), None),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_which_views_are_the_weight_itself(view, expected, device):
    weight = torch.empty(4, 32, 64, dtype=torch.bfloat16, device=device)
    assert swaps_last_dims(weight, view(weight)) is expected


@pytest.mark.parametrize("shape", [(1, 32, 64), (64, 64, 64), (4, 1, 64), (4, 64, 1)])
def test_views_of_unusual_shapes(shape):
    weight = torch.empty(shape)
    assert swaps_last_dims(weight, weight.detach()) is False
    assert swaps_last_dims(weight, weight.mT) is True
    assert swaps_last_dims(weight.mT, weight) is True
    assert swaps_last_dims(weight, torch.empty(2, 2)) is None
