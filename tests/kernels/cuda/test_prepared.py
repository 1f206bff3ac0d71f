"""Operators on CUDA, whose calls after the first launch what that one has prepared: equal to the first, at any address,
of operands of any strides and dtypes, on any device; and the launches' structs.
Called by pytest; the kernels run by the emulator, the driver's launch is simulated.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from emulated_gemms import make
from oracle import relative_error

import thunder_moe.ops.experts
import thunder_moe.ops.router  # noqa: F401  (they register the operators)
from thunder_moe.formats import mxfp8
from thunder_moe.kernels import select, slow_paths
from thunder_moe.kernels.cuda import arguments, launch, nvrtc
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.scaled_mm import dense_operands
from thunder_moe.routing import RouterForm

E, T, A, H, INNER, BF16 = 4, 5, 2, 64, 64, torch.bfloat16
OFFSETS = torch.tensor([1, 4, 4, 10], dtype=torch.int32)
OPS, FORM = torch.ops.thunder_moe, dict(alpha=1.702, limit=1.5, up_shift=1.0)
STRUCTS = [getattr(arguments, name) for name in arguments.__all__]
needs_bindings = pytest.mark.skipif(nvrtc.missing_reason() is not None, reason=str(nvrtc.missing_reason()))


@pytest.fixture(autouse=True)
def operators_on_cuda(emulated, monkeypatch):
    """Operators on this CPU run the CUDA kernels."""
    monkeypatch.setitem(select._KNOWN, "cuda", ("cpu",))
    monkeypatch.setattr(select, "_load", select._load.__wrapped__)
    monkeypatch.setattr(cuda, "unavailable_reason", lambda device=None: None)
    monkeypatch.setattr(slow_paths, "_warned", set())
    with select.use_backend("cuda"):
        yield


def weights(layout, format="nvfp4"):
    if format == "mxfp8":
        packed = [mxfp8.quantize(torch.randn(E, n, k)) for n, k in ((2 * INNER, H), (H, INNER))]
    else:
        packed = [make(E, 2 * INNER, H, halves=2)[0], make(E, H, INNER)[0]]
    return [weight.to_layout(layout) for weight in packed]


CASES = (
    "mm",
    "swiglu",
    "scaled swiglu",
    "combine",
    "weighted combine",
    "dgrad",
    "dgrad of row scales",
    "dense",
    "layer",
)


def make_call(case, format, layout):
    """(operator, arguments, options, how many rows of the result are defined)."""
    gate_up, down = weights(layout, format)
    ids, scores, x = torch.randint(-1, E + 1, (T, A)), torch.rand(T, A), torch.randn(T, H, dtype=BF16)
    row_slot, offsets, slot_row = cuda.route(ids, E)
    rows, first, second = torch.randn(T * A, INNER, dtype=BF16), operands(gate_up), operands(down)
    biases = torch.randn(E, 2 * INNER, dtype=BF16), torch.randn(E, H)
    name, args, options = {
        "mm": ("scaled_grouped_mm", (rows, *second, offsets), {}),
        "swiglu": ("grouped_swiglu", (x, *first, offsets, row_slot), {}),
        "scaled swiglu": ("grouped_swiglu", (x, *first, offsets, row_slot, scores, biases[0]), FORM),
        "combine": ("grouped_mm_combine", (rows, *second, offsets, slot_row), {}),
        "weighted combine": ("grouped_mm_combine", (rows, *second, offsets, slot_row, scores, biases[1]), {}),
        "dgrad": ("scaled_grouped_mm_dgrad", (rows, *second, offsets), {}),
        "dgrad of row scales": (
            "scaled_grouped_mm_dgrad",
            (torch.randn(T * A, 2 * INNER).to(BF16), *first, offsets),
            {},
        ),
        "dense": ("scaled_mm", (x, *dense_operands(down), torch.randn(H)), {}),
        "layer": ("moe_experts", (x, ids, scores, *first, *second, *biases), FORM),
    }[case]
    layouts = ("gate_up_layout", "down_layout") if case == "layer" else ("layout",)
    options = options | dict.fromkeys(layouts, layout)
    of_tokens = name in ("grouped_mm_combine", "scaled_mm", "moe_experts")
    return getattr(OPS, f"f16a_{format}weight_{name}"), args, options, T if of_tokens else int(offsets[-1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_later_calls_equal_the_first(layout, format, case):
    operator, args, options, live = make_call(case, format, layout)
    first = operator(*args, **options)[:live]
    for _ in range(2):
        assert torch.equal(operator(*args, **options)[:live], first)
    with select.use_backend("reference"):
        assert relative_error(first, operator(*args, **options)[:live]) < 1e-2


@pytest.mark.parametrize("shape", [(H,), (2, 3, H)])
def test_dense_layers_of_any_leading_dimensions(layout, shape):
    operator, (_, *packed), options, _ = make_call("dense", "nvfp4", layout)
    x = torch.randn(shape, dtype=BF16)
    expected = operator(x.view(-1, H), *packed, **options).view(*shape[:-1], INNER)
    for _ in range(2):
        assert torch.equal(operator(x, *packed, **options), expected)


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_routing(tokens, biased):
    logits, ids = torch.randn(tokens, 40), torch.randint(-1, E + 1, (tokens, A))
    args = (logits, torch.randn(40)) if biased else (logits,)
    form = dict(top_k=4, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    wanted = cuda.router(logits, args[1] if biased else None, RouterForm(**form), BF16)
    order = cuda.route(ids, E)
    for _ in range(2):
        assert all(map(torch.equal, OPS.moe_router(*args, **form, scores_dtype=BF16), wanted))
        assert all(map(torch.equal, OPS.moe_route(ids, E), order))


def shift(tensor):
    """A copy at an address that is no multiple of 16."""
    flat = tensor.contiguous().flatten()
    shifted = torch.cat([flat[:1], flat])[1:].view(tensor.shape)
    assert shifted.data_ptr() % 16
    return shifted


def test_operands_may_lie_unaligned(layout):
    operator, (rows, codes, *others), options, live = make_call("mm", "nvfp4", layout)
    operator(rows, codes, *others, **options)
    expected = operator(rows, codes, *others, **options)[:live]
    moved = shift(codes.mT).mT
    assert torch.equal(operator(shift(rows), moved, *others, **options)[:live], expected)


def test_another_backend_is_asked_anew():
    operator, args, _, live = make_call("mm", "nvfp4", "linear")
    results = [operator(*args)[:live] for _ in range(2)]
    with select.use_backend("w4a4"):  # which rounds the rows, too
        assert relative_error(operator(*args)[:live], results[1]) > 0.02


def test_operands_that_have_to_be_converted():
    operator, args, _, _ = make_call("weighted combine", "nvfp4", "linear")
    rows, offsets, bias = args[0], args[4], args[7]
    expected = operator(*args)
    strided = (rows.t().contiguous().t(), *args[1:4], offsets.repeat_interleave(2)[::2], *args[5:7], bias.double())
    for position in (0, 4, 7):
        changed = [new if i == position else old for i, (old, new) in enumerate(zip(args, strided, strict=True))]
        for _ in range(2):
            assert torch.equal(operator(*changed), expected)
    with pytest.warns(UserWarning, match="no CUDA kernel serves activations in float32"):
        assert relative_error(operator(rows.float(), *args[1:]), expected) < 1e-2
    none = args[5].new_full((T, A), -1)
    assert operator(rows[:0], *args[1:4], 0 * offsets, none, *args[6:]).eq(0).all()


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


def test_another_device_than_the_current_one_is_switched_to(monkeypatch):
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
    operator, args, _, _ = make_call("combine", "nvfp4", "linear")
    ids = torch.randint(0, E, (T, A))
    operator(*args), OPS.moe_route(ids, E)
    switched.clear()
    monkeypatch.setattr(launch, "current_device", lambda: 1)
    operator(*args), OPS.moe_route(ids, E)
    assert switched == [None] * 3  # a GEMM, what adds its rows up, the order
