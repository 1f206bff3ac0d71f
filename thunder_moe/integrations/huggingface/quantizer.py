"""transformers' quantizer plug-in: ``from_pretrained`` of a ModelOpt or compressed-tensors NVFP4 checkpoint.
Called by transformers, which knows it by its import (for compressed-tensors by `register`). Imported by registration,
checkpoint, and quantization.families for `FAMILIES`; calls thunder_moe.checkpoint to read, families to place.

Pipeline: skeleton on "meta" -> experts swapped for `NVFP4Experts`, 4-bit dense layers for `NVFP4Linear` on "meta" ->
transformers loads all else, allocates -> 4-bit weights are read from the files into place, layer by layer -> dense
layers that read the same rows get one weight.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from thunder_moe.checkpoint import Checkpoint, ExpertsLayout
from thunder_moe.checkpoint.formats.compressed_tensors import COMPRESSED_TENSORS
from thunder_moe.dense_names import is_read_by_code
from thunder_moe.finetune.lora import ADAPTER_NAME, restore_adapters_
from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.integrations.huggingface import attention, implementation, sharding  # noqa: F401  (two register)
from thunder_moe.integrations.huggingface.checkpoint_names import ModelNames
from thunder_moe.integrations.huggingface.configs import METHOD, ON_LOAD, NVFP4CheckpointConfig, ThunderMoeConfig
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_weights
from thunder_moe.integrations.huggingface.families import FAMILIES, put_experts
from thunder_moe.integrations.huggingface.forms import form_of
from thunder_moe.integrations.huggingface.loading import PackedQuantizer, mark_initialized
from thunder_moe.integrations.huggingface.on_load import ThunderMoeQuantizer
from thunder_moe.integrations.huggingface.saving import forget_in_configs
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn import NVFP4Linear
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import join_read_together
from thunder_moe.quantization.replaceable import has_own_forward

__all__ = [
    "FAMILIES", "METHOD", "NVFP4CheckpointConfig", "NVFP4CheckpointQuantizer", "ThunderMoeConfig", "register",
    "unregister",
]  # fmt: skip

logger = logging.getLogger(__name__)

# Temporary name of a dense module's 16-bit weight while transformers loads: the file has a 4-bit one by its own name.
_WAITING = "_thunder_moe_weight"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, in a module's name
_NOT_WEIGHTS = r"\.((input|input_global|k|v|weight_global)_scale|weight_scale(_inv|_2)?)$"


class NVFP4CheckpointQuantizer(PackedQuantizer):
    """Load the 4-bit weights of a checkpoint; see this file's pipeline.

    `layouts` has the path of each block of experts in the model -> its path and layout in the checkpoint.
    """

    requires_calibration = True  # transformers' word for a quantizer that loads quantized checkpoints only

    def __init__(self, quantization_config: NVFP4CheckpointConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.layouts: dict[str, tuple[str, ExpertsLayout]] = {}
        # By paths in the checkpoint, during a load: the packed modules, and those that stay in 16 bits.
        self._packed: dict[str, NVFP4Experts | NVFP4Linear] = {}
        self._dense: dict[str, nn.Module] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: got 'disk', wanted devices: 4-bit experts cannot be offloaded to disk")

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        sharding.add_rules(model, plan)

    def prepare(self, model: Any, files: list[Path]) -> None:
        """Swap the modules whose weights are packed in the checkpoint for packed ones, on "meta"."""
        if not files:
            raise ValueError(f"checkpoint_files: got none of safetensors at {model.name_or_path}, wanted some")
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        names = ModelNames(model)
        self.checkpoint = Checkpoint(files[0].parent)
        self.checkpoint.require_4_bit_experts()
        forms = [form_of(module) for module in names.blocks.values()]
        self.checkpoint.interleaved |= any(form.interleaved for form in forms if form is not None)
        unexpected, missing = [_NOT_WEIGHTS, ADAPTER_NAME.pattern], [rf"\.{_WAITING}$"]
        dense: set[str] = set()
        for source in (*self.checkpoint.experts, *self.checkpoint.dense):
            is_block = source in self.checkpoint.experts
            name = names.experts(source) if is_block else names.dense(source)
            if name is None:
                logger.warning("%s has no counterpart in %s and is not loaded", source, type(model).__name__)
                continue
            path = re.escape(name)
            if is_block:
                self._put_experts(model, source, name)
                unexpected.append(rf"{path}\.")
                missing += [rf"{path}\.(gate_up_proj|down_proj)\.", rf"{path}\.(gate_up|down)_bias$"]
                continue
            dense.add(name)
            unexpected += [rf"{place}\.weight(_packed)?$" for place in (path, re.escape(source))]
            module = model.get_submodule(name)
            if not is_read_by_code(name) and self._stays_4_bit(model, source, name, module):
                self._packed[source] = _put_linear(model, name, module, self.checkpoint.number_format(source))
                missing.append(rf"{path}\.(qdata|scale|global_scale)$")
                continue
            module.register_parameter(_WAITING, module._parameters.pop("weight"))
            mark_initialized(module)  # or transformers would look for its weight
            self._dense[source] = module
        self._refuse_missing(model, names, dense)
        for attribute, patterns in (("unexpected", unexpected), ("missing", missing)):
            attribute = f"_keys_to_ignore_on_load_{attribute}"
            known = getattr(model, attribute)  # a list in transformers 5.7, a set in 5.23
            known = [] if known is None else known
            setattr(model, attribute, type(known)([*known, *patterns]))
        sharding.cut_as_planned(model)

    def _refuse_missing(self, model: Any, names: ModelNames, dense: set[str]) -> None:
        """Raise for experts without a tensor in the checkpoint, and for such linears that are packed in another layer:
        transformers would give them random numbers."""
        there = [names.parameter(name)[0] for name in self.checkpoint.others]
        lacking = [
            name
            for name in names.blocks
            if name not in self.layouts and not any(key.startswith(f"{name}.") for key in there)
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
        """True if a dense layer keeps its 4-bit weight: it is a plain linear, and no other module shares the weight."""
        config: Any = self.quantization_config
        tied = model.all_tied_weights_keys
        return (
            config.linears
            and self.checkpoint.is_4_bit(source)
            and type(module) is nn.Linear
            and f"{name}.weight" not in {*tied, *tied.values()}
        )

    def _put_experts(self, model: nn.Module, source: str, name: str) -> None:
        """Swap an experts module for its NVFP4 form, on "meta"."""
        old = model.get_submodule(name)
        form = self.checkpoint.number_format(source)
        gate_up, down = (_meta_weight(form, name, *view.shape) for _, view in expert_weights(old))
        biases = [p for key, p in old.named_parameters(recurse=False) if key.endswith("_bias")]
        meta_biases = [torch.empty_like(bias, device="meta") for bias in biases]
        new = NVFP4Experts.from_weights(old, gate_up, down, *meta_biases, auto_layout=True)
        parent, _, attribute = name.rpartition(".")
        put_experts(model.get_submodule(parent), attribute, new)
        mark_initialized(new, new.gate_up_proj, new.down_proj)
        self._packed[source] = new
        self.layouts[name] = (source, self.checkpoint.layout(source))

    def finish(self, model: Any) -> None:
        """Read the packed weights, onto the devices where transformers has put the modules."""
        sharding.keep_plans(model)
        sharding.refuse_parallel(model)
        self._refuse_sharded_linears(model)
        sharding.dispatch_weighted_rows(model)
        self.check_shapes(model)
        if self._dense:
            logger.info("%d dense quantized modules are dequantized to 16 bits", len(self._dense))
        total = len(self._packed) + len(self._dense)
        formats = " and ".join(sorted({self.checkpoint.number_format(source).name.upper() for source in self._packed}))
        with progress_bar(total=total, desc=f"loading {formats} weights", unit="module", disable=total < 8) as bar:
            for source, packed in self._packed.items():
                if isinstance(packed, NVFP4Experts):
                    _fill_experts(source, packed, self.checkpoint)
                else:
                    weight = self.checkpoint.read_dense_weight(source, packed.qdata.device, packed.process_part)
                    _set_weight(packed, weight, self.checkpoint, source, "a weight")
                    del weight
                bar.update()
            for source, module in self._dense.items():
                parameter = module._parameters.pop(_WAITING)
                assert parameter is not None
                _fill_dense(parameter, self.checkpoint.read_dense(source, parameter.dtype, parameter.device))
                module.register_parameter("weight", parameter)
                bar.update()
        for name, parameter in model.named_parameters():
            # transformers 5.7 leaves what it renames in the checkpoint's dtype; float32 may be on purpose.
            wanted = self._dtypes.get(name, parameter.dtype)
            if parameter.dtype in (torch.bfloat16, torch.float16) and parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)
        if any(isinstance(module, NVFP4Linear) for module in self._packed.values()):
            join_read_together(model)
        self._restore_adapters(model)
        self.checkpoint.files.close()
        self._packed, self._dense = {}, {}
        forget_in_configs(model, "_is_quantized")  # transformers' Jamba computes otherwise where it is there

    def _restore_adapters(self, model: Any) -> None:
        """Add the adapters that `save_checkpoint` has written beside the weights."""
        modules, prefix = {name for name, _ in model.named_modules(remove_duplicate=False)}, model.base_model_prefix
        stored: dict[str, torch.Tensor] = {}
        for key in self.checkpoint.others:
            if (match := ADAPTER_NAME.search(key)) is None:
                continue
            path = key[: match.start()]
            # A model with a head reads what one without has written, and the reverse.
            names = (path, path.removeprefix(f"{prefix}."), f"{prefix}.{path}")
            if (name := next((name for name in names if name in modules), None)) is not None:
                stored[name + match[0]] = self.checkpoint.read(key)
            elif match[1] == "specs":
                logger.warning("%s has no counterpart in %s; its adapters are not loaded", path, type(model).__name__)
        if stored:
            sharding.refuse_part(model, "whose layers are whole, as the adapters in the checkpoint are")
            try:
                restore_adapters_(model, stored)
            except ValueError as error:
                raise ValueError(f"{self.checkpoint.path}: {error}") from error

    def _refuse_sharded_linears(self, model: Any) -> None:
        """Raise for dense layers that are 4-bit in the file, which tensor parallelism or FSDP would share."""
        for source, linear in self._packed.items():
            if isinstance(linear, NVFP4Linear) and not has_own_forward(linear) and linear.process_part is None:
                raise ValueError(
                    f"linears: {source} is 4-bit in the checkpoint and has a rule of the tp_plan that is not known for"
                    " 4-bit layers, wanted linears=False (dense layers in 16 bits, in parts) or a tp_plan without it"
                )
        if self._dense and getattr(model, "_is_fsdp_managed_module", False):
            raise ValueError(
                f"linears: {next(iter(self._dense))} would be dequantized into a parameter of FSDP, wanted linears=True"
                " (each rank has the 4-bit dense layers whole) or fsdp_size 1"
            )


def _meta_weight(form: BlockFormat, name: str, experts: int, n: int, k: int) -> PackedWeight:
    """Return a packed weight without data for a module of this name."""
    if k % form.block_size:
        raise ValueError(
            f"model: {name} has shape {(experts, n, k)}, wanted in_features of blocks of {form.block_size}"
        )
    qdata = torch.empty(experts, n, k // form.codes_per_byte, dtype=form.code_dtypes[0], device="meta")
    scale = torch.empty(experts, n, k // form.block_size, dtype=form.scale_dtype, device="meta")
    others = (torch.empty(experts, dtype=torch.float32, device="meta"),) if form is NVFP4 else ()
    weight: PackedWeight = WEIGHTS[form.name](qdata, scale, *others)
    return weight


def _put_linear(model: nn.Module, name: str, linear: Any, form: BlockFormat) -> NVFP4Linear:
    """Swap a linear for its NVFP4 (or MXFP8) form, on "meta"."""
    weight = _meta_weight(form, name, 1, linear.out_features, linear.in_features)
    new = NVFP4Linear(weight, linear.bias, weight_dtype=linear.weight.dtype, auto_layout=True)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new.train(linear.training))
    mark_initialized(new)
    return new


def _set_weight(module: Any, weight: PackedWeight, checkpoint: Checkpoint, source: str, kind: str) -> None:
    """Give a module a weight of the checkpoint, in the layout that its kernels read best."""
    wanted = (getattr(module, "num_experts", 1), module.out_features, module.in_features)
    if weight.shape != wanted:
        raise ValueError(f"{checkpoint.path}: {source} has {kind} {weight.shape}, wanted {wanted}")
    module.set_weight(lay_out(weight, "auto"))


def _fill_dense(parameter: Any, weight: Tensor) -> None:
    """Give a parameter, or the part of it that this rank has, its values."""
    if not hasattr(parameter, "device_mesh"):
        parameter.data.copy_(weight)
        return
    from torch.distributed.tensor import distribute_tensor

    whole: Any = distribute_tensor(  # without communication
        weight.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    parameter.to_local().data.copy_(whole.to_local())


def _fill_experts(source: str, module: NVFP4Experts, checkpoint: Checkpoint) -> None:
    """Read the experts of a layer onto the device of their module."""
    weights = checkpoint.read_experts(source, module.down_proj.qdata.device, module.part)
    _set_weight(module.gate_up_proj, weights.gate_up, checkpoint, source, "up projections")
    _set_weight(module.down_proj, weights.down, checkpoint, source, "down projections")
    for parameter, bias in ((module.gate_up_bias, weights.gate_up_bias), (module.down_bias, weights.down_bias)):
        if parameter is None and bias is None:
            continue
        if parameter is None or bias is None:
            raise ValueError(f"{checkpoint.path}: {source} has biases where the model has none, or lacks its own")
        _fill_dense(parameter, bias)


class _CompressedTensors(QuantizationConfigMixin):
    """Take NVFP4 and MXFP8 from transformers' config of compressed-tensors, and leave it all other formats."""

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
