"""refresh_(model) quantizes again after 16-bit weights changed: those whose 4-bit copies compiled graphs keep, or those
that `quantize_` replaced, which a trainer hands over.
Called by users; calls weight_cache for the copies; families to quantize copies of modules, a layer at a time.

A trainer's weights: the quantized modules of each layer are its "blocks". Each gets a copy in 16 bits on "meta". All
names and shapes are checked with these copies. Then each layer's copies load the weights and are quantized. The results
are checked for NaN and copied into the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.checks import require_module
from thunder_moe.formats.registry import FORMATS, check_scale_search
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.select import lay_out, quantize_unchecked
from thunder_moe.nn.linear import NVFP4LinearPart, NVFP4LinearStack
from thunder_moe.nn.packed import PackedModule
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import ExpertFamily, Quantization, families_of
from thunder_moe.quantization.layer_chain import numbered_layers
from thunder_moe.quantization.plan import PROGRESS_WEIGHTS, exclusive
from thunder_moe.quantization.replaceable import HOOK_ATTRIBUTES, has_hook, has_own_forward, wrapped_modules
from thunder_moe.selection import shortened
from thunder_moe.weight_cache import refresh

Model = TypeVar("Model", bound=nn.Module)


@torch.inference_mode(False)
@torch.no_grad()
def refresh_(model: Model, weights: Mapping[str, Tensor] | None = None, *, scale_search: str | None = None) -> Model:
    """Quantize a model's weights again, in place, after a change.

    Without `weights`: compiled graphs keep a 4-bit copy beside each frozen 16-bit weight, and make it again when they
    detect a change of the weight. Writes through ``parameter.data`` or NumPy, and collectives of torch.distributed,
    cannot be detected: call this after them. docs/weights.md lists the changes that are detected.

    With `weights`: the model was quantized by `quantize_`, and holds no 16-bit experts any more. It takes the weights
    of a trainer, which are quantized layer by layer, and all its other parameters and buffers. The result has the bits
    of `quantize_` of the trained model. Beyond the model's own memory this needs one layer in 4 bits, and in 16 bits
    where its weights have another dtype or device than the model's.

    In both cases the quantized tensors keep their addresses, so compiled graphs and captured CUDA graphs read them.

    Args:
        model: a module, compiled by torch.compile or not; of thunder.jit the module that was compiled. Without
            `weights`, the copies of its parameters and buffers, and of all tensors that share their storage, are made
            again.
        weights: state dict of the 16-bit model, as before `quantize_`, on any device. Tensors are cast to the dtypes
            that the weights had. A DTensor (FSDP2) is gathered when its layer is quantized: all processes of its mesh
            call this.
        scale_search: as in `quantize_`, for `weights`; give the same value as there.

    Returns:
        The same model.

    Raises:
        TypeError: model is not a module, or weights is not a mapping of tensors.
        ValueError: a weight holds NaN or Inf. Or with `weights`: the model holds nothing quantized, experts that are
            sharded over processes, tensors on "meta", or customized modules that cannot be replaced; a module around
            quantized ones has hooks on loading; names are missing or unknown; a scale_search that is unknown, or for
            MXFP8 alone; another thread converts the model.
        RuntimeError: a tensor has another shape, as in `load_state_dict`.

    All these leave the model unchanged, but for NaN or Inf. An error in a layer (these, or out of memory) leaves that
    layer and those behind it unchanged, and the layers before it new.
    """
    require_module(model)
    module: nn.Module = getattr(model, "_orig_mod", model)  # of a compiled model
    if weights is not None:
        _take(module, weights, scale_search)
    elif scale_search is not None:
        raise ValueError(f"scale_search: got {scale_search!r} without weights, wanted weights to quantize")
    refresh(itertools.chain(module.parameters(), module.buffers()))
    return model


def _take(model: nn.Module, weights: Mapping[str, Tensor], scale_search: str | None) -> None:
    """Give a quantized model the weights of a trainer."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: got {type(weights).__name__}, wanted a state dict: a mapping of names and tensors")
    with exclusive(model):
        layers = _layers(model)
        blocks = (block for layer in layers.values() for block in layer.blocks)
        check_scale_search(scale_search, {block.format for block in blocks if block.family is not None})
        _check(layers, weights)
        _find_groups(model, layers)
        quick = sum(tensor.numel() for tensor in weights.values()) < PROGRESS_WEIGHTS
        for name in progress_bar([*layers], desc="refreshing", unit="layer", disable=quick):
            _refresh_layer(layers.pop(name), weights, scale_search)


@dataclass(eq=False)
class _Block:
    """A module that takes its weights as a whole: a quantized one, or without a family one with a load of its own."""

    module: nn.Module
    family: ExpertFamily | None
    names: list[str]
    copy: Any = None  # of the module, in 16 bits, on "meta"
    weights: dict[str, Tensor] = field(default_factory=dict)  # by their names in it

    @property
    def holder(self) -> nn.Module:
        """Return the module that has the packed weights."""
        return _holder(self.module)

    @property
    def format(self) -> str:
        return next(part.format_name for part in self.holder.modules() if isinstance(part, PackedModule))


@dataclass
class _Layer:
    """A part of the model that changes at once."""

    blocks: list[_Block] = field(default_factory=list)
    others: dict[str, Tensor] = field(default_factory=dict)  # of modules outside of blocks, by their names in the model


def _layers(model: nn.Module) -> dict[str | None, _Layer]:
    """Return the layers of a model with quantized modules, by name, and behind them all else under the name None.

    A layer is the module in a list that holds quantized modules, else their parent, or a dense layer itself."""
    families: list[ExpertFamily] = [*families_of(model), DenseLinears()]
    wrapped = wrapped_modules(model)
    blocks: dict[nn.Module, _Block] = {}
    others: dict[str, Tensor] = {}
    loaders: list[str] = []  # modules around quantized ones that change what these load
    homes: dict[str, str] = {}  # quantized modules by name, and their parent, or a dense layer itself
    inside = None  # what the names of the parts of the last block, which follow it, begin with
    for name, module in model.named_modules(remove_duplicate=False):
        if (inside is not None and name.startswith(inside)) or isinstance(module, NVFP4LinearStack):
            continue
        family = _family_of(module, families)
        own_load = family is None and _has_own_load(module)
        if own_load and any(_family_of(part, families) for part in module.modules()):
            own_load, loaders = False, [*loaders, name]
        if family is None and not own_load:
            module._save_to_state_dict(others, name and f"{name}.", keep_vars=True)
            continue
        inside = name and f"{name}."
        if module in blocks:
            blocks[module].names.append(name)
        else:
            blocks[module] = block = _Block(module, family, [name])
            _require_replaceable(block, wrapped)
        if family is not None:
            alone = isinstance(module, PackedModule) and not isinstance(module, NVFP4LinearPart)
            homes[name] = name if alone else name.rpartition(".")[0]
    if not homes:
        raise ValueError(f"model: found nothing quantized in {type(model).__name__}, wanted a model of `quantize_`")
    names = dict.fromkeys((homes | numbered_layers(homes)).values())
    layers: dict[str | None, _Layer] = {name: _Layer() for name in names if _prefix_of(name, names) == name}
    if changing := [name or "the model" for name in loaders if _prefix_of(name, layers) is not None]:
        raise ValueError(
            f"model: {shortened(changing)} holds quantized modules and changes what they load (by a hook, or a"
            " _load_from_state_dict of its own), wanted a plain load: change `weights` before"
        )
    layers[None] = _Layer()
    for block in blocks.values():
        layers[_prefix_of(block.names[0], layers)].blocks.append(block)
    for name, tensor in others.items():
        layers[_prefix_of(name, layers)].others[name] = tensor
    return layers


def _family_of(module: nn.Module, families: list[ExpertFamily]) -> ExpertFamily | None:
    return next((family for family in families if family.match_quantized(module)), None)


def _has_own_load(module: nn.Module) -> bool:
    """Return True if a module does more on loading than to copy the tensors of its names."""
    plain = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks) or not plain


def _prefix_of(name: str, names: Container[str | None]) -> str | None:
    """Return the name, among some of modules, of the one that a module or tensor is in; None if there is none."""
    prefixes = itertools.chain([""], itertools.accumulate(name.split("."), "{}.{}".format))
    return next((prefix for prefix in prefixes if prefix in names), None)


def _holder(module: Any) -> Any:
    """Return the module that has the packed weights of a quantized one."""
    return module.stack if isinstance(module, NVFP4LinearPart) else module


def _require_replaceable(block: _Block, wrapped: Mapping[nn.Module, str]) -> None:
    """Raise a ValueError for a module without data, and for a quantized one that `quantize_` would not make."""
    name = block.names[0] or "the model"
    if any(tensor.is_meta for tensor in (*block.holder.parameters(), *block.holder.buffers())):
        raise ValueError(f"model: {name} is on the meta device or offloaded, wanted weights in memory")
    if block.family is None:
        return
    for part in block.holder.modules():
        if isinstance(part, PackedModule) and (part.process_part is not None or part._sharding is not None):
            raise ValueError(f"model: {name} has a part of weights that processes share, wanted whole weights")
    reason = wrapped.get(block.module) or block.family.blocker(block.module)
    if reason is not None:
        raise ValueError(f"model: {name} ({type(block.module).__name__}) cannot take weights: {reason}")


def _check(layers: Mapping[str | None, _Layer], weights: Mapping[str, Tensor]) -> None:
    """Raise the errors of `refresh_` for weights that do not fit, and give the blocks their copies and weights."""
    blocks = {name: block for layer in layers.values() for block in layer.blocks for name in block.names}
    others = {name: tensor for layer in layers.values() for name, tensor in layer.others.items()}
    given: dict[str, dict[str, Tensor]] = {name: {} for name in blocks}
    missing, unknown = [name for name in others if name not in weights], []
    for key, tensor in weights.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"weights: {key}: got {type(tensor).__name__}, wanted a tensor")
        name = _prefix_of(key, blocks)
        if name is not None:
            given[name][key[len(name) :].removeprefix(".")] = tensor
        elif key not in others:
            unknown.append(key)
    for layer in layers.values():
        _copy_blocks(layer.blocks)
    for name, block in blocks.items():
        block.weights = given[name]
        shapes = {key: torch.empty(tensor.shape, device="meta") for key, tensor in block.weights.items()}
        try:
            keys = block.copy.load_state_dict(shapes, strict=False)
        except RuntimeError as error:
            raise RuntimeError(f"weights: {name or 'the model'}: {error}") from error
        missing += [f"{name}.{key}" if name else key for key in keys.missing_keys]
        unknown += [f"{name}.{key}" if name else key for key in keys.unexpected_keys]
    if missing or unknown:
        raise ValueError(
            f"weights: missing {shortened(missing) or 'none'}; unknown {shortened(unknown) or 'none'}; wanted the names"
            " before `quantize_`, without what wrappers add ('_orig_mod.' of torch.compile, 'module.' of DDP)"
        )
    for name, tensor in others.items():
        if weights[name].shape != tensor.shape:
            shape = tuple(weights[name].shape)
            raise RuntimeError(f"weights: {name}: got shape {shape}, wanted {tuple(tensor.shape)}")
        if tensor.is_meta:
            raise ValueError(f"model: {name} is on the meta device or offloaded, wanted weights in memory")


def _copy_blocks(blocks: list[_Block]) -> None:
    """Give the blocks of a layer their copies. Of quantized ones all but modules and tensors is shared."""
    memo: dict[int, Any] = {}  # what deepcopy takes for copies
    for block in blocks:
        for part in block.holder.modules():
            for name, value in vars(part).items() if block.family is not None else ():
                if name not in ("_parameters", "_buffers", "_modules") and not isinstance(value, nn.Module):
                    memo[id(value)] = value
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _like(tensor, "meta")
    restored: dict[Any, Any] = {}
    for block in blocks:
        made = deepcopy(block.module, memo)
        for part in _holder(made).modules():
            _remove_hook(part)
        block.copy = made if block.family is None else block.family.restore(made, restored)


def _remove_hook(module: nn.Module) -> None:
    """Remove a hook of accelerate's, which would move the tensors, from a copy of a module."""
    for name in HOOK_ATTRIBUTES if has_hook(module) else ():
        vars(module).pop(name, None)


def _find_groups(model: nn.Module, layers: Mapping[str | None, _Layer]) -> None:
    """Have the dense layers packed together that `quantize_` packs together, by their parents; in one layer each."""
    family, blocks = DenseLinears(), {}
    parents: dict[str, nn.Module] = {}  # copies, with the dense layers alone
    for block in (block for layer in layers.values() for block in layer.blocks):
        if isinstance(block.family, DenseLinears):
            family, blocks[block.copy] = block.family, block
            home, _, name = block.names[0].rpartition(".")
            if home not in parents:
                parent = model.get_submodule(home)
                parents[home] = copy(parent)
                vars(parents[home]).update(_modules={}, _parameters={}, _buffers={})
                if has_own_forward(parent):
                    _remove_hook(parents[home])
            parents[home]._modules[name] = block.copy
    copies = nn.Module()
    copies._modules.update(parents)
    family.choose(
        copies,
        lambda module, name: True,
        declined=lambda module, name: None,
        device_of=lambda module: torch.device("meta"),
        format_of=lambda module, name: blocks[module].format,
    )
    done: set[_Block] = set()
    for layer in layers.values():
        groups = ([block, *map(blocks.get, family.packed_together(block.copy))] for block in layer.blocks)
        members = dict.fromkeys(itertools.chain.from_iterable(groups))
        layer.blocks = [block for block in members if block is not None and block not in done]
        done.update(layer.blocks)


def _like(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return an uninitialized tensor, or parameter, of the same kind on a device."""
    new = torch.empty_like(tensor, device=device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def _refresh_layer(layer: _Layer, weights: Mapping[str, Tensor], scale_search: str | None) -> None:
    """Quantize the weights of a layer in copies of its blocks, then copy the results into the model.

    The checks for NaN and Inf wait for the device, so they follow all kernels of the layer."""
    checks: list[tuple[_Block, Tensor, torch.dtype]] = []

    def pack(block: _Block, weight: Tensor) -> PackedWeight:
        search = scale_search if block.format == NVFP4.name else None
        packed, amax = quantize_unchecked(block.format, weight, search)
        checks.append((block, amax, weight.dtype))
        return packed

    for block in layer.blocks:
        _load(block)
    pairs: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
    for block in layer.blocks:
        new = block.copy
        if block.family is not None:
            run = Quantization(partial(pack, block), "auto")
            block.family.prepare([new], run)
            new = block.family.convert(new, run)
        if block.holder not in pairs:
            pairs[block.holder] = [*_pairs(block.names[0], block.holder, _holder(new))]
    for block, amax, dtype in checks:
        try:
            FORMATS[block.format].check_amax(amax, dtype)
        except ValueError as error:
            raise ValueError(f"weights: {block.names[0] or 'the model'}: {error}") from error
    for tensor, made in itertools.chain.from_iterable(pairs.values()):
        tensor.copy_(made)
    for name, tensor in layer.others.items():
        tensor.copy_(whole_tensor(weights[name]))


def _load(block: _Block) -> None:
    """Load the weights into the copy of a block, which shares the memory of those that need no cast."""
    weights = {key: whole_tensor(tensor).detach() for key, tensor in block.weights.items()}
    if block.family is None:
        block.copy = deepcopy(block.module)
        block.copy.load_state_dict(weights)
        return
    home = next(part.qdata.device for part in block.holder.modules() if isinstance(part, PackedModule))
    kinds = {(type(each), each.layout, each.dtype, each.device, each.is_inference()) for each in weights.values()}
    shares = kinds == {(Tensor, torch.strided, each.dtype, home, False) for each in block.copy.parameters()}
    for part in () if shares else block.copy.modules():
        for tensors in (part._parameters, part._buffers):
            tensors |= {key: _like(each, home) for key, each in tensors.items() if each is not None}
    block.copy.load_state_dict(weights, assign=shares)


def _pairs(name: str, old: nn.Module, new: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of a module, each with the tensor of the other module to copy, in the same layout."""
    parts = dict(new.named_modules())
    for where, part in old.named_modules():
        other = parts.get(where)
        if isinstance(part, PackedModule) and isinstance(other, PackedModule) and other.layout != part.layout:
            other.set_weight(lay_out(other.packed_weight, part.layout))
        made = {} if other is None else {**other._parameters, **other._buffers}
        for key, tensor in {**part._parameters, **part._buffers}.items():
            if tensor is None or key in part._non_persistent_buffers_set:
                continue
            fresh = made.get(key)
            if fresh is None or fresh.shape != tensor.shape or fresh.dtype != tensor.dtype:
                raise ValueError(f"model: {name}: {where}.{key} is quantized in another way than `quantize_` does it")
            yield tensor, fresh


def whole_tensor(tensor: Any) -> Tensor:
    """Return a tensor, a DTensor gathered."""
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result
