"""The Thunder plugin "nvfp4-moe": ``thunder.compile(model, plugins="nvfp4-moe")``, with any recipe.
Made by thunder.compile (thunder_compat.py tells it the name); calls nothing: it hands moe_executor and its rewrite to
the recipe.

It compiles as ``thunder.jit(model, executors=[moe_executor, ...])`` does, with the recipe's executors and transforms
behind. ``from thunder_moe import moe_executor`` makes the name known, ``thunder_moe.register("thunder")``, too, and
``import thunder_moe`` after thunder.
"""

from __future__ import annotations

from thunder.core.recipe import Plugin, PluginPolicy
from thunder.core.transform_common import Transform
from thunder.extend import Executor

from thunder_moe.compilers.thunder.executor import moe_executor, nvfp4_rewrite

__all__ = ["NVFP4MoE"]


class NVFP4MoE(Plugin):
    """A plugin that runs frozen expert GEMMs with NVFP4 weights, ahead of the recipe's transforms and executors.

    The transform comes first because pruning transforms would drop the checks that it adds to the prologue, the
    executor because Thunder gives an operation to the first executor that accepts it."""

    policy = PluginPolicy.PRE

    def setup_executors(self) -> list[Executor]:
        return [moe_executor]

    def setup_transforms(self) -> list[Transform]:
        return [nvfp4_rewrite]
