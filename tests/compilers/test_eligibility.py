"""The predicate that both compilers share: every gate, and its reason.
Called by pytest.
"""

from dataclasses import replace

import pytest
import torch

from thunder_moe.compilers.eligibility import GroupedGemm, decline_reason

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
    ],
)
def test_declines(change, reason):
    assert reason in decline_reason(replace(GOOD, **change))
