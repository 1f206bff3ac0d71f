"""The name of huggingface.llama4 in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls huggingface.llama4, and for run_routed huggingface.thunder_llama4, alone.
"""

from typing import Any

from thunder_moe.integrations.huggingface.llama4 import Llama4TextMoe, RoutedLlama4TextMoe, check_layer

__all__ = ["Llama4TextMoe", "RoutedLlama4TextMoe", "check_layer", "run_routed"]  # noqa: F822


def __getattr__(name: str) -> Any:
    if name != "run_routed":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from thunder_moe.integrations.huggingface.thunder_llama4 import run_routed  # imports Thunder

    return run_routed
