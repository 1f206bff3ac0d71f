"""The torch.compile backend: ``torch.compile(model, backend="thunder_moe")``.
Called by torch.compile through the entry point `torch_dynamo_backends`; calls rewrite.py, report.py and an inner
compiler, inductor unless ``options={"thunder_moe.inner": ...}`` names another.

graph of dynamo -> rewrite, report -> inner compiler. The layout of the packed weights is that which the kernels of
their device read best, an argument of the operators. At each call the packed weights come from the cache, so one graph
serves all layers that share it, changed and replaced weights are seen, and addresses stay (CUDA graphs).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from thunder_moe.compilers.dynamo.expert_linears import positional_grouped_mm
from thunder_moe.compilers.dynamo.nodes import traced_frame
from thunder_moe.compilers.dynamo.rewrite import Rewritten, grouped_gemms, rewrite
from thunder_moe.compilers.dynamo.scopes import copy_of
from thunder_moe.compilers.eligibility import Format, GroupedGemm, choosing_format
from thunder_moe.compilers.report import RewriteEntry, record, record_later, rewrite_report
from thunder_moe.compilers.safety import is_hidden_training_forward

__all__ = ["thunder_moe_backend"]


def thunder_moe_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """A backend of torch.compile that runs frozen expert GEMMs with NVFP4 weights.

    Args:
        gm: dynamo's graph.
        example_inputs: its inputs; parameters are the real ones.
        mode: as inductor's ("reduce-overhead", "max-autotune", ...).
        options: as inductor's, and ``"thunder_moe.inner"``: "inductor" (the default), "thunder", "eager", "aot_eager"
            or any other backend's name. ``"thunder_moe.attention"``: whether decode steps read keys and values without
            repeating them for the heads of a group: True, False, or None (the default) for on CUDA; not by Thunder.
            ``"thunder_moe.format"``: the number format of the weights, "nvfp4" (the default) or "mxfp8", or a function
            of a weight's qualified name and its `GroupedGemm` that names one; None leaves the weight 16-bit.
        dynamic: as inductor's.

    Returns:
        What runs in place of the graph.

    Raises:
        ValueError: an unknown ``thunder_moe.`` option, or a value that one does not take, or two formats for the
            projections of one block of experts.
    """
    options = dict(options or {})
    inner = options.pop("thunder_moe.inner", "inductor")
    attention = options.pop("thunder_moe.attention", None)
    format = options.pop("thunder_moe.format", None)
    unknown = [name for name in options if name.startswith("thunder_moe.")]
    if unknown:
        raise ValueError(
            f"options: got {unknown[0]!r}, those of thunder_moe are 'thunder_moe.inner', 'thunder_moe.attention' and"
            " 'thunder_moe.format'"
        )
    if attention not in (True, False, None):
        raise ValueError(f"options['thunder_moe.attention']: got {attention!r}, wanted True, False or None")
    if attention and inner == "thunder":
        raise ValueError("options['thunder_moe.attention']: got True with the inner compiler 'thunder', which has none")
    owner = _owner(sys._getframe(1))
    if not isinstance(inner, str) and not callable(inner):
        raise TypeError(f"options['thunder_moe.inner']: got {inner!r}, wanted the name of a compiler")
    if inner not in ("inductor", "thunder"):
        torch._dynamo.lookup_backend(inner)  # an unknown name fails here
    if inner == "thunder":
        with choosing_format("options['thunder_moe.format']", format):
            return _compile_with_thunder(gm, example_inputs, owner, format)

    def compile_(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return _compile(inner, graph_module, inputs, mode, options, dynamic)

    new = copy_of(gm)
    with choosing_format("options['thunder_moe.format']", format):
        rewritten, decisions, attended = rewrite(new, example_inputs, attention)
    record(owner, decisions, traced_frame(gm.graph), attended)
    compiled = compile_(new, rewritten.inputs(example_inputs))
    if not rewritten.packs:
        return _runner(rewritten, compiled) if rewritten.watched else compiled
    original = copy_of(gm)
    for module in original.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.clear()
    return _runner(rewritten, compiled, torch.compile(original, backend=compile_, dynamic=dynamic))


def _runner(
    rewritten: Rewritten, compiled: Callable[..., Any], in_16_bit: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The callable that replaces dynamo's graph.

    Args:
        rewritten: how the inputs become those of the rewritten graph.
        compiled: the rewritten graph.
        in_16_bit: dynamo's graph, for calls that nothing but a look at each can tell from others: training forwards
            (dynamo guards on the grad mode alone, and before torch 2.13 not on what its parameters require), and those
            given an input that the graph changes and that shares its memory with a packed weight, or with another input
            where it did not before. None where no weight is packed.
    """

    def run(*given: Any) -> Any:
        hidden = is_hidden_training_forward()
        if in_16_bit is not None:
            trains = hidden or torch.is_grad_enabled() or rewritten.enables_grad
            thawed = trains and rewritten.is_thawed(given)
            if thawed:
                rewritten.declare_thawed(given)
            shares = rewritten.writes_read(given)
            if shares:
                rewritten.declare_shared()
            if thawed or shares or (hidden and rewritten.watched):
                rewritten.declare_trained(given, hidden=hidden)
                return in_16_bit(*given)
        inputs = rewritten.inputs(given)
        rewritten.declare_trained(given, hidden=hidden)
        return compiled(*inputs)

    return run


def _compile(
    inner: str, gm: fx.GraphModule, inputs: list[Any], mode: str | None, options: dict[str, Any], dynamic: bool | None
) -> Callable[..., Any]:
    if inner == "inductor":
        inductor: Any = torch._TorchCompileInductorWrapper
        return cast("Callable[..., Any]", inductor(mode, options, dynamic)(gm, inputs))
    given = {name: value for name, value in (("mode", mode), ("options", options)) if value}
    return cast("Callable[..., Any]", torch._dynamo.lookup_backend(inner)(gm, inputs, **given))


def _compile_with_thunder(
    gm: fx.GraphModule, inputs: Sequence[Any], owner: Any, format: Format | None
) -> Callable[..., Any]:
    """Hands the graph to thunderfx with moe_executor, which does the rewrite by the same predicate."""
    from thunder_moe.compilers.thunder.compat import thunderfx_compile
    from thunder_moe.compilers.thunder.executor import moe_executor
    from thunder_moe.compilers.thunder.rewrite import OPTION

    gemms = grouped_gemms(gm, inputs)
    positional_grouped_mm(gm)
    compiler, compiled = thunderfx_compile(gm, inputs, moe_executor, **({} if format is None else {OPTION: format}))

    def entries() -> list[RewriteEntry]:
        functions = [fn for info in compiler.subgraph_infos for fn in info.thunder_compiled_fns]
        found = [entry for fn in functions for entry in rewrite_report(fn)]
        # Thunder knows other names than dynamo does. What it cannot trace it hands to inductor without a word.
        taken = Counter(_sizes(entry.gemm) for entry in found)
        for gemm in gemms:
            taken[_sizes(gemm)] -= 1
            if taken[_sizes(gemm)] < 0:
                found.append(RewriteEntry(0, gemm, "16-bit", "Thunder leaves it to inductor"))
        return found

    record_later(owner, entries, traced_frame(gm.graph))
    return compiled


def _sizes(gemm: GroupedGemm) -> tuple[int, int, int]:
    return gemm.experts, gemm.out_features, gemm.in_features


def _owner(frame: Any) -> Any:
    """The wrapper with which torch.compile calls its backend: one per torch.compile, so it stands for the function."""
    caller = frame.f_locals.get("self")
    return caller if isinstance(caller, torch._TorchCompileWrapper) else None
