"""What nvFuser's tests/python/test_moe.py asserts of thunderfx on a Llama 4 layer, for NVFP4 experts on a CPU: one
subgraph, no reason for a split, and its tolerances, against the dequantized layer. Called by pytest.
"""

import copy

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from thunder.dynamo import thunderfx
from torch import nn

from thunder_moe import Llama4MoE, Llama4MoEConfig, dequantize_, moe_executor, quantize_, rewrite_report

BF16 = torch.bfloat16
TOLERANCES = dict(atol=1e-2, rtol=1e-2)  # nvFuser's


@pytest.mark.parametrize("beforehand", [True, *others_slow([False], exhaustive=True)])
@torch.no_grad()
def test_llama4_moe_by_thunderfx(beforehand):
    torch.manual_seed(0)
    config = Llama4MoEConfig(hidden_size=128, intermediate_size=256, num_routed_experts=8)
    in_16_bits = Llama4MoE(config, dtype=BF16).requires_grad_(False)
    for name, weight in in_16_bits.named_parameters():
        # Results of about 0.3: the roundings of 16 bits stay within the tolerances, the errors of 4 bits do not.
        nn.init.normal_(weight, std=(4 if name == "router.weight" else 0.8) * weight.shape[-1] ** -0.5)
    x = torch.randn(1, 64, config.hidden_size, dtype=BF16)
    model = quantize_(copy.deepcopy(in_16_bits))
    dequantized = dequantize_(copy.deepcopy(model))
    expected = dequantized(x)
    assert expected.shape == x.shape
    assert expected.dtype == BF16

    compiled = thunderfx(model if beforehand else in_16_bits, executors=[moe_executor], nv_enable_linear=True)
    actual = compiled(x)

    assert len(compiled._backend.subgraph_infos) == 1
    assert len(compiled._backend.subgraph_infos[0].split_reasons) == 0
    assert len(rewrite_report(compiled).rewritten) == (2 if beforehand else 3)
    torch.testing.assert_close(actual, expected, **TOLERANCES)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(actual, in_16_bits(x), **TOLERANCES)
    assert relative_error(actual, in_16_bits(x)) < 0.2
