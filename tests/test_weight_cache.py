"""The cache of packed weights: one copy each, refreshed on change, gone with its weight.
Called by pytest.
"""

import collections
import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from processes import FORKS
from torch import nn

from thunder_moe import refresh_, weight_cache
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.kernels import slow_paths
from thunder_moe.weight_cache import changed, get, operands, refresh, stacked_layout, swizzled


@pytest.fixture
def count(monkeypatch):
    calls = []
    monkeypatch.setattr(
        weight_cache.select, "quantize", lambda weight: (calls.append(weight.shape), quantize(weight))[1]
    )
    return calls


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)


def is_right(*weights):
    expected = torch.cat([dequantize(quantize(weight.detach())) for weight in weights], 1)
    return torch.equal(dequantize(get(*weights)), expected)


def watched(*weights, **form):
    """Weak references to the tensors of a copy."""
    return [weakref.ref(tensor) for tensor in get(*weights, **form).tensors()]


def are_freed(references):
    return all(reference() is None for reference in references)


@pytest.fixture
def no_collector():
    """Copies go with their weights, not with the next collection of cycles."""
    gc.disable()
    yield
    gc.enable()


def test_quantizes_once(count):
    weight = parameter(2, 8, 32)
    packed = get(weight)
    assert get(weight) is packed
    assert len(count) == 1
    assert torch.equal(packed.qdata, quantize(weight).qdata)


def test_changes_refresh_the_same_tensors(count):
    weight = parameter(2, 8, 32)
    packed = get(weight)
    addresses = [tensor.data_ptr() for tensor in packed.tensors()]
    with torch.no_grad():
        weight.mul_(-3)
    get(weight)
    weight.data = torch.randn_like(weight)
    get(weight)
    optimizer = torch.optim.SGD([weight.requires_grad_()], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [tensor.data_ptr() for tensor in get(weight).tensors()] == addresses
    assert len(count) == 4
    assert torch.equal(dequantize(packed), dequantize(quantize(weight)))


def test_stacks_and_transposes():
    gate, up = parameter(2, 32, 8), parameter(2, 32, 24)
    both = get(gate, up, transposed=True)
    expected = torch.cat([dequantize(quantize(w.mT)) for w in (gate, up)], 1)
    assert torch.equal(dequantize(both), expected)
    assert get(gate, up, transposed=True) is both


def test_layouts(count):
    gate, up = parameter(2, 32, 64), parameter(2, 32, 64)
    linear, tiled = get(gate, up), get(gate, up, layout="tiled_64x64")
    assert (linear.layout, tiled.layout) == ("linear", "tiled_64x64")
    assert get(gate, up, layout="tiled_64x64") is tiled
    fp4_weight, scale, _ = operands(gate, up, layout="tiled_64x64")
    assert fp4_weight.dtype == torch.uint8
    assert fp4_weight.shape == (2, 32, 64)
    assert (fp4_weight.data_ptr(), scale.data_ptr()) == (tiled.qdata.data_ptr(), tiled.scale.data_ptr())
    addresses = [tensor.data_ptr() for tensor in tiled.tensors()]
    with torch.no_grad():
        up.mul_(-3)
    again = get(gate, up, layout="tiled_64x64")
    assert again.layout == "tiled_64x64"
    assert [tensor.data_ptr() for tensor in again.tensors()] == addresses
    assert torch.equal(dequantize(again), torch.cat([dequantize(quantize(w)) for w in (gate, up)], 1))
    assert len(count) == 6
    with pytest.raises(ValueError, match="layout: got 'tiled_64x64' .* needs out_features and in_features multiples"):
        get(gate, layout="tiled_64x64")


def test_stacked_layout(tiles):
    gate, up = parameter(2, 64, 96), parameter(2, 64, 32)
    assert stacked_layout(gate, up, transposed=False) == "linear"
    assert stacked_layout(gate, up, transposed=True) == "tiled_64x64"
    assert stacked_layout(gate, transposed=True, device=torch.device("meta")) == "linear"
    assert tiles == [("cpu", 128, 96), ("cpu", 128, 64), ("meta", 96, 64)]


def test_weights_that_have_moved_leave_nothing_behind(monkeypatch):
    weight = parameter(2, 64, 64)
    with monkeypatch.context() as patch:  # as if the weight had been there
        patch.setattr(weight_cache.select, "quantize", lambda tensor: quantize(tensor).to("meta"))
        left = watched(weight, layout="linear")
    assert left[0]().device.type == "meta"
    assert get(weight, layout="tiled_64x64").device.type == "cpu"
    assert are_freed(left)


@pytest.mark.usefixtures("no_collector")
def test_copies_die_with_their_weights():
    gate, up = parameter(2, 8, 32), parameter(2, 8, 32)
    stacked, crossed, alone = watched(gate, up), watched(up, gate), watched(gate)
    del gate
    assert are_freed(stacked + alone)
    other = parameter(2, 8, 32)
    assert is_right(up, other)  # drops what was stacked with `gate`
    assert are_freed(crossed)
    last = watched(up, other)
    del up
    assert are_freed(last)


@pytest.mark.usefixtures("no_collector")
def test_copies_of_a_model_die_with_it():
    model = nn.ModuleList(nn.ParameterList([parameter(2, 8, 32), parameter(2, 8, 32)]) for _ in range(3))
    copies = [reference for layer in model for reference in watched(*layer)]
    assert not any(reference() is None for reference in copies)
    del model
    assert are_freed(copies)


@pytest.mark.parametrize("n", [128, 40])
def test_swizzling_new_data_leaves_the_old_data_alone(n):
    """What needs no padding is shared by the copy."""
    first, second = quantize(torch.randn(3, n, 64)), quantize(torch.randn(3, n, 64))
    buffers = [tensor.clone() for tensor in first.tensors()]
    old = [buffer.data for buffer in buffers]
    swizzled(*buffers)
    for buffer, new in zip(buffers, second.tensors(), strict=True):
        buffer.data = new.clone()
    given = swizzled(*buffers)
    for tensor, expected in zip(old, first.tensors(), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    fresh = [tensor.clone() for tensor in second.tensors()]
    for tensor, expected in zip(given, swizzled(*fresh), strict=True):
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_a_new_shape_gets_new_tensors():
    weight = parameter(2, 8, 32)
    old = get(weight)
    weight.data = torch.randn(2, 4, 32, dtype=torch.bfloat16)
    assert get(weight).shape == (2, 4, 32)
    assert old.shape == (2, 8, 32)


def test_a_refused_weight_is_quantized_once_it_holds_numbers():
    weight = parameter(2, 8, 32)
    weight.data[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"weight: got NaN or Inf in experts \[0\]"):
        get(weight)
    weight.data.zero_()
    assert is_right(weight)


def test_inference_tensors():
    with torch.inference_mode():
        weight = torch.randn(2, 8, 32, dtype=torch.bfloat16)
        assert get(weight) is get(weight)


def test_copies_made_under_inference_mode_are_normal_tensors():
    weight = parameter(2, 8, 32)
    with torch.inference_mode():
        packed = get(weight)
        given = operands(weight)
    assert not any(tensor.is_inference() for tensor in (*packed.tensors(), *given))
    with torch.no_grad():
        weight.mul_(-3)
    assert torch.equal(dequantize(get(weight)), dequantize(quantize(weight)))


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "Adagrad", "SGD"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_steps_of_optimizers_are_seen(optimizer, fused):
    if fused and optimizer == "SGD":
        pytest.skip("torch 2.13's fused SGD changes nothing in bfloat16 on a CPU")
    weight = parameter(2, 8, 32).requires_grad_()
    step = getattr(torch.optim, optimizer)([weight], lr=0.5, fused=fused).step
    packed = get(weight)
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        step()
        assert not torch.equal(weight, before)
        assert get(weight) is packed
        assert torch.equal(dequantize(packed), dequantize(quantize(weight.detach())))


def test_steps_of_optimizers_on_a_flat_buffer_are_seen():
    flat = nn.Parameter(torch.randn(1024, dtype=torch.bfloat16))
    weight = nn.Parameter(torch.empty(2, 8, 32, dtype=torch.bfloat16), requires_grad=False)
    weight.data = flat.data[:512].view(2, 8, 32)
    get(weight)
    flat.grad = torch.ones_like(flat)
    torch.optim.Adam([flat], lr=0.5, fused=True).step()
    assert torch.equal(dequantize(get(weight)), dequantize(quantize(weight)))


def test_optimizers_of_other_layouts_step():
    """The hook of the cache sees the optimizers of the whole process: sparse parameters are without a storage."""
    weight = parameter(2, 8, 32).requires_grad_()
    packed, sparse = get(weight), nn.Parameter(torch.eye(3).to_sparse())
    weight.grad, sparse.grad = torch.ones_like(weight), torch.eye(3).to_sparse()
    torch.optim.SGD([sparse, weight], lr=0.5, foreach=False).step()
    assert torch.equal(sparse.to_dense(), torch.eye(3) / 2)
    assert get(weight) is packed
    assert torch.equal(dequantize(packed), dequantize(quantize(weight.detach())))


def test_frozen_weights_in_an_optimizer_are_not_quantized_again(count):
    frozen, trained = parameter(2, 8, 32), parameter(2, 8, 32).requires_grad_()
    get(frozen)
    trained.grad = torch.ones_like(trained)
    torch.optim.Adam([frozen, trained], fused=True).step()
    get(frozen)
    assert len(count) == 1


def test_another_storage_is_seen_at_the_same_address():
    weight = parameter(2, 8, 32)
    for _ in range(20):
        packed = get(weight)
        new = torch.randn_like(weight)
        weight.data = torch.empty(0)  # the allocator often gives the same address again
        weight.data = new.clone()
        assert get(weight) is packed
        assert torch.equal(dequantize(packed), dequantize(quantize(new)))


def test_another_view_of_the_same_storage_is_seen():
    weight = parameter(2, 32, 32)
    get(weight)
    weight.data = weight.data.mT
    assert torch.equal(dequantize(get(weight)), dequantize(quantize(weight)))
    weight.data = weight.data[:1]
    assert get(weight).shape == (1, 32, 32)


def test_new_data_keep_the_addresses():
    weight, partner = parameter(2, 8, 32), parameter(2, 8, 32)
    packed, stacked = get(weight), get(weight, partner)
    weight.data, partner.data = torch.randn_like(weight), torch.randn_like(partner)
    gc.collect()
    assert is_right(parameter(2, 8, 32))  # another weight, meanwhile
    assert is_right(weight, parameter(2, 8, 32))  # another partner, meanwhile
    assert get(weight) is packed
    assert get(weight, partner) is stacked
    assert is_right(weight)
    assert is_right(weight, partner)


@pytest.mark.filterwarnings("ignore:thunder_moe. a weight")
@pytest.mark.parametrize("stacked", [False, True])
def test_new_parameters_over_the_same_memory(stacked):
    """Their version counters begin at 0, and they often get the `id` of the last one."""
    base, first = parameter(2, 8, 32), [parameter(2, 8, 32)] * stacked
    for number in range(20):
        assert is_right(*first, nn.Parameter(base.data, requires_grad=False))
        with torch.no_grad():
            base.mul_(2 - number % 2 * 1.5)


def test_tensors_of_the_same_memory_get_a_warning(monkeypatch):
    monkeypatch.setattr(slow_paths, "_warned", set())
    base, other, models = parameter(2, 8, 32), parameter(2, 8, 32), [parameter(2, 8, 32) for _ in range(4)]
    flat = torch.randn(4, 2, 8, 32, dtype=torch.bfloat16)
    for step in range(4):  # changes, and parts of one buffer: no warning
        get(nn.Parameter(flat[step], requires_grad=False))
        get(nn.Parameter(base, requires_grad=False), other)
        get(models[step])
        with torch.no_grad():
            base.mul_(-3)
    assert not slow_paths._warned
    for _ in range(2):
        get(base[:])
    with pytest.warns(UserWarning, match=r"shape \(2, 8, 32\) was quantized for a third tensor of the same memory"):
        get(base[:])


def test_a_weight_that_takes_turns_with_others_behind_the_same_one():
    gate, ups = parameter(2, 8, 32), [parameter(2, 8, 32) for _ in range(3)]
    packed = [get(gate, up) for up in ups]
    assert [get(gate, up) for up in ups] == packed
    assert all(is_right(gate, up) for up in ups)


def test_weights_declared_changed(count):
    flat = torch.randn(1024, dtype=torch.bfloat16)
    weight, neighbour, other = flat[:512].view(2, 8, 32), flat[512:].view(2, 8, 32), parameter(2, 8, 32)
    for one in (weight, other):
        get(one)
    changed(neighbour, parameter(2, 8, 32))
    for one in (weight, other):
        get(one)
    assert len(count) == 3
    for one in (weight, other):
        get(one)
    assert len(count) == 3


def test_refresh():
    model = nn.ParameterList([parameter(2, 8, 32), parameter(2, 8, 32), parameter(2, 8, 32)])
    gate, up, down = model
    held = get(gate, up), get(down), get(down, transposed=False, layout="linear")
    gate.data.mul_(-3)
    down.data.view(torch.int16).numpy()[...] = 0x3F80  # ones
    assert refresh_(model) is model
    # Before any call: a captured CUDA graph reads them.
    assert torch.equal(dequantize(held[0]), torch.cat([dequantize(quantize(weight)) for weight in (gate, up)], 1))
    assert torch.equal(dequantize(held[1]), torch.ones(2, 8, 32))
    assert get(gate, up) is held[0]
    part = nn.ParameterList([up])  # one of two that are stacked: made again when both are at hand
    up.data.mul_(-3)
    refresh_(part)
    assert torch.equal(dequantize(get(gate, up))[:, 8:], dequantize(quantize(up)))
    with pytest.raises(TypeError, match=r"model: got Parameter, wanted a torch.nn.Module"):
        refresh_(gate)


def test_refresh_of_a_weight_of_another_shape():
    weight = parameter(2, 64, 64)
    get(weight, layout="tiled_64x64")
    weight.data = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    refresh([weight])  # the layout does not fit it
    assert torch.equal(dequantize(get(weight)), dequantize(quantize(weight)))


def test_refresh_after_a_stacked_weight_has_died():
    gate, bias = parameter(2, 8, 32), nn.Parameter(torch.randn(7))
    get(gate, parameter(2, 8, 32))
    gate.data.mul_(-3)
    refresh_(nn.ParameterList([gate, bias, parameter(2, 8, 32)]))
    assert is_right(gate)


def test_weights_can_be_swapped():
    weight, other, up = parameter(2, 8, 32), parameter(2, 8, 32), parameter(2, 8, 32)
    for _ in range(3):
        for one in (weight, other):
            assert is_right(one)
            assert is_right(one, up)
            assert is_right(up, one)
        torch.utils.swap_tensors(weight, other)
        with torch.no_grad():
            weight.mul_(-3)


@pytest.mark.usefixtures("no_collector")
def test_weights_that_are_loaded_by_swap():
    model = nn.ParameterList([parameter(2, 8, 32), parameter(2, 8, 32)])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(3):
            old = watched(*model)
            model.load_state_dict({name: -3 * tensor for name, tensor in model.state_dict().items()})
            assert are_freed(old)
            assert is_right(*model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def reload(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIED = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "save": reload,
    "save a list": lambda tensor: reload([tensor])[0],
    "save the copy of a copy": lambda tensor: reload(copy.copy(tensor)),
    "save twice": lambda tensor: reload(reload(tensor)),
}


@pytest.mark.parametrize("copied", COPIED.values(), ids=COPIED.keys())
@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
def test_copied_and_saved_weights_have_their_own_copies(copied, kind):
    weight = parameter(2, 8, 32) if kind is nn.Parameter else parameter(2, 8, 32).data
    up = parameter(2, 8, 32)
    packed, stacked = get(weight), get(up, weight)
    twin = copied(weight)
    assert type(twin) is kind
    for changed_one in (weight, twin):
        with torch.no_grad():
            changed_one.mul_(-3)
        for one in (weight, twin):
            assert is_right(one)
            assert is_right(up, one)
    assert get(weight) is packed
    assert get(up, weight) is stacked


def test_a_shallow_copy_has_its_own_copies():
    """It has the attributes and the memory of the weight, and a version counter of its own."""
    weight, up = parameter(2, 8, 32), parameter(2, 8, 32)
    get(weight), get(up, weight)
    twin = copy.copy(weight)
    with torch.no_grad():
        weight.mul_(-3)
    for one in (twin, weight, twin):
        assert is_right(one)
        assert is_right(up, one)
    twin.data = torch.randn_like(twin)
    packed = get(weight)
    assert is_right(twin)  # not into the tensors of the other copy
    assert torch.equal(dequantize(packed), dequantize(quantize(weight)))


def test_state_dicts_of_parameters_can_be_saved():
    module = nn.ParameterDict({"weight": parameter(2, 8, 32)})
    module.register_buffer("buffer", torch.randn(2, 8, 32, dtype=torch.bfloat16))
    for tensor in (module.weight, module.buffer):
        get(tensor)
    for state in (module.state_dict(), module.state_dict(keep_vars=True)):
        loaded = reload(state)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.mul_(-3)
    assert all(map(is_right, (module.weight, other.weight, other.buffer)))


def send(queue, weight):
    queue.put(is_right(weight))


@pytest.mark.slow
def test_weights_in_other_processes():
    context = torch.multiprocessing.get_context(FORKS.get_start_method())
    queue, weight = context.Queue(), parameter(2, 8, 32)
    get(weight)
    process = context.Process(target=send, args=(queue, weight))
    process.start()
    assert queue.get(timeout=300)
    process.join()
    assert is_right(weight)  # its memory is shared now


def test_functional_call_and_subclasses():
    class Right(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = parameter(2, 8, 32)

        def forward(self):
            return is_right(self.weight)

    class Subclass(torch.Tensor):
        pass

    module = Right()
    for _ in range(3):
        assert torch.func.functional_call(module, {"weight": torch.randn(2, 8, 32, dtype=torch.bfloat16)})
    assert module()
    weight = torch.randn(2, 8, 32, dtype=torch.bfloat16).as_subclass(Subclass)
    assert is_right(weight)
    weight.mul_(-3)
    assert is_right(weight)


def test_threads_make_one_copy(count):
    weights, start = [parameter(2, 64, 64) for _ in range(8)], threading.Barrier(4)
    seen = collections.defaultdict(set)

    def look():
        start.wait()
        for number, weight in enumerate(weights):
            seen[number].add(id(get(weight)))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == len(weights)
    assert [len(copies) for copies in seen.values()] == [1] * len(weights)


def test_threads_refresh_while_others_look():
    weights, stop, wrong = [parameter(2, 8, 32) for _ in range(4)], threading.Event(), []

    def look():
        while not stop.is_set():
            wrong.extend(weight for weight in weights if get(weight).shape != (2, 8, 32))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(30):
        for weight in weights:
            weight.data.mul_(-1)
        refresh(weights)
        changed(*weights)
    stop.set()
    thread.join()
    assert not wrong
    assert all(map(is_right, weights))


def test_an_interrupted_refresh_leaves_no_half_of_a_copy(monkeypatch):
    weight, new = parameter(2, 8, 32), torch.randn(2, 8, 32, dtype=torch.bfloat16)
    get(weight)
    old, weight.data = weight.data, new

    def interrupt(tensor, *args):
        tensor.zero_()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            get(weight)
    weight.data = old
    assert is_right(weight)
