"""`QuantizationPlan`, the table of the modules that a conversion of a model replaces, and `swap`, which replaces them.
Made by choose; called by quantization and integrations.huggingface.on_load; calls the families of the modules.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread, current_thread
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4
from thunder_moe.formats.checks import require_module
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import is_dense_layer
from thunder_moe.quantization.families import ExpertFamily, Quantization, families_of

Model = TypeVar("Model", bound=nn.Module)
_LOGGER = logging.getLogger("thunder_moe")
# Models with more expert weights than this (a few seconds of work) show a progress bar.
PROGRESS_WEIGHTS = 2**28
# The modules of models that are being converted -> the converting thread; `_BUSY_LOCK` guards it. An entry of a thread
# that has ended is ignored, because an interrupt may have prevented its removal.
_BUSY: WeakKeyDictionary[nn.Module, Thread] = WeakKeyDictionary()
_BUSY_LOCK = Lock()


class Target(NamedTuple):
    """A module to replace: its qualified name, its family and the number format of its weights."""

    name: str
    family: ExpertFamily
    format: str = NVFP4.name


Targets = dict[nn.Module, Target]
Skipped = dict[nn.Module, tuple[str, str]]  # module that is not replaced -> its qualified name and the reason


@dataclass(frozen=True)
class PlannedModule:
    """Experts or a dense layer in a `QuantizationPlan`.

    Attributes:
        name: qualified name.
        kind: name of the module's class.
        format: number format after the conversion; None: it stays in 16 bits.
        bytes_before: of its parameters and buffers.
        bytes_after: of them once the plan is applied, without global scales (4 bytes an expert, or a row).
        reason: why it stays in 16 bits; "" if it does not.
    """

    name: str
    kind: str
    format: str | None
    bytes_before: int
    bytes_after: int
    reason: str = ""


class QuantizationPlan(Generic[Model]):
    """The plan of `quantize_` with the same options for a model; `plan_quantization` makes it. Prints as a table.

    Attributes:
        modules: the experts and dense layers that are replaced or stay, in the order of the model; no routers.
        bytes_before: of all parameters and buffers of the model; tied ones count once.
        bytes_after: of them once the plan is applied.
    """

    def __init__(
        self,
        model: Model,
        run: Quantization,
        chosen: Targets,
        skipped: Skipped,
        linears: object,
        choose_again: Callable[[], QuantizationPlan[Model]],
    ) -> None:
        self.run, self.chosen = run, chosen
        self._model, self._skipped, self._linears, self._choose_again = model, skipped, linears, choose_again
        self.modules: tuple[PlannedModule, ...] = ()
        self.bytes_before = self.bytes_after = 0

    def describe(self) -> QuantizationPlan[Model]:
        """Fills `modules` and the sizes, and returns the plan."""
        tensors = {id(tensor): tensor for tensor in _tensors(self._model)}
        self.bytes_before = self.bytes_after = sum(tensor.nbytes for tensor in tensors.values())
        rows: dict[str, PlannedModule] = {}
        packed: set[nn.Parameter] = set()
        for module, (name, family, format) in self.chosen.items():
            before = after = sum(tensor.nbytes for tensor in _tensors(module))
            for parameter, view in family.weights(module):
                saved = view.nbytes - int(view.numel() * BLOCK_FORMATS[format].bits_per_weight / 8)
                after -= saved
                self.bytes_after -= 0 if parameter in packed else saved
                packed.add(parameter)
            rows[name] = PlannedModule(name, type(module).__name__, format, before, after)
        chosen = {part for module in self.chosen for part in module.modules()}
        inside: set[nn.Module] = set()
        for module, (name, reason) in self._skipped.items():
            if module not in inside and chosen.isdisjoint(module.modules()):
                inside.update(module.modules())
                size = sum(tensor.nbytes for tensor in _tensors(module))
                rows[name] = PlannedModule(name, type(module).__name__, None, size, size, reason)
        order = {name: at for at, (name, _) in enumerate(self._model.named_modules(remove_duplicate=False))}
        self.modules = tuple(sorted(rows.values(), key=lambda row: order[row.name]))
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self) -> Model:
        """Replaces the modules, as `quantize_`, and returns the model.

        The modules are chosen again by the same options, with all checks. Functions among the options are called again.

        Raises:
            ValueError: the plan is applied already, the model has changed since, so that the options choose other
                modules or none, or another thread converts it.
        """
        with exclusive(self._model):
            if not self.chosen or not self.chosen.keys() <= set(self._model.modules()):
                raise ValueError("plan: it is applied already, or the model has other modules now: make a plan again")
            try:
                now = self._choose_again()
            except ValueError as error:
                raise ValueError(f"plan: the model has changed ({error}): make a plan again") from error
            for module, target in {**now.chosen, **self.chosen}.items():
                was, would = (
                    chosen[module].format if module in chosen else "16-bit" for chosen in (self.chosen, now.chosen)
                )
                if was != would:
                    _, why = now._skipped.get(module, ("", f"it would be {would}, and {was} in the plan"))
                    raise ValueError(f"plan: {target.name!r} has changed, {why}: make a plan again")
            del module, target  # each is freed once it is converted
            self.run, self.chosen = now.run, now.chosen
            self.quantize_modules()
            return self._model

    @torch.inference_mode(False)  # buffers of an inference mode could not be loaded into outside of it
    @torch.no_grad()
    def quantize_modules(self) -> None:
        """Replaces the modules of `chosen`, and empties it."""
        run, label = self.run, "quantizing experts" if self._linears is False else "quantizing"
        try:
            swap(self._model, self.chosen, run.convert, label)
        finally:  # after an interrupt, too: the replaced modules are saved as 4-bit ones
            for family in families_of(self._model):
                family.finish(self._model)
            run.memo.clear()  # the plan does not keep the weights alive

    def __str__(self) -> str:
        lines = [("module", "class", "format", "MB before", "MB after", "why it stays")]
        for row in self.modules:
            sizes = f"{row.bytes_before / 1e6:.3f}", f"{row.bytes_after / 1e6:.3f}"
            lines.append((row.name, row.kind, row.format or "16-bit", *sizes, row.reason))
        lines.append(("whole model", "", "", f"{self.bytes_before / 1e6:.3f}", f"{self.bytes_after / 1e6:.3f}", ""))
        if self._linears is False:
            dense = sum(is_dense_layer(name, module) for name, module in self._model.named_modules())
            lines[-1] = (*lines[-1][:-1], f"linears=False: {dense} dense layers are left out") if dense else lines[-1]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if at in (3, 4) else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


@contextmanager
def exclusive(model: nn.Module) -> Iterator[None]:
    """Let one thread at a time convert a model, or a module of it; it is a ValueError in another thread."""
    require_module(model)
    with _BUSY_LOCK:
        threads = {_BUSY.get(module) for module in model.modules()} - {None, current_thread()}
        if any(thread is not None and thread.is_alive() for thread in threads):
            raise ValueError(f"model: another thread is converting this {type(model).__name__}, wanted one at a time")
        own = WeakSet(model.modules())
        _BUSY.update(dict.fromkeys(own, current_thread()))
    try:
        yield
    finally:
        with _BUSY_LOCK:
            for module in own:
                _BUSY.pop(module, None)


def swap(
    model: nn.Module, chosen: Targets, replace: Callable[[nn.Module, ExpertFamily], nn.Module], label: str
) -> None:
    """Put `replace(module, family)` into every parent of each module, and free the old module at once."""
    places = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():  # named_children gives a child of two names once
            if child is not None and child in chosen:  # an entry for any other would keep its parents alive
                places[child].append((parent, name))
    weights = sum(tensor.numel() for module in chosen for tensor in _tensors(module))
    modules = _blocks_first(chosen)
    chosen.clear()
    modules.reverse()
    bar = progress_bar(
        total=len(modules), desc=label, unit="module", disable=len(modules) == 1 or weights < PROGRESS_WEIGHTS
    )
    with bar:
        while modules:
            module, target = modules.pop()
            replace_module(module, target, places.pop(module), replace, label)
            del module
            bar.update()


def replace_module(
    module: nn.Module,
    target: Target,
    parents: Iterable[tuple[nn.Module, str]],
    replace: Callable[[nn.Module, ExpertFamily], nn.Module],
    label: str,
) -> nn.Module:
    """Put `replace(module, family)` into each of the parents, by the module's name there, log its sizes, return it."""
    where, family, _ = target
    before, kind = sum(tensor.nbytes for tensor in _tensors(module)), type(module).__name__
    new = replace(module, family)
    for parent, name in parents:
        family.put(parent, name, new)
    after = sum(tensor.nbytes for tensor in _tensors(new))
    sizes = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB"
    detail = f"({new.extra_repr()})" if new.extra_repr() else ""
    _LOGGER.info("%s: %s %s -> %s%s, %s", label, where, kind, new._get_name(), detail, sizes)
    return new


def _blocks_first(chosen: Targets) -> list[tuple[nn.Module, Target]]:
    """Sort blocks before their submodules, because a block recognizes these by their original class."""
    parts = {part for module in chosen for part in module.modules() if part is not module}
    return sorted(chosen.items(), key=lambda item: item[0] in parts)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
