"""Adds to the key of vLLM's cache of compiled graphs whose kernels run the 4-bit layers.
Called by plugin, methods and linears; calls vllm.envs.

vLLM makes keys of its settings and of the environment variables that it knows. A graph with our operators must not run
on weights that vLLM's kernels have repacked, nor the other way round, and vLLM's own key does not distinguish them.
"""

from __future__ import annotations

import vllm.envs

from thunder_moe.formats.block_format import BlockFormat

__all__ = ["add_to_key", "record_choice"]

_choices: set[str] = set()  # of all models of this process


def record_choice(what: str, format: BlockFormat, ours: bool) -> None:
    """Records whose kernels run the "experts" or "dense layers" of a number format in a model of this process."""
    _choices.add(f"{what} in {format.name}: {'thunder_moe' if ours else 'vLLM'}")


def add_to_key(variable: str) -> None:
    """Adds this package's version and the recorded choices to the key, under the name of an environment variable."""
    vllm.envs.environment_variables[variable] = _key


def _key() -> str:
    """Return the addition to the key, without a CUDA context: some of vLLM's processes must not have one."""
    from thunder_moe import __version__

    return f"thunder_moe {__version__} {sorted(_choices)}"
