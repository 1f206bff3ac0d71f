"""The forms of routers that models have, as options of `moe_router`, and logits for them.
Called by the tests of the router in ops, kernels and integrations; calls torch alone.
"""

import torch

# Form -> (experts, options).
FORMS = {
    "qwen3": (128, dict(top_k=8)),
    "mixtral": (8, dict(top_k=2, scores_dtype=torch.float32)),
    "olmoe": (64, dict(top_k=8, normalize=False)),
    "gpt_oss": (32, dict(top_k=4)),
    "deepseek_v3": (
        256,
        dict(top_k=8, score="sigmoid", epsilon=1e-20, scale=2.5, num_groups=8, top_groups=4),
    ),
    "deepseek_v2": (
        160,
        dict(top_k=6, normalize=False, scale=16.0, num_groups=8, top_groups=3, group_best=1, mask_to_zero=True),
    ),
    "masked with zero": (
        24,
        dict(top_k=3, score="sigmoid", num_groups=4, top_groups=2, mask_to_zero=True, scale=0.5),
    ),
    "ernie": (64, dict(top_k=6, least_sum=0.2)),
    "llama4": (16, dict(top_k=1, score="sigmoid", normalize=False)),
    "one expert": (1, dict(top_k=1)),
    "many": (512, dict(top_k=32, score="sigmoid", epsilon=1e-6)),
    "groups of three": (45, dict(top_k=5, num_groups=15, top_groups=3, group_best=3, score="sigmoid")),
}
BIASED = ("deepseek_v3", "masked with zero", "ernie", "many", "groups of three")


def make_router(name, tokens, dtype=torch.float32, *, seed=0):
    """(logits, bias or None, options); values of bf16 have many ties."""
    generator = torch.Generator().manual_seed(seed)
    experts, options = FORMS[name]
    logits = (2 * torch.randn(tokens, experts, generator=generator)).to(dtype)
    bias = 0.5 * torch.randn(experts, generator=generator) if name in BIASED else None
    return logits, bias, options
