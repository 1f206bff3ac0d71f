"""Measures what a conversion has changed: the output of each quantized module, and the divergence of the whole model.
Called by the command line (`convert --report`) and users; calls quantization to find the modules, divergence, and
matplotlib for the plot.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.quantization.choose import walk
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import families_of
from thunder_moe.selection import shortened
from thunder_moe.tools.divergence import Divergence, divergence_table, measure_divergence


@dataclass(frozen=True)
class ConversionReport:
    """Holds what a conversion has changed; prints as a table.

    Attributes:
        modules: name of each quantized module -> the mean over the windows of ||output - 16-bit output|| / ||16-bit
            output|| (Frobenius), and its standard error. Both modules get the inputs of the 16-bit model. In place of
            Llama 4's experts, which take other inputs in 16 bits, it is the layer that calls them.
        divergence: of the whole model.
        windows, length: of the text.
    """

    modules: dict[str, tuple[float, float]]
    divergence: Divergence
    windows: int
    length: int

    def __str__(self) -> str:
        width = max(len("module"), *(len(name) for name in self.modules))
        lines = [f"{'module':{width}}  {'output error':>16}"]
        lines += [f"{name:{width}}  {mean:>7.3%} ({error:.3%})" for name, (mean, error) in self.modules.items()]
        return "\n".join([*lines, divergence_table([self.divergence])])

    def save(self, path: str | Path, **more: Any) -> None:
        """Writes the numbers as JSON, with more of them by name."""
        Path(path).write_text(json.dumps({**more, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draws the errors of the modules with standard errors.

        Raises:
            ImportError: matplotlib is missing.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(6.0, min(16.0, 2 + 0.25 * len(self.modules))), 4.2), layout="constrained")
        axes = figure.subplots()
        means, errors = zip(*self.modules.values(), strict=True)
        axes.errorbar(range(len(means)), [100 * x for x in means], [100 * x for x in errors], fmt="o", ms=4, capsize=2)
        axes.set(xlabel="quantized module", ylabel="output error (%)", ylim=(0, None))
        (kl, its_error), (agreement, _) = self.divergence.kl, self.divergence.agreement
        axes.set_title(f"KL {kl:.6f} ({its_error:.6f}) nats per token, same top-1 token {agreement:.2%}", fontsize=10)
        figure.savefig(path, dpi=150)


@torch.no_grad()
def measure_conversion(
    reference: nn.Module, converted: nn.Module, windows: Tensor, *, progress: bool = False
) -> ConversionReport:
    """Compares a quantized model with its 16-bit one on held-out text, as a whole and module by module.

    Args:
        reference: the 16-bit model, as in `measure_divergence`, on the device of the other.
        converted: the same model after `quantize_` or `calibrate_`, or from a converted checkpoint.
        windows: as in `measure_divergence`.
        progress: show a bar.

    Raises:
        ValueError: as `measure_divergence`, or `converted` has no quantized module, or `reference` lacks its name or
            has it quantized.
    """
    ratios: dict[str, list[Tensor]] = defaultdict(list)
    quantized = _quantized(converted)
    if not quantized:
        raise ValueError(f"converted: found no quantized modules in {type(converted).__name__}, nothing to compare")
    if both := [name for name in _quantized(reference) if name in quantized]:
        raise ValueError(f"reference: got a model whose {shortened(both)} are quantized, wanted the 16-bit model")

    def compare(other: nn.Module, name: str, _: nn.Module, args: Any, options: Any, output: Any) -> None:
        result = other(*args, **options)
        if isinstance(output, tuple):  # with the logits of the router
            output, result = output[0], result[0]
        error = result.float() - output.float()
        ratios[name].append((error.norm() / output.float().norm().clamp_min(1e-30)).double().cpu())

    handles = []
    try:
        for name, module in quantized.items():
            try:
                own = reference.get_submodule(name)
            except AttributeError as error:
                raise ValueError(f"reference: got a model without {name!r}, wanted the 16-bit model") from error
            layer = name.rpartition(".")[0]
            layers = reference.get_submodule(layer), converted.get_submodule(layer)
            if type(layers[0]).forward is not type(layers[1]).forward:  # Llama 4's, which calls its experts otherwise
                name, (own, module) = layer, layers
            handles.append(own.register_forward_hook(partial(compare, module, name), with_kwargs=True))
        (divergence,) = measure_divergence(reference, {"converted": converted}, windows, progress=progress)
    finally:
        for handle in handles:
            handle.remove()
    modules = {}
    for name, values in ratios.items():
        each = torch.stack(values)
        modules[name] = each.mean().item(), (each.std() / len(each) ** 0.5).item()
    return ConversionReport(modules, divergence, *windows.shape)


def _quantized(model: nn.Module) -> dict[str, nn.Module]:
    """Return the experts and dense layers of a model that are quantized, by name."""
    families, found = [*families_of(model), DenseLinears()], dict[str, nn.Module]()

    def visit(module: nn.Module, name: str) -> bool:
        if any(family.match_quantized(module) for family in families):
            found[name] = module
        return name in found

    walk(model, visit)
    return found
