"""The torch.compile backend: inner compilers, options, graphs that layers share, exported programs, the user's line.
Called by pytest; judged by tests/oracle.py and by the report. ../test_rewrite.py has what both compilers do.
"""

import copy
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from both_compilers import by_dynamo as compiled
from both_compilers import decisions
from fast_cases import others_slow
from interpreters import fresh_python
from oracle import llama4_moe, relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    quantize_,
    rewrite_report,
)
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.kernels.select import select

BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
CONFIG = Llama4MoEConfig(64, 32, 4)
BOTH = ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"]


def decoded(model):
    return dequantize_(quantize_(copy.deepcopy(model)))


def test_found_by_name_without_an_import():
    code = """
import sys, torch
print("thunder_moe" in torch.compiler.list_backends(), "thunder_moe" in sys.modules)
torch.compile(lambda x: x + 1, backend="thunder_moe", options={"thunder_moe.inner": "eager"})(torch.ones(2))
print("thunder_moe" in sys.modules, "thunder" in sys.modules)
"""
    assert fresh_python(code).split() == ["True", "False", "True", "False"]


@pytest.mark.parametrize(
    "options",
    [
        dict(options={"thunder_moe.inner": "eager"}),
        dict(),  # inductor, whose compilations take seconds
        *others_slow(
            [
                dict(options={"thunder_moe.inner": "aot_eager"}, dynamic=True),  # other tests have it
                dict(options={"thunder_moe.inner": "thunder"}),  # ../thunder/test_thunderfx.py has it
                dict(mode="reduce-overhead", dynamic=True),
                dict(options={"max_autotune": False, "epilogue_fusion": True}),
            ],
            exhaustive=True,
        ),
    ],
    ids=str,
)
def test_rewrites_a_frozen_layer_with_every_inner_compiler(moe, x, options):
    function = torch.compile(moe.requires_grad_(False), backend="thunder_moe", fullgraph=True, **options)
    reference = decoded(moe)
    out = function(x)
    assert relative_error(out, llama4_moe(reference, x)) < 0.01
    assert 0.02 < relative_error(out, llama4_moe(moe, x)) < 0.2
    assert decisions(function) == BOTH


def test_inductor_gets_its_mode_and_options(monkeypatch):
    seen = []

    def inductor(mode, options, dynamic):
        seen.append((mode, options, dynamic))
        return lambda gm, inputs: gm

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", inductor)
    linear, x = GroupedLinear(4, 64, 32, dtype=BF16).requires_grad_(False), torch.randn(8, 64, dtype=BF16)
    for given in (dict(mode="reduce-overhead"), dict(options={"max_autotune": False})):
        torch._dynamo.reset()
        torch.compile(linear, backend="thunder_moe", fullgraph=True, **given)(x, EVEN)
    assert seen == [("reduce-overhead", {}, None), (None, {"max_autotune": False}, None)]


def test_report_names_the_users_line(moe, x):
    moe.requires_grad_(False)
    plain = compiled(lambda x: moe(x) + 1)
    plain(x)
    assert decisions(plain) == BOTH
    line = f"{os.path.relpath(__file__)}:{sys._getframe().f_lineno - 3}"
    assert {entry.gemm.where for entry in rewrite_report(plain)} == {line}


def test_one_graph_for_all_token_counts(moe):
    function = compiled(moe.requires_grad_(False), dynamic=True)
    reference = decoded(moe)
    for batch, tokens in ((2, 3), (4, 8), (3, 17), (2, 64)):
        x = torch.randn(batch, tokens, 64, dtype=BF16)
        out, exact = function(x).float(), reference(x).float()
        # Of each token: a near tie in bf16 may send one to another expert.
        error = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert error.median() < 0.01
        assert (error < 0.03).float().mean() > 0.8
    report = rewrite_report(function)
    assert {entry.graph for entry in report} == {0}
    assert {entry.gemm.rows for entry in report} == {None}
    assert "varies" in str(report)


@pytest.mark.parametrize("inner", ["aot_eager", *others_slow(["inductor"], exhaustive=True)])
def test_layers_that_share_a_graph_keep_their_own_weights(x, count, inner):
    layers = [Llama4MoE(CONFIG, dtype=BF16).requires_grad_(False) for _ in range(3)]
    functions = [compiled(layer, inner) for layer in layers]
    for _ in range(2):
        for layer, function in zip(layers, functions, strict=True):
            assert relative_error(function(x), decoded(layer)(x)) < 0.01
    assert len(count) == 9
    assert all(decisions(function) == BOTH for function in functions)


def test_layers_compiled_in_place(x):
    model = nn.Sequential(*(Llama4MoE(CONFIG, dtype=BF16) for _ in range(3))).requires_grad_(False)
    expected = decoded(model)(x)
    for layer in model:
        layer.compile(backend="thunder_moe", options={"thunder_moe.inner": "eager"})
    assert relative_error(model(x), expected) < 0.04  # both sides round to bf16, three times over
    assert all(decisions(layer) == BOTH for layer in model)
    other = torch.compile(lambda x: x + 1, backend="thunder_moe", options={"thunder_moe.inner": "eager"})
    with pytest.raises(ValueError, match="compiled: not called yet"):
        rewrite_report(other)


@pytest.mark.slow
def test_kernels_read_the_cached_weights_in_place(moe, x, monkeypatch):
    kernels, seen = select(torch.device("cpu")), set()
    for name in ("grouped_mm", "grouped_swiglu"):
        original = getattr(kernels, name)

        def spy(rows, weight, *rest, original=original):
            assert weight.qdata.is_contiguous()
            seen.add(weight.qdata.data_ptr())
            return original(rows, weight, *rest)

        monkeypatch.setattr(kernels, name, spy)
    function = compiled(moe.requires_grad_(False), "inductor")
    for _ in range(3):
        function(x)
    assert len(seen) == 2


@pytest.mark.slow
def test_quantized_modules_under_plain_inductor():
    experts, x = nn.ModuleList([GroupedSwiGLU(4, 64, 32, dtype=BF16)]), torch.randn(8, 64, dtype=BF16)
    (quantized,), (expected,) = quantize_(copy.deepcopy(experts)), decoded(experts)
    assert relative_error(torch.compile(quantized, fullgraph=True)(x, EVEN), expected(x, EVEN)) < 0.01


def test_operators_read_the_layout_that_the_device_prefers(moe, x, tiles):
    layouts = {}

    def listing(gm, inputs):
        for node in gm.graph.nodes:
            layouts.update({name: value for name, value in node.kwargs.items() if name.endswith("layout")})
        return gm

    options = {"thunder_moe.inner": listing}
    torch.compile(moe.requires_grad_(False), backend="thunder_moe", options=options)(x)
    assert layouts == {"gate_up_layout": "tiled_64x64", "down_layout": "linear"}  # down has 32 in_features


def test_export_of_a_quantized_block(moe, x):
    quantized = quantize_(copy.deepcopy(moe)).requires_grad_(False)
    program = torch.export.export(quantized, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
    names = [str(node.target) for node in program.graph.nodes]
    assert "thunder_moe.f16a_nvfp4weight_moe_experts.default" in names
    for tokens in (8, 5):
        assert relative_error(program.module()(x[:, :tokens]), decoded(moe)(x[:, :tokens])) < 0.01


@pytest.mark.parametrize("way", ["export", *others_slow(["AOTInductor"], exhaustive=True)])
def test_another_process_runs_an_exported_block(moe, x, tmp_path, way):
    """The import that the documentation names registers all operators of quantized blocks."""
    program = torch.export.export(quantize_(copy.deepcopy(moe)).requires_grad_(False), (x,))
    file, tensors = tmp_path / "program.pt2", tmp_path / "tensors.pt"
    if way == "export":
        torch.export.save(program, file)
        load = f"torch.export.load({str(file)!r}).module()"
    else:
        options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # 6 seconds in place of 20
        torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=options)
        load = f"torch._inductor.aoti_load_package({str(file)!r})"
    torch.save(x, tensors)
    code = f"import torch, thunder_moe.nn; torch.save({load}(torch.load({str(tensors)!r})), {str(tensors)!r})"
    fresh_python(code)
    assert relative_error(torch.load(tensors), decoded(moe)(x)) < 0.01


@pytest.mark.skipif(
    not hasattr(torch._functorch.config, "bypass_autograd_cache_key"), reason="this torch does not tell of aot_compile"
)
def test_aot_compile_is_refused_with_what_to_do_instead(moe, x):
    moe.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"quantize_\(model\), then compile it with backend='inductor'"):
        compiled(moe).forward.aot_compile(((x,), {}))


# ---- what is recognised, and what is left alone


def mm(x, weight, offsets):
    return F.grouped_mm(x, weight, offs=offsets)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_side_effects_beside_the_experts_survive(inner):
    linear, before = GroupedLinear(4, 64, 32, dtype=BF16).requires_grad_(False), torch.randn(4)
    linear.register_buffer("static", before.clone())

    def program(x):
        linear.static.add_(1)
        return linear(x, EVEN)

    function = compiled(program, inner)
    for calls in (1, 2):
        function(torch.randn(8, 64, dtype=BF16))
        assert torch.equal(linear.static, before + 1 if calls == 1 else before + 1 + 1)
    assert decisions(function) == ["nvfp4"]


def test_weights_on_the_meta_device_stay_as_they_are_until_they_hold_numbers():
    linear = GroupedLinear(4, 64, 32, dtype=BF16, device="meta").requires_grad_(False)
    function, x = compiled(linear, "eager"), torch.randn(8, 64, dtype=BF16)
    with pytest.warns(RewriteWarning, match="meta device, which holds no numbers"):
        assert function(x.to("meta"), EVEN.to("meta")).shape == (8, 32)
    linear.to_empty(device="cpu")
    nn.init.normal_(linear.weight)
    rounded = dequantize(quantize(linear.weight), torch.float32)
    expected = torch.cat([part @ w.mT for part, w in zip(x.float().split(2), rounded, strict=True)])
    assert relative_error(function(x, EVEN), expected) < 0.01
    assert decisions(function)[-1] == "nvfp4"


def test_batched_gemms_of_two_batches_are_left_alone():
    batched, weight = torch.randn(4, 8, 64, dtype=BF16), torch.randn(4, 64, 32, dtype=BF16)
    with pytest.warns(RewriteWarning, match="has no call of"):
        out = compiled(lambda a, b: F.grouped_mm(a, b))(batched, weight)
    assert torch.equal(out, F.grouped_mm(batched, weight))


def test_a_fragment_beside_the_experts_is_no_warning(moe, x):
    moe.requires_grad_(False)

    def broken(x):
        y = moe(x)
        torch._dynamo.graph_break()
        return y + 1

    function = torch.compile(broken, backend="thunder_moe", options={"thunder_moe.inner": "eager"})
    assert relative_error(function(x), decoded(moe)(x) + 1) < 0.01
    assert len(rewrite_report(function).rewritten) == 3


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match=r"options: got 'thunder_moe.iner', wanted 'thunder_moe.inner'"):
        torch.compile(lambda x: x + 1, backend="thunder_moe", options={"thunder_moe.iner": "eager"})(torch.ones(2))
    with pytest.raises(Exception, match="nonesuch"):
        compiled(lambda x: x + 1, "nonesuch")(torch.ones(2))


# ---- Hugging Face


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="on torch 2.10 and a CPU, transformers looks at addresses, which dynamo cannot trace",
)
@pytest.mark.slow
def test_a_hugging_face_model_untouched():
    transformers = pytest.importorskip("transformers", minversion="5.7")
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, num_experts=4, moe_intermediate_size=32,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to(BF16).eval().requires_grad_(False)
    for parameter in (p for n, p in model.named_parameters() if ".experts." in n):
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.set_experts_implementation("grouped_mm")
    rounded_model = copy.deepcopy(model)
    for parameter in (p for n, p in rounded_model.named_parameters() if ".experts." in n):
        parameter.copy_(dequantize(quantize(parameter)))
    function, ids = compiled(model), torch.randint(128, (2, 32))
    logits, exact, wide = (m(input_ids=ids, use_cache=False).logits for m in (function, rounded_model, model))
    # Of each token, since rounding may send one to another expert.
    error = (logits - exact).float().norm(dim=-1) / exact.float().norm(dim=-1)
    assert error.median() < 0.02
    assert (error < 0.03).float().mean() > 0.75
    assert relative_error(logits, wide) > 0.02
    report = list(rewrite_report(function))
    assert [entry.decision for entry in report] == ["nvfp4 + swiglu", "nvfp4"]
    assert report[0].gemm.weight.endswith("layers.0.mlp.experts.gate_up_proj")
