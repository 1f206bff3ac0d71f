"""The modules: shapes, routing, gradients, bad input, compilation, and Llama 4 from transformers.
Called by pytest; judged by tests/oracle.py and by transformers itself.
"""

import pytest
import torch
from oracle import KERNEL_TOLERANCE, grouped_mm, llama4_moe, relative_error

from thunder_moe import GroupedLinear, GroupedSwiGLU, Llama4MoE, Llama4MoEConfig, SwiGLU

CONFIG = Llama4MoEConfig(64, 32, 4)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_linear(offsets, dtype):
    linear = GroupedLinear(4, 64, 32, dtype=dtype)
    x = torch.randn(int(offsets[-1]), 64, dtype=dtype)
    out = linear(x, offsets)
    assert out.dtype == dtype
    assert relative_error(out, grouped_mm(x, linear.weight, offsets)) < KERNEL_TOLERANCE[dtype]


def test_grouped_linear_is_initialised_as_linear():
    weight = GroupedLinear(4, 64, 512).weight.detach()
    bound = 64**-0.5
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert GroupedLinear(4, 64, 512).weight.requires_grad


def test_modules_take_dtype_and_device():
    for module in (
        GroupedLinear(2, 16, 16, dtype=torch.float16, device="meta"),
        SwiGLU(16, 16, dtype=torch.float16, device="meta"),
        GroupedSwiGLU(2, 16, 16, dtype=torch.float16, device="meta"),
        Llama4MoE(CONFIG, dtype=torch.float16, device="meta"),
    ):
        assert {(p.dtype, p.device.type) for p in module.parameters()} == {(torch.float16, "meta")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (3, 5)])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_llama4_moe(shape, top_k, dtype):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, num_shared_experts=2, top_k=top_k), dtype=dtype)
    x = torch.randn(*shape, 64, dtype=dtype)
    assert relative_error(moe(x), llama4_moe(moe, x)) < 2 * KERNEL_TOLERANCE[dtype]


def test_llama4_moe_with_empty_experts_and_without_a_shared_one():
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, num_shared_experts=0))
    torch.nn.init.zeros_(moe.router.weight)  # every token to one expert
    x = torch.randn(2, 8, 64)
    assert relative_error(moe(x), llama4_moe(moe, x)) < 1e-5
    assert moe.shared_expert is None


def test_llama4_moe_of_no_tokens():
    assert Llama4MoE(CONFIG)(torch.randn(2, 0, 64)).shape == (2, 0, 64)


def test_gradients():
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 8, top_k=2))
    x = torch.randn(1, 3, 64, requires_grad=True)
    grads = torch.autograd.grad(moe(x).pow(2).mean(), [x, *moe.parameters()])
    expected = torch.autograd.grad(llama4_moe(moe, x).pow(2).mean(), [x, *moe.parameters()])
    for got, exact in zip(grads, expected, strict=True):
        assert relative_error(got, exact) < 1e-4


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_without_a_graph_break(dynamic):
    moe = Llama4MoE(CONFIG, dtype=torch.bfloat16)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (5, 8):
        x = torch.randn(2, tokens, 64, dtype=torch.bfloat16)
        assert relative_error(compiled(x), llama4_moe(moe, x)) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_from_transformers(dtype):
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers import Llama4TextConfig

    config = Llama4TextConfig(hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    theirs = modeling.Llama4TextMoe(config).to(dtype).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
    ours = Llama4MoE.from_transformers(theirs)
    assert not ours.training
    assert torch.equal(ours.routed_experts.up_proj.weight, theirs.experts.gate_up_proj[..., 32:].mT)
    x = torch.randn(2, 7, 64, dtype=dtype)
    assert relative_error(ours(x), theirs(x)[0].view_as(x)) < 2 * KERNEL_TOLERANCE[dtype]


def test_from_transformers_refuses():
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="module: got Linear, wanted transformers' Llama4TextMoe"):
        Llama4MoE.from_transformers(torch.nn.Linear(2, 2))


def test_refuses():
    moe, linear = Llama4MoE(CONFIG), GroupedLinear(4, 64, 32)
    offsets = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    bad = [
        (lambda: moe(torch.randn(8, 64)), r"hidden_states: got shape \(8, 64\), wanted \(batch, sequence, 64\)"),
        (lambda: moe(torch.randn(2, 8, 32)), r"hidden_states: got shape \(2, 8, 32\)"),
        (lambda: linear(torch.randn(4, 32), offsets), r"x: got .*\(4, 32\).*, wanted shape \(rows, in_features = 64\)"),
        (lambda: linear(torch.randn(4, 1, 64), offsets), r"x: got .*wanted shape \(rows, in_features = 64\)"),
        (lambda: linear(torch.randn(4, 64).bfloat16(), offsets), r"x: got torch.bfloat16.*wanted dtype torch.float32"),
        (lambda: linear(torch.randn(4, 64, device="meta"), offsets), r"x: got .*on meta, wanted device cpu"),
        (lambda: linear(torch.randn(4, 64), offsets.long()), r"offsets: got torch.int64.*wanted dtype int32"),
        (lambda: linear(torch.randn(4, 64), offsets[:3]), r"offsets: got .*\(3,\).*, wanted shape \(4,\)"),
        (lambda: linear(torch.randn(4, 64), offsets.to("meta")), "offsets: got .*on meta, wanted device cpu"),
        (lambda: GroupedLinear(0, 64, 32), "num_experts: got 0, wanted an integer of at least 1"),
        (lambda: GroupedLinear(2, 64.0, 32), "in_features: got 64.0"),
        (lambda: Llama4MoEConfig(64, 32, 4, top_k=5), "top_k: got 5, wanted at most num_routed_experts = 4"),
        (lambda: Llama4MoEConfig(64, 0, 4), "intermediate_size: got 0"),
        (lambda: Llama4MoEConfig(64, 32, 4, num_shared_experts=-1), "num_shared_experts: got -1"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
