"""Lookasides: symbols that `thunder.jit` traces in place of the functions of parallel.modules that communicate.
Called by compilers.thunder.lookasides, if parallel.modules is imported; calls compilers.thunder.training_symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from thunder_moe.parallel import modules


def _sum_of_ranks(x: Any, mesh: DeviceMesh) -> Any:
    # Symbols cannot be imported above: the executor reads LOOKASIDES when the first of them is registered.
    from thunder_moe.compilers.thunder.training_symbols import sum_of_ranks

    return sum_of_ranks(x, mesh.get_group())


def _sum_gradient(x: Any, mesh: DeviceMesh) -> Any:
    from thunder_moe.compilers.thunder.training_symbols import sum_gradient

    return sum_gradient(x, mesh.get_group())


def _refuse(*args: Any) -> Any:
    raise NotImplementedError(
        "ExpertParallel: thunder.jit does not trace the exchange of tokens; wanted TensorParallel(), or torch.compile"
        " by inductor"
    )


LOOKASIDES: dict[Callable[..., Any], Callable[..., Any]] = {
    modules.sum_of_ranks: _sum_of_ranks,
    modules.sum_gradient: _sum_gradient,
    modules.exchange_layer: _refuse,
    modules.exchange_rows: _refuse,
}
