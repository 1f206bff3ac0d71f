"""The registry of expert families: kinds of modules that quantize_ replaces, each with its match, convert and restore.
Called by choose, quantize and finetune, which loop over it, and by grouped_experts, dense_linears and
integrations.huggingface, whose families derive from `ExpertFamily`; calls nothing of the package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from thunder_moe.formats.weight import PackedWeight


@dataclass
class Quantization:
    """One call of `quantize_`, as the families' `convert` sees it."""

    pack: Callable[[Tensor], PackedWeight]  # quantizes (E, N, K), to the number format of the module that is converted
    layout: str  # of the packed weights, as in `quantize_`
    # The results of the families, so that tied weights stay tied: by `weight_key` a packed weight, or in `restore` a
    # list of parameters. Families may add keys of their own
    memo: dict[Any, Any] = field(default_factory=dict)
    # Module -> `pack`, for modules of another format
    packs: Mapping[nn.Module, Callable[[Tensor], PackedWeight]] = field(default_factory=dict)

    def for_module(self, module: nn.Module) -> Quantization:
        """Return this quantization with the `pack` of a module."""
        return replace(self, pack=self.packs[module]) if module in self.packs else self

    def convert(self, module: nn.Module, family: ExpertFamily) -> nn.Module:
        """Return the 4-bit form of a module, in its own format."""
        return family.convert(module, self.for_module(module))


def weight_key(*weights: Tensor, order: str = "") -> tuple[Any, ...]:
    """Return the key in a memo for the conversion of living weights; all families use it.

    The weights are parameters, or the qdata of a 4-bit weight. The order is of their dimensions in memory; "" is (E, N,
    K). Only modules of one order stay tied.
    """
    return (*map(id, weights), order)


class ExpertFamily:
    """A kind of expert modules, with their conversion to 4 bits and back to 16.

    Families are asked in the order of `FAMILIES` and of registration; the first one that matches converts the module.
    The description is of its modules, for the error when a model has none.
    """

    description: str

    def match(self, module: nn.Module) -> bool:
        """True if this is a 16-bit module of the family, customized or not."""
        raise NotImplementedError

    def match_quantized(self, module: nn.Module) -> bool:
        """True if this is a 4-bit module of the family."""
        raise NotImplementedError

    def blocker(self, module: nn.Module) -> str | None:
        """Return why a module, 16-bit or 4-bit, cannot be replaced because of its own state; None if it can."""
        raise NotImplementedError

    def problem_on_any_rank(self, module: nn.Module, problem: str | None) -> str | None:
        """Return `problem`, or the problem of another process if several processes have parts of the module.

        Every process that has a part calls this."""
        return problem

    def weights(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters to quantize, each with its view as (E, N, K)."""
        raise NotImplementedError

    def prepare(self, modules: Iterable[nn.Module], run: Quantization) -> None:
        """Prepare the conversion of all these modules, before the first is converted.

        An implementation keeps no reference to them: each is freed once it is converted."""

    def sizes(self, module: nn.Module, run: Quantization) -> list[tuple[int, int]]:
        """Return (N, K) of each 4-bit weight that `convert` will make."""
        return [(view.shape[1], view.shape[2]) for _, view in self.weights(module)]

    def check_parent(self, parent: nn.Module, module: nn.Module) -> None:
        """Raises a TypeError if `put` could not put the converted module into this parent."""

    def convert(self, module: nn.Module, run: Quantization) -> nn.Module:
        """Return the 4-bit form of a module that has no `blocker`."""
        raise NotImplementedError

    def restore(self, module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
        """Return the 16-bit form of a 4-bit module; all calls for a model share `memo`, as in `Quantization`."""
        raise NotImplementedError

    def put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Makes a converted or restored module the child of a parent."""
        setattr(parent, name, module)

    def obstacle_to_recipe(self, module: nn.Module) -> str | None:
        """Return why a 16-bit module cannot have an 8-bit recipe; None if it can."""
        return None

    def set_recipe(self, module: nn.Module, recipe: str | None) -> None:
        """Let a 16-bit module multiply by an 8-bit recipe, or without one, for `prepare_8bit_training_`."""
        raise NotImplementedError

    def recipe(self, module: nn.Module) -> str | None:
        """Return the 8-bit recipe of a 16-bit module itself, not of its children; None without one."""
        return None

    def finish(self, model: nn.Module) -> None:
        """Update the model at the end of `quantize_`, `dequantize_`, `prepare_qat_` and `finish_qat_`."""


# Module that has families -> the packages of the classes that they handle; any class when empty. Modules are listed by
# name, because they import this one. transformers_modules is the code that comes with a checkpoint.
_MODULES: dict[str, tuple[str, ...]] = {
    "thunder_moe.integrations.huggingface.quantizer": (
        "transformers",
        "transformers_modules",
        "thunder_moe.integrations.huggingface",
    ),
    "thunder_moe.quantization.grouped_experts": (),
}


def register(module: str, *, packages: tuple[str, ...] = ()) -> None:
    """Register the families that a module lists as `FAMILIES`, by its name, for models with a class of `packages`."""
    _MODULES[module] = packages


def families_of(model: nn.Module) -> list[ExpertFamily]:
    """Return the families that may match modules of a model."""
    homes = {type(module).__module__ for module in model.modules()}
    found: list[ExpertFamily] = []
    for module, packages in _MODULES.items():
        if not packages or any(f"{home}.".startswith(tuple(f"{name}." for name in packages)) for home in homes):
            found += importlib.import_module(module).FAMILIES
    return found
