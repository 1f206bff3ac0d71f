"""Converts a checkpoint to NVFP4 or MXFP8 layer by layer, resumably, and measures the error of each layer.
Called by the command line and users; calls reader, choice, quantize_experts, quantize_linears, writer and partial.

Pipeline: headers checked -> per layer: 16-bit or FP8 experts or linears -> quantize -> ModelOpt tensors -> shard ->
configs -> companions -> rename.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import torch

from thunder_moe.checkpoint.choice import Choice
from thunder_moe.checkpoint.companions import copy_companions
from thunder_moe.checkpoint.ignored import ignored_modules
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.checkpoint.partial import PartialCheckpoint, open_partial
from thunder_moe.checkpoint.quantize_experts import quantize_experts
from thunder_moe.checkpoint.quantize_linears import linear_groups, quantize_linears
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.checkpoint.writer import (
    MAX_SHARD_SIZE,
    ShardWriter,
    encode,
    parse_size,
    require_absent,
    write_configs,
)
from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.registry import FORMATS, check_scale_search, find_format
from thunder_moe.progress import progress_bar
from thunder_moe.selection import Format, Patterns, Selection

__all__ = ["LayerError", "convert"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerError:
    """The quantization error of the experts of a layer, or of a dense layer.

    Attributes:
        name: path of the experts or of the dense layer.
        gate_up: signal to quantization noise of gate and up in decibels, or of the weight of a dense layer; infinite
            if the source was NVFP4, MXFP8 or MXFP4 already.
        down: the signal to noise of the down projection; None for a dense layer.
        nbytes: of the result.
    """

    name: str
    gate_up: float
    down: float | None
    nbytes: int


@torch.no_grad()
def convert(
    source: str | Path,
    destination: str | Path,
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    linears: bool | Selection | None = None,
    format: Format = "nvfp4",
    scale_search: str | None = None,
    device: torch.device | str = "cpu",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: bool = False,
) -> list[LayerError]:
    """Writes a checkpoint with experts, and on request dense layers, in NVFP4 or MXFP8 in ModelOpt's form.

    Experts in 16 bits or FP8 are quantized. Experts that are NVFP4, MXFP8 or MXFP4 already are copied exactly, for any
    `format` (MXFP4 as NVFP4 of the same values), and so are dense layers that are NVFP4 or MXFP8. Other FP8 weights
    become bfloat16. FP8 is read in the forms of DeepSeek (blocks of 128 x 128 with weight_scale_inv),
    compressed-tensors and ModelOpt. All other tensors stay unchanged. Memory holds one layer, and one shard twice.
    Tokenizer, code, licence and other files beside the weights are copied, with subfolders that hold no weights.

    Finished shards are kept in ``<destination>.partial`` until the conversion is complete; then the checkpoint is
    renamed. After an interruption (a signal, a full disk) the same call resumes after the last complete shard. An
    invalid source leaves nothing behind.

    `filter`, `ignore`, `linears` and `format` mean what they mean in `quantize_`. They take the checkpoint's names;
    experts have the name of their block ("model.layers.0.mlp.experts"), which is converted as one. A function gets the
    name, and as the module an `nn.Linear` without data for a dense layer, or an empty `nn.Module` for experts.

    Args:
        source: directory, or the name of a hub model in the local cache.
        destination: a directory that does not exist yet.
        filter: as in `quantize_`; modules that it declines stay, or become, 16-bit. NVFP4, MXFP8 and MXFP4 weights are
            copied nevertheless, with a warning if patterns decline them; functions are not asked about them.
        ignore: as in `quantize_`; NVFP4, MXFP8 and MXFP4 weights are copied nevertheless.
        linears: True: the decoder's dense layers of attention, dense MLPs and shared experts, by their names, are
            quantized, too. The head is not, because other engines have no 4-bit kernel for it, nor are routers.
            (`quantize_` chooses by speed on the current device instead, and takes the head.) Layers that read the same
            rows (q, k and v; gate and up) share a global scale in NVFP4. Patterns or a function: the matrices that they
            take, without routers and embeddings. None: 16-bit and quantized layers stay unchanged. False: quantized
            layers become 16-bit.
        format: as in `quantize_`. Engines merge q, k and v, and gate and up, which then have to be of one format.
        scale_search: as in `nvfp4.quantize`, for weights in NVFP4.
        device: where to quantize.
        max_shard_size: of a file, in bytes or as "5GB".
        progress: show a bar.

    Returns:
        The errors, layer by layer.

    Raises:
        TypeError: `filter`, `ignore`, `linears` or `format` is something else.
        FileNotFoundError: no checkpoint at the source.
        FileExistsError: the destination exists, or the partial one is of another source or other options, or another
            conversion is writing it.
        OSError: a file cannot be read or written; names it.
        MemoryError: a layer does not fit the device.
        ValueError: a file of the source is truncated or inconsistent (names file and tensor), or one of the partial
            conversion is damaged (says what to remove), a weight's in_features
            are no multiple of 16 (of 32 for MXFP8), the device is not there, an unknown format, a scale_search with
            MXFP8 alone, there are no experts, nor with `linears` dense layers, to convert, or a pattern fits nothing.
    """
    destination, max_bytes = Path(destination).expanduser(), parse_size(max_shard_size)
    require_absent(destination, "destination")
    # An unknown name raises before any work.
    check_scale_search(scale_search, [find_format(format).name] if isinstance(format, str) else [])
    target_device = _device(device)
    checkpoint = Checkpoint(source, argument="source")
    plan = _plan(checkpoint, Choice(checkpoint, filter=filter, ignore=ignore, linears=linears, format=format))
    if not checkpoint.blocks and not plan.experts and not plan.groups:
        every = checkpoint.plain_blocks or checkpoint.fp8_blocks
        chooses = filter is not None or ignore is not None or not isinstance(format, str)
        why = "(tensors named '...experts...') to convert"
        why = "that filter, ignore and format take" if every and chooses else why
        raise ValueError(f"source: {checkpoint.path} has no experts {why}")
    check_scale_search(scale_search, {*plan.formats.values()})
    with open_partial(destination, _job(checkpoint, scale_search, max_bytes, plan)) as partial:
        try:
            errors = _convert_all(checkpoint, partial, plan, target_device, progress)
        except ValueError:
            partial.remove()
            raise
        copy_companions(checkpoint.path, partial.checkpoint, skip=(partial.directory,))
        partial.finish()
    return errors


@dataclass(frozen=True)
class _Plan:
    """The checkpoint to write.

    Attributes:
        units: the modules and tensors to convert, in the order of the files.
        experts: path -> 16-bit or FP8 experts to quantize.
        groups: dense layers to quantize: path of the first in a group -> path -> module of all that read the same rows.
        formats: path of experts, or of the first in a group -> name of the number format.
        decoded: name of an FP8 weight of experts that becomes 16-bit -> its module.
        copied: paths of the dense layers whose packed weights are copied.
        ignore: the modules that stay or become 16-bit.
    """

    units: list[str]
    experts: dict[str, ExpertBlock]
    groups: dict[str, dict[str, Module]]
    formats: dict[str, str]
    decoded: dict[str, Module]
    copied: frozenset[str]
    ignore: list[str]


def _device(device: torch.device | str) -> torch.device:
    """Return the device, after a check that tensors on it can be made and read."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: got {device!r}, wanted one of torch's, such as 'cpu' or 'cuda'") from error
    try:
        torch.zeros(1, device=found).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: got {str(device)!r}, which cannot be used here ({reason})") from error
    return found


def _job(checkpoint: Checkpoint, scale_search: str | None, max_bytes: int, plan: _Plan) -> dict[str, Any]:
    """Return the description of a conversion, which has to be equal to resume it. Versions may quantize differently."""
    from thunder_moe import __version__

    files = sorted({info.file for info in checkpoint.files.infos.values()})
    stats = {str(file.relative_to(checkpoint.path)): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    source = str(checkpoint.path.resolve())
    job: dict[str, Any] = {"source": source, "files": stats, "scale_search": scale_search, "max_shard_bytes": max_bytes}
    job["version"] = __version__
    linears = sorted([*plan.copied, *(path for group in plan.groups.values() for path in group)])
    job |= {"experts": sorted([*checkpoint.blocks, *plan.experts]), "linears": linears}
    others = {path: name for path, name in sorted(plan.formats.items()) if name != NVFP4.name}
    return job | ({"formats": others} if others else {})


def _convert_all(
    checkpoint: Checkpoint, partial: PartialCheckpoint, plan: _Plan, device: torch.device, progress: bool
) -> list[LayerError]:
    done: list[str] = partial.state["done"]
    errors = [LayerError(**error) for error in partial.state["errors"]]
    job = partial.state["job"]
    writer = ShardWriter(partial.checkpoint, job["max_shard_bytes"], partial.state["shards"])

    def save_progress() -> None:
        # A layer counts as done when the next one begins; a layer that two shards share is computed again.
        partial.save(done=done, shards=writer.shards, errors=[asdict(error) for error in errors])

    writer.on_shard = save_progress
    already = set(done)
    for name in progress_bar(plan.units, desc="converting", unit="module", disable=not progress):
        if name in already:
            continue
        try:
            tensors, found = _convert_unit(checkpoint, name, plan, device, job["scale_search"])
            for key, tensor in tensors:
                if key not in writer:
                    writer.add(key, tensor)
        except RuntimeError as error:
            # Without main memory torch raises a plain RuntimeError: "can't allocate memory", "Cannot allocate memory".
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            reason = str(error).partition("\n")[0]
            raise MemoryError(f"{checkpoint.path}: {name} does not fit the device {device} ({reason})") from error
        done.append(name)
        errors += found
    writer.finish()
    save_progress()
    write_configs(partial.checkpoint, checkpoint.config, plan.ignore)
    return errors


def _convert_unit(
    checkpoint: Checkpoint, name: str, plan: _Plan, device: torch.device, scale_search: str | None
) -> tuple[Iterator[tuple[str, torch.Tensor]], list[LayerError]]:
    """Return (tensors to write, errors) of one of the plan's units."""
    if name in checkpoint.blocks:
        weights = checkpoint.read_experts(name)
        found = [LayerError(name, inf, inf, weights.nbytes)]
        return encode(name, weights, checkpoint.layout(name)), found
    if name in plan.experts:
        number_format, block = FORMATS[plan.formats[name]], plan.experts[name]
        result = quantize_experts(checkpoint.floats, block, checkpoint.interleaved, number_format, device, scale_search)
        found = [LayerError(name, result.gate_up_error, result.down_error, result.weights.nbytes)]
        return encode(name, result.weights, checkpoint.layout(name)), found
    if name in plan.groups or name in plan.copied:
        quantized = (
            [(name, checkpoint.read_dense_weight(name), inf)]
            if name in plan.copied
            else quantize_linears(
                checkpoint.floats, plan.groups[name], FORMATS[plan.formats[name]], device, scale_search
            )
        )
        found = [LayerError(path, noise, None, weight.nbytes) for path, weight, noise in quantized]
        return chain.from_iterable(encode(path, weight) for path, weight, _ in quantized), found
    if name in plan.decoded:
        return iter([(name, checkpoint.floats.read(plan.decoded[name]).bfloat16())]), []
    if name in checkpoint.files:
        return iter([(name, checkpoint.read(name))]), []
    return iter([(f"{name}.weight", checkpoint.read_dense(name, device=device))]), []


def _plan(checkpoint: Checkpoint, choice: Choice) -> _Plan:
    first = {name: block.any_info() for name, block in checkpoint.blocks.items()}
    others = set(checkpoint.others)
    formats = choice.formats_of_experts()
    experts = {path: choice.experts[path] for path in formats}
    decoded: dict[str, Module] = {}
    for path, block in experts.items():
        first[path] = block.any_info()
        others -= {info.name for info in block.infos()}
    for path, block in checkpoint.fp8_blocks.items():
        if path not in experts:
            decoded |= {checkpoint.floats.info(module).name: module for module in block.modules.values()}
            others |= {module.fields["bias"].name for module in block.modules.values() if "bias" in module.fields}
    groups = linear_groups(choice.dense, choice.takes_dense, choice.format_of_dense)
    formats |= {path: name for path, (name, _) in groups.items()}
    modules = {path: {member: choice.dense[member] for member in members} for path, (_, members) in groups.items()}
    for path, members in modules.items():
        first[path] = members[path].any_info()
        others -= {f"{member}.weight" for member in members}
    grouped = {member for members in modules.values() for member in members}
    copied = frozenset(name for name in checkpoint.dense if checkpoint.is_4_bit(name) and choice.linears is not False)
    dense = [name for name in checkpoint.dense if name not in copied and name not in grouped]
    for name in others | decoded.keys():
        first[name] = checkpoint.files[name]
    plain = [(name, checkpoint.files[name].shape) for name in (*others, *decoded)]
    plain += [(f"{name}.weight", (1, 1)) for name in dense]
    ignore = ignored_modules(plain, [*copied, *grouped])
    for name, info in checkpoint.dense_infos().items():
        if name not in grouped:
            first[name] = info
    if dense:
        logger.warning("%d quantized modules that are not experts become bfloat16: %s, ...", len(dense), dense[0])
    order = {name: number for number, name in enumerate(checkpoint.files.infos)}
    units = sorted(first, key=lambda name: order[first[name].name])
    return _Plan(units, experts, modules, formats, decoded, copied, ignore)
