"""Times whole Hugging Face models in bf16 and with NVFP4 experts: prompt and generation tokens per second, memory.
Called by `python -m benchmarks model`; calls thunder_moe.quantize_, torch.compile and benchmarks/harness.

    eager bf16           the model as it is
    compile bf16         its forward under torch.compile, as in all "compile" columns
    compile nvfp4        torch.compile(backend="thunder_moe"): the frozen expert GEMMs are rewritten
    eager nvfp4          after thunder_moe.quantize_
    quantize_ + compile  the quantized model under torch.compile

All columns generate greedily with a static cache. The prompt's time is that of generating one token, the generation's
that of all other tokens. Before a column is timed, its logits behind the prompt are compared: compiled bf16 with eager
bf16, the columns of 4-bit weights with each other; `rewrite_report` has to confirm "compile nvfp4". `--models` takes
small random models of well-known architectures, a config.json (random weights), or the directory of a checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.harness.models import CONFIGS, load
from benchmarks.harness.report import aligned, comma_list, one_of, parser, positive, relative_error, save
from benchmarks.harness.timing import measure
from thunder_moe import quantize_, rewrite_report
from thunder_moe.integrations.huggingface.experts import expert_blocks

STEM = "model"
COLUMNS = ("eager bf16", "compile bf16", "compile nvfp4", "eager nvfp4", "quantize_ + compile")
# Relative Frobenius error of logits: bf16 roundings in another order, and the few routing decisions that they change.
TOLERANCE = 0.1


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table and writes JSON.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON, one for each column of a model.

    Raises:
        RuntimeError: a column computes something wrong, or was not compiled to what it says.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    for source in args.models:
        torch.manual_seed(args.seed)
        model = load(source, args.device, args.layers)
        vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
        prompt = torch.randint(1, vocabulary, (args.batch, args.prompt_tokens), device=args.device)
        rows += [{"model": _name(source), **row} for row in _run(model, prompt, args)]
        del model
    path = save(STEM, args.device, rows, args.output, tolerance=TOLERANCE, inner=args.inner, batch=args.batch,
                prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens)  # fmt: skip
    print(_table(rows), path, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("model", __doc__ or "", shapes=False)
    result.set_defaults(rounds=5, budget=60.0, slow=600.0)
    result.add_argument(
        "--models", type=comma_list(_model), default=["qwen3_moe"],
        help=f"comma-separated, of: {', '.join(CONFIGS)}, or paths (default: qwen3_moe)",
    )  # fmt: skip
    result.add_argument("--columns", type=comma_list(one_of(COLUMNS)), default=list(COLUMNS), help="(default: all)")
    result.add_argument("--layers", type=positive, help="another number of layers, for random weights")
    result.add_argument("--prompt-tokens", type=positive, default=64, help="of a random prompt (default: %(default)s)")
    result.add_argument("--new-tokens", type=positive, default=32, help="at least 2 (default: %(default)s)")
    result.add_argument("--batch", type=positive, default=1, help="texts at once (default: %(default)s)")
    result.add_argument("--seed", type=int, default=0, help="of weights and prompt (default: %(default)s)")
    result.add_argument(
        "--inner", choices=("inductor", "aot_eager"), default="inductor",
        help="what compiles the graphs: aot_eager needs no C++ compiler (default: %(default)s)",
    )  # fmt: skip
    args = result.parse_args(argv)
    if args.new_tokens < 2:
        result.error(f"argument --new-tokens: got {args.new_tokens}, wanted at least 2")
    if args.device.type == "cpu" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        result.error("a CPU needs torch 2.11: torch.compile of 2.10 cannot trace transformers' bf16 experts")
    return args


def _model(text: str) -> str:
    if text not in CONFIGS and not Path(text).exists():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, wanted one of {', '.join(CONFIGS)}, a path to config.json, or the directory of a checkpoint"
        )
    return text


def _name(source: str) -> str:
    path = Path(source)
    return source if source in CONFIGS else (path.parent if path.is_file() else path).resolve().name


def _run(model: nn.Module, prompt: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Checks and times the columns one after the other, because `quantize_` replaces the weights in place."""
    names = list(expert_blocks(model))
    if not names:
        raise SystemExit(f"{type(model).__name__} has no experts that thunder_moe knows")
    rows, logits = [], dict[bool, Tensor]()
    bar = tqdm([name for name in COLUMNS if name in args.columns], unit="column")
    for name in bar:
        bar.set_description(f"{type(model).__name__} {name}")
        torch._dynamo.reset()  # a compiled graph would keep the 16-bit weights
        vars(model).pop("forward", None)
        nvfp4 = name.endswith("nvfp4") or name.startswith("quantize_")
        if nvfp4 and name != "compile nvfp4" and expert_blocks(model):
            quantize_(model)
        if "compile" in name:
            vars(model)["forward"] = _compiled(model, name, args)
        start = time.perf_counter()
        error = _check(name, model, prompt, logits, nvfp4, names)
        compile_seconds = time.perf_counter() - start
        functions = {
            part: functools.partial(generate, model, prompt, tokens)
            for part, tokens in (("prompt", 1), ("all", args.new_tokens))
        }
        how = dict(rounds=args.rounds, min_rounds=min(3, args.rounds), budget=args.budget, slow=args.slow, warmup=2)
        # A call of generate replays the CUDA graphs of its column and synchronizes, so that it cannot be captured.
        timings = measure(functions, device=args.device, own_graphs=list(functions), **how)
        first, whole = timings["prompt"].median, timings["all"].median
        rows.append({
            "column": name,
            "prompt_tokens_per_second": prompt.numel() / first,
            "new_tokens_per_second": prompt.shape[0] * (args.new_tokens - 1) / max(whole - first, 1e-9),
            "seconds": {part: asdict(timing) for part, timing in timings.items()},
            "first_call_seconds": compile_seconds,
            "model_bytes": tensor_bytes(model),
            "expert_bytes": sum(tensor_bytes(model.get_submodule(path)) for path in names),
            "relative_error": error,
        })  # fmt: skip
    vars(model).pop("forward", None)
    return rows


def _compiled(model: nn.Module, name: str, args: argparse.Namespace) -> Callable[..., Any]:
    """The forward of a column under torch.compile; on CUDA inductor captures CUDA graphs."""
    options: dict[str, Any] = dict(fullgraph=True)
    graphs = args.device.type == "cuda" and args.inner == "inductor"
    if name == "compile nvfp4":
        options |= dict(backend="thunder_moe")
        if graphs:
            options |= dict(mode="reduce-overhead")
        else:
            options |= dict(options={"thunder_moe.inner": args.inner})
    else:
        options |= dict(backend=args.inner, mode="reduce-overhead" if graphs else None)
    return torch.compile(model.forward, **options)


def _check(
    name: str, model: nn.Module, prompt: Tensor, logits: dict[bool, Tensor], nvfp4: bool, names: Sequence[str]
) -> float | None:
    """The relative error of a column's logits against the first column with the same weights (None for that one)."""
    with torch.no_grad():
        found = model(prompt, logits_to_keep=1).logits.float()
    if name == "compile nvfp4":
        report = rewrite_report(vars(model)["forward"])
        rewritten = {entry.gemm.weight for entry in report if entry.rewritten}
        if len(rewritten) != 2 * len(names) or not all(entry.rewritten for entry in report):
            raise RuntimeError(f"{name!r}: wanted the experts of {len(names)} layers in NVFP4, compiled was\n{report}")
    if nvfp4 not in logits:
        logits[nvfp4] = found
        return None
    error = relative_error(found, logits[nvfp4])
    if error > TOLERANCE:
        raise RuntimeError(f"{name!r} is wrong: relative error {error:.2g} of the logits, wanted at most {TOLERANCE}")
    return error


def generate(model: nn.Module, prompt: Tensor, tokens: int) -> Tensor:
    """Greedy text behind a prompt, with a cache of fixed size.

    Args:
        model: a Hugging Face model; `generate` calls its `forward`, compiled or not.
        prompt: int64 (batch, length).
        tokens: to generate.

    Returns:
        int64 (batch, length + tokens).
    """
    options: dict[str, Any] = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    # Without disable_compile, generate compiles by itself on a GPU.
    options |= dict(cache_implementation="static", disable_compile=True)
    text: Tensor = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), **options
    )
    return text


def tensor_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, each once."""
    return sum({id(t): t.nbytes for t in [*module.parameters(), *module.buffers()]}.values())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [["model", "column", "prompt [tokens/s]", "generation [tokens/s]", "weights [MiB]", "experts [MiB]"]]
    for row in rows:
        speeds = (f"{row[key]:,.1f}" for key in ("prompt_tokens_per_second", "new_tokens_per_second"))
        sizes = (f"{row[key] / 2**20:,.1f}" for key in ("model_bytes", "expert_bytes"))
        cells.append([row["model"], row["column"], *speeds, *sizes])
    return aligned(cells)
