"""moe_executor under thunder.jit: its traces, the layouts in them, executors and transforms beside it, bad operands.
Called by pytest; judged by tests/oracle.py and by the trace. ../test_rewrite.py has what both compilers do.
"""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, llama4_moe, relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    dequantize_,
    moe_executor,
    quantize_,
    rewrite_report,
)

BF16 = torch.bfloat16
EVEN = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
NVFP4, SWIGLU = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"


def jit(function, **options):
    return thunder.jit(function, executors=[moe_executor], **options)


def symbols(compiled, traces=thunder.last_traces):
    return [bsym.sym.name for bsym in traces(compiled)[-1].bound_symbols if "grouped" in bsym.sym.name]


def decoded(model):
    """Return the model with its expert weights rounded to NVFP4: a rewritten model has to compute the same."""
    return dequantize_(quantize_(copy.deepcopy(model)))


def test_rewrites_a_frozen_layer(moe, x):
    moe.requires_grad_(False)
    compiled = jit(moe)
    out = compiled(x)
    assert relative_error(out, llama4_moe(decoded(moe), x)) < KERNEL_TOLERANCE[BF16] * 2
    assert 0.02 < relative_error(out, llama4_moe(moe, x)) < 0.2
    assert symbols(compiled) == [SWIGLU, NVFP4]
    assert [(entry.gemm.weight, entry.decision) for entry in rewrite_report(compiled)] == [
        ("routed_experts.gate_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.up_proj.weight", "nvfp4 + swiglu"),
        ("routed_experts.down_proj.weight", "nvfp4"),
    ]
    assert [entry.decision for entry in rewrite_report(compiled).routers] == ["moe_router"]
    assert "topk" not in str(thunder.last_traces(compiled)[-1])
    # The 16-bit weights are no longer inputs of the computation; the prologue packs them.
    arguments = [arg.name for arg in thunder.last_traces(compiled)[-1].args]
    assert not [name for name in arguments if name.endswith("proj_weight") and "routed" in name]
    packs = [b for b in thunder.last_prologue_traces(compiled)[-1].bound_symbols if b.sym.name == "nvfp4_pack"]
    assert [len(pack.flat_proxy_args) for pack in packs] in ([1, 2], [2, 1])


def test_function_prologue_pruning_and_default_executors():
    from thunder.transforms.prune_prologue_checks import PrunePrologueChecks

    experts, x = GroupedSwiGLU(4, 64, 32, dtype=BF16).requires_grad_(False), torch.randn(8, 64, dtype=BF16)
    expected = decoded(nn.ModuleList([experts]))[0](x, EVEN)
    for compiled in (
        jit(lambda x, offsets: experts(x, offsets), transforms=[PrunePrologueChecks()]),
        thunder.jit(experts, executors=["thunder_moe", *thunder.get_default_executors()]),
    ):
        assert relative_error(compiled(x, EVEN), expected) < 0.01
        assert symbols(compiled) == [SWIGLU, NVFP4]


def test_layouts_compute_the_same():
    experts, results = nn.ModuleList([GroupedSwiGLU(4, 128, 64, dtype=BF16)]), []
    for layout in ("linear", "tiled_64x64"):
        compiled = jit(quantize_(copy.deepcopy(experts), layout=layout)[0])
        leaf = torch.linspace(-3, 3, 8 * 128).sin().view(8, 128).to(BF16).requires_grad_()
        out = compiled(leaf, EVEN)
        out.square().sum().backward()
        results.append((out, leaf.grad))
        assert [entry.reason for entry in rewrite_report(compiled)] == ["quantized beforehand"] * 2
        traces = [traces(compiled)[-1] for traces in (thunder.last_traces, thunder.last_backward_traces)]
        calls = [bsym for trace in traces for bsym in trace.bound_symbols if "f16a_nvfp4weight" in bsym.sym.name]
        assert [bsym.kwargs["layout"] for bsym in calls] == [layout] * 4
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_all_gemms_of_a_step_read_the_layout_that_the_device_prefers(tiles):
    experts = GroupedSwiGLU(4, 64, 32, dtype=BF16).requires_grad_(False)
    compiled = jit(experts)
    compiled(torch.randn(8, 64, dtype=BF16, requires_grad=True), EVEN).float().sum().backward()
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    calls = [bsym for trace in (forward, backward) for bsym in trace.bound_symbols if "nvfp4weight" in bsym.sym.name]
    tiled, linear = "tiled_64x64", "linear"  # down has 32 in_features
    assert [(call.sym.name, call.kwargs["layout"]) for call in calls] == [
        (SWIGLU, tiled), (NVFP4, linear), (f"{NVFP4}_backward", linear), (f"{SWIGLU}_backward", tiled),
    ]  # fmt: skip
    packs = [b for b in thunder.last_prologue_traces(compiled)[-1].bound_symbols if b.sym.name == "nvfp4_pack"]
    assert sorted(pack.kwargs["layout"] for pack in packs) == [linear, tiled]


def mm(x, weight, offsets):
    return F.grouped_mm(x, weight, offs=offsets)


@pytest.mark.parametrize("returned", [lambda w: w, lambda w: w.mT], ids=["as it is", "transposed"])
def test_a_weight_that_is_returned_too_stays_an_input(returned):
    linear = GroupedLinear(4, 64, 32, dtype=BF16).requires_grad_(False)
    compiled = jit(lambda x, offsets: (mm(x, linear.weight.mT, offsets), returned(linear.weight)))
    _, weight = compiled(torch.randn(8, 64, dtype=BF16), EVEN)
    assert torch.equal(weight, returned(linear.weight))
    assert symbols(compiled) == [NVFP4]


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), *others_slow([((2, 2),)], exhaustive=True)])
@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
def test_attention_whose_heads_share_keys(heads):
    """Models of transformers ask for `enable_gqa` in a prompt, and Thunder's own symbol does not take it."""

    def attention(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)

    operands = [torch.randn(2, count, 5, 16) for count in (heads[0], heads[1], heads[1])]
    results = []
    for run in (attention, jit(attention)):
        leaves = [operand.clone().requires_grad_() for operand in operands]
        out = run(*leaves)
        out.square().sum().backward()
        results.append((out, *(leaf.grad for leaf in leaves)))
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) < 1e-5


def replace_the_module(model):
    model.block = GroupedLinear(4, 64, 32, dtype=BF16).requires_grad_(False)


def replace_a_parameter(model):
    model.block.weight = nn.Parameter(torch.zeros(4, 32, 64, dtype=BF16), requires_grad=False)


def replace_a_buffer(model):
    model.block.global_scale = 2 * model.block.global_scale


@pytest.mark.parametrize(
    "replace", [*others_slow([replace_the_module], exhaustive=True), replace_a_parameter, replace_a_buffer]
)
def test_weights_that_were_replaced_are_refused_by_name(replace):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = GroupedLinear(4, 64, 32, dtype=BF16).requires_grad_(False)

        def forward(self, x, offsets):
            return self.block(x, offsets)

    model = Model()
    model = quantize_(model) if replace is replace_a_buffer else model
    compiled, x = jit(model), torch.randn(8, 64, dtype=BF16)
    compiled(x, EVEN)
    replace(model)
    with pytest.raises(ValueError, match=r"block\.\w+: it, or a module that holds it, was replaced after thunder.jit"):
        compiled(x, EVEN)


@pytest.mark.parametrize("act", ["to", "load_state_dict"])
def test_a_refused_buffer_names_the_acts_that_replace_one_unnoticed(act):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weight", torch.randn(4, 32, 64, dtype=BF16))

        def forward(self, x, offsets):
            return mm(x, self.weight.mT, offsets)

    model, x = Model(), torch.randn(8, 64, dtype=BF16)
    compiled = jit(model)
    expected = compiled(x, EVEN)
    if act == "to":
        model.to(torch.float32).to(BF16)
    else:
        compiled.load_state_dict({"weight": model.weight.clone()}, assign=True)
    with pytest.raises(ValueError, match=rf"weight: .* replaced after thunder.jit.*{act}\(.*\).* replaces"):
        compiled(x, EVEN)
    assert torch.equal(jit(model)(x, EVEN), expected)


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
