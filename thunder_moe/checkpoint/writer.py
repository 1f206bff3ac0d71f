"""Writes checkpoints in ModelOpt's form, which vLLM, SGLang and TensorRT-LLM read: shards, index, configs.
Called by integrations.huggingface and convert; calls formats.modelopt to encode, scratch and safetensors.

A checkpoint is written beside its path and renamed when it is complete, so that the path never holds half of one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from thunder_moe.checkpoint.companions import copy_companions
from thunder_moe.checkpoint.experts import ExpertsLayout, ExpertWeights
from thunder_moe.checkpoint.files import INDEX_NAME, SINGLE_NAME, TensorFiles, expand_user
from thunder_moe.checkpoint.formats.modelopt import MODELOPT
from thunder_moe.checkpoint.formats.registry import format_of
from thunder_moe.checkpoint.ignored import ignored_modules, merge_conflicts
from thunder_moe.checkpoint.modules import sort_modules
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.scratch import remove_leftovers, scratch_directory

logger = logging.getLogger(__name__)

# A shard is held twice while it is written, beside one layer.
MAX_SHARD_SIZE = "2GB"
_GLOBAL_SCALE, _FUSED_GLOBAL_SCALE = ".weight_scale_2", "_proj_weight_scale_2"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass
class ShardWriter:
    """Collects tensors and writes them as shards of a directory."""

    directory: Path  # an existing one
    max_bytes: int  # a shard is written before it would exceed this; a larger tensor gets a shard of its own
    shards: list[dict[str, Any]] = field(default_factory=list)  # the written shards: names and bytes of their tensors
    on_shard: Callable[[], None] | None = None  # called after each shard

    def __post_init__(self) -> None:
        self._names = {name for shard in self.shards for name in shard["names"]}
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Collect a copy of a tensor of a new name; write the shard first if it would become too large."""
        if name in self._names:
            raise ValueError(f"tensors: got {name!r} twice")
        if self._pending and self._pending_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        tensor = tensor.detach()
        on_cpu = tensor.device.type == "cpu"
        copy = tensor.clone(memory_format=torch.contiguous_format) if on_cpu else tensor.cpu().contiguous()
        self._pending[name] = copy
        self._pending_bytes += copy.nbytes
        self._names.add(name)

    def flush(self) -> None:
        """Write the collected tensors as one shard; the file appears complete or not at all."""
        if not self._pending:
            return
        path, _ = shard_paths(self.directory, len(self.shards), 1)
        unfinished = path.with_suffix(".unfinished")
        try:
            save_file(self._pending, str(unfinished), metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{unfinished}: cannot be written: {error}") from error
        unfinished.chmod(0o666 & ~_umask())  # safetensors creates files with mode 0600
        os.replace(unfinished, path)
        self.shards.append({"names": list(self._pending), "nbytes": self._pending_bytes})
        self._pending, self._pending_bytes = {}, 0
        if self.on_shard is not None:
            self.on_shard()

    def finish(self) -> None:
        """Write the rest, give the shards their final names, and write the index."""
        self.flush()
        count = len(self.shards)
        names = []
        for number in range(count):
            part, final = shard_paths(self.directory, number, count)
            names.append(final.name)
            if part.exists():  # False when an interrupted run renamed it already
                os.replace(part, final)
        if count > 1:
            weight_map = {t: name for name, shard in zip(names, self.shards, strict=True) for t in shard["names"]}
            total = sum(shard["nbytes"] for shard in self.shards)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            write_json(self.directory / INDEX_NAME, index)


def shard_paths(directory: Path, number: int, count: int) -> tuple[Path, Path]:
    """Return the temporary and the final file of one of `count` shards."""
    name = SINGLE_NAME if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
    return directory / f"part-{number:05}.safetensors", directory / name


def write_checkpoint(
    path: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, torch.Tensor | ExpertWeights | PackedWeight]],
    *,
    layout: ExpertsLayout | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    extra: dict[str, str] | None = None,
    companions: Path | None = None,
) -> Path:
    """Write a checkpoint in ModelOpt's layout, and return its directory.

    Args:
        path: a directory that does not exist yet.
        config: for config.json; its quantization_config is replaced.
        tensors: (name, tensor) to write unchanged, (path, ExpertWeights) of blocks of experts and (path, PackedWeight)
            of dense layers; taken one by one.
        layout: of experts in checkpoints of the architecture; None: per expert.
        max_shard_size: of a file, in bytes or as "5GB".
        extra: text of further files by name.
        companions: directory of another checkpoint, whose files are copied, without weights and configs.

    Raises:
        FileExistsError: the path exists.
        ValueError: max_shard_size is not valid, the layout cannot hold the weights, or weights have NaN (names the
            tensor). Nothing is left behind then.
    """
    path, max_bytes, layout = expand_user(path, "path"), parse_size(max_shard_size), layout or ExpertsLayout()
    require_absent(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    with scratch_directory(path, path.parent) as directory:
        writer = ShardWriter(directory, max_bytes)
        for name, value in tensors:
            for key, tensor in encode(name, value, layout):
                writer.add(key, tensor)
        writer.finish()
        write_configs(directory, config)
        for name, text in (extra or {}).items():
            write_text(directory / name, text)
        if companions is not None:
            copy_companions(companions, directory)
        directory.chmod(0o777 & ~_umask())
        require_absent(path)
        os.rename(directory, path)
    return path


def encode(
    name: str, value: torch.Tensor | ExpertWeights | PackedWeight, layout: ExpertsLayout | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the (name, tensor) pairs of a file for a pair that `write_checkpoint` takes.

    NaN in a packed weight, which readers refuse, is a ValueError that names the tensor.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if isinstance(value, ExpertWeights):
        tensors = MODELOPT.encode(name, value, layout or ExpertsLayout())
    else:
        tensors = MODELOPT.encode_dense(name, value)
    for key, tensor in tensors:
        MODELOPT.check_values(key, tensor)
        yield key, tensor


def write_configs(directory: Path, config: dict[str, Any]) -> None:
    """Write config.json, from the model's, and hf_quant_config.json beside the weights of a checkpoint.

    Warn of linears that engines merge and that differ.
    """
    from thunder_moe import __version__

    producer = {"name": "thunder_moe", "version": __version__}
    files = TensorFiles(directory)
    modules = sort_modules(files)
    quantized = {
        path: next(iter(block.modules.values())) for path, block in modules.experts.items() if block.is_quantized
    }
    formats = {path: format_of(module).number_format for path, module in (quantized | modules.dense).items()}
    plain = [info for block in modules.experts.values() if not block.is_quantized for info in block.infos()]
    plain += [files[name] for name in modules.others]
    ignore = ignored_modules(((info.name, info.shape) for info in plain), modules.dense)
    quantization_config, hf_quant_config = MODELOPT.configs(ignore, producer, formats)
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and "quantization_config" in text_config:
        config["text_config"] = {key: value for key, value in text_config.items() if key != "quantization_config"}
    write_json(directory / "config.json", config | {"quantization_config": quantization_config})
    write_json(directory / "hf_quant_config.json", hf_quant_config)
    scales: dict[str, float | None] = {}
    for path, module in modules.dense.items():
        if f"{path}{_GLOBAL_SCALE}" in files:
            scales[path] = files.read(f"{path}{_GLOBAL_SCALE}").item()
        elif module.is_mxfp8:
            scales[path] = None
    if fused := [name for name, info in files.infos.items() if name.endswith(_FUSED_GLOBAL_SCALE) and info.shape]:
        words = "%s and %d more have a global scale for each expert, which only this package and its vLLM plugin read"
        logger.warning(words, fused[0], len(fused) - 1)
    for words in merge_conflicts(ignore, scales):
        logger.warning("elsewhere the results will differ: %s", words)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all; an error names it and leaves an earlier file unchanged."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):  # a full disk: the error of a write names no file
            error.filename = error.filename or str(unfinished)
        raise


def parse_size(size: int | str) -> int:
    """Return the bytes of a size such as 1000, "500MB" or "5GB"; raise a ValueError for any other."""
    text = str(size).strip().upper()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        nbytes = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        nbytes = 0
    if nbytes <= 0:
        raise ValueError(f"max_shard_size: got {size!r}, wanted bytes or a size like '5GB'")
    return nbytes


def require_absent(path: Path, argument: str = "path") -> None:
    """Raise a FileExistsError if a path exists, also as a link to nothing: nothing is overwritten."""
    if os.path.lexists(path):
        raise FileExistsError(f"{argument}: {path} exists already; remove it or choose another")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
