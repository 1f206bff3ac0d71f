"""The torch.compile backend: ``torch.compile(model, backend="thunder_moe")``.
Called by torch.compile through the entry point `torch_dynamo_backends`, and by huggingface/generation.py; calls
compiled_graph.py with an inner compiler: inductor unless ``options={"thunder_moe.inner": ...}`` names another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from thunder_moe.compilers.dynamo.compiled_graph import compile_graph
from thunder_moe.compilers.report import torch_compile_wrapper


def thunder_moe_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Compile a graph of torch.compile whose frozen expert GEMMs run expert GEMMs with NVFP4 weights.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs; parameters are the real ones.
        mode: as inductor's ("reduce-overhead", "max-autotune", ...).
        options: the inner compiler's options, and ``"thunder_moe.inner"``: "inductor" (the default), "thunder",
            "eager", "aot_eager" or any other backend's name. ``"thunder_moe.attention"``: whether decode steps read
            keys and values without repeating them for the heads of a group, and causal masks become ``is_causal=True``:
            True, False, or None (the default) for on CUDA; not by Thunder. ``"thunder_moe.format"``: the number format
            of the weights, "nvfp4" (the default) or "mxfp8", or a function of a weight's qualified name and its
            `GroupedGemm` that names one; None leaves the weight 16-bit.
        dynamic: as inductor's.

    Returns:
        The callable that runs in place of the graph.

    Raises:
        ValueError: an unknown ``thunder_moe.`` option, or a value that one does not take, or two formats for the
            projections of one block of experts.
        NotImplementedError: called by ``aot_compile``, which saves what a backend returns.
    """
    if getattr(torch._functorch.config, "bypass_autograd_cache_key", False):  # torch sets it around the call
        raise NotImplementedError(
            "aot_compile: the backend 'thunder_moe' packs 16-bit weights at each call, which no file can hold: "
            "quantize_(model), then compile it with backend='inductor'"
        )
    options = dict(options or {})
    inner = options.pop("thunder_moe.inner", "inductor")
    attention = options.pop("thunder_moe.attention", None)
    format = options.pop("thunder_moe.format", None)
    unknown = [name for name in options if name.startswith("thunder_moe.")]
    if unknown:
        raise ValueError(
            f"options: got {unknown[0]!r}, wanted 'thunder_moe.inner', 'thunder_moe.attention' or 'thunder_moe.format'"
        )
    if attention not in (True, False, None):
        raise ValueError(f"options['thunder_moe.attention']: got {attention!r}, wanted True, False or None")
    if attention and inner == "thunder":
        raise ValueError("options['thunder_moe.attention']: got True with the inner compiler 'thunder', which has none")
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(f"options['thunder_moe.inner']: got {inner!r}, wanted the name of a compiler")
    chosen = dict(owner=_owner(), format=format, option="options['thunder_moe.format']")
    if inner == "thunder":
        if mode is not None:
            raise ValueError(f"mode: got {mode!r}, which the inner compiler 'thunder' does not have; leave it out")
        from thunder_moe.compilers.thunder import thunderfx
        from thunder_moe.compilers.thunder.executor import moe_executor

        return thunderfx.compile_graph(thunderfx.compiler_with(moe_executor, **options), gm, example_inputs, **chosen)
    if inner != "inductor":
        torch._dynamo.lookup_backend(inner)  # an unknown name fails here

    def compile_(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_inner(inner, graph_module, inputs, mode, options, dynamic)

    return compile_graph(gm, example_inputs, compile_, attention=attention, dynamic=dynamic, **chosen)


def compile_inner(
    inner: str, gm: fx.GraphModule, inputs: list[Any], mode: str | None, options: dict[str, Any], dynamic: bool | None
) -> Callable[..., Any]:
    """Compile a graph of dynamo's by another backend, such as inductor, by its name."""
    if inner == "inductor":
        inductor: Any = torch._TorchCompileInductorWrapper
        return cast("Callable[..., Any]", inductor(mode, options, dynamic)(gm, inputs))
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    return cast("Callable[..., Any]", torch._dynamo.lookup_backend(inner)(gm, inputs, **given))


def _owner() -> Any:
    """Return torch.compile's wrapper of its backend: it identifies a call of torch.compile, because each has its own.

    Dynamo's running translation holds it. None without a translation, for example if a user calls a backend directly.
    """
    try:
        translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    except AttributeError:
        return None
    return torch_compile_wrapper(translator.output.compiler_fn)
