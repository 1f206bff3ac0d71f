"""Times one NVFP4 expert GEMM by every kernel backend that runs here, beside bf16 torch._grouped_mm.
Called from the command line and by `make bench`; calls kernels.select; beside it timing, report, roofline, shapes.

Three GEMMs of a layer: gate_up (E, 2I, H); gate_up with its SwiGLU behind it (one operator in NVFP4, GEMM, silu and
product in bf16); down (E, H, I). Each backend's result is compared with an fp32 loop over experts that reads the
dequantised weights before anything is timed; a wrong result ends the run.

The device's read bandwidth and matrix rate are measured first: each time is also given as a share of the least one that
they allow (roofline.py). `--peers` draws other kernels' shares beside ours, from a separate yardstick's file.

On a CPU every expert has the same number of rows; on CUDA tokens are routed at random.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from report import comma_list, one_of, parser, plot, positive, relative_error, save, table, timed
from roofline import Limits, missing, panels, plot_shares, read_peers, summary
from shapes import CUDA_SHAPES, SHAPES, MoEShape
from timing import measure
from torch import Tensor
from tqdm import tqdm

from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize, quantize
from thunder_moe.kernels.select import BACKENDS, preferred_layout, select

STEM = "bench_grouped_mm"
BASELINE = "bf16"
GEMMS = ("gate_up", "gate_up_swiglu", "down")
ROWS_PER_EXPERT = [1, 2, 4, 8, 64, 256]
TOKENS = [1, 8, 32, 128, 1024, 8192]
# Relative Frobenius, bf16 against fp32: rounding of weights, sums and results gives about 2e-3.
TOLERANCE = 5e-3
Kernel = Callable[[Tensor, NVFP4Weight, Tensor], Tensor]


@dataclass(frozen=True)
class Load:
    """Rows for one GEMM: `rows` of them in all, `offsets` int32 (E,) row ends; `label` is the table's."""

    label: int
    rows: int
    offsets: Tensor
    active_experts: int

    @staticmethod
    def even(rows_per_expert: int, shape: MoEShape, device: torch.device) -> Load:
        experts = shape.num_experts
        offsets = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * rows_per_expert
        return Load(rows_per_expert, experts * rows_per_expert, offsets, experts)

    @staticmethod
    def routed(tokens: int, shape: MoEShape, device: torch.device, seed: int = 0) -> Load:
        logits = torch.randn(tokens, shape.num_experts, generator=torch.Generator().manual_seed(seed))
        counts = logits.topk(shape.top_k).indices.flatten().bincount(minlength=shape.num_experts)
        offsets = counts.cumsum(0).int().to(device)
        return Load(tokens, tokens * shape.top_k, offsets, int((counts > 0).sum()))


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the tables, writes JSON and plots.

    Args:
        argv: command-line arguments, those of the process when None.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a backend computes something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    device: torch.device = args.device
    backends, notes = _backends(device, args.backends)
    if not backends:
        raise SystemExit("no backend runs here\n" + "\n".join(notes))
    if args.tokens:
        what, make_load, sizes = "tokens", Load.routed, args.tokens
    else:
        what, make_load, sizes = "rows_per_expert", Load.even, args.rows_per_expert
    how = dict(rounds=args.rounds, budget=args.budget, slow=args.slow)
    limits = Limits.measured(device, **how)
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(args.shapes) * len(args.gemms) * len(sizes), unit="row") as bar:
        for shape in args.shapes:
            for which in args.gemms:
                bar.set_description(f"{shape.name} {which}")
                weight, packed = _weights(shape, which, device)
                packed_for = {name: packed.to_layout(_layout(name, packed)) for name in backends}
                for size in sizes:
                    case = make_load(size, shape, device)
                    row = {"shape": shape.name, "gemm": which, what: size, "rows": case.rows,
                           "active_experts": case.active_experts,
                           **_run(which, case, weight, packed, packed_for, backends, how)}  # fmt: skip
                    rows.append({**row, **_floor(limits, shape, row)})
                    bar.update()
                del weight, packed, packed_for
    means, peers, notes = summary(rows, what), summary(args.peers, "tokens"), [*notes, *missing(args.peers)]
    more = {
        "tolerance": TOLERANCE,
        **asdict(limits),
        "summary": means,
        **({"peers": peers} if peers else {}),
        "notes": notes,
    }
    path = save(STEM, device, rows, args.output, **more)
    title = f"One expert GEMM with NVFP4 weights, {device.type}"
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
    print(*notes, path, image, roofline, sep="\n")
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    result = parser(__doc__ or "")
    result.add_argument("--gemms", type=comma_list(one_of(GEMMS)), default=list(GEMMS), help=f"of: {', '.join(GEMMS)}")
    result.add_argument(
        "--backends", type=comma_list(one_of(BACKENDS)), help=f"of: {', '.join(BACKENDS)} (default: all that run)"
    )
    load = result.add_mutually_exclusive_group()
    load.add_argument("--rows-per-expert", type=comma_list(positive), help=f"default on a CPU: {ROWS_PER_EXPERT}")
    load.add_argument("--tokens", type=comma_list(positive), help=f"routed at random; default on CUDA: {TOKENS}")
    result.add_argument(
        "--peers", type=read_peers, default=[], metavar="FILE", help="JSON of a yardstick's rows, in microseconds"
    )
    args = result.parse_args(argv)
    on_cuda = args.device.type == "cuda"
    args.shapes = args.shapes or (list(CUDA_SHAPES) if on_cuda else [SHAPES["qwen3-30b-a3b/4"]])
    if not args.rows_per_expert and not args.tokens:
        args.tokens, args.rows_per_expert = (TOKENS, None) if on_cuda else (None, ROWS_PER_EXPERT)
    if args.peers and not args.tokens:
        result.error("argument --peers: the file's rows are by tokens, wanted --tokens too")
    return args


def _backends(device: torch.device, wanted: list[str] | None) -> tuple[dict[str, Any], list[str]]:
    """name -> kernel module of the backends that run on a device, and a line on each that should but does not."""
    modules, notes = {}, []
    for name in wanted or [name for name, devices in BACKENDS.items() if devices is None or device.type in devices]:
        try:
            modules[name] = select(device, backend=name)
        except (ValueError, ImportError) as error:
            notes.append(f"{name}: not run: {error}")
    return modules, notes


def _layout(backend: str, weight: NVFP4Weight) -> str:
    """The layout that a backend is timed with: for the default one what `quantize_` chooses."""
    return preferred_layout(weight.device, *weight.shape[1:]) if backend == "cuda" else "linear"


def _weights(shape: MoEShape, which: str, device: torch.device) -> tuple[Tensor, NVFP4Weight]:
    """bf16 (E, N, K) and its NVFP4 form."""
    generator = torch.Generator(device).manual_seed(0)
    experts, n, k = shape.gemm(which)
    weight = torch.randn(experts, n, k, dtype=torch.bfloat16, device=device, generator=generator).mul_(k**-0.5)
    return weight, quantize(weight)


def _run(
    which: str,
    case: Load,
    weight: Tensor,
    packed: NVFP4Weight,
    packed_for: dict[str, NVFP4Weight],
    backends: dict[str, Any],
    how: dict[str, Any],
) -> dict[str, Any]:
    """Checks every backend, then times all of them and bf16 side by side; `packed_for` has each one's layout."""
    generator = torch.Generator(weight.device).manual_seed(1)
    x = torch.randn(case.rows, weight.shape[2], dtype=torch.bfloat16, device=weight.device, generator=generator)
    wanted = _oracle(which, x, packed, case.offsets)
    functions: dict[str, Callable[[], Tensor]] = {BASELINE: functools.partial(_bf16, which, x, weight, case.offsets)}
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
    timings = measure(functions, device=weight.device, **how)
    return {**timed(timings, BASELINE), "relative_error": errors}


def _floor(limits: Limits, shape: MoEShape, row: dict[str, Any]) -> dict[str, Any]:
    """The least time of a row, and each candidate's share of it."""
    _, n, k = shape.gemm(row["gemm"])
    outputs = n // 2 if row["gemm"] == "gate_up_swiglu" else n
    floor = limits.floor_seconds(experts=row["active_experts"], n=n, k=k, rows=row["rows"], outputs=outputs)
    share = {name: floor / timing["median"] for name, timing in row["seconds"].items()}
    return {"floor_seconds": floor, "floor_share": share}


def _bf16(which: str, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = torch._grouped_mm(x, weight.transpose(1, 2), offsets)
    return _swiglu(out) if which == "gate_up_swiglu" else out


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _oracle(which: str, x: Tensor, packed: NVFP4Weight, offsets: Tensor) -> Tensor:
    """fp32, one expert after the other."""
    out = torch.zeros(x.shape[0], packed.shape[1], device=x.device)
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            one = NVFP4Weight(*(tensor[expert : expert + 1] for tensor in packed.tensors()))
            out[start:end] = x[start:end].float() @ dequantize(one, torch.float32)[0].t()
        start = end
    return _swiglu(out) if which == "gate_up_swiglu" else out


if __name__ == "__main__":
    main()
