"""Launches prepared for one kind of operands: equal to the backend's own functions, at any address, on any device.
Called by pytest; the kernels run by the emulator, the driver's launch is simulated.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from emulated_gemms import make

from thunder_moe.activations import GLU
from thunder_moe.kernels.cuda import arguments, launch, nvrtc, prepared
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.scaled_mm import dense_operands
from thunder_moe.routing import RouterForm, route

E, T, A, H, INNER = 4, 5, 2, 64, 64
OFFSETS = torch.tensor([1, 4, 4, 10], dtype=torch.int32)
STRUCTS = [getattr(arguments, name) for name in arguments.__all__]
needs_bindings = pytest.mark.skipif(nvrtc.missing_reason() is not None, reason=str(nvrtc.missing_reason()))


def weights(layout):
    gate_up, _ = make(E, 2 * INNER, H, halves=2)
    down, _ = make(E, H, INNER)
    return gate_up.to_layout(layout), down.to_layout(layout)


def test_equals_the_backend(layout):
    ids, scores = torch.randint(-1, E + 1, (T, A)), torch.rand(T, A)
    row_slot, offsets, slot_row = (tensor.int() for tensor in route(ids, E))
    gate_up, down = weights(layout)
    dtype = torch.bfloat16
    x, rows = torch.randn(T, H, dtype=dtype), torch.randn(T * A, INNER, dtype=dtype)
    biases = torch.randn(E, 2 * INNER, dtype=dtype), torch.randn(E, H)
    form = dict(alpha=1.702, limit=1.5, up_shift=1.0)
    options = dict(layout=layout)
    first, second = operands(gate_up), operands(down)
    swiglu, mm, combine = (
        cuda.PREPARED[f"f16a_nvfp4weight_{name}"]
        for name in ("grouped_swiglu", "scaled_grouped_mm", "grouped_mm_combine")
    )
    cases = [
        (mm, (rows, *second, offsets), options, cuda.grouped_mm(rows, down, offsets)),
        (
            swiglu,
            (x, *first, offsets, row_slot, scores, biases[0]),
            options | form,
            cuda.grouped_swiglu(x, gate_up, offsets, row_slot, scores, biases[0], GLU(**form)),
        ),
        (swiglu, (x, *first, offsets, row_slot), options, cuda.grouped_swiglu(x, gate_up, offsets, row_slot)),
        (
            combine,
            (rows, *second, offsets, slot_row, scores, biases[1]),
            options,
            cuda.grouped_mm_combine(rows, down, offsets, slot_row, scores, biases[1]),
        ),
        (
            combine,
            (rows, *second, offsets, slot_row),
            options,
            cuda.grouped_mm_combine(rows, down, offsets, slot_row, None, None),
        ),
    ]
    live = int(offsets[-1])
    for prepare, args, keywords, expected in cases:
        run = prepare(*args, **keywords)
        for _ in range(2):
            assert torch.equal(run(*args, **keywords)[:live], expected[:live])
    sort = cuda.PREPARED["moe_route"](ids, E)
    for actual, expected in zip(sort(ids, E), (row_slot, offsets, slot_row), strict=True):
        assert torch.equal(actual, expected)


def test_dense_layers_equal_the_backend(layout):
    weight, _ = make(1, 64, 128, halves=2)
    weight = weight.to_layout(layout)
    packed, bias = dense_operands(weight), torch.randn(64)
    for shape in ((128,), (3, 128), (2, 3, 128)):
        x = torch.randn(shape, dtype=torch.bfloat16)
        run = cuda.PREPARED["f16a_nvfp4weight_scaled_mm"](x, *packed, bias, layout=layout)
        out = run(x, *packed, bias, layout=layout)
        assert out.shape == (*shape[:-1], 64)
        assert torch.equal(out.view(-1, 64), cuda.mm(x.view(-1, 128), weight, bias))


@pytest.mark.parametrize("halves", [1, 2])
def test_gradients_equal_the_backend(emulated, hopper, halves):
    for layout in ("linear", "tiled_64x64"):
        weight, _ = make(E, 64, 128, halves=halves)
        weight, grad = weight.to_layout(layout), torch.randn(12, 64, dtype=torch.bfloat16)
        args = (grad, *operands(weight), torch.tensor([1, 4, 3, 99], dtype=torch.int32))  # decreasing, too many
        run = cuda.PREPARED["f16a_nvfp4weight_scaled_grouped_mm_dgrad"](*args, layout=layout)
        expected = cuda.grouped_mm_dgrad(grad, weight, args[-1])
        assert torch.equal(run(*args, layout=layout), expected)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_routers_equal_the_backend(emulated, tokens, biased):
    logits, bias = torch.randn(tokens, 40), torch.randn(40) if biased else None
    options = dict(top_k=4, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    args = (logits, bias) if biased else (logits,)
    run = cuda.PREPARED["moe_router"](*args, **options, scores_dtype=torch.bfloat16)
    results = run(*args, **options, scores_dtype=torch.bfloat16)
    for result, expected in zip(results, cuda.router(logits, bias, RouterForm(**options), torch.bfloat16), strict=True):
        assert torch.equal(result, expected)


def test_operands_may_lie_unaligned(layout):
    _, down = weights(layout)
    x = torch.randn(10, INNER, dtype=torch.bfloat16)
    run = cuda.PREPARED["f16a_nvfp4weight_scaled_grouped_mm"](x, *operands(down), OFFSETS, layout=layout)
    expected = run(x, *operands(down), OFFSETS)
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
    codes = down.qdata.flatten()
    moved = torch.cat([codes[:3], codes])[3:].view(down.qdata.shape).transpose(1, 2)
    assert shifted.data_ptr() % 16
    assert moved.data_ptr() % 16
    assert torch.equal(run(shifted, moved, *operands(down)[1:], OFFSETS), expected)


@pytest.mark.parametrize(
    "change",
    [
        dict(activation=torch.randn(10, INNER)),
        dict(activation=torch.randn(INNER, 10, dtype=torch.bfloat16).t()),
        dict(activation=torch.empty(0, INNER, dtype=torch.bfloat16)),
        dict(offsets=torch.zeros(2 * E, dtype=torch.int32)[::2]),
        dict(bias=torch.randn(E, H).double()),
    ],
    ids=["float32", "strided", "no rows", "strided offsets", "float64 bias"],
)
def test_operands_that_have_to_be_converted_are_left_to_the_backend(emulated, change):
    _, down = weights("linear")
    x = torch.randn(10, INNER, dtype=torch.bfloat16)
    values = dict(activation=x, offsets=OFFSETS, bias=None) | change
    activation, offsets, bias = values.values()
    slots = torch.zeros(5, 2, dtype=torch.int32)
    combine = cuda.PREPARED["f16a_nvfp4weight_grouped_mm_combine"]
    assert combine(activation, *operands(down), offsets, slots, None, bias) is None


@pytest.mark.parametrize("struct", STRUCTS, ids=[struct.__name__ for struct in STRUCTS])
def test_fields_are_packed_as_ctypes_lays_them_out(struct):
    def fill(kind, next_value):
        filled, values = kind(), []
        for name, of, *_ in kind._fields_:
            if name.endswith("_"):
                continue
            if issubclass(of, ctypes.Structure):
                inner, inner_values = fill(of, next_value)
                setattr(filled, name, inner)
                values += inner_values
            elif issubclass(of, ctypes.Array):
                raw = bytes((next_value() + i) % 256 for i in range(ctypes.sizeof(of)))
                setattr(filled, name, of.from_buffer_copy(raw))
                values.append(raw)
            else:
                value = next_value()
                setattr(filled, name, value)
                values.append(value)
        return filled, values

    numbers = iter(range(1, 1000))
    filled, values = fill(struct, lambda: next(numbers))
    assert launch.packer(struct).pack(*values) == bytes(filled)


@needs_bindings
def test_the_launcher_gives_the_driver_what_it_wants(monkeypatch):
    seen = []

    def driver_launch(config, function, parameters, extra):
        config = launch.LaunchConfig.from_address(config)
        address = ctypes.c_void_p.from_address(parameters).value
        given = arguments.GatherArguments.from_address(address)
        fields = tuple(getattr(given, name) for name, _ in given._fields_)
        seen.append((config.gridDimX, config.blockDimX, config.sharedMemBytes, config.hStream, config.numAttrs, fields))
        assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ) == (1, 1, 1, 1)
        assert ctypes.c_uint.from_address(config.attrs).value == 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIAL...
        assert ctypes.c_int.from_address(config.attrs + 8).value == 1
        assert (function, extra) == (77, None)
        return 0 if len(seen) < 3 else 700

    monkeypatch.setattr(launch, "_launch_function", lambda: driver_launch)
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: None)
    kernel = SimpleNamespace(function=77, device=0, config=nvrtc.launch_config(256, 1024, overlap=True))
    run = launch.Launcher(kernel, 12, arguments.GatherArguments)
    fields = (2**40, None, 3, 4, 5, 6, 7)
    run(9, 2**40, 0, 3, 4, 5, 6, 7)
    run.launch(10, arguments.GatherArguments(*fields))
    assert seen == [(12, 256, 1024, 9, 1, fields), (12, 256, 1024, 10, 1, fields)]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(9, 2**40, 0, 3, 4, 5, 6, 7)


def test_another_device_than_the_current_one_is_switched_to(emulated, monkeypatch):
    switched = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            switched.append(self.index)
            monkeypatch.setattr(launch, "current_device", lambda: self.index)

        def __exit__(self, *error):
            monkeypatch.setattr(launch, "current_device", lambda: 1)

    monkeypatch.setattr(torch.cuda, "device", Device)
    _, down = weights("linear")
    rows, ids = torch.randn(10, INNER, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.int32)
    gemm = cuda.PREPARED["f16a_nvfp4weight_grouped_mm_combine"](rows, *operands(down), OFFSETS, ids)
    sort = prepared.route_launch((5, 2), E, ids.dtype, ids.device)
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    gemm(rows, *operands(down), OFFSETS, ids)
    sort(ids)
    assert switched == [None] * 3
