"""`QuantizedModel`: how transformers models with 4-bit or prepared modules save, load, resize, count, cast, dequantize.
Called by families after `quantize_`, `dequantize_`, `prepare_qat_` and `finish_qat_`, and by loading, through
`mark_quantized`; calls writing to save, state_dicts to read, quantization.quantize for the way back.

A marked model's class is a subclass of its former class, of the same name, so that `model.save_pretrained(path)`,
`Trainer` and `push_to_hub` write what `save_checkpoint` writes. Models that share its config do not see any of it.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from thunder_moe.checkpoint.files import INDEX_NAME
from thunder_moe.checkpoint.writer import MAX_SHARD_SIZE
from thunder_moe.finetune.lora import ADAPTER_NAME, lora_linears, stored_adapters
from thunder_moe.finetune.qat import prepared_weights
from thunder_moe.integrations.huggingface.class_swap import OtherMethods
from thunder_moe.integrations.huggingface.configs import METHOD, ON_LOAD
from thunder_moe.integrations.huggingface.lora_targets import refuse_left_out
from thunder_moe.integrations.huggingface.state_dicts import load_by_checkpoint_names
from thunder_moe.integrations.huggingface.writing import is_shared, write_model
from thunder_moe.nn.packed import PackedModule
from thunder_moe.quantization.quantize import dequantize_, dequantize_with_
from thunder_moe.scratch import move_files, remove_leftovers, scratch_directory

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX_NAME))


class QuantizedModel(OtherMethods):
    """The methods of a transformers model that holds 4-bit modules, or weights that `prepare_qat_` has prepared."""

    prefix = ""

    def save_pretrained(
        self: Any,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        variant: str | None = None,
        token: str | bool | None = None,
        save_peft_format: bool = True,
        save_original_format: bool = True,
        distributed_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write the model as `thunder_moe.save_checkpoint` does: ModelOpt's form, which `from_pretrained` (after
        ``import thunder_moe``), `load_checkpoint` and other engines read, every tensor bit for bit.

        Everything is written into a hidden folder there first and moved when whole; the next save to this place
        removes what a killed one has left, with a warning. Weights of an earlier save there are replaced, other files
        stay. A model with adapters of transformers' own saves these alone, as it always does.
        Of a model that `prepare_qat_` has prepared transformers writes the parameters themselves, by their plain names.

        Args:
            save_directory: made if it does not exist.
            is_main_process: False writes nothing. Of a model that transformers has shared among processes
                (``distributed_config``) all call this, and the first one writes.
            state_dict: whose tensors are saved in the place of the model's own; all of them, by the model's names.
            push_to_hub: uploads the directory afterwards; `kwargs` has repo_id, commit_message, create_pr and what
                ``huggingface_hub.create_repo`` takes.
            variant, distributed_checkpoint: None and False alone.
            save_original_format: there is one format; both values write it.

        Raises:
            FileExistsError: the path is a file.
            ValueError: a variant, distributed_checkpoint, weights that are prepared for training beside 4-bit ones,
                adapters of `add_lora_` beside those of transformers, a tensor on the "meta" device that accelerate has
                not offloaded, or one that is sharded, a state dict that lacks one; or no name in a checkpoint is known
                for a module. Nothing is written then.
        """
        save = super().save_pretrained  # type: ignore[misc]  # before `mark_quantized` changes the class
        prepared = prepared_names(self)
        if prepared and not _is_quantized(self):
            plain = {own: name for name, own in prepared.items()}
            given = self.state_dict() if state_dict is None else state_dict
            state_dict = {plain.get(name, name): tensor for name, tensor in given.items()}
        elif not _is_quantized(self):
            mark_quantized(self)  # all of it was dequantized since, module by module
        of_peft = getattr(self, "_hf_peft_config_loaded", False)
        if of_peft and lora_linears(self):
            raise ValueError(
                "model: got adapters of add_lora_ beside adapters of transformers' add_adapter, which alone would be"
                " written; call save_lora and remove_lora_ for the adapters of add_lora_ before"
            )
        if not _is_quantized(self) or of_peft:
            return save(
                save_directory, is_main_process=is_main_process, state_dict=state_dict, push_to_hub=push_to_hub,
                max_shard_size=max_shard_size, variant=variant, token=token, save_peft_format=save_peft_format,
                save_original_format=save_original_format, distributed_checkpoint=distributed_checkpoint, **kwargs,
            )  # fmt: skip
        if variant is not None:
            raise ValueError(f"variant: got {variant!r}, wanted None: a 4-bit checkpoint has one form")
        if distributed_checkpoint:
            raise ValueError("distributed_checkpoint: got True, wanted False: one process saves the whole 4-bit model")
        if prepared:
            raise ValueError(f"model: {next(iter(prepared))} is prepared for training: finish_qat_(model) before")
        directory = Path(save_directory)
        if directory.is_file():
            raise FileExistsError(f"save_directory: {directory} is a file, wanted a directory")
        shared = is_shared(self)
        if shared and state_dict is not None:
            raise ValueError("state_dict: got one for a model that several processes share, wanted None")
        if not is_main_process and not shared:
            return None
        with _tensors_of(self, state_dict):
            _write(self, directory, max_shard_size)
        if shared:
            torch.distributed.barrier()
        if push_to_hub and is_main_process:
            _upload(directory, token, **kwargs)
        return None

    def load_state_dict(self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as any module does, or from tensors of a checkpoint that `save_pretrained` wrote, by their names there:
        a resumed ``Trainer`` hands these over. The tensors of a shard need ``strict=False``.

        Raises:
            RuntimeError: as any module's; where adapters do not fit the state dict, or are merged, nothing has changed.
        """
        for name, linear in lora_linears(self).items():  # before 4-bit weights are set
            if (problem := linear.obstacle_to_load(state_dict, f"{name}.")) is not None:
                raise RuntimeError(f"Error in loading state_dict for {type(self).__name__}:\n\t{name}: {problem}")
        state_dict = load_by_checkpoint_names(self, state_dict, prepared_names(self))
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize as transformers does. A 4-bit head is dequantized before and stays 16-bit, because the rows of new
        tokens have to be trained: it is trainable where the embeddings are. The log says so. A size that is there
        already changes nothing.

        Raises:
            ValueError: the head is 4-bit and cannot be replaced (the message says why). The model is unchanged then.
        """
        resize = super().resize_token_embeddings  # type: ignore[misc]
        head, embeddings = self.get_output_embeddings(), self.get_input_embeddings()
        if head is None or not _is_quantized(head):
            return resize(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = embeddings.weight.shape[0] if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        if size == embeddings.weight.shape[0] == getattr(head, "out_features", None):
            return embeddings
        name = next(name for name, module in self.named_modules() if module is head)
        dequantize_with_(self, {name: head}, only_needed=True)
        self.get_output_embeddings().requires_grad_(embeddings.weight.requires_grad)
        logger.warning("%s is 16-bit from now on, since the rows of new tokens need training", name)
        return resize(new_num_tokens, pad_to_multiple_of, mean_resizing)

    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count as transformers does, and each packed weight with the number of its 16-bit weights: all of them, even
        where several processes share it."""
        count: int = super().num_parameters(only_trainable, exclude_embeddings)  # type: ignore[misc]
        return count if only_trainable else count + count_packed(self)

    # They cast all but the packed weights; transformers refuses that where a model was loaded in 4 bits.
    half, float = nn.Module.half, nn.Module.float

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; refuse the configurations that stock PEFT sets when it has left out 4-bit layers they mean.

        Raises:
            ValueError: the first ``peft_config``, of a configuration that names such layers.
        """
        if name == "peft_config" and name not in vars(self):
            refuse_left_out(self, value)
        super().__setattr__(name, value)

    def dequantize(self: Any, dtype: torch.dtype | None = None) -> Any:
        """Run `dequantize_`, which makes this a plain model of transformers again; in `dtype` if given."""
        model = dequantize_(self)
        return model if dtype is None else model.to(dtype)


def mark_quantized(model: nn.Module) -> None:
    """Make each transformers model in `model` that holds 4-bit or prepared modules a `QuantizedModel`. A model that
    holds no such module any more gets its own class back, and loses a load's entries in its config.

    If models are nested, the outer one is marked. ``from_pretrained`` then reads what they save.
    """
    inside: set[nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        if _is_quantized(module) or prepared_names(module):
            if module not in inside and not isinstance(module, QuantizedModel):
                QuantizedModel.put_on(module)
            inside.update(module.modules())
            continue
        QuantizedModel.take_off(module)
        if getattr(module, "quantization_method", None) in (METHOD, ON_LOAD):
            forget_quantization(module)


def count_packed(model: nn.Module) -> int:
    """Return the number of 16-bit weights that the packed ones stand for, in all processes that share them."""
    packed = {id(module.qdata): module for module in model.modules() if isinstance(module, PackedModule)}
    return sum((each.process_part or (0, 0, 1))[2] * math.prod(each.packed_weight.shape) for each in packed.values())


def _is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, PackedModule) for module in model.modules())


def prepared_names(model: nn.Module) -> dict[str, str]:
    """Return the plain name of each parameter that `prepare_qat_` has prepared -> its present name."""
    return {
        f"{place}.{name}".lstrip("."): f"{place}.parametrizations.{name}.original".lstrip(".")
        for place, _, name in prepared_weights(model)
    }


def forget_quantization(model: Any) -> None:
    """Remove what a load of a 4-bit checkpoint has left on a model and in its configs."""
    model.hf_quantizer.remove_quantization_config(model)
    forget_in_configs(model, "quantization_config", "_is_quantized")


def forget_in_configs(model: nn.Module, *names: str) -> None:
    """Remove attributes from the configurations of the modules of a model."""
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            for name in names:
                vars(config).pop(name, None)


@contextmanager
def _tensors_of(model: Any, state_dict: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Put the tensors of a state dict into a model meanwhile, or if None the tensors that accelerate has offloaded.
    Nothing is copied. Tensors of a 4-bit weight are in layout "linear", as their shapes tell.

    Raises:
        ValueError: the state dict lacks some.
    """
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    given: dict[int, Tensor] = {}
    names: dict[int, str] = {}
    adapters = stored_adapters(model)
    for place, module in model.named_modules(remove_duplicate=False):
        dropped = module._non_persistent_buffers_set if state_dict is not None else ()
        for home in (module._parameters, module._buffers):
            for key, tensor in home.items():
                name = f"{place}.{key}".lstrip(".")
                merged = ADAPTER_NAME.search(name) is not None and name not in adapters
                if tensor is None or key in dropped or merged or (state_dict is None and not tensor.is_meta):
                    continue
                places.append((home, key, tensor))
                names.setdefault(id(tensor), name)
                found = _offloaded(model, name) if state_dict is None else state_dict.get(name)
                if found is not None:
                    given[id(tensor)] = found
    lacking = [name for tensor, name in names.items() if tensor not in given]
    if lacking and state_dict is None:
        raise ValueError(f"model: {lacking[0]} is on the 'meta' device, wanted it in memory or offloaded by accelerate")
    if lacking:
        raise ValueError(f"state_dict: lacks {', '.join(lacking[:5])}, wanted all tensors of the model")
    for name, tensor in (state_dict or {}).items():
        own, is_record = adapters.get(name), name.endswith(".lora_specs")
        if ADAPTER_NAME.search(name) and (own is None or (is_record and not torch.equal(tensor.cpu(), own))):
            raise ValueError(
                f"state_dict: got {name} of adapters that the model has merged, lacks, or has in another form (rank,"
                " alpha, activity), wanted the state dict of the model as it is now"
            )
    try:
        for home, key, tensor in places:
            home[key] = given[id(tensor)]
        yield
    finally:
        for home, key, tensor in places:
            home[key] = tensor


def _offloaded(model: Any, name: str) -> Tensor | None:
    """Return a tensor that accelerate keeps on the CPU or on disk; None if it does not."""
    for depth in range(name.count("."), -1, -1):  # the innermost module with a hook has it
        parts = name.split(".")
        hook = vars(model.get_submodule(".".join(parts[:depth]))).get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            if (weights := getattr(each, "weights_map", None)) is not None:
                tensor: Tensor = weights[".".join(parts[depth:])]
                return tensor
    return None


def _write(model: Any, directory: Path, max_shard_size: int | str) -> None:
    """Write the checkpoint into a directory in `directory`, or beside one that does not exist, and move it from there.
    Weights of another checkpoint in `directory` are removed."""
    shared = is_shared(model)
    for name, parameter in () if shared else model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"model: {name} is sharded (a DTensor); pass the gathered tensors as state_dict")
    # One that exists may be a mount point: files can be moved within it alone.
    place = directory if directory.exists() else directory.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    if not shared or torch.distributed.get_rank() == 0:
        remove_leftovers(directory)
    with scratch_directory(directory, place) as around:
        whole = write_model(model, around / "whole", max_shard_size, None)
        if whole.exists() and directory.exists():
            move_files(whole, directory, CONFIG_NAME, lambda name: _WEIGHTS.fullmatch(name) is not None)
        elif whole.exists():  # the first of several processes has it
            os.rename(whole, directory)


def _upload(directory: Path, token: str | bool | None, **options: Any) -> None:
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    commit = {name: options.pop(name) for name in ("commit_message", "create_pr") if name in options}
    commit.setdefault("commit_message", "Upload model")
    created = api.create_repo(options.pop("repo_id", directory.name), exist_ok=True, **options)
    api.upload_folder(repo_id=created.repo_id, folder_path=directory, **commit)
