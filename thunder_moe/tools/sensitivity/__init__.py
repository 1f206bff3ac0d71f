"""Measures the loss of a model with each block of experts in each number format, and chooses formats within a budget.
Called by users and the command line; re-exports alone. `load_formats` reads a choice for `quantize_`.
"""

from thunder_moe.tools.sensitivity.budget import Choice, choose_formats
from thunder_moe.tools.sensitivity.formats_file import load_formats
from thunder_moe.tools.sensitivity.measure import BlockLoss, Sensitivity, measure_sensitivity

__all__ = ["BlockLoss", "Choice", "Sensitivity", "choose_formats", "load_formats", "measure_sensitivity"]
