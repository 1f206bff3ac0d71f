"""MXFP4 to NVFP4: the same values, to the bit, or an error. Called by pytest; judged by decoding both by arithmetic."""

import pytest
import torch
from checkpoint_files import copy_export, edit_tensors
from oracle import decode_e2m1
from oracle import dequantize as oracle_dequantize

from thunder_moe.checkpoint import Checkpoint
from thunder_moe.formats.mxfp4 import mxfp4_to_nvfp4


def decode_mxfp4(blocks, scales):
    """fp64 (E, N, K), value by value."""
    values = torch.tensor([decode_e2m1(code) for code in range(16)], dtype=torch.float64)
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()  # [E, N, K // 32, 32]
    return (values[codes] * torch.pow(2.0, scales.double() - 127)[..., None]).flatten(-2)


def make(exponents, n=4, k=64):
    """Random codes, and scales drawn from `exponents` (E, 1 or N, ...) shifted ranges: (least, most) per expert."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (len(exponents), n, k // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.stack(
        [torch.randint(low + 127, high + 128, (n, k // 32), generator=generator) for low, high in exponents]
    )
    for expert, (low, high) in enumerate(exponents):  # both ends are there
        scales[expert, 0, 0], scales[expert, 0, 1] = low + 127, high + 127
    return blocks, scales.to(torch.uint8)


def assert_exact(blocks, scales):
    weight = mxfp4_to_nvfp4(blocks, scales)
    expected = decode_mxfp4(blocks, scales)
    assert torch.equal(oracle_dequantize(*weight.tensors()).double(), expected)
    assert torch.equal(weight.qdata, blocks.flatten(-2))
    return weight


def test_one_global_scale_where_the_exponents_allow():
    weight = assert_exact(*make([(-12, 5), (-10, 0), (-3, -3)]))
    assert weight.global_scale.tolist() == [2.0**-3] * 3  # 5 - 8, so that the largest block scale is 2**8


def test_a_global_scale_per_expert_or_per_row():
    assert assert_exact(*make([(-12, 5), (-13, 0), (-40, -30)])).global_scale.shape == (3,)
    blocks, scales = make([(-4, 4), (-4, 4)])
    scales[0, 1] += 60
    assert assert_exact(blocks, scales).global_scale.shape == (2, 4)


def test_exponents_at_the_ends():
    # E8M0 from 2**-127; codes of 6 at 2**124 are the largest that float32 products hold.
    assert_exact(*make([(-127, -111), (107, 124)]))
    assert_exact(*make([(-127, -127)]))


def test_a_scale_for_each_block_of_16():
    blocks, scales = make([(-12, 5), (-3, 0)])
    halves, twice = blocks.unflatten(-1, (2, 8)).flatten(2, 3), scales.repeat_interleave(2, -1)
    one, other = mxfp4_to_nvfp4(blocks, scales), mxfp4_to_nvfp4(halves, twice)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def test_zeros_have_no_exponent():
    blocks, scales = make([(-12, 5)])
    blocks[0, 1, 0], scales[0, 1, 0] = 0, 0
    blocks[0, 2, 1], scales[0, 2, 1] = 0x80, 254  # minus zero
    blocks[0, 3], scales[0, 3] = 0x08, 255  # a row of zeros whose scales are NaN
    weight = mxfp4_to_nvfp4(blocks, scales)
    live = torch.tensor([0, 1, 2])
    assert torch.equal(oracle_dequantize(*weight.tensors())[0, live].double(), decode_mxfp4(blocks, scales)[0, live])
    assert torch.equal(oracle_dequantize(*weight.tensors())[0, 3], torch.zeros(64))
    assert_exact(torch.zeros(2, 3, 1, 16, dtype=torch.uint8), torch.zeros(2, 3, 1, dtype=torch.uint8))


def test_a_spread_of_18_has_no_nvfp4():
    assert_exact(*make([(0, 17)]))
    blocks, scales = make([(0, 17), (-1, 17)])
    with pytest.raises(ValueError, match="scales: got exponents from -1 to 17 in row 0 of expert 1, wanted"):
        mxfp4_to_nvfp4(blocks, scales)


def test_bad_input():
    blocks, scales = make([(0, 1)])
    with pytest.raises(ValueError, match=r"blocks: got torch.int32 \(1, 4, 2, 16\), wanted uint8 \(experts, rows"):
        mxfp4_to_nvfp4(blocks.int(), scales)
    with pytest.raises(ValueError, match=r"scales: got torch.uint8 \(1, 4, 1\), wanted uint8 \(1, 4, 2\)"):
        mxfp4_to_nvfp4(blocks, scales[..., :1])
    scales[0, 2, 1] = 255
    with pytest.raises(ValueError, match=r"scales: got NaN \(255\)"):
        mxfp4_to_nvfp4(blocks, scales)


def test_the_error_names_file_and_tensor(tmp_path):
    copy, name = copy_export(tmp_path, "mxfp4_gpt_oss"), "model.layers.0.mlp.experts"

    def spread(tensors):
        tensors[f"{name}.down_proj_scales"][0, 0, 0] = 90
        tensors[f"{name}.down_proj_scales"][0, 0, 1] = 130

    edit_tensors(copy, spread)
    wanted = rf"model.safetensors: tensor '{name}.down_proj_scales' cannot become NVFP4: scales: got exponents from -37"
    with pytest.raises(ValueError, match=wanted):
        Checkpoint(copy).read_experts(name)
    edit_tensors(copy, lambda tensors: tensors.pop(f"{name}.down_proj_scales"))
    with pytest.raises(
        ValueError, match=rf"model.safetensors: tensor '{name}.down_proj_blocks' has no 'scales' beside"
    ):
        Checkpoint(copy).read_experts(name)
