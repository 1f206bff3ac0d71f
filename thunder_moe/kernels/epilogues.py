"""The name that activations.GLU had in version 0.1, for pickles of whole models.
Called by unpickling; calls activations alone.
"""

from thunder_moe import activations

SwiGLU = activations.GLU

__all__ = ["SwiGLU"]
