"""What only a CUDA device can show: no host synchronisation, CUDA graphs, Thunder and training on the GPU.
Called by `pytest -m gpu` on a machine with one; judged by tests/oracle.py.
"""

import contextlib
import copy

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, grouped_swiglu, groups, llama4_moe, relative_error

from thunder_moe import (
    GroupedLinear,
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    f16a_nvfp4weight_grouped_swiglu,
    f16a_nvfp4weight_scaled_grouped_mm,
    moe_executor,
    quantize_,
    rewrite_report,
)
from thunder_moe.nvfp4 import NVFP4Weight, quantize
from thunder_moe.ops.grouped_mm import operands

import thunder  # isort: skip  (after moe_executor: see compilers/compat.py)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
CONFIG = Llama4MoEConfig(256, 128, 8, top_k=2)


@contextlib.contextmanager
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(n=96, k=64):
    weight = quantize(torch.randn(4, n, k))
    return weight.to("cuda"), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
def test_operators_never_synchronise(offsets, dtype):
    weight, exact = make()
    rows = int(offsets[-1])
    activation = torch.randn(rows + 2, 64, device="cuda", dtype=dtype, requires_grad=True)
    packed, ends = operands(weight), offsets.cuda()
    with no_synchronisation():
        out = f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends)
        hidden = f16a_nvfp4weight_grouped_swiglu(activation, *packed, ends)
        grad = torch.ones_like(out)
        (dgrad,) = torch.autograd.grad(out, activation, grad)
    host = activation.detach().cpu()
    tolerance = max(KERNEL_TOLERANCE[dtype], 1e-3)  # float32 products may run in TF32
    assert relative_error(out[:rows].cpu(), grouped_mm(host, exact, offsets)) < tolerance
    assert relative_error(hidden[:rows].cpu(), grouped_swiglu(host, exact, offsets)) < 2 * tolerance
    expected = torch.cat([torch.ones(end - start, 96) @ exact[e] for e, start, end in groups(offsets)])
    assert relative_error(dgrad[:rows].cpu(), expected) < tolerance


def test_cuda_graph_replays_with_new_offsets():
    weight, exact = make()
    packed = operands(weight)
    activation = torch.randn(12, 64, device="cuda", dtype=BF16)
    ends = torch.tensor([3, 6, 9, 12], dtype=torch.int32, device="cuda")

    def run():
        return f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for rows in ([3, 6, 9, 12], [0, 12, 12, 12], [1, 1, 2, 10]):
        offsets = torch.tensor(rows, dtype=torch.int32)
        ends.copy_(offsets)
        graph.replay()
        torch.cuda.synchronize()
        expected = grouped_mm(activation.cpu(), exact, offsets)
        assert relative_error(out[: rows[-1]].cpu(), expected) < KERNEL_TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_quantize_is_the_same_on_both_devices(dtype):
    weight = (torch.randn(3, 96, 128) * 0.02).to(dtype)
    for cpu, gpu in zip(quantize(weight).tensors(), quantize(weight.cuda()).tensors(), strict=True):
        assert torch.equal(cpu.view(torch.uint8), gpu.cpu().view(torch.uint8))


def test_layer_never_synchronises():
    moe = quantize_(torch.nn.Sequential(Llama4MoE(CONFIG, dtype=BF16, device="cuda")))
    x = torch.randn(2, 5, 256, device="cuda", dtype=BF16)
    with no_synchronisation():
        out = moe(x)
    assert relative_error(out.cpu(), llama4_moe(dequantize_(moe)[0], x).cpu()) < 0.02


def test_thunder_rewrites_and_computes():
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda").requires_grad_(False)
    x = torch.randn(2, 5, 256, device="cuda", dtype=BF16)
    expected = llama4_moe(dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0], x)
    for executors in ([moe_executor], [moe_executor, *thunder.get_default_executors()]):
        compiled = thunder.jit(moe, executors=executors)
        assert relative_error(compiled(x).cpu(), expected.cpu()) < 0.02
        assert len(rewrite_report(compiled).rewritten) == 3
        with no_synchronisation():
            compiled(x)


def test_training_through_thunder():
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda")
    x = torch.randn(1, 2, 256, device="cuda", dtype=BF16)  # 4 rows for 8 experts: some have none
    compiled = thunder.jit(moe, executors=[moe_executor])
    with pytest.warns(RewriteWarning, match="trainable"):
        compiled(x).float().pow(2).mean().backward()
    exact = copy.deepcopy(moe).float()
    exact.zero_grad()
    llama4_moe(exact, x.float()).pow(2).mean().backward()
    for (name, parameter), reference in zip(moe.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(parameter.grad.cpu(), reference.grad.cpu()) < 0.05, name
    idle = exact.routed_experts.up_proj.weight.grad.flatten(1).eq(0).all(1)
    assert idle.any()
    assert moe.routed_experts.up_proj.weight.grad[idle].eq(0).all()


def test_moving_a_quantized_model():
    linear = torch.nn.Sequential(GroupedLinear(4, 64, 96, dtype=BF16))
    quantize_(linear).cuda()
    weight: NVFP4Weight = linear[0].nvfp4_weight
    assert weight.device.type == "cuda"
    assert weight.qdata.dtype == torch.uint8


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_torch_compile_with_weights_that_change_and_move(mode):
    moe = Llama4MoE(CONFIG, dtype=BF16).requires_grad_(False)
    function = torch.compile(moe, backend="thunder_moe", fullgraph=True, mode=mode)

    def check(device):
        x = torch.randn(2, 8, 256, device=device, dtype=BF16)
        expected = llama4_moe(dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0], x)
        for _ in range(3):  # under reduce-overhead: warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            out = function(x).clone()
            assert relative_error(out.cpu(), expected.cpu()) < 0.02

    check("cpu")
    moe.cuda()
    check("cuda")
    moe.routed_experts.down_proj.weight.mul_(-3)
    check("cuda")
    moe.routed_experts.up_proj.weight = torch.nn.Parameter(
        torch.randn_like(moe.routed_experts.up_proj.weight) / 16, requires_grad=False
    )
    check("cuda")
    assert len(rewrite_report(function).rewritten) >= 6
    x = torch.randn(2, 8, 256, device="cuda", dtype=BF16)
    torch.compiler.cudagraph_mark_step_begin()
    function(x)
    with no_synchronisation():
        torch.compiler.cudagraph_mark_step_begin()
        function(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_training_through_torch_compile(frozen):
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda")
    moe.routed_experts.requires_grad_(not frozen)
    x = torch.randn(1, 2, 256, device="cuda", dtype=BF16)
    function = torch.compile(moe, backend="thunder_moe", fullgraph=True)
    with contextlib.nullcontext() if frozen else pytest.warns(RewriteWarning, match="trainable"):
        function(x).float().pow(2).mean().backward()
    exact = dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0] if frozen else copy.deepcopy(moe)
    exact = exact.float()
    exact.zero_grad()
    llama4_moe(exact, x.float()).pow(2).mean().backward()
    for (name, parameter), reference in zip(moe.named_parameters(), exact.parameters(), strict=True):
        if parameter.requires_grad:
            assert relative_error(parameter.grad.cpu(), reference.grad.cpu()) < 0.05, name
