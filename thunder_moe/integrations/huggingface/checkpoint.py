"""`load_checkpoint` and `save_checkpoint`: transformers models with NVFP4 experts from files and to files.
Called by users; calls quantizer to load, writing to save.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from thunder_moe.checkpoint import Checkpoint
from thunder_moe.checkpoint.files import INDEX_NAME, find_checkpoint, read_json
from thunder_moe.checkpoint.writer import MAX_SHARD_SIZE
from thunder_moe.integrations.huggingface.quantizer import METHOD
from thunder_moe.integrations.huggingface.sharding import require_available
from thunder_moe.integrations.huggingface.writing import write_model


def load_checkpoint(
    path: str | Path,
    *,
    device: torch.device | str | int | dict[str, Any] | None = None,
    dtype: torch.dtype | str = "auto",
    linears: bool = True,
    trust_remote_code: bool = False,
    **options: Any,
) -> transformers.PreTrainedModel:
    """Load an NVFP4, MXFP8 or MXFP4 checkpoint as a transformers model whose experts are `NVFP4Experts`.

    Reads ModelOpt's forms, compressed-tensors' nvfp4-pack-quantized and mxfp8-quantized, and GPT-OSS's MXFP4 (as NVFP4,
    exactly, where ``from_pretrained`` would dequantize it). Packed weights go to their device layer by layer, in the
    layout that its kernels read best. NVFP4 and MXFP8 dense layers become `NVFP4Linear`s. As after
    `quantize_`, dense layers that read the same rows share one weight. FP8 dense layers are dequantized. So are layers
    whose weight their parent reads itself (Jamba's ``dt_proj``, the ``out_proj`` of Mamba 2 layers); `quantize_` leaves
    them in 16 bits.

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
        TypeError: `linears` is not a bool.
        ValueError: a file is truncated, or a tensor inconsistent (names it), the quantization is not read here, the
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
    index = checkpoint.path / INDEX_NAME
    if index.is_file() and not isinstance(read_json(index).get("metadata"), dict):
        raise ValueError(f"{index}: got no 'metadata', wanted a JSON object, which transformers reads; {{}} is enough")
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
    if (distributed or device is not None) and find_spec("accelerate") is None:
        raise ImportError(
            "load_checkpoint on devices that it is given needs accelerate: pip install 'thunder_moe[transformers]'"
        )
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
    """Return the class that loads a model: the one of its architecture, or one that finds the model's own code."""
    own = [name for name in getattr(config, "auto_map", None) or {} if name.startswith("AutoModel")]
    if trust_remote_code and own:
        named = "AutoModelForCausalLM" if "AutoModelForCausalLM" in own else own[-1]
        return getattr(transformers, named)
    name = next(iter(config.architectures or ()), "")
    return getattr(transformers, name, transformers.AutoModelForCausalLM)


def save_checkpoint(
    model: transformers.PreTrainedModel, path: str | Path, *, max_shard_size: int | str = MAX_SHARD_SIZE
) -> Path:
    """Write a model with NVFP4 or MXFP8 experts or dense layers as ModelOpt does, for vLLM, SGLang, TensorRT-LLM, and
    `load_checkpoint`.

    The tokenizer and the other files but weights of the directory (or of the hub's local cache) that the model was
    loaded from are copied, as is the Python code of a model that has its own.

    Loading it again gives every tensor bit for bit. Weights alone are quantized (W4A16_NVFP4, MXFP8, or
    MIXED_PRECISION of the two): scales of quantized activations and of the key-value cache that the model's own
    checkpoint may have had are not kept. The tensors are named as in that checkpoint, or as in its architecture's
    checkpoints on the hub, but experts are written one by one. Only GPT-OSS has fused experts, which in MXFP8 no other
    engine reads.

    If several processes share the model (``distributed_config``), all call this, and the first one writes: it has one
    layer's experts whole at a time, and the 16-bit weights in main memory.

    Args:
        model: a transformers model after `quantize_` or `load_checkpoint`.
        path: a directory that does not exist yet; it appears whole.
        max_shard_size: of a file, in bytes or as "5GB".

    Adapters of `add_lora_` are written beside the weights with their rank and alpha, and come back, active
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


def _source_directory(model: transformers.PreTrainedModel) -> Path | None:
    """Return the checkpoint that a model was loaded from, if it is still there and of the same kind of model."""
    name = model.name_or_path
    try:
        directory = find_checkpoint(name, getattr(model.config, "_commit_hash", None)) if name else None
        if directory is None or read_json(directory / "config.json").get("model_type") != model.config.model_type:
            return None
    except (OSError, ValueError):
        return None
    return directory
