"""nvFuser on a GPU beside moe_executor: one region on compute capability 10.0, our kernels between regions on others.
Called by `pytest -m gpu` on a machine with both; judged by tests/oracle.py and kernels/w4a4.py.
"""

import copy

import pytest
import thunder
import torch
from oracle import llama4_moe, relative_error

from thunder_moe import Llama4MoE, Llama4MoEConfig, dequantize_, moe_executor, quantize_, rewrite_report
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import w4a4

from thunder.executors.nvfuserex import nvfuserex  # isort: skip

BLACKWELL = torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(nvfuserex is None, reason="needs a CUDA device and nvFuser"),
]
BF16 = torch.bfloat16
EXPERT_SYMBOLS = {"f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"}
ORDERS = {"moe first": lambda: [moe_executor, nvfuserex], "nvFuser first": lambda: [nvfuserex, moe_executor]}


@pytest.fixture(params=ORDERS.values(), ids=ORDERS.keys())
def executors(request):
    return request.param()


@pytest.fixture
def moe():
    model = Llama4MoE(Llama4MoEConfig(256, 192, 8, top_k=2), dtype=BF16, device="cuda").requires_grad_(False)
    experts = model.routed_experts
    for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
        torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return model


def regions(compiled):
    """Return (the symbols in every nvFuser region, the names of the others)"""
    bsyms = thunder.last_traces(compiled)[-1].bound_symbols
    fused = [{sub.sym.name for sub in bsym.subsymbols} for bsym in bsyms if bsym.sym.is_fusion]
    return fused, {bsym.sym.name for bsym in bsyms if not bsym.sym.is_fusion}


@pytest.mark.skipif(BLACKWELL, reason="capability 10.0 has nvFuser's own kernel")
def test_our_kernels_between_nvfusers_regions(moe, executors):
    x = torch.randn(2, 5, 256, device="cuda", dtype=BF16)
    compiled = thunder.jit(moe, executors=executors)
    out = compiled(x)
    expected = llama4_moe(dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0], x)
    assert relative_error(out.cpu(), expected.cpu()) < 0.02
    fused, others = regions(compiled)
    assert len(fused) > 1
    assert others >= EXPERT_SYMBOLS
    assert not any(names & EXPERT_SYMBOLS for names in fused)
    major, minor = torch.cuda.get_device_capability()
    for entry in rewrite_report(compiled):
        assert f"not by nvFuser: the compute capability is {major}.{minor}" in entry.reason
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compiled(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not BLACKWELL, reason="needs compute capability 10.0")
@pytest.mark.parametrize("amax", [None, 6.0])
def test_one_region_on_blackwell(moe, executors, amax):
    known = {f"routed_experts.{name}_proj.weight": amax for name in ("gate", "down")} if amax else {}
    x = torch.randn(2, 64, 256, device="cuda", dtype=BF16)
    compiled = thunder.jit(moe, executors=executors, nvfp4_activation_amax=known)
    out = compiled(x)
    fused, others = regions(compiled)
    assert [names >= EXPERT_SYMBOLS for names in fused if names & EXPERT_SYMBOLS] == [True]
    assert not others & EXPERT_SYMBOLS
    oracle = copy.deepcopy(moe)
    oracle.routed_experts = Simulated(moe.routed_experts, amax)
    assert relative_error(out.cpu(), oracle(x).cpu()) < 0.02


class Simulated(torch.nn.Module):
    """A block's experts in kernels/w4a4.py's arithmetic, gate and up with one global scale per expert."""

    def __init__(self, block, amax) -> None:
        super().__init__()
        self.gate_up = quantize(torch.cat([block.gate_proj.weight, block.up_proj.weight], 1))
        self.down, self.amax = quantize(block.down_proj.weight), amax

    def forward(self, x, offsets):
        hidden = w4a4.grouped_swiglu(x, self.gate_up, offsets, amax=self.amax)
        return w4a4.grouped_mm(hidden, self.down, offsets, amax=self.amax)
