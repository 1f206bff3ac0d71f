"""`PackedQuantizer`: what both quantizers do around a load, and their answers to transformers' questions after it.
Base of NVFP4CheckpointQuantizer (quantizer) and ThunderMoeQuantizer (on_load); calls sharding and saving.

Pipeline: transformers makes the skeleton on "meta" -> `prepare` -> transformers loads -> `finish`.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import local_torch_dtype
from transformers.quantizers.base import HfQuantizer

from thunder_moe.checkpoint.files import require_inside
from thunder_moe.integrations.huggingface.saving import mark_quantized
from thunder_moe.integrations.huggingface.sharding import refuse_parallel


class PackedQuantizer(HfQuantizer):
    """A load that makes packed weights of this package.

    Transformers asks the properties only where it does not call the `QuantizedModel` itself.
    """

    def prepare(self, model: Any, files: list[Path]) -> None:
        """Prepare the skeleton of a model for the weights of its safetensors files."""
        raise NotImplementedError

    def finish(self, model: Any) -> None:
        """Check the shapes of what transformers has loaded, and complete the model."""
        raise NotImplementedError

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        refuse_parallel(model)
        directory = str(model.name_or_path)
        if checkpoint_files and os.path.isdir(directory):
            require_inside(checkpoint_files, Path(directory))
        tensors = chain(model.named_parameters(), model.named_buffers())
        self._shapes = {name: tensor.shape for name, tensor in tensors}
        # transformers calls this under the model's dtype as the default one, which must not reach further.
        with local_torch_dtype(torch.float32):
            self.prepare(model, [Path(file) for file in checkpoint_files or () if str(file).endswith(".safetensors")])

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self.finish(model)
        mark_quantized(model)

    def check_shapes(self, model: Any) -> None:
        """Raise a ValueError for a tensor of the file that took the place of one of another shape, which some versions
        of transformers let pass when a model has a quantizer."""
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            wanted = self._shapes.get(name, tensor.shape)
            if tensor.shape != wanted:
                raise ValueError(f"checkpoint: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(wanted)}")

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Return False: `QuantizedModel` writes these models, transformers' own ``save_pretrained`` cannot."""
        return False

    # Gradients flow through the frozen 4-bit weights to routers, norms and adapters; without adapters, too.
    is_trainable = is_qat_trainable = is_compileable = True


def mark_initialized(*things: nn.Module | nn.Parameter) -> None:
    """Tell transformers that it need not initialise parameters, or the parameters of modules."""
    for thing in things:
        vars(thing)["_is_hf_initialized"] = True
