"""Decodes the experts of a layer to `ExpertWeights`, from any format.
Called by reader; calls formats.registry for the format of a module, and files.

Legend: E experts, N output features, K input features, I intermediate_size, H hidden_size.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from thunder_moe.checkpoint.experts import UNSHARDED, ExpertsPart, ExpertWeights
from thunder_moe.checkpoint.files import TensorFiles, TensorInfo
from thunder_moe.checkpoint.formats.interface import FLOATS, CheckpointFormat
from thunder_moe.checkpoint.formats.registry import format_of
from thunder_moe.checkpoint.modules import ExpertBlock, Module
from thunder_moe.formats.gate_up import deinterleave
from thunder_moe.formats.weight import PackedWeight, joined


def decode_experts(
    files: TensorFiles, block: ExpertBlock, interleaved: bool, part: ExpertsPart = UNSHARDED
) -> ExpertWeights:
    """Return the experts of one layer or a part of them, on the CPU, as copies.

    If ranks share the features, the first has down's bias and the others have zeros. `interleaved` says that the rows
    of a fused gate_up projection alternate. A ValueError names file and tensor if one is missing or has the wrong
    dtype, shape or values, or says that the ranks cannot share the experts evenly.
    """
    experts = block.experts()
    if block.is_fused:
        weights, sizes = _decode_fused(files, block, interleaved, part)
    else:
        experts = experts[part.experts(len(experts))]
        first = ("gate", "up") if block.gated else ("up",)
        gate_up, gate_up_bias, gate_up_sizes = _stack(files, block, first, experts, part)
        down, down_bias, down_sizes = _stack(files, block, ("down",), experts, part)
        weights, sizes = ExpertWeights(gate_up, down, gate_up_bias, down_bias), (gate_up_sizes, down_sizes)
    gate_up_size, down_size = sizes
    block.require_sizes((weights.gate_up.shape[0], *gate_up_size), (weights.down.shape[0], *down_size))
    if weights.down_bias is not None and part.feature_rank:
        weights = replace(weights, down_bias=torch.zeros_like(weights.down_bias))
    return weights


def decode_dense(
    files: TensorFiles, module: Module, device: torch.device | str = "cpu", part: tuple[int, int, int] | None = None
) -> PackedWeight:
    """Return a copy of the weight (1, N, K) of a packed module that is not an expert, on a device.

    A `part` (dim, index, count) is one of `count` equal parts along dim 1 or 2. Errors are as in `decode_experts`.
    """
    form = format_of(module)
    infos, slices = form.infos(module, 2), None
    if part is not None:
        (n, k, _), (dim, index, count) = form.sizes(infos, 2), part
        size = (n if dim == 1 else k) // count
        if dim == 2 and size % form.block:
            raise infos[0].error(f"is shared by {count} processes, wanted shares of blocks of {form.block}")
        own = slice(index * size, (index + 1) * size)
        slices = (own, slice(0, k)) if dim == 1 else (slice(0, n), own)
    weight = _one(files, form, infos, slices)
    return weight.with_tensors(tensor.to(device, copy=True) for tensor in weight.tensors())


def _one(
    files: TensorFiles, form: CheckpointFormat, infos: list[TensorInfo], slices: tuple[slice, slice] | None
) -> PackedWeight:
    """Return the weight (1, N, K) of one module, or slices of its rows and columns; whole, as a view of the file."""
    read = files.read if slices is None else form.sliced(files, infos, None, [slices[0]], slices[1])
    codes, bits, global_scale = form.read(read, infos)
    return form.weight(codes[None], bits[None], None if global_scale is None else global_scale.reshape(1))


def _stack(
    files: TensorFiles, block: ExpertBlock, projections: tuple[str, ...], experts: range, part: ExpertsPart
) -> tuple[PackedWeight, torch.Tensor | None, tuple[int, int]]:
    """Return a part of the stacked rows of these projections, (E, len(projections) * N, K), their biases, and a size.

    The size counts the features of all ranks: (len(projections) * N, K).
    """
    form = format_of(block.modules[projections[0], experts[0]])
    infos = form.infos(block.modules[projections[0], experts[0]], 2)
    first, (n, k, _) = infos[0], form.sizes(infos, 2)
    is_down = projections == ("down",)
    rows = slice(0, n) if is_down else part.features(n, form.block)
    columns = part.features(k, form.block) if is_down else slice(0, k)
    slices = (rows, columns) if part.feature_ranks > 1 else None
    weights: list[PackedWeight] = []
    biases: list[torch.Tensor] = []
    for expert, projection in product(experts, projections):
        module = block.modules[projection, expert]
        infos = form.infos(module, 2)
        infos[0].require((first.dtype,), first.shape, f", as {first.name!r} has")
        weights.append(_one(files, form, infos, slices))
        if "bias" in module.fields:
            module.fields["bias"].require(FLOATS, (n,))
            biases.append(files.read(module.fields["bias"].name, (rows,)))
    if len(biases) not in (0, len(weights)):
        raise first.error(f"belongs to {block.name}, where some experts have a bias and others have none")
    total = len(projections) * (rows.stop - rows.start)
    stacked = (joined(tensors, 0) for tensors in zip(*(weight.tensors() for weight in weights), strict=True))
    qdata, scale, *global_scale = (tensor.view(len(experts), -1, *tensor.shape[2:]) for tensor in stacked)
    of_rows = [each.repeat_interleave(total // len(projections), 1) for each in global_scale]
    weight = weights[0].with_tensors((qdata, scale, *of_rows)).share_global_scale()
    bias = torch.stack(biases).view(len(experts), total) if biases else None
    return weight, bias, (len(projections) * n, k)


def _decode_fused(
    files: TensorFiles, block: ExpertBlock, interleaved: bool, part: ExpertsPart
) -> tuple[ExpertWeights, tuple[tuple[int, int], tuple[int, int]]]:
    """Decode experts with one tensor per projection; also return the sizes (N, K) of gate_up and down for all ranks."""
    _check_orders(block)
    weights: dict[str, PackedWeight] = {}
    biases: dict[str, torch.Tensor] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for (name, _), module in block.modules.items():
        alternates = interleaved and name == "gate_up"
        weights[name], bias, sizes[name] = _decode_fused_weight(files, module, name, alternates, part)
        if bias is not None:
            biases[name] = bias
    if "gate_up" not in weights:
        weights["gate_up"] = PackedWeight.concatenate(weights["gate"], weights["up"])
        sizes["gate_up"] = (sizes["gate"][0] + sizes["up"][0], sizes["gate"][1])
        if len(both := [biases[name] for name in ("gate", "up") if name in biases]) == 1:
            raise block.any_info().error(f"belongs to {block.name}, where one of gate and up has a bias")
        biases |= {"gate_up": torch.cat(both, 1)} if both else {}
    decoded = ExpertWeights(weights["gate_up"], weights["down"], biases.get("gate_up"), biases.get("down"))
    return decoded, (sizes["gate_up"], sizes["down"])


def _check_orders(block: ExpertBlock) -> None:
    """Raise a ValueError if the scales show that projections of fused experts differ in their order of dimensions."""
    first, down = block.modules.get(("gate_up", None)), block.modules["down", None]
    if first is not None and first.is_mxfp8 and down.is_mxfp8:
        (gate_up, _), (down_info, scale) = (format_of(module).infos(module, 3) for module in (first, down))
        if gate_up.shape[1:] == (down_info.shape[2], 2 * down_info.shape[1]) and scale.shape[1] == down_info.shape[1]:
            raise scale.error(
                f"has shape {scale.shape}, scales along out_features of {down_info.name!r} (as ModelOpt 0.47 writes"
                " fused experts in MXFP8), wanted them along in_features; convert the 16-bit checkpoint instead"
            )
    orders = {}
    for module in block.modules.values():
        form = format_of(module)
        infos = form.infos(module, 3)
        orders[form.sizes(infos, 3)[2]] = infos[1]
    if len(orders) > 1:
        message = f"has shape {orders[False].shape}, where {orders[True].name!r} shows that in_features come first"
        raise orders[False].error(message)


def _decode_fused_weight(
    files: TensorFiles, module: Module, name: str, alternates: bool, part: ExpertsPart
) -> tuple[PackedWeight, torch.Tensor | None, tuple[int, int]]:
    """Return a part of one projection of all experts, (E, N, K) with gate's rows first, its bias and whole size."""
    form = format_of(module)
    infos = form.infos(module, 3)
    (n, k, k_first), experts = form.sizes(infos, 3), infos[0].shape[0]
    own, rows, columns = part.experts(experts), [slice(0, n)], slice(0, k)
    if part.feature_ranks > 1 and name == "down":
        columns = part.features(k, form.block)
    elif part.feature_ranks > 1:
        halves = 2 if name == "gate_up" else 1
        share = part.features(n // halves, form.block)
        # Rows of gate and up alternate, so that the rows of a share of the features lie together.
        rows = [slice(2 * share.start, 2 * share.stop)] if alternates else part.rows(n, halves)
    read = files.read if part.is_unsharded else form.sliced(files, infos, own, rows, columns)
    qdata, scale, global_scale = form.read(read, infos)
    if k_first:
        qdata, scale = qdata.mT, scale.mT
    if global_scale is None or len(infos) == 2:
        pass  # there is none, or `form.read` has made it for the rows that were read
    elif global_scale.numel() in (1, experts):
        global_scale = global_scale.reshape(-1).expand(experts)[own]
    elif global_scale.shape == (experts, n):
        global_scale = torch.cat([global_scale[own, each] for each in rows], 1)
    else:
        raise infos[-1].error(f"has shape {infos[-1].shape}, wanted (), {(experts,)} or {(experts, n)}")
    bias = None
    if "bias" in module.fields:
        info = module.fields["bias"]
        info.require(FLOATS, (experts, n))
        bias = torch.cat([files.read(info.name, (own, each)) for each in rows], 1)
        bias = deinterleave(bias) if alternates else bias
    if alternates:
        qdata, scale = deinterleave(qdata), deinterleave(scale)
        if global_scale is not None and global_scale.ndim == 2:
            global_scale = deinterleave(global_scale)
    # Until here the tensors are views of the mapped file, or one projection at most.
    qdata, scale = (t.clone(memory_format=torch.contiguous_format) for t in (qdata, scale))
    return form.weight(qdata, scale, None if global_scale is None else global_scale.clone()), bias, (n, k)
