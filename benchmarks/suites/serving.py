"""Times vLLM's routed MoE layer, router to weighted sum, with vLLM's kernels for NVFP4 or MXFP8 experts and with ours.
Called by `python -m benchmarks serving`, which needs vLLM; calls benchmarks/harness.

    thunder_moe   the plugin's experts
    vLLM Marlin   vLLM with --moe-backend marlin
    vLLM Humming  vLLM with --moe-backend humming, if humming-kernels is installed: vLLM 0.32's choice on Hopper
    vLLM bf16     vLLM's own choice for 16-bit experts

All of them run in vLLM's own layer (FusedMoEFactory), with its router, on the same weights; on CUDA in CUDA graphs.
Before anything is timed, each result is compared with an fp32 loop over experts. A kernel that cannot run a layer, or
gives other numbers, is named below the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.harness.report import comma_list, one_of, parser, plot, positive, relative_error, save, table, timed
from benchmarks.harness.served import COLUMNS, LAYERS, ServedLayer
from benchmarks.harness.timing import describe, measure
from thunder_moe.formats.registry import FORMATS
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.kernels.select import quantize_to
from thunder_moe.progress import progress_bar

STEM = "serving"
OURS = "thunder_moe"
BASELINE = "vLLM Marlin"  # on a GPU: it runs all layers
TOKENS = [2**power for power in range(14)]
# Relative Frobenius of a layer in bf16 against fp32: roundings of two GEMMs, an activation and sums.
TOLERANCE = 8e-3


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
    from benchmarks.harness.vllm_layers import VERSION, VLLMLayer, one_process  # needs vLLM

    stem = STEM if args.format == "nvfp4" else f"{STEM}_{args.format}"
    rows: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    kernels: dict[str, set[str]] = {}
    with (
        torch.no_grad(),
        one_process(args.device),
        progress_bar(total=len(args.layers) * len(args.tokens), unit="row") as bar,
    ):
        for name in args.layers:
            layer = LAYERS[name]
            gate_up, down, correction = random_weights(layer, args.device, args.format)
            built = {}
            for column in args.columns:
                bar.set_description(f"{name}: building {column}")
                try:
                    built[column] = VLLMLayer(layer, column, gate_up, down, correction)
                except Exception as error:  # whatever keeps vLLM from it: the reason is printed and saved
                    if column == OURS:
                        raise
                    notes[f"{column}, {name}: not run: {reason(error)}"] = None
                else:
                    kernels.setdefault(column, set()).add(built[column].kernel)
            for tokens in args.tokens:
                bar.set_description(f"{name} {tokens}")
                row = _row(layer, tokens, built, (gate_up, down), args, notes)
                rows.append(row)
                if args.verbose:
                    times = {column: f"{timing['median'] * 1e6:.1f} us" for column, timing in row["seconds"].items()}
                    tqdm.write(f"{name} {tokens}: {times} errors {row['relative_error']}")
                bar.update()
            del built, gate_up, down
            # After each layer: a run that ends early leaves what it has measured.
            more = {
                "vllm": VERSION,
                "kernels": {column: sorted(names) for column, names in kernels.items()},
                "tolerance": TOLERANCE,
                "summary": _means(rows, args.tokens),
                "notes": list(notes),
            }
            path = save(stem, args.device, rows, args.output, **more)
    baseline = args.baseline if any(args.baseline in row["seconds"] for row in rows) else OURS
    image = plot(
        path,
        rows,
        "tokens",
        panel=lambda row: row["layer"],
        label=lambda column, row: column,
        baseline=baseline,
        title=f"A routed MoE layer of vLLM {VERSION}, {args.format.upper()} experts, {describe(args.device)}",
    )
    print(table(rows, ("layer", "tokens"), baseline))
    print("", table(_means(rows, args.tokens), ("tokens",), baseline, of="geometric means over the layers"), sep="\n")
    print(*notes, path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("serving", __doc__ or "", shapes=False)
    result.add_argument("--layers", type=comma_list(one_of(LAYERS)), default=list(LAYERS), help="default: all")
    result.add_argument("--columns", type=comma_list(one_of(COLUMNS)), default=list(COLUMNS), help="default: all")
    result.add_argument(
        "--format", type=one_of(FORMATS), default="nvfp4", help=f"of: {', '.join(FORMATS)} (default: %(default)s)"
    )
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help="default: %(default)s")
    result.add_argument("--verbose", action="store_true", help="print each row when it is measured")
    args = result.parse_args(argv)
    if OURS not in args.columns:
        result.error(f"argument --columns: wanted {OURS} among them")
    args.baseline = BASELINE if BASELINE in args.columns and args.device.type == "cuda" else OURS
    return args


def random_weights(
    layer: ServedLayer, device: torch.device, format: str = "nvfp4"
) -> tuple[PackedWeight, PackedWeight, Tensor | None]:
    """Random gate_up (E, 2I, H), in NVFP4 with one global scale per expert, as vLLM's kernels need it, down and a
    correction."""
    generator = torch.Generator(device).manual_seed(0)
    experts, h, i = layer.local_experts, layer.hidden_size, layer.intermediate_size

    def packed(n: int, k: int) -> PackedWeight:
        parts = []
        for _ in range(experts):  # one at a time: 16-bit weights of a layer take gigabytes
            weight = torch.randn(1, n, k, dtype=torch.bfloat16, device=device, generator=generator)
            parts.append(quantize_to(format, weight.mul_(k**-0.5)).tensors())
        tensors = []
        for own in zip(*parts, strict=True):  # torch concatenates no E8M0
            bits = [each.view(torch.uint8) if each.itemsize == 1 else each for each in own]
            tensors.append(torch.cat(bits).view(own[0].dtype))
        whole: PackedWeight = WEIGHTS[format](*tensors, "linear")
        return whole

    correction = None
    if layer.corrected:
        correction = torch.randn(layer.num_experts, device=device, generator=generator).mul_(0.1)
    return packed(2 * i, h), packed(h, i), correction


def _row(
    layer: ServedLayer,
    tokens: int,
    built: dict[str, Any],
    weights: tuple[PackedWeight, PackedWeight],
    args: argparse.Namespace,
    notes: dict[str, None],
) -> dict[str, Any]:
    """Checks every column, then times all of them interleaved."""
    from benchmarks.harness.vllm_layers import oracle

    device = args.device
    generator = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(tokens, layer.hidden_size, dtype=torch.bfloat16, device=device, generator=generator)
    logits = torch.randn(tokens, layer.num_experts, dtype=torch.bfloat16, device=device, generator=generator)
    on_input = bool(layer.routing.get("apply_router_weight_on_input"))
    factors, ids = built[OURS].chosen(hidden, logits)
    wanted = oracle(hidden, factors, ids, *weights, on_input)
    functions: dict[str, Callable[[], Tensor]] = {}
    errors: dict[str, float] = {}
    for column, run in built.items():
        try:
            errors[column] = relative_error(run(hidden.clone(), logits), wanted)
        except Exception as error:  # as above
            if column == OURS:
                raise
            notes[f"{column}, {layer.name}: not run: {reason(error)}"] = None
            continue
        functions[column] = partial(run, hidden, logits)
        if errors[column] > TOLERANCE:
            text = f"{column}, {layer.name}, {tokens} tokens: relative error {errors[column]:.2g}"
            if column == OURS:
                raise RuntimeError(f"{text}, wanted at most {TOLERANCE}")
            notes[f"{text}, timed all the same"] = None
    timings = measure(functions, device=device, rounds=args.rounds, budget=args.budget, slow=args.slow)
    return {
        "layer": layer.name,
        "tokens": tokens,
        **timed(timings, args.baseline if args.baseline in timings else OURS),
        "relative_error": errors,
    }


def _means(rows: Sequence[dict[str, Any]], tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Geometric means over the layers that a column ran in."""
    means = []
    for count in tokens:
        own = [row["times_faster"] for row in rows if row["tokens"] == count]
        columns = dict.fromkeys(column for ratios in own for column in ratios)
        ratios = {column: geometric_mean([ratio[column] for ratio in own if column in ratio]) for column in columns}
        means.append({"tokens": count, "times_faster": ratios})
    return means


def reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300] or type(error).__name__
