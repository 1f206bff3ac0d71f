"""The family of dense layers: chooses the linears that `quantize_(linears=)` takes, converts them to NVFP4 and back,
and stacks the weights of linears that read the same rows (q, k and v; gate and up).
Called by quantization and integrations.huggingface; calls nn.linear, kernels.dense for the sizes that are faster in
4 bits, dense_names and replaceable.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from thunder_moe.dense_names import READ_TOGETHER, is_encoder, is_read_by_code, is_router, read_together, sharing_scale
from thunder_moe.formats.block_format import BLOCK_FORMATS, NVFP4, BlockFormat
from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.nvfp4 import WEIGHT_DTYPES
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.dense import SlowerFrom, slower_from, why_slower
from thunder_moe.kernels.select import lay_out, preferred_layout
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack, is_packed_dense, stacked_bias
from thunder_moe.quantization.families import ExpertFamily, Quantization, weight_key
from thunder_moe.quantization.replaceable import copy_hook, customization, has_own_forward
from thunder_moe.selection import shortened

_LOGGER = logging.getLogger("thunder_moe")
_ROUTER_CLASS = re.compile(r"Router|Gate($|[A-Z])|Gating")


class DenseLinears(ExpertFamily):
    """`nn.Linear`, to `NVFP4Linear`, or with others that read the same rows to parts of a `NVFP4LinearStack`.

    The candidates of `choose` that stay 16-bit are in `skipped`, with their qualified name and the reason.
    """

    description = "nn.Linear"

    def __init__(self) -> None:
        self.skipped: dict[nn.Module, tuple[str, str]] = {}
        self._device_of: Callable[[Any], torch.device] = lambda linear: linear.weight.device
        self._formats: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[nn.Module, _Group] = WeakKeyDictionary()

    def choose(
        self,
        model: nn.Module,
        linears: bool | Callable[[nn.Module, str], bool],
        declined: Callable[[nn.Module, str], str | None],
        device_of: Callable[[nn.Module], torch.device] | None,
        format_of: Callable[[nn.Module, str], str | None],
    ) -> None:
        """Choose the linears that `match` accepts.

        Args:
            model: the model that `quantize_` is called with.
            linears: as in `quantize_`, with patterns as a function.
            declined: returns why the options `filter` and `ignore` leave a module of this name in 16 bits, or None.
            device_of: as in `choose_modules`; nothing is logged then.
            format_of: returns the format of a module of this name, None for 16 bits.
        """
        self._device_of = device_of or self._device_of
        apart: dict[str, dict[str, None]] = defaultdict(dict)  # names of linears -> classes
        skipped: dict[str, list[str]] = defaultdict(list)
        candidates: dict[nn.Linear, str] = {}
        tied = _tied_or_read(model)

        def skip(module: nn.Module, name: str, reason: str) -> None:
            self.skipped[module] = name, reason
            skipped[reason].append(name)

        for name, module in model.named_modules():
            if not is_dense_layer(name, module):
                continue
            assert isinstance(module, nn.Linear)
            asked = "linears declines it" if callable(linears) and not linears(module, name) else declined(module, name)
            if asked is None and linears is True and is_encoder(name):
                asked = "it belongs to an encoder of images or sound"
            format = format_of(module, name) if asked is None else None
            if format is None:
                self.skipped[module] = name, asked or "format is None for it"
                continue
            reason = tied.get(module) or (_unfit_reason(module, BLOCK_FORMATS[format]) if linears is True else None)
            if reason is not None:
                skip(module, name, reason)
                continue
            candidates[module], self._formats[module] = name, format
        for parent in model.modules():
            self._find_stacks(parent, candidates)
        if linears is True:
            for module, name in list(candidates.items()):
                size = self._rows_of_stack(module), module.in_features
                if (reason := why_slower(self._device_of(module), module.weight.dtype, *size)) is not None:
                    skip(module, name, reason)
                    del candidates[module], self._formats[module]
        for parent in model.modules():
            self._find_shared_scales(parent, candidates, apart)
        if device_of is not None:
            return
        slower: dict[tuple[SlowerFrom, str], list[str]] = defaultdict(list)
        for module, name in candidates.items():
            size = self._rows_of_stack(module), module.in_features
            packed_in = BLOCK_FORMATS[self._formats[module]]
            limit = slower_from(preferred_layout(self._device_of(module), *size, packed_in), *size, packed_in.name)
            if limit is not None:
                slower[limit, packed_in.name].append(name)
        words = "slower in %d bits than in 16 at %d rows and more, by up to %d %%: %s; `ignore` leaves them in 16 bits"
        for (limit, format_name), names in slower.items():
            _LOGGER.info(words, 4 if format_name == NVFP4.name else 8, *limit, shortened(names))
        for reason, names in skipped.items():
            _LOGGER.info("stays 16-bit: %s: %s", shortened(names), reason)
        words = (
            "computed one by one in eager mode: %s of %s, of which dense_names.READ_TOGETHER_BY does not say that they"
            " read the same tensor"
        )
        for siblings, classes in apart.items():
            _LOGGER.info(words, siblings, ", ".join(classes))

    def _find_stacks(self, parent: nn.Module, candidates: dict[nn.Linear, str]) -> None:
        """Find the children of a module that read the same rows, for one stacked weight."""

        def kind_of(child: Any) -> Any:
            fits = child in candidates and self.blocker(child) is None
            return (self._kind(child), child.bias is None) if fits else None

        for group in _alike(parent, read_together(type(parent)) if has_own_forward(parent) else (), kind_of):
            if not any(member in self._groups for member in group.values()):
                self._groups.update(dict.fromkeys(group.values(), _Group(group, _stack_name(parent, [*group]))))

    def _find_shared_scales(
        self, parent: nn.Module, candidates: dict[nn.Linear, str], apart: dict[str, dict[str, None]]
    ) -> None:
        """Find the children of a module that this model computes one by one and engines merge, by their names."""

        def kind_of(child: Any) -> Any:
            alone = child in candidates and self._stack_of(child) is None
            return self._kind(child) if alone and self.blocker(child) is None else None

        for names in READ_TOGETHER:
            for group in _alike(parent, names, kind_of):
                self._groups.update(dict.fromkeys(group.values(), _Group(group)))
                apart[", ".join(names)].setdefault(type(parent).__name__)

    def _kind(self, linear: nn.Linear) -> tuple[Any, ...]:
        return linear.in_features, linear.weight.dtype, self._device_of(linear), self._formats[linear]

    def _stack_of(self, module: nn.Module) -> _Group | None:
        group = self._groups.get(module)
        return None if group is None or group.stack_name is None else group

    def _rows_of_stack(self, module: nn.Linear) -> int:
        """Return the out_features of the stack that a linear is in; of the linear if it is in none."""
        group = self._stack_of(module)
        return module.out_features if group is None else sum(member.out_features for member in group.living_members())

    def match(self, module: nn.Module) -> bool:
        return module in self._formats

    def format_of(self, module: nn.Module) -> str:
        """Return the number format of a module that `match` accepts."""
        return self._formats[module]

    def match_quantized(self, module: nn.Module) -> bool:
        return is_packed_dense(module)

    def packed_together(self, module: nn.Module) -> list[nn.Module]:
        """Return the linears that are packed with this one, as one weight or with one global scale, and this one."""
        group = self._groups.get(module)
        return [module] if group is None else [*group.living_members()]

    def unstack(self, module: nn.Module) -> None:
        """Have the linears of a stack converted one by one, to the bits that they have in the stack."""
        if (group := self._stack_of(module)) is not None:
            members = [*zip(group.names, group.living_members(), strict=True)]
            for positions in sharing_scale(group.names):
                shared = dict(members[position] for position in positions)
                self._groups.update(dict.fromkeys(shared.values(), _Group(shared)))

    def blocker(self, module: nn.Module) -> str | None:
        return customization(module, hooked=True)

    def weights(self, module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
        assert isinstance(module, nn.Linear)
        weight: Any = module.weight
        return [(weight, weight[None])]

    def sizes(self, module: nn.Module, run: Quantization) -> list[tuple[int, int]]:
        assert isinstance(module, nn.Linear)
        return [(self._rows_of_stack(module), module.in_features)]

    def convert(self, module: nn.Module, run: Quantization) -> nn.Module:
        assert isinstance(module, nn.Linear)
        group = self._groups.get(module)
        new: nn.Module
        if group is None or group.stack_name is None:
            pack = run.pack if group is None else partial(group.pack_member, module, run.pack)
            new = NVFP4Linear.from_linear(module, pack=pack, layout=run.layout)
            copy_hook(new, module)
        else:
            members = group.living_members()
            if group.stack is None:
                pack = partial(group.pack_stack, run.pack)
                group.stack = NVFP4LinearStack.from_linear(*members, pack=pack, layout=run.layout)
                copy_hook(group.stack, module)
            new = NVFP4LinearPart(group.stack, group.index(module))
            new.__dict__["stack_name"] = group.stack_name
        return new.train(module.training)

    def restore(self, module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
        stack = module.stack if isinstance(module, NVFP4LinearPart) else module
        assert isinstance(stack, NVFP4Linear)
        key = weight_key(stack.qdata, order="dense")
        if key not in memo:
            memo[key] = stack.to_linears()
        linear: nn.Linear = memo[key][module.index if isinstance(module, NVFP4LinearPart) else 0]
        copy_hook(linear, stack)
        return linear.train(module.training)

    def put(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        if isinstance(module, NVFP4LinearPart) and module.stack not in parent.children():
            setattr(parent, vars(module)["stack_name"], module.stack)
            if read_together(type(parent)):
                module.stack.share_in(parent)
        setattr(parent, name, module)
        needed = {child.stack for child in parent.children() if isinstance(child, NVFP4LinearPart)}
        for key, child in list(parent._modules.items()):
            if isinstance(child, NVFP4LinearStack) and child not in needed:
                child.leave(parent)
                delattr(parent, key)


def is_dense_layer(name: str, module: nn.Module) -> bool:
    """True for an `nn.Linear` that is not a router: a candidate of the option `linears`."""
    return isinstance(module, nn.Linear) and not is_router(name) and not _ROUTER_CLASS.search(type(module).__name__)


def _alike(parent: nn.Module, names: Iterable[str], kind_of: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return the children of these names in groups of one kind, by name: two or more different modules each.

    A kind of None is of no group."""
    found: dict[Any, dict[str, Any]] = defaultdict(dict)
    for name in names:
        child = parent._modules.get(name)
        if child is not None and (kind := kind_of(child)) is not None:
            found[kind][name] = child
    return [group for group in found.values() if len(set(group.values())) == len(group) > 1]


def join_read_together(model: nn.Module) -> None:
    """Replace the plain `NVFP4Linear`s that read the same rows by stacks, as `quantize_` does, exactly."""
    family = DenseLinears()

    def kind_of(child: Any) -> Any:
        if type(child) is not NVFP4Linear or family.blocker(child) is not None:
            return None
        dtype = None if child.bias is None else child.bias.dtype
        layout = "auto" if child.auto_layout else child.layout  # "auto": the stack's size decides
        return child.in_features, child.qdata.device, layout, dtype, child.format_name

    for parent in list(model.modules()):
        for group in _alike(parent, read_together(type(parent)) if has_own_forward(parent) else (), kind_of):
            _join(parent, [*group], [*group.values()])


def _join(parent: nn.Module, names: list[str], linears: list[NVFP4Linear]) -> None:
    """Replace children of a module by the parts of a stack of them."""
    first = linears[0]
    weight = PackedWeight.concatenate(*(lay_out(linear.packed_weight, LINEAR) for linear in linears))
    stack = NVFP4LinearStack(
        lay_out(weight.share_global_scale(), "auto" if first.auto_layout else first.layout),
        stacked_bias([linear.bias for linear in linears if linear.bias is not None]),
        weight_dtype=[dtype for linear in linears for dtype in linear.weight_dtypes],
        weight_requires_grad=[grads for linear in linears for grads in linear.weights_require_grad],
        auto_layout=first.auto_layout,
        part_features=[linear.out_features for linear in linears],
    )
    stack.train(first.training)
    copy_hook(stack, first)
    setattr(parent, _stack_name(parent, names), stack)
    stack.share_in(parent)
    for index, name in enumerate(names):
        part = NVFP4LinearPart(stack, index)
        setattr(parent, name, part.train(linears[index].training))


class _Group:
    """Linears that are packed together: as one stacked weight, or (without a `stack_name`) with one global scale.

    Linears of a stack read the same rows. Linears that share a scale are merged by engines: DeepSeek's q_a_proj and
    kv_a_proj_with_mqa, and q, k and v of an attention that calls them in branches. The group has references, because
    each 16-bit weight is freed once it is converted.
    """

    def __init__(self, members: dict[str, nn.Linear], stack_name: str | None = None) -> None:
        self.names, self.stack_name = [*members], stack_name
        self.stack: NVFP4LinearStack | None = None
        self._members = [*map(ref, members.values())]
        self._packed: dict[int, PackedWeight] = {}

    def living_members(self) -> list[nn.Linear]:
        return [member for reference in self._members if (member := reference()) is not None]

    def index(self, linear: nn.Module) -> int:
        return [member() is linear for member in self._members].index(True)

    def pack_stack(self, pack: Callable[[Tensor], PackedWeight], weight: Tensor) -> PackedWeight:
        """Pack the stacked weight (1, N, K).

        Linears that engines merge share a global scale, as in `checkpoint.convert`: q, k and v share one, an
        attention's gate beside them has its own."""
        groups = sharing_scale(self.names)
        if len(groups) == 1:
            return pack(weight)
        rows = weight[0].split([member.out_features for member in self.living_members()])
        parts: dict[int, PackedWeight] = {}
        for positions in groups:
            parts |= zip(positions, _packed_as_one(pack, [rows[at] for at in positions]), strict=True)
        return PackedWeight.concatenate(*(parts[at] for at in range(len(rows))))

    def pack_member(self, own: nn.Linear, pack: Callable[[Tensor], PackedWeight], weight: Tensor) -> PackedWeight:
        """Return the packed weight (1, N, K) of one member; the first call packs all members."""
        if not self._packed:
            living = self.living_members()
            parts = _packed_as_one(pack, [member.weight.detach() for member in living])
            for member, part in zip(living, parts, strict=True):
                self._packed[self.index(member)] = part.with_tensors(tensor.clone() for tensor in part.tensors())
        return self._packed.pop(self.index(own))


def _packed_as_one(pack: Callable[[Tensor], PackedWeight], weights: list[Tensor]) -> list[PackedWeight]:
    """Return the packed weights (1, N, K) of weights (N, K), with the global scale of all of them."""
    whole, begin = pack(torch.cat(weights)[None]).to_layout(LINEAR), 0
    return [whole.rows(slice(begin, begin := begin + len(weight))) for weight in weights]


def _stack_name(parent: nn.Module, names: list[str]) -> str:
    """Return an unused name for the child that holds the stacked weights: "qkv_proj", "gate_up_proj"."""
    ends = {name.rpartition("_")[2] for name in names}
    name = "_".join(names)
    if len(ends) == 1 and all("_" in one for one in names):
        stems = [one.rpartition("_")[0] for one in names]
        name = f"{('' if all(len(stem) == 1 for stem in stems) else '_').join(stems)}_{ends.pop()}"
    while hasattr(parent, name):
        name = f"nvfp4_{name}"
    return name


def _tied_or_read(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linears that have to keep their 16-bit weight, with the reason: it is tied, or code reads it."""
    owners: dict[Any, list[tuple[int, int, str, nn.Module]]] = defaultdict(list)  # by device or, without data, identity
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
            if not plain or tensor.is_meta or not tensor.numel():
                owners[id(tensor)].append((0, 1, name, module))
            else:
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                begin = tensor.data_ptr()
                owners[tensor.device].append((begin, begin + (last + 1) * tensor.itemsize, name, module))
    reasons: dict[nn.Module, str] = {}
    for each in owners.values():
        together: list[tuple[str, nn.Module]] = []  # owners whose memory overlaps
        end = 0
        for begin, behind, name, module in sorted(each, key=lambda owner: owner[0]):
            together = [*together, (name, module)] if begin < end else [(name, module)]
            end = max(end, behind) if len(together) > 1 else behind
            names = dict.fromkeys(name for name, _ in together)
            for own, sharing in together if len(names) > 1 else ():
                others = ", ".join(other for other in names if other != own)
                reasons[sharing] = f"its weight is tied to the weight of {others}"
    for name, module in model.named_modules():
        if is_read_by_code(name):
            reasons.setdefault(module, "the code of the models that have such a layer reads its weight itself")
    return reasons


def _unfit_reason(module: nn.Linear, format: BlockFormat) -> str | None:
    """Return why a linear that no option names cannot have its weight in a format; None if it can."""
    weight = module.weight
    if weight.dtype not in WEIGHT_DTYPES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    if module.in_features % format.block_size or not weight.numel():
        return f"its in_features are not a multiple of {format.block_size}"
    return None
