"""Extend vLLM's text model of Llama 4 by a reader of fused experts, as nvidia-modelopt writes them.
Called by vLLM for checkpoints that configs claims: configs puts the name of this class into their `architectures`.
llama4_images extends the model of images and text; its vLLM class needs torchvision.

A projection's experts are one tensor, K before N, gate's rows first, then up's: `experts.gate_up_proj` and
`experts.down_proj`, with `_weight_scale`, `_weight_scale_2` and `_input_scale`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from vllm.model_executor.models.llama4 import Llama4ForCausalLM

_FUSED = re.compile(r"^(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<field>_\w+)?$")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class PerExpert:
    """A model class's base that passes fused experts to vLLM's loader expert by expert."""

    config: Any

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._per_expert(weights))  # type: ignore[misc]

    def _per_expert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of one expert's projection each; one number for all experts is repeated."""
        experts = self.config.get_text_config().num_local_experts
        for name, tensor in weights:
            match = _FUSED.match(name)
            if match is None:
                yield name, tensor
                continue
            projections, field = _PROJECTIONS[match["projection"]], (match["field"] or "_weight")[1:]
            for expert, part in enumerate(tensor.expand(experts, *tensor.shape[1:])):
                parts = part.mT.chunk(len(projections)) if part.ndim else [part] * len(projections)
                for projection, rows in zip(projections, parts, strict=True):
                    yield f"{match['experts']}.{expert}.{projection}.{field}", rows


class ThunderLlama4ForCausalLM(PerExpert, Llama4ForCausalLM):  # type: ignore[misc]
    """vLLM's text model, whose own loader looks for the scales under names that no parameter has."""
