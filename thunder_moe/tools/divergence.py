"""Compares quantized language models with their 16-bit one on a text: KL divergence, top-1 agreement and loss.
Called by users and conversion; calls the models, and sensitivity's check of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.progress import progress_bar
from thunder_moe.tools.sensitivity.measure import check_windows


@dataclass(frozen=True)
class Divergence:
    """Holds the distance of a model from a reference: means per token and their standard errors over windows.

    Attributes:
        name: of the model.
        kl: KL(reference || model) in nats.
        agreement: the share of tokens at which both have the same most likely next token.
        increase: of the loss, in nats; the difference is taken in each window.
        kl_change: `kl` less the first model's; the difference is taken in each window. (0, 0) for the first model.
    """

    name: str
    kl: tuple[float, float]
    agreement: tuple[float, float]
    increase: tuple[float, float]
    kl_change: tuple[float, float]


@torch.no_grad()
def measure_divergence(
    reference: nn.Module, models: Mapping[str, nn.Module], windows: Tensor, *, progress: bool = False
) -> list[Divergence]:
    """Compares models with a reference on held-out text: not the text that `calibrate_` had.

    Args:
        reference: the 16-bit model, called as ``model(input_ids=...)`` in evaluation mode with a window at a time; its
            result has `logits` (1, L, vocabulary).
        models: name -> a model with the same vocabulary, such as a copy of it after `quantize_` or `calibrate_`.
        windows: int64 (W, L), token ids, two rows or more; all but the first of each are predicted.
        progress: show a bar.

    Raises:
        ValueError: `windows` has another dtype or shape, there is no model, or a result is not finite.
    """
    check_windows(windows)
    if not models:
        raise ValueError("models: got none, wanted names with models to compare")
    modes = [(model, model.training) for model in (reference, *models.values())]
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    try:
        for model, _ in modes:
            model.eval()
        for window in progress_bar(windows, desc="divergence", unit="window", disable=not progress):
            wanted = _log_probabilities(reference, window)
            for name, model in models.items():
                own = _log_probabilities(model, window).to(wanted.device)
                kl = F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)
                agrees = own.argmax(-1) == wanted.argmax(-1)
                change = (wanted - own).gather(-1, window[1:, None].to(wanted.device))
                found[name].append(torch.stack([each.double().mean() for each in (kl, agrees, change)]).cpu())
    finally:
        for model, mode in modes:
            model.train(mode)
    means = {name: torch.stack(rows) for name, rows in found.items()}  # [windows, 3]
    for name, rows in means.items():
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"models: {name!r} or the reference has logits that are not finite, wanted finite ones")
    first = next(iter(means.values()))[:, :1]
    return [
        Divergence(name, *_means_and_errors(torch.cat([rows, rows[:, :1] - first], 1))) for name, rows in means.items()
    ]


def divergence_table(found: list[Divergence]) -> str:
    """Return a line per model: the means and, in brackets, their standard errors."""
    width = max(len("model"), *(len(each.name) for each in found))
    head = ("KL, nats/token", "against the first", "top-1 agreement", "loss, nats/token")
    lines = [f"{'model':{width}}  " + "  ".join(f"{name:>22}" for name in head)]
    for each in found:
        cells = ["{:.6f} ({:.6f})".format(*each.kl), "{:+.6f} ({:.6f})".format(*each.kl_change)]
        cells += ["{:.3%} ({:.3%})".format(*each.agreement), "{:+.6f} ({:.6f})".format(*each.increase)]
        lines.append(f"{each.name:{width}}  " + "  ".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def _log_probabilities(model: nn.Module, window: Tensor) -> Tensor:
    """Return the model's log-probabilities (L - 1, vocabulary) of the tokens of a window (L,), float32."""
    row = window[None].to(next(model.parameters()).device)
    return F.log_softmax(model(input_ids=row).logits[0, :-1].float(), -1)


def _means_and_errors(rows: Tensor) -> list[tuple[float, float]]:
    """Return the mean and its standard error of each column."""
    return [(values.mean().item(), (values.std() / len(values) ** 0.5).item()) for values in rows.unbind(1)]
