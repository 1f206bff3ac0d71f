"""Logs whose kernels run the layers of a number format, and adds it to the key of vLLM's cache of compiled graphs.
Called by plugin, methods and linears; calls vllm.envs.

vLLM makes keys of its settings and of the environment variables that it knows. A graph with our operators must not run
on weights that vLLM's kernels have repacked, nor the other way round, and vLLM's own key does not distinguish them.
"""

from __future__ import annotations

import vllm.envs
from vllm.logger import init_logger

# vLLM's log, where users look for what runs their experts.
logger = init_logger("vllm.thunder_moe")
_choices: set[str] = set()  # of all models of this process


def decide(what: str, format: str, reason: str | None) -> bool:
    """Return True if `reason`, why vLLM's own kernels run "experts" or "dense layers" in a number format, is None; log
    whose kernels run them, and the reason."""
    _choices.add(f"{what} in {format}: {'thunder_moe' if reason is None else 'vLLM'}")
    layers = f"{format.upper()} {what}"
    if reason is None:
        logger.info_once("%s run on the kernels of thunder_moe (THUNDER_MOE_VLLM=0 turns them off).", layers)
    else:
        say = logger.warning_once if what == "experts" else logger.info_once
        say("%s do not run on the kernels of thunder_moe, but on vLLM's own: %s.", layers, reason)
    return reason is None


def add_to_key(variable: str) -> None:
    """Adds this package's version and the recorded choices to the key, under the name of an environment variable."""
    vllm.envs.environment_variables[variable] = _key


def _key() -> str:
    """Return the addition to the key, without a CUDA context: some of vLLM's processes must not have one."""
    from thunder_moe import __version__

    return f"thunder_moe {__version__} {sorted(_choices)}"
