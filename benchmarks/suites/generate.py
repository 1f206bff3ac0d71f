"""Times `model.generate` as a user calls it: tokens per second of a whole call, prompt and first step among them.
Called by `python -m benchmarks generate`; calls transformers' generate, thunder_moe.quantize_ and fast_generate.

    eager              the model's default cache, nothing compiled
    static             cache_implementation="static": on a GPU transformers compiles the decode step
    fast               custom_generate=fast_generate: step and choice of the token in one CUDA graph

each of the 16-bit model, after `quantize_` and after `quantize_(linears=True)`. One model is in memory: it is measured
in 16 bits, then quantized. All calls are greedy and make --new tokens.
The table has the share of a column's first tokens that equal the tokens of an eager call with the same weights:
rounding may change a choice, and all tokens behind it. The first call, which compiles, is reported apart; the rate is
the median of --rounds later calls.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.models import CONFIGS, REAL, build, has_sdpa
from benchmarks.harness.report import comma_list, markdown, one_of, parser, plot_lines, positive, save
from thunder_moe import fast_generate, quantize_
from thunder_moe.progress import progress_bar

STEM = "generate"
WEIGHTS: dict[str, dict[str, Any] | None] = {"bf16": None, "quantize_": {}, "quantize_ linears": {"linears": True}}
LOOPS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static": {"cache_implementation": "static"},
    "fast": {"custom_generate": fast_generate},
}
COLUMNS = [f"{weights} {loop}" for weights in WEIGHTS for loop in LOOPS]
COMPARED = 16  # tokens of a text


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Run the benchmark; print the table and write JSON and plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON, one for each column, batch and length of prompts.

    Raises:
        SystemExit: bad arguments, or an interrupt, after what was measured before it has been written.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    cells = len(args.columns) * len(args.batch) * len(args.prompts)
    with contextlib.suppress(KeyboardInterrupt), progress_bar(total=cells, unit="cell") as bar:
        _measure_all(rows, args, bar)
    if not rows:
        raise SystemExit("interrupted before a cell was measured")
    path = save(STEM, args.device, rows, args.output, model=args.model, layers=args.layers, attention=args.attention)
    print(f"{args.model}, attention {args.attention}", markdown(_table(rows)), path, sep="\n")
    print(_plot(path, rows, args.model))
    if len(rows) < cells:
        raise SystemExit(f"interrupted: {cells - len(rows)} of {cells} cells were not measured")
    return rows


def _measure_all(rows: list[dict[str, Any]], args: argparse.Namespace, bar: Any) -> None:
    """Append a row for each cell as soon as it is measured."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model: Any = build(args.model, args.device, layers=args.layers, attention=args.attention)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    for weights, quantized in WEIGHTS.items():
        loops = [loop for loop in LOOPS if f"{weights} {loop}" in args.columns]
        if quantized is not None and any(column.startswith("quantize_") for column in args.columns):
            quantize_(model, **quantized)
        for texts in args.batch if loops else ():
            for prompt in args.prompts:
                ids = torch.randint(model.config.get_text_config().vocab_size, (texts, prompt), device=args.device)
                wanted = _tokens(model, ids, min(COMPARED, args.new), {})
                for loop in loops:
                    bar.set_description(f"{weights} {loop}, {texts} x {prompt}")
                    row = {"column": f"{weights} {loop}", "batch": texts, "prompt": prompt, "new": args.new}
                    rows.append(row | _measure(model, ids, args, LOOPS[loop], wanted))
                    bar.update()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("generate", __doc__ or "", shapes=False, limits=False)
    result.set_defaults(rounds=3)
    result.add_argument("--model", type=one_of((*REAL, *CONFIGS)), help="(default: qwen3-30b-a3b, on a CPU qwen3_moe)")
    result.add_argument("--layers", type=positive, help="of a shortened model (default: all)")
    result.add_argument(
        "--attention", help="of all columns (default: thunder_moe_sdpa; eager for models without SDPA, such as GPT-OSS)"
    )
    result.add_argument(
        "--columns", type=comma_list(one_of(COLUMNS)), default=COLUMNS, help=f"of: {', '.join(COLUMNS)} (default: all)"
    )
    result.add_argument("--batch", type=comma_list(positive), help="texts (default: 1,8,32; on a CPU 1)")
    result.add_argument("--prompts", type=comma_list(positive), help="tokens (default: 128,2048; on a CPU 16)")
    result.add_argument("--new", type=positive, help="new tokens of a call (default: 384; on a CPU 16)")
    args = result.parse_args(argv)
    on_cuda = args.device.type == "cuda"
    args.model = args.model or ("qwen3-30b-a3b" if on_cuda else "qwen3_moe")
    args.batch = args.batch or ([1, 8, 32] if on_cuda else [1])
    args.prompts = args.prompts or ([128, 2048] if on_cuda else [16])
    args.new = args.new or (384 if on_cuda else 16)
    sdpa = has_sdpa(args.model)
    if args.attention in ("sdpa", "thunder_moe_sdpa") and not sdpa:
        result.error(f"argument --attention: got {args.attention} for {args.model}, which has no SDPA; wanted eager")
    args.attention = args.attention or ("thunder_moe_sdpa" if sdpa else "eager")
    return args


def _tokens(model: Any, ids: Tensor, new: int, options: dict[str, Any]) -> Tensor:
    made: Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
    )
    return made[:, ids.shape[1] :]


def _measure(model: Any, ids: Tensor, args: argparse.Namespace, loop: dict[str, Any], wanted: Tensor) -> dict[str, Any]:
    seconds: list[float] = []
    for _ in range(1 + args.rounds):
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        tokens = _tokens(model, ids, args.new, loop)
        if args.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    made = ids.shape[0] * args.new
    return {
        "first_call_seconds": seconds[0],
        "seconds": seconds[1:],
        "tokens_per_second": made / statistics.median(seconds[1:]),
        "equal_tokens": float((tokens[:, : wanted.shape[1]] == wanted).float().mean()),
    }


def _table(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return tokens per second, and in brackets the share of first tokens that equal the tokens of eager calls."""
    cells = list(dict.fromkeys((row["batch"], row["prompt"]) for row in rows))
    found = {(row["column"], row["batch"], row["prompt"]): row for row in rows}
    table = [["tokens per second (equal tokens; first call)", *(f"{texts} x {prompt}" for texts, prompt in cells)]]
    for column in dict.fromkeys(row["column"] for row in rows):
        table.append([column, *(_cell(found.get((column, *cell))) for cell in cells)])
    return table


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['tokens_per_second']:,.0f} ({row['equal_tokens']:.0%}; {row['first_call_seconds']:.0f} s)"


def _plot(path: Any, rows: Sequence[dict[str, Any]], model: str) -> Any:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        lines = panels.setdefault(f"prompts of {row['prompt']} tokens", {})
        lines.setdefault(row["column"], []).append((row["batch"], row["tokens_per_second"]))
    title = f"generate of {model}"
    image = path.with_suffix(".png")
    return plot_lines(image, panels, x="texts", y="tokens per second", reference=None, title=title)
