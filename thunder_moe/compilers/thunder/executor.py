"""`moe_executor`, the Thunder executor: what it intercepts while Thunder traces a model; and the plugin "nvfp4-moe".
Called by users as ``thunder.jit(model, executors=[moe_executor])``, and as ``thunder.compile(model,
plugins="nvfp4-moe")``, whose name thunder_compat.py makes known; calls symbols.py and rewrite.py.

A call of grouped_mm while tracing -> the executor's own differentiable symbol, and the rewrite joins the compilation
that is under way. Thunder runs a compilation's transforms after tracing, so the rewrite sees the whole trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.compile_data import get_compile_data
from thunder.core.dtypes import dtype, to_torch_dtype
from thunder.core.recipe import Plugin, PluginPolicy
from thunder.core.transform_common import Transform
from thunder.extend import Executor, register_executor, resolve_executors

from thunder_moe.compilers import thunder_compat
from thunder_moe.compilers.thunder import nvfuser, thunderfx
from thunder_moe.compilers.thunder.rewrite import NVFP4Rewrite
from thunder_moe.compilers.thunder.symbols import EXECUTOR, OPERATOR_SYMBOLS, SYMBOLS, grouped_mm, moe_experts
from thunder_moe.compilers.thunder.training_symbols import CALLS, local_shard
from thunder_moe.nn.grouped_linear import local_part
from thunder_moe.nn.linear import traced_by_thunder
from thunder_moe.ops.operator import is_eager, is_plain_eager

_OPS = torch.ops.thunder_moe
moe_executor = register_executor(EXECUTOR)
nvfuser.register()
nvfp4_rewrite = NVFP4Rewrite()
thunder_compat.route_thunderfx(
    lambda compiler: moe_executor in resolve_executors(compiler.thunder_options.get("executors")),
    thunderfx.compile_graph,
)


def _join_compilation() -> None:
    """Put the rewrite first among the transforms of the compilation under way (pruning ones would drop its checks).

    Also let the compilation's guards find the hooks of the outermost module.
    """
    data = get_compile_data()
    if data is not None:
        thunder_compat.put_first(data, nvfp4_rewrite)
        for module in data._thunder_module_map.values():
            # They look up the flags of the model's own hooks in Thunder's module, which has none.
            for flags in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
                vars(module)[flags] = getattr(module._model, flags)


def _grouped_mm_lookaside(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None:
        return ltorch._grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
    _join_compilation()
    return grouped_mm(mat_a, mat_b, offs, out_dtype)


def _lookaside(symbol: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _join_compilation()
        # Proxies have Thunder's dtypes, operators take torch's.
        options = {name: to_torch_dtype(value) if isinstance(value, dtype) else value for name, value in kwargs.items()}
        return symbol(*args, **options)

    return call


moe_executor._lookasides.update(
    {
        traced_by_thunder: lambda: True,
        is_plain_eager: lambda tensor: False,
        is_eager: lambda: False,
        local_part: lambda whole, sharded: local_shard(whole) if sharded and whole is not None else whole,
        **thunder_compat.refused_dtensors(),
        torch._grouped_mm: _grouped_mm_lookaside,
        F.grouped_mm: _grouped_mm_lookaside,
        _OPS.trainable_grouped_mm: _grouped_mm_lookaside,
        torch.tensor: thunder_compat.with_python_types("tensor"),
        torch.zeros: thunder_compat.with_python_types("zeros"),
        F.scaled_dot_product_attention: thunder_compat.scaled_dot_product_attention,
        **{getattr(_OPS, name): _lookaside(call) for name, call in (OPERATOR_SYMBOLS | CALLS).items()},
        **{getattr(_OPS, f"f16a_{format}weight_moe_experts"): _lookaside(moe_experts(format)) for format in SYMBOLS},
    }
)


class NVFP4MoE(Plugin):
    """A plugin that runs frozen expert GEMMs with NVFP4 weights, ahead of the recipe's transforms and executors.

    The transform comes first because pruning transforms would drop the checks that it adds to the prologue, the
    executor because Thunder gives an operation to the first executor that accepts it."""

    policy = PluginPolicy.PRE

    def setup_executors(self) -> list[Executor]:
        return [moe_executor]

    def setup_transforms(self) -> list[Transform]:
        return [nvfp4_rewrite]
