"""Conversion of each architecture: 16-bit checkpoint -> convert -> load_checkpoint gives the logits of quantize_.
Called by pytest; `quantize_` itself is judged by test_hf_experts.py.
"""

import pytest
import torch
from tiny_models import ARCHITECTURES, OTHERS, tiny_model, tokens

from thunder_moe import load_checkpoint, quantize_
from thunder_moe.checkpoint import convert

SPECIAL = ("gemma4", "granitemoe", "nemotron_h", "qwen3_vl_moe")  # tied, of other names, without a gate, transposed
NAMES = [
    pytest.param(name, marks=() if name in (*ARCHITECTURES, *SPECIAL) else pytest.mark.slow)
    for name in (*ARCHITECTURES, *OTHERS)
]


def logits_of(model):
    with torch.no_grad():
        return model.eval()(tokens(batch=1)).logits


@pytest.mark.parametrize("name", NAMES)
def test_conversion_gives_what_quantize_gives(tmp_path, name):
    model = tiny_model(name, torch.bfloat16)
    stock = logits_of(model).float()
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    loaded, wanted = logits_of(load_checkpoint(tmp_path / "out")), logits_of(quantize_(model))
    if name != "gpt_oss":
        assert torch.equal(loaded, wanted)
    else:  # fused experts share one global scale in the file: other roundings, the same error
        errors = [(logits.float() - stock).norm() / stock.norm() for logits in (loaded, wanted)]
        assert 0 < errors[0] < 1.2 * errors[1]
