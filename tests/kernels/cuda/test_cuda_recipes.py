"""The CUDA kernels of 8-bit recipes, run by the emulator on a CPU, and on a GPU: rounded operands, codes, products.
Called by pytest, with -m gpu on a GPU; judged by the arithmetic of tests/oracle.py.
"""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from emulated_gemms import emulate_device
from oracle import RecipeLinear, relative_error, round_to_recipe

from thunder_moe.kernels import slow_paths
from thunder_moe.kernels.cuda import recipes, training

BF16 = torch.bfloat16
SPLITS = [5, 0, 130, 33, 0]


def wild(*shape, dtype, device):
    """Return numbers of many magnitudes, with zeros; some of the blocks of 32 are all zero, or tiny."""
    values = torch.randn(*shape) * 10 ** (2 * torch.randn(*shape))
    values[..., :2, :32] *= torch.tensor([0.0, 1e-34])[:, None]
    values[..., :32, :2] *= torch.tensor([0.0, 1e-34])
    return values.to(device, dtype)


def equal(got, expected):
    """Compare numbers in fp64, NaN with NaN."""
    expected = torch.where(expected.isnan(), torch.nan, expected)
    torch.testing.assert_close(got.double().cpu(), expected.double(), rtol=0, atol=0, equal_nan=True)


def numbers(result):
    """Return rounded numbers times their scales, in fp64."""
    values, scale = (None if part is None else part.double().cpu() for part in result)
    return values if scale is None else values * scale[..., None]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(BF16, 136), (torch.float32, 39), pytest.param(BF16, 1160, marks=pytest.mark.slow),
     pytest.param(torch.float32, 9000, marks=pytest.mark.slow)],
)  # fmt: skip
def test_rows(device, recipe, dtype, columns):
    torch.manual_seed(0)
    values = wild(3, 5, columns, dtype=dtype, device=device)
    values[0, 2, 7], values[1, 3, 5] = float("nan"), float("inf")
    got = numbers(recipes.quantize(values, recipe))
    expected = round_to_recipe(values.cpu(), recipe)
    assert got[0, 2].isnan().any()
    assert got[1, 3].isnan().any()
    whole = torch.ones(3, 5, dtype=torch.bool)
    whole[0, 2] = whole[1, 3] = False
    equal(got[whole], expected[whole])


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
@pytest.mark.parametrize(("dtype", "rows", "columns"), [(BF16, 136, 136), (torch.float32, 39, 20)])
def test_columns_of_weights(device, recipe, dtype, rows, columns):
    torch.manual_seed(0)
    weight = wild(3, rows, columns, dtype=dtype, device=device)
    values, scale = recipes.quantize_columns(weight, recipe)
    equal(numbers((values.mT, scale)), round_to_recipe(weight.mT.cpu(), recipe))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
def test_columns_of_rows(device, recipe):
    torch.manual_seed(0)
    rows = wild(sum(SPLITS) + 3, 72, dtype=BF16, device=device)
    rows[sum(SPLITS) :] = float("nan")
    ends = torch.tensor(SPLITS, device=device).cumsum(0)
    values, scale = recipes.quantize_columns(rows, recipe, ends.long())
    begin = 0
    for expert, count in enumerate(SPLITS):
        part = slice(begin, begin := begin + count)
        if count:
            got = numbers((values[part].t(), None if scale is None else scale[expert]))
            equal(got, round_to_recipe(rows[part].t().cpu(), recipe))
    assert scale is None or scale.isfinite().all()


def test_codes(device):
    torch.manual_seed(0)
    weight, rows = wild(2, 160, 144, dtype=BF16, device=device), wild(sum(SPLITS) + 3, 144, dtype=BF16, device=device)
    rows[sum(SPLITS) :] = float("nan")
    equal(numbers(recipes.quantize_codes(weight)), round_to_recipe(weight.cpu(), "fp8"))
    equal(numbers(recipes.quantize_column_codes(weight)[:2]), round_to_recipe(weight.mT.cpu(), "fp8"))
    codes, scale, ends = recipes.quantize_column_codes(rows, torch.tensor(SPLITS, device=device).cumsum(0))
    assert ends.tolist() == [16, 32, 176, 224, 240]
    assert codes.shape[1] % 16 == 0
    begin = 0
    for expert, (count, end) in enumerate(zip(SPLITS, ends.tolist(), strict=True)):
        padded = 16 if count == 0 else -(-count // 16) * 16
        of_expert = codes[:, end - padded : end]
        part = rows[begin : (begin := begin + count)]
        assert of_expert[:, count:].float().eq(0).all()
        if count:
            equal(numbers((of_expert[:, :count], scale[expert])), round_to_recipe(part.t().cpu(), "fp8"))


def scaled_grouped_mm(a, b, scale_a, scale_b, offs=None, out_dtype=None, use_fast_accum=False):
    """Stand in for torch's function on a CPU, behind the checks of its meta function."""
    assert not use_fast_accum  # see test_sums_of_positive_products
    meta = [tensor.to("meta") for tensor in (a, b, scale_a, scale_b, offs)]
    shape = torch.ops.aten._scaled_grouped_mm(*meta, out_dtype=out_dtype, use_fast_accum=use_fast_accum).shape
    out, begin = torch.full(shape, torch.nan), 0
    for expert, end in enumerate(offs.tolist()):
        if b.ndim == 3:
            out[begin:end] = a[begin:end].float() @ b[expert].float() * scale_a[begin:end, None] * scale_b[expert]
        else:
            assert end > begin
            assert (end - begin) % 16 == 0
            product = a[:, begin:end].float() @ b[begin:end].float()
            out[expert] = product * scale_a.view(len(offs), -1)[expert][:, None] * scale_b.view(len(offs), -1)[expert]
        begin = end
    return out.to(out_dtype)


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
@pytest.mark.parametrize("capability", [(9, 0), pytest.param((8, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("dtype", "n", "k"),
    [(BF16, 48, 144), (torch.float32, 20, 36), pytest.param(BF16, 20, 36, marks=pytest.mark.slow)],
)
def test_products(device, monkeypatch, recipe, capability, dtype, n, k):
    """Rows past the end are NaN: zeros come of them; a buffer keeps them. main_grad is added to."""
    if device == "cpu":
        emulate_device(monkeypatch, 3, capability)
        monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
        monkeypatch.setattr(torch, "_grouped_mm", reference_mm)
    elif torch.cuda.get_device_capability() != capability:
        pytest.skip("another compute capability")
    monkeypatch.setattr(slow_paths, "_warned", set())
    torch.manual_seed(0)
    live, experts = sum(SPLITS), len(SPLITS)
    ends = torch.tensor(SPLITS).cumsum(0).int()
    x, grad = (torch.randn(live + 3, size) * 10 ** torch.randn(live + 3, 1) for size in (k, n))
    x[live:], grad[live:] = float("nan"), float("inf")
    x, grad, weight = x.to(dtype), grad.to(dtype), torch.randn(experts, n, k).to(dtype)
    leaves = [t.double().nan_to_num(0, 0, 0).requires_grad_() for t in (x, weight)]
    exact = RecipeLinear.apply(*leaves, ends, recipe)
    exact.backward(grad.double().nan_to_num(0, 0, 0))
    x, grad, weight, offsets = (t.to(device) for t in (x, grad, weight, ends))
    products = training.quantized_products(recipe)
    slow = recipe == "fp8" and (capability != (9, 0) or dtype != BF16 or n % 16)
    with pytest.warns(UserWarning, match='"fp8" rounds to 8 bits, but multiplies no') if slow else nullcontext():
        results = [
            products.grouped_mm(x, weight, offsets),
            products.dgrad(grad, weight, offsets),
            products.wgrad(x, grad, offsets),
        ]
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    for got, wanted, rows in zip(results, (exact, *(leaf.grad for leaf in leaves)), (True, True, False), strict=True):
        assert got.dtype == dtype
        assert relative_error(got.cpu(), wanted) < tolerance
        assert not rows or got[live:].eq(0).all()
    assert results[2][torch.tensor(SPLITS) == 0].eq(0).all()
    buffers = torch.full_like(results[0], 7), torch.full_like(x, 7)
    products.grouped_mm(x, weight, offsets, out=buffers[0])
    products.dgrad(grad, weight, offsets, out=buffers[1])
    for buffer, got in zip(buffers, results, strict=False):
        assert torch.equal(buffer[:live], got[:live])
        assert buffer[live:].eq(7).all()
    main = torch.ones(experts, n, k, device=device)
    products.wgrad(x, grad, offsets, out=main, accumulate=True)
    assert relative_error((main - 1).cpu(), leaves[1].grad) < tolerance
    products.wgrad(x, grad, offsets, out=main)
    assert relative_error(main.cpu(), leaves[1].grad) < tolerance


@pytest.mark.gpu
def test_sums_of_positive_products():
    """Fast accumulation on Hopper, which keeps fewer bits than float32, is off by 6.7 % here."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    x, weight = torch.rand(64, 4096).bfloat16(), torch.rand(1, 64, 4096).bfloat16()
    ends = torch.tensor([64], dtype=torch.int32)
    got = training.quantized_products("fp8").grouped_mm(x.cuda(), weight.cuda(), ends.cuda())
    assert relative_error(got.cpu(), RecipeLinear.apply(x, weight, ends, "fp8")) < 4e-3


def reference_mm(a, b, offs):
    """Stand in for torch's grouped GEMM of bfloat16."""
    parts = [0, *offs.tolist()]
    if b.ndim == 2:
        groups = [a[:, i:j].float() @ b[i:j].float() for i, j in pairwise(parts)]
        return torch.stack(groups).to(a.dtype)
    out = torch.full((a.shape[0], b.shape[2]), torch.nan)
    for expert, (i, j) in enumerate(pairwise(parts)):
        out[i:j] = a[i:j].float() @ b[expert].float()
    return out.to(a.dtype)
