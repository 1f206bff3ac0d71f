"""Times one expert GEMM with NVFP4 or MXFP8 weights on every backend that runs here, beside bf16 torch._grouped_mm.
Called by `python -m benchmarks gemm` and `make bench`; calls kernels.select and benchmarks/harness.

The GEMMs of a layer: gate_up (E, 2I, H); gate_up_swiglu, the same followed by SwiGLU (one operator of packed weights;
GEMM, silu and product in bf16); down (E, H, I). Before anything is timed, each backend's result is compared with an
fp32 loop over experts with the dequantized weights; a wrong result ends the run. On GPUs of compute capability 9.0
"torch fp8" is one column more: torch._scaled_grouped_mm of E4M3 weights with a scale per output feature, rows rounded
to E4M3 with a scale each in the same call, sums in the tensor cores' precision. For each column the relative error
against the product of the 16-bit weights in fp32 is written, too.

The device's read bandwidth and matrix throughput are measured first. Each time is also given as a share of the least
time that they allow. `--peers FILE` adds the shares of other kernels, from a JSON file that another benchmark wrote.

On a CPU every expert has the same number of rows; on CUDA tokens are routed at random.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.report import comma_list, one_of, parser, plot, positive, relative_error, save, table, timed
from benchmarks.harness.roofline import Limits, missing, panels, plot_shares, read_peers, summary
from benchmarks.harness.shapes import CUDA_SHAPES, SHAPES, Load, MoEShape
from benchmarks.harness.timing import describe, measure
from thunder_moe.formats.registry import FORMATS, dequantize_expert
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.cuda import recipes
from thunder_moe.kernels.select import BACKENDS, preferred_layout, quantize_to, select
from thunder_moe.progress import progress_bar

STEM = "gemm"
BASELINE = "bf16"
FP8 = "torch fp8"
GEMMS = ("gate_up", "gate_up_swiglu", "down")
ROWS_PER_EXPERT = [1, 2, 4, 8, 64, 256]
TOKENS = [1, 8, 32, 128, 1024, 8192]
# Relative Frobenius, bf16 against fp32: rounding of weights, sums and results gives about 2e-3.
TOLERANCE = 5e-3
Kernel = Callable[[Tensor, PackedWeight, Tensor], Tensor]


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the tables, writes JSON and plots.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a backend computes something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    device: torch.device = args.device
    backends, notes = _backends(device, args.backends, args.format)
    if not backends:
        raise SystemExit("no backend runs here\n" + "\n".join(notes))
    make_load: Callable[[int, MoEShape, torch.device], Load] = Load.routed if args.tokens else Load.even
    what, sizes = ("tokens", args.tokens) if args.tokens else ("rows_per_expert", args.rows_per_expert)
    how = dict(rounds=args.rounds, min_rounds=min(3, args.rounds), budget=args.budget, slow=args.slow)
    limits = Limits.measured(device, bits_per_weight=FORMATS[args.format].bits_per_weight, **how)
    rows: list[dict[str, Any]] = []
    with progress_bar(total=len(args.shapes) * len(args.gemms) * len(sizes), unit="row") as bar:
        for shape in args.shapes:
            for which in args.gemms:
                bar.set_description(f"{shape.name} {which}")
                weight, packed = _weights(shape, which, device, args.format)
                packed_for = {name: packed.to_layout(_layout(name, packed)) for name in backends}
                of_8_bits = _fp8_weight(weight)
                for size in sizes:
                    case = make_load(size, shape, device)
                    row = {"shape": shape.name, "gemm": which, what: size, "rows": case.rows,
                           "active_experts": case.active_experts,
                           **_run(which, case, weight, packed, packed_for, of_8_bits, backends, how)}  # fmt: skip
                    rows.append({**row, **_floor(limits, shape, row)})
                    bar.update()
                del weight, packed, packed_for, of_8_bits
    means, peers, notes = summary(rows, what), summary(args.peers, "tokens"), [*notes, *missing(args.peers)]
    more = {
        "tolerance": TOLERANCE,
        **asdict(limits),
        "summary": means,
        **({"peers": peers} if peers else {}),
        "notes": notes,
    }
    stem = STEM if args.format == "nvfp4" else f"{STEM}_{args.format}"
    path = save(stem, device, rows, args.output, **more)
    title = f"One expert GEMM with {args.format.upper()} weights, {describe(device)}"
    image = plot(
        path,
        rows,
        what,
        panel=lambda row: row["shape"],
        label=lambda name, row: f"{name}, {row['gemm']}",
        baseline=BASELINE,
        title=title,
    )
    roofline = plot_shares(
        path.with_name(f"{path.stem}_roofline.png"),
        panels(rows, what, args.peers),
        what,
        f"{title}: how close it comes to what the hardware allows",
    )
    print(table(rows, ("shape", "gemm", what), BASELINE), limits, sep="\n")
    print("", table(means, ("gemm", what), BASELINE, of="geometric means over the shapes"), sep="\n")
    if peers:
        print("", table(peers, ("gemm", "tokens"), BASELINE, of="peers, geometric means over the shapes"), sep="\n")
    print("", "relative errors against 16-bit weights, means:", *_mean_errors(rows), sep="\n")
    print(*notes, path, image, roofline, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("gemm", __doc__ or "")
    result.add_argument("--gemms", type=comma_list(one_of(GEMMS)), default=list(GEMMS), help=f"of: {', '.join(GEMMS)}")
    result.add_argument(
        "--backends", type=comma_list(one_of(BACKENDS)), help=f"of: {', '.join(BACKENDS)} (default: all that run)"
    )
    result.add_argument(
        "--format", type=one_of(FORMATS), default="nvfp4", help=f"of: {', '.join(FORMATS)} (default: %(default)s)"
    )
    load = result.add_mutually_exclusive_group()
    load.add_argument("--rows-per-expert", type=comma_list(positive), help=f"default on a CPU: {ROWS_PER_EXPERT}")
    load.add_argument("--tokens", type=comma_list(positive), help=f"routed at random; default on CUDA: {TOKENS}")
    result.add_argument(
        "--peers", type=read_peers, default=[], metavar="FILE", help="JSON rows of other kernels, in microseconds"
    )
    args = result.parse_args(argv)
    on_cuda = args.device.type == "cuda"
    args.shapes = args.shapes or (list(CUDA_SHAPES) if on_cuda else [SHAPES["qwen3-30b-a3b/4"]])
    if not args.rows_per_expert and not args.tokens:
        args.tokens, args.rows_per_expert = (TOKENS, None) if on_cuda else (None, ROWS_PER_EXPERT)
    if args.peers and not args.tokens:
        result.error("argument --peers: the file's rows are by tokens, wanted --tokens too")
    return args


def _backends(device: torch.device, wanted: list[str] | None, format: str) -> tuple[dict[str, Any], list[str]]:
    """Return name -> kernel module of the backends that run on a device with weights in a format, and a line on each
    other one that was asked for."""
    modules, notes = {}, []
    for name in wanted or [name for name, devices in BACKENDS.items() if devices is None or device.type in devices]:
        try:
            modules[name] = select(device, backend=name, format=format)
        except (ValueError, ImportError) as error:
            notes.append(f"{name}: not run: {error}")
    return modules, notes


def _layout(backend: str, weight: PackedWeight) -> str:
    """Return the layout that a backend is timed with: on a GPU the one that `quantize_` chooses."""
    return preferred_layout(weight.device, *weight.shape[1:], weight.format) if backend == "cuda" else "linear"


def _weights(shape: MoEShape, which: str, device: torch.device, format: str) -> tuple[Tensor, PackedWeight]:
    """Return bf16 (E, N, K) and its form in a number format."""
    generator = torch.Generator(device).manual_seed(0)
    experts, n, k = shape.gemm(which)
    weight = torch.randn(experts, n, k, dtype=torch.bfloat16, device=device, generator=generator).mul_(k**-0.5)
    return weight, quantize_to(format, weight)


def _run(
    which: str,
    case: Load,
    weight: Tensor,
    packed: PackedWeight,
    packed_for: dict[str, PackedWeight],
    of_8_bits: tuple[Tensor, Tensor] | None,
    backends: dict[str, Any],
    how: dict[str, Any],
) -> dict[str, Any]:
    """Checks every backend, then times all of them and bf16 interleaved; `packed_for` is in each backend's layout."""
    generator = torch.Generator(weight.device).manual_seed(1)
    x = torch.randn(case.rows, weight.shape[2], dtype=torch.bfloat16, device=weight.device, generator=generator)
    wanted = _oracle(which, x, packed, case.offsets)
    exact = _oracle(which, x, weight, case.offsets)
    functions: dict[str, Callable[[], Tensor]] = {BASELINE: functools.partial(_bf16, which, x, weight, case.offsets)}
    if of_8_bits is not None:
        functions[FP8] = functools.partial(_fp8, which, x, of_8_bits, case.offsets)
    errors = {}
    for name, module in backends.items():
        kernel: Kernel = module.grouped_swiglu if which == "gate_up_swiglu" else module.grouped_mm
        call = functools.partial(kernel, x, packed_for[name], case.offsets)
        errors[name] = relative_error(call(), wanted)
        if errors[name] > TOLERANCE:
            raise RuntimeError(
                f"backend {name!r} is wrong: relative error {errors[name]:.2g} on {which} {tuple(packed.shape)} with"
                f" {case.rows} rows, wanted at most {TOLERANCE}"
            )
        functions[name] = call
    of_weights = {name: relative_error(function(), exact) for name, function in functions.items()}
    timings = measure(functions, device=weight.device, **how)
    return {**timed(timings, BASELINE), "relative_error": errors, "error_against_16_bits": of_weights}


def _mean_errors(rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for each GEMM with the mean error of each column."""
    lines = []
    for which in dict.fromkeys(row["gemm"] for row in rows):
        errors = [row["error_against_16_bits"] for row in rows if row["gemm"] == which]
        means = {name: sum(each[name] for each in errors) / len(errors) for name in errors[0]}
        lines.append(f"{which}: " + ", ".join(f"{name} {mean:.2%}" for name, mean in means.items()))
    return lines


def _floor(limits: Limits, shape: MoEShape, row: dict[str, Any]) -> dict[str, Any]:
    """Return the least time of a row's GEMM, and each candidate's share of it."""
    _, n, k = shape.gemm(row["gemm"])
    outputs = n // 2 if row["gemm"] == "gate_up_swiglu" else n
    floor = limits.floor_seconds(experts=row["active_experts"], n=n, k=k, rows=row["rows"], outputs=outputs)
    share = {name: floor / timing["median"] for name, timing in row["seconds"].items()}
    return {"floor_seconds": floor, "floor_share": share}


def _bf16(which: str, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = torch._grouped_mm(x, weight.transpose(1, 2), offsets)
    return _swiglu(out) if which == "gate_up_swiglu" else out


def _fp8_weight(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return E4M3 codes (E, N, K) and scales (E, N) of a weight where torch multiplies such codes, else None."""
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) != (9, 0):
        return None
    return recipes.quantize_codes(weight)


def _fp8(which: str, x: Tensor, weight: tuple[Tensor, Tensor], offsets: Tensor) -> Tensor:
    (codes, of_columns), (rows, of_rows) = weight, recipes.quantize_codes(x)
    options: dict[str, Any] = dict(offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch._scaled_grouped_mm(rows, codes.transpose(1, 2), of_rows, of_columns, **options)
    return _swiglu(out) if which == "gate_up_swiglu" else out


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _oracle(which: str, x: Tensor, weight: Tensor | PackedWeight, offsets: Tensor) -> Tensor:
    """Compute the product in fp32, one expert at a time."""
    out = torch.zeros(x.shape[0], weight.shape[1], device=x.device)
    matrix = torch.empty(weight.shape[1:], device=x.device)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            if isinstance(weight, Tensor):
                matrix.copy_(weight[expert])
            else:
                dequantize_expert(weight, expert, matrix)
            out[start:end] = x[start:end].float() @ matrix.t()
        start = end
    return _swiglu(out) if which == "gate_up_swiglu" else out
