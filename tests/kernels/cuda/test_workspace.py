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
    """What the thread runs on: a stream, which may be captured."""
    now = SimpleNamespace(cuda_stream=1, capturing=False)
    monkeypatch.setattr(launch, "current_stream", lambda device: now.cuda_stream)
    monkeypatch.setattr(workspace, "_is_capturing", lambda device: now.capturing)
    monkeypatch.setattr(workspace, "_POOLS", {})
    return now


def make(size):
    return workspace.SemaphorePool(CPU, torch.zeros(size, dtype=torch.int32))


def test_kernels_that_may_run_at_once_have_rows_of_their_own(now):
    all_rows = make(5 * workspace.STREAM_SIZE)

    def row(stream, capturing=False):
        now.cuda_stream, now.capturing = stream, capturing
        return all_rows.take()

    first, again, other = row(1), row(1), row(2)
    assert first.data_ptr() == again.data_ptr()
    taken = [first, other, *(row(1, capturing=True) for _ in range(5))]  # more than there are
    assert len({one.data_ptr() for one in taken}) == 7
    assert row(1).data_ptr() == first.data_ptr()
    assert not any(one.any() for one in taken)


def test_a_captured_call_takes_no_more_than_it_needs(now):
    now.capturing = True
    all_rows = make(workspace.STREAM_SIZE)
    rows = [all_rows.take(32) for _ in range(workspace.STREAM_SIZE // 32)]
    taken = {index for row in rows for index in range(row.data_ptr(), row.data_ptr() + 4 * 32, 4)}
    assert len(taken) == workspace.STREAM_SIZE  # apart from each other
    assert all_rows.take(32).data_ptr() not in taken


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("room", [1, 8])
def test_a_row_is_as_long_as_was_asked_for(now, room, capturing):
    now.capturing = capturing
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
    now.capturing = True
    assert workspace.semaphore_pool(CPU) is not workspace.semaphore_pool(CPU)
    assert workspace.semaphore_pool(CPU).take(4 * workspace.STREAM_SIZE).numel() == 4 * workspace.STREAM_SIZE
    assert not made
    now.capturing = False
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
