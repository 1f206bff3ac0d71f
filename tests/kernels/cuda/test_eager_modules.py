"""Quantized models of transformers in eager inference, whose routers, experts and dense layers run prepared chains:
they give what the backend's functions give, also behind changes.
Called by pytest; the kernels run by the emulator, on a CPU that takes itself for a CUDA device.
"""

import copy
import io

import pytest
import torch
from fast_cases import others_slow
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import quantize_
from thunder_moe.integrations.huggingface import routers as routers_module
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.huggingface.routers import FusedRouter
from thunder_moe.kernels import select
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack

BF16, OTHERS = torch.bfloat16, ("deepseek_v3", "mixtral", "llama4")


def by_functions(model, *args, **options):
    """Run a model by the functions of the backend, without prepared chains."""
    with select.use_backend("cuda"):
        return model(*args, **options)


def make_block():
    """Return a Qwen3-MoE block whose chains are prepared, and its input."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    block = Qwen3MoeSparseMoeBlock(tiny_config("qwen3_moe")).to(BF16)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    block = quantize_(block.eval(), layout="linear")
    x = torch.randn(1, 3, 64, dtype=BF16)
    block(x)
    return block, x


MODELS = [
    ("qwen3_moe", "linear"),
    ("gpt_oss", "tiled_64x64"),
    *others_slow([("qwen3_moe", "tiled_64x64"), *((name, "linear") for name in ("gpt_oss", *OTHERS))], ()),
]


@pytest.mark.parametrize(("name", "layout"), MODELS)
@torch.no_grad()
def test_models(request, chains, name, layout):
    config = tiny_config(name)
    if layout != "linear":
        request.getfixturevalue("hopper")
        config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 256, 64, 64
    model = quantize_(tiny_model(name, BF16, config), layout=layout)
    layers = sum(isinstance(module, NVFP4Experts) for module in model.modules())
    ids = tokens(1, 3)
    first = model(ids).logits
    assert "f16a_nvfp4weight_moe_experts" in chains
    for _ in range(2):  # with the logits Llama 4's experts get no order of rows
        chains.clear()
        again = model(ids, output_router_logits=True)
    assert not chains
    expected = by_functions(model, ids, output_router_logits=True)
    assert torch.equal(first, expected.logits)
    assert torch.equal(again.logits, expected.logits)
    if name not in ("deepseek_v3", "llama4"):  # whose outputs have none
        assert len(again.router_logits) == layers
        for found, wanted in zip(again.router_logits, expected.router_logits, strict=True):
            assert torch.equal(found, wanted)


@torch.no_grad()
def test_routers_of_one_token_are_one_kernel(chains, monkeypatch):
    """Routers run one kernel if `is_one_operator` (which asks for CUDA): logits are float32 sums, rounded once."""
    monkeypatch.setattr(routers_module, "is_one_operator", lambda hidden, weight: hidden.dtype == weight.dtype)
    linear_layers, plain = [], torch.nn.functional.linear
    monkeypatch.setattr(routers_module.F, "linear", lambda *args: linear_layers.append(1) or plain(*args))
    for name in ("qwen3_moe", "gpt_oss"):
        model = quantize_(tiny_model(name, BF16), layout="linear")
        gate = next(module for module in model.modules() if isinstance(module, FusedRouter))
        x = torch.randn(1, 64, dtype=BF16)
        gate(x)
        linear_layers.clear()
        chains.clear()
        logits, scores, ids = gate(x)
        assert not chains
        assert not linear_layers
        for found, wanted in zip((logits, scores, ids), by_functions(gate, x), strict=True):
            assert torch.equal(found, wanted)
        wide = plain(x.float(), gate.weight.float(), None if name == "qwen3_moe" else gate.bias.float())
        torch.testing.assert_close(logits.float(), wide, rtol=1e-2, atol=1e-2)
        if name == "gpt_oss":
            nn.utils.parametrize.register_parametrization(gate, "bias", Plus())
            torch.testing.assert_close(gate(x)[0].float(), wide + 1, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])  # without and with a bias of the scores
@pytest.mark.covering(1)
@torch.no_grad()
def test_routers_equal_their_operators(chains, monkeypatch, name, one_kernel):
    if one_kernel:
        monkeypatch.setattr(routers_module, "is_one_operator", lambda hidden, weight: hidden.dtype == weight.dtype)
    model = quantize_(tiny_model(name, BF16), layout="linear")
    gate = next(module for module in model.modules() if isinstance(module, FusedRouter))
    for bias in gate.buffers():
        bias.normal_()
    for tokens_of_call in (1, 3, 70):
        x = torch.randn(tokens_of_call, 64, dtype=BF16)
        for rows in (x, x, shift(x), x.t().contiguous().t(), x.repeat(1, 2)[:, :64]):
            assert all(map(torch.equal, gate(rows), by_functions(gate, rows)))


@torch.no_grad()
def test_operands_of_other_kinds(chains):
    """Operands that have to be checked or converted are left to the operator."""
    experts = make_block()[0].experts
    x, ids, scores = torch.randn(5, 64, dtype=BF16), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    kinds = [(x, ids, scores), (x.float(), ids, scores), (x, ids.int(), scores)]
    kinds += [(x[:3], ids[:3], scores[:3]), (x, ids[:, :1], scores[:, :1]), (x, ids, scores.t().contiguous().t())]
    kinds += [(x.t().contiguous().t(), ids, scores), (shift(x), ids, scores)]
    for operands in [*kinds, *kinds]:
        assert torch.equal(experts(*operands), by_functions(experts, *operands))
    with pytest.raises(ValueError, match="expert_weights: "):
        experts(x, ids, scores[:, :1])


def shift(tensor):
    """Return a copy at an address that is not a multiple of 16."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


@torch.no_grad()
def test_hooks_run_and_what_they_change_counts(chains):
    block, x = make_block()
    plain = block(x)

    def swap(module, args, outputs):
        seen.append(outputs)
        outputs[2].copy_(outputs[2].flip(-1))  # other experts for the same weights

    def replace(module, args, outputs):
        return outputs[0], outputs[1], outputs[2].flip(-1)

    results = []
    for hook in (swap, replace):
        seen = []
        handle = block.gate.register_forward_hook(hook)
        results += [block(x), by_functions(block, x)]
        handle.remove()
    assert not torch.equal(results[0], plain)
    assert all(torch.equal(result, results[0]) for result in results)
    handle = block.experts.register_forward_hook(lambda module, args, output: output + 1)
    assert torch.equal(block(x), plain + 1)
    handle.remove()
    block.experts.down_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hooks or a forward of its own"):
        block(x)


@torch.no_grad()
def test_weights_that_change_are_seen(chains):
    block, x = make_block()
    before, other = block(x), make_block()[0]
    own = copy.deepcopy(block.state_dict())
    experts = block.experts
    experts.gate_up_proj.set_weight(other.experts.gate_up_proj.packed_weight)
    assert not torch.equal(block(x), before)
    assert torch.equal(block(x), by_functions(block, x))
    block.load_state_dict(own)
    assert torch.equal(block(x), before)
    experts.down_proj.global_scale = 2 * experts.down_proj.global_scale
    assert torch.equal(block(x), 2 * before)
    experts.down_proj.global_scale /= 2
    assert torch.equal(block(x), before)
    kept, experts.down_proj.qdata = experts.down_proj.qdata, shift(experts.down_proj.qdata)
    for _ in range(2):
        assert torch.equal(block(x), before)
    experts.down_proj.qdata = kept
    block.gate.weight.copy_(other.gate.weight)
    assert torch.equal(block(x), by_functions(block, x))
    chains.clear()
    block(x)
    assert not chains


@torch.no_grad()
def test_biases_that_change_are_seen(chains):
    model = quantize_(tiny_model("gpt_oss", BF16), layout="linear")
    experts = model.model.layers[0].mlp.experts
    ids = tokens(1, 3)
    model(ids)
    before = model(ids).logits
    kept, experts.down_bias = experts.down_bias, nn.Parameter(experts.down_bias + 1, requires_grad=False)
    assert torch.equal(model(ids).logits, by_functions(model, ids).logits)
    experts.down_bias = None
    assert torch.equal(model(ids).logits, by_functions(model, ids).logits)
    experts.down_bias = nn.Parameter(kept.double(), requires_grad=False)
    assert torch.equal(model(ids).logits, by_functions(model, ids).logits)
    experts.down_bias = kept
    assert torch.equal(model(ids).logits, before)
    nn.utils.parametrize.register_parametrization(experts, "down_bias", Plus())
    assert torch.equal(model(ids).logits, by_functions(model, ids).logits)
    assert not torch.equal(model(ids).logits, before)


class Plus(nn.Module):
    def forward(self, bias):
        return bias + 1


@torch.no_grad()
def test_copies_have_weights_of_their_own(chains):
    block, x = make_block()
    expected = block(x)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    for copied in (copy.deepcopy(block), torch.load(file, weights_only=False)):
        copied.experts.down_proj.global_scale *= 2
        chains.clear()
        assert torch.equal(copied(x), 2 * expected)
        assert not chains
    assert torch.equal(block(x), expected)


@torch.no_grad()
def test_modes(chains):
    block, x = make_block()
    expected = block(x)
    with torch.inference_mode():
        for _ in range(2):
            chains.clear()
            assert torch.equal(block(x), expected)
    assert not chains
    with FlopCounterMode(display=False):
        assert torch.equal(block(x), expected)
    with select.use_backend("reference"):
        block(x)
    assert torch.equal(torch.vmap(block)(x[None])[0], expected)
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x), expected)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        out = block(leaf)
        assert torch.equal(out, expected)
        out.sum().backward()
    assert leaf.grad.abs().sum() > 0
    with torch.autocast("cpu", BF16):  # under which the router's own forward runs
        assert torch.equal(block(x), by_functions(block, x))


def stack_of(*sizes):
    """Return a stack in layout "linear" of a module that calls its parts, the module, and an input."""

    class Parent(nn.ModuleList):
        def forward(self, x):
            return [part(x) for part in self[1:]]

    linears = [nn.Linear(64, size, bias=True, dtype=BF16) for size in sizes]
    stack = NVFP4LinearStack.from_linear(*linears, layout="linear")
    parent = Parent([stack, *(NVFP4LinearPart(stack, index) for index in range(len(sizes)))])
    stack.share_in(parent)
    return stack, parent, torch.randn(1, 2, 64, dtype=BF16)


@torch.no_grad()
def test_dense_layers(chains):
    layer = NVFP4Linear.from_linear(nn.Linear(64, 32, dtype=BF16), layout="linear")
    other = NVFP4Linear.from_linear(nn.Linear(64, 32, dtype=BF16), layout="linear")
    for shape in ((64,), (1, 64), (2, 3, 64)):
        x = torch.randn(shape, dtype=BF16)
        layer(x)
        chains.clear()
        result = layer(x)
        assert not chains
        assert torch.equal(result, by_functions(layer, x))
    strided = torch.randn(64, 2, dtype=BF16).t()
    shifted = torch.randn(129, dtype=BF16)[1:].view(2, 64)
    for x in (strided, shifted, torch.randn(2, 64), torch.empty(0, 64, dtype=BF16)):
        layer(x)
        assert torch.equal(layer(x), by_functions(layer, x))
    x = torch.randn(1, 64, dtype=BF16)
    layer.set_weight(other.packed_weight)
    layer.bias = other.bias
    assert torch.equal(layer(x), other(x))
    layer.bias = None
    assert torch.equal(layer(x), by_functions(layer, x))
    nn.utils.parametrize.register_parametrization(other, "bias", Plus())
    assert torch.equal(other(x), by_functions(other, x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with pytest.raises(ValueError, match="activation"):
        layer(torch.randn(1, 48, dtype=BF16))


@torch.no_grad()
def test_stacks_share_a_call(chains):
    stack, parent, x = stack_of(32, 16, 16)

    def expected():
        return by_functions(NVFP4Linear.forward, stack, x).split((32, 16, 16), -1)

    called = []
    handle = stack.register_forward_hook(lambda *_: called.append(1))
    for _ in range(2):
        assert all(map(torch.equal, parent(x), expected()))
    assert len(called) == 2
    handle.remove()
    x += 1
    stack.bias += 1
    assert all(map(torch.equal, parent(x), expected()))
    stack.set_weight(stack_of(32, 16, 16)[0].packed_weight)
    assert all(map(torch.equal, parent(x), expected()))
    assert torch.equal(parent[2](x), expected()[1])
