"""Hooks on 4-bit modules, and projections that were wrapped or replaced: they run, though operators could do it all.
Called by pytest; judged by the same modules without what was added.
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import nn
from torch.nn.utils import parametrize

from thunder_moe import GroupedSwiGLU, Llama4MoE, Llama4MoEConfig, NVFP4GroupedLinear, NVFP4GroupedSwiGLU, quantize_
from thunder_moe.formats.nvfp4 import quantize

X = torch.linspace(-3, 3, 2 * 5 * 64).sin().view(2, 5, 64)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x, offsets):
        return 2 * self.base(x, offsets)


class Gelu(NVFP4GroupedSwiGLU):
    def forward(self, x, offsets):
        gate, up = self.gate_up_proj(x, offsets).chunk(2, -1)
        return self.down_proj(F.gelu(gate) * up, offsets)


def moe():
    torch.manual_seed(0)
    return quantize_(nn.Sequential(Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=2))))


def routed(model):
    return model[0].run_routed_experts(X.reshape(-1, 64))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_offsets_may_be_int64(format):
    experts = quantize_(nn.Sequential(GroupedSwiGLU(4, 64, 32)), format=format)[0]
    offsets = torch.tensor([2, 2, 7, 10])
    assert torch.equal(experts(X.view(10, 64), offsets), experts(X.view(10, 64), offsets.int()))


@pytest.mark.parametrize("path", ["", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("compile_it", [False, True])
def test_hooks_run(path, compile_it):
    model, seen = moe(), []
    expected = routed(model)
    module = model[0].routed_experts.get_submodule(path)

    def hook(module, inputs, output):
        seen.append(output.shape)
        return output * 2

    module.register_forward_hook(hook)
    function = torch.compile(model[0].run_routed_experts, fullgraph=True, backend="eager") if compile_it else None
    out = routed(model) if function is None else function(X.reshape(-1, 64))
    assert seen == [(20, 64)]
    if path != "gate_up_proj":
        assert relative_error(out, 2 * expected) < 1e-5
    assert relative_error(out, expected) > 0.1


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_wrapped_projections_run(name):
    model = moe()
    experts = model[0].routed_experts
    setattr(experts, name, LoRA(getattr(experts, name)))
    out = routed(model)
    getattr(experts, name).base.global_scale.mul_(2)
    setattr(experts, name, getattr(experts, name).base)
    assert relative_error(out, routed(model)) < 1e-5


def test_a_subclass_runs_its_forward():
    model = moe()
    expected = routed(model)
    model[0].routed_experts.__class__ = Gelu
    assert relative_error(routed(model), expected) > 0.01
    model[0].routed_experts.__class__ = NVFP4GroupedSwiGLU
    model[0].routed_experts.forward = lambda x, offsets: torch.zeros_like(x)
    assert not routed(model).any()


def test_experts_of_transformers_refuse_what_would_not_run():
    pytest.importorskip("transformers")
    from tiny_models import tiny_model

    experts = quantize_(tiny_model("qwen3_moe")).model.layers[0].mlp.experts
    inputs = torch.randn(5, 64), torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
    experts(*inputs)
    handle = experts.down_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a projection is a NVFP4GroupedLinear with hooks or a forward of its own"):
        experts(*inputs)
    handle.remove()
    experts(*inputs)
    experts.gate_up_proj = LoRA(experts.gate_up_proj)
    with pytest.raises(ValueError, match="a projection is a LoRA with hooks or a forward of its own"):
        experts(*inputs)
    assert isinstance(experts.gate_up_proj.base, NVFP4GroupedLinear)


def test_buffers_may_be_parametrized():
    linear = NVFP4GroupedLinear(quantize(torch.randn(2, 16, 32)))
    x, offsets = torch.randn(3, 32), torch.tensor([1, 3], dtype=torch.int32)
    expected = linear(x, offsets)

    class Doubled(nn.Module):
        def forward(self, scale):
            return 2 * scale

    parametrize.register_parametrization(linear, "global_scale", Doubled())
    assert torch.equal(linear(x, offsets), 2 * expected)
