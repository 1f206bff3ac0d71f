"""The name of huggingface.quantizer in version 0.1, for pickles of whole models.
Called by unpickling; calls huggingface.quantizer alone.
"""

from thunder_moe.integrations.huggingface.quantizer import NVFP4CheckpointConfig, NVFP4CheckpointQuantizer

__all__ = ["NVFP4CheckpointConfig", "NVFP4CheckpointQuantizer"]
