"""Chooses: which backend runs a grouped GEMM on a device with weights in a number format, which layout of
weights it reads best, and what quantizes them.
Called by ops and the layers above; calls kernels.cpu, .cuda, .reference (plain torch, for any device),
.training_reference and .w4a4.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.layouts import LINEAR, TILED_64X64, layout_fits, preferred_on
from thunder_moe.formats.mxfp8 import E8M0_NAN
from thunder_moe.formats.registry import find_format
from thunder_moe.formats.weight import MXFP8Weight, NVFP4Weight, PackedWeight
from thunder_moe.kernels import chains
from thunder_moe.kernels.batch_invariance import is_batch_invariant, refuse

# In order of preference; each has the devices that it serves (None: all).
BACKENDS: dict[str, tuple[str, ...] | None] = {
    "cpu": ("cpu",),
    "cuda": ("cuda",),
    "reference": None,
}
# Backends with other arithmetic, which run only when asked for by name.
SIMULATIONS: dict[str, tuple[str, ...] | None] = {"w4a4": None}
_KNOWN = BACKENDS | SIMULATIONS
Weight = TypeVar("Weight", bound=PackedWeight)


def select(device: torch.device, *, backend: str | None = None, format: str = NVFP4.name) -> ModuleType:
    """Return the kernel module for operands on a device.

    Args:
        device: where the operands are.
        backend: a name of `BACKENDS` or `SIMULATIONS` to insist on; None for the backend of `use_backend`, or the best
            available.
        format: the name of the weights' number format. Simulations simulate NVFP4 and leave other formats to the best
            backend.

    Returns:
        A module with `grouped_mm`, `grouped_mm_dgrad`, `grouped_swiglu`, `grouped_mm_combine`, `moe_experts`, `mm`,
        `mm_dgrad`, `route`, `router`, `linear_router`, `decode_attention`, `add_norm_mm` and
        `add_norm_linear_router`, as in kernels.reference.

    Raises:
        ValueError: the backend is unknown, does not serve the device, takes no weights in the format, or cannot run
            here (the message says why).
    """
    backend = backend or _CHOSEN.get()
    if backend in SIMULATIONS:
        refuse(f"backend {backend!r} has one scale for all rows", "leave it out")
    if backend is None or (format != NVFP4.name and backend in SIMULATIONS):
        return _best(_indexed(device), format)
    if backend not in _KNOWN:
        raise ValueError(f"backend: got {backend!r}, wanted one of {tuple(_KNOWN)}")
    devices = _KNOWN[backend]
    if devices is not None and device.type not in devices:
        raise ValueError(f"backend: got {backend!r} for a tensor on {device}, it runs on {devices}")
    module, reason = _load(backend, _indexed(device))
    if reason is not None:
        raise ValueError(f"backend: {backend!r} cannot run here: {reason}")
    if format not in _formats_of(module):
        raise ValueError(f"backend: {backend!r} takes no {format} weights, only {_formats_of(module)}")
    return module


def _formats_of(module: ModuleType) -> tuple[str, ...]:
    """Return the number formats of weights that a backend takes, its `FORMATS`."""
    return getattr(module, "FORMATS", (NVFP4.name,))


def training_kernels(device: torch.device) -> ModuleType:
    """Return the module of the kernels of training, and of `combine_rows`, for operands on a device.

    Returns:
        `kernels.cuda.training` where the CUDA kernels can run, unless `use_backend` asks for "reference"; else
        `kernels.training_reference`, which has the same functions in plain torch.
    """
    cuda = chosen_backend() != "reference" and runs_on_cuda(device)
    return importlib.import_module(f"thunder_moe.kernels.{'cuda.training' if cuda else 'training_reference'}")


def training_products(device: torch.device, recipe: str | None) -> Any:
    """Return `grouped_mm`, `dgrad` and `wgrad` for operands on a device, in 16 bits or by an 8-bit recipe."""
    if recipe is not None:
        refuse(f"recipe {recipe!r}", "train in 16 bits, recipe=None")
    kernels = training_kernels(device)
    return kernels if recipe is None else kernels.quantized_products(recipe)


def has_chains(device: torch.device) -> bool:
    """True if kernels of a device can be prepared as a chain, `prepare`."""
    return device.type == "cuda"


def prepare(name: str, args: Sequence[Any], options: dict[str, Any], format: str, kind: Hashable) -> None:
    """Prepare the chain of kernels of an operator for all arguments of a kind, for `chains.find`.

    Args:
        name, args, options: the operator and the arguments of its description, which have passed its checks: weights
            are `WeightOperands`.
        format: the number format of the operator's weights.
        kind: `chains.kind_of` these.
    """
    device = args[0].device
    if select(device, format=format) is _load("cuda", _indexed(device))[0]:
        importlib.import_module("thunder_moe.kernels.cuda.operators").prepare(name, args, options, kind)
    else:
        chains.remember(kind, None)


def preferred_layout(device: torch.device, n: int, k: int, format: BlockFormat = NVFP4) -> str:
    """Return the layout of (E, n, k) weights that the default backend of a device reads best.

    On CUDA devices where our kernels can run it is the layout that `formats.layouts.REGISTRY` prefers ("tiled_64x64" on
    compute capability 9.0, for n and k that are multiples of 64); else "linear". Weights are laid out by it when they
    are quantized; `use_backend` makes no difference, since every backend takes every layout.
    """
    if not runs_on_cuda(device, format.name):
        return LINEAR
    return preferred_on(torch.cuda.get_device_capability(device), n, k, format)


def resolve_layout(layout: str, device: torch.device, n: int, k: int, format: BlockFormat = NVFP4) -> str:
    """Resolve "auto" for (E, n, k) weights on a device to `preferred_layout`; other layouts stand for themselves."""
    return preferred_layout(device, n, k, format) if layout == "auto" else layout


def runs_on_cuda(device: torch.device, format: str = NVFP4.name) -> bool:
    """True if the CUDA kernels can run on a device, with weights in a number format."""
    if device.type != "cuda":
        return False
    module, reason = _load("cuda", _indexed(device))
    return reason is None and format in _formats_of(module)


def lay_out(weight: Weight, layout: str) -> Weight:
    """Return a weight in a layout of `formats.layouts.LAYOUTS`, or in the one that "auto" means for it,
    `resolve_layout`.

    On a CUDA device a kernel converts between "linear" and "tiled_64x64", byte for byte as `PackedWeight.to_layout`.
    """
    _, n, k = weight.shape
    layout = resolve_layout(layout, weight.device, n, k, weight.format)
    converts = {weight.layout, layout} == {LINEAR, TILED_64X64} and layout_fits(n, k, layout, weight.format) is None
    if converts and not isinstance(weight.qdata, FakeTensor):
        kernels = _cuda_quantizer(weight.device, weight.format.name)
        if kernels is not None:
            return kernels.to_layout(weight, layout)
    return weight.to_layout(layout)


def quantize(weight: Tensor, *, scale_search: str | None = None) -> NVFP4Weight:
    """Run `formats.nvfp4.quantize` by the kernels of the weight's device: the same bytes, on CUDA many times faster."""
    return quantize_to(NVFP4.name, weight, scale_search=scale_search)


def quantize_to(format: str, weight: Tensor, *, scale_search: str | None = None) -> Any:
    """Run `quantize` of a number format's module by the kernels of the weight's device: the same bytes.

    Args:
        format: its name, one of `formats.registry.FORMATS`.
        weight: (E, N, K).
        scale_search: as in the format's `quantize`.

    Raises:
        ValueError: as the format's `quantize`, or there is no such format.
    """
    known = find_format(format)
    kernels = _cuda_quantizer(weight.device, known.name)
    if kernels is None:
        return known.quantize(weight, scale_search=scale_search)
    return kernels.quantize(weight, known.name, scale_search=scale_search)


def quantize_unchecked(format: str, weight: Tensor, scale_search: str | None = None) -> tuple[Any, Tensor]:
    """Run `quantize_unchecked` of a number format's module likewise. On CUDA nothing synchronises.

    Returns:
        The packed weight, and the largest magnitude of each expert, float32 (E,), for `check_amax` of that module.
    """
    known = find_format(format)
    kernels = _cuda_quantizer(weight.device, known.name)
    if kernels is None:
        return known.quantize_unchecked(weight, scale_search)
    return kernels.quantize_unchecked(weight, known.name, scale_search)


def fake_quantize(weight: Tensor, scale_search: str | None = None, format: str = NVFP4.name) -> Tensor:
    """Round a weight (E, N, K) to a number format: `quantize`, then `dequantize` to its dtype.

    Experts with NaN or Inf become NaN. The result is contiguous. On CUDA nothing synchronises.
    """
    known = find_format(format)
    packed, amax = quantize_unchecked(format, weight, scale_search)
    finite = torch.isfinite(amax)
    if format == NVFP4.name:
        packed = NVFP4Weight.unchecked(
            packed.qdata, packed.scale, torch.where(finite, packed.global_scale, torch.nan), LINEAR
        )
    else:
        scale = torch.where(finite[:, None, None], packed.scale.view(torch.uint8), E8M0_NAN)
        packed = MXFP8Weight.unchecked(packed.qdata, scale.view(packed.scale.dtype), LINEAR)
    if weight.dtype == torch.float32 or format != NVFP4.name or not runs_on_cuda(weight.device):
        return known.dequantize(packed, weight.dtype)
    return importlib.import_module("thunder_moe.kernels.cuda.backend").dequantize(packed, weight.dtype)


def _cuda_quantizer(device: torch.device, format: str = NVFP4.name) -> Any:
    """Return kernels.cuda.quantizer if it can run and knows a number format, else None."""
    if not runs_on_cuda(device, format):
        return None
    return importlib.import_module("thunder_moe.kernels.cuda.quantizer")


@contextlib.contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every operator inside on this backend, also in compiled graphs (not in CUDA graphs captured before).

    Raises:
        ValueError: the backend is unknown; when an operator runs, also that it cannot run there.
    """
    if not isinstance(backend, str) or backend not in _KNOWN:
        raise ValueError(f"backend: got {backend!r}, wanted one of {tuple(_KNOWN)}")
    token = _CHOSEN.set(backend)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def simulate_w4a4() -> contextlib.AbstractContextManager[None]:
    """Make NVFP4 operators inside also round their activations to NVFP4, as nvFuser's kernels do on Blackwell (SM
    10.0).

    It shows the accuracy of W4A4 on any machine, not its speed: ``with simulate_w4a4(): model(tokens)``, also for
    compiled models. kernels/w4a4.py has the arithmetic.
    """
    return use_backend("w4a4")


_CHOSEN: ContextVar[str | None] = ContextVar("thunder_moe_backend", default=None)
chosen_backend = _CHOSEN.get  # the name that `use_backend` was given, else None


def chooses_freely() -> bool:
    """True outside of `use_backend` and of `batch_invariant`, whose choices prepared chains do not have."""
    return _CHOSEN.get() is None and not is_batch_invariant()


@functools.cache
def _best(device: torch.device, format: str = NVFP4.name) -> ModuleType:
    for name, devices in BACKENDS.items():
        if devices is not None and device.type not in devices:
            continue
        module, reason = _load(name, device)
        if reason is None and format in _formats_of(module):
            return module
        reason = reason or f"they take no {format} weights, only {', '.join(_formats_of(module))}"
        warnings.warn(
            f"thunder_moe: the {name!r} kernels cannot run on {device}, slower plain-torch ones take their place:"
            f" {reason}",
            stacklevel=2,
        )
    raise AssertionError("the reference runs everywhere")


_MODULES = {"cpu": "thunder_moe.kernels.cpu.backend", "cuda": "thunder_moe.kernels.cuda.backend"}


@functools.cache
def _load(name: str, device: torch.device) -> tuple[ModuleType, str | None]:
    """Return a backend's module, and why it cannot run on a device; GPUs of one machine may differ in capability."""
    module = importlib.import_module(_MODULES.get(name, f"thunder_moe.kernels.{name}"))
    return module, module.unavailable_reason(device)


def _indexed(device: torch.device) -> torch.device:
    """Return the device with its index: the current one where "cuda" has none."""
    if device.type != "cuda" or device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())
