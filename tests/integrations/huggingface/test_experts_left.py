"""Experts of transformers that quantize_ leaves as they are: hooks, patches, wrappers and weights of their own.
Called by pytest; judged by the same layer before, which has to compute the same afterwards.
"""

import functools
import logging

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers")

from thunder_moe import dequantize_, quantize_  # noqa: E402
from thunder_moe.formats.nvfp4 import quantize  # noqa: E402
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks  # noqa: E402

X, IDS, WEIGHTS = (
    torch.linspace(-3, 3, 5 * 64).sin().view(5, 64),
    torch.arange(10).view(5, 2) % 8,
    torch.full((5, 2), 0.5),
)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class OwnParameter(nn.Parameter):
    pass


class Wrapper(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args):
        return self.base_layer(*args) + 1


def subclass(experts, name, function):
    experts.__class__ = type("Own", (type(experts),), {name: function})


def own_forward(self, hidden_states, top_k_index, top_k_weights):
    return 2 * hidden_states


def own_gate(gate_up):
    return gate_up[..., :32]


def wrap_forward(experts):
    inner = experts.forward
    experts.forward = lambda *args: inner(*args) + 1


def hook_of_accelerate(experts):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(experts, hooks.AlignDevicesHook(execution_device="cpu"))


def patched_then_hooked(experts):
    wrap_forward(experts)
    hook_of_accelerate(experts)


def hooked_then_patched(experts):
    hook_of_accelerate(experts)
    wrap_forward(experts)


def plus_one(module, inputs, output):
    return output + 1


def hold_own_parameter(experts):
    experts.down_proj = OwnParameter(experts.down_proj.detach())


def to_double(experts):
    experts.double()
    if hasattr(experts, "config"):
        experts.config._experts_implementation = "eager"


CHANGES = {
    "forward hook": (lambda e: e.register_forward_hook(plus_one), "it has forward hooks"),
    "pre-hook": (lambda e: e.register_forward_pre_hook(lambda *_: None), "it has forward pre-hooks"),
    "hook of the activation": (lambda e: e.act_fn.register_forward_hook(plus_one), "act_fn: it has forward hooks"),
    "forward": (wrap_forward, r"something \(expert parallelism\?\) has wrapped its forward"),
    "partial": (lambda e: setattr(e, "forward", functools.partial(e.forward)), "has wrapped its forward"),
    "forward below a hook of accelerate": (patched_then_hooked, "has wrapped its forward"),
    "forward above a hook of accelerate": (hooked_then_patched, "has wrapped its forward"),
    "subclass": (lambda e: subclass(e, "forward", own_forward), "Own has a forward of its own"),
    "gate of the instance": (lambda e: setattr(e, "_apply_gate", own_gate), "its _apply_gate is patched"),
    "parametrization": (
        lambda e: parametrize.register_parametrization(e, "down_proj", Doubled()),
        "its down_proj is parametrized",
    ),
    "compile": (lambda e: e.compile(backend="eager"), r"it was compiled by its own compile\(\)"),
    "type of parameter": (hold_own_parameter, "its down_proj is a OwnParameter, not a plain parameter"),
    "dtype": (to_double, "its down_proj is torch.float64 of shape .* 16 or 32 bits"),
    "state dict hook": (lambda e: e.register_state_dict_pre_hook(lambda *_: None), "it has state dict pre-hooks"),
}


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_experts_with_anything_of_their_own_are_left_and_told(name, change, reason, caplog):
    if name == "llama4" and change in (CHANGES["gate of the instance"][0], CHANGES["subclass"][0]):
        pytest.skip("these experts have no such gate; a subclass has its own reason")
    model = tiny_model(name)
    path, own = next(iter(expert_blocks(model).items()))
    change(own)
    args = (X.to(own.down_proj.dtype), IDS, WEIGHTS.to(own.down_proj.dtype))
    args = args if name != "llama4" else (args[0].repeat(8, 1),)
    expected = own(*args)
    with caplog.at_level(logging.WARNING, logger="thunder_moe"):
        quantize_(model)
    assert model.get_submodule(path) is own
    assert torch.equal(own(*args), expected)
    assert len([module for module in model.modules() if isinstance(module, NVFP4Experts)]) == 1
    assert f"stays 16-bit: {path} ({type(own).__name__}): " in caplog.text
    with pytest.raises(ValueError, match=f"nothing in .* can be replaced; {path} .*: .*{reason}"):
        quantize_(model)
    if "dtype" not in reason and change not in (CHANGES["parametrization"][0], CHANGES["dtype"][0]):
        weights = [quantize(torch.randn(8, 64, 64)), quantize(torch.randn(8, 64, 32))]
        with pytest.raises(ValueError, match=f"hf_experts_module: cannot replace this .*: .*{reason}"):
            NVFP4Experts.from_weights(own, *weights)


def test_a_subclass_of_llama4s_experts():
    model = tiny_model("llama4")
    for experts in expert_blocks(model).values():
        subclass(experts, "forward", lambda self, hidden: 2 * hidden)
    with pytest.raises(ValueError, match="Own has another forward than Llama4TextExperts"):
        quantize_(model)


def test_llama4s_layer_with_a_forward_of_its_own_is_refused():
    model = tiny_model("llama4")
    layer = model.model.layers[1].feed_forward
    wrap_forward(layer)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(TypeError, match="the forward of a Llama4TextMoe was replaced"):
        quantize_(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_wrapper_of_peft_keeps_its_experts(caplog):
    model = tiny_model("qwen3_moe")
    ParamWrapper = type("ParamWrapper", (Wrapper,), {"__module__": "peft.tuners.lora.layer"})
    block = model.model.layers[0].mlp
    own = block.experts
    block.experts = ParamWrapper(own)
    expected = block.experts(X, IDS, WEIGHTS)
    quantize_(model)
    assert torch.equal(block.experts(X, IDS, WEIGHTS), expected)
    assert "model.layers.0.mlp.experts.base_layer (Qwen3MoeExperts): a ParamWrapper of PEFT wraps it" in caplog.text
    assert isinstance(model.model.layers[1].mlp.experts, NVFP4Experts)


def test_a_class_whose_forward_was_replaced(monkeypatch):
    model = tiny_model("qwen3_moe")
    kind = type(model.model.layers[0].mlp.experts)
    monkeypatch.setattr(kind, "forward", own_forward)
    with pytest.raises(ValueError, match="Qwen3MoeExperts has a forward of its own"):
        quantize_(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: e.register_forward_hook(plus_one), "it has forward hooks"),
        (wrap_forward, "has wrapped its forward"),
        (lambda e: setattr(e, "down_proj", Wrapper(e.down_proj)), "its down_proj is a Wrapper, not a NVFP4GroupedL"),
        (lambda e: e.down_proj.register_forward_hook(plus_one), "down_proj: it has forward hooks"),
    ],
)
def test_dequantize_leaves_what_has_anything_of_its_own(change, reason, caplog):
    model = quantize_(tiny_model("qwen3_moe"))
    own = model.model.layers[0].mlp.experts
    change(own)
    dequantize_(model)
    assert model.model.layers[0].mlp.experts is own
    assert "stays 4-bit: model.layers.0.mlp.experts (NVFP4Experts): " in caplog.text
    assert reason in caplog.text
    assert len(expert_blocks(model)) == 1
    if "down_proj" not in reason:  # projections with anything of their own do not run
        model(tokens())
