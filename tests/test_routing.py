"""Routing in plain torch, against Python's own sort. Called by pytest."""

import pytest
import torch

from thunder_moe.routing import invert, route, sort_by_expert


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[[1, 0], [3, 1], [1, 1]], [[-1, 4], [2, 9]], [[2]], [[4, 5]]], ids=str)
def test_route(ids, dtype):
    row_slot, offsets, slot_row = route(torch.tensor(ids, dtype=dtype), 4)
    flat = [expert for row in ids for expert in row]
    keys = [expert if 0 <= expert < 4 else 4 for expert in flat]
    wanted = sorted(range(len(flat)), key=keys.__getitem__)
    assert row_slot.tolist() == wanted
    assert offsets.tolist() == [sum(key <= expert for key in keys) for expert in range(4)]
    rows = [wanted.index(slot) if keys[slot] < 4 else -1 for slot in range(len(flat))]
    assert slot_row.flatten().tolist() == rows
    assert slot_row.shape == (len(ids), len(ids[0]))
    assert {tensor.dtype for tensor in (row_slot, offsets, slot_row)} == {torch.int32}


def test_route_without_slots():
    row_slot, offsets, slot_row = route(torch.empty(0, 2, dtype=torch.int64), 3)
    assert (row_slot.shape, offsets.tolist(), slot_row.shape) == ((0,), [0, 0, 0], (0, 2))


def test_sort_by_expert_and_invert():
    ids = torch.randint(0, 5, (40,))
    order, offsets = sort_by_expert(ids, 6)
    assert order.tolist() == sorted(range(40), key=ids.tolist().__getitem__)
    assert offsets.tolist() == [int((ids <= expert).sum()) for expert in range(6)]
    assert torch.equal(invert(order)[order], torch.arange(40))
