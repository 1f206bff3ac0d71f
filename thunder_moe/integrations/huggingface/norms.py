"""`fuse_norms_(model)`: RMS norms of transformers' models in one or two kernels of torch, in place of seven, in eager
inference on CUDA, where probes prove that they compute the same.
Called by users; calls the norm's own forward to compare, and torch's fused rms_norm.

A norm keeps its class' name for isinstance, its parameters and its hooks: only the forward is another one, and that
runs the own one wherever it is not known to compute the same, as with gradients and in compiled graphs.

Legend: ... any leading dimensions, H hidden_size, P probes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_moe.integrations.huggingface.class_swap import OtherForward
from thunder_moe.integrations.huggingface.routers import KNOWN_CODE, OWN_STATE, is_setting, settings_of
from thunder_moe.nn.autocast import autocast_dtype
from thunder_moe.ops.operator import is_plain_eager
from thunder_moe.replaceable import has_own_forward

__all__ = ["FusedNorm", "NormCall", "fuse_norms_", "restore_norms_"]

_LOGGER = logging.getLogger("thunder_moe")
_DTYPES = (torch.bfloat16, torch.float16)
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class NormCall:
    """What a norm computes of (..., H), in float32 inside: ``x * rsqrt(mean(x ** 2) + epsilon) * weight``.

    Attributes:
        epsilon: as above.
        rounds_first: the product with the weight is one of 16 bits, behind a rounding; else there is one rounding.
        settings: numbers and strings in the module when it was compared, on which the comparison relies.
    """

    epsilon: float
    rounds_first: bool
    settings: tuple[tuple[str, Any], ...]

    def holds(self, norm: Any, x: Tensor) -> bool:
        """Whether the norm still has the settings of the comparison, and x is of its kind."""
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

    def defined(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same in plain operations, for any dtype and device."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return weight * wide.to(x.dtype) if self.rounds_first else (weight.float() * wide).to(x.dtype)


class FusedNorm(OtherForward):
    """Run torch's rms_norm in the place of a norm's own forward, where it is known to compute the same."""

    added = ("norm_call",)
    norm_call: NormCall

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """(..., H) -> (..., H)."""
        if is_plain_eager(hidden_states) and _is_served(hidden_states) and not (args or options):
            call: Any = self.norm_call
            if call.holds(self, hidden_states):
                return call(hidden_states, self._parameters["weight"])
        return super().forward(hidden_states, *args, **options)


def fuse_norms_(model: Model) -> Model:
    """Makes the RMS norms of a transformers model run torch's fused kernel in eager inference on CUDA, in place.

    A decoder layer of Qwen3-MoE has four, of seven small kernels each: in eager `generate` of one text they take more
    of the host's time than the experts. Results are the same but for the rounding of 16 bits where float32 sums differ
    in order. Norms with hooks keep them; with gradients, in compiled graphs, under autocast and on other devices the
    norm's own forward runs. The logger "thunder_moe" says at level INFO which classes take part.

    Args:
        model: with modules of transformers, quantized or not.

    Returns:
        The same model.

    Raises:
        ValueError: no norm of the model is known to compute the same.
    """
    found = 0
    for module in list(model.modules()):
        if isinstance(module, FusedNorm):
            found += 1
            continue
        call = _call_of(module)
        if call is not None:
            FusedNorm.put_on(module, norm_call=call)
            found += 1
    if not found:
        raise ValueError(f"model: found no RMS norm of transformers in {type(model).__name__} that can be fused")
    return model


def restore_norms_(model: Model) -> Model:
    """The inverse of `fuse_norms_`."""
    for module in list(model.modules()):
        FusedNorm.take_off(module)
    return model


def _is_served(x: Tensor) -> bool:
    return x.is_cuda


def _call_of(norm: nn.Module) -> NormCall | None:
    """How torch's rms_norm computes what a module does, or None; the same for all of equal class and settings."""
    kind = type(norm)
    weight = norm._parameters.get("weight")
    if not kind.__module__.startswith(KNOWN_CODE) or "Norm" not in kind.__name__ or weight is None:
        return None
    if weight.ndim != 1 or type(weight) is not nn.Parameter or len([*norm.parameters(), *norm.buffers()]) > 1:
        return None
    if any(norm.children()) or not has_own_forward(norm):
        return None
    if not all(is_setting(value) for name, value in vars(norm).items() if name not in OWN_STATE):
        return None
    key = kind, weight.shape, settings_of(norm)
    if key not in _CALLS:
        try:
            _CALLS[key] = _compare(norm)
        except Exception as error:  # a forward with other arguments, results or needs than a norm's
            _LOGGER.debug("%s stays as it is: %s: %s", kind.__name__, type(error).__name__, error)
            _CALLS[key] = None
        does = "keeps its own operations" if _CALLS[key] is None else f"runs rms_norm, {_CALLS[key]}"
        _LOGGER.info("norm %s %s", kind.__name__, does)
    return _CALLS[key]


_CALLS: dict[Any, NormCall | None] = {}


def probe_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module of the same class and attributes with zeros of a dtype on the CPU in the place of its tensors."""
    new = type(module).__new__(type(module))
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        if name not in OWN_STATE:
            vars(new)[name] = value
    for name, child in module._modules.items():
        new.register_module(name, None if child is None else probe_copy(child, dtype))
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        zeros = None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device="cpu")
        if name in module._parameters:
            new.register_parameter(name, None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        else:
            new.register_buffer(name, zeros)
    return new


@torch.inference_mode(False)
@torch.no_grad()
def _compare(norm: nn.Module) -> NormCall | None:
    """The first call that agrees with the norm's own forward at all probes, in both 16-bit dtypes."""
    settings = settings_of(norm)
    epsilons = sorted({value for _, value in settings if isinstance(value, float) and 0.0 <= value <= 1e-2})
    for epsilon in epsilons:
        for rounds_first in (True, False):
            call = NormCall(epsilon, rounds_first, settings)
            if all(_agrees(call, norm, dtype, training) for dtype in _DTYPES for training in (False, True)):
                return call
    return None


def _agrees(call: NormCall, norm: nn.Module, dtype: torch.dtype, training: bool) -> bool:
    """Whether the norm gives the numbers of the call, nearly always the very same."""
    probe: Any = probe_copy(norm, dtype).train(training)
    size = probe.weight.shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    options: dict[str, Any] = dict(generator=generator, device="cpu", dtype=torch.float32)
    probe.weight.copy_(0.5 + torch.rand(size, **options))
    # Some so small that epsilon decides.
    scale = torch.tensor([1e-4, 1e-3, 1e-2, 0.3, 1.0, 30.0], device="cpu", dtype=torch.float32)
    x = (torch.randn(6, 8, size, **options) * scale[:, None, None]).to(dtype)  # [P, P, H]
    own, wanted = probe(x.clone()), call.defined(x, probe.weight)
    if own.shape != wanted.shape or own.dtype != wanted.dtype:
        return False
    return bool((own == wanted).float().mean() > 0.999)
