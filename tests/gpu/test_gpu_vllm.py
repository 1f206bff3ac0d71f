"""The vLLM plugin's layers in vLLM's own on a GPU, against the oracle: eager, CUDA graphs, EPLB, other weights.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls benchmarks/harness/vllm_layers.py.
"""

import gc
from importlib.util import find_spec

import pytest
import torch
from oracle import dequantize, dequantize_mxfp8, moe_experts, relative_error

from benchmarks.harness.served import ServedLayer

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

E, A, H, I = 16, 4, 512, 256  # noqa: E741
TOLERANCE = 8e-3  # of a whole layer in bf16
FORMATS = {"nvfp4": dequantize, "mxfp8": dequantize_mxfp8}


@pytest.fixture(params=FORMATS)
def format(request):
    """The number format of the experts."""
    return request.param


@pytest.fixture(scope="module")
def layers():
    """benchmarks/harness/vllm_layers.py, with vLLM's groups of processes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from benchmarks.harness import vllm_layers

    with vllm_layers.one_process(torch.device("cuda")), torch.no_grad():
        yield vllm_layers


def made(layers, format, ranks=1, intermediate=I, before=None, **routing):
    """(vLLM's layer with our experts, float32 gate_up (E, 2I, H), down (E, H, I) on the CPU)"""
    from thunder_moe.kernels.select import quantize_to

    sizes = ServedLayer("test", H, intermediate, E * ranks, A, ranks=ranks, routing=routing)
    shapes = (E, 2 * intermediate, H), (E, H, intermediate)
    dense = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[2] ** -0.5 for shape in shapes]
    weights = [quantize_to(format, weight) for weight in dense]
    dense = [FORMATS[format](*(tensor.cpu() for tensor in weight.tensors())) for weight in weights]
    layer = layers.VLLMLayer(sizes, "thunder_moe", *weights, before=before)
    assert layer.kernel == "ThunderExperts"
    return layer, dense


def inputs(tokens, experts=E):
    hidden = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
    return hidden, torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)


def expected(layer, dense, hidden, logits, **options):
    weights, ids = (tensor.cpu() for tensor in layer.chosen(hidden, logits))
    return moe_experts(hidden.cpu(), ids, weights, *dense, **options)


@pytest.mark.parametrize("intermediate", [I, 96])  # 96: blocks of scales fit, tiles of 64 x 64 do not
@pytest.mark.parametrize("tokens", [1, 3, 37, 300])
def test_layer(layers, format, tokens, intermediate):
    layer, dense = made(layers, format, intermediate=intermediate)
    hidden, logits = inputs(tokens)
    out = layer(hidden.clone(), logits)
    assert relative_error(out.cpu(), expected(layer, dense, hidden, logits)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(
    ("routing", "options"),
    [
        (dict(swiglu_limit=0.5), dict(limit=0.5)),
        (
            dict(activation="swigluoai_uninterleave", swiglu_limit=0.7, swiglu_alpha=1.702, swiglu_beta=1.0),
            dict(limit=0.7, alpha=1.702, up_shift=1.0),
        ),
    ],
    ids=["clamped", "swigluoai"],
)
def test_clamped_activations(layers, format, tokens, routing, options):
    layer, dense = made(layers, format, **routing)
    hidden, logits = inputs(tokens)
    out = layer(hidden.clone(), logits)
    wanted = expected(layer, dense, hidden, logits, **options)
    assert relative_error(out.cpu(), wanted) < TOLERANCE
    assert relative_error(wanted, expected(layer, dense, hidden, logits)) > 10 * TOLERANCE  # it makes a difference


@pytest.mark.parametrize("tokens", [1, 37])
def test_router_weights_on_the_input(layers, format, tokens):
    """Llama 4's layers, of one expert per token here as there."""
    layer, dense = made(layers, format, apply_router_weight_on_input=True, renormalize=False)
    hidden, logits = inputs(tokens)
    weights, ids = (tensor.cpu()[:, :1].contiguous() for tensor in layer.chosen(hidden, logits))
    experts = layer.runner.routed_experts
    out = layer.method.apply(experts, hidden, weights.cuda(), ids.cuda(), None, None)
    wanted = moe_experts(hidden.cpu(), ids, weights, *dense, weight_on_input=True)
    assert relative_error(out.cpu(), wanted) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 64])
def test_expert_map(layers, format, tokens):
    """The first of two ranks: experts E to 2E - 1 are another's."""
    layer, dense = made(layers, format, ranks=2)
    assert int((layer.runner.routed_experts.expert_map < 0).sum()) == E
    hidden, logits = inputs(tokens, 2 * E)
    out = layer(hidden.clone(), logits)
    assert relative_error(out.cpu(), expected(layer, dense, hidden, logits)) < TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
def test_ids_of_no_expert(layers, format, ranks):
    """Padded tokens of all-to-all exchanges have ids of -1."""
    layer, dense = made(layers, format, ranks=ranks)
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
def test_cuda_graph(layers, format, tokens, ranks):
    """Replayed with other inputs it gives the bits that a plain call gives."""
    layer, dense = made(layers, format, ranks=ranks)
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


def test_graph_sees_moved_experts(layers, format):
    """EPLB writes experts into the parameters that a captured graph reads; the logits of the experts move along."""
    layer, _ = made(layers, format)
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
        view = view.view(torch.uint8) if view.itemsize == 1 else view
        view.copy_(view[order].clone())
    graph.replay()
    assert not torch.equal(out, before)
    logits.copy_(logits[:, order].clone())
    graph.replay()
    assert relative_error(out.cpu(), before.cpu()) < 1e-3  # equal logits may be chosen, and summed, in another order


def reload(layer, gate_up, down):
    """What vLLM's reload_weights does to a layer, expert by expert as checkpoints have them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    from thunder_moe.integrations.vllm.experts import FIELDS

    experts = layer.runner.routed_experts
    with set_current_vllm_config(layer.config), torch.device("cuda"):
        layerwise.initialize_layerwise_reload(experts)
        for name, weight in (("w13", gate_up), ("w2", down)):
            for field, tensor in zip(FIELDS[weight.format], weight.tensors(), strict=True):
                parameter = getattr(experts, f"{name}_{field}")
                for expert, part in enumerate(tensor):
                    part = part.view(parameter.dtype) if part.itemsize == 1 else part
                    shards = ("w1", "w3") if name == "w13" else ("w2",)
                    parts = part.chunk(len(shards)) if part.ndim else [part] * len(shards)
                    for shard, own in zip(shards, parts, strict=True):
                        parameter.weight_loader(parameter, own, f"{name}_{field}", shard_id=shard, expert_id=expert)
        layerwise.finalize_layerwise_reload(experts, None)


def test_other_weights_in_a_graph(layers, format):
    """vLLM's reload puts other weights into the memory that a captured graph reads, and nothing keeps the old ones."""
    from vllm.model_executor.model_loader.reload import layerwise

    from thunder_moe.kernels.select import quantize_to

    layer, dense = made(layers, format, before=layerwise.record_metadata_for_reloading)
    shapes = (E, 2 * I, H), (E, H, I)
    random = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[2] ** -0.5 for shape in shapes]
    others = [quantize_to(format, weight) for weight in random]
    experts = layer.runner.routed_experts
    hidden, logits = inputs(37)
    layer(hidden, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden, logits)
    places = {name: parameter.data_ptr() for name, parameter in experts.named_parameters()}
    used = torch.cuda.memory_allocated()
    reload(layer, *others)
    gc.collect()
    assert places == {name: parameter.data_ptr() for name, parameter in experts.named_parameters()}
    assert torch.cuda.memory_allocated() < used + others[1].nbytes // 2  # nobody has kept a copy
    graph.replay()
    new = [FORMATS[format](*(tensor.cpu() for tensor in weight.tensors())) for weight in others]
    assert relative_error(out.cpu(), expected(layer, new, hidden, logits)) < TOLERANCE
    assert relative_error(out.cpu(), expected(layer, dense, hidden, logits)) > 0.5


@pytest.mark.parametrize("tokens", [1, 37])
def test_biases_and_rows_in_turns(layers, format, tokens):
    """GPT-OSS: rows of gate and up alternate in the checkpoint."""
    biases = torch.randn(E, 2 * I), torch.randn(E, H)
    turns = torch.arange(2 * I).view(2, I).t().flatten()

    def fill(experts):
        for name in ("w13_weight", "w13_weight_scale"):
            data = getattr(experts, name).data.view(torch.uint8)
            data.copy_(data[:, turns].clone())
        experts.w13_bias.data.copy_(biases[0][:, turns])
        experts.w2_bias.data.copy_(biases[1])

    layer, dense = made(layers, format, before=fill, activation="swigluoai", has_bias=True)
    hidden, logits = inputs(tokens)
    wanted = expected(
        layer, dense, hidden, logits, gate_up_bias=biases[0].bfloat16().float(),
        down_bias=biases[1].bfloat16().float(), limit=7.0, alpha=1.702, up_shift=1.0,
    )  # fmt: skip
    assert relative_error(layer(hidden.clone(), logits).cpu(), wanted) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 37, 300])
@pytest.mark.parametrize("features", [(256, 512), (96, 544)])
def test_dense_layer(layers, format, rows, features):
    """The method of dense layers, in a graph."""
    from thunder_moe.kernels.select import quantize_to

    n, k = features
    weight = quantize_to(format, torch.randn(1, n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5)
    layer = layers.VLLMLinear(weight, "thunder_moe")
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    wanted = x.float().cpu() @ FORMATS[format](*(tensor.cpu() for tensor in weight.tensors()))[0].t()
    assert relative_error(out.cpu(), wanted) < TOLERANCE


@pytest.mark.parametrize("tokens", [5, 600])  # products by row, and by blocks of rows that are sorted
def test_adapters(layers, format, tokens):
    """Tokens with one of two adapters, or none, in a batch; other adapters of the same tokens in the same graph."""
    from thunder_moe.kernels.select import quantize_to

    rank = 16
    shapes = (E, 2 * I, H), (E, H, I)
    random = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[2] ** -0.5 for shape in shapes]
    weights = [quantize_to(format, weight) for weight in random]
    dense = [FORMATS[format](*(tensor.cpu() for tensor in weight.tensors())) for weight in weights]

    def matrix(n, k):
        return (torch.randn(E, n, k, device="cuda") * k**-0.5).bfloat16()

    adapters = [
        layers.Adapter(
            (matrix(rank, H), matrix(rank, I), matrix(rank, H)), (matrix(I, rank), matrix(H, rank), matrix(I, rank))
        )
        for _ in range(2)
    ]
    layer = layers.VLLMLoRALayer(ServedLayer("test", H, I, E, A), "thunder_moe", *weights, adapters, tokens)
    assert layer.kernel == "ThunderLoRAExperts"
    merged = {-1: dense}
    for slot, (a, b) in enumerate(adapters):
        gate, down, up = (second.float().cpu() @ first.float().cpu() for first, second in zip(a, b, strict=True))
        merged[slot] = dense[0] + torch.cat([gate, up], 1), dense[1] + down
    hidden, logits = inputs(tokens)
    graph = torch.cuda.CUDAGraph()
    for turn in range(2):
        slots = [(7 * token + turn) % 3 - 1 for token in range(tokens)]
        layer.choose(slots)
        if turn == 0:
            layer(hidden.clone(), logits)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = layer(hidden, logits)
        graph.replay()
        weights_of, ids = (tensor.cpu() for tensor in layer.chosen(hidden, logits))
        for slot, both in merged.items():
            own = [token for token in range(tokens) if slots[token] == slot]
            wanted = moe_experts(hidden.cpu()[own], ids[own], weights_of[own], *both)
            assert relative_error(out.cpu()[own], wanted) < TOLERANCE
