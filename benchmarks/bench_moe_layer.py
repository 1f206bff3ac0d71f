"""Times a Llama4MoE layer and its routed experts alone: eager and Thunder, bf16 and NVFP4, against tokens.
Called from the command line and by `make bench`; calls thunder_moe, Thunder, and timing, report and shapes beside it.

    eager bf16     the layer as it is
    eager nvfp4    after thunder_moe.quantize_
    thunder bf16   thunder.jit(layer, executors=[moe_executor]), forward only, with its experts left in 16 bits
    thunder nvfp4  the same call with a frozen layer, whose three expert GEMMs the executor rewrites

Thunder 0.2.6 cannot run torch._grouped_mm by itself, so "thunder bf16" is Thunder with the executor's own 16-bit
symbol: its expert weights require a gradient and gradients are enabled, which keeps them out of the rewrite. Its input
requires none, and only the forward is timed. `rewrite_report` has to confirm both Thunder columns, graph by graph.

Before anything is timed, NVFP4 is compared with eager dequantised weights (`dequantize_`) and Thunder's bf16 with eager
bf16; a wrong result ends the run.
"""

from __future__ import annotations

import argparse
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from report import comma_list, parser, plot, positive, relative_error, save, table, timed
from shapes import CPU_SHAPES, CUDA_SHAPES, MoEShape
from timing import measure
from torch import Tensor, nn
from tqdm import tqdm

from thunder_moe import (
    Llama4MoE,
    Llama4MoEConfig,
    RewriteWarning,
    dequantize_,
    moe_executor,  # before thunder, which it makes importable on new versions of torch
    quantize_,
    rewrite_report,
)

import thunder  # isort: skip

STEM = "bench_moe_layer"
BASELINE = "eager bf16"
PARTS = ("layer", "experts")
TOKENS = {"cpu": [1, 8, 32, 128, 1024], "cuda": [1, 8, 32, 128, 1024, 8192]}
# Relative Frobenius, bf16 against bf16 of the same weights in another order of roundings.
TOLERANCE = 1e-2
EXPERT_GEMMS = 3  # gate, up, down


@dataclass(frozen=True)
class Variant:
    """One column: a layer, what runs each of its `PARTS`, and whether its expert GEMMs are NVFP4."""

    layer: Llama4MoE
    run: dict[str, Callable[..., Tensor]]
    nvfp4: bool
    compiled: bool
    grad: bool = False

    @staticmethod
    def eager(layer: Llama4MoE, *, nvfp4: bool) -> Variant:
        return Variant(layer, {"layer": layer, "experts": layer.routed_experts}, nvfp4, compiled=False)

    @staticmethod
    def thunder(layer: Llama4MoE, *, nvfp4: bool) -> Variant:
        layer.requires_grad_(False).routed_experts.requires_grad_(not nvfp4)
        modules: dict[str, nn.Module] = {"layer": layer, "experts": layer.routed_experts}
        run = {part: thunder.jit(module, executors=[moe_executor]) for part, module in modules.items()}
        return Variant(layer, run, nvfp4, compiled=True, grad=not nvfp4)

    def __call__(self, part: str, *inputs: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.grad):
            return self.run[part](*inputs)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table, writes JSON and plot.

    Args:
        argv: command-line arguments, those of the process when None.

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
    with tqdm(total=len(args.shapes) * len(args.tokens) * len(args.parts), unit="row") as bar:
        for shape in args.shapes:
            bar.set_description(f"{shape.name} preparing")
            variants, exact = _variants(shape, device)
            weights[shape.name] = {
                "bf16": _nbytes(variants["eager bf16"].layer.routed_experts),
                "nvfp4": _nbytes(variants["eager nvfp4"].layer.routed_experts),
            }
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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    result = parser(__doc__ or "")
    result.add_argument("--tokens", type=comma_list(positive), help=f"comma-separated (default: {TOKENS})")
    result.add_argument("--parts", type=comma_list(_part), default=list(PARTS), help=f"of: {', '.join(PARTS)}")
    args = result.parse_args(argv)
    args.tokens = args.tokens or TOKENS[args.device.type]
    args.shapes = args.shapes or list(CUDA_SHAPES if args.device.type == "cuda" else CPU_SHAPES)
    return args


def _part(text: str) -> str:
    if text not in PARTS:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one of {', '.join(PARTS)}")
    return text


def _variants(shape: MoEShape, device: torch.device) -> tuple[dict[str, Variant], Variant]:
    """The columns, and the eager layer with dequantised weights that the NVFP4 ones are compared with."""
    torch.manual_seed(0)
    config = Llama4MoEConfig(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_shared_experts, shape.top_k
    )
    layer = Llama4MoE(config, dtype=torch.bfloat16, device=device)
    quantized = quantize_(copy.deepcopy(layer))
    variants = {
        "eager bf16": Variant.eager(layer, nvfp4=False),
        "thunder bf16": Variant.thunder(copy.deepcopy(layer), nvfp4=False),
        "eager nvfp4": Variant.eager(quantized, nvfp4=True),
        "thunder nvfp4": Variant.thunder(copy.deepcopy(layer), nvfp4=True),
    }
    return variants, Variant.eager(dequantize_(copy.deepcopy(quantized)), nvfp4=False)


def _inputs(layer: Llama4MoE, tokens: int, device: torch.device) -> dict[str, tuple[Tensor, ...]]:
    """Hidden states for the layer, and the rows and offsets that it gives its experts for them."""
    generator = torch.Generator(device).manual_seed(tokens)
    size = (1, tokens, layer.config.hidden_size)
    x = torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
    inputs: dict[str, tuple[Tensor, ...]] = {"layer": (x,)}
    hook = layer.routed_experts.register_forward_pre_hook(lambda _, args: inputs.update(experts=args))
    with torch.no_grad():
        layer(x)
    hook.remove()
    return inputs


def _run(
    part: str, inputs: tuple[Tensor, ...], variants: dict[str, Variant], exact: Variant, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, float]]:
    """Compiles and checks every variant, then times them side by side."""
    wanted = {True: exact(part, *inputs), False: variants[BASELINE](part, *inputs)}
    errors = {}
    for name, variant in variants.items():
        with warnings.catch_warnings():
            if variant.compiled and not variant.nvfp4:
                warnings.simplefilter("ignore", RewriteWarning)  # nothing rewritten is what this column wants
            out = variant(part, *inputs)
        if variant.compiled:
            _check_rewrite(name, variant, part)
        errors[name] = relative_error(out, wanted[variant.nvfp4])
        if errors[name] > TOLERANCE:
            what = f"{part} {tuple(inputs[0].shape)}"
            raise RuntimeError(
                f"{name!r} is wrong: relative error {errors[name]:.2g} on {what}, wanted at most {TOLERANCE}"
            )
    functions = {name: functools.partial(variant, part, *inputs) for name, variant in variants.items()}
    timings = measure(functions, device=args.device, rounds=args.rounds, budget=args.budget, slow=args.slow)
    return timed(timings, BASELINE), errors


def _check_rewrite(name: str, variant: Variant, part: str) -> None:
    """RuntimeError unless the newest graph has all its expert GEMMs in NVFP4, or none."""
    report = rewrite_report(variant.run[part])
    newest = [entry for entry in report if entry.graph == max(entry.graph for entry in report)]
    rewritten = sum(entry.rewritten for entry in newest)
    if len(newest) != EXPERT_GEMMS or rewritten != (EXPERT_GEMMS if variant.nvfp4 else 0):
        wanted = "all" if variant.nvfp4 else "none"
        raise RuntimeError(f"{name!r}: wanted {wanted} of {EXPERT_GEMMS} expert GEMMs in NVFP4, compiled was\n{report}")


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


if __name__ == "__main__":
    main()
