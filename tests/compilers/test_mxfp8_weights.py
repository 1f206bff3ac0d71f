"""MXFP8 under both compilers: the option that chooses a format, layers of both formats, modules that have it before.
Called by pytest; judged by the model of the dequantized weights.
"""

import copy

import pytest
import torch
from both_compilers import compile_by
from fast_cases import others_slow
from oracle import relative_error
from torch import nn

import thunder_moe
from thunder_moe import dequantize_, quantize_, rewrite_report, weight_cache

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
(THUNDER,) = others_slow(["thunder"], exhaustive=True)  # test_the_option_chooses_the_format has it
OFFSETS = torch.tensor([2, 4, 4, 8], dtype=torch.int32)
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.swiglu, self.linear = thunder_moe.GroupedSwiGLU(4, 64, 32), thunder_moe.GroupedLinear(4, 64, 64)

    def forward(self, x, offsets):
        return self.linear(self.swiglu(x, offsets), offsets)


def model():
    torch.manual_seed(0)
    layers = Layers()
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.15)
    return layers.to(torch.bfloat16).requires_grad_(False)


def linear_alone(module_or_gemm, name):
    return "mxfp8" if "linear" in name else "nvfp4"


def expected_of(format):
    """Return the numbers of the same model quantized beforehand, without a compiler."""
    return quantize_(model(), format=format)(X, OFFSETS)


@pytest.mark.parametrize("compiler", ["dynamo-eager", "thunder"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", linear_alone], ids=["nvfp4", "mxfp8", "both"])
@pytest.mark.covering(1)
def test_the_option_chooses_the_format(compiler, format):
    layers = model()
    compiled = compile_by(compiler, layers, format=format)
    out = compiled(X, OFFSETS)
    assert relative_error(out, expected_of(format)) < 1e-2
    decisions = {
        entry.gemm.weight.rpartition("_proj")[0] or entry.gemm.weight: entry for entry in rewrite_report(compiled)
    }
    assert len(decisions) == 4
    for name, entry in decisions.items():
        wanted = format if isinstance(format, str) else linear_alone(None, name)
        assert entry.decision.partition(" ")[0] == wanted
        assert entry.gemm.format == wanted
        assert ("swiglu" in entry.decision) == ("gate" in name or "up" in name)
    with torch.no_grad():  # changed weights are seen
        layers.linear.weight.mul_(2)
    assert relative_error(compiled(X, OFFSETS), 2 * out) < 1e-2


def test_copies_in_two_formats_live_beside_each_other():
    layers = model()
    outs = [compile_by("dynamo-eager", layers, format=format)(X, OFFSETS) for format in ("nvfp4", "mxfp8", "nvfp4")]
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])
    weight = layers.linear.weight
    packed = [weight_cache.get(weight, format=format) for format in ("nvfp4", "mxfp8")]
    assert [each.format.name for each in packed] == ["nvfp4", "mxfp8"]
    assert weight_cache.get(weight, format="mxfp8") is packed[1]


@pytest.mark.parametrize("compiler", ["dynamo-eager", THUNDER])
def test_none_leaves_a_weight_in_16_bits(compiler):
    layers = model()
    compiled = compile_by(compiler, layers, format=lambda gemm, name: None if "linear" in name else "mxfp8")
    out = compiled(X, OFFSETS)
    (left,) = (entry for entry in rewrite_report(compiled) if entry.decision == "16-bit")
    assert "linear" in left.gemm.weight
    assert left.reason == "no number format is chosen for it"
    expected = quantize_(model(), format=lambda module, name: None if name == "linear" else "mxfp8")
    assert relative_error(out, expected(X, OFFSETS)) < 1e-2


@pytest.mark.parametrize("compiler", ["dynamo-eager", THUNDER])
@pytest.mark.parametrize("format", ["mxfp8", linear_alone], ids=["mxfp8", "both"])
def test_modules_that_are_quantized_before(compiler, format):
    quantized = quantize_(model(), format=format)
    expected, plain = quantized(X, OFFSETS), dequantize_(copy.deepcopy(quantized))
    compiled = compile_by(compiler, quantized, format=None)
    x = X.clone().requires_grad_()
    out = compiled(x, OFFSETS)
    assert relative_error(out, expected) < 1e-2
    (ours,) = torch.autograd.grad(out.float().square().sum(), x)
    (theirs,) = torch.autograd.grad(plain(x, OFFSETS).float().square().sum(), x)
    assert relative_error(ours, theirs) < 2e-2
    entries = rewrite_report(compiled)
    assert {entry.decision.partition(" ")[0] for entry in entries} == (
        {"mxfp8"} if format == "mxfp8" else {"nvfp4", "mxfp8"}
    )
    assert {entry.gemm.in_features for entry in entries} == {32, 64}


class Routed(nn.Module):
    """A whole layer by the operator, and a dense one."""

    def __init__(self):
        super().__init__()
        self.experts, self.dense = thunder_moe.Llama4MoE(CONFIG), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.experts(self.dense(x))


CONFIG = thunder_moe.Llama4MoEConfig(hidden_size=64, intermediate_size=32, num_experts=4, top_k=1)


@pytest.mark.parametrize("compiler", ["dynamo-eager", *others_slow(["thunder"], exhaustive=True)])
def test_whole_layers_and_dense_layers(compiler):
    torch.manual_seed(0)
    layer = Routed().to(torch.bfloat16).requires_grad_(False)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    quantize_(layer, format="mxfp8", linears=lambda module, name: name == "dense")
    x = torch.randn(1, 6, 64, dtype=torch.bfloat16)
    expected = layer(x)
    assert relative_error(compile_by(compiler, layer, format=None)(x), expected) < 1e-2


def test_the_option_takes_upper_case():
    expected = compile_by("dynamo-eager", model(), format="mxfp8")(X, OFFSETS)
    torch._dynamo.reset()
    assert torch.equal(compile_by("dynamo-eager", model(), format="MXFP8")(X, OFFSETS), expected)


@pytest.mark.parametrize("compiler", ["dynamo-eager", THUNDER])
def test_the_option_refuses(compiler):
    layers = model()
    for module, format, message in (
        (layers.linear, "fp8", "format'?]?: got 'fp8', wanted one of"),
        (layers.linear, 8, "format'?]?: got 8, wanted one of"),
        (layers.linear, lambda gemm, name: "int4", "format: got 'int4', wanted one of"),
        (
            layers.linear,
            lambda name, gemm: "mxfp8",
            r"format'?]?: got a function of \(name, gemm\), wanted .* called as f\(gemm, name\)",
        ),
        (
            layers.swiglu,
            lambda gemm, name: "mxfp8" if "gate" in name else "nvfp4",
            "format: got 'mxfp8' for .* wanted one for all",
        ),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            compile_by(compiler, module, format=format)(X, OFFSETS)
