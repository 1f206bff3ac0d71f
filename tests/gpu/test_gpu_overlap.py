"""Kernels that start before the one in front of them has ended, as inductor's may too: nothing stale is read.
Called by `pytest -m gpu`; judged by the same calls one by one, with the device idle between them.
"""

import functools
import itertools
import threading

import pytest
import torch
from oracle import relative_error
from router_forms import make_router
from torch import nn

from thunder_moe import Llama4MoE, Llama4MoEConfig, NVFP4Linear, moe_linear_router, moe_router, quantize_, routing
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import plan, workspace
from thunder_moe.kernels.cuda.configs import GemmConfig
from thunder_moe.ops.operator import OPERATORS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
randn = functools.partial(torch.randn, device="cuda", dtype=BF16)


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of tiled weights are for compute capability 9.0")


def captured(function):
    """(graph, results of its replays)"""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "deepseek_v3", "ernie", "many"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 40])
def test_linear_router(monkeypatch, name, tokens):
    monkeypatch.setattr(routing, "LINEAR_ROUTER_TOKENS", 4)
    chains.clear()
    monkeypatch.setattr(OPERATORS["moe_linear_router"], "_mru", ())
    logits, bias, options = make_router(name, tokens)
    hidden, weight = randn(tokens, 1032), randn(logits.shape[1], 1032) / 8
    linear_bias, bias = randn(logits.shape[1]), None if bias is None else bias.cuda()
    for logits_dtype, added in itertools.product((BF16, torch.float32), (None, linear_bias)):
        call = functools.partial(moe_linear_router, hidden, weight, added, bias, logits_dtype=logits_dtype, **options)
        graph, (*results, logits) = captured(call)
        for _ in range(20):
            hidden.normal_()
            graph.replay()
            exact = hidden.double() @ weight.double().T + (0 if added is None else added.double())
            assert relative_error(logits, exact) < (3e-6 if logits_dtype == torch.float32 else 4e-3)
            dtype = options.get("scores_dtype", BF16)
            wanted = moe_router(logits, bias, **(options | dict(scores_dtype=dtype)))
            for result, other in zip(results, wanted, strict=True):
                assert torch.equal(result, other)
    pool = workspace.semaphore_pool(torch.device("cuda", 0))
    assert not pool._zeros.any()


@pytest.mark.parametrize(("row_blocks", "warps_n", "warps_k", "depth"), [(1, 1, 4, 1), (2, 1, 2, 2), (2, 2, 1, 2)])
@pytest.mark.parametrize(("n", "k"), [(2048, 4096), (5120, 2048), (512, 8192)])
def test_sums_of_single_rows_that_blocks_exchange(monkeypatch, n, k, row_blocks, warps_n, warps_k, depth):
    needs_hopper()
    weight = quantize(torch.randn(2, n, k)).to("cuda").to_layout("tiled_64x64")
    config = GemmConfig("tiled_mma", 1, row_blocks, warps_n, warps_k, depth, True)
    rows, offsets = randn(2, k), torch.tensor([1, 2], device="cuda", dtype=torch.int32)
    monkeypatch.setattr(plan, "_FEW_ROWS", 0)
    plan.plan_gemm.cache_clear()
    chains.clear()
    inputs = [randn(2, k) for _ in range(30)]
    inputs[3][0] = 0  # sums that are zero
    wanted = [cuda.grouped_mm(each, weight, offsets, config=config) for each in inputs]
    monkeypatch.undo()
    plan.plan_gemm.cache_clear()
    chains.clear()
    graph, out = captured(lambda: cuda.grouped_mm(rows, weight, offsets, config=config))
    for each, other in zip(inputs, wanted, strict=True):
        rows.copy_(each)
        graph.replay()
        assert torch.equal(out, other)
    assert not workspace.semaphore_pool(torch.device("cuda", 0))._zeros.any()


class Norm(nn.Module):
    def forward(self, x):
        return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    """What a decoder layer has but for attention, of kernels that are as short as they get."""

    def __init__(self, hidden_size=2048):
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.moe = Llama4MoE(Llama4MoEConfig(hidden_size=hidden_size, intermediate_size=256, num_experts=16, top_k=4))
        self.norm = Norm()

    def forward(self, x):
        x = x + self.linear(self.norm(x))
        return x + self.moe(self.norm(x)[None])[0]


def blocks(count=4):
    model = nn.Sequential(*(Block() for _ in range(count))).to("cuda", BF16).eval().requires_grad_(False)
    for block in model:
        block.linear = NVFP4Linear.from_linear(block.linear)
    return quantize_(model)


def by_itself(model, x):
    """The layers of a model one by one, the device idle in between."""
    for block in model:
        x = block(x)
        torch.cuda.synchronize()
    return x


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("overlapping", [False, True], ids=["inductor as it is", "inductor's kernels overlap too"])
def test_compiled_layers_in_a_graph(tokens, overlapping):
    """New tokens, so other experts, at each replay, behind kernels of any length and beside another stream's."""
    torch._dynamo.reset()
    model = blocks()
    compiled = torch.compile(model, fullgraph=True, options={"triton.enable_pdl": overlapping})
    x = randn(tokens, 2048)
    graph, out = captured(lambda: compiled(x))
    other_graph, other = captured(lambda: compiled(x))
    side = torch.cuda.Stream()
    for trial in range(40):
        x.normal_()
        torch.cuda.synchronize()
        wanted = compiled(x)
        torch.cuda.synchronize()
        if trial % 3 == 0:
            torch.cuda._sleep(1000 * trial)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            other_graph.replay()
        for _ in range(5):
            graph.replay()
        torch.cuda.current_stream().wait_stream(side)
        assert torch.equal(out, wanted)
        assert torch.equal(other, wanted)
        if trial % 10 == 0:
            assert relative_error(out, by_itself(model, x)) < 3e-2
    assert not workspace.semaphore_pool(torch.device("cuda", 0))._zeros.any()


@torch.no_grad()
@pytest.mark.parametrize("copy", ["plain", "compiled"])
def test_weights_that_the_kernel_in_front_writes(copy):
    """The GEMM starts while a kernel still writes its weights; inductor's lets it start before it writes at all."""
    torch._dynamo.reset()
    linears = [NVFP4Linear.from_linear(nn.Linear(2048, 2048, bias=False).to("cuda", BF16)) for _ in range(3)]
    target, *sources = linears

    def write(source):
        for name in ("scale", "global_scale", "qdata"):  # bytes: Triton has no kernel for all of them
            to, of = getattr(target, name), getattr(source, name)
            to.view(torch.uint8).copy_(of.view(torch.uint8)) if to.ndim else to.copy_(of)

    if copy == "compiled":
        write = torch.compile(write, options={"triton.enable_pdl": True})
    for tokens in (1, 8, 64, 256):
        x = randn(tokens, 2048)
        wanted = [source(x) for source in sources]
        torch.cuda.synchronize()
        for trial in range(60):
            write(sources[trial % 2])
            out = target(x)
            assert torch.equal(out, wanted[trial % 2])


@torch.no_grad()
def test_threads_with_streams_of_their_own():
    model = blocks(2)
    inputs = [randn(1, 2048) for _ in range(4)]
    wanted = [model(x).clone() for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                out = model(inputs[i])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(out, wanted[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
