"""Layout "tiled_64x64" of MXFP8 weights: the bytes are those that its comments describe, and they come back.
Called by pytest; judged by loops over indices.
"""

import itertools

import torch

from thunder_moe.formats.mxfp8_tiled_64x64 import from_tiled, to_tiled

TAKEN, WORD = 0x87F087F0, 0xFFFFFFFF


def random_weight(experts, n, k, scales):
    codes = torch.randint(0, 256, (experts, n, k), dtype=torch.uint8)
    scale = torch.randint(0, scales, (experts, n, k // 32), dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)


def bits(tensor):
    return tensor.view(torch.uint8)


def code(half):
    assert half & ~0x87F0 == 0
    return half >> 8 & 0x80 | half >> 4 & 0x7F


def test_any_bytes_come_back():
    qdata, scale = random_weight(2, 128, 192, 167)
    tiled = to_tiled(qdata, scale)
    assert tiled[0].shape == qdata.shape
    assert tiled[1].shape == scale.shape
    for back, first in zip(from_tiled(*tiled), (qdata, scale), strict=True):
        assert torch.equal(bits(back), bits(first))


def test_scales_that_the_kernels_do_not_reach_become_nan():
    qdata, scale = random_weight(1, 64, 64, 167)
    scale = bits(scale).clone()
    scale[0, 5, 1], scale[0, 9, 0] = 167, 254
    back = bits(from_tiled(*to_tiled(qdata, scale.view(torch.float8_e8m0fnu)))[1])
    assert back[0, 5, 1] == back[0, 9, 0] == 255
    assert int((back != scale).sum()) == 2


def test_tiled_order_by_index():
    qdata, scale = random_weight(1, 128, 128, 167)
    tiled = to_tiled(qdata, scale)
    codes, scales = bits(qdata)[0].tolist(), bits(scale)[0].tolist()
    words = bits(tiled[0]).flatten().view(torch.int32).view(2, 2, 4, 2, 8, 4, 2, 2).tolist()
    scale_words = bits(tiled[1]).flatten().view(torch.int32).view(2, 2, 4, 8).tolist()
    for n, k, w, g in itertools.product(range(2), range(2), range(4), range(8)):
        row = 64 * n + 16 * w + g
        for p, t, s, i in itertools.product(range(2), range(4), range(2), range(2)):
            word, at = words[n][k][w][p][g][t][s][i] & WORD, 64 * k + 32 * p + 16 * s + 8 * i + 2 * t
            registers = word & TAKEN, (word << 4 & WORD ^ word >> 4) & TAKEN
            for register, of in zip(registers, (row, row + 8), strict=True):
                assert [code(register & 0xFFFF), code(register >> 16)] == codes[of][at : at + 2]
        word = scale_words[n][k][w][g] & WORD
        exponents = [(word >> 7 | word << 25) >> 8 * byte & 0xFF for byte in range(4)]
        assert [exponent - 88 for exponent in exponents] == scales[row][2 * k : 2 * k + 2] + scales[row + 8][
            2 * k : 2 * k + 2
        ]
