"""The Humming backend on a CUDA device with humming-kernels: results, host synchronisation, CUDA graphs, streams.
Called by `pytest -m gpu` on such a machine; judged by tests/oracle.py.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, grouped_swiglu, groups, llama4_moe, relative_error
from test_gpu import check_cuda_graphs, check_many_weights, check_two_streams_and_a_graph, no_synchronisation

from thunder_moe import (
    Llama4MoE,
    Llama4MoEConfig,
    dequantize_,
    f16a_nvfp4weight_grouped_swiglu,
    f16a_nvfp4weight_scaled_grouped_mm,
    quantize_,
    use_backend,
)
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import humming
from thunder_moe.ops.grouped_mm import operands

REASON = humming.unavailable_reason()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def backend():
    with use_backend("humming"):
        yield


def make(n, k, experts=4, parts=1):
    """A weight on the device, in Humming's layout, and dequantised on the host; `parts` of it differ in scale."""
    weight = NVFP4Weight.concatenate(*(quantize(torch.randn(experts, n // parts, k) * 3**i) for i in range(parts)))
    return weight.to("cuda").to_layout("humming"), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mean_rows", [1, 12, 90])
def test_operators(mean_rows, parts, dtype):
    weight, exact = make(256, 672, 6, parts)
    counts = torch.randint(0, 2 * mean_rows + 1, (6,)).mul(torch.tensor([1, 0, 3, 1, 0, 1]))
    offsets = counts.cumsum(0).int()
    rows = torch.randn(int(offsets[-1]) + 2, 672).to(dtype)
    on_device = rows.cuda().requires_grad_()
    packed, ends = operands(weight), offsets.cuda()
    f16a_nvfp4weight_grouped_swiglu(on_device, *packed, ends, layout="humming")  # compiles
    with no_synchronisation():
        out = f16a_nvfp4weight_scaled_grouped_mm(on_device, *packed, ends, layout="humming")
        hidden = f16a_nvfp4weight_grouped_swiglu(on_device, *packed, ends, layout="humming")
    live = int(offsets[-1])
    assert relative_error(out[:live].detach().cpu(), grouped_mm(rows, exact, offsets)) < KERNEL_TOLERANCE[dtype]
    assert (
        relative_error(hidden[:live].detach().cpu(), grouped_swiglu(rows, exact, offsets)) < 2 * KERNEL_TOLERANCE[dtype]
    )
    (dgrad,) = torch.autograd.grad(out, on_device, torch.ones_like(out))
    expected = torch.cat([torch.ones(end - start, 256) @ exact[e] for e, start, end in groups(offsets)])
    assert relative_error(dgrad[:live].cpu(), expected) < 2 * KERNEL_TOLERANCE[dtype]


def test_result_is_the_same_every_time():
    weight, _ = make(2048, 1024, 16)
    ends = torch.arange(1, 17, dtype=torch.int32, device="cuda")
    rows = torch.randn(16, 1024, dtype=BF16, device="cuda")
    first, *others = (humming.grouped_mm(rows, weight, ends) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


def test_a_layer_on_two_streams_and_in_a_graph():
    (gate_up, exact_gate_up), (down, exact_down) = make(256, 256, 8, 2), make(256, 128, 8)
    check_two_streams_and_a_graph((gate_up, down), (exact_gate_up, exact_down), 3 * KERNEL_TOLERANCE[BF16])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_quantised_for_humming_and_compiled(mode):
    moe = Llama4MoE(Llama4MoEConfig(256, 128, 8, top_k=2), dtype=BF16, device="cuda")
    model = quantize_(torch.nn.Sequential(moe), layout="humming")
    x = torch.randn(2, 8, 256, device="cuda", dtype=BF16)
    function = torch.compile(model, fullgraph=True, mode=mode)
    results = []
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(function(x).clone())
    expected = llama4_moe(dequantize_(model)[0], x)
    for out in results:
        assert relative_error(out.cpu(), expected.cpu()) < 0.02


def test_cuda_graphs():
    check_cuda_graphs("humming")


def test_more_than_two_to_the_31_weights():
    check_many_weights(humming, "humming")


def test_offsets_out_of_range():
    weight, exact = make(256, 672)
    rows, offsets = torch.randn(42, 672, dtype=BF16), torch.tensor([-3, 20, 2**31 - 1, 5], dtype=torch.int32)
    out = humming.grouped_mm(rows.cuda(), weight, offsets.cuda())
    expected = grouped_mm(rows, exact, torch.tensor([0, 20, 42, 42]))
    assert relative_error(out.cpu(), expected) < KERNEL_TOLERANCE[BF16]
