"""Sorts the tensors of a checkpoint by their names into experts of layers, quantized modules and others.
Called by formats, decode, reader and quantize; calls files for names, dtypes and shapes, and reads no tensor.

Every format names the tensors of an expert's projection or of a Linear ``<module>.<field>``, and tensors of all experts
``<experts>.<projection>_<field>``. `sort_modules` maps both to a `Module` with its fields.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from thunder_moe.checkpoint.experts import ExpertsLayout
from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.formats.block_format import MXFP8

# Models whose fused gate and up rows alternate.
INTERLEAVED_MODEL_TYPES = ("gpt_oss",)
# Scales of 4-bit activations and of the key-value cache, which stay 16-bit here.
ACTIVATION_FIELDS = ("input_scale", "input_global_scale", "activation_scale")
CACHE_FIELDS = ("k_scale", "v_scale")
# Scales of an FP8 weight. All of them multiply, "weight_scale_inv" and "scale_inv" (of all experts), too.
FP8_SCALE_FIELDS = ("weight_scale_inv", "weight_scale", "scale_inv", "scale")
# Scales of an MXFP8 weight: ModelOpt's and compressed-tensors' name, then the names of MiniMax and transformers (the
# last one for all experts).
MXFP8_SCALE_FIELDS = ("weight_scale", "weight_scale_inv", "scale_inv")
# thunder_moe.finetune.lora stores a module's adapters beside its weight, in this field.
ADAPTERS_FIELD = "lora_specs"
# Fields that only quantized modules have; for modules of fused experts also "blocks" (MXFP4).
QUANTIZED_FIELDS = ("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
# The checkpoint's name of a projection -> its name here.
PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up",
    "w1": "gate", "w3": "up", "w2": "down", "input_linear": "gate_up", "output_linear": "down",
}  # fmt: skip
_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.(\w+)\.(\w+)")
_FUSED = re.compile(r"((?:.+\.)?experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:[_.](\w+))?")
# Granite's checkpoints name no module of experts; it gets its name in the model, "...block_sparse_moe.experts".
_GRANITE = re.compile(r"((?:.+\.)?block_sparse_moe)\.(input_linear|output_linear)\.(\w+)")


@dataclass
class Module:
    """The tensors of one projection of one expert, of one projection of all experts, or of a dense module."""

    fields: dict[str, TensorInfo] = field(default_factory=dict)  # field, as the checkpoint names it -> tensor
    fused: bool = False  # True for the tensors of one projection of all experts

    @property
    def is_quantized(self) -> bool:
        """True if the weight is quantized, by its fields and dtypes."""
        weight = self.fields.get("weight")
        low = weight is not None and weight.dtype in ("U8", "F8_E4M3")
        return low or not self.fields.keys().isdisjoint(QUANTIZED_FIELDS) or (self.fused and "blocks" in self.fields)

    @property
    def mxfp8_scale_field(self) -> str:
        """Return the name that this module has for the scales of an MXFP8 weight."""
        return next((field for field in MXFP8_SCALE_FIELDS if field in self.fields), MXFP8_SCALE_FIELDS[0])

    @property
    def is_mxfp8(self) -> bool:
        """True if the weight is MXFP8: FP8 with a power-of-two scale in one byte for each 32 weights along K."""
        weight, scale = self.fields.get("weight"), self.fields.get(self.mxfp8_scale_field)
        if weight is None or scale is None or weight.dtype != "F8_E4M3":
            return False
        size, (*others, last) = MXFP8.block_size, weight.shape or (0,)
        fits = [(*others, last // size)]
        if len(others) == 2:  # all experts, K ahead of N
            fits.append((others[0], others[1] // size, last))
        return scale.dtype == "U8" or (scale.dtype == "F8_E8M0" and scale.shape in fits)

    @property
    def is_fp8(self) -> bool:
        """True if the weight is FP8 with other scales than MXFP8's."""
        return "weight" in self.fields and self.fields["weight"].dtype == "F8_E4M3" and not self.is_mxfp8

    def any_info(self) -> TensorInfo:
        """Return any tensor of the module, to name in an error."""
        return next(iter(self.fields.values()))

    def require(self, *fields: str) -> list[TensorInfo]:
        """Return the tensors of these fields. One that is missing, or another one beside them, is a ValueError."""
        for name, info in self.fields.items():
            if name not in (*fields, "bias", *ACTIVATION_FIELDS, *CACHE_FIELDS):
                raise info.error(f"is not understood: wanted {', '.join(fields)} alone to decode its module")
        for name in fields:
            if name not in self.fields:
                beside = next((self.fields[other] for other in fields if other in self.fields), self.any_info())
                raise beside.error(f"has no {name!r} beside it, which decodes it")
        return [self.fields[name] for name in fields]


@dataclass
class ExpertBlock:
    """The experts of one layer."""

    name: str  # their module path in the checkpoint, such as "model.layers.0.mlp.experts"
    # ("gate", "up", "down" or "gate_up"; expert) -> tensors. Expert None: one tensor for all experts
    modules: dict[tuple[str, int | None], Module] = field(default_factory=dict)
    projections: dict[str, str] = field(default_factory=dict)  # our name of a projection -> the checkpoint's name

    @property
    def is_quantized(self) -> bool:
        return any(module.is_quantized for module in self.modules.values())

    @property
    def is_fp8(self) -> bool:
        """True if the weights are FP8; `experts` checks that they are alike."""
        modules = self.modules.values()
        return any(module.is_fp8 for module in modules) and not any(module.is_mxfp8 for module in modules)

    @property
    def gated(self) -> bool:
        """True if there is a gate beside the up projection."""
        return any(part in ("gate", "gate_up") for part, _ in self.modules)

    @property
    def is_fused(self) -> bool:
        """True if one tensor per projection holds all experts."""
        return all(expert is None for _, expert in self.modules)

    def infos(self) -> list[TensorInfo]:
        """Return all tensors of the block."""
        return [info for module in self.modules.values() for info in module.fields.values()]

    def any_info(self) -> TensorInfo:
        """Return any tensor of the block, to name in an error."""
        return next(iter(self.modules.values())).any_info()

    def experts(self) -> range:
        """Return the numbers of the experts; empty if they are fused.

        Raises:
            ValueError: a projection of an expert is missing, or projections differ in their number format.
        """
        parts = {part for part, _ in self.modules}
        numbers = {expert for _, expert in self.modules if expert is not None}
        complete = ({"gate", "up", "down"}, {"up", "down"} if numbers else {"gate_up", "down"})
        mixed = numbers and any(expert is None for _, expert in self.modules)
        if parts not in complete or mixed:
            raise self._error(f"has the projections {sorted(self.projections.values())}, wanted gate, up and down")
        count = max(numbers, default=-1) + 1
        most_are_mxfp8 = 2 * sum(module.is_mxfp8 for module in self.modules.values()) > len(self.modules)
        kinds = {"quantized": self.is_quantized, "MXFP8": most_are_mxfp8, "FP8": self.is_fp8}
        for part in sorted(parts):
            for expert in range(count) if count else [None]:
                if (module := self.modules.get((part, expert))) is None:
                    raise self._error(f"lacks {self.projections[part]} of expert {expert} of {count}")
                own = {"quantized": module.is_quantized, "MXFP8": module.is_mxfp8, "FP8": module.is_fp8}
                if (kind := next((kind for kind in kinds if own[kind] != kinds[kind]), None)) is not None:
                    words = f"belongs to {self.name}, where some weights are {kind} and others not"
                    raise module.any_info().error(words)
        return range(count)

    def require_sizes(self, gate_up: tuple[int, int, int], down: tuple[int, int, int]) -> None:
        """Raise a ValueError unless the shapes (E, N, K) of gate and up and of down fit each other."""
        experts, n, k = gate_up
        wanted = (experts, k, n // 2 if self.gated else n)
        if down != wanted:
            info = next(module.any_info() for (part, _), module in self.modules.items() if part == "down")
            raise info.error(f"belongs to down projections of shape {down}, gate and up want {wanted}")

    def layout(self, interleaved: bool) -> ExpertsLayout:
        """Return the layout that this block is written in; `interleaved`: gate and up of the fused experts alternate.

        Fused experts are written per expert, which all engines read. Alternating rows stay fused, because no engine
        reads them per expert.
        """
        if self.is_fused:
            alternates = interleaved and "gate_up" in self.projections
            return ExpertsLayout(fused=alternates, interleaved=alternates)
        names = tuple(self.projections.get(part, f"{part}_proj") for part in ("gate", "up", "down"))
        return ExpertsLayout(projections=names)  # type: ignore[arg-type]

    def k_first(self) -> bool:
        """True if 16-bit or FP8 projections of all experts are (E, in_features, out_features), from their shapes."""
        first = self.modules.get(("gate_up", None)) or self.modules["up", None]
        parts = 2 if ("gate_up", None) in self.modules else 1
        up_shape, down_shape = (m.fields["weight"].shape[1:] for m in (first, self.modules["down", None]))
        if len(up_shape) == len(down_shape) == 2:
            k_first = up_shape == (down_shape[1], parts * down_shape[0])
            n_first = up_shape == (parts * down_shape[1], down_shape[0])
            if k_first and n_first:
                raise first.any_info().error(f"has dimensions {up_shape}, which may be (in, out) or (out, in) features")
            if k_first or n_first:
                return k_first
        raise first.any_info().error(f"has dimensions {up_shape}, which do not fit the down projection's {down_shape}")

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.any_info().file}: module {self.name!r} {message}")


@dataclass
class Modules:
    """The tensors of a checkpoint, sorted."""

    experts: dict[str, ExpertBlock]  # module path -> the experts of a layer, quantized or not
    dense: dict[str, Module]  # module path -> a quantized module that is not an expert
    others: list[str]  # names of all other tensors


def sort_modules(files: TensorFiles) -> Modules:
    """Sort the tensors of a checkpoint by their names and dtypes."""
    blocks: dict[str, ExpertBlock] = {}
    dense: dict[str, Module] = {}
    others: list[str] = []
    for name, info in files.infos.items():
        if name.endswith(f".{ADAPTERS_FIELD}"):
            others.append(name)
            continue
        expert: int | None = None
        if match := _EXPERT.fullmatch(name):
            path, number, projection, field_name = match.groups()
            expert = int(number)
        elif match := _FUSED.fullmatch(name):
            path, projection, field_name = match.group(1), match.group(2), match.group(3) or "weight"
        elif match := _GRANITE.fullmatch(name):
            path, projection, field_name = f"{match.group(1)}.experts", match.group(2), match.group(3)
        else:
            path, _, field_name = name.rpartition(".")
            dense.setdefault(path, Module()).fields[field_name] = info
            continue
        block = blocks.setdefault(path, ExpertBlock(path))
        part = PROJECTIONS.get(projection, projection)
        block.projections[part] = projection
        block.modules.setdefault((part, expert), Module(fused=expert is None)).fields[field_name] = info
    quantized = {path: module for path, module in dense.items() if module.is_quantized}
    others += [info.name for path, module in dense.items() if path not in quantized for info in module.fields.values()]
    others += [module.fields["bias"].name for module in quantized.values() if "bias" in module.fields]
    return Modules(blocks, quantized, others)


def is_interleaved(config: dict[str, Any]) -> bool:
    """True if the rows of a model's fused gate_up projection alternate, gate and up."""
    types = (config.get("model_type"), (config.get("text_config") or {}).get("model_type"))
    return any(name in INTERLEAVED_MODEL_TYPES for name in types)
