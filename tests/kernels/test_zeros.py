"""Rows of zeros: which kernels share one. Called by pytest; streams and captures are pretended on a CPU."""

from types import SimpleNamespace

import torch

from thunder_moe.kernels import zeros


def test_kernels_that_may_run_at_once_have_rows_of_their_own(monkeypatch):
    now = SimpleNamespace(cuda_stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    all_rows = zeros.Zeros(torch.device("cpu"), 5 * zeros.ROW_SIZE)

    def row(stream, capturing=False):
        now.cuda_stream, now.capturing = stream, capturing
        return all_rows.row()

    first, again, other = row(1), row(1), row(2)
    assert first.data_ptr() == again.data_ptr()
    taken = [first, other, *(row(1, capturing=True) for _ in range(5))]  # more than there are
    assert len({one.data_ptr() for one in taken}) == 7
    assert row(1).data_ptr() == first.data_ptr()
    assert not any(one.any() for one in taken)


def test_a_captured_call_takes_no_more_than_it_needs(monkeypatch):
    now = SimpleNamespace(cuda_stream=1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    all_rows = zeros.Zeros(torch.device("cpu"), zeros.ROW_SIZE)
    rows = [all_rows.row(32) for _ in range(zeros.ROW_SIZE // 32)]
    taken = {index for row in rows for index in range(row.data_ptr(), row.data_ptr() + 4 * 32, 4)}
    assert len(taken) == zeros.ROW_SIZE  # apart from each other
    assert all_rows.row(32).data_ptr() not in taken


def test_a_device_has_one_set_but_under_capture(monkeypatch):
    monkeypatch.setattr(zeros, "_ZEROS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cpu")
    assert zeros.zeros_of(device) is not zeros.zeros_of(device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert zeros.zeros_of(device) is zeros.zeros_of(device)
