"""Tests Thunder's CUDA graphs around a layer: what they hold, what a graph on a GPU computes, what is refused.
Called by pytest; judged by eager layers with dequantized weights. Without a GPU the regions run as they are.
"""

import copy

import pytest
import thunder
import torch
from fast_cases import others_slow
from oracle import relative_error
from thunder.transforms.cudagraph import CUDAGraphRunner, CUDAGraphTransform

from thunder_moe import (
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    dequantize_,
    moe_executor,
    quantize_,
    rewrite_report,
)

BF16 = torch.bfloat16


class Uncaptured(CUDAGraphRunner):
    """Runs what would be a graph."""

    def call_cuda_graph(self, fn_name, *args):
        return self.python_callables[fn_name][0](*args)


def uncaptured():
    transform = CUDAGraphTransform()
    transform.cuda_graph_runner = Uncaptured()
    return transform


def make_layer(device="cpu"):
    layer = Llama4MoE(Llama4MoEConfig(256, 192, 8, top_k=2), dtype=BF16, device=device).requires_grad_(False)
    experts = layer.routed_experts
    for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
        torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return layer


def decoded(layer):
    return dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(layer))))[0]


def graphs(compiled):
    """Return (the number of graphs in the computation, the other symbols that compute something)."""
    bsyms = thunder.last_traces(compiled)[-1].bound_symbols
    others = {bsym.sym.name for bsym in bsyms if not bsym.sym.is_fusion}
    return sum(bsym.sym.is_fusion for bsym in bsyms), others - {"unpack_trivial", "python_return", "python_del"}


@pytest.mark.parametrize(
    "beforehand", [False, *others_slow([True], exhaustive=True)], ids=["rewritten", "quantized beforehand"]
)
@pytest.mark.slow
def test_a_layer_is_one_graph(beforehand):
    layer = make_layer()
    expected = decoded(layer)
    compiled = thunder.jit(
        quantize_(layer) if beforehand else layer, executors=[moe_executor], transforms=[uncaptured()]
    )
    x = torch.randn(2, 1, 256, dtype=BF16)
    assert relative_error(compiled(x), expected(x)) < 0.02
    assert graphs(compiled) == (1, set())
    assert [entry.decision for entry in rewrite_report(compiled)][-1] == "nvfp4"
    assert all(entry.rewritten for entry in rewrite_report(compiled))


def test_changes_of_arguments_are_refused():
    """A cache of keys and values changes so, and Thunder's graph would change a copy."""
    experts = GroupedSwiGLU(4, 64, 32, dtype=BF16).requires_grad_(False)
    inputs = torch.randn(3, 64, dtype=BF16), torch.tensor([0, 1, 1, 3], dtype=torch.int32)

    def step(x, offsets, count):
        count.add_(1)
        return experts(x, offsets)

    with pytest.raises(NotImplementedError, match=r"changes .*count.* in place.*reduce-overhead"):
        thunder.jit(step, executors=[moe_executor], transforms=[CUDAGraphTransform()])(*inputs, torch.tensor(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("beforehand", [False, True], ids=["rewritten", "quantized beforehand"])
def test_a_captured_decode_step_equals_eager(beforehand):
    layer = make_layer("cuda")
    expected, transform = decoded(layer), CUDAGraphTransform()
    layer = quantize_(layer) if beforehand else layer
    compiled = thunder.jit(layer, executors=[moe_executor], transforms=[transform])
    for _ in range(4):  # one capture, then replays with other tokens and other experts
        x = torch.randn(2, 1, 256, dtype=BF16, device="cuda")
        assert relative_error(compiled(x).cpu(), expected(x).cpu()) < 0.02
    assert len(transform.cuda_graph_runner.cuda_graph_cache) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_plugin_captures_a_graph():
    layer = make_layer("cuda")
    expected = decoded(layer)
    compiled = thunder.compile(layer, plugins=["nvfp4-moe", "reduce-overhead"])
    for _ in range(3):
        x = torch.randn(2, 1, 256, dtype=BF16, device="cuda")
        assert relative_error(compiled(x).cpu(), expected(x).cpu()) < 0.02
    assert graphs(compiled)[0] == 1
