"""`load_checkpoint` and `save_checkpoint`: transformers models with NVFP4 experts from files and to files.
Called by users; calls quantizer to load, thunder_moe.checkpoint to write.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from thunder_moe.checkpoint import Checkpoint, ExpertsLayout, ExpertWeights, write_checkpoint
from thunder_moe.checkpoint.files import find_checkpoint, read_json
from thunder_moe.checkpoint.writer import MAX_SHARD_SIZE
from thunder_moe.finetune.lora import lora_linears, stored_adapters
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.integrations.huggingface.expert_names import expert_source
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.huggingface.gathering import (
    by_first,
    is_shared,
    whole_experts,
    whole_linear,
    whole_state,
)
from thunder_moe.integrations.huggingface.quantizer import METHOD, NVFP4CheckpointQuantizer
from thunder_moe.integrations.huggingface.sharding import refuse_part, require_available
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack

try:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.dynamic_module_utils import custom_object_save
except ImportError as error:
    raise ImportError(
        "integrations.huggingface.checkpoint needs transformers >= 5.7: pip install 'thunder_moe[transformers]'"
    ) from error

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = logging.getLogger(__name__)


def load_checkpoint(
    path: str | Path,
    *,
    device: torch.device | str | int | dict[str, Any] | None = None,
    dtype: torch.dtype | str = "auto",
    linears: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Loads an NVFP4, MXFP8 or MXFP4 checkpoint as a transformers model whose experts are `NVFP4Experts`.

    Reads ModelOpt's forms, compressed-tensors' nvfp4-pack-quantized and mxfp8-quantized, and GPT-OSS's MXFP4 (as NVFP4,
    exactly, where ``from_pretrained`` would dequantize it). Packed weights go to their device layer by layer, in the
    layout that its kernels read best. NVFP4 and MXFP8 dense layers are `NVFP4Linear`s, and those that read the same
    rows one weight, as after `quantize_`. FP8 ones are dequantized, and so are those whose weight their parent reads
    itself (Jamba's ``dt_proj``, the ``out_proj`` of Mamba 2 layers), which `quantize_` leaves in 16 bits.

    Args:
        path: a directory, or the name of a hub model that the local cache holds.
        device: ``device_map`` of ``from_pretrained``: a device, "auto", or a dictionary. None: the CPU.
        dtype: of all that is not 4-bit; "auto": as the checkpoint has it.
        linears: whether 4-bit dense layers stay so; False dequantizes them.
        trust_remote_code: whether to run Python files of the checkpoint, where its config.json names some; False: the
            classes of transformers.
        **options: for ``from_pretrained``; with a ``distributed_config`` each process reads its part of the experts
            alone, onto its own device (transformers >= 5.23).

    Raises:
        FileNotFoundError: no checkpoint there.
        TypeError: `linears` is no bool.
        ValueError: a file is truncated or inconsistent (names file and tensor), the quantization is not read here, the
            checkpoint is not quantized, or lacks a tensor of the model; a distributed_config with a device, pipeline
            parallelism or an older transformers, or of sizes that do not divide the experts or their blocks of 16.
        ImportError: a device or a distributed_config is given and accelerate is missing.
    """
    if not isinstance(linears, bool):
        raise TypeError(f"linears: got {linears!r}, wanted a bool")
    checkpoint = Checkpoint(path)
    if checkpoint.method in (None, "fp8"):
        kind = "a 16-bit" if checkpoint.method is None else "an FP8"
        raise ValueError(
            f"path: {checkpoint.path} is {kind} checkpoint, wanted a 4-bit one; load it with from_pretrained and"
            " call quantize_(model), or convert it with python -m thunder_moe convert"
        )
    checkpoint.require_4_bit_experts()
    config = transformers.AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    config.quantization_config = {"quant_method": METHOD, "source": checkpoint.quantization, "linears": linears}
    text_config = config.get_text_config()
    if text_config is not config and hasattr(text_config, "quantization_config"):
        del text_config.quantization_config
    distributed = options.get("distributed_config") is not None
    if distributed:
        require_available()
        if device is not None:
            raise ValueError(
                f"device: got {device!r} with a distributed_config, wanted None: each process has its own device"
            )
    if distributed or device is not None:
        _require_accelerate()
    if device is not None:
        options["device_map"] = device
    model_class = _model_class(config, trust_remote_code)
    if model_class.__name__.startswith("Auto"):
        options["trust_remote_code"] = trust_remote_code
    with_report = options.pop("output_loading_info", False)
    model: Any
    model, report = model_class.from_pretrained(
        checkpoint.path, config=config, dtype=dtype, output_loading_info=True, **options
    )
    if missing := sorted(report["missing_keys"]):
        # transformers gives them random numbers, with a warning.
        raise ValueError(f"path: {checkpoint.path} lacks {', '.join(missing[:5])}, which {type(model).__name__} has")
    return (model, report) if with_report else model  # type: ignore[return-value]


def _model_class(config: Any, trust_remote_code: bool) -> Any:
    """The class that loads a model: the one of its architecture, or one that finds the model's own code."""
    own = [name for name in getattr(config, "auto_map", None) or {} if name.startswith("AutoModel")]
    if trust_remote_code and own:
        named = "AutoModelForCausalLM" if "AutoModelForCausalLM" in own else own[-1]
        return getattr(transformers, named)
    name = next(iter(config.architectures or ()), "")
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def _require_accelerate() -> None:
    try:
        import accelerate  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "load_checkpoint on devices that it is given needs accelerate: pip install 'thunder_moe[transformers]'"
        ) from error


def save_checkpoint(
    model: transformers.PreTrainedModel, path: str | Path, *, max_shard_size: int | str = MAX_SHARD_SIZE
) -> Path:
    """Writes a model with NVFP4 or MXFP8 experts or dense layers as ModelOpt does, for vLLM, SGLang, TensorRT-LLM, and
    `load_checkpoint`.

    The tokenizer and the other files but weights of the directory (or of the hub's local cache) that the model was
    loaded from are copied, as is the Python code of a model that has its own.

    Loading it again gives every tensor bit for bit. Weights alone are quantized (W4A16_NVFP4, MXFP8, or
    MIXED_PRECISION of the two): scales of quantized activations and of the key-value cache that the model's own
    checkpoint may have had are not kept. The names are those of that checkpoint, or of its architecture's checkpoints
    on the hub, but experts are written one by one; only GPT-OSS has fused ones (which in MXFP8 no other engine reads).

    Of a model that several processes share (``distributed_config``) all call this, and the first one writes: it has one
    layer's experts whole at a time, and the 16-bit weights in main memory.

    Args:
        model: a transformers model after `quantize_` or `load_checkpoint`.
        path: a directory that does not exist yet; it appears whole.
        max_shard_size: of a file, in bytes or as "5GB".

    Adapters of `add_lora_` are written beside the weights with their rank and alpha, and come back as they were, active
    or not; merged ones are in the weights alone.

    Returns:
        The directory.

    Raises:
        TypeError: the model is not transformers'.
        FileExistsError: the path exists.
        ValueError: the model has no NVFP4 or MXFP8 experts or dense layers, a tensor is on the "meta" device
            (offloaded), a packed weight has NaN (names the tensor), PEFT has wrapped layers of it, or it has adapters
            and several processes share it.
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model: got {type(model).__name__}, wanted a transformers model")
    return write_model(model, path, max_shard_size, _source_directory(model))


def write_model(
    model: transformers.PreTrainedModel, path: str | Path, max_shard_size: int | str, companions: Path | None
) -> Path:
    """`save_checkpoint`, with the tokenizer and so on of a given directory, or none."""
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Experts)}
    if not blocks and not any(isinstance(module, NVFP4Linear) for module in model.modules()):
        raise ValueError(f"model: found no NVFP4 experts in {type(model).__name__}; call quantize_(model) first")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"model: {name} is on the 'meta' device (offloaded), wanted it in memory")
    wrapped = next((name for name, _ in model.named_modules() if name.endswith(".base_layer")), None)
    if wrapped is not None:
        raise ValueError(
            f"model: PEFT has wrapped {wrapped.removesuffix('.base_layer')}, wanted the PeftModel's save_pretrained,"
            " which writes the adapters, or merge_and_unload before"
        )
    if stored_adapters(model):
        logger.warning(
            "adapters are written beside the weights, where this package alone reads them; for other engines,"
            " merge_lora_(model), or save_lora(model, path, per_expert=True) beside the model without them"
        )
        refuse_part(model, "whose adapters are whole: each process has those of its part, in its state dict")
    sources = expert_sources(model)
    layout = next((layout for _, layout in sources.values()), None)
    config = model_config(model)
    extra = _own_code(model, config)
    if model.can_generate():
        extra["generation_config.json"] = model.generation_config.to_json_string()
    tensors = model_tensors(model)

    def write() -> Path:
        options: dict[str, Any] = dict(layout=layout, max_shard_size=max_shard_size, extra=extra)
        return write_checkpoint(path, config, tensors, **options, companions=companions)

    if is_shared(model):
        by_first(write, lambda: deque(tensors, maxlen=0))
        return Path(path)
    return write()


def _own_code(model: transformers.PreTrainedModel, config: dict[str, Any]) -> dict[str, str]:
    """Text of the Python files of a model that is no part of transformers, by name; `config` comes to name them."""
    with TemporaryDirectory() as folder:
        for part in (model.config, model):
            if part._auto_class is not None:
                custom_object_save(part, folder, config=config)
        return {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}


def _source_directory(model: transformers.PreTrainedModel) -> Path | None:
    """The checkpoint that a model was loaded from, if it is still there and of the same kind of model."""
    name = model.name_or_path
    try:
        directory = find_checkpoint(name, getattr(model.config, "_commit_hash", None)) if name else None
        if directory is None or read_json(directory / "config.json").get("model_type") != model.config.model_type:
            return None
    except (OSError, ValueError):
        return None
    return directory


def model_config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """config.json of a model, as it is now; what it says of a quantization is that of the files it came from."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    config.pop("distributed_config", None)
    dtype = str(model.dtype).removeprefix("torch.")
    if _has_untied_head(model):
        config["tie_word_embeddings"] = False
        if isinstance(text_config := config.get("text_config"), dict):
            text_config["tie_word_embeddings"] = False
    return config | {"architectures": [type(model).__name__], "dtype": dtype}


def _has_untied_head(model: Any) -> bool:
    """Whether the configuration ties the head to the embeddings, and the model has other weights there."""
    head: Any = model.get_output_embeddings()
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None:
        return False
    source = model.all_tied_weights_keys.get(f"{name}.weight")
    if source is None:  # transformers forgets the ties that a checkpoint does not keep
        config = model.config
        if not any(getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config())):
            return False
    if isinstance(head, NVFP4Linear):
        return True
    path, _, key = (source or "").rpartition(".")  # a given state dict puts plain tensors there: no get_parameter
    embeddings = model.get_input_embeddings().weight if source is None else getattr(model.get_submodule(path), key)
    # Offloading keeps a tensor for each of two tied weights.
    return head.weight is not embeddings and not torch.equal(head.weight, embeddings.to(head.weight.device))


def expert_sources(model: transformers.PreTrainedModel) -> dict[str, tuple[str, ExpertsLayout]]:
    """Path of each block of 4-bit experts in the model -> its path and layout in a checkpoint."""
    return {name: _source(model, name, module) for name, module in _blocks(model).items()}


def _blocks(model: transformers.PreTrainedModel) -> dict[str, NVFP4Experts]:
    """The blocks of 4-bit experts by their paths; one that several layers share has several."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, NVFP4Experts)}


def model_tensors(
    model: transformers.PreTrainedModel,
) -> Iterator[tuple[str, Tensor | ExpertWeights | PackedWeight]]:
    """The experts and 4-bit dense layers by their paths in the checkpoint, then everything else by its name there."""
    inside: set[str] = set()
    sources = expert_sources(model)
    blocks = _blocks(model)
    for name, module in blocks.items():
        inside |= {f"{name}.gate_up_bias", f"{name}.down_bias"}
        yield sources[name][0], whole_experts(module)
    # Not state_dict(): in another layout than "linear" that copies all 4-bit weights.
    packed: set[Module] = {linear for module in blocks.values() for linear in (module.gate_up_proj, module.down_proj)}
    packed |= {each for linear in lora_linears(model).values() for each in (linear.lora_A, linear.lora_B)}
    state: dict[str, Tensor] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, NVFP4LinearPart | NVFP4Linear):
            if not isinstance(part, NVFP4LinearStack):
                yield linear_source(model, name), whole_linear(part)
                state |= {} if part.bias is None else {f"{name}.bias": part.bias.detach()}
        elif part not in packed:
            part._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    tied = {} if _has_untied_head(model) else model.all_tied_weights_keys
    state = {key: tensor for key, tensor in state.items() if key not in inside and tied.get(key) not in inside}
    state = {key: tensor for key, tensor in state.items() if tied.get(key) not in state}
    adapters = stored_adapters(model)  # by the model's own names, which are theirs in the file
    if is_shared(model):
        state, adapters = whole_state(state), whole_state(adapters)
    yield from revert_weight_conversion(model, state).items()
    yield from adapters.items()


def linear_source(model: transformers.PreTrainedModel, name: str) -> str:
    """The path of a dense layer in a checkpoint of the model's architecture."""
    names = list(revert_weight_conversion(model, {f"{name}.weight": torch.zeros(1, 1)}))
    if len(names) != 1 or not names[0].endswith(".weight"):
        raise ValueError(f"model: checkpoints of {type(model).__name__} keep {name} as {names}, wanted one weight")
    path: str = names[0].removesuffix(".weight")
    return path


def _source(model: transformers.PreTrainedModel, name: str, module: NVFP4Experts) -> tuple[str, ExpertsLayout]:
    """(path, layout) of a block of experts in a checkpoint: of the one it was loaded from, or of its architecture."""
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, NVFP4CheckpointQuantizer) and name in quantizer.layouts:
        return quantizer.layouts[name]
    return expert_source(model, name, module.form)
