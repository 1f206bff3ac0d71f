"""The modules: shapes, routing, gradients, bad input, compilation, layouts of 4-bit weights, transformers' Llama 4.
Called by pytest; judged by tests/oracle.py and by transformers itself.
"""

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from oracle import KERNEL_TOLERANCE, llama4_moe, relative_error
from torch.autograd import forward_ad

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    NVFP4GroupedLinear,
    NVFP4GroupedSwiGLU,
    SwiGLU,
)
from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize, quantize
from thunder_moe.nn import MODULE_LAYOUTS

CONFIG = Llama4MoEConfig(64, 32, 4)
DTYPES = [torch.float32, torch.bfloat16]


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


@pytest.mark.parametrize("make", [GroupedLinear, GroupedMLP, GroupedSwiGLU])
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(make, grad):
    """torch would take the tangents for zeros."""
    module, x, ends = make(2, 32, 32).requires_grad_(False), torch.randn(6, 32), torch.tensor([2, 6])
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda rows: module(rows, ends), (x,), (x,))
    with torch.set_grad_enabled(grad), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        module(forward_ad.make_dual(x, x), ends)


def test_gradients():
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 8, top_k=2))
    x = torch.randn(1, 3, 64, requires_grad=True)
    grads = torch.autograd.grad(moe(x).pow(2).mean(), [x, *moe.parameters()])
    expected = torch.autograd.grad(llama4_moe(moe, x).pow(2).mean(), [x, *moe.parameters()])
    for got, exact in zip(grads, expected, strict=True):
        assert relative_error(got, exact) < 1e-4


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.exhaustive), True])
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


def test_from_transformers_refuses_what_computes_something_else():
    modeling = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    from transformers import Llama4TextConfig

    sizes = dict(hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="module.experts.act_fn: got .*, wanted SiLU"):
        Llama4MoE.from_transformers(modeling.Llama4TextMoe(Llama4TextConfig(**sizes, hidden_act="gelu")))
    theirs = modeling.Llama4TextMoe(Llama4TextConfig(**sizes))
    theirs.shared_expert.activation_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="module.shared_expert.activation_fn: got GELU"):
        Llama4MoE.from_transformers(theirs)
    theirs = modeling.Llama4TextMoe(Llama4TextConfig(**sizes))
    theirs.experts.forward = lambda x: 2 * x
    with pytest.raises(ValueError, match="module.experts: its forward was replaced, wanted the forward of Llama4"):
        Llama4MoE.from_transformers(theirs)
    theirs.__class__ = type("Own", (modeling.Llama4TextMoe,), {})
    with pytest.raises(TypeError, match="module: got Own, wanted transformers' Llama4TextMoe"):
        Llama4MoE.from_transformers(theirs)


# ---- 4-bit linears in another layout, against the same weight in layout "linear"


OTHERS = [layout for layout in MODULE_LAYOUTS if layout != "linear"]


@pytest.fixture(params=OTHERS)
def layout(request):
    return request.param


def both(layout, seed=0, n=256, k=64):
    """Return (linear, other): modules of one weight, with global scales per row."""
    torch.manual_seed(seed)
    halves = (quantize(torch.randn(4, n // 2, k) * scale) for scale in (1, 3))
    weight = NVFP4Weight.concatenate(*halves)
    return NVFP4GroupedLinear(weight), NVFP4GroupedLinear(weight.to_layout(layout))


def bits(state):
    return {name: tensor.contiguous().view(torch.uint8) for name, tensor in state.items()}


def assert_same_bits(state, other):
    assert state.keys() == other.keys()
    assert all(torch.equal(a, b) for a, b in zip(bits(state).values(), bits(other).values(), strict=True))


def test_a_linear_keeps_its_layout(layout, offsets):
    linear, other = both(layout)
    assert (linear.layout, other.layout) == ("linear", layout)
    assert other.packed_weight.layout == layout
    assert not torch.equal(other.qdata, linear.qdata)
    assert NVFP4GroupedLinear(other.packed_weight.to_layout("swizzled_128x4")).layout == "linear"
    assert repr(other) == repr(linear)[:-1] + f", layout={layout!r})"
    x = torch.randn(int(offsets[-1]), 64)
    results = []
    for module in (linear, other):
        leaf = x.clone().requires_grad_()
        out = module(leaf, offsets)
        out.square().sum().backward()
        results.append((out, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_block_takes_a_layout_for_each_of_its_linears(layout, offsets):
    (gate_up, other_gate_up), (down, other_down) = both(layout), both(layout, n=128, k=128)
    x = torch.randn(int(offsets[-1]), 64, dtype=torch.bfloat16)
    expected = NVFP4GroupedSwiGLU(gate_up, down)(x, offsets)
    for pair in ((other_gate_up, other_down), (other_gate_up, down), (gate_up, other_down)):
        assert torch.equal(NVFP4GroupedSwiGLU(*pair)(x, offsets), expected)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_state_dicts_are_linear(layout, keep_vars):
    linear, other = both(layout)
    state = other.state_dict(prefix="a.", keep_vars=keep_vars)
    assert_same_bits(state, linear.state_dict(prefix="a."))
    assert state["a.global_scale"].data_ptr() == other.global_scale.data_ptr()
    for name, tensor in linear.state_dict(keep_vars=keep_vars).items():
        assert tensor.data_ptr() == getattr(linear, name).data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_into_either_layout(layout, assign):
    source, target = both(layout, 1), both(layout, 2)
    for one in source:
        for other in target:
            before = {name: tensor.data_ptr() for name, tensor in other.named_buffers()}
            for tensor in other.buffers():
                tensor.view(torch.uint8).zero_()
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
            other.load_state_dict(state, assign=assign)
            assert_same_bits(other.state_dict(), source[0].state_dict())
            assert_same_bits(dict(other.named_buffers()), dict(source[target.index(other)].named_buffers()))
            for name, tensor in other.named_buffers():
                assert (tensor.data_ptr() == before[name]) == (not assign)
                given = assign and (other.layout == "linear" or name == "global_scale")
                assert (tensor.data_ptr() == state[name].data_ptr()) == given


@pytest.mark.parametrize("assign", [False, True])
def test_parts_of_a_state_dict_load(layout, assign):
    source, _ = both(layout, 1)
    for name in ("qdata", "scale", "global_scale"):
        linear, other = both(layout, 2)
        before = dict(other.named_buffers())
        for module in (linear, other):
            part = {name: source.state_dict()[name].clone(), "other": torch.zeros(1)}
            keys = module.load_state_dict(part, strict=False, assign=assign)
            assert keys.unexpected_keys == ["other"]
            assert keys.missing_keys == [key for key in before if key != name]
        assert_same_bits(other.state_dict(), linear.state_dict())
        for key, tensor in other.named_buffers():
            assert (tensor is before[key]) == (key != name or not assign)


def test_scales_of_zero_load_alone(layout, offsets):
    linear, other = both(layout)
    scale = linear.scale.clone()
    scale.view(torch.uint8)[:, ::3, 1::2] = 0
    x = torch.randn(int(offsets[-1]), 64)
    for module in (linear, other):
        module.load_state_dict({"scale": scale}, strict=False)
    assert torch.equal(dequantize(other.packed_weight), dequantize(linear.packed_weight))
    assert torch.equal(other(x, offsets), linear(x, offsets))
    linear.load_state_dict(other.state_dict())
    assert_same_bits(
        dict(NVFP4GroupedLinear(linear.packed_weight.to_layout(layout)).named_buffers()), dict(other.named_buffers())
    )


def test_a_module_without_data_loads(layout):
    (source, expected), (_, other) = both(layout, 1), both(layout, 2)
    other.to("meta")
    assert other.state_dict()["scale"].is_meta
    with pytest.warns(UserWarning, match="is a no-op"):
        other.load_state_dict(source.state_dict())
    other.load_state_dict(source.state_dict(), assign=True)
    assert_same_bits(dict(other.named_buffers()), dict(expected.named_buffers()))


def test_state_dicts_that_do_not_fit_leave_the_module_as_it_was(layout):
    (source, _), (linear, other) = both(layout, 1), both(layout, 2)
    state = source.state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "qdata", "scale"'):
        other.load_state_dict({"global_scale": linear.global_scale})
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        other.load_state_dict({**linear.state_dict(), "scale": state["scale"][:, :128]})
    for wrong in (state["scale"].float(), state["scale"].to("meta")):
        with pytest.raises(ValueError, match="scale: got .*, wanted (dtype float8_e4m3fn|device cpu)"):
            other.load_state_dict({**state, "scale": wrong}, assign=True)
    assert other.layout == layout
    assert_same_bits(other.state_dict(), linear.state_dict())


def test_the_old_name_of_num_experts_stays_valid():
    old = Llama4MoEConfig(hidden_size=64, intermediate_size=32, num_routed_experts=8, top_k=2)
    assert old == Llama4MoEConfig(64, 32, 8, top_k=2)
    assert hash(old) == hash(Llama4MoEConfig(64, 32, 8, top_k=2))
    assert (old.num_experts, old.num_routed_experts, old.num_shared_experts) == (8, 8, 1)
    assert repr(old) == (
        "Llama4MoEConfig(hidden_size=64, intermediate_size=32, num_experts=8, num_shared_experts=1, top_k=2)"
    )
    assert [field.name for field in dataclasses.fields(old)] == [*dataclasses.asdict(old)]
    assert dataclasses.replace(old, num_experts=4).num_routed_experts == 4
    assert dataclasses.replace(old, top_k=1) == Llama4MoEConfig(64, 32, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        old.num_experts = 4
    with pytest.raises(ValueError, match="num_experts: got 4 and num_routed_experts=8, wanted num_experts alone"):
        Llama4MoEConfig(64, 32, 4, num_routed_experts=8)
    with pytest.raises(TypeError, match="num_experts: got none"):
        Llama4MoEConfig(64, 32)
    with pytest.raises(ValueError, match="top_k: got 2, wanted at most num_experts = 1"):
        Llama4MoEConfig(64, 32, num_routed_experts=1, top_k=2)
    assert copy.deepcopy(old) == pickle.loads(pickle.dumps(old)) == old


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
        (lambda: linear(torch.randn(4, 64), offsets.float()), r"offsets: got torch.float32.*wanted dtype int32"),
        (lambda: linear(torch.randn(4, 64), offsets[:3]), r"offsets: got .*\(3,\).*, wanted shape \(4,\)"),
        (lambda: linear(torch.randn(4, 64), offsets.to("meta")), "offsets: got .*on meta, wanted device cpu"),
        (lambda: GroupedLinear(0, 64, 32), "num_experts: got 0, wanted an integer of at least 1"),
        (lambda: GroupedLinear(2, 64.0, 32), "in_features: got 64.0"),
        (lambda: Llama4MoEConfig(64, 32, 4, top_k=5), "top_k: got 5, wanted at most num_experts = 4"),
        (lambda: Llama4MoEConfig(64, 0, 4), "intermediate_size: got 0"),
        (lambda: Llama4MoEConfig(64, 32, 4, num_shared_experts=-1), "num_shared_experts: got -1"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
