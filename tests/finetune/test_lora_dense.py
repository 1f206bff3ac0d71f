"""LoRA on 4-bit dense layers, alone and as parts of a stack: values and gradients, compilers, merging, state dicts.
Called by pytest; calls plain torch for what is expected.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import KERNEL_TOLERANCE, dequantize, relative_error
from torch import nn

from thunder_moe import dequantize_, quantize_
from thunder_moe.dense_names import READ_TOGETHER_BY
from thunder_moe.finetune.lora import (
    add_lora_,
    lora_linears,
    lora_parameters,
    remove_lora_,
    use_lora_,
)
from thunder_moe.finetune.merge import merge_lora_, unmerge_lora_
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart

H = 64


class Attention(nn.Module):
    """q and v read the same rows."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(H, 96), nn.Linear(H, 96)
        self.o_proj = nn.Linear(96, H, bias=False)

    def forward(self, x):
        q, v = self.q_proj(x), self.v_proj(x)
        return self.o_proj(q.tanh() * v)


@pytest.fixture(autouse=True)
def known_class(monkeypatch):
    monkeypatch.setitem(READ_TOGETHER_BY, (__name__, "Attention"), ("q_proj", "v_proj"))


def everything(module, name):
    return True


def adapted(dtype=torch.float32, linears=True, **options):
    torch.manual_seed(0)
    model = quantize_(Attention().to(dtype), linears=everything)
    add_lora_(model, 4, 8, linears=linears, **options)
    for linear in lora_linears(model).values():
        for b in linear.lora_B.values():
            nn.init.normal_(b, std=0.3)
    return model, torch.randn(2, 5, H, dtype=dtype, requires_grad=True)


def oracle(model, x):
    """float32, of dequantized weights plus dense adapters; and their leaves."""
    leaves, weights = [], {}
    for name in ("q_proj", "v_proj", "o_proj"):
        module = model.get_submodule(name)
        weight = dequantize(*module.packed_weight.to_layout("linear").tensors())[0]
        if name in lora_linears(model):
            a, b = (each["default"].detach().float().requires_grad_() for each in (module.lora_A, module.lora_B))
            leaves += [a, b]
            weight = weight + module.lora_specs["default"].scaling * b[0] @ a[0]
        weights[name] = weight, None if module.bias is None else module.bias.detach().float()
    q, v = (F.linear(x, *weights[name]) for name in ("q_proj", "v_proj"))
    return F.linear(q.tanh() * v, *weights["o_proj"]), leaves


def compare(model, x, call=None, tolerance=1e-5):
    wide = x.detach().float().requires_grad_()
    out, (expected, leaves) = (model if call is None else call)(x), oracle(model, wide)
    assert relative_error(out, expected) < tolerance
    assert relative_error(expected, oracle(remove_lora_(copy.deepcopy(model)), wide)[0]) > 0.3
    grad = torch.randn(expected.shape)
    parameters = [p for name in ("q_proj", "v_proj", "o_proj") if (linear := lora_linears(model).get(name)) is not None
                  for p in lora_parameters(linear)]  # fmt: skip
    actual = torch.autograd.grad(out, [x, *parameters], grad.to(out.dtype))
    wanted = torch.autograd.grad(expected, [wide, *leaves], grad)
    for got, want in zip(actual, wanted, strict=True):
        assert relative_error(got, want) < 3 * tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["all", "one part"])
def test_values_and_gradients(which, dtype):
    linears = everything if which == "all" else lambda module, name: name == "v_proj"
    model, x = adapted(dtype, linears)
    assert len(lora_linears(model)) == (3 if which == "all" else 1)
    compare(model, x, tolerance=1e-5 if dtype == torch.float32 else 3 * KERNEL_TOLERANCE[dtype])
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.filterwarnings("ignore:thunder_moe rewrote no expert GEMM")
def test_torch_compile():
    model, x = adapted()
    inner = {"thunder_moe.inner": "aot_eager"}
    compare(model, x, torch.compile(model, backend="thunder_moe", fullgraph=True, options=inner))


@pytest.mark.exhaustive  # test_lora.py has Thunder with adapters
@pytest.mark.filterwarnings("ignore:thunder_moe rewrote no expert GEMM")
def test_thunder():
    from thunder_moe import moe_executor

    import thunder  # isort: skip

    model, x = adapted()
    compare(model, x, thunder.jit(model, executors=[moe_executor]))


def test_parts_run_once_for_all():
    model, x = adapted()
    calls = []
    stack = model.q_proj.stack
    stack.register_forward_hook(lambda *_: calls.append(1))
    assert relative_error(model(x), oracle(model, x)[0]) < 1e-5
    assert len(calls) == 1


def test_experts_alone_by_default():
    model = quantize_(Attention(), linears=everything)
    with pytest.raises(ValueError, match="no linear of experts"):
        add_lora_(model, 4, 8)
    with pytest.raises(ValueError, match="declined"):
        add_lora_(model, 4, 8, linears=lambda module, name: False)
    assert not lora_linears(model)


def test_merge_and_unmerge():
    model, x = adapted()
    before, expected = {k: v.clone() for k, v in model.state_dict().items()}, model(x)
    plain = use_lora_(model, None)(x)
    use_lora_(model, "default")
    errors = merge_lora_(model)
    assert errors.keys() == {"q_proj", "v_proj", "o_proj"}
    assert all(0 < error < 0.5 for error in errors.values())
    assert relative_error(model(x), expected) < 0.2 < relative_error(plain, expected)
    unmerge_lora_(model)
    assert relative_error(model(x), expected) < 1e-6
    for name in ("o_proj.qdata", "o_proj.global_scale", "o_proj.lora_A.default"):
        assert torch.equal(model.state_dict()[name], before[name])


def test_merge_into_16_bits():
    model, x = adapted(torch.bfloat16)
    expected = model(x)
    errors = merge_lora_(model, dequantize=True)
    assert all(0 < error < 0.05 for error in errors.values())
    assert all(type(module) is nn.Linear for module in model.children())
    assert relative_error(model(x), expected) < 0.02


def test_merging_what_cannot_be_replaced_changes_nothing():
    model, x = adapted()
    use_lora_(model, None)
    expected, state = model(x), copy.deepcopy(model.state_dict())
    model.o_proj.register_forward_pre_hook(lambda module, given: None)
    with pytest.raises(ValueError, match="o_proj cannot be replaced by a 16-bit module: it has forward pre-hooks"):
        merge_lora_(model, "default", dequantize=True)
    assert torch.equal(model(x), expected)
    assert model.state_dict().keys() == state.keys()
    model.o_proj._forward_pre_hooks.clear()
    compare(use_lora_(model, "default"), x)


def test_adapters_go_and_come():
    model, x = adapted()
    expected, state = model(x), model.state_dict()
    same = copy.deepcopy(model)
    assert torch.equal(same(x), expected)
    remove_lora_(same)
    assert type(same.q_proj) is NVFP4LinearPart
    assert type(same.o_proj) is NVFP4Linear
    assert relative_error(same(x), expected) > 0.1
    add_lora_(same, 4, 8, linears=True)
    same.load_state_dict(state)
    assert torch.equal(same(x), expected)
    add_lora_(same, 2, 2, linears=lambda module, name: name == "q_proj", adapter="other")
    assert same.q_proj.lora_active == ("other",)
    assert same.o_proj.lora_active == ()
    assert torch.equal(use_lora_(same, "default")(x), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_merged_parts_are_not_loaded_below_the_same_adapter(format):
    model, other, plain = (quantize_(Attention(), linears=everything, format=format) for _ in range(3))
    for each in (model, other):
        add_lora_(each, 4, 8, linears=True)
    plain_state = copy.deepcopy(plain.state_dict())
    nn.init.normal_(model.q_proj.lora_B["default"])
    merge_lora_(model)
    saved, x = model.state_dict(), torch.randn(3, H)
    before = plain(x)
    plain.load_state_dict(saved)
    assert torch.equal(plain(x), model(x))
    plain.load_state_dict(plain_state)  # of another shape of NVFP4's global scale: rows of q and v have the same again
    assert torch.equal(plain(x), before)
    with pytest.raises(RuntimeError, match=r"v_proj: got a weight with \['default'\] merged into it"):
        other.load_state_dict(saved, strict=False)


@pytest.mark.parametrize("why", ["merged", "another rank"])
def test_a_refused_state_dict_leaves_the_weights_that_parts_share(why):
    torch.manual_seed(1)
    other = quantize_(Attention(), linears=everything)
    model, x = adapted()
    if why == "merged":
        merge_lora_(model)
    else:
        add_lora_(other, 2, 4, linears=True)
    expected = model(x)
    with pytest.raises(RuntimeError, match=r"v_proj: (\['default'\] are merged|got an adapter 'default' of rank 2)"):
        model.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(model(x), expected)
    if why != "merged":  # nothing of it is left for the next load
        remove_lora_(model).load_state_dict(remove_lora_(other).state_dict())
        assert torch.equal(model(x), other(x))


def test_dropout():
    model, _ = adapted(dropout=0.5)
    model.train()
    torch.manual_seed(1)
    first = model.o_proj(torch.ones(3, 96))
    torch.manual_seed(1)
    assert torch.equal(first, model.o_proj(torch.ones(3, 96)))
    assert relative_error(first, model.eval().o_proj(torch.ones(3, 96))) > 0.01


def test_layers_with_adapters_stay_4_bit():
    """Without `merge_lora_` the adapters would be lost."""
    model, x = adapted()
    expected = model(x)
    with pytest.raises(ValueError, match="q_proj .*it has LoRA adapters: merge_lora_"):
        dequantize_(model)
    assert torch.equal(model(x), expected)
