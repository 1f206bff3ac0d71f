"""The nvFuser route: what it makes of models under Thunder's own fusion pass, and what that computes.
Called by pytest; judged by the text of the fusions, by oracles that run what the text says, and by kernels/w4a4.py.
"""

import copy
import re
import sys
import weakref

import pytest
import thunder
import torch
import torch.nn.functional as F
from fast_cases import others_slow
from nvfuser_emulator import Ops, statements
from nvfuser_session import OnCpu, run_as_cuda, set_gpu
from oracle import KERNEL_TOLERANCE, dequantize, grouped_mm, relative_error
from thunder.dynamo import thunderfx

from thunder_moe import (
    GroupedLinear,
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    dequantize_,
    moe_executor,
    quantize_,
    rewrite_report,
    weight_cache,
)
from thunder_moe.compilers import thunder_compat
from thunder_moe.compilers.thunder import nvfuser as route
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import w4a4

pytest_plugins = "nvfuser_session"  # the fixtures implementation, fusions and executors

BF16 = torch.bfloat16
EVEN = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
NVFP4, SWIGLU = "f16a_nvfp4weight_scaled_grouped_mm", "f16a_nvfp4weight_grouped_swiglu"


class Experts(torch.nn.Module):
    """The oracle of a block's W4A4 experts: fp32, an expert at a time, weights and rows rounded to NVFP4."""

    def __init__(self, block, amax=(None, None)) -> None:
        super().__init__()
        gate, up, down = (getattr(block, f"{name}_proj").weight.detach() for name in ("gate", "up", "down"))
        self.gate_up = dequantize(*quantize(torch.cat([gate, up], 1)).tensors())  # one global scale for both
        self.down, self.amax = dequantize(*quantize(down).tensors()), amax

    def forward(self, x, offsets):
        gate, up = grouped_mm(rounded(x, self.amax[0]), self.gate_up, offsets).to(x.dtype).float().chunk(2, -1)
        h = (F.silu(gate) * up).to(x.dtype)
        return grouped_mm(rounded(h, self.amax[1]), self.down, offsets).to(x.dtype)


def rounded(rows, amax=None):
    """Return rows after the round trip through NVFP4, by the emulator's arithmetic."""
    encode = torch.tensor(2688.0) / (rows.float().abs().max() if amax is None else torch.tensor(amax))
    values, scale = Ops().nv_block_quantize(rows, encode)
    return values * scale.float().repeat_interleave(16, -1) / encode


def block(hidden=128, intermediate=128, experts=4, dtype=BF16):
    experts = GroupedSwiGLU(experts, hidden, intermediate, dtype=dtype).requires_grad_(False)
    for linear in (experts.gate_proj, experts.up_proj, experts.down_proj):
        torch.nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    with torch.no_grad():
        experts.up_proj.weight.mul_(3)  # gate and up differ in scale, and have to share one
    return experts


def expression(fusion, name) -> str:
    """Return a fusion's value as an expression without numbers, casts, broadcasts: `sub(Int32, slice(pad(Int32)))`."""
    outputs, operation, arguments, keywords = next(line for line in fusion if name in line[0])
    if operation == "define_tensor":
        return keywords["dtype"].removeprefix("DataType.").removesuffix("_x2")
    made = {output: line[1] for line in fusion for output in line[0]}
    words = re.findall(r"\w+", " ".join([*arguments, *keywords.values()]))
    parts = [expression(fusion, word) for word in words if made.get(word, "define_scalar") != "define_scalar"]
    if operation in ("cast", "broadcast", "broadcast_in_dim", "expand"):
        return parts[0]
    if operation == "pad":  # nvFuser computes some widths
        parts = parts[:1]
    if operation == "cat":  # nvFuser writes it as a sum of padded parts
        parts = [part[4:-1] if part.startswith("pad(") else part for part in parts]
    index = f"[{outputs.index(name)}]" if len(outputs) > 1 else ""
    return f"{operation}({', '.join(parts)}){index}"


def gemms(texts):
    """Return (fusion, arguments) of each CUTLASS GEMM."""
    for text in texts:
        fusion = statements(text)
        for _, operation, arguments, _ in fusion:
            if operation == "cutlass_nvfp4_grouped_mm":
                yield fusion, arguments


def regions(compiled):
    """Return the names of the symbols in every nvFuser region of the final trace, and the others."""
    bsyms = thunder.last_traces(compiled)[-1].bound_symbols
    fused = [[sub.sym.name for sub in bsym.subsymbols] for bsym in bsyms if bsym.sym.is_fusion]
    return fused, [bsym.sym.name for bsym in bsyms if not bsym.sym.is_fusion]


@pytest.mark.parametrize(
    "intermediate", [*others_slow([128], exhaustive=True), 192], ids=["rows of 128", "rows padded to 256"]
)
def test_llama4_is_one_region(fusions, executors, intermediate):
    moe = Llama4MoE(Llama4MoEConfig(128, intermediate, 4), dtype=BF16).requires_grad_(False)
    moe.routed_experts = block(128, intermediate)
    x = torch.randn(2, 8, 128, dtype=BF16)
    out, compiled = run_as_cuda(moe, x, executors=executors)
    fused, others = regions(compiled)
    assert [NVFP4 in names and SWIGLU in names for names in fused if {NVFP4, SWIGLU} & set(names)] == [True]
    assert not {NVFP4, SWIGLU} & set(others)
    for entry in rewrite_report(compiled):
        assert entry.reason.endswith("; by nvFuser, rows in NVFP4 too")

    (fusion, first), (same, second) = gemms(fusions)
    assert fusion == same
    shown = [[expression(fusion, name) for name in arguments[:8]] for arguments in (first, second)]
    ends = "cumsum(Int32)"
    starts = f"slice(pad({ends}))"
    rows = f"sub({ends}, {starts})"
    padded = f"bitwise_and(add({rows}))"
    scale_starts = f"sub(cumsum({padded}), {padded})"
    hidden = f"cutlass_nvfp4_grouped_mm({', '.join(shown[0])})"
    activated = f"mul(silu(slice({hidden})), slice({hidden}))"
    activations = ["BFloat16", activated if intermediate == 128 else f"slice({activated})"]
    for activation, parts in zip(activations, shown, strict=True):
        live = f"lt(iota(), squeeze(slice({ends})))"
        encode = f"div(maximum(max(where({live}, abs({activation})))))"
        quantized = f"nv_grouped_block_quantize({activation}, {starts}, {scale_starts}, {encode})"
        assert parts == [
            f"{quantized}[0]",
            "Float4_e2m1fn",
            f"{quantized}[1]",
            "Float8_e4m3fn",
            f"mul(Float, reciprocal({encode}))",
            f"cat({rows}, full(), full())",
            starts,
            scale_starts,
        ]
    # Both GEMMs share their operands: one cumsum makes the rows' bounds, the other one is the routing's.
    assert first[6:8] == second[6:8]
    assert sum(operation == "cumsum" for _, operation, _, _ in fusion) == 2
    assert sum(operation == "nv_grouped_block_quantize" for _, operation, _, _ in fusion) == 2

    oracle = copy.deepcopy(moe)
    oracle.routed_experts = Experts(moe.routed_experts)
    assert relative_error(out, oracle(x)) < 0.01
    assert relative_error(out, moe(x)) > 0.05


# Rows of each of four experts, the dtype of the rows.
W4A4 = [((0, 5, 0, 0), torch.float16), ((0, 0, 0, 0), BF16)]
MORE_W4A4 = [
    ((1, 7, 0, 3), BF16),
    ((0, 1, 0, 0), torch.float16), ((0, 5, 0, 0), BF16), ((4, 4, 4, 4), BF16), ((0, 0, 0, 9), BF16),
    ((1, 7, 0, 3), torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("offsets", "dtype"),
    [*W4A4, *others_slow(MORE_W4A4, exhaustive=True)],
    indirect=["offsets"],
)
def test_computes_w4a4(fusions, implementation, offsets, dtype):
    experts = block(128, 192, dtype=dtype)
    x = torch.randn(int(offsets[-1]), 128, dtype=dtype)
    out, compiled = run_as_cuda(experts, x, offsets, executors=[moe_executor, implementation.ex])
    if offsets[-1] == 0:
        assert out.shape == (0, 128)
        assert "not by nvFuser: there are no rows" in str(rewrite_report(compiled))
        return
    assert len(regions(compiled)[0]) == 1
    assert relative_error(out, Experts(experts)(x, offsets)) < KERNEL_TOLERANCE[dtype]
    gate, up, down = (linear.weight for linear in (experts.gate_proj, experts.up_proj, experts.down_proj))
    hidden = w4a4.grouped_swiglu(x, quantize(torch.cat([gate, up], 1)), offsets)
    assert relative_error(out, w4a4.grouped_mm(hidden, quantize(down), offsets)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("garbage", [torch.nan, *others_slow([1e30], exhaustive=True)])
def test_rows_past_the_last_group_do_not_matter(fusions, implementation, garbage):
    model, x, offsets = block(), torch.randn(20, 128, dtype=BF16), EVEN.clone()
    x[16:] = garbage
    out, _ = run_as_cuda(model, x, offsets, executors=[moe_executor, implementation.ex])
    assert relative_error(out[:16], Experts(model)(x[:16], offsets)) < KERNEL_TOLERANCE[BF16]
    packed = quantize(torch.cat([model.gate_proj.weight, model.up_proj.weight], 1))
    assert torch.equal(w4a4.grouped_mm(x, packed, offsets)[:16], w4a4.grouped_mm(x[:16], packed, offsets))


@pytest.mark.parametrize("experts", [7, *others_slow([1], exhaustive=True)])
def test_computes_with_any_number_of_experts(fusions, implementation, experts):
    model, x = block(64, 64, experts), torch.randn(300, 64, dtype=BF16)
    offsets = torch.linspace(300 // experts, 300, experts).int()
    out, _ = run_as_cuda(model, x, offsets, executors=[moe_executor, implementation.ex])
    assert relative_error(out, Experts(model)(x, offsets)) < KERNEL_TOLERANCE[BF16]


def test_calibrated_scales_need_no_reduction(fusions, implementation):
    model, x, offsets = block(), torch.randn(16, 128, dtype=BF16), EVEN.clone()
    amax = {"gate_proj.weight": 2.6, "down_proj.weight": 7.0}  # the largest of x are cut off
    options = dict(executors=[moe_executor, implementation.ex], nvfp4_activation_amax=amax)
    out, _ = run_as_cuda(model, x, offsets, **options)
    oracle = Experts(model, tuple(amax.values()))
    assert relative_error(out, oracle(x, offsets)) < KERNEL_TOLERANCE[BF16]
    assert relative_error(out, Experts(model)(x, offsets)) > 0.02
    assert " fd.ops.max(" not in fusions[0]
    for wrong in (0.0, torch.nan):
        with pytest.raises(ValueError, match="nvfp4_activation_amax: got .* for 'gate_proj.weight', wanted a positive"):
            run_as_cuda(model, x, offsets, **options | dict(nvfp4_activation_amax={"gate_proj.weight": wrong}))


@pytest.mark.slow
@pytest.mark.exhaustive  # test_nvfuser_checker.py has the capabilities, and other tests our kernels between regions
def test_hopper_runs_our_kernels_between_regions(fusions, implementation, monkeypatch):
    executors = [moe_executor, implementation.ex]
    set_gpu(monkeypatch, implementation, capability=(9, 0))
    moe = Llama4MoE(Llama4MoEConfig(128, 128, 4), dtype=BF16).requires_grad_(False)
    x = torch.randn(2, 8, 128, dtype=BF16)
    out, compiled = run_as_cuda(moe, x, executors=executors)
    fused, others = regions(compiled)
    assert len(fused) > 1
    assert [name for name in others if name in (NVFP4, SWIGLU)] == [SWIGLU, NVFP4]
    for entry in rewrite_report(compiled):
        assert entry.reason.endswith(
            "not by nvFuser: the compute capability is 9.0, its NVFP4 kernel runs on 10.0 alone"
        )
    assert relative_error(out, dequantize_(quantize_(copy.deepcopy(moe)))(x)) < 0.01


def test_thunderfx_tells_that_nvfuser_gets_no_gemms(fusions, implementation):
    compiled = thunderfx(block(), executors=[implementation.ex, moe_executor])
    compiled(torch.randn(16, 128, dtype=BF16), EVEN)
    for entry in rewrite_report(compiled):
        assert entry.reason.endswith("; not by nvFuser: it gets expert GEMMs from thunder.jit, not from thunderfx")


def test_a_model_without_nvfuser_listed_does_not_mention_it(fusions):
    _, compiled = run_as_cuda(block(), torch.randn(16, 128, dtype=BF16), EVEN.clone(), executors=[moe_executor])
    assert "nvFuser" not in str(rewrite_report(compiled))


def test_frozen_experts_pass_gradients(fusions, implementation):
    experts, offsets = block(), EVEN.clone()
    x = torch.randn(16, 128, dtype=BF16, requires_grad=True)
    out, _ = run_as_cuda(experts, x, offsets, executors=[moe_executor, implementation.ex])
    assert relative_error(out, Experts(experts)(x, offsets)) < KERNEL_TOLERANCE[BF16]
    with OnCpu():
        out.float().sum().backward()
    reference = x.detach().requires_grad_()
    weights = Experts(experts)  # unrounded rows: the gradient that the 16-bit rows have
    gate, up = grouped_mm(reference, weights.gate_up, offsets).chunk(2, -1)
    grouped_mm(F.silu(gate) * up, weights.down, offsets).sum().backward()
    assert relative_error(x.grad, reference.grad) < 0.02


@pytest.mark.parametrize("out_features", [*others_slow([128], exhaustive=True), 200])
def test_linears_quantized_beforehand(fusions, implementation, out_features):
    torch.manual_seed(0)
    linear = torch.nn.ModuleList([GroupedLinear(4, 128, out_features, dtype=BF16)])
    weight = linear[0].weight.detach().clone()
    model = Call(quantize_(linear)[0])
    x, offsets = torch.randn(16, 128, dtype=BF16), EVEN.clone()
    out, compiled = run_as_cuda(model, x, offsets, executors=[moe_executor, implementation.ex])
    (entry,) = rewrite_report(compiled)
    assert entry.reason == "quantized beforehand; by nvFuser, rows in NVFP4 too"
    assert NVFP4 in regions(compiled)[0][0]
    expected = grouped_mm(rounded(x), dequantize(*quantize(weight).tensors()), offsets)
    assert relative_error(out, expected) < KERNEL_TOLERANCE[BF16]


def test_blocks_quantized_beforehand(fusions, implementation):
    """gate and up have a global scale each and run our kernel; down_proj runs nvFuser's."""
    experts = block()
    model = Call(quantize_(torch.nn.ModuleList([copy.deepcopy(experts)]))[0])
    x, offsets = torch.randn(16, 128, dtype=BF16), EVEN.clone()
    out, compiled = run_as_cuda(model, x, offsets, executors=[moe_executor, implementation.ex])
    gate_up, down = rewrite_report(compiled)
    if model.inner.gate_up_proj.global_scale.ndim == 2:
        reason = "weight_global_scale has shape (4, 256), wanted (4,), one scale per expert"
        assert gate_up.reason == f"quantized beforehand; not by nvFuser: {reason}"
    assert down.reason == "quantized beforehand; by nvFuser, rows in NVFP4 too"
    assert 0.01 < relative_error(out, model(x, offsets)) < 0.2


@pytest.mark.parametrize(
    "make", [lambda: GroupedLinear(4, 128, 128, dtype=BF16), *others_slow([block], exhaustive=True)]
)
def test_layouts_of_other_kernels_are_not_nvfusers(fusions, implementation, make):
    layout, experts = "tiled_64x64", torch.nn.ModuleList([make()])
    linear, other = (quantize_(copy.deepcopy(experts), layout=name) for name in ("linear", layout))
    x, offsets = torch.randn(16, 128, dtype=BF16), EVEN.clone()
    reason = f"layout is {layout!r}, wanted 'swizzled_128x4', which is made of buffers in layout 'linear'"
    for plain, module in zip(linear, other, strict=True):
        model = Call(module)
        out, compiled = run_as_cuda(model, x, offsets, executors=[moe_executor, implementation.ex])
        assert {e.reason for e in rewrite_report(compiled)} == {f"quantized beforehand; not by nvFuser: {reason}"}
        assert not {NVFP4, SWIGLU} & {name for names in regions(compiled)[0] for name in names}
        assert torch.equal(out, plain(x, offsets))


class Call(torch.nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args)


def test_given_sizes_and_places_are_used(fusions, implementation):
    """A call of the operator itself may pass what is otherwise derived."""
    weight = quantize(torch.randn(4, 128, 128) / 11).to_layout(route.LAYOUT)
    offsets = EVEN.clone()
    sizes = torch.tensor([[4, 128, 128]] * 4, dtype=torch.int32)
    places = torch.tensor([0, 256, 128, 384], dtype=torch.int32)  # not in the order of the groups
    fp4_weight = weight.qdata.view(torch.float4_e2m1fn_x2).transpose(1, 2)
    x = torch.randn(16, 128, dtype=BF16)
    arguments = (x, fp4_weight, weight.scale, weight.global_scale, offsets, places, sizes)

    def function(*args):
        return torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(*args, layout=route.LAYOUT)

    model = Call(function)
    out, compiled = run_as_cuda(model, *arguments, executors=[moe_executor, implementation.ex])
    assert "cumsum" not in fusions[0]
    expected = grouped_mm(rounded(x), dequantize(*weight.to_layout("linear").tensors()), offsets)
    assert relative_error(out, expected) < KERNEL_TOLERANCE[BF16]
    assert "by nvFuser" in rewrite_report(compiled).entries[0].reason


def test_direct_bindings_alone_serve_thunder(implementation, monkeypatch):
    """Thunder 0.2.6 takes one function from a package that wheels of 0.2.36 do not have."""
    monkeypatch.delitem(sys.modules, "nvfuser", raising=False)
    thunder_compat.alias_nvfuser()
    tensor = torch.empty(4, 64, 256).transpose(1, 2)
    implementation.compute_contiguity.cache_clear()
    contiguity, order = implementation.compute_contiguity(tensor.shape, tensor.stride())
    assert (contiguity, order) == ((True,) * 3, (2, 0, 1))


# ---- the weights as nvFuser takes them


def decode(operands, n, parts=1) -> torch.Tensor:
    """Return (E, N, K) in fp32 of operands in layout "swizzled_128x4", whose padding has to be zeros."""
    fp4_weight, scale, global_scale = operands
    assert fp4_weight.dtype == torch.float4_e2m1fn_x2
    qdata = fp4_weight.view(torch.uint8).transpose(1, 2)
    assert qdata.is_contiguous()
    linear = NVFP4Weight(qdata, scale, global_scale, route.LAYOUT).to_layout("linear")
    rows = dequantize(*linear.tensors()).unflatten(1, (parts, -1))
    assert rows.shape[2] % 128 == 0
    assert rows[:, :, n:].eq(0).all()
    return rows[:, :, :n].flatten(1, 2)


@pytest.mark.parametrize("n", [128, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_packed_once(n, transposed):
    gate, up = torch.randn(2, 3, n, 64, dtype=BF16).unbind()
    given = [weight.mT.contiguous() if transposed else weight for weight in (gate, up)]
    operands = weight_cache.operands(*given, transposed=transposed, layout=route.LAYOUT)
    together = quantize(torch.cat([gate, up], 1))
    assert torch.equal(operands[2], together.global_scale)
    assert torch.equal(decode(operands, n, 2), dequantize(*together.tensors()))
    again = weight_cache.operands(*given, transposed=transposed, layout=route.LAYOUT)
    assert all(old is new for old, new in zip(operands, again, strict=True))
    assert weight_cache.operands(*given, transposed=transposed)[0].dtype == torch.uint8
    addresses = [tensor.data_ptr() for tensor in operands]
    given[0].mul_(-3)
    changed = weight_cache.operands(*given, transposed=transposed, layout=route.LAYOUT)
    assert [tensor.data_ptr() for tensor in changed] == addresses
    assert torch.equal(changed[2], quantize(torch.cat([-3 * gate if transposed else gate, up], 1)).global_scale)


@pytest.mark.parametrize(("n", "parts"), [(128, 1), (256, 2), (40, 1), (80, 2)])
def test_quantized_weights_are_swizzled_once(n, parts):
    weight = quantize(torch.randn(3, n, 64))
    tensors = weight.tensors()
    operands = weight_cache.swizzled(*tensors, parts=parts)
    assert weight_cache.swizzled(*tensors, parts=parts) is operands
    assert torch.equal(decode(operands, n // parts, parts), dequantize(*tensors))
    assert (operands[0].data_ptr() == weight.qdata.data_ptr()) == (n // parts == 128)  # shared where it can be
    weight.scale.copy_(weight.scale.float() / 2)
    again = weight_cache.swizzled(*tensors, parts=parts)
    assert again[1].data_ptr() == operands[1].data_ptr()
    assert torch.equal(decode(again, n // parts, parts), dequantize(*tensors))
    assert weight_cache.swizzled(*tensors, parts=parts) is again
    copies = list(map(weakref.ref, operands))
    del weight, tensors, operands, again  # the codes may be shared with the copy
    assert all(copy() is None for copy in copies)
