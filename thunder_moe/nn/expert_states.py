"""State dicts of expert linears, with one tensor for all experts or one per expert.
Called by nn.grouped_linear and training.grouped_mlp; calls torch alone.

    stacked       weight (E, N, K), bias (E, N)
    per expert    weight0 (N, K), weight1, ..., bias0 (N,), bias1, ...
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

NAMES = ("weight", "bias")


def check_experts(state_dict: dict[str, Any], prefix: str, linear: nn.Module) -> list[str]:
    """Return the names of a linear's parameters, of weight and bias, that a state dict has per expert; some experts
    may be missing.

    Raises:
        ValueError: both forms of a name are there, or a tensor has another shape.
    """
    found = []
    num_experts = cast("int", linear.num_experts)
    for name in NAMES:
        parameter = linear._parameters.get(name)
        if parameter is None:
            continue
        keys = [key for expert in range(num_experts) if (key := f"{prefix}{name}{expert}") in state_dict]
        if not keys:
            continue
        if f"{prefix}{name}" in state_dict:
            raise ValueError(f"state_dict: got both {prefix}{name} and {keys[0]}, ..., wanted one of the two forms")
        wanted = tuple(parameter.shape[1:])
        for key in keys:
            if tuple(state_dict[key].shape) != wanted:
                raise ValueError(f"state_dict: got {key} of shape {tuple(state_dict[key].shape)}, wanted {wanted}")
        found.append(name)
    return found


def one_per_weight(
    state_dict: dict[str, Any], prefix: str, linear: nn.Module, missing_keys: list[str]
) -> dict[str, Any]:
    """Return a state dict with one tensor per weight for a linear, without TransformerEngine's `_extra_state`.

    Experts that are missing keep their numbers, and `missing_keys` gets their keys, as `load_state_dict` reports them.

    Raises:
        ValueError: as `check_experts`.
    """
    names = check_experts(state_dict, prefix, linear)
    num_experts, state_dict = cast("int", linear.num_experts), dict(state_dict)
    state_dict.pop(f"{prefix}_extra_state", None)
    for name in names:
        keys = [f"{prefix}{name}{expert}" for expert in range(num_experts)]
        missing = [key for key in keys if key not in state_dict]
        given = [state_dict.pop(key, None) for key in keys]
        missing_keys += missing
        if missing:
            own: Tensor = linear._parameters[name].detach()  # type: ignore[union-attr]
            if own.is_meta:  # it has no numbers to keep, and stays as it is
                continue
            own = own.to(next(each.device for each in given if each is not None))
            given = [old if each is None else each.to(own.dtype) for each, old in zip(given, own, strict=True)]
        state_dict[f"{prefix}{name}"] = torch.stack(given)
    return state_dict
