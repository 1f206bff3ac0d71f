"""Tests 4-bit modules whose weights change their layout: other holders of old or new tensors compute the same, or fail.
State dicts, ties, functional calls, compiled, exported and saved programs, moves to another device, dtypes of what is
loaded. Called by pytest; judged by the same model in layout "linear".
"""

import copy
import io
import itertools
import pickle
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn

from thunder_moe import (
    GroupedLinear,
    Llama4MoE,
    Llama4MoEConfig,
    NVFP4GroupedLinear,
    dequantize_,
    quantize_,
    rewrite_report,
    to_layout_,
)
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.kernels import slow_paths
from thunder_moe.nn import MODULE_LAYOUTS
from thunder_moe.nn.linear import NVFP4Linear

BF16 = torch.bfloat16
OTHERS = [layout for layout in MODULE_LAYOUTS if layout != "linear"]
PAIRS = [(a, b) for a in MODULE_LAYOUTS for b in MODULE_LAYOUTS if a != b]
X = torch.linspace(-3, 3, 2 * 5 * 128).sin().view(2, 5, 128).to(BF16)


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request):
    """Return (layout before, layout after)."""
    return request.param


@pytest.fixture(params=OTHERS)
def layout(request):
    return request.param


def model(layout="linear", seed=0):
    torch.manual_seed(seed)
    return quantize_(nn.Sequential(Llama4MoE(Llama4MoEConfig(128, 64, 4, top_k=2), dtype=BF16)), layout=layout)


def down(model):
    return model[0].routed_experts.down_proj


def layouts(model):
    return [module.layout for module in model.modules() if isinstance(module, NVFP4GroupedLinear)]


@torch.no_grad()
def run(model, *inputs):
    return model(*(inputs or (X,)))


# ---- who holds the tensors


def test_a_state_dict_taken_before_still_holds_the_weights(pair):
    before, after = pair
    source = model(before)
    expected, state, buffers = run(source), source.state_dict(), dict(source.named_buffers(remove_duplicate=False))
    aliases = {name: buffer.detach() for name, buffer in buffers.items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    to_layout_(source, after)
    for name, tensor in state.items():
        assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8))
    for assign in (False, True):
        other = model(before, seed=1)
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        assert torch.equal(run(other), expected)
        source.load_state_dict(state, assign=assign)
        assert torch.equal(run(source), expected)
    for held in (state, aliases, dict(source.named_buffers())):
        assert torch.equal(torch.func.functional_call(source, held, (X,)), expected)


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.exhaustive)])
def test_functional_call_with_a_state_dict(layout, backend):
    laid_out, others = model(layout), model("linear", seed=1)

    def call(state, x):
        return torch.func.functional_call(laid_out, state, (x,))

    call = call if backend is None else torch.compile(call, backend=backend, fullgraph=True)
    assert torch.equal(call(laid_out.state_dict(), X), run(laid_out))
    assert torch.equal(call(others.state_dict(), X), run(others))
    assert not torch.equal(run(others), run(laid_out))
    with pytest.raises(Exception, match="scale: got shape .* wanted one scale for 8 bytes of qdata"):
        call({"0.routed_experts.down_proj.qdata": down(others).qdata}, X)


def test_modules_that_share_tensors_by_a_state_dict(pair):
    before, after = pair
    both = nn.ModuleList([model(before), model(before, seed=1)])
    expected = run(both[0])
    both[1].load_state_dict(both[0].state_dict(), assign=True)
    alone = copy.deepcopy(both)
    to_layout_(alone[0], after)
    assert layouts(alone) == [after] * 2 + [before] * 2
    assert all(torch.equal(run(one), expected) for one in alone)
    shared = down(both[0]).qdata.data_ptr() == down(both[1]).qdata.data_ptr()
    to_layout_(both, after)
    assert layouts(both) == [after] * 4
    assert all(torch.equal(run(one), expected) for one in both)
    assert (down(both[0]).qdata.data_ptr() == down(both[1]).qdata.data_ptr()) == shared


def test_tied_modules_of_which_one_is_laid_out(pair):
    before, after = pair
    first = GroupedLinear(2, 64, 128, dtype=BF16)
    second = GroupedLinear(2, 64, 128, dtype=BF16)
    second.weight = first.weight
    tied = quantize_(nn.ModuleList([first, second]), layout=before)
    x, offsets = torch.randn(4, 64, dtype=BF16), torch.tensor([1, 4], dtype=torch.int32)
    expected = tied[0](x, offsets)
    to_layout_(nn.ModuleList([tied[0]]), after)
    assert layouts(tied) == [after] * 2
    assert tied[0].qdata is tied[1].qdata
    assert torch.equal(tied[0](x, offsets), expected)
    assert torch.equal(tied[1](x, offsets), expected)


def test_torch_compile_sees_the_new_layout_and_later_weights(pair):
    before, after = pair
    laid_out, other = model(before), model(seed=1)
    expected = run(laid_out)
    compiled = torch.compile(laid_out, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(compiled), expected)
    to_layout_(laid_out, after)
    assert torch.equal(run(compiled), expected)
    laid_out.load_state_dict(other.state_dict())
    assert torch.equal(run(compiled), run(other))


@pytest.mark.slow
def test_thunder_sees_the_new_layout_and_later_weights(layout):
    """A module alone, which Thunder traces in a quarter of a layer's time."""
    import thunder

    from thunder_moe import moe_executor

    laid_out, other = model(), model(seed=1)
    rows, offsets = X.view(-1, 64)[:16], torch.tensor([3, 3, 9, 16], dtype=torch.int32)
    expected, later = (down(each)(rows, offsets) for each in (laid_out, other))
    compiled = thunder.jit(down(laid_out), executors=[moe_executor])
    assert torch.equal(compiled(rows, offsets), expected)
    to_layout_(laid_out, layout)
    assert down(laid_out).layout == layout
    assert torch.equal(compiled(rows, offsets), expected)
    laid_out.load_state_dict(other.state_dict())
    assert torch.equal(compiled(rows, offsets), later)
    assert {entry.gemm.weight for entry in rewrite_report(compiled)} == {"qdata"}


def test_reports_name_the_buffers_of_every_layout(layout):
    laid_out = model(layout)
    compiled = torch.compile(laid_out, fullgraph=True, backend="thunder_moe", options={"thunder_moe.inner": "eager"})
    run(compiled)
    names = [entry.gemm.weight for entry in rewrite_report(compiled)]
    assert names == ["0.routed_experts.gate_up_proj.qdata", "0.routed_experts.down_proj.qdata"]


def test_an_exported_program_is_right_or_fails(pair):
    before, after = pair
    laid_out = model(before)
    expected = run(laid_out)
    program = torch.export.export(laid_out, (X,))
    assert torch.equal(run(program.module()), expected)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    to_layout_(laid_out, after)
    try:
        out = run(program.module())
    except (RuntimeError, ValueError):
        pass  # of the shape of a tensor
    else:
        assert torch.equal(out, expected)
    assert torch.equal(run(torch.export.load(file).module()), expected)


def test_an_exported_dense_layer_is_right_or_fails(pair):
    before, after = pair
    layer = nn.Sequential(NVFP4Linear(quantize(torch.randn(1, 64, 128)).to_layout(before)))
    expected = run(layer)
    program = torch.export.export(layer, (X,))
    assert torch.equal(run(program.module()), expected)
    to_layout_(layer, after)
    assert torch.equal(run(layer), expected)
    with pytest.raises((RuntimeError, ValueError)):
        run(program.module())


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.covering(1)
def test_a_backward_that_waits_is_right_or_fails(pair, compile_it):
    before, after = pair
    laid_out = model(before)
    function = torch.compile(laid_out, fullgraph=True, backend="aot_eager") if compile_it else laid_out
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(x).float().square().sum(), x)
    out = function(x).float().square().sum()
    to_layout_(laid_out, after)
    try:
        (grad,) = torch.autograd.grad(out, x)
    except (RuntimeError, ValueError):
        return
    assert torch.equal(grad, expected)


def test_buffers_in_another_layout_than_linear_do_not_load(layout):
    for target in MODULE_LAYOUTS:
        with pytest.raises(RuntimeError, match="size mismatch for 0.routed_experts.gate_up_proj.qdata"):
            model(target).load_state_dict({**model().state_dict(), **dict(model(layout).named_buffers())})


def test_set_weight():
    linear = NVFP4GroupedLinear(quantize(torch.randn(2, 128, 64)))
    alias = linear.qdata.detach()
    weight = quantize(torch.randn(2, 128, 64))
    for layout in MODULE_LAYOUTS:
        linear.set_weight(weight.to_layout(layout))
        assert linear.layout == layout
        assert torch.equal(linear.state_dict()["qdata"], weight.qdata)
        assert not torch.equal(alias, weight.qdata)
    for wrong in (weight.to_layout("swizzled_128x4"), quantize(torch.randn(2, 64, 64))):
        with pytest.raises(ValueError, match=r"weight: got shape .* in layout .*, wanted \(2, 128, 64\) in one of"):
            linear.set_weight(wrong)


def test_modules_quantized_in_inference_mode_load_and_move_outside(layout):
    quantized = nn.Sequential(Llama4MoE(Llama4MoEConfig(128, 64, 4, top_k=2), dtype=BF16))
    with torch.inference_mode():
        quantize_(quantized, layout=layout)
        to_layout_(quantized)
        to_layout_(quantized, layout)
    other = model(seed=1)
    quantized.load_state_dict(other.state_dict())
    assert torch.equal(run(quantized.to("cpu")), run(other))
    with torch.inference_mode():
        assert torch.equal(quantized(X), run(other))
        dequantize_(quantized)
    assert not any(parameter.is_inference() for parameter in quantized.parameters() if parameter.ndim == 3)


# ---- what loads


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("before", MODULE_LAYOUTS)
def test_scales_and_codes_are_loaded_by_their_bits(before, assign):
    source = model(seed=1)
    state = {
        name: tensor.view(torch.uint8) if name.endswith("down_proj.scale") else tensor
        for name, tensor in source.state_dict().items()
    }
    name = "0.routed_experts.gate_up_proj.qdata"
    state[name] = state[name].view(torch.float4_e2m1fn_x2)
    target = model(before)
    target.load_state_dict(state, assign=assign)
    assert state[name].dtype == torch.float4_e2m1fn_x2, "the caller's state dict is as it was"
    assert down(target).scale.dtype == torch.float8_e4m3fn
    assert torch.equal(run(target), run(source))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("before", MODULE_LAYOUTS)
@pytest.mark.parametrize(
    ("field", "dtype", "wanted"),
    [
        ("qdata", torch.int8, "dtype uint8 or torch.float4_e2m1fn_x2"),
        ("qdata", torch.float32, "dtype uint8 or torch.float4_e2m1fn_x2"),
        ("scale", torch.float32, "dtype float8_e4m3fn or torch.uint8"),
        ("scale", torch.float8_e5m2, "dtype float8_e4m3fn or torch.uint8"),
        ("global_scale", BF16, "dtype float32"),
        ("global_scale", torch.uint8, "dtype float32"),
    ],
)
@pytest.mark.covering(1)
def test_other_dtypes_do_not_load(before, assign, field, dtype, wanted):
    target = model(before)
    expected, state = run(target), target.state_dict()
    name = f"0.routed_experts.down_proj.{field}"
    state[name] = torch.zeros(state[name].shape, dtype=dtype)
    with pytest.raises(ValueError, match=rf"{name}: got {dtype} .*, wanted {wanted}"):
        target.load_state_dict(state, assign=assign)
    assert torch.equal(run(target), expected)


# ---- moves to other devices: "meta" and back is the only one here


def test_a_module_of_layout_auto_follows_its_device(tiles, monkeypatch):
    quantized = model("auto")
    assert layouts(quantized) == ["tiled_64x64"] * 2
    expected, state = run(quantized), quantized.state_dict()
    preferred = []

    def prefer(device, n, k, format=None):
        preferred.append((device.type, n, k))
        return "linear"

    monkeypatch.setattr("thunder_moe.kernels.select.preferred_layout", prefer)
    for other in (copy.deepcopy(quantized), copy.deepcopy(quantized).share_memory()):
        other.to("cpu")
        assert layouts(other) == ["linear"] * 2
        assert torch.equal(run(other), expected)
    assert set(preferred) == {("cpu", 128, 128), ("cpu", 128, 64)}
    quantized.to("meta")
    assert layouts(quantized) == ["tiled_64x64"] * 2
    quantized.to_empty(device="cpu")
    assert layouts(quantized) == ["linear"] * 2
    quantized.load_state_dict(state)
    assert torch.equal(run(quantized), expected)


def test_a_module_that_follows_its_device_stays_tied(tiles, monkeypatch):
    first, second = (GroupedLinear(2, 64, 128, dtype=BF16) for _ in range(2))
    second.weight = first.weight
    tied = quantize_(nn.ModuleList([first, second]))
    monkeypatch.undo()
    tied.to("cpu")
    assert layouts(tied) == ["linear"] * 2
    assert tied[0].qdata is tied[1].qdata
    assert tied[0].scale is tied[1].scale


def test_who_asked_for_a_layout_is_told_once_that_it_is_slow(recwarn, layout, monkeypatch):
    monkeypatch.setattr(slow_paths, "_warned", set())
    quantized = model(layout)
    quantized.to("cpu")
    quantized.half()
    assert not [w for w in recwarn if "thunder_moe" in str(w.message)]
    quantized.to("meta")
    with pytest.warns(
        UserWarning, match=rf"in layout '{layout}' were moved to a 'cpu' device.*to_layout_\(model\)"
    ) as seen:
        quantized.to_empty(device="cpu")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized.to("meta").to_empty(device="cpu")
    assert layouts(quantized) == [layout] * 2
    to_layout_(quantized)
    assert layouts(quantized) == ["linear"] * 2
    monkeypatch.setattr(slow_paths, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized.to("meta").to_empty(device="cpu")


def test_casts_of_any_kind_leave_the_bits():
    quantized = model("tiled_64x64")
    bits = [buffer.view(torch.uint8).clone() for buffer in quantized.buffers()]
    for cast in (
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.type(torch.float64),
        lambda m: m.to(torch.float32),
        lambda m: m._apply(lambda t: t.to(torch.int32) if t.dtype == torch.uint8 else t),
        lambda m: m.bfloat16(),
    ):
        cast(quantized)
        for old, new in zip(bits, quantized.buffers(), strict=True):
            assert torch.equal(old, new.view(torch.uint8))


def test_what_a_subclass_adds_is_moved_with_it():
    class WithLoRA(NVFP4GroupedLinear):
        pass

    linear = WithLoRA(quantize(torch.randn(2, 16, 16)))
    linear.lora_A = nn.Parameter(torch.zeros(2, 2))
    linear.register_buffer("extra", torch.zeros(2))
    linear.half()
    assert linear.lora_A.dtype == linear.extra.dtype == torch.float16
    assert linear.scale.dtype == torch.float8_e4m3fn
    assert [name for name, _ in linear.named_buffers()] == ["qdata", "scale", "global_scale", "extra"]


# ---- threads, and whose memory lives


ROWS = torch.linspace(-3, 3, 8 * 128).sin().view(8, 128).to(BF16)
INPUTS = {NVFP4GroupedLinear: (ROWS, torch.tensor([3, 8], dtype=torch.int32)), NVFP4Linear: (ROWS,)}
CHANGES = {
    "layout": lambda linear, weight, turn: to_layout_(linear, MODULE_LAYOUTS[turn % 2]),
    "weight": lambda linear, weight, turn: linear.set_weight(weight.to_layout(MODULE_LAYOUTS[turn // 2 % 2])),
    "dtype": lambda linear, weight, turn: linear.to((BF16, torch.float16)[turn % 2]),
}


def packed(kind, seed=0):
    torch.manual_seed(seed)
    return quantize(torch.randn(1 if kind is NVFP4Linear else 2, 128, 128))


@pytest.fixture
def fine_grained_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
@pytest.mark.covering(1)
def test_a_forward_beside_a_change_reads_the_old_or_the_new_weight(kind, change, fine_grained_threads):
    """With buffers that were read one by one, one forward of six was wrong or failed."""
    weights = [packed(kind, seed) for seed in (0, 1)]
    expected = [run(kind(weight), *INPUTS[kind]) for weight in weights]
    linear, found, stop = kind(packed(kind)), [], time.monotonic() + 0.4

    def forward():
        while time.monotonic() < stop:
            try:
                found.append(run(linear, *INPUTS[kind]))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in itertools.count():
        change(linear, weights[turn % 2], turn)
        if time.monotonic() > stop:
            break
    for thread in threads:
        thread.join()
    assert [error for error in found if isinstance(error, Exception)] == []
    assert all(any(torch.equal(result, right) for right in expected) for result in found)
    assert torch.equal(run(linear, *INPUTS[kind]), run(kind(linear.packed_weight), *INPUTS[kind]))


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
def test_changes_by_several_threads_leave_one_weight(kind, fine_grained_threads):
    """A layout that one thread had set was undone in part by another one that moved the buffers it had read before."""
    weight, state = packed(kind), kind(packed(kind)).state_dict()
    linear, tied = kind(weight), kind(weight)
    expected, errors, stop = run(linear, *INPUTS[kind]), [], time.monotonic() + 0.4

    def check_state(turn):
        for name, tensor in linear.state_dict().items():
            assert torch.equal(tensor.float(), state[name].float())

    def repeat(change):
        try:
            for turn in itertools.count():
                change(turn)
                if time.monotonic() > stop:
                    break
        except Exception as error:
            errors.append(error)

    changes = (
        lambda turn: to_layout_(linear, MODULE_LAYOUTS[turn % 2]),
        lambda turn: to_layout_(tied, MODULE_LAYOUTS[turn % 2]),
        lambda turn: tied.to((BF16, torch.float16)[turn % 2]),
        check_state,
    )
    threads = [threading.Thread(target=repeat, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert linear.qdata is tied.qdata
    assert torch.equal(run(linear, *INPUTS[kind]), expected)
    assert torch.equal(run(tied, *INPUTS[kind]), expected)


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_by_swap_tensors_after_a_forward(kind, assign):
    linear, other = kind(packed(kind)), kind(packed(kind, 1))
    run(linear, *INPUTS[kind])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        linear.load_state_dict(other.state_dict(), assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(run(linear, *INPUTS[kind]), run(other, *INPUTS[kind]))


def replace_buffers(linear):
    """Replace buffers like accelerate does when it moves a module's weights away."""
    for name, buffer in list(linear.named_buffers()):
        linear._buffers[name] = torch.empty_like(buffer, device="meta")


RELEASES = {
    "set_weight": lambda linear, tied: linear.set_weight(packed(type(linear), 1)),
    "to another layout": lambda linear, tied: to_layout_(linear, "tiled_64x64"),
    "to meta": lambda linear, tied: nn.ModuleList([linear, tied]).to("meta"),
    "replaced": lambda linear, tied: (replace_buffers(linear), replace_buffers(tied)),
}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
def test_the_memory_of_a_weight_that_was_replaced_is_free(kind, release):
    weight = packed(kind)
    array = weight.qdata.numpy().copy()  # lives while a tensor has its memory
    weight = NVFP4Weight(torch.from_numpy(array), weight.scale, weight.global_scale)
    linear, tied, memory = kind(weight), kind(weight), weakref.ref(array)
    for module in (linear, tied):
        run(module, *INPUTS[kind])
    del weight, array
    release(linear, tied)
    assert memory() is None


@pytest.mark.parametrize("kind", INPUTS, ids=lambda kind: kind.__name__)
def test_a_forward_leaves_nothing_in_pickles_and_copies(kind):
    linear = kind(packed(kind))
    before = pickle.dumps(linear)
    expected = run(linear, *INPUTS[kind])
    assert pickle.dumps(linear) == before
    other = copy.deepcopy(linear)
    other.set_weight(packed(kind, 1))
    assert torch.equal(run(linear, *INPUTS[kind]), expected)
    assert not torch.equal(run(other, *INPUTS[kind]), expected)


# ---- and back to 16 bits


@pytest.mark.parametrize("cast", [torch.float64, torch.float16, torch.float32])
def test_dequantize_after_a_cast(cast):
    quantized = model()
    exact = dequantize_(copy.deepcopy(quantized).to(torch.float32))
    back = dequantize_(quantized.to(cast))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = getattr(back[0].routed_experts, name).weight
        assert weight.dtype == cast
        assert torch.equal(weight, getattr(exact[0].routed_experts, name).weight.to(cast))


def test_gate_and_up_get_their_own_dtype_and_requires_grad_back(layout):
    moe = Llama4MoE(Llama4MoEConfig(128, 64, 4), dtype=BF16)
    experts = moe.routed_experts
    experts.up_proj.to(torch.float32)
    experts.gate_proj.requires_grad_(False)
    experts.down_proj.half()
    expected = {name: (p.dtype, p.requires_grad, p.shape) for name, p in moe.named_parameters()}
    exact = {
        name: NVFP4Weight.to_layout(quantize(getattr(experts, name).weight), "linear") for name in experts._modules
    }
    back = dequantize_(copy.deepcopy(quantize_(nn.Sequential(moe), layout=layout)))[0]
    assert {name: (p.dtype, p.requires_grad, p.shape) for name, p in back.named_parameters()} == expected
    for name, weight in exact.items():
        parameter = getattr(back.routed_experts, name).weight
        assert parameter.is_contiguous()
        again = quantize(parameter)
        assert torch.equal(again.qdata, weight.qdata)
    with pytest.raises(ValueError, match="weight_dtype: got .* wanted one of each for every one of the weights"):
        NVFP4GroupedLinear(quantize(torch.randn(1, 16, 16)), weight_dtype=[BF16, BF16])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("first", ["qdata", "scale"])
def test_shards_that_part_codes_from_scales_load(layout, assign, first):
    """Codes in blocks whose scale is still 0 must wait for the scale, not become 0."""
    source = quantize(torch.randn(2, 128, 64))
    linear = NVFP4GroupedLinear(quantize(torch.zeros(2, 128, 64)).to_layout(layout))
    state = NVFP4GroupedLinear(source).state_dict()
    second = "scale" if first == "qdata" else "qdata"
    for names in ((first,), (second, "global_scale")):
        linear.load_state_dict({name: state[name].clone() for name in names}, strict=False, assign=assign)
    assert linear.layout == layout
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)), name


@pytest.mark.parametrize("assign", [False, True])
def test_a_module_of_layout_auto_follows_what_is_assigned(tiles, monkeypatch, assign):
    quantized = model("auto")
    assert layouts(quantized) == ["tiled_64x64"] * 2
    state = model(seed=1).state_dict()
    quantized.to("meta")
    monkeypatch.undo()
    if not assign:
        quantized.to_empty(device="cpu")
    quantized.load_state_dict(state, assign=assign)
    assert layouts(quantized) == ["linear"] * 2
    assert torch.equal(run(quantized), run(model(seed=1)))
