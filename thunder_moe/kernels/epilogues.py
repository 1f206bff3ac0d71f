"""The name that activations and routing had in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls activations and routing alone.
"""

from thunder_moe import activations
from thunder_moe.activations import pre_activation, swiglu
from thunder_moe.routing import (
    combine,
    expert_of_row,
    gather_rows,
    live_rows,
    route,
    row_groups,
    scale_of_rows,
    token_of_slot,
)

SwiGLU, PLAIN_SWIGLU = activations.GLU, activations.SWIGLU

__all__ = [
    "PLAIN_SWIGLU",
    "SwiGLU",
    "combine",
    "expert_of_row",
    "gather_rows",
    "live_rows",
    "pre_activation",
    "route",
    "row_groups",
    "scale_of_rows",
    "swiglu",
    "token_of_slot",
]
