"""The files that go along with the weights of a checkpoint: tokenizer, processor, templates, code, licence.
Called by convert and writer; calls nothing of the package.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

_LOGGER = logging.getLogger(__name__)

# Endings of weights in any form, and of unfinished downloads.
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data", ".npz",
    ".npy", ".pkl", ".tflite", ".ot", ".distcp", ".nemo", ".engine", ".mlmodel",
)  # fmt: skip
_UNFINISHED = (".incomplete", ".unfinished", ".lock", ".tmp")
# Files that the conversion writes itself, or that describe the source's weights.
_CONFIGS = ("config.json", "hf_quant_config.json", "adapter_config.json")


def copy_companions(source: Path, destination: Path, *, skip: tuple[Path, ...] = ()) -> None:
    """Copy everything of a checkpoint but weights, their indices and configs; hidden files stay behind.

    Subfolders are copied unless they hold weights (another form of the model) or are in `skip`. Existing files of the
    destination stay. Links to files, like the hub's cache has, are followed; links to folders are not.
    """
    left_out = {path.resolve() for path in (*skip, destination)}
    for folder, subfolders, names in os.walk(source, onerror=_raise):
        here = Path(folder)
        subfolders[:] = sorted(
            name for name in subfolders if _is_visible(name) and (here / name).resolve() not in left_out
        )
        if here != source and any(name.endswith(_WEIGHTS) for name in names):
            subfolders.clear()
            continue
        for name in sorted(names):
            file = here / name
            target = destination / file.relative_to(source)
            is_config = here == source and name in _CONFIGS
            of_weights = name.endswith((*_WEIGHTS, *_UNFINISHED, ".index.json"))
            if is_config or of_weights or not _is_visible(name) or target.exists():
                continue
            if not file.is_file():
                _LOGGER.warning("%s is not copied: it is a link to nothing, or no regular file", file)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _raise(error: OSError) -> None:
    raise error


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"
