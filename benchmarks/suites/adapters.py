"""Times vLLM's routed MoE layer with adapters on its experts (--enable-lora), with vLLM's kernels and with ours.
Called by `python -m benchmarks adapters`, which needs vLLM; calls suites/serving.py and benchmarks/harness.

The layer is vLLM's FusedMoEWithLoRA of Qwen3-30B-A3B, with adapters of one rank on gate, up and down of all experts.

    none    no token has an adapter
    one     all tokens have the same
    mixed   the adapters and none take turns

Before anything is timed, each result is compared with fp32, and on CUDA a graph captured with "one" is replayed with
"mixed" and compared with a plain call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.report import comma_list, one_of, parser, plot, positive, relative_error, save, table, timed
from benchmarks.harness.served import COLUMNS, LAYERS, ServedLayer
from benchmarks.harness.timing import describe, measure
from benchmarks.suites.serving import BASELINE, OURS, TOLERANCE, random_weights, reason
from thunder_moe.progress import progress_bar

STEM = "adapters"
TOKENS = [1, 8, 32, 128, 512, 2048, 8192]
RANKS = (1, 8, 16, 32, 64, 128, 256)
SAME = 1e-4  # Marlin's sums are in no fixed order
BATCHES = ("none", "one", "mixed")


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the tables, writes JSON and a plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: our kernels compute something wrong.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    from benchmarks.harness.vllm_layers import VERSION, VLLMLoRALayer, one_process  # needs vLLM

    layer = LAYERS[args.layer]
    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    with torch.no_grad(), one_process(args.device):
        weights = random_weights(layer, args.device)[:2]
        adapters = _adapters(layer, args.adapters, args.rank, args.device)
        built: dict[str, VLLMLoRALayer] = {}
        for column in args.columns:
            try:
                built[column] = VLLMLoRALayer(layer, column, *weights, adapters, max(args.tokens))
            except Exception as error:  # whatever keeps vLLM from it: the reason is printed and saved
                if column == OURS:
                    raise
                notes[f"{column}: not run: {reason(error)}"] = None
        bar = progress_bar([(tokens, batch) for tokens in args.tokens for batch in BATCHES])
        for tokens, batch in bar:
            if tokens == 1 and batch == "mixed":
                continue
            rows.append(_row(layer, tokens, batch, built, weights, adapters, args, notes))
            if args.verbose:
                times = {column: f"{timing['median'] * 1e6:.1f} us" for column, timing in rows[-1]["seconds"].items()}
                tqdm.write(f"{tokens} {batch}: {times} {rows[-1]['relative_error']}")
        kernels = {column: each.kernel for column, each in built.items()}
    about = {"layer": layer.name, "adapters": args.adapters, "rank": args.rank, "vllm": VERSION, "kernels": kernels}
    path = save(STEM, args.device, rows, args.output, **about, tolerance=TOLERANCE, notes=list(notes))
    image = plot(
        path,
        rows,
        "tokens",
        panel=lambda row: {"none": "no adapter", "one": "one adapter", "mixed": "mixed adapters"}[row["batch"]],
        label=lambda column, row: column,
        baseline=args.baseline,
        title=f"{args.adapters} adapters of rank {args.rank}, {layer.name}, vLLM {VERSION}, {describe(args.device)}",
    )
    print(table(rows, ("tokens", "batch"), args.baseline), *notes, path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser(STEM, __doc__ or "", shapes=False)
    default = [column for column in COLUMNS if column != "vLLM Humming"]  # it has no adapters
    names = [name for name, layer in LAYERS.items() if layer.ranks == 1 and not layer.routing]
    result.add_argument("--layer", type=one_of(names), default=names[0], help="default: %(default)s")
    result.add_argument("--columns", type=comma_list(one_of(default)), default=default, help="default: all")
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help="default: %(default)s")
    result.add_argument("--adapters", type=positive, default=4, help="that are loaded (default: %(default)s)")
    result.add_argument(
        "--rank", type=int, choices=RANKS, default=16, help="of the adapters, as vLLM knows them (default: %(default)s)"
    )
    result.add_argument("--verbose", action="store_true", help="print each row when it is measured")
    args = result.parse_args(argv)
    if OURS not in args.columns:
        result.error(f"argument --columns: wanted {OURS} among them")
    args.baseline = BASELINE if BASELINE in args.columns and args.device.type == "cuda" else OURS
    return args


def _adapters(layer: ServedLayer, count: int, rank: int, device: torch.device) -> list[Any]:
    from benchmarks.harness.vllm_layers import Adapter

    generator = torch.Generator(device).manual_seed(2)
    experts, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size

    def random(n: int, k: int) -> Tensor:
        values = torch.randn(experts, n, k, device=device, generator=generator)
        return values.mul_(k**-0.5).to(torch.bfloat16)

    return [
        Adapter(
            (random(rank, h), random(rank, i), random(rank, h)), (random(i, rank), random(h, rank), random(i, rank))
        )
        for _ in range(count)
    ]


def _slots(tokens: int, batch: str, adapters: int) -> list[int]:
    """Return the adapter of each token, -1 for none."""
    if batch == "mixed":
        return [(7 * token) % (adapters + 1) - 1 for token in range(tokens)]
    return [0 if batch == "one" else -1] * tokens


def _row(
    layer: ServedLayer, tokens: int, batch: str, built: dict[str, Any], weights: Any, adapters: list[Any],
    args: argparse.Namespace, notes: dict[str, None],
) -> dict[str, Any]:  # fmt: skip
    """Checks every column, then times all of them interleaved."""
    from benchmarks.harness.vllm_layers import oracle

    generator = torch.Generator(args.device).manual_seed(1)
    kind: dict[str, Any] = dict(dtype=torch.bfloat16, device=args.device, generator=generator)
    hidden, logits = torch.randn(tokens, layer.hidden_size, **kind), torch.randn(tokens, layer.num_experts, **kind)
    slots = _slots(tokens, batch, len(adapters))
    factors, ids = built[OURS].chosen(hidden, logits)
    wanted = oracle(hidden, factors, ids, weights[0], weights[1], False, adapters, slots)
    functions: dict[str, Callable[[], Tensor]] = {}
    errors: dict[str, float] = {}
    for column, run in built.items():
        try:
            run.choose(slots)
            errors[column] = relative_error(run(hidden.clone(), logits), wanted)
            if batch == "mixed" and args.device.type == "cuda":
                _check_graph(run, hidden, logits, slots, f"{column}, {tokens} tokens")
        except Exception as error:  # as above
            if column == OURS:
                raise
            notes[f"{column}, {tokens} tokens, {batch}: not run: {reason(error)}"] = None
            errors.pop(column, None)
            continue
        functions[column] = partial(run, hidden, logits)
        if errors[column] > TOLERANCE:
            text = f"{column}, {tokens} tokens, {batch}: relative error {errors[column]:.2g}"
            if column == OURS:
                raise RuntimeError(f"{text}, wanted at most {TOLERANCE}")
            notes[f"{text}, timed all the same"] = None
    timings = measure(functions, device=args.device, rounds=args.rounds, budget=args.budget, slow=args.slow)
    return {
        "tokens": tokens,
        "batch": batch,
        **timed(timings, args.baseline if args.baseline in timings else OURS),
        "relative_error": errors,
    }


def _check_graph(run: Any, hidden: Tensor, logits: Tensor, slots: list[int], name: str) -> None:
    """Checks that a graph captured with other adapters of the tokens uses the adapters of its replay."""
    run.choose([0] * len(slots))
    run(hidden, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(hidden, logits)
    run.choose(slots)
    graph.replay()
    error = relative_error(out, run(hidden.clone(), logits))
    if error > SAME:
        raise RuntimeError(f"{name}: a CUDA graph with other adapters is {error:.2g} off a plain call")
