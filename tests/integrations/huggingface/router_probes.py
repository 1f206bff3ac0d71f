"""Compares a router of transformers with what the table says that it computes: the very numbers of its own forward, for
logits of many magnitudes, in bfloat16 and float32, in training and evaluation.
Called by test_routers; calls the router's own forward, with hidden states that are its logits.

Legend: P probes, E experts.
"""

import itertools

import torch
from norm_probes import probe_copy
from torch import nn


@torch.no_grad()
def assert_computes(call, router):
    """AssertionError unless the router computes what its `RouterCall` says."""
    for dtype in (torch.bfloat16, torch.float32):
        _compare(call, router, dtype)


def _compare(call, router, dtype):
    kind = call.kind
    tensors = {name for name, _ in [*router.named_parameters(), *router.named_buffers()]}
    assert tensors <= {"weight", "bias", kind.bias}
    probe = probe_copy(router, dtype)
    experts, hidden_size = probe.weight.shape
    # Near the identity: exact in float32, rounded in 16 bits.
    eye = torch.eye(experts)
    probe.weight = nn.Parameter((eye + 2**-9 * eye.roll(1, 0)).to(dtype), requires_grad=False)
    if hasattr(probe, "hidden_dim"):
        assert probe.hidden_dim == hidden_size
        probe.hidden_dim = experts
    generator = torch.Generator().manual_seed(0)
    hidden = _probes(experts, generator).to(dtype)
    around = torch.randn(experts, generator=generator)
    if getattr(probe, "bias", None) is not None:
        probe.bias.copy_(around)
    # The correction: none, of both signs, so negative that experts with 0 would win, and in the order of the experts.
    corrections = [torch.zeros(experts), 0.5 * around, around - 6.0, around.sort().values]
    for correction, training in itertools.product(corrections[: 1 if kind.bias is None else None], (False, True)):
        stored, more = None, []
        if kind.bias == "":
            stored = correction.to(dtype)
            more = [stored]
        elif kind.bias is not None:
            target = probe
            for name in kind.bias.split("."):
                target = getattr(target, name)
            target.copy_(correction.reshape(target.shape))
            stored = target.reshape(-1).clone()
        logits, scores, ids = own = probe.train(training)(hidden.clone(), *more)
        assert torch.equal(logits, call.logits(probe, hidden))
        assert logits.dtype == (torch.float32 if kind.wide or kind.logits_float else dtype)
        assert scores.dtype == (torch.float32 if kind.scores_float else dtype)
        assert (scores.shape, ids.shape, ids.dtype) == (*[(len(hidden), call.form.top_k)] * 2, torch.int64)
        _assert_chooses(call.form, logits, stored, ids)
        _assert_weighs(call.form, logits, scores, ids)
        if kind.flattens:
            results = probe(hidden.clone().unflatten(0, (2, -1)), *more)
            assert all(map(torch.equal, results, own))


def _probes(experts, generator):
    """(P, E): logits of several magnitudes, and some whose sigmoids are as small as an epsilon in their sum."""
    shift = torch.tensor([0.0] * 32 + [-10.0, -14.0, -18.0, -30.0, -44.0, -46.0, -48.0, -50.0] * 2)
    scale = torch.tensor([0.3, 1.0, 2.0, 8.0] + [1.0] * 2).repeat_interleave(8)
    return torch.randn(len(shift), experts, generator=generator) * scale[:, None] + shift[:, None]


def _assert_chooses(form, logits, correction, ids):
    """The form chooses the same, but for the order, and for experts that are equal to rounding."""
    choice = form.choice(form.scores(logits), correction)
    best = choice.topk(form.top_k, dim=-1).values
    own = choice.gather(-1, ids).sort(dim=-1, descending=True).values
    assert ids.sort(dim=-1).values.diff(dim=-1).ne(0).all()
    torch.testing.assert_close(own, best, rtol=1e-5, atol=1e-30)


def _assert_weighs(form, logits, scores, ids):
    """The form gives the scores: of 16 bits, nearly always the very same."""
    expected = form.weigh(form.scores(logits).gather(-1, ids)).to(scores.dtype)
    if scores.dtype == torch.float32:
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=0.0)
        return
    assert (scores == expected).float().mean() > 0.98
    torch.testing.assert_close(scores.float(), expected.float(), rtol=2**-7, atol=0.0)
