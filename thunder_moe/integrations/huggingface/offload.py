"""4-bit modules that wait in main memory or on disk, and are on the device that computes during their forward.
Called by on_load, for what a ``device_map`` puts on "cpu" beside an accelerator or on "disk"; calls accelerate's hooks.

Pipeline: a packed module leaves a `_Placeholder` in the model; its tensors go to main memory, or to transformers for
its offload folder -> accelerate gives the placeholders hooks, which say where to compute -> the module comes back with
a hook that moves all of its tensors. (Accelerate's own hooks move parameters of the module that is called; our tensors
are buffers of its children.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.integrations.huggingface.loading import mark_initialized
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart

__all__ = ["Offloaded", "separate"]


class _Placeholder(nn.Module):
    """A stand-in for a module while accelerate dispatches a model; its parameter makes accelerate give it a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.offloaded = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
        mark_initialized(self, self.offloaded)


class Offloaded:
    """A module that is out of the model until `put_back`.

    Args:
        parent: of the module.
        key: its name there.
        name: its qualified name.
        on_disk: whether its tensors are left to transformers.

    Attributes:
        tensors: by their names in the module, in main memory; none of a module on disk once `files` was called.

    Raises:
        ValueError: the module has other tensors, which are not loaded yet.
    """

    def __init__(self, parent: nn.Module, key: str, name: str, on_disk: bool) -> None:
        from accelerate.utils import set_module_tensor_to_device

        module = parent._modules[key]
        assert module is not None
        self._parent, self._key, self._name, self._on_disk, self._module = parent, key, name, on_disk, module
        own = dict([*module.named_parameters(), *module.named_buffers()])
        others = [each for each, tensor in own.items() if tensor.is_meta]
        if others:
            raise ValueError(
                f"device_map: {name} has {', '.join(others)} beside its weights, which cannot be offloaded"
            )
        self.tensors: dict[str, Tensor] = {}
        for each, tensor in own.items():
            self.tensors[each] = tensor.detach().to("cpu", copy=True).contiguous()
            set_module_tensor_to_device(module, each, "meta")
        parent._modules[key] = _Placeholder()

    def files(self) -> dict[str, Tensor]:
        """Return the tensors of a module on disk by their full names, and forget them; none of another module."""
        if not self._on_disk:
            return {}
        tensors, self.tensors = self.tensors, {}
        return {f"{self._name}.{each}": tensor for each, tensor in tensors.items()}

    def put_back(self) -> None:
        """Put the module into the model again, once accelerate has dispatched it."""
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module
        from accelerate.utils import PrefixedDataset

        placeholder = self._parent._modules[self._key]
        given = vars(placeholder)["_hf_hook"]
        weights: Any = self.tensors
        if self._on_disk:
            weights = PrefixedDataset(given.weights_map.dataset, f"{self._name}.")
        hook = AlignDevicesHook(
            execution_device=given.execution_device,
            offload=True,
            weights_map=weights,
            offload_buffers=True,
            place_submodules=True,
            skip_keys=given.skip_keys,
        )
        self._parent._modules[self._key] = self._module
        add_hook_to_module(self._module, hook)


def separate(part: NVFP4LinearPart) -> NVFP4Linear:
    """Return a linear of a stack as a module with tensors of its own: offloading a stack would take its parts' away."""
    stack, weight = part.stack, part.packed_weight
    own = weight.with_tensors(tensor.clone() for tensor in weight.tensors())
    bias: nn.Parameter | None = None
    if part.bias is not None and stack.bias is not None:
        bias = nn.Parameter(part.bias.detach().clone(), requires_grad=stack.bias.requires_grad)
    linear = NVFP4Linear(
        lay_out(own, "auto" if stack.auto_layout else stack.layout),
        bias,
        weight_dtype=stack.weight_dtypes[part.index],
        weight_requires_grad=stack.weights_require_grad[part.index],
        auto_layout=stack.auto_layout,
    )
    return linear.train(part.training)
