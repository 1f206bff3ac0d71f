"""quantize_(model, linears=...): which dense layers become 4-bit, what is stacked, what stays 16-bit and why.
Called by pytest; judged by the model with the dequantized weights.
"""

import copy
import io
import logging

import pytest
import torch
import torch.nn.functional as F
from dense_calls import DenseCalls as Calls
from oracle import dequantize, relative_error
from torch import nn

from thunder_moe import Llama4MoE, Llama4MoEConfig, NVFP4Linear, dequantize_, quantize_, refresh_, to_layout_
from thunder_moe.dense_names import READ_TOGETHER_BY
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels import dense
from thunder_moe.nn.linear import NVFP4LinearPart, NVFP4LinearStack

X = torch.linspace(-3, 3, 2 * 5 * 64).sin().view(2, 5, 64)


def everything(module, name):
    return True


def no_experts(module, name):
    return type(module) is nn.Linear


class Attention(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(64, 32, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(64, 64, bias=bias)

    def forward(self, x, scale=1.0):
        shape = x.shape[:-1]
        q = self.q_proj(x).view(*shape, 2, 32)
        k = self.k_proj(x).view(*shape, 1, 32)
        v = self.v_proj(x).view(*shape, 1, 32)
        return x + self.o_proj((q * scale + k).tanh().flatten(-2) + v.expand_as(q).flatten(-2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, tie=False, bias=False):
        super().__init__()
        self.embed = nn.Embedding(48, 64)
        self.attention, self.mlp = Attention(bias), MLP()
        self.router = nn.Linear(64, 4)
        self.moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=2))
        self.head = nn.Linear(64, 48, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.attention(x)
        x = x + self.mlp(x)
        return self.head(x + self.moe(x) * self.router(x).sigmoid().mean(-1, keepdim=True))


def make(**options):
    torch.manual_seed(0)
    return Model(**options).eval()


@pytest.fixture(autouse=True)
def known_classes(monkeypatch):
    """The classes of this file, as users add their own."""
    monkeypatch.setitem(READ_TOGETHER_BY, (__name__, "Attention"), ("q_proj", "k_proj", "v_proj"))
    monkeypatch.setitem(READ_TOGETHER_BY, (__name__, "MLP"), ("gate_proj", "up_proj"))


def kinds(model):
    kinds = (nn.Linear, NVFP4Linear, NVFP4LinearPart)
    return {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, kinds)}


def test_computes_what_the_dequantized_model_does_once_for_all_that_read_the_same_rows():
    model = make(bias=True)
    before = model(X)
    quantize_(model, linears=everything)
    found = kinds(model)
    assert found["attention.q_proj"] == found["mlp.up_proj"] == "NVFP4LinearPart"
    assert found["attention.qkv_proj"] == found["mlp.gate_up_proj"] == "NVFP4LinearStack"
    assert found["moe.shared_expert.gate_up_proj"] == "NVFP4LinearStack"
    assert found["attention.o_proj"] == found["mlp.down_proj"] == found["head"] == "NVFP4Linear"
    assert found["router"] == "Linear"
    assert type(model.moe.routed_experts).__name__ == "NVFP4GroupedSwiGLU"
    with Calls() as calls:
        out = model(X)
    assert calls.count == 7  # qkv, o; gate and up, down; those of the shared expert; the head
    assert 0.01 < relative_error(out, before) < 0.3
    back = dequantize_(copy.deepcopy(model))
    assert kinds(back) == kinds(make())
    assert back.state_dict().keys() == make(bias=True).state_dict().keys()
    assert relative_error(back(X), out) < 1e-5


def test_stacked_weights_share_a_global_scale():
    model, plain = make(), make().attention
    quantize_(model, linears=everything)
    attention = model.attention
    together = torch.cat([plain.q_proj.weight, plain.k_proj.weight, plain.v_proj.weight])
    weight = quantize(together[None])
    assert torch.equal(attention.qkv_proj.qdata, weight.qdata[0])
    assert attention.qkv_proj.global_scale.shape == ()
    assert torch.equal(attention.v_proj.packed_weight.qdata[0], weight.qdata[0, 96:])
    attention.q_proj(X)
    assert relative_error(attention.k_proj(X), X @ dequantize(*weight.tensors())[0, 64:96].T) < 1e-5


def test_a_filter_is_asked_about_linears_alone_and_about_no_router():
    asked, model = [], make()

    def linears(module, name):
        assert type(module) is nn.Linear
        asked.append(name)
        return name.startswith("attention")

    quantize_(model, filter=no_experts, linears=linears)
    assert set(asked) == {name for name in kinds(make()) if name not in ("router", "moe.router")}
    assert {name for name, kind in kinds(model).items() if kind == "NVFP4Linear"} == {"attention.o_proj"}
    assert type(model.moe.routed_experts).__name__ == "GroupedSwiGLU"
    quantize_(model, linears=everything)  # the others, later
    assert kinds(model)["head"] == "NVFP4Linear"
    assert type(model.moe.routed_experts).__name__ == "NVFP4GroupedSwiGLU"


def test_true_takes_what_is_large_enough_for_the_device_and_tells_what_stays(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "thunder_moe")
    model = quantize_(make(), linears=True)
    assert kinds(model) == kinds(make())
    assert "too small to be faster in 4 bits on a 'cpu' device" in caplog.text
    assert "attention.q_proj, attention.k_proj" in caplog.text
    # q, k and v count as one.
    monkeypatch.setitem(dense._LEAST_WEIGHTS, "cpu", 128 * 64)
    model = quantize_(make(), linears=True)
    assert {name for name, kind in kinds(model).items() if kind.startswith("NVFP4")} == {
        *(f"attention.{name}_proj" for name in ("q", "k", "v", "qkv")),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "gate_up", "down")),
    }


def test_the_log_tells_from_how_many_rows_on_layers_are_slower(caplog, monkeypatch):
    """By the size of what is computed at once, so q, k and v count as one; also for a function that chooses."""
    caplog.set_level(logging.INFO, "thunder_moe")
    classes = (64 * 64, dense.SlowerFrom(96, 25)), (1 << 62, dense.SlowerFrom(256, 7))
    monkeypatch.setitem(dense._SLOWER_FROM, ("nvfp4", "linear"), classes)
    monkeypatch.setitem(dense._SLOWER_FROM, ("mxfp8", "linear"), ((1 << 62, dense.SlowerFrom(32, 9)),))
    quantize_(make(), linears=lambda module, name: name.startswith("attention"))
    assert "slower in 4 bits than in 16 at 96 rows and more, by up to 25 %: attention.o_proj;" in caplog.text
    assert "at 256 rows and more, by up to 7 %: attention.q_proj, attention.k_proj, attention.v_proj;" in caplog.text
    quantize_(make(), linears=lambda module, name: name == "attention.o_proj", format="mxfp8")
    assert "slower in 8 bits than in 16 at 32 rows and more, by up to 9 %: attention.o_proj;" in caplog.text


def test_true_leaves_encoders_and_what_has_no_kernel(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "thunder_moe")
    monkeypatch.setitem(dense._LEAST_WEIGHTS, "cpu", 1)
    model = nn.ModuleDict(dict(vision_tower=MLP(), text=MLP(), odd=nn.Linear(24, 16), wide=nn.Linear(16, 16).double()))
    found = kinds(quantize_(model, linears=True))
    assert {name for name, kind in found.items() if kind == "NVFP4Linear"} == {"text.down_proj"}
    assert "stays 16-bit: odd: its in_features are not a multiple of 16" in caplog.text
    assert "stays 16-bit: wide: its weight is float64" in caplog.text
    monkeypatch.setattr(dense, "select", lambda device: dense)  # anything that is not the reference
    assert dense.why_slower(torch.device("cuda"), torch.bfloat16, 4096, 4096) is None
    assert "float32" in dense.why_slower(torch.device("cuda"), torch.float32, 4096, 4096)
    assert "no kernel" in dense.why_slower(torch.device("mps"), torch.bfloat16, 4096, 4096)
    # The kernels of the tiled layout are faster than bf16 in smaller layers than those of the other.
    assert "too small" in dense.why_slower(torch.device("cuda"), torch.bfloat16, 2048, 2048)
    monkeypatch.setattr(dense, "preferred_layout", lambda *_: "tiled_64x64")
    assert dense.why_slower(torch.device("cuda"), torch.bfloat16, 2048, 2048) is None
    assert "too small" in dense.why_slower(torch.device("cuda"), torch.bfloat16, 512, 512)


def test_a_tied_head_stays_16_bit_and_tied(caplog):
    caplog.set_level(logging.INFO, "thunder_moe")
    model = quantize_(make(tie=True), linears=everything)
    assert kinds(model)["head"] == "Linear"
    assert model.head.weight is model.embed.weight
    assert "stays 16-bit: head: its weight is tied to the weight of embed" in caplog.text


def test_weights_side_by_side_in_one_storage_are_not_tied():
    model = make()
    both = torch.randn(2, 64, 64)
    model.attention.q_proj.weight.data, model.attention.o_proj.weight.data = both
    model.mlp.gate_proj.weight.data = both.view(128, 64)[64:].repeat(2, 1)
    quantize_(model, linears=everything)
    assert type(model.attention.o_proj) is NVFP4Linear
    model = make()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.attention.q_proj.weight.data = both[0]
    model.attention.o_proj.weight.data = both.view(128, 64)[32:96]  # overlaps
    quantize_(model, linears=everything)
    assert type(model.attention.q_proj) is type(model.attention.o_proj) is nn.Linear


def lora(model):
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return 2 * self.base(x)

    model.mlp.up_proj = LoRA(model.mlp.up_proj)


def own_class(model):
    class Loud(nn.Linear):
        pass

    model.mlp.up_proj.__class__ = Loud


def hook(model):
    model.mlp.up_proj.register_forward_hook(lambda *_: None)


def own_forward(model):
    model.mlp.up_proj.forward = lambda x: x


def norm(model):
    nn.utils.parametrizations.weight_norm(model.mlp.up_proj)


def extra(model):
    model.mlp.up_proj.extra = nn.Parameter(torch.zeros(1))


CHANGES = {
    "subclass": (own_class, "it is a Loud, not a Linear itself"),
    "hook": (hook, "it has forward hooks"),
    "own forward": (own_forward, "its forward is wrapped or replaced"),
    "weight norm": (norm, "its weight is parametrized"),
    "parameter": (extra, "it has the parameter extra more or less than a Linear"),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES.keys())
def test_what_has_anything_of_its_own_stays_and_its_siblings_are_alone(change, reason, caplog):
    model = make()
    change(model)
    expected = model.mlp.up_proj
    quantize_(model, linears=everything)
    assert model.mlp.up_proj is expected
    assert reason in caplog.text
    assert "mlp.up_proj" in caplog.text
    assert type(model.mlp.gate_proj) is NVFP4Linear
    if change is hook:
        calls = []
        model.mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
        model(X)
        assert calls


def test_a_wrapped_linear_becomes_4_bit_inside_of_its_wrapper():
    model = make()
    lora(model)
    quantize_(model, linears=everything)
    assert type(model.mlp.up_proj.base) is NVFP4Linear
    assert torch.isfinite(model(X)).all()


def test_a_weight_that_code_of_models_reads_stays(caplog):
    caplog.set_level(logging.INFO, "thunder_moe")
    model = nn.ModuleDict(dict(mamba=nn.ModuleDict(dict(out_proj=nn.Linear(64, 64), in_proj=nn.Linear(64, 64)))))
    assert kinds(quantize_(model, linears=everything)) == {"mamba.out_proj": "Linear", "mamba.in_proj": "NVFP4Linear"}
    assert "mamba.out_proj: the code of the models that have such a layer reads its weight itself" in caplog.text


def test_a_class_that_is_not_listed_computes_its_linears_one_by_one(caplog):
    class Own(MLP):
        def forward(self, x):
            gate = self.gate_proj(x)
            return self.down_proj(F.silu(gate) * self.up_proj(2 * x))

    class Named(MLP):
        pass

    caplog.set_level(logging.INFO, "thunder_moe")
    model = quantize_(nn.Sequential(Own(), Named()), linears=everything)
    assert type(model[0].gate_proj) is NVFP4Linear
    assert type(model[1].gate_proj) is NVFP4LinearPart  # its forward is the one of a class that is listed
    assert "one by one in eager mode: gate_proj, up_proj of Own" in caplog.text
    assert "Named" not in caplog.text
    assert torch.equal(model[0].gate_proj.global_scale, model[0].up_proj.global_scale)  # as engines merge them
    with torch.no_grad():
        expected = dequantize_(copy.deepcopy(model))(X)
        assert relative_error(model(X), expected) < 1e-5


def test_linears_of_which_one_is_elsewhere_too_compute_the_same():
    model = make()
    model.again = model.attention.k_proj
    quantize_(model, linears=everything)
    assert model.again is model.attention.k_proj
    alone = NVFP4Linear.from_linear(make().attention.k_proj)
    assert relative_error(model.again(X), alone(X)) < 1e-6
    assert torch.isfinite(model(X)).all()


def test_state_dicts_copies_layouts_casts_and_refresh():
    model = quantize_(make(), linears=everything)
    expected = model(X)
    torch.manual_seed(5)
    other = quantize_(Model().eval(), linears=everything)
    assert relative_error(other(X), expected) > 0.1
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), expected)
    assert "attention.qkv_proj.qdata" in model.state_dict()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for copied in (loaded, copy.deepcopy(model), refresh_(model)):
        assert torch.equal(copied(X), expected)
    to_layout_(loaded, "linear")
    assert relative_error(loaded.to(torch.bfloat16)(X.bfloat16()), expected) < 0.05
    assert loaded.attention.qkv_proj.qdata.dtype == torch.uint8


def test_modules_of_layout_auto_take_what_the_device_prefers(tiles):
    model = quantize_(make(), linears=everything)
    assert model.attention.qkv_proj.layout == model.attention.o_proj.layout == "tiled_64x64"
    assert model.head.layout == "linear"
    expected = dequantize_(copy.deepcopy(model))(X)
    assert relative_error(model(X), expected) < 1e-5
    with pytest.raises(ValueError, match="layout: got 'tiled_64x64' for 'moe.shared_expert.down_proj'"):
        quantize_(make(), filter=no_experts, linears=everything, layout="tiled_64x64")


def test_dtype_and_requires_grad_come_back():
    model = make()
    model.attention.k_proj.weight.requires_grad_(False)
    model.attention.q_proj.train()
    quantize_(model, linears=everything).to(torch.bfloat16)
    dequantize_(model)
    attention = model.attention
    assert [attention.q_proj.weight.requires_grad, attention.k_proj.weight.requires_grad] == [True, False]
    assert attention.q_proj.weight.dtype == torch.bfloat16
    assert attention.q_proj.training
    assert not attention.k_proj.training


def test_part_of_a_stack_that_has_a_hook_stays_when_the_others_go_back(caplog):
    model = quantize_(make(), linears=everything)
    expected = model(X)
    model.attention.k_proj.register_forward_hook(lambda *_: None)
    dequantize_(model)
    assert not model.mlp._forward_pre_hooks
    assert not model.mlp._forward_hooks
    found = kinds(model)
    assert (found["attention.q_proj"], found["attention.k_proj"]) == ("Linear", "NVFP4LinearPart")
    assert found["attention.qkv_proj"] == "NVFP4LinearStack"
    assert relative_error(model(X), expected) < 1e-5


def test_gradients_reach_what_is_in_front():
    model = quantize_(make(bias=True), linears=everything)
    reference = dequantize_(copy.deepcopy(model))
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((model, reference), inputs, strict=True):
        each(x).square().sum().backward()
    assert relative_error(inputs[0].grad, inputs[1].grad) < 1e-4
    assert model.attention.qkv_proj.bias.grad is not None


def test_compiles_without_a_graph_break():
    model = quantize_(make(), linears=everything)
    calls = []

    def backend(graph, inputs):
        calls.append(sum("scaled_mm" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert torch.equal(compiled(X), compiled(X))
        assert relative_error(compiled(X), model(X)) < 1e-5
    assert calls == [7]


def test_a_model_without_experts():
    model = quantize_(nn.Sequential(MLP()), linears=everything)
    assert type(model[0].gate_up_proj) is NVFP4LinearStack
    with pytest.raises(ValueError, match="found no .*nn.Linear"):
        quantize_(model, linears=everything)


def test_refuses_and_leaves_the_model_unchanged():
    with pytest.raises(ValueError, match="linears: 'all' fits no dense layer of Model"):
        quantize_(make(), linears="all")
    for change, message in (
        (lambda model: model.head.weight.data.fill_(float("nan")), "'head' has NaN or Inf"),
        (lambda model: setattr(model, "head", nn.Linear(24, 16)), "'head' has in_features 24"),
        (lambda model: model.head.to("meta"), "'head' is on the meta device"),
        (lambda model: model.head.double(), "'head' has a weight of torch.float64"),
    ):
        model = make()
        change(model)
        with pytest.raises(ValueError, match=message):
            quantize_(model, linears=everything)
        assert set(kinds(model).values()) == {"Linear"}
    with pytest.raises(ValueError, match="got a bare Linear"):
        quantize_(nn.Linear(64, 64), linears=everything)


def test_hooks_of_accelerate_survive():
    hooks = pytest.importorskip("accelerate.hooks")
    model = make()
    for linear in (model.attention.q_proj, model.attention.k_proj, model.attention.v_proj, model.mlp.down_proj):
        hooks.add_hook_to_module(linear, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    expected = quantize_(make(), linears=everything)(X)
    quantize_(model, linears=everything)
    assert torch.equal(model(X), expected)
    assert hasattr(model.mlp.down_proj, "_hf_hook")
    assert hasattr(model.attention.qkv_proj, "_hf_hook")
    dequantize_(model)
    assert hasattr(model.attention.k_proj, "_hf_hook")
    assert relative_error(model(X), expected) < 1e-5
