"""The choice between `moe_linear_router`, and a router's linear layer with `moe_router` behind it.
Called by nn.llama4 and integrations.huggingface; calls kernels.batch_invariance, nn.autocast and nn.linear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thunder_moe.kernels.batch_invariance import is_batch_invariant
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.nn.linear import traced_by_thunder
from thunder_moe.ops.checks import ACTIVATION_DTYPES
from thunder_moe.routing import LINEAR_ROUTER_TOKENS


def is_one_operator(hidden_TH: Tensor, weight: Any) -> bool:
    """True if `moe_linear_router` computes the logits, too.

    It does so in all graphs of inference, because it reads the batch-invariant mode when it runs. A linear layer of
    torch does not. In eager inference on CUDA it saves a launch for few tokens. Under autocast to another dtype a
    linear layer has other operands.
    """
    if torch.is_grad_enabled() or traced_by_thunder() or hidden_TH.dtype != weight.dtype:
        return False
    if autocast_dtype(hidden_TH) not in (None, hidden_TH.dtype):
        return False
    if torch.compiler.is_compiling():
        return hidden_TH.dtype in ACTIVATION_DTYPES
    if not hidden_TH.is_cuda or hidden_TH.shape[0] > LINEAR_ROUTER_TOKENS or is_batch_invariant():
        return False
    return hidden_TH.dtype in (torch.bfloat16, torch.float16)
