"""Checks an installed wheel: it is what is imported, has its sources of kernels, and computes what the reference does.
Called by `make package`, in the folder of the wheel; calls thunder_moe alone.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch

import thunder_moe
from thunder_moe import NVFP4GroupedLinear, nvfp4, use_backend

home = Path(thunder_moe.__file__).parent
if home.parent != Path.cwd():
    sys.exit(f"imported {home}, wanted the wheel in {Path.cwd()}")
sources = {path.suffix for path in home.glob("kernels/*/src/*")}
if not {".cpp", ".cu", ".cuh", ".h"} <= sources or not (home / "py.typed").exists():
    sys.exit(f"the wheel lacks py.typed or sources of kernels: it has {sorted(sources)}")

generator = torch.Generator().manual_seed(0)
weight = torch.randn(2, 64, 64, generator=generator, dtype=torch.bfloat16)
linear = NVFP4GroupedLinear(nvfp4.quantize(weight))
rows = torch.randn(8, 64, generator=generator, dtype=torch.bfloat16)
offsets = torch.tensor([3, 8], dtype=torch.int32)
compiled = linear(rows, offsets)
with use_backend("reference"):
    error = (compiled - linear(rows, offsets)).norm() / compiled.norm()
if not error < 5e-3:
    sys.exit(f"the kernel of the wheel is {float(error):.2e} off the reference")
version = importlib.metadata.version("thunder_moe")
print(f"thunder_moe {version}: the wheel computes, {float(error):.1e} off the reference")
