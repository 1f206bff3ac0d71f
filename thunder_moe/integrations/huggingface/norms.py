"""`fuse_norms_(model)`: RMS norms of transformers' models in one or two kernels of torch, in place of seven, in eager
inference on CUDA, of the classes that `norm_table` lists.
Called by users; calls norm_table, class_swap and torch's fused rms_norm.

A norm runs its own forward where the fused one is not known to compute the same, as with gradients and in compiled
graphs.

Legend: ... any leading dimensions, H hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module
from thunder_moe.integrations.huggingface.class_swap import OtherMethods
from thunder_moe.integrations.huggingface.known_code import key, runs_class_forward, tell_decision, unknown_version
from thunder_moe.integrations.huggingface.norm_table import NORMS
from thunder_moe.integrations.huggingface.routers import OWN_STATE, is_setting, settings_of
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.ops.operator import is_plain_eager

_DTYPES = (torch.bfloat16, torch.float16)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class NormCall:
    """Compute what a norm does by torch's rms_norm, while its numbers and strings are the `settings`.

    If `rounds_first`, the product with the weight is one of 16 bits, behind a rounding; else there is one rounding.
    """

    epsilon: float
    rounds_first: bool
    settings: tuple[tuple[str, Any], ...]

    def holds(self, norm: Any, x: Tensor) -> bool:
        """True if the norm still has its settings, and x is of its kind."""
        weight = norm._parameters.get("weight")  # None where it is parametrized
        if weight is None or x.dtype not in _DTYPES or weight.dtype != x.dtype or x.shape[-1:] != weight.shape:
            return False
        for name, value in self.settings:
            if getattr(norm, name, None) != value:
                return False
        return autocast_dtype(x) is None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.rounds_first:
            return weight * F.rms_norm(x, weight.shape, None, self.epsilon)
        return F.rms_norm(x, weight.shape, weight, self.epsilon)


class FusedNorm(OtherMethods):
    """Run torch's rms_norm in the place of a norm's own forward, where it is known to compute the same."""

    added = ("norm_call",)
    norm_call: NormCall

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Map (..., H) -> (..., H)."""
        if is_plain_eager(hidden_states) and _is_served(hidden_states) and not (args or options):
            call: Any = self.norm_call
            if call.holds(self, hidden_states):
                return call(hidden_states, self._parameters["weight"])
        return super().forward(hidden_states, *args, **options)


def fuse_norms_(model: Model) -> Model:
    """Make the RMS norms of a transformers model run torch's fused kernel in eager inference on CUDA, in place.

    A decoder layer of Qwen3-MoE has four, of seven small kernels each: in eager `generate` of one text they take more
    of the host's time than the experts. Results are the same but for the rounding of 16 bits where float32 sums differ
    in order. Norms with hooks keep them; with gradients, in compiled graphs, under autocast and on other devices the
    norm's own forward runs. The logger "thunder_moe" says at level INFO which classes take part.

    Args:
        model: with modules of transformers, quantized or not.

    Returns:
        The same model.

    Raises:
        TypeError: the model is not a module.
        ValueError: the table has no norm of the model.
    """
    require_module(model)
    found = 0
    for module in list(model.modules()):
        call = None if isinstance(module, FusedNorm) else _call_of(module)
        if call is not None:
            FusedNorm.put_on(module, norm_call=call)
        found += isinstance(module, FusedNorm)
    if not found:
        only = unknown_version()
        known = "" if only is None else f": they are known {only}"
        raise ValueError(f"model: found no RMS norm of transformers in {type(model).__name__} that can be fused{known}")
    return model


def restore_norms_(model: Model) -> Model:
    """Undo `fuse_norms_`."""
    for module in list(model.modules()):
        FusedNorm.take_off(module)
    return model


def _is_served(x: Tensor) -> bool:
    return x.is_cuda


def _call_of(norm: nn.Module) -> NormCall | None:
    """Return how torch's rms_norm computes what a module does, by the table; None where it does not."""
    cls, call, why = type(norm), None, None
    if "Norm" not in cls.__name__:
        return None
    kind, weight = NORMS.get(key(cls)), norm._parameters.get("weight")
    one = len([*norm.parameters(), *norm.buffers()]) == 1 and not any(norm.children())
    plain = all(is_setting(value) for name, value in vars(norm).items() if name not in OWN_STATE)  # nothing patched
    plain = plain and getattr(norm, "with_scale", True)  # Gemma's, without which the weight does not count
    if kind is not None and type(weight) is nn.Parameter and one and plain and runs_class_forward(norm):
        epsilon = getattr(norm, kind.epsilon)
        why = unknown_version(kind.since)
        if why is None and isinstance(epsilon, float) and weight.ndim == 1:
            call = NormCall(epsilon, kind.rounds_first, settings_of(norm))
    tell_decision("norm", cls, "rms_norm", call, why)
    return call
