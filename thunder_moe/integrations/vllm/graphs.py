"""The key by which vLLM finds the graphs that it has compiled and kept: it tells whose kernels run the 4-bit layers.
Called by plugin, methods and linears; calls vllm.envs.

vLLM makes keys of its settings and of the environment variables that it knows. A graph with our operators is not for
weights that its own kernels have repacked, nor the other way round, and vLLM would not see which it is.
"""

from __future__ import annotations

import vllm.envs

from thunder_moe.formats.block_format import BlockFormat

__all__ = ["add_to_key", "note"]

_choices: set[str] = set()  # of all models of this process


def note(what: str, format: BlockFormat, ours: bool) -> None:
    """Notes whose kernels run the "experts" or "dense layers" of a number format in a model of this process."""
    _choices.add(f"{what} in {format.name}: {'thunder_moe' if ours else 'vLLM'}")


def add_to_key(variable: str) -> None:
    """Adds this package's version and what was noted to the key, under the name of an environment variable."""
    vllm.envs.environment_variables[variable] = _key


def _key() -> str:
    """vLLM asks in processes, too, that are to have no CUDA context: this makes none."""
    from thunder_moe import __version__

    return f"thunder_moe {__version__} {sorted(_choices)}"
