"""The CUDA kernels of training, run by the emulator on a CPU, and on a GPU: activations, biases, gradients of weights.
Called by pytest, with -m gpu on a GPU; judged by float64 formulas and autograd of plain torch.
"""

import pytest
import torch
from emulated_gemms import emulate_device
from fast_cases import others_slow

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.kernels import slow_paths
from thunder_moe.kernels.cuda import linear, operands, training, wgrad
from thunder_moe.kernels.specs import LinearSpec

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
FORMS = [SwiGLUConfig(), SwiGLUConfig(alpha=1.702, limit=1.5, up_shift=1.0)]


def error(got, expected):
    """Return the relative Frobenius error."""
    got, expected = got.double().cpu(), expected.double().cpu()
    assert got.shape == expected.shape
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))


def swiglu64(y, scales, form, interleave):
    s = interleave or y.shape[1] // 2
    gate, up = y.reshape(len(y), -1, 2, s).unbind(2)
    gate, up = gate.flatten(1), up.flatten(1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return gate * torch.sigmoid(form.alpha * gate) * (up + form.up_shift) * scales[:, None]


def srelu64(y, scales, form, interleave):
    return y.relu().square() * scales[:, None]


@pytest.mark.parametrize(
    ("dtype", "features", "interleave", "form"),
    [
        (torch.bfloat16, 48, None, FORMS[0]),
        pytest.param(torch.bfloat16, 48, 1, FORMS[1], marks=pytest.mark.slow),
        pytest.param(torch.float16, 64, 2, FORMS[0], marks=pytest.mark.slow),
        pytest.param(torch.float32, 32, 4, FORMS[1], marks=pytest.mark.slow),
        pytest.param(torch.float32, 64, 32, FORMS[1], marks=pytest.mark.exhaustive),
        pytest.param(torch.float16, 36, 3, FORMS[0], marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 5, None, FORMS[1], marks=pytest.mark.slow),
        (torch.float16, 48, None, None),
        pytest.param(torch.float32, 7, None, None, marks=pytest.mark.exhaustive),
    ],
)
def test_activations(device, dtype, features, interleave, form):
    torch.manual_seed(0)
    rows, end = 21, 17
    width = features if form is None else 2 * features
    y = torch.randn(rows, width, device=device).to(dtype)
    grad = torch.randn(rows, features, device=device).to(dtype)
    if form is not None and form.limit is not None:
        y[0, :6], y[1, :6] = form.limit, -form.limit  # gradients pass at equality
    scales = torch.rand(rows, device=device).to(torch.float32 if features % 2 else dtype)
    offsets = torch.tensor([3, 3, end], device=device, dtype=torch.int64 if features % 3 else torch.int32)
    y[end:], grad[end:] = float("nan"), float("inf")

    exact, exact_scales = y[:end].double().requires_grad_(), scales[:end].double().requires_grad_()
    expected = (swiglu64 if form else srelu64)(exact, exact_scales, form, interleave)
    expected.backward(grad[:end].double())
    options = dict(form=form, interleave=interleave)
    out = training.scaled_activation(y, scales, offsets, **options)
    grad_y, grad_scales = training.scaled_activation_gradient(grad, y, scales, offsets, **options)
    assert (out.dtype, grad_y.dtype, grad_scales.dtype) == (dtype, dtype, scales.dtype)
    assert error(out[:end], expected.detach()) < TOLERANCE[dtype]
    assert error(grad_y[:end], exact.grad) < TOLERANCE[dtype]
    assert error(grad_scales[:end], exact_scales.grad) < TOLERANCE[scales.dtype]
    tails = [out[end:], grad_y[end:], grad_scales[end:]]
    if form is not None and interleave is None:
        *grads, value = training.swiglu_gradient_and_value(grad, y, scales, offsets, form=form, needs_scales=True)
        assert torch.equal(grads[0], grad_y)
        assert torch.equal(grads[1], grad_scales)
        assert error(value[:end], expected.detach()) < TOLERANCE[dtype]
        tails.append(value[end:])
    for tail in tails:
        assert torch.equal(tail, torch.zeros_like(tail))


def test_activations_without_scales_and_offsets_of_strided_operands(device):
    torch.manual_seed(0)
    y = torch.randn(64, 9, device=device).bfloat16().t()
    grad = torch.ones((), device=device, dtype=torch.bfloat16).expand(9, 32)
    exact = y.double().requires_grad_()
    expected = swiglu64(exact, torch.ones(9, device=device), SwiGLUConfig(), None)
    expected.sum().backward()
    out = training.scaled_activation(y, form=SwiGLUConfig())
    grad_y, grad_scales = training.scaled_activation_gradient(grad, y, form=SwiGLUConfig())
    assert error(out, expected.detach()) < 4e-3
    assert error(grad_y, exact.grad) < 4e-3
    assert grad_scales is None


def test_nan_stays_nan(device):
    y = torch.full((1, 16), float("nan"), device=device, dtype=torch.bfloat16)
    assert training.scaled_activation(y, form=FORMS[1]).isnan().all()
    assert training.scaled_activation(y, form=None).isnan().all()


@pytest.mark.slow
def test_a_row_of_a_whole_block(device):
    torch.manual_seed(0)
    features = training._BLOCK_FEATURES
    y = torch.randn(3, 2 * features, device=device)
    grad, scales = torch.randn(3, features, device=device), torch.rand(3, device=device)
    exact, exact_scales = y.double().requires_grad_(), scales.double().requires_grad_()
    expected = swiglu64(exact, exact_scales, SwiGLUConfig(), None)
    expected.backward(grad.double())
    grad_y, grad_scales = training.scaled_activation_gradient(grad, y, scales, form=SwiGLUConfig())
    assert error(training.scaled_activation(y, scales, form=SwiGLUConfig()), expected.detach()) < 1e-5
    assert error(grad_y, exact.grad) < 1e-5
    assert error(grad_scales, exact_scales.grad) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "n", "splits"),
    [
        (torch.bfloat16, 40, [0, 5, 0, 11]),
        (torch.bfloat16, 40, [300, 0, 129, 128]),
        (torch.bfloat16, 40, [0, 0, 0]),
        pytest.param(torch.bfloat16, 40, [1] * 300, marks=pytest.mark.slow),
        pytest.param(torch.float16, 13, [0, 5, 0, 130], marks=pytest.mark.slow),
        pytest.param(torch.float32, 264, [1100], marks=pytest.mark.slow),
    ],
)
def test_bias_gradients(device, dtype, n, splits):
    torch.manual_seed(0)
    ends = torch.tensor(splits).cumsum(0)
    rows, experts = int(ends[-1]) + 5, len(splits)
    offsets = ends.to(device, torch.int32 if n == 40 else torch.int64)
    grad = torch.randn(rows, n, device=device).to(dtype)
    grad[int(ends[-1]) :] = float("nan")
    scale = None if n == 13 else torch.rand(rows, device=device).to(dtype)
    bias = torch.randn(experts, n, device=device).to(torch.float32 if n == 40 else dtype)
    expected = torch.zeros(experts, n, dtype=torch.float64)
    for row in range(rows - 5):
        expert = int((ends <= row).sum())
        expected[expert] += grad[row].double().cpu() * (1.0 if scale is None else float(scale[row]))
    got = training.bias_grad(grad, offsets, scale)
    assert got.dtype == torch.float32
    assert error(got, expected) < 1e-5
    empty = torch.tensor(splits) == 0
    assert torch.equal(got.cpu()[empty], torch.zeros(int(empty.sum()), n))

    of_scale = training.bias_scale_grad(grad, bias, offsets)
    experts_of_rows = torch.bucketize(torch.arange(rows - 5), ends, right=True)
    expected = (grad[: rows - 5].double().cpu() * bias.double().cpu()[experts_of_rows]).sum(1)
    assert error(of_scale[: rows - 5], expected) < 1e-5
    assert torch.equal(of_scale[rows - 5 :].cpu(), torch.zeros(5))


@pytest.mark.gpu
def test_bias_gradients_are_the_same_bits_in_each_run():
    torch.manual_seed(0)
    grad = torch.randn(8192, 2880, device="cuda", dtype=torch.bfloat16)
    offsets = torch.randint(0, 8193, (32,), device="cuda").sort().values.int()
    first = training.bias_grad(grad, offsets)
    assert all(torch.equal(training.bias_grad(grad, offsets), first) for _ in range(100))


@pytest.mark.parametrize(("dtype", "n"), others_slow([(torch.bfloat16, 40), (torch.float32, 13)], [torch.bfloat16]))
@pytest.mark.parametrize("in_place", [False, True])
def test_add_bias(device, dtype, n, in_place):
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 3, 14])
    y, bias = torch.randn(17, n, device=device).to(dtype), torch.randn(4, n, device=device).to(dtype)
    bias_scale, scales = torch.rand(17, device=device), torch.rand(17, device=device).to(dtype)
    y[14:], bias_scale[14:], scales[14:] = float("nan"), float("nan"), float("inf")
    of_row = bias.double()[torch.bucketize(torch.arange(14), ends, right=True).to(device)]
    expected = (y[:14].double() + of_row * bias_scale[:14, None].double()) * scales[:14, None].double()
    plain = y.clone()
    got = training.add_bias(y, ends.to(device), bias, bias_scale, scales, out=y if in_place else None)
    assert (got is y) == in_place
    assert error(got[:14], expected) < TOLERANCE[dtype]
    tail = got[14:]
    assert tail.isnan().all() if in_place else torch.equal(tail, torch.zeros_like(tail))
    without = training.add_bias(plain, ends.to(device))
    assert torch.equal(without[:14], plain[:14])
    assert torch.equal(without[14:], torch.zeros_like(tail))


def test_rows_past_the_end_become_zeros(device):
    rows = torch.full((9, 5), float("nan"), device=device)
    rows[:4] = 1
    got = training.zero_past_end(rows, torch.tensor([0, 4], device=device))
    assert torch.equal(got.cpu(), torch.tensor([[1.0], [0.0]]).repeat_interleave(torch.tensor([4, 5]), 0).expand(9, 5))


WGRADS = [
    ("any", torch.float32, 12, 70, [0, 5, 0, 11]),
    pytest.param("any", torch.bfloat16, 9, 7, [3, 20], marks=pytest.mark.slow),
    ("mma", torch.bfloat16, 136, 72, [0, 5, 0, 40]),
    pytest.param("mma", torch.float16, 16, 256, [130, 0, 3], marks=pytest.mark.slow),
    ("wgmma", torch.bfloat16, 136, 72, [0, 5, 0, 70, 64]),
    pytest.param("wgmma", torch.float16, 72, 264, [1, 63, 0], marks=pytest.mark.slow),
]


@pytest.mark.parametrize("form", ["added", "written", "narrow"])
@pytest.mark.parametrize(("kernel", "dtype", "n", "k", "splits"), WGRADS)
def test_wgrad(device, monkeypatch, kernel, dtype, n, k, splits, form):
    monkeypatch.setattr(wgrad, "MAX_EXPERTS", 2 if len(splits) == 3 else 1024)  # in two parts
    skip_without(device, kernel)
    torch.manual_seed(0)
    ends = torch.tensor(splits).cumsum(0)
    rows = int(ends[-1]) + 9
    x, grad = torch.randn(rows, k, device=device).to(dtype), torch.randn(rows, n, device=device).to(dtype)
    x[int(ends[-1]) :], grad[int(ends[-1]) :] = float("nan"), float("inf")
    out = torch.randn(len(splits), n, k, device=device)
    expected = out.double().cpu() if form == "added" else torch.zeros(len(splits), n, k, dtype=torch.float64)
    untouched = out.clone()
    if form != "added":
        out = torch.full_like(out, float("nan"), dtype=dtype if form == "narrow" else None)
    for expert, (begin, end) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        expected[expert] += grad[begin:end].double().t().cpu() @ x[begin:end].double().cpu()
    offsets = ends.to(device, torch.int64 if n == 136 else torch.int32)
    wgrad.wgrad(x, grad, offsets, out, form == "added", kernel=kernel)
    assert error(out, expected) < (TOLERANCE[dtype] if form == "narrow" else 1e-6)
    if form == "added":
        empty = torch.tensor(splits, device=device) == 0
        assert torch.equal(out[empty], untouched[empty])


LINEARS = [  # kernel, dtype, N, K, rows of each expert, rows of a tile
    ("any", torch.float32, 70, 12, [0, 5, 0, 11], 32),
    ("mma", torch.bfloat16, 136, 72, [0, 5, 0, 40], 32),
    ("wgmma", torch.bfloat16, 136, 72, [0, 5, 0, 70, 1], 64),
]
OTHER_LINEARS = [
    ("any", torch.float32, 260, 40, [130, 0, 7], 128),
    ("mma", torch.float16, 264, 24, [130, 0, 3], 128),
    ("any", torch.bfloat16, 9, 7, [3, 20], 32),
    ("wgmma", torch.float16, 200, 136, [1, 63, 0], 64),
    ("any", torch.float16, 131, 20, [40, 0, 65], 64),
    ("wgmma", torch.bfloat16, 72, 24, [270], 256),
    ("wgmma", torch.bfloat16, 72, 200, [0, 130, 9], 128),
    ("mma", torch.bfloat16, 264, 24, [300, 0, 3], 32),  # two groups of tiles
]


@pytest.mark.parametrize(
    ("kernel", "dtype", "n", "k", "splits", "tile", "transposed"),
    [
        *((*row, transposed) for row in LINEARS for transposed in (False, True)),
        *others_slow((*row, index % 2 == 1) for index, row in enumerate(OTHER_LINEARS)),
        *others_slow(((*row, index % 2 == 0) for index, row in enumerate(OTHER_LINEARS)), exhaustive=True),
    ],
)
def test_linear(device, monkeypatch, kernel, dtype, n, k, splits, tile, transposed):
    """Rows past the end are zeros, or keep a buffer's values, for any contents of rows and the next expert's weight."""
    monkeypatch.setattr(linear, "MAX_EXPERTS", 2 if len(splits) == 3 else 1024)  # in two parts
    skip_without(device, kernel)
    torch.manual_seed(0)
    ends, experts = torch.tensor(splits).cumsum(0), len(splits)
    end = int(ends[-1])
    rows = end + 9
    x = torch.randn(rows, k, device=device).to(dtype)
    x[end:] = float("nan")
    weight = torch.randn(experts, k if transposed else n, n if transposed else k, device=device).to(dtype)
    expert_of_row = torch.bucketize(torch.arange(end), ends, right=True)
    for expert, count in enumerate(splits):
        if count == 0:
            weight[expert] = float("inf")
    matrices = weight.double().cpu() if transposed else weight.mT.double().cpu()
    expected = (x[:end, None].double().cpu() @ matrices[expert_of_row])[:, 0]
    offsets = ends.to(device, torch.int64 if n == 136 else torch.int32)
    for zero_tail in (True, False):
        out = torch.full((rows, n), 7.0, device=device, dtype=dtype)
        target = operands.target(x.device)
        spec = LinearSpec(rows, experts, n, k, dtype, target, transposed, n == 136, zero_tail, into=True)
        assert linear.prepare_linear(spec, kernel, tile)(x, weight, offsets, out) is out
        assert error(out[:end], expected) < TOLERANCE[dtype]
        assert torch.equal(out[end:].cpu(), torch.full((9, n), 0.0 if zero_tail else 7.0, dtype=dtype))


def skip_without(device, kernel):
    if device == "cuda" and kernel == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    ("dtype", "n", "k"), [(torch.bfloat16, 64, 72), (torch.float16, 30, 20), (torch.float32, 30, 20)]
)
@pytest.mark.covering(1)
def test_gemms(device, monkeypatch, capability, dtype, n, k):
    """Rows past the end are NaN: zeros come of them; a buffer keeps them. Offsets that make no sense do no harm."""
    if device == "cpu":
        emulate_device(monkeypatch, 3, capability)
    elif torch.cuda.get_device_capability() != capability:
        pytest.skip("another compute capability")
    torch.manual_seed(0)
    splits = [0, 5, 0, 11]
    offsets = torch.tensor(splits, device=device).cumsum(0).int()
    x, grad = torch.randn(20, k, device=device).to(dtype), torch.randn(20, n, device=device).to(dtype)
    weight = torch.randn(4, n, k, device=device).to(dtype)
    x[16:], grad[16:] = float("nan"), float("inf")
    of_row = torch.tensor([1] * 5 + [3] * 11)
    out = training.grouped_mm(x, weight, offsets)
    assert error(out[:16], (weight.double()[of_row] @ x[:16, :, None].double())[..., 0]) < TOLERANCE[dtype]
    grad_x = training.dgrad(grad, weight, offsets)
    assert error(grad_x[:16], (grad[:16, None].double() @ weight.double()[of_row])[:, 0]) < TOLERANCE[dtype]
    assert not out[16:].any()
    assert not grad_x[16:].any()
    buffer = torch.full((20, n), 7.0, device=device, dtype=dtype)
    assert training.grouped_mm(x, weight, offsets, buffer) is buffer
    assert torch.equal(buffer[:16], out[:16])
    assert (buffer[16:] == 7).all()
    grad_w = training.wgrad(x, grad, offsets)
    expected = torch.stack([grad[a:b].double().t() @ x[a:b].double() for a, b in ((0, 0), (0, 5), (5, 5), (5, 16))])
    assert grad_w.shape == weight.shape
    assert error(grad_w, expected) < TOLERANCE[dtype]
    assert not grad_w[0].any()
    wild = torch.tensor([-3, 50, 2, 2**31 - 1], device=device)
    assert training.grouped_mm(x, weight, wild).shape == (20, n)
    assert training.wgrad(x, grad, wild).shape == weight.shape


def test_sums_of_rows(device):
    """Sums of rows at any address are right; float32 sums run in plain torch."""
    offsets, slot_row = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([2, 6], [[0, 5], [-1, 2]]))
    for dtype, tolerance in TOLERANCE.items():
        rows = torch.randn(6 * 40 + 1, device=device).to(dtype)[1:].view(6, 40)
        out, wide = rows.new_empty(2, 40), rows.double()
        assert training.combine_rows(rows, offsets, slot_row, out) is out
        assert error(out, torch.stack([wide[0] + wide[5], wide[2]])) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(emulated, dtype):
    x, weight, offsets = torch.zeros(4, 8).to(dtype), torch.zeros(1, 8, 8).to(dtype), torch.tensor([4])
    for call in (training.grouped_mm, training.dgrad, lambda *args: training.wgrad(x, x, offsets)):
        with pytest.raises(ValueError, match="x: got .*wanted dtype float32, bfloat16 or float16"):
            call(x, weight, offsets)


def test_operands_that_do_not_fit_are_refused(emulated):
    x, weight, offsets = torch.zeros(4, 8), torch.zeros(2, 16, 8), torch.tensor([1, 4])
    for bad in (weight.half(), weight[:1], weight[:, :, :4]):
        with pytest.raises(ValueError, match=r"weight: got .*wanted torch.float32 \(2, 16, 8\), for rows"):
            training.grouped_mm(x, bad, offsets)
    for bad in (torch.zeros(4, 15), torch.zeros(4, 16).half(), torch.zeros(16, 4).t()):
        with pytest.raises(ValueError, match=r"out: got .*wanted contiguous torch.float32 \(4, 16\)"):
            training.grouped_mm(x, weight, offsets, bad)
    with pytest.raises(ValueError, match="grad: got .*wanted 4 rows"):
        training.wgrad(x, torch.zeros(3, 16), offsets)


@pytest.mark.slow
def test_results_at_odd_addresses(emulated, monkeypatch):
    """The fast kernel runs, and does not write rows past the end; a warning says why an odd main_grad is slow."""
    torch.manual_seed(0)
    monkeypatch.setattr(slow_paths, "_warned", set())
    kernels, kernel_for = [], linear.kernel_for
    monkeypatch.setattr(linear, "kernel_for", lambda *args: kernels.append(kernel_for(*args)) or kernels[-1])
    x, weight, offsets = torch.randn(6, 24).half(), torch.randn(2, 72, 24).half(), torch.tensor([1, 4])
    out = torch.ones(6 * 72 + 1).half()[1:].view(6, 72)
    assert training.grouped_mm(x, weight, offsets, out) is out
    assert kernels == ["mma"]
    for expert, part in ((0, slice(0, 1)), (1, slice(1, 4))):
        assert error(out[part], x[part].double() @ weight[expert].double().T) < TOLERANCE[torch.float16]
    assert out[4:].eq(1).all()
    main_grad, grad = torch.zeros(2 * 72 * 24 + 1)[1:].view(2, 72, 24), torch.randn(6, 72).half()
    with pytest.warns(UserWarning, match="main_grad lies at no multiple of 16 bytes, .*: align it"):
        training.wgrad(x, grad, offsets, main_grad, True)
    assert error(main_grad[1], grad[1:4].double().T @ x[1:4].double()) < 1e-5


RANKS = [(torch.bfloat16, 16, 200, [0, 5, 0, 140, 1]), (torch.float16, 40, 72, [130, 0, 3])]  # dtype, R, K, rows


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize(("dtype", "rank", "k", "splits"), others_slow(RANKS, [torch.bfloat16], exhaustive=True))
def test_rank_wgrad(device, monkeypatch, dtype, rank, k, splits, wide_first, gathered):
    monkeypatch.setattr(wgrad, "MAX_EXPERTS", 2 if len(splits) == 3 else 1024)  # in two parts
    torch.manual_seed(0)
    ends = torch.tensor(splits).cumsum(0)
    end = int(ends[-1])
    rows = end + end % 2 + 2
    narrow, wide = torch.randn(rows, rank, device=device).to(dtype), torch.randn(rows, k, device=device).to(dtype)
    narrow[end:] = float("nan")
    slot = None
    if gathered:
        slot, wide = torch.randperm(rows).int().to(device), wide[: rows // 2]
    else:
        wide[end:] = float("inf")
    exact = (wide if slot is None else wide[slot.long() // 2]).double().cpu()
    offsets = ends.to(device, torch.int64 if k == 72 else torch.int32)
    got = wgrad.rank_wgrad(narrow, wide, offsets, wide_first, slot)
    for expert, (begin, stop) in enumerate(zip([0, *ends.tolist()], ends.tolist(), strict=False)):
        wanted = narrow[begin:stop].double().cpu().T @ exact[begin:stop]
        wanted = wanted.T if wide_first else wanted
        assert error(got[expert], wanted) < TOLERANCE[dtype] if stop > begin else got[expert].eq(0).all()
