"""Dense layers in 4 bits on a CUDA device: every kernel, CUDA graphs, no host synchronization, whole modules.
Called by `pytest -m gpu`; judged by tests/oracle.py and the dequantized modules.
"""

import copy

import pytest
import torch
from oracle import KERNEL_TOLERANCE, dequantize, relative_error
from torch import nn

from thunder_moe import NVFP4Linear, dequantize_, f16a_nvfp4weight_scaled_mm, quantize_
from thunder_moe.dense_names import READ_TOGETHER_BY
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda.configs import GemmConfig
from thunder_moe.nn.linear import NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.ops.scaled_mm import dense_operands

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16
SHARED = [
    GemmConfig("tiled_mma", 1, 1, 1, 4, 1, True),
    GemmConfig("tiled_mma", 4, 1, 1, 2, 1, True),
    GemmConfig("tiled_wgmma", 4, 1, 2, 1, 4, True),
    GemmConfig("tiled_wgmma", 8, 1, 2, 1, 2, True),
    GemmConfig("tiled_wgmma", 8, 2, 2, 1, 2, True),
    GemmConfig("tiled_wgmma", 16, 2, 2, 1, 1, True),
]


CLUSTERS = [
    GemmConfig("tiled_cluster", 1, 1, 3, 1, 2, splits=4),
    GemmConfig("tiled_cluster", 8, 1, 1, 1, 4),
    GemmConfig("tiled_cluster", 8, 1, 2, 2, 1, splits=3),
    GemmConfig("tiled_cluster", 16, 1, 2, 1, 2, splits=2),
    GemmConfig("tiled_cluster", 4, 1, 1, 2, 2, splits=2),
    GemmConfig("tiled_cluster", 12, 1, 4, 1, 1),
]


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels of tiled weights are for compute capability 9.0")


def make(n, k, layout):
    weight = quantize(torch.randn(1, n, k))
    exact = dequantize(*weight.tensors())[0].cuda()
    return weight.to("cuda").to_layout(layout), exact


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("layout", ["linear", "tiled_64x64"])
@pytest.mark.parametrize(("n", "k"), [(512, 2048), (2048, 4096), (192, 64)])
def test_any_rows(dtype, layout, n, k):
    if layout != "linear":
        needs_hopper()
    weight, exact = make(n, k, layout)
    packed, bias = dense_operands(weight), torch.randn(n, device="cuda")
    for rows in (0, 1, 7, 16, 33, 64, 65, 200, 1000):
        x = torch.randn(rows, k, dtype=dtype, device="cuda")
        out = f16a_nvfp4weight_scaled_mm(x, *packed, bias, layout=layout)
        assert relative_error(out, x.float() @ exact.T + bias) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("config", SHARED + CLUSTERS, ids=str)
def test_blocks_share_few_tiles(config):
    needs_hopper()
    for n, k in ((512, 2048), (2048, 4096), (5120, 5120)):
        weight, exact = make(n, k, "tiled_64x64")
        for rows in (1, 33, 64, 75, 130):
            x = torch.randn(rows, k, dtype=BF16, device="cuda")
            out = cuda.mm(x, weight, config=config)
            assert relative_error(out, x.float() @ exact.T) < KERNEL_TOLERANCE[BF16]
            assert torch.equal(cuda.mm(x, weight, config=config), out)


def test_cuda_graphs_without_synchronization():
    linears = [nn.Linear(2048, n, bias=True, dtype=BF16, device="cuda") for n in (2048, 256, 256)]
    single, stack = NVFP4Linear.from_linear(linears[0]), NVFP4LinearStack.from_linear(*linears)
    parts = [NVFP4LinearPart(stack, index) for index in range(3)]
    static = torch.randn(32, 2048, dtype=BF16, device="cuda")

    def run():
        return [single(static), *(part(static) for part in parts)]

    with torch.no_grad():
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        for _ in range(3):
            static.normal_()
            graph.replay()
            for out, wanted in zip(outputs, run(), strict=True):
                assert torch.equal(out, wanted)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_quantized_block_compiles(mode, monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(512, 1024, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(1024, 512, bias=False)

        def forward(self, x):
            return x + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setitem(READ_TOGETHER_BY, (Block.__module__, Block.__qualname__), ("gate_proj", "up_proj"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).to("cuda", BF16)
    quantize_(model, linears=lambda module, name: True)
    assert type(model[0].gate_up_proj) is NVFP4LinearStack
    reference = dequantize_(copy.deepcopy(model))
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(8, 512, dtype=BF16, device="cuda")
            assert relative_error(compiled(x), reference(x)) < 2e-2


def test_gradients():
    linear = nn.Linear(512, 256, dtype=BF16, device="cuda")
    module = NVFP4Linear.from_linear(linear)
    (back,) = module.to_linears()
    grad = torch.randn(4, 7, 256, dtype=BF16, device="cuda")
    grads = []
    for each in (module, back):
        x = torch.randn(4, 7, 512, dtype=BF16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        x.requires_grad_()
        each.bias.grad = None
        each(x).backward(grad)
        grads.append((x.grad, each.bias.grad))
    for one, other in zip(*grads, strict=True):
        assert relative_error(one, other) < 1e-2
