"""The safetensors files of a checkpoint: has all headers checked against the files, then reads one tensor at a time.
Called by the modules of checkpoint that read tensors, quantization.kept_layers, tools and integrations.huggingface;
calls safetensors.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from thunder_moe.formats.checks import require_path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# Endings of the names of tensors that are floating-point in every model.
_FLOAT_NAMES = (".weight", ".bias", "_proj", "_bias", ".sinks")
# Files kept open: the tensors of one layer are in two or three shards; closing a file releases its mapping.
_OPEN_FILES = 4


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header of a file; `dtype` is safetensors' word, such as "BF16", "U8", "F8_E4M3"."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]

    def error(self, message: str) -> ValueError:
        """Return a ValueError that names the file and the tensor."""
        return ValueError(f"{self.file}: tensor {self.name!r} {message}")

    def require_float(self) -> None:
        """Raise a ValueError if a weight or bias of a 16-bit module, by its name, has integers or 8-bit floats."""
        if self.name.endswith(_FLOAT_NAMES) and self.dtype not in ("F64", "F32", "BF16", "F16"):
            raise self.error(f"has dtype {self.dtype}, wanted F32, BF16 or F16 of a weight that is not quantized")

    def require(self, dtypes: tuple[str, ...], shape: tuple[int, ...] | None, why: str = "") -> None:
        """Raise a ValueError unless the tensor has one of these dtypes and this shape, if it is given."""
        if self.dtype not in dtypes or (shape is not None and self.shape != shape):
            wanted = f"{' or '.join(dtypes)}" + (f" of shape {shape}" if shape is not None else "")
            raise self.error(f"has dtype {self.dtype} and shape {self.shape}, wanted {wanted}{why}")


class TensorFiles:
    """All tensors of a checkpoint directory by name; `argument` is the name of its path in messages.

    Reads every header and checks it against its file's size, and the index against the headers. A checkpoint without
    files raises a FileNotFoundError here, a broken one a ValueError that names the file, before any tensor is read.
    """

    def __init__(self, path: Path, argument: str = "path") -> None:
        self.path = path
        self.infos: dict[str, TensorInfo] = {}
        self._open: OrderedDict[Path, Any] = OrderedDict()
        index = path / INDEX_NAME
        if index.is_file():
            self._read_index(index)
        elif (path / SINGLE_NAME).is_file():
            self.infos = _read_header(path / SINGLE_NAME)
        else:
            raise FileNotFoundError(f"{argument}: {path} has neither {INDEX_NAME} nor {SINGLE_NAME}")

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def __getitem__(self, name: str) -> TensorInfo:
        return self.infos[name]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a tensor on the CPU, or only its part at an index: a view of the mapped file, to copy before a change.

        A ValueError names file and tensor if safetensors cannot read it.
        """
        info = self.infos[name]
        try:
            file = self._file(info.file)
            tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except SafetensorError as error:
            raise info.error(f"cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Close all files; views of them stay valid until they are dropped."""
        self._open.clear()

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(str(path), framework="pt")
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]

    def _read_index(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index}: got no 'weight_map', wanted a mapping of tensor names to files")
        first: dict[str, str] = {}
        for name, file in weight_map.items():
            _check_inside(index, name, file)
            first.setdefault(file, name)
        for file, name in first.items():
            if not (self.path / file).is_file():
                raise FileNotFoundError(f"{index}: names {file} for tensor {name!r}, which is not there")
        self.infos = read_headers(self.path / file for file in first)
        for name, file in weight_map.items():
            if name not in self.infos or self.infos[name].file != self.path / file:
                raise ValueError(f"{self.path / file}: has no tensor {name!r}, which {INDEX_NAME} places there")


def _check_inside(index: Path, name: str, file: Any) -> None:
    """Raise a ValueError unless an index names a file inside of its directory for a tensor."""
    if not isinstance(file, str) or not file:
        raise ValueError(f"{index}: names {file!r} for tensor {name!r}, wanted the name of a file")
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    if posix.is_absolute() or windows.anchor or ".." in (*posix.parts, *windows.parts):
        raise ValueError(f"{index}: names {file!r} for tensor {name!r}, wanted a file inside {index.parent}")


def read_headers(files: Iterable[Path]) -> dict[str, TensorInfo]:
    """Return the tensors of safetensors files, by name. A broken file, or a tensor in two of them, is a ValueError."""
    infos: dict[str, TensorInfo] = {}
    for file in files:
        for info in _read_header(file).values():
            if info.name in infos:
                raise info.error(f"is also in {infos[info.name].file}, wanted in one file only")
            infos[info.name] = info
    return infos


def require_inside(files: Iterable[str], directory: Path) -> None:
    """Raise a ValueError for a file that is not inside a directory, by its path: links are followed."""
    for file in files:
        path = Path(file)
        if not path.is_relative_to(directory) or ".." in path.relative_to(directory).parts:
            raise ValueError(f"{directory}: its index names the file {file}, wanted a file inside the directory")


def find_checkpoint(path: str | Path, revision: str | None = None, *, argument: str = "path") -> Path:
    """Return the directory of a checkpoint, without network access: a path, or a hub model in the local cache.

    Args:
        path: of the directory, or the name of a hub model.
        revision: of the hub model; None: its main one.
        argument: the name of the path in messages.

    Raises:
        TypeError, ValueError: as `expand_user`.
        FileNotFoundError: there is neither such a directory nor such a model.
    """
    directory = expand_user(path, argument)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise FileNotFoundError(f"{argument}: {directory} is a file, wanted the directory of a checkpoint")
    why = "huggingface_hub, which would look in the local cache, is not installed"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        pass
    else:
        try:
            return Path(snapshot_download(str(path), revision=revision, local_files_only=True))
        except (ValueError, OSError) as error:  # not a model's name, or not in the cache
            why = f"the local Hugging Face cache has no model of that name ({type(error).__name__})"
    raise FileNotFoundError(f"{argument}: {path} is not a directory, and {why}")


def expand_user(path: str | os.PathLike[Any], argument: str) -> Path:
    """Return the path with ``~`` replaced by the home directory.

    What is not a path is a TypeError, an unknown home a ValueError; both name the argument.
    """
    require_path(argument, path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{argument}: got {str(path)!r}, wanted the name of a user with a home directory") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; anything else in it is a ValueError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, wanted a JSON object")
    return value


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name, after safetensors' check of the header against the file."""
    with path.open("rb") as file:
        try:
            with safe_open(str(path), framework="pt"):
                length = int.from_bytes(file.read(8), "little")
        except SafetensorError as error:
            raise ValueError(f"{path}: is truncated or no safetensors file ({error})") from error
        header = json.loads(file.read(length), object_pairs_hook=partial(_without_repeats, path))
    header.pop("__metadata__", None)
    return {name: TensorInfo(name, path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _without_repeats(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise for repeated keys (safetensors silently takes one of them)."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path}: {repeated!r} is twice in the header, wanted once")
    return found
