"""`Choice`: the experts and dense layers of a checkpoint that the options of convert take, with their formats.
Made by convert; calls selection to parse the options, dense_names for routers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn

from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.ignored import HEAD
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.dense_names import is_embedding, is_router
from thunder_moe.selection import (
    Format,
    Names,
    Patterns,
    Selection,
    Selector,
    check_patterns,
    format_function,
    select,
    shortened,
)

__all__ = ["Choice"]

_LOGGER = logging.getLogger(__name__)


class Choice:
    """The decision of the options on each block of experts and each dense layer, by path.

    Args:
        checkpoint: the source.
        filter: as in `convert`.
        ignore: likewise.
        linears: likewise.
        format: likewise.

    Attributes:
        experts: path of each block of experts that may be quantized.
        dense: path of each dense layer that may be quantized, with its weight; empty without `linears`.
        linears: the option.
        takes_dense: True: the names of `dense` decide; False: none; or a function of a path.

    Raises:
        TypeError: an option is of another type.
        ValueError: a pattern fits nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        filter: Selection | None,
        ignore: Patterns | None,
        linears: bool | Selection | None,
        format: Format,
    ) -> None:
        self.linears = linears
        self.experts: dict[str, ExpertBlock] = dict(checkpoint.fp8_blocks)
        if checkpoint.method in (None, "fp8"):  # in a 4-bit checkpoint, layers were left 16-bit on purpose
            self.experts |= checkpoint.plain_blocks
        self.dense: dict[str, Module] = _dense_candidates(checkpoint) if linears not in (None, False) else {}
        blocks = checkpoint.blocks | checkpoint.plain_blocks | checkpoint.fp8_blocks
        parts = {info.name for block in blocks.values() for info in block.infos()}  # a block is converted as one
        modules = [name.rpartition(".")[0] for name in checkpoint.files.infos if name not in parts]
        paths = [path for name in (*modules, *blocks, *self.dense, HEAD) for path in _with_parents(name)]
        names = Names(str(checkpoint.path), {path: (path,) for path in paths})
        self._selector, self._format = Selector(names, filter, ignore), format_function(format, names)
        self.takes_dense: bool | Callable[[str], bool] = False
        if linears is not None and not isinstance(linears, bool):
            takes = select("linears", linears, names)
            self.takes_dense = lambda path: takes(self._linear(path), path)
        elif linears:
            self.takes_dense = True
        check_patterns(names, self.experts, self.dense, filter=filter, ignore=ignore, linears=linears, format=format)
        packed = [*checkpoint.blocks, *(name for name in checkpoint.dense if checkpoint.is_4_bit(name))]
        asked = [path for path in packed if self._selector.ignored(path) is not None]
        if not callable(filter):  # functions are not asked about what is packed
            asked = [path for path in packed if self._selector.declined(nn.Module(), path) is not None]
        if asked:
            _LOGGER.warning("packed in the source, and copied whatever filter and ignore say: %s", shortened(asked))

    def formats_of_experts(self) -> dict[str, str]:
        """Returns the number format of each block of experts to quantize.

        Raises:
            ValueError: the function `format` names no format.
        """
        formats = {path: self._format_of(nn.Module(), path) for path in self.experts}
        return {path: format for path, format in formats.items() if format is not None}

    def format_of_dense(self, path: str) -> str | None:
        """Returns the number format of a dense layer, None for 16 bits."""
        return self._format_of(self._linear(path), path)

    def _format_of(self, module: nn.Module, path: str) -> str | None:
        return self._format(module, path) if self._selector.declined(module, path) is None else None

    def _linear(self, path: str) -> nn.Linear:
        """Returns an `nn.Linear` on "meta" with the shape of a dense layer, for functions among the options."""
        n, k = self.dense[path].fields["weight"].shape
        with torch.device("meta"):
            return nn.Linear(k, n, bias=False)


def _dense_candidates(checkpoint: Checkpoint) -> dict[str, Module]:
    """Returns the 16-bit and FP8 matrices of dense layers, without routers and embeddings, by path."""
    experts = {info.name for block in checkpoint.plain_blocks.values() for info in block.infos()}
    names = [name for name in checkpoint.others if name.endswith(".weight") and name not in experts]
    modules = {name.removesuffix(".weight"): Module({"weight": checkpoint.files[name]}) for name in names}
    modules |= checkpoint.fp8_dense()
    weights = {path: module.fields["weight"] for path, module in modules.items()}
    return {
        path: module
        for path, module in modules.items()
        if len(weights[path].shape) == 2
        and weights[path].dtype in (*FLOATS, "F8_E4M3")
        and not is_router(path)
        and not is_embedding(path)
    }


def _with_parents(name: str) -> Iterator[str]:
    """Yields a name and the names of all modules that hold it."""
    while name:
        yield name
        name = name.rpartition(".")[0]
