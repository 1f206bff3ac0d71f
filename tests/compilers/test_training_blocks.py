"""Training blocks under both compilers: 16-bit ones train as the loop, frozen ones run in NVFP4 with fused SwiGLU.
Called by pytest; judged by the fp64 loops of tests/oracle.py.
"""

import copy

import oracle
import pytest
import thunder
import torch
from both_compilers import compile_by, decisions
from fast_cases import others_slow
from oracle import relative_error
from torch import nn

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    dequantize_,
    offsets_from_splits,
    quantize_,
)
from thunder_moe.formats.nvfp4 import dequantize, quantize

BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, BF16: 2e-2}
GPT_OSS = dict(alpha=1.702, limit=7.0, up_shift=1.0)
pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")


MODES = ["dynamo-aot_eager", pytest.param("thunder", marks=pytest.mark.slow)]
# test_a_training_block_trains_as_the_loop has Thunder.
VARIANTS = pytest.mark.parametrize("mode", ["dynamo-aot_eager", *others_slow(["thunder"], exhaustive=True)])


def leaves_of(mlp):
    return [mlp.gate_up_proj.weight, mlp.down_proj.weight, mlp.gate_up_proj.bias, mlp.down_proj.bias]


def twins(*tensors):
    return [None if t is None else t.detach().double().nan_to_num().requires_grad_(t.requires_grad) for t in tensors]


def inputs(rows, live, dtype, width=32):
    x, scales = torch.randn(rows, width).to(dtype), torch.rand(rows)
    x[live:] = scales[live:] = float("nan")
    grad = torch.randn(rows, width).to(dtype)
    grad[live:] = float("nan")
    return x.requires_grad_(), scales.requires_grad_(), grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.covering(1)
def test_a_training_block_trains_as_the_loop(mode, dtype):
    mlp = GroupedMLP(3, 32, 10, bias=True, activation=ScaledSwiGLU(2, **GPT_OSS), dtype=dtype)
    run, ends = compile_by(mode, mlp), offsets_from_splits([4, 0, 7])
    x, scales, grad = inputs(13, 11, dtype)
    out = run(x, ends, scales)
    out.backward(grad)
    twin, factors, *others = twins(x, scales, *leaves_of(mlp))
    exact = oracle.trained_mlp(twin, ends, *others, scales=factors, interleave=2, **GPT_OSS)
    exact.backward(grad.double().nan_to_num())
    got = [out, x.grad, scales.grad, *(leaf.grad for leaf in leaves_of(mlp))]
    wanted = [exact, twin.grad, factors.grad, *(leaf.grad for leaf in others)]
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < TOLERANCE[dtype]
    for a in got[:3]:
        assert a[11:].eq(0).all()


@VARIANTS
def test_parts_and_srelu_and_strange_sizes(mode):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = GroupedLinear(3, 7, 5, bias=True), GroupedLinear(3, 5, 9)
            self.activation = ScaledSReLU()

        def forward(self, x, offsets, scale):
            return self.second(self.activation(self.first(x, offsets, scale)), offsets)

    parts, ends = Parts(), offsets_from_splits([4, 0, 7]).long()
    eager = copy.deepcopy(parts)
    x, scale = torch.randn(13, 7), torch.rand(13)
    twin, factor = (t.clone().requires_grad_() for t in (x, scale))
    x.requires_grad_(), scale.requires_grad_()
    compile_by(mode, parts)(x, ends, scale).pow(2).sum().backward()
    eager(twin, ends, factor).pow(2).sum().backward()
    pairs = [(x, twin), (scale, factor), *zip(parts.parameters(), eager.parameters(), strict=True)]
    for a, b in pairs:
        assert relative_error(a.grad, b.grad) < 1e-5


FROZEN = [
    (True, 2, True, "both", False),
    (False, 1, True, "both", True),
    (True, None, True, "gate_up_proj", False),
    (True, 2, False, "down_proj", True),
    (True, None, True, "both", True),
    (False, None, False, "both", False),
    (True, 2, True, "down_proj", False),
]


@pytest.mark.parametrize(
    ("mode", "bias", "interleave", "scaled", "frozen", "parts"),
    [
        *((mode, *FROZEN[0]) for mode in ("dynamo-aot_eager", "thunder")),
        *(("dynamo-aot_eager", *row) for row in FROZEN[1:4]),
        *others_slow((("dynamo-aot_eager", *row) for row in FROZEN[4:]), exhaustive=True),
        *others_slow((("thunder", *row) for row in FROZEN[1:]), exhaustive=True),
    ],
)
def test_frozen_blocks_run_in_nvfp4(mode, bias, interleave, scaled, frozen, parts):
    mlp = GroupedMLP(3, 32, 48, bias=bias, activation=ScaledSwiGLU(interleave, **GPT_OSS), dtype=BF16)
    for name in ("gate_up_proj", "down_proj") if frozen == "both" else (frozen,):
        getattr(mlp, name).weight.requires_grad_(False)

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp

        def forward(self, x, offsets, scales=None):
            rows = self.mlp.activation(self.mlp.gate_up_proj(x, offsets), scales)
            return self.mlp.down_proj(rows, offsets, scales if bias else None)

    run, ends = compile_by(mode, Parts() if parts else mlp), offsets_from_splits([4, 0, 7])
    x, scales, grad = inputs(13, 11, BF16)
    given = (scales,) if scaled else ()
    out = run(x, ends, *given)
    out.backward(grad)
    decoded = [
        leaf if leaf is None or leaf.requires_grad else dequantize(quantize(leaf.detach()), torch.float32)
        for leaf in leaves_of(mlp)[:2]
    ]
    twin, factors, *others = twins(x, scales, *decoded, *leaves_of(mlp)[2:])
    exact = oracle.trained_mlp(
        twin, ends, *others, scales=factors if scaled else None, interleave=interleave, **GPT_OSS
    )
    exact.backward(grad.double().nan_to_num())
    pairs = [(out, exact), (x.grad, twin.grad), *((a.grad, b.grad) for a, b in zip(leaves_of(mlp), others, strict=True)
             if a is not None and a.requires_grad)]  # fmt: skip
    if scaled:
        pairs.append((scales.grad, factors.grad))
        assert scales.grad[11:].eq(0).all()
    for a, b in pairs:
        assert relative_error(a, b) < TOLERANCE[BF16]
    assert out[11:].eq(0).all()
    assert x.grad[11:].eq(0).all()
    wanted = {
        "both": ["nvfp4 + swiglu", "nvfp4"],
        "gate_up_proj": ["nvfp4", "16-bit"],
        "down_proj": ["16-bit", "nvfp4"],
    }
    assert decisions(run) == wanted[frozen]


@pytest.mark.parametrize("mode", MODES)
def test_no_graph_is_compiled_again_for_another_routing(mode):
    mlp = GroupedMLP(3, 16, 10, bias=True)
    run = compile_by(mode, mlp)
    counted = torch._dynamo.testing.CompileCounter() if mode != "thunder" else None
    if counted is not None:
        run = torch.compile(mlp, backend=counted, fullgraph=True, dynamic=True)
    for splits in ([4, 0, 7], [0, 0, 11], [11, 0, 0], [1, 2, 3]):
        ends, x = offsets_from_splits(splits), torch.randn(11, 16)
        assert relative_error(run(x, ends), mlp(x, ends)) < 1e-5
    if counted is None:
        assert thunder.cache_misses(run) == 1
    else:
        for rows in (12, 30):  # dynamic=True: all row counts
            x = torch.randn(rows, 16)
            assert relative_error(run(x, ends), mlp(x, ends)) < 1e-5
        assert counted.frame_count == 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", ["out", "grad_input", "accumulate_into_main_grad", "delay_wgrad"])
@pytest.mark.parametrize("kind", [GroupedLinear, GroupedMLP])
def test_writes_outside_of_the_graph_are_refused_by_name(mode, what, kind):
    options = {what: True} if what in ("accumulate_into_main_grad", "delay_wgrad") else {}
    module, ends, x = kind(2, 8, 8, **options), offsets_from_splits([2, 2]), torch.randn(4, 8)
    buffers = {} if options else {what: torch.empty(4, 8)}
    with pytest.raises(Exception, match=what):
        compile_by(mode, module)(x, ends, **buffers)
    if mode != "thunder":  # where a graph may break, the call is eager
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        run = torch.compile(module, backend="thunder_moe", options={"thunder_moe.inner": "eager"})
        assert relative_error(run(x, ends, **buffers), module(x, ends)) < 1e-6


@VARIANTS
def test_grouped_swiglu_is_zero_past_the_end_in_nvfp4(mode):
    block, ends = GroupedSwiGLU(3, 32, 48, dtype=BF16).requires_grad_(False), offsets_from_splits([4, 0, 7])
    x, _, _ = inputs(13, 11, BF16)
    out = compile_by(mode, block)(x, ends)
    out.float().sum().backward()
    assert out[11:].eq(0).all()
    assert x.grad[11:].eq(0).all()


# ---- 4-bit modules


@pytest.mark.parametrize("mode", ["eager", *MODES])
@pytest.mark.parametrize(
    "activation", [ScaledSwiGLU(**GPT_OSS), ScaledSwiGLU(2), ScaledSReLU()], ids=["gpt-oss", "interleaved", "srelu"]
)
@pytest.mark.covering(1)
def test_gradients_through_quantized_blocks(mode, activation):
    mlp = GroupedMLP(3, 32, 48, bias=True, activation=activation, dtype=BF16, delay_wgrad=True)
    bias = mlp.down_proj.bias
    root = nn.ModuleDict(dict(mlp=mlp))
    reference = copy.deepcopy(mlp)
    reference.gate_up_proj.delay_wgrad = reference.down_proj.delay_wgrad = False
    with torch.no_grad():
        for linear in (reference.gate_up_proj, reference.down_proj):
            linear.weight.copy_(dequantize(quantize(linear.weight), BF16))
    quantize_(root)
    block = root["mlp"]
    assert block.down_proj.bias is bias
    assert sorted(name for name, _ in block.named_parameters()) == ["down_proj.bias", "gate_up_proj.bias"]
    run = block if mode == "eager" else compile_by(mode, block)
    x, scales, grad = inputs(13, 11, BF16)
    twin, factors = (t.detach().clone().requires_grad_() for t in (x, scales))
    ends = offsets_from_splits([4, 0, 7])
    out, exact = run(x, ends, scales), reference(twin, ends, factors)
    out.backward(grad)
    exact.backward(grad)
    pairs = [(out, exact), (x.grad, twin.grad), (scales.grad, factors.grad)]
    for a, b in pairs:
        assert a[11:].eq(0).all()
        assert relative_error(a, b) < TOLERANCE[BF16]
    for name in ("gate_up_proj", "down_proj"):
        ours, theirs = getattr(block, name).bias.grad, getattr(reference, name).bias.grad
        assert relative_error(ours, theirs) < TOLERANCE[BF16]
    dequantize_(root)
    restored = root["mlp"]
    assert restored.down_proj.bias is bias
    assert restored.down_proj.delay_wgrad
    assert restored.gate_up_proj.weight.requires_grad
    assert torch.equal(restored.gate_up_proj.weight, reference.gate_up_proj.weight)
    with torch.no_grad():
        assert relative_error(restored(x, ends, scales), exact) < 1e-6


def test_quantized_blocks_save_load_and_call_hooks():
    root = nn.ModuleDict(dict(mlp=GroupedMLP(3, 32, 48, bias=True, dtype=BF16)))
    ends, x, scales = offsets_from_splits([4, 0, 7]).long(), torch.randn(11, 32).to(BF16), torch.rand(11)
    other = copy.deepcopy(root)
    quantize_(root)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    quantize_(other)
    other.load_state_dict(root.state_dict())
    exact = root["mlp"](x, ends, scales)
    assert torch.equal(other["mlp"](x, ends, scales), exact)
    seen = []
    for name in ("gate_up_proj", "activation", "down_proj"):
        getattr(other["mlp"], name).register_forward_hook(lambda *args, name=name: seen.append(name))
    assert relative_error(other["mlp"](x, ends, scales), exact) < TOLERANCE[BF16]
    assert seen == ["gate_up_proj", "activation", "down_proj"]


def test_a_block_whose_gradient_waits_is_not_quantized():
    mlp, ends = GroupedMLP(2, 16, 16, delay_wgrad=True), offsets_from_splits([2, 2])
    mlp(torch.randn(4, 16), ends).sum().backward()
    with pytest.raises(ValueError, match=r"waits for backward_dw\(\)"):
        quantize_(nn.ModuleDict(dict(mlp=mlp)))


def test_the_filter_may_take_one_projection():
    root = nn.ModuleDict(dict(mlp=GroupedMLP(2, 16, 16, bias=True)))
    ends, x, scales = offsets_from_splits([2, 2]), torch.randn(4, 16, requires_grad=True), torch.rand(4)
    exact = root["mlp"](x, ends, scales)
    quantize_(root, filter=lambda module, name: name.endswith("down_proj"))
    out = root["mlp"](x, ends, scales)
    assert 0.01 < relative_error(out, exact) < 0.2
    out.sum().backward()
    assert root["mlp"].gate_up_proj.weight.grad is not None
    assert not root["mlp"].need_backward_dw()
