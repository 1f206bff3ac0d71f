"""Operators on CUDA, whose calls after the first run a chain that is prepared by then: equal to the first, at any
address, of operands of any strides and dtypes.
Called by pytest; the kernels run by the emulator.
"""

import pytest
import torch
from emulated_gemms import make
from oracle import relative_error

import thunder_moe.ops.experts
import thunder_moe.ops.router  # noqa: F401  (they register the operators)
from thunder_moe.formats import mxfp8
from thunder_moe.formats.registry import find_format
from thunder_moe.kernels import select, slow_paths
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS
from thunder_moe.ops.scaled_mm import dense_operands
from thunder_moe.routing import RouterConfig

E, T, A, H, INNER, BF16 = 4, 5, 2, 64, 64, torch.bfloat16
OFFSETS = torch.tensor([1, 4, 4, 10], dtype=torch.int32)
OPS, FORM = torch.ops.thunder_moe, dict(alpha=1.702, limit=1.5, up_shift=1.0)


@pytest.fixture(autouse=True)
def prepared_chains(chains, monkeypatch):
    """Operators on this CPU run the CUDA kernels, after the first call by chains."""
    monkeypatch.setattr(slow_paths, "_warned", set())


def weights(layout, format="nvfp4"):
    if format == "mxfp8":
        packed = [mxfp8.quantize(torch.randn(E, n, k)) for n, k in ((2 * INNER, H), (H, INNER))]
    else:
        packed = [make(E, 2 * INNER, H, halves=2)[0], make(E, H, INNER)[0]]
    return [weight.to_layout(layout) for weight in packed]


CASES = (
    "mm",
    "swiglu",
    "scaled swiglu",
    "combine",
    "weighted combine",
    "dgrad",
    "dgrad of row scales",
    "dense",
    "layer",
)


def make_call(case, format, layout):
    """Return (operator, arguments, options, how many rows of the result are defined)."""
    gate_up, down = weights(layout, format)
    ids, scores, x = torch.randint(-1, E + 1, (T, A)), torch.rand(T, A), torch.randn(T, H, dtype=BF16)
    row_slot, offsets, slot_row = cuda.route(ids, E)
    rows, first, second = torch.randn(T * A, INNER, dtype=BF16), operands(gate_up), operands(down)
    biases = torch.randn(E, 2 * INNER, dtype=BF16), torch.randn(E, H)
    name, args, options = {
        "mm": ("scaled_grouped_mm", (rows, *second, offsets), {}),
        "swiglu": ("grouped_swiglu", (x, *first, offsets, row_slot), {}),
        "scaled swiglu": ("grouped_swiglu", (x, *first, offsets, row_slot, scores, biases[0]), FORM),
        "combine": ("grouped_mm_combine", (rows, *second, offsets, slot_row), {}),
        "weighted combine": ("grouped_mm_combine", (rows, *second, offsets, slot_row, scores, biases[1]), {}),
        "dgrad": ("scaled_grouped_mm_dgrad", (rows, *second, offsets), {}),
        "dgrad of row scales": (
            "scaled_grouped_mm_dgrad",
            (torch.randn(T * A, 2 * INNER).to(BF16), *first, offsets),
            {},
        ),
        "dense": ("scaled_mm", (x, *dense_operands(down), torch.randn(H)), {}),
        "layer": ("moe_experts", (x, ids, scores, *first, *second, *biases), FORM),
    }[case]
    layouts = ("gate_up_layout", "down_layout") if case == "layer" else ("layout",)
    options = options | dict.fromkeys(layouts, layout)
    of_tokens = name in ("grouped_mm_combine", "scaled_mm", "moe_experts")
    return getattr(OPS, f"f16a_{format}weight_{name}"), args, options, T if of_tokens else int(offsets[-1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_later_calls_equal_the_first(chains, layout, format, case):
    operator, args, options, live = make_call(case, format, layout)
    first = operator(*args, **options)[:live]
    chains.clear()
    for _ in range(2):
        assert torch.equal(operator(*args, **options)[:live], first)
    assert not chains
    with select.use_backend("reference"):
        assert relative_error(first, operator(*args, **options)[:live]) < 1e-2


@pytest.mark.parametrize("shape", [(H,), (2, 3, H)])
def test_dense_layers_of_any_leading_dimensions(layout, shape):
    operator, (_, *packed), options, _ = make_call("dense", "nvfp4", layout)
    x = torch.randn(shape, dtype=BF16)
    expected = operator(x.view(-1, H), *packed, **options).view(*shape[:-1], INNER)
    for _ in range(2):
        assert torch.equal(operator(x, *packed, **options), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_a_result_of_odd_features_may_be_changed_in_place(format):
    """One row of it looks contiguous with the column that its kernel adds, too."""
    weight, offsets = operands(find_format(format).quantize(torch.randn(E, 17, H))), torch.ones(E, dtype=torch.int32)
    operator = OPERATORS[f"f16a_{format}weight_scaled_grouped_mm"]
    for _ in range(2):
        out = operator(torch.randn(1, H, dtype=BF16, requires_grad=True), *weight, offsets)
        assert out.stride() == (17, 1)
        assert not out._is_view()
        out.mul_(2).sum().backward()


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_routing(tokens, biased):
    logits, ids = torch.randn(tokens, 40), torch.randint(-1, E + 1, (tokens, A))
    args = (logits, torch.randn(40)) if biased else (logits,)
    form = dict(top_k=4, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)
    wanted = cuda.router(logits, args[1] if biased else None, RouterConfig(**form), BF16)
    order = cuda.route(ids, E)
    for _ in range(2):
        assert all(map(torch.equal, OPS.moe_router(*args, **form, scores_dtype=BF16), wanted))
        assert all(map(torch.equal, OPS.moe_route(ids, E), order))


def shift(tensor):
    """Return a copy at an address that is not a multiple of 16."""
    flat = tensor.contiguous().flatten()
    shifted = torch.cat([flat[:1], flat])[1:].view(tensor.shape)
    assert shifted.data_ptr() % 16
    return shifted


def test_operands_may_lie_unaligned(layout):
    operator, (rows, codes, *others), options, live = make_call("mm", "nvfp4", layout)
    operator(rows, codes, *others, **options)
    expected = operator(rows, codes, *others, **options)[:live]
    moved = shift(codes.mT).mT
    assert torch.equal(operator(shift(rows), moved, *others, **options)[:live], expected)


def test_another_backend_is_asked_anew():
    operator, args, _, live = make_call("mm", "nvfp4", "linear")
    results = [operator(*args)[:live] for _ in range(2)]
    with select.use_backend("w4a4"):  # which rounds the rows, too
        assert relative_error(operator(*args)[:live], results[1]) > 0.02


def test_operands_that_have_to_be_converted():
    operator, args, _, _ = make_call("weighted combine", "nvfp4", "linear")
    rows, offsets, bias = args[0], args[4], args[7]
    expected = operator(*args)
    strided = (rows.t().contiguous().t(), *args[1:4], offsets.repeat_interleave(2)[::2], *args[5:7], bias.double())
    for position in (0, 4, 7):
        changed = [new if i == position else old for i, (old, new) in enumerate(zip(args, strided, strict=True))]
        for _ in range(2):
            assert torch.equal(operator(*changed), expected)
    with pytest.warns(UserWarning, match="no CUDA kernel serves activations in float32"):
        assert relative_error(operator(rows.float(), *args[1:]), expected) < 1e-2
    none = args[5].new_full((T, A), -1)
    assert operator(rows[:0], *args[1:4], 0 * offsets, none, *args[6:]).eq(0).all()
