"""transformers' routers in one operator: which are recognized, results and gradients, hooks, the order of rows that
they pass on, pickling, and the way back.
Called by pytest; judged by the routers' own forward.
"""

import copy
import importlib.util
import io
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fast_cases import one_of_each
from oracle import relative_error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from router_probes import assert_computes
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens

from thunder_moe import batch_invariant, dequantize_, quantize_
from thunder_moe.integrations.huggingface import routers
from thunder_moe.integrations.huggingface.known_code import NEWEST, tell, unknown_version
from thunder_moe.integrations.huggingface.router_table import ROUTERS
from thunder_moe.integrations.huggingface.routers import (
    FusedRouter,
    RowOrders,
    fuse_routers,
    fused_call,
    restore_routers,
)

E, H, A = 32, 48, 4
CONFIG = dict(
    num_experts_per_tok=A, num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, moe_k=A,
    hidden_size=H, norm_topk_prob=True, routed_scaling_factor=2.5, router_scaling_factor=2.5, n_group=4, topk_group=2,
    moe_norm_min=1e-12, topk_method="group_limited_greedy", moe_topk=A, use_expert_bias=True,
    expert_selection_fn="sigmoid", moe_router_logit_softcapping=0.0,
)  # fmt: skip
# Module, class, other settings, and what the operator is to be asked for.
FUSED = [
    ("qwen3_moe", "Qwen3MoeTopKRouter", {}, dict(score="softmax", normalize=True)),
    ("qwen3_moe", "Qwen3MoeTopKRouter", dict(norm_topk_prob=False), dict(score="softmax", normalize=False)),
    ("olmoe", "OlmoeTopKRouter", dict(norm_topk_prob=False), dict(score="softmax", normalize=False)),
    ("mixtral", "MixtralTopKRouter", {}, dict(score="softmax", normalize=True)),
    ("gpt_oss", "GptOssTopKRouter", {}, dict(score="softmax", normalize=True)),
    ("granitemoe", "GraniteMoeTopKRouter", {}, dict(score="softmax", normalize=True)),
    ("deepseek_v2", "DeepseekV2TopkRouter", {}, dict(normalize=False, scale=2.5, num_groups=4, group_best=1)),
    ("deepseek_v2", "DeepseekV2TopkRouter", dict(topk_method="greedy"), dict(normalize=False, num_groups=1)),
    ("deepseek_v3", "DeepseekV3TopkRouter", {}, dict(score="sigmoid", epsilon=1e-20, scale=2.5, num_groups=4)),
    ("deepseek_v3", "DeepseekV3TopkRouter", dict(n_group=1, topk_group=1), dict(score="sigmoid", num_groups=1)),
    ("glm4_moe", "Glm4MoeTopkRouter", dict(norm_topk_prob=False), dict(score="sigmoid", normalize=False, scale=2.5)),
    ("minimax_m2", "MiniMaxM2TopKRouter", {}, dict(score="sigmoid", epsilon=0.0)),
    ("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", {}, dict(score="softmax", normalize=True)),
]
LEFT = [  # 16-bit sigmoids, whose rounding decides the choice, and another function of the logits
    ("lfm2_moe", "Lfm2MoeTopKRouter", {}),
    ("cohere2_moe", "Cohere2MoeTopKRouter", {}),
    ("laguna", "LagunaTopKRouter", dict(moe_router_logit_softcapping=30.0)),
]
# Settings in which the classes of the table compute different things.
VARIED = [
    {},
    dict(norm_topk_prob=False),
    dict(n_group=1, topk_group=1),
    dict(n_group=8, topk_group=3, routed_scaling_factor=0.7, router_scaling_factor=1.5),
    dict(topk_method="greedy"),
    dict(num_experts_per_tok=1),
    dict(expert_selection_fn="softmax", moe_norm_min=0.2),
]


def make(name, kind, settings, dtype=torch.float32):
    """(a layer with a stock router of random weights, the correction that its forward takes as an argument)."""
    path = f"transformers.models.{name}.modeling_{name}"
    known = ROUTERS.get((path, kind))
    if known is not None and unknown_version(known.since):
        pytest.skip("computes something else in this transformers")
    if importlib.util.find_spec(f"transformers.models.{name}") is None:
        pytest.skip(f"this transformers has no {name}")
    module = importlib.import_module(path)
    config = SimpleNamespace(**CONFIG | settings)
    if not hasattr(module, kind):
        pytest.skip(f"this transformers has no {kind}")
    router = getattr(module, kind)(config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*router.parameters(), *router.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * H**-0.5)
    layer = type("Layer", (nn.Module,), {"__module__": module.__name__})()
    layer.gate = router
    return layer, [torch.linspace(-0.5, 0.5, E)] if kind.startswith("MiniMaxM2") else []


def states(dtype=torch.float32, count=50):
    return (3 * torch.randn(count, H, generator=torch.Generator().manual_seed(2))).to(dtype)


def stored(thing):
    """What torch.load gives of what torch.save has written."""
    file = io.BytesIO()
    torch.save(thing, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


class Called(TorchDispatchMode):
    """Counts the calls of the routing operators; experts without an order of rows sort the slots, as moe_route does."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "thunder_moe" and "moe_rout" in str(function):
            self.names.append(function._schema.name.partition("::")[2])
        if (
            function.namespace == "thunder_moe"
            and "moe_experts" in str(function)
            and not any(argument is not None for argument in args[11:14])
        ):
            self.names.append("moe_route")
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind", "settings", "options"), FUSED)
def test_a_router_of_transformers(name, kind, settings, options, dtype):
    layer, correction = make(name, kind, settings, dtype)
    own, hidden = copy.deepcopy(layer.gate), states(dtype)
    assert fuse_routers(layer, RowOrders())
    assert isinstance(layer.gate, FusedRouter)
    assert isinstance(layer.gate, type(own))
    form = asdict(layer.gate.router_call.form)
    assert {key: form[key] for key in options} == options
    with Called() as called:
        logits, scores, ids = layer.gate(hidden, *correction)
    assert called.names == ["moe_router"]
    own_logits, own_scores, own_ids = own(hidden, *correction)
    assert torch.equal(logits, own_logits)
    assert (scores.dtype, scores.shape, ids.dtype) == (own_scores.dtype, own_scores.shape, own_ids.dtype)
    # Some ask torch.topk for no order; bf16 logits have equal ones, of which it may take any.
    dense, own_dense = (torch.zeros(50, E).scatter(1, i, s.float()) for i, s in ((ids, scores), (own_ids, own_scores)))
    same = (ids.sort(-1).values == own_ids.sort(-1).values).all(-1)
    assert same.float().mean() > (0.999 if dtype == torch.float32 else 0.9)
    assert torch.allclose(dense[same], own_dense[same], rtol=2e-6 if scores.dtype == torch.float32 else 2**-7)
    with torch.no_grad():
        chosen = own_logits.gather(1, ids).float().sort(-1).values
        others = own_logits.gather(1, own_ids).float().sort(-1).values
    if "bias" not in str(layer.gate.router_call.kind.bias) and not correction and options.get("num_groups", 1) == 1:
        assert torch.equal(chosen, others)


@pytest.mark.parametrize(("name", "kind", "settings", "options"), FUSED)
def test_gradients_of_a_router(name, kind, settings, options):
    layer, correction = make(name, kind, settings)
    own, hidden = copy.deepcopy(layer.gate), states()
    fuse_routers(layer, RowOrders())
    grad = torch.randn(50, E)
    results = []
    for router in (layer.gate.train(), own.train()):
        x = hidden.clone().requires_grad_()
        logits, scores, ids = router(x, *correction)
        (torch.zeros(50, E).scatter(1, ids, scores) * grad).sum().add(logits.logsumexp(-1).sum()).backward()
        results.append([x.grad, *(parameter.grad for parameter in router.parameters() if parameter.requires_grad)])
    for actual, expected in zip(*results, strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize(("name", "kind", "settings"), LEFT)
def test_other_routers_stay(name, kind, settings):
    layer, _ = make(name, kind, settings)
    assert not fuse_routers(layer, RowOrders())
    assert not isinstance(layer.gate, FusedRouter)


# One class of each row: the classes of a row are copies in transformers, and `make test-matrix` runs all of them.
@pytest.mark.parametrize(("row", "module", "kind"), one_of_each((row, *name) for name, row in ROUTERS.items()))
def test_each_class_of_the_table_computes_what_it_says(row, module, kind):
    found = 0
    for settings in VARIED:
        layer, _ = make(module.split(".")[2], kind, settings)
        call = fused_call(layer.gate)
        if call is not None:
            assert_computes(call, layer.gate)
            found += 1
    assert found == len(VARIED) or kind == "Cohere2MoeTopKRouter"


def test_versions_of_transformers_that_the_table_does_not_know_keep_their_routers(monkeypatch, caplog):
    """Of all that is installed it knows: `NEWEST` moves with a new version, once these tests pass with that."""
    caplog.set_level("INFO", "thunder_moe")
    assert not unknown_version()
    layer, _ = make(*FUSED[0][:3])
    for version in ("5.6.2", f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev0"):
        monkeypatch.setattr("transformers.__version__", version)
        assert not fuse_routers(layer, RowOrders())
    assert "Qwen3MoeTopKRouter keeps its own operations, slower in eager code" in caplog.text
    assert {record.levelname for record in caplog.records if "slower" in record.message} == {"WARNING"}


def test_routers_that_somebody_has_changed_stay(monkeypatch):
    layer, _ = make(*FUSED[0][:3])
    layer.gate.forward = lambda hidden_states: None
    assert not fuse_routers(layer, RowOrders())
    layer, _ = make(*FUSED[0][:3])
    layer.gate.__class__ = type("Other", (type(layer.gate),), {"__module__": type(layer.gate).__module__})
    assert not fuse_routers(layer, RowOrders())
    layer, _ = make(*FUSED[0][:3])
    monkeypatch.setattr(type(layer.gate), "forward", lambda self, hidden_states: None)
    assert not fuse_routers(layer, RowOrders())


def test_the_log_tells_what_became_of_each_class(caplog):
    caplog.set_level("INFO", "thunder_moe")
    tell.cache_clear()
    for _ in range(2):
        fuse_routers(make(*FUSED[0][:3])[0], RowOrders())
        fuse_routers(make(*LEFT[0])[0], RowOrders())
    assert caplog.text.count("router Qwen3MoeTopKRouter runs moe_router, RouterConfig(top_k=4") == 1
    assert caplog.text.count("router Lfm2MoeTopKRouter keeps its own operations") == 1


def test_a_setting_changed_later_counts():
    layer, _ = make(*FUSED[0][:3])
    fuse_routers(layer, RowOrders())
    layer.gate.top_k = 2
    with Called() as called:
        assert layer.gate(states())[2].shape == (50, 2)
    assert called.names == []
    layer.gate.top_k = A
    with Called() as called, torch.autocast("cpu", dtype=torch.bfloat16):
        layer.gate(states())
    assert called.names == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_quantize_fuses_the_routers_of_a_model(name):
    model = tiny_model(name, torch.bfloat16)
    keys = [key for key in model.state_dict() if "experts" not in key]
    kinds = {path: type(module) for path, module in model.named_modules() if "outer" in type(module).__name__}
    quantize_(model)
    assert [key for key in model.state_dict() if "experts" not in key] == keys
    layers = len(ARCHITECTURES[name][2])
    with torch.no_grad(), Called() as called:
        out = model(tokens()).logits
    assert called.names == ["moe_router"] * layers
    for again in (copy.deepcopy(model), stored(model)):
        with torch.no_grad(), Called() as called:
            assert torch.equal(again(tokens()).logits, out)
        assert called.names == ["moe_router"] * layers
    own = copy.deepcopy(model)
    for module in own.modules():
        if name == "llama4" and type(module).__name__ == "RoutedLlama4Router":
            module.__class__ = kinds["model.layers.0.feed_forward.router"]
        restore_routers(module)
    with torch.no_grad(), Called() as called:
        assert relative_error(own(tokens()).logits, out) < 5e-3
    assert called.names == ["moe_route"] * layers
    dequantize_(model)
    assert {path: type(model.get_submodule(path)) for path in kinds} == kinds
    for path in kinds:
        assert not {"router_call", "router_options", "row_orders"} & vars(model.get_submodule(path)).keys()


def test_router_logits_are_recorded_and_routers_train():
    config = tiny_config("qwen3_moe")
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    model = quantize_(tiny_model("qwen3_moe", config=config).train())
    own = copy.deepcopy(model)
    for layer in own.modules():
        restore_routers(layer)
    results = []
    for each in (model, own):
        out = each(tokens(), labels=tokens())
        out.loss.backward()
        weights = [parameter.grad for path, parameter in each.named_parameters() if path.endswith("gate.weight")]
        results.append((out.loss, out.aux_loss, *out.router_logits, *weights))
    assert len(results[0]) == 6
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-5


def test_a_hook_that_changes_the_ids_is_heard():
    model = quantize_(tiny_model("qwen3_moe"))
    (first, second) = (module for module in model.modules() if isinstance(module, FusedRouter))

    def other_ids(module, args, output):
        logits, scores, ids = output
        return logits, scores, (ids + 1) % 8

    def in_place(module, args, output):
        output[2].add_(1).remainder_(8)

    results = []
    for hook in (other_ids, in_place):
        handles = [router.register_forward_hook(hook) for router in (first, second)]
        with torch.no_grad(), Called() as called:
            results.append(model(tokens()).logits)
        assert called.names == ["moe_router", "moe_route"] * 2
        for handle in handles:
            handle.remove()
    assert torch.equal(*results)
    with torch.no_grad():
        assert relative_error(model(tokens()).logits, results[0]) > 1e-2
    with torch.inference_mode(), Called() as called:
        model(tokens())
    assert called.names == ["moe_router", "moe_route"] * 2


def test_ids_that_are_changed_in_place_in_a_compiled_graph_are_sorted():
    """By hooks of the experts, with and without a graph break behind it: no order of other ids is used."""

    def of_experts(module, args):
        args[1].add_(1).remainder_(8)

    def with_break(module, args):
        of_experts(module, args)
        torch._dynamo.graph_break()

    layer = quantize_(tiny_model("qwen3_moe")).model.layers[0].mlp
    x = torch.randn(2, 9, 64)
    for hook, fullgraph in ((of_experts, True), (with_break, False)):
        handle = layer.experts.register_forward_pre_hook(hook)
        torch._dynamo.reset()
        with torch.no_grad():
            expected = layer(x)
            compiled = torch.compile(layer, backend="eager", fullgraph=fullgraph)
            assert relative_error(compiled(x), expected) < 1e-5
        handle.remove()
    with torch.no_grad():
        assert relative_error(layer(x), expected) > 1e-2


def test_a_router_in_float64_runs_its_own_forward():
    layer, _ = make(*FUSED[0][:3], dtype=torch.float64)
    own = copy.deepcopy(layer.gate)
    assert fuse_routers(layer, RowOrders())
    for actual, expected in zip(layer.gate(states(torch.float64)), own(states(torch.float64)), strict=True):
        assert torch.equal(actual, expected)


def test_the_router_of_llama4_gives_hooks_and_callers_what_it_gave():
    model = tiny_model("llama4")
    x, seen = torch.randn(5, 64), []
    with torch.no_grad():
        stock = model.model.layers[0].feed_forward.router(x)
        quantize_(model)
        expected = model(tokens()).logits
        router = model.model.layers[0].feed_forward.router
        for actual, own in zip(router(x), stock, strict=True):
            assert torch.equal(actual, own)
        router.register_forward_hook(lambda module, args, output: seen.extend(output))
        assert relative_error(model(tokens()).logits, expected) < 1e-5
    assert [tuple(each.shape) for each in seen] == [(18, 8), (18, 8)]


def test_an_order_for_another_number_of_experts_is_not_taken():
    orders, ids = RowOrders(), torch.zeros(3, 2, dtype=torch.int64)
    orders.put(ids, (torch.zeros(6), torch.zeros(8), torch.zeros(3, 2)), nn.Module())
    assert orders.take(ids, 7) is None


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("llama4", marks=pytest.mark.exhaustive)])
def test_compiled_graphs_have_one_operator_for_it(name):
    model = quantize_(tiny_model(name))
    layer = model.model.layers[0]
    block, hidden = layer.feed_forward if name == "llama4" else layer.mlp, torch.randn(2, 9, 64)
    with torch.no_grad():
        expected = block(hidden)
        found = []

        def backend(graph, inputs):
            found.extend(
                str(node.target)
                for node in graph.graph.nodes
                if node.op == "call_function" and "router" in str(node.target)
            )
            return graph

        compiled = torch.compile(block, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(hidden), expected, rtol=1e-4, atol=1e-5)
    assert found == ["thunder_moe.moe_linear_router"]
    orders = [module.row_orders for module in model.modules() if hasattr(module, "row_orders")]
    assert len({id(order) for order in orders}) == 2
    assert all(order._last is None for order in orders)


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("llama4", marks=pytest.mark.exhaustive)])
def test_checkpoints_in_compiled_graphs(name):
    """Their bodies may not change Python objects, as eager layers pass on the order of rows, and outputs of stacks."""
    model = quantize_(tiny_model(name), linears=lambda module, name: True).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    layer, hidden = model.model.layers[0], torch.randn(2, 9, 64, requires_grad=True)
    rotations = model.model.rotary_emb(hidden, torch.arange(9)[None])
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = run(hidden, position_embeddings=rotations).square().mean()
        loss.backward()
        results.append([loss, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)])
    assert len(results[0]) > 1
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_float32_logits_of_16_bit_tensors_on_cuda(tokens):
    layer, _ = make("deepseek_v3", "DeepseekV3TopkRouter", {}, torch.bfloat16)
    own, hidden = copy.deepcopy(layer.gate).cuda(), states(torch.bfloat16, tokens).cuda()
    fuse_routers(layer.cuda(), RowOrders())
    with torch.no_grad():
        actual, expected = layer.gate(hidden), own(hidden)
    assert actual[0].dtype == torch.float32
    assert relative_error(actual[0], expected[0]) < 1e-5
    assert torch.equal(actual[2].sort(-1).values, expected[2].sort(-1).values)


def test_no_float32_copies_of_weights_only_in_eager_inference_on_cuda(monkeypatch):
    layer, _ = make("deepseek_v3", "DeepseekV3TopkRouter", {}, torch.bfloat16)
    hidden, multiplied = states(torch.bfloat16), []
    fuse_routers(layer, RowOrders())

    def mm(rows, weight, out_dtype):
        multiplied.append((rows.dtype, weight.dtype, out_dtype))
        return rows.float() @ weight.float()

    with torch.no_grad():
        expected = layer.gate(hidden)
        monkeypatch.setattr(torch, "mm", mm)
        layer.gate(hidden)
        assert multiplied == []
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        assert torch.equal(layer.gate(hidden)[1], expected[1])
        layer.gate(hidden.float())
    layer.gate(hidden)  # with gradients
    assert multiplied == [(torch.bfloat16, torch.bfloat16, torch.float32)]


@pytest.mark.parametrize(("name", "kind", "settings", "options"), FUSED)
def test_with_its_linear_layer_in_one_operator(monkeypatch, name, kind, settings, options):
    """What inference on CUDA runs."""
    layer, more = make(name, kind, settings, torch.bfloat16)
    hidden = states(torch.bfloat16)
    assert fuse_routers(layer, RowOrders())
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(str(function))
            return function(*args, **kwargs or {})

    with torch.no_grad():
        wanted = layer.gate(hidden, *more)
        monkeypatch.setattr(routers, "is_one_operator", lambda hidden, weight: True)
        with Calls():
            found = layer.gate(hidden, *more)
    if layer.gate.router_call.kind.logits_float:
        assert "thunder_moe.moe_linear_router.default" not in called
    else:
        assert called.count("thunder_moe.moe_linear_router.default") == 1
        assert "thunder_moe.moe_router.default" not in called
    for result, other in zip(found, wanted, strict=True):
        assert torch.equal(result, other)
        assert result.dtype == other.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "kind", "settings", "options"), FUSED)
@torch.no_grad()
def test_batch_invariant(name, kind, settings, options, dtype):
    """The linear layer of the router, too, gives a token the same bits among others."""
    layer, more = make(name, kind, settings, dtype)
    hidden = torch.randn(67, H, dtype=dtype)
    wanted = layer.gate(hidden, *more)
    assert fuse_routers(layer, RowOrders())
    with batch_invariant():
        whole = layer.gate(hidden, *more)
        for tokens_of in (slice(5, 6), slice(5, 12), torch.arange(67).flip(0)):
            for some, every in zip(layer.gate(hidden[tokens_of], *more), whole, strict=True):
                assert torch.equal(some, every[tokens_of])
    for result, other in zip(whole, wanted, strict=True):
        assert result.dtype == other.dtype


def test_one_operator_with_the_linear_layer_is_for_inference_on_cuda_and_in_graphs(monkeypatch):
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)

    def on_cuda(dtype=torch.bfloat16, tokens=3):
        return SimpleNamespace(is_cuda=True, dtype=dtype, shape=(tokens, 8), device=torch.device("cuda"))

    with torch.no_grad():
        assert routers.is_one_operator(on_cuda(), weight)
        assert not routers.is_one_operator(on_cuda(tokens=4), weight)  # eager: a linear layer and moe_router
        assert not routers.is_one_operator(weight, weight)
        assert not routers.is_one_operator(on_cuda(torch.float16), weight)
        assert not routers.is_one_operator(on_cuda(torch.float32), weight.float())
        with batch_invariant():
            assert not routers.is_one_operator(on_cuda(), weight)  # else the bits would depend on the number of tokens
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert routers.is_one_operator(weight.float(), weight.float())
        assert not routers.is_one_operator(weight.double(), weight.double())
    assert not routers.is_one_operator(on_cuda(), weight)


def test_experts_take_the_order_of_the_one_operator_in_compiled_graphs(monkeypatch):
    model, ids = quantize_(tiny_model("llama4", config=tiny_config("llama4", layers=1))), tokens()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        wanted = model(ids).logits
        for module in (routers, importlib.import_module("thunder_moe.integrations.huggingface.llama4")):
            monkeypatch.setattr(module, "is_one_operator", lambda hidden, weight: True)
        found = torch.compile(model, fullgraph=True, backend=backend)(ids).logits
    (code,) = graphs
    assert code.count("moe_linear_router") >= 1
    assert "moe_route(" not in code
    assert "moe_router(" not in code
    assert relative_error(found, wanted) < 1e-5


def test_llama4s_router_under_autocast_in_a_compiled_graph():
    layer = tiny_model("llama4").model.layers[0].feed_forward
    routed, x = copy.deepcopy(layer), torch.randn(1, 9, layer.hidden_dim)
    llama4 = importlib.import_module("thunder_moe.integrations.huggingface.llama4")
    llama4.route_layer(routed, RowOrders())
    choose = torch.compile(routed.router.choose, fullgraph=True, backend="eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        wanted, logits = layer.router(x[0])
        scores, own_logits, ids = choose(x[0])
    assert own_logits.dtype == logits.dtype == scores.dtype == torch.bfloat16
    assert torch.equal(own_logits, logits)
    assert torch.equal(scores, wanted.gather(1, ids))
    assert torch.equal(ids.sort()[0], logits.topk(ids.shape[1])[1].sort()[0])


def test_a_model_on_meta_runs():
    """Autocast knows no such device; shapes are counted there."""
    model = quantize_(tiny_model("qwen3_moe"), linears=lambda module, name: "self_attn" in name).to("meta")
    logits = model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).logits
    assert logits.is_meta
    assert logits.shape[:2] == (2, 5)
