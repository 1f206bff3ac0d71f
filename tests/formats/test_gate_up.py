"""The two orders of gate and up rows. Called by pytest."""

import pytest
import torch

from thunder_moe.formats.gate_up import deinterleave, interleave


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 6), (1, 2, 3), (3, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_gate_rows_come_first_and_go_back(shape, dtype):
    rows = torch.randint(0, 100, shape, dtype=torch.uint8)
    rows = rows.view(dtype) if dtype.itemsize == 1 else rows.to(dtype)
    for given in (rows, rows.transpose(0, -1).contiguous().transpose(0, -1)):
        sorted_rows, half = deinterleave(given), shape[1] // 2
        for index in range(half):
            assert torch.equal(sorted_rows[:, index].float(), rows[:, 2 * index].float())
            assert torch.equal(sorted_rows[:, half + index].float(), rows[:, 2 * index + 1].float())
        assert torch.equal(interleave(sorted_rows).float(), rows.float())
