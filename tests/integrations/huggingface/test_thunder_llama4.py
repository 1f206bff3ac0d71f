"""Llama 4's stock layer under Thunder: routed instead of dense, rewritten, right, differentiable; others left alone.
Called by pytest; judged by transformers' own dense layer.
"""

import copy
import sys
import warnings

import pytest
import torch
from interpreters import OF_TRANSFORMERS, fresh_python
from oracle import relative_error

transformers = pytest.importorskip("transformers")

import thunder  # noqa: E402
from transformers.models.llama4 import modeling_llama4  # noqa: E402
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe  # noqa: E402

from thunder_moe import RewriteWarning, dequantize_, moe_executor, quantize_, rewrite_report  # noqa: E402
from thunder_moe.compilers.thunder.lookasides import LateLookasides  # noqa: E402
from thunder_moe.integrations.huggingface import thunder_llama4 as llama4  # noqa: E402

BF16 = torch.bfloat16


def make_layer(top_k=1):
    sizes = dict(hidden_size=64, intermediate_size=32, intermediate_size_mlp=48)
    layer = Llama4TextMoe(Llama4TextConfig(num_local_experts=4, num_experts_per_tok=top_k, **sizes)).to(BF16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.1)
    return layer


def decoded(layer):
    return dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(layer))))[0]


@pytest.mark.parametrize("top_k", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_frozen_layer_is_rewritten(top_k):
    layer = make_layer(top_k).requires_grad_(False)
    compiled = thunder.jit(layer, executors=[moe_executor])
    x = torch.randn(2, 5, 64, dtype=BF16)
    out, logits = compiled(x)
    expected, expected_logits = decoded(layer)(x)
    assert relative_error(out, expected) < 0.01
    assert torch.equal(logits, expected_logits)
    report = rewrite_report(compiled)
    assert [(entry.gemm.weight, entry.decision) for entry in report] == [
        ("experts.gate_up_proj", "nvfp4 + swiglu"),
        ("experts.down_proj", "nvfp4"),
    ]
    assert {entry.gemm.rows for entry in report} == {10 * top_k}, "and not 4 times 10"


@pytest.mark.slow
def test_trainable_layer_gets_the_gradients_of_the_dense_one():
    layer = make_layer(2)
    x = torch.randn(2, 5, 64, dtype=BF16)
    grads = []
    for run in (layer, thunder.jit(layer, executors=[moe_executor])):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RewriteWarning)  # all of it trains
            out, _ = run(leaf)
        out.float().pow(2).sum().backward()
        grads.append({"x": leaf.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        assert relative_error(grads[1][name], expected) < 0.03, name


def test_eager_and_torch_compile_run_the_stock_layer(monkeypatch):
    monkeypatch.setattr(llama4, "run_routed", None)
    layer = make_layer().requires_grad_(False)
    assert Llama4TextMoe.forward.__code__.co_filename == modeling_llama4.__file__, "transformers' own"
    x = torch.randn(1, 3, 64, dtype=BF16)
    out, _ = layer(x)
    compiled, _ = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert torch.equal(compiled, out)


@pytest.mark.exhaustive
def test_thunder_with_other_executors_runs_the_stock_layer():
    layer, x = make_layer().requires_grad_(False), torch.randn(1, 3, 64, dtype=BF16)
    others = thunder.jit(layer, executors=thunder.get_default_executors())
    assert relative_error(others(x)[0], layer(x)[0]) < 0.01


@pytest.mark.slow
def test_a_router_of_ones_own_is_not_routed():
    layer = make_layer().requires_grad_(False)

    class Router(type(layer.router)):
        pass

    layer.router.__class__ = Router
    compiled = thunder.jit(layer, executors=[moe_executor, *thunder.get_default_executors()])
    x = torch.randn(1, 3, 64, dtype=BF16)
    with pytest.warns(RewriteWarning):
        out, _ = compiled(x)
    assert relative_error(out, layer(x)[0]) < 0.01


def test_the_executor_knows_the_layer_once_transformers_is_imported(monkeypatch):
    """Also where that is later than the executor, whose lookasides are completed whenever Thunder reads them."""
    executor, forward = LateLookasides("late"), Llama4TextMoe.forward
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, modeling_llama4.__name__)
        assert forward not in executor._lookasides
    assert executor._lookasides[forward] is llama4.LOOKASIDES[forward]
    assert isinstance(moe_executor, LateLookasides)


@pytest.mark.exhaustive  # the one above, in an interpreter of its own
def test_the_layer_is_routed_where_transformers_is_imported_last():
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from thunder_moe import moe_executor, rewrite_report
import thunder, torch
from compiler_speed import speed_up_compilers
speed_up_compilers()
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
config = Llama4TextConfig(hidden_size=64, intermediate_size=32, num_local_experts=4)
layer = Llama4TextMoe(config).bfloat16().requires_grad_(False)
compiled = thunder.jit(layer, executors=[moe_executor])
compiled(torch.zeros(1, 3, 64, dtype=torch.bfloat16))
print([entry.decision for entry in rewrite_report(compiled)])
"""
    assert fresh_python(code, OF_TRANSFORMERS).splitlines()[-1] == "['nvfp4 + swiglu', 'nvfp4']"
