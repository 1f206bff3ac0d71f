"""from_thunder: layers of Thunder's inference benchmark as ours.
Called by pytest; judged by Thunder's own dequantization and by the oracle. Thunder 0.2.6 has the older form of 4-bit
weights; stand-ins have the form of later releases.
"""

import sys
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from oracle import dequantize, relative_error
from torch import nn

import thunder_moe
from thunder_moe import from_thunder, moe_executor, nvfp4  # noqa: F401  (Thunder can be imported)

BF16 = torch.bfloat16
E, H, INTERMEDIATE = 3, 128, 256


@pytest.fixture(scope="module")
def layers():
    with pytest.MonkeyPatch.context() as patch:
        expecttest = types.ModuleType(
            "expecttest"
        )  # torch's testing tools import it, and Thunder's layers import these
        expecttest.TestCase = unittest.TestCase
        patch.setitem(sys.modules, "expecttest", sys.modules.get("expecttest", expecttest))
        import thunder.benchmarks.layers_for_inference_benchmark as layers
    return layers


def block(layers):
    """A block of experts whose weights survive Thunder's quantizer."""
    torch.manual_seed(0)
    experts = layers.GroupedSwiGLU(E, H, INTERMEDIATE, BF16, "cpu")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=3.0)
    return experts.requires_grad_(False)


def packed(layers, linear, newer):
    """Thunder's 4-bit form of a GroupedLinear, as release 0.2.6 keeps it or as later ones do."""
    module = layers.NVFP4InferenceGroupedLinear.from_grouped_linear(linear)
    if not newer:
        return module
    later = stand_in("NVFP4InferenceGroupedLinear")
    for name, buffer in module.named_buffers():
        if not name.endswith("strides"):
            later.register_buffer(name, buffer.mT if name == "fp4_weight" else buffer)
    return later


def stand_in(name, home="layers_for_inference_benchmark", **children):
    """An instance of a class of this name, by default in a module as nvFuser's benchmarks import it."""
    module = type(name, (nn.Module,), {"__module__": home})()
    for child, value in children.items():
        setattr(module, child, value)
    return module


def meaning(module, newer):
    """What the buffers of a 4-bit module mean: bits decoded by the oracle, swizzled scales found one by one."""
    fp4 = module.fp4_weight.view(torch.uint8)
    fp4 = fp4.mT if newer else fp4
    experts, n, columns = module.weight_scaling_factor.shape
    scale = torch.empty(experts, n, columns, dtype=torch.uint8)
    stored = module.weight_scaling_factor.view(torch.uint8).reshape(experts, -1)
    for row in range(n):
        for column in range(columns):
            tile = row // 128 * (columns // 4) + column // 4
            place = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            scale[:, row, column] = stored[:, tile * 512 + place]
    return dequantize(fp4, scale.view(torch.float8_e4m3fn), 1 / module.weight_global_scale)


@pytest.mark.parametrize("newer", [False, True])
def test_packed_weights_are_bit_equal_to_what_the_buffers_mean(layers, newer):
    linear = block(layers).down_proj
    module = packed(layers, linear, newer)
    ours = from_thunder(module)
    assert type(ours) is thunder_moe.NVFP4GroupedLinear
    assert (ours.num_experts, ours.in_features, ours.out_features) == (E, INTERMEDIATE, H)
    got = nvfp4.dequantize(ours.packed_weight, torch.float32)
    assert torch.equal(got, meaning(module, newer))
    assert relative_error(got, linear.weight) < 0.11


def test_thunders_own_dequantization_gives_the_same_weights(layers):
    """Also bit by bit where the global scale, here the largest magnitude, is a power of two."""
    linear = block(layers).gate_proj
    with torch.no_grad():
        linear.weight[0].clamp_(-8, 8)
    module = packed(layers, linear, newer=False)
    assert module.weight_global_scale[0] == 8
    got = nvfp4.dequantize(from_thunder(module).packed_weight, torch.float32)
    for expert in range(E):
        parts = (module.fp4_weight, module.weight_scaling_factor, module.weight_global_scale)
        theirs = layers.dequantize_to_dtype(*(part[expert] for part in parts), torch.float32, "cpu")
        torch.testing.assert_close(got[expert], theirs, rtol=2**-22, atol=0)
        assert expert > 0 or torch.equal(got[expert], theirs)


def test_linear_with_an_encode_scale(layers):
    torch.manual_seed(0)
    linear = nn.Linear(H, INTERMEDIATE, dtype=BF16)
    module = layers.NVFP4InferenceLinear.from_linear(linear)
    ours = from_thunder(module)
    parts = module.fp4_weight, module.weight_scaling_factor, module.weight_global_scale
    theirs = layers.dequantize_to_dtype(*parts, torch.float32, "cpu")
    got = nvfp4.dequantize(ours.packed_weight, torch.float32)[0]
    torch.testing.assert_close(got, theirs, rtol=2**-22, atol=0)
    x = torch.randn(5, H, dtype=BF16)
    assert relative_error(ours(x), F.linear(x.float(), theirs, linear.bias.float())) < 5e-3


def test_16_bit_layers_keep_their_parameters_and_compute_the_same(layers):
    experts = block(layers).eval()
    experts.gate_proj.weight.requires_grad_(True)
    ours = from_thunder(experts)
    assert [id(parameter) for parameter in ours.parameters()] == [id(parameter) for parameter in experts.parameters()]
    assert not ours.training
    assert (ours.down_proj.in_features, ours.down_proj.out_features) == (INTERMEDIATE, H)
    rows, ends = torch.randn(9, H, dtype=BF16), torch.tensor([4, 4, 9], dtype=torch.int32)
    assert relative_error(ours(rows, ends), experts(rows, ends)) < 5e-3


def llama4(layers):
    from thunder.tests.llama4_moe import Config

    torch.manual_seed(0)
    moe = layers.Llama4MoE(Config("test", H, INTERMEDIATE, E, 2, BF16, "cpu"))
    for parameter in moe.routed_experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    return moe.requires_grad_(False)


def test_llama4_moe(layers):
    moe = llama4(layers)
    ours = from_thunder(moe)
    assert type(ours) is thunder_moe.Llama4MoE
    assert ours.config == thunder_moe.Llama4MoEConfig(H, INTERMEDIATE, E, num_shared_experts=2)
    x = torch.randn(2, 7, H, dtype=BF16)
    theirs, _ = moe(x)
    assert relative_error(ours(x), theirs) < 1e-2
    thunder_moe.quantize_(ours)
    assert 0.01 < relative_error(ours(x), theirs) < 0.2
    assert torch.equal(moe(x)[0], theirs)


@pytest.mark.parametrize("newer", [False, True])
def test_llama4_moe_whose_experts_are_packed(layers, newer):
    moe, experts = llama4(layers), block(layers)
    projections = {name: packed(layers, linear, newer) for name, linear in experts.named_children()}
    for name, module in projections.items():
        setattr(experts, name, module)
    moe.routed_experts = stand_in("NVFP4InferenceGroupedSwiGLU", **projections) if newer else experts
    moe.shared_experts.up_proj = layers.NVFP4InferenceLinear.from_linear(moe.shared_experts.up_proj)
    ours = from_thunder(moe)
    gate_up = ours.routed_experts.gate_up_proj.dequantized()
    for got, name in zip(gate_up, ("gate_proj", "up_proj"), strict=True):
        assert torch.equal(got, meaning(projections[name], newer).to(BF16))
    assert type(ours.shared_expert.up_proj) is thunder_moe.NVFP4Linear
    x = torch.randn(2, 7, H, dtype=BF16)
    got = ours(x.requires_grad_())
    got.sum().backward()  # Thunder's own buffers are inference tensors, which no backward could save
    assert x.grad.isfinite().all()
    assert relative_error(got, thunder_moe.dequantize_(ours)(x)) < 1e-2


def test_modules_on_meta(layers):
    linear = layers.GroupedLinear(E, H, INTERMEDIATE, BF16, "meta")
    assert from_thunder(linear).weight is linear.weight


REFUSED = {
    "another class": (lambda layers: nn.Linear(2, 2), TypeError, r"module: got torch.nn.modules.linear.Linear, wanted"),
    "a whole model": (lambda layers: nn.Sequential(block(layers)), TypeError, "Sequential.*convert layers one by one"),
    "no module": (lambda layers: torch.zeros(2), TypeError, "got torch.Tensor, wanted Thunder's GroupedLinear"),
    "a namesake": (lambda layers: thunder_moe.GroupedLinear(2, 16, 16), TypeError, "got thunder_moe.nn.grouped_linear"),
    "a namesake in another module": (
        lambda layers: stand_in("GroupedLinear", "mine.layers"), TypeError, "got mine.layers.GroupedLinear"
    ),
    "a foreign part": (
        lambda layers: changed(block(layers), up_proj=nn.Identity()), TypeError, r"module.up_proj: got .*Identity"
    ),
    "two kinds": (
        lambda layers: changed(block(layers), up_proj=packed(layers, block(layers).up_proj, True)),
        TypeError,
        "module.up_proj: got .*NVFP4InferenceGroupedLinear, wanted Thunder's GroupedLinear",
    ),
    "a hook": (lambda layers: hooked(block(layers)), ValueError, "module.up_proj: it has forward hooks"),
    "sizes": (
        lambda layers: changed(block(layers), up_proj=block(layers).down_proj), ValueError, "which do not match"
    ),
    "another router": (
        lambda layers: changed(llama4(layers), gate=nn.Linear(H, E + 1)), ValueError, "sizes that do not match"
    ),
    "cut scales": (
        lambda layers: packed(layers, layers.GroupedLinear(E, 64, 96, BF16, "cpu"), False),
        ValueError,
        r"weight_scaling_factor: got shape \(3, 96, 4\), wanted \(3, 128, 4\): Thunder cuts",
    ),
    "an expert of zeros": (
        lambda layers: packed(layers, zeros(layers), False), ValueError, r"weight_global_scale: got \[0.0.*positive"
    ),
}  # fmt: skip


def changed(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def hooked(module):
    module.up_proj.register_forward_hook(lambda *args: None)
    return module


def zeros(layers):
    linear = block(layers).up_proj
    linear.weight[0] = 0
    return linear


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_why(layers, case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        from_thunder(make(layers))
