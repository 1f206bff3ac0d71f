"""Lists the 16-bit modules of a checkpoint for engines, which build all modules that are not listed in 4 bits.
Called by writer; choice takes the name of the head; calls dense_names for the linears that engines merge.

Engines look up the names of their own modules: of a linear, or of the linears that they merge into one; of all experts
of a layer at once; and of the head, which they have even if its weight is tied and the file has none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from thunder_moe.dense_names import READ_TOGETHER

HEAD = "lm_head"
_EXPERTS = re.compile(r"((?:.+\.)?experts)\.")
# Tensors of all experts of a layer that are named beside the experts (Granite).
_BESIDE = re.compile(r"(.+\.)(input_linear|output_linear)\.weight")


def ignored_modules(plain: Iterable[tuple[str, Sequence[int]]], quantized: Collection[str] = ()) -> list[str]:
    """Return the paths for ``ignore`` of config.json and ``exclude_modules`` of hf_quant_config.json, sorted.

    They follow from (name, shape) of the `plain` tensors, which are not 4-bit, and from the paths of the `quantized`
    modules that are not experts.
    """
    modules = set()
    for name, shape in plain:
        experts = _EXPERTS.match(name)
        if experts and len(shape) >= 2:
            modules.add(experts.group(1))
        beside = _BESIDE.fullmatch(name)
        if beside and len(shape) == 3:
            modules.add(f"{beside.group(1)}experts")
        if name.endswith(".weight") and len(shape) >= 2:
            modules.add(name.removesuffix(".weight"))
    if not any(path.rpartition(".")[2] == HEAD for path in (*modules, *quantized)):
        modules.add(HEAD)
    return sorted(modules)


def merge_conflicts(ignored: Collection[str], scales: Mapping[str, float | None]) -> list[str]:
    """Return messages about linears that engines merge into one, and that differ in precision or global scale.

    Args:
        ignored: paths of 16-bit modules.
        scales: path of each NVFP4 module that is not an expert -> its global scale; of each MXFP8 module -> None.
    """
    conflicts = []
    for names in READ_TOGETHER:
        stems = {path.removesuffix(own) for path in scales if (own := path.rpartition(".")[2]) in names}
        for stem in sorted(stems):
            paths = [f"{stem}{name}" for name in names]
            mixed = [path for path in paths if path in scales or path in ignored]
            if any(path in ignored for path in mixed):
                own_bits = {4 if scales[path] is not None else 8 for path in mixed if path in scales}
                bits = " and of ".join(map(str, sorted({*own_bits, 16})))
                conflicts.append(f"{' and '.join(mixed)} are of {bits} bits, which engines refuse")
            elif len({scales[path] is None for path in mixed}) > 1:
                conflicts.append(f"{' and '.join(mixed)} are in NVFP4 and in MXFP8, which engines refuse")
            elif len({scales[path] for path in mixed}) > 1:
                conflicts.append(f"{' and '.join(mixed)} have several global scales, of which engines take the largest")
    return conflicts
