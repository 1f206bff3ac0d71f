"""The formats of quantized checkpoints; re-exports alone. `interface` says what one is, `registry` lists them.
Called by pickles of version 0.1, which name these classes here; calls checkpoint.
"""

from thunder_moe.checkpoint.experts import ExpertsLayout
from thunder_moe.checkpoint.modules import ExpertBlock, Module

__all__ = ["ExpertBlock", "ExpertsLayout", "Module"]
