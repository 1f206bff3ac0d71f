"""Add this package's quantization method to vLLM's registry, as the entry point `vllm.general_plugins`.
Called by vLLM in each of its processes; calls configs, which imports vLLM's layers, and graphs.
"""

from __future__ import annotations

import logging
import os

# An environment variable, since the processes that vLLM starts inherit it: "0" turns the plugin off, "1" turns it on
# with versions of vLLM that it was not tested with.
SWITCH = "THUNDER_MOE_VLLM"
TESTED = ("0.32.",)

logger = logging.getLogger("vllm.thunder_moe")  # below vLLM's own logger, which prints


def register() -> None:
    """Register the quantization method "thunder_moe" and model classes, under names of their own.

    `VLLM_PLUGINS` without "thunder_moe" turns it off, and so do `THUNDER_MOE_VLLM=0` and, with a warning, a version of
    vLLM other than the tested ones. `VLLM_BATCH_INVARIANT=1` makes our kernels batch-invariant in the whole process.
    Runs any number of times.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}: got {switch!r}, wanted 0 (off), 1 (on with every version of vLLM) or nothing")
    if switch == "0":
        logger.info("NVFP4, MXFP8 and MXFP4 experts run on vLLM's own kernels: %s=0.", SWITCH)
        return
    version = _vllm_version()
    if switch != "1" and not version.startswith(TESTED):
        logger.warning(
            "NVFP4, MXFP8 and MXFP4 experts run on vLLM's own kernels: thunder_moe was tested with vLLM %s*, this is"
            " %s; %s=1 tries it.",
            "*, ".join(TESTED), version, SWITCH,
        )  # fmt: skip
        return
    from vllm import ModelRegistry, envs

    from thunder_moe.integrations.vllm.configs import MODELS, register_configs
    from thunder_moe.integrations.vllm.graphs import add_to_key
    from thunder_moe.kernels.batch_invariance import make_batch_invariant

    register_configs()
    add_to_key(SWITCH)
    if envs.VLLM_BATCH_INVARIANT:
        make_batch_invariant()

    for name, module in MODELS.items():  # by name: vLLM imports models in the processes that need them
        ModelRegistry.register_model(f"Thunder{name}", f"thunder_moe.integrations.vllm.{module}:Thunder{name}")


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
