"""The vLLM plugin's experts in vLLM's own MoE layer and kernel on a GPU, against the oracle: eager, CUDA graphs, EPLB.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls benchmarks/harness/vllm_layers.py.
"""

from importlib.util import find_spec

import pytest
import torch
from oracle import dequantize, moe_experts, relative_error

from benchmarks.harness.served import ServedLayer

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

E, A, H, I = 16, 4, 512, 256  # noqa: E741
TOLERANCE = 8e-3  # of a whole layer in bf16


@pytest.fixture(scope="module")
def layers():
    """benchmarks/harness/vllm_layers.py, with vLLM's groups of processes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from benchmarks.harness import vllm_layers

    with vllm_layers.one_process(torch.device("cuda")), torch.no_grad():
        yield vllm_layers


def packed(experts, n, k):
    from thunder_moe.formats.nvfp4 import quantize

    return quantize(torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5)


def made(layers, ranks=1, intermediate=I, **routing):
    """(vLLM's layer with our experts, float32 gate_up (E, 2I, H), down (E, H, I) on the CPU)"""
    sizes = ServedLayer("test", H, intermediate, E * ranks, A, ranks=ranks, routing=routing)
    weights = packed(E, 2 * intermediate, H), packed(E, H, intermediate)
    dense = [dequantize(*(tensor.cpu() for tensor in weight.tensors())) for weight in weights]
    layer = layers.VLLMLayer(sizes, "thunder_moe", *weights)
    assert layer.kernel == "ThunderExperts"
    return layer, dense


def inputs(tokens, experts=E):
    hidden = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
    return hidden, torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)


def expected(layer, dense, hidden, logits, first=0):
    weights, ids = (tensor.cpu() for tensor in layer.chosen(hidden, logits))
    return moe_experts(hidden.cpu(), ids - first, weights, *dense)


@pytest.mark.parametrize("intermediate", [I, 48])
@pytest.mark.parametrize("tokens", [1, 3, 37, 300])
def test_layer(layers, tokens, intermediate):
    layer, dense = made(layers, intermediate=intermediate)
    hidden, logits = inputs(tokens)
    out = layer(hidden.clone(), logits)
    assert relative_error(out.cpu(), expected(layer, dense, hidden, logits)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 64])
def test_expert_map(layers, tokens):
    """The first of two ranks: experts E to 2E - 1 are another's."""
    layer, dense = made(layers, ranks=2)
    assert int((layer.runner.routed_experts.expert_map < 0).sum()) == E
    hidden, logits = inputs(tokens, 2 * E)
    out = layer(hidden.clone(), logits)
    assert relative_error(out.cpu(), expected(layer, dense, hidden, logits)) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_no_expert(layers, ranks):
    """Padded tokens of all-to-all exchanges have ids of -1."""
    layer, dense = made(layers, ranks=ranks)
    hidden, logits = inputs(37, E * ranks)
    weights, ids = layer.chosen(hidden, logits)
    ids[::3] = -1
    ids[1, 0] = -1
    experts = layer.runner.routed_experts
    out = layer.method.apply(experts, hidden, weights, ids, None, None)
    assert relative_error(out.cpu(), moe_experts(hidden.cpu(), ids.cpu(), weights.cpu(), *dense)) < TOLERANCE
    assert not out[::3].any()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 8, 64, 300])
def test_cuda_graph(layers, tokens, ranks):
    """Replayed with other inputs it gives the bits that a plain call gives."""
    layer, dense = made(layers, ranks=ranks)
    hidden, logits = inputs(tokens, E * ranks)
    for _ in range(2):
        layer(hidden, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden, logits)
    for _ in range(3):
        new = inputs(tokens, E * ranks)
        hidden.copy_(new[0])
        logits.copy_(new[1])
        graph.replay()
        got = out.clone()
        assert torch.equal(got, layer(*new))
        assert relative_error(got.cpu(), expected(layer, dense, *new)) < TOLERANCE


def test_graph_sees_moved_experts(layers):
    """EPLB writes experts into the parameters that a captured graph reads; the logits of the experts move along."""
    layer, _ = made(layers)
    hidden, logits = inputs(37)
    layer(hidden, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden, logits)
    graph.replay()
    before = out.clone()
    order = torch.randperm(E, device="cuda")
    for parameter in layer.runner.routed_experts.parameters():
        view = parameter.data.view(E, -1)  # contiguous and expert-major, as EPLB needs it
        view = view.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else view
        view.copy_(view[order].clone())
    graph.replay()
    assert not torch.equal(out, before)
    logits.copy_(logits[:, order].clone())
    graph.replay()
    assert relative_error(out.cpu(), before.cpu()) < 1e-3  # equal logits may be chosen, and summed, in another order
