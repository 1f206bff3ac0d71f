"""Keeps the layers that `calibrate_` has finished on disk, so that a call that was killed resumes behind them.
Called by calibrate; calls checkpoint.partial for the directory, its lock and its checksums, and formats.weight.

``<destination>.partial`` has a file for each layer, with the packed weights in the order in which they were made.
"""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thunder_moe.checkpoint.files import expand_user
from thunder_moe.checkpoint.partial import PartialCheckpoint, open_partial
from thunder_moe.checkpoint.writer import shard_paths
from thunder_moe.formats.block_format import BLOCK_FORMATS
from thunder_moe.formats.weight import WEIGHTS, PackedWeight


@dataclass
class KeptLayers:
    """The finished layers of a model: their directory, if any, and a description of the weights of each, in JSON."""

    partial: PartialCheckpoint | None = None
    layers: list[Any] = dataclasses.field(default_factory=list)

    def read(self, number: int) -> Iterator[PackedWeight]:
        """Yield the packed weights of a finished layer, on the CPU."""
        content = load_file(self._path(number))
        for weight, name in sorted({tuple(key.split(".")[:2]) for key in content}):
            format = BLOCK_FORMATS[name]
            dtypes = zip(format.fields, (format.code_dtypes[0], format.scale_dtype, torch.float32), strict=False)
            tensors: Any = (content[f"{weight}.{name}.{field}"].view(dtype) for field, dtype in dtypes)
            yield WEIGHTS[name](*tensors)

    def add(self, description: Any, weights: Iterable[PackedWeight]) -> None:
        """Write a layer that has just been finished."""
        self.layers.append(description)
        if self.partial is not None:
            content = {
                f"{number:04}.{weight.format.name}.{field}": tensor.contiguous().view(torch.uint8)
                for number, weight in enumerate(weights)
                for field, tensor in zip(weight.format.fields, weight.tensors(), strict=True)
            }
            save_file(content, self._path(len(self.layers) - 1))
            state = self.partial.state
            self.partial.save(done=self.layers, errors=[], shards=[*state["shards"], {}])  # save adds the checksum

    def _path(self, number: int) -> Path:
        assert self.partial is not None
        return shard_paths(self.partial.checkpoint, number, 0)[0]


@contextmanager
def keep_layers(
    destination: str | Path | None, model: nn.Module, batches: list[Any], options: dict[str, Any]
) -> Iterator[KeptLayers]:
    """Open the directory of the finished layers, new or of an interrupted call; nothing is kept without a destination.

    To resume, the tensors of the model (before anything is changed), the batches and the options, name -> value in
    JSON, have to be the same. Raises what `open_partial` raises.
    """
    if destination is None:
        yield KeptLayers()
        return
    job = {"model": _checksum([*model.parameters(), *model.buffers()]), "batches": _checksum(batches)}
    path = expand_user(destination, "destination")
    with open_partial(path, job | options) as partial:
        yield KeptLayers(partial, [*partial.state["done"]])


def _checksum(values: Iterable[Any]) -> int:
    """Return the CRC-32 of tensors and other values."""
    checksum = 0
    for value in values:
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            content: Any = (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
            checksum = zlib.crc32(f"{value.dtype} {tuple(value.shape)}".encode(), zlib.crc32(content, checksum))
        else:
            checksum = zlib.crc32(repr(value).encode(), checksum)
    return checksum
