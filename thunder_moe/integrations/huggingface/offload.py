"""4-bit modules that wait in main memory or on disk, and are on the device that computes during their forward.
Called by on_load, for what a ``device_map`` puts on "cpu" beside an accelerator or on "disk"; calls accelerate's hooks.

Pipeline: a packed module leaves a placeholder in the model; its tensors go to main memory, or to transformers for its
offload folder -> accelerate gives the placeholder a hook, which says where to compute -> the module comes back with
a hook that moves all of its tensors. (Accelerate's own hooks move parameters of the module that is called; our tensors
are buffers of its children.)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from thunder_moe.integrations.huggingface.loading import mark_initialized

__all__ = ["Offloaded"]


class Offloaded:
    """A module that is out of the model until `put_back`.

    Args:
        model: the module's model.
        name: of the module.
        files: gets the tensors by their full names, for transformers to write to disk; None: they stay in main memory.

    Raises:
        ValueError: the module has other tensors, which are not loaded yet.
    """

    def __init__(self, model: nn.Module, name: str, files: dict[str, Tensor] | None) -> None:
        from accelerate.utils import set_module_tensor_to_device

        self._model, self._name, self._module = model, name, model.get_submodule(name)
        own = dict([*self._module.named_parameters(), *self._module.named_buffers()])
        if others := [each for each, tensor in own.items() if tensor.is_meta]:
            raise ValueError(
                f"device_map: {name} has {', '.join(others)} beside its weights, which cannot be offloaded"
            )
        tensors: dict[str, Tensor] = {}
        for each, tensor in own.items():
            tensors[each] = tensor.detach().to("cpu", copy=True).contiguous()
            set_module_tensor_to_device(self._module, each, "meta")
        self._in_memory = tensors if files is None else None
        if files is not None:
            files |= {f"{name}.{each}": tensor for each, tensor in tensors.items()}
        placeholder: Any = nn.Linear(1, 1, bias=False, device="meta")  # has a parameter, so accelerate gives it a hook
        mark_initialized(placeholder, placeholder.weight)
        model.set_submodule(name, placeholder)

    def put_back(self) -> None:
        """Put the module into the model again, once accelerate has dispatched it."""
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module
        from accelerate.utils import PrefixedDataset

        given = vars(self._model.get_submodule(self._name))["_hf_hook"]
        weights: Any = self._in_memory or PrefixedDataset(given.weights_map.dataset, f"{self._name}.")
        hook = AlignDevicesHook(
            execution_device=given.execution_device,
            offload=True,
            weights_map=weights,
            offload_buffers=True,
            place_submodules=True,
            skip_keys=given.skip_keys,
        )
        self._model.set_submodule(self._name, self._module)
        add_hook_to_module(self._module, hook)
