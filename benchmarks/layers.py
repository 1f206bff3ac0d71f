"""The columns of the layer benchmarks: a Llama4MoE layer and what runs it, checked before anything is timed.
Called by bench_moe_layer.py and bench_compile_overhead.py; calls thunder_moe and torch.compile, and report beside it.

On CUDA torch.compile runs with mode="reduce-overhead": it captures CUDA graphs of its own, in three calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import relative_error
from shapes import MoEShape
from torch import Tensor, nn

from thunder_moe import Llama4MoE, Llama4MoEConfig, RewriteWarning, rewrite_report

__all__ = ["EXPERT_GEMMS", "TOLERANCE", "Variant", "build", "check", "hidden_states"]

# Relative Frobenius, bf16 against bf16 of the same weights in another order of roundings.
TOLERANCE = 1e-2
EXPERT_GEMMS = 3  # gate, up, down


@dataclass(frozen=True)
class Variant:
    """One column.

    Attributes:
        layer: whose weights it runs with.
        run: "layer" and "experts" -> what runs that part.
        nvfp4: whether its expert GEMMs read NVFP4 weights.
        rewritten: how many of them `rewrite_report` has to call rewritten; None when no rewrite takes part.
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
        """The frozen layer under torch.compile; nvfp4 with "inductor" means that quantize_ has swapped its experts."""
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
            torch.compiler.cudagraph_mark_step_begin()  # its next output may lie where the last one lay
        with torch.set_grad_enabled(self.grad):
            return self.run[part](*inputs)


def build(shape: MoEShape, device: torch.device) -> Llama4MoE:
    """The layer of a shape in bf16, with the same random weights each time."""
    torch.manual_seed(0)
    config = Llama4MoEConfig(
        shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.num_shared_experts, shape.top_k
    )
    return Llama4MoE(config, dtype=torch.bfloat16, device=device)


def hidden_states(layer: Llama4MoE, tokens: int, device: torch.device) -> Tensor:
    """bf16 (1, tokens, H)."""
    generator = torch.Generator(device).manual_seed(tokens)
    size = (1, tokens, layer.config.hidden_size)
    return torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)


def check(name: str, variant: Variant, part: str, inputs: tuple[Tensor, ...], wanted: Tensor) -> float:
    """Calls a variant until it is compiled and captured, and compares its last output.

    Returns:
        The relative error.

    Raises:
        RuntimeError: it computes something else than `wanted`, or was not compiled to what its column says.
    """
    with warnings.catch_warnings():
        if variant.rewritten == 0:
            warnings.simplefilter("ignore", RewriteWarning)  # nothing rewritten is what this column wants
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
