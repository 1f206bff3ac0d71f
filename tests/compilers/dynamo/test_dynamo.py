"""The torch.compile backend: what is rewritten by which inner compiler, what it computes, trains and declines.
Called by pytest; judged by tests/oracle.py and by the report.
"""

import copy
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from interpreters import fresh_python
from oracle import KERNEL_TOLERANCE, grouped_mm, groups, llama4_moe, relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    quantize_,
    rewrite_report,
)
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.kernels.select import select
from thunder_moe.ops import experts as experts_operator
from thunder_moe.ops import grouped_mm as grouped_mm_operator
from thunder_moe.ops import grouped_swiglu as grouped_swiglu_operator
from thunder_moe.ops.grouped_mm import weight_from_operands

BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
CONFIG = Llama4MoEConfig(64, 32, 4)
BOTH = ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"]


def compiled(function, inner="aot_eager", **options):
    return torch.compile(
        function, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": inner}, **options
    )


def decoded(model):
    return dequantize_(quantize_(copy.deepcopy(model)))


def decisions(function):
    return [entry.decision for entry in rewrite_report(function)]


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
        dict(options={"thunder_moe.inner": "aot_eager"}, dynamic=True),
        dict(options={"thunder_moe.inner": "thunder"}),
        dict(),
        pytest.param(dict(mode="reduce-overhead", dynamic=True), marks=pytest.mark.slow),
        dict(options={"max_autotune": False, "epilogue_fusion": True}),
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


def test_report_names_weights_and_the_users_line(moe, x):
    function = compiled(moe.requires_grad_(False))
    with pytest.raises(ValueError, match="compiled: not called yet"):
        rewrite_report(function)
    function(x)
    report = rewrite_report(function)
    names = [entry.gemm.weight for entry in report]
    assert names == [f"routed_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
    assert "routed_experts.down_proj.weight  4 x 64 x 32" in str(report)
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


def test_no_graph_break(moe, x):
    explanation = torch._dynamo.explain(moe.requires_grad_(False))(x)
    assert explanation.graph_break_count == 0


def test_changed_and_replaced_weights(moe, x, count):
    moe.requires_grad_(False)
    function = compiled(moe)
    function(x)
    assert len(count) == 3
    down = moe.routed_experts.down_proj
    down.weight.mul_(-2)
    assert relative_error(function(x), decoded(moe)(x)) < 0.01
    assert len(count) == 4
    down.weight.data = torch.randn_like(down.weight)
    assert relative_error(function(x), decoded(moe)(x)) < 0.01
    down.weight = nn.Parameter(torch.randn_like(down.weight), requires_grad=False)
    assert relative_error(function(x), decoded(moe)(x)) < 0.01


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
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
def test_one_copy_for_graphs_models_and_compilers(moe, x, count):
    from thunder_moe import moe_executor

    import thunder  # isort: skip  (after moe_executor: see compilers/compat.py)

    moe.requires_grad_(False)
    other = Llama4MoE(CONFIG, dtype=BF16).requires_grad_(False)
    other.routed_experts = moe.routed_experts
    for function in (compiled(moe), compiled(other, "eager"), thunder.jit(moe, executors=[moe_executor])):
        function(x)
        function(x[:, :3])
    assert len(count) == 3


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


# ---- training


def gradients(function, model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    function(x).float().pow(2).mean().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_trainable_experts_train_in_16_bit(inner):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 8, top_k=2), dtype=BF16)
    x = torch.randn(1, 3, 64, dtype=BF16)  # 6 rows for 8 experts: some have none
    function = compiled(moe, inner)
    with pytest.warns(RewriteWarning, match="down_proj.weight: the weight is trainable"):
        got = gradients(function, moe, x)
    exact = copy.deepcopy(moe).float()
    expected = gradients(lambda x: llama4_moe(exact, x), exact, x.float())
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name
    idle = expected["routed_experts.up_proj.weight"].flatten(1).eq(0).all(1)
    assert idle.any()
    assert got["routed_experts.up_proj.weight"][idle].eq(0).all()
    with torch.no_grad():
        assert relative_error(function(x), decoded(moe)(x)) < 0.01
    assert len(rewrite_report(function).rewritten) == 3


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_expanded_gradients(inner):
    linear = GroupedLinear(4, 64, 32, dtype=BF16)
    x = torch.randn(8, 64, dtype=BF16, requires_grad=True)
    with pytest.warns(RewriteWarning):
        compiled(linear, inner)(x, EVEN).sum().backward()  # torch's own backward fails here with "Invalid strides"
    expected = torch.cat([torch.ones(end - start, 32) @ linear.weight[e].float() for e, start, end in groups(EVEN)])
    assert relative_error(x.grad, expected) < KERNEL_TOLERANCE[BF16]


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_frozen_experts_pass_gradients_on(moe, x, inner):
    moe.routed_experts.requires_grad_(False)
    function = compiled(moe, inner)
    got = gradients(function, moe, x)
    exact = decoded(moe).float()
    expected = gradients(lambda x: llama4_moe(exact, x), exact, x.float())
    assert "router.weight" in got
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name
    assert decisions(function) == BOTH


# ---- layouts


@pytest.mark.parametrize("inner", ["aot_eager", "inductor", "thunder"])
def test_weights_are_packed_in_the_layout_that_the_device_prefers(moe, x, tiles, monkeypatch, inner):
    called = []

    def spy(*packed):
        called.append(packed[-1])
        return weight_from_operands(*packed)

    for module in (grouped_mm_operator, grouped_swiglu_operator, experts_operator):
        monkeypatch.setattr(module, "weight_from_operands", spy)
    moe.requires_grad_(False)
    function = compiled(moe, inner)
    with torch.no_grad():
        out = function(x)
    assert decisions(function) == BOTH
    assert set(tiles) == {("cpu", 64, 64), ("cpu", 64, 32)}  # gate and up together, and down, which does not fit
    assert called == ["tiled_64x64", "linear"]
    assert relative_error(out, llama4_moe(decoded(moe), x)) < 0.01
    with torch.no_grad():
        for parameter in moe.routed_experts.parameters():
            parameter.mul_(-0.5)
        assert not torch.equal(function(x), out)
        assert relative_error(function(x), llama4_moe(decoded(moe), x)) < 0.01
    assert called[2:] == ["tiled_64x64", "linear"] * 2


def test_training_passes_through_the_preferred_layout(moe, x, tiles):
    moe.routed_experts.requires_grad_(False)
    reference = quantize_(copy.deepcopy(moe), layout="linear")
    results = []
    for model in (compiled(moe), reference):
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        out.float().square().sum().backward()
        results.append((out, leaf.grad))
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 0.02


# ---- modules that quantize_ has swapped already


def test_quantized_modules_under_the_backend_and_plain_inductor(moe, x):
    quantized = quantize_(copy.deepcopy(moe))
    function = compiled(quantized)
    assert relative_error(function(x), decoded(moe)(x)) < 0.01
    assert [(e.gemm.weight, e.decision, e.reason) for e in rewrite_report(function)] == [
        ("routed_experts.gate_up_proj.qdata", "nvfp4 + swiglu", "quantized beforehand"),
        ("routed_experts.down_proj.qdata", "nvfp4", "quantized beforehand"),
    ]
    assert relative_error(torch.compile(quantized, fullgraph=True)(x), decoded(moe)(x)) < 0.01


def test_export_of_a_quantized_block(moe, x):
    quantized = quantize_(copy.deepcopy(moe)).requires_grad_(False)
    program = torch.export.export(quantized, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
    names = [str(node.target) for node in program.graph.nodes]
    assert "thunder_moe.f16a_nvfp4weight_moe_experts.default" in names
    for tokens in (8, 5):
        assert relative_error(program.module()(x[:, :tokens]), decoded(moe)(x[:, :tokens])) < 0.01


@pytest.mark.parametrize("way", ["export", pytest.param("AOTInductor", marks=pytest.mark.slow)])
def test_another_process_runs_an_exported_block(moe, x, tmp_path, way):
    """The import that the documentation names registers all operators of quantized blocks."""
    program = torch.export.export(quantize_(copy.deepcopy(moe)).requires_grad_(False), (x,))
    file, tensors = tmp_path / "program.pt2", tmp_path / "tensors.pt"
    if way == "export":
        torch.export.save(program, file)
        load = f"torch.export.load({str(file)!r}).module()"
    else:
        torch._inductor.aoti_compile_and_package(program, package_path=str(file))
        load = f"torch._inductor.aoti_load_package({str(file)!r})"
    torch.save(x, tensors)
    code = f"import torch, thunder_moe.nn; torch.save({load}(torch.load({str(tensors)!r})), {str(tensors)!r})"
    fresh_python(code)
    assert relative_error(torch.load(tensors), decoded(moe)(x)) < 0.01


# ---- what is recognised, and what is left alone


class Block(nn.Module):
    """Experts whose forward is given, to try patterns. gate, up: (4, 64, 32); gate_up: (4, 64, 64)."""

    def __init__(self, forward, dtype=BF16, in_features=64):
        super().__init__()
        for name, width in (("gate", 32), ("up", 32), ("gate_up", 64)):
            weight = torch.randn(4, in_features, width, dtype=dtype) / 8
            setattr(self, name, nn.Parameter(weight, requires_grad=False))
        self.register_buffer("static", torch.randn(4, in_features, 32, dtype=dtype))
        self.body = forward

    def forward(self, x, offsets):
        return self.body(self, x, offsets)


def mm(x, weight, offsets):
    return F.grouped_mm(x, weight, offs=offsets)


def halves(y):
    return y.chunk(2, dim=-1)


SITES = {
    "as it is": lambda self, x, o: mm(x, self.gate, o),
    "buffer": lambda self, x, o: mm(x, self.static, o),
    "torch._grouped_mm": lambda self, x, o: torch._grouped_mm(x, self.gate, o),
    "aten": lambda self, x, o: torch.ops.aten._grouped_mm(x, self.gate, o),
    "transpose twice": lambda self, x, o: mm(x, self.gate.transpose(1, 2).transpose(-1, -2), o),
    "torch.transpose": lambda self, x, o: mm(x, torch.transpose(torch.transpose(self.gate, 1, 2), 1, 2), o),
    "mT": lambda self, x, o: mm(x, self.gate.mT.mT, o),
    "permute": lambda self, x, o: mm(x, self.gate.permute(0, 2, 1).permute((0, 2, 1)), o),
    "swapaxes": lambda self, x, o: mm(x, self.gate.swapaxes(1, 2).swapaxes(1, 2), o),
}
SWIGLU_FORMS = {
    "separate": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "separate, up first": lambda self, x, o: mm(x, self.up, o) * F.silu(mm(x, self.gate, o)),
    "torch.mul": lambda self, x, o: torch.mul(F.silu(mm(x, self.gate, o)), mm(x, self.up, o)),
    "chunk": lambda self, x, o: (lambda g, u: F.silu(g) * u)(*mm(x, self.gate_up, o).chunk(2, dim=-1)),
    "chunk, up first": lambda self, x, o: (lambda g, u: u * F.silu(g))(*mm(x, self.gate_up, o).chunk(2, -1)),
    "torch.chunk": lambda self, x, o: (lambda g, u: F.silu(g) * u)(*torch.chunk(mm(x, self.gate_up, o), 2, 1)),
    "split": lambda self, x, o: (lambda g, u: F.silu(g) * u)(*mm(x, self.gate_up, o).split(32, dim=-1)),
    "slices": lambda self, x, o: (lambda y: F.silu(y[..., :32]) * y[..., 32:])(mm(x, self.gate_up, o)),
    "slices of 2-D": lambda self, x, o: (lambda y: F.silu(y[:, :32]) * y[:, 32:])(mm(x, self.gate_up, o)),
    "interleaved": lambda self, x, o: (lambda y: F.silu(y[..., ::2]) * y[..., 1::2])(mm(x, self.gate_up, o)),
    "nn.SiLU": lambda self, x, o: nn.SiLU()(mm(x, self.gate, o)) * mm(x, self.up, o),
}
NOT_SWIGLU = {
    "gelu": lambda self, x, o: F.gelu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "gate read twice": lambda self, x, o: (lambda g: F.silu(g) * mm(x, self.up, o) + g)(mm(x, self.gate, o)),
    "whole read twice": lambda self, x, o: (lambda y: (F.silu(y[:, :32]) * y[:, 32:]) + y[:, :32])(
        mm(x, self.gate_up, o)
    ),
    "up half first": lambda self, x, o: (lambda y: F.silu(y[:, 32:]) * y[:, :32])(mm(x, self.gate_up, o)),
    "uneven slices": lambda self, x, o: (lambda y: F.silu(y[:, :32]) * y[:, 16:48])(mm(x, self.gate_up, o)),
    "chunks of rows": lambda self, x, o: (lambda g, u: F.silu(g) * u)(*mm(x, self.gate_up, o).chunk(2, dim=0)),
    "four chunks": lambda self, x, o: (lambda g, u, _, v: F.silu(g) * u + v)(*mm(x, self.gate_up, o).chunk(4, -1)),
    "two inputs": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x + 1, self.up, o),
    "two offsets": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o + 0),
}


def rounded(block):
    """The block in fp32 with its weights rounded to NVFP4."""
    result = copy.deepcopy(block).float()
    for name in ("gate", "up", "gate_up", "static"):
        getattr(result, name).copy_(dequantize(quantize(getattr(block, name).mT), torch.float32).mT)
    return result


@pytest.mark.parametrize("body", SITES.values(), ids=SITES.keys())
def test_recognises_every_way_to_write_the_gemm(body):
    block, x = Block(body), torch.randn(8, 64, dtype=BF16)
    function = compiled(block)
    weight = block.static if body is SITES["buffer"] else block.gate
    expected = grouped_mm(x, dequantize(quantize(weight.mT)), EVEN)
    assert relative_error(function(x, EVEN), expected) < KERNEL_TOLERANCE[BF16]
    assert decisions(function) == ["nvfp4"]


@pytest.mark.parametrize("body", [*SWIGLU_FORMS.values(), *NOT_SWIGLU.values()], ids=[*SWIGLU_FORMS, *NOT_SWIGLU])
@pytest.mark.covering(1)
def test_swiglu_is_fused_where_it_is_one(body):
    block, x = Block(body), torch.randn(8, 64, dtype=BF16)
    function = compiled(block)
    assert relative_error(function(x, EVEN), body(rounded(block), x.float(), EVEN)) < 0.012
    expected = "nvfp4 + swiglu" if body in SWIGLU_FORMS.values() else "nvfp4"
    assert set(decisions(function)) == {expected}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Block(lambda self, x, o: mm(x, self.gate * 2, o)), "not a parameter or buffer"),
        (
            Block(lambda self, x, o: mm(x[:, :40], self.gate, o), in_features=40),
            "in_features 40 is not a multiple of 16",
        ),
        (Block(lambda self, x, o: mm(x, self.gate, o)).requires_grad_(), "trainable: freeze it"),
    ],
)
def test_declines_with_its_reason(block, reason):
    function, x = compiled(block), torch.randn(8, 64, dtype=BF16)
    with pytest.warns(RewriteWarning, match=reason):
        out = function(x, EVEN)
    assert torch.equal(out, block(x, EVEN))
    (entry,) = rewrite_report(function)
    assert reason in entry.reason
    assert entry.decision == "16-bit"


@pytest.mark.parametrize("change", [lambda w: w.mul_(2), lambda w: w.transpose(1, 2).add_(1)], ids=["mul_", "view"])
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_weight_that_the_graph_changes_is_declined(change, inner):
    def body(self, x, offsets):
        change(self.gate)
        return mm(x, self.gate, offsets)

    block, x = Block(body), torch.randn(8, 64, dtype=BF16)
    expected = copy.deepcopy(block)(x, EVEN)
    with pytest.warns(RewriteWarning, match="the weight may be changed in place by (mul|add)_ in the same graph"):
        assert torch.equal(compiled(block, inner)(x, EVEN), expected)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_side_effects_beside_the_experts_survive(inner):
    def body(self, x, offsets):
        self.static.add_(1)
        return mm(x, self.gate, offsets)

    block, x = Block(body), torch.randn(8, 64, dtype=BF16)
    before = block.static.clone()
    function = compiled(block, inner)
    for calls in (1, 2):
        function(x, EVEN)
        assert torch.equal(block.static, before + 1 if calls == 1 else before + 1 + 1)
    assert decisions(function) == ["nvfp4"]


def test_other_forms_are_left_alone():
    x, weight = torch.randn(8, 64, dtype=BF16), torch.randn(4, 64, 32, dtype=BF16)
    with pytest.warns(RewriteWarning, match="not a parameter or buffer"):
        assert torch.equal(compiled(mm)(x, weight, EVEN), mm(x, weight, EVEN))
    batched = torch.randn(4, 8, 64, dtype=BF16)
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


def test_nan_in_a_weight_names_the_parameter(moe, x):
    moe.requires_grad_(False)
    moe.routed_experts.down_proj.weight[1, 0, 0] = float("nan")
    with pytest.raises(Exception, match=r"routed_experts.down_proj.weight: weight: got NaN or Inf in experts \[1\]"):
        compiled(moe)(x)


def test_unknown_options_are_refused():
    with pytest.raises(Exception, match=r"options: got 'thunder_moe.iner', those of thunder_moe are"):
        torch.compile(lambda x: x + 1, backend="thunder_moe", options={"thunder_moe.iner": "eager"})(torch.ones(2))
    with pytest.raises(Exception, match="nonesuch"):
        compiled(lambda x: x + 1, "nonesuch")(torch.ones(2))


# ---- Hugging Face


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="on torch 2.10 and a CPU, transformers looks at addresses, which dynamo cannot trace",
)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
@pytest.mark.slow
def test_hugging_face_models_untouched(name):
    transformers = pytest.importorskip("transformers", minversion="5.7")
    experts = dict(num_experts=4, moe_intermediate_size=32) if name == "Qwen3Moe" else dict(num_local_experts=4)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=128, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, **experts,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(BF16).eval().requires_grad_(False)
    for parameter in (p for n, p in model.named_parameters() if ".experts." in n):
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.set_experts_implementation("grouped_mm")
    rounded_model = copy.deepcopy(model)
    for parameter in (p for n, p in rounded_model.named_parameters() if ".experts." in n):
        parameter.copy_(dequantize(quantize(parameter)))
    function = compiled(model)
    for tokens in (17, 32):
        ids = torch.randint(128, (2, tokens))
        logits, exact, wide = (m(input_ids=ids, use_cache=False).logits for m in (function, rounded_model, model))
        # Of each token, since rounding may send one to another expert.
        error = (logits - exact).float().norm(dim=-1) / exact.float().norm(dim=-1)
        assert error.median() < 0.02
        assert (error < 0.03).float().mean() > 0.75
        assert relative_error(logits, wide) > 0.02
    first = [entry for entry in rewrite_report(function) if entry.graph == 0]
    assert [entry.decision for entry in first] == ["nvfp4 + swiglu", "nvfp4"] * 2
    assert first[0].gemm.weight.endswith("layers.0.mlp.experts.gate_up_proj")
