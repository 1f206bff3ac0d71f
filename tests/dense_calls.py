"""Counts the calls of the dense operators.
Called by the tests of NVFP4Linear and of quantize_; calls torch alone.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DenseCalls(TorchDispatchMode):
    """The number of calls inside of it, as `count`."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operators = torch.ops.thunder_moe
        self.count += function in (
            operators.f16a_nvfp4weight_scaled_mm.default,
            operators.f16a_mxfp8weight_scaled_mm.default,
        )
        return function(*args, **(kwargs or {}))
