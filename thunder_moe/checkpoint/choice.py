"""`choose`: the experts and dense layers of a checkpoint that the options of convert take, with their formats.
Called by convert; calls selection to parse the options, dense_names to recognize layers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from thunder_moe import selection
from thunder_moe.checkpoint.formats.interface import FLOATS
from thunder_moe.checkpoint.ignored import HEAD
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.dense_names import READ_TOGETHER, is_embedding, is_encoder, is_linear, is_router
from thunder_moe.formats.registry import FORMATS

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The 16-bit and FP8 modules of a checkpoint to quantize."""

    experts: dict[str, ExpertBlock]  # path -> block of experts
    # Path of the first in a group of dense layers that read the same rows -> path -> module of all
    groups: dict[str, dict[str, Module]]
    formats: dict[str, str]  # path of a block or group -> name of the number format


def choose(
    checkpoint: Checkpoint,
    *,
    filter: selection.Selection | None,
    ignore: selection.Patterns | None,
    linears: bool | selection.Selection | None,
    format: selection.Format,
) -> Choice:
    """Return what the options take; they mean what they mean in `convert`, and raise the same errors."""
    experts = dict(checkpoint.fp8_blocks)
    if checkpoint.method in (None, "fp8"):  # in a 4-bit checkpoint, layers were left 16-bit on purpose
        experts |= checkpoint.plain_blocks
    dense = _dense_candidates(checkpoint) if linears not in (None, False) else {}
    blocks = checkpoint.blocks | checkpoint.plain_blocks | checkpoint.fp8_blocks
    parts = {info.name for block in blocks.values() for info in block.infos()}  # a block is converted as one
    modules = [name.rpartition(".")[0] for name in checkpoint.files.infos if name not in parts]
    paths = [path for name in (*modules, *blocks, *dense, HEAD) for path in (name, *selection.parents(name)) if path]
    names = selection.Names(str(checkpoint.path), {path: (path,) for path in paths})
    selector, format_of = selection.Selector(names, filter, ignore), selection.format_function(format, names)
    takes = None if linears is None or isinstance(linears, bool) else selection.select("linears", linears, names)
    selection.check_patterns(names, experts, dense, filter=filter, ignore=ignore, linears=linears, format=format)
    packed = [*checkpoint.blocks, *(name for name in checkpoint.dense if checkpoint.is_4_bit(name))]
    asked = [path for path in packed if selector.ignored(path) is not None]
    if not callable(filter):  # functions are not asked about what is packed
        asked = [path for path in packed if selector.declined(nn.Module(), path) is not None]
    if asked:
        _LOGGER.warning(
            "packed in the source, and copied whatever filter and ignore say: %s", selection.shortened(asked)
        )

    def chosen(module: nn.Module, path: str) -> str | None:
        return format_of(module, path) if selector.declined(module, path) is None else None

    formats = {path: name for path in experts if (name := chosen(nn.Module(), path)) is not None}
    experts = {path: experts[path] for path in formats}
    linear_formats: dict[str, str] = {}
    for path, module in dense.items():
        n, k = module.fields["weight"].shape
        if takes is None and (not is_linear(path) or is_encoder(path) or 0 in (n, k)):
            continue
        with torch.device("meta"):
            linear = nn.Linear(k, n, bias=False)  # for functions among the options
        name = chosen(linear, path) if takes is None or takes(linear, path) else None
        if name is not None and (takes is not None or k % FORMATS[name].block_size == 0):
            linear_formats[path] = name
    groups = _groups(dense, linear_formats)
    return Choice(experts, groups, formats | {path: linear_formats[path] for path in groups})


def _groups(dense: dict[str, Module], formats: dict[str, str]) -> dict[str, dict[str, Module]]:
    """Group the layers of `formats` that read the same rows, in one format; by the path of the first in each group."""
    kinds = {path: (name, dense[path].fields["weight"].shape[1]) for path, name in formats.items()}
    groups: dict[str, dict[str, Module]] = {}
    for path, kind in kinds.items():
        parent, dot, own = path.rpartition(".")
        together = next((names for names in READ_TOGETHER if own in names), (own,))
        members = [sibling for name in together if kinds.get(sibling := f"{parent}{dot}{name}") == kind]
        groups.setdefault(members[0], {member: dense[member] for member in members})
    return groups


def _dense_candidates(checkpoint: Checkpoint) -> dict[str, Module]:
    """Return the 16-bit and FP8 matrices of dense layers, without routers and embeddings, by path."""
    experts = {info.name for block in checkpoint.plain_blocks.values() for info in block.infos()}
    names = [name for name in checkpoint.others if name.endswith(".weight") and name not in experts]
    modules = {name.removesuffix(".weight"): Module({"weight": checkpoint.files[name]}) for name in names}
    modules |= {name: module for name, module in checkpoint.dense.items() if module.is_fp8}
    weights = {path: module.fields["weight"] for path, module in modules.items()}
    return {
        path: module
        for path, module in modules.items()
        if len(weights[path].shape) == 2
        and weights[path].dtype in (*FLOATS, "F8_E4M3")
        and not is_router(path)
        and not is_embedding(path)
    }
