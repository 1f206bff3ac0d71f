"""Read and write PEFT's adapter files of 4-bit experts and dense layers, for PEFT and for vLLM.
Called by huggingface.lora and users; calls thunder_moe.finetune.lora. It needs neither PEFT nor its classes.

    as PEFT        <experts>[.base_layer].lora_A.weight (E * r, K), .lora_B.weight (N, r * E): target_parameters;
                   a dense layer likewise, with E = 1
    per expert     <experts>.{e}.gate_proj.lora_A.weight (r, K), ...lora_B.weight (N, r): what vLLM reads

Legend: E experts, N out_features, K in_features, r rank of one part, P parts (2: gate and up apart), R = P * r.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from thunder_moe.checkpoint.files import expand_user, read_json
from thunder_moe.finetune import lora
from thunder_moe.formats.checks import require_module
from thunder_moe.formats.gate_up import deinterleave, interleave
from thunder_moe.integrations.huggingface.checkpoint_names import expert_source
from thunder_moe.integrations.huggingface.lora_targets import PREFIX, Target, blocks_of, is_named, place_of, targets
from thunder_moe.integrations.huggingface.sharding import refuse_part
from thunder_moe.nn.lora import LoRALinear, LoRASpec, in_blocks
from thunder_moe.scratch import move_files, remove_leftovers, scratch_directory

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Options of a LoraConfig that change the computation of an adapter, or the layers that have one.
_FOREIGN = (
    "alora_invocation_tokens", "arrow_config", "bias", "fan_in_fan_out", "kasa_config", "layer_replication",
    "lora_bias", "monteclora_config", "use_bdlora", "use_dora", "use_qalora", "velora_config",
)  # fmt: skip
_OTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initializations that change the model's weights
_ANY = "#"  # stands for the number of an expert
PARTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2, "w1": 0, "w3": 1, "w2": 2}
_LORA = re.compile(r"\.lora_([AB])(?:\.[^.]+)?(?:\.weight)?$")


class Adapter(NamedTuple):
    """The adapter of a target, in the order of rows that our weights have: A (E, P r, K), B (E, N, r)."""

    a: Tensor
    b: Tensor
    spec: LoRASpec


def save_lora(
    model: Any, path: str | Path, adapter: str = "default", *, per_expert: bool = False, config: Any = None
) -> None:
    """Write an adapter of the experts and 4-bit dense layers as PEFT does: adapter_model.safetensors and
    adapter_config.json.

    PEFT loads it onto the 16-bit model (``PeftModel.from_pretrained(model, path)``), `load_lora_` onto a quantized one.

    Args:
        model: a model of transformers whose experts `quantize_` and `add_lora_` have changed.
        path: a directory, which is made.
        adapter: its name.
        per_expert: a tensor per expert and projection, named as in the checkpoints of the architecture (``gate_proj``,
            or ``w1``), as vLLM reads it, in place of PEFT's for fused experts. A projection without an adapter gets
            zeros where others have one, which vLLM wants.
        config: more entries of adapter_config.json, a dictionary.

    Raises:
        TypeError: the model is not a module, or the path is neither a string nor a path.
        OSError: a file cannot be written; an adapter that was there stays.
        ValueError: no experts with that adapter, merged adapters, or with per_expert experts that are not gated.
    """
    require_module(model)
    path = expand_user(path, "path")
    chosen = adapters(model, adapter)
    if not chosen:
        raise ValueError(
            f"adapter: got {adapter!r}, which no experts of transformers' models in {type(model).__name__} have"
        )
    path.mkdir(parents=True, exist_ok=True)
    tensors, own, *_ = encode(model, chosen, per_expert)
    write_adapter(path, tensors, own | (config or {}))


def encode(
    model: Any, chosen: list[tuple[Target, Adapter]], per_expert: bool
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, int], dict[str, float]]:
    """Return tensors and configuration of an adapter's files, and ranks and alphas by the names in the files.

    Names are of parameters, of dense layers, or of projections of any expert: "...experts.#.gate_proj".
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, key, (a, b, spec) in _encode_per_expert(model, chosen) if per_expert else _encode(chosen):
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a.contiguous(), f"{PREFIX}{name}.lora_B.weight": b.contiguous()}
        ranks[key], alphas[key] = spec.rank, spec.rank * spec.scaling
    dense = {target.name for target, _ in chosen if not target.experts}
    modules = [name for name in ranks if per_expert or name in dense]
    return tensors, _config(model, ranks, alphas, modules), ranks, alphas


def write_adapter(path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write both files of an adapter into an existing directory; an error leaves an earlier adapter there unchanged."""
    remove_leftovers(path)
    with scratch_directory(path, path) as new:
        try:
            save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path / WEIGHTS}: cannot be written: {error}") from error
        (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        move_files(new, path, CONFIG)


def load_lora_(model: nn.Module, path: str | Path, adapter: str = "default", *, freeze: bool = True) -> nn.Module:
    """Add an adapter of the experts from PEFT's files to a quantized model, or fill the one of that name.

    Args:
        model: a model of transformers after `quantize_` (or of a 4-bit checkpoint).
        path: a directory with adapter_config.json and adapter_model.safetensors.
        adapter: the name that it gets; it becomes the active one.
        freeze: as in `add_lora_`.

    Raises:
        TypeError: the model is not a module, or the path is neither a string nor a path.
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated (names it); the adapter matches no experts of the model, or is also of other
            modules (attention, say), which `get_peft_model` handles; tensors that do not fit; a kind of adapter that is
            not plain LoRA; merged adapters in the model, or one of that name in linears of which the files have none.
    """
    found, rest, config = read_adapter(model, path)
    if not found:
        raise no_adapter(model, path, rest)
    if rest:
        raise ValueError(
            f"path: {path} has adapters of {len(rest)} tensors that are not experts' ({next(iter(rest))}, ...), wanted"
            " thunder_moe.load_peft_model, which leaves those to PEFT"
        )
    set_adapter_(model, found, adapter, dropout=config.get("lora_dropout") or 0.0, freeze=freeze)
    return lora.use_lora_(model, adapter)


def set_adapter_(
    model: nn.Module, found: dict[str, Adapter], adapter: str, *, dropout: float = 0.0, freeze: bool = True
) -> None:
    """Add adapters by the path of their linear, or fill the existing ones.

    Other shapes, merged adapters, and an adapter of that name in other linears, which would stay, are a ValueError.
    """
    present = lora.lora_linears(model)
    lora.refuse_merged(present)
    if others := [path for path, linear in present.items() if adapter in linear.lora_specs and path not in found]:
        raise ValueError(
            f"adapter: got {adapter!r}, which {others[0]} has ({len(others)} in all) and the files have not, wanted"
            " another name, or remove_lora_ before"
        )
    ready: dict[str, Adapter] = {}
    missing: dict[str, LoRASpec] = {}
    for path, new in found.items():  # all is checked before the first change
        linear: Any = model.get_submodule(path)
        if isinstance(linear, LoRALinear) and adapter in linear.lora_specs:
            spec, shapes = linear.lora_specs[adapter], (linear.lora_A[adapter].shape, linear.lora_B[adapter].shape)
            if spec.parts == 1 and new.spec.parts == 2 and spec.rank == 2 * new.spec.rank:
                new = _joined(new)
            if (spec.rank, spec.parts) != (new.spec.rank, new.spec.parts):
                got = f"{new.spec.rank} x {new.spec.parts}"
                raise ValueError(f"{path}: got an adapter of rank {got}, wanted {spec.rank} x {spec.parts}")
        else:
            missing[path], shapes = replace(new.spec, dropout=dropout), lora.shapes_of(linear, new.spec)
        for name, value, shape in zip("AB", new[:2], shapes, strict=True):
            if value.shape != shape:
                raise ValueError(f"{path}.lora_{name}: got shape {tuple(value.shape)}, wanted {tuple(shape)}")
        ready[path] = new
    if missing:
        lora.add_by_name_(model, missing, adapter)
        if freeze:
            lora.freeze_others_(model)
    with torch.no_grad():
        for path, new in ready.items():
            linear = model.get_submodule(path)
            linear.lora_A[adapter].copy_(new.a)
            linear.lora_B[adapter].copy_(new.b * (new.spec.scaling / linear.lora_specs[adapter].scaling))


def read_adapter(
    model: nn.Module, path: str | os.PathLike[Any]
) -> tuple[dict[str, Adapter], dict[str, Tensor], dict[str, Any]]:
    """Return the adapters of a directory's files by the path of their linear, the other tensors, and the configuration.

    Raises what `load_lora_` raises. Other tensors, and files without tensors of 4-bit linears, are not errors here.
    """
    require_module(model)
    refuse_part(model, "whose layers are whole, as an adapter's files are: add_lora_(model, ...) adds one for training")
    path = expand_user(path, "path")
    config = read_json(path / CONFIG)
    refuse_foreign(config, f"path: {path / CONFIG}")
    if str(config.get("init_lora_weights")).lower().startswith(_OTHER_BASE):
        raise ValueError(
            f"path: {path / CONFIG} has init_lora_weights {config['init_lora_weights']!r}, whose adapters are for other"
            " weights than the model's, wanted plain LoRA, as PEFT's path_initial_model_for_weight_conversion writes"
        )
    try:
        tensors = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(
            f"path: {path / WEIGHTS} cannot be read, truncated or no safetensors file ({error})"
        ) from error
    blocks = blocks_of(model)
    rest: dict[str, Tensor] = {}
    found: dict[str, Adapter] = {}
    by_block: dict[str, dict[tuple[str, str], Tensor]] = {}
    places: dict[str, str] = {}  # of the blocks in the files
    for key, tensor in tensors.items():
        match = _LORA.search(key)
        if match is not None and not (tensor.dtype in lora.DTYPES and bool(tensor.isfinite().all())):
            raise ValueError(
                f"path: {path / WEIGHTS} has {key} in {tensor.dtype}, wanted finite values in one of {lora.DTYPES}"
            )
        name = key[: match.start()].removeprefix(PREFIX) if match else ""
        block, inside = place_of(name, blocks)
        if match is None or block is None:
            rest[key] = tensor
            continue
        given = by_block.setdefault(block, {})
        if (inside, match[1]) in given:
            raise ValueError(f"path: {path / WEIGHTS} has two tensors of {key}, under two names, wanted one")
        given[inside, match[1]] = tensor.float()
        places[block] = name.removesuffix(inside).rstrip(".")
    for block, given in by_block.items():
        for target, adapter in _decode(blocks[block], given, config, places[block]):
            found[target.path] = adapter
    return found, rest, config


def refuse_foreign(config: Mapping[str, Any], place: str) -> None:
    """Raise a ValueError, which begins with `place`, for a configuration of more than plain LoRA."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        raise ValueError(f"{place}: got {kind}, wanted a LoraConfig")
    for name in _FOREIGN:
        if (value := config.get(name)) not in (None, False, "none"):
            raise ValueError(f"{place}.{name}: got {value!r}, wanted none of it for adapters of experts")


def no_adapter(model: nn.Module, path: str | os.PathLike[Any], tensors: Mapping[str, Tensor]) -> ValueError:
    """Return the error for a directory whose files have tensors, but no adapter of a 4-bit linear of the model."""
    experts = {target.experts for target in targets(model) if target.experts}
    return ValueError(
        f"path: {Path(path) / WEIGHTS} has no adapter of the {len(experts)} blocks of 4-bit experts of"
        f" {type(model).__name__}; it has {', '.join(list(tensors)[:3])}, ..."
    )


# ---- as PEFT: A (E * r, K), B (N, r * E) of each parameter, whose wrappers are nested


# What an encoding yields: module in the file, its name in the configuration, the adapter with matrices as A and B.
_Encoded = Iterator[tuple[str, str, Adapter]]


def _encode(chosen: list[tuple[Target, Adapter]]) -> _Encoded:
    by_block: dict[str, list[tuple[Target, Adapter]]] = {}
    for target, adapter in chosen:
        by_block.setdefault(target.block, []).append((target, adapter))
    for block, wrapped in by_block.items():
        for depth, (target, adapter) in enumerate(reversed(wrapped)):
            a, b, spec = _joined(adapter)
            b = interleave(b) if target.interleaved else b
            a, b = (b.transpose(1, 2), a.transpose(1, 2)) if target.swapped else (a, b)
            a, b = a.reshape(-1, a.shape[2]), b.permute(1, 2, 0).reshape(b.shape[1], -1)
            yield block + ".base_layer" * depth, target.name, Adapter(a, b, spec)


def _decode(
    own: list[Target], given: dict[tuple[str, str], Tensor], config: dict[str, Any], place: str
) -> Iterator[tuple[Target, Adapter]]:
    block = own[0].block
    for (inside, each), tensor in given.items():
        if tensor.ndim != 2:
            raise ValueError(f"path: an adapter of {block} has shape {tuple(tensor.shape)}, wanted a matrix")
        if (inside, "B" if each == "A" else "A") not in given:
            raise ValueError(f"path: the adapter {inside or 'itself'} of {block} has lora_{each} alone")
    if any(re.match(r"\d+\.", inside) for inside, _ in given):
        yield from _decode_per_expert(own, given, config, place)
        return
    depths = sorted({inside.count("base_layer") for inside, _ in given})
    names = config.get("target_parameters") or []
    named = [target for target in own if is_named(target.name, names)]
    wrapped = named if len(named) == len(depths) else own if len(own) == len(depths) else []
    if not wrapped or {inside.replace("base_layer", "").strip(".") for inside, _ in given} != {""}:
        raise ValueError(
            f"path: the adapters of {block} ({', '.join(inside or 'itself' for inside, _ in given)}) do not"
            f" fit target_parameters={list(names)}"
        )
    for depth, target in zip(depths, reversed(wrapped), strict=True):
        inside, experts = ".".join(["base_layer"] * depth), target.num_experts
        a, b = given[inside, "A"], given[inside, "B"]
        spec = _spec(config, target.name)
        if not a.shape[0] == b.shape[1] == spec.rank * experts:
            raise ValueError(
                f"path: {target.name} has adapters {tuple(a.shape)} and {tuple(b.shape)}, wanted {experts} experts of"
                f" rank {spec.rank}"
            )
        a, b = a.reshape(experts, spec.rank, -1), b.reshape(b.shape[0], spec.rank, experts).permute(2, 0, 1)
        a, b = (b.transpose(1, 2), a.transpose(1, 2)) if target.swapped else (a, b)
        b = deinterleave(b.contiguous()) if target.interleaved else b
        yield target, Adapter(a.contiguous(), b.contiguous(), spec)


# ---- one adapter per expert and projection


def _encode_per_expert(model: Any, chosen: list[tuple[Target, Adapter]]) -> _Encoded:
    own = {target.path: adapter for target, adapter in chosen}
    blocks = {target.experts: adapter for target, adapter in chosen if target.experts}
    for target in targets(model):
        adapter, like = own.get(target.path), blocks.get(target.experts)
        if target.module is None and adapter is not None:
            yield from _encode([(target, adapter)])
        if target.module is None or like is None:
            continue
        if not target.module.form.gated:
            raise ValueError(f"per_expert: got experts without a gate ({target.experts}), wanted per_expert=False")
        if adapter is None:  # zeros
            spec = replace(like.spec, parts=1)
            a, b = map(like.a.new_zeros, lora.shapes_of(target.linear, spec))
            adapter = Adapter(a, b, spec)
        path, layout = expert_source(model, target.experts, target.module.form)
        names = layout.projections[2:] if target.is_down else layout.projections[:2]
        rows, columns = adapter.b.chunk(len(names), 1), adapter.a.chunk(adapter.spec.parts, 1)
        for at, name in enumerate(names):
            for expert, (a, b) in enumerate(zip(columns[at % adapter.spec.parts], rows[at], strict=True)):
                yield f"{path}.{expert}.{name}", f"{path}.{_ANY}.{name}", Adapter(a.clone(), b.clone(), adapter.spec)


def _decode_per_expert(
    own: list[Target], given: dict[tuple[str, str], Tensor], config: dict[str, Any], place: str
) -> Iterator[tuple[Target, Adapter]]:
    block, experts = own[0].experts, own[0].num_experts
    tensors: dict[tuple[int, str], dict[int, Tensor]] = {}
    names: dict[int, str] = {}
    for (inside, each), tensor in given.items():
        expert, _, name = inside.partition(".")
        if name not in PARTS:
            raise ValueError(f"path: {block} has an adapter of {inside!r}, wanted one of {tuple(PARTS)}")
        by_expert = tensors.setdefault((PARTS[name], each), {})
        if int(expert) in by_expert:
            raise ValueError(f"path: {block} has two tensors lora_{each} of {inside}, under two names, wanted one")
        by_expert[int(expert)], names[PARTS[name]] = tensor, name
    if (0 in names) != (1 in names):
        raise ValueError(f"path: {block} has an adapter of gate_proj or up_proj alone, wanted both or neither")
    found: dict[int, Adapter] = {}
    for part, name in names.items():
        if sorted(tensors[part, "A"]) != list(range(experts)):
            count = len(tensors[part, "A"])
            raise ValueError(f"path: {block} has adapters of {count} of the {experts} experts, wanted all")
        a, b = (torch.stack([tensors[part, each][expert] for expert in range(experts)]) for each in "AB")
        spec = _spec(config, f"{place}.0.{name}")
        if not a.shape[1] == b.shape[2] == spec.rank:
            raise ValueError(
                f"path: {block} has adapters {tuple(a.shape)} and {tuple(b.shape)} of {name}, wanted rank {spec.rank},"
                f" the rank in {CONFIG}"
            )
        found[part] = Adapter(a, b, spec)
    if 0 in found:
        gate, up = found[0], found[1]
        rank, scaling = gate.spec.rank, gate.spec.scaling
        if rank != up.spec.rank:
            raise ValueError(f"path: {block} has gate_proj of rank {rank}, up_proj of {up.spec.rank}, wanted one")
        b = torch.cat([gate.b, up.b * (up.spec.scaling / scaling)], 1)
        yield own[0], Adapter(torch.cat([gate.a, up.a], 1), b, replace(gate.spec, parts=2))
    if 2 in found:
        yield own[1], found[2]


# ---- what an adapter is


def adapters(model: nn.Module, adapter: str) -> list[tuple[Target, Adapter]]:
    """Return the linears that have an adapter of that name.

    Merged adapters, and a model that is a process's part of a whole one, are a ValueError.
    """
    refuse_part(model, "whose adapters are whole: each process has the adapters of its part, in its state dict")
    found = []
    for target in targets(model):
        linear = target.linear
        if not isinstance(linear, LoRALinear) or (spec := linear.lora_specs.get(adapter)) is None:
            continue
        lora.refuse_merged({target.path: linear})
        a, b = (each[adapter].detach().expand(linear.num_experts, -1, -1) for each in (linear.lora_A, linear.lora_B))
        found.append((target, Adapter(a, b, spec)))
    return found


def _joined(adapter: Adapter) -> Adapter:
    """Return the adapter as one part: of two, A's rows one after the other, and B in blocks."""
    a, b, spec = adapter
    return adapter if spec.parts == 1 else Adapter(a, in_blocks(b), LoRASpec(2 * spec.rank, spec.scaling))


def _config(model: Any, ranks: dict[str, int], alphas: dict[str, float], modules: list[str]) -> dict[str, Any]:
    rank = min(ranks.values())
    alpha = next(alphas[name] for name in ranks if ranks[name] == rank)
    return dict(
        peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none",
        use_rslora=False, use_dora=False, fan_in_fan_out=False, inference_mode=True, init_lora_weights=True,
        base_model_name_or_path=getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        target_modules=list(dict.fromkeys(name.rpartition(".")[2] for name in modules)),
        target_parameters=sorted({_suffix(name) for name in ranks if name not in modules}) or None,
        rank_pattern=pattern(ranks, rank), alpha_pattern=pattern(alphas, alpha),
    )  # fmt: skip


def pattern(values: Mapping[str, float], general: float) -> dict[str, float]:
    """Return PEFT's pattern of numbers by module. No name fits two keys, because PEFT sorts keys when it saves."""
    if set(values.values()) == {general}:
        return {}
    by_suffix: dict[str, set[float]] = {}
    for name, value in values.items():
        by_suffix.setdefault(_suffix(name), set()).add(value)
    if all(len(each) == 1 for each in by_suffix.values()):
        return {_escape(suffix): each.pop() for suffix, each in by_suffix.items()}
    return {_escape(name): value for name, value in values.items()}


def _escape(name: str) -> str:
    return re.escape(name).replace(re.escape(_ANY), r"\d+")


def _suffix(name: str) -> str:
    """Return what names have in common over layers: "mlp.experts.down_proj"."""
    return ".".join(name.split(".")[-3:])


def rank_and_alpha(config: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return the rank and alpha of a module by its name, as PEFT finds them in the patterns of a configuration."""

    def of(pattern: Mapping[str, Any] | None, default: Any) -> Any:
        return next((value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)

    return of(config.get("rank_pattern"), config["r"]), of(config.get("alpha_pattern"), config["lora_alpha"])


def _spec(config: dict[str, Any], name: str) -> LoRASpec:
    try:
        rank, alpha = rank_and_alpha(config, name)
        return LoRASpec(int(rank), lora.scaling_of(int(rank), float(alpha), bool(config.get("use_rslora"))))
    except (AttributeError, KeyError, TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"path: {CONFIG} has no valid r and lora_alpha, or rank_pattern and alpha_pattern, for {name} ({error})"
        ) from error
