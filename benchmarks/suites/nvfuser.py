"""Times a frozen Llama4MoE layer under Thunder with moe_executor alone and with nvFuser, and saves its trace.
Called by `python -m benchmarks nvfuser` on a GPU with nvFuser; calls thunder_moe, Thunder and benchmarks/harness.

    thunder            thunder.jit(layer, executors=[moe_executor])
    thunder + nvfuser  thunder.jit(layer, executors=[moe_executor, nvfuserex])

The trace (nvfuser_trace.py beside the JSON) and its header, the `rewrite_report`, say which kernels run the experts:
our own between nvFuser's regions; on compute capability 10.0 nvFuser's, in one region. Before anything is timed, both
are compared with an eager quantized layer, nvFuser's kernels with one under the "w4a4" backend.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness.layers import build, hidden_states
from benchmarks.harness.report import comma_list, parser, positive, relative_error, save, table, timed
from benchmarks.harness.shapes import CUDA_SHAPES, MoEShape
from benchmarks.harness.timing import measure
from thunder_moe import Llama4MoE, moe_executor, quantize_, rewrite_report
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels.select import use_backend
from thunder_moe.nn import NVFP4GroupedLinear, NVFP4GroupedSwiGLU
from thunder_moe.progress import progress_bar

import thunder  # isort: skip  (after moe_executor: see compilers/thunder_compat.py)
from thunder.executors.nvfuserex import nvfuserex  # isort: skip

STEM = "nvfuser"
BASELINE, WITH_NVFUSER = "thunder", "thunder + nvfuser"
TOKENS = [1, 8, 32, 128, 1024, 8192]
# 16-bit roundings in another order; with W4A4 such a rounding may also change a 4-bit code.
TOLERANCE = 1e-2
W4A4_TOLERANCE = 5e-2


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and the trace.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: one of the two computes something wrong.
        SystemExit: bad arguments, no CUDA device, or no nvFuser.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    trace = ""
    for shape in args.shapes:
        layer = build(shape, args.device).requires_grad_(False)
        exact: dict[str, torch.nn.Module] = {BASELINE: quantize_(torch.nn.Sequential(copy.deepcopy(layer)))}
        exact[WITH_NVFUSER] = _sharing_a_scale(layer) if _w4a4() else exact[BASELINE]
        executors = {BASELINE: [moe_executor], WITH_NVFUSER: [moe_executor, nvfuserex]}
        compiled = {name: thunder.jit(layer, executors=listed) for name, listed in executors.items()}
        for tokens in progress_bar(args.tokens, desc=shape.name, unit="row"):
            x = hidden_states(layer, tokens, args.device)
            errors = {name: _check(name, function, exact[name], x) for name, function in compiled.items()}
            functions = {name: functools.partial(function, x) for name, function in compiled.items()}
            options = dict(rounds=args.rounds, min_rounds=min(3, args.rounds), budget=args.budget, slow=args.slow)
            timings = timed(measure(functions, device=args.device, **options), BASELINE)
            rows.append({"shape": shape.name, "tokens": tokens, **timings, "relative_error": errors})
        trace = _annotated_trace(shape, compiled[WITH_NVFUSER])
        print(rewrite_report(compiled[WITH_NVFUSER]))
    path = save(STEM, args.device, rows, args.output, tolerance=TOLERANCE)
    path.with_name(f"{STEM}_trace.py").write_text(trace)
    print(table(rows, ("shape", "tokens"), BASELINE))
    print(path)
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("nvfuser", __doc__ or "")
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help=f"(default: {TOKENS})")
    args = result.parse_args(argv)
    if args.device.type != "cuda" or nvfuserex is None:
        result.error("it needs a CUDA device and nvFuser: pip install 'thunder_moe[nvfuser]'")
    args.shapes = args.shapes or list(CUDA_SHAPES)
    return args


def _w4a4() -> bool:
    return torch.cuda.get_device_capability() == (10, 0)


def _sharing_a_scale(layer: Llama4MoE) -> Llama4MoE:
    """Return the layer quantized like nvFuser's: gate and up of an expert share one global scale."""
    result, experts = copy.deepcopy(layer), layer.routed_experts
    gate_up = torch.cat([experts.gate_proj.weight, experts.up_proj.weight], 1)
    packed = [NVFP4GroupedLinear(quantize(weight)) for weight in (gate_up, experts.down_proj.weight)]
    result.routed_experts = NVFP4GroupedSwiGLU(*packed)  # type: ignore[assignment]
    return result


def _check(name: str, compiled: torch.nn.Module, exact: torch.nn.Module, x: torch.Tensor) -> float:
    """Return the relative error of a compiled layer against the eager one with the same arithmetic."""
    w4a4 = name == WITH_NVFUSER and _w4a4()
    with use_backend("w4a4") if w4a4 else contextlib.nullcontext():
        error = relative_error(compiled(x), exact(x))
    limit = W4A4_TOLERANCE if w4a4 else TOLERANCE
    if error > limit:
        raise RuntimeError(f"{name!r} is wrong on {tuple(x.shape)}: relative error {error:.2g}, wanted at most {limit}")
    return error


def _annotated_trace(shape: MoEShape, compiled: torch.nn.Module) -> str:
    """Return the last trace of a compiled layer, with its rewrite report as a comment on top."""
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, nvFuser {nvfuserex.version}"
    head = [f"{shape.name}, {device}", *str(rewrite_report(compiled)).splitlines()]
    return "".join(f"# {line}\n" for line in head) + f"\n{thunder.last_traces(compiled)[-1]}\n"
