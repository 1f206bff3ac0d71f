"""The batch-invariant mode on a CUDA device: a row has the same bits among any others, in CUDA graphs, too.
Called by `pytest -m gpu`; calls tests/batch_invariant_cases.py for the operators and their operands.
"""

import pytest
import torch
from batch_invariant_cases import CASES, Rows, differing

from thunder_moe import Llama4MoE, Llama4MoEConfig, batch_invariant, decode_attention, quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = (1, 2, 8, 33, 128, 700)  # and all
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = {"many experts": (2048, 768, 128, 8), "few experts": (2048, 7168, 8, 2), "whole blocks": (2080, 720, 16, 4)}
WEIGHTS = [
    ("many experts", BF16, "nvfp4", "tiled_64x64"),
    ("many experts", FP16, "mxfp8", "tiled_64x64"),
    ("few experts", FP16, "nvfp4", "tiled_64x64"),
    ("whole blocks", BF16, "nvfp4", "linear"),
    ("many experts", FP16, "mxfp8", "linear"),
]


@pytest.fixture(scope="module")
def pool():
    """Return a function that makes `Rows`, and keeps the `Rows` of the last weights."""
    kept = {}

    def make(weights):
        if weights not in kept:
            kept.clear()
            size, dtype, format, layout = weights
            if layout != "linear" and torch.cuda.get_device_capability() != (9, 0):
                pytest.skip("kernels of tiled weights are for compute capability 9.0")
            hidden, inner, experts, top_k = SIZES[size]
            kept[weights] = Rows(4096, hidden, inner, dtype, format, layout, "cuda", experts, top_k)
        return kept[weights]

    return make


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("weights", WEIGHTS)
@torch.no_grad()
def test_rows_do_not_depend_on_others(pool, weights, case):
    rows = pool(weights)
    with batch_invariant():
        assert differing(rows, case, TOKENS) == []


@torch.no_grad()
def test_a_cuda_graph_keeps_the_mode_of_its_capture(pool):
    rows, tokens = pool(WEIGHTS[0]), torch.arange(5, device="cuda")
    with batch_invariant():
        (whole,) = rows.run("experts", torch.arange(700, device="cuda"))
        rows.run("experts", tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (captured,) = rows.run("experts", tokens)
    graph.replay()
    assert torch.equal(captured, whole[:5])


@torch.no_grad()
def test_a_graph_compiled_outside_reads_the_mode(pool):
    rows = pool(WEIGHTS[0])
    compiled = torch.compile(lambda tokens: rows.run("experts", tokens)[0], dynamic=True)
    compiled(torch.arange(3, device="cuda"))
    with batch_invariant():
        some = compiled(torch.arange(5, device="cuda"))
        assert torch.equal(some, compiled(torch.arange(700, device="cuda"))[:5])


@torch.no_grad()
def test_decode_attention():
    """A text's attention does not depend on the number of texts."""
    texts, heads, key_heads, width, length = 40, 32, 4, 128, 1100
    query, *keys = (torch.randn(texts, n, width, device="cuda", dtype=BF16) for n in (heads, key_heads, key_heads))
    caches = [torch.randn(texts, key_heads, length, width, device="cuda", dtype=BF16) for _ in range(2)]
    position = torch.tensor([1000], device="cuda")
    mask = (torch.arange(length, device="cuda") <= 1000).expand(texts, length)

    def attend(count):
        of = [each[:count].clone() for each in (query, *keys, *caches)]
        return decode_attention(*of, position, mask[:count], scale=width**-0.5)

    with batch_invariant():
        whole = attend(texts)
        assert all(torch.equal(attend(count), whole[:count]) for count in (1, 2, 8, 33))


def alone_and_among(layer, hidden):
    """Assert that tokens of (1, S, H) have the same bits in a layer in any number."""

    def run(tokens):
        out = layer(tokens)
        return (out[0] if isinstance(out, tuple) else out).reshape(-1, hidden.shape[-1])

    with batch_invariant():
        whole = run(hidden)
        for count in TOKENS:
            assert torch.equal(run(hidden[:, :count]), whole[:count])
    torch.testing.assert_close(whole, run(hidden), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("shared", [0, 1])
@torch.no_grad()
def test_llama4_moe(shared):
    """Its router and, in 16 bits, its shared expert."""
    config = Llama4MoEConfig(2048, 768, 128, num_shared_experts=shared, top_k=2)
    layer = quantize_(Llama4MoE(config, dtype=BF16, device="cuda"))
    hidden = torch.randn(1, 1000, 2048, device="cuda", dtype=BF16)
    alone_and_among(layer, hidden)
    if not shared:
        compiled = torch.compile(layer, dynamic=True, fullgraph=True)
        compiled(hidden)
        alone_and_among(compiled, hidden)


@pytest.mark.parametrize("name", ["afmoe", "hunyuan_v1_moe", "lfm2_moe", "qwen2_moe", "phimoe", "qwen3_moe", "llama4"])
@torch.no_grad()
def test_layers_of_transformers(name):
    """Routers that keep their own operations, and gates of shared experts."""
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    model = quantize_(tiny_model(name, BF16)).cuda()
    parents = (each for each in model.modules() if any("NVFP4Experts" in type(c).__name__ for c in each.children()))
    alone_and_among(next(parents), torch.randn(1, 1000, 64, device="cuda", dtype=BF16))
