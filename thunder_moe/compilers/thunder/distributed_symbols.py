"""The symbols of weights and results that are spread over ranks: meta, implementation and gradient of each.
Called by trace.py, executor.py and parallel.thunder; calls symbols.py to register them, and torch.distributed.

The local tensor of a DTensor; the sum over ranks; a tensor whose gradient is the sum of all ranks' gradients.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from thunder.core.prims import get_grad, put_grad
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_moe.compilers.thunder.symbols import register

__all__ = ["local_shard", "sum_gradient", "sum_of_ranks"]


def _local_meta(dtensor: Any) -> TensorProxy:
    return TensorProxy(like=dtensor.local_tensor, requires_grad=dtensor.requires_grad)


def _local_gradient(dtensor: Any) -> TensorProxy:
    out: TensorProxy = local_shard(dtensor)
    if dtensor.requires_grad:
        put_grad(dtensor, _to_dtensor(get_grad(out), dtensor))
    return out


def _dtensor_of(local: Tensor, like: Any) -> Any:
    sizes = dict(shape=like.shape, stride=like.stride())
    return type(like).from_local(local, like.device_mesh, like.placements, run_check=False, **sizes)


local_shard = register("moe_local_shard", lambda dtensor: dtensor.to_local(), _local_gradient, meta=_local_meta)
_to_dtensor = register("moe_to_dtensor", _dtensor_of, meta=lambda local, like: type(like)(like=like))


# ---- sums over the ranks of a process group


def _sum(x: Tensor, group: Any) -> Tensor:
    out = x.clone()  # x may be saved for the backward
    dist.all_reduce(out, group=group)
    return out


def _sum_backward(x: TensorProxy, group: Any) -> TensorProxy:
    out: TensorProxy = sum_of_ranks(x, group)
    put_grad(x, get_grad(out))
    return out


def _gradient_backward(x: TensorProxy, group: Any) -> TensorProxy:
    out: TensorProxy = sum_gradient(x, group)
    put_grad(x, sum_of_ranks(get_grad(out), group))
    return out


def _like_first(x: TensorProxy, group: Any) -> TensorProxy:
    return TensorProxy(like=x)


sum_of_ranks = register("moe_sum_of_ranks", _sum, _sum_backward, meta=_like_first)
sum_gradient = register("moe_sum_gradient", lambda x, group: x.view_as(x), _gradient_backward, meta=_like_first)
