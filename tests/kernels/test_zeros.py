"""Rows of zeros: which kernels share one. Called by pytest; streams and captures are pretended on a CPU."""

from types import SimpleNamespace

import torch

from thunder_moe.kernels import zeros


def test_kernels_that_may_run_at_once_have_rows_of_their_own(monkeypatch):
    monkeypatch.setattr(zeros, "_ROWS", 5)
    now = SimpleNamespace(cuda_stream=1, capturing=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.capturing)
    all_rows = zeros.Zeros(torch.device("cpu"))

    def row(stream, capturing=False):
        now.cuda_stream, now.capturing = stream, capturing
        return all_rows.row()

    first, again, other = row(1), row(1), row(2)
    assert first.data_ptr() == again.data_ptr()
    taken = [first, other, *(row(1, capturing=True) for _ in range(5))]  # more than there are
    assert len({one.data_ptr() for one in taken}) == 7
    assert row(1).data_ptr() == first.data_ptr()
    assert not any(one.any() for one in taken)


def test_a_device_has_one_set_but_under_capture(monkeypatch):
    monkeypatch.setattr(zeros, "_ZEROS", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cpu")
    assert zeros.zeros_of(device) is not zeros.zeros_of(device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert zeros.zeros_of(device) is zeros.zeros_of(device)
