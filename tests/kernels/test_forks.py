"""Quantized models in forked processes, as workers of a DataLoader are: same results, and no lock that stays closed.
Called by pytest; the program runs in a process of its own, which forks.
"""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")

PARENT = """
import os, sys, threading, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels.cpu import backend, crossover
from thunder_moe.nn.linear import NVFP4Linear
from thunder_moe import weight_cache

# Measured times choose a kernel, so a child that measures again may round differently: fix the choice.
crossover._read_or_measure = lambda *args: crossover.Limits()
torch.manual_seed(0)
model = quantize_(nn.Sequential(Llama4MoE(Llama4MoEConfig(64, 64, 4, top_k=2), dtype=torch.bfloat16)), linears=True)
xs = torch.randn(4, 1, 9, 64, dtype=torch.bfloat16)
weight = nn.Parameter(torch.randn(4, 32, 64, dtype=torch.bfloat16), requires_grad=False)
with torch.no_grad():
    expected = [model(x) for x in xs]  # with all threads: torch's OpenMP has its pool now
"""
WORKERS = """
class Outputs(Dataset):
    def __len__(self):
        return len(xs)
    def __getitem__(self, index):
        with torch.no_grad():
            return model(xs[index])

loader = DataLoader(Outputs(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=300)
print(all(map(torch.equal, loader, expected)), flush=True)
"""
LOCKS = """
held, done = threading.Event(), threading.Event()
def hold():
    with weight_cache._LOCK, backend._lock, crossover._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    crossover._known.clear()
    with torch.no_grad():
        same = torch.equal(model(xs[0]), expected[0]) and weight_cache.get(weight, transposed=False) is not None
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
done.set()
thread.join()
with weight_cache._LOCK:
    child = os.fork()  # the child goes on inside, too
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(status) == 0 and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
"""
SWAPS = """
torch.set_num_threads(1)
linear, rows = NVFP4Linear(quantize(torch.randn(1, 64, 64))), torch.randn(4, 64)
weights = [quantize(torch.randn(1, 64, 64)) for _ in range(2)]
results = []
with torch.no_grad():
    for weight in weights:
        linear.set_weight(weight)
        results.append(linear(rows))
stop = threading.Event()
def swap():
    while not stop.is_set():
        for weight in weights:
            linear.set_weight(weight)
sys.setswitchinterval(1e-5)
thread, good = threading.Thread(target=swap), True
thread.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            os._exit(0 if any(torch.equal(linear(rows), result) for result in results) else 1)
    good = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and good
stop.set()
thread.join()
print(good)
"""


@pytest.mark.slow
def test_forked_processes():
    """Workers compute what the parent does, locks are open, and a weight that a thread replaces is one of the two."""
    # A lock that stays closed would be waited for without an end; a build of the CPU kernels takes minutes at most.
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARENT + WORKERS + LOCKS + SWAPS],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.stdout.split() == ["True"] * 3, run.stderr
