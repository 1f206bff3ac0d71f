"""Add LoRA adapters to linears of experts and to 4-bit dense ones: subclasses that take the place of their classes.
Called by finetune, which adds and merges them, parallel.shards and integrations.huggingface; calls nn.grouped_linear,
nn.quantized and nn.linear.

y = W x + b  ->  y + scaling * B (A x), for each active adapter, as two (grouped) GEMMs beside the one of W

Legend: M rows sorted by expert, E experts, N out_features, K in_features, r rank of one adapter, P its parts, R of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.layouts import LINEAR
from thunder_moe.formats.registry import dequantize
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.kernels.batch_invariance import refuse
from thunder_moe.kernels.select import lay_out
from thunder_moe.nn.grouped_linear import GroupedLinear, linear_operator
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart
from thunder_moe.nn.quantized import NVFP4GroupedLinear


@dataclass(frozen=True)
class LoRASpec:
    """The numbers of an adapter beside its two parameters."""

    rank: int  # r
    scaling: float  # multiplies B (A x)
    dropout: float = 0.0  # probability with which a value of x is left out for A in training
    # P, the number of adapters that share the rows of W evenly: A (E, P r, K) has their A one after the other, B (E, N,
    # r) has each B at the adapter's rows. 1, or 2 if gate and up have an adapter each
    parts: int = 1

    def __str__(self) -> str:
        parts = "" if self.parts == 1 else " of gate and up each"
        stabilized = f"with rslora {self.scaling * self.rank**0.5:g}"
        return f"rank {self.rank}{parts} and alpha {self.scaling * self.rank:g} ({stabilized})"


def read_record(state_dict: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, LoRASpec], tuple[str, ...]] | None:
    """Return the specs in the `LoRALinear.lora_record` of a linear, and the names of the active adapters.

    The record is "lora_specs" below the prefix, beside the adapters. Return None without a record, or with one on the
    meta device. Raise a ValueError if a record has not five valid numbers for each adapter.
    """
    record, start = state_dict.get(f"{prefix}lora_specs"), f"{prefix}lora_A."
    if record is None or record.is_meta:
        return None
    names = sorted(key.removeprefix(start) for key in state_dict if key.startswith(start))
    rows = record.tolist() if record.shape == (len(names), 5) and record.dtype == torch.float64 else [[math.nan] * 5]
    if not all(
        rank >= 1 and scaling != 0 and 0 <= dropout < 1 and parts in (1, 2) and math.isfinite(rank + scaling + place)
        for rank, scaling, dropout, parts, place in rows
    ):
        raise ValueError(
            f"lora_specs: got {record.dtype} {tuple(record.shape)}, wanted rank, factor, dropout, parts and place for"
            f" each of {names}, in float64"
        )
    found = {name: LoRASpec(int(row[0]), row[1], row[2], int(row[3])) for name, row in zip(names, rows, strict=True)}
    places = sorted((row[4], name) for name, row in zip(names, rows, strict=True) if row[4])
    return found, tuple(name for _, name in places)


def in_blocks(b: Tensor) -> Tensor:
    """Return B (E, N, r) of gate and up apart as one (E, N, 2 r), for both rows of A: zeros where B has none."""
    gate, up = b.chunk(2, 1)
    zeros = torch.zeros_like(gate)
    return torch.cat([torch.cat([gate, zeros], 2), torch.cat([zeros, up], 2)], 1)


class LoRALinear(nn.Module):
    """A mixin that holds the adapters of a linear of experts, or of a dense linear (then E is 1).

    By adapter's name, `lora_A` has parameters (E, P r, K), `lora_B` (E, N, r); (1, ...) where the experts share it.
    """

    lora_A: nn.ParameterDict  # noqa: N815  (PEFT's names)
    lora_B: nn.ParameterDict  # noqa: N815
    lora_specs: dict[str, LoRASpec]
    lora_joined: str  # the active adapters' names: Thunder guards the value of a string, not the length of a tuple
    lora_by_peft: bool  # True if a PeftModel says which adapters are active; else a loaded state dict says it
    lora_merged: tuple[str, ...]  # are in the weight; a state dict has the merged weight and their names only
    lora_unmerged: Tensor | PackedWeight | None  # the weight without the merged adapters
    num_experts: int
    in_features: int
    out_features: int

    @property
    def lora_active(self) -> tuple[str, ...]:
        """Return the adapters that `forward` adds."""
        return tuple(self.lora_joined.split(".")) if self.lora_joined else ()

    @lora_active.setter
    def lora_active(self, names: tuple[str, ...]) -> None:
        self.lora_joined = ".".join(names)  # no name has a dot

    def lora_record(self) -> Tensor | None:
        """Return rank, scaling, dropout, parts and place among the active ones (0: not active) of each adapter, in the
        order of their names: float64 (adapters, 5).

        Merged adapters are left out; None if all are.
        """
        active = self.lora_active
        rows = [
            (spec.rank, spec.scaling, spec.dropout, spec.parts, active.index(name) + 1 if name in active else 0)
            for name, spec in sorted(self.lora_specs.items())
            if name not in self.lora_merged
        ]
        return torch.tensor(rows, dtype=torch.float64, device="cpu") if rows else None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict, with `lora_record` as "lora_specs".

        Merged adapters are left out, and "lora_merged" has their names, joined by ".": uint8 of UTF-8.
        """
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix") or (args[1] if len(args) > 1 else "")
        for name in self.lora_merged:
            for part in ("lora_A", "lora_B"):
                found.pop(f"{prefix}{part}.{name}", None)
        if self.lora_merged:
            names = ".".join(self.lora_merged).encode()
            found[f"{prefix}lora_merged"] = torch.tensor([*names], dtype=torch.uint8, device="cpu")
        if (record := self.lora_record()) is not None:
            found[f"{prefix}lora_specs"] = record
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        *_, unexpected_keys, error_msgs = args
        key, where = f"{prefix}lora_specs", prefix[:-1] or type(self).__name__
        if (problem := self.obstacle_to_load(state_dict, prefix)) is not None:
            error_msgs.append(f"{where}: {problem}")
            if isinstance(self, NVFP4LinearPart):
                self.stack._refused_in = error_msgs  # it leaves the weight of all parts unchanged
            return
        super()._load_from_state_dict(state_dict, prefix, *args)
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        if (record := read_record(state_dict, prefix)) is None or self.lora_by_peft:
            return
        specs, active = record
        for name in specs.keys() & self.lora_specs.keys():
            self.lora_specs[name] = replace(self.lora_specs[name], dropout=specs[name].dropout)
        others = (name for name in self.lora_active if name not in specs)
        self.lora_active = (*(name for name in active if name in self.lora_specs), *others)

    def obstacle_to_load(self, state_dict: Any, prefix: str) -> str | None:
        """Return why a state dict cannot be loaded; None if it can. A state dict without a record is accepted."""
        if self.lora_merged:
            merged = f"{list(self.lora_merged)} are merged into its weight"
            return f"{merged}, wanted unmerge_lora_(model) before loading"
        names = state_dict.get(f"{prefix}lora_merged")
        joined = b"" if names is None or names.is_meta else bytes(names.to(torch.uint8).tolist())
        if twice := [name for name in joined.decode().split(".") if name in self.lora_specs]:
            remedy = " and ".join(f"remove_lora_(model, {name!r})" for name in twice)
            return (
                f"got a weight with {twice} merged into it, which the model has beside its weight, too, and would count"
                f" twice; wanted {remedy} before loading, or unmerge_lora_ before saving"
            )
        try:
            given, _ = read_record(state_dict, prefix) or ({}, ())
        except ValueError as error:
            return str(error)
        for name in given.keys() & self.lora_specs.keys():
            new, own = given[name], self.lora_specs[name]
            if (new.rank, new.parts) != (own.rank, own.parts) or not math.isclose(new.scaling, own.scaling):
                return f"got an adapter {name!r} of {new}, wanted {own}, as add_lora_ has made it"
        return None

    def plus_lora(self, y: Tensor, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Add the active adapters' result for an input x (..., K) to the linear's result y (..., N), in y's dtype.

        The offsets are the row ends of the experts; None for a dense linear.
        """
        if offsets is None and self.lora_active and not torch.compiler.is_compiling():
            refuse("LoRA adapters of a dense layer", "merge them: merge_lora_(model)")
        x, drops = x.to(y.dtype), self.lora_drops_out()
        for names in [(name,) for name in self.lora_active] if drops else [self.lora_active]:
            if (pair := self.lora_pair(y.dtype, names)) is None:
                continue
            rows = F.dropout(x, self.lora_specs[names[0]].dropout, self.training) if drops else x
            for matrix in pair:
                if offsets is None:
                    rows = F.linear(rows, matrix[0])
                else:
                    rows = linear_operator(rows)(rows, matrix, offsets, None, None)
            y = y + rows.to(y.dtype)
        return y

    def lora_drops_out(self) -> bool:
        """True if an active adapter has a dropout now."""
        return self.training and any(self.lora_specs[name].dropout > 0 for name in self.lora_active)

    def lora_pair(self, dtype: torch.dtype, names: tuple[str, ...] | None = None) -> tuple[Tensor, Tensor] | None:
        """Return A (E, R, K) and scaled B (E, N, R) of these adapters together, by default the active ones.

        None if there are none.
        """
        pairs = []
        for name in self.lora_active if names is None else names:
            spec = self.lora_specs[name]
            # Products, and so no parameters that a compiler could take for frozen weights and quantize.
            a, b = self.lora_A[name] * 1.0, self.lora_B[name] * spec.scaling
            b = in_blocks(b) if spec.parts > 1 else b
            pairs.append([each.expand(self.num_experts, -1, -1) if each.shape[0] == 1 else each for each in (a, b)])
        if not pairs:
            return None
        if len(pairs) == 1:
            ((a, b),) = pairs
        else:
            a, b = torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 2)
        return a.to(dtype), b.to(dtype)

    def lora_delta(self, names: tuple[str, ...]) -> Tensor:
        """Return what some adapters, at least one, add to the weight: float32 (E, N, K)."""
        pair = self.lora_pair(torch.float32, names)
        assert pair is not None
        return pair[1] @ pair[0]

    def extra_repr(self) -> str:
        named = (f"{name} (rank {spec.rank})" for name, spec in self.lora_specs.items())
        state = f", merged={list(self.lora_merged)}" if self.lora_merged else ""
        return f"{super().extra_repr()}, lora: {', '.join(named)}, active={list(self.lora_active)}{state}"


class LoRAGroupedLinear(LoRALinear, GroupedLinear):
    """`GroupedLinear` with adapters, as `thunder_moe.add_lora_` makes it; buffers (`out`, `grad_input`) are refused."""

    def forward(
        self,
        x: Tensor,
        offsets: Tensor,
        bias_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
        grad_input: Tensor | None = None,
    ) -> Tensor:
        """Return the result of `GroupedLinear.forward` plus the result of the active adapters.

        Raises:
            ValueError: as in `GroupedLinear.forward`, and for a buffer.
        """
        for name, buffer in dict(out=out, grad_input=grad_input).items():
            if buffer is not None:
                raise ValueError(f"{name}: got a buffer for a linear with LoRA adapters, wanted None")
        y = GroupedLinear.forward(self, x, offsets, bias_scale)
        return self.plus_lora(y, x, offsets)


class NVFP4LoRAGroupedLinear(LoRALinear, NVFP4GroupedLinear):
    """`NVFP4GroupedLinear` with adapters, as `thunder_moe.add_lora_` makes it."""

    lora_to_restore = False  # True if `dequantized` includes the active adapters

    def forward(self, x: Tensor, offsets: Tensor, bias_scale: Tensor | None = None) -> Tensor:
        """Return the result of `NVFP4GroupedLinear.forward` plus the result of the active adapters."""
        y = NVFP4GroupedLinear.forward(self, x, offsets, bias_scale)
        return self.plus_lora(y, x, offsets)

    def dequantized(self) -> list[Tensor]:
        """Return the weights in 16 bits; with `lora_to_restore` plus the active adapters, rounded once."""
        if not self.lora_to_restore or not self.lora_active:
            return super().dequantized()
        total = dequantize(lay_out(self.packed_weight, LINEAR), torch.float32) + self.lora_delta(self.lora_active)
        parts = zip(total.chunk(len(self.weight_dtypes), 1), self.weight_dtypes, strict=True)
        return [part.to(dtype).contiguous() for part, dtype in parts]


class LoRADense(LoRALinear):
    """A mixin that holds the adapters of a dense linear."""

    num_experts = 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the linear plus the result of the active adapters."""
        return self.plus_lora(super().forward(x), x)


class NVFP4LoRALinear(LoRADense, NVFP4Linear):
    """`NVFP4Linear` with adapters, as `thunder_moe.add_lora_` makes it."""


class NVFP4LoRALinearPart(LoRADense, NVFP4LinearPart):
    """`NVFP4LinearPart` with adapters, as `thunder_moe.add_lora_` makes it."""
