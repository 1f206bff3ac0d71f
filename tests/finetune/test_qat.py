"""Quantization-aware training: fake_quantize, prepare_qat_, finish_qat_, and that quantize_ gives what training saw.
Called by pytest; judged by `formats.nvfp4`, which has an oracle of its own, bit for bit.
"""

import copy

import pytest
import torch
from interruptions import interrupted
from oracle import relative_error
from tiny_models import tiny_model, tokens
from torch import nn
from torch.nn.utils import parametrize

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    dequantize_,
    finish_qat_,
    nvfp4,
    prepare_qat_,
    quantize_,
)
from thunder_moe.finetune.qat import FakeQuantize
from thunder_moe.formats.nvfp4 import dequantize, quantize

OFFSETS = torch.tensor([3, 3, 8, 12], dtype=torch.int32)


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return self.experts(x, OFFSETS)


def model_of_experts(dtype=torch.bfloat16, intermediate=48):
    torch.manual_seed(0)
    return Model(GroupedSwiGLU(4, 32, intermediate, dtype=dtype))


def compiled(model, mode):
    if mode == "eager":
        return model
    if mode == "thunder":
        thunder = pytest.importorskip("thunder")
        from thunder_moe import moe_executor

        return thunder.jit(model, executors=[moe_executor])
    return torch.compile(model, fullgraph=True, backend="thunder_moe", options={"thunder_moe.inner": "aot_eager"})


def test_an_interrupted_preparation_is_undone():
    model = Model(GroupedMLP(4, 32, 48))
    before = model.state_dict()
    moments = 0
    for _ in interrupted(lambda: prepare_qat_(model), step=4):
        moments += 1
        assert model.state_dict().keys() == before.keys()
        assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert moments > 5
    assert len(finish_qat_(model).state_dict()) == len(before)


@pytest.mark.parametrize("scale_search", [None, "mse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fake_quantize_is_quantize_and_dequantize_with_a_straight_gradient(dtype, scale_search):
    torch.manual_seed(0)
    weight = torch.randn(3, 16, 32).to(dtype).requires_grad_()
    for view in (weight, weight.transpose(1, 2)):
        got = nvfp4.fake_quantize(view, scale_search=scale_search)
        assert torch.equal(got, dequantize(quantize(view, scale_search=scale_search), dtype))
        assert not torch.equal(got, view)
        assert got.is_contiguous()
        grad = torch.randn_like(got)
        (of_view,) = torch.autograd.grad(got, view, grad)
        assert torch.equal(of_view, grad)


def test_the_operator_passes_opcheck():
    weight = torch.randn(2, 8, 32, requires_grad=True)
    torch.library.opcheck(torch.ops.thunder_moe.nvfp4_fake_quantize, (weight,), {"scale_search": "mse"})


def test_experts_that_are_not_finite_are_nan_and_the_others_themselves():
    weight = torch.randn(4, 8, 32)
    weight[1, 2, 3], weight[3, 0, 0] = float("nan"), float("inf")
    got = nvfp4.fake_quantize(weight)
    assert got[1].isnan().all()
    assert got[3].isnan().all()
    assert torch.equal(got[[0, 2]], nvfp4.fake_quantize(weight[[0, 2]]))


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (torch.randn(2, 8, 24), {}, "in_features a positive multiple of 16"),
        (torch.randn(8, 32), {}, "shape"),
        (torch.ones(2, 8, 32, dtype=torch.int32), {}, "dtype float32, bfloat16 or float16"),
        (torch.randn(2, 8, 32), {"scale_search": "best"}, "scale_search: got 'best'"),
    ],
)
def test_bad_input(weight, options, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.fake_quantize(weight, **options)


@pytest.mark.parametrize(
    ("mode", "scale_search", "format"),
    [
        ("eager", None, "nvfp4"), ("eager", "mse", "nvfp4"), ("compile", None, "nvfp4"),
        pytest.param("thunder", "mse", "nvfp4", marks=pytest.mark.exhaustive),
        pytest.param("thunder", None, "mxfp8", marks=pytest.mark.exhaustive),
        ("eager", None, "mxfp8"), ("compile", None, "mxfp8"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
def test_quantize_gives_the_numbers_that_training_saw(mode, scale_search, format):
    """After two steps of SGD: the packed weights are those of another forward, bit for bit; all modes train alike."""
    # In float32 the outputs agree, too; torch compiles the grouped GEMM of bfloat16 alone.
    dtype = torch.float32 if mode == "eager" else torch.bfloat16
    experts = model_of_experts(dtype, 48 if format == "nvfp4" else 64)
    model = prepare_qat_(experts, scale_search=scale_search, format=format)
    parameters = dict(model.named_parameters())
    names = [f"{name}_proj" for name in ("down", "gate", "up")]
    assert sorted(parameters) == [f"experts.{name}.parametrizations.weight.original" for name in names]
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    run, optimizer = compiled(model, mode), torch.optim.SGD(model.parameters(), 100.0)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    for _ in range(2):
        optimizer.zero_grad()
        run(x).float().square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in parameters.items())
    seen = {name: getattr(model.experts, name).weight.detach().clone() for name in names}
    out = run(x).detach()

    assert finish_qat_(model) is model
    assert type(model.experts.gate_proj) is GroupedLinear
    for name, parameter in parameters.items():  # those of the optimizer
        assert model.get_parameter(name.replace("parametrizations.weight.original", "weight")) is parameter
    quantize_(model, scale_search=scale_search, format=format)
    assert relative_error(model(x), out) < (1e-5 if dtype == torch.float32 else 3e-2)
    dequantize_(model)
    for name, weight in seen.items():
        assert torch.equal(getattr(model.experts, name).weight, weight), name


@pytest.mark.parametrize("mode", ["compile", "thunder"])
@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
def test_compiled_gradients_are_those_of_eager(mode):
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    grads = {}
    for each in ("eager", mode):
        model = prepare_qat_(model_of_experts())
        compiled(model, each)(x.bfloat16()).float().square().mean().backward()
        grads[each] = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert grads["eager"].abs().max() > 0
    assert relative_error(grads[mode], grads["eager"]) < 1e-2


@pytest.mark.usefixtures("ties_have_an_order")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_models_of_transformers(name):
    pytest.importorskip("transformers")
    from thunder_moe.integrations.huggingface.experts import expert_blocks

    model = prepare_qat_(tiny_model(name, torch.bfloat16))
    out = model(tokens()).logits
    out.float().square().mean().backward()
    experts = next(module for module in model.modules() if "gate_up_proj" in getattr(module, "parametrizations", {}))
    lists = experts.parametrizations
    assert sorted(lists) == ["down_proj", "gate_up_proj"]
    assert all(each.original.grad.abs().max() > 0 for each in lists.values())
    seen = {weight: getattr(experts, weight).detach().clone() for weight in lists}
    assert not torch.equal(seen["down_proj"], lists["down_proj"].original)
    quantize_(finish_qat_(model))
    assert relative_error(model(tokens()).logits, out.detach()) < 2e-2
    dequantize_(model)
    experts = next(iter(expert_blocks(model).values()))
    for weight, value in seen.items():
        assert torch.equal(getattr(experts, weight), value), weight


def test_what_is_prepared_can_be_copied_and_its_state_loads():
    model = prepare_qat_(model_of_experts())
    twin = prepare_qat_(model_of_experts())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(12, 32).bfloat16()
    assert torch.equal(twin(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_copy_has_nothing_that_waits_for_backward_dw():
    model = prepare_qat_(Model(GroupedMLP(4, 32, 48, delay_wgrad=True)))
    model(2 * torch.randn(12, 32).requires_grad_()).sum().backward()
    assert not copy.deepcopy(model).experts.need_backward_dw()
    model.experts.backward_dw()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


def test_gradients_accumulate_while_weights_are_cached():
    model, plain = prepare_qat_(model_of_experts(torch.float32)), prepare_qat_(model_of_experts(torch.float32))
    x = torch.randn(2, 12, 32)
    with parametrize.cached():
        for rows in x:
            model(rows).square().sum().backward()
    for rows in x:
        plain(rows).square().sum().backward()
    for parameter, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad)


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
def test_grouped_mlp(mode):
    torch.manual_seed(0)
    model = prepare_qat_(Model(GroupedMLP(4, 32, 48, bias=True, dtype=torch.bfloat16)))
    x = torch.randn(12, 32).bfloat16()
    out = compiled(model, mode)(x)
    out.float().square().mean().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    seen = {name: getattr(model.experts, name).weight.detach().clone() for name in ("gate_up_proj", "down_proj")}
    dequantize_(quantize_(finish_qat_(model)))
    for name, weight in seen.items():
        assert torch.equal(getattr(model.experts, name).weight, weight), name
    assert relative_error(model(x), out.detach()) < 4e-3


def test_tied_weights_stay_tied():
    model = nn.ModuleList([GroupedLinear(2, 32, 16), GroupedLinear(2, 32, 16), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    prepare_qat_(model)
    assert len(list(model.parameters())) == 3
    assert torch.equal(model[0].weight, model[1].weight)
    finish_qat_(model)
    assert model[0].weight is model[1].weight


def test_a_filter_and_errors():
    model = nn.ModuleDict(dict(a=GroupedLinear(2, 32, 16), b=GroupedLinear(2, 32, 16)))
    prepare_qat_(model, filter=lambda module, name: name == "a")
    assert parametrize.is_parametrized(model["a"], "weight")
    assert not parametrize.is_parametrized(model["b"])
    with pytest.raises(ValueError, match="a .Parametrized.*is parametrized"):
        prepare_qat_(model, filter=lambda module, name: name == "a")
    with pytest.raises(ValueError, match="a .Parametrized.*is parametrized"):
        quantize_(model, filter=lambda module, name: name == "a")
    parametrize.register_parametrization(model["a"], "weight", nn.Identity())
    with pytest.raises(ValueError, match="weight of 'a' has another parametrization"):
        finish_qat_(model)
    with pytest.raises(ValueError, match="found nothing in Linear"):
        finish_qat_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="scale_search"):
        prepare_qat_(model, scale_search="best")
    with pytest.raises(ValueError, match="scale_search: got 'mse', wanted None: MXFP8"):
        prepare_qat_(model, scale_search="mse", format="mxfp8")
    with pytest.raises(ValueError, match="format: got 'fp8', wanted one of"):
        prepare_qat_(model, format="fp8")
    odd = nn.ModuleDict(dict(even=GroupedLinear(2, 32, 16), odd=GroupedLinear(2, 48, 16)))
    with pytest.raises(ValueError, match="multiple of 32"):
        prepare_qat_(odd, format="mxfp8")
    assert not any(map(parametrize.is_parametrized, odd.values()))
    assert FakeQuantize(transposed=True)(torch.ones(1, 16, 4)).shape == (1, 16, 4)
