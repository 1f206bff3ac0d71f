"""The name of huggingface.forms in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls huggingface.forms and formats.gate_up alone.
"""

from thunder_moe.formats.gate_up import deinterleave as halves
from thunder_moe.formats.gate_up import interleave
from thunder_moe.integrations.huggingface.forms import (
    ExpertsForm,
    apply_gate,
    form_of,
    has_experts,
    not_plain_experts,
    require_form,
    stored_weights,
)

__all__ = [
    "ExpertsForm",
    "apply_gate",
    "form_of",
    "halves",
    "has_experts",
    "interleave",
    "not_plain_experts",
    "require_form",
    "stored_weights",
]
