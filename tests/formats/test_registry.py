"""Every number format by its registry entry: its sizes are those of what it quantizes, and it decodes what it packs.
Called by pytest.
"""

import pytest
import torch
from oracle import relative_error

from thunder_moe.formats.registry import FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_what_its_entry_says(name):
    number_format = FORMATS[name]
    assert number_format.name == name
    weight = torch.randn(2, 64, 8 * number_format.block_size)
    packed = number_format.quantize(weight)
    bits = 8 * (packed.qdata.nbytes + packed.scale.nbytes)
    assert bits == number_format.bits_per_weight * weight.numel()
    assert packed.scale.numel() * number_format.block_size == weight.numel()
    decoded = number_format.dequantize(packed, torch.float32)
    assert 0 < relative_error(decoded, weight) < 0.12
    assert torch.equal(number_format.dequantize(number_format.quantize(decoded), torch.float32), decoded)
