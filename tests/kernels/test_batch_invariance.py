"""The batch-invariant mode on a CPU: the compiled kernels and the reference give a row the same bits among any others.
Called by pytest; calls tests/batch_invariant_cases.py for the operators and their operands.
"""

import asyncio
import contextlib
import threading

import decode_attention_cases
import pytest
import torch
import torch.nn.functional as F
from batch_invariant_cases import CASES, Rows, differing, operands
from torch.utils.checkpoint import checkpoint

from thunder_moe import (
    GroupedLinear,
    Llama4MoE,
    Llama4MoEConfig,
    SwiGLU,
    add_lora_,
    batch_invariant,
    decode_attention,
    moe_experts,
    quantize_,
    simulate_w4a4,
    use_backend,
)
from thunder_moe.kernels import reference, trainable_grouped_mm
from thunder_moe.kernels.batch_invariance import is_batch_invariant, make_batch_invariant
from thunder_moe.ops import experts_lora  # noqa: F401  (registers its operators)
from thunder_moe.ops.operator import operator_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPERATORS = [
    (backend, format, dtype, case)
    for backend in ("cpu", "reference")
    for format in ("nvfp4", "mxfp8")
    for dtype in DTYPES
    for case in CASES
]


@pytest.fixture(scope="module")
def pool():
    """Return a function that makes `Rows`, once for each dtype and format."""
    made = {}

    def make(dtype, format):
        if (dtype, format) not in made:
            inner = 80 if format == "nvfp4" else 96  # no whole number of vectors, where the format allows it
            made[dtype, format] = Rows(513, 1120, inner, dtype, format)  # K: more than a chunk of 4 KiB, and a rest
        return made[dtype, format]

    return make


@pytest.mark.covering(2)
@pytest.mark.parametrize(("backend", "format", "dtype", "case"), OPERATORS)
@torch.no_grad()
def test_rows_do_not_depend_on_others(pool, backend, format, dtype, case):
    rows = pool(dtype, format)
    with batch_invariant(), use_backend(backend):
        assert differing(rows, case, (7, 64)) == []


def test_the_mode_is_of_its_thread_or_of_the_process(pool):
    rows, found = pool(torch.float32, "nvfp4"), {}

    def run(name):
        with torch.no_grad(), use_backend("reference"):
            (found[name],) = rows.run("experts", torch.arange(513))

    def in_a_thread(name):
        thread = threading.Thread(target=run, args=(name,))
        thread.start()
        thread.join()

    with batch_invariant():
        run("inside")
        in_a_thread("context")
    make_batch_invariant()
    try:
        in_a_thread("process")
    finally:
        make_batch_invariant(False)
    assert not torch.equal(found["context"], found["inside"])
    assert torch.equal(found["process"], found["inside"])


def test_the_mode_is_of_its_asyncio_task():
    found = {}

    async def run(name, mode):
        with batch_invariant() if mode else contextlib.nullcontext():
            await asyncio.sleep(0)
            found[name] = is_batch_invariant()

    async def both():
        await asyncio.gather(run("inside", True), run("outside", False))
        await run("awaited", True)
        found["behind"] = is_batch_invariant()

    asyncio.run(both())
    assert found == dict(inside=True, outside=False, awaited=True, behind=False)


def test_the_forward_of_a_call_with_gradients(pool):
    """The result has the bits that it has without gradients; the gradients are those outside."""
    rows = pool(torch.float32, "nvfp4")
    x = rows.x[:9].clone().requires_grad_()

    def layer():
        gate_up, down, _ = rows.packed.values()
        return moe_experts(x, rows.ids[:9], rows.weights[:9], gate_up, down)

    with batch_invariant():
        out = layer()
        with torch.no_grad():
            assert torch.equal(out, layer())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (usual,) = torch.autograd.grad(layer().sum(), x)
    torch.testing.assert_close(gradient, usual)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("kind", ["quantized", "16 bits", "dense"])
def test_whole_layers(kind, dtype, grad):
    """The router and the shared expert of a `Llama4MoE`, too, and a `SwiGLU`, whose products are torch's outside."""
    torch.manual_seed(0)
    config = Llama4MoEConfig(hidden_size=96, intermediate_size=48, num_experts=5, top_k=2)
    layer = SwiGLU(96, 40, dtype=dtype) if kind == "dense" else Llama4MoE(config, dtype)
    if kind == "quantized":
        quantize_(layer)
    x = torch.randn(1, 65, 96, dtype=dtype)
    with batch_invariant(), torch.set_grad_enabled(grad):
        whole = layer(x)
        for token in (0, 17, 64):
            assert torch.equal(layer(x[:, token : token + 1])[0, 0], whole[0, token])
    torch.testing.assert_close(whole, layer(x), rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 2e-2)


FUNCTIONS = {
    "linear": lambda x: F.linear(x, torch.ones(3, x.shape[-1], dtype=x.dtype), torch.ones(3, dtype=x.dtype)),
    "mm": lambda x: torch.mm(x.flatten(0, -2), torch.ones(x.shape[-1], 3, dtype=x.dtype)),
    "matmul": lambda x: x @ torch.ones(x.shape[-1], 3, dtype=x.dtype),
    "softmax": lambda x: F.softmax(x, dim=x.ndim - 1, dtype=torch.float32),
    "softmax of a method": lambda x: x.softmax(-1),
    "softmax over rows": lambda x: x.softmax(0),
    "sigmoid": lambda x: x.sigmoid(),
    "silu": F.silu,
}


UNCHANGED = {
    "integers": lambda: torch.arange(6).view(2, 3) @ torch.arange(6).view(3, 2),
    "keywords": lambda: torch.matmul(input=torch.ones(2, 3), other=torch.ones(3, 2)),
    "a vector as weight": lambda: F.linear(torch.ones(2, 3), torch.ones(3)),
    "no in_features": lambda: F.linear(torch.ones(2, 0), torch.ones(3, 0), torch.ones(3)),
    "no columns": lambda: torch.ones(2, 0).exp(),
    "sparse": lambda: torch.eye(3).to_sparse() @ torch.ones(3, 2),
    "meta": lambda: torch.ones(2, 3, device="meta") @ torch.ones(3, 2, device="meta"),
    "dtype by position": lambda: torch.randn(2, 3).softmax(-1, torch.float64),
}
ROW, HALF = torch.ones(2, 3), torch.ones(3, 3, dtype=torch.bfloat16)
ERRORS_OF_TORCH = {
    "16-bit weight": lambda: F.linear(ROW, HALF),
    "16-bit bias": lambda: F.linear(ROW, HALF.float(), HALF[0]),
    "16-bit mm": lambda: torch.mm(ROW, HALF),
    "16-bit matmul": lambda: ROW @ HALF,
    "integer matmul": lambda: ROW @ HALF.int(),
    "mm of three dimensions": lambda: torch.mm(ROW[None], HALF.float()),
    "a bias of more rows": lambda: F.linear(ROW[:1], HALF.float(), torch.ones(4, 3)),
}


class TestFunctionsOfTorch:
    @pytest.mark.parametrize("shape", [(7, 19), (2, 3, 19), (0, 19), (2, 3, 4, 19)])
    @pytest.mark.parametrize("call", FUNCTIONS)
    def test_compute_the_same(self, call, shape):
        x = torch.randn(shape, requires_grad=True)
        expected = FUNCTIONS[call](x)
        weight = torch.randn_like(expected)
        with batch_invariant():
            out = FUNCTIONS[call](x)
        torch.testing.assert_close(out, expected)
        gradients = [torch.autograd.grad((each * weight).sum(), x)[0] for each in (out, expected)]
        torch.testing.assert_close(*gradients)

    @pytest.mark.parametrize("dtype", DTYPES[:2])
    def test_dense_layers_give_a_row_its_own_bits(self, dtype):
        layer, x = torch.nn.Linear(515, 33, dtype=dtype), torch.randn(67, 515, dtype=dtype)
        with batch_invariant(), torch.no_grad():
            whole, product = layer(x), x @ layer.weight.mT
            for row in (0, 40, 66):
                assert torch.equal(layer(x[row]), whole[row])
                assert torch.equal(x[row] @ layer.weight.mT, product[row])
                assert torch.equal(x[None, row : row + 1] @ layer.weight.mT, product[None, row : row + 1])

    def test_products_of_attention_stay(self):
        query, key = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 8, 5)
        with batch_invariant():
            assert torch.equal(query @ key, torch.matmul(query, key))
        assert torch.equal(query @ key, torch.einsum("bhqd,bhdk->bhqk", query, key))

    def test_linear_under_autocast(self):
        with batch_invariant(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert FUNCTIONS["linear"](torch.ones(2, 3, 4)).dtype == torch.bfloat16

    def test_linear_without_a_kernel(self):
        layer = torch.nn.Linear(4, 2, dtype=torch.float64)
        with batch_invariant(), pytest.raises(ValueError, match=r"a linear layer of torch.float64"):
            layer(torch.ones(1, 4, dtype=torch.float64))

    @pytest.mark.parametrize("call", UNCHANGED)
    def test_what_is_left_to_torch(self, call):
        torch.manual_seed(0)
        expected = UNCHANGED[call]()
        torch.manual_seed(0)
        with batch_invariant():
            out = UNCHANGED[call]()
        torch.testing.assert_close(out, expected)

    @pytest.mark.parametrize("call", ERRORS_OF_TORCH)
    def test_errors_of_torch_stay(self, call):
        with pytest.raises(RuntimeError) as expected:
            ERRORS_OF_TORCH[call]()
        with batch_invariant(), pytest.raises(RuntimeError) as found:
            ERRORS_OF_TORCH[call]()
        assert str(found.value) == str(expected.value)

    @pytest.mark.parametrize("call", [lambda x: torch.exp(x, out=x), lambda x: F.silu(x, inplace=True)])
    def test_functions_in_place_are_refused(self, call):
        with batch_invariant(), pytest.raises(ValueError, match="with out= or inplace=True"):
            call(torch.randn(3, 4))
        with batch_invariant(), pytest.raises(ValueError, match="out=.*leave it out"):
            torch.mm(torch.eye(3), torch.eye(3), out=torch.empty(3, 3))

    @pytest.mark.parametrize("call", [lambda f, x: torch.func.jvp(f, (x,), (x,)), lambda f, x: torch.func.jacrev(f)(x)])
    def test_transforms_are_refused(self, call):
        """An operator would have tangents of zeros."""
        for function in (lambda x: x @ torch.eye(4), torch.sigmoid):
            with batch_invariant(), pytest.raises(ValueError, match=r"in torch.func or forward-mode"):
                call(function, torch.randn(3, 4))

    def test_second_derivatives(self):
        layer, x = torch.nn.Linear(5, 3), torch.randn(4, 5, requires_grad=True)

        def second():
            (first,) = torch.autograd.grad(layer(x).sigmoid().sum(), x, create_graph=True)
            return torch.autograd.grad(first.square().sum(), [x, layer.weight])

        expected = second()
        with batch_invariant():
            out = second()
        torch.testing.assert_close(out, expected)

    @pytest.mark.parametrize("brings", [False, True])
    def test_checkpoints(self, brings):
        """Backward leaves the mode, also inside of it."""
        block, seen = torch.nn.Sequential(torch.nn.Linear(515, 33), torch.nn.SiLU(), torch.nn.Linear(33, 2)), []
        block[0].register_forward_hook(lambda module, given, out: seen.append(out.detach().clone()))
        x = torch.randn(67, 515)
        options = dict(context_fn=lambda: (contextlib.nullcontext(), batch_invariant())) if brings else {}
        block(x).sum().backward()
        expected = [parameter.grad.clone() for parameter in block.parameters()]
        for inside in (True, False):
            block.zero_grad()
            seen.clear()
            with batch_invariant():
                out = checkpoint(block, x, use_reentrant=False, **options)
                if inside:
                    out.sum().backward()
            if not inside:
                out.sum().backward()
            assert torch.equal(*seen) == brings
            torch.testing.assert_close([parameter.grad for parameter in block.parameters()], expected)

    def test_another_task_of_the_thread_computes_as_outside(self):
        layer, x = torch.nn.Linear(4, 2, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)

        async def inside():
            with batch_invariant():
                await asyncio.sleep(0)

        async def outside():
            return layer(x)

        async def both():
            return await asyncio.gather(inside(), outside())

        assert torch.equal(asyncio.run(both())[1], layer(x))


def adapters_of_experts(rows):
    gate_up, down, _ = rows.packed.values()
    weights = *operands(gate_up), *operands(down)
    operator_for("f16a_nvfp4weight_moe_experts_lora", gate_up.format)(rows.x, rows.ids, rows.weights, *weights)


def adapters_of_a_dense_layer(rows):
    model = torch.nn.Sequential(torch.nn.Linear(1120, 96))
    quantize_(model, linears=lambda module, name: True)
    add_lora_(model, rank=2, alpha=2, linears=True)
    model(rows.x)


def recipe(rows):
    GroupedLinear(2, 1120, 32, recipe="mxfp8")(rows.x, torch.tensor([1, 513], dtype=torch.int32))


def torchs_grouped_gemm(rows):
    trainable_grouped_mm.forward(rows.x, rows.x.mT[None], torch.tensor([513], dtype=torch.int32))


def rounded_activations(rows):
    with simulate_w4a4():
        rows.run("experts", torch.arange(3))


def attention(rows):
    call = decode_attention_cases.make("cpu", torch.float32, *decode_attention_cases.CASES["one head, no mask"][:5])
    decode_attention(*call[:11], epsilon=1e-6, scale=1.0)


def rows_without_a_kernel(rows):
    """Run what float32 rows on CUDA run."""
    weight, offsets = rows.packed["gate_up"].to("meta"), torch.empty(8, dtype=torch.int32, device="meta")
    reference.grouped_mm(rows.x.to("meta"), weight, offsets)


REFUSED = {
    adapters_of_experts: r"LoRA adapters of experts.*merge_lora_\(model\)",
    adapters_of_a_dense_layer: r"LoRA adapters of a dense layer.*merge_lora_\(model\)",
    recipe: "recipe 'mxfp8'.*recipe=None",
    torchs_grouped_gemm: "torch's grouped GEMM",
    rounded_activations: "backend 'w4a4'",
    rows_without_a_kernel: "torch.float32 rows on meta run in plain torch",
    attention: "decode_attention in plain torch",
}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_what_depends_on_other_rows_is_refused(pool, call):
    rows = pool(torch.float32, "nvfp4")
    with torch.no_grad(), batch_invariant(), pytest.raises(ValueError, match=f"batch_invariant: {REFUSED[call]}"):
        call(rows)
