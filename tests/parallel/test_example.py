"""examples/expert_parallel.py as users start it, on two processes.
Called by pytest; calls torchrun.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_example():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/expert_parallel.py"]
    command += ["--hidden", "64", "--intermediate", "64", "--experts", "4", "--tokens", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "2 ranks on cpu"
    forms = ["one rank", "EP, exact sizes", "EP, no synchronisation", "EP, all-gather", "TP"]
    assert [form for line in lines[2:] for form in forms if f"  {form}  " in line] == 2 * forms


@pytest.mark.slow
def test_example_without_torchrun():
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "examples/expert_parallel.py"]
    run = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "start with torchrun" in run.stderr
