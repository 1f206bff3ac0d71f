"""`calibrate_`: `quantize_` with codes that fit the rows which each weight multiplies, layer by layer (GPTQ).
Called by users and the command line; calls choose and plan as quantize does, the formats with Hessians, layer_chain to
run the layers, kept_layers to resume.

per layer: the last layer's results through this layer -> X^T X of each expert -> codes -> the layer swapped -> the next
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain as chain_of
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_moe.formats.block_format import NVFP4
from thunder_moe.formats.checks import require_device, require_module, require_type
from thunder_moe.formats.registry import FORMATS, dequantize_expert
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.progress import progress_bar
from thunder_moe.quantization.choose import choose_modules
from thunder_moe.quantization.families import Quantization, families_of
from thunder_moe.quantization.kept_layers import keep_layers
from thunder_moe.quantization.layer_chain import LayerChain, numbered_layers
from thunder_moe.quantization.plan import Target, Targets, exclusive, swap
from thunder_moe.selection import Format, Patterns, Selection

# Operators of rows and then a weight -> the place of the rows among the arguments, the weight's dimension in_features.
_PRODUCTS = {
    "aten::mm": (0, -2),
    "aten::addmm": (1, -2),
    "aten::bmm": (0, -2),
    "aten::_grouped_mm": (0, -2),
    "transformers::grouped_mm_fallback": (0, -2),
    "thunder_moe::grouped_linear": (0, -1),
    "thunder_moe::activated_grouped_linear": (0, -1),  # of rows that `_activated` computes
}


@dataclass(frozen=True)
class OutputError:
    """The error of a weight's product with the calibration rows: ||X Q - X W|| / ||X W||, Frobenius, of all experts.

    Attributes:
        name: of the weight; the first one of linears that are packed together.
        rows, fewest: calibration rows of all experts, and of the expert that saw the fewest.
        rounded, calibrated: the error as `quantize_` rounds with the same scale_search, and of the model's new weight.
    """

    name: str
    rows: int
    fewest: int
    rounded: float
    calibrated: float


@dataclass(frozen=True)
class Calibration:
    """Holds what `calibrate_` did, an `OutputError` for each weight. Prints as a table."""

    weights: tuple[OutputError, ...]

    def __str__(self) -> str:
        width = max(len("weight"), *(len(weight.name) for weight in self.weights))
        lines = [f"{'weight':{width}}  {'rows':>9}  {'fewest':>7}  {'rounded':>8}  {'calibrated':>10}"]
        for name, rows, fewest, rounded, calibrated in map(astuple, self.weights):
            lines.append(f"{name:{width}}  {rows:9}  {fewest:7}  {100 * rounded:7.3f}%  {100 * calibrated:9.3f}%")
        return "\n".join(lines)


@torch.inference_mode(False)
@torch.no_grad()
def calibrate_(
    model: nn.Module,
    batches: Iterable[Tensor | Mapping[str, Any]],
    format: Format = "nvfp4",
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    linears: bool | Selection = False,
    scale_search: str | None = None,
    layout: str = "auto",
    device: str | torch.device | None = None,
    destination: str | Path | None = None,
    progress: bool = False,
) -> Calibration:
    """Quantizes a model as `quantize_` does, in place, with codes that keep the outputs on calibration rows (GPTQ).

    The modules, the state dict and the files are the same as after `quantize_` with the same options; codes and block
    scales differ. For each layer, the batches run through the model up to this layer, whose predecessors are 4-bit by
    then. Each weight is rounded by `nvfp4.quantize` with the Hessian of the rows that its experts get from the router.
    An expert with fewer rows n than in_features K is filled up with the mean of all experts' rows in this layer,
    ``H = X_own^T X_own + max(K - n, 0) * sum(X^T X) / sum(n)``, so an expert without rows has the layer's Hessian.
    `format`, `filter`, `ignore`, `linears`, `scale_search` and `layout` are
    the options of `quantize_`.

    Cost: each layer runs twice on the batches, and GPTQ. This needs layers in one module list that run one after the
    other, which a pass of the first batch finds out. Other models run on the batches up to the layer for each layer, L
    / 2 passes for L layers. Memory beyond the model: the results of one layer on all batches, 4 * E * K^2 bytes for
    each weight of one layer, for one weight twice, and what `nvfp4.quantize` takes.

    Args:
        model: in 16 bits or float32, as in `quantize_`.
        batches: what the model is called with, each a tensor (`model(batch)`, of token ids for a language model) or a
            mapping (`model(**batch)`), on the device that the model takes. 128 rows of 512 to 2048 tokens, without
            padding, are usual. The result depends on nothing else, so it is repeatable.
        device: where layers run and are calibrated, one at a time. The others stay where they are, say in main memory;
            what is in no layer (embeddings, the head) is on the device for the call. None: the model runs where it is.
        destination: where the model will be saved, or None. Each finished layer is kept in ``<destination>.partial``.
            The same call on the same model resumes behind the layers that are complete there, after it was killed say.
            Remove the directory when the model is saved.
        progress: show a bar of the layers.

    Returns:
        The output error of each weight, rounded and calibrated.

    Raises:
        ValueError, TypeError: as `quantize_`. Also: no batches, tied weights, weights that
            processes share, a weight that no row of the first batch reaches, or that the model reads otherwise than by
            a matrix product with it, or with `device` layers that do not run one after the other. The model is
            unchanged then. If rows have NaN or Inf, the layers before are quantized. A file in
            ``<destination>.partial`` is damaged.
        FileExistsError: the destination exists, or ``<destination>.partial`` is of other arguments (says which).
    """
    require_type("batches", batches, Iterable, "a list of tensors (windows.split(8)) or mappings of arguments")
    inputs = [*batches]
    kinds = sorted({type(batch).__name__ for batch in inputs})
    alone = isinstance(batches, Tensor | Mapping)  # its rows or keys would be batches
    if alone or not inputs or not all(isinstance(batch, Tensor | Mapping) for batch in inputs):
        got = f"one {type(batches).__name__}" if alone else f"{type(batches).__name__} of {kinds or 'nothing'}"
        raise ValueError(f"batches: got {got}, wanted a list of tensors (windows.split(8)) or mappings of arguments")
    require_module(model)
    device = None if device is None else require_device("device", device)
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with exclusive(model), torch.autocast((device or home).type, enabled=False):
        plan = choose_modules(
            model, format, filter=filter, ignore=ignore, linears=linears, scale_search=scale_search, layout=layout
        )
        run, found = plan.run, list[OutputError]()
        layers: dict[str, Targets] = defaultdict(dict)
        numbered = numbered_layers([target.name for target in plan.chosen.values()])
        for module, target in plan.chosen.items():
            layers[numbered.get(target.name, target.name)][module] = target
        del module
        if device is not None:
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
        chain = _chain(model, [*layers], device)
        with nullcontext() if chain is None else chain.on_device():
            if not _check(model, plan.chosen, inputs[0], chain):
                chain = None
                if device is not None:
                    raise ValueError(
                        f"device: got {str(device)!r}, but the layers of {type(model).__name__} do not run one after"
                        " the other, wanted None, and the model on its device"
                    )
            formats = {target.name: target.format for target in plan.chosen.values()}
            plan.chosen.clear()  # it would keep modules alive
            options = {"formats": formats, "scale_search": scale_search}
            with keep_layers(destination, model, tree_leaves(inputs), options) as kept:
                # Restored layers run one at a time for their results: a device cannot hold all of them.
                needs_results = device is not None and len(kept.layers) < len(layers)
                try:
                    bar = progress_bar([*layers], desc="calibrating", unit="layer", disable=not progress)
                    for number, layer in enumerate(bar):
                        with nullcontext() if chain is None else chain.at(layer):
                            if number < len(kept.layers):
                                _restore_layer(model, layers.pop(layer), run, kept.read(number))
                                found += [OutputError(**each) for each in kept.layers[number]]
                                if needs_results:
                                    _run(model, [], inputs, layer, chain)
                                continue
                            packed, begin = list[PackedWeight](), len(found)
                            pack = partial(_pack, scale_search, found, packed if destination is not None else None)
                            _calibrate_layer(model, layer, layers.pop(layer), inputs, run, pack, chain)
                            kept.add([asdict(each) for each in found[begin:]], packed)
                finally:  # after an interrupt, too, as in `quantize_`
                    for family in families_of(model):
                        family.finish(model)
                    run.memo.clear()
    return Calibration(tuple(found))


def _chain(model: nn.Module, layers: list[str], device: torch.device | None) -> LayerChain | None:
    """Return the list of modules that has all numbered layers; None if there is none, or more than one."""
    parts = [layer.rpartition(".") for layer in layers]
    holders = {holder for holder, _, number in parts if number.isdecimal()}
    if len(holders) != 1:
        return None
    (holder,) = holders
    in_a_row = isinstance(model.get_submodule(holder), nn.ModuleList | nn.Sequential)
    return LayerChain(model, holder, device) if in_a_row else None


def _check(model: nn.Module, chosen: Targets, batch: Any, chain: LayerChain | None) -> bool:
    """Raise the errors of `calibrate_` for the weights, by a pass of the first batch that only counts rows.

    Returns True if the layers of the chain run one after the other.
    """
    owners: dict[nn.Parameter, str] = {}
    for module, (name, family, _) in chosen.items():
        for parameter, _ in family.weights(module):
            if (owner := owners.setdefault(parameter, name)) != name:
                raise ValueError(f"model: {name!r} and {owner!r} share a weight, wanted none shared: `ignore` both")
            if hasattr(parameter, "device_mesh"):
                raise ValueError(f"model: processes share the weights of {name!r}, wanted a model in one process")
    weights = [weight for module, target in chosen.items() for weight in _weights(module, target, False)]
    if chain is None:
        _run(model, weights, [batch])
        return False

    def find_again() -> None:
        views = [view for module, target in chosen.items() for _, view in target.family.weights(module)]
        for weight, view in zip(weights, views, strict=True):
            weight.place(view.detach())

    chain.moved = find_again
    try:
        return chain.holds(lambda: _run(model, weights, [batch]), partial(_run, model, [], [batch]))
    finally:
        chain.moved = lambda: None


def _weights(module: nn.Module, target: Target, hessians: bool) -> list[_Weight]:
    """Return the weights of a module."""
    names = {parameter: name for name, parameter in module.named_parameters(prefix=target.name)}
    pairs = target.family.weights(module)
    return [_Weight(names[parameter], view.detach(), hessians) for parameter, view in pairs]


def _calibrate_layer(
    model: nn.Module,
    layer: str,
    targets: Targets,
    inputs: list[Any],
    run: Quantization,
    pack: Callable[..., Any],
    chain: LayerChain | None,
) -> None:
    """Replaces the modules of a layer; `pack` is `_pack` for the weights of a module."""
    weights = {module: _weights(module, target, True) for module, target in targets.items()}
    _run(model, [*chain_of(*weights.values())], inputs, layer, chain)
    packs = {module: partial(pack, targets[module].format, own) for module, own in weights.items()}
    own_run = replace(run, packs=WeakKeyDictionary(packs))
    del weights, packs  # each module is freed once it is converted
    swap(model, targets, own_run.convert, "calibrating")


def _restore_layer(model: nn.Module, targets: Targets, run: Quantization, kept: Iterator[PackedWeight]) -> None:
    """Replaces the modules of a layer with the weights that an interrupted call has calibrated, in the same order."""
    own_run = replace(run, pack=lambda weight: next(kept).to(weight.device), packs={})
    swap(model, targets, own_run.convert, "restoring")


class _LayerDoneError(Exception):
    """Ends a forward pass behind the layer that is calibrated."""


def _stop(*_: Any) -> None:
    raise _LayerDoneError


def _run(
    model: nn.Module, weights: list[_Weight], inputs: list[Any], layer: str = "", chain: LayerChain | None = None
) -> None:
    """Runs the model in evaluation mode, up to the end of a layer, and adds the rows to the weights."""
    was_training = model.training
    handle = model.get_submodule(layer).register_forward_hook(_stop)
    model.eval()
    try:
        for number, batch in enumerate(inputs):
            replay = nullcontext() if chain is None else chain.replay(number)
            with replay, suppress(_LayerDoneError), _Watch(weights):
                _ = model(batch) if isinstance(batch, Tensor) else model(**batch)
    finally:
        handle.remove()
        model.train(was_training)
    for weight in weights:
        if not sum(weight.rows):
            raise ValueError(f"batches: no row reached {weight.name!r}, wanted inputs that do, or it among `ignore`")
        if weight.hessian is not None and not bool(weight.hessian.diagonal(dim1=1, dim2=2).sum().isfinite()):
            raise ValueError(f"batches: rows of {weight.name!r} have NaN or Inf, wanted inputs with finite activations")


class _Weight:
    """A weight to calibrate, a view (E, N, K) of its parameter: its memory, the rows of each expert and their X^T X.

    Rows of zeros do not count. The Hessian is float32 (E, K, K), or None: rows are only counted.
    """

    def __init__(self, name: str, view: Tensor, with_hessian: bool) -> None:
        self.name, self.rows = name, [0] * len(view)
        shape = len(view), view.shape[2], view.shape[2]
        self.hessian = torch.zeros(shape, dtype=torch.float32, device=view.device) if with_hessian else None
        self.place(view)

    def place(self, view: Tensor) -> None:
        """Sets the weight's memory, after a move, too."""
        self.view = view
        last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
        self.memory = range(view.data_ptr(), view.data_ptr() + (last + 1) * view.itemsize)

    def add(self, operator: Any, args: tuple[Any, ...], operand: Tensor) -> None:
        """Adds the rows of an operator's call that reads this weight."""
        at, dim = _PRODUCTS.get(operator._schema.name, (-1, 0))
        columns = self.view.shape[2], self.view.stride(2)
        if at < 0 or args[at + 1] is not operand or (operand.shape[dim], operand.stride(dim)) != columns:
            raise ValueError(
                f"model: it reads {self.name!r} by {operator}, wanted a product of rows with it (without autocast; for"
                " transformers model.set_experts_implementation('grouped_mm') or 'eager'), or it among `ignore`"
            )
        rows, ends = args[at], args[at + 2] if len(args) > at + 2 else None
        parts = [*rows] if rows.ndim == 3 else [rows]
        if rows.ndim == 2 and isinstance(ends, Tensor):
            parts = [rows[begin:end] for begin, end in pairwise([0, *ends.tolist()])]
        first = (operand.data_ptr() - self.memory.start) // operand.itemsize
        step = operand.stride(0) if operand.ndim == 3 else 0
        for number, part in enumerate(parts):
            expert = (first + number * step) // self.view.stride(0)
            self.rows[expert] += int(part.any(-1).sum())
            if self.hessian is not None:
                part = part.float()
                self.hessian[expert].addmm_(part.T, part)

    def filled_hessian(self) -> Tensor:
        """Return the Hessians (E, K, K), filled up to K rows each with the mean of all experts' rows."""
        assert self.hessian is not None
        rows = torch.tensor(self.rows, dtype=torch.float32, device=self.hessian.device)
        missing = (self.view.shape[2] - rows).clamp_min(0)
        return (missing[:, None, None] * (self.hessian.sum(0) / rows.sum())).add_(self.hessian)

    def output_error(self, weight: Tensor, packed: PackedWeight) -> float:
        """Return the relative error of the rows' product with a packed weight (E, N, K)."""
        assert self.hessian is not None
        noise = signal = 0.0
        for expert, hessian in enumerate(self.hessian):
            exact = weight[expert].float()
            error = torch.empty_like(exact, memory_format=torch.contiguous_format)
            dequantize_expert(packed, expert, error)
            error -= exact
            noise += float((error @ hessian).mul_(error).sum(dtype=torch.float64))
            signal += float((exact @ hessian).mul_(exact).sum(dtype=torch.float64))
        return (max(noise, 0.0) / signal) ** 0.5 if signal > 0 else 0.0


class _Watch(TorchDispatchMode):
    """Adds to weights the rows that operators multiply by them."""

    def __init__(self, weights: list[_Weight]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A copy to another device is a layer on its way there: its products follow.
        moves = func.name() == "aten::_to_copy" and result.device != args[0].device
        if not func.is_view and not moves:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                    for weight in self._weights:
                        if tensor.device == weight.view.device and tensor.data_ptr() in weight.memory:
                            weight.add(func, _activated(func, args, kwargs), tensor)
        return result


def _activated(operator: Any, args: tuple[Any, ...], form: Any) -> tuple[Any, ...]:
    """Return the arguments of an operator, with the rows that it multiplies if it computes them from others."""
    if operator._schema.name != "thunder_moe::activated_grouped_linear":
        return args
    y, weight, offsets, *scales = args[:4]
    return torch.ops.thunder_moe.scaled_activation(y, *(scales or [None]), offsets, **form), weight, offsets


def _pack(
    scale_search: str | None,
    found: list[OutputError],
    made: list[PackedWeight] | None,
    format: str,
    weights: list[_Weight],
    weight: Tensor,
) -> PackedWeight:
    """Return the calibrated weight of one of `weights`, or of linears stacked with the only one.

    Its error is added to `found`, and the weight to `made`."""
    own = next((each for each in weights if each.view.data_ptr() == weight.data_ptr()), weights[0])
    assert len(weights) == 1 or own.view.data_ptr() == weight.data_ptr()
    quantize = partial(FORMATS[format].quantize, weight, scale_search=scale_search if format == NVFP4.name else None)
    packed: PackedWeight = quantize(hessian=own.filled_hessian())
    errors = (own.output_error(weight, each) for each in (quantize(), packed))
    found.append(OutputError(own.name, sum(own.rows), min(own.rows), *errors))
    if made is not None:
        made.append(packed)
    return packed
