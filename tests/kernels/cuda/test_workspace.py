"""The workspace: which kernels share semaphores. Called by pytest; streams and captures are simulated on a CPU."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from thunder_moe.kernels.cuda import launch, workspace

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """Return what the thread runs on: a stream, and the number of its capture, 0 for none."""
    now = SimpleNamespace(cuda_stream=1, capture=0)
    monkeypatch.setattr(launch, "current_stream", lambda device: now.cuda_stream)
    monkeypatch.setattr(launch, "capture_of", lambda stream: now.capture)
    monkeypatch.setattr(workspace, "_is_capturing", lambda device: now.capture > 0)
    monkeypatch.setattr(workspace, "_POOLS", {})
    return now


def make(size):
    return workspace.SemaphorePool(CPU, torch.zeros(size, dtype=torch.int32))


def test_kernels_that_may_run_at_once_have_rows_of_their_own(now):
    all_rows = make(6 * workspace.STREAM_SIZE)

    def row(stream, capture=0, **how):
        now.cuda_stream, now.capture = stream, capture
        return all_rows.take(**how)

    first, again, other = row(1), row(1), row(2)
    assert first.data_ptr() == again.data_ptr()
    captured = [
        row(1, 7),
        row(1, 7, overlapping=True),
        row(2, 7),
        row(1, 8),
        row(1, 9),
        row(1, 10),
    ]  # more than there are
    taken = [first, other, *captured]
    assert len({one.data_ptr() for one in taken}) == 8
    assert row(1).data_ptr() == first.data_ptr()
    assert not any(one.any() for one in taken)


def test_the_kernels_of_a_graph_that_follow_each_other_share_a_row(now):
    now.capture = 3
    all_rows = make(2 * workspace.STREAM_SIZE)
    small, first = all_rows.take(32), all_rows.take(96)
    assert all(all_rows.take(size).data_ptr() == first.data_ptr() for size in (32, 64, 96))
    assert all_rows._used == 32 + 96  # no more than they need
    assert small.data_ptr() != first.data_ptr()
    now.capture = 4
    second = all_rows.take(32)
    assert second.data_ptr() != first.data_ptr()
    now.capture = 0
    assert all_rows.take(32).data_ptr() not in (first.data_ptr(), second.data_ptr())


@pytest.mark.parametrize("capture", [0, 1])
@pytest.mark.parametrize("room", [1, 8])
def test_a_row_is_as_long_as_was_asked_for(now, room, capture):
    now.capture = capture
    all_rows = make(room * workspace.STREAM_SIZE)
    small, large = all_rows.take(32), all_rows.take(2 * workspace.STREAM_SIZE)
    assert large.numel() >= 2 * workspace.STREAM_SIZE
    assert small.numel() >= 32
    assert not large.any()


def test_threads_never_get_the_same_row(monkeypatch, now):
    local, threads, rows = threading.local(), 8, []

    class Interrupted:
        """A tensor during whose slicing other threads run."""

        def __init__(self, size):
            self.tensor = torch.zeros(size, dtype=torch.int32)

        def numel(self):
            return self.tensor.numel()

        def __getitem__(self, index):
            time.sleep(0.001)
            return self.tensor[index]

    monkeypatch.setattr(launch, "current_stream", lambda device: local.cuda_stream)
    all_rows = workspace.SemaphorePool(CPU, Interrupted(20 * threads * workspace.STREAM_SIZE))

    def ask(thread):
        for i in range(20):
            local.cuda_stream = thread * 1000 + i
            rows.append(all_rows.take().data_ptr())

    workers = [threading.Thread(target=ask, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(rows)) == len(rows) == 20 * threads


def test_a_device_has_one_set_but_under_capture(now, monkeypatch):
    made = []

    def filled(size, device):
        made.append(threading.current_thread())
        time.sleep(0.05)
        return torch.zeros(size, dtype=torch.int32)

    monkeypatch.setattr(workspace, "_filled", filled)
    now.capture = 1
    assert workspace.semaphore_pool(CPU) is not workspace.semaphore_pool(CPU)
    assert workspace.semaphore_pool(CPU).take(4 * workspace.STREAM_SIZE).numel() == 4 * workspace.STREAM_SIZE
    assert not made
    now.capture = 0
    found = []
    workers = [threading.Thread(target=lambda: found.append(workspace.semaphore_pool(CPU))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({id(one) for one in found}) == 1
    assert len(made) == 1
    assert made[0] not in [threading.current_thread(), *workers]  # whose memory pools and modes count for nothing


def test_the_device_of_the_tensor_is_asked_whether_it_is_captured(monkeypatch):
    current = [0]

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(launch, "current_device", lambda: current[0])
    monkeypatch.setattr(launch, "is_capturing", lambda: current[0] == 1)
    assert [workspace._is_capturing(torch.device("cuda", i)) for i in range(3)] == [False, True, False]
    assert current == [0]
