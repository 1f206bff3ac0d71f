"""transformers' quantizer plug-in for `ThunderMoeConfig`: a 16-bit checkpoint is quantized while it loads.
Called by transformers, because quantizer registers it; calls choose for the modules, plan to replace them, experts
to pack single weights, and accelerate's hooks to offload.

Pipeline: 16-bit skeleton on "meta" -> the modules that `quantize_` would replace are chosen in it -> transformers reads
the weights of a layer, merges them and hands them to `_Load` -> each weight of experts is packed at once; a module
whose tensors are all there is replaced -> after the load, `quantize_` takes what could not be chosen ahead (tied
weights that are not tied after all).

What a ``device_map`` puts on "cpu" beside an accelerator or on "disk" waits there, and is on the device that computes
during its forward: a packed module leaves a placeholder in the model; its tensors go to main memory, or to transformers
for its offload folder -> accelerate gives the placeholder a hook, which says where to compute -> the module comes back
with a hook that moves all of its tensors. (Accelerate's own hooks move parameters of the module that is called; our
tensors are buffers of its children.)
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.integrations.accelerate import get_device

from thunder_moe.checkpoint.files import read_headers
from thunder_moe.formats.registry import FORMATS
from thunder_moe.integrations.huggingface.configs import ThunderMoeConfig
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, pack_ahead
from thunder_moe.integrations.huggingface.families import TransformersExperts
from thunder_moe.integrations.huggingface.forms import require_form, stored_weights
from thunder_moe.integrations.huggingface.loading import PackedQuantizer, mark_initialized
from thunder_moe.integrations.huggingface.saving import forget_quantization
from thunder_moe.integrations.huggingface.sharded_forward import local_of, sharding_of
from thunder_moe.integrations.huggingface.sharding import refuse_parallel
from thunder_moe.nn.packed import PackedModule
from thunder_moe.quantization.choose import choose_modules, non_finite_problem
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import Quantization
from thunder_moe.quantization.plan import Target, replace_module

_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")  # of experts, as opposed to their biases


class ThunderMoeQuantizer(PackedQuantizer):
    """Quantize the weights of a 16-bit checkpoint as transformers loads them; see this file's pipeline."""

    quantization_config: ThunderMoeConfig

    def __init__(self, quantization_config: ThunderMoeConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError(
                f"config.json: its quantization_config is one for loading ({quantization_config.quant_method!r}), not"
                " a checkpoint's: remove it from a 16-bit checkpoint's file"
            )
        self._device_map: Any = None
        self._dtype: torch.dtype | None = None
        self._load: _Load | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        # Transformers calls it again when it knows what "auto" means.
        self._device_map, self._load = device_map, None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._dtype = dtype
        return dtype

    def prepare(self, model: Any, files: list[Path]) -> None:
        """Refuse files with tensors that are not floating-point; what is quantized is chosen when all is known."""
        for info in read_headers(files).values():
            info.require_float()

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self._load_of(model).units

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        unit = self._load_of(model).units.get(param_name)
        packed = unit is not None and param.ndim > 1 and not param_name.endswith("_bias")
        return unit.bytes_per_weight if unit is not None and packed else param.itemsize

    def get_quantize_ops(self) -> ConversionOps:
        assert self._load is not None
        return self._load

    def _load_of(self, model: Any) -> _Load:
        if self._load is None:
            self._load = _Load(model, self.quantization_config, self._device_map, self._dtype)
        return self._load

    def finish(self, model: Any) -> None:
        """Quantize the rest, and make the model what `quantize_` makes."""
        load, self._load = self._load_of(model), None
        for module in load.offloaded:
            module.put_back()
        self.check_shapes(model)
        load.finish()
        forget_quantization(model)


class _Load(ConversionOps):
    """One call of ``from_pretrained``; transformers calls it with the weights that it has merged for the model."""

    def __init__(self, model: Any, config: ThunderMoeConfig, device_map: Any, dtype: torch.dtype | None) -> None:
        refuse_parallel(model)
        self.model, self.config, self.device_map = model, config, device_map or {"": "cpu"}
        self.units: dict[str, _Unit] = {}  # by the full name of each parameter that is to be quantized
        self.offloaded: list[_Offloaded] = []  # out of the model until accelerate has dispatched it
        with torch.inference_mode(False), torch.no_grad():
            names = {module: name for name, module in model.named_modules()}
            device_of: Any = lambda module: self.device(names[module])  # noqa: E731
            plan = choose_modules(model, **config.options(), device_of=device_of)
        run, chosen = plan.run, plan.chosen
        places = Counter(child for parent in model.modules() for child in parent._modules.values())
        tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
        done: set[nn.Module] = set()
        for module, place in chosen.items():
            together = [module]
            if isinstance(place.family, DenseLinears):
                if self._waits(place.name):  # offloading a stack would take the tensors of its parts away
                    place.family.unstack(module)
                together = place.family.packed_together(module)
            if module in done or not isinstance(place.family, DenseLinears | TransformersExperts):
                continue
            done.update(together)
            unit = _Unit(model, [(member, chosen[member]) for member in together], run)
            # What is not certain, or not of the dtype that transformers is going to load it in, is quantized later.
            ahead = not tied.intersection(unit.waiting) and all(places[member] == 1 for member in together)
            if ahead and all(module.get_parameter(name).dtype == dtype for module, name in unit.waiting.values()):
                self.units |= dict.fromkeys(unit.waiting, unit)

    def device(self, name: str) -> torch.device:
        """Return the device on which a module or parameter of this name will be."""
        if isinstance(self.device_map, str):  # "auto" and the like, before transformers has decided
            accelerator = torch.accelerator.current_accelerator()
            return accelerator or torch.device("cpu")
        return self._main if self._waits(name) else torch.device(get_device(self.device_map, name))

    @property
    def _main(self) -> torch.device:
        """Return the device on which offloaded modules compute."""
        devices = [device for device in self.device_map.values() if str(device) not in ("cpu", "disk")]
        return torch.device(devices[0] if devices else "cpu")

    def _waits(self, name: str) -> str | None:
        """Return where an offloaded module or parameter waits, "cpu" or "disk"; None if it is not offloaded."""
        if isinstance(self.device_map, str):
            return None
        device = str(get_device(self.device_map, name))
        return device if device == "disk" or (device == "cpu" and self._main.type != "cpu") else None

    def convert(
        self, input_dict: dict[str, Any], *args: Any, missing_keys: set[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Take the tensors that are to be quantized; return the others, and what is to be written to disk."""
        others: dict[str, Any] = {}
        try:
            for name in list(input_dict):
                tensor = input_dict.pop(name)
                if name not in self.units:
                    others[name] = tensor
                    continue
                unit, waits = self.units[name], self._waits(name)
                unit.take(name, (tensor[0] if isinstance(tensor, list) else tensor).to(self.device(name)))
                replaced = [] if unit.waiting else unit.replace()
                for each in replaced if waits else ():
                    self.offloaded.append(_Offloaded(self.model, each, others if waits == "disk" else None))
                if missing_keys is not None:
                    missing_keys.discard(name)
        except Exception as error:
            return _Failed(error)
        return others

    def finish(self) -> None:
        """Replace units that lack weights in the checkpoint, and quantize what was not chosen ahead."""
        for unit in dict.fromkeys(self.units.values()):
            if unit.started:
                unit.replace()
        with torch.inference_mode(False), torch.no_grad():
            replaced = any(unit.replaced for unit in self.units.values())
            plan = choose_modules(self.model, **self.config.options(), required=not replaced)
        if plan.chosen:
            plan.quantize_modules()


class _Unit:
    """Modules that are replaced at once: a layer's experts, or the linears of one weight."""

    def __init__(self, model: nn.Module, members: list[tuple[nn.Module, Target]], run: Quantization) -> None:
        self._model, self._members = model, members
        self._run = Quantization(run.pack, run.layout, packs=run.packs)  # with a memo of its own: see `pack_ahead`
        self.bytes_per_weight = FORMATS[members[0][1].format].bits_per_weight / 8  # with its share of a scale
        self.started = self.replaced = False  # a weight of experts has been packed; the modules have been replaced
        # Full names of the parameters that are not loaded yet -> module and name there.
        self.waiting: dict[str, tuple[nn.Module, str]] = {}
        for module, place in members:
            names = (
                ("weight", "bias") if isinstance(module, nn.Linear) else stored_weights(module, require_form(module))
            )
            for name in names:
                if module._parameters.get(name) is not None:
                    self.waiting[f"{place.name}.{name}"] = module, name

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, full_name: str, tensor: Tensor) -> None:
        module, name = self.waiting[full_name]
        parameter, sharding = module.get_parameter(name), sharding_of(module)
        wanted, tensor = local_of(parameter).shape, local_of(tensor)
        where, problem = f"model: {full_name.rpartition('.')[0]!r}", None
        if tensor.shape != wanted:
            where = f"checkpoint: {full_name}"
            problem = f"has shape {tuple(tensor.shape)}, the model's has {tuple(wanted)}"
        elif name in (*_WEIGHTS, "weight"):
            problem = non_finite_problem(tensor, all_experts=sharding is None)
        if sharding is not None:  # of experts that do not divide one process may have too many, and the others wait
            problem = sharding.problem_on_any_rank(problem)
        if problem is not None:
            raise ValueError(f"{where} {problem}")
        if name in _WEIGHTS:
            pack_ahead(module, name, tensor, self._run.memo, self._run.for_module(module).pack, self._run.layout)
            self.started = True
        else:
            # A tensor that was read in inference mode cannot be a parameter outside of it.
            module.register_parameter(name, nn.Parameter(tensor.clone() if tensor.is_inference() else tensor))
        mark_initialized(module.get_parameter(name))
        del self.waiting[full_name]

    @torch.inference_mode(False)
    @torch.no_grad()
    def replace(self) -> list[str]:
        """Replace the modules; return their full names."""
        names = [place.name for _, place in self._members]
        for module, place in self._members:
            path, _, key = place.name.rpartition(".")
            parent = self._model.get_submodule(path)
            new = replace_module(module, place, [(parent, key)], self._run.convert, "quantizing")
            packed = (*new.modules(), *parent.children())
            mark_initialized(*(each for each in packed if isinstance(each, PackedModule | NVFP4Experts)))
        self._members, self._run.memo = [], {}
        self.started, self.replaced = False, True
        return names


class _Offloaded:
    """A module, by its name in a model, that is out of the model until `put_back`.

    Its tensors stay in main memory, or go to `files` by their full names, for transformers to write to disk. Other
    tensors, which are not loaded yet, are a ValueError.
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


class _Failed(dict[str, Any]):
    """The result of a failure. transformers keeps what an operation raises and loads on; this raises on its use."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def items(self) -> Any:
        raise self.error
