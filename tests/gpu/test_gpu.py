"""Tests that need a CUDA device: no host synchronization, CUDA graphs, streams, Thunder and training on the GPU.
Called by `pytest -m gpu`; judged by tests/oracle.py.
"""

import contextlib
import copy
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracle import (
    KERNEL_TOLERANCE,
    dequantize,
    dequantize_mxfp8,
    grouped_mm,
    grouped_swiglu,
    groups,
    llama4_moe,
    relative_error,
)
from oracle import moe_experts as oracle_experts
from router_forms import FORMS, make_router

from thunder_moe import (
    GroupedLinear,
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    f16a_nvfp4weight_grouped_swiglu,
    f16a_nvfp4weight_scaled_grouped_mm,
    moe_executor,
    moe_experts,
    moe_route,
    moe_router,
    quantize_,
    rewrite_report,
)
from thunder_moe.activations import SWIGLU
from thunder_moe.formats import mxfp8
from thunder_moe.formats.gate_up import deinterleave, interleave
from thunder_moe.formats.nvfp4 import NVFP4Weight, quantize
from thunder_moe.formats.weight import PackedWeight, joined
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda import nvrtc, operators, prefill, workspace
from thunder_moe.kernels.cuda.configs import MEASURED, GemmConfig, Point, candidates
from thunder_moe.kernels.cuda.plan import plan_gemm
from thunder_moe.kernels.select import lay_out, preferred_layout, use_backend
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS
from thunder_moe.routing import route as plain_route

import thunder  # isort: skip  (after moe_executor: see compilers/thunder_compat.py)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


@pytest.fixture(params=["reference", "cuda"], autouse=True)
def backend(request):
    with use_backend(request.param):
        yield request.param


CONFIG = Llama4MoEConfig(256, 128, 8, top_k=2)
# A layout and the configuration that reads it; None: the chosen one. "shared" has few tiles of a long K (stream-K).
KERNELS = {
    "linear": ("linear", None),
    "linear, wgmma": ("linear", GemmConfig("wgmma", 8, 2, 1, 1, 3)),
    "tiled": ("tiled_64x64", None),
    "tiled, shared": ("tiled_64x64", GemmConfig("tiled_mma", 1, 2, 1, 1, 1, True)),
    "tiled, wgmma": ("tiled_64x64", GemmConfig("tiled_wgmma", 2, 2, 1, 1, 1)),
}


@pytest.fixture(params=KERNELS.values(), ids=KERNELS.keys())
def kernel_layout(request, backend, monkeypatch):
    """A layout; each parameter runs another kernel on its weights."""
    layout, config = request.param
    if backend != "cuda" or preferred_layout(torch.device("cuda"), 64, 64) == "linear":
        pytest.skip("of the kernels of the cuda backend on devices of compute capability (9, 0)")
    if config is not None:
        monkeypatch.setattr(operators, "plan_gemm", lambda spec, given=None: plan_gemm(spec, given or config))
    for operator in OPERATORS.values():  # what they know of earlier calls
        monkeypatch.setattr(operator, "_mru", ())
    chains.clear()
    yield layout
    chains.clear()


@contextlib.contextmanager
def no_synchronization():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make(n=96, k=64):
    weight = quantize(torch.randn(4, n, k))
    return weight.to("cuda"), dequantize(*weight.tensors())


@pytest.mark.parametrize("dtype", list(KERNEL_TOLERANCE))
def test_operators_never_synchronize(offsets, dtype):
    weight, exact = make()
    rows = int(offsets[-1])
    activation = torch.randn(rows + 2, 64, device="cuda", dtype=dtype, requires_grad=True)
    packed, ends = operands(weight), offsets.cuda()
    with no_synchronization():
        out = f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends)
        hidden = f16a_nvfp4weight_grouped_swiglu(activation, *packed, ends)
        grad = torch.ones_like(out)
        (dgrad,) = torch.autograd.grad(out, activation, grad)
    host = activation.detach().cpu()
    tolerance = max(KERNEL_TOLERANCE[dtype], 1e-3)  # float32 products may run in TF32
    assert relative_error(out[:rows].cpu(), grouped_mm(host, exact, offsets)) < tolerance
    assert relative_error(hidden[:rows].cpu(), grouped_swiglu(host, exact, offsets)) < 2 * tolerance
    expected = torch.cat([torch.ones(end - start, 96) @ exact[e] for e, start, end in groups(offsets)])
    assert relative_error(dgrad[:rows].cpu(), expected) < tolerance


def test_cuda_graph_replays_with_new_offsets(backend):
    if backend != "reference":
        pytest.skip("test_cuda_graphs_of_each_layout has the kernels")
    check_cuda_graphs("linear")


def test_cuda_graphs_of_each_layout(kernel_layout):
    check_cuda_graphs(kernel_layout)


def check_cuda_graphs(layout, n=256, k=1024):
    """Two graphs of the same operator, replayed at once on two streams, with other offsets each time."""
    weight, exact = make(n, k)
    packed = operands(weight.to_layout(layout))
    activation = torch.randn(12, k, device="cuda", dtype=BF16)
    ends = [torch.tensor([3, 6, 9, 12], dtype=torch.int32, device="cuda") for _ in range(2)]
    f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends[0], layout=layout)  # compiles
    torch.cuda.synchronize()
    graphs, outputs, streams = [], [], [torch.cuda.Stream() for _ in ends]
    for each in ends:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(10):
                out = f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, each, layout=layout)
        outputs.append(out)
    tables = [[3, 6, 9, 12], [0, 12, 12, 12], [1, 1, 2, 10], [0, 0, 0, 12], [12, 12, 12, 12]]
    for rows in zip(tables, tables[::-1], strict=True):
        for each, table in zip(ends, rows, strict=True):
            each.copy_(torch.tensor(table, dtype=torch.int32))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for out, table in zip(outputs, rows, strict=True):
            expected = grouped_mm(activation.cpu(), exact, torch.tensor(table))
            assert relative_error(out[: table[-1]].cpu(), expected) < KERNEL_TOLERANCE[BF16]


def test_the_first_call_of_a_stream_that_is_busy(kernel_layout, monkeypatch):
    """The workspace of its kernels is zero for other streams, too, which do not wait for it."""
    monkeypatch.setattr(workspace, "_POOLS", {})
    weight, exact = make(256, 1024)
    packed = operands(weight.to_layout(kernel_layout))
    x, ends = torch.randn(12, 1024, device="cuda", dtype=BF16), torch.tensor([3, 6, 9, 12], dtype=torch.int32).cuda()
    expected = grouped_mm(x.cpu(), exact, ends.cpu())
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):  # the memory that the allocator has for this stream holds anything but zeros
        blocks = [torch.full((2**20 * (1 + i % 4),), 3, dtype=torch.int32, device="cuda") for i in range(16)]
        del blocks
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # half a second
        first = f16a_nvfp4weight_scaled_grouped_mm(x, *packed, ends, layout=kernel_layout)
    with torch.cuda.stream(free):
        second = f16a_nvfp4weight_scaled_grouped_mm(x, *packed, ends, layout=kernel_layout)
    torch.cuda.synchronize()
    for out in (first, second):
        assert relative_error(out.cpu(), expected) < KERNEL_TOLERANCE[BF16]


def test_a_thread_without_a_context(kernel_layout):
    weight, exact = make(256, 1024)
    packed = operands(weight.to_layout(kernel_layout))
    x, ends = torch.randn(12, 1024, device="cuda", dtype=BF16), torch.tensor([3, 6, 9, 12], dtype=torch.int32).cuda()

    def call():
        return f16a_nvfp4weight_scaled_grouped_mm(x, *packed, ends, layout=kernel_layout)

    call()  # the thread below finds kernels, and memory in torch's cache: nothing there makes a context
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(call()))
    thread.start()
    thread.join()
    assert relative_error(outputs[0].cpu(), grouped_mm(x.cpu(), exact, ends.cpu())) < KERNEL_TOLERANCE[BF16]


def test_the_first_call_in_the_warm_up_of_a_cuda_graph(kernel_layout, monkeypatch):
    """The workspace is not in the memory pool of torch.compile's graphs, which is reused."""
    monkeypatch.setattr(workspace, "_POOLS", {})
    model = torch.nn.Sequential(Llama4MoE(CONFIG, dtype=BF16, device="cuda"))
    model = quantize_(model, layout=kernel_layout)
    x = torch.randn(2, 8, 256, device="cuda", dtype=BF16)
    function = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    results = []
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        results.append(function(x).clone())
    expected = llama4_moe(dequantize_(model)[0], x)
    for out in results:
        assert relative_error(out.cpu(), expected.cpu()) < 0.02


@pytest.mark.parametrize(
    "ends", [[10, 20, 43, 2**31 - 1], [1 << 30] * 4, [-5, 10, 2**31 - 1, 40], [30, 3, 60, 2]], ids=str
)
def test_what_is_out_of_range_is_not_touched(kernel_layout, ends):
    """compute-sanitizer sees accesses beyond operands, and this test their results."""
    weight, exact = make(256, 512)
    weight, rows = weight.to_layout(kernel_layout), torch.randn(42, 512, device="cuda", dtype=BF16)
    in_order = torch.tensor(list(itertools.accumulate((min(max(end, 0), 42) for end in ends), max)))
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    out = cuda.grouped_mm(rows, weight, offsets)
    live = min(max(ends[-1], 0), 42)  # rows past the last offset are undefined, whatever the offsets before it are
    if ends != [30, 3, 60, 2]:  # where two experts have the same rows
        expected = grouped_mm(rows.cpu(), exact, in_order)[:live]
        assert relative_error(out[:live].cpu(), expected) < KERNEL_TOLERANCE[BF16]
    grad = torch.randn(42, 256, device="cuda", dtype=BF16)
    dgrad = cuda.grouped_mm_dgrad(grad, weight, offsets)
    expected = grouped_mm(grad.cpu(), exact.transpose(1, 2), in_order)[:live]
    assert relative_error(dgrad[:live].cpu(), expected) < KERNEL_TOLERANCE[BF16]
    slots = torch.randint(-(2**31), 2**31 - 1, (42,), device="cuda", dtype=torch.int32)
    scale = torch.rand(21, 2, device="cuda")
    hidden = cuda.grouped_swiglu(rows[:21], weight, offsets, slots, scale)
    cuda.swiglu(out, offsets, slots, scale, None, SWIGLU)
    summed = cuda.combine(hidden, slots.view(21, 2), scale)
    torch.cuda.synchronize()
    assert not summed.any()


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_quantize_is_the_same_on_both_devices(dtype):
    weight = (torch.randn(3, 96, 128) * 0.02).to(dtype)
    for cpu, gpu in zip(quantize(weight).tensors(), quantize(weight.cuda()).tensors(), strict=True):
        assert torch.equal(cpu.view(torch.uint8), gpu.cpu().view(torch.uint8))


@pytest.mark.parametrize("by", [lay_out, PackedWeight.to_layout], ids=["kernel", "torch"])
@pytest.mark.parametrize("pack", [quantize, mxfp8.quantize], ids=["nvfp4", "mxfp8"])
def test_tiles_are_laid_out_on_the_device(pack, by):
    weight = pack(torch.randn(3, 128, 192) * torch.rand(3, 128, 1) ** 20)
    expected, on_device = weight.to_layout("tiled_64x64"), weight.to("cuda")
    by(by(on_device, "tiled_64x64"), "linear")  # compiles
    with no_synchronization():
        tiled = by(on_device, "tiled_64x64")
        back = by(tiled, "linear")
    for ours, cpu in ((tiled, expected), (back, weight)):
        for tensor, wanted in zip(ours.tensors(), cpu.tensors(), strict=True):
            assert torch.equal(tensor.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_8_bit_floats_are_moved_on_the_device(dtype):
    """torch has no CUDA kernel for `cat` of the scales of MXFP8."""
    bits = torch.arange(3 * 8 * 4, dtype=torch.uint8).view(3, 8, 4)
    there = bits.cuda().view(dtype)
    for dim in range(3):
        pieces = there.split([1, bits.shape[dim] - 1], dim)
        assert torch.equal(joined(pieces, dim).view(torch.uint8).cpu(), bits)
    for change in (deinterleave, interleave, copy.deepcopy, lambda t: t[:, 2:6].contiguous()):
        assert torch.equal(change(there).contiguous().view(torch.uint8).cpu(), change(bits))


@pytest.mark.parametrize("pack", [quantize, mxfp8.quantize], ids=["nvfp4", "mxfp8"])
def test_weights_are_concatenated_on_the_device(pack):
    weight = pack(torch.randn(2, 128, 64))
    expected, on_device = (
        w.concatenate(w.rows(slice(0, 40)), w.rows(slice(40, 128))) for w in (weight, weight.to("cuda"))
    )
    for tensor, wanted in zip(on_device.tensors(), expected.tensors(), strict=True):
        assert torch.equal(tensor.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_every_layout_computes_on_a_gpu(offsets):
    weight, exact = make(128, 128)
    rows = int(offsets[-1])
    activation, ends = torch.randn(rows + 2, 128, device="cuda", dtype=BF16), offsets.cuda()
    preferred = preferred_layout(activation.device, 128, 128)
    assert preferred == ("tiled_64x64" if torch.cuda.get_device_capability() == (9, 0) else "linear")
    for layout in ("linear", "tiled_64x64"):
        packed = operands(weight.to_layout(layout))
        f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends, layout=layout)  # compiles
        with no_synchronization():
            out = f16a_nvfp4weight_scaled_grouped_mm(activation, *packed, ends, layout=layout)
            hidden = f16a_nvfp4weight_grouped_swiglu(activation, *packed, ends, layout=layout)
        host = activation.cpu()
        assert relative_error(out[:rows].cpu(), grouped_mm(host, exact, offsets)) < KERNEL_TOLERANCE[BF16]
        assert relative_error(hidden[:rows].cpu(), grouped_swiglu(host, exact, offsets)) < 2 * KERNEL_TOLERANCE[BF16]


def test_layer_never_synchronizes():
    moe = quantize_(torch.nn.Sequential(Llama4MoE(CONFIG, dtype=BF16, device="cuda")))
    x = torch.randn(2, 5, 256, device="cuda", dtype=BF16)
    with no_synchronization():
        out = moe(x)
    assert relative_error(out.cpu(), llama4_moe(dequantize_(moe)[0], x).cpu()) < 0.02


def test_thunder_rewrites_and_computes():
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda").requires_grad_(False)
    x = torch.randn(2, 5, 256, device="cuda", dtype=BF16)
    expected = llama4_moe(dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0], x)
    for executors in ([moe_executor], [moe_executor, *thunder.get_default_executors()]):
        compiled = thunder.jit(moe, executors=executors)
        assert relative_error(compiled(x).cpu(), expected.cpu()) < 0.02
        assert len(rewrite_report(compiled).rewritten) == 3
        with no_synchronization():
            compiled(x)


def test_training_through_thunder():
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda")
    x = torch.randn(1, 2, 256, device="cuda", dtype=BF16)  # 4 rows for 8 experts: some have none
    compiled = thunder.jit(moe, executors=[moe_executor])
    with pytest.warns(RewriteWarning, match="trainable"):
        compiled(x).float().pow(2).mean().backward()
    exact = copy.deepcopy(moe).float()
    exact.zero_grad()
    llama4_moe(exact, x.float()).pow(2).mean().backward()
    for (name, parameter), reference in zip(moe.named_parameters(), exact.parameters(), strict=True):
        assert relative_error(parameter.grad.cpu(), reference.grad.cpu()) < 0.05, name
    idle = exact.routed_experts.up_proj.weight.grad.flatten(1).eq(0).all(1)
    assert idle.any()
    assert moe.routed_experts.up_proj.weight.grad[idle].eq(0).all()


def test_moving_a_quantized_model():
    linear = torch.nn.Sequential(GroupedLinear(4, 64, 96, dtype=BF16))
    quantize_(linear).cuda()
    weight: NVFP4Weight = linear[0].packed_weight
    assert weight.device.type == "cuda"
    assert weight.qdata.dtype == torch.uint8
    moe = quantize_(torch.nn.Sequential(Llama4MoE(CONFIG, dtype=BF16)))
    x, state = torch.randn(2, 8, 256, dtype=BF16), moe.state_dict()
    with use_backend("cpu"):
        expected = moe(x)
    linears = [module for module in moe.modules() if hasattr(module, "packed_weight")]
    moe.cuda()
    for linear in linears:
        assert linear.layout == preferred_layout(linear.qdata.device, linear.out_features, linear.in_features)
    assert relative_error(moe(x.cuda()).cpu(), expected) < 0.02
    for name, tensor in moe.state_dict().items():
        assert torch.equal(tensor.cpu().view(torch.uint8), state[name].cpu().view(torch.uint8))
    moe.cpu()
    assert {linear.layout for linear in linears} == {"linear"}
    with use_backend("cpu"):
        assert torch.equal(moe(x), expected)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_torch_compile_with_weights_that_change_and_move(backend, mode):
    moe = Llama4MoE(CONFIG, dtype=BF16).requires_grad_(False)
    function = torch.compile(moe, backend="thunder_moe", fullgraph=True, mode=mode)

    def check(device):
        x = torch.randn(2, 8, 256, device=device, dtype=BF16)
        expected = llama4_moe(dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0], x)
        for _ in range(3):  # under reduce-overhead: warm-up, recording, replay
            torch.compiler.cudagraph_mark_step_begin()
            out = function(x).clone()
            assert relative_error(out.cpu(), expected.cpu()) < 0.02

    if backend == "reference":  # the others run on CUDA alone
        check("cpu")
    moe.cuda()
    check("cuda")
    moe.routed_experts.down_proj.weight.mul_(-3)
    check("cuda")
    moe.routed_experts.up_proj.weight = torch.nn.Parameter(
        torch.randn_like(moe.routed_experts.up_proj.weight) / 16, requires_grad=False
    )
    check("cuda")
    assert len(rewrite_report(function).rewritten) >= (6 if backend == "reference" else 3)
    x = torch.randn(2, 8, 256, device="cuda", dtype=BF16)
    torch.compiler.cudagraph_mark_step_begin()
    function(x)
    with no_synchronization():
        torch.compiler.cudagraph_mark_step_begin()
        function(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_training_through_torch_compile(frozen):
    moe = Llama4MoE(CONFIG, dtype=BF16, device="cuda")
    moe.routed_experts.requires_grad_(not frozen)
    x = torch.randn(1, 2, 256, device="cuda", dtype=BF16)
    function = torch.compile(moe, backend="thunder_moe", fullgraph=True)
    with contextlib.nullcontext() if frozen else pytest.warns(RewriteWarning, match="trainable"):
        function(x).float().pow(2).mean().backward()
    exact = dequantize_(quantize_(torch.nn.Sequential(copy.deepcopy(moe))))[0] if frozen else copy.deepcopy(moe)
    exact = exact.float()
    exact.zero_grad()
    llama4_moe(exact, x.float()).pow(2).mean().backward()
    for (name, parameter), reference in zip(moe.named_parameters(), exact.parameters(), strict=True):
        if parameter.requires_grad:
            assert relative_error(parameter.grad.cpu(), reference.grad.cpu()) < 0.05, name


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("mean_rows", [1, 12, 30, 90])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_every_configuration_of_the_cuda_kernels(backend, format, mean_rows, swiglu, dtype):
    if backend != "cuda":
        pytest.skip("of the kernels of the cuda backend")
    shape = 6, 200, 656 if format == "nvfp4" else 672
    point = Point(shape[0], mean_rows, *shape[1:])
    configs = candidates(point, swiglu, torch.cuda.get_device_capability(), "linear", format)
    check_configurations(configs, "linear", shape, mean_rows, swiglu, dtype, format)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("mean_rows", [1, 12, 30, 90])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_every_chosen_configuration_of_tiled_weights(backend, format, mean_rows, swiglu, dtype):
    """K is long and tiles are few, so that blocks share them where they may."""
    layout, capability = "tiled_64x64", torch.cuda.get_device_capability()
    if backend != "cuda" or preferred_layout(torch.device("cuda"), 64, 64) != layout:
        pytest.skip("of the kernels of the cuda backend where the device prefers this layout")
    entries = json.loads(MEASURED.read_text())["entries"]
    configs = {
        GemmConfig(*entry["config"])
        for entry in entries
        if tuple(entry["capability"]) == capability and entry["swiglu"] == swiglu
    }
    shape = 6, 192, 4096
    wanted = (config for config in configs if (config.layout, config.format) == (layout, format))
    tiled = sorted(
        (config for config in wanted if config.serves(shape[0], shape[2])), key=str
    )  # those of one weight alone: test_gpu_linears.py
    assert tiled
    check_configurations(tiled, layout, shape, mean_rows, swiglu, dtype, format)


def check_configurations(configs, layout, shape, mean_rows, swiglu, dtype, format="nvfp4"):
    """Random and skewed routings, with the memory of the output poisoned before each call; shape: E, features, K."""
    experts, features, k = shape
    values = torch.randn(experts, 2 * features if swiglu else features, k)
    weight = quantize(values) if format == "nvfp4" else mxfp8.quantize(values)
    exact = (dequantize if format == "nvfp4" else dequantize_mxfp8)(*weight.tensors())
    weight = weight.to("cuda").to_layout(layout)
    capability = torch.cuda.get_device_capability()
    with ThreadPoolExecutor() as pool:  # the calls below find the kernels in the cache
        list(
            pool.map(
                lambda config: nvrtc.compile_files(
                    config.sources, config.expression(dtype, swiglu, k), capability, config.argument
                ),
                configs,
            )
        )
    for config in configs:
        offsets = torch.randint(0, 2 * mean_rows + 1, (experts,)).mul(torch.tensor([1, 0, 3, 1, 0, 1])).cumsum(0).int()
        rows = torch.randn(int(offsets[-1]) + 3, k).to(dtype)
        torch.full((rows.shape[0], features), torch.nan, dtype=dtype, device="cuda")
        kernel = cuda.grouped_swiglu if swiglu else cuda.grouped_mm
        out = kernel(rows.cuda(), weight, offsets.cuda(), config=config)
        expected = (grouped_swiglu if swiglu else grouped_mm)(rows, exact, offsets)
        error = relative_error(out[: offsets[-1]].cpu(), expected)
        assert error < KERNEL_TOLERANCE[dtype], config
        assert torch.equal(
            kernel(rows.cuda(), weight, offsets.cuda(), config=config)[: offsets[-1]], out[: offsets[-1]]
        )


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize(("n", "k"), [(128, 192), (192, 96)])
def test_many_rows_of_linear_weights(backend, format, n, k):
    """On SM90 they are converted at the call: to tiles, or to 16 bits."""
    if backend != "cuda":
        pytest.skip("of the kernels of the cuda backend")
    weight = (quantize if format == "nvfp4" else mxfp8.quantize)(torch.randn(4, n, k))
    exact = (dequantize if format == "nvfp4" else dequantize_mxfp8)(*weight.tensors())
    offsets = torch.tensor([500, 500, 1200, 1290], dtype=torch.int32)
    rows = torch.randn(1300, k, dtype=BF16)
    if torch.cuda.get_device_capability() == (9, 0):
        assert prefill.strategy("linear", weight.shape, format, 1300, (9, 0)) is not None
    operands_of = rows.cuda(), weight.to("cuda"), offsets.cuda()
    for kernel, oracle_of in ((cuda.grouped_mm, grouped_mm), (cuda.grouped_swiglu, grouped_swiglu)):
        kernel(*operands_of)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            out = kernel(*operands_of)
        graph.replay()
        expected = oracle_of(rows, exact, offsets)
        assert relative_error(out[:1290].cpu(), expected[:1290]) < KERNEL_TOLERANCE[BF16]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 8, 128), (1000, 4, 60), (65_536, 8, 512)])
def test_route_is_the_stable_sort(tokens, top_k, experts):
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    for actual, expected in zip(moe_route(ids.cuda(), experts), plain_route(ids, experts), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 100, 3000])
@pytest.mark.parametrize("name", FORMS)
def test_router_is_its_definition(name, tokens, dtype):
    logits, bias, options = make_router(name, tokens, dtype)
    logits, bias = logits.cuda(), None if bias is None else bias.cuda()
    scores, ids, *order = moe_router(logits, bias, **options)
    with use_backend("reference"):
        expected, expected_ids, *_ = moe_router(logits, bias, **options)
    same = (ids == expected_ids).all(-1)  # sums of exponentials round otherwise, which may exchange near ones
    assert same.float().mean() > 0.995
    assert relative_error(scores[same], expected[same]) < KERNEL_TOLERANCE[scores.dtype]
    for actual, wanted in zip(order, plain_route(ids, logits.shape[1]), strict=True):
        assert torch.equal(actual, wanted)


def test_a_layer_of_operators_on_two_streams_and_in_a_graph(backend):
    if backend != "reference":
        pytest.skip("test_two_streams_and_a_graph_of_each_layout has the kernels")
    check_layer_on_two_streams("linear")


def test_two_streams_and_a_graph_of_each_layout(kernel_layout):
    check_layer_on_two_streams(kernel_layout)


def check_layer_on_two_streams(layout):
    gate_up, down = quantize(torch.randn(8, 1024, 1024)), quantize(torch.randn(8, 1024, 512))
    exact = [dequantize(*weight.tensors()) for weight in (gate_up, down)]
    weights = [weight.to("cuda").to_layout(layout) for weight in (gate_up, down)]
    check_two_streams_and_a_graph(weights, exact, 2 * KERNEL_TOLERANCE[BF16])


def check_two_streams_and_a_graph(weights, exact, tolerance):
    """`moe_experts` of gate_up and down on the device, beside the oracle of the same dequantized on the host."""
    experts, hidden, _ = exact[1].shape
    tokens = 20
    inputs = [
        (torch.randn(tokens, hidden, dtype=BF16), torch.randint(0, experts, (tokens, 2)), torch.rand(tokens, 2))
        for _ in range(2)
    ]
    expected = [oracle_experts(*each, *exact) for each in inputs]
    on_device = [tuple(tensor.cuda() for tensor in each) for each in inputs]
    moe_experts(*on_device[0], *weights)  # compiles
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in inputs], []
    for stream, each in zip(streams, on_device, strict=True):
        with torch.cuda.stream(stream):
            outputs.append([moe_experts(*each, *weights) for _ in range(20)][-1])
    torch.cuda.synchronize()
    for out, wanted in zip(outputs, expected, strict=True):
        assert relative_error(out.cpu(), wanted) < tolerance
    static = [tensor.clone() for tensor in on_device[0]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_experts(*static, *weights)
    for each, wanted in zip(on_device, expected, strict=True):
        for to, source in zip(static, each, strict=True):
            to.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(captured.cpu(), wanted) < tolerance


@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_overlapping_kernels_of_a_layer_equal_its_parts(kernel_layout, format, tokens):
    """Two layers in one graph, replayed with other routings: a kernel that read too early would see an older one."""
    pack = quantize if format == "nvfp4" else mxfp8.quantize
    layers = [
        [pack(torch.randn(8, n, k)).to("cuda").to_layout(kernel_layout) for n, k in ((1024, 512), (512, 512))]
        for _ in range(2)
    ]
    x, ids = torch.randn(tokens, 512, device="cuda", dtype=BF16), torch.randint(0, 8, (tokens, 2), device="cuda")
    scores = torch.rand(tokens, 2, device="cuda")
    moe_experts(x, ids, scores, *layers[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = moe_experts(x, ids, scores, *layers[0])
        second = moe_experts(x, ids, scores, *layers[1])
    for _ in range(50):
        ids.copy_(torch.randint(-1, 9, (tokens, 2)))
        x.normal_()
        graph.replay()
        row_slot, offsets, slot_row = moe_route(ids, 8)
        for out, (gate_up, down) in zip((first, second), layers, strict=True):
            swiglu, combine = (
                getattr(torch.ops.thunder_moe, f"f16a_{format}weight_{name}")
                for name in ("grouped_swiglu", "grouped_mm_combine")
            )
            rows = swiglu(x, *operands(gate_up), offsets, row_slot, layout=gate_up.layout)
            torch.cuda.synchronize()  # the parts one after the other
            parts = combine(rows, *operands(down), offsets, slot_row, scores, layout=down.layout)
            assert torch.equal(out, parts)


def test_more_than_two_to_the_31_weights(kernel_layout):
    check_many_weights(cuda, kernel_layout)


def check_many_weights(module, layout):
    """The first and the last of 2.7e9 weights; with SwiGLU the last of gate and of up."""
    experts, n, k = 5, 32_768, 16_384
    qdata = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = torch.rand(experts, n, k // 16, device="cuda").to(torch.float8_e4m3fn)
    linear = NVFP4Weight(qdata, scale, torch.full((experts,), 1e-2, device="cuda"))
    weight = linear.to_layout(layout)
    rows, offsets = torch.randn(4, k, dtype=BF16, device="cuda"), torch.tensor([1, 1, 1, 1, 4], dtype=torch.int32)
    out, hidden = (kernel(rows, weight, offsets.cuda()) for kernel in (module.grouped_mm, module.grouped_swiglu))

    def product(expert, of_rows, columns):
        parts = (tensor[expert : expert + 1, columns].cpu() for tensor in (qdata, scale))
        return rows[of_rows].cpu().float() @ dequantize(*parts, torch.full((1,), 1e-2))[0].T

    first, last, middle = slice(0, 64), slice(n - 64, n), slice(n // 2 - 64, n // 2)
    tolerance = KERNEL_TOLERANCE[BF16]
    assert relative_error(out[:1, first].cpu(), product(0, slice(0, 1), first)) < tolerance
    assert relative_error(out[1:, last].cpu(), product(4, slice(1, 4), last)) < tolerance
    expected = torch.nn.functional.silu(product(4, slice(1, 4), middle)) * product(4, slice(1, 4), last)
    assert relative_error(hidden[1:, -64:].cpu(), expected) < 2 * tolerance
