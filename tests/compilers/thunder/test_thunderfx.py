"""thunderfx with moe_executor, by Thunder's own entry point and as the inner compiler of the torch.compile backend.
Called by pytest; judged as NVIDIA Fuser's and Thunder's tests of their MoE layer are: one graph, no split, and what the
layer computes eagerly, with weights that NVFP4 holds exactly.
"""

import copy

import pytest
import thunder
import torch
import torch.nn.functional as F
from both_compilers import decisions
from differential.runtime import exact
from fast_cases import others_slow
from oracle import relative_error
from thunder.dynamo import ThunderCompiler, thunderfx
from thunder.recipes import BaseRecipe
from tiny_models import tiny_config, tiny_model
from tiny_models import tokens as token_ids
from torch import nn
from transformers import StaticCache

from thunder_moe import Llama4MoE, Llama4MoEConfig, moe_executor, quantize_, rewrite_report

pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
BF16 = torch.bfloat16
E, H, INTERMEDIATE = 4, 64, 32
ROWS, ENDS = torch.randn(8, H).to(BF16), torch.tensor([2, 4, 6, 8], dtype=torch.int32)
IN_4_BITS, IN_16_BITS = ["nvfp4 + swiglu", "nvfp4 + swiglu", "nvfp4"], ["16-bit"] * 3


def by_thunderfx(function, **options):
    return thunderfx(function, executors=[moe_executor], **options)


def by_backend(function, **options):
    return torch.compile(function, backend="thunder_moe", options={"thunder_moe.inner": "thunder"}, **options)


BOTH = pytest.mark.parametrize("compile_", [by_thunderfx, by_backend])


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(H, INTERMEDIATE, bias=False, dtype=BF16) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, H, bias=False, dtype=BF16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GroupedSwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Parameter(exact(E, INTERMEDIATE, H, seed)) for seed in (1, 2))
        self.down = nn.Parameter(exact(E, H, INTERMEDIATE, 3))

    def forward(self, rows, ends):
        gate = torch._grouped_mm(rows, self.gate.transpose(-1, -2), offs=ends)
        up = torch._grouped_mm(rows, self.up.transpose(-1, -2), offs=ends)
        return torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-1, -2), offs=ends)


class Layer(nn.Module):
    """A layer like in Thunder's tests: a shared expert, and routed ones on rows sorted by expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(H, E, bias=False, dtype=BF16)
        self.shared, self.routed = SwiGLU(), GroupedSwiGLU()

    def forward(self, x):
        tokens = x.view(-1, H)
        best, ids = self.router(tokens).topk(1, dim=-1)
        chosen = torch.zeros(tokens.shape[0], E, dtype=torch.int64).scatter(1, ids, 1)
        order = ids.view(-1).argsort()
        ends = torch.cumsum(chosen.sum(0), 0, dtype=torch.int32)
        out = self.routed((tokens * best.sigmoid())[order], ends)
        return self.shared(x) + out[order.argsort()].reshape(x.shape)


class Experts(GroupedSwiGLU):
    """Experts alone, of eight rows: Thunder traces them in a third of a layer's time."""

    def forward(self, rows):
        return super().forward(rows, ENDS)


def layer(kind, trainable=False):
    if kind is Layer:
        return Layer().requires_grad_(trainable)
    model = Llama4MoE(Llama4MoEConfig(H, INTERMEDIATE, E), dtype=BF16).requires_grad_(trainable)
    with torch.no_grad():
        for seed, name in enumerate(("gate", "up", "down")):
            weight = getattr(model.routed_experts, f"{name}_proj").weight
            weight.copy_(exact(*weight.shape, seed))
    return model


def tokens(number):
    """Return tokens without ties between experts: top-k may choose either of two equal ones."""
    return torch.randn(2, number, H, generator=torch.Generator().manual_seed(number)).to(BF16)


def run(function, model, x):
    """Return the output, and the gradients of the input and of the parameters where there are any."""
    model.zero_grad()
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    y = function(x)
    if y.requires_grad:
        (y.float() * torch.linspace(-1, 1, H)).sum().backward()
    grads = {"x": x.grad} | {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach()} | {name: grad.clone() for name, grad in grads.items() if grad is not None}


def check(compiled, model, x):
    got, wanted = run(compiled, model, x), run(model, model, x)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert relative_error(got[name], value) < 0.02, name
    torch.testing.assert_close(got["y"], wanted["y"], atol=1e-2 * float(wanted["y"].abs().max()), rtol=1e-2)


def check_unsplit(compiled, graphs=1):
    assert len(compiled._backend.subgraph_infos) == graphs
    assert all(not info.split_reasons for info in compiled._backend.subgraph_infos)


@pytest.mark.parametrize("kind", [Layer, *others_slow([Llama4MoE], exhaustive=True)])
@pytest.mark.parametrize(
    ("trainable", "mode"),
    [
        (False, torch.no_grad),
        *others_slow([(True, torch.enable_grad), (True, torch.no_grad), (False, torch.enable_grad)], exhaustive=True),
    ],
)
def test_a_layer_is_one_graph(kind, trainable, mode):
    model, x = layer(kind, trainable), tokens(8)
    compiled = by_thunderfx(model, nv_enable_linear=True)
    with mode():
        for _ in range(2):
            check(compiled, model, x)
    check_unsplit(compiled)
    assert decisions(compiled) == (IN_16_BITS if trainable and mode is torch.enable_grad else IN_4_BITS)
    assert compiled.last_traces


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Layer, *others_slow([Llama4MoE], exhaustive=True)])
@pytest.mark.parametrize("trainable", [False, *others_slow([True], exhaustive=True)])
def test_other_numbers_of_tokens(kind, trainable):
    model = layer(kind, trainable)
    compiled = by_thunderfx(model)
    for number in (3, 8, 11):
        check(compiled, model, tokens(number))
    check_unsplit(compiled, graphs=2)


@pytest.mark.slow
def test_weights_that_change_are_packed_again():
    model = Experts()
    compiled = by_thunderfx(model)
    for _ in range(2):
        with torch.no_grad():
            check(compiled, model, ROWS)
        check(compiled, model, ROWS)
        for parameter in model.parameters():
            parameter.data.mul_(-2)  # leaves no trace, as some optimizers


def test_the_plugin_in_a_recipe_with_thunderfx():
    model = Experts().requires_grad_(False)
    compiled = thunder.compile(model, recipe=BaseRecipe(interpreter="thunder.fx"), plugins="nvfp4-moe")
    check(compiled, model, ROWS)
    assert decisions(compiled) == IN_4_BITS


def test_options_are_those_of_thunder_jit():
    from thunder.core.transform_common import Transform

    model, given = Experts().requires_grad_(False), [Transform()]
    before = list(given)
    compiled = thunderfx(model, executors=["thunder_moe"], transforms=given, moe_format="mxfp8")
    compiled(ROWS)
    assert decisions(compiled) == ["mxfp8 + swiglu", "mxfp8 + swiglu", "mxfp8"]
    assert given == before
    with pytest.raises(Exception, match="moe_format: got 'int4', wanted one of"):
        by_thunderfx(model, moe_format="int4")(ROWS)


def test_a_report_before_the_first_call():
    with pytest.raises(ValueError, match="not called yet"):
        rewrite_report(by_thunderfx(layer(Layer)))


def test_the_compiler_alone_is_a_backend_with_a_report():
    model = Experts().requires_grad_(False)
    compiled = torch.compile(model, backend=ThunderCompiler(executors=[moe_executor]))
    check(compiled, model, ROWS)
    assert decisions(compiled) == IN_4_BITS


def test_compilers_without_the_executor_are_thunders_own(monkeypatch):
    monkeypatch.setattr(ThunderCompiler.__call__, "__wrapped__", lambda compiler, gm, inputs: "Thunder's own")
    assert ThunderCompiler()(None, []) == "Thunder's own"


# ---- both ways in


class Gemm(nn.Module):
    """One weight (E, N, K), a parameter or a buffer, and a forward that is given."""

    def __init__(self, body, buffer=False):
        super().__init__()
        weight = exact(E, INTERMEDIATE, H, 1)
        self.weight = nn.Buffer(weight) if buffer else nn.Parameter(weight, requires_grad=False)
        self.body = body

    def forward(self, x, ends):
        return self.body(self, x, ends)


def gemm(self, x, ends):
    return torch._grouped_mm(x, self.weight.mT, offs=ends)


def changed_between(self, x, ends):
    y = gemm(self, x, ends)  # reads one view of the weight, as the second one does
    self.weight.mul_(0.5)
    return y + gemm(self, x, ends)


def changed_between_products(self, x, ends):
    y = x @ self.weight[0].T
    self.weight.mul_(0.5)
    return gemm(self, x, ends) + y + x @ self.weight[0].T


def in_inference_mode(self, x, ends):
    with torch.inference_mode():
        return gemm(self, x, ends)


@BOTH
def test_a_weight_in_a_buffer(compile_):
    model = Gemm(gemm, buffer=True)
    compiled = compile_(model)
    assert relative_error(compiled(ROWS, ENDS), model(ROWS, ENDS)) < 0.01
    assert decisions(compiled) == ["nvfp4"]
    assert rewrite_report(compiled).entries[0].gemm.weight == "weight"


@BOTH
@pytest.mark.parametrize("body", [changed_between, changed_between_products])
@pytest.mark.covering(1)
def test_a_weight_that_changes_between_its_reads(compile_, body):
    model = Gemm(body)
    reference, compiled = copy.deepcopy(model), compile_(model)
    for _ in range(2):
        assert relative_error(compiled(ROWS, ENDS), reference(ROWS, ENDS)) < 0.01
        assert torch.equal(model.weight, reference.weight)
    assert set(decisions(compiled)) == {"16-bit"}
    assert "may be changed in place by mul_" in rewrite_report(compiled).entries[0].reason


@BOTH
def test_inference_mode_inside_is_refused(compile_):
    with pytest.raises(Exception, match=r"torch.inference_mode\(\) inside of what thunderfx compiles"):
        compile_(Gemm(in_inference_mode))(ROWS, ENDS)
    assert not torch.is_inference_mode_enabled()
    model = Gemm(gemm)
    with torch.inference_mode():
        assert relative_error(compile_(model)(ROWS, ENDS), model(ROWS, ENDS)) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("compile_", [by_backend, *others_slow([by_thunderfx], exhaustive=True)])
def test_an_unconverted_layer_of_transformers(compile_):
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    config = llama4.Llama4TextConfig(
        hidden_size=H, intermediate_size=INTERMEDIATE, num_local_experts=E, num_experts_per_tok=1
    )
    model = llama4.Llama4TextMoe(config).to(BF16).requires_grad_(False)
    model.experts.gate_up_proj.copy_(exact(E, 2 * INTERMEDIATE, H, 1).mT)
    model.experts.down_proj.copy_(exact(E, H, INTERMEDIATE, 2).mT)
    for linear in (model.router, *model.shared_expert.children()):
        if isinstance(linear, nn.Linear):
            nn.init.normal_(linear.weight, std=0.1)
    x, compiled = tokens(8), compile_(model)
    assert relative_error(compiled(x)[0], model(x)[0]) < 0.02
    assert decisions(compiled) == ["nvfp4 + swiglu", "nvfp4"]


def test_operators_behind_a_size():
    """Rows past the end are zeroed by their number, which is the size of a result."""

    def function(x, ends):
        y = torch.ops.thunder_moe.grouped_linear(x, weight, ends)
        return y.sum() + x.sum()

    weight, x = exact(E, INTERMEDIATE, H, 1), ROWS.clone().requires_grad_()
    ends, compiled = torch.tensor([2, 2, 4, 5], dtype=torch.int32), by_thunderfx(function)
    compiled(x, ends).backward()
    wanted = torch.ones(5, INTERMEDIATE)
    expected = torch.cat([
        torch.cat([wanted[a:b] @ weight[e].float() for e, (a, b) in enumerate([(0, 2), (2, 2), (2, 4), (4, 5)])]),
        torch.zeros(3, H),
    ]) + 1  # fmt: skip
    assert relative_error(x.grad, expected) < 0.01
    check_unsplit(compiled)


def test_modes_of_inductor_are_refused():
    with pytest.raises(
        Exception, match="mode: got 'reduce-overhead', which the inner compiler 'thunder' does not have"
    ):
        torch._dynamo.lookup_backend("thunder_moe")(
            None, [], mode="reduce-overhead", options={"thunder_moe.inner": "thunder"}
        )


def test_offsets_that_change_behind_gemms():
    """Thunder's own executors would change them before, by their fusion."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trainable = nn.Parameter(exact(E, 48, 16, 1))
            self.frozen = nn.Parameter(exact(E, 48, 16, 2, transposed=True), requires_grad=False)

        def forward(self, x, ends, other, scale):
            rows = x * scale.float().sigmoid().to(x.dtype)
            gate = torch._grouped_mm(rows, torch.transpose(self.trainable, 1, 2), offs=ends)
            up = torch._grouped_mm(rows, self.frozen, offs=ends)
            out = up * F.silu(gate)
            ends.add_(other - ends)
            return (out,)

    model, x, scale = Model(), torch.randn(8, 16).to(BF16), torch.randn(8, 1).to(BF16)
    first, second = (torch.tensor([1, 1, 7, 8], dtype=torch.int32) for _ in range(2))
    assert relative_error(by_backend(model)(x, first, ENDS, scale)[0], model(x, second, ENDS, scale)[0]) < 0.01
    assert torch.equal(first, ENDS)


def turned(x):
    """Thunder leaves complex numbers to inductor, so what is behind them is another part."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * pairs).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("slices", [lambda x: x.chunk(3, -1), lambda x: [x.narrow(-1, 4 * i, 4) for i in range(3)]])
@BOTH
@pytest.mark.covering(1)
def test_parts_of_one_tensor_behind_a_split(compile_, slices):
    """Thunder takes inputs of one storage for one tensor, if another tensor is changed in place: v was k."""

    def function(x, cache):
        q, k, v = slices(x * 2)
        q = turned(q)
        cache.add_(k)
        return q + cache, cache * v

    x, caches = torch.randn(2, 12), [torch.ones(2, 4) for _ in range(2)]
    compiled = compile_(function)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, caches[0]), function(x, caches[1]))
    torch.testing.assert_close(*caches)


def test_views_of_one_tensor_as_inputs():
    def function(k, v, cache):
        cache.copy_(k)
        return cache + v

    both, cache = torch.randn(2, 8), torch.zeros(2, 4)
    torch.testing.assert_close(by_thunderfx(function)(both[:, :4], both[:, 4:], cache), both[:, :4] + both[:, 4:])
    with pytest.raises(Exception, match="shares memory with another tensor, and one of them is changed in place"):
        by_thunderfx(function)(both[:, :4], both[:, 4:], both[:, 2:6])


def test_inputs_that_share_memory_in_a_later_call_alone():
    def function(k, v, cache):
        cache.copy_(k)
        return cache + v

    compiled, cache = by_thunderfx(function), torch.zeros(2, 4)
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    torch.testing.assert_close(compiled(one, other, cache), one + other)
    both = torch.randn(4, 4)
    with pytest.raises(NotImplementedError, match="share memory, which the inputs of the compilation did not"):
        compiled(both[:2], both[2:], cache)
    torch.testing.assert_close(compiled(other, one, cache), one + other)
    empty = by_thunderfx(function)
    assert empty(one[:0], other[:0], cache[:0]).shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "other"), [(torch.float32, lambda x: x.view(torch.int32)), (torch.complex64, torch.conj)]
)
def test_other_numbers_in_the_memory_of_an_input(dtype, other):
    def function(x, y, cache):
        cache.add_(1)
        return x * 2, y + 1

    x = torch.randn(2, 4, dtype=dtype)
    torch.testing.assert_close(by_thunderfx(function)(x, other(x), torch.zeros(2)), (x * 2, other(x) + 1))


@pytest.mark.parametrize("trained", ["x", "y", "xy"])
def test_gradients_of_a_tensor_and_its_detached_alias(trained):
    def function(x, y, cache):
        cache.add_(1)
        return (x * 2 + y * 3).square().sum()

    x = torch.randn(2, 4)
    pairs = [[x.detach().requires_grad_(name in trained) for name in "xy"] for _ in range(2)]
    for run, pair in zip((by_thunderfx(function), function), pairs, strict=True):
        run(*pair, torch.zeros(2)).backward()
    for got, wanted in zip(*pairs, strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


@pytest.mark.parametrize(
    "device", [*others_slow(["cpu"], exhaustive=True), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_decode_steps_with_4_bit_dense_layers(device):
    """q, k and v are parts of one GEMM's result; on CUDA, torch.compile would put norms into the layers behind them."""
    model = tiny_model("llama4", BF16, tiny_config("llama4", 1)).to(device)
    model = quantize_(model, linears="*").requires_grad_(False)
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    compiled = by_thunderfx(model)
    with torch.no_grad():
        for cache in caches:
            model(token_ids(1, 5).to(device), past_key_values=cache)
        for _ in range(2):
            ids = token_ids(1, 1).to(device)
            got, wanted = (f(ids, past_key_values=c).logits for f, c in zip((compiled, model), caches, strict=True))
            assert relative_error(got, wanted) < 0.02
