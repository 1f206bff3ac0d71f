"""`LayerChain`: layers of a model that run one after the other; each runs on the stored results of the one before, and
may be on a device alone.
Called by calibrate and, for names of layers, by refresh; calls the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_SAMPLE = 4096  # numbers of a layer's result that are compared


def numbered_layers(names: Collection[str]) -> dict[str, str]:
    """Return the layer of each module, by qualified names: the name up to its first number, "model.layers.3".

    Numbers in front that all names share are not a layer's, if others follow: a Sequential holds the whole model
    ("0.model.layers.3"). Modules without a number are left out.
    """
    split = {name: name.split(".") for name in names}
    shared = 0
    while len({parts[shared] for parts in split.values()}) == 1 and all(
        parts[shared].isdecimal() and len(parts) > shared + 1 for parts in split.values()
    ):
        shared += 1
    for begin in (shared, 0):
        layers: dict[str, str] = {}
        for name, parts in split.items():
            if numbers := [at for at in range(begin, len(parts)) if parts[at].isdecimal()]:
                layers[name] = ".".join(parts[: numbers[0] + 1])
        if layers:
            return layers
    return {}


class LayerChain:
    """The members of a module list that a model calls in their order, each with the result of the one before.

    With a device, a layer runs there while `on_device` is open. `moved` is called when modules have been moved.
    """

    def __init__(self, model: nn.Module, holder: str, device: torch.device | None) -> None:
        self._model, self._device = model, device
        self.moved: Callable[[], Any] = lambda: None
        self._home = next(model.parameters()).device
        children = dict(model.get_submodule(holder).named_children())
        self._names = [f"{holder}.{name}" if holder else name for name in children]
        self._layers = [*children.values()]
        self._final = 0  # layers that do not change any more
        self._still: set[nn.Module] = set()  # layers that a forward does not move
        self._kept: dict[int, tuple[int, Any]] = {}  # number of a batch -> layers that have run, result of the last one

    @contextmanager
    def replay(self, number: int) -> Iterator[None]:
        """Let the model run on the batch of a number without the layers that were final in the last such call.

        These return the stored result of the last one. The model may stop behind any layer.
        """
        (begin, result), final = self._kept.get(number, (0, None)), self._final
        if self._device is not None:
            result = _to(result, self._device)
        found: list[Any] = []
        with ExitStack() as stack:
            for layer in self._layers[:begin]:
                stack.enter_context(_returns(layer, result))
            stack.enter_context(self._hold(self._layers[:begin]))
            if final > begin:
                last = self._layers[final - 1]
                stack.callback(last.register_forward_hook(lambda layer, args, out: found.append(out)).remove)
            yield
        if found:
            self._kept[number] = final, found[-1] if self._device is None else _to(found[-1], self._home)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have all but the layers on the device, and each layer while it runs."""
        if self._device is None:
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._model.to, self._home)
            self._move_others(self._device)
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._fetch, prepend=True).remove)
                stack.callback(layer.register_forward_hook(self._put_back, always_call=True).remove)
            self.moved()
            yield

    def _move_others(self, device: torch.device) -> None:
        inside = {part for layer in self._layers for part in layer.modules()}
        for part in self._model.modules():
            if part not in inside:
                part._apply(lambda tensor: tensor.to(device), recurse=False)

    @contextmanager
    def at(self, layer: str) -> Iterator[None]:
        """Let a layer change, on the device; the layers before it are final, and in the end it is, too.

        It stays on the device while the batches of the next `at` run through it. A module outside of the list may
        change as well; no layer is final by that."""
        begin = self._final
        if layer in self._names:
            self._final = self._names.index(layer)
        end = self._final + (layer in self._names)
        parts = self._layers[max(begin - 1, 0) : end]
        for part in parts:
            self._fetch(part)
        with self._hold(parts):
            yield
        for part in parts[:-1]:
            self._put_back(part)
        self._final = end

    @contextmanager
    def _hold(self, layers: list[nn.Module]) -> Iterator[None]:
        before = set(self._still)
        self._still.update(layers)
        try:
            yield
        finally:
            self._still = before

    def _fetch(self, layer: nn.Module, *_: Any) -> None:
        if self._device is not None and layer not in self._still:
            layer.to(self._device)
            self.moved()

    def _put_back(self, layer: nn.Module, *_: Any) -> None:
        if self._device is not None and layer not in self._still:
            layer.to(self._home)
            self.moved()

    def holds(self, check: Callable[[], Any], run: Callable[[str], Any]) -> bool:
        """True if the layers run one after the other, and `replay` gives what the whole model gives.

        `check` runs the model on the first batch, once; `run` likewise, up to the layer of a name, once for each.
        """
        record = _Record()
        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_hook(partial(record, number), with_kwargs=True).remove)
            check()
        if not record.in_a_row or len(record.samples) != len(self._layers):
            return False
        try:
            for number, sample in enumerate(record.samples):
                self._final = number + 1
                with self.replay(0):
                    run(self._names[number])
                result = _first_tensor(self._kept[0][1])
                if result is None or (_sample(result) - sample).norm() > 1e-3 * sample.norm():
                    return False
            return True
        finally:
            self._kept.clear()
            self._final = 0


class _Record:
    """A forward hook of layers, behind their number: whether each takes what the one before gave, unchanged."""

    def __init__(self) -> None:
        self.in_a_row = True
        self.samples: list[Tensor] = []
        self._given: Tensor | None = None
        self._version = 0

    def __call__(self, number: int, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        before, self._given = self._given, _first_tensor(out)
        follows = before is _first_tensor((args, kwargs)) and before is not None and before._version == self._version
        if self._given is None or number != len(self.samples) or (number > 0 and not follows):
            self.in_a_row = False
        else:
            self.samples.append(_sample(self._given))
            self._version = self._given._version


def _first_tensor(tree: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)


def _sample(result: Tensor) -> Tensor:
    flat = result.flatten()
    return flat[:: -(-flat.numel() // _SAMPLE) or 1].float().cpu()


def _to(tree: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), tree)


@contextmanager
def _returns(layer: nn.Module, result: Any) -> Iterator[None]:
    """Let a layer return a result at once."""
    own = layer.__dict__.get("forward")  # accelerate sets one
    layer.__dict__["forward"] = lambda *args, **kwargs: result
    try:
        yield
    finally:
        del layer.__dict__["forward"]
        if own is not None:
            layer.__dict__["forward"] = own
