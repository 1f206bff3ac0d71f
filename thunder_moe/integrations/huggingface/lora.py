"""Make PeftModels whose 4-bit experts and dense layers have adapters, too: `get_peft_model` and `load_peft_model`.
Called by users, Trainer and TRL; calls finetune.lora for what is 4-bit, PEFT for all else, lora_files for the files.

config -> the 4-bit linears that it names get `add_lora_` -> PEFT gets what is left of it -> one PeftModel
"""

from __future__ import annotations

import copy
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thunder_moe.checkpoint.files import expand_user
from thunder_moe.finetune.lora import add_by_name_, lora_linears, scaling_of
from thunder_moe.formats.checks import require_module, require_type
from thunder_moe.integrations.huggingface import lora_files
from thunder_moe.integrations.huggingface.lora_targets import PREFIX, Target, blocks_of, is_named, place_of, targets
from thunder_moe.integrations.huggingface.saving import count_packed
from thunder_moe.nn.linear import is_packed_dense
from thunder_moe.nn.lora import LoRASpec

try:
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    from thunder_moe.integrations.huggingface.lora_tuner import TunerWithExperts, kept_, refuse_changed
except ImportError as error:
    raise ImportError(
        "thunder_moe.integrations.huggingface.lora needs PEFT: pip install 'thunder_moe[peft]'"
    ) from error

_LOGGER = logging.getLogger("thunder_moe")
_NOTHING = "dummy-target-modules"  # PEFT's word for a configuration that needs no module to match
# The weight of experts -> names of its projections in checkpoints with a tensor for each.
_PROJECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",)), "up_proj": (),
}  # fmt: skip


def get_peft_model(model: Any, peft_config: Any, adapter_name: str = "default") -> Any:
    """Do what `peft.get_peft_model` does, for a model with 4-bit experts: its configuration adapts them, and all else.

    Experts are named by ``target_parameters`` (["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]: gate and up share
    A) or by ``target_modules`` (["gate_proj", "up_proj", "down_proj"], or "w1", "w3", "w2": one adapter each). Other
    modules (attention, routers) are PEFT's where they are 16-bit; where ``quantize_(linears=...)`` has made them 4-bit,
    they get adapters here, by the same names. "all-linear" means what it means to PEFT in the 16-bit model: all linears
    but the head, and the experts of architectures that PEFT knows as linears. The result is a PeftModel: Trainer and
    TRL train it; its save_pretrained writes files that PEFT loads onto the 16-bit model, its load_adapter reads them.

    Args:
        model: a model of transformers after `quantize_`, or of a 4-bit checkpoint.
        peft_config: a `peft.LoraConfig`; lora_dropout works for experts, too.
        adapter_name: of the adapter, which becomes the active one.

    Raises:
        TypeError: the model is not a module, or the configuration is not a `peft.LoraConfig`.
        ValueError: nothing of the model is named, or it has nothing that is 4-bit; gate_proj without up_proj; an option
            that experts do not have (DoRA, biases, initializations but for True and "gaussian").
    """
    require_module(model)
    require_type("peft_config", peft_config, peft.LoraConfig, "a peft.LoraConfig")
    _check(peft_config)
    chosen, rest = _chosen(model, peft_config), _rest(model, peft_config)
    names = sorted(target.name for target in targets(model))
    names_others = rest.target_parameters or rest.target_modules != _NOTHING
    if not chosen and (_is_all_linear(peft_config) or not names_others or not names):
        raise ValueError(
            f"peft_config: target_modules={peft_config.target_modules} and target_parameters="
            f"{peft_config.target_parameters} name none of the {len(names)} 4-bit linears"
            f" ({', '.join(names[:2])}, ...), wanted some of them, or peft.get_peft_model"
        )
    _add(model, chosen, peft_config, adapter_name)
    return _wrap(model, rest, adapter_name)


def load_peft_model(model: Any, path: str | Path, adapter_name: str = "default", *, is_trainable: bool = False) -> Any:
    """Do what `peft.PeftModel.from_pretrained` does, for a model with 4-bit experts; no match is an error.

    Args:
        model: as in `get_peft_model`.
        path: a directory with adapter_config.json and adapter_model.safetensors, as PEFT and `save_pretrained` of
            `get_peft_model`'s result write them, or with an adapter per expert and projection.
        adapter_name: of the adapter, which becomes the active one.
        is_trainable: whether its parameters require gradients.

    Raises:
        TypeError: the model is not a module, or the path is neither a string nor a path.
        FileNotFoundError: a file is missing.
        ValueError: the files have no adapter of the model's experts, or one that does not fit.
    """
    found, rest, config = _read(model, path)
    config.inference_mode = not is_trainable
    lora_files.set_adapter_(model, found, adapter_name, dropout=config.lora_dropout)
    wrapped = _wrap(model, _rest(model, config, rest), adapter_name)
    wrapped.load_adapter(path, adapter_name, is_trainable=is_trainable)
    wrapped.base_model.use(is_trainable)
    return wrapped


def _read(model: Any, path: str | PathLike[Any]) -> tuple[dict[str, lora_files.Adapter], dict[str, Tensor], Any]:
    """Return the adapters of 4-bit linears by their path, the other tensors and the configuration of PEFT's files."""
    path = expand_user(path, "path")
    found, rest, _ = lora_files.read_adapter(model, path)
    config = peft.PeftConfig.from_pretrained(str(path))
    _check(config)
    if not found and _chosen(model, config):
        raise lora_files.no_adapter(model, path, rest)
    return found, rest, config


class _WithExperts(peft.PeftModel):
    """A PeftModel that saves, loads, adds, disables and counts adapters of 4-bit layers beside PEFT's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.base_model = TunerWithExperts(cast("peft.LoraModel", self.base_model))

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Count parameters, for `print_trainable_parameters`, with the packed weights, which are buffers, among all."""
        trainable, total = super().get_nb_trainable_parameters()
        return trainable, total + count_packed(self)

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        *args: Any,
        per_expert: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save adapters, of 4-bit layers in the same files, in PEFT's names and shapes; with per_expert in vLLM's (see
        `save_lora`).

        Raises:
            ValueError: no safe_serialization; adapters of experts are merged, or were removed since.
        """
        if not safe_serialization:
            raise ValueError(
                "safe_serialization: got False, wanted True: adapters of experts are written by safetensors"
            )
        refuse_changed(self.base_model)
        folder, embeddings = str(expand_user(save_directory, "save_directory")), save_embedding_layers
        super().save_pretrained(folder, True, selected_adapters, embeddings, is_main_process, *args, **kwargs)
        for name in selected_adapters or list(self.peft_config) if is_main_process else ():
            _complete(self.get_base_model(), Path(folder, "" if name == "default" else name), name, per_expert)

    def load_adapter(
        self, model_id: str | PathLike[Any], adapter_name: str, is_trainable: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter from a directory: fill the one of that name, or add it.

        Raises:
            ValueError: as `load_peft_model`.
        """
        base = self.get_base_model()
        found, rest, given = _read(base, model_id)
        with kept_(self.base_model, is_trainable), tempfile.TemporaryDirectory() as folder:
            lora_files.set_adapter_(base, found, adapter_name, dropout=given.lora_dropout, freeze=False)
            _rest(base, given, rest).save_pretrained(folder)
            save_file(rest, Path(folder) / lora_files.WEIGHTS, metadata={"format": "pt"})
            result = super().load_adapter(folder, adapter_name, is_trainable, *args, **kwargs)
        return result

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, to the 4-bit layers that the configuration names, too."""
        base = self.get_base_model()
        _check(peft_config)
        chosen = _chosen(base, peft_config)
        with kept_(self.base_model):
            _add(base, chosen, peft_config, adapter_name)
            super().add_adapter(adapter_name, _rest(base, peft_config), *args, **kwargs)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute without adapters, in 4-bit layers, too."""
        refuse_changed(self.base_model)
        active = {linear: linear.lora_active for linear in lora_linears(self).values()}
        peft_has_any = any(isinstance(module, BaseTunerLayer) for module in self.modules())
        try:
            for linear in active:
                linear.lora_active = ()
            with super().disable_adapter() if peft_has_any else nullcontext():
                yield
        finally:
            for linear, names in active.items():
                linear.lora_active = names


_OF_PEFT: set[Any] = {peft.PeftModel, *peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.values()}
# By PEFT's class for a task; pickles know them by their names in this module.
_CLASSES: dict[Any, Any] = {
    kind: type(f"{kind.__name__}WithExperts", (_WithExperts, kind), {"__module__": __name__}) for kind in _OF_PEFT
}
globals().update({each.__name__: each for each in _CLASSES.values()})


def _wrap(model: Any, config: Any, adapter_name: str) -> Any:
    kind = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, peft.PeftModel)
    config.base_model_name_or_path = vars(model).get("name_or_path") or None
    wrapped = _CLASSES[kind](model, config, adapter_name=adapter_name)  # which freezes what it does not know
    wrapped.base_model.use()
    return wrapped


# ---- which linears of experts a configuration names


def _check(config: Any) -> None:
    """Raise a ValueError for options that adapters of experts do not have."""
    lora_files.refuse_foreign(vars(config), "peft_config")
    if (init := config.init_lora_weights) not in (True, "gaussian"):
        raise ValueError(f"peft_config.init_lora_weights: got {init!r}, wanted True or 'gaussian' for experts")


def _chosen(model: nn.Module, config: Any) -> dict[Target, LoRASpec]:
    """Return the linears that a configuration names, and the adapter that each gets."""
    _refuse_saved(model, config)
    config = _as_peft_reads(model, config)
    found: dict[Target, LoRASpec] = {}
    for target in targets(model):
        names = _names(model, target, config) if _in_layers(target.path, config) else []
        numbers = {lora_files.rank_and_alpha(vars(config), name) for name in names}
        if len(numbers) > 1:
            parts = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise ValueError(
                f"peft_config: rank_pattern={config.rank_pattern} and alpha_pattern={config.alpha_pattern} give"
                f" {' and '.join(parts)} of {target.experts} several (rank, alpha), {sorted(numbers)}, wanted one for"
                " all experts, and for gate_proj and up_proj"
            )
        for rank, alpha in numbers:
            apart = names != [target.name] and not target.is_down
            scaling = scaling_of(rank, alpha, config.use_rslora)
            found[target] = LoRASpec(rank, scaling, config.lora_dropout, 2 if apart else 1)
    return found


def _names(model: nn.Module, target: Target, config: Any) -> list[str]:
    """Return the names of a linear that a configuration has: its own, or one of each expert and projection."""
    if not target.experts:
        return [target.name] if _is_module(target.name, config, target.linear, model) else []
    if is_named(target.name, config.target_parameters) or _is_module(target.path, config):
        return [target.name]
    for parts in _PROJECTIONS[target.name.rpartition(".")[2]]:
        names = [f"{target.experts}.{at}.{name}" for at in range(target.num_experts) for name in parts]
        hits = sum(_is_module(name, config) for name in names)
        if 0 < hits < len(names):
            raise ValueError(
                f"peft_config.target_modules: got {config.target_modules}, which names {hits} of {len(names)}"
                f" projections of {target.experts}, wanted both of gate_proj and up_proj (w1 and w3), which have one"
                " weight, of all experts"
            )
        if hits:
            return names
    return []


def _is_all_linear(config: Any) -> bool:
    return isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear"


def _as_peft_reads(model: nn.Module, config: Any) -> Any:
    """Return a configuration with the parameters of experts and routers that PEFT takes "all-linear" for."""
    if not _is_all_linear(config):
        return config
    read, config = copy.deepcopy(config), copy.copy(config)
    convert_peft_config_for_transformers(read, model, None)
    config.target_parameters = read.target_parameters
    config.rank_pattern, config.alpha_pattern = read.rank_pattern, read.alpha_pattern
    return config


def _refuse_saved(model: nn.Module, config: Any) -> None:
    """Raise a ValueError for modules_to_save with 4-bit weights: PEFT trains copies, and these cannot be trained."""
    packed = sorted({target.block for target in targets(model)})
    for name in config.modules_to_save or ():
        if inside := [path for path in packed if f".{name}." in f".{path}."]:
            raise ValueError(
                f"peft_config.modules_to_save: got {name!r}, which has the 4-bit weights of {inside[0]}, wanted 16-bit"
                " modules"
            )


def _is_module(key: str, config: Any, layer: Any = None, model: Any = None) -> bool:
    """True if PEFT's rule takes a name; "all-linear" takes a layer that is linear, but for the model's head."""
    if _is_all_linear(config):  # not for routers that derive from nn.Linear: PEFT's forward fails at their tuples
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        if layer is head or not (type(layer) is nn.Linear or is_packed_dense(layer)):
            return False
        config = copy.copy(config)
        config.target_modules = {key}
    return bool(config.target_modules and check_target_module_exists(config, key))


def _in_layers(experts: str, config: Any) -> bool:
    layers, number = config.layers_to_transform, re.search(r"\.(\d+)\.", experts)
    wanted = [layers] if isinstance(layers, int) else layers
    return wanted is None or (number is not None and int(number[1]) in wanted)


@torch.no_grad()
def _add(model: Any, chosen: dict[Target, LoRASpec], config: Any, adapter: str) -> None:
    if chosen:
        add_by_name_(model, {target.path: spec for target, spec in chosen.items()}, adapter)
    if config.init_lora_weights == "gaussian":
        for target, spec in chosen.items():
            target.linear.lora_A[adapter].normal_(std=1 / spec.rank)


def _rest(model: nn.Module, config: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """Return the configuration for PEFT: the other layers by whole names, or the ones that `tensors` are of."""
    rest = copy.deepcopy(config)
    rest.target_parameters = None
    paths = {target.block for target in targets(model)}

    def inside(name: str) -> bool:
        return any(name == path or name.startswith(f"{path}.") for path in paths)

    layers = {name: module for name, module in model.named_modules() if name and not inside(name)}
    tuners = tuple(f"{name}." for name, module in layers.items() if isinstance(module, BaseTunerLayer))
    bases = {  # of the leaves, and of what has an adapter of another name
        name: module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        for name, module in layers.items()
        if (isinstance(module, BaseTunerLayer) or not module._modules) and not name.startswith(tuners)
    }
    found = {name for name, base in bases.items() if _is_module(name, config, base, model)}
    if tensors is not None:
        found = {name for name in found if any(f"{name}.lora_" in key for key in tensors)} or found
    rest.target_modules = found or _NOTHING
    read = _as_peft_reads(model, config)
    named = ((name.replace(".base_layer", ""), parameter) for name, parameter in model.named_parameters())
    parameters = [
        name for name, parameter in named
        if parameter.ndim > 1 and not inside(name) and is_named(name, read.target_parameters)
    ]  # fmt: skip
    if parameters:
        rest.target_parameters = parameters
    if any(
        lora_files.rank_and_alpha(vars(read), name) != lora_files.rank_and_alpha(vars(config), name)
        for name in parameters
    ):
        rest.rank_pattern, rest.alpha_pattern = read.rank_pattern, read.alpha_pattern
    rest.left_out_on_purpose = True  # for `refuse_left_out`
    return rest


# ---- files


def _complete(model: nn.Module, folder: Path, adapter: str, per_expert: bool) -> None:
    """Put the adapters of 4-bit layers into files that PEFT has written, in the place of what it took them for."""
    blocks = blocks_of(model)
    tensors = {
        key: value for key, value in load_file(folder / lora_files.WEIGHTS).items()
        if place_of(key.removeprefix(PREFIX), blocks)[0] is None
    }  # fmt: skip
    config = json.loads((folder / lora_files.CONFIG).read_text())
    if chosen := lora_files.adapters(model, adapter):
        own, ours, ranks, alphas = lora_files.encode(model, chosen, per_expert)
        tensors |= own
        nothing = config.get("target_modules") == _NOTHING
        if nothing and not config.get("target_parameters"):
            names = ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters")
            config |= {name: ours[name] for name in (*names, "rank_pattern", "alpha_pattern")}
        else:  # where the experts' numbers are others, they are in the patterns
            if config.get("use_rslora"):
                alphas = {name: alpha / ranks[name] ** 0.5 for name, alpha in alphas.items()}
            alphas = {name: round(alpha, 9) for name, alpha in alphas.items()}
            config["rank_pattern"] = lora_files.pattern(ranks, config["r"]) | (config.get("rank_pattern") or {})
            config["alpha_pattern"] = lora_files.pattern(alphas, config["lora_alpha"]) | (
                config.get("alpha_pattern") or {}
            )
            named = (config.get("target_parameters") or []) + (ours["target_parameters"] or [])
            config["target_parameters"] = named or None
            modules = [] if nothing else config["target_modules"]
            config["target_modules"] = modules if isinstance(modules, str) else [*modules, *ours["target_modules"]]
        config["lora_dropout"] = 0.0  # PEFT has none for parameters
    lora_files.write_adapter(folder, tensors, config)
    dense = (target.name for target, _ in chosen if not target.experts)
    lost = [name for name in dense if name.rpartition(".")[2] in lora_files.PARTS]
    if lost and _as_peft_reads(model, peft.LoraConfig(target_modules="all-linear")).target_parameters:
        _LOGGER.warning(
            "%s: PEFT takes the names of %s and others for names of experts and leaves their adapters out on the 16-bit"
            " model; load_peft_model reads them", folder, lost[0],
        )  # fmt: skip
