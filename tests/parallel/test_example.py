"""examples/expert_parallel.py on two processes, and what torchrun makes of a rank that raises.
Called by pytest; calls torchrun.
"""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def torchrun(script, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)


def run_example(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / "expert_parallel.py"))["main"](arguments)
    return out.getvalue()


@pytest.mark.slow
def test_example(ranks):
    sizes = ["--hidden", "64", "--intermediate", "64", "--experts", "4", "--tokens", "8"]
    text, nothing = ranks(2).as_of_torchrun(run_example, sizes)
    assert not nothing
    lines = text.splitlines()
    assert lines[0] == "2 ranks on cpu"
    forms = ["one rank", "EP, exact sizes", "EP, no synchronisation", "EP, all-gather", "TP"]
    assert [form for line in lines[2:] for form in forms if f"  {form}  " in line] == 2 * forms


RAISES = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from thunder_moe import Llama4MoE, Llama4MoEConfig
from thunder_moe.parallel import ExpertParallel

dist.init_process_group("gloo")  # its timeout is half an hour
style = ExpertParallel(exchange="all_gather", capacity=3)
layer = parallelize_module(Llama4MoE(Llama4MoEConfig(16, 16, 2)), init_device_mesh("cpu", (2,)), style)
while True:
    layer(torch.randn(1, 3 + dist.get_rank(), 16))
"""


@pytest.mark.slow
@pytest.mark.exhaustive  # test_parallel.py has a rank that dies; here it is torchrun that ends the others
def test_a_rank_that_raises_ends_the_others(tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    run = torchrun(str(tmp_path / "raises.py"))
    assert run.returncode == 1
    assert "wanted at most capacity = 3 tokens" in run.stderr


def test_example_without_torchrun(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    main = runpy.run_path(str(ROOT / "examples" / "expert_parallel.py"))["main"]
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "start with torchrun" in capsys.readouterr().err
