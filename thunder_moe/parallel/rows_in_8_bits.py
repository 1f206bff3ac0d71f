"""Rows that travel in the numbers of an 8-bit recipe: `AllToAll8Bit`, the exchange "all_to_all_8bit".
Called by parallel.styles and, as an exchange, by parallel.modules; calls parallel.exchange, kernels.select and
formats.mxfp8.

    forward    rows (T, H) -> codes and scales -> all-to-all -> rows of the same numbers; sums go back in 16 bits
    backward   the sums' gradients travel in 8 bits likewise, the rows' gradients go back in 16 bits

A row has one float32 scale with "fp8", and with "mxfp8" a byte for each 32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_moe.formats.mxfp8 import BLOCK_SIZE, powers_of_two, quantize_rows
from thunder_moe.kernels.select import training_kernels
from thunder_moe.parallel import exchange as plain


@torch.library.custom_op("thunder_moe::coded_rows", mutates_args=())
def encode(rows: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Round rows (T, H) as the product that reads them does: -> uint8 codes of E4M3 (T, H), and scales (T, S)."""
    if recipe == "fp8":
        codes, scale = training_kernels(rows.device).quantize_codes(rows)
        return codes.contiguous().view(torch.uint8), scale[:, None]
    codes, scales = quantize_rows(F.pad(rows, (0, -rows.shape[1] % BLOCK_SIZE)))
    return codes[:, : rows.shape[1]].contiguous().view(torch.uint8), scales


@encode.register_fake
def _(rows: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    count, dtype = (1, torch.float32) if recipe == "fp8" else (-(-rows.shape[1] // BLOCK_SIZE), torch.uint8)
    return rows.new_empty(rows.shape, dtype=torch.uint8), rows.new_empty(rows.shape[0], count, dtype=dtype)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows (T, H) of `encode`, in a dtype."""
    if scales.dtype == torch.uint8:
        scales = powers_of_two(scales).repeat_interleave(BLOCK_SIZE, 1)[:, : codes.shape[1]]
    numbers = codes.view(torch.float8_e4m3fn).to(dtype)
    return torch.mul(numbers, scales, out=torch.empty_like(numbers))  # in float32, rounded once


@dataclass
class _Coded:
    """Rows of `encode` that may still travel; `parallel.exchange.wait` calls `wait`."""

    rows: Tensor
    codes: Any
    scales: Any
    route: tuple[list[int], list[int], str]

    def wait(self) -> Tensor:
        """Return the received rows, whose gradient goes back to the sent ones."""
        coded = plain.wait(self.codes), plain.wait(self.scales)
        return torch.ops.thunder_moe.received_rows(self.rows, *coded, *self.route)


class AllToAll8Bit(plain.AllToAll):
    """`AllToAll` whose rows, and gradients of sums, travel as the experts' recipe rounds them."""

    takes_recipes = True

    def send_rows(self, rows: Tensor, coming: list[int], sending: list[int], recipe: str | None) -> Any:
        if recipe is None:
            return super().send_rows(rows, coming, sending, None)
        coded = torch.ops.thunder_moe.coded_rows(rows.detach(), recipe)
        codes, scales = (plain.all_to_all(part, coming, sending, self._group) for part in coded)
        return _Coded(rows, codes, scales, (coming, sending, self._group.group_name))

    def send_back(self, sums: Tensor, sent: plain.Sent) -> Any:
        *_, coming, sending = sent.back
        if sent.recipes[1] is None or not (torch.is_grad_enabled() and sums.requires_grad):
            return super().send_back(sums, sent)
        return torch.ops.thunder_moe.returned_sums(sums, sent.recipes[1], sending, coming, self._group.group_name)


def _exchanged(x: Tensor, coming: list[int], sending: list[int], group_name: str) -> Tensor:
    return plain.wait(plain.all_to_all(x, coming, sending, plain.process_group(group_name)))


@torch.library.custom_op("thunder_moe::received_rows", mutates_args=())
def _received_rows(
    rows: Tensor, codes: Tensor, scales: Tensor, coming: list[int], sending: list[int], group_name: str
) -> Tensor:
    """Return the rows (T', H) that have arrived coded; differentiable in the rows (T, H) that were sent."""
    return decode(codes, scales, rows.dtype)


@torch.library.custom_op("thunder_moe::returned_sums", mutates_args=())
def _returned_sums(sums: Tensor, recipe: str, coming: list[int], sending: list[int], group_name: str) -> Tensor:
    """Send sums to the ranks of their tokens, unchanged; their gradients come back in 8 bits."""
    return _exchanged(sums, coming, sending, group_name)


@torch.library.custom_op("thunder_moe::gradients_of_rows", mutates_args=())
def _gradients_of_rows(
    grad: Tensor, recipe: str | None, coming: list[int], sending: list[int], group_name: str
) -> Tensor:
    """Send gradients, in 8 bits if there is a recipe; no double backward."""
    if recipe is None:
        return _exchanged(grad, coming, sending, group_name)
    codes, scales = (_exchanged(part, coming, sending, group_name) for part in encode(grad, recipe))
    return decode(codes, scales, grad.dtype)


@_received_rows.register_fake
def _(rows: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(codes.shape)


@_returned_sums.register_fake
@_gradients_of_rows.register_fake
def _(x: Tensor, recipe: str | None, coming: list[int], *_: Any) -> Tensor:
    return x.new_empty(sum(coming), x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, ctx.coming, ctx.sending, ctx.group_name = inputs


def _setup_context_of_returned(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.recipe, ctx.coming, ctx.sending, ctx.group_name = inputs


def _backward_of_received(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = torch.ops.thunder_moe.gradients_of_rows(grad, None, ctx.sending, ctx.coming, ctx.group_name)
    return back, None, None, None, None, None


def _backward_of_returned(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    back = torch.ops.thunder_moe.gradients_of_rows(grad, ctx.recipe, ctx.sending, ctx.coming, ctx.group_name)
    return back, None, None, None, None


_received_rows.register_autograd(_backward_of_received, setup_context=_setup_context)
_returned_sums.register_autograd(_backward_of_returned, setup_context=_setup_context_of_returned)
