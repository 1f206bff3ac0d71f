"""Measures the loss of a model with one block of experts at a time in a number format.
Called by the command line and users; calls choose for the blocks, formats.registry to round their weights.

loss of the 16-bit model -> per block, per format: round its weights in place -> loss -> restore the weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.registry import FORMATS, NumberFormat
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.choose import choose_modules
from thunder_moe.selection import Patterns, Selection

WIDE = "16-bit"  # the name, in tables and in `BlockLoss`, of weights that stay as they are


@dataclass(frozen=True)
class BlockLoss:
    """A block of experts, its size and what it costs in each format, `WIDE` among them.

    Attributes:
        name: qualified name of the module.
        nbytes: format -> bytes of the block's weights. Only formats that its shape fits.
        increase: format -> loss of the model with this block alone in the format, minus the 16-bit model's loss, in
            nats per token; 0 for `WIDE`.
        error: format -> standard error of `increase` over the windows of the text.
    """

    name: str
    nbytes: dict[str, int]
    increase: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True)
class Sensitivity:
    """The blocks of a model.

    Attributes:
        loss: of the 16-bit model, in nats per token.
        tokens: predicted ones.
        other_bytes: of all parameters and buffers outside of the weights of these blocks.
        blocks: in the order of the model.
    """

    loss: float
    tokens: int
    other_bytes: int
    blocks: tuple[BlockLoss, ...]


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module,
    windows: Tensor,
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    progress: bool = False,
) -> Sensitivity:
    """Measures the loss of a language model with each block of experts alone in each number format.

    The blocks are the experts that `quantize_` would replace. The weights of one at a time are rounded to the format in
    place, in their own dtype, and computed with the model's own code; then the kept weights are put back, bit for bit,
    after an error or an interrupt, too. Memory: the model, and one block once more.

    Args:
        model: called as ``model(input_ids=...)``, whose result has `logits` (1, L, vocabulary), as transformers' causal
            language models; in 16 bits or float32.
        windows: int64 (W, L), token ids; each row is a text of its own, in which all but the first are predicted.
        filter: as in `quantize_`: which experts are measured; the others stay in 16 bits.
        ignore: as in `quantize_`.
        progress: show a bar.

    Raises:
        ValueError: `windows` is not int64 (W, L) with at least two rows and two columns, the model has no experts to
            quantize, two blocks of it share a weight, or a loss is not finite (names block and format).
    """
    check_windows(windows)
    weights = _weights(model, filter, ignore)
    fitting = {name: _fitting(views) for name, views in weights.items()}
    was_training = model.training
    model.eval()
    bar = progress_bar(
        total=1 + sum(map(len, fitting.values())), desc="sensitivity", unit="pass", disable=not progress, leave=False
    )
    blocks = []
    try:
        with bar:
            base = _losses(model, windows, "in 16 bits")
            bar.update()
            for name, views in weights.items():
                block = BlockLoss(name, {WIDE: sum(view.nbytes for view in views)}, {WIDE: 0.0}, {WIDE: 0.0})
                for format in fitting[name]:
                    with _rounded(views, format):
                        change = _losses(model, windows, f"with {name!r} in {format.name}") - base
                    block.nbytes[format.name] = sum(_packed_bytes(view, format) for view in views)
                    block.increase[format.name] = change.mean().item()
                    block.error[format.name] = (change.std() / len(change) ** 0.5).item()
                    bar.update()
                blocks.append(block)
    finally:
        model.train(was_training)
    own = sum(block.nbytes[WIDE] for block in blocks)
    return Sensitivity(base.mean().item(), windows[:, 1:].numel(), _all_bytes(model) - own, tuple(blocks))


def check_windows(windows: Tensor) -> None:
    """Raises the ValueError of `measure_sensitivity` for the token ids of a text."""
    if windows.ndim != 2 or windows.dtype != torch.int64 or len(windows) < 2 or windows.shape[1] < 2:
        raise ValueError(
            f"windows: got {windows.dtype} {tuple(windows.shape)}, wanted int64 (windows, length), two or more of each"
        )


@torch.no_grad()
def measure_choice(model: nn.Module, windows: Tensor, formats: Mapping[str, str | None]) -> float:
    """Return the loss of a model with all formats of a choice. Its weights stay rounded: use another copy afterwards.

    Args:
        model: as in `measure_sensitivity`.
        windows: as in `measure_sensitivity`.
        formats: name of each block that was measured -> its format, None for 16 bits.
    """
    for name, views in _weights(model, lambda module, name: name in formats, None).items():
        if (format := formats[name]) is not None:
            for view in views:
                _round(view, view, FORMATS[format])
    return _losses(model, windows, "with the chosen formats").mean().item()


def _weights(model: nn.Module, filter: Selection | None, ignore: Patterns | None) -> dict[str, list[Tensor]]:
    """Return the weights (E, N, K) of each block, views of the parameters."""
    chosen = choose_modules(model, filter=filter, ignore=ignore).chosen
    weights: dict[str, list[Tensor]] = {}
    owners: dict[nn.Parameter, str] = {}
    for module, place in chosen.items():
        pairs = place.family.weights(module)
        for parameter, _ in pairs:
            if owners.setdefault(parameter, place.name) != place.name:
                raise ValueError(
                    f"model: {place.name!r} and {owners[parameter]!r} share a weight, wanted blocks that are tied to"
                    " no other: each is measured alone"
                )
        weights[place.name] = [view.detach() for _, view in pairs]
    return weights


def _fitting(views: list[Tensor]) -> list[NumberFormat]:
    """Return the formats whose blocks divide all rows."""
    return [format for format in FORMATS.values() if not any(view.shape[-1] % format.block_size for view in views)]


@contextmanager
def _rounded(views: list[Tensor], format: NumberFormat) -> Iterator[None]:
    """Rounds weights to a format in place, and restores them at the end of the block."""
    originals = [view.clone() for view in views]
    try:
        for view, source in zip(views, originals, strict=True):
            _round(view, source, format)
        yield
    finally:
        for view, source in zip(views, originals, strict=True):
            view.copy_(source)


def _round(view: Tensor, source: Tensor, format: NumberFormat) -> None:
    for expert in range(len(view)):  # one by one: each has its own scales, and this needs little memory
        packed = format.quantize(source[expert : expert + 1].contiguous())
        view[expert].copy_(format.dequantize(packed, source.dtype)[0])


def _packed_bytes(view: Tensor, format: NumberFormat) -> int:
    """Return the bytes of codes, scales and global scales of a weight."""
    row: PackedWeight = format.quantize(torch.zeros(1, 1, view.shape[-1]))
    codes, scale, *per_expert = (tensor.nbytes for tensor in row.tensors())
    return view.shape[0] * (view.shape[1] * (codes + scale) + sum(per_expert))


def _all_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers; tied ones count once."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def _losses(model: nn.Module, windows: Tensor, what: str) -> Tensor:
    """Return the mean cross-entropy of each window, float64 (W,) on the CPU."""
    device = next(model.parameters()).device
    losses = []
    for window in windows:
        row = window[None].to(device)
        logits = model(input_ids=row).logits[0, :-1]
        losses.append(F.cross_entropy(logits.float(), row[0, 1:].to(logits.device)).double().cpu())
    found = torch.stack(losses)
    if not found.isfinite().all():
        index = int(torch.nonzero(~found.isfinite())[0])
        raise ValueError(f"model: its loss {what} is {found[index].item()} in window {index}, wanted a finite number")
    return found
