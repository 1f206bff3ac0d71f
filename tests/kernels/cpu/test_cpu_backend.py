"""The compiled CPU kernels, each for all rows: exact decoding, products, edge rows, threads, no compiler, limits.
Called by pytest; skipped with the backend's own reason where it cannot run.
Calls kernels/cpu/{backend,crossover}.py; judged by tests/oracle.py's decoding and by fp64 products.
"""

import contextlib
import errno
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch
from fast_cases import others_slow
from interpreters import fresh_python
from oracle import dequantize as decode
from oracle import dequantize_mxfp8, grouped_swiglu, relative_error
from pairwise import pairwise

from thunder_moe.formats.nvfp4 import NVFP4Weight
from thunder_moe.formats.weight import MXFP8Weight
from thunder_moe.kernels import code_cache, host_code
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.kernels.cpu import crossover
from thunder_moe.kernels.cpu.crossover import NEVER, Limits, limits_are

pytestmark = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))

# Relative Frobenius error. One rounding to bf16 is at most 2**-8 = 3.9e-3, also of a single number.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 4e-3}
ROWS = {
    "one token": (0, 1, 0, 0),
    "one row each": (1, 1, 1, 1),
    "no rows": (0, 0, 0, 0),
    "all on the last": (0, 0, 0, 9),
    "all on the first": (70, 0, 0, 0),
    "ragged, small": (2, 0, 7, 12),
    "both kernels": (13, 1, 12, 25),
    "several row tasks": (3, 400, 0, 5),
}
SHAPES = [(1, 16), (17, 48), (33, 128), (64, 272), (130, 2080), (20, 4240)]
# Limits that give all rows to one kernel; if this CPU lacks it, the slice kernel runs.
KERNELS = {
    "dots": Limits(gemv=NEVER),
    "fma": Limits(gemv=NEVER, fma=True),
    "tiles": Limits(tiles=NEVER),
    "slice": Limits(),
    "slice_fp32": Limits(fp32_slices=True),
    "panel": Limits(panel=1),
}


@pytest.fixture(params=KERNELS)
def kernel(request):
    with limits_are(KERNELS[request.param]):
        yield request.param


def weights(experts, n, k, per_column=False):
    qdata = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(experts, n, k // 16) * 448).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[..., ::3] = torch.randint(0, 8, scale[..., ::3].shape, dtype=torch.uint8)  # subnormals, 0
    global_scale = torch.rand(experts, n) if per_column else torch.rand(experts)
    return NVFP4Weight(qdata, scale, (global_scale + 0.1) / 10)


def weights_in(format, experts, n, k, per_column=False):
    """Return the weights and what they stand for; K of MXFP8 is rounded up to its blocks."""
    if format == "nvfp4":
        weight = weights(experts, n, k, per_column)
        return weight, decode(*weight.tensors())
    k = (k + 31) // 32 * 32
    codes = torch.randint(0, 127, (experts, n, k), dtype=torch.uint8)  # 127 is NaN
    codes += 128 * torch.randint(0, 2, codes.shape, dtype=torch.uint8)
    scale = torch.randint(110, 130, (experts, n, k // 32), dtype=torch.uint8)
    scale[..., ::3] = 0  # as blocks of zeros have
    codes[..., : k // 32 * 32].view(experts, n, -1, 32)[..., ::3, :] &= 128
    weight = mxfp8(codes, scale)
    return weight, dequantize_mxfp8(*weight.tensors())


def mxfp8(codes, scale):
    return MXFP8Weight(codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))


def oracle(rows, matrices, ends):
    out, begin = torch.zeros(rows.shape[0], matrices.shape[1]), 0
    for matrix, end in zip(matrices, ends, strict=True):
        out[begin:end] = (rows[begin:end].double() @ matrix.double().t()).float()
        begin = end
    return out


def assert_close(actual, expected, dtype, roundings=1):
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error, norm = (actual.float() - expected).norm().item(), expected.norm().item()
    assert error <= roundings * TOLERANCE[dtype] * norm, f"relative error {error / norm}"


@pytest.mark.parametrize(
    ("format", "name", "shape", "dtype", "per_column", "limits"),
    pairwise(
        ["nvfp4", "mxfp8"],
        list(ROWS),
        SHAPES,
        list(TOLERANCE),
        [False, True],
        [*KERNELS.values(), Limits(mm=5), Limits(3, 9), Limits(3, 9, fma=True), Limits(3, 9, tiles=6), None],
    ),
    ids=str,
)
def test_grouped_mm(format, name, shape, dtype, per_column, limits):
    with limits_are(limits) if limits else contextlib.nullcontext():
        check_grouped_mm(ROWS[name], shape, dtype, per_column, format)


def check_grouped_mm(rows, shape, dtype, per_column, format="nvfp4"):
    weight, matrices = weights_in(format, len(rows), *shape, per_column)
    _, n, k = matrices.shape
    offsets = torch.tensor(rows).cumsum(0).int()
    x = torch.randn(sum(rows) + 3, k).to(dtype)  # three rows past the last group
    actual = cpu.grouped_mm(x, weight, offsets)
    expected = oracle(x.float(), matrices, offsets.tolist())
    assert_close(actual, expected, dtype, roundings=2)  # of the weight where torch.mm multiplies it, of the result
    assert (actual[sum(rows) :] == 0).all()
    grad = torch.randn(sum(rows) + 3, n).to(dtype)
    expected = oracle(grad.float(), matrices.transpose(1, 2), offsets.tolist())
    actual = cpu.grouped_mm_dgrad(grad, weight, offsets)
    assert_close(actual, expected, dtype, roundings=2)  # of the weight, of the result
    assert (actual[sum(rows) :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *others_slow([torch.float16], exhaustive=True)], ids=str)
def test_more_rows_than_are_copied_at_once(dtype):
    """16 MiB of copies are kept between calls: experts in ranges, and one that has more."""
    with limits_are(KERNELS["panel"]):
        check_grouped_mm((2100, 4500, 0, 1, 700), (17, 2080), dtype, False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_no_rows_at_all(dtype):
    weight, offsets = weights(3, 17, 32), torch.zeros(3, dtype=torch.int32)
    assert cpu.grouped_mm(torch.empty(0, 32, dtype=dtype), weight, offsets).shape == (0, 17)
    assert cpu.grouped_mm_dgrad(torch.empty(0, 17, dtype=dtype), weight, offsets).shape == (0, 32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_number_of_rows(dtype, kernel):
    for count in [*range(1, 27), 32, 33, 70]:
        weight = weights(1, 21, 160)
        x = torch.randn(count, 160).to(dtype)
        actual = cpu.grouped_mm(x, weight, torch.tensor([count], dtype=torch.int32))
        assert_close(actual, oracle(x.float(), decode(*weight.tensors()), [count]), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_code_and_scale_decodes_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    bits = torch.arange(256, dtype=torch.uint8)
    scale = bits[(bits & 127) != 127].view(torch.float8_e4m3fn)
    qdata = codes.expand(254, 256)[None].contiguous()
    scale = scale[:, None].expand(254, 32)[None].contiguous()
    for factor in (1.0, 0.3, 2.0**-20, 1e-8, 1e-38, 1e-44, 1e5, 3e35, -0.7):  # bf16 and fp16 subnormals, overflow
        for global_scale in (torch.tensor([factor]), torch.rand(1, 254) * factor):
            actual = cpu.dequantize(NVFP4Weight(qdata, scale, global_scale), dtype)
            expected = decode(qdata, scale, global_scale).to(dtype)
            bits_of = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(actual.view(bits_of), expected.view(bits_of))


@pytest.mark.parametrize("rows", [1, 7, 13])
def test_every_code_and_scale_of_mxfp8(rows, kernel):
    """One-hot activations read the weights out of each kernel, with scales that bf16 products would lose, too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 127) == 127, 0, codes)[None, :, None].expand(1, 256, 1024).contiguous()
    for dtype in TOLERANCE:
        for first in (*range(0, 255, 32), 111):
            scale = torch.arange(first, first + 32, dtype=torch.int32).clamp_max(254).to(torch.uint8)
            weight = mxfp8(codes, scale[None, None].expand(1, 256, 32).contiguous())
            matrix = dequantize_mxfp8(*weight.tensors())[0]
            assert torch.equal(cpu.dequantize(weight, dtype)[0], matrix.to(dtype))
            x, columns = torch.zeros(rows, 1024, dtype=dtype), torch.randint(0, 1024, (rows,))
            x[torch.arange(rows), columns] = 1
            x, matrix = x[:, matrix.isfinite().all(0)], matrix[:, matrix.isfinite().all(0)]
            if x.shape[1] < 1024:  # 448 times the largest scales is infinite
                keep = x.shape[1] // 32
                weight = mxfp8(
                    codes[..., : 32 * keep].contiguous(), weight.scale.view(torch.uint8)[..., :keep].contiguous()
                )
            actual = cpu.grouped_mm(x.contiguous(), weight, torch.tensor([rows], dtype=torch.int32))
            assert torch.equal(actual, (x.double() @ matrix.double().t()).float().to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_codes_and_scales_of_mxfp8_stay_in_their_column(dtype, kernel):
    for rows in (1, 13):
        weight, _ = weights_in("mxfp8", 1, 37, 160)
        weight.qdata.view(torch.uint8)[0, 3, 70] = 0xFF
        weight.qdata.view(torch.uint8)[0, 8, 1] = 0x7F
        weight.scale.view(torch.uint8)[0, 20, 4] = 255
        actual = cpu.grouped_mm(torch.randn(rows, 160).to(dtype), weight, torch.tensor([rows], dtype=torch.int32))
        assert actual[:, [3, 8, 20]].isnan().all()
        assert actual.isnan().sum() == 3 * rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dgrad_keeps_rows_beside_the_least_weights_of_mxfp8(dtype, kernel):
    """Weights below 2^-133 have bits where panels of pairs hold the row before: those may not change it."""
    usual, _ = weights_in("mxfp8", 1, 36, 64)
    codes, scale = usual.qdata.view(torch.uint8).clone(), usual.scale.view(torch.uint8).clone()
    codes[:, 1::2], scale[:, 1::2] = torch.tensor([1, 3, 0x87, 0x85], dtype=torch.uint8).repeat(16), 0
    weight, offsets = mxfp8(codes, scale), torch.tensor([5], dtype=torch.int32)
    grad = torch.randn(5, 36).to(dtype)
    expected = grad.double() @ dequantize_mxfp8(*weight.tensors())[0].double()
    assert_close(cpu.grouped_mm_dgrad(grad, weight, offsets), expected, dtype, roundings=2)


@pytest.mark.parametrize("rows", [1, 13])
def test_every_code_and_scale_multiplies_exactly(rows, kernel):
    """One-hot activations read the decoded weights out of each kernel of each dtype, bit for bit before rounding."""
    qdata = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)[None].contiguous()
    for dtype in TOLERANCE:
        for first in range(0, 256, 64):
            bits = torch.arange(first, first + 64, dtype=torch.uint8)
            bits = torch.where((bits & 127) == 127, 0, bits)
            scale = bits.view(torch.float8_e4m3fn)[None, None].expand(1, 256, 64).contiguous()
            codes = qdata.repeat(1, 1, 64)
            x = torch.zeros(rows, 1024, dtype=dtype)
            columns = torch.randint(0, 1024, (rows,))
            x[torch.arange(rows), columns] = 1
            weight = NVFP4Weight(codes, scale, torch.ones(1))
            actual = cpu.grouped_mm(x, weight, torch.tensor([rows], dtype=torch.int32))
            expected = decode(*weight.tensors())[0][:, columns].t().to(dtype)
            assert torch.equal(actual, expected)
            grad = torch.zeros(rows, 256, dtype=dtype)
            columns = torch.randint(0, 256, (rows,))
            grad[torch.arange(rows), columns] = 1
            actual = cpu.grouped_mm_dgrad(grad, weight, torch.tensor([rows], dtype=torch.int32))
            assert torch.equal(actual, decode(*weight.tensors())[0][columns].to(dtype))


def spread(low, high):
    """Numbers of either sign between powers of two."""
    exponents = torch.randint(low, high, (50, 160))
    return (torch.rand(50, 160) + 1) * 2.0**exponents * torch.randn(50, 160).sign()


def few(rows):
    """Nine of ten numbers become 0, so that sums of numbers of any size show each of them."""
    return torch.where(torch.rand(rows.shape) < 0.1, rows, 0)


RANGES = {
    "subnormals": lambda: spread(-149, -127),
    "subnormals of fp16": lambda: spread(-24, -14),
    "every size": lambda: few(spread(-149, 128)),
    "huge": lambda: spread(96, 128),
    "largest": lambda: torch.full((50, 160), torch.inf) * torch.randn(50, 160).sign(),  # held to the dtype's range
    # Where the weight of the one is 0, the subnormal is all there is.
    "a one and a subnormal": lambda: (
        torch.zeros(50, 160).index_fill_(1, torch.tensor(7), 1).index_fill_(1, torch.tensor(90), 3e-39)
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype", "factor", "counts", "limits"),
    pairwise(list(RANGES), list(TOLERANCE), [1.0, 1e-4, 1e-30], [(1, 0, 9), (13, 7, 30)], list(KERNELS.values())),
    ids=str,
)
def test_activations_of_every_size(name, dtype, factor, counts, limits):
    with limits_are(limits):
        check_activations_of_every_size(name, dtype, factor, counts)


def check_activations_of_every_size(name, dtype, factor, counts):
    """Each output is within rounding of fp64: no subnormal is lost, and nothing overflows that need not."""
    weight = weights(3, 37, 160)
    weight = NVFP4Weight(weight.qdata, weight.scale, weight.global_scale * factor)
    finfo, offsets = torch.finfo(dtype), torch.tensor(counts).cumsum(0).int()
    x = RANGES[name]()[: sum(counts)].clamp(-finfo.max, finfo.max).to(dtype)
    actual = cpu.grouped_mm(x, weight, offsets)
    matrices = decode(weight.qdata, weight.scale, torch.ones(3)).double() * weight.global_scale.double()[:, None, None]
    rows = list(zip([0, *offsets], offsets, range(3), strict=False))
    exact = torch.cat([x[start:end].double() @ matrices[e].T for start, end, e in rows])
    size = torch.cat([x[start:end].double().abs() @ matrices[e].T.abs() for start, end, e in rows])
    expected = exact.to(dtype)
    overflows = exact.abs() > finfo.max * (1 - finfo.eps)
    assert torch.equal(actual[overflows].abs() >= finfo.max * (1 - 2 * finfo.eps), overflows[overflows])
    error = (actual.double() - expected.double()).abs()[~overflows]
    # A unit in the last place of the result, and the rounding of the sum in fp32.
    allowed = exact.abs() * finfo.eps + size * 160 * 2.0**-24 + 1.01 * finfo.smallest_normal * finfo.eps
    assert (error <= allowed[~overflows]).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_and_infinity_spread_as_in_ieee_arithmetic(dtype, kernel):
    weight = weights(1, 37, 160)
    matrix = decode(*weight.tensors())[0].double()
    for count in (5, 20):
        x = torch.randn(count, 160).to(dtype)
        x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
        x[3, 9], x[3, 10] = torch.inf, torch.finfo(dtype).max
        x[4] = -0.0
        actual = cpu.grouped_mm(x, weight, torch.tensor([count], dtype=torch.int32))
        expected = (x[:, :, None].double() * matrix.T).sum(1)
        special = ~expected.isfinite()
        assert torch.equal(actual[special].double().nan_to_num(7, 8, 9), expected[special].nan_to_num(7, 8, 9))
        assert actual[~special].isfinite().all()
        assert actual[4].count_nonzero() == 0


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_row_ends_and_slots_out_of_range_touch_nothing(dtype, kernel):
    """Called without the operators' checks, the kernels still stay inside of their operands."""
    weight, x = weights(4, 32, 64), torch.randn(30, 64).to(dtype)
    wild = torch.tensor([-(2**31), 2**31 - 1, -7, 2**31 - 1], dtype=torch.int32)
    good = torch.tensor([0, 30, 30, 30], dtype=torch.int32)
    expected = cpu.grouped_mm(x, weight, good)
    assert cpu.grouped_mm(x, weight, wild).shape == (30, 32)
    assert torch.equal(cpu.grouped_mm(x, weight, torch.tensor([0, 99, 99, 99]).int()), expected)
    assert cpu.grouped_mm_dgrad(expected, weight, wild).shape == (30, 64)
    slots = torch.tensor([[3, 30], [-(2**31), 2**31 - 1], [5, -1]], dtype=torch.int32)
    for bias in (None, torch.randn(4, 32)):
        out = cpu.grouped_mm_combine(x, weight, good, slots, None, bias)
        rows = (expected if bias is None else expected + bias[1]).to(dtype)
        assert torch.equal(out, torch.stack([rows[3], torch.zeros(32, dtype=dtype), rows[5]]))


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_scale_stays_in_its_column(byte, dtype, kernel):
    weight = weights(1, 9, 256)
    weight.scale.view(torch.uint8)[0, 4, 2] = byte
    for rows in (2, 20):
        actual = cpu.grouped_mm(torch.randn(rows, 256).to(dtype), weight, torch.tensor([rows]).int())
        assert actual.isnan().any(0).tolist() == [column == 4 for column in range(9)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [(2, 0, 3), (20, 0, 15)], ids=str)
def test_poison_outside_the_operands_is_not_read(rows, dtype, kernel):
    """Operands are views into NaN-filled memory, experts without rows hold NaN scales, rows past the end hold NaN."""
    n, k = 19, 48
    qdata, scale, global_scale = weights(3, n, k).tensors()
    scale.view(torch.uint8)[1] = 0x7F
    memory = torch.full((5, n, k // 16), 0x7F, dtype=torch.uint8)
    memory[1:4] = scale.view(torch.uint8)
    codes = torch.full((5, n, k // 2), 0xFF, dtype=torch.uint8)
    codes[1:4] = qdata
    offsets = torch.tensor(rows).cumsum(0).int()
    x = torch.full((sum(rows) + 8, k + 5), torch.nan, dtype=dtype)
    x[4 : 4 + sum(rows), 3 : 3 + k] = torch.randn(sum(rows), k).to(dtype)
    view = x[4:-2, 3 : 3 + k]  # not contiguous, two rows of NaN at its end
    weight = NVFP4Weight(codes[1:4], memory[1:4].view(torch.float8_e4m3fn), global_scale)
    actual = cpu.grouped_mm(view, weight, offsets)
    expected = oracle(view.float()[: sum(rows)], decode(*weight.tensors()), offsets.tolist())
    assert_close(actual[: sum(rows)], expected, dtype)
    assert (actual[sum(rows) :] == 0).all()
    grad = torch.full((sum(rows) + 5, n), torch.nan, dtype=dtype)
    grad[: sum(rows)] = torch.randn(sum(rows), n).to(dtype)
    actual = cpu.grouped_mm_dgrad(grad, weight, offsets)
    expected = oracle(grad.float()[: sum(rows)], decode(*weight.tensors()).transpose(1, 2), offsets.tolist())
    assert_close(actual[: sum(rows)], expected, dtype, roundings=2)
    assert (actual[sum(rows) :] == 0).all()


@pytest.mark.parametrize("rows", [(2, 0, 3), (20, 0, 15)], ids=str)
def test_poison_outside_operands_of_mxfp8_is_not_read(rows, kernel):
    n, k = 19, 96
    weight, matrices = weights_in("mxfp8", 3, n, k)
    scale = torch.full((5, n, k // 32), 255, dtype=torch.uint8)
    codes = torch.full((5, n, k), 0x7F, dtype=torch.uint8)
    for expert in (0, 2):
        scale[expert + 1], codes[expert + 1] = (
            weight.scale.view(torch.uint8)[expert],
            weight.qdata.view(torch.uint8)[expert],
        )
    weight, offsets = mxfp8(codes[1:4], scale[1:4]), torch.tensor(rows).cumsum(0).int()
    for dtype in TOLERANCE:
        x = torch.full((sum(rows) + 4, k), torch.nan, dtype=dtype)
        x[2:-2] = torch.randn(sum(rows), k).to(dtype)
        actual = cpu.grouped_mm(x[2:], weight, offsets)
        expected = oracle(x[2:].float()[: sum(rows)], matrices, offsets.tolist())
        assert_close(actual[: sum(rows)], expected, dtype)
        assert (actual[sum(rows) :] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_grouped_swiglu(dtype, kernel):
    weight, offsets = weights(4, 66, 64), torch.tensor([4, 9, 9, 30], dtype=torch.int32)
    x = torch.randn(30, 64).to(dtype) / 8
    actual = cpu.grouped_swiglu(x, weight, offsets)
    assert actual.dtype == dtype
    expected = grouped_swiglu(x, decode(*weight.tensors()), offsets)
    assert relative_error(actual, expected) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("layout", "n"), [("linear", 33), ("swizzled_128x4", 33), ("tiled_64x64", 64)])
def test_any_strides_and_layouts(layout, n):
    weight, offsets = weights(4, n, 64), torch.tensor([4, 9, 9, 30], dtype=torch.int32)
    x = torch.randn(30, 64)
    expected = cpu.grouped_mm(x, weight, offsets)
    tensors = (t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 3 else t for t in weight.tensors())
    other = NVFP4Weight(*tensors).to_layout(layout)
    assert torch.equal(cpu.grouped_mm(x.t().contiguous().t(), other, offsets), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_same_bits_for_any_number_of_threads_and_from_two_python_threads(dtype, kernel):
    weight, offsets = weights(8, 200, 256), torch.tensor([1, 2, 2, 10, 40, 140, 150, 153], dtype=torch.int32)
    x = torch.randn(153, 256).to(dtype)
    grad = torch.randn(153, 200).to(dtype)
    expected, gradient = cpu.grouped_mm(x, weight, offsets), cpu.grouped_mm_dgrad(grad, weight, offsets)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(cpu.grouped_mm(x, weight, offsets), expected)
            assert dtype == torch.float32 or torch.equal(cpu.grouped_mm_dgrad(grad, weight, offsets), gradient)
    finally:
        torch.set_num_threads(threads)
    same = []

    def repeat():
        same.extend(torch.equal(cpu.grouped_mm(x, weight, offsets), expected) for _ in range(20))

    workers = [threading.Thread(target=repeat) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert same == [True] * 40


def test_fp16_is_multiplied_exactly_before_the_sum(kernel):
    """Each fp16 is split into two bf16 without loss: one product per output."""
    bits = torch.arange(0, 65536, 16, dtype=torch.int32).add(5).to(torch.int16)  # all sizes, odd low bits
    x = bits.view(torch.float16)
    x = x[x.isfinite()]
    weight = NVFP4Weight(
        torch.full((1, 1, 16), 0x20, dtype=torch.uint8).index_fill_(2, torch.arange(1, 16), 0),
        torch.ones(1, 1, 2).to(torch.float8_e4m3fn),
        torch.ones(1),
    )  # the second of 32 weights is 1
    rows = torch.zeros(len(x), 32, dtype=torch.float16)
    rows[:, 1] = x
    actual = cpu.grouped_mm(rows, weight, torch.tensor([len(x)], dtype=torch.int32))
    assert torch.equal(actual[:, 0], x)


def test_without_mkldnn_the_panel_kernel_is_not_taken():
    weight, offsets = weights(2, 33, 64), torch.tensor([4, 40], dtype=torch.int32)
    x, grad = torch.randn(40, 64).bfloat16(), torch.randn(40, 33).bfloat16()
    with limits_are(Limits()):
        expected = cpu.grouped_mm(x, weight, offsets), cpu.grouped_mm_dgrad(grad, weight, offsets)
    with limits_are(Limits(panel=1)), torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(cpu.grouped_mm(x, weight, offsets), expected[0])
        torch.testing.assert_close(cpu.grouped_mm_dgrad(grad, weight, offsets), expected[1])


ONEDNN = """
import torch
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.kernels.cpu.crossover import Limits, limits_are
from thunder_moe.formats.nvfp4 import quantize
weight, offsets = quantize(torch.ones(1, 16, 32)), torch.tensor([300], dtype=torch.int32)
rows = torch.ones(300, 32, dtype=torch.bfloat16)
for limits in (Limits(panel=1), cpu._limits(torch.bfloat16)):
    with limits_are(limits):
        assert (cpu.grouped_mm(rows, weight, offsets) == 32).all()
        assert (cpu.grouped_mm_dgrad(rows[:, :16].contiguous(), weight, offsets) == 16).all()
print(sorted(cpu._kernels(torch.bfloat16, True)))
"""


@pytest.mark.slow
def test_without_the_instructions_for_brgemm_the_panel_kernel_is_not_taken():
    """The file of limits, which other processes share, may name panels."""
    cpu._limits(torch.bfloat16)
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    run = subprocess.run([sys.executable, "-c", ONEDNN], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "'slice'" in run.stdout
    assert "'panel'" not in run.stdout


def times(dots, fma, slices, panel, **others):
    """Seconds as straight lines: (fixed, per row) of each kernel; dots, fma and tiles up to 32 rows."""
    lines = {"dots": dots, "fma": fma, "slice": slices, "panel": panel, **others}
    few = ("dots", "fma", "tiles")
    return {
        rows: {name: a + b * rows for name, (a, b) in lines.items() if name not in few or rows <= 32}
        for rows in crossover.ROWS
    }


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (times((10, 3), (12, 6), (23, 2), (45, 2)), Limits(12)),  # AVX512-BF16 of AMD: dots, then slices
        (times((40, 15), (30, 6), (70, 13), (45, 3)), Limits(4, 6, fma=True)),  # a matrix unit, which tiles may not use
        (
            times((40, 15), (30, 6), (70, 13), (45, 3), tiles=(45, 1.5)),
            Limits(3, 40, fma=True, tiles=32),
        ),  # Intel's AMX
        (times((40, 15), (30, 10), (70, 13), (70, 12), slice_fp32=(80, 7)), Limits(16, fma=True, fp32_slices=True)),
        (times((10, 3), (12, 6), (23, 2), (45, 1)), Limits(12, 20)),  # dots, slices, panels
        (times((50, 50), (50, 50), (25, 2), (math.inf, math.inf)), Limits()),
    ],
    ids=["AVX512-BF16", "panels", "AMX", "Intel without AMX", "all", "slices"],
)
def test_limits_take_the_fastest_kernel(table, expected):
    limits = crossover.best_limits(table)
    assert (limits.gemv, limits.mm, limits.fma) == (expected.gemv, NEVER, expected.fma)
    assert (limits.tiles, limits.fp32_slices) == (expected.tiles, expected.fp32_slices)
    assert limits.panel == expected.panel or expected.panel < NEVER > abs(limits.panel - expected.panel) <= 2
    for rows, seconds in table.items():
        slices = "slice_fp32" if limits.fp32_slices else "slice"
        few = "fma" if limits.fma else "dots"
        name = few if rows <= limits.gemv else "tiles" if rows <= limits.tiles else slices
        name = "panel" if rows >= limits.panel else name
        assert seconds[name] <= 1.03 * min(seconds.values())


def test_panels_are_taken_where_they_tie_with_slices():
    assert crossover.best_limits(times((10, 3), (12, 6), (25, 2), (25, 2.02))).panel < 24


def test_limits_survive_one_wrong_time():
    table = times((10, 5), (10, 5), (25, 5), (25, 0.25))
    table[32]["panel"] *= 3
    assert crossover.best_limits(table).panel <= 4


def test_limits_are_measured_once_per_machine_and_kept_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(crossover, "_known", {})
    file, calls, broken = tmp_path / "crossover.json", [], ["", "[]", '{"a": 3}']
    kernels = {"slice": Limits(), "fma": Limits(gemv=NEVER, fma=True), "panel": Limits(panel=1)}

    def seconds(dtype, rows, limits):
        calls.append(rows)
        return 1.0 + (rows if limits == kernels["fma"] else 5 if limits == kernels["panel"] else 100)

    def limits_for(machine="a", dtype=torch.bfloat16, without=None):
        present = {name: limits for name, limits in kernels.items() if name != without}
        return crossover.limits_for(dtype, present, seconds, file, machine)

    first = limits_for()
    assert (first.gemv, first.fma) == (4, True)
    assert first.panel in (5, 6)
    count = len(calls)
    assert limits_for() == first
    monkeypatch.setattr(crossover, "_known", {})
    assert limits_for() == first
    assert len(calls) == count  # by the file
    monkeypatch.setattr(crossover, "_known", {})
    assert limits_for("b") == first
    assert len(calls) == 2 * count  # another machine
    assert limits_for("b", torch.float16) == first
    assert len(calls) == 3 * count  # another dtype
    assert limits_for("b", without="panel").panel == NEVER
    assert len(calls) > 3 * count  # other kernels
    assert limits_for("b") == first
    name = "torch.bfloat16: fma, panel, slice"
    assert name in file.read_text()
    for numbers in ("[1]", '"x"', f"[0, {NEVER}, 0, false, 0, false]", f"[{1 << 70}, 1, 1, false, 0, false]"):
        broken.append(f'{{"a": {{"{name}": {numbers}}}}}')
    for text in broken:
        file.write_text(text)
        monkeypatch.setattr(crossover, "_known", {})
        assert limits_for() == first
    monkeypatch.setattr(crossover, "_known", {})
    file = tmp_path / "no" / "such" / "directory.json"
    assert limits_for() == first


def _deep(file):
    file.write_text("[" * 1_000_000)


def _of_all(file):
    file.chmod(0o666)


def _not_text(file):
    file.write_bytes(b"\xff{}")


def _pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="files have no owner here, and pipes no name")
@pytest.mark.parametrize("change", [_deep, _of_all, _not_text, _pipe])
def test_a_file_of_limits_that_cannot_be_trusted_is_measured_again(tmp_path, monkeypatch, caplog, change):
    file, measured = tmp_path / "crossover.json", []
    kernels = {"slice": Limits(), "panel": Limits(panel=1)}

    def limits():
        monkeypatch.setattr(crossover, "_known", {})
        return crossover.limits_for(torch.bfloat16, kernels, lambda *_: measured.append(1) or 1.0, file, "a")

    expected = limits()
    count = len(measured)
    assert limits() == expected
    assert len(measured) == count
    assert not caplog.records
    change(file)
    for _ in range(2):
        assert limits() == expected
    assert len(measured) == 2 * count
    (record,) = caplog.records
    assert f"{file} is not used, CPU kernels are timed again" in record.getMessage()
    assert os.listdir(tmp_path) == [file.name]


def test_limits_that_leave_rows_to_no_kernel_are_refused():
    for options in (dict(mm=0), dict(panel=0), dict(gemv=-1), dict(gemv=1 << 70)):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: got"):
            Limits(**options)


def test_limits_of_this_machine_are_those_of_its_kernels():
    for dtype in TOLERANCE:
        limits, kernels = cpu._limits(dtype), cpu._kernels(dtype, torch._C._get_mkldnn_enabled())
        assert limits.gemv == 0 or ("fma" if limits.fma else "dots") in kernels
        assert limits.tiles == 0 or "tiles" in kernels
        assert limits.panel == NEVER or "panel" in kernels
        assert limits.mm == NEVER or "mm" in kernels
    assert cpu._limits(torch.float32).panel == NEVER


def test_every_source_is_part_of_the_name_of_a_build():
    """A header that is not would leave old builds in use."""
    assert {*cpu._SOURCES, *cpu._HEADERS} == set(cpu._SOURCE.iterdir())


SCRIPT = """
import torch
from thunder_moe.kernels.cpu import backend as cpu
from thunder_moe.formats.nvfp4 import quantize
print(cpu.unavailable_reason())
try:
    cpu.dequantize(quantize(torch.ones(1, 1, 16)), torch.float32)
except RuntimeError as error:
    assert str(error) == cpu.unavailable_reason()
else:
    raise AssertionError("ran without an extension")
"""


def reason_with(tmp_path, **environment):
    return fresh_python(SCRIPT, XDG_CACHE_HOME=str(tmp_path / "cache"), **environment)


@pytest.mark.slow
def test_says_that_there_is_no_compiler(tmp_path):
    assert "no C++ compiler found: 'no-such-compiler'" in reason_with(tmp_path, CXX="no-such-compiler")


@pytest.mark.slow
def test_says_that_the_compiler_is_not_on_the_path(tmp_path):
    environment = {"PATH": str(tmp_path), "CXX": "c++"}
    assert "no C++ compiler found: 'c++' is not on PATH" in reason_with(tmp_path, **environment)


@pytest.mark.slow
def test_says_what_the_compiler_said(tmp_path):
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        """#!/bin/sh
        case " $* " in *" -c "*) echo "this compiler is broken" >&2; exit 1;; esac
        exec c++ "$@"
        """
    )
    compiler.chmod(0o755)
    assert "this compiler is broken" in reason_with(tmp_path, CXX=str(compiler))


# ---- the library on disk, with a compiler that takes no time: it copies the library that these tests run ----


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return a log of linked libraries, one character each, in a process that has neither loaded nor cached any."""
    library, log = code_cache.read(host_code.key_of(cpu._parts())), tmp_path / "linked"
    if library is None:
        pytest.skip("there is no cache of compiled kernels")
    (tmp_path / "library.so").write_bytes(library)
    compiler = tmp_path / "quick-c++"
    compiler.write_text(
        f"""#!/bin/sh
        case " $* " in *" -shared "*) printf x >> {log}; while [ "$1" != -o ]; do shift; done
            cp {tmp_path}/library.so "$2";; esac
        """
    )
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    forget_library()
    yield log.read_text
    monkeypatch.undo()
    forget_library()


def forget_library():
    cpu._load_once.cache_clear()


def kept_library(tmp_path):
    (file,) = (tmp_path / "cache" / "thunder_moe").glob("*.code")
    return file


def test_the_library_is_compiled_once_and_says_so(compiled, caplog):
    for _ in range(2):
        assert cpu.unavailable_reason() is None
        forget_library()
    assert compiled() == "x"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # printed where nobody has configured logging
    assert record.getMessage().startswith("thunder_moe: compiling the CPU kernels")


@pytest.mark.parametrize("part", [0, 0.01, 0.5, 1], ids=["empty", "the head", "half", "all but one byte"])
def test_a_library_that_was_cut_is_compiled_again(compiled, caplog, tmp_path, part):
    assert cpu.unavailable_reason() is None
    file = kept_library(tmp_path)
    library = file.read_bytes()
    file.write_bytes(library[: min(int(part * len(library)), len(library) - 1)])
    for _ in range(2):
        forget_library()
        assert cpu.unavailable_reason() is None
    assert compiled() == "xx"
    assert caplog.text.count(f"{file} are not used, they are compiled again: it is damaged") == 1


def test_a_library_that_does_not_load_is_not_kept(compiled, tmp_path):
    good = (tmp_path / "library.so").read_bytes()
    (tmp_path / "library.so").write_bytes(b"no library")
    assert "the CPU kernel cannot run" in cpu.unavailable_reason()
    (tmp_path / "library.so").write_bytes(good)
    forget_library()
    assert cpu.unavailable_reason() is None
    assert compiled() == "xx"


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have no owner here")
def test_a_library_of_others_is_not_loaded(compiled, caplog, tmp_path, monkeypatch):
    assert cpu.unavailable_reason() is None
    kept_library(tmp_path).chmod(0o777)
    forget_library()
    assert cpu.unavailable_reason() is None
    assert compiled() == "xx"
    assert "another user owns it or may write it" in caplog.text
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    forget_library()
    assert cpu.unavailable_reason() is None
    assert compiled() == "xxx"


def test_code_that_runs_does_not_change_with_the_file(compiled, tmp_path):
    """A library that is mapped from a file that somebody cuts would end the process by SIGBUS."""
    weight = weights(1, 16, 32)
    expected = decode(*weight.tensors())
    assert torch.equal(cpu.dequantize(weight, torch.float32), expected)
    kept_library(tmp_path).write_bytes(b"")
    assert torch.equal(cpu.dequantize(weight, torch.float32), expected)
    grad = cpu.grouped_mm_dgrad(torch.randn(1, 16), weight, torch.tensor([1], dtype=torch.int32))
    assert grad.isfinite().all()


HOLDER = """
import os, runpy, signal, sys, time
with runpy.run_path(sys.argv[1])["one_process"](sys.argv[2], "compiles"):
    child = os.fork() if sys.argv[3] == "fork" else None
    if child != 0:
        print(child, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["kill", "fork"])
def test_the_lock_of_a_process_that_was_killed_is_free(compiled, caplog, end):
    """The lock is free even if a process that it forked lives on."""
    command = [sys.executable, "-c", HOLDER, code_cache.__file__, host_code.key_of(cpu._parts()), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        child = holder.stdout.readline().strip()
        try:
            waiting = threading.Thread(target=cpu.unavailable_reason, daemon=True)
            waiting.start()
            until = time.monotonic() + 60
            while "waiting for another process" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)
            assert compiled() == ""
            holder.kill()
            waiting.join(60)
            assert not waiting.is_alive()
        finally:
            holder.kill()
            if end == "fork":
                os.kill(int(child), 9)
    assert "thunder_moe: waiting for another process, which compiles the CPU kernels" in caplog.text
    assert cpu.unavailable_reason() is None
    assert compiled() == "x"


def test_without_locks_each_process_compiles(compiled, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    assert cpu.unavailable_reason() is None
    assert compiled() == "x"


def test_without_a_folder_for_the_cache_the_kernels_run(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "library.so"))
    with pytest.warns(UserWarning, match="cannot be cached in .*library.so.*set XDG_CACHE_HOME"):
        assert cpu.unavailable_reason() is None
    assert compiled() == "x"


def test_a_cached_library_is_loaded_from_memory_or_a_temporary_file(compiled, tmp_path, monkeypatch):
    """A temporary file needs space on the disk, and memory to run code from needs the system's permission."""

    def forbidden(name):
        raise PermissionError(errno.EACCES, "memfd_create")

    assert cpu.unavailable_reason() is None
    for owner, name, value in ((tempfile, "tempdir", str(tmp_path / "missing")), (os, "memfd_create", forbidden)):
        if hasattr(owner, name):
            with monkeypatch.context() as without:
                without.setattr(owner, name, value)
                forget_library()
                assert cpu.unavailable_reason() is None
    assert compiled() == "x"


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has files in memory")
def test_an_extension_that_memory_may_not_run_is_loaded_from_a_file():
    """Python's loader of extensions raises ImportError where ctypes raises OSError."""
    opened = []

    def load(path):
        opened.append(path)
        if len(opened) == 1:
            raise ImportError("failed to map segment from shared object")
        return path

    assert host_code._open(b"library", load) == opened[1]
    assert opened[0].startswith("/proc/self/fd/")
    assert not os.path.exists(opened[0])  # closed
