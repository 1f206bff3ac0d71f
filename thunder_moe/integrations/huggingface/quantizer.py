"""transformers' quantizer plug-in: ``from_pretrained`` of a ModelOpt or compressed-tensors NVFP4 checkpoint.
Called by transformers, to which importing makes it known (`register`: for compressed-tensors, too); imported by
registration and checkpoint; calls thunder_moe.checkpoint to read, experts and families to place.

Pipeline: skeleton on "meta" -> experts swapped for `NVFP4Experts`, 4-bit dense layers for `NVFP4Linear` on "meta" ->
transformers loads all else, allocates -> 4-bit weights are read from the files into place, layer by layer -> those of
dense layers that read the same rows become one.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thunder_moe.checkpoint import Checkpoint, ExpertsLayout
from thunder_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from thunder_moe.checkpoint.formats.registry import check_quantization
from thunder_moe.dense_names import is_read_by_code
from thunder_moe.finetune.lora import restore_adapters_
from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.integrations.huggingface import attention, implementation  # noqa: F401  (entries in transformers)
from thunder_moe.integrations.huggingface.expert_names import expert_source
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks, expert_weights
from thunder_moe.integrations.huggingface.families import put_experts
from thunder_moe.integrations.huggingface.forms import form_of
from thunder_moe.integrations.huggingface.on_load import ThunderMoeQuantizer, refuse_outside
from thunder_moe.integrations.huggingface.on_load_config import ON_LOAD, ThunderMoeConfig
from thunder_moe.integrations.huggingface.saving import SavesNVFP4, forget_in_configs, mark_quantized
from thunder_moe.integrations.huggingface.sharding import (
    add_rules,
    cut_as_planned,
    dispatch_weighted_rows,
    keep_plans,
    refuse_parallel,
    refuse_part,
)
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn import NVFP4Linear
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import join_read_together
from thunder_moe.quantization.replaceable import has_own_forward

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(
        "integrations.huggingface.quantizer needs transformers >= 5.7: pip install 'thunder_moe[transformers]'"
    ) from error

__all__ = [
    "METHOD",
    "NVFP4CheckpointConfig",
    "NVFP4CheckpointQuantizer",
    "ThunderMoeConfig",
    "register",
    "unregister",
]

logger = logging.getLogger(__name__)

METHOD = "thunder_moe"
# Temporary name of a dense module's 16-bit weight while transformers loads: the file has a 4-bit one by its own name.
_WAITING = "_thunder_moe_weight"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, in a module's name
_NOT_WEIGHTS = r"\.((input|input_global|k|v|weight_global)_scale|weight_scale(_inv|_2)?)$"
_ADAPTERS = r"\.lora_([AB]\.[^.]+|specs)$"  # of thunder_moe.finetune.lora.stored_adapters


class NVFP4CheckpointConfig(QuantizationConfigMixin):
    """The quantization config of an NVFP4 checkpoint, as its config.json has it.

    Attributes:
        source: that dictionary.
        linears: whether 4-bit dense layers stay so; else they are dequantized.

    Raises:
        ValueError: a method, algorithm, format or block size that is not read here.
    """

    def __init__(self, source: dict[str, Any], *, linears: bool = True) -> None:
        check_quantization(source)
        self.quant_method: Any = METHOD
        self.source, self.linears = source, linears

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From the dictionary of a checkpoint, or ``{"quant_method": METHOD, "source": that, "linears": ...}``."""
        own = config_dict["quant_method"] == METHOD
        if own and "source" not in config_dict:
            raise ValueError(
                f"quant_method: got {METHOD!r}, this package's word for a checkpoint that is quantized already, wanted"
                f" ThunderMoeConfig(...), whose quant_method is {ON_LOAD!r}, to quantize a 16-bit one while it loads"
            )
        config = cls(config_dict["source"], linears=config_dict["linears"]) if own else cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        return dict(self.source)


@dataclass(frozen=True)
class _Place:
    """Where the experts of a layer go.

    Attributes:
        source: their path in the checkpoint.
        module: in the model.
    """

    source: str
    module: NVFP4Experts


class NVFP4CheckpointQuantizer(SavesNVFP4):
    """Loads the 4-bit weights of a checkpoint; see this file's pipeline.

    Attributes:
        layouts: path of each block of experts in the model -> its path and layout in the checkpoint.
    """

    requires_calibration = True  # transformers' word for a quantizer that loads quantized checkpoints only

    def __init__(self, quantization_config: NVFP4CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.layouts: dict[str, tuple[str, ExpertsLayout]] = {}
        self._places: dict[str, _Place] = {}
        self._dense: dict[str, nn.Module] = {}
        self._linears: dict[str, NVFP4Linear] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, torch.Size] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: got 'disk', wanted devices: 4-bit experts cannot be offloaded to disk")

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        # transformers calls this under the model's dtype as the default one, which must not reach further.
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            self._prepare(model, checkpoint_files)
        finally:
            torch.set_default_dtype(dtype)

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        add_rules(model, plan)

    def _prepare(self, model: nn.Module, checkpoint_files: list[str] | None) -> None:
        refuse_parallel(model)
        if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
            raise ValueError(f"checkpoint_files: got {checkpoint_files}, wanted safetensors files")
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._shapes = {name: t.shape for name, t in chain(model.named_parameters(), model.named_buffers())}
        names = _ModelNames(model)
        refuse_outside(model, checkpoint_files)
        self.checkpoint = Checkpoint(Path(checkpoint_files[0]).parent)
        self.checkpoint.require_4_bit_experts()
        forms = [form_of(module) for module in names.blocks.values()]
        self.checkpoint.interleaved |= any(form.interleaved for form in forms if form is not None)
        unexpected, missing = [_NOT_WEIGHTS, _ADAPTERS], [rf"\.{_WAITING}$"]
        dense: set[str] = set()
        for source in self.checkpoint.experts:
            name = names.experts(source)
            if name is None:
                logger.warning("%s has no counterpart in %s and is not loaded", source, type(model).__name__)
                continue
            self._place(model, source, name)
            unexpected.append(rf"{re.escape(name)}\.")
            missing += [rf"{re.escape(name)}\.(gate_up_proj|down_proj)\.", rf"{re.escape(name)}\.(gate_up|down)_bias$"]
        for source in self.checkpoint.dense:
            name = names.dense(source)
            if name is None:
                logger.warning("%s has no counterpart in %s and is not loaded", source, type(model).__name__)
                continue
            dense.add(name)
            module = model.get_submodule(name)
            if not is_read_by_code(name) and self._stays_4_bit(model, source, name, module):
                self._linears[source] = _put_linear(model, name, module, self.checkpoint.number_format(source))
                missing.append(rf"{re.escape(name)}\.(qdata|scale|global_scale)$")
                unexpected += [rf"{re.escape(place)}\.weight(_packed)?$" for place in (name, source)]
                continue
            module.register_parameter(_WAITING, module._parameters.pop("weight"))
            _mark_initialized(module)  # or transformers would look for its weight
            self._dense[source] = module
            unexpected += [rf"{re.escape(place)}\.weight(_packed)?$" for place in (name, source)]
        self._refuse_missing(model, names, dense)
        for attribute, patterns in (("unexpected", unexpected), ("missing", missing)):
            attribute = f"_keys_to_ignore_on_load_{attribute}"
            known = getattr(model, attribute)  # a list in transformers 5.7, a set in 5.23
            known = [] if known is None else known
            setattr(model, attribute, type(known)([*known, *patterns]))
        cut_as_planned(model)

    def _refuse_missing(self, model: Any, names: _ModelNames, dense: set[str]) -> None:
        """Raises for experts, and for linears that the checkpoint has quantized in another layer, of which it has no
        tensor: transformers would give them random numbers."""
        there = [names.parameter(name) for name in self.checkpoint.others]
        lacking = [
            name
            for name in names.blocks
            if name not in self._places and not any(key.startswith(f"{name}.") for key in there)
        ]
        kinds = {_NUMBER.sub("*", name) for name in dense}
        known = {*there, *model.all_tied_weights_keys}
        lacking += [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and name not in dense
            and _NUMBER.sub("*", name) in kinds
            and f"{name}.weight" not in known
        ]
        if lacking:
            raise ValueError(
                f"path: {self.checkpoint.path} lacks the weights of {', '.join(lacking[:5])}, which the"
                f" {type(model).__name__} of its config.json has"
            )

    def _stays_4_bit(self, model: Any, source: str, name: str, module: nn.Module) -> bool:
        """Whether the 4-bit weight of a dense layer stays so: it is a plain linear's, which no other module shares."""
        config: Any = self.quantization_config
        tied = model.all_tied_weights_keys
        return (
            config.linears
            and self.checkpoint.is_4_bit(source)
            and type(module) is nn.Linear
            and f"{name}.weight" not in {*tied, *tied.values()}
        )

    def _place(self, model: nn.Module, source: str, name: str) -> None:
        """Swaps an experts module for its NVFP4 form, on "meta"."""
        old = model.get_submodule(name)
        shapes = [tuple(view.shape) for _, view in expert_weights(old)]
        form = self.checkpoint.number_format(source)
        for experts, n, k in shapes:
            if k % form.block_size:
                raise ValueError(
                    f"model: {name} has shape {(experts, n, k)}, wanted in_features of blocks of {form.block_size}"
                )
        biases = [p for key, p in old.named_parameters(recurse=False) if key.endswith("_bias")]
        weights = (_meta_weight(form, *shapes[0]), _meta_weight(form, *shapes[1]))
        meta_biases = [torch.empty_like(bias, device="meta") for bias in biases]
        new = NVFP4Experts.from_weights(old, *weights, *meta_biases, auto_layout=True)
        parent, _, attribute = name.rpartition(".")
        put_experts(model.get_submodule(parent), attribute, new)
        for module in (new, new.gate_up_proj, new.down_proj):
            _mark_initialized(module)
        self._places[name] = _Place(source, new)
        self.layouts[name] = (source, self.checkpoint.layout(source))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        keep_plans(model)
        refuse_parallel(model)
        self._refuse_sharded_linears(model)
        dispatch_weighted_rows(model)
        if self._dense:
            logger.info("%d dense quantized modules are dequantized to 16 bits", len(self._dense))
        total = len(self._places) + len(self._linears) + len(self._dense)
        sources = [*(place.source for place in self._places.values()), *self._linears]
        formats = " and ".join(sorted({self.checkpoint.number_format(source).name.upper() for source in sources}))
        with progress_bar(total=total, desc=f"loading {formats} weights", unit="module", disable=total < 8) as bar:
            for place in self._places.values():
                _fill(place, self.checkpoint)
                bar.update()
            for source, linear in self._linears.items():
                _fill_linear(source, linear, self.checkpoint)
                bar.update()
            for source, module in self._dense.items():
                weight = module._parameters.pop(_WAITING)
                assert weight is not None
                _fill_dense(weight, self.checkpoint.read_dense(source, weight.dtype, weight.device))
                module.register_parameter("weight", weight)
                bar.update()
        self._check_shapes(model)
        for name, parameter in model.named_parameters():
            # transformers 5.7 leaves what it renames in the checkpoint's dtype; float32 may be on purpose.
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)
        if self._linears:
            join_read_together(model)
        self._restore_adapters(model)
        self.checkpoint.files.close()
        self._places, self._linears, self._dense, self._dtypes, self._shapes = {}, {}, {}, {}, {}
        forget_in_configs(model, "_is_quantized")  # transformers' Jamba computes otherwise where it is there
        mark_quantized(model)

    def _restore_adapters(self, model: Any) -> None:
        """Adds the adapters that `save_checkpoint` has written beside the weights."""
        modules, prefix = {name for name, _ in model.named_modules(remove_duplicate=False)}, model.base_model_prefix
        stored: dict[str, torch.Tensor] = {}
        for key in self.checkpoint.others:
            if (match := re.search(_ADAPTERS, key)) is None:
                continue
            path = key[: match.start()]
            # A model with a head reads what one without has written, and the reverse.
            names = (path, path.removeprefix(f"{prefix}."), f"{prefix}.{path}")
            name = next((name for name in names if name in modules), None)
            if name is not None:
                stored[name + match[0]] = self.checkpoint.read(key)
            elif match[1] == "specs":
                logger.warning("%s has no counterpart in %s; its adapters are not loaded", path, type(model).__name__)
        if stored:
            refuse_part(model, "whose layers are whole, as the adapters in the checkpoint are")
            try:
                restore_adapters_(model, stored)
            except ValueError as error:
                raise ValueError(f"{self.checkpoint.path}: {error}") from error

    def _refuse_sharded_linears(self, model: Any) -> None:
        """Raises for what tensor parallelism or FSDP would have of dense layers that are 4-bit in the file."""
        for source, linear in self._linears.items():
            if not has_own_forward(linear) and linear.process_part is None:
                raise ValueError(
                    f"linears: {source} is 4-bit in the checkpoint and has a rule of the tp_plan that is not known for"
                    " 4-bit layers, wanted linears=False (dense layers in 16 bits, in parts) or a tp_plan without it"
                )
        if self._dense and getattr(model, "_is_fsdp_managed_module", False):
            raise ValueError(
                f"linears: {next(iter(self._dense))} would be dequantized into a parameter of FSDP, wanted linears=True"
                " (each rank has the 4-bit dense layers whole) or fsdp_size 1"
            )

    def _check_shapes(self, model: Any) -> None:
        """Raises where a tensor of the file took the place of one of another shape, which some versions of transformers
        let pass when a model has a quantizer."""
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            wanted = self._shapes.get(name, tensor.shape)
            if tensor.shape != wanted:
                raise ValueError(
                    f"{self.checkpoint.path}: {name} has shape {tuple(tensor.shape)}, the model wants {tuple(wanted)}"
                )


class _ModelNames:
    """Finds the module of a model that a path in a checkpoint means, by transformers' own renaming of weights."""

    def __init__(self, model: Any) -> None:
        conversions = get_model_conversion_mapping(model)
        self.blocks = expert_blocks(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()
        self._model = model

    def experts(self, source: str) -> str | None:
        """Of a block of experts; None when the model has no such layer.

        Raises:
            ValueError: it has one, of a kind that is not known here.
        """
        keys = [
            self._rename(f"{source}.{key}")[0] for key in ("gate_up_proj", "up_proj", "0.up_proj.weight", "0.w3.weight")
        ]
        for key in keys:
            for name in self.blocks:
                if key.startswith(f"{name}."):
                    return name
        for name, module in self.blocks.items():
            form = form_of(module)
            if form is not None and expert_source(self._model, name, form)[0] == source:
                return name
        for key in keys:
            if key in self._state:
                raise ValueError(f"model: {key} is of experts that are not known here, cannot load {source} into them")
        return None

    def dense(self, source: str) -> str | None:
        """Of a module that is no expert.

        Raises:
            ValueError: the model has its weight merged with others.
        """
        renamed, converted = self._rename(f"{source}.weight")
        if renamed not in self._state:
            return None
        if converted is not None:
            raise ValueError(
                f"model: merges the packed weight of {source} into {renamed}, which is not supported;"
                " thunder_moe.checkpoint.convert(source, destination, linears=False) makes it 16-bit"
            )
        return renamed.removesuffix(".weight")

    def parameter(self, source: str) -> str:
        """The parameter of the model that a tensor becomes, or a part of."""
        return self._rename(source)[0]

    def _rename(self, key: str) -> tuple[str, str | None]:
        return rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)


def _mark_initialized(module: Any) -> None:
    """Tells transformers that it need not initialise a module's parameters."""
    module._is_hf_initialized = True


def _meta_weight(form: BlockFormat, experts: int, n: int, k: int) -> PackedWeight:
    """A packed weight without data."""
    qdata = torch.empty(experts, n, k // form.codes_per_byte, dtype=form.code_dtypes[0], device="meta")
    scale = torch.empty(experts, n, k // form.block_size, dtype=form.scale_dtype, device="meta")
    others = (torch.empty(experts, dtype=torch.float32, device="meta"),) if form is NVFP4 else ()
    weight: PackedWeight = WEIGHTS[form.name](qdata, scale, *others)
    return weight


def _put_linear(model: nn.Module, name: str, linear: Any, form: BlockFormat) -> NVFP4Linear:
    """Swaps a linear for its NVFP4 (or MXFP8) form, on "meta"."""
    n, k = linear.out_features, linear.in_features
    if k % form.block_size:
        raise ValueError(f"model: {name} has shape {(n, k)}, wanted in_features of blocks of {form.block_size}")
    new = NVFP4Linear(_meta_weight(form, 1, n, k), linear.bias, weight_dtype=linear.weight.dtype, auto_layout=True)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new.train(linear.training))
    _mark_initialized(new)
    return new


def _fill_linear(source: str, linear: NVFP4Linear, checkpoint: Checkpoint) -> None:
    """Reads the weight of a dense layer onto the device where transformers put the module, as `_fill`."""
    weight = checkpoint.read_dense_weight(source, linear.qdata.device, linear.process_part)
    wanted = (1, linear.out_features, linear.in_features)
    if weight.shape != wanted:
        raise ValueError(f"{checkpoint.path}: {source} has a weight {weight.shape[1:]}, wanted {wanted[1:]}")
    linear.set_weight(lay_out(weight, "auto"))


def _fill_dense(parameter: Any, weight: Tensor) -> None:
    """Gives a parameter, or the part of it that this rank has, its values."""
    if not hasattr(parameter, "device_mesh"):
        parameter.data.copy_(weight)
        return
    from torch.distributed.tensor import distribute_tensor

    whole: Any = distribute_tensor(  # without communication
        weight.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().data.copy_(whole.to_local())


def _fill(place: _Place, checkpoint: Checkpoint) -> None:
    """Reads the experts of a layer onto the device where transformers put the module, in the layout it reads best."""
    module = place.module
    weights = checkpoint.read_experts(place.source, module.down_proj.qdata.device, module.part)
    for name, linear, weight in (
        ("up", module.gate_up_proj, weights.gate_up),
        ("down", module.down_proj, weights.down),
    ):
        wanted = (linear.num_experts, linear.out_features, linear.in_features)
        if weight.shape != wanted:
            raise ValueError(
                f"{checkpoint.path}: {place.source} has {name} projections {weight.shape}, wanted {wanted}"
            )
        linear.set_weight(lay_out(weight, "auto"))
    for parameter, bias in ((module.gate_up_bias, weights.gate_up_bias), (module.down_bias, weights.down_bias)):
        if parameter is None and bias is None:
            continue
        if parameter is None or bias is None:
            raise ValueError(f"{checkpoint.path}: {place.source} has biases where the model has none, or lacks its own")
        _fill_dense(parameter, bias)


class _CompressedTensors(QuantizationConfigMixin):
    """Replaces transformers' config of compressed-tensors: takes NVFP4 and MXFP8, delegates all other formats to it."""

    original: Any = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        reader = NVFP4CheckpointConfig if COMPRESSED_TENSORS.is_read(config_dict) else cls.original
        return reader.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)


def register() -> bool:
    """Make ``from_pretrained`` read NVFP4 checkpoints of compressed-tensors by this package, until `unregister`.

    transformers itself decodes their experts as if their global scale multiplied. It keeps the other formats of
    compressed-tensors.

    Returns:
        False if they are read by it already.
    """
    current = AUTO_QUANTIZATION_CONFIG_MAPPING.get("compressed-tensors")
    if current is _CompressedTensors:
        return False
    _CompressedTensors.original = current
    AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = _CompressedTensors
    return True


def unregister() -> None:
    """Give compressed-tensors back to transformers."""
    if AUTO_QUANTIZATION_CONFIG_MAPPING.get("compressed-tensors") is _CompressedTensors:
        AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"] = _CompressedTensors.original


register_quantizer(METHOD)(NVFP4CheckpointQuantizer)
register_quantization_config(METHOD)(NVFP4CheckpointConfig)
register_quantizer(ON_LOAD)(ThunderMoeQuantizer)
register_quantization_config(ON_LOAD)(ThunderMoeConfig)
if "modelopt" not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config("modelopt")(NVFP4CheckpointConfig)
