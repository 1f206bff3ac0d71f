"""Converts a checkpoint to NVFP4 or MXFP8 layer by layer, resumably, and measures the error of each layer.
Called by the command line and users; calls reader, choice, quantize, writer and partial.

Pipeline: headers checked -> units of the reader, some replaced by quantizing ones -> per unit: read or quantize ->
ModelOpt tensors -> shard -> configs -> companions -> rename.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from thunder_moe.checkpoint.choice import Choice, choose
from thunder_moe.checkpoint.companions import copy_companions
from thunder_moe.checkpoint.experts import ExpertWeights
from thunder_moe.checkpoint.files import expand_user
from thunder_moe.checkpoint.modules import Module
from thunder_moe.checkpoint.partial import PartialCheckpoint, open_partial
from thunder_moe.checkpoint.quantize import quantize_experts, quantize_linears
from thunder_moe.checkpoint.reader import Checkpoint, Unit
from thunder_moe.checkpoint.writer import MAX_SHARD_SIZE, ShardWriter, encode, parse_size, require_absent, write_configs
from thunder_moe.formats.checks import require_device
from thunder_moe.formats.registry import FORMATS, check_scale_search, find_format
from thunder_moe.progress import progress_bar
from thunder_moe.selection import Format, Patterns, Selection

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
    """Write a checkpoint with experts, and on request dense layers, in NVFP4 or MXFP8 in ModelOpt's form.

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
        ValueError: a file of the source is truncated or a tensor inconsistent (names it), or a file of the partial
            conversion is damaged (says what to remove), a weight's in_features
            are not a multiple of 16 (of 32 for MXFP8), the device is not there, an unknown format, a scale_search with
            MXFP8 alone, there are no experts, nor with `linears` dense layers, to convert, or a pattern fits nothing.
    """
    destination, max_bytes = expand_user(destination, "destination"), parse_size(max_shard_size)
    require_absent(destination, "destination")
    # An unknown name raises before any work.
    check_scale_search(scale_search, [find_format(format).name] if isinstance(format, str) else [])
    require_device("device", device)
    checkpoint = Checkpoint(source, argument="source")
    choice = choose(checkpoint, filter=filter, ignore=ignore, linears=linears, format=format)
    if not checkpoint.blocks and not choice.formats:
        every = checkpoint.plain_blocks or checkpoint.fp8_blocks
        chooses = filter is not None or ignore is not None or not isinstance(format, str)
        why = (
            "that filter, ignore and format take" if every and chooses else "(tensors named '...experts...') to convert"
        )
        raise ValueError(f"source: {checkpoint.path} has no experts {why}")
    check_scale_search(scale_search, {*choice.formats.values()})
    units = _units(checkpoint, choice, linears is not False, device, scale_search)
    with open_partial(destination, _job(checkpoint, choice, [*units], scale_search, max_bytes)) as unfinished:
        try:
            errors = _convert_all(checkpoint, unfinished, units, device, progress)
        except ValueError:
            unfinished.remove()
            raise
        copy_companions(checkpoint.path, unfinished.checkpoint, skip=(unfinished.directory,))
        unfinished.finish()
    return errors


def _units(
    checkpoint: Checkpoint, choice: Choice, linears: bool, device: torch.device | str, scale_search: str | None
) -> dict[str, Unit]:
    """Return the units to convert, in the order of the files.

    Units that quantize replace the units of their tensors; they call `quantize_experts` or `quantize_linears`.
    """

    def read_bfloat16(module: Module) -> torch.Tensor:
        return checkpoint.read_float(module).bfloat16()

    units = checkpoint.units(linears=linears, device=device)
    for path, block in checkpoint.fp8_blocks.items():
        for module in block.modules.values() if path not in choice.experts else ():
            info = checkpoint.float_info(module)
            units[info.name] = info, partial(read_bfloat16, module)
            if (bias := module.fields.get("bias")) is not None:
                units[bias.name] = bias, partial(checkpoint.read, bias.name)
    for path, block in choice.experts.items():
        for info in block.infos():
            units.pop(info.name, None)
        options = FORMATS[choice.formats[path]], device, scale_search
        units[path] = block.any_info(), partial(quantize_experts, checkpoint, block, *options)
    for path, modules in choice.groups.items():
        for member in modules:
            del units[f"{member}.weight"]
        options = FORMATS[choice.formats[path]], device, scale_search
        units[path] = modules[path].any_info(), partial(quantize_linears, checkpoint, modules, *options)
    if dense := [path for path in checkpoint.dense if f"{path}.weight" in units]:
        logger.warning("%d quantized modules that are not experts become bfloat16: %s, ...", len(dense), dense[0])
    order = {name: number for number, name in enumerate(checkpoint.files.infos)}
    return dict(sorted(units.items(), key=lambda unit: order[unit[1][0].name]))


def _job(
    checkpoint: Checkpoint, choice: Choice, units: list[str], scale_search: str | None, max_bytes: int
) -> dict[str, Any]:
    """Return the description of a conversion, which has to be equal to resume it."""
    files = sorted({info.file for info in checkpoint.files.infos.values()})
    stats = {str(file.relative_to(checkpoint.path)): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    job: dict[str, Any] = {"source": str(checkpoint.path.resolve()), "source's files": stats}
    job |= {"scale_search": scale_search, "max_shard_size": max_bytes}
    return job | {"units": units, "formats": dict(sorted(choice.formats.items()))}


def _convert_all(
    checkpoint: Checkpoint,
    unfinished: PartialCheckpoint,
    units: dict[str, Unit],
    device: torch.device | str,
    progress: bool,
) -> list[LayerError]:
    done: list[str] = unfinished.state["done"]
    errors = [LayerError(**error) for error in unfinished.state["errors"]]
    max_bytes = unfinished.state["job"]["max_shard_size"]
    writer = ShardWriter(unfinished.checkpoint, max_bytes, unfinished.state["shards"])

    def save_progress() -> None:
        # A layer counts as done when the next one begins; a layer that two shards share is computed again.
        unfinished.save(done=done, shards=writer.shards, errors=[asdict(error) for error in errors])

    writer.on_shard = save_progress
    already = set(done)
    for name, (_, read) in progress_bar(units.items(), desc="converting", unit="module", disable=not progress):
        if name in already:
            continue
        try:
            found = _convert_unit(checkpoint, writer, name, read)
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
    write_configs(unfinished.checkpoint, checkpoint.config)
    return errors


def _convert_unit(checkpoint: Checkpoint, writer: ShardWriter, name: str, read: Callable[[], Any]) -> list[LayerError]:
    """Write the tensors of a unit; return its errors."""
    values = read()
    if not isinstance(values, list):  # exact
        values = [(name, values, (inf, inf if isinstance(values, ExpertWeights) else None))]
    errors = []
    for path, value, (gate_up, down) in values:
        layout = checkpoint.layout(path) if isinstance(value, ExpertWeights) else None
        for key, tensor in encode(path, value, layout):
            if key not in writer:
                writer.add(key, tensor)
        if not isinstance(value, torch.Tensor):
            errors.append(LayerError(path, gate_up, down, value.nbytes))
    return errors
