"""moe_executor under thunder.jit: what is rewritten, what it computes, what it trains, what it declines.
Called by pytest; judged by tests/oracle.py and by the trace itself.
"""

import copy
import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from oracle import KERNEL_TOLERANCE, grouped_mm, groups, llama4_moe, relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    moe_executor,
    quantize_,
    rewrite_report,
)
from thunder_moe.formats.nvfp4 import dequantize, quantize

BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
NVFP4, SWIGLU = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"
CONFIG = Llama4MoEConfig(64, 32, 4)
# Those of the slow set; other tests have top_k 1.
SHAPES_AND_TOP_K = [((1, 1), 1), ((1, 3), 4), ((7, 1), 2)]


def jit(function, **options):
    return thunder.jit(function, executors=[moe_executor], **options)


def symbols(compiled, traces=thunder.last_traces):
    return [bsym.sym.name for bsym in traces(compiled)[-1].bound_symbols if "grouped" in bsym.sym.name]


def decoded(model):
    """The same model with its expert weights rounded to NVFP4: what a rewritten one has to compute."""
    return dequantize_(quantize_(copy.deepcopy(model)))


def test_rewrites_a_frozen_layer(moe, x):
    moe.requires_grad_(False)
    compiled = jit(moe)
    out = compiled(x)
    assert relative_error(out, llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2
    assert 0.02 < relative_error(out, llama4_moe(moe, x)) < 0.2
    assert symbols(compiled) == [SWIGLU, NVFP4]
    # The 16-bit weights are no longer inputs of the computation; the prologue packs them.
    arguments = [arg.name for arg in thunder.last_traces(compiled)[-1].args]
    assert not [name for name in arguments if name.endswith("proj_weight") and "routed" in name]
    packs = [b for b in thunder.last_prologue_traces(compiled)[-1].bound_symbols if b.sym.name == "nvfp4_pack"]
    assert [len(pack.flat_proxy_args) for pack in packs] in ([1, 2], [2, 1])


def test_report(moe, x):
    compiled = jit(moe.requires_grad_(False))
    with pytest.raises(ValueError, match="compiled: not called yet"):
        rewrite_report(compiled)
    compiled(x)
    report = rewrite_report(compiled)
    assert [(e.gemm.weight, e.decision) for e in report] == [
        ("routed_experts.gate_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.up_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.down_proj.weight", "nvfp4"),
    ]
    gemm = report.entries[2].gemm
    assert (gemm.experts, gemm.out_features, gemm.in_features, gemm.rows) == (4, 64, 32, 16)
    assert len(report.rewritten) == len(report) == 3
    assert "routed_experts.down_proj.weight" in str(report)
    with pytest.raises(ValueError, match="compiled: got Llama4MoE, wanted what thunder.jit or torch.compile returned"):
        rewrite_report(moe)


@pytest.mark.slow
def test_quantizes_once_for_all_calls_and_compilations(moe, x, count):
    moe.requires_grad_(False)
    outputs = []
    for compiled in (jit(moe), jit(lambda x: moe(x))):
        outputs += [compiled(x), compiled(x), compiled(x[:1])]
    assert len(count) == 3
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[3])


@pytest.mark.slow
def test_two_models_share_a_tied_weight(x, count):
    first, second = (Llama4MoE(CONFIG, dtype=BF16).requires_grad_(False) for _ in range(2))
    second.routed_experts = first.routed_experts
    both = nn.Sequential(first, second)
    assert relative_error(jit(both)(x), decoded(both)(x)) < 0.015  # both sides round to bf16, twice
    jit(second)(x)
    assert len(count) == 3


@pytest.mark.parametrize(
    ("shape", "top_k"),
    [((1, 1), 4), ((2, 5), 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SHAPES_AND_TOP_K)],
)
def test_any_batch_and_top_k(shape, top_k):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=top_k), dtype=BF16).requires_grad_(False)
    x = torch.randn(*shape, 64, dtype=BF16)
    assert relative_error(jit(moe)(x), llama4_moe(decoded(moe), x)) < 0.01


def test_no_shared_expert_and_all_tokens_on_one_expert(x):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, num_shared_experts=0), dtype=BF16).requires_grad_(False)
    moe.router.weight.copy_(torch.tensor([[-1.0], [-1.0], [1.0], [-1.0]]).expand(-1, 64))
    x = x.abs()
    assert relative_error(jit(moe)(x), llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2


def test_weights_that_change_are_quantized_again(moe, x, count):
    moe.requires_grad_(False)
    compiled = jit(moe)
    compiled(x)
    with torch.no_grad():
        moe.routed_experts.down_proj.weight.mul_(-2)
    assert relative_error(compiled(x), decoded(moe)(x)) < 0.01
    assert len(count) == 4
    moe.routed_experts.up_proj.weight.data = torch.randn_like(moe.routed_experts.up_proj.weight)
    assert relative_error(compiled(x), decoded(moe)(x)) < 0.01
    assert len(count) == 6  # gate and up are one pack


@pytest.mark.slow
def test_function_prologue_pruning_and_default_executors(moe, x):
    from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

    moe.requires_grad_(False)
    expected = decoded(moe)(x)
    for compiled in (
        jit(lambda x: moe(x)),
        jit(moe, transforms=[PrunePrologueChecks()]),
        thunder.jit(moe, executors=[moe_executor, *thunder.get_default_executors()]),
        thunder.jit(moe, executors=["thunder_moe"]),
    ):
        assert relative_error(compiled(x), expected) < 0.01
        assert symbols(compiled) == [SWIGLU, NVFP4]


@pytest.mark.slow
def test_nan_in_a_weight_names_the_parameter(moe, x):
    moe.requires_grad_(False)
    moe.routed_experts.down_proj.weight[1, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"routed_experts.down_proj.weight: weight: got NaN or Inf in experts \[1\]"):
        jit(moe)(x)


# ---- training


def gradients(model, x, oracle=False):
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = llama4_moe(model, x) if oracle else model(x)
    out.float().pow(2).mean().backward()
    return {"x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def compiled_gradients(model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    compiled = jit(model)
    compiled(x).float().pow(2).mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"x": x.grad, **grads}, compiled


def test_trainable_experts_train_in_16_bit(x):
    moe = Llama4MoE(Llama4MoEConfig(64, 32, 8, top_k=2), dtype=BF16)
    x = x[:1, :3]  # 6 rows for 8 experts: some have none
    with pytest.warns(RewriteWarning, match="down_proj.weight: the weight is trainable"):
        got, compiled = compiled_gradients(moe, x)
    assert symbols(compiled) == ["moe_grouped_mm"] * 3
    assert len(symbols(compiled, thunder.last_backward_traces)) == 6  # dgrad and wgrad of each
    exact = gradients(copy.deepcopy(moe).float(), x.float(), oracle=True)
    assert got.keys() == exact.keys()
    for name, grad in got.items():
        assert grad.dtype == BF16
        assert relative_error(grad, exact[name]) < 0.03, name
    idle = exact["routed_experts.up_proj.weight"].flatten(1).eq(0).all(1)
    assert idle.any()
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert got[f"routed_experts.{name}.weight"][idle].eq(0).all()


@pytest.mark.slow
def test_no_grad_runs_the_trainable_model_in_nvfp4_after_every_step(moe, x):
    compiled = jit(moe)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RewriteWarning)
            loss = compiled(x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            out = compiled(x)
            assert relative_error(out, decoded(moe)(x)) < 0.01
    assert symbols(compiled) == [SWIGLU, NVFP4]
    assert {entry.graph for entry in rewrite_report(compiled)} == {0, 1}
    assert {entry.reason.split(";")[0] for entry in rewrite_report(compiled).rewritten} == {"gradients are disabled"}


def test_frozen_experts_pass_gradients_to_router_and_input(moe, x):
    moe.routed_experts.requires_grad_(False)
    got, compiled = compiled_gradients(moe, x)
    assert symbols(compiled) == [SWIGLU, NVFP4]
    assert symbols(compiled, thunder.last_backward_traces) == [f"{NVFP4}_dgrad", f"{SWIGLU}_backward"]
    expected = gradients(decoded(moe).float(), x.float(), oracle=True)
    assert set(got) == {"x", "router.weight", *(f"shared_expert.{n}_proj.weight" for n in ("gate", "up", "down"))}
    for name, grad in got.items():
        assert relative_error(grad, expected[name]) < 0.03, name


def test_expanded_gradients():
    linear = GroupedLinear(4, 64, 32, dtype=BF16)
    x = torch.randn(8, 64, dtype=BF16, requires_grad=True)
    with pytest.warns(RewriteWarning):
        jit(linear)(x, EVEN).sum().backward()  # torch's own backward fails here with "Invalid strides"
    expected = torch.cat([torch.ones(end - start, 32) @ linear.weight[e].float() for e, start, end in groups(EVEN)])
    assert relative_error(x.grad, expected) < KERNEL_TOLERANCE[BF16]


def test_out_dtype_stays_16_bit_and_trains():
    linear = GroupedLinear(4, 64, 32, dtype=BF16)
    x = torch.randn(8, 64, dtype=BF16)
    compiled = jit(lambda x: torch._grouped_mm(x, linear.weight.mT, EVEN, out_dtype=BF16))
    with pytest.warns(RewriteWarning, match="trainable"):
        assert relative_error(compiled(x), grouped_mm(x, linear.weight, EVEN)) < KERNEL_TOLERANCE[BF16]


# ---- modules that quantize_ has swapped already


@pytest.mark.slow
def test_quantized_modules(moe, x):
    quantized = quantize_(copy.deepcopy(moe))
    compiled = jit(quantized)
    assert relative_error(compiled(x), decoded(moe)(x)) < 0.01
    assert [entry.reason for entry in rewrite_report(compiled)] == ["quantized beforehand"] * 2
    got, _ = compiled_gradients(quantized, x)
    expected = gradients(decoded(moe).float(), x.float(), oracle=True)
    assert relative_error(got["router.weight"], expected["router.weight"]) < 0.03


@pytest.mark.parametrize("layout", ["tiled_64x64"])
@pytest.mark.slow
def test_layouts_compute_the_same(layout):
    moe = Llama4MoE(Llama4MoEConfig(128, 64, 4, top_k=2), dtype=BF16)
    linear, other = (quantize_(nn.Sequential(copy.deepcopy(moe)), layout=name) for name in ("linear", layout))
    x = torch.randn(1, 5, 128, dtype=BF16)
    grads, compiled = zip(*(compiled_gradients(model, x) for model in (linear, other)), strict=True)
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    assert [entry.reason for entry in rewrite_report(compiled[1])] == ["quantized beforehand"] * 2
    traces = [traces(compiled[1])[-1] for traces in (thunder.last_traces, thunder.last_backward_traces)]
    calls = [bsym for trace in traces for bsym in trace.bound_symbols if "f16a_nvfp4weight" in bsym.sym.name]
    assert [bsym.kwargs["layout"] for bsym in calls] == [layout] * 4
    results = []
    for model in (linear, other):  # the experts alone, by the operators without routing
        leaf = torch.linspace(-3, 3, 8 * 128).sin().view(8, 128).to(BF16).requires_grad_()
        out = jit(model[0].routed_experts)(leaf, EVEN)
        out.square().sum().backward()
        results.append((out, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_weights_are_packed_in_the_layout_that_the_device_prefers(moe, x, tiles):
    moe.requires_grad_(False)
    compiled = jit(moe)
    out = compiled(x)
    assert relative_error(out, llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2
    gate_up, down = [b for b in thunder.last_traces(compiled)[-1].bound_symbols if "nvfp4weight" in b.sym.name]
    assert (gate_up.kwargs["layout"], down.kwargs["layout"]) == ("tiled_64x64", "linear")  # down: in_features 32
    packs = [b for b in thunder.last_prologue_traces(compiled)[-1].bound_symbols if b.sym.name == "nvfp4_pack"]
    assert sorted(pack.kwargs["layout"] for pack in packs) == ["linear", "tiled_64x64"]
    with torch.no_grad():
        for parameter in moe.routed_experts.parameters():
            parameter.mul_(-0.5)
    assert relative_error(compiled(x), llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2
    assert set(tiles) == {("cpu", 64, 64), ("cpu", 64, 32)}


@pytest.mark.slow
def test_gradients_pass_through_the_preferred_layout(moe, x, tiles):
    moe.routed_experts.requires_grad_(False)
    got, compiled = compiled_gradients(moe, x)
    assert [
        b.kwargs["layout"]
        for b in thunder.last_backward_traces(compiled)[-1].bound_symbols
        if "f16a_nvfp4weight" in b.sym.name
    ] == ["linear", "tiled_64x64"]
    expected = gradients(decoded(moe).float(), x.float(), oracle=True)
    assert relative_error(got["router.weight"], expected["router.weight"]) < 0.03


# ---- what is recognised, and what is left alone


class Block(nn.Module):
    """Experts whose forward is given, to try patterns."""

    def __init__(self, forward, dtype=BF16, in_features=64, layout="EKN"):
        super().__init__()
        shape = (4, in_features, 32)
        self.gate, self.up, self.other = (
            nn.Parameter(
                torch.randn(shape if layout == "EKN" else (4, 32, in_features), dtype=dtype), requires_grad=False
            )
            for _ in range(3)
        )
        self.body = forward

    def forward(self, x, offsets):
        return self.body(self, x, offsets)


def mm(x, weight, offsets):
    return F.grouped_mm(x, weight, offs=offsets)


@pytest.mark.parametrize(
    "swap",
    [
        lambda w: w.transpose(-2, -1),
        lambda w: w.transpose(1, 2),
        lambda w: w.mT,
        lambda w: w.permute(0, 2, 1),
        lambda w: w.swapaxes(-1, -2),
        lambda w: w.swapdims(1, 2),
        lambda w: w.mT.mT.mT,
        lambda w: w.detach().mT,
        lambda w: w.mT.detach(),
        lambda w: w.to(BF16).mT,
        lambda w: w.bfloat16().mT,
        lambda w: w.contiguous().mT,
        lambda w: w[:].mT,
        lambda w: w.view(w.shape).mT,
        lambda w: w.view_as(w).mT,
        lambda w: w.unsqueeze(0).squeeze(0).mT,
    ],
)
@pytest.mark.covering(1)
def test_recognises_every_view_of_a_whole_weight(swap):
    block = Block(lambda self, x, offsets: mm(x, swap(self.gate), offsets), layout="ENK")
    x = torch.randn(8, 64, dtype=BF16)
    compiled = jit(block)
    expected = grouped_mm(x, dequantize(quantize(block.gate)), EVEN)
    assert relative_error(compiled(x, EVEN), expected) < KERNEL_TOLERANCE[BF16]
    assert symbols(compiled) == [NVFP4]


@pytest.mark.parametrize("call", [torch._grouped_mm, F.grouped_mm])
def test_recognises_weights_stored_as_they_are_multiplied(call):
    block = Block(lambda self, x, offsets: call(x, self.gate, offs=offsets))
    x = torch.randn(8, 64, dtype=BF16)
    compiled = jit(block)
    expected = grouped_mm(x, dequantize(quantize(block.gate.mT)), EVEN)
    assert relative_error(compiled(x, EVEN), expected) < KERNEL_TOLERANCE[BF16]
    assert symbols(compiled) == [NVFP4]


def swiglu(gate, up):
    return F.silu(gate) * up


SWIGLU_FORMS = {
    "silu(gate) * up": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "up * silu(gate)": lambda self, x, o: mm(x, self.up, o) * F.silu(mm(x, self.gate, o)),
    "chunk": lambda self, x, o: swiglu(*mm(x, self.gate, o).chunk(2, -1)),
    "split": lambda self, x, o: swiglu(*mm(x, self.gate, o).split(16, 1)),
    "slices": lambda self, x, o: (lambda y: swiglu(y[..., :16], y[:, 16:]))(mm(x, self.gate, o)),
    "interleaved": lambda self, x, o: (lambda y: y[..., 1::2] * F.silu(y[..., ::2]))(mm(x, self.gate, o)),
    "torch.mul": lambda self, x, o: torch.mul(F.silu(mm(x, self.gate, o)), mm(x, self.up, o)),
}
NOT_SWIGLU = {
    "gelu": lambda self, x, o: F.gelu(mm(x, self.gate, o)) * mm(x, self.up, o),
    "gate read twice": lambda self, x, o: (lambda g: F.silu(g) * mm(x, self.up, o) + g)(mm(x, self.gate, o)),
    "silu read twice": lambda self, x, o: (lambda s: s * mm(x, self.up, o) + s)(F.silu(mm(x, self.gate, o))),
    "two inputs": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x + 1, self.up, o),
    "two offsets": lambda self, x, o: F.silu(mm(x, self.gate, o)) * mm(x, self.up, o + 0),
    "up before gate": lambda self, x, o: swiglu(*mm(x, self.gate, o).chunk(2, -1)[::-1]),
    "one half": lambda self, x, o: swiglu(*[mm(x, self.gate, o).chunk(2, -1)[0]] * 2),
    "halves read twice": lambda self, x, o: (lambda a, b: swiglu(a, b) + b)(*mm(x, self.gate, o).chunk(2, -1)),
    "whole read too": lambda self, x, o: (lambda y: swiglu(*y.chunk(2, -1)) + y[:, 8:24])(mm(x, self.gate, o)),
    "other parts": lambda self, x, o: (lambda y: swiglu(y[:, :8], y[:, 16:24]))(mm(x, self.gate, o)),
    "half interleaved": lambda self, x, o: (lambda y: swiglu(y[:, ::2], y[:, 16:]))(mm(x, self.gate, o)),
    "silu of a sum": lambda self, x, o: F.silu(mm(x, self.gate, o) + 1) * mm(x, self.up, o),
}


@pytest.mark.parametrize("body", [*SWIGLU_FORMS.values(), *NOT_SWIGLU.values()], ids=[*SWIGLU_FORMS, *NOT_SWIGLU])
@pytest.mark.covering(1)
def test_swiglu_is_fused_where_it_is_one(body):
    block = Block(body)
    x = torch.randn(8, 64, dtype=BF16) / 8
    compiled = jit(block)
    out = compiled(x, EVEN)
    reference = copy.deepcopy(block).float()
    for name in ("gate", "up"):
        getattr(reference, name).copy_(dequantize(quantize(getattr(block, name).mT), torch.float32).mT)
    assert relative_error(out, body(reference, x.float(), EVEN)) < 0.01
    fused = body in SWIGLU_FORMS.values()
    assert symbols(compiled) == ([SWIGLU] if fused else [NVFP4] * len(rewrite_report(compiled)))


@pytest.mark.parametrize("body", [SWIGLU_FORMS["chunk"], SWIGLU_FORMS["interleaved"]])
def test_one_gemm_of_gate_and_up_passes_gradients(body):
    block, x = Block(body), torch.randn(8, 64, dtype=BF16) / 8
    grads = []
    for model, rows in ((jit(block), x.clone().requires_grad_()), (copy.deepcopy(block).float(), x.float())):
        if rows.dtype == torch.float32:
            model.gate.copy_(dequantize(quantize(block.gate.mT), torch.float32).mT)
            rows.requires_grad_()
        model(rows, EVEN).square().sum().backward()
        grads.append(rows.grad)
    assert relative_error(*grads) < 0.02


@pytest.mark.parametrize("other", [lambda w: w[:, :16].mT, lambda w: w.mT * 1, lambda w: w.flip(0).mT])
def test_what_is_not_the_whole_weight_is_declined(other):
    block = Block(lambda self, x, offsets: mm(x, other(self.gate), offsets), layout="ENK")
    compiled, x = jit(block), torch.randn(8, 64, dtype=BF16)
    with pytest.warns(RewriteWarning, match="not a parameter or buffer"):
        assert torch.equal(compiled(x, EVEN), block(x, EVEN))


def test_a_weight_that_is_used_otherwise_too_stays_an_input():
    block = Block(lambda self, x, o: mm(x, self.gate, o) + self.gate.sum())
    compiled = jit(block)
    x = torch.randn(8, 64, dtype=BF16)
    expected = grouped_mm(x, dequantize(quantize(block.gate.mT)), EVEN).to(BF16) + block.gate.sum()
    assert relative_error(compiled(x, EVEN), expected) < KERNEL_TOLERANCE[BF16]
    assert (4, 64, 32) in [tuple(arg.shape) for arg in thunder.last_traces(compiled)[-1].args]


@pytest.mark.parametrize("returned", [lambda w: w, lambda w: w.mT], ids=["as it is", "transposed"])
def test_a_weight_that_is_returned_too_stays_an_input(returned):
    block = Block(lambda self, x, o: (mm(x, self.gate.mT, o), returned(self.gate)), layout="ENK")
    compiled = jit(block)
    _, weight = compiled(torch.randn(8, 64, dtype=BF16), EVEN)
    assert torch.equal(weight, returned(block.gate))
    assert symbols(compiled) == [NVFP4]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Block(lambda self, x, o: mm(x, self.gate * 2, o)), "not a parameter or buffer"),
        (Block(lambda self, x, o: mm(x.float(), self.gate, o), dtype=torch.float32), "torch.float32, not bfloat16"),
        (
            Block(lambda self, x, o: mm(x[:, :40], self.gate, o), in_features=40),
            "in_features 40 is not a multiple of 16",
        ),
        (Block(lambda self, x, o: mm(x, self.gate, o)).requires_grad_(), "trainable: freeze it"),
    ],
)
def test_declines_with_its_reason(block, reason):
    compiled = jit(block)
    x = torch.randn(8, 64, dtype=BF16)
    with pytest.warns(RewriteWarning, match=reason):
        out = compiled(x, EVEN)
    assert torch.equal(out, block(x, EVEN))
    (entry,) = rewrite_report(compiled)
    assert reason in entry.reason
    assert not entry.rewritten
    assert symbols(compiled) == ["moe_grouped_mm"]


def test_an_argument_as_weight_is_declined():
    x, weight = torch.randn(8, 64, dtype=BF16), torch.randn(4, 64, 32, dtype=BF16)
    with pytest.warns(RewriteWarning, match="not a parameter or buffer"):
        out = jit(mm)(x, weight, EVEN)
    assert torch.equal(out, mm(x, weight, EVEN))


def test_partly_frozen_layers_are_partly_rewritten(x):
    experts = GroupedSwiGLU(4, 64, 32, dtype=BF16)
    experts.down_proj.requires_grad_(False)
    compiled = jit(experts)
    compiled(x[0], EVEN)
    assert [entry.decision for entry in rewrite_report(compiled)] == ["16-bit", "16-bit", "nvfp4"]


def test_nothing_to_rewrite_is_a_warning():
    compiled = jit(nn.Linear(3, 4))
    with pytest.warns(RewriteWarning, match="has no call of torch.nn.functional.grouped_mm"):
        compiled(torch.randn(2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RewriteWarning)
        compiled(torch.randn(2, 3))
    assert len(rewrite_report(compiled)) == 0
    assert str(rewrite_report(compiled)) == "no grouped GEMM was compiled"


def test_bad_operands_are_refused_while_tracing():
    x, weight = torch.randn(8, 64, dtype=BF16), torch.randn(4, 64, 32, dtype=BF16)
    for rows, offsets, message in (
        (x, EVEN.long(), r"offs: got .*int64 \(4,\), wanted int32 \(4,\)"),
        (x, EVEN[:3], r"offs: got .*int32 \(3,\), wanted int32 \(4,\)"),
        (x[:, :48], EVEN, r"mat_a: got shape \(8, 48\), wanted \(rows, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            jit(mm)(rows, weight, offsets)
    with pytest.raises(ValueError, match=r"offsets: got .* \(3,\)"):
        jit(GroupedLinear(4, 64, 32, dtype=BF16))(x, EVEN[:3])


def test_unsupported_forms_still_say_so():
    x, weight = torch.randn(8, 64, dtype=BF16), torch.randn(4, 64, 32, dtype=BF16)
    with pytest.raises(Exception, match="bias"):
        jit(lambda x: F.grouped_mm(x, weight, offs=EVEN, bias=torch.zeros(4, 32, dtype=BF16)))(x)
