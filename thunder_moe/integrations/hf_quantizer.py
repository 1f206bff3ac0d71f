"""The name of huggingface.quantizer in version 0.1, for pickles of whole models and for users.
Called by unpickling and users; calls huggingface.quantizer alone.
"""

from thunder_moe.integrations.huggingface.quantizer import (
    METHOD,
    NVFP4CheckpointConfig,
    NVFP4CheckpointQuantizer,
    register,
)

__all__ = ["METHOD", "NVFP4CheckpointConfig", "NVFP4CheckpointQuantizer", "register"]
