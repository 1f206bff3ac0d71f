"""Tests CUDA GEMMs of 4-bit weights fused with a LoRA adapter's, by the emulator on a CPU, and on a GPU.
Called by pytest, with -m gpu on a GPU; judged by float64 products.
"""

from types import SimpleNamespace

import pytest
import torch
from emulated_gemms import TILED_CONFIGS, make
from emulator.guarded_memory import guarded
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error

from thunder_moe.formats.weight import NVFP4Weight
from thunder_moe.kernels import chains
from thunder_moe.kernels.cuda import backend, linear, low_rank, prepared, training, wgrad
from thunder_moe.kernels.cuda.configs import GemmConfig

ENDS = (3, 3, 40, 42)
WGMMA = {name: config for name, config in TILED_CONFIGS.items() if config.kernel == "tiled_wgmma"}


@pytest.fixture
def device(request, device):
    """Return a device of compute capability 9.0."""
    if device == "cpu":
        request.getfixturevalue("hopper")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of compute capability 9.0")
    return device


def operands(device, dtype, n, k, rank, *, transposed=False, ends=ENDS):
    """Return a 4-bit weight in tiles and its values; rows, their product with A, and B. The rows past the end are NaN.

    transposed: a gradient, its product with B, and A in place of the last three.
    """
    torch.manual_seed(0)
    weight, exact = make(len(ends), n, k)
    weight = weight.to_layout("tiled_64x64")
    weight = NVFP4Weight(*(each.to(device) for each in weight.tensors()), "tiled_64x64")
    width = n if transposed else k
    x, inner = torch.randn(ends[-1] + 2, width).to(dtype), 30 * torch.randn(ends[-1] + 2, rank).to(dtype)
    x[ends[-1] :] = inner[ends[-1] :] = float("nan")
    b = torch.randn(len(ends), *((rank, k) if transposed else (n, rank))).to(dtype)
    b[1] = float("inf")  # of an expert without rows
    return weight, exact, x, inner, b


def expected(x, exact, inner, b, *, ends=ENDS):
    """Return the float64 result of the rows that experts have."""
    parts = []
    for expert, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
        part = x[begin:end].double() @ exact[expert].double().T
        parts.append(part + inner[begin:end].double() @ b[expert].double().T if end > begin else part)
    return torch.cat(parts)


CASES = [  # configuration, dtype, N, K, R
    ("tiled wgmma", torch.bfloat16, 192, 320, 16),
    ("tiled wgmma, odd", torch.float16, 64, 64, 8),
    ("tiled wgmma, three warpgroups", torch.bfloat16, 192, 64, 40),
    ("tiled wgmma, 128 k", torch.bfloat16, 192, 512, 64),
]


@pytest.mark.parametrize(("name", "dtype", "n", "k", "rank"), others_slow(CASES, ["tiled wgmma"]))
def test_product_and_adapter(device, name, dtype, n, k, rank):
    weight, exact, x, inner, b = operands(device, dtype, n, k, rank)
    offsets = torch.tensor(ENDS, dtype=torch.int32, device=device)
    given = (each.to(device) for each in (inner, b))
    out = low_rank.grouped_mm(x.to(device), weight, offsets, *given, config=WGMMA[name])
    assert relative_error(out[: ENDS[-1]].cpu(), expected(x, exact, inner, b)) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("layout", ["linear", "tiled_64x64"])
@pytest.mark.parametrize(("n", "k", "rank"), [(192, 64, 16), (64, 192, 8), (64, 320, 40)])
def test_gradient_of_the_rows(device, layout, n, k, rank):
    dtype = torch.bfloat16
    weight, exact, grad, outer, a = operands(device, dtype, n, k, rank, transposed=True)
    offsets = torch.tensor(ENDS, dtype=torch.int32, device=device)
    out = low_rank.dgrad(grad.to(device), weight.to_layout(layout), offsets, outer.to(device), a.to(device))
    wanted = expected(grad, exact.mT, outer, a.mT)
    assert relative_error(out[: ENDS[-1]].cpu(), wanted) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("kernel", "dtype", "rank", "per_row"),
    others_slow(
        [
            (64, torch.bfloat16, 24, True),
            (192, torch.float16, 0, False),
            (192, torch.bfloat16, 40, True),
            ("192 rows", torch.bfloat16, 16, False),
            ("tiled wgmma, odd", torch.float16, 40, False),
            ("linear", torch.bfloat16, 24, False),
            ("dequantized", torch.bfloat16, 16, True),
        ],
        [64, "192 rows"],
    ),
)
def test_gradient_of_many_rows(device, monkeypatch, kernel, dtype, rank, per_row):
    """There are more stages than a block has room for, and tiles of all widths in two columns, the last half full."""
    ends, n, k = (50, 50, 150, 580), 128, 192
    weight, exact, grad, outer, a = operands(device, dtype, n, k, rank, transposed=True, ends=ends)
    if per_row:
        factors = 0.5 + torch.rand(4, n)
        of_rows = weight.global_scale[:, None] * factors.to(device)
        weight, exact = NVFP4Weight(weight.qdata, weight.scale, of_rows, weight.layout), exact * factors[..., None]
    chains.clear()
    monkeypatch.setattr(linear, "_packed_tile", lambda rows: kernel)
    monkeypatch.setattr(prepared, "packed_is_faster", lambda rows: isinstance(kernel, int))
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    weight = weight.to_layout("linear" if kernel == "linear" else weight.layout)
    if rank:
        config = low_rank._DGRAD_CONFIG if kernel == "192 rows" else WGMMA.get(kernel)
        out = low_rank.dgrad(grad.to(device), weight, offsets, outer.to(device), a.to(device), config=config)
    else:
        out = backend.grouped_mm_dgrad(grad.to(device), weight, offsets)
    chains.clear()
    wanted = expected(grad, exact.mT, outer, a.mT, ends=ends)
    for begin, end in zip((0, *ends), ends, strict=False):
        assert begin == end or relative_error(out[begin:end].cpu(), wanted[begin:end]) < KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize("rank", others_slow([12, 16, 72], [16]))
def test_where_no_kernel_does_both(device, monkeypatch, rank):
    """For other ranks, few rows and other layouts the GEMM runs, and the adapter's product is added to it."""
    dtype = torch.bfloat16
    weight, exact, x, inner, b = operands(device, dtype, 64, 64, rank)
    offsets = torch.tensor(ENDS, dtype=torch.int32, device=device)
    x, inner, b = (each.to(device) for each in (x, inner, b))
    assert low_rank.grouped_mm(x, weight, offsets, inner, b, config=GemmConfig("tiled_mma", 4, 2, 1, 2, 1)) is None
    if rank % 8 or rank > 64:
        assert low_rank.grouped_mm(x, weight, offsets, inner, b) is None
    monkeypatch.setattr(training, "select", lambda device: backend)
    out = training.grouped_mm_low_rank(x, weight.to_layout("linear"), offsets, inner, b)
    wanted = expected(*(each.cpu() for each in (x, exact, inner, b)))
    assert relative_error(out[: ENDS[-1]].cpu(), wanted) < 2 * KERNEL_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("of_gemm", "rank", "wanted"),
    [
        ((18, 2, 2, 1, 1), 16, (18, 1, 3, 1, 1)),
        ((10, 2, 3, 1, 2), 8, (10, 1, 4, 1, 2)),
        ((8, 2, 3, 1, 2), 64, (8, 2, 3, 1, 2)),
        ((24, 1, 3, 1, 1), 48, (24, 1, 3, 1, 1)),
        ((24, 1, 3, 1, 1), 56, (22, 1, 3, 1, 1)),
        ((12, 1, 4, 1, 2), 64, (10, 1, 4, 1, 2)),
        ((24, 1, 2, 1, 1), 64, (24, 1, 2, 1, 1)),
    ],
)
def test_sums_leave_registers_for_the_adapter(emulated, hopper, monkeypatch, of_gemm, rank, wanted):
    """ptxas serialises the products of the GEMM's own configurations, with an adapter beside them."""
    weight, _, x, inner, b = operands("cpu", torch.bfloat16, 64, 128, rank)
    offsets, seen = torch.tensor(ENDS, dtype=torch.int32), []
    plan = SimpleNamespace(config=GemmConfig("tiled_wgmma", *of_gemm))
    monkeypatch.setattr(low_rank, "plan_gemm", lambda *args: plan)
    monkeypatch.setattr(low_rank.operators, "run", lambda *args, config, **options: seen.append(config))
    low_rank.grouped_mm(x, weight, offsets, inner, b)
    assert seen == [GemmConfig("tiled_wgmma", *wanted)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "rank", "k"), [(torch.bfloat16, 16, 200), (torch.float16, 40, 72)])
@pytest.mark.covering(1)
def test_gather(device, dtype, rank, k, transposed):
    """An expert has rows of two tiles, and ids are not trusted."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 5, 5, 145, 146], dtype=torch.int32)
    tokens, slots = torch.randn(74, k).to(dtype), torch.randperm(148).int()
    matrix = torch.randn(5, *((k, rank) if transposed else (rank, k))).to(dtype)
    matrix[2] = float("inf")  # of an expert without rows
    matrix = matrix.mT if transposed else matrix
    rows, product = low_rank.gather(tokens.to(device), slots.to(device), matrix.to(device), ends.to(device))
    exact = tokens[slots.long() // 2][:146]
    assert torch.equal(rows[:146].cpu(), exact)
    for expert, (begin, end) in enumerate(zip((0, *ends.tolist()), ends.tolist(), strict=False)):
        wanted = exact[begin:end].double() @ matrix[expert].double().T
        assert end == begin or relative_error(product[begin:end].cpu(), wanted) < KERNEL_TOLERANCE[dtype]
    slots[0] = 10**9
    rows, _ = low_rank.gather(tokens.to(device), slots.to(device), matrix.to(device), ends.to(device))
    assert torch.equal(rows[0].cpu(), tokens[-1])


@pytest.mark.slow
def test_gather_of_a_high_rank_with_little_shared_memory(emulated):
    """Other devices than SM90 run three stages instead of four."""
    torch.manual_seed(0)
    ends, slots = torch.tensor([130, 140], dtype=torch.int32), torch.randperm(140)
    tokens, matrix = torch.randn(70, 328).bfloat16(), torch.randn(2, 64, 328).bfloat16()
    rows, product = low_rank.gather(tokens, slots.int(), matrix, ends)
    assert torch.equal(rows, tokens[slots // 2])
    for expert, part in enumerate((slice(130), slice(130, 140))):
        wanted = rows[part].double() @ matrix[expert].double().T
        assert relative_error(product[part], wanted) < KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("rank", others_slow([8, 16], [8]))
def test_reads_nothing_beyond_its_operands(emulated, hopper, monkeypatch, rank):
    """Memory beyond the operands faults."""
    dtype, offsets = torch.bfloat16, guarded(torch.tensor(ENDS, dtype=torch.int32))
    weight, exact, x, inner, b = operands("cpu", dtype, 192, 320, rank)
    x, inner, b = (guarded(each) for each in (x[: ENDS[-1]].clone(), inner[: ENDS[-1]].clone(), b))
    weight = NVFP4Weight(*map(guarded, weight.tensors()), "tiled_64x64")
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: guarded(torch.empty(*shape, dtype=self.dtype)))
    out = low_rank.grouped_mm(x, weight, offsets, inner, b, config=WGMMA["tiled wgmma"])
    assert relative_error(out, expected(x, exact, inner, b)) < KERNEL_TOLERANCE[dtype]
    slots, a = guarded(torch.randperm(ENDS[-1]).int()), guarded(torch.randn(4, rank, 320).to(dtype))
    grad = guarded(torch.randn(ENDS[-1], 192).to(dtype))
    for of_rows in (low_rank._DGRAD_CONFIG, None):
        out = low_rank.dgrad(grad, weight, offsets, inner, a, config=of_rows)
        assert relative_error(out, expected(grad, exact.mT, inner, a.mT)) < KERNEL_TOLERANCE[dtype]
    tokens = guarded(torch.randn(ENDS[-1] // 2, 320).to(dtype))
    rows, product = low_rank.gather(tokens, slots, a, offsets)
    assert torch.equal(rows, tokens[slots.long() // 2])
    for narrow, wide, row_slot in ((product, tokens, slots), (inner, x, None)):
        for wide_first in (False, True):
            grads = wgrad.rank_wgrad(narrow, wide, offsets, wide_first, row_slot)
            exact_rows = wide if row_slot is None else rows
            wanted = narrow[3:40].double().T @ exact_rows[3:40].double()
            assert relative_error(grads[2], wanted.T if wide_first else wanted) < KERNEL_TOLERANCE[dtype]
