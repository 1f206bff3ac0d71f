"""quantize_ and dequantize_: what is swapped, ties, state dicts, layouts, devices and dtypes, memory, bad input.
Called by pytest; judged by tests/oracle.py.
"""

import copy
import gc
import io
import sys
import weakref

import pytest
import torch
from oracle import KERNEL_TOLERANCE, llama4_moe, relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    NVFP4GroupedLinear,
    NVFP4GroupedSwiGLU,
    dequantize_,
    quantize_,
    to_layout_,
)
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.nn import MODULE_LAYOUTS
from thunder_moe.quantization import families, plan
from thunder_moe.quantization.grouped_experts import GroupedExperts

BF16 = torch.bfloat16


def model(layers=1, dtype=BF16):
    return nn.Sequential(*(Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=2), dtype=dtype) for _ in range(layers)))


def expert_bytes(module):
    tensors = {t.data_ptr(): t for t in [*module.parameters(), *module.buffers()] if t.ndim >= 1}
    return sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_swaps_and_computes(dtype):
    original = model(dtype=dtype)
    quantized = quantize_(copy.deepcopy(original))
    assert isinstance(quantized[0].routed_experts, NVFP4GroupedSwiGLU)
    x = torch.randn(2, 5, 64, dtype=dtype)
    rounded = dequantize_(copy.deepcopy(quantized))
    assert relative_error(quantized(x), llama4_moe(rounded[0], x)) < 2 * KERNEL_TOLERANCE[dtype]
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(original[0].routed_experts, name).weight
        back = getattr(rounded[0].routed_experts, name).weight
        assert torch.equal(back, dequantize(quantize(weight), dtype))
        assert back.requires_grad == weight.requires_grad
        assert back.dtype == dtype


def test_quantizing_twice_changes_nothing():
    once = dequantize_(quantize_(model(dtype=torch.float32)))
    twice = dequantize_(quantize_(copy.deepcopy(once)))
    for a, b in zip(once.parameters(), twice.parameters(), strict=True):
        assert relative_error(b, a) < 1e-6


def test_frees_the_16_bit_weights():
    quantized = model()
    experts = quantized[0].routed_experts
    dead = [weakref.ref(p) for p in experts.parameters()]
    before = expert_bytes(experts)
    del experts
    quantize_(quantized)
    gc.collect()
    assert all(ref() is None for ref in dead)
    after = expert_bytes(quantized[0].routed_experts)
    assert after / before == pytest.approx(4.5 / 16, rel=0.2)  # the row scales of a small gate_up weigh


def test_frees_the_16_bit_weights_module_by_module(monkeypatch):
    quantized = model(3)
    weights = [weakref.ref(block.routed_experts.gate_proj.weight) for block in quantized]
    alive = []
    convert = GroupedExperts.convert

    def spy(self, module, run):
        alive.append(sum(weight() is not None for weight in weights))
        return convert(self, module, run)

    monkeypatch.setattr(GroupedExperts, "convert", spy)
    quantize_(quantized)
    assert alive == [3, 2, 1]


THEIR_FAMILIES = """
from torch import nn
from thunder_moe.quantization.families import ExpertFamily

class Family(ExpertFamily):
    description = "theirs"

    def match(self, module):
        return type(module).__module__ == "their.models"

    def match_quantized(self, module):
        return isinstance(module, nn.Identity)

    def blocker(self, module):
        return "it has no bias" if isinstance(module, nn.Linear) and module.bias is None else None

    def weights(self, module):
        return [(module.weight, module.weight[None])]

    def convert(self, module, run):
        return run.memo.setdefault(id(module.weight), nn.Identity())

    def restore(self, module, memo):
        return memo.setdefault(id(module), nn.Linear(16, 16))

FAMILIES = [Family()]
"""


def test_families_of_other_packages_are_imported_with_their_first_model(tmp_path, monkeypatch):
    (tmp_path / "their_families.py").write_text(THEIR_FAMILIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "_MODULES", {**families._MODULES})
    families.register("their_families", packages=("their",))

    class Theirs(nn.Linear):
        __module__ = "their.models"

    with pytest.raises(
        ValueError, match="found no GroupedLinear, GroupedMLP or GroupedSwiGLU to quantize in Sequential"
    ):
        quantize_(nn.Sequential(nn.Linear(16, 16)))
    assert "their_families" not in sys.modules
    first = Theirs(16, 16)
    mixed = nn.Sequential(first, Theirs(16, 16, bias=False), GroupedLinear(1, 16, 16), nn.Sequential(first))
    quantize_(mixed)
    assert [type(part) for part in mixed] == [nn.Identity, Theirs, NVFP4GroupedLinear, nn.Sequential]
    assert mixed[3][0] is mixed[0]
    dequantize_(mixed)
    assert [type(part) for part in mixed] == [nn.Linear, Theirs, GroupedLinear, nn.Sequential]
    assert mixed[3][0] is mixed[0]
    with pytest.raises(ValueError, match="found no GroupedLinear, GroupedMLP or GroupedSwiGLU, or theirs to quantize"):
        quantize_(mixed, filter=lambda module, name: False)


def test_filter():
    names = []
    quantized = quantize_(
        model(2), filter=lambda module, name: names.append(name) or name == "1.routed_experts.down_proj"
    )
    assert names[:2] == ["0.routed_experts", "0.routed_experts.gate_proj"]
    assert isinstance(quantized[0].routed_experts, GroupedSwiGLU)
    assert isinstance(quantized[1].routed_experts.gate_proj, GroupedLinear)
    assert isinstance(quantized[1].routed_experts.down_proj, NVFP4GroupedLinear)
    assert quantized(torch.randn(1, 3, 64, dtype=BF16)).isfinite().all()
    dequantize_(quantized)
    assert isinstance(quantized[1].routed_experts.down_proj, GroupedLinear)


def test_tied_modules_stay_tied():
    tied = model(3)
    tied[1].routed_experts = tied[0].routed_experts  # one module in two places
    for name in ("gate_proj", "up_proj", "down_proj"):  # one set of weights in two modules
        getattr(tied[2].routed_experts, name).weight = getattr(tied[0].routed_experts, name).weight
    quantize_(tied)
    assert tied[0].routed_experts is tied[1].routed_experts
    assert tied[2].routed_experts is not tied[0].routed_experts

    def check(model):
        for a, b in zip(model[0].routed_experts.buffers(), model[2].routed_experts.buffers(), strict=True):
            assert a.data_ptr() == b.data_ptr()

    check(tied)
    check(copy.deepcopy(tied))
    check(copy.deepcopy(tied).half())
    assert {buffer.device.type for buffer in copy.deepcopy(tied).to("meta").buffers()} == {"meta"}
    dequantize_(tied)
    assert tied[0].routed_experts is tied[1].routed_experts
    assert tied[0].routed_experts.gate_proj.weight is tied[2].routed_experts.gate_proj.weight


def test_a_gate_that_is_tied_elsewhere_is_not_fused():
    tied = model(2)
    tied[1].routed_experts.up_proj.weight = tied[0].routed_experts.gate_proj.weight
    quantize_(tied)
    for layer in tied:
        assert isinstance(layer.routed_experts, GroupedSwiGLU)
    assert tied[1].routed_experts.up_proj.qdata is tied[0].routed_experts.gate_proj.qdata
    assert tied(torch.randn(1, 3, 64, dtype=BF16)).isfinite().all()


def test_modes_and_requires_grad_survive():
    frozen = model().eval()
    frozen[0].routed_experts.requires_grad_(False)
    quantize_(frozen)
    assert not any(module.training for module in frozen.modules())
    dequantize_(frozen)
    assert not any(module.training for module in frozen.modules())
    assert not frozen[0].routed_experts.up_proj.weight.requires_grad


def test_gradients_reach_the_router():
    quantized = quantize_(model())
    quantized(torch.randn(1, 4, 64, dtype=BF16)).float().pow(2).mean().backward()
    assert quantized[0].router.weight.grad.norm() > 0
    assert not [name for name, _ in quantized.named_parameters() if "routed" in name]


def test_torch_compile_without_a_graph_break():
    quantized = quantize_(model())
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 6):
        x = torch.randn(1, tokens, 64, dtype=BF16)
        assert relative_error(compiled(x), quantized(x)) < 0.01


def test_progress_bar_on_big_models(monkeypatch, capfd):
    quantize_(model())
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(plan, "PROGRESS_WEIGHTS", 1)
    quantize_(model(2))
    assert "quantizing experts: 100%" in capfd.readouterr().err


@pytest.mark.parametrize("first", [True, False], ids=["registered before", "registered after"])
@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
def test_a_projection_that_is_elsewhere_too(name, first):
    block = GroupedSwiGLU(4, 64, 32, dtype=BF16)
    alias = getattr(block, name)
    both = nn.ModuleDict({"alias": alias, "block": block} if first else {"block": block, "alias": alias})
    x, offsets = torch.randn(8, 64, dtype=BF16), torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    rounded = quantize_(copy.deepcopy(nn.ModuleDict({"block": block})))
    expected = rounded["block"](x, offsets)
    quantize_(both)
    assert isinstance(both["alias"], NVFP4GroupedLinear)
    assert getattr(both["block"], name).qdata.data_ptr() == both["alias"].qdata.data_ptr()
    assert relative_error(both["block"](x, offsets), expected) < 0.01
    dequantize_(both)
    assert isinstance(both["block"], GroupedSwiGLU)
    assert type(both["alias"]) is GroupedLinear
    assert getattr(both["block"], name).weight is both["alias"].weight
    assert torch.equal(both["alias"].weight, dequantize(quantize(alias.weight.detach()), BF16))


def test_gate_and_up_in_one_that_are_elsewhere_stay_4_bit_there(caplog):
    both = nn.ModuleDict({"block": GroupedSwiGLU(4, 64, 32, dtype=BF16)})
    fused = quantize_(both)["block"].gate_up_proj
    both = nn.ModuleDict({"alias": fused, "block": both["block"]})
    dequantize_(both)
    assert type(both["block"]) is GroupedSwiGLU
    assert both["alias"] is fused
    assert "stays 4-bit: alias (NVFP4GroupedLinear): it stands for gate and up together" in caplog.text


def test_a_part_of_a_block_that_stays():
    block = GroupedSwiGLU(4, 64, 32, dtype=BF16)
    model = nn.ModuleDict({"alias": block.down_proj, "block": block})
    with pytest.raises(ValueError, match="filter: took 'block' but not 'alias', which is a part of it"):
        quantize_(model, filter=lambda module, name: name == "block")
    handle = block.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="'alias' is a part of a block that has to stay 16-bit: .*hook"):
        quantize_(model)
    assert [type(module) for module in model.values()] == [GroupedLinear, GroupedSwiGLU]
    handle.remove()
    quantize_(model)
    model["alias"] = model["block"].down_proj
    model["block"].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="alias .*a part of 'block', which stays 4-bit"):
        dequantize_(model)
    assert model["block"](torch.randn(4, 64, dtype=BF16), torch.tensor([1, 2, 3, 4]).int()).isfinite().all()


def test_refuses_and_leaves_the_model_unchanged():
    odd = nn.Sequential(GroupedSwiGLU(2, 64, 24, dtype=BF16))
    broken = model()
    broken[0].routed_experts.up_proj.weight.data[0, 0, 0] = float("inf")
    tied = model(2)
    tied[1].routed_experts = GroupedSwiGLU(4, 64, 32, dtype=BF16)
    tied[1].routed_experts.up_proj.weight = tied[0].routed_experts.up_proj.weight
    bad = [
        (nn.Linear(2, 2), None, "found no GroupedLinear, GroupedMLP or GroupedSwiGLU to quantize in Linear"),
        (model(), lambda module, name: False, "declined by the filter"),
        (quantize_(model()), None, "quantized already"),
        (GroupedLinear(2, 16, 16), None, "got a bare GroupedLinear, which cannot be replaced in place"),
        (odd, None, "'0' has in_features 24, wanted a multiple of 16"),
        (broken, None, "'0.routed_experts' has NaN or Inf"),
        (
            tied,
            lambda module, name: name == "0.routed_experts",
            "took '0.routed_experts' but not '1.routed_experts.up_proj'",
        ),
    ]
    for module, filter, message in bad:
        kinds = [type(m) for m in module.modules()]
        with pytest.raises(ValueError, match=message):
            quantize_(module, filter=filter)
        assert [type(m) for m in module.modules()] == kinds
    with pytest.raises(ValueError, match="found no NVFP4 modules in Linear"):
        dequantize_(nn.Linear(2, 2))


# ---- other layouts, against layout "linear"


OTHERS = [layout for layout in MODULE_LAYOUTS if layout != "linear"]


@pytest.fixture(params=OTHERS)
def layout(request):
    return request.param


def both(original, layout):
    """(the model quantized in layout "linear", in another one)."""
    return tuple(quantize_(copy.deepcopy(original), layout=name) for name in ("linear", layout))


def layouts(model):
    return [module.layout for module in model.modules() if isinstance(module, NVFP4GroupedLinear)]


def wide_model(layers=1, dtype=BF16):
    """Sizes that fit every layout: gate and up together have 128 rows."""
    return nn.Sequential(*(Llama4MoE(Llama4MoEConfig(128, 64, 4, top_k=2), dtype=dtype) for _ in range(layers)))


def assert_same_bits(state, other):
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_layouts_compute_the_same(layout, dtype):
    linear, laid_out = both(wide_model(dtype=dtype), layout)
    assert layouts(linear) == ["linear"] * 2
    assert layouts(laid_out) == [layout] * 2
    assert not torch.equal(*(model[0].routed_experts.down_proj.qdata for model in (linear, laid_out)))
    results = []
    for model in (linear, laid_out):
        x = torch.linspace(-3, 3, 2 * 5 * 128).sin().view(2, 5, 128).to(dtype).requires_grad_()
        out = model(x)
        out.float().square().sum().backward()
        results.append((out, x.grad, model[0].router.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_same_bits(dequantize_(laid_out).state_dict(), dequantize_(linear).state_dict())


@pytest.mark.exhaustive  # tests/nn/test_module_layouts.py compares compiled modules of all layouts with eager ones
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layouts_compute_the_same_compiled(layout, backend):
    x = torch.randn(2, 5, 128, dtype=BF16)
    with torch.no_grad():
        linear, laid_out = (torch.compile(m, fullgraph=True, backend=backend)(x) for m in both(wide_model(), layout))
    assert torch.equal(linear, laid_out)


@pytest.mark.parametrize("layout", MODULE_LAYOUTS)
def test_a_layout_survives_copies_casts_and_pickles(layout):
    linear, laid_out = both(wide_model(), layout)
    whole = io.BytesIO()
    torch.save(laid_out, whole)
    whole.seek(0)
    x = torch.randn(1, 4, 128, dtype=BF16)
    for other in (copy.deepcopy(laid_out), torch.load(whole, weights_only=False), copy.deepcopy(laid_out).to("cpu")):
        assert layouts(other) == [layout] * 2
        assert torch.equal(other(x), linear(x))
    assert torch.equal(copy.deepcopy(laid_out).half()(x.half()), linear.half()(x.half()))


def test_state_dicts_load_across_layouts(layout):
    source, target = both(wide_model(), layout), both(wide_model(), layout)
    x = torch.randn(1, 4, 128, dtype=BF16)
    assert not torch.equal(target[1](x), source[0](x))
    assert_same_bits(source[1].state_dict(), source[0].state_dict())
    assert "0.routed_experts.gate_up_proj.qdata" in source[0].state_dict()
    with pytest.raises(RuntimeError, match="routed_experts.gate_proj.weight"):
        target[1].load_state_dict(wide_model().state_dict())
    for one in source:
        for other in map(copy.deepcopy, target):
            other.load_state_dict(one.state_dict())
            assert torch.equal(other(x), source[0](x))


def test_tied_modules_stay_tied_in_other_layouts(layout):
    tied = wide_model(3)
    tied[1].routed_experts = tied[0].routed_experts
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(tied[2].routed_experts, name).weight = getattr(tied[0].routed_experts, name).weight
    _, laid_out = both(tied, layout)
    with torch.no_grad():
        for parameter in tied.parameters():
            parameter.neg_()
    linear, _ = both(tied, layout)
    x = torch.randn(1, 4, 128, dtype=BF16)
    for model in (laid_out, copy.deepcopy(laid_out)):
        assert not torch.equal(model(x), linear(x))
        model.load_state_dict(linear.state_dict())
        assert model[0].routed_experts is model[1].routed_experts
        for a, b in zip(model[0].routed_experts.buffers(), model[2].routed_experts.buffers(), strict=True):
            assert a.data_ptr() == b.data_ptr()
        assert torch.equal(model(x), linear(x))
    dequantize_(laid_out)
    assert laid_out[0].routed_experts.gate_proj.weight is laid_out[2].routed_experts.gate_proj.weight


def test_linears_that_are_not_fused_take_a_layout_too(layout):
    only = dict(filter=lambda module, name: name.endswith(("up_proj", "down_proj")))
    original = nn.Sequential(Llama4MoE(Llama4MoEConfig(128, 128, 4), dtype=BF16))
    laid_out = quantize_(copy.deepcopy(original), layout=layout, **only)
    assert layouts(laid_out) == [layout] * 2
    x = torch.randn(1, 4, 128, dtype=BF16)
    assert torch.equal(laid_out(x), quantize_(original, layout="linear", **only)(x))


def test_refuses_layouts_and_leaves_the_model_unchanged():
    apart = nn.Sequential(Llama4MoE(Llama4MoEConfig(128, 32, 4, top_k=2), dtype=BF16))  # gate alone has 32 rows
    bad = [
        (wide_model(), None, "tiled", r"layout: got 'tiled', wanted one of \('auto', 'linear', 'tiled_64x64'\)"),
        (wide_model(), None, "swizzled_128x4", "layout: got 'swizzled_128x4', wanted one of"),
        (wide_model(), None, None, "layout: got None, wanted one of"),
        (wide_model(), None, "humming", "layout: got 'humming', wanted one of"),
        (
            model(),
            None,
            "tiled_64x64",
            "layout: got 'tiled_64x64' for '0.routed_experts', which has a weight of out_features 64 and in_features"
            " 32, wanted out_features and in_features multiples of 64",
        ),
        (
            nn.Sequential(*wide_model(), GroupedSwiGLU(2, 128, 48, dtype=BF16)),
            None,
            "tiled_64x64",
            "got 'tiled_64x64' for '1', which has a weight of out_features 96 and in_features 128, wanted out_features"
            " and in_features multiples of 64",
        ),
        (
            apart,
            lambda module, name: isinstance(module, GroupedLinear),
            "tiled_64x64",
            "got 'tiled_64x64' for '0.routed_experts.gate_proj', which has a weight of out_features 32",
        ),
    ]
    for module, filter, layout, message in bad:
        kinds = [type(m) for m in module.modules()]
        with pytest.raises(ValueError, match=message):
            quantize_(module, filter=filter, layout=layout)
        assert [type(m) for m in module.modules()] == kinds


def test_scale_search_lessens_the_error():
    block = torch.nn.Sequential(GroupedSwiGLU(2, 64, 32))
    plain, searched = (dequantize_(quantize_(copy.deepcopy(block), scale_search=search)) for search in (None, "mse"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        exact = getattr(block[0], name).weight
        errors = [(getattr(model[0], name).weight - exact).norm() for model in (plain, searched)]
        assert errors[1] < 0.95 * errors[0]
    with pytest.raises(ValueError, match="scale_search: got 'best'"):
        quantize_(block, scale_search="best")
    assert isinstance(block[0], GroupedSwiGLU), "the model is unchanged"


def test_to_layout_of_a_quantized_model_and_back(layout):
    linear, laid_out = both(wide_model(), layout)
    model = copy.deepcopy(linear)
    x = torch.randn(2, 5, model[0].config.hidden_size, dtype=torch.bfloat16)
    expected = model(x)
    assert to_layout_(model, layout) is model
    assert layouts(model) == layouts(laid_out)
    for buffer, wanted in zip(model.buffers(), laid_out.buffers(), strict=True):
        assert torch.equal(buffer.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(model(x), expected)
    to_layout_(to_layout_(model, layout), "linear")
    assert_same_bits(dict(model.named_buffers()), dict(linear.named_buffers()))


def test_to_layout_refuses_and_changes_nothing():
    model = quantize_(torch.nn.ModuleList([GroupedLinear(2, 64, 128), GroupedLinear(2, 32, 64)]))
    message = "layout: got 'tiled_64x64' for '1', .* in_features 32, wanted out_features and in_features multiples"
    with pytest.raises(ValueError, match=message):
        to_layout_(model, "tiled_64x64")
    assert layouts(model) == ["linear"] * 2
    with pytest.raises(ValueError, match="layout: got 'tiled', wanted one of"):
        to_layout_(model, "tiled")
    with pytest.raises(ValueError, match="found no NVFP4 modules in Linear"):
        to_layout_(torch.nn.Linear(2, 2), "tiled_64x64")


# ---- layout "auto", as if a CPU preferred another one


def test_auto_takes_the_preferred_layout_where_it_fits(tiles):
    original = model(2)
    quantized = quantize_(copy.deepcopy(original))
    assert layouts(quantized) == ["tiled_64x64", "linear"] * 2  # down has in_features 32
    assert tiles[:2] == [("cpu", 64, 64), ("cpu", 64, 32)]
    linear = quantize_(original, layout="linear")
    assert layouts(linear) == ["linear"] * 4
    x = torch.randn(1, 4, 64, dtype=BF16)
    assert torch.equal(quantized(x), linear(x))
    assert_same_bits(quantized.state_dict(), linear.state_dict())
    to_layout_(linear)
    assert layouts(linear) == layouts(quantized)
    assert_same_bits(dict(linear.named_buffers()), dict(quantized.named_buffers()))
    quantized.to("meta")
    assert layouts(to_layout_(quantized, "linear")) == ["linear"] * 4


def test_auto_is_linear_on_a_cpu():
    quantized = quantize_(wide_model(), layout="auto")
    assert layouts(quantized) == ["linear"] * 2
    to_layout_(quantized, "tiled_64x64")
    assert layouts(to_layout_(quantized)) == ["linear"] * 2


def test_the_default_dtype_is_not_that_of_a_weight():
    torch.set_default_dtype(torch.float64)
    try:
        quantized = quantize_(torch.nn.Sequential(GroupedLinear(2, 64, 64, dtype=torch.float32)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(quantized[0]).__name__ == "NVFP4GroupedLinear"
