"""The CUDA kernels of 8-bit recipes, run by the emulator on a CPU, and on a GPU: rounded operands, codes, products.
Called by pytest, with -m gpu on a GPU; judged by the arithmetic of tests/oracle.py.
"""

from contextlib import nullcontext
from itertools import pairwise, product

import pytest
import torch
from emulated_gemms import emulate_device
from fast_cases import others_slow
from oracle import RecipeLinear, relative_error, round_to_recipe

from thunder_moe.kernels import rounded_weights, slow_paths
from thunder_moe.kernels.cuda import linear, recipes, training, wgrad

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
     pytest.param(BF16, 2312, marks=pytest.mark.slow), pytest.param(torch.float32, 9000, marks=pytest.mark.slow)],
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


@pytest.mark.parametrize("lead", [0, recipes.LEAD])
def test_codes(device, monkeypatch, lead):
    """Tiles are measured just before they are rounded, or all of them first."""
    monkeypatch.setattr(recipes, "LEAD", lead)
    torch.manual_seed(0)
    weight, rows = wild(2, 160, 144, dtype=BF16, device=device), wild(sum(SPLITS) + 3, 144, dtype=BF16, device=device)
    rows[sum(SPLITS) :] = float("nan")
    equal(numbers(recipes.quantize_codes(weight)), round_to_recipe(weight.cpu(), "fp8"))
    equal(numbers(recipes.quantize_column_codes(weight)[:2]), round_to_recipe(weight.mT.cpu(), "fp8"))
    codes, scale, ends = recipes.quantize_column_codes(rows, torch.tensor(SPLITS, device=device).cumsum(0))
    assert ends.tolist() == [32, 32, 192, 256, 256]
    assert codes.shape[1] % 16 == 0
    begin = 0
    for expert, (count, end) in enumerate(zip(SPLITS, ends.tolist(), strict=True)):
        padded = -(-count // 32) * 32
        of_expert = codes[:, end - padded : end]
        part = rows[begin : (begin := begin + count)]
        assert of_expert[:, count:].float().eq(0).all()
        if count:
            equal(numbers((of_expert[:, :count], scale[expert])), round_to_recipe(part.t().cpu(), "fp8"))


CODES = torch.float8_e4m3fn


def codes_and_scales(*shape):
    """Return codes of any magnitude, and a scale of each row."""
    return (torch.randn(shape) * 4).clamp(-448, 448).to(CODES), torch.rand(shape[:-1]) + 0.5


@pytest.mark.parametrize(
    ("n", "k", "splits", "tile"),
    [
        (144, 144, [0, 5, 0, 70, 1], 64),
        (16, 16, [3, 1, 0], 64),
        pytest.param(80, 272, [0, 130, 9], 128, marks=pytest.mark.slow),
        pytest.param(48, 160, [300, 0, 150], 256, marks=pytest.mark.slow),
        pytest.param(48, 160, [450, 63], 256, marks=pytest.mark.slow),
    ],
)
def test_products_of_codes(device, monkeypatch, n, k, splits, tile):
    """Rows past the end, and weights of experts without rows, are NaN. Three experts are computed in two parts."""
    on_hopper(device, monkeypatch)
    monkeypatch.setattr(linear, "MAX_EXPERTS", 2 if len(splits) == 3 else 1024)
    torch.manual_seed(0)
    ends, end = torch.tensor(splits).cumsum(0), sum(splits)
    (rows, row_scale), (weight, column_scale) = codes_and_scales(end + 9, k), codes_and_scales(len(splits), n, k)
    rows.view(torch.uint8)[end:], row_scale[end:] = 0x7F, float("nan")
    weight.view(torch.uint8)[torch.tensor(splits) == 0], column_scale[torch.tensor(splits) == 0] = 0xFF, float("inf")
    expert = torch.bucketize(torch.arange(end), ends, right=True)
    products = (rows[:end, None].double() @ weight.double().mT[expert])[:, 0]
    expected = products * row_scale[:end, None] * column_scale[expert]
    offsets = ends.int() if n == 16 else ends
    operands = [each.to(device) for each in (rows, row_scale, weight, column_scale, offsets)]
    for zero_tail in (True, False):
        out = torch.full((end + 9, n), 7.0, dtype=BF16, device=device)
        linear.scaled_linear(*operands, out, zero_tail, tile)
        assert relative_error(out[:end].cpu(), expected) < 4e-3
        assert out[end:].eq(0 if zero_tail else 7).all()


@pytest.mark.parametrize("form", ["added", "written", "narrow"])
@pytest.mark.parametrize(
    ("n", "k", "splits", "columns"),
    [
        (144, 80, [0, 32, 0, 160], 128),
        pytest.param(48, 272, [64, 288, 0], 256, marks=pytest.mark.slow),
        pytest.param(80, 208, [0, 96, 128], 192, marks=pytest.mark.slow),
    ],
)
def test_wgrad_of_codes(device, monkeypatch, n, k, splits, columns, form):
    """Codes past the end are NaN. float32 results are sums in float32; tensor cores keep some 14 bits of 128 rows."""
    on_hopper(device, monkeypatch)
    monkeypatch.setattr(wgrad, "MAX_EXPERTS", 2 if len(splits) == 3 else 1024)
    torch.manual_seed(0)
    ends, end, experts = torch.tensor(splits).cumsum(0), sum(splits), len(splits)
    (x, _), (grad, _) = codes_and_scales(k, end + 32), codes_and_scales(n, end + 32)
    x.view(torch.uint8)[:, end:], grad.view(torch.uint8)[:, end:] = 0x7F, 0xFF
    x_scale, grad_scale = torch.rand(experts, k) + 0.5, torch.rand(experts, n) + 0.5
    out = torch.randn(experts, n, k)
    expected = out.double() if form == "added" else torch.zeros(experts, n, k, dtype=torch.float64)
    for expert, (begin, stop) in enumerate(pairwise([0, *ends.tolist()])):
        product = grad[:, begin:stop].double() @ x[:, begin:stop].double().t()
        expected[expert] += product * grad_scale[expert][:, None] * x_scale[expert]
    got = out.clone() if form == "added" else torch.full_like(out, torch.nan, dtype=BF16 if form == "narrow" else None)
    got = got.to(device)
    operands = [each.to(device) for each in (x, x_scale, grad, grad_scale, ends.int())]
    wgrad.scaled_wgrad(*operands, got, form == "added", columns=columns)
    assert relative_error(got.cpu(), expected) < (4e-3 if form == "narrow" else 1e-6 if device == "cpu" else 3e-4)
    empty = torch.tensor(splits) == 0
    assert torch.equal(got.cpu()[empty], out[empty] if form == "added" else torch.zeros_like(got.cpu()[empty]))


def on_hopper(device, monkeypatch):
    if device == "cpu":
        emulate_device(monkeypatch, 3)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(
    ("recipe", "capability", "dtype", "n", "k"),
    [
        *product(["mxfp8", "fp8"], [(9, 0)], [BF16], [48], [144]),
        *product(["mxfp8", "fp8"], [(9, 0)], [torch.float32], [20], [36]),
        *others_slow([("fp8", (8, 0), BF16, 48, 144), ("mxfp8", (8, 0), BF16, 20, 36), ("fp8", (9, 0), BF16, 20, 36)]),
        *others_slow(
            [
                ("mxfp8", (8, 0), BF16, 48, 144),
                ("fp8", (8, 0), BF16, 20, 36),
                ("mxfp8", (9, 0), BF16, 20, 36),
                *product(["mxfp8", "fp8"], [(8, 0)], [torch.float32], [20], [36]),
            ],
            exhaustive=True,
        ),
    ],
)
def test_products(device, monkeypatch, recipe, capability, dtype, n, k):
    """Rows past the end are NaN: zeros come of them; a buffer keeps them. main_grad is added to. A
    weight that is rounded already gives the same bits."""
    if device == "cpu":
        emulate_device(monkeypatch, 3, capability)
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
    keys = [rounded_weights.keep(weight, weight, *rounding) for rounding in products.roundings(weight)]
    products.grouped_mm(x, weight, offsets, out=buffers[0])
    products.dgrad(grad, weight, offsets, out=buffers[1])
    for key in keys:
        rounded_weights.drop(key)
    assert all(cause[0] != "rounded" for cause in slow_paths._warned)  # it found what was kept
    for buffer, got in zip(buffers, results, strict=False):
        assert torch.equal(buffer[:live], got[:live])
        assert buffer[live:].eq(7).all()
    main = torch.ones(experts, n, k, device=device)
    products.wgrad(x, grad, offsets, out=main, accumulate=True)
    assert relative_error((main - 1).cpu(), leaves[1].grad) < tolerance
    products.wgrad(x, grad, offsets, out=main)
    assert relative_error(main.cpu(), leaves[1].grad) < tolerance


def test_buffers_at_any_address(device, monkeypatch):
    """The kernels of codes store 16 bytes at a time, which needs an aligned address."""
    on_hopper(device, monkeypatch)
    torch.manual_seed(0)
    x, grad, weight = (torch.randn(*shape, device=device).to(BF16) for shape in ((40, 48), (40, 32), (2, 32, 48)))
    ends, products = torch.tensor([9, 37], device=device), training.quantized_products("fp8")
    y, of_weight = products.grouped_mm(x, weight, ends), products.wgrad(x, grad, ends)
    odd_y = torch.full((y.numel() + 1,), 7.0, dtype=BF16, device=device)[1:].view_as(y)
    products.grouped_mm(x, weight, ends, out=odd_y)
    assert torch.equal(odd_y[:37], y[:37])
    assert odd_y[37:].eq(7).all()
    main = torch.ones(of_weight.numel() + 1, device=device)[1:].view_as(of_weight)
    products.wgrad(x, grad, ends, out=main, accumulate=True)
    assert relative_error((main - 1).cpu(), of_weight.cpu()) < 4e-3
    products.wgrad(x, grad, ends, out=main)
    assert relative_error(main.cpu(), of_weight.cpu()) < 4e-3


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
