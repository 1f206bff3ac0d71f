"""quantize_(model) and dequantize_(model) swap experts and dense layers for their packed forms in place, and back;
plan_quantization(model) shows what quantize_ would do; to_layout_(model) changes the layout of packed weights.
Called by users; calls choose for the modules, plan to swap them, kernels.select to lay weights out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from thunder_moe.formats.checks import require_module
from thunder_moe.kernels.select import lay_out, resolve_layout
from thunder_moe.nn.packed import PackedModule
from thunder_moe.nn.snapshot import replacing
from thunder_moe.quantization import choose
from thunder_moe.quantization.dense_linears import DenseLinears
from thunder_moe.quantization.families import ExpertFamily, families_of
from thunder_moe.quantization.plan import QuantizationPlan, Skipped, Target, Targets, exclusive, swap
from thunder_moe.quantization.replaceable import has_hook, wrapped_modules
from thunder_moe.selection import Format, Patterns, Selection

Model = TypeVar("Model", bound=nn.Module)


@torch.inference_mode(False)  # buffers of an inference mode could not be loaded into outside of it
@torch.no_grad()
def quantize_(
    model: Model,
    format: Format = "nvfp4",
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    linears: bool | Selection = False,
    scale_search: str | None = None,
    layout: str = "auto",
) -> Model:
    """Replaces the experts of a model with their NVFP4 (or MXFP8) form, in place, and on request its dense layers.

    Knows `GroupedMLP`, `GroupedSwiGLU` and `GroupedLinear`, whose biases stay unchanged, and the experts modules of
    transformers' models (`integrations.huggingface.experts.expert_blocks` lists them). The 16-bit weights are freed
    module by module. Modules and weights that are tied stay tied. The NVFP4 tensors are buffers: in the state dict,
    frozen, moved by ``model.to``. The logger "thunder_moe" lists each replaced module at level INFO.

    Replaces only modules without customization. A customized module stays 16-bit as a whole, and the logger gives its
    name and the reason at level WARNING. Customizations are:

    - a subclass (but for transformers' experts with the forward of transformers' interface; their gate function is
      kept), a ``module.compile()``, a forward or another method replaced on the instance;
    - hooks of torch (accelerate's hooks on transformers' experts are kept) and parametrizations;
    - children, parameters or buffers that its class does not have (LoRA);
    - parameters of another type than ``nn.Parameter``, such as DTensor. Experts that transformers 5.23 has sharded by
      expert or tensor parallelism are replaced: each process quantizes its part, and all of them call this;
    - a wrapper that would keep using the 16-bit module: PEFT's, torch.compile of the module itself, thunder.jit of a
      module that holds it.

    With a `filter` that declines a customized `GroupedSwiGLU` and takes its projections, the projections without
    customization are replaced one by one.

    `filter`, `ignore`, `linears` and `format` name modules by patterns. They mean the same in `ThunderMoeConfig`,
    `checkpoint.convert` and its command line. A pattern is a name ("lm_head"), a glob whose ``*`` takes dots, too
    ("*.layers.0.*"), or "re:" and a regular expression that is matched from the start of a name. A name or a glob that
    fits a module covers all that is in it, a regular expression only what it matches. A module that is in several
    places has all their names. Functions are called as ``function(module, name)`` with its first name.

    With `linears` each `nn.Linear` becomes a `NVFP4Linear`: attention's projections, shared experts, dense MLPs, head.
    Linears that are known to read the same tensor (q, k and v; gate and up) are computed at once: their weights are
    stacked in a child "qkv_proj" or "gate_up_proj" of their parent, and the modules in their places return their part
    of its result. Routers and gates are never replaced. A head that is tied to the embedding stays 16-bit, as does any
    weight that another module shares, or that its parent reads itself. The logger says at level INFO which stay and
    why.

    Args:
        model: any module that holds experts, or with `linears` dense layers.
        format: the number format of the weights: "nvfp4" (4.5 bits a weight), or "mxfp8" (8.25 bits, nearly lossless).
            Or a dictionary of patterns and formats (None: 16 bits): the first pattern that covers a module decides, and
            modules that no pattern covers become "nvfp4". Or a function of a module and its name that returns a format
            or None. Dense layers that read the same rows are stacked if they have one format.
        filter: the experts and dense layers that become 4-bit; None: all. A pattern, a list of patterns, or a function
            of a module and its name that returns True to convert it. When it declines a `GroupedSwiGLU` it is
            asked about each of its three projections.
        ignore: a pattern or a list of patterns of experts and dense layers that stay 16-bit even if `filter` takes
            them.
        linears: the dense layers that are candidates. False: none. True: layers whose size is faster in 4 bits at 1 to
            64 rows on the device of the weights, but for encoders of images and sound. Or patterns, or a function of an
            `nn.Linear` and its name: the layers that it names, of any size. `filter` and `ignore` hold for them as for
            experts. The logger says at level INFO from how many rows on the layers taken are slower, by measurements.
        scale_search: as in `nvfp4.quantize`: "mse" tries a few scales per block for about 1 dB less noise. It applies
            to weights in NVFP4, and is an error where there are none.
        layout: of the weights in memory. "auto": the layout that the default kernels of the weight's device prefer,
            "tiled_64x64" on a CUDA device of compute capability 9.0 if out_features (of gate and up together) and
            in_features are multiples of 64, else "linear". Or one of these for all. State dicts do not depend on it.

    Returns:
        The same model.

    Raises:
        ValueError: the model is unchanged, and one of these holds. There is nothing that can be quantized (the message
            names the modules and the reasons). The format or the layout is unknown, or a weight's shape does not fit
            it: in_features have to be a multiple of 16 (of 32 for MXFP8). A weight is not bfloat16, float16 or float32,
            has NaN or Inf, or no data (the "meta" device). Gate and up are on several devices. Of two tied weights only
            one is taken or can be, or they are to have two formats. A pattern of `filter` or `linears` fits no experts
            or dense layer, a pattern of `ignore` or `format` fits no module with weights (close names are listed), a
            pattern is empty, or `ignore` names a part of a block that is converted as one. Another thread converts the
            model.
        TypeError: the parent of transformers' experts is not the layer that calls them, or an option is of another
            type, or a function of other arguments; the model is unchanged then.

    All checks are made before the first module is replaced. An error that no check foresees (out of memory, an
    interrupt) leaves the first modules quantized and the others 16-bit: the model still computes, and another call
    quantizes the rest.
    """
    with exclusive(model):
        choose.choose_modules(
            model, format, filter=filter, ignore=ignore, linears=linears, scale_search=scale_search, layout=layout
        ).quantize_modules()
    return model


@torch.inference_mode(False)
@torch.no_grad()
def plan_quantization(
    model: Model,
    format: Format = "nvfp4",
    *,
    filter: Selection | None = None,
    ignore: Patterns | None = None,
    linears: bool | Selection = False,
    scale_search: str | None = None,
    layout: str = "auto",
) -> QuantizationPlan[Model]:
    """Returns what `quantize_` with the same options would do, and changes nothing.

    ``print(plan)`` is a table: module, class, format, megabytes before and after, and why a module stays in 16 bits.
    ``plan.apply()`` does it. All arguments are as in `quantize_`.

    Raises:
        ValueError, TypeError: as `quantize_`.
    """
    with exclusive(model):
        return choose.choose_modules(
            model, format, filter=filter, ignore=ignore, linears=linears, scale_search=scale_search, layout=layout
        ).describe()


def dequantize_(model: Model) -> Model:
    """Undoes `quantize_`: returns 16-bit modules with the dequantized weights (the rounding to 4 bits remains).

    Each weight has its dtype from before, or the dtype of a later ``model.to(dtype)``, and its requires_grad.
    Customized modules (hooks, wrapped projections, ..., as in `quantize_`) and offloaded modules stay 4-bit, which is
    logged.

    Raises:
        ValueError: the model holds no packed modules, or none that can be replaced; it is unchanged then.
    """
    return dequantize_with_(model, {})


@torch.inference_mode(False)
@torch.no_grad()
def dequantize_with_(model: Model, needed: Mapping[str, nn.Module], *, only_needed: bool = False) -> Model:
    """Run `dequantize_`, with a ValueError before any change if one of `needed` (4-bit linears, by name) would stay.

    With `only_needed` all other modules stay 4-bit."""
    with exclusive(model):
        families: list[ExpertFamily] = [*families_of(model), DenseLinears()]
        chosen: Targets = {}
        skipped: Skipped = {}
        wrapped = wrapped_modules(model)

        def visit(module: nn.Module, name: str) -> bool:
            family = next((family for family in families if family.match_quantized(module)), None)
            if family is not None and only_needed and module not in needed.values():
                return False
            if family is not None:
                choose.choose_or_skip(module, Target(name, family), wrapped, chosen, skipped)
            return family is not None

        choose.walk(model, visit)
        for module in list(chosen):
            if has_hook(module) and any(buffer.is_meta for buffer in module.buffers()):
                skipped[module] = chosen.pop(module).name, "its weights are offloaded"
        for whole, (where, reason) in list(skipped.items()):
            for module in whole.modules():
                if module in chosen:
                    skipped[module] = chosen.pop(module).name, f"it is a part of {where!r}, which stays 4-bit: {reason}"
        if not chosen and not skipped:
            raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to dequantize")
        choose.refuse_root(model, chosen)
        replaced = {part for module in chosen for part in module.modules()}
        for name, linear in needed.items():
            if linear not in replaced:
                reasons = (reason for whole, (_, reason) in skipped.items() if linear in whole.modules())
                why = next(reasons, "it is unknown")
                raise ValueError(f"model: {name} cannot be replaced by a 16-bit module: {why}")
        choose.report_skipped(model, chosen, skipped, "4-bit")
        memo: dict[Any, Any] = {}
        swap(model, chosen, lambda module, family: family.restore(module, memo), "dequantizing")
        for family in families:
            family.finish(model)
        return model


@torch.inference_mode(False)
@torch.no_grad()
def to_layout_(model: Model, layout: str = "auto") -> Model:
    """Converts the weights of a quantized model to another layout in memory, exactly, in place.

    Call it for other kernels, or after a model that was quantized with a fixed layout has moved to another device
    (weights of layout "auto" follow the device by themselves). The weights get new memory: compiled models compile
    again, earlier state dicts keep the old tensors, and CUDA graphs have to be captured again. The shapes of the
    buffers tell their layout, so nothing reads one layout as another.

    Args:
        model: a module that holds NVFP4 modules.
        layout: as in `quantize_`: "auto" (also after a later move to another device), "linear" or "tiled_64x64".

    Returns:
        The same model.

    Raises:
        ValueError: an unknown layout, or one that a weight's shape does not fit, or the model holds no NVFP4 modules.
            The model is unchanged then.
    """
    require_module(model)
    choose.require_layout(layout)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}
    if not linears:
        raise ValueError(f"model: found no NVFP4 modules in {type(model).__name__}, nothing to lay out")
    wanted = {}
    for name, module in linears.items():
        n, k = module.out_features, module.in_features
        wanted[module] = resolve_layout(layout, module.qdata.device, n, k, module.format)
        choose.require_fit(wanted[module], name, n, k, module.format)
    # Modules that share memory, even through different buffers, share the new memory. All keep the old memory until the
    # first is converted. The lock keeps another thread from replacing half of the buffers meanwhile: their shapes would
    # tell of a layout that does not exist.
    with replacing:
        shared: dict[tuple[Any, ...], list[PackedModule]] = defaultdict(list)
        for module, own in wanted.items():
            module.auto_layout = layout == "auto"
            if module.layout != own:
                shared[tuple(_memory(buffer) for buffer in module.buffers(recurse=False))].append(module)
        for modules in shared.values():
            weight = lay_out(modules[0].packed_weight, wanted[modules[0]])
            for module in modules:
                module.set_weight(weight)
    return model


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key for the memory of a living tensor."""
    if tensor.is_meta:
        return (id(tensor),)
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
