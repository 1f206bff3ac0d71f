"""Operands that kernels may read early: where the graph proves that nothing writes them, and nowhere else.
Called by pytest; reads the graphs that `prefetch_operands` leaves.
"""

import pytest
import torch
import torch.nn.functional as F

import thunder_moe
from thunder_moe.compilers.dynamo.prefetch import prefetch_operands
from thunder_moe.compilers.dynamo.scopes import copy_of, scopes_of
from thunder_moe.formats import nvfp4

N, K = 64, 64


def prefetched(function, *arguments):
    """Return, for each operator of the package in a function's graph in order, if it reads an operand early."""
    found = []

    def backend(gm, inputs):
        graph = copy_of(gm)
        prefetch_operands(scopes_of(graph, False))
        ours = [node for node in graph.graph.nodes if "thunder_moe" in str(node.target)]
        found.extend(bool(node.kwargs.get("prefetch")) for node in ours)
        return graph

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    return found


@pytest.fixture
def weight():
    packed = nvfp4.quantize(torch.randn(1, N, K))
    return packed.qdata[0].t(), packed.scale[0], packed.global_scale[0]


def norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def linear(x, weight):
    return thunder_moe.f16a_nvfp4weight_scaled_mm(x, *weight)


def test_behind_another_kernel(weight):
    assert prefetched(lambda x: linear(norm(x), weight), torch.randn(1, K)) == [True]
    assert prefetched(lambda x: linear(linear(x, weight), weight), torch.randn(1, K)) == [False, True]
    ids, table = torch.tensor([1]), torch.randn(4, K)
    assert prefetched(lambda: linear(F.embedding(ids, table), weight)) == [True]


def test_the_first_kernel_of_a_graph_waits(weight):
    """The kernel in front of it is another program's, which may have written the weight."""
    assert prefetched(lambda x: linear(x.view(1, K), weight), torch.randn(K)) == [False]
    assert prefetched(lambda x: linear(x.to(x.dtype), weight), torch.randn(1, K)) == [False]


def copied_over(y, x):
    y.view(-1).copy_(x.view(-1))
    return y


def assigned(y, x):
    y[:] = x
    return y


def given_as_out(y, x):
    torch.mul(x, 2, out=y)
    return y


@pytest.mark.parametrize(
    "input_of",
    [
        lambda x: copied_over(norm(x), x),
        lambda x: copied_over(F.embedding(torch.tensor([1]), x.expand(2, K)), x),
        lambda x: assigned(norm(x), x),
        lambda x: given_as_out(norm(x), x),
        lambda x: torch.mul(x, 2, out=norm(x)),
        lambda x: x * torch.rsqrt(torch.ones(K)),
        lambda x: x.expand_as(norm(x)),
        lambda x: x.view_as(norm(x)),
        lambda x: x.bfloat16().type_as(norm(x)),
        lambda x: torch.zeros_like(norm(x)),
        lambda x: norm(x).new_full((1, K), 2.0),
        lambda x: norm(x).copy_(x),
        lambda x: norm(x).zero_(),
        lambda x: torch.broadcast_tensors(norm(x), x)[1],
        lambda x: torch.atleast_2d(norm(x), x)[1],
    ],
)
def test_a_kernel_that_inductor_leaves_out_is_none(weight, input_of):
    assert prefetched(lambda x: linear(input_of(x), weight), torch.randn(1, K)) == [False]


@pytest.mark.parametrize(
    "view_of",
    [
        lambda x: torch.broadcast_tensors(x, x.new_ones(3, 1, K))[0][0],
        lambda x: torch.cat([x, x]).chunk(2)[1],
        lambda x: x.view(K).as_strided((1, K), (K, 1)).expand(1, K)[:, :].reshape(1, K),
    ],
)
def test_views_of_a_result_are_behind_its_kernel(weight, view_of):
    assert prefetched(lambda x: linear(view_of(norm(x)), weight), torch.randn(1, K)) == [True]
    assert prefetched(lambda x: linear(view_of(x), weight), torch.randn(1, K)) == [False]


def test_operands_by_keyword_wait(weight):
    def step(q, k, v, keys, values, position):
        keys.mul_(2)
        return thunder_moe.decode_attention(
            norm(q), k, v, key_cache=keys, value_cache=values, position=position, scale=1.0
        )

    q, k, v = torch.randn(3, 1, 2, 64).unbind()
    assert prefetched(step, q, k, v, *torch.randn(2, 1, 2, 16, 64).unbind(), torch.tensor([3])) == [False]


def test_a_weight_that_the_graph_changes_waits(weight):
    def step(x, codes, scale, global_scale):
        y = linear(norm(x), (codes, scale, global_scale))
        global_scale.mul_(2)
        return y

    assert prefetched(step, torch.randn(1, K), *weight) == [False]


def test_a_weight_that_the_graph_makes_waits(weight):
    assert prefetched(lambda x: linear(norm(x), (weight[0], weight[1], weight[2] * 2)), torch.randn(1, K)) == [False]


def test_routers(weight):
    def step(x, gate):
        return thunder_moe.moe_linear_router(norm(x), gate, top_k=2)

    assert prefetched(step, torch.randn(1, K), torch.randn(8, K)) == [True]


@pytest.mark.parametrize("changed", [False, True])
def test_caches_are_changed_by_the_attention_alone(changed):
    def step(x, keys, values, position):
        q, k, v = norm(x).split([4, 2, 2], 1)
        out = thunder_moe.decode_attention(q, k, v, keys, values, position, scale=1.0)
        return out if not changed else (out, keys.mul_(2))

    caches = torch.randn(2, 1, 2, 16, 64).unbind()
    assert prefetched(step, torch.randn(1, 8, 64), *caches, torch.tensor([3])) == [not changed]
