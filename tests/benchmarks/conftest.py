"""Imports of benchmarks/, which is no package, on one thread and with limits that are measured in no time.
Called by pytest; calls benchmarks/roofline.py.
"""

import importlib
import pathlib

import pytest
import torch

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Imports a module of benchmarks/. One thread: on a busy machine two wait for each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setitem(importlib.import_module("roofline").SIZES, "cpu", (2**20, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module
    torch.set_num_threads(threads)
