"""Counts the calls of the dense operator.
Called by the tests of NVFP4Linear and of quantize_; calls torch alone.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DenseCalls(TorchDispatchMode):
    """The number of calls inside of it, as `count`."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.thunder_moe.f16a_nvfp4weight_scaled_mm.default
        return function(*args, **(kwargs or {}))
