"""Sums and norms that become a part of the dense layer or the router behind them: found in transformers' models and in
plain code, left where the program needs them otherwise.
Called by pytest; judged by the same function, uncompiled.
"""

import pytest
import torch
from fast_cases import others_slow
from tiny_models import tiny_model, tokens
from transformers import StaticCache

import thunder_moe
from thunder_moe import quantize_
from thunder_moe.compilers.dynamo.add_norm import fuse_add_norms
from thunder_moe.compilers.dynamo.prefetch import prefetch_operands
from thunder_moe.compilers.dynamo.scopes import copy_of, scopes_of
from thunder_moe.formats import mxfp8, nvfp4
from thunder_moe.integrations.huggingface import routers

N, K = 48, 64


def fused(function, *arguments, again=None, dynamic=False, on_any_device=True):
    """Return the number of norms that are fused in a function's graph; its results are the function's own, of `again`
    if it changes the arguments."""
    counts, early = [], []

    def backend(gm, inputs):
        graph = copy_of(gm)
        counts.append(fuse_add_norms(scopes_of(graph, torch.is_grad_enabled()), on_any_device=on_any_device))
        graph.graph.lint()
        prefetch_operands(scopes_of(graph, torch.is_grad_enabled()))
        ours = [node for node in graph.graph.nodes if "add_norm" in str(node.target)]
        early.extend(bool(node.kwargs.get("prefetch")) for node in ours)
        assert len(ours) == counts[-1]
        graph.recompile()
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    given = [each.clone() if isinstance(each, torch.Tensor) and not each.requires_grad else each for each in arguments]
    torch.testing.assert_close(compiled(*given), function(*(again or arguments)), rtol=1e-5, atol=1e-5)
    fused.early = early
    return sum(counts)


# DeepSeek-V3 has layers that several others read the rows of; GPT-OSS multiplies by the norm's weight in float32.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3_moe", 3),
        *others_slow([("deepseek_v3", 2), ("mixtral", 3), ("gpt_oss", 0)], exhaustive=True),
    ],
)
def test_decode_steps_of_models(name, count, monkeypatch):
    """Two layers: the first norm has no sum in front of it."""
    monkeypatch.setattr(routers, "is_one_operator", lambda hidden, weight: True)
    model = quantize_(tiny_model(name), linears="*_proj").requires_grad_(False)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(tokens(1, 9), past_key_values=cache)
        own, other = ((tokens(1, 1), torch.tensor([[9]]), cache) for cache in caches)

        def step(token, position, cache):
            return model(token, position_ids=position, past_key_values=cache).logits

        assert fused(step, *own, again=other) == count
    assert all(fused.early)


@pytest.fixture(params=["nvfp4", *others_slow(["mxfp8"], exhaustive=True)])
def layer(request):
    """Return the operator of a dense layer, and its weight (K, N)."""
    format = {"nvfp4": nvfp4, "mxfp8": mxfp8}[request.param]
    codes, scale, *others = format.quantize(torch.randn(1, N, K)).tensors()
    run = getattr(thunder_moe, f"f16a_{request.param}weight_scaled_mm")
    return lambda rows: run(rows, codes[0].t(), scale[0], *(each[0] for each in others))


X, RESIDUAL, WEIGHT = torch.randn(2, 1, K), torch.randn(2, 1, K), torch.randn(K)


def norm(x, weight, epsilon=1e-6):
    wide = x.to(torch.float32)
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * (wide * factor).to(x.dtype)


@torch.no_grad()
def test_plain_layers(layer):
    def block(x, residual, weight):
        total = residual + x
        return layer(norm(total, weight)), total

    assert fused(block, X, RESIDUAL, WEIGHT) == 1
    assert fused(lambda *each: layer(norm(each[0] + each[1], each[2], 0.5).view(2, K)), X, RESIDUAL, WEIGHT) == 1


@torch.no_grad()
def test_a_chain_of_layers(layer):
    def block(x, residual, weight):
        for _ in range(3):
            residual = residual + x
            x = torch.cat((layer(norm(residual, weight)), x[..., N:]), -1)
        return x

    assert fused(block, X, RESIDUAL, WEIGHT) == 3


@torch.no_grad()
def test_routers():
    gate = torch.randn(8, K)

    def block(x, residual, weight, after=True):
        total = x + residual
        rows = norm(total, weight)
        flat = rows.view(-1, K)
        early = None if after else flat.sum()
        scores, ids, *_order = torch.ops.thunder_moe.moe_linear_router(flat, gate, None, None, top_k=2)
        return scores, ids, total * 2, rows.cos(), flat.sin(), early

    assert fused(block, X, RESIDUAL, WEIGHT) == 1
    assert fused(lambda *given: block(*given, after=False), X, RESIDUAL, WEIGHT) == 0

    def by_name(x, residual, weight):
        rows = norm(x + residual, weight).view(-1, K)
        return torch.ops.thunder_moe.moe_linear_router(hidden_states=rows, weight=gate, top_k=2)[0]

    assert fused(by_name, X, RESIDUAL, WEIGHT) == 0


@torch.no_grad()
def test_other_programs_are_left(layer):
    def of(change):
        def block(x, residual, weight):
            total = x + residual
            return change(total, norm(total, weight), residual)

        return fused(block, X, RESIDUAL, WEIGHT)

    assert of(lambda total, rows, _: (layer(rows), rows)) == 0  # somebody else reads the rows
    assert of(lambda total, rows, _: (total.sum(), layer(rows))) == 0  # or the sum earlier
    assert of(lambda total, rows, _: layer(total.add_(1) * 0 + rows)) == 0
    assert of(lambda total, rows, _: (total.add_(1), layer(rows))) == 0
    assert of(lambda total, rows, residual: (residual.add_(1), layer(rows))) == 0
    assert fused(lambda x, weight: layer(norm(x, weight)), X, WEIGHT) == 0
    assert fused(lambda x, weight: layer(norm(x + 1.0, weight)), X, WEIGHT) == 0
    assert fused(lambda x, one, weight: layer(norm(x + one, weight)), X, X[:1], WEIGHT) == 0  # broadcast
    assert fused(lambda x, other, weight: layer(norm(torch.add(x, other, alpha=2), weight)), X, X, WEIGHT) == 0
    assert fused(lambda x, other, weight: layer(norm(x + other, weight)), X, X, WEIGHT, dynamic=True) == 0


@torch.no_grad()
def test_a_mean_of_another_dtype_is_left(layer):
    def block(x, residual, weight):
        wide = (x + residual).to(torch.float32)
        mean = wide.pow(2).mean(-1, keepdim=True, dtype=torch.bfloat16)
        return layer(weight * (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype))

    assert fused(block, X, RESIDUAL, WEIGHT) == 0


@torch.no_grad()
def test_a_layer_that_autocast_casts_is_left(layer):
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(lambda x, o, w: layer(norm(x + o, w)), X, RESIDUAL, WEIGHT) == 0


@torch.no_grad()
def test_rows_given_by_name_or_twice_are_left():
    router = torch.ops.thunder_moe.moe_linear_router

    def of(change):
        def block(x, residual, weight):
            return change(norm((x + residual).view(-1, K), weight))[:2]

        return fused(block, X, RESIDUAL, WEIGHT)

    assert of(lambda rows: router(hidden_states=rows, weight=torch.ones(8, K), top_k=2)) == 0
    assert of(lambda rows: router(rows, weight=torch.ones(8, K), top_k=2)) == 0
    assert of(lambda rows: router(rows, rows, top_k=2)) == 0


def test_training_is_left(layer):
    weight = WEIGHT.clone().requires_grad_()
    assert fused(lambda x, other, weight: layer(norm(x + other, weight)), X, RESIDUAL, weight) == 0


def test_a_cpu_keeps_its_own_kernels(layer):
    with torch.no_grad():
        assert fused(lambda x, o, w: layer(norm(x + o, w)), X, RESIDUAL, WEIGHT, on_any_device=False) == 0
