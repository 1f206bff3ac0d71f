"""Times a Llama4MoE layer and its routed experts alone by tokens: eager, Thunder, torch.compile; bf16 and NVFP4.
Called by `python -m benchmarks layer` and `make bench`; calls thunder_moe, Thunder and benchmarks/harness.

    eager bf16     the layer unchanged
    eager nvfp4    after thunder_moe.quantize_
    thunder bf16   thunder.jit(layer, executors=[moe_executor]), forward only, its experts stay in 16 bits
    thunder nvfp4  the same call with a frozen layer, whose three expert GEMMs the executor rewrites
    compile bf16   torch.compile(layer), frozen
    compile nvfp4  torch.compile(layer, backend="thunder_moe"), frozen: three expert GEMMs rewritten
    quantize_ + compile  torch.compile of the layer after quantize_: routing, gather and combine in its operators

Thunder 0.2.6 cannot run torch._grouped_mm by itself, so "thunder bf16" is Thunder with the executor's own 16-bit
symbol: its expert weights require a gradient and gradients are enabled, which keeps them out of the rewrite. Its input
does not require a gradient, and only the forward is timed. `rewrite_report` has to confirm both Thunder columns and
"compile nvfp4", graph by graph.

torch.compile makes one graph for all token counts but 1, which torch specializes on. On CUDA it runs with
mode="reduce-overhead": it replays CUDA graphs of its own, which are timed as plain calls ("own graph") after a
flush; the benchmark captures the other columns. `python -m benchmarks compile` measures the host's part of a replay.

Before anything is timed, NVFP4 is compared with eager dequantized weights (`dequantize_`) and bf16 with eager bf16; a
wrong result ends the run.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.layers import EXPERT_GEMMS, TOLERANCE, Variant, build, check, hidden_states
from benchmarks.harness.report import comma_list, one_of, parser, plot, positive, save, table, timed
from benchmarks.harness.shapes import CPU_SHAPES, CUDA_SHAPES, MoEShape
from benchmarks.harness.timing import measure
from thunder_moe import (
    Llama4MoE,
    dequantize_,
    moe_executor,  # before thunder, which it makes importable on new versions of torch
    quantize_,
)
from thunder_moe.progress import progress_bar

import thunder  # isort: skip

STEM = "layer"
BASELINE = "eager bf16"
PARTS = ("layer", "experts")
TOKENS = {"cpu": [1, 8, 32, 128, 1024], "cuda": [1, 8, 32, 128, 1024, 8192]}


def _thunder(layer: Llama4MoE, *, nvfp4: bool) -> Variant:
    layer.requires_grad_(False).routed_experts.requires_grad_(not nvfp4)
    modules: dict[str, nn.Module] = {"layer": layer, "experts": layer.routed_experts}
    run = {part: thunder.jit(module, executors=[moe_executor]) for part, module in modules.items()}
    return Variant(layer, run, nvfp4, rewritten=EXPERT_GEMMS if nvfp4 else 0, grad=not nvfp4)


# name -> makes the column from a copy of the bf16 layer, which it may change, and from the quantized layer.
COLUMNS: dict[str, Callable[[Llama4MoE, Llama4MoE], Variant]] = {
    BASELINE: lambda layer, _: Variant.eager(layer, nvfp4=False),
    "thunder bf16": lambda layer, _: _thunder(layer, nvfp4=False),
    "compile bf16": lambda layer, _: Variant.compile(layer, nvfp4=False, dynamic=True),
    "eager nvfp4": lambda _, quantized: Variant.eager(quantized, nvfp4=True),
    "thunder nvfp4": lambda layer, _: _thunder(layer, nvfp4=True),
    "compile nvfp4": lambda layer, _: Variant.compile(layer, nvfp4=True, backend="thunder_moe", dynamic=True),
    "quantize_ + compile": lambda _, quantized: Variant.compile(quantized, nvfp4=True, dynamic=True),
}


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and plot.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        RuntimeError: a variant computes something wrong, or was not compiled to what its column says.
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    device: torch.device = args.device
    rows: list[dict[str, Any]] = []
    weights: dict[str, dict[str, int]] = {}
    with progress_bar(total=len(args.shapes) * len(args.tokens) * len(args.parts), unit="row") as bar:
        for shape in args.shapes:
            bar.set_description(f"{shape.name} preparing")
            variants, exact, weights[shape.name] = _variants(shape, args.columns, device)
            for tokens in args.tokens:
                inputs = _inputs(variants[BASELINE].layer, tokens, device)
                for part in args.parts:
                    bar.set_description(f"{shape.name} {part} {tokens}")
                    timings, errors = _run(part, inputs[part], variants, exact, args)
                    rows.append(
                        {"shape": shape.name, "part": part, "tokens": tokens, **timings, "relative_error": errors}
                    )
                    bar.update()
            del variants, exact
    path = save(STEM, device, rows, args.output, tolerance=TOLERANCE, expert_weight_bytes=weights)
    image = plot(
        path,
        rows,
        "tokens",
        panel=lambda row: f"{row['shape']}, {row['part']}",
        label=lambda name, row: name,
        baseline=BASELINE,
        title=f"MoE layer and its routed experts, {device.type}",
    )
    print(table(rows, ("shape", "part", "tokens"), BASELINE))
    for name, size in weights.items():
        bf16, nvfp4 = (f"{size[dtype] / 1e6:.1f} MB in {dtype}" for dtype in ("bf16", "nvfp4"))
        print(f"{name}: expert weights {bf16}, {nvfp4}, {size['bf16'] / size['nvfp4']:.2f} times less")
    print(path, image, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("layer", __doc__ or "")
    result.add_argument("--tokens", type=comma_list(positive), help=f"comma-separated (default: {TOKENS})")
    result.add_argument("--parts", type=comma_list(one_of(PARTS)), default=list(PARTS), help=f"of: {', '.join(PARTS)}")
    result.add_argument(
        "--columns",
        type=comma_list(one_of(COLUMNS)),
        default=list(COLUMNS),
        help=f"of: {', '.join(COLUMNS)} (default: all; {BASELINE} always takes part)",
    )
    args = result.parse_args(argv)
    args.columns = [name for name in COLUMNS if name == BASELINE or name in args.columns]
    args.tokens = args.tokens or TOKENS[args.device.type]
    args.shapes = args.shapes or list(CUDA_SHAPES if args.device.type == "cuda" else CPU_SHAPES)
    return args


def _variants(
    shape: MoEShape, columns: Sequence[str], device: torch.device
) -> tuple[dict[str, Variant], Variant, dict[str, int]]:
    """Return the columns, the eager layer of dequantized weights (NVFP4's reference), and the experts' bytes."""
    torch.compiler.reset()  # or the graphs of all shapes add up to torch's recompile limit
    layer = build(shape, device)
    quantized = quantize_(copy.deepcopy(layer))
    variants = {name: COLUMNS[name](copy.deepcopy(layer), quantized) for name in columns}
    size = {"bf16": _nbytes(layer.routed_experts), "nvfp4": _nbytes(quantized.routed_experts)}
    return variants, Variant.eager(dequantize_(copy.deepcopy(quantized)), nvfp4=False), size


def _inputs(layer: Llama4MoE, tokens: int, device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """Hidden states for the layer, and the sorted rows and offsets that it passes to its experts for them."""
    x = hidden_states(layer, tokens, device)
    inputs: dict[str, tuple[Tensor, ...]] = {"layer": (x,)}
    hook = layer.routed_experts.register_forward_pre_hook(lambda _, args: inputs.update(experts=args))
    with torch.no_grad():
        layer(x)
    hook.remove()
    return inputs


def _run(
    part: str, inputs: tuple[Tensor, ...], variants: dict[str, Variant], exact: Variant, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, float]]:
    """Compiles and checks every variant, then times them interleaved."""
    wanted = {True: exact(part, *inputs), False: variants[BASELINE](part, *inputs)}
    errors = {name: check(name, variant, part, inputs, wanted[variant.nvfp4]) for name, variant in variants.items()}
    functions = {name: functools.partial(variant, part, *inputs) for name, variant in variants.items()}
    own_graphs = [name for name, variant in variants.items() if variant.own_graphs]
    timings = measure(
        functions,
        device=args.device,
        rounds=args.rounds,
        min_rounds=min(3, args.rounds),
        budget=args.budget,
        slow=args.slow,
        own_graphs=own_graphs,
    )
    return timed(timings, BASELINE), errors


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
