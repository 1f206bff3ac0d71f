"""The name of huggingface.llama4 in version 0.1, for pickles of whole models.
Called by unpickling; calls huggingface.llama4 alone.
"""

from thunder_moe.integrations.huggingface.llama4 import RoutedLlama4TextMoe

__all__ = ["RoutedLlama4TextMoe"]
