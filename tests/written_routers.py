"""Routers written in torch's operations, as models have them, and code that nearly is one.
Called by the tests of both compilers' rewrites of routers; calls torch alone.

`FUSED`: the options of `moe_router` that a router becomes. `OTHERS`: what a report says of the others: a part of the
code becomes `moe_router` (True), stays as written (False), or no router is found in it (None).
"""

import torch
import torch.nn.functional as F

T, E, A = 7, 12, 3


def wide(mask):
    """Return a mask of groups (T, G) as one of experts."""
    return mask.unsqueeze(-1).expand(-1, mask.shape[1], E // mask.shape[1]).reshape(-1, E)


def qwen(logits):
    values, ids = torch.topk(F.softmax(logits, dtype=torch.float, dim=-1), A, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return values.to(logits.dtype), ids


def mixtral(logits):
    values, ids = F.softmax(logits.float(), dim=1).topk(A)
    return values / torch.sum(values, -1, True), ids


def olmoe(logits):
    values, ids = torch.topk(torch.softmax(logits, -1, torch.float32), A, dim=1, sorted=False)
    return values.type_as(logits), ids


def special(logits):
    """The example of docs/design.md."""
    values, ids = torch.special.softmax(logits, dim=-1, dtype=torch.float32).topk(A)
    return values / values.sum(-1, keepdim=True), ids


def gpt_oss(logits):
    values, ids = torch.topk(logits, A, dim=-1)
    return F.softmax(values, dim=1, dtype=values.dtype), ids


def granite(logits):
    values, ids = logits.float().topk(A, dim=-1)
    return torch.softmax(values, dim=-1).type_as(logits), ids


def with_epsilon_and_scale(logits):
    values, ids = F.softmax(logits.float(), -1).topk(A, -1)
    return values / (values.sum(-1, keepdim=True) + 1e-3) * 2.5, ids


def by_groups(logits, fill=float("-inf")):
    """DeepSeek-V3's, GLM-4-MoE's, ...: a bias in the choice, which is among the two best groups of four."""
    scores = logits.type(torch.float32).sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1)
    ids = torch.topk(best, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best)
    mask.scatter_(1, ids, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    choice = choice.masked_fill(~mask.bool(), fill)
    ids = torch.topk(choice, k=A, dim=-1, sorted=False)[1]
    scores = scores.gather(1, ids)
    denominator = scores.sum(dim=-1, keepdim=True) + 1e-20
    scores /= denominator
    return scores * 2.5, ids


def by_groups_with_zeros(logits):
    """As DeepSeek-V3's first code, whose experts of other groups outrank negative ones."""
    return by_groups(logits, 0.0)


def by_best_of_groups(logits):
    """DeepSeek-V2's."""
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    best = scores.view(-1, 4, E // 4).max(dim=-1).values
    ids = torch.topk(best, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(best).scatter(1, ids, 1.0)
    mask = wide(mask)
    values, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=A, dim=-1, sorted=False)
    return values * 16, ids


def by_groups_of_softmax(logits):
    """Mistral 4's, without a bias."""
    scores = logits.float().softmax(-1)
    best = scores.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(best).bool().scatter(1, best.topk(2)[1], True)
    mask = mask[..., None].expand(-1, 4, E // 4).flatten(1)
    ids = scores.masked_fill(mask.logical_not(), 0.0).topk(A)[1]
    return scores.gather(-1, ids), ids


def minimax(logits):
    weights = F.sigmoid(logits.float())
    _, ids = torch.topk(weights + BIAS, A, dim=-1, sorted=False)
    scores = weights.gather(1, ids)
    scores /= scores.sum(dim=-1, keepdim=True)
    return scores, ids


def moonlight(logits):
    """A bias of two dimensions, added without gradients; the sum is not below a number."""
    scores = logits.float().sigmoid()
    with torch.no_grad():
        ids = (BIAS[None] + scores.detach()).topk(A, -1).indices
    scores = torch.gather(scores, 1, ids)
    return 0.5 * (scores / scores.sum(-1, keepdim=True).clamp(min=2.0)), ids


def afmoe(logits):
    scores = torch.sigmoid(logits.to(torch.float32))
    _, ids = torch.topk(scores + HALF_BIAS, k=A, dim=1)
    scores = scores.gather(dim=1, index=ids)
    return (scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) * 3).type_as(logits), ids


def longcat(logits):
    scores = logits.float().softmax(-1)
    with torch.no_grad():
        ids = torch.topk(scores.view(-1, E) + BIAS.unsqueeze(0), k=A, dim=-1, sorted=False)[1]
    return (scores.gather(1, ids) * 6.0).to(logits.dtype), ids


def llama4(logits):
    values, ids = torch.topk(logits, A, dim=1)
    return torch.sigmoid(values.float()).to(logits.dtype), ids


def cohere2(logits):
    values, ids = torch.topk(logits, A, dim=-1)
    scores = F.sigmoid(values.float())
    return scores / torch.sum(scores, dim=-1, keepdim=True) / 4, ids


def sigmoids_chosen(logits):
    values, ids = logits.float().sigmoid().topk(A)
    return values, ids


BIAS = torch.randn(E, generator=torch.Generator().manual_seed(5)) * 0.5
HALF_BIAS = BIAS.bfloat16()

FUSED = {
    by_groups: dict(score="sigmoid", num_groups=4, top_groups=2, group_best=2, mask_to_zero=False, epsilon=1e-20),
    by_groups_with_zeros: dict(score="sigmoid", num_groups=4, top_groups=2, mask_to_zero=True, scale=2.5),
    by_best_of_groups: dict(score="softmax", num_groups=4, group_best=1, mask_to_zero=False, scale=16.0),
    by_groups_of_softmax: dict(score="softmax", num_groups=4, group_best=2, mask_to_zero=False, normalize=False),
    minimax: dict(score="sigmoid", normalize=True),
    moonlight: dict(score="sigmoid", normalize=True, least_sum=2.0, scale=0.5),
    afmoe: dict(score="sigmoid", normalize=True, epsilon=1e-20, scale=3.0),
    longcat: dict(score="softmax", normalize=False, scale=6.0),
    llama4: dict(score="sigmoid", normalize=False),
    cohere2: dict(score="sigmoid", normalize=True, scale=0.25),
    sigmoids_chosen: dict(score="sigmoid", normalize=False),
    qwen: dict(normalize=True),
    mixtral: dict(normalize=True),
    olmoe: dict(normalize=False),
    special: dict(normalize=True),
    gpt_oss: dict(normalize=True),
    granite: dict(normalize=True),
    with_epsilon_and_scale: dict(normalize=True, epsilon=1e-3, scale=2.5),
}


def probabilities_too(logits):
    probabilities = F.softmax(logits, -1)
    values, ids = probabilities.topk(A)
    return values, ids, probabilities


def values_too(logits):
    values, ids = F.softmax(logits, -1).topk(A)
    return values / values.sum(-1, keepdim=True), values, ids


def logits_changed(logits):
    logits = logits * 2
    probabilities = F.softmax(logits, -1)
    logits.zero_()
    return probabilities.topk(A)


def smallest(logits):
    return F.softmax(logits, -1).topk(A, largest=False)


def by_column(logits):
    return F.softmax(logits, -1).topk(A, dim=0)


def softmax_of_columns(logits):
    return F.softmax(logits, 0).topk(A)


def three_dimensions(logits):
    return F.softmax(logits[None], -1).topk(A)


def sixteen_bit_probabilities(logits):
    return F.softmax(logits.bfloat16(), -1).topk(A)


def no_softmax(logits):
    return logits.topk(A)


def other_mode(logits):
    with torch.no_grad():
        probabilities = F.softmax(logits, -1)
    return probabilities.topk(A)


def scaled_in_16_bits(logits):
    values, ids = F.softmax(logits, -1).topk(A)
    return values.bfloat16() * 0.3, ids


def other_mask_value(logits):
    return by_groups(logits, -1e4)


def masked_scores(logits):
    """The scores, not the choice, are of the groups; the bias is added behind the mask."""
    scores = logits.sigmoid()
    best = scores.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(2)[1], 1)
    mask = wide(mask)
    ids = (scores.masked_fill(~mask.bool(), 0.0) + BIAS).topk(A)[1]
    return scores.gather(1, ids), ids


def other_groups(logits):
    """Consecutive in the mask, strided in the scores of groups."""
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, E // 4, 4).transpose(1, 2).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(2)[1], 1)
    mask = wide(mask)
    ids = choice.masked_fill(~mask.bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids


def inverted_groups(logits):
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(2)[1], 1)
    mask = wide(mask)
    ids = choice.masked_fill(mask.bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids


def mask_changed(logits):
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(2)[1], 1)
    mask[:, 0] = 1
    ids = choice.masked_fill(~wide(mask).bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids


def mask_too(logits):
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best)
    mask.scatter_(1, best.topk(2)[1], 1)
    ids = choice.masked_fill(~wide(mask).bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids, mask


def wide_mask_too(logits):
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 4, E // 4).amax(-1)
    mask = torch.zeros_like(best)
    mask.scatter_(1, best.topk(2)[1], 1)
    mask = wide(mask)
    ids = choice.masked_fill(~mask.bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids, mask


def biased_scores(logits):
    choice = logits.sigmoid() + BIAS
    values, ids = choice.topk(A)
    return values, ids


def biased_in_place(logits):
    scores = logits.detach().sigmoid()
    scores += BIAS
    ids = scores.topk(A)[1]
    return scores.gather(1, ids), ids


def bias_of_tokens(logits):
    scores = logits.sigmoid()
    ids = (scores + torch.arange(T)[:, None].flip(1).expand(-1, E)).topk(A)[1]
    return scores.gather(1, ids), ids


def bias_of_logits(logits):
    """Inkling's: the bias is added to the logits."""
    ids = torch.topk(logits + BIAS, A, dim=-1)[1]
    return logits.gather(1, ids).sigmoid(), ids


def weighted_bias(logits):
    scores = logits.sigmoid()
    ids = torch.add(scores, BIAS, alpha=2).topk(A)[1]
    return scores.gather(1, ids), ids


def other_ids(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    return scores.gather(1, ids.flip(1)), ids


def gathered_twice(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    return scores.gather(1, ids), ids, scores.gather(1, ids) * 2, scores


def ids_changed(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    ids.add_(1).remainder_(E)
    return scores.gather(1, ids), ids


def bias_changed(logits):
    scores, bias = logits.sigmoid(), BIAS.clone()
    choice = scores + bias
    bias.zero_()
    ids = choice.topk(A)[1]
    return scores.gather(1, ids), ids


def detached_scores(logits):
    scores = logits.sigmoid()
    values, ids = scores.detach().topk(A)
    return values * scores.sum(), ids


def gathered_detached(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    return scores.detach().gather(1, ids) * scores.sum(), ids


def choice_without_gradients(logits):
    scores = logits.sigmoid()
    with torch.no_grad():
        ids = (scores + BIAS).topk(A)[1]
        other = ids + 1
    return scores.gather(1, ids), other


def sum_of_all(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    chosen = scores.gather(1, ids)
    return chosen / scores.sum(-1, keepdim=True), ids


def sum_of_columns(logits):
    scores = logits.sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    chosen = scores.gather(1, ids)
    return chosen / chosen.sum(0, keepdim=True), ids


def divided_in_place_and_read(logits):
    values, ids = logits.sigmoid().topk(A)
    before = values.view(-1)
    values /= values.sum(-1, keepdim=True)
    return values, ids, before


def scaled_twice(logits):
    values, ids = logits.sigmoid().topk(A)
    return values * 2.0 * 0.3, ids


def sigmoid_of_softmax(logits):
    values, ids = F.softmax(logits, -1).topk(A)
    return values.sigmoid(), ids


def softmax_of_sigmoid(logits):
    values, ids = logits.sigmoid().topk(A)
    return F.softmax(values, -1), ids


def sigmoids_of_half(logits):
    """Rounded to 16 bits before the choice: the bias then decides otherwise."""
    scores = logits.bfloat16().sigmoid()
    ids = (scores + BIAS).topk(A)[1]
    return scores.gather(1, ids), ids


def groups_of_another_bias(logits):
    """The groups' scores have another bias."""
    scores = logits.sigmoid()
    best = (scores + BIAS).view(-1, 6, E // 6).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(2)[1], 1)
    mask = wide(mask)
    ids = (scores + BIAS.abs()).masked_fill(~mask.bool(), 0.0).topk(A)[1]
    return scores.gather(1, ids), ids


def too_many_of_a_group(logits):
    scores = logits.sigmoid()
    choice = scores + BIAS
    best = choice.view(-1, 6, E // 6).amax(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(1)[1], 1)
    mask = wide(mask)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(A)[1]
    return scores.gather(1, ids), ids


OTHERS = {
    other_mask_value: None,
    masked_scores: None,
    other_groups: None,
    inverted_groups: None,
    mask_changed: False,
    mask_too: False,
    wide_mask_too: True,
    biased_scores: None,
    biased_in_place: None,
    bias_of_tokens: None,
    bias_of_logits: None,
    weighted_bias: None,
    other_ids: None,
    gathered_twice: True,
    ids_changed: None,
    bias_changed: False,
    detached_scores: None,
    gathered_detached: None,
    choice_without_gradients: False,
    sum_of_all: True,
    sum_of_columns: True,
    divided_in_place_and_read: True,
    scaled_twice: True,
    sigmoid_of_softmax: True,
    softmax_of_sigmoid: True,
    sigmoids_of_half: None,
    groups_of_another_bias: None,
    too_many_of_a_group: False,
    probabilities_too: True,
    values_too: True,
    scaled_in_16_bits: True,
    logits_changed: False,
    smallest: None,
    by_column: None,
    softmax_of_columns: None,
    three_dimensions: None,
    sixteen_bit_probabilities: None,
    no_softmax: None,
    other_mode: False,
}
