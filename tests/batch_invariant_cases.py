"""Calls whose rows must not depend on other rows in the batch-invariant mode, on any device, and `assert_invariant`.
Called by tests/kernels/test_batch_invariance.py, the emulator's tests and tests/gpu; calls operators of thunder_moe.
"""

import torch

from thunder_moe import GroupedMLP, moe_experts, moe_linear_router, moe_route, moe_router
from thunder_moe.kernels.select import lay_out, quantize_to
from thunder_moe.ops import add_norm  # noqa: F401  (registers its operators)
from thunder_moe.ops.operator import operator_for

CASES = (
    "experts", "experts with biases", "grouped", "dense", "router", "linear router", "norm and dense",
    "norm and router", "training",
)  # fmt: skip


class Rows:
    """A pool of tokens and weights; `run` computes a case for some of the tokens, in an order.

    Args:
        tokens: their number.
        hidden: H.
        inner: I.
        dtype: of the tokens.
        format: of packed weights.
        layout: likewise.
        device: of everything.
        experts: E.
        top_k: A.
    """

    def __init__(
        self, tokens, hidden, inner, dtype, format="nvfp4", layout="linear", device="cpu", experts=8, top_k=3
    ):  # fmt: skip
        def random(*shape):
            return torch.randn(*shape, generator=generator)

        generator, self.experts, self.top_k = torch.Generator().manual_seed(0), experts, top_k
        self.options = dict(top_k=top_k, score="sigmoid", num_groups=2, top_groups=1)
        on = dict(device=device, dtype=dtype)
        self.x, self.residual = random(tokens, hidden).to(**on), random(tokens, hidden).to(**on)
        # Half of the tokens prefer an expert, so that experts have many rows and few.
        favour = torch.arange(tokens)[:, None] % 2 * (torch.arange(experts) == 1) * 2
        self.ids = (random(tokens, experts) + favour).topk(top_k).indices.to(device)
        self.weights = random(tokens, top_k).softmax(-1).to(device)
        self.logits = random(tokens, experts).to(**on)
        features = {"gate_up": (2 * inner, hidden), "down": (hidden, inner), "dense": (2 * inner, hidden)}
        sizes = {name: (1 if name == "dense" else experts, *size) for name, size in features.items()}
        packed = {name: quantize_to(format, random(*size).to(device)) for name, size in sizes.items()}
        self.packed = {name: lay_out(weight, layout) for name, weight in packed.items()}
        self.biases = {name: random(experts, size[1]).to(device) for name, size in sizes.items()}
        self.norm, self.router = random(hidden).to(**on), random(experts, hidden).to(**on)
        self.mlp = GroupedMLP(experts, hidden, inner, dtype=dtype, device=device).requires_grad_(False)
        for parameter in self.mlp.parameters():
            parameter.copy_(random(*parameter.shape))

    def run(self, case, tokens):
        """Return the results of a case for tokens (n,): each has a row per token."""
        x, ids, weights = self.x[tokens], self.ids[tokens], self.weights[tokens]
        gate_up, down, dense = self.packed.values()
        if case == "experts":
            return (moe_experts(x, ids, weights, gate_up, down),)
        if case == "experts with biases":
            biases = dict(gate_up_bias=self.biases["gate_up"], down_bias=self.biases["down"])
            return (moe_experts(x, ids, weights, gate_up, down, weight_on_input=True, limit=1.5, **biases),)
        if case in ("grouped", "training"):
            row_slot, offsets, slot_row = moe_route(ids, self.experts)
            rows = x[row_slot // self.top_k]
            if case == "training":
                out = self.mlp(rows, offsets)
            else:
                operator = operator_for("f16a_nvfp4weight_scaled_grouped_mm", gate_up.format)
                out = operator(rows, *operands(gate_up), offsets, layout=gate_up.layout)
            return (out[slot_row],)
        if case == "dense":
            operator = operator_for("f16a_nvfp4weight_scaled_mm", dense.format)
            return (operator(x, *operands(dense, alone=True), self.biases["dense"][0], layout=dense.layout),)
        if case == "norm and dense":
            operator = operator_for("f16a_nvfp4weight_add_norm_scaled_mm", dense.format)
            packed = operands(dense, alone=True)
            return operator(x, self.residual[tokens], self.norm, *packed, epsilon=1e-6, layout=dense.layout)
        if case == "router":
            return moe_router(self.logits[tokens], **self.options)[:2]
        if case == "linear router":
            results = moe_linear_router(x, self.router, self.router[:, 0].contiguous(), **self.options)
            wide = moe_linear_router(x, self.router, **self.options, logits_dtype=torch.float32)
            return *results[:2], results[-1], *wide[:2], wide[-1]
        assert case == "norm and router"
        options = dict(self.options, norm_epsilon=1e-6)
        results = torch.ops.thunder_moe.add_norm_linear_router(
            x, self.residual[tokens], self.norm, self.router, **options
        )
        return *results[:2], *results[5:]


def operands(weight, alone=False):
    """Return a weight's tensors as operators take them; `alone`: of a dense layer."""
    codes, *scales = (each[0] if alone else each for each in weight.tensors())
    return codes.mT, *scales


def differing(rows, case, counts):
    """Return (number of tokens, how many of them differ) for tokens alone, among `counts` others, and in another
    order, beside the same tokens among all."""
    total = rows.x.shape[0]
    device, generator = rows.x.device, torch.Generator().manual_seed(1)
    whole = rows.run(case, torch.arange(total, device=device))
    found = []
    for count in (1, 1, *counts, total):
        tokens = torch.randperm(total, generator=generator)[:count].to(device)
        for some, every in zip(rows.run(case, tokens), whole, strict=True):
            differ = (some != every[tokens]) & ~(some.isnan() & every[tokens].isnan())
            if differ.any():
                found.append((count, int(differ.flatten(1).any(1).sum())))
    return found
