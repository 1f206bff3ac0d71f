"""The cache of packed weights: one copy each, refreshed on change, gone with its weight.
Called by pytest.
"""

import gc

import pytest
import torch
from torch import nn

from thunder_moe import weight_cache
from thunder_moe.formats.nvfp4 import dequantize, quantize
from thunder_moe.weight_cache import WeightCache, refresh_, stacked_layout


@pytest.fixture
def cache():
    return WeightCache()


@pytest.fixture
def count(monkeypatch):
    calls = []
    monkeypatch.setattr(
        weight_cache.select, "quantize", lambda weight: (calls.append(weight.shape), quantize(weight))[1]
    )
    return calls


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)


def test_quantizes_once(cache, count):
    weight = parameter(2, 8, 32)
    packed = cache.get(weight)
    assert cache.get(weight) is packed
    assert len(count) == 1
    assert torch.equal(packed.qdata, quantize(weight).qdata)


def test_changes_refresh_the_same_tensors(cache, count):
    weight = parameter(2, 8, 32)
    packed = cache.get(weight)
    addresses = [tensor.data_ptr() for tensor in packed.tensors()]
    with torch.no_grad():
        weight.mul_(-3)
    cache.get(weight)
    weight.data = torch.randn_like(weight)
    cache.get(weight)
    optimizer = torch.optim.SGD([weight.requires_grad_()], lr=0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [tensor.data_ptr() for tensor in cache.get(weight).tensors()] == addresses
    assert len(count) == 4
    assert torch.equal(dequantize(packed), dequantize(quantize(weight)))


def test_stacks_and_transposes(cache):
    gate, up = parameter(2, 32, 8), parameter(2, 32, 24)
    both = cache.get(gate, up, transposed=True)
    expected = torch.cat([dequantize(quantize(w.mT)) for w in (gate, up)], 1)
    assert torch.equal(dequantize(both), expected)
    assert cache.get(gate, up, transposed=True) is both


def test_layouts(cache, count):
    gate, up = parameter(2, 32, 64), parameter(2, 32, 64)
    linear, tiled = cache.get(gate, up), cache.get(gate, up, layout="tiled_64x64")
    assert (linear.layout, tiled.layout) == ("linear", "tiled_64x64")
    assert cache.get(gate, up, layout="tiled_64x64") is tiled
    fp4_weight, scale, _ = cache.operands(gate, up, layout="tiled_64x64")
    assert fp4_weight.dtype == torch.uint8
    assert fp4_weight.shape == (2, 32, 64)
    assert (fp4_weight.data_ptr(), scale.data_ptr()) == (tiled.qdata.data_ptr(), tiled.scale.data_ptr())
    addresses = [tensor.data_ptr() for tensor in tiled.tensors()]
    with torch.no_grad():
        up.mul_(-3)
    again = cache.get(gate, up, layout="tiled_64x64")
    assert again.layout == "tiled_64x64"
    assert [tensor.data_ptr() for tensor in again.tensors()] == addresses
    assert torch.equal(dequantize(again), torch.cat([dequantize(quantize(w)) for w in (gate, up)], 1))
    assert len(count) == 6
    with pytest.raises(ValueError, match="layout: got 'tiled_64x64' .* needs out_features and in_features multiples"):
        cache.get(gate, layout="tiled_64x64")


def test_stacked_layout(tiles):
    gate, up = parameter(2, 64, 96), parameter(2, 64, 32)
    assert stacked_layout(gate, up, transposed=False) == "linear"
    assert stacked_layout(gate, up, transposed=True) == "tiled_64x64"
    assert stacked_layout(gate, transposed=True, device=torch.device("meta")) == "linear"
    assert tiles == [("cpu", 128, 96), ("cpu", 128, 64), ("meta", 96, 64)]


def test_weights_that_have_moved_leave_nothing_behind(cache):
    weight, other = parameter(2, 64, 64), parameter(2, 64, 64)
    for one in (weight, other):
        cache.get(one, layout="tiled_64x64")
    entry = cache._entries["quantize", False, False, "tiled_64x64", "nvfp4", id(weight)]
    entry.packed = entry.packed.to("meta")  # as if the weight had been there
    cache.get(weight, layout="linear")
    assert len(cache) == 2
    cache.get(weight, layout="tiled_64x64")
    assert len(cache) == 3


def test_entries_die_with_their_weights(cache):
    gate, up = parameter(2, 8, 32), parameter(2, 8, 32)
    cache.get(gate, up)
    cache.get(gate)
    assert len(cache) == 2
    del gate
    gc.collect()
    assert len(cache) == 0


def test_a_new_shape_gets_new_tensors(cache):
    weight = parameter(2, 8, 32)
    old = cache.get(weight)
    weight.data = torch.randn(2, 4, 32, dtype=torch.bfloat16)
    assert cache.get(weight).shape == (2, 4, 32)
    assert old.shape == (2, 8, 32)


def test_a_refused_weight_leaves_nothing_behind(cache):
    weight = parameter(2, 8, 32)
    weight.data[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"weight: got NaN or Inf in experts \[0\]"):
        cache.get(weight)
    assert len(cache) == 0


def test_inference_tensors(cache):
    with torch.inference_mode():
        weight = torch.randn(2, 8, 32, dtype=torch.bfloat16)
        assert cache.get(weight) is cache.get(weight)


def test_copies_made_under_inference_mode_are_normal_tensors(cache):
    weight = parameter(2, 8, 32)
    with torch.inference_mode():
        packed = cache.get(weight)
        operands = cache.operands(weight)
    assert not any(tensor.is_inference() for tensor in (*packed.tensors(), *operands))
    with torch.no_grad():
        weight.mul_(-3)
    assert torch.equal(dequantize(cache.get(weight)), dequantize(quantize(weight)))


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "Adagrad", "SGD"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_steps_of_optimizers_are_seen(cache, optimizer, fused):
    if fused and optimizer == "SGD":
        pytest.skip("torch 2.13's fused SGD changes nothing in bfloat16 on a CPU")
    weight = parameter(2, 8, 32).requires_grad_()
    step = getattr(torch.optim, optimizer)([weight], lr=0.5, fused=fused).step
    packed = cache.get(weight)
    for _ in range(2):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        step()
        assert not torch.equal(weight, before)
        assert cache.get(weight) is packed
        assert torch.equal(dequantize(packed), dequantize(quantize(weight.detach())))


def test_steps_of_optimizers_on_a_flat_buffer_are_seen(cache):
    flat = nn.Parameter(torch.randn(1024, dtype=torch.bfloat16))
    weight = nn.Parameter(torch.empty(2, 8, 32, dtype=torch.bfloat16), requires_grad=False)
    weight.data = flat.data[:512].view(2, 8, 32)
    cache.get(weight)
    flat.grad = torch.ones_like(flat)
    torch.optim.Adam([flat], lr=0.5, fused=True).step()
    assert torch.equal(dequantize(cache.get(weight)), dequantize(quantize(weight)))


def test_frozen_weights_in_an_optimizer_are_not_quantized_again(cache, count):
    frozen, trained = parameter(2, 8, 32), parameter(2, 8, 32).requires_grad_()
    cache.get(frozen)
    trained.grad = torch.ones_like(trained)
    torch.optim.Adam([frozen, trained], fused=True).step()
    cache.get(frozen)
    assert len(count) == 1


def test_another_storage_is_seen_at_the_same_address(cache):
    weight = parameter(2, 8, 32)
    for _ in range(20):
        packed = cache.get(weight)
        new = torch.randn_like(weight)
        weight.data = torch.empty(0)  # the allocator often gives the same address again
        weight.data = new.clone()
        assert cache.get(weight) is packed
        assert torch.equal(dequantize(packed), dequantize(quantize(new)))


def test_another_view_of_the_same_storage_is_seen(cache):
    weight = parameter(2, 32, 32)
    cache.get(weight)
    weight.data = weight.data.mT
    assert torch.equal(dequantize(cache.get(weight)), dequantize(quantize(weight)))
    weight.data = weight.data[:1]
    assert cache.get(weight).shape == (1, 32, 32)


def test_new_data_keep_the_addresses_over_garbage_collections(cache):
    weight, other = parameter(2, 8, 32), parameter(2, 8, 32)
    packed = cache.get(weight)
    weight.data = torch.randn_like(weight)
    gc.collect()
    cache.get(other)  # makes room first
    assert cache.get(weight) is packed
    assert torch.equal(dequantize(packed), dequantize(quantize(weight)))


def test_living_weights_with_new_data_are_looked_for_once(cache, monkeypatch):
    weight, others = parameter(2, 8, 32), [parameter(2, 8, 32) for _ in range(4)]
    cache.get(weight)
    weight.data = torch.randn_like(weight)
    scans = []
    everything = gc.get_objects
    monkeypatch.setattr(weight_cache.gc, "get_objects", lambda: (scans.append(1), everything())[1])
    for other in others:
        cache.get(other)
    assert len(scans) == 1
    del weight  # unused since its data are new
    gc.collect()
    assert len(cache) == len(others)


def test_an_id_that_lives_again_gets_its_own_content(cache):
    old, new = parameter(2, 8, 32), parameter(2, 8, 32)
    cache.get(old)
    # As if `new` had got the id of `old`, whose storage lives on elsewhere.
    cache._entries = {(*key[:-1], id(new)): entry for key, entry in cache._entries.items()}
    assert torch.equal(dequantize(cache.get(new)), dequantize(quantize(new)))


def test_refresh_where_an_id_lives_again_in_a_bias(monkeypatch):
    cache = WeightCache()
    monkeypatch.setattr(weight_cache, "WEIGHT_CACHE", cache)
    bias, weight = nn.Parameter(torch.randn(7)), parameter(2, 8, 32)
    cache.get(weight)
    # As if `bias` had got the id of `weight`.
    cache._entries = {(*key[:-1], id(bias)): entry for key, entry in cache._entries.items()}
    refresh_(nn.ParameterList([bias]))


def test_weights_declared_changed(cache, count):
    flat = torch.randn(1024, dtype=torch.bfloat16)
    weight, neighbour, other = flat[:512].view(2, 8, 32), flat[512:].view(2, 8, 32), parameter(2, 8, 32)
    for one in (weight, other):
        cache.get(one)
    cache.changed(neighbour, parameter(2, 8, 32))
    for one in (weight, other):
        cache.get(one)
    assert len(count) == 3
    for one in (weight, other):
        cache.get(one)
    assert len(count) == 3


def test_refresh(monkeypatch):
    cache = WeightCache()
    monkeypatch.setattr(weight_cache, "WEIGHT_CACHE", cache)
    model = nn.ParameterList([parameter(2, 8, 32), parameter(2, 8, 32), parameter(2, 8, 32)])
    gate, up, down = model
    held = cache.get(gate, up), cache.get(down), cache.get(down, transposed=False, layout="linear")
    gate.data.mul_(-3)
    down.data.view(torch.int16).numpy()[...] = 0x3F80  # ones
    assert refresh_(model) is model
    # Before any call: a captured CUDA graph reads them.
    assert torch.equal(dequantize(held[0]), torch.cat([dequantize(quantize(weight)) for weight in (gate, up)], 1))
    assert torch.equal(dequantize(held[1]), torch.ones(2, 8, 32))
    assert cache.get(gate, up) is held[0]
    part = nn.ParameterList([up])  # one of two that are stacked: made again when both are at hand
    up.data.mul_(-3)
    refresh_(part)
    assert torch.equal(dequantize(cache.get(gate, up))[:, 8:], dequantize(quantize(up)))
    with pytest.raises(TypeError, match=r"model: got Parameter, wanted a torch.nn.Module"):
        refresh_(gate)


def test_refresh_of_a_weight_of_another_shape(cache):
    weight = parameter(2, 64, 64)
    cache.get(weight, layout="tiled_64x64")
    weight.data = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    cache.refresh([weight])  # the layout does not fit it
    assert torch.equal(dequantize(cache.get(weight)), dequantize(quantize(weight)))


def test_weights_can_be_swapped(cache):
    weight, other = parameter(2, 8, 32), parameter(2, 8, 32)
    cache.get(weight)
    torch.utils.swap_tensors(weight, other)
    assert torch.equal(dequantize(cache.get(weight)), dequantize(quantize(weight)))
    assert torch.equal(dequantize(cache.get(other)), dequantize(quantize(other)))


def test_weights_that_die_at_any_time(cache):
    """The garbage collector runs at almost every allocation, while the cache walks over its entries."""

    class Cycle:
        def __init__(self):
            self.weight, self.itself = parameter(1, 4, 16), self
            cache.get(self.weight)

    kept = parameter(1, 4, 16)
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(60):
            Cycle()
            cache.get(kept)
            cache.refresh([kept, parameter(1, 4, 16)])
            if number % 7 == 0:
                with torch.no_grad():
                    kept.mul_(-2)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(cache) == 1
    assert torch.equal(dequantize(cache.get(kept)), dequantize(quantize(kept)))
