"""Times whole Hugging Face models, eager and compiled, in bf16 and with NVFP4 weights: the package's main benchmark.
Called by `python -m benchmarks model`; calls harness/{processes,models,model_report}.py.

    eager bf16         the model unchanged
    compiled bf16      torch.compile(model, fullgraph=True), as in all columns below
    thunder_moe        backend="thunder_moe": the frozen expert GEMMs are rewritten while the model is compiled
    quantize_          after thunder_moe.quantize_
    quantize_ linears  after thunder_moe.quantize_(linears=True): attention, dense layers and the head in 4 bits too
    quantize_ mxfp8    after thunder_moe.quantize_(format="mxfp8"); only on request, like the next one
    quantize_ mxfp8 linears

Each column runs in processes of its own. Several compile at the same time (--jobs), but a cell is timed while nothing
else of the run computes; a cell whose quartiles are more than 5 % of its median apart shows them. A column measures

- a decode step for each of --batch, after --context tokens in a static cache, with the mask that generate() prepares.
  On CUDA a compiled step is one CUDA graph, replayed with a cold L2 cache; an eager one is a plain call.
- the time to the first token of prompts of --prompts tokens, in plain calls, with a new cache.
- tokens per second of eager generate(), for the columns that run without a compiler.
- memory, the time to build and to quantize, and the time of each first call, which compiles.

"% of floor" is the least time over the step's time. The least time is the time to read the bytes of a decode step
(experts that have tokens, other weights, keys and values) in the column's own format, at the measured bandwidth.

A compiled decode step and prefill of a column's two-layer model are compared with eager 16-bit code on the same
(dequantized) weights; a wrong column gets no times. On a CPU, the timed graphs are compared if the model has two layers
or fewer. `--models` takes names of real models (the default on CUDA), of small models for a CPU, a config.json, or the
directory of a checkpoint. Weights are random except in a checkpoint.

A bar says what runs. Interrupted, the benchmark writes and prints what it has measured.

`--merge` makes one report of several, for example of models that were measured on several GPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.column import COLUMNS, Spec
from benchmarks.harness.model_report import FULL, legend, merged, plot, profiles, tables
from benchmarks.harness.models import CONFIGS, REAL, has_sdpa
from benchmarks.harness.processes import cores, run_columns
from benchmarks.harness.report import comma_list, markdown, one_of, parser, positive, save

STEM = "model"
DEFAULT_COLUMNS = [name for name in COLUMNS if "mxfp8" not in name]
COLUMNS_HELP = f"of: {', '.join(COLUMNS)} (default: all but those of mxfp8)"
# device -> models, batches, prompts, context, prompt and new tokens of generate()
DEFAULTS: dict[str, tuple[list[str], list[int], list[int], int, tuple[int, int]]] = {
    # Llama 4 Maverick with all layers fits no GPU, in 4 bits neither.
    "cuda": ([name for name in REAL if name != "llama-4-maverick"], [1, 8, 32, 128], [128, 2048, 8192], 512, (64, 32)),
    # With all columns this ends in about 90 s on two cores.
    "cpu": (["qwen3_moe"], [1], [128], 64, (32, 16)),
}


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the tables and writes JSON and plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON, one for each column of a model.

    Raises:
        SystemExit: bad arguments, or a column failed: with status 1 after everything else was measured and written.
    """
    args = _arguments(argv)
    if args.merge:
        try:
            report = merged(args.merge)
        except (OSError, ValueError) as error:
            raise SystemExit(f"argument --merge: {error}") from error
        path = args.output / args.merge[0].name
        args.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        _show(path, report["rows"])
        return list(report["rows"])
    limits, rows = run_columns(list(_specs(args)), args.jobs, args.patience)
    for row in rows:
        row["model"] = _name(row["model"])
    bandwidth = limits.get("read_bytes_per_second")
    for row in rows:
        for cell in row.get("decode", {}).values():
            if bandwidth and "median" in cell:
                cell["floor_share"] = cell["step_bytes"] / bandwidth / cell["median"]
    how = dict(read_bytes_per_second=bandwidth, inner=args.inner, context=args.context, generate=args.generate)
    path = save(STEM, args.device, rows, args.output, **how)
    _show(path, rows)
    every = [limits | {"model": "", "column": "limits"}, *rows]
    failed = [row for row in every if not row.get("error", FULL).startswith(FULL)]
    for row in failed:
        print(f"FAILED: {row['model']}, {row['column']}: {row['error']}", file=sys.stderr)
    if failed:
        raise SystemExit(1)
    return rows


def _show(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Prints a report that is in a file, and plots it beside the file."""
    for title, cells in tables(rows):
        print(f"\n{title}\n\n{markdown(cells)}")
    print(f"\n{legend(rows)}")
    for text in profiles(rows):
        print(text)
    print(path)
    if image := plot(path, rows):
        print(image)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("model", __doc__ or "", shapes=False, slow=False)
    result.set_defaults(rounds=30)
    numbers = _numbers_or_none
    result.add_argument(
        "--models", type=comma_list(_model),
        help=f"comma-separated, of: {', '.join((*REAL, *CONFIGS))}, or paths; MODEL:LAYERS shortens one "
        f"(default: {','.join(DEFAULTS['cuda'][0])} on CUDA, {','.join(DEFAULTS['cpu'][0])} on a CPU)",
    )  # fmt: skip
    result.add_argument("--columns", type=comma_list(one_of(COLUMNS)), default=DEFAULT_COLUMNS, help=COLUMNS_HELP)
    result.add_argument("--layers", type=positive, help="of shortened models; the tables say how many (default: all)")
    result.add_argument(
        "--batch", type=numbers, help='of decode steps, comma-separated, or "none" (default: by device)'
    )
    result.add_argument("--context", type=positive, help="tokens before a decode step (default: by device)")
    result.add_argument("--prompts", type=numbers, help='tokens of prefills, or "none" (default: by device)')
    result.add_argument("--generate", type=numbers, metavar="PROMPT,NEW", help='tokens, or "none" (default: by device)')
    result.add_argument(
        "--attention", type=comma_list(str), default=["sdpa"],
        help="transformers' names, each in all columns (default: sdpa; eager for models without it)",
    )  # fmt: skip
    result.add_argument(
        "--jobs", type=positive,
        help="processes that compile at the same time, as far as memory allows; nothing is measured meanwhile. On CUDA "
        "with more than one each graph of a column is a process (default: on CUDA one a core, at most 16; on a CPU 5)",
    )  # fmt: skip
    result.add_argument(
        "--profile",
        action="store_true",
        help="the kernels of one decode step of each batch and of one prefill of each length",
    )
    result.add_argument(
        "--patience", type=positive, default=math.inf, metavar="SECONDS",
        help="a process that has not compiled by then is ended, since the others wait for it (default: none is)",
    )  # fmt: skip
    result.add_argument("--seed", type=int, default=0, help="of weights (default: %(default)s)")
    result.add_argument(
        "--inner", choices=("inductor", "aot_eager"), default="inductor",
        help="what compiles the graphs: aot_eager needs no C++ compiler (default: %(default)s)",
    )  # fmt: skip
    result.add_argument(
        "--merge", type=Path, nargs="+", metavar="JSON", default=[],
        help="measure nothing: write reports as one into --output, under the name of the first, and print its tables",
    )  # fmt: skip
    args = result.parse_args(argv)
    models, batches, prompts, context, generate = DEFAULTS[args.device.type]
    args.models = args.models or models
    args.batch = sorted(batches if args.batch is None else args.batch)
    args.prompts = prompts if args.prompts is None else args.prompts
    args.context = args.context or context
    args.jobs = args.jobs or (min(16, cores()) if args.device.type == "cuda" else len(DEFAULT_COLUMNS))
    args.generate = generate if args.generate is None else args.generate
    if len(args.generate) not in (0, 2):
        result.error(
            f"argument --generate: got {len(args.generate)} numbers, wanted 2: tokens of the prompt, new tokens"
        )
    if args.device.type == "cpu" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        result.error("a CPU needs torch 2.11: torch.compile of 2.10 cannot trace transformers' bf16 experts")
    return args


def _numbers_or_none(text: str) -> list[int]:
    return [] if text == "none" else comma_list(positive)(text)


def _model(text: str) -> str:
    source, _ = _layers(text)
    if source not in REAL and source not in CONFIGS and not Path(source).exists():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted one of {', '.join((*REAL, *CONFIGS))}, a path to config.json, or the directory of a "
            "checkpoint, and optionally :LAYERS behind it"
        )
    return text


def _layers(text: str) -> tuple[str, int | None]:
    """Return a model, and its number of layers if MODEL:LAYERS says one."""
    source, _, layers = text.rpartition(":")
    return (source, int(layers)) if source and layers.isdecimal() else (text, None)


def _name(source: str) -> str:
    path = Path(source)
    return source if source in REAL or source in CONFIGS else (path.parent if path.is_file() else path).resolve().name


def _specs(args: argparse.Namespace) -> Iterator[Spec]:
    """Return each column of each model."""
    device = args.device.type
    for text in args.models:
        model, layers = _layers(text)
        # A model without SDPA has one attention.
        for attention in args.attention if has_sdpa(model) else ["sdpa"]:
            for column in args.columns:
                yield Spec(
                    model, column, device, layers=layers or args.layers, attention=attention, batches=args.batch,
                    context=args.context, prompts=args.prompts, generate=tuple(args.generate) or None, inner=args.inner,
                    rounds=args.rounds, budget=args.budget, seed=args.seed, profile=args.profile,
                )  # fmt: skip
