"""What foreign checkpoints look like: their quantization configs, and their tensor names sorted into modules.
Called by reader and convert; calls files for names, dtypes and shapes, and reads no tensor.

Every format names the tensors of an expert's projection or of a Linear ``<module>.<field>``, or those of all experts
``<experts>.<projection>_<field>``. `sort_modules` maps both to a `Module` with the field names of `FIELDS`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.formats.layouts import BLOCK_SIZE

__all__ = [
    "ExpertBlock",
    "ExpertsLayout",
    "Module",
    "Modules",
    "check_quantization",
    "find_quantization",
    "is_compressed_tensors_nvfp4",
    "is_interleaved",
    "sort_modules",
]

# ModelOpt's algorithms that are read; FP8 stands beside NVFP4 in MIXED_PRECISION, for dense layers alone.
MODELOPT_ALGOS = ("NVFP4", "W4A16_NVFP4")
MODELOPT_LAYER_ALGOS = (*MODELOPT_ALGOS, "FP8")
COMPRESSED_TENSORS_FORMAT = "nvfp4-pack-quantized"
# Models whose fused gate and up rows alternate.
INTERLEAVED_MODEL_TYPES = ("gpt_oss",)

# Foreign field -> ours.
FIELDS = {
    "weight": "weight",
    "weight_packed": "packed",
    "weight_scale": "scale",
    "weight_scale_2": "multiplier",
    "weight_global_scale": "divisor",
    "bias": "bias",
}
# Of MXFP4, of fused experts alone.
MXFP4_FIELDS = {"blocks": "blocks", "scales": "scales"}
# Of 4-bit activations and of the key-value cache, which stay 16-bit here.
ACTIVATION_FIELDS = ("input_scale", "input_global_scale")
CACHE_FIELDS = ("k_scale", "v_scale")
# Foreign projection -> ours.
PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(\w+)\.(\w+)")
_FUSED = re.compile(r"((?:.+\.)?experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:[_.](\w+))?")


@dataclass(frozen=True)
class ExpertsLayout:
    """How a checkpoint of some architecture names and lays out its experts.

    Attributes:
        fused: one tensor per projection for all experts, as Llama 4 and GPT-OSS have it, K before N.
        interleaved: the rows of the fused gate_up projection alternate (GPT-OSS).
        projections: names of gate, up and down of one expert; not used when fused.
    """

    fused: bool = False
    interleaved: bool = False
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass
class Module:
    """The tensors of one projection of one expert, of one projection of all experts, or of a dense module.

    Attributes:
        fields: field in our words -> tensor; foreign ones that have none are written with a dot before them.
    """

    fields: dict[str, TensorInfo] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        weight = self.fields.get("weight")
        low = weight is not None and weight.dtype in ("U8", "F8_E4M3")
        return low or not self.fields.keys().isdisjoint(("packed", "scale", "multiplier", "divisor", "blocks"))

    def any(self) -> TensorInfo:
        """Some tensor of the module, for an error's sake."""
        return next(iter(self.fields.values()))

    def require(self, *fields: str) -> list[TensorInfo]:
        """The tensors of these fields.

        Raises:
            ValueError: one is missing, or there are fields that would change the weight and are not understood.
        """
        for name, info in self.fields.items():
            known = name.startswith(".") and name.endswith((*ACTIVATION_FIELDS, *CACHE_FIELDS))
            if name not in (*fields, "bias") and not known:
                raise info.error(f"is not understood: wanted {', '.join(fields)} alone to decode its module")
        for name in fields:
            if name not in self.fields:
                foreign = next(foreign for foreign, ours in (FIELDS | MXFP4_FIELDS).items() if ours == name)
                beside = next((self.fields[other] for other in fields if other in self.fields), self.any())
                raise beside.error(f"has no {foreign!r} beside it, which decodes it")
        return [self.fields[name] for name in fields]


@dataclass
class ExpertBlock:
    """The experts of one layer.

    Attributes:
        name: their module path in the checkpoint, such as "model.layers.0.mlp.experts".
        modules: ("gate", "up", "down" or "gate_up"; expert) -> tensors. Expert None: one tensor for all experts.
        projections: our name of a projection -> the checkpoint's.
    """

    name: str
    modules: dict[tuple[str, int | None], Module] = field(default_factory=dict)
    projections: dict[str, str] = field(default_factory=dict)

    @property
    def is_quantized(self) -> bool:
        return any(module.is_quantized for module in self.modules.values())

    @property
    def gated(self) -> bool:
        """There is a gate beside the up projection."""
        return any(part in ("gate", "gate_up") for part, _ in self.modules)

    @property
    def is_fused(self) -> bool:
        """One tensor holds all experts."""
        return all(expert is None for _, expert in self.modules)

    def infos(self) -> list[TensorInfo]:
        """All tensors of the block."""
        return [info for module in self.modules.values() for info in module.fields.values()]

    def any(self) -> TensorInfo:
        """Some tensor of the block, for an error's sake."""
        return next(iter(self.modules.values())).any()

    def experts(self) -> range:
        """The numbers of the experts.

        Raises:
            ValueError: a projection of an expert is missing, or quantized and 16-bit ones are mixed.
        """
        parts = {part for part, _ in self.modules}
        numbers = {expert for _, expert in self.modules if expert is not None}
        complete = ({"gate", "up", "down"}, {"up", "down"} if numbers else {"gate_up", "down"})
        mixed = numbers and any(expert is None for _, expert in self.modules)
        if parts not in complete or mixed:
            raise self._error(f"has the projections {sorted(self.projections.values())}, wanted gate, up and down")
        count = max(numbers, default=-1) + 1
        for part in sorted(parts):
            for expert in range(count) if count else [None]:
                module = self.modules.get((part, expert))
                if module is None:
                    raise self._error(f"lacks {self.projections[part]} of expert {expert} of {count}")
                if module.is_quantized != self.is_quantized:
                    raise module.any().error(f"belongs to {self.name}, where some weights are quantized and others not")
        return range(count)

    def layout(self, interleaved: bool) -> ExpertsLayout:
        """How this block is laid out; `interleaved` is said of models whose fused gate and up rows alternate.

        Raises:
            ValueError: the shapes of fused projections fit neither order of their dimensions.
        """
        if not self.is_fused:
            names = tuple(self.projections.get(part, f"{part}_proj") for part in ("gate", "up", "down"))
            return ExpertsLayout(projections=names)  # type: ignore[arg-type]
        return ExpertsLayout(fused=self.k_first(), interleaved=interleaved and "gate_up" in self.projections)

    def k_first(self) -> bool:
        """Whether fused projections lie as (E, in_features, out_features), from their shapes."""
        down = self.modules["down", None].fields
        if "blocks" in down:
            return True  # not these bytes, but the model that they are of
        first = self.modules.get(("gate_up", None)) or self.modules["up", None]
        if "scale" in down and "weight" in down:  # the scales are an eighth of the bytes along in_features
            return down["weight"].shape[1] == 8 * down["scale"].shape[1]
        parts = 2 if ("gate_up", None) in self.modules else 1
        up_shape, down_shape = first.fields["weight"].shape[1:], down["weight"].shape[1:]
        if len(up_shape) == len(down_shape) == 2:
            if up_shape == (down_shape[1], parts * down_shape[0]):
                return True
            if up_shape == (parts * down_shape[1], down_shape[0]):
                return False
        raise first.any().error(f"has dimensions {up_shape}, which do not fit the down projection's {down_shape}")

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.any().file}: module {self.name!r} {message}")


@dataclass
class Modules:
    """The tensors of a checkpoint, sorted.

    Attributes:
        experts: module path -> the experts of a layer, quantized or not.
        dense: module path -> a quantized module that is no expert.
        others: names of all other tensors.
    """

    experts: dict[str, ExpertBlock]
    dense: dict[str, Module]
    others: list[str]


def sort_modules(files: TensorFiles) -> Modules:
    """Sorts the tensors of a checkpoint by their names and dtypes."""
    blocks: dict[str, ExpertBlock] = {}
    dense: dict[str, Module] = {}
    for name, info in files.infos.items():
        fields = FIELDS
        if match := _EXPERT.fullmatch(name):
            path, number, projection, foreign = match.groups()
            expert: int | None = int(number)
        elif match := _FUSED.fullmatch(name):
            path, projection, foreign = match.group(1), match.group(2), match.group(3) or "weight"
            expert, fields = None, FIELDS | MXFP4_FIELDS
        else:
            path, _, foreign = name.rpartition(".")
            dense.setdefault(path, Module()).fields[FIELDS.get(foreign, f".{foreign}")] = info
            continue
        block = blocks.setdefault(path, ExpertBlock(path))
        part = PROJECTIONS.get(projection, projection)
        block.projections[part] = projection
        block.modules.setdefault((part, expert), Module()).fields[fields.get(foreign, f".{foreign}")] = info
    quantized = {path: module for path, module in dense.items() if module.is_quantized}
    others = [info.name for path, module in dense.items() if path not in quantized for info in module.fields.values()]
    others += [module.fields["bias"].name for module in quantized.values() if "bias" in module.fields]
    return Modules(blocks, quantized, others)


def find_quantization(config: dict[str, Any], hf_quant_config: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a checkpoint says of its quantization, None when nothing.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, which older versions of ModelOpt write alone.
    """
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if found is None and hf_quant_config is not None:
        found = {"quant_method": "modelopt", **hf_quant_config.get("quantization", {})}
    return found


def check_quantization(found: dict[str, Any]) -> str:
    """What quantized a checkpoint: "modelopt", "compressed-tensors" or "mxfp4".

    Args:
        found: its quantization_config.

    Raises:
        ValueError: another method, algorithm, format or block size than those that are read here.
    """
    method = found.get("quant_method")
    if method == "modelopt":
        _check_modelopt(found)
    elif method == "compressed-tensors":
        _check_compressed_tensors(found)
    elif method != "mxfp4":
        raise ValueError(f"quant_method: got {method!r}, wanted 'modelopt', 'compressed-tensors' or 'mxfp4'")
    return str(method)


def is_compressed_tensors_nvfp4(found: dict[str, Any]) -> bool:
    """Whether all groups of a compressed-tensors config are NVFP4."""
    groups = found.get("config_groups", {}).values()
    return bool(groups) and all((g.get("format") or found.get("format")) == COMPRESSED_TENSORS_FORMAT for g in groups)


def is_interleaved(config: dict[str, Any]) -> bool:
    """Whether the rows of a model's fused gate_up projection alternate, gate and up."""
    types = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    return any(name in INTERLEAVED_MODEL_TYPES for name in types)


def _check_modelopt(found: dict[str, Any]) -> None:
    algo = found.get("quant_algo")
    if algo == "MIXED_PRECISION":
        for layer, entry in found.get("quantized_layers", {}).items():
            if entry.get("quant_algo") not in MODELOPT_LAYER_ALGOS:
                wanted = f"wanted one of {MODELOPT_LAYER_ALGOS}"
                raise ValueError(f"quant_algo: got {entry.get('quant_algo')!r} for layer {layer!r}, {wanted}")
            _check_group_size(entry.get("group_size"))
    elif algo not in MODELOPT_ALGOS:
        raise ValueError(f"quant_algo: got {algo!r}, wanted one of {(*MODELOPT_ALGOS, 'MIXED_PRECISION')}")
    _check_group_size(found.get("group_size"))
    for group in found.get("config_groups", {}).values():
        if (group.get("weights") or {}).get("num_bits") != 8:
            _check_group_size((group.get("weights") or {}).get("group_size"))


def _check_compressed_tensors(found: dict[str, Any]) -> None:
    for name, group in found.get("config_groups", {}).items():
        form = group.get("format") or found.get("format")
        if form != COMPRESSED_TENSORS_FORMAT:
            raise ValueError(f"format: got {form!r} in {name!r}, wanted {COMPRESSED_TENSORS_FORMAT!r}")
        _check_group_size((group.get("weights") or {}).get("group_size"))
    if not found.get("config_groups"):
        raise ValueError("config_groups: got none, wanted those of a compressed-tensors checkpoint")


def _check_group_size(size: int | None) -> None:
    if size not in (None, BLOCK_SIZE):
        raise ValueError(f"group_size: got {size}, wanted {BLOCK_SIZE}")
