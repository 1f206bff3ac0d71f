"""What quantize_ and dequantize_ leave as it is: modules with anything of their own that a replacement would lack.
Called by pytest; judged by the model that is left, which still has to compute what is its own.
"""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import nn
from torch.nn.utils import parametrize, prune

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    NVFP4GroupedLinear,
    NVFP4GroupedSwiGLU,
    dequantize_,
    quantize_,
)

BF16 = torch.bfloat16
OFFSETS = torch.tensor([2, 3, 7], dtype=torch.int32)
X = torch.linspace(-3, 3, 7 * 64).sin().view(7, 64).to(BF16)


class Gelu(GroupedSwiGLU):
    def forward(self, x, offsets):
        return self.down_proj(F.gelu(self.gate_proj(x, offsets)) * self.up_proj(x, offsets), offsets)


class WithBias(GroupedLinear):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.full((self.num_experts, self.out_features), 3.0, dtype=self.weight.dtype))

    def forward(self, x, offsets):
        return super().forward(x, offsets) + self.bias[0]


class SameForward(GroupedLinear):
    pass


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x, offsets):
        return self.base(x, offsets) + 1


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class OwnParameter(nn.Parameter):
    pass


def block(cls=GroupedSwiGLU):
    return cls(3, 64, 32, dtype=BF16)


def replace_linear(block, name, cls):
    old = getattr(block, name)
    setattr(block, name, cls(old.num_experts, old.in_features, old.out_features, dtype=BF16))
    return block


def on_block(change):
    def changed():
        made = block()
        change(made)
        return made

    return changed


def patch_forward(module):
    module.forward = lambda x, offsets: torch.zeros_like(x)


def plus_one(module, inputs, output):
    return output + 1


def no_change(*args, **kwargs):
    return None


# What is done to a block, and the reason that has to be told.
CHANGES = {
    "subclass": (lambda: block(Gelu), "it is a Gelu, not a GroupedSwiGLU itself"),
    "subclass of a linear": (
        lambda: replace_linear(block(), "up_proj", WithBias),
        "up_proj: it is a WithBias, not a G",
    ),
    "subclass without a forward": (
        lambda: replace_linear(block(), "up_proj", SameForward),
        "up_proj: it is a SameForwar",
    ),
    "class of the instance": (on_block(lambda b: setattr(b, "__class__", Gelu)), "it is a Gelu"),
    "forward": (on_block(patch_forward), "its forward is wrapped or replaced"),
    "forward of a linear": (
        on_block(lambda b: patch_forward(b.down_proj)),
        "down_proj: its forward is wrapped or repl",
    ),
    "another method": (on_block(lambda b: setattr(b, "_call_impl", b._call_impl)), "its _call_impl is patched"),
    "LoRA": (
        on_block(lambda b: setattr(b, "gate_proj", LoRA(b.gate_proj))),
        "its gate_proj is a LoRA, not a GroupedLin",
    ),
    "a child more": (on_block(lambda b: b.add_module("norm", nn.LayerNorm(64))), "it has the child norm more or less"),
    "a parameter more": (
        on_block(lambda b: b.up_proj.register_parameter("gain", nn.Parameter(torch.ones(2)))),
        "up_proj: it has the parameter gain more or less than a GroupedLinear",
    ),
    "a buffer more": (on_block(lambda b: b.register_buffer("scale", torch.ones(2))), "it has the buffer scale more or"),
    "parametrization": (
        on_block(lambda b: parametrize.register_parametrization(b.gate_proj, "weight", Doubled())),
        "gate_proj: its weight is parametrized",
    ),
    "weight_norm": (
        on_block(lambda b: torch.nn.utils.parametrizations.weight_norm(b.gate_proj)),
        "gate_proj: its weight is parametrized",
    ),
    "pruning": (
        on_block(lambda b: prune.random_unstructured(b.up_proj, "weight", 0.5)),
        "up_proj: it has forward pre-hooks",
    ),
    "type of parameter": (
        on_block(lambda b: setattr(b.up_proj, "weight", OwnParameter(b.up_proj.weight.detach()))),
        "up_proj: its weight is a OwnParameter, not a plain parameter",
    ),
    "forward hook": (on_block(lambda b: b.register_forward_hook(plus_one)), "it has forward hooks"),
    "forward hook of a linear": (
        on_block(lambda b: b.up_proj.register_forward_hook(plus_one)),
        "up_proj: it has forward hooks",
    ),
    "pre-hook": (on_block(lambda b: b.register_forward_pre_hook(no_change)), "it has forward pre-hooks"),
    "backward hook": (on_block(lambda b: b.register_full_backward_hook(no_change)), "it has backward hooks"),
    "backward pre-hook": (on_block(lambda b: b.register_full_backward_pre_hook(no_change)), "it has backward pre-hoo"),
    "state dict hook": (on_block(lambda b: b.register_state_dict_post_hook(no_change)), "it has state dict hooks"),
    "state dict pre-hook": (
        on_block(lambda b: b.register_state_dict_pre_hook(no_change)),
        "it has state dict pre-hooks",
    ),
    "load hook": (on_block(lambda b: b.register_load_state_dict_pre_hook(no_change)), "it has hooks on loading"),
    "load post-hook": (on_block(lambda b: b.register_load_state_dict_post_hook(no_change)), "it has hooks on loading"),
    "compile": (on_block(lambda b: b.compile(backend="eager")), "it was compiled by its own compile()"),
    "shapes": (
        on_block(lambda b: setattr(b, "up_proj", GroupedLinear(3, 64, 1, dtype=BF16))),
        r"its weights have shapes \(3, 32, 64\), \(3, 1, 64\) and \(3, 64, 32\), which do not match",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize(("make", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_a_block_with_anything_of_its_own_is_left_and_told(make, reason, caplog):
    model = nn.ModuleDict({"own": make(), "plain": block()})
    expected, kinds = model["own"](X, OFFSETS), [type(module) for module in model["own"].modules()]
    with caplog.at_level(logging.WARNING, logger="thunder_moe"):
        assert quantize_(model) is model
    assert [type(module) for module in model["own"].modules()] == kinds
    assert torch.equal(model["own"](X, OFFSETS), expected)
    assert type(model["plain"]) is NVFP4GroupedSwiGLU
    (message,) = (record.message for record in caplog.records if record.name == "thunder_moe")
    assert message.startswith(f"stays 16-bit: own ({kinds[0].__name__}): ")
    pattern = pytest.raises(ValueError, match=rf"model: nothing in ModuleDict can be replaced; own \(.*\): .*{reason}")
    with pattern as error:
        quantize_(nn.ModuleDict({"own": model["own"]}))
    assert message.removeprefix("stays 16-bit: ") in str(error.value)
    assert [type(module) for module in model["own"].modules()] == kinds


def test_a_linear_with_a_bias_of_its_own_is_left(caplog):
    model = nn.ModuleDict({"biased": WithBias(3, 64, 64, dtype=BF16), "plain": GroupedLinear(3, 64, 64, dtype=BF16)})
    expected = model["biased"](X, OFFSETS)
    quantize_(model)
    assert torch.equal(model["biased"](X, OFFSETS), expected)
    assert type(model["plain"]) is NVFP4GroupedLinear
    assert "stays 16-bit: biased (WithBias): it is a WithBias, not a GroupedLinear itself" in caplog.text


def test_parametrised_weights_are_never_mistaken_for_each_other():
    """A parametrised weight is another tensor at each access, so that two modules may see the same id."""
    model = nn.ModuleList([GroupedLinear(3, 64, 64, dtype=BF16) for _ in range(4)])
    for linear in model:
        parametrize.register_parametrization(linear, "weight", Doubled())
    model.append(GroupedLinear(3, 64, 64, dtype=BF16))
    expected = [linear(X, OFFSETS) for linear in model]
    quantize_(model)
    for linear, out in zip(model[:4], expected[:4], strict=True):
        assert torch.equal(linear(X, OFFSETS), out)
    assert relative_error(model[4](X, OFFSETS), expected[4]) < 0.2


def test_a_filter_takes_the_plain_projections_of_such_a_block():
    model = nn.Sequential(replace_linear(block(Gelu), "up_proj", WithBias))
    original = copy.deepcopy(model)
    quantize_(model, filter=lambda module, name: isinstance(module, GroupedLinear))
    own = model[0]
    assert [type(child) for child in own.children()] == [NVFP4GroupedLinear, WithBias, NVFP4GroupedLinear]
    rounded = dequantize_(copy.deepcopy(model))
    assert relative_error(own(X, OFFSETS), rounded[0](X, OFFSETS)) < 0.02
    assert relative_error(own(X, OFFSETS), original[0](X, OFFSETS)) < 0.3


def test_a_class_whose_forward_was_replaced(monkeypatch):
    monkeypatch.setattr(GroupedSwiGLU, "forward", Gelu.forward)
    with pytest.raises(ValueError, match="the forward of GroupedSwiGLU was replaced"):
        quantize_(nn.Sequential(block()))


def test_a_filter_that_declines_keeps_quiet(caplog):
    model = nn.ModuleList([block(Gelu), block()])
    quantize_(model, filter=lambda module, name: name.startswith("1"))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert type(model[1]) is NVFP4GroupedSwiGLU


def test_an_own_forward_that_was_put_back_is_no_change():
    model = nn.Sequential(block())
    model[0].forward = model[0].forward  # as accelerate leaves it
    assert type(quantize_(model)[0]) is NVFP4GroupedSwiGLU


def test_a_module_that_has_to_stay_and_is_tied():
    model = nn.ModuleList([block(), block(Gelu)])
    model[1].up_proj.weight = model[0].up_proj.weight
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="'1.up_proj' is tied to '0' and has to stay 16-bit: it is a Gelu"):
        quantize_(model)
    assert [type(module) for module in model.modules()] == before


def test_a_wrapper_of_peft_keeps_what_it_wraps():
    ParamWrapper = type("ParamWrapper", (LoRA,), {"__module__": "peft.tuners.lora.layer"})
    model = nn.ModuleList([ParamWrapper(block()), block()])
    expected = model[0](X, OFFSETS)
    quantize_(model)
    assert torch.equal(model[0](X, OFFSETS), expected)
    with pytest.raises(ValueError, match=r"0.base \(GroupedSwiGLU\): a ParamWrapper of PEFT wraps it"):
        quantize_(model)


@pytest.mark.parametrize("wrap", ["torch.compile", "thunder.jit"])
def test_what_was_compiled_by_itself_goes_on_with_its_own_weights(wrap, caplog):
    import thunder

    from thunder_moe import moe_executor

    def compiled(module):
        if wrap == "torch.compile":
            return torch.compile(module, backend="eager")
        return thunder.jit(module, executors=[moe_executor])

    for change in (quantize_, dequantize_):
        model = nn.ModuleList([block(), block()])
        if change is dequantize_:
            quantize_(model)
        model[0] = compiled(model[0])
        with torch.no_grad():
            expected = model[0](X, OFFSETS)
            inner, plain = [type(module) for module in model[0].modules()], type(model[1])
            change(model)
            assert torch.equal(model[0](X, OFFSETS), expected)
        assert [type(module) for module in model[0].modules()] == inner
        assert type(model[1]) is not plain
        assert wrap in caplog.text
        with pytest.raises(ValueError, match=f"can be replaced; 0.*{wrap}.*: compile afterwards"):
            change(model)


def test_a_compiled_model_sees_the_swap():
    model = nn.ModuleDict({"experts": block()})
    function = torch.compile(lambda x: model["experts"](x, OFFSETS), backend="eager")
    function(X)
    quantize_(model)
    assert torch.equal(function(X), model["experts"](X, OFFSETS))


def test_a_module_of_two_names_in_one_parent():
    shared = block()
    model = nn.ModuleDict({"a": shared, "b": shared})
    quantize_(model)
    assert type(model["b"]) is NVFP4GroupedSwiGLU
    assert model["a"] is model["b"]
    dequantize_(model)
    assert type(model["b"]) is GroupedSwiGLU
    assert model["a"] is model["b"]


def test_an_ineligible_dtype_found_last_leaves_the_model_unchanged():
    model = nn.ModuleList([block(), block().double()])
    before = [*model.modules()]
    with pytest.raises(ValueError, match=r"'1' has a weight of torch.float64, wanted one of \(torch.float32"):
        quantize_(model)
    assert [*model.modules()] == before
    model[1].to(BF16)
    model[1].down_proj.weight = nn.Parameter(torch.zeros(3, 64, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="'1' has a weight of torch.float64"):
        quantize_(model)
    assert [*model.modules()] == before
    flat = GroupedLinear(1, 64, 64, dtype=BF16)
    flat.weight = nn.Parameter(flat.weight[0].detach())
    with pytest.raises(ValueError, match=r"'1' has a weight of shape \(64, 64\), wanted three dimensions"):
        quantize_(nn.ModuleList([block(), flat]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.register_forward_hook(plus_one), "it has forward hooks"),
        (lambda b: b.down_proj.register_forward_hook(plus_one), "down_proj: it has forward hooks"),
        (patch_forward, "its forward is wrapped or replaced"),
        (lambda b: setattr(b, "down_proj", LoRA(b.down_proj)), "its down_proj is a LoRA, not a NVFP4GroupedLinear"),
        (lambda b: b.gate_up_proj.register_parameter("lora_A", nn.Parameter(torch.ones(1))), "parameter lora_A more"),
    ],
)
def test_dequantize_leaves_what_has_anything_of_its_own(change, reason, caplog):
    model = quantize_(nn.ModuleList([block(), block()]))
    change(model[0])
    expected = model[0](X, OFFSETS)
    dequantize_(model)
    assert type(model[0]) is NVFP4GroupedSwiGLU
    assert type(model[1]) is GroupedSwiGLU
    assert torch.equal(model[0](X, OFFSETS), expected)
    assert reason in caplog.text
    assert "stays 4-bit: 0 (NVFP4GroupedSwiGLU)" in caplog.text
    with pytest.raises(ValueError, match=f"nothing in ModuleList can be replaced; 0 .*{reason}"):
        dequantize_(model)
