"""Expert GEMMs under both compilers: what is recognised, what it computes, trains and declines.
Called by pytest; judged by tests/oracle.py and by the report. What one compiler alone has is in its folder.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from both_compilers import compile_by, decisions
from fast_cases import others_slow
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

BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
BOTH = pytest.mark.parametrize("compiler", ["dynamo-aot_eager", "thunder"])
# Tables of patterns, which are found in the graph before any compiler sees it.
PATTERNS = pytest.mark.parametrize("compiler", ["dynamo-eager", "thunder"])
# Thunder traces a whole layer in two seconds, experts alone in a tenth of one: thunder/test_executor.py has a layer.
LAYERS = pytest.mark.parametrize("compiler", ["dynamo-aot_eager", *others_slow(["thunder"], exhaustive=True)])
OTHER_COMPILERS = others_slow(["dynamo-eager", "dynamo-inductor"], exhaustive=True)


class Block(nn.Module):
    """Frozen experts whose forward is given, to try patterns.

    gate, up, static: (4, K, 32); gate_up: (4, K, 64); down: (4, 64, 32).
    """

    def __init__(self, forward, dtype=BF16, in_features=64):
        super().__init__()
        shapes = dict(gate=(in_features, 32), up=(in_features, 32), gate_up=(in_features, 64), down=(64, 32))
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(4, *shape, dtype=dtype) / 8, requires_grad=False))
        self.register_buffer("static", torch.randn(4, in_features, 32, dtype=dtype))
        self.body = forward

    def forward(self, x, offsets):
        return self.body(self, x, offsets)


def mm(x, weight, offsets):
    return F.grouped_mm(x, weight, offs=offsets)


def swiglu(gate, up):
    return F.silu(gate) * up


def experts(self, x, o):
    return mm(swiglu(mm(x, self.gate, o), mm(x, self.up, o)), self.down.mT, o)


def all_of(table, body):
    """Return the forward of a block that runs `body` with each entry of a table, all in one graph."""
    return lambda self, x, o: {name: body(entry, self, x, o) for name, entry in table.items()}


def rows():
    return torch.randn(8, 64, dtype=BF16)


def rounded(block):
    """Return the block in fp32 with its weights rounded to NVFP4."""
    result = copy.deepcopy(block).float()
    for name in ("gate", "up", "gate_up", "static"):
        getattr(result, name).data.copy_(dequantize(quantize(getattr(block, name).detach().mT), torch.float32).mT)
    result.down.data.copy_(dequantize(quantize(block.down.detach()), torch.float32))
    return result


def decoded(model):
    """Return the model with its expert weights rounded to NVFP4: a rewritten model has to compute the same."""
    return dequantize_(quantize_(copy.deepcopy(model)))


# ---- what is recognised, and what is left alone

VIEWS = {  # of a weight (E, N, K), to the right operand (E, K, N)
    "transpose": lambda w: w.transpose(-2, -1),
    "transpose by other numbers": lambda w: w.transpose(1, 2),
    "torch.transpose": lambda w: torch.transpose(w, 1, 2),
    "mT": lambda w: w.mT,
    "permute": lambda w: w.permute(0, 2, 1),
    "permute by a tuple": lambda w: w.permute((0, 2, 1)),
    "swapaxes": lambda w: w.swapaxes(-1, -2),
    "swapdims": lambda w: w.swapdims(1, 2),
    "three transposes": lambda w: w.mT.mT.mT,
    "detach": lambda w: w.detach().mT,
    "detach behind": lambda w: w.mT.detach(),
    "to": lambda w: w.to(BF16).mT,
    "bfloat16": lambda w: w.bfloat16().mT,
    "contiguous": lambda w: w.contiguous().mT,
    "slice of all": lambda w: w[:].mT,
    "view": lambda w: w.view(w.shape).mT,
    "view_as": lambda w: w.view_as(w).mT,
    "unsqueeze": lambda w: w.unsqueeze(0).squeeze(0).mT,
}


@PATTERNS
def test_recognises_every_view_of_a_whole_weight(compiler):
    block, x = Block(all_of(VIEWS, lambda view, self, x, o: mm(x, view(self.down), o))), torch.randn(8, 32, dtype=BF16)
    compiled = compile_by(compiler, block)
    expected = grouped_mm(x, dequantize(quantize(block.down)), EVEN)
    for name, out in compiled(x, EVEN).items():
        assert relative_error(out, expected) < KERNEL_TOLERANCE[BF16], name
    assert decisions(compiled) == ["nvfp4"] * len(VIEWS)


SITES = {
    "F.grouped_mm": lambda self, x, o: mm(x, self.gate, o),
    "torch._grouped_mm": lambda self, x, o: torch._grouped_mm(x, self.gate, offs=o),
    "out_dtype": lambda self, x, o: torch._grouped_mm(x, self.gate, o, out_dtype=BF16),
    "aten": lambda self, x, o: torch.ops.aten._grouped_mm(x, self.gate, o),
    "buffer": lambda self, x, o: mm(x, self.static, o),
    "read elsewhere": lambda self, x, o: mm(x, self.gate, o) + self.gate.sum(),
}


@PATTERNS
def test_recognises_every_way_to_write_the_gemm(compiler):
    sites = {name: site for name, site in SITES.items() if (compiler, name) != ("thunder", "aten")}  # it traces none
    block, x = Block(all_of(sites, lambda site, *given: site(*given))), rows()
    compiled = compile_by(compiler, block)
    exact = rounded(block)
    for name, out in compiled(x, EVEN).items():
        expected = grouped_mm(x, (exact.static if name == "buffer" else exact.gate).mT, EVEN)
        if name == "read elsewhere":
            expected = expected.to(BF16) + block.gate.sum()  # the 16-bit weight
        assert relative_error(out, expected) < KERNEL_TOLERANCE[BF16], name
    assert decisions(compiled) == ["nvfp4"] * len(sites)


SWIGLU_FORMS = {
    "silu(gate) * up": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "up * silu(gate)": lambda self, x, o: mm(x, self.up, o) * F.silu(mm(x, self.gate, o)),
    "torch.mul": lambda self, x, o: torch.mul(F.silu(mm(x, self.gate, o)), mm(x, self.up, o)),
    "nn.SiLU": lambda self, x, o: nn.SiLU()(mm(x, self.gate, o)) * mm(x, self.up, o),
    "chunk": lambda self, x, o: swiglu(*mm(x, self.gate_up, o).chunk(2, -1)),
    "chunk, up first": lambda self, x, o: (lambda g, u: u * F.silu(g))(*mm(x, self.gate_up, o).chunk(2, dim=-1)),
    "torch.chunk": lambda self, x, o: swiglu(*torch.chunk(mm(x, self.gate_up, o), 2, 1)),
    "split": lambda self, x, o: swiglu(*mm(x, self.gate_up, o).split(32, dim=-1)),
    "slices": lambda self, x, o: (lambda y: swiglu(y[..., :32], y[:, 32:]))(mm(x, self.gate_up, o)),
    "interleaved": lambda self, x, o: (lambda y: y[..., 1::2] * F.silu(y[..., ::2]))(mm(x, self.gate_up, o)),
}
NOT_SWIGLU = {
    "gelu": lambda self, x, o: F.gelu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "gate read twice": lambda self, x, o: (lambda g: F.silu(g) * mm(x, self.up, o) + g)(mm(x, self.gate, o)),
    "silu read twice": lambda self, x, o: (lambda s: s * mm(x, self.up, o) + s)(F.silu(mm(x, self.gate, o))),
    "silu of a sum": lambda self, x, o: F.silu(mm(x, self.gate, o) + 1) * mm(x, self.up, o),
    "two inputs": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x + 1, self.up, o),
    "two offsets": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o + 0),
    "up half first": lambda self, x, o: swiglu(*mm(x, self.gate_up, o).chunk(2, -1)[::-1]),
    "one half": lambda self, x, o: swiglu(*[mm(x, self.gate_up, o).chunk(2, -1)[0]] * 2),
    "halves read twice": lambda self, x, o: (lambda a, b: swiglu(a, b) + b)(*mm(x, self.gate_up, o).chunk(2, -1)),
    "whole read too": lambda self, x, o: (lambda y: swiglu(*y.chunk(2, -1)) + y[:, 16:48])(mm(x, self.gate_up, o)),
    "other parts": lambda self, x, o: (lambda y: swiglu(y[:, :16], y[:, 32:48]))(mm(x, self.gate_up, o)),
    "uneven slices": lambda self, x, o: (lambda y: swiglu(y[:, :32], y[:, 16:48]))(mm(x, self.gate_up, o)),
    "half interleaved": lambda self, x, o: (lambda y: swiglu(y[:, ::2], y[:, 32:]))(mm(x, self.gate_up, o)),
    "chunks of rows": lambda self, x, o: swiglu(*mm(x, self.gate_up, o).chunk(2, dim=0)),
    "four chunks": lambda self, x, o: (lambda g, u, _, v: swiglu(g, u) + v)(*mm(x, self.gate_up, o).chunk(4, -1)),
}


@PATTERNS
@pytest.mark.parametrize(
    ("forms", "decision"), [(SWIGLU_FORMS, "nvfp4 + swiglu"), (NOT_SWIGLU, "nvfp4")], ids=["a SwiGLU", "another"]
)
def test_swiglu_is_fused_where_it_is_one(compiler, forms, decision):
    block, x = Block(all_of(forms, lambda form, *given: form(*given))), rows()
    compiled = compile_by(compiler, block)
    expected = block.body(rounded(block), x.float(), EVEN)
    for name, out in compiled(x, EVEN).items():
        assert relative_error(out, expected[name]) < 0.012, name
    assert set(decisions(compiled)) == {decision}


CHANGED = {
    "scaled": lambda gate: gate * 2,
    "a part": lambda gate: gate[:, :, :16],
    "once more": lambda gate: gate * 1,
    "flipped": lambda gate: gate.flip(0),
    "cloned": lambda gate: gate.clone(),
}
DECLINED = {
    "changed": (all_of(CHANGED, lambda change, self, x, o: mm(x, change(self.gate), o)), "not a parameter or buffer"),
    "float32": (lambda self, x, o: mm(x.float(), self.gate, o), "torch.float32, not bfloat16"),
    "in_features": (lambda self, x, o: mm(x[:, :40], self.gate, o), "in_features 40 is not a multiple of 16"),
    "trainable": (lambda self, x, o: mm(x, self.gate, o), "trainable: freeze it"),
}


@BOTH
@pytest.mark.parametrize("case", DECLINED)
def test_declines_with_its_reason(compiler, case):
    if (compiler, case) == ("dynamo-aot_eager", "float32"):
        pytest.skip("torch itself traces none of float32")
    body, reason = DECLINED[case]
    block = Block(body, torch.float32 if case == "float32" else BF16, 40 if case == "in_features" else 64)
    block.requires_grad_(case == "trainable")
    compiled, x = compile_by(compiler, block), rows()
    with pytest.warns(RewriteWarning, match=reason):
        out = compiled(x, EVEN)
    torch.testing.assert_close(out, block(x, EVEN), rtol=0, atol=0)
    report = rewrite_report(compiled)
    assert len(report) == (len(CHANGED) if case == "changed" else 1)
    for entry in report:
        assert reason in entry.reason
        assert entry.decision == "16-bit"
        assert not entry.rewritten


@BOTH
def test_an_argument_as_weight_is_declined(compiler):
    x, weight = rows(), torch.randn(4, 64, 32, dtype=BF16)
    with pytest.warns(RewriteWarning, match="not a parameter or buffer"):
        assert torch.equal(compile_by(compiler, mm)(x, weight, EVEN), mm(x, weight, EVEN))


@BOTH
def test_partly_frozen_layers_are_partly_rewritten(compiler):
    block = Block(experts).requires_grad_()
    block.down.requires_grad_(False)
    compiled = compile_by(compiler, block)
    compiled(rows(), EVEN)
    assert decisions(compiled) == ["16-bit", "16-bit", "nvfp4"]


@BOTH
def test_nothing_to_rewrite_is_a_warning(compiler):
    compiled = compile_by(compiler, nn.Linear(3, 4))
    with pytest.raises(ValueError, match="compiled: not called yet"):
        rewrite_report(compiled)
    with pytest.warns(RewriteWarning, match="has no call of torch.nn.functional.grouped_mm"):
        compiled(torch.randn(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewriteWarning)
        compiled(torch.randn(2, 3))
    assert len(rewrite_report(compiled)) == 0
    assert str(rewrite_report(compiled)) == "no grouped GEMM was compiled"
    with pytest.raises(ValueError, match="compiled: got Linear, wanted what thunder.jit or torch.compile returned"):
        rewrite_report(nn.Linear(3, 4))


# ---- a layer, and weights that change


@LAYERS
def test_rewrites_a_frozen_layer(compiler, moe, x):
    compiled = compile_by(compiler, moe.requires_grad_(False))
    out = compiled(x)
    assert relative_error(out, llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2
    assert 0.02 < relative_error(out, llama4_moe(moe, x)) < 0.2
    report = rewrite_report(compiled)
    assert [(entry.gemm.weight, entry.decision) for entry in report] == [
        ("routed_experts.gate_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.up_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.down_proj.weight", "nvfp4"),
    ]
    gemm = report.entries[2].gemm
    assert (gemm.experts, gemm.out_features, gemm.in_features, gemm.rows) == (4, 64, 32, 16)
    assert len(report.rewritten) == len(report) == 3
    assert "routed_experts.down_proj.weight  4 x 64 x 32" in str(report)


@LAYERS
@pytest.mark.parametrize(
    ("shape", "top_k", "shared"),
    [
        ((7, 1), 2, 1),
        *others_slow([((1, 1), 1, 0), ((1, 1), 4, 1), ((1, 3), 4, 0), ((2, 5), 2, 0)], exhaustive=True),
    ],
)
@pytest.mark.slow
def test_any_batch_and_top_k(compiler, shape, top_k, shared):
    config = Llama4MoEConfig(64, 32, 4, top_k=top_k, num_shared_experts=shared)
    moe, x = Llama4MoE(config, dtype=BF16).requires_grad_(False), torch.randn(*shape, 64, dtype=BF16)
    assert relative_error(compile_by(compiler, moe)(x), llama4_moe(decoded(moe), x)) < 0.01


@BOTH
def test_all_rows_on_one_expert(compiler):
    block, x = Block(experts), rows()
    compiled = compile_by(compiler, block)
    for offsets in ([0, 0, 8, 8], [8, 8, 8, 8], [0, 1, 1, 8]):
        offsets = torch.tensor(offsets, dtype=torch.int32)
        out = compiled(x, offsets)
        assert relative_error(out, experts(rounded(block), x.float(), offsets)) < KERNEL_TOLERANCE[BF16] * 2


@BOTH
def test_weights_that_change_are_quantized_again(compiler, count):
    block, x = Block(experts), rows()
    compiled = compile_by(compiler, block)

    def check(quantized):
        assert relative_error(compiled(x, EVEN), experts(rounded(block), x.float(), EVEN)) < 0.01
        assert len(count) == quantized

    check(3)
    check(3)
    block.down.mul_(-2)
    check(4)
    block.up.data = torch.randn_like(block.up)
    check(6)  # gate and up are one pack
    if compiler != "thunder":  # whose modules keep the parameters that they were made of
        block.down = nn.Parameter(torch.randn_like(block.down), requires_grad=False)
        check(7)


def test_one_copy_for_graphs_models_and_compilers(count):
    first, second = Block(experts), Block(lambda self, x, o: first(first(x, o), o))
    second.first = first
    for compiler, model in [("dynamo-aot_eager", second), ("dynamo-eager", first), ("thunder", first)]:
        compiled = compile_by(compiler, model)
        for x, ends in ((rows(), EVEN), (rows()[:5], EVEN.clamp(max=5))):
            out = compiled(x, ends)
            assert torch.equal(compiled(x, ends), out)
            exact = rounded(first)
            expected = exact(x.float(), ends)
            if model is second:
                expected = exact(expected, ends)
            assert relative_error(out, expected) < 0.015  # the first layer's result is rounded to bf16
        assert len(count) == 3


@BOTH
def test_weights_that_are_not_loaded_yet_are_quantized_when_they_are(compiler):
    block, x, reason = Block(experts), rows(), r"down: weight: got NaN or Inf in experts \[1\]"
    expected, loaded = experts(rounded(block), x.float(), EVEN), block.down.clone()
    block.down[1, 0, 0] = float("nan")
    compiled = compile_by(compiler, block)
    if compiler == "thunder":
        with pytest.raises(ValueError, match=reason):
            compiled(x, EVEN)
    else:
        with pytest.warns(UserWarning, match=reason + ".*calls run in 16 bits"):
            out = compiled(x, EVEN)
        assert out[EVEN[0] : EVEN[1]].isnan().any()
        assert not out[EVEN[1] :].isnan().any()
    block.down.copy_(loaded)
    assert relative_error(compiled(x, EVEN), expected) < 0.01
    if compiler != "thunder":
        (calls,) = rewrite_report(compiled).calls
        assert (calls.calls, *calls.in_16_bit.values()) == (2, 1)


@BOTH
def test_weights_are_packed_in_the_layout_that_the_device_prefers(compiler, tiles):
    """A gradient passes through the same layout."""
    block, x = Block(experts), rows()
    compiled = compile_by(compiler, block)
    for factor in (1, -0.5):
        for weight in block.parameters():
            weight.mul_(factor)
        results = []
        for run, leaf in ((compiled, x.clone()), (rounded(block), x.float())):
            out = run(leaf.requires_grad_(), EVEN)
            (gradient,) = torch.autograd.grad(out.float().square().sum(), leaf)
            results.append((out, gradient))
        for ours, exact in zip(*results, strict=True):
            assert relative_error(ours, exact) < 0.02
    assert set(tiles) == {("cpu", 64, 64), ("cpu", 64, 32)}  # gate and up together, and down, which does not fit
    assert {entry.gemm.weight for entry in rewrite_report(compiled).rewritten} == {"gate", "up", "down"}


# ---- training


def gradients(run, model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    run(x).float().pow(2).mean().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("compiler", ["dynamo-aot_eager", *others_slow(["thunder"], exhaustive=True), *OTHER_COMPILERS])
def test_trainable_experts_train_in_16_bit(compiler):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 8, top_k=2), dtype=BF16)
    x = torch.randn(1, 3, 64, dtype=BF16)  # 6 rows for 8 experts: some have none
    compiled = compile_by(compiler, moe)
    with pytest.warns(RewriteWarning, match="down_proj.weight: the weight is trainable"):
        got = gradients(compiled, moe, x)
    exact = copy.deepcopy(moe).float()
    expected = gradients(lambda x: llama4_moe(exact, x), exact, x.float())
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        assert grad.dtype == BF16
        assert relative_error(grad, expected[name]) < 0.03, name
    idle = expected["routed_experts.up_proj.weight"].flatten(1).eq(0).all(1)
    assert idle.any()
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert got[f"routed_experts.{name}.weight"][idle].eq(0).all()
    with torch.no_grad():
        assert relative_error(compiled(x), decoded(moe)(x)) < 0.01
    assert len(rewrite_report(compiled).rewritten) == 3


@BOTH
def test_no_grad_runs_the_trainable_model_in_nvfp4_after_every_step(compiler):
    block, x = Block(experts).requires_grad_(), rows()
    compiled = compile_by(compiler, block)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.5)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RewriteWarning)
            loss = compiled(x, EVEN).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            assert relative_error(compiled(x, EVEN), experts(rounded(block), x.float(), EVEN)) < 0.01
    assert {entry.reason.split(";")[0] for entry in rewrite_report(compiled).rewritten} == {"gradients are disabled"}


@LAYERS
def test_frozen_experts_pass_gradients_to_router_and_input(compiler, moe, x):
    moe.routed_experts.requires_grad_(False)
    compiled = compile_by(compiler, moe)
    got = gradients(compiled, moe, x)
    exact = decoded(moe).float()
    expected = gradients(lambda x: llama4_moe(exact, x), exact, x.float())
    assert set(got) == {"x", "router.weight", *(f"shared_expert.{n}_proj.weight" for n in ("gate", "up", "down"))}
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name
    assert decisions(compiled) == ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"]


@BOTH
@pytest.mark.parametrize("form", ["chunk", "interleaved"])
def test_one_gemm_of_gate_and_up_passes_gradients(compiler, form):
    block, x = Block(SWIGLU_FORMS[form]), rows() / 8
    exact = rounded(block)
    ours, theirs = (
        gradients(lambda rows, run=run: run(rows, EVEN), block, leaf)["x"]
        for run, leaf in ((compile_by(compiler, block), x), (exact, x.float()))
    )
    assert relative_error(ours, theirs) < 0.02


@BOTH
def test_expanded_gradients(compiler):
    linear = GroupedLinear(4, 64, 32, dtype=BF16)
    x = rows().requires_grad_()
    with pytest.warns(RewriteWarning):
        compile_by(compiler, linear)(x, EVEN).sum().backward()  # torch's own backward fails here with "Invalid strides"
    expected = torch.cat([torch.ones(end - start, 32) @ linear.weight[e].float() for e, start, end in groups(EVEN)])
    assert relative_error(x.grad, expected) < KERNEL_TOLERANCE[BF16]


# ---- modules that quantize_ has swapped already


@LAYERS
def test_quantized_modules(compiler, moe, x):
    quantized = quantize_(copy.deepcopy(moe))
    compiled = compile_by(compiler, quantized)
    assert relative_error(compiled(x), decoded(moe)(x)) < 0.01
    assert [(e.gemm.weight, e.decision, e.reason) for e in rewrite_report(compiled)] == [
        ("routed_experts.gate_up_proj.qdata", "nvfp4 + swiglu", "quantized beforehand"),
        ("routed_experts.down_proj.qdata", "nvfp4", "quantized beforehand"),
    ]
    got, exact = gradients(compiled, quantized, x), decoded(moe).float()
    expected = gradients(lambda x: llama4_moe(exact, x), exact, x.float())
    assert relative_error(got["router.weight"], expected["router.weight"]) < 0.03
