"""The comparison of quantized models with their 16-bit one: its numbers, table and bad input.
Called by pytest; judged by sums over the vocabulary in float64.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from thunder_moe.tools.divergence import divergence_table, measure_divergence

WINDOWS, LENGTH, VOCABULARY = 5, 7, 11
TEXT = torch.randint(0, VOCABULARY, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Bigrams(nn.Module):
    """Logits of the next token by the last one."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids):
        assert not self.training
        return SimpleNamespace(logits=self.logits[input_ids])


def model(noise=0.0, seed=1):
    base = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return Bigrams(base + noise * torch.randn(base.shape, generator=torch.Generator().manual_seed(seed))).train()


def by_hand(reference, other):
    """KL, agreement and increase of the loss of each window."""
    p, q = (each.logits.detach().double().softmax(-1) for each in (reference, other))
    kl = (p * (p.log() - q.log())).sum(-1)
    agree = (p.argmax(-1) == q.argmax(-1)).double()
    before, after = TEXT[:, :-1], TEXT[:, 1:]
    increase = p[before, after].log() - q[before, after].log()
    return [each.mean(1) for each in (kl[before], agree[before], increase)]


def mean_and_error(values):
    return pytest.approx((values.mean().item(), values.std().item() / WINDOWS**0.5), rel=1e-4, abs=1e-7)


def test_numbers_are_means_and_paired_errors_over_windows():
    reference, models = model(), {"coarse": model(0.3, 2), "fine": model(0.1, 3), "same": model()}
    found = measure_divergence(reference, models, TEXT)
    assert [each.name for each in found] == [*models]
    assert reference.training
    assert models["fine"].training
    first = by_hand(reference, models["coarse"])[0]
    for each in found:
        kl, agreement, increase = by_hand(reference, models[each.name])
        assert each.kl == mean_and_error(kl)
        assert each.agreement == mean_and_error(agreement)
        assert each.increase == mean_and_error(increase)
        assert each.kl_change == mean_and_error(kl - first)
    assert found[2].kl[0] == pytest.approx(0, abs=1e-7)
    assert found[2].agreement == (1, 0)


def test_the_table():
    found = measure_divergence(model(), {"coarse": model(0.3, 2), "fine": model(0.1, 3)}, TEXT)
    head, coarse, fine = divergence_table(found).splitlines()
    assert "KL" in head
    assert "top-1 agreement" in head
    assert fine.startswith("fine ")
    assert f"{found[1].kl[0]:.6f} ({found[1].kl[1]:.6f})" in fine
    assert f"{100 * found[0].agreement[0]:.3f}%" in coarse


def test_bad_input():
    with pytest.raises(ValueError, match="windows: got torch.int64 .*, wanted int64"):
        measure_divergence(model(), {"same": model()}, TEXT[:1])
    with pytest.raises(ValueError, match="models: got none"):
        measure_divergence(model(), {}, TEXT)
    with pytest.raises(ValueError, match="models: 'bad' or the reference has logits that are not finite"):
        measure_divergence(model(), {"good": model(), "bad": model(float("nan"))}, TEXT)
