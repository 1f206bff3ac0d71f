"""The name of huggingface.forms in version 0.1, for pickles of whole models.
Called by unpickling; calls huggingface.forms alone.
"""

from thunder_moe.integrations.huggingface.forms import ExpertsForm

__all__ = ["ExpertsForm"]
