"""Times vLLM's engine (`LLM.generate`, CUDA graphs) on an NVFP4 or MXFP8 checkpoint: its kernels beside ours.
Called by `python -m benchmarks engine`, which needs vLLM; calls transformers, benchmarks/harness/engines.py and vLLM.

The checkpoint has random weights and is written by `quantize_` and `save_checkpoint`. With `--linears` attention's
projections are in the format too. The bf16 column reads it dequantized, and so does the FP8 column, whose engine then
quantizes these weights as `--quantization fp8` does. Each column is an engine in its own process; all engines exist at
once and take turns. `--gpus` gives each of them a GPU, where one GPU has no memory for all of them.

    decode    new tokens of each request per second: (time of many new tokens - time of few)
    prefill   tokens of prompts per second, one step of vLLM

Before anything is timed, each engine generates greedily, with log probabilities. `load_checkpoint` in fp32 computes the
log probabilities of the same tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.engines import ENGINES, MODELS, Engine
from benchmarks.harness.report import comma_list, one_of, parser, plot_lines, positive, save, table
from benchmarks.harness.timing import describe
from thunder_moe.formats.registry import FORMATS

STEM = "engine"
OURS = "thunder_moe"
TRANSFORMERS = "transformers and thunder_moe"
PROMPT, NEW = 64, 33  # tokens of the requests that are compared
CHECKED = 4  # requests of each column that are compared with fp32
# Mean difference of log probabilities in bf16 to fp32; the top one is about 4 above the mean: wrong experts give more.
TOLERANCE = 0.5


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and a plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the engine with our kernels does not start, or computes something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    stem = STEM if args.format == "nvfp4" else f"{STEM}_{args.format}"
    stem = f"{stem}_linears" if args.linears else stem
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        engines = {
            column: Engine(column, path, options) for column, options in zip(args.columns, _options(args), strict=True)
        }
        try:
            prompts = _prompts(args)
            checked = {TRANSFORMERS: _write(path, prompts, args)}
            if args.device.type == "cuda":
                torch.cuda.empty_cache()
            model = _reference(path, args)  # before the engines, which look at the memory that is free
            for engine in engines.values():
                engine.start()
            for column in list(engines):
                try:
                    engines[column].wait()
                    checked[column] = engines[column].ask("generate", prompts, NEW)
                except RuntimeError as error:  # whatever keeps vLLM from it: the reason is printed and saved
                    if column == OURS:
                        raise
                    notes.append(f"{column}: not run: {error}")
                    engines.pop(column).end()
            errors = _check(model, prompts, checked)
            del model
            print("\n".join(f"{column}: {error}" for column, error in errors.items()), flush=True)
            if errors[OURS]["mean_difference"] > TOLERANCE:
                raise RuntimeError(f"{OURS}: {errors[OURS]}, wanted a mean_difference of at most {TOLERANCE}")
            notes += [
                f"{column}: mean difference to fp32 {error['mean_difference']:.2g}, timed all the same"
                for column, error in errors.items()
                if error["mean_difference"] > TOLERANCE
            ]
            more = {
                "vllm": engines[OURS].ask("version"),
                "attention": engines[OURS].ask("attention"),
                "gpus": args.gpus,
                "model": args.model,
                "layers": args.layers,
                "linears": args.linears,
                "compiled": args.device.type == "cuda" and not args.uncompiled,
                "tolerance": TOLERANCE,
                "checked": errors,
                "notes": notes,
            }
            rows: list[dict[str, Any]] = []
            for row in _measure(engines, args):  # a run that ends early leaves what it has measured
                rows.append(row)
                path = save(stem, args.device, rows, args.output, **more)
        finally:
            for engine in engines.values():
                engine.end()
    print(table(rows, ("step", "tokens"), OURS), *notes, path, sep="\n")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        for column, rate in row["tokens_per_second"].items():
            panels.setdefault(row["step"], {}).setdefault(column, []).append((row["tokens"], rate))
    what = f"{args.format.upper()} {'experts and attention' if args.linears else 'experts'}"
    title = f"vLLM's engine, {args.layers} layers of {args.model}, {what}, {describe(args.device)}"
    print(
        plot_lines(
            path.with_suffix(".png"), panels, x="tokens of a step", y="tokens per second", reference=None, title=title
        )
    )
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("engine", __doc__ or "", shapes=False, limits=False)
    result.add_argument("--columns", type=comma_list(one_of(ENGINES)), default=list(ENGINES), help="default: all")
    result.add_argument("--model", type=one_of(MODELS), default=next(iter(MODELS)), help="default: %(default)s")
    result.add_argument(
        "--format", type=one_of(FORMATS), default="nvfp4", help=f"of: {', '.join(FORMATS)} (default: %(default)s)"
    )
    result.add_argument("--layers", type=positive, default=16, help="of the model (default: %(default)s)")
    result.add_argument("--batches", type=comma_list(positive), default=[1, 8, 32], help="default: %(default)s")
    result.add_argument(
        "--prefills", type=comma_list(positive), default=[1024, 8192], help="tokens of prompts (default: %(default)s)"
    )
    result.add_argument("--new", type=positive, default=96, help="tokens that are timed (default: %(default)s)")
    result.add_argument(
        "--uncompiled", action="store_true", help="vLLM compiles no layers; it captures CUDA graphs all the same"
    )
    result.add_argument("--linears", action="store_true", help="4-bit (or MXFP8) attention, too")
    result.add_argument("--attention", help="vLLM's --attention-backend (default: its choice)")
    result.add_argument("--gpus", type=comma_list(str), help="the GPU of each column (default: 0; the check runs on 0)")
    result.set_defaults(rounds=7)
    args = result.parse_args(argv)
    if OURS not in args.columns:
        result.error(f"argument --columns: wanted {OURS} among them")
    known = [str(index) for index in range(torch.cuda.device_count())]
    if args.gpus and (len(args.gpus) != len(args.columns) or not {*args.gpus} <= {*known}):
        wanted = f"one of {', '.join(known) or 'none'} for each of the {len(args.columns)} columns"
        result.error(f"argument --gpus: got {','.join(args.gpus)}, wanted {wanted}")
    return args


def _options(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return each column's options. On a GPU each engine has its own cores, so none waits for another's threads."""
    shared = {
        "device": args.device.type, "batches": args.batches, "tokens": max(args.prefills), "new": args.new,
        "compiled": not args.uncompiled, "attention": args.attention,
    }  # fmt: skip
    count = len(args.columns)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    share = len(cores) // count if args.device.type == "cuda" else 0
    gpus = args.gpus or [None] * count
    return [
        shared | {"cores": cores[index * share : (index + 1) * share] or None, "gpu": gpu}
        for index, gpu in enumerate(gpus)
    ]


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = MODELS[args.model]["vocab_size"]
    ids: list[list[int]] = torch.randint(10, vocabulary, (max(args.batches), PROMPT), generator=generator).tolist()
    return ids


@torch.no_grad()
def _write(path: Path, prompts: list[list[int]], args: argparse.Namespace) -> tuple[list[list[int]], list[list[float]]]:
    """Writes the checkpoint; returns greedy tokens and their log probabilities of the model that was written."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from thunder_moe import quantize_, save_checkpoint

    config = Qwen3MoeConfig(**MODELS[args.model], num_hidden_layers=args.layers, dtype=torch.bfloat16)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with args.device:
            model = Qwen3MoeForCausalLM(config).train(False)
    finally:
        torch.set_default_dtype(default)
    linears = (lambda _, name: "self_attn" in name) if args.linears else False
    save_checkpoint(quantize_(model, format=args.format, linears=linears), path)
    ids = torch.tensor(prompts, device=args.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    new = out.sequences[:, PROMPT:]
    of_steps = [logits.float().log_softmax(-1).gather(1, new[:, step, None]) for step, logits in enumerate(out.logits)]
    tokens: list[list[int]] = new.tolist()
    values: list[list[float]] = torch.cat(of_steps, 1).tolist()
    return tokens, values


def _reference(path: Path, args: argparse.Namespace) -> Any:
    from thunder_moe import load_checkpoint, to_layout_

    device = args.device if args.device.type == "cuda" else None
    return to_layout_(load_checkpoint(path, device=device, dtype=torch.float32), "linear")


@torch.no_grad()
def _check(
    model: Any, prompts: list[list[int]], checked: dict[str, tuple[list[list[int]], list[list[float]]]]
) -> dict[str, dict[str, float]]:
    """Log probabilities of each column's tokens beside those that the model in fp32 gives to the same ones."""
    from thunder_moe import use_backend

    some = prompts[:CHECKED]
    sequences = [prompt + new for tokens, _ in checked.values() for prompt, new in zip(some, tokens, strict=False)]
    ids = torch.tensor(sequences, device=model.device)
    with use_backend("reference"):  # one pass: it dequantizes all experts
        logits: Tensor = model(ids, logits_to_keep=NEW + 1, use_cache=False).logits[:, :-1]
    reference = checked[TRANSFORMERS][0]
    errors: dict[str, dict[str, float]] = {}
    for index, (column, (tokens, values)) in enumerate(checked.items()):
        part = slice(index * len(some), (index + 1) * len(some))
        wanted, new = logits[part].log_softmax(-1), ids[part, PROMPT:]
        differences = (wanted.gather(2, new[..., None])[..., 0].cpu() - torch.tensor(values[: len(some)])).abs()
        errors[column] = {
            "mean_difference": differences.mean().item() if bool(differences.isfinite().all()) else float("inf"),
            "largest_difference": differences.max().item(),
            "share_of_top_tokens": (wanted.argmax(-1) == new).float().mean().item(),
            "tokens_equal_to_generate": _agreement(reference, tokens),
            "requests_equal_to_generate": sum(map(list.__eq__, reference, tokens)) / len(tokens),
        }
    return errors


def _agreement(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of tokens before the first difference of each request."""
    equal = 0
    for a, b in zip(one, other, strict=True):
        different = [at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        equal += different[0] if different else len(a)
    return equal / sum(map(len, one))


def _measure(engines: dict[str, Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = [("decode", tokens) for tokens in args.batches] + [("prefill", tokens) for tokens in args.prefills]
    for step, tokens in steps:
        seconds: dict[str, list[float]] = {column: [] for column in engines}
        for engine in engines.values():
            engine.ask(step, tokens)  # warm-up
        for index in range(args.rounds):
            order = list(engines)
            for column in order[index % len(order) :] + order[: index % len(order)]:
                seconds[column].append(engines[column].ask(step, tokens))
        medians = {column: median(own) for column, own in seconds.items()}
        timings = {
            column: {
                "median": medians[column],
                "quartiles": [quantiles(own, n=4)[0], quantiles(own, n=4)[2]] if len(own) > 1 else own * 2,
                "rounds": len(own),
                "method": "perf_counter",
            }
            for column, own in seconds.items()
        }
        print(step, tokens, {column: round(own * 1e3, 3) for column, own in medians.items()}, "ms", flush=True)
        yield {
            "step": step,
            "tokens": tokens,
            "seconds": timings,
            "times_faster": {column: medians[OURS] / own for column, own in medians.items() if column != OURS},
            "tokens_per_second": {column: tokens / own for column, own in medians.items()},
        }
