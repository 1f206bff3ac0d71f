"""4-bit experts under transformers' expert and tensor parallelism (`DistributedConfig`): what a rank has of them.
Called by quantizer, loading, writing, state_dicts and lora_files; calls experts.

Transformers shards a module by the style that a plan names for it: "ep_dispatch_experts" gives each rank whole experts,
"moe_tp_experts" a share of the intermediate features of all. Its styles shard parameters, which packed weights are not:
`cut_as_planned` cuts these when transformers has resolved the plans, and its styles then install their forwards.

Legend: T tokens, A = top_k, H hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from thunder_moe.checkpoint.experts import UNSHARDED, ExpertsPart
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.huggingface.sharded_forward import AllReduce, Registry, by_layer
from thunder_moe.nn.linear import NVFP4Linear

AVAILABLE = Registry is not None  # transformers 5.23
# Styles of dense layers that 4-bit ones take -> the dimension of their weight that processes share: output or input
# features. Where results are gathered at once, or nothing is shared, each process has the layer whole.
_DENSE_STYLES = {"colwise": 1, "rowwise": 2, "colwise_gather_output": 0, "colwise_rep": 0, "replicate": 0}
_EP_STYLE, _TP_STYLE = "ep_dispatch_experts", "moe_tp_experts"


def refuse_parallel(model: Any) -> None:
    """Raise a ValueError for a load on several processes that cannot shard 4-bit experts: pipelines, an old
    transformers."""
    config = getattr(model.config, "distributed_config", None)
    if config is None and getattr(model, "_device_mesh", None) is None:
        return
    require_available()
    if config is not None and config.pp_size > 1:
        raise ValueError(
            f"distributed_config: got pp_size {config.pp_size}, wanted 1: 4-bit experts are loaded by expert and tensor"
            " parallelism (ep_size, tp_size, fsdp_size)"
        )


def require_available() -> None:
    """Raise a ValueError where transformers is too old to load 4-bit experts on several processes."""
    if not AVAILABLE:
        raise ValueError(
            f"distributed_config: got one (or a tp_plan) with transformers {transformers.__version__}, wanted"
            " transformers >= 5.23 for 4-bit experts on several processes"
        )


def part_of(model: nn.Module) -> str | None:
    """Return what this process has a part of, if it has a part of a layer's experts or of a dense layer."""
    for name, module in model.named_modules():
        if isinstance(module, NVFP4Experts) and not module.part.is_unsharded:
            return f"{name} is a part of its experts ({module.part})"
        if isinstance(module, NVFP4Linear) and module.process_part is not None:
            return f"{name} is a part of its weight"
    return None


def refuse_part(model: nn.Module, wanted: str) -> None:
    """Raise a ValueError where this process has a part of a layer's experts or of a dense layer."""
    if (part := part_of(model)) is not None:
        raise ValueError(f"model: {part}, wanted a model {wanted}")


def add_rules(model: Any, plan: dict[str, str]) -> None:
    """Add a rule for 4-bit experts to a model's tp_plan or ep_plan where transformers has none for the architecture.
    Remove rules of parameters that only the 16-bit form has.

    Experts of Llama 4 are dispatched, because the 4-bit form routes; experts of GPT-OSS have shares of the features.
    """
    if not AVAILABLE:
        return
    style = _EP_STYLE if plan is model.ep_plan else _TP_STYLE
    own = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    names = {by_layer(name) for name in own}
    for path, module in model.named_modules():
        if isinstance(module, NVFP4Experts):
            name = by_layer(path)
            plan.setdefault(name, style)
            for rule in [rule for rule in plan if rule.startswith(f"{name}.") and rule not in names]:
                del plan[rule]


def cut_(experts: NVFP4Experts, part: ExpertsPart, mesh: Any = None) -> None:
    """Reduce 4-bit experts, on "meta" or with weights, to one of the parts that the processes of a mesh share.

    Raises:
        ValueError: the ranks cannot share them evenly, or the experts compute something that is of all features.
    """
    assert experts.part is UNSHARDED
    form, first, second = experts.form, experts.gate_up_proj, experts.down_proj
    if part.feature_ranks > 1 and (form.post_norm or (form.gated and form.swiglu is None)):
        raise ValueError(
            f"tp_plan: {experts.experts_class.__name__} ({form}) computes with all features of an expert, wanted"
            " expert parallelism: ep_size"
        )
    own, parts, size = part.experts(first.num_experts), 2 if form.gated else 1, second.format.block_size
    part.features(second.in_features, size)  # the shares have whole blocks
    rows = part.rows(first.out_features, parts)
    first.narrow_(0, part.expert_rank, part.expert_ranks)
    first.narrow_(1, part.feature_rank, part.feature_ranks, parts)
    second.narrow_(0, part.expert_rank, part.expert_ranks)
    second.narrow_(2, part.feature_rank, part.feature_ranks)
    for name, kept in (("gate_up_bias", rows), ("down_bias", [slice(None)])):
        if (bias := getattr(experts, name)) is not None:
            value = torch.cat([bias.detach()[own, each] for each in kept], 1)
            value = torch.zeros_like(value) if name == "down_bias" and part.feature_rank else value
            experts.register_parameter(name, nn.Parameter(value, requires_grad=bias.requires_grad))
    if part.expert_ranks > 1:
        experts.num_experts = own.stop - own.start
    experts.note_part(part, mesh)


def cut_as_planned(model: Any) -> None:
    """Make transformers cut the 4-bit modules of a model that it is loading, once it has resolved the model's plans.

    The model's own `_resolve_parallel_plans` is replaced until transformers has called it; a load by one process does
    not, and takes it back after the weights.
    """
    if not AVAILABLE:
        return
    resolve = model._resolve_parallel_plans

    def resolve_and_cut(config: Any) -> tuple[dict[str, str], ...]:
        keep_plans(model)
        tp_plan, ep_plan, fsdp_plan = resolve(config)
        for dim, plan in (("tp", tp_plan), ("ep", ep_plan)):
            if plan:
                _cut_modules(model, plan, model._mesh_manager.get_mesh(dim))
        return tp_plan, ep_plan, fsdp_plan

    model._resolve_parallel_plans = resolve_and_cut


def keep_plans(model: Any) -> None:
    """End `cut_as_planned`; do nothing where transformers has resolved the plans already."""
    vars(model).pop("_resolve_parallel_plans", None)


def _cut_modules(model: nn.Module, plan: dict[str, str], mesh: Any) -> None:
    """Cut the 4-bit modules of a model on "meta" that a resolved plan names, and remove the rules that do not apply."""
    modules, rank, size = dict(model.named_modules()), mesh.get_local_rank(), mesh.size()
    for name, style in [*plan.items()]:
        module = modules.get(name)
        if isinstance(module, NVFP4Experts):
            if style == _EP_STYLE:
                cut_(module, ExpertsPart(expert_rank=rank, expert_ranks=size), mesh)
            elif style == _TP_STYLE:
                cut_(module, ExpertsPart(feature_rank=rank, feature_ranks=size), mesh)
        elif isinstance(module, NVFP4Linear) and style in _DENSE_STYLES:
            if dim := _DENSE_STYLES[style]:
                module.narrow_(dim, rank, size)
                module.process_part = (dim, rank, size)
                vars(module)["process_mesh"] = mesh
                vars(module)["_hf_quantized_needs_local_tp"] = True  # transformers' word for a weight without DTensor
            else:
                for rule in (name, f"{name}.bias"):
                    plan.pop(rule, None)
    for name, module in modules.items():
        if isinstance(module, NVFP4Experts):
            for rule in [rule for rule in plan if rule.startswith(f"{name}.")]:  # of 16-bit weights
                del plan[rule]


def dispatch_weighted_rows(model: Any) -> None:
    """Make dispatched experts whose weights multiply the input (Llama 4) send weighted rows, once transformers has
    installed its forwards. Its all-reduce alone hands the weights on to the experts."""
    for module in model.modules():
        dispatched = isinstance(module, NVFP4Experts) and module.form.weight_on_input and module.part.expert_ranks > 1
        if dispatched and Registry()[model.config.distributed_config.ep_implementation] is not AllReduce:
            module.forward = _weighted_ahead(module.forward)


def _weighted_ahead(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the forward of dispatched experts whose weights multiply the input (Llama 4).

    transformers multiplies the results by the weights, so each (token, expert) pair is sent as a weighted row with the
    weight 1.
    """

    def weighted(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, top_k = top_k_index.shape
        rows = (hidden_states[:, None] * top_k_weights[..., None]).to(hidden_states.dtype).flatten(0, 1)  # [T * A, H]
        ones = torch.ones_like(top_k_weights).reshape(-1, 1)
        out = forward(rows, top_k_index.reshape(-1, 1), ones)
        return out.view(tokens, top_k, -1).sum(1)

    return weighted
