"""The number format: rounding, scales, layouts and bad input of thunder_moe.formats.nvfp4.
Called by pytest; judged by tests/oracle.py and, byte for byte, by torchao.
"""

import sys
from dataclasses import replace

import pytest
import torch
from interpreters import fresh_python
from oracle import FORMAT_ERROR, decode_e2m1, relative_error
from oracle import dequantize as oracle_dequantize

from thunder_moe.formats import nvfp4
from thunder_moe.formats.nvfp4 import NVFP4Weight, dequantize, quantize

BITS = torch.uint8


def bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(BITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 40, 64), (1, 1, 16), (2, 129, 80)])
def test_format_error_on_normal_weights(shape, dtype):
    weight = (torch.randn(shape) * 0.02).to(dtype)
    packed = quantize(weight)
    decoded = dequantize(packed, torch.float32)
    assert torch.equal(decoded, oracle_dequantize(*packed.tensors()))
    if weight.numel() > 1000:
        assert relative_error(decoded, weight) == pytest.approx(FORMAT_ERROR, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_once(dtype):
    packed = quantize(torch.randn(2, 64, 64) * 0.02)
    assert torch.equal(dequantize(packed, dtype), dequantize(packed, torch.float32).to(dtype))


def test_every_code_and_scale_decodes():
    qdata = torch.arange(256, dtype=torch.uint8).repeat(16).view(1, 512, 8)
    finite = torch.tensor(list(range(127)), dtype=torch.uint8)
    scale = finite.repeat(5)[:512].view(1, 512, 1).view(torch.float8_e4m3fn)
    packed = NVFP4Weight(qdata, scale, torch.tensor([0.75]))
    assert torch.equal(dequantize(packed, torch.float32), oracle_dequantize(*packed.tensors()))


def test_codes_round_to_nearest_even():
    # One block whose scale is 1 (its amax is 6) in an expert whose global scale is 1 (amax 2688).
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    weight = torch.zeros(1, 16, 16)
    weight[0, 0, 0] = 2688.0
    for row, (tie, wanted) in enumerate(ties.items(), start=1):
        below, above = (
            torch.nextafter(torch.tensor(tie), torch.tensor(0.0)),
            torch.nextafter(torch.tensor(tie), torch.tensor(9.0)),
        )
        weight[0, row, :7] = torch.tensor([6.0, tie, -tie, below, above, -below, -above])
        values = dequantize(quantize(weight), torch.float32)[0, row, :7].tolist()
        magnitudes = sorted(decode_e2m1(code) for code in range(8))
        lower, upper = max(m for m in magnitudes if m < tie), min(m for m in magnitudes if m > tie)
        assert values == [6.0, wanted, -wanted, lower, upper, -lower, -upper], tie


def test_scales_are_not_clamped_from_below():
    # Block amaxes from the expert's down to where the e4m3 scale rounds to its subnormals, then to zero.
    amax = 2688.0 * 2.0 ** -torch.arange(0, 24).float()
    weight = amax[None, :, None] * torch.ones(1, 1, 16)
    packed = quantize(weight)
    expected = (amax / 6).to(torch.float8_e4m3fn)
    assert torch.equal(bits(packed.scale)[0, :, 0], bits(expected))
    zero = expected.float() == 0
    assert zero.any()
    assert not zero.all()
    assert packed.qdata[0, zero].eq(0).all()
    assert dequantize(packed)[0, zero].eq(0).all()
    subnormal = (expected.float() > 0) & (expected.float() < 2**-6)
    assert subnormal.any()


def test_all_zero_experts():
    weight = torch.randn(3, 8, 32)
    weight[1] = 0
    packed = quantize(weight)
    assert packed.global_scale[1] == 1
    assert dequantize(packed)[1].eq(0).all()
    assert dequantize(packed).isfinite().all()


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e30])
def test_extreme_magnitudes_stay_finite(magnitude):
    weight = torch.randn(1, 4, 32) * magnitude
    decoded = dequantize(quantize(weight), torch.float32)
    assert decoded.isfinite().all()
    if magnitude > 1e-35:
        assert relative_error(decoded, weight) < 0.15


def test_global_scale_is_per_expert():
    weight = torch.randn(2, 32, 64)
    scaled = weight * torch.tensor([1.0, 2.0**-12])[:, None, None]
    plain, packed = quantize(weight), quantize(scaled)
    assert torch.equal(plain.qdata, packed.qdata)
    assert torch.equal(packed.global_scale, plain.global_scale * torch.tensor([1.0, 2.0**-12]))


def test_non_contiguous_weight():
    weight = torch.randn(2, 48, 24)
    assert torch.equal(quantize(weight.mT).qdata, quantize(weight.mT.contiguous()).qdata)


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def default_dtype(request):
    """As in transformers' from_pretrained, which makes the model's dtype torch's default while it builds."""
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("scale_search", [None, "mse"])
def test_the_default_dtype_makes_no_difference(default_dtype, scale_search):
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    got = quantize(weight, scale_search=scale_search)
    torch.set_default_dtype(torch.float32)
    expected = quantize(weight, scale_search=scale_search)
    assert torch.equal(got.qdata, expected.qdata)
    assert torch.equal(bits(got.scale), bits(expected.scale))
    assert got.global_scale.dtype == torch.float32
    assert torch.equal(got.global_scale, expected.global_scale)


def test_chunks_do_not_change_the_result(monkeypatch):
    weight = torch.randn(2, 100, 64)
    whole = quantize(weight)
    monkeypatch.setitem(nvfp4._CHUNK_WEIGHTS, "cpu", 64 * 7)
    parts = quantize(weight)
    assert all(torch.equal(a.view(BITS), b.view(BITS)) for a, b in zip(whole.tensors(), parts.tensors(), strict=True))
    assert torch.equal(dequantize(parts), dequantize(whole))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_quantizing_takes_little_more_memory_than_its_result():
    code = """
import torch
from thunder_moe.formats.nvfp4 import quantize
def peak():  # of this program; getrusage counts that of the process that has started it
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
quantize(torch.randn(1, 64, 4096, dtype=torch.bfloat16))
weight = torch.ones(4, 1024, 4096, dtype=torch.bfloat16)  # 32 MiB, and 64 in float32
before = peak()
packed = quantize(weight)
print((peak() - before) / 1024 - packed.nbytes / 2**20)
"""
    assert float(fresh_python(code)) < 24, "MiB beyond the result"


def torchao_quantize(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scale, qdata = nvfp4_quantize(weight, 16, global_scale)
    return qdata, scale.view(weight.shape[0], -1)


def test_equals_torchao_byte_for_byte_where_all_arithmetic_is_exact():
    # Global and block scales are powers of two and values multiples of 1/8: many exact ties, no rounding but e2m1's.
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-6, 9, (64, 8, 1), generator=generator)
    blocks = torch.randint(-48, 49, (64, 8, 16), generator=generator) / 8
    blocks[..., 0] = 6.0
    weight = (blocks * 2.0**exponents).view(1, 64, 128)
    weight[0, 0, 0] = 2688.0
    packed = quantize(weight)
    assert packed.global_scale.item() == 1
    qdata, scale = torchao_quantize(weight[0], torch.tensor(1.0))
    assert torch.equal(bits(packed.scale[0]), bits(scale))
    assert torch.equal(packed.qdata[0], qdata)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torchao_on_normal_weights_but_for_ulps_at_ties(dtype):
    # torchao multiplies by a rounded reciprocal where the contract divides: a value within an ulp of a tie may differ.
    weight = (torch.randn(1, 512, 1024) * 0.02).to(dtype)
    packed = quantize(weight)
    qdata, scale = torchao_quantize(weight[0], packed.global_scale[0])
    assert torch.equal(bits(packed.scale[0]), bits(scale))
    assert (packed.qdata[0] != qdata).float().mean() < 2e-5


def test_equal_global_scales_of_rows_are_shared():
    weight = quantize(torch.randn(3, 8, 32))
    same = NVFP4Weight.concatenate(weight, weight)
    mixed = NVFP4Weight.concatenate(weight, quantize(torch.ones(3, 8, 32)))
    shared = same.share_global_scale()
    assert torch.equal(shared.global_scale, weight.global_scale)
    assert torch.equal(dequantize(shared), dequantize(same))
    assert mixed.share_global_scale() is mixed
    assert weight.share_global_scale() is weight


def test_concatenate():
    first, second = quantize(torch.randn(3, 8, 32)), quantize(torch.randn(3, 24, 32) * 7)
    both = NVFP4Weight.concatenate(first, second)
    assert both.global_scale.shape == (3, 32)
    assert torch.equal(dequantize(both), torch.cat([dequantize(first), dequantize(second)], 1))
    assert NVFP4Weight.concatenate(first) is first
    with pytest.raises(ValueError, match="layout 'swizzled_128x4'"):
        NVFP4Weight.concatenate(first, second.to_layout("swizzled_128x4"))
    with pytest.raises(ValueError, match="experts and in_features"):
        NVFP4Weight.concatenate(first, quantize(torch.randn(3, 8, 16)))
    with pytest.raises(ValueError, match="weights: got none, wanted one NVFP4Weight or more"):
        NVFP4Weight.concatenate()
    for wrong in (None, first.qdata, [first]):
        with pytest.raises(TypeError, match=f"weights: got a {type(wrong).__name__} at position 1, wanted NVFP4Weight"):
            NVFP4Weight.concatenate(first, wrong)


def test_a_weight_is_made_of_tensors():
    qdata, scale, global_scale = quantize(torch.randn(2, 8, 16)).tensors()
    with pytest.raises(TypeError, match="qdata: got NoneType, wanted a tensor"):
        NVFP4Weight(None, scale, global_scale)
    with pytest.raises(TypeError, match="global_scale: got float, wanted a tensor"):
        NVFP4Weight(qdata, scale, 1.0)


def test_bytes_are_a_quarter():
    weight = torch.randn(2, 256, 512, dtype=torch.bfloat16)
    assert quantize(weight).nbytes == pytest.approx(weight.nbytes * 4.5 / 16, rel=1e-3)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.randn(8, 32), r"weight: got torch.float32 \(8, 32\) on cpu, wanted shape \(experts"),
        (torch.ones(1, 8, 32, dtype=torch.int32), r"weight: got torch.int32 .* wanted dtype float32"),
        (torch.randn(1, 8, 24), r"weight: got .* wanted in_features a positive multiple of 16"),
        (torch.tensor([[[1.0] * 15 + [float("nan")]]]), r"weight: got NaN or Inf in experts \[0\]"),
        (torch.tensor([[[1.0] * 16], [[float("-inf")] * 16]]), r"weight: got NaN or Inf in experts \[1\]"),
    ],
)
def test_quantize_refuses(weight, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight)


def test_weight_refuses():
    good = quantize(torch.randn(2, 8, 32))
    bad = [
        (dict(qdata=good.qdata.int()), "qdata: .*wanted dtype uint8"),
        (dict(qdata=good.qdata[0]), "qdata: .*wanted shape"),
        (dict(qdata=good.qdata[..., :4]), "qdata: .*multiple of 16"),
        (dict(scale=good.scale.float()), "scale: .*wanted dtype float8_e4m3fn"),
        (dict(scale=good.scale[:, :4]), r"scale: .*wanted shape \(2, 8, 2\)"),
        (dict(global_scale=good.global_scale.double()), "global_scale: .*wanted dtype float32"),
        (dict(global_scale=torch.ones(3)), "global_scale: .*wanted a shape of"),
        (dict(scale=good.scale.to("meta")), "scale: .*wanted device cpu"),
        (dict(layout="marlin"), "layout: got 'marlin'"),
    ]
    fields = dict(qdata=good.qdata, scale=good.scale, global_scale=good.global_scale)
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            NVFP4Weight(**{**fields, **change})
    with pytest.raises(ValueError, match="layout: got 'row'"):
        good.to_layout("row")
    with pytest.raises(ValueError, match=r"dtype: got torch.int8"):
        dequantize(good, torch.int8)


def nearest_values(x, scale):
    """Each x over the scale, rounded to the nearest E2M1 value (any of two at a tie), times the scale; fp64."""
    values = torch.tensor([decode_e2m1(code) for code in range(16)], dtype=torch.float64) * scale[..., None, None]
    return values.expand(*x.shape, 16).gather(-1, (values - x[..., None]).abs().argmin(-1, keepdim=True))[..., 0]


def squared_errors(packed, weight):
    """fp64 (E, N, K // 16): of each block."""
    error = oracle_dequantize(*packed.tensors()).double() - weight.double()
    return error.square().unflatten(-1, (-1, 16)).sum(-1)


DISTRIBUTIONS = {
    "normal": lambda *shape: torch.randn(shape),
    "Laplace": lambda *shape: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    "outliers": lambda *shape: torch.randn(shape) * torch.where(torch.rand(shape) < 0.01, 10.0, 1.0),
    "uniform": lambda *shape: torch.rand(shape) * 2 - 1,
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_mse_finds_the_best_of_the_scales_it_tries(distribution):
    weight = distribution(2, 24, 64) * 0.02
    usual, searched = quantize(weight), quantize(weight, scale_search="mse")
    found = dequantize(searched, torch.float32).double()
    torch.testing.assert_close((found * weight).sum((1, 2)), weight.double().square().sum((1, 2)), rtol=1e-6, atol=0)
    searched = replace(searched, global_scale=usual.global_scale)
    blocks = weight.double().unflatten(-1, (-1, 16))
    errors = []
    for step in (0, *nvfp4._SCALE_STEPS):
        scale = (bits(usual.scale).int() + step).clamp(0, 126).to(BITS).view(torch.float8_e4m3fn).double()
        errors.append(
            (nearest_values(blocks, scale * usual.global_scale[:, None, None].double()) - blocks).square().sum(-1)
        )
    torch.testing.assert_close(squared_errors(searched, weight), torch.stack(errors).amin(0), rtol=1e-5, atol=0)


def test_searched_scales_keep_weights_finite():
    weight = ((2 * torch.rand(1, 32, 64) - 1) * 65504).half()
    weight[0, 0, 0] = 65504
    packed = quantize(weight, scale_search="mse")
    assert packed.global_scale == torch.tensor(65504 / 2688)  # 1.003 times as much without the limit
    assert dequantize(packed, torch.float16).isfinite().all()


def test_mse_has_less_error():
    for name, least in {"normal": 1.2, "Laplace": 0.9, "outliers": 0.5, "uniform": 0.9}.items():
        weight = DISTRIBUTIONS[name](2, 128, 256) * 0.02
        noise = [squared_errors(quantize(weight, scale_search=search), weight).sum() for search in (None, "mse")]
        assert 10 * torch.log10(noise[0] / noise[1]) > least


def four_over_six_noise(weight):
    """Squared error of "Four Over Six": the largest weight of a block becomes 6 or 4, whichever has less error."""
    blocks = weight.double().unflatten(-1, (-1, 16))
    amax, whole = blocks.abs().amax(-1), weight.abs().amax((1, 2)).double()[:, None, None] / (6 * 256)
    errors = []
    for top in (6, 4):
        scale = (amax / (top * whole)).to(torch.float8_e4m3fn).double() * whole
        errors.append((nearest_values(blocks, scale) - blocks).square().sum(-1))
    return torch.minimum(*errors).sum()


def test_mse_has_less_error_than_four_over_six():
    """Not on uniform weights: the blocks with the largest weights cannot be 4, because their scale is 448 at most."""
    for name, *expected in (
        ("normal", 0.0953, 0.0873, 0.0821), ("Laplace", 0.0932, 0.0873, 0.0829), ("outliers", 0.0939, 0.0905, 0.0878),
    ):  # fmt: skip
        weight = DISTRIBUTIONS[name](2, 128, 256) * 0.02
        noise = [squared_errors(quantize(weight, scale_search=search), weight).sum() for search in (None, "mse")]
        noise.insert(1, four_over_six_noise(weight))
        relative = [(each / weight.double().square().sum()).sqrt().item() for each in noise]
        assert relative == pytest.approx(expected, rel=0.02), name


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_mse_does_not_depend_on_the_size(size):
    weight = torch.randn(1, 8, 64)
    small, usual = quantize(weight * size, scale_search="mse"), quantize(weight, scale_search="mse")
    same = (bits(small.scale) == bits(usual.scale)).float().mean()
    assert same > 0.95  # global scales differ by a rounding


def test_mse_edges():
    weight = torch.zeros(2, 3, 32)
    packed = quantize(weight, scale_search="mse")
    assert not packed.qdata.any()
    assert torch.equal(oracle_dequantize(*packed.tensors()), weight)
    # A block far below the largest weight, whose usual scale is 0, gets one that holds it.
    weight[0, 0, 0], weight[0, 1, :16] = 1.0, 1e-7
    assert bits(quantize(weight).scale)[0, 1, 0] == 0
    assert (
        squared_errors(quantize(weight, scale_search="mse"), weight)[0, 1, 0]
        <= squared_errors(quantize(weight), weight)[0, 1, 0]
    )
    strided = torch.randn(2, 64, 16).mT
    one, other = quantize(strided, scale_search="mse"), quantize(strided.contiguous(), scale_search="mse")
    assert torch.equal(one.qdata, other.qdata)
    assert torch.equal(bits(one.scale), bits(other.scale))


def test_unknown_scale_search():
    with pytest.raises(ValueError, match=r"scale_search: got 'best', wanted None or one of \('mse',\)"):
        quantize(torch.zeros(1, 1, 16), scale_search="best")
