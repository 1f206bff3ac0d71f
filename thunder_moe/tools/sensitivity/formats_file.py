"""The JSON file of a measurement and of the formats chosen from it.
Called by the command line and users; calls measure for the classes and checkpoint.writer. `load_formats` reads it for
`quantize_`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from thunder_moe.checkpoint.files import read_json
from thunder_moe.checkpoint.writer import write_json
from thunder_moe.formats.checks import require_path
from thunder_moe.formats.registry import FORMATS
from thunder_moe.tools.sensitivity.measure import WIDE, BlockLoss, Sensitivity


def load_formats(path: str | Path) -> Callable[[nn.Module, str], str | None]:
    """Return the formats that ``python -m thunder_moe sensitivity --budget`` has written, as `quantize_` takes them.

    Use it as ``quantize_(model, format=load_formats("sensitivity.json"))``. Dense layers outside of the file's blocks,
    which `linears` takes, get "nvfp4"; parts of a block that stays 16-bit get None.

    Args:
        path: of the file.

    Returns:
        A function of a module and its qualified name that returns the name of a format, or None for 16 bits. It raises
        a ValueError for experts that the file does not have, because the file is of another model then.

    Raises:
        TypeError: the path is neither a string nor a path.
        FileNotFoundError: the file does not exist.
        ValueError: it is another file, or the file of a run without ``--budget``.
    """
    formats = read_formats(path)

    def format_of(module: nn.Module, name: str) -> str | None:
        if name in formats:
            return formats[name]
        if any(name.startswith(f"{block}.") for block, format in formats.items() if format is None):
            return None
        if isinstance(module, nn.Linear):
            return "nvfp4"
        raise ValueError(
            f"format: {str(path)!r} has none for {name!r} ({type(module).__name__}), wanted the file of this model; it"
            f" has {_names(formats)}"
        )

    return format_of


def read_formats(path: str | Path) -> dict[str, str | None]:
    """Return the format of each block by its name, None for 16 bits.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is another file, or the file of a run without ``--budget``.
    """
    content = _read(path, "formats")
    formats = content.get("formats")
    if formats is None and "blocks" in content:
        raise ValueError(
            f"formats: {str(path)!r} has no formats; `python -m thunder_moe sensitivity {path} --budget GB` adds them"
        )
    if not isinstance(formats, dict) or not formats:
        raise ValueError(f"formats: {str(path)!r} has no 'formats' by name, wanted a file of the command sensitivity")
    for name, format in formats.items():
        if format is not None and not (isinstance(format, str) and format in FORMATS):
            raise ValueError(
                f"formats: {str(path)!r} has {format!r} for {name!r}, wanted one of {tuple(FORMATS)}, or null"
            )
    return formats


def format_of_path(formats: dict[str, str | None], path: str) -> str | None:
    """Return the format of a block by its path in a checkpoint, whose first names may differ from the model's.

    A block is found by the same name, or else by the same numbers and the same last name, if only one block has these.

    Raises:
        KeyError: no block is found.
    """
    if path in formats:
        return formats[path]
    alike = [name for name in formats if _key(name) == _key(path)]
    if len(alike) != 1:
        raise KeyError(path)
    return formats[alike[0]]


def _key(name: str) -> tuple[tuple[str, ...], str]:
    return tuple(re.findall(r"(?<![^.])\d+(?![^.])", name)), name.rpartition(".")[2]


def read_sensitivity(path: str | Path) -> tuple[Sensitivity, dict[str, Any]]:
    """Return a measurement and what else is in its file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not such a file.
    """
    content = _read(path, "MODEL")
    try:
        blocks = tuple(BlockLoss(**block) for block in content.pop("blocks"))
        found = Sensitivity(content.pop("loss"), content.pop("tokens"), content.pop("other_bytes"), blocks)
        valid = _is_measurement(found)
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"MODEL: {str(path)!r} has no measurement, wanted a file of the command sensitivity")
    return found, content


def _is_measurement(found: Sensitivity) -> bool:
    """True if names are different ones, numbers finite, and bytes no less than 0."""
    blocks = found.blocks
    names = [block.name for block in blocks]
    keys = all({WIDE} < b.nbytes.keys() == b.increase.keys() == b.error.keys() for b in blocks)
    sizes = [found.tokens, found.other_bytes, *(n for block in blocks for n in block.nbytes.values())]
    numbers = [found.loss, *(x for block in blocks for x in (*block.increase.values(), *block.error.values()))]
    return (
        0 < len(names) == len(set(names))
        and keys
        and all(isinstance(name, str) for name in names)
        and all(type(size) is int and size >= 0 for size in sizes)
        and all(type(number) in (int, float) and isfinite(number) for number in numbers)
    )


def write(path: Path, found: Sensitivity, **more: Any) -> None:
    """Writes a measurement, with what else is to be told of it (formats, model, text): whole or not at all.

    Raises:
        OSError: it cannot be written. Since it may have taken hours, the message holds the content.
    """
    content = {**more, **asdict(found)}
    try:
        write_json(path, content)
    except OSError as error:
        raise OSError(
            f"--output: {error}; the measurement is the line below, which as a file x.json can be the MODEL of this"
            f" command:\n{json.dumps(content)}"
        ) from error


def _read(path: str | Path, argument: str) -> dict[str, Any]:
    require_path(argument, path)
    try:
        return read_json(Path(path))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{argument}: no file {str(path)!r}, wanted one of the command sensitivity") from error
    except ValueError as error:
        raise ValueError(f"{argument}: {error}, wanted a file of the command sensitivity") from error


def _names(formats: dict[str, str | None]) -> str:
    names = list(formats)
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"
