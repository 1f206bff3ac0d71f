"""Checkpoints: NVFP4 and MXFP4 files read into `NVFP4Weight`s, ModelOpt files written, 16-bit ones converted.
Called by integrations and the command line; calls formats, dense_names, selection, progress and scratch.
"""

from thunder_moe.checkpoint.convert import LayerError, convert
from thunder_moe.checkpoint.experts import ExpertsLayout, ExpertWeights
from thunder_moe.checkpoint.reader import Checkpoint
from thunder_moe.checkpoint.writer import write_checkpoint

__all__ = ["Checkpoint", "ExpertWeights", "ExpertsLayout", "LayerError", "convert", "write_checkpoint"]
