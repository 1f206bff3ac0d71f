"""Chains of launches: which operands they take, what kernels are given, results, errors, explanations.
Called by pytest; the driver's launch is a function of the test.
"""

import copy
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from thunder_moe.activations import SWIGLU
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import arguments, chain, launch, nvrtc, operators
from thunder_moe.kernels.cuda.chain import ChainBuilder, TensorMap, launched
from thunder_moe.kernels.specs import GemmSpec, Target, WeightSpec

CPU = torch.device("cpu")
STRUCTS = [struct for name, struct in vars(arguments).items() if name.endswith("Arguments")]
needs_bindings = pytest.mark.skipif(nvrtc.missing_reason() is not None, reason=str(nvrtc.missing_reason()))


@pytest.fixture
def driver(monkeypatch):
    """Every launch: the function, the configuration, and the bytes of the struct; a launch may be told to fail."""
    seen = SimpleNamespace(launches=[], size=0, status=0, stream=9)

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    def run(config, function, parameters, extra):
        content = ctypes.string_at(parameters[0], seen.size)
        seen.launches.append((function, launch.LaunchConfig.from_buffer_copy(ctypes.string_at(config, 56)), content))
        return seen.status

    def kernel(sources, expression, threads, shared_bytes, device, argument):
        config = launch.LaunchConfig(blockDimX=threads, sharedMemBytes=shared_bytes)
        seen.size = ctypes.sizeof(argument)
        address = ctypes.addressof(config)
        handle = SimpleNamespace(getPtr=lambda config=config: address)
        return SimpleNamespace(function=77, config=handle, blocks_per_multiprocessor=2)

    monkeypatch.setattr(launch, "launch_address", lambda: ctypes.cast(run, ctypes.c_void_p).value)
    monkeypatch.setattr(launch, "current_stream", lambda device: seen.stream)
    monkeypatch.setattr(nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvrtc, "bind_context", lambda device: None)
    return seen


def gather_chain(*, blocks=12, multiprocessors=None):
    """Run one kernel on x (3, 4) and row_slot int32 (6,), and return what it writes."""
    builder = ChainBuilder(CPU)
    x, slots = builder.operand((3, 4), torch.bfloat16), builder.operand((6,), torch.int32, align=1)
    out = builder.result((6, 4), torch.bfloat16)
    fields = x, slots, out, slots.plus(20), 6, 4, 2
    builder.launch((), "gather", 256, 1024, blocks, arguments.GatherArguments, fields, multiprocessors)
    return builder.build()


X, SLOTS = torch.ones(3, 4, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int32)


def test_a_launch_gets_addresses_numbers_and_the_stream(driver):
    run = gather_chain()
    out = run(X, SLOTS)
    driver.stream = 10
    again = run(X, SLOTS)
    assert out.shape == (6, 4)
    assert out.dtype == torch.bfloat16
    for result, (function, config, content), stream in zip((out, again), driver.launches, (9, 10), strict=True):
        given = arguments.GatherArguments.from_buffer_copy(content)
        addresses = X.data_ptr(), SLOTS.data_ptr(), result.data_ptr(), SLOTS.data_ptr() + 20
        assert tuple(getattr(given, name) for name, *_ in given._fields_) == (*addresses, 6, 4, 2)
        assert (function, config.gridDimX, config.blockDimX, config.sharedMemBytes) == (77, 12, 256, 1024)
        assert config.hStream == stream


def test_persistent_kernels_have_as_many_blocks_as_run_at_once(driver):
    gather_chain(blocks=12, multiprocessors=3)(X, SLOTS)
    assert driver.launches[0][1].gridDimX == 6


@pytest.mark.parametrize("struct", STRUCTS, ids=[struct.__name__ for struct in STRUCTS])
def test_fields_are_where_ctypes_lays_them_out(driver, monkeypatch, struct):
    monkeypatch.setattr(launch, "tensor_map", lambda address, *numbers: bytes([numbers[0]]) * 128)
    builder = ChainBuilder(CPU)
    x, numbers = builder.operand((64,), torch.float32), iter(range(1, 200))

    def fill(kind):
        filled, fields = kind(), []
        for name, of, *_ in kind._fields_:
            if name.endswith("_"):
                continue
            number = next(numbers)
            if issubclass(of, ctypes.Structure):
                inner, more = fill(of)
                setattr(filled, name, inner)
                fields += more
            elif issubclass(of, ctypes.Array):
                setattr(filled, name, of.from_buffer_copy(bytes([number]) * 128))
                fields.append(TensorMap(x, number, 8, 64))
            elif of is ctypes.c_void_p:
                setattr(filled, name, memory.data_ptr() + number)
                fields.append(x.plus(number))
            else:
                setattr(filled, name, number)
                fields.append(number)
        return filled, fields

    memory = torch.zeros(64)
    filled, fields = fill(struct)
    builder.result((1,), torch.float32)
    builder.launch((), "any", 32, 0, 1, struct, fields)
    assert builder.build()(memory) is not None
    assert driver.launches[0][2] == bytes(filled)


class Subclass(torch.Tensor):
    pass


def shifted(tensor):
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)  # as FSDP does; a kernel would take address 0 for "not given"
    return tensor


OTHERS = {
    "shape": lambda: (X[:2], SLOTS),
    "rank": lambda: (X.flatten(), SLOTS),
    "strides": lambda: (X.t().contiguous().t(), SLOTS),
    "dtype": lambda: (X.half(), SLOTS),
    "address": lambda: (shifted(X), SLOTS),
    "device": lambda: (X.to("meta"), SLOTS),
    "no tensor": lambda: (X, None),
    "number": lambda: (X, 3),
    "too few": lambda: (X,),
    "too many": lambda: (X, SLOTS, X),
    "fake tensor": lambda: (FakeTensorMode().from_tensor(X), SLOTS),
    "freed memory": lambda: (X, freed(SLOTS)),
    "negated view": lambda: (torch._neg_view(X), SLOTS),
}


@pytest.mark.parametrize("operands", OTHERS.values(), ids=OTHERS.keys())
def test_operands_of_another_kind_launch_nothing(driver, operands):
    run = gather_chain()
    assert run(*operands()) is None
    assert not driver.launches
    with pytest.raises(ValueError, match="operands: got .*which the kernels of this chain do not take"):
        launched(run, *operands())
    assert run(nn.Parameter(X), SLOTS) is not None
    assert run(X, shifted(SLOTS)) is not None  # whose address may be any


def test_strides_of_one_element_are_any(driver):
    builder = ChainBuilder(CPU)
    builder.operand((1, 4), torch.bfloat16)
    builder.result((1,), torch.float32)
    run = builder.build()
    assert X[:1].repeat(1, 2)[:, :4].stride() == (8, 1)
    assert run(X[:1].repeat(1, 2)[:, :4]) is not None
    assert run(X[:1].repeat(1, 2)[:, ::2]) is None


def test_batched_tensors_are_another_kind(driver):
    run, taken = gather_chain(), []
    torch.vmap(lambda x: taken.append(run(x, SLOTS)) or x)(torch.stack([X, X]))
    assert taken == [None]


def test_values_and_options(driver):
    builder = ChainBuilder(CPU)
    builder.like(None)
    builder.like(4)
    builder.options({"layout": "linear", "alpha": 1.0}, {"alpha": 1.0})
    builder.result((2,), torch.float32)
    run = builder.build()
    assert run(None, 4, layout="linear", alpha=1.0) is not None
    assert run(None, 4, None, alpha=1.0, layout="linear") is not None
    assert run(None, 4, layout="linear") is not None
    for args, options in (
        ((None, 5), dict(layout="linear", alpha=1.0)),
        ((None, 4.0), dict(layout="linear", alpha=1.0)),
        ((X, 4), dict(layout="linear", alpha=1.0)),
        ((None, 4), dict(layout="tiled", alpha=1.0)),
        ((None, 4), dict(layout="linear", alpha=2.0)),
        ((None, 4), dict(layout="linear", beta=1.0)),
        ((None, 4), {}),
        ((None,), dict(layout="linear")),
    ):
        assert run(*args, **options) is None


def test_a_result_in_an_operand(driver):
    builder = ChainBuilder(CPU)
    out = builder.result_in(builder.operand((3, 4), torch.bfloat16), (3, 4), torch.bfloat16)
    builder.launch((), "gather", 32, 0, 1, arguments.GatherArguments, (None, None, out, None, 6, 4, 2))
    given = X.clone()
    assert builder.build()(given) is given
    assert arguments.GatherArguments.from_buffer_copy(driver.launches[0][2]).out == given.data_ptr()
    assert given._version == 1
    lazy = torch._lazy_clone(given)
    builder.build()(lazy)
    written = arguments.GatherArguments.from_buffer_copy(driver.launches[1][2]).out
    assert written == lazy.data_ptr() != given.data_ptr()  # the copy was due before the kernel writes


def test_scratch_memory_is_apart_and_aligned(driver):
    builder = ChainBuilder(CPU)
    first, second = builder.scratch(10), builder.scratch(1000)
    builder.result((1,), torch.float32)
    builder.launch((), "gather", 32, 0, 1, arguments.GatherArguments, (first, second, None, None, 6, 4, 2))
    builder.build()()
    given = arguments.GatherArguments.from_buffer_copy(driver.launches[0][2])
    assert given.row_slot - given.x == 256


def test_other_threads_run_while_a_launch_waits(driver):
    """The driver waits where its queue is full, maybe for what another thread has to launch on another stream."""
    run, started, stop = gather_chain(), threading.Event(), threading.Event()

    def waits(config, function, parameters, extra):
        started.set()
        return 0 if stop.wait(60) else 1

    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    function = kind(waits)
    builder = ChainBuilder(CPU)
    builder.result((1,), torch.float32)
    builder.launch((), "gather", 32, 0, 1, arguments.GatherArguments, (None, None, None, None, 6, 4, 2))
    launch_address, launch.launch_address = launch.launch_address, lambda: ctypes.cast(function, ctypes.c_void_p).value
    waiting = builder.build()
    launch.launch_address = launch_address
    driver.stream = 1
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(waiting)
        assert started.wait(60)
        driver.stream = 2
        assert run(X, SLOTS) is not None
        driver.stream = 1  # on which the launches of two chains follow each other
        second = threads.submit(run, X, SLOTS)
        time.sleep(0.05)
        assert len(driver.launches) == 1
        stop.set()
        assert first.result(60) is not None
        assert second.result(60) is not None
    assert [config.hStream for _, config, _ in driver.launches] == [2, 1]


def test_the_table_forgets_chains_that_are_not_looked_up(monkeypatch):
    monkeypatch.setattr(chains, "_CHAINS", {})
    monkeypatch.setattr(chains, "MAX_CHAINS", 2)
    defaults = {"layout": "linear"}
    kinds = [chains.kind_of("mm", (X, SLOTS[:n], None), {"layout": "linear"}, defaults) for n in (1, 2, 3)]
    assert kinds[0] == chains.kind_of("mm", (X, SLOTS[:1]), {}, defaults)
    assert kinds[0] != chains.kind_of("mm", (X, SLOTS[:1]), {"layout": "tiled"}, defaults)
    assert kinds[0] != chains.kind_of("mm", (X, SLOTS[:1], 3), {}, defaults)
    for kind in kinds[:2]:
        chains.remember(kind, len)
    assert chains.find(kinds[0]) is len
    chains.remember(kinds[2], None)
    assert [chains.find(kind) for kind in kinds] == [len, chains.UNKNOWN, None]


@needs_bindings
def test_an_error_of_the_driver(driver):
    run = gather_chain()
    driver.status = 700
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(X, SLOTS)


def test_errors_of_python_are_passed_on(driver, monkeypatch):
    def fails(device):
        raise KeyError("no stream")

    monkeypatch.setattr(launch, "current_stream", fails)
    with pytest.raises(KeyError, match="no stream"):
        gather_chain()(X, SLOTS)
    with pytest.raises(TypeError, match="cannot create"):
        type(gather_chain())()
    with pytest.raises(TypeError, match="a dtype was wanted"):
        chain._extension().build([("float", (1,), (1,), 1, None)], [], [], [], [], 0, 0, False, (1, 2, 3, 4, 5), 0)


@needs_bindings
def test_kernels_may_start_before_the_previous_one_has_ended(driver, monkeypatch):
    config = nvrtc.launch_config(256, 1024, overlap=True)
    monkeypatch.setattr(
        nvrtc, "kernel", lambda *_: SimpleNamespace(function=77, config=config, blocks_per_multiprocessor=1)
    )
    gather_chain()(X, SLOTS)
    _, given, _ = driver.launches[0]
    assert (given.gridDimX, given.gridDimY, given.gridDimZ, given.blockDimX, given.numAttrs) == (12, 1, 1, 256, 1)
    assert ctypes.c_uint.from_address(given.attrs).value == 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert ctypes.c_int.from_address(given.attrs + 8).value == 1


def test_why_no_chain_serves_a_gemm():
    target = Target(torch.device("cuda", 0), 132, (9, 0))
    spec = GemmSpec(8, 4, 128, 64, torch.bfloat16, WeightSpec("tiled_64x64"), target)
    assert operators.unserved_reason(spec) is None
    for change, reason in (
        (dict(dtype=torch.float32), "no CUDA kernel serves activations in float32"),
        (dict(num_experts=2000), "no CUDA kernel serves more than 1024 experts"),
        (dict(rows=0), "there is nothing to compute"),
        (dict(weight=WeightSpec("swizzled_128x4")), "layout 'swizzled_128x4' is converted to 'linear' first"),
        (dict(n=96, activation=SWIGLU), "blocks of layout 'tiled_64x64' have rows of gate and of up"),
        (dict(weight=WeightSpec("linear"), rows=10**5), "so many rows are multiplied by weights that are converted"),
    ):
        other = copy.copy(spec)
        for name, value in change.items():
            object.__setattr__(other, name, value)
        assert reason in operators.unserved_reason(other)
