"""Writes a transformers model with packed weights in ModelOpt's form, by its names in checkpoints.
Called by checkpoint (`save_checkpoint`) and saving (`save_pretrained`); calls thunder_moe.checkpoint.write_checkpoint.

All processes that share a model call this. Each has the experts of one layer whole at a time; 16-bit weights are
collected on the CPU of the first process.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from thunder_moe.checkpoint import ExpertWeights, write_checkpoint
from thunder_moe.finetune.lora import lora_linears, stored_adapters
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.weight import NVFP4Weight, PackedWeight
from thunder_moe.integrations.huggingface.checkpoint_names import expert_sources, linear_source
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.huggingface.sharding import part_of, refuse_part
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.quantization.refresh import whole_tensor

logger = logging.getLogger(__name__)


def write_model(model: PreTrainedModel, path: str | Path, max_shard_size: int | str, companions: Path | None) -> Path:
    """Write a model as `save_checkpoint` describes, with the tokenizer and other files of a given directory."""
    if not any(isinstance(module, NVFP4Experts | NVFP4Linear) for module in model.modules()):
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
        refuse_part(model, "whose adapters are whole: each process has the adapters of its part, in its state dict")
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
        _by_first(write, lambda: deque(tensors, maxlen=0))
        return Path(path)
    return write()


def _own_code(model: PreTrainedModel, config: dict[str, Any]) -> dict[str, str]:
    """Return the text of the Python files of a model that brings its own, by name, and name them in `config`."""
    with TemporaryDirectory() as folder:
        for part in (model.config, model):
            if part._auto_class is not None:
                custom_object_save(part, folder, config=config)
        return {file.name: file.read_text(encoding="utf-8") for file in Path(folder).iterdir()}


def model_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return config.json of a model in its present state; a quantization in it is the one of the files it came from."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    config.pop("distributed_config", None)
    dtype = str(model.dtype).removeprefix("torch.")
    if _has_untied_head(model):
        config["tie_word_embeddings"] = False
        if isinstance(text_config := config.get("text_config"), dict):
            text_config["tie_word_embeddings"] = False
    return config | {"architectures": [type(model).__name__], "dtype": dtype}


def _has_untied_head(model: Any) -> bool:
    """True if the configuration ties the head to the embeddings, and the model has other weights there."""
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


def model_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | ExpertWeights | PackedWeight]]:
    """Yield the experts and 4-bit dense layers by their paths in the checkpoint, then all else by its name there."""
    inside: set[str] = set()
    packed: set[nn.Module] = set()
    for name, (source, _) in expert_sources(model).items():
        module: Any = model.get_submodule(name)
        inside |= {f"{name}.gate_up_bias", f"{name}.down_bias"}
        packed |= {module.gate_up_proj, module.down_proj}
        yield source, _whole_experts(module)
    # Not state_dict(): in another layout than "linear" that copies all 4-bit weights.
    packed |= {each for linear in lora_linears(model).values() for each in (linear.lora_A, linear.lora_B)}
    state: dict[str, Tensor] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, NVFP4LinearPart | NVFP4Linear):
            if not isinstance(part, NVFP4LinearStack):
                share = getattr(part, "process_part", None)
                weight = lay_out(part.packed_weight, LINEAR)
                weight = weight if share is None else _whole(weight, vars(part)["process_mesh"], share[0])
                yield linear_source(model, name), weight
                state |= {} if part.bias is None else {f"{name}.bias": part.bias.detach()}
        elif part not in packed:
            part._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
    tied = {} if _has_untied_head(model) else model.all_tied_weights_keys
    state = {key: tensor for key, tensor in state.items() if key not in inside and tied.get(key) not in inside}
    state = {key: tensor for key, tensor in state.items() if tied.get(key) not in state}
    adapters = stored_adapters(model)  # by the model's own names, which are theirs in the file
    if is_shared(model):
        state, adapters = _whole_state(state), _whole_state(adapters)
    yield from revert_weight_conversion(model, state).items()
    yield from adapters.items()


def is_shared(model: nn.Module) -> bool:
    """True if transformers has shared a model among processes, and this one has parts of some layers."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return False
    return part_of(model) is not None or any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def _by_first(work: Callable[[], Any], others: Callable[[], Any]) -> Any:
    """Run `work` in the first process, and `others` in all, which `work` needs; all processes return together.

    The first process runs `others` after `work`, even if that has failed; the other ones raise a RuntimeError then.
    """
    done, problem = None, None
    if dist.get_rank() == 0:
        try:
            done = work()
        except Exception as error:
            problem = error
    others()
    device = torch.accelerator.current_accelerator() if "nccl" in dist.get_backend() else None
    failed = torch.tensor([problem is not None], dtype=torch.int32, device=device or "cpu")
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if bool(failed):
        raise RuntimeError("the first process could not save the model: its error says why")
    return done


def _whole_experts(experts: NVFP4Experts) -> ExpertWeights:
    """Return the whole experts of a layer, on the device of this process' part."""
    part, form = experts.part, experts.form
    biases = [
        None if bias is None else whole_tensor(bias.detach()) for bias in (experts.gate_up_bias, experts.down_bias)
    ]
    gate_up, down = (lay_out(each.packed_weight, LINEAR) for each in (experts.gate_up_proj, experts.down_proj))
    if part.is_unsharded:
        return ExpertWeights(gate_up, down, *biases)
    mesh, halves = experts.part_mesh, 2 if form.gated else 1
    if part.expert_ranks > 1:
        first, second = (None if bias is None else _joined(bias, mesh, 0) for bias in biases)
        return ExpertWeights(_whole(gate_up, mesh, 0), _whole(down, mesh, 0), first, second)
    gate_up, down = _whole(gate_up, mesh, 1, halves), _whole(down, mesh, 2)
    first, second = biases
    if first is not None:
        first = _joined(first, mesh, 1, halves)
    if second is not None:  # the other processes have zeros
        second = second.clone()
        dist.all_reduce(second, group=mesh.get_group())
    return ExpertWeights(gate_up, down, first, second)


def _whole_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that are not packed weights: in the first process whole and on its CPU, in the others none."""
    first, whole = dist.get_rank() == 0, {}
    for name, tensor in state.items():
        full = whole_tensor(tensor)
        if first:
            whole[name] = full.cpu()
    return whole


def _whole(weight: PackedWeight, mesh: Any, dim: int, parts: int = 1) -> PackedWeight:
    """Join the parts of a "linear" weight along a dimension of (E, N, K), along which `parts` weights are stacked."""
    qdata, scale = (_joined(tensor.view(torch.uint8), mesh, dim, parts) for tensor in (weight.qdata, weight.scale))
    qdata, scale = qdata.view(weight.qdata.dtype), scale.view(weight.scale.dtype)
    if not isinstance(weight, NVFP4Weight):
        return weight.with_tensors((qdata, scale))
    # One per row: which of the two shapes it has may differ between processes.
    global_scale = weight.row_global_scale().contiguous()
    if dim < 2:
        global_scale = _joined(global_scale, mesh, dim, parts)
    return NVFP4Weight(qdata, scale, global_scale).share_global_scale()


def _joined(tensor: Tensor, mesh: Any, dim: int, parts: int = 1) -> Tensor:
    pieces = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
    dist.all_gather(pieces, tensor.contiguous(), group=mesh.get_group())
    return torch.cat([piece.chunk(parts, dim)[part] for part in range(parts) for piece in pieces], dim)
