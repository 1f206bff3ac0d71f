"""The benchmarks on one thread, with limits that take no time to measure. Without matplotlib nothing is collected.
Called by pytest; calls benchmarks/harness/roofline.py.

The fast tests show each command's help, each suite once from end to end at a tiny size, the tables and reports, and
that wrong results have no times. Tests of processes that measure in turns are slow, but for one in which columns crash.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("matplotlib") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _small_and_on_one_thread(monkeypatch):
    """On a busy machine two threads wait for each other."""
    from benchmarks.harness import roofline

    monkeypatch.setitem(roofline.SIZES, "cpu", (2**20, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
