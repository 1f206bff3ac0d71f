"""The cache of packed weights: one copy each, refreshed on change, gone with its weight.
Called by pytest.
"""

import gc

import pytest
import torch
from torch import nn

from thunder_moe.compilers import weight_cache
from thunder_moe.compilers.weight_cache import WeightCache, stacked_layout
from thunder_moe.nvfp4 import dequantize, quantize


@pytest.fixture
def cache():
    return WeightCache()


@pytest.fixture
def count(monkeypatch):
    calls = []
    monkeypatch.setattr(weight_cache, "quantize", lambda weight: (calls.append(weight.shape), quantize(weight))[1])
    return calls


def parameter(*shape):
    return nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False)


def test_quantises_once(cache, count):
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
    entry = cache._entries["quantize", False, False, "tiled_64x64", id(weight)]
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
