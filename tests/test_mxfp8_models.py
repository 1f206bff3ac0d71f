"""Models with weights in MXFP8, or in both formats: `quantize_`, state dicts, training, and what refuses them.
Called by pytest; judged by tests/oracle.py and by the model of the dequantized weights.
"""

import copy
import io
import logging

import pytest
import torch
from oracle import MXFP8_FORMAT_ERROR, dequantize_mxfp8, relative_error
from torch import nn

import thunder_moe
from thunder_moe import dequantize_, mxfp8, quantize_
from thunder_moe.dense_names import READ_TOGETHER_BY
from thunder_moe.formats import nvfp4
from thunder_moe.formats.mxfp8 import quantize
from thunder_moe.nn.packed import PackedModule

OFFSETS = torch.tensor([2, 4, 4, 8], dtype=torch.int32)


class Layer(nn.Module):
    """Dense layers that read the same rows, one block of each kind of experts."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.out = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(96, 64, bias=False)
        self.swiglu, self.mlp = thunder_moe.GroupedSwiGLU(4, 64, 32), thunder_moe.GroupedMLP(4, 64, 32)
        self.linear = thunder_moe.GroupedLinear(4, 64, 64, bias=True)

    def forward(self, x, offsets=OFFSETS):
        x = self.out(torch.cat([self.q_proj(x), self.k_proj(x)], -1))
        return self.linear(self.mlp(self.swiglu(x, offsets), offsets), offsets)


@pytest.fixture(autouse=True)
def known_class(monkeypatch):
    monkeypatch.setitem(READ_TOGETHER_BY, (__name__, "Layer"), ("q_proj", "k_proj"))


def model(dtype=torch.float32):
    torch.manual_seed(0)
    layer = Layer()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.15)
    return layer.to(dtype).requires_grad_(False)


def formats(layer):
    return {name: module.format_name for name, module in layer.named_modules() if isinstance(module, PackedModule)}


ALL_LINEARS = dict(linears=lambda module, name: True)
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def by_name(module, name):
    """NVFP4 for the MLP and the stacked dense layers, 16 bits for a linear of experts, MXFP8 for the others."""
    return None if name == "linear" else "nvfp4" if name in ("mlp", "q_proj", "k_proj") else "mxfp8"


@pytest.mark.parametrize("format", ["mxfp8", by_name], ids=["mxfp8", "both"])
def test_quantize_and_back(format, caplog):
    layer = model()
    with caplog.at_level(logging.INFO, "thunder_moe"):
        quantized = quantize_(copy.deepcopy(layer), format=format, **ALL_LINEARS)
    everywhere = format == "mxfp8"
    assert formats(quantized) == {
        "qk_proj": "mxfp8" if everywhere else "nvfp4", "out": "mxfp8",
        "swiglu.gate_up_proj": "mxfp8", "swiglu.down_proj": "mxfp8",
        "mlp.gate_up_proj": "mxfp8" if everywhere else "nvfp4", "mlp.down_proj": "mxfp8" if everywhere else "nvfp4",
        **({"linear": "mxfp8"} if everywhere else {}),
    }  # fmt: skip
    text = repr(quantized)
    assert ("NVFP4" in text) == (not everywhere)
    assert all(name in text for name in ("MXFP8Linear(", "MXFP8GroupedSwiGLU(", "MXFP8GroupedLinear("))
    assert ("MXFP8LinearStack(" in text) == ("MXFP8GroupedMLP(" in text) == everywhere
    assert "swiglu GroupedSwiGLU -> MXFP8GroupedSwiGLU" in caplog.text
    weight = quantized.swiglu.down_proj.packed_weight
    own = quantize(layer.swiglu.down_proj.weight)
    assert torch.equal(weight.qdata.view(torch.uint8), own.qdata.view(torch.uint8))
    assert relative_error(dequantize_mxfp8(*weight.tensors()), layer.swiglu.down_proj.weight) == pytest.approx(
        MXFP8_FORMAT_ERROR, rel=0.1
    )
    out = quantized(X)
    plain = dequantize_(quantized)
    assert not formats(plain)
    assert relative_error(out, plain(X)) < 1e-5, "the error of the kernels"
    assert 0.01 < relative_error(out, layer(X)) < (0.15 if everywhere else 0.5), "the error of the format"
    for name, parameter in layer.named_parameters():
        assert plain.get_parameter(name).shape == parameter.shape


def test_parts_of_a_block_that_a_function_declines():
    def down_alone(module, name):
        return "mxfp8" if name == "swiglu.down_proj" else None

    layer = quantize_(model(), format=down_alone)
    assert formats(layer) == {"swiglu.down_proj": "mxfp8"}
    # A filter is asked first.
    asked = []
    only = dict(filter=lambda module, name: name == "mlp")
    quantize_(model(), **only, format=lambda module, name: asked.append(name) or "mxfp8")
    assert asked == ["mlp"]


def test_dense_layers_of_two_formats_are_not_stacked():
    layer = quantize_(model(), format=lambda module, name: "nvfp4" if name == "q_proj" else "mxfp8", **ALL_LINEARS)
    assert formats(layer)["q_proj"] == "nvfp4"
    assert formats(layer)["k_proj"] == "mxfp8"


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(assign):
    layer = quantize_(model(), format=by_name, **ALL_LINEARS)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert "out.global_scale" not in state
    other = model()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    quantize_(other, format=by_name, **ALL_LINEARS)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(X), layer(X))
    as_bytes = {name: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for name, t in state.items()}
    other.load_state_dict(as_bytes, assign=assign)
    assert torch.equal(other(X), layer(X))
    moved = copy.deepcopy(layer).to(torch.bfloat16).to("meta")
    assert moved.out.scale.dtype == torch.float8_e8m0fnu
    assert moved.out.scale.is_meta
    in_nvfp4 = quantize_(model(), **ALL_LINEARS)
    with pytest.raises(ValueError, match="out.global_scale: got a tensor of an nvfp4 weight, wanted an mxfp8 weight"):
        other.load_state_dict(in_nvfp4.state_dict())
    with pytest.raises(ValueError, match=r"qdata: .*wanted dtype uint8"):
        in_nvfp4.load_state_dict(state)


def test_pickle_and_set_weight():
    layer = quantize_(model(), format="mxfp8")
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(X), layer(X))
    new = quantize(torch.randn(4, 64, 64))
    again.linear.set_weight(new)
    assert torch.equal(again.linear.packed_weight.qdata.view(torch.uint8), new.qdata.view(torch.uint8))
    with pytest.raises(ValueError, match="weight: got one in nvfp4, wanted mxfp8, the module's format"):
        again.linear.set_weight(nvfp4.quantize(torch.randn(4, 64, 64)))


def test_trains_through_frozen_weights():
    layer, x = model(), X.clone().requires_grad_()
    quantized = quantize_(layer, format=by_name, **ALL_LINEARS)
    plain = dequantize_(copy.deepcopy(quantized))
    for each in (quantized, plain):
        each.linear.bias.requires_grad_()
    (ours, bias), (theirs, plain_bias) = (
        torch.autograd.grad(each(x).square().sum(), [x, each.linear.bias]) for each in (quantized, plain)
    )
    assert relative_error(ours, theirs) < 1e-5
    assert relative_error(bias, plain_bias) < 1e-5


def test_autocast():
    quantized = quantize_(model(), format="mxfp8", **ALL_LINEARS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = quantized(X)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, quantized(X)) < 3e-2


def test_refusals():
    layer = model()
    before = layer.state_dict()
    cases = [
        (dict(format="fp8"), ValueError, r"format: got 'fp8', wanted one of \('nvfp4', 'mxfp8'\)"),
        (dict(format=lambda module, name: "int4"), ValueError, "format: got 'int4' for 'swiglu', wanted one of"),
        (
            dict(format=lambda module, name: ["mxfp8"]),
            ValueError,
            r"format: got \[.mxfp8.\] for .swiglu., wanted one of",
        ),
        (dict(format=8), TypeError, "format: got 8, wanted one of"),
        *(
            (dict(format=format, scale_search="mse"), ValueError, "scale_search: got 'mse', wanted None: MXFP8")
            for format in ("mxfp8", {"*": "MXFP8"}, {"*": "mxfp8", "linear": "nvfp4"}, lambda module, name: "mxfp8")
        ),
        (dict(format="mxfp8", layout="swizzled_128x4"), ValueError, "layout: got 'swizzled_128x4'"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            quantize_(layer, **options)
    assert before.keys() == layer.state_dict().keys()
    odd = nn.Sequential(thunder_moe.GroupedLinear(2, 48, 64))
    with pytest.raises(ValueError, match="in_features 48, wanted a multiple of 32"):
        quantize_(odd, format="mxfp8")
    layer.other = thunder_moe.GroupedLinear(4, 64, 64)
    layer.other.weight = layer.linear.weight
    with pytest.raises(ValueError, match="format: got 'mxfp8' for 'other', which is tied to 'linear' in 'nvfp4'"):
        quantize_(layer, format=lambda module, name: "mxfp8" if name == "other" else "nvfp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantize(dtype, opcheck):
    weight = torch.randn(2, 16, 64, dtype=dtype, requires_grad=True)
    out = mxfp8.fake_quantize(weight)
    assert torch.equal(out, mxfp8.dequantize(quantize(weight), dtype))
    grad = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, weight, grad)[0], grad)
    opcheck(torch.ops.thunder_moe.mxfp8_fake_quantize.default, (weight,))
    bad = weight.detach().clone()
    bad[1, 3, 5] = torch.inf
    out = mxfp8.fake_quantize(bad)
    assert out[1].isnan().all()
    assert torch.equal(out[0], mxfp8.dequantize(quantize(bad[:1]), dtype)[0])
    with pytest.raises(ValueError, match="multiple of 32"):
        mxfp8.fake_quantize(torch.randn(1, 4, 48))
