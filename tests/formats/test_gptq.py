"""GPTQ inside NVFP4 and MXFP8, `quantize(weight, hessian=)`: its objective, its codes, and bad input.
Called by pytest; judged by tests/oracle.py, by the GPTQ of its paper, in float64, and by rounding to nearest.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from oracle import decode_e2m1, dequantize_mxfp8
from oracle import dequantize as oracle_dequantize

from thunder_moe.formats import gptq, mxfp8
from thunder_moe.formats.nvfp4 import dequantize, quantize

E, N, K = 3, 24, 64
VALUES = torch.tensor([decode_e2m1(code) for code in range(16)], dtype=torch.float64)


def hessian_of(kind):
    """X^T X (E, K, K) of rows that are independent, correlated, or fewer than K."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(E, 20 if kind == "few" else 500, K, generator=generator)
    if kind == "correlated":
        rows @= torch.randn(E, K, K, generator=generator)
    return rows.mT @ rows


def weights(dtype=torch.float32):
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(2)).to(dtype)


def objective(weight, packed, hessian):
    """tr((W - Q) H (W - Q)^T) of each expert, in float64."""
    values = (dequantize_mxfp8 if packed.format.name == "mxfp8" else oracle_dequantize)(*packed.tensors())
    error = weight.double() - values.double()
    return torch.einsum("enk,ekl,enl->e", error, hessian.double().expand(len(weight), K, K), error)


def same_bits(a, b):
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.tensors(), b.tensors(), strict=True)
    )


@pytest.mark.parametrize("kind", ["independent", "correlated", "few"])
@pytest.mark.parametrize("scale_search", [None, "mse"])
def test_the_objective_is_lower_than_without_a_hessian(kind, scale_search):
    weight, hessian = weights(), hessian_of(kind)
    packed = quantize(weight, scale_search=scale_search, hessian=hessian)
    plain = objective(weight, quantize(weight, scale_search=scale_search), hessian)
    assert (
        objective(weight, packed, hessian) < {"independent": 0.98, "correlated": 0.6, "few": 0.3}[kind] * plain
    ).all()
    if kind != "independent":
        searched = objective(weight, quantize(weight, scale_search="mse"), hessian)
        assert (objective(weight, packed, hessian) < searched).all()


@pytest.mark.parametrize("kind", ["independent", "correlated", "few"])
def test_mxfp8_has_less_error(kind):
    weight, hessian = weights(), hessian_of(kind)
    plain = objective(weight, mxfp8.quantize(weight), hessian)
    packed = mxfp8.quantize(weight, hessian=hessian)
    assert (
        objective(weight, packed, hessian) < {"independent": 1.0, "correlated": 0.6, "few": 0.4}[kind] * plain
    ).all()
    alone = mxfp8.quantize(weight[1:2], hessian=hessian[1])
    assert (alone.qdata.view(torch.uint8) == packed.qdata.view(torch.uint8)[1:2]).float().mean() > 0.98


def test_mxfp8_does_not_overflow():
    """The second column of a block, near 448 times its scale, gets four times the error of the first: 503."""
    weight = torch.zeros(1, 1, 32)
    weight[..., 0], weight[..., 1] = 430.0, 447.0  # 430 becomes 416
    row = torch.zeros(1, 32)
    row[:, 0], row[:, 1] = 4.0, 1.0
    packed = mxfp8.quantize(weight, hessian=1000 * row.T @ row)
    assert mxfp8.dequantize(packed, torch.float32)[0, 0, :2].tolist() == [416.0, 448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_identity_gives_the_bits_of_rounding_in_mxfp8(dtype):
    weight = weights(dtype)
    weight[0, 3, 32:] = 0
    for hessian in (torch.eye(K), torch.zeros(K, K)):
        assert same_bits(mxfp8.quantize(weight, hessian=hessian), mxfp8.quantize(weight))


@pytest.mark.parametrize("scale_search", [None, "mse"])
def test_codes_are_those_of_gptq(scale_search, monkeypatch):
    """GPTQ by the inverse of the Hessian of the columns that are left, in float64, with the scales that were chosen."""
    monkeypatch.setattr(gptq, "_SWEEPS", 0)
    weight, hessian = weights(), hessian_of("correlated")
    packed = quantize(weight, scale_search=scale_search, hessian=hessian)
    packed = replace(packed, global_scale=quantize(weight).global_scale)  # by which it was rounded
    values = oracle_dequantize(*packed.tensors()).double()
    scales = packed.scale.double().repeat_interleave(16, -1) * packed.global_scale.double()[:, None, None]
    wrong = 0
    for expert in range(E):
        left, damped = weight[expert].double().clone(), hessian[expert].double()
        damped = damped + 0.01 * damped.diagonal().mean() * torch.eye(K)
        for k in range(K):
            scaled = left[:, k] / scales[expert, :, k]
            nearest = VALUES[(scaled[:, None] - VALUES).abs().argmin(1)] * scales[expert, :, k]
            wrong += int((~torch.isclose(nearest, values[expert, :, k], rtol=1e-5)).sum())  # ties within float32
            inverse = torch.linalg.inv(damped[k:, k:])
            left[:, k:] -= torch.outer((left[:, k] - values[expert, :, k]) / inverse[0, 0], inverse[0])
    assert wrong <= 2


def test_sweeps_lower_the_objective_until_each_code_is_the_best_beside_the_others(monkeypatch):
    weight, hessian = weights(), hessian_of("correlated")
    damped = hessian.double() + 0.01 * hessian.double().diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(K)
    found = []
    for sweeps in (0, 1, 2, 30):
        monkeypatch.setattr(gptq, "_SWEEPS", sweeps)
        packed = quantize(weight, hessian=hessian)
        found.append(objective(weight, packed, damped))
    assert all((later < earlier).all() for earlier, later in pairwise(found))
    values = oracle_dequantize(*packed.tensors()).double()
    scales = packed.scale.double().repeat_interleave(16, -1) * packed.global_scale.double()[:, None, None]
    changes, wrong = values - weight.double(), 0
    for k in range(K):
        of_others = (changes @ damped[:, :, k, None])[..., 0] - changes[..., k] * damped[:, k, k, None]
        scaled = (weight[..., k] - of_others / damped[:, k, k, None]) / scales[..., k]
        nearest = VALUES[(scaled[..., None] - VALUES).abs().argmin(-1)] * scales[..., k]
        wrong += int((~torch.isclose(nearest, values[..., k], rtol=1e-5)).sum())  # ties within float32
    assert wrong <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_search", [None, "mse"])
def test_an_identity_gives_the_bits_of_rounding(dtype, scale_search):
    weight = weights(dtype).transpose(1, 2).contiguous().transpose(1, 2)  # (E, K, N) in memory, as GPT-OSS has them
    weight[0, 3, 16:32] = 1e-9  # a block whose scale is 0
    for hessian in (torch.eye(K), 7 * torch.eye(K).repeat(E, 1, 1), torch.zeros(K, K)):
        packed = quantize(weight, scale_search=scale_search, hessian=hessian)
        rounded = quantize(weight, scale_search=scale_search)
        torch.testing.assert_close(packed.global_scale, rounded.global_scale, rtol=1e-6 if scale_search else 0, atol=0)
        assert same_bits(packed, replace(rounded, global_scale=packed.global_scale))


def test_products_with_searched_scales_are_unbiased():
    weight, hessian = weights(torch.bfloat16), hessian_of("correlated")
    found = dequantize(quantize(weight, scale_search="mse", hessian=hessian), torch.float32).double()
    damped = hessian.double() + 0.01 * hessian.double().diagonal(dim1=1, dim2=2).mean(-1)[:, None, None] * torch.eye(K)
    weighted = weight.double() @ damped
    torch.testing.assert_close((weighted * found).sum((1, 2)), (weighted * weight).sum((1, 2)), rtol=1e-5, atol=0)


def test_experts_together_are_experts_alone():
    weight, hessian = weights(), hessian_of("correlated")
    packed = quantize(weight, hessian=hessian)
    for expert in range(E):
        own = slice(expert, expert + 1)
        alone = quantize(weight[own], hessian=hessian[expert])
        # Products of batches may differ in the last bits, which moves ties.
        together = [tensor[own].view(torch.uint8) for tensor in packed.tensors()]
        equal = [(a == b.view(torch.uint8)).float().mean() for a, b in zip(together, alone.tensors(), strict=True)]
        assert min(equal) > 0.98
        assert objective(weight[own], alone, hessian[own]).item() == pytest.approx(
            objective(weight, packed, hessian)[expert].item(), rel=0.02
        )


def test_autocast_changes_nothing():
    weight, hessian = weights(), hessian_of("correlated")
    with torch.autocast("cpu", torch.bfloat16):
        inside = quantize(weight, hessian=hessian)
    assert same_bits(inside, quantize(weight, hessian=hessian))


def test_columns_without_rows_are_rounded_to_nearest():
    weight, hessian = weights(), hessian_of("correlated")
    hessian[:, 16:32], hessian[:, :, 16:32] = 0, 0
    packed, plain = quantize(weight, hessian=hessian), quantize(weight)
    assert torch.equal(packed.qdata[..., 8:16], plain.qdata[..., 8:16])
    assert not torch.equal(packed.qdata[..., 16:], plain.qdata[..., 16:])


def test_errors_push_no_float16_weight_of_mxfp8_to_infinity():
    weight = (weights(torch.float16).float() * 1e6).clamp(-63000, 63000).half()
    packed = mxfp8.quantize(weight, hessian=hessian_of("correlated"))
    assert mxfp8.dequantize(packed, torch.float16).abs().amax() == 61440


def test_weights_of_zeros_and_without_rows():
    assert not quantize(torch.zeros(1, 4, K), hessian=hessian_of("few")[0]).qdata.any()
    assert quantize(torch.zeros(2, 0, K), hessian=torch.eye(K)).shape == (2, 0, K)


@pytest.mark.parametrize(
    ("hessian", "message"),
    [
        (torch.eye(K + 16), rf"hessian: got .*, wanted .*shape \({E}, {K}, {K}\), or \({K}, {K}\)"),
        (torch.eye(K).repeat(E + 1, 1, 1), "hessian: got .*, wanted .*shape"),
        (torch.eye(K, dtype=torch.float64), "hessian: got torch.float64 .*, wanted dtype float32"),
        (torch.eye(K).fill_diagonal_(float("nan")), "hessian: got NaN or Inf in expert 0, wanted X"),
        (torch.ones(K, K).triu(), "hessian: got one that is not symmetric in expert 0, wanted X"),
        (1 - 2 * torch.eye(K), "hessian: got one that is not positive semidefinite in expert 0, wanted X"),
    ],
)
def test_bad_hessians(hessian, message):
    with pytest.raises(ValueError, match=message):
        quantize(weights(), hessian=hessian)


def test_other_bad_input():
    with pytest.raises(TypeError, match="hessian: got list"):
        quantize(weights(), hessian=[1.0])
    with pytest.raises(ValueError, match=r"weight: got NaN or Inf in experts \[1\]"):
        quantize(weights().index_fill_(0, torch.tensor([1]), float("inf")), hessian=torch.eye(K))
    with pytest.raises(ValueError, match="weight: .*in_features a positive multiple of 16"):
        quantize(torch.zeros(1, 2, 17), hessian=torch.eye(17))
    with pytest.raises(ValueError, match="scale_search: got 'all'"):
        quantize(weights(), scale_search="all", hessian=torch.eye(K))
    with pytest.raises(ValueError, match="scale_search: got 'mse', wanted None: MXFP8"):
        mxfp8.quantize(weights(), scale_search="mse", hessian=torch.eye(K))
    with pytest.raises(ValueError, match="hessian: got torch.float64"):
        mxfp8.quantize(weights(), hessian=torch.eye(K, dtype=torch.float64))
