"""`moe_executor`, the Thunder executor: what it intercepts while Thunder traces a model.
Called by users as ``thunder.jit(model, executors=[moe_executor])``; calls thunder_symbols and thunder_transform.

A call of grouped_mm while tracing -> the executor's own differentiable symbol, and the rewrite joins the compilation
that is under way. Thunder runs a compilation's transforms after tracing, so the rewrite sees the whole trace.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from thunder_moe.compilers.thunder.compat import import_thunder, put_first

import_thunder()

import thunder.torch as ltorch  # noqa: E402
from thunder.core.compile_data import get_compile_data  # noqa: E402
from thunder.extend import register_executor  # noqa: E402

from thunder_moe.compilers.thunder import nvfuser  # noqa: E402
from thunder_moe.compilers.thunder.rewrite import NVFP4Rewrite  # noqa: E402
from thunder_moe.compilers.thunder.symbols import (  # noqa: E402
    EXECUTOR,
    grouped_mm,
    moe_route,
    nvfp4_combine,
    nvfp4_grouped_mm,
    nvfp4_grouped_swiglu,
)

__all__ = ["moe_executor"]

moe_executor = register_executor(EXECUTOR)
nvfuser.register()
_REWRITE = NVFP4Rewrite()


def _join_compilation() -> None:
    """Puts the rewrite first among the transforms of the compilation under way (pruning ones would drop its checks)."""
    data = get_compile_data()
    if data is not None:
        moe_executor.attached(data)
        put_first(data, _REWRITE)


def _grouped_mm_lookaside(mat_a, mat_b, offs=None, bias=None, out_dtype=None):
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None:
        return ltorch._grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    _join_compilation()
    return grouped_mm(mat_a, mat_b, offs, out_dtype)


def _lookaside(symbol):
    def call(*args, **kwargs):
        _join_compilation()
        return symbol(*args, **kwargs)

    return call


moe_executor._lookasides.update(
    {
        torch._grouped_mm: _grouped_mm_lookaside,
        F.grouped_mm: _grouped_mm_lookaside,
        **{
            getattr(torch.ops.thunder_moe, symbol.name): _lookaside(symbol)
            for symbol in (moe_route, nvfp4_grouped_mm, nvfp4_grouped_swiglu, nvfp4_combine)
        },
    }
)
