"""Converts a checkpoint to NVFP4 layer by layer, resumably, and measures the error of each layer.
Called by the command line and users; calls reader, quantize_experts, quantize_linears and writer.

Pipeline: headers checked -> per layer: 16-bit experts or linears -> quantize -> ModelOpt tensors -> shard -> configs ->
rename.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from thunder_moe.checkpoint.experts import ExpertWeights
from thunder_moe.checkpoint.files import read_json
from thunder_moe.checkpoint.formats.modelopt import MODELOPT
from thunder_moe.checkpoint.ignored import ignored_modules
from thunder_moe.checkpoint.quantize_experts import quantize_experts
from thunder_moe.checkpoint.quantize_linears import linear_groups, quantize_linears
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.checkpoint.writer import (
    MAX_SHARD_SIZE,
    ShardWriter,
    parse_size,
    require_absent,
    write_configs,
    write_json,
)
from thunder_moe.formats.nvfp4 import quantize

__all__ = ["LayerError", "convert"]

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"
# What goes along beside weights and configs: tokeniser, templates, code, licence.
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".md", ".vocab", ".spm")
_NOT_COMPANIONS = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", PROGRESS_NAME)


@dataclass(frozen=True)
class LayerError:
    """The quantization error of the experts of a layer, or of a dense layer.

    Attributes:
        name: path of the experts or of the dense layer.
        gate_up: signal to quantization noise of gate and up in decibels, or of the weight of a dense layer; infinite
            where the source was 4-bit already.
        down: the same of the down projection; None for a dense layer.
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
    linears: bool | Callable[[str], bool] | None = None,
    scale_search: str | None = None,
    device: torch.device | str = "cpu",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: bool = False,
) -> list[LayerError]:
    """Writes a checkpoint whose experts, and where asked to dense layers, are NVFP4 in ModelOpt's form; everything else
    stays as it is.

    16-bit experts are quantized; experts that are NVFP4 or MXFP4 already are copied exactly, and so are dense layers
    that are NVFP4. Those in FP8 become 16-bit. Memory holds one layer, and one shard twice.

    Finished shards are kept in ``<destination>.partial`` until the conversion is complete; then the directory is
    renamed. After an interruption (a signal, a full disk) the same call resumes after the last complete shard. An
    invalid source leaves nothing behind.

    Args:
        source: directory, or the name of a hub model in the local cache.
        destination: a directory that does not exist yet.
        linears: True: the linears of attention, dense MLPs and shared experts of the decoder become NVFP4, too; not the
            head, for which other engines have no 4-bit kernel, nor routers. Those that read the same rows (q, k and v;
            gate and up) share a global scale. A function is asked about each matrix but routers by its path. None:
            16-bit ones stay so, and 4-bit ones, too. False: 4-bit ones become 16-bit.
        scale_search: as in `nvfp4.quantize`.
        device: where to quantize.
        max_shard_size: of a file, in bytes or as "5GB".
        progress: show a bar.

    Returns:
        The errors, layer by layer.

    Raises:
        TypeError: `linears` is something else.
        FileNotFoundError: no checkpoint at the source.
        FileExistsError: the destination exists, or the partial one is of another source or other options.
        ValueError: a file of the source is truncated or inconsistent (names file and tensor), or has no experts, nor
            with `linears` dense layers to convert.
    """
    if not (linears is None or isinstance(linears, bool) or callable(linears)):
        raise TypeError(f"linears: got {linears!r}, wanted a bool, None, or a function of a path")
    destination, max_bytes = Path(destination).expanduser(), parse_size(max_shard_size)
    require_absent(destination)
    # A wrong name is an error before any work.
    quantize(torch.zeros(1, 1, 16, dtype=torch.float32, device="cpu"), scale_search=scale_search)
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: got {device!r}, wanted one of torch's, such as 'cpu' or 'cuda'") from error
    checkpoint = Checkpoint(source)
    plan = _plan(checkpoint, linears)
    if not checkpoint.blocks and not checkpoint.plain_blocks and not plan.groups:
        raise ValueError(f"source: {checkpoint.path} has no experts (tensors named '...experts...') to convert")
    partial = destination.with_name(f"{destination.name}.partial")
    job = _job(checkpoint, scale_search, max_bytes, plan)
    state = _open_partial(partial, job)
    try:
        errors = _convert_all(checkpoint, partial, state, job, plan, device, progress)
    except ValueError:
        shutil.rmtree(partial)
        raise
    for file in sorted(checkpoint.path.iterdir()):
        if file.is_file() and file.suffix in _COMPANIONS and file.name not in _NOT_COMPANIONS:
            shutil.copyfile(file, partial / file.name)
    require_absent(destination)
    os.rename(partial, destination)
    (destination / PROGRESS_NAME).unlink()
    return errors


@dataclass(frozen=True)
class _Plan:
    """What is written.

    Attributes:
        units: the modules and tensors to convert, in the order of the files.
        groups: of 16-bit dense layers to quantize: path of the first -> paths of all that share a global scale.
        kept: paths of the dense layers whose 4-bit weights are copied.
        ignore: the modules that stay or become 16-bit.
    """

    units: list[str]
    groups: dict[str, tuple[str, ...]]
    kept: frozenset[str]
    ignore: list[str]


def _job(checkpoint: Checkpoint, scale_search: str | None, max_bytes: int, plan: _Plan) -> dict[str, Any]:
    """What must be the same for a conversion to resume an interrupted one."""
    files = sorted({info.file for info in checkpoint.files.infos.values()})
    stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    source = str(checkpoint.path.resolve())
    job = {"source": source, "files": stats, "scale_search": scale_search, "max_shard_bytes": max_bytes}
    linears = sorted([*plan.kept, *(path for group in plan.groups.values() for path in group)])
    return job | ({"linears": linears} if linears else {})


def _open_partial(partial: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Creates the directory, or resumes that of an earlier run of the same job; returns its state."""
    partial.mkdir(parents=True, exist_ok=True)
    for file in partial.glob("*.unfinished"):
        file.unlink()
    if not any(partial.iterdir()):
        fresh = {"job": job, "done": [], "shards": [], "errors": []}
        write_json(partial / PROGRESS_NAME, fresh)
        return fresh
    state = read_json(partial / PROGRESS_NAME) if (partial / PROGRESS_NAME).is_file() else {}
    if state.get("job") != job:
        raise FileExistsError(f"path: {partial} is of another source or other options; remove it to start anew")
    logger.info("%s: resuming after %d modules", partial, len(state["done"]))
    return state


def _convert_all(
    checkpoint: Checkpoint,
    partial: Path,
    state: dict[str, Any],
    job: dict[str, Any],
    plan: _Plan,
    device: torch.device,
    progress: bool,
) -> list[LayerError]:
    done: list[str] = state["done"]
    errors = [LayerError(**error) for error in state["errors"]]
    writer = ShardWriter(partial, job["max_shard_bytes"], state["shards"])

    def save_progress() -> None:
        # A layer counts as done when the next one begins; one that two shards share is computed again.
        state = {"job": job, "done": done, "shards": writer.shards, "errors": [asdict(error) for error in errors]}
        write_json(partial / PROGRESS_NAME, state)

    writer.on_shard = save_progress
    already = set(done)
    for name in tqdm(plan.units, desc="converting", unit="module", disable=not progress):
        if name in already:
            continue
        found: list[LayerError] = []
        tensors: Iterator[tuple[str, torch.Tensor]]
        if name in checkpoint.blocks or name in checkpoint.plain_blocks:
            weights, error = _layer(checkpoint, name, device, job["scale_search"])
            found = [error]
            tensors = MODELOPT.encode(name, weights, checkpoint.layout(name))
        elif name in plan.groups or name in plan.kept:
            quantized = (
                [(name, checkpoint.read_dense_weight(name), inf)]
                if name in plan.kept
                else quantize_linears(checkpoint.files, plan.groups[name], device, job["scale_search"])
            )
            found = [LayerError(path, noise, None, weight.nbytes) for path, weight, noise in quantized]
            tensors = chain.from_iterable(MODELOPT.encode_dense(path, weight) for path, weight, _ in quantized)
        elif name in checkpoint.files:
            tensors = iter([(name, checkpoint.read(name))])
        else:
            tensors = iter([(f"{name}.weight", checkpoint.read_dense(name, device=device))])
        for key, tensor in tensors:
            if key not in writer:
                writer.add(key, tensor)
        done.append(name)
        errors += found
    writer.finish()
    save_progress()
    write_configs(partial, checkpoint.config, plan.ignore)
    return errors


def _plan(checkpoint: Checkpoint, linears: bool | Callable[[str], bool] | None) -> _Plan:
    first = {name: block.any() for name, block in checkpoint.blocks.items()}
    others = set(checkpoint.others)
    experts = {info.name for block in checkpoint.plain_blocks.values() for info in block.infos()}
    if checkpoint.method is None:  # in a quantized checkpoint, layers were left 16-bit on purpose
        first |= {name: block.any() for name, block in checkpoint.plain_blocks.items()}
        others -= experts
    dense_names = [name for name in checkpoint.others if name not in experts]
    groups = linear_groups(checkpoint.files, dense_names, linears or False)
    for path, members in groups.items():
        first[path] = checkpoint.files[f"{path}.weight"]
        others -= {f"{member}.weight" for member in members}
    kept = frozenset(name for name in checkpoint.dense if checkpoint.is_4_bit(name) and linears is not False)
    dense = [name for name in checkpoint.dense if name not in kept]
    for name in others:
        first[name] = checkpoint.files[name]
    plain = [(name, checkpoint.files[name].shape) for name in others]
    plain += [(f"{name}.weight", (1, 1)) for name in dense]
    ignore = ignored_modules(plain, [*kept, *chain.from_iterable(groups.values())])
    for name, info in checkpoint.dense_infos().items():
        first[name] = info
    if dense:
        logger.warning("%d quantized modules that are no experts become bfloat16: %s, ...", len(dense), dense[0])
    order = {name: number for number, name in enumerate(checkpoint.files.infos)}
    return _Plan(sorted(first, key=lambda name: order[first[name].name]), groups, kept, ignore)


def _layer(
    checkpoint: Checkpoint, name: str, device: torch.device, scale_search: str | None
) -> tuple[ExpertWeights, LayerError]:
    """The experts of a layer: copied when they are 4-bit, else quantized."""
    if name in checkpoint.blocks:
        weights = checkpoint.read_experts(name)
        return weights, LayerError(name, inf, inf, weights.nbytes)
    block = checkpoint.plain_blocks[name]
    result = quantize_experts(checkpoint.files, block, checkpoint.interleaved, device, scale_search)
    return result.weights, LayerError(name, result.gate_up_error, result.down_error, result.weights.nbytes)
