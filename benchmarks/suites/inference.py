"""Times greedy decoding behind a prompt as Lightning Thunder's `benchmark_inference.py` does: TTFT, TBOT, throughput.
Called by `python -m benchmarks inference`; calls thunder_moe, torch.compile, Thunder and benchmarks/harness.

Options, metrics and their names in the output and the JSON are the same as there. A cell is one of

    eager        transformers' code
    inductor     torch.compile(model, fullgraph=True)
    thunder      thunderfx(model, executors=[moe_executor, ...])
    thunderjit   thunder.jit(model, executors=[moe_executor, ...]); transformers' experts then have
                 experts_implementation="thunder_moe", because Thunder cannot trace "grouped_mm"

with weights of one of --columns

    bf16               not quantized
    thunder_moe        16-bit weights; the mode's compiler packs the experts: the backend "thunder_moe" of
                       torch.compile, or moe_executor
    quantize_          the experts after thunder_moe.quantize_
    quantize_ linears  after thunder_moe.quantize_(linears=True): attention, dense layers and the head too

with a CUDA graph or without. The graph holds a decode step and the choice of its token; no prompt is captured. Without
--mode all modes are measured, in bf16 and "quantize_ linears", with and without graphs. A cell that cannot run says
why in a line.

An iteration is a prompt of --input-length tokens, whose logits are all computed as in Thunder's benchmark, then
--output-length - 1 decode steps in a static cache, by wall clock with synchronization. TTFT is the time of the prompt,
TBOT the mean time of a step; "prefill" is the prompt, "overall" all of it. Means over --num-iterations.

Llama 4's layers of experts are replaced by this package's Llama4MoE, as there by Thunder's class of that name, which
computes the chosen experts alone; --disable-moe-replacement keeps transformers' layers. All layers of the cache hold
all tokens (StaticLayer), because Thunder compiles each step of a sliding window again. Weights are random.

Started by torchrun on several processes, the benchmark is tensor parallel, as there: experts and shared experts by
this package's TensorParallel, the linears of attention and of dense layers by columns and rows. torch's styles for
those make DTensors, which Thunder cannot trace; here they compute with local tensors. The head, which is whole there,
is cut by columns. All logits of a prompt are computed, and each process keeps those of its part of the vocabulary.
Only logits that are read are gathered: of the last token, because they choose the next one, and of the tokens that are
compared. Each process builds the whole model and its reference, then cuts it. It prints and writes the times of the
first process. 4-bit dense layers are not cut: --enable-nvfp4 quantizes the experts alone.

Before a cell is timed, its logits of the prompt and of decode steps are compared with the logits of transformers' eager
layers, without a cache, on the same (dequantized) weights, which have to fit the device. A wrong cell gets no times,
and the run ends with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.harness.column import quantizer, require_rewritten, require_same_logits, token_errors
from benchmarks.harness.decode import GreedyLoop
from benchmarks.harness.models import (
    CONFIGS,
    REAL,
    build,
    config_of,
    use_llama4_moe,
    use_transformers_moe,
)
from benchmarks.harness.report import (
    RESULTS,
    add_device,
    comma_list,
    command_parser,
    markdown,
    one_of,
    positive,
    save,
    stacked_bars,
    writable_folder,
)
from thunder_moe import Llama4MoE, RewriteWarning, dequantize_, rewrite_report
from thunder_moe.parallel import TensorParallel
from thunder_moe.parallel.exchange import all_gather, wait
from thunder_moe.parallel.modules import sum_of_ranks
from thunder_moe.parallel.shards import WeightSharding, check_sharding, shard_weight_
from thunder_moe.progress import progress_bar

STEM = "inference"
MODES = ("eager", "inductor", "thunder", "thunderjit")
# Name -> the arguments of `quantize_`, or None for a model of 16-bit weights.
COLUMNS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "thunder_moe": None,
    "quantize_": {},
    "quantize_ linears": {"linears": True},
}
QUANTIZED = "quantize_ linears"  # as Thunder's benchmark, whose --enable-nvfp4 replaces all linears
# device -> the defaults; on CUDA they are Thunder's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": dict(model_name="llama-4-maverick", input_length=2048, output_length=128, num_layers=2,
                 num_iterations=100, warmup_iterations=10),
    "cpu": dict(model_name="llama4", input_length=16, output_length=16, num_layers=1, num_iterations=3,
                warmup_iterations=1),
}  # fmt: skip
# Tokens of each text whose logits are compared: the last ones of the prompt, and decode steps. They are many, because
# a router of 128 experts sends some of them to another expert by a rounding.
CHECKED_OF_PROMPT, CHECKED_STEPS = 64, 64
REFERENCE_TOKENS = 2048  # of a call of the reference, in which all experts of Llama 4 compute each token

# Of a cell: title -> lines with their metric and its unit.
PRINTED: dict[str, list[tuple[str, str, str]]] = {
    "Throughput Metrics": [
        ("Overall Throughput", "throughput_tokens_per_sec", "tokens/sec"),
        ("Prefill Throughput", "prefill_throughput_tokens_per_sec", "tokens/sec"),
        ("Decode Throughput", "decode_throughput_tokens_per_sec", "tokens/sec"),
        ("Latency", "latency_ms_per_token", "ms/token"),
    ],
    "Latency Breakdown": [
        ("Time to First Token (TTFT)", "time_to_first_token_ms", "ms"),
        ("Time Between Output Tokens (TBOT)", "time_between_output_tokens_ms", "ms"),
        ("Prefill Time", "prefill_time_ms", "ms"),
        ("Decode Time", "decode_time_ms", "ms"),
        ("Total Generation Time", "total_time_ms", "ms"),
    ],
    "Memory Usage": [("Current Memory", "memory_used_gb", "GB"), ("Peak Memory", "peak_memory_gb", "GB")],
    "Variance Analysis": [
        ("Throughput Std Dev", "total_time_std_ms", "ms"),
        ("TTFT Std Dev", "ttft_std_ms", "ms"),
        ("TBOT Std Dev", "tbot_std_ms", "ms"),
    ],
}
Row = dict[str, Any]


def main(argv: Sequence[str]) -> list[Row]:
    """Run the benchmark; print the results, and write JSON and plot with --save-results.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON, one for each cell.

    Raises:
        SystemExit: bad arguments, or a cell failed: with status 1 after all others were measured and written. An
            interrupt is a failure of the cells that it prevents.
    """
    args = _arguments(argv)
    if args.ranks > 1:
        with _process_group(args), contextlib.ExitStack() as silent:
            if dist.get_rank():
                silent.enter_context(contextlib.redirect_stdout(silent.enter_context(Path(os.devnull).open("w"))))
            return _main(args)
    return _main(args)


def _main(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = [
        dict(mode=mode, column=column, cudagraph=graph)
        for column in args.columns
        for mode in args.modes
        for graph in args.graphs
    ]
    with contextlib.suppress(KeyboardInterrupt), progress_bar(total=len(rows), unit="cell") as bar:
        for column in args.columns:
            _measure_column([row for row in rows if row["column"] == column], args, bar)
    for row in filter(_is_pending, rows):
        row["error"] = "interrupted"
    if args.mode:
        for row in rows:
            if "metrics" in row:
                _print_results(row, args)
    for attention in dict.fromkeys(row["attention"] for row in rows if "attention" in row):
        print(f"{args.model_name}, attention {attention}")
    print(markdown(_table(rows)))
    for row in rows:
        if "not_run" in row:
            print(f"not run: {_name(row)}: {row['not_run']}")
    if args.save_results and not (args.ranks > 1 and dist.get_rank()):
        config = {name: value for name, value in vars(args).items() if isinstance(value, str | int | None)}
        path = save(STEM, args.device, rows, args.output_dir, config=config)
        print(path, *_plot(path, rows, args), sep="\n")
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"FAILED: {_name(row)}: {row['error']}", file=sys.stderr)
    if failed:
        raise SystemExit(1)
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = command_parser(STEM, __doc__ or "")
    add_device(result)
    of_device = "(default on CUDA: {cuda}, on a CPU: {cpu})"

    def number(name: str, what: str) -> None:
        key = name[2:].replace("-", "_")
        default = of_device.format(**{device: values[key] for device, values in DEFAULTS.items()})
        result.add_argument(name, type=positive, help=f"{what} {default}")

    result.add_argument(
        "--model-name", type=_model,
        help=f"of: {', '.join((*REAL, *CONFIGS))}, a hub's name of one of the first, or the path of a config.json "
        + of_device.format(**{device: values["model_name"] for device, values in DEFAULTS.items()}),
    )  # fmt: skip
    result.add_argument("--batch-size", type=positive, default=1, help="texts (default: %(default)s)")
    number("--input-length", "tokens of a prompt")
    number("--output-length", "tokens to generate, at least 2")
    number("--num-layers", "layers of the model, which is shortened to them")
    number("--num-iterations", "timed iterations")
    number("--warmup-iterations", "iterations before them")
    result.add_argument("--mode", choices=MODES, help="(default: all)")
    weights = result.add_mutually_exclusive_group()
    weights.add_argument(
        "--enable-nvfp4", action="store_true", help=f'only the column "{QUANTIZED}"; without it --mode has bf16'
    )
    weights.add_argument(
        "--columns", type=comma_list(one_of(COLUMNS)), help=f"of: {', '.join(COLUMNS)} (default: by the other options)"
    )
    result.add_argument("--format", choices=("nvfp4", "mxfp8"), help="of quantized weights (default: nvfp4)")
    result.add_argument(
        "--enable-cudagraph", action="store_true", help="only cells with a CUDA graph; without it --mode has none"
    )
    result.add_argument("--disable-moe-replacement", action="store_true", help="keep transformers' layers in Llama 4")
    result.add_argument(
        "--attn-implementation", default="sdpa", help="transformers' name (default: sdpa, or what a model has)"
    )
    result.add_argument(
        "--profile", action="store_true",
        help="call cudaProfilerStart and cudaProfilerStop around each timed iteration, for `nsys profile "
        "--capture-range=cudaProfilerApi --capture-range-end=repeat:N`",
    )  # fmt: skip
    result.add_argument("--save-results", action="store_true", help="write JSON and plot")
    result.add_argument("--output-dir", type=writable_folder, default=RESULTS, help="(default: %(default)s)")
    args = result.parse_args(argv)
    args.ranks = int(os.environ.get("WORLD_SIZE", "1"))  # of torchrun
    for name, value in DEFAULTS[args.device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.output_length < 2:
        result.error("argument --output-length: got 1, wanted at least 2: TBOT is the time between tokens")
    if args.profile and args.device.type != "cuda":
        result.error("argument --profile: it needs --device cuda")
    if args.enable_nvfp4 and args.format == "mxfp8":
        result.error("argument --format: got 'mxfp8' and --enable-nvfp4, wanted one of them")
    quantized = args.enable_nvfp4 or args.format is not None
    if args.columns is None:
        of_weights = QUANTIZED if args.ranks == 1 else "quantize_"
        args.columns = [of_weights] if quantized else ["bf16"] if args.mode else ["bf16", of_weights]
    args.format = args.format or "nvfp4"
    args.modes = [args.mode] if args.mode else MODES
    args.graphs = [True] if args.enable_cudagraph else [False] if args.mode else [False, True]
    return args


def _model(text: str) -> str:
    """Parse --model-name; "meta-llama/Llama-4-Maverick-17B-128E" means "llama-4-maverick"."""
    if Path(text).is_file():
        return text
    short = text.rpartition("/")[2].lower()
    name = next((name for name in REAL if short.startswith(name)), text)
    if name not in REAL and name not in CONFIGS:
        wanted = ", ".join((*REAL, *CONFIGS))
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {wanted}, or the path of a config.json")
    return name


def _is_pending(row: Row) -> bool:
    return not row.keys() & {"metrics", "not_run", "error"}


def _measure_column(rows: Sequence[Row], args: argparse.Namespace, bar: Any) -> None:
    """Measure the cells of a column, which share a model."""
    column = rows[0]["column"]
    for row in rows:
        if reason := _why_not(row, args):
            row["not_run"] = reason
    cells = list(filter(_is_pending, rows))
    bar.update(len(rows) - len(cells))
    if not cells:
        return
    bar.set_description(f"{column}: preparing")
    with _failures(cells), warnings.catch_warnings():
        # The newer name is not known to transformers 5.17.
        warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
        steps = min(CHECKED_STEPS, args.output_length - 1)
        shape = args.batch_size, args.input_length + steps
        generator = torch.Generator(args.device).manual_seed(0)
        vocabulary = config_of(args.model_name).vocab_size
        ids = torch.randint(vocabulary, shape, generator=generator, device=args.device)
        wanted = _reference_logits(column, args, ids, min(CHECKED_OF_PROMPT, args.input_length) + steps)
        _free(args.device)
        model = _build(column, args)
        if args.ranks > 1:
            _shard_(model, init_device_mesh(args.device.type, (args.ranks,)))
        for mode in dict.fromkeys(row["mode"] for row in cells):
            of_mode = [row for row in cells if row["mode"] == mode]
            with _failures(of_mode):
                _measure_mode(model, of_mode, args, ids, wanted, bar)
            bar.update(len(of_mode))
            _free(args.device)


def _why_not(row: Row, args: argparse.Namespace) -> str | None:
    """Return why a cell cannot run, or None."""
    if row["cudagraph"] and args.device.type != "cuda":
        return "CUDA graphs need a CUDA device"
    if args.ranks > 1 and row["column"] == QUANTIZED:
        return "4-bit dense layers are not cut over several processes"
    if args.ranks > 1 and (args.disable_moe_replacement or config_of(args.model_name).model_type != "llama4_text"):
        return "on several processes the experts have to be this package's Llama4MoE"
    if row["column"] == "thunder_moe" and row["mode"] == "eager":
        return "nothing packs 16-bit weights without a compiler"
    if row["mode"].startswith("thunder") and importlib.util.find_spec("thunder") is None:
        return "lightning-thunder is not installed: pip install 'thunder_moe[thunder]'"
    if row["mode"] == "thunderjit" and config_of(args.model_name).model_type == "gpt_oss":
        return "Thunder 0.2.6 lacks max(dim).values, which the attention of GPT-OSS reads"
    return None


@contextlib.contextmanager
def _failures(rows: Sequence[Row]) -> Iterator[None]:
    """Give the rows that are not measured yet the error of the body, of any class."""
    try:
        yield
    except Exception as error:
        key = "not_run" if isinstance(error, torch.OutOfMemoryError | NotImplementedError) else "error"
        if key == "error":
            traceback.print_exc()
        for row in filter(_is_pending, rows):
            row[key] = _in_a_line(error)


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {text[:300]}"


def _free(device: torch.device) -> None:
    """Free what the last cells compiled and allocated."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _process_group(args: argparse.Namespace) -> Iterator[None]:
    """Make the process group of torchrun's processes, each with the GPU of its rank."""
    if args.device.type == "cuda":
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    yield
    dist.destroy_process_group()


def _shard_(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a model's experts, attention, dense layers and head over the ranks of a mesh.

    The head then computes this rank's logits, which `_gather_vocabulary` gathers. An embedding that is tied to it stays
    whole.

    Raises:
        ValueError: the ranks do not divide a size of the model, such as the vocabulary.
    """
    blocks = [module for module in model.modules() if isinstance(module, Llama4MoE)]
    inside = {part for block in blocks for part in block.modules()}
    for block in blocks:
        parallelize_module(block, mesh, TensorParallel())
    for name, linear in model.named_modules():
        kind = name.rpartition(".")[2].removesuffix("_proj")
        if linear in inside or kind not in ("q", "k", "v", "o", "gate", "up", "down", "lm_head"):
            continue
        by_rows = kind in ("o", "down")
        sharding = WeightSharding(mesh, (2 if by_rows else 1,))
        check_sharding(name, linear, sharding)
        shard_weight_(linear, sharding, 0)
        if by_rows:
            linear.register_forward_hook(lambda module, args, out: sum_of_ranks(out, mesh))


def _gather_vocabulary(logits: Tensor) -> Tensor:
    """Return the logits (B, S, vocabulary) of all ranks' logits (B, S, vocabulary / ranks)."""
    parts = wait(all_gather(logits[None], dist.group.WORLD))  # [ranks, B, S, vocabulary / ranks]
    return parts.movedim(0, 2).flatten(2)


def _build(column: str, args: argparse.Namespace, attention: str | None = None) -> Any:
    options = COLUMNS[column]
    return build(
        args.model_name, args.device, layers=args.num_layers, attention=attention or args.attn_implementation,
        change=None if args.disable_moe_replacement else use_llama4_moe,
        finish=None if options is None else quantizer({**options, "format": args.format}),
    )  # fmt: skip


@torch.no_grad()
def _reference_logits(column: str, args: argparse.Namespace, ids: Tensor, kept: int) -> Tensor:
    """Return logits (B, kept, vocabulary) of the last tokens, by transformers' eager layers and its default cache."""
    model = _build("quantize_" if column == "thunder_moe" else column, args, "sdpa")
    if column != "bf16":
        dequantize_(model)
    use_transformers_moe(model)
    if model.config._experts_implementation != "eager":
        model.set_experts_implementation("eager")
    cache, logits = None, []
    for piece in ids.split(REFERENCE_TOKENS, 1):
        result = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=min(kept, piece.shape[1]))
        cache = result.past_key_values
        logits.append(result.logits)
    return torch.cat(logits, 1)[:, -kept:]


def _compile(model: Any, mode: str, column: str, format: str) -> Callable[..., Any]:
    """Return the model as a mode calls it."""
    packs = column == "thunder_moe"
    if mode == "eager":
        return model  # type: ignore[no-any-return]
    if mode == "inductor":
        how: dict[str, Any] = dict(backend="thunder_moe", options={"thunder_moe.format": format}) if packs else {}
        compiled: Callable[..., Any] = torch.compile(model, fullgraph=True, dynamic=False, **how)
        return compiled
    from thunder_moe import moe_executor  # before thunder, which it makes importable on new versions of torch

    import thunder  # isort: skip
    from thunder.dynamo import thunderfx

    jit: Callable[..., Any] = thunder.jit if mode == "thunderjit" else thunderfx
    executors = [moe_executor, *thunder.get_default_executors()]
    forward: Callable[..., Any] = jit(
        model, executors=executors, moe_format=format if packs else lambda gemm, name: None
    )
    return forward


@torch.no_grad()
def _measure_mode(
    model: Any, rows: Sequence[Row], args: argparse.Namespace, ids: Tensor, wanted: Tensor, bar: Any
) -> None:
    """Check and time the cells of a mode, which share a compiled model."""
    prompt, column = ids[:, : args.input_length].contiguous(), rows[0]["column"]
    forward = _compile(model, rows[0]["mode"], column, args.format)
    gather = _gather_vocabulary if args.ranks > 1 else None
    loop = GreedyLoop(model, forward, args.batch_size, args.input_length + args.output_length, gather)
    if rows[0]["mode"] == "thunderjit" and model.config._experts_implementation == "grouped_mm":
        # The same GEMMs among operations that thunder.jit traces. It is the last mode: no other meets this.
        model.set_experts_implementation("thunder_moe")
    for row in rows:
        row["attention"] = model.config._attn_implementation
        bar.set_description(_name(row))
        with _failures([row]), warnings.catch_warnings():
            if column != "thunder_moe":
                warnings.simplefilter("ignore", RewriteWarning)  # this column wants nothing rewritten
            start = time.perf_counter()
            if row["cudagraph"] and (reason := _capture(loop, prompt)):
                row["not_run"] = reason
                continue
            _check(row, loop, prompt, ids[:, args.input_length :], wanted)
            _check_weights(model, forward, row)
            row["compile_and_check_seconds"] = time.perf_counter() - start
            row |= _time(loop, prompt, args, bar)


def _capture(loop: GreedyLoop, prompt: Tensor) -> str | None:
    """Make the decode step a CUDA graph; return why it is not, or None."""
    loop.cache.reset()
    loop.read(prompt)
    loop.advance()  # compiles
    try:
        loop.capture()
    except Exception as error:  # any operation that a capture forbids
        torch.cuda.synchronize()
        return f"the step cannot be captured: {_in_a_line(error)}"
    return None


def _check(row: Row, loop: GreedyLoop, prompt: Tensor, tokens: Tensor, wanted: Tensor) -> None:
    """Compare the last logits of a prompt, and of steps with given tokens behind it, with `wanted`."""
    kept = wanted.shape[1] - tokens.shape[1]
    loop.cache.reset()
    of_prompt = token_errors(loop.gather(loop.read(prompt)[:, -kept:]).float(), wanted[:, :kept].float())
    steps = []
    for token, expected in zip(tokens.split(1, 1), wanted[:, kept:].split(1, 1), strict=True):
        loop.token.copy_(token)
        steps.append(token_errors(loop.gather(loop.advance()).float(), expected.float()))
    require_same_logits([of_prompt, torch.cat(steps)], row.update)


def _check_weights(model: nn.Module, forward: Any, row: Row) -> None:
    """Raise a RuntimeError unless the experts have the weights that the column says."""
    experts = sum(parameter.ndim == 3 for parameter in model.parameters())
    if row["column"] == "thunder_moe":
        require_rewritten(forward, experts)
    elif row["column"] != "bf16" and experts:
        raise RuntimeError(f"wanted all experts quantized, {experts} of their weights are in 16 bits")
    elif row["column"] == "bf16" and row["mode"].startswith("thunder") and rewrite_report(forward).rewritten:
        raise RuntimeError(f"wanted 16-bit experts, compiled was\n{rewrite_report(forward)}")


def _time(loop: GreedyLoop, prompt: Tensor, args: argparse.Namespace, bar: Any) -> Row:
    """Return the metrics of the iterations."""
    cuda = args.device.type == "cuda"
    prefill, decode = [], []
    for index in range(args.warmup_iterations + args.num_iterations):
        bar.set_postfix_str(f"iteration {index + 1} of {args.warmup_iterations + args.num_iterations}")
        if cuda and index == args.warmup_iterations:
            torch.cuda.reset_peak_memory_stats()
        loop.cache.reset()
        profiled = args.profile and index >= args.warmup_iterations
        if profiled:
            torch.cuda.profiler.start()
        start = _clock(cuda)
        loop.read(prompt)
        first = _clock(cuda)
        for _ in range(args.output_length - 1):
            loop.advance()
        end = _clock(cuda)
        if profiled:
            torch.cuda.profiler.stop()
        if index >= args.warmup_iterations:
            prefill.append(1e3 * (first - start))
            decode.append(1e3 * (end - first))
    total = [sum(times) for times in zip(prefill, decode, strict=True)]
    metrics = _metrics(prefill, decode, total, args)
    if cuda:
        metrics["memory_used_gb"] = torch.cuda.memory_allocated() / 1e9
        metrics["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    detailed = dict(iteration_times=total, ttft_times=prefill, prefill_times=prefill, decode_times=decode)
    return {"metrics": metrics, "detailed_metrics": detailed}


def _clock(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _metrics(
    prefill: Sequence[float], decode: Sequence[float], total: Sequence[float], args: argparse.Namespace
) -> dict[str, float]:
    """Return means and standard deviations of the iterations' times, in ms, by the names of Thunder's JSON."""
    steps = args.output_length - 1
    tbot = [time / steps for time in decode]

    def rate(tokens: int, times: Sequence[float]) -> float:
        return statistics.mean([1e3 * tokens * float(args.batch_size) / time for time in times])

    result = {
        "throughput_tokens_per_sec": rate(args.output_length, total),
        "prefill_throughput_tokens_per_sec": rate(args.input_length, prefill),
        "decode_throughput_tokens_per_sec": rate(steps, decode),
        "latency_ms_per_token": statistics.mean(total) / (args.output_length * args.batch_size),
        "time_to_first_token_ms": statistics.mean(prefill),
        "time_between_output_tokens_ms": statistics.mean(tbot),
        "prefill_time_ms": statistics.mean(prefill),
        "decode_time_ms": statistics.mean(decode),
        "total_time_ms": statistics.mean(total),
    }
    if len(total) > 1:
        deviations = {"total_time_std_ms": total, "ttft_std_ms": prefill, "tbot_std_ms": tbot}
        result |= {name: statistics.stdev(times) for name, times in deviations.items()}
    return result


def _name(row: Row) -> str:
    return f"{row['mode']} {row['column']}" + (", CUDA graph" if row["cudagraph"] else "")


def _print_results(row: Row, args: argparse.Namespace) -> None:
    """Print a cell in the words of Thunder's benchmark."""
    print("\n" + "=" * 60, f"BENCHMARK RESULTS - {args.model_name} {_name(row)}", "=" * 60, sep="\n")
    for title, lines in PRINTED.items():
        known = [line for line in lines if line[1] in row["metrics"]]
        if known:
            print(f"\n{title}:")
        for what, key, unit in known:
            print(f"  {what}: {row['metrics'][key]:.2f} {unit}")


def _table(rows: Sequence[Row]) -> list[list[str]]:
    """Return a line for each cell that was run."""
    table = [["mode", "weights", "graph", "TTFT ms", "TBOT ms", "prefill tokens/s", "decode tokens/s",
              "overall tokens/s", "memory GB", "peak GB", "error of logits"]]  # fmt: skip
    for row in rows:
        if "not_run" in row:
            continue
        m = row.get("metrics", {})
        numbers = [
            _spread(m, "time_to_first_token_ms", "ttft_std_ms"),
            _spread(m, "time_between_output_tokens_ms", "tbot_std_ms"),
            *(f"{m[key]:,.0f}" if m else "-" for key in ("prefill_throughput_tokens_per_sec",
              "decode_throughput_tokens_per_sec", "throughput_tokens_per_sec")),
            *(f"{m[key]:.1f}" if key in m else "-" for key in ("memory_used_gb", "peak_memory_gb")),
            f"{row['relative_error']:.1g}" if "relative_error" in row else "-",
        ]  # fmt: skip
        table.append([row["mode"], row["column"], "yes" if row["cudagraph"] else "no", *numbers])
    return table


def _spread(metrics: dict[str, float], key: str, deviation: str) -> str:
    if not metrics:
        return "-"
    return f"{metrics[key]:.2f}" + (f" ± {metrics[deviation]:.2f}" if deviation in metrics else "")


def _plot(path: Path, rows: Sequence[Row], args: argparse.Namespace) -> list[Path]:
    """Draw the time of each measured cell, beside the JSON; return the path of the PNG, if there is one."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if m := row.get("metrics"):
            bars = panels.setdefault("with CUDA graphs" if row["cudagraph"] else "without CUDA graphs", {})
            times = {"prefill": m["prefill_time_ms"], "decode": m["decode_time_ms"]}
            bars[f"{row['mode']} {row['column']}"] = times
    lengths = f"{args.batch_size} x ({args.input_length} + {args.output_length}) tokens"
    title = f"{args.model_name}, --num-layers {args.num_layers}, {lengths}"
    return [stacked_bars(path, panels, axis_label="ms of an iteration", title=title)] if panels else []
