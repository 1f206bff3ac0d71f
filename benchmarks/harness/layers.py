"""Variants of a Llama4MoE layer (eager or compiled, bf16 or NVFP4) and the check of their results before timing.
Called by suites/{layer,compile,nvfuser}.py; calls thunder_moe, torch.compile and harness/report.py.

On CUDA torch.compile runs with mode="reduce-overhead": it captures CUDA graphs of its own, in three calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.harness.report import relative_error
from benchmarks.harness.shapes import MoEShape
from thunder_moe import Llama4MoE, Llama4MoEConfig, RewriteWarning, register, rewrite_report

register("torch")  # the backend "thunder_moe"

__all__ = ["EXPERT_GEMMS", "TOLERANCE", "Variant", "build", "check", "hidden_states"]

# Relative Frobenius, bf16 against bf16 of the same weights in another order of roundings.
TOLERANCE = 1e-2
EXPERT_GEMMS = 3  # gate, up, down


@dataclass(frozen=True)
class Variant:
    """One column of a benchmark.

    Attributes:
        layer: the layer whose weights it reads.
        run: "layer" and "experts" -> the function that runs that part.
        nvfp4: whether its expert GEMMs read NVFP4 weights.
        rewritten: how many of them `rewrite_report` has to report as rewritten; None without a rewrite.
        grad: whether it runs with gradients enabled.
        own_graphs: whether it replays CUDA graphs of its own.
    """

    layer: Llama4MoE
    run: dict[str, Callable[..., Tensor]]
    nvfp4: bool
    rewritten: int | None = None
    grad: bool = False
    own_graphs: bool = False

    @staticmethod
    def eager(layer: Llama4MoE, *, nvfp4: bool) -> Variant:
        return Variant(layer, {"layer": layer, "experts": layer.routed_experts}, nvfp4)

    @staticmethod
    def compile(layer: Llama4MoE, *, nvfp4: bool, backend: str = "inductor", dynamic: bool | None = None) -> Variant:
        """Return the frozen layer compiled; nvfp4 with "inductor" means that quantize_ has swapped its experts."""
        layer.requires_grad_(False)
        on_cuda = next(layer.parameters()).is_cuda
        mode = "reduce-overhead" if on_cuda else None
        modules: dict[str, nn.Module] = {"layer": layer, "experts": layer.routed_experts}
        run: dict[str, Callable[..., Tensor]] = {
            part: torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic, mode=mode)
            for part, module in modules.items()
        }
        return Variant(layer, run, nvfp4, EXPERT_GEMMS if backend == "thunder_moe" else None, own_graphs=on_cuda)

    def __call__(self, part: str, *inputs: Tensor) -> Tensor:
        if self.own_graphs:
            next_output_may_reuse_memory: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin
            next_output_may_reuse_memory()
        with torch.set_grad_enabled(self.grad):
            return self.run[part](*inputs)


def build(shape: MoEShape, device: torch.device) -> Llama4MoE:
    """Return the layer of a shape in bf16; its random weights are the same at each call."""
    torch.manual_seed(0)
    config = Llama4MoEConfig(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_shared_experts, shape.top_k
    )
    return Llama4MoE(config, dtype=torch.bfloat16, device=device)


def hidden_states(layer: Llama4MoE, tokens: int, device: torch.device) -> Tensor:
    """Return bf16 (1, tokens, H), of tokens whose experts are clear.

    Where the last expert that is chosen and the next one have the same logit in bf16, `topk` and `moe_router` may
    choose differently, and both are right.
    """
    generator = torch.Generator(device).manual_seed(tokens)
    size = (2 * tokens + 64, layer.config.hidden_size)
    x = torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
    with torch.no_grad():
        logits = layer.router(x).sort(dim=-1, descending=True).values
    last = layer.config.top_k - 1
    clear = (logits[:, last] != logits[:, last + 1]).nonzero().flatten()
    assert len(clear) >= tokens, f"{len(clear)} of {len(x)} tokens have clear experts, wanted {tokens}"
    return x[clear[:tokens]].unsqueeze(0)


def check(name: str, variant: Variant, part: str, inputs: tuple[Tensor, ...], wanted: Tensor) -> float:
    """Calls a variant until it is compiled and captured, and compares its last output.

    Returns:
        The relative error.

    Raises:
        RuntimeError: its output differs from `wanted`, or its rewrite report is not what its column says.
    """
    with warnings.catch_warnings():
        if variant.rewritten == 0:
            warnings.simplefilter("ignore", RewriteWarning)  # this column wants nothing rewritten
        for _ in range(3 if variant.own_graphs else 1):
            out = variant(part, *inputs)
    if variant.rewritten is not None:
        _check_rewrite(name, variant.run[part], variant.rewritten)
    error = relative_error(out, wanted)
    if error > TOLERANCE:
        what = f"{part} {tuple(inputs[0].shape)}"
        raise RuntimeError(f"{name!r} is wrong: relative error {error:.2g} on {what}, wanted at most {TOLERANCE}")
    return error


def _check_rewrite(name: str, compiled: Callable[..., Tensor], wanted: int) -> None:
    report = rewrite_report(compiled)
    newest = [entry for entry in report if entry.graph == max(entry.graph for entry in report)]
    rewritten = sum(entry.rewritten for entry in newest)
    if len(newest) != EXPERT_GEMMS or rewritten != wanted:
        raise RuntimeError(f"{name!r}: wanted {wanted} of {EXPERT_GEMMS} expert GEMMs in NVFP4, compiled was\n{report}")
