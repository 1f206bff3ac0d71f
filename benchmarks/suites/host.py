"""Times what one call costs the host: each operator beside torch's grouped GEMM, and eager Hugging Face layers.
Called by `python -m benchmarks host`; calls thunder_moe's operators, quantize_, transformers and benchmarks/harness.

A fast device waits for the host at batch 1, so this time, not the kernels' time, decides how fast an eager model
is. On CUDA calls are only launched, in groups that fit the device's queue, and their launches are timed. On a CPU the
kernels run within the call; sizes are tiny there, so that the kernels take little of the time.

    operators   torch._grouped_mm, and the operators of thunder_moe on the layer's operands
    gradient    the same with an input that requires one
    experts     the experts of a Qwen3-MoE block: transformers' "grouped_mm", its "batched_mm", with which generate
                decodes on a GPU, and after quantize_
    block       the whole block with its router
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.report import aligned, comma_list, parser, positive, save
from benchmarks.harness.shapes import SHAPES, MoEShape
from thunder_moe import quantize_
from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels.select import lay_out, quantize
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.progress import progress_bar

STEM = "host"
BASELINE = "torch._grouped_mm"
TOKENS = [1, 32]
TINY = MoEShape("tiny", 64, 32, 8, 2)
CALLS = 40  # launched between two synchronizations: far fewer kernels than a device's queue holds


def main(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the benchmark; prints the table and writes JSON.

    Args:
        argv: the arguments behind the subcommand.

    Returns:
        The rows of the JSON.

    Raises:
        SystemExit: bad arguments.
    """
    args = _arguments(argv)
    rows: list[dict[str, Any]] = []
    with progress_bar(total=len(args.shapes) * len(args.tokens), unit="row") as bar:
        for shape in args.shapes:
            block = _block(shape, args.device)
            blocks = {
                "bf16": block,
                "bf16 batched_mm": _block(shape, args.device, "batched_mm"),
                "quantize_": quantize_(copy.deepcopy(block)),
            }
            for tokens in args.tokens:
                bar.set_description(f"{shape.name} {tokens}")
                calls = _operators(shape, tokens, args.device) | _layers(blocks, shape, tokens, args.device)
                times = _host_times(calls, args.device, args.rounds)
                rows += [
                    {"shape": shape.name, "tokens": tokens, "call": name, "microseconds": microseconds}
                    for name, microseconds in times.items()
                ]
                bar.update()
            del block, blocks
    path = save(STEM, args.device, rows, args.output, calls=CALLS)
    print(_table(rows), path, sep="\n")
    return rows


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    result = parser("host", __doc__ or "", limits=False)
    result.add_argument("--tokens", type=comma_list(positive), default=TOKENS, help=f"(default: {TOKENS})")
    args = result.parse_args(argv)
    args.shapes = args.shapes or ([SHAPES["qwen3-30b-a3b"]] if args.device.type == "cuda" else [TINY])
    return args


def _operators(shape: MoEShape, tokens: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Calls of the operators on a layer's operands."""
    ops, bf16 = torch.ops.thunder_moe, torch.bfloat16
    weights = []
    for which in ("gate_up", "down"):
        _, n, k = shape.gemm(which)
        plain = torch.randn(shape.num_experts, n, k, dtype=bf16, device=device)
        weights.append((plain, lay_out(quantize(plain), "auto")))
    (plain, gate_up), (_, down) = weights
    logits = torch.randn(tokens, shape.num_experts, device=device)
    scores, ids = logits.softmax(-1).topk(shape.top_k)
    row_slot, offsets, slot_row = ops.moe_route(ids, shape.num_experts)
    x = torch.randn(tokens, shape.hidden_size, dtype=bf16, device=device)
    gathered = x.repeat_interleave(shape.top_k, 0)
    inner = torch.randn(tokens * shape.top_k, shape.intermediate_size, dtype=bf16, device=device)
    grad = torch.randn(tokens * shape.top_k, gate_up.shape[1], dtype=bf16, device=device)
    learned = gathered.clone().requires_grad_()
    transposed = plain.transpose(1, 2)
    first, second = _packed(gate_up), _packed(down)

    def no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
        return torch.no_grad()(call)

    def with_backward(call: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: call().backward(grad, inputs=[learned])

    gemm, dgrad = ops.f16a_nvfp4weight_scaled_grouped_mm, ops.f16a_nvfp4weight_scaled_grouped_mm_dgrad
    swiglu, combine = ops.f16a_nvfp4weight_grouped_swiglu, ops.f16a_nvfp4weight_grouped_mm_combine
    return {
        BASELINE: lambda: torch._grouped_mm(gathered, transposed, offsets),
        "scaled_grouped_mm": lambda: gemm(gathered, *first[0], offsets, **first[1]),
        "grouped_swiglu": lambda: swiglu(x, *first[0], offsets, row_slot, **first[1]),
        "grouped_mm_combine": lambda: combine(inner, *second[0], offsets, slot_row, scores, **second[1]),
        "moe_route": lambda: ops.moe_route(ids, shape.num_experts),
        "scaled_grouped_mm_dgrad": lambda: dgrad(grad, *first[0], offsets, **first[1]),
        "gradient: torch._grouped_mm": with_backward(lambda: torch._grouped_mm(learned, transposed, offsets)),
        "gradient: scaled_grouped_mm": with_backward(lambda: gemm(learned, *first[0], offsets, **first[1])),
    }


def _packed(weight: NVFP4Weight) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the weight's arguments of an operator: positional and by keyword."""
    return operands(weight), dict(layout=weight.layout)


def _block(shape: MoEShape, device: torch.device, implementation: str = "grouped_mm") -> nn.Module:
    """Return a Qwen3-MoE block of transformers with random bf16 weights, and one of its implementations of experts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    with torch.device(device):
        block: nn.Module = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return block.eval().requires_grad_(False)


def _layers(
    blocks: dict[str, nn.Module], shape: MoEShape, tokens: int, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """Calls of the experts of blocks, and of the blocks."""
    x = torch.randn(1, tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    scores, ids = torch.randn(tokens, shape.num_experts, device=device).softmax(-1).topk(shape.top_k)
    scores = scores.to(torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {}
    for name, module in blocks.items():
        calls[f"experts: {name}"] = torch.no_grad()(lambda experts=module.experts: experts(x[0], ids, scores))
    for name, module in blocks.items():
        calls[f"block: {name}"] = torch.no_grad()(lambda module=module: module(x))
    return calls


def _host_times(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds of the host for one call, the median and the least of rounds, the calls in turn."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                finish()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                found[name].append((time.perf_counter() - start) / CALLS)
                finish()
    finally:
        gc.enable()
    return {
        name: {"median": 1e6 * statistics.median(times), "least": 1e6 * min(times)} for name, times in found.items()
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [["shape", "tokens", "call", "host [us]", "x of the first"]]
    for row in rows:
        prefix = row["call"].partition(": ")[0] + ": " if ": " in row["call"] else ""
        like = [r for r in rows if (r["shape"], r["tokens"]) == (row["shape"], row["tokens"])]
        first = next(r for r in like if r["call"].startswith(prefix))
        median = row["microseconds"]["median"]
        ratio = median / first["microseconds"]["median"]
        cells.append([row["shape"], str(row["tokens"]), row["call"], f"{median:.1f}", f"{ratio:.2f}"])
    return aligned(cells)
