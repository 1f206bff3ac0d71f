"""Tests the description of operators: schemas stay what saved programs have, and the parts agree.
Called by pytest."""

import inspect
import re

import pytest
import torch
from interpreters import fresh_python
from oracle import relative_error
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from thunder_moe import f16a_nvfp4weight_scaled_grouped_mm, moe_route
from thunder_moe.compilers import nvf_cutlass  # noqa: F401  (registers its operator)
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.kernels.select import use_backend
from thunder_moe.ops import (  # noqa: F401  (register the operators)
    add_norm,
    decode_attention,
    experts_lora,
    fake_quantize,
    operator,
    scaled_mm,
)
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS, is_plain_eager
from thunder_moe.ops.scaled_mm import dense_operands

DENSE_WEIGHT = "Tensor fp4_weight, Tensor weight_scaling_factor, Tensor weight_global_scale"
WEIGHT = "Tensor fp4_weight, Tensor weight_scaling_factor, Tensor weight_global_scale, Tensor offsets"
SCHEMAS = {
    "f16a_nvfp4weight_scaled_grouped_mm": f"(Tensor activation, {WEIGHT}, Tensor? blockscale_offsets=None,"
    ' Tensor? problem_sizes=None, *, str layout="linear") -> Tensor',
    "f16a_nvfp4weight_scaled_grouped_mm_dgrad": f'(Tensor grad, {WEIGHT}, *, str layout="linear") -> Tensor',
    "f16a_nvfp4weight_grouped_swiglu": f"(Tensor activation, {WEIGHT}, Tensor? row_slot=None,"
    ' Tensor? slot_scale=None, Tensor? bias=None, *, str layout="linear", float alpha=1., float? limit=None,'
    " float up_shift=0.) -> Tensor",
    "f16a_nvfp4weight_grouped_mm_combine": f"(Tensor activation, {WEIGHT}, Tensor slot_row,"
    ' Tensor? slot_weight=None, Tensor? bias=None, *, str layout="linear") -> Tensor',
    "f16a_nvfp4weight_moe_experts": "(Tensor hidden_states, Tensor expert_ids, Tensor expert_weights,"
    " Tensor gate_up, Tensor gate_up_scale, Tensor gate_up_global_scale,"
    " Tensor down, Tensor down_scale, Tensor down_global_scale,"
    " Tensor? gate_up_bias=None, Tensor? down_bias=None,"
    " Tensor? row_slot=None, Tensor? offsets=None, Tensor? slot_row=None, *, bool weight_on_input=False,"
    ' str gate_up_layout="linear", str down_layout="linear", float alpha=1., float? limit=None,'
    " float up_shift=0., SymInt expert_ranks=1) -> Tensor",
    "f16a_nvfp4weight_scaled_mm": f"(Tensor activation, {DENSE_WEIGHT}, Tensor? bias=None, *,"
    ' str layout="linear", bool prefetch=False) -> Tensor',
    "f16a_nvfp4weight_add_norm_scaled_mm": f"(Tensor activation, Tensor residual, Tensor norm_weight, {DENSE_WEIGHT},"
    ' Tensor? bias=None, *, float epsilon, str layout="linear", bool prefetch=False) -> (Tensor, Tensor)',
    "add_norm_linear_router": "(Tensor hidden_states, Tensor residual, Tensor norm_weight, Tensor weight,"
    " Tensor? linear_bias=None, Tensor? bias=None, *, float norm_epsilon, SymInt top_k,"
    ' str score="softmax", bool normalize=True, float epsilon=0., float least_sum=0., float scale=1.,'
    " SymInt num_groups=1, SymInt top_groups=1, SymInt group_best=2, bool mask_to_zero=False,"
    " ScalarType? logits_dtype=None, ScalarType? scores_dtype=None, bool prefetch=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "f16a_nvfp4weight_scaled_mm_dgrad": f'(Tensor grad, {DENSE_WEIGHT}, *, str layout="linear") -> Tensor',
    "decode_attention": "(Tensor query, Tensor key, Tensor value, Tensor(a3!) key_cache, Tensor(a4!) value_cache,"
    " Tensor position, Tensor? mask=None, Tensor? cos=None, Tensor? sin=None, Tensor? query_norm=None,"
    " Tensor? key_norm=None, *, float epsilon=0., float scale, bool prefetch=False) -> Tensor",
    "moe_linear_router": "(Tensor hidden_states, Tensor weight, Tensor? linear_bias=None, Tensor? bias=None, *,"
    ' SymInt top_k, str score="softmax", bool normalize=True, float epsilon=0., float least_sum=0., float scale=1.,'
    " SymInt num_groups=1, SymInt top_groups=1, SymInt group_best=2, bool mask_to_zero=False,"
    " ScalarType? logits_dtype=None, ScalarType? scores_dtype=None, bool prefetch=False)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "moe_route": "(Tensor expert_ids, SymInt num_experts) -> (Tensor, Tensor, Tensor)",
    "moe_router": '(Tensor logits, Tensor? bias=None, *, SymInt top_k, str score="softmax", bool normalize=True,'
    " float epsilon=0., float least_sum=0., float scale=1., SymInt num_groups=1, SymInt top_groups=1,"
    " SymInt group_best=2, bool mask_to_zero=False, ScalarType? scores_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "mxfp8_fake_quantize": "(Tensor weight) -> Tensor",
    "nvfp4_fake_quantize": "(Tensor weight, *, str? scale_search=None) -> Tensor",
    "moe_combine": "(Tensor rows, Tensor offsets, Tensor slot_row) -> Tensor",
    "nvf_cutlass_scaled_grouped_mm": f"(Tensor activation, {WEIGHT}, Tensor blockscale_offsets, Tensor problem_sizes)"
    " -> Tensor",
    "f16a_nvfp4weight_moe_experts_lora": "(Tensor hidden_states, Tensor expert_ids, Tensor expert_weights,"
    " Tensor gate_up, Tensor gate_up_scale, Tensor gate_up_global_scale, Tensor down, Tensor down_scale,"
    " Tensor down_global_scale, Tensor? gate_up_a=None, Tensor? gate_up_b=None, Tensor? down_a=None,"
    " Tensor? down_b=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, Tensor? row_slot=None,"
    ' Tensor? offsets=None, Tensor? slot_row=None, *, bool weight_on_input=False, str gate_up_layout="linear",'
    ' str down_layout="linear", float alpha=1., float? limit=None, float up_shift=0.) ->'
    " (Tensor, Tensor, Tensor, Tensor)",
}
# The operators in MXFP8 lack the global scales and nvFuser's arguments.
_ABSENT = r", Tensor (\w+_)?global_scale|, Tensor\? (blockscale|problem)\w+=None"
SCHEMAS |= {
    name.replace("nvfp4", "mxfp8"): re.sub(_ABSENT, "", schema).replace("fp4_weight", "fp8_weight")
    for name, schema in SCHEMAS.items()
    if "nvfp4weight" in name
}


def test_schemas():
    found = {name: str(getattr(torch.ops.thunder_moe, name).default._schema) for name in OPERATORS}
    assert found == {name: f"thunder_moe::{name}{schema}" for name, schema in SCHEMAS.items()}


@pytest.mark.parametrize("name", SCHEMAS)
def test_gradients_belong_to_the_arguments_of_their_names(name):
    described = OPERATORS[name]
    names = list(described.signature.parameters)
    assert [names[position] for position in described.positions] == list(described.differentiable)
    without = "decode_attention", "linear_router", "moe_route", "add_norm_scaled_mm"
    assert bool(described.positions) == (not name.endswith(without))


def test_the_public_function_has_the_signature_and_the_documentation():
    signature = inspect.signature(f16a_nvfp4weight_scaled_grouped_mm)
    assert list(signature.parameters)[-1] == "layout"
    assert signature == OPERATORS["f16a_nvfp4weight_scaled_grouped_mm"].signature
    assert "grouped GEMM" in f16a_nvfp4weight_scaled_grouped_mm.__doc__


@pytest.mark.parametrize("backend", ["cpu", "reference", "w4a4"])
def test_results_have_the_shapes_and_may_be_changed_in_place(backend):
    """Views that were made in the kernel would refuse it, where F.relu(F.linear(x, w), inplace=True) does not."""
    weight = operands(quantize(torch.randn(4, 32, 48)))
    ids = torch.tensor([[0, 3], [1, 1], [2, 0]])
    row_slot, offsets, slot_row = torch.ops.thunder_moe.moe_route(ids, 4)
    x, rows = torch.randn(3, 48), torch.randn(6, 48)
    down = operands(quantize(torch.randn(4, 48, 16)))
    dense = dense_operands(quantize(torch.randn(1, 32, 48)))
    theirs = operands(quantize(torch.randn(4, 128, 64)).to_layout("swizzled_128x4"))
    starts, sizes = torch.tensor([0, 1, 2, 6], dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    calls = {
        "decode_attention": (*torch.randn(3, 2, 2, 16), *torch.randn(2, 2, 2, 5, 16), torch.tensor([3])),
        "moe_linear_router": (x, torch.randn(4, 48)),
        "add_norm_linear_router": (x, x, torch.randn(48), torch.randn(4, 48)),
        "f16a_nvfp4weight_add_norm_scaled_mm": (*torch.randn(2, 2, 3, 48), torch.randn(48), *dense),
        "moe_route": (ids, 4),
        "moe_router": (torch.randn(3, 4),),
        "f16a_nvfp4weight_scaled_grouped_mm": (rows, *weight, offsets),
        "f16a_nvfp4weight_scaled_grouped_mm_dgrad": (torch.randn(6, 32), *weight, offsets),
        "f16a_nvfp4weight_scaled_mm": (torch.randn(2, 3, 48), *dense),
        "f16a_nvfp4weight_scaled_mm_dgrad": (torch.randn(2, 3, 32), *dense),
        "f16a_nvfp4weight_grouped_swiglu": (x, *weight, offsets, row_slot),
        "f16a_nvfp4weight_grouped_mm_combine": (rows, *weight, offsets, slot_row),
        "f16a_nvfp4weight_moe_experts": (x, ids, torch.rand(3, 2), *weight, *down),
        "f16a_nvfp4weight_moe_experts_lora": (x, ids, torch.rand(3, 2), *weight, *down),
        "moe_combine": (rows, offsets, slot_row),
        "nvfp4_fake_quantize": (torch.randn(4, 32, 48),),
        "nvf_cutlass_scaled_grouped_mm": (torch.randn(6, 64, dtype=torch.bfloat16), *theirs, starts, starts, sizes),
    }
    in_mxfp8 = {name for name in OPERATORS if "mxfp8" in name}  # tests/ops/test_mxfp8_operators.py
    assert calls.keys() == OPERATORS.keys() - in_mxfp8
    for name, args in calls.items():
        options = dict(top_k=2) if name.endswith("router") else dict(scale=1.0) if "attention" in name else {}
        if "add_norm" in name:
            options["norm_epsilon" if "router" in name else "epsilon"] = 1e-6
        first = args[0].clone().requires_grad_(args[0].is_floating_point())
        for grad in (False, True):
            with use_backend(backend), torch.set_grad_enabled(grad):
                results = getattr(torch.ops.thunder_moe, name)(first, *args[1:], **options)
            results = results if isinstance(results, tuple) else (results,)
            assert tuple(tuple(result.shape) for result in results) == OPERATORS[name].shapes(*args, **options)
            assert not any(result._is_view() for result in results)
            results[0].mul_(2)
            assert results[0].requires_grad == (grad and first.requires_grad)


@pytest.mark.slow
def test_modules_of_operators_can_be_reloaded():
    code = """
import importlib, torch
from thunder_moe.ops import grouped_mm, route, scaled_mm, trainable_grouped_mm
for module in (route, grouped_mm, scaled_mm, trainable_grouped_mm):
    importlib.reload(module)
print(route.moe_route(torch.tensor([[1, 0]]), 2)[1].tolist())
"""
    assert fresh_python(code) == "[1, 2]\n"


def test_missing_and_unknown_arguments_are_type_errors():
    rows = torch.randn(2, 16)
    with pytest.raises(TypeError, match="missing a required argument: 'fp4_weight'"):
        f16a_nvfp4weight_scaled_grouped_mm(rows)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        moe_route(torch.zeros(2, 1, dtype=torch.int32), 4, foo=1)
    with pytest.raises(ValueError, match="activation: got"):
        f16a_nvfp4weight_scaled_grouped_mm(rows[0], *[rows] * 4)


DESCRIBED = OPERATORS["f16a_nvfp4weight_scaled_grouped_mm"]
GROUPED_MM = torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm


def make(rows=3):
    """Return a call of the grouped GEMM: arguments that an operator has not seen."""
    weight = operands(quantize(torch.randn(2, 16, 16)))
    return torch.randn(rows, 16), *weight, torch.tensor([1, rows], dtype=torch.int32)


def test_kinds_of_arguments_in_turn():
    """An operator does not confuse what it remembers of different kinds of arguments."""
    x, *rest = make()
    kinds = [(x, *rest), (x.bfloat16(), *rest), (torch.randn(16, 3).t(), *rest), (x[:2], *rest[:-1], rest[-1] - 1)]
    kinds += [(x.half(), *rest), (x[:0], *rest[:-1], rest[-1] * 0)]
    first = [GROUPED_MM(*args) for args in kinds]
    for _ in range(2):
        for args, wanted in zip(kinds, first, strict=True):
            assert torch.equal(GROUPED_MM(*args), wanted)
            with use_backend("reference"):
                assert relative_error(GROUPED_MM(*args), wanted) < 1e-2


def test_a_tensor_that_is_changed_in_place_is_of_another_kind():
    x, *rest = make()
    for _ in range(2):
        GROUPED_MM(x, *rest)
    for change in (lambda t: t.t_(), lambda t: t.resize_(2, 16), lambda t: t.unsqueeze_(0)):
        changed = x.clone()
        GROUPED_MM(changed, *rest)
        change(changed)
        with pytest.raises(ValueError, match="got"):
            GROUPED_MM(changed, *rest)
    x.data = x.double()
    with pytest.raises(ValueError, match="activation: got"):
        GROUPED_MM(x, *rest)


def test_each_mode_takes_the_way_that_it_needs():
    x, *rest = make()
    learned = x.clone().requires_grad_()
    for _ in range(2):
        assert GROUPED_MM(learned, *rest).requires_grad
        with torch.no_grad():
            assert not GROUPED_MM(learned, *rest).requires_grad
        with torch.inference_mode():
            assert GROUPED_MM(torch.randn(3, 16), *rest).is_inference()
        with pytest.raises(NotImplementedError, match="no gradient inside transforms of torch.func"):
            torch.func.grad(lambda x: GROUPED_MM(x, *rest).sum())(x)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = GROUPED_MM(*map(mode.from_tensor, (x, *rest)))
        assert isinstance(fake, torch._subclasses.FakeTensor)


@pytest.mark.parametrize("inference", [False, True])
def test_values_are_checked_at_every_call(inference):
    with torch.inference_mode(inference):
        x, *rest = make()
        GROUPED_MM(x, *rest)
        rest[-1][0] = 4
        with pytest.raises(ValueError, match=r"offsets: got \[4, 3\], wanted .* never decrease"):
            GROUPED_MM(x, *rest)
        rest[-1][:] = 4
        with pytest.raises(ValueError, match="offsets: got a last row end of 4"):
            GROUPED_MM(x, *rest)


def test_a_known_kind_is_that_of_a_backend_a_device_and_a_mode():
    x, *rest = make()
    out = GROUPED_MM(x, *rest)
    with use_backend("w4a4"):
        assert not torch.equal(GROUPED_MM(x, *rest), out)
    assert torch.equal(GROUPED_MM(x, *rest), out)
    with pytest.raises(ValueError, match="layout: got 'rows'"):
        GROUPED_MM(x, *rest, layout="rows")
    with pytest.raises(ValueError, match="offsets: .*wanted device meta"):
        GROUPED_MM(x.to("meta"), *[tensor.to("meta") for tensor in rest[:-1]], rest[-1])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        GROUPED_MM(x, *rest)


def test_dynamo_does_not_trace_the_kernels():
    """An operator that is called between two graphs is not compiled itself."""
    x, *rest = make()
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    @torch._dynamo.disable(recursive=False)
    def between_graphs(x):
        return torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(x, *rest)

    compiled = torch.compile(lambda x: between_graphs(x * 2) * 3, backend=backend)
    for rows in (x, x.clone().requires_grad_()):
        assert torch.equal(compiled(rows), between_graphs(rows * 2) * 3)
    assert all(len(targets) == 1 for targets in graphs)
    assert len(graphs) <= 4


def test_tensors_of_a_subclass_reach_its_dispatch():
    seen = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            args = [arg.plain if isinstance(arg, Logged) else arg for arg in args]
            return function(*args, **(kwargs or {}))

    x, *rest = make()
    logged = torch.Tensor._make_wrapper_subclass(Logged, x.shape)
    logged.plain = x
    expected = GROUPED_MM(x, *rest)
    assert torch.equal(GROUPED_MM(logged, *rest), expected)
    assert seen == [torch.ops.thunder_moe.f16a_nvfp4weight_scaled_grouped_mm.default]


@pytest.mark.parametrize("place", range(5))
def test_a_later_argument_of_a_subclass_or_of_a_lazy_kind(place):
    """The first argument alone was looked at: the kernels read the memory of a wrapper, which has none."""
    seen = []

    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*[arg.plain if isinstance(arg, Wrapped) else arg for arg in args], **(kwargs or {}))

    args = list(make())
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, args[place].shape, dtype=args[place].dtype)
    wrapped.plain = args[place]
    with torch.no_grad():
        expected = DESCRIBED(*args)
        assert torch.equal(DESCRIBED(*args[:place], wrapped, *args[place + 1 :]), expected)
        if args[place].is_floating_point() and place in (0, 3):
            assert torch.equal(DESCRIBED(*args[:place], torch._neg_view(args[place]), *args[place + 1 :]), -expected)
    assert seen == [GROUPED_MM.default]


def test_numbers_of_other_types_are_converted_or_named():
    """Kernels would raise errors that name no argument, or keep the number that a tensor held at the first call."""
    ids, (x, *rest) = torch.tensor([[0], [2]], dtype=torch.int32), make()
    for count in (3, 4):
        with torch.no_grad():
            assert torch.equal(moe_route(ids, torch.tensor(count))[1], moe_route(ids, count)[1])
    swiglu = OPERATORS["f16a_nvfp4weight_grouped_swiglu"]
    for call, name in (
        (lambda: DESCRIBED(x, *rest[:-1], [1, 3]), "offsets"),
        (lambda: DESCRIBED(x, *rest[:-1], 3), "offsets"),
        (lambda: swiglu(x, *rest, alpha="x"), "alpha"),
        (lambda: swiglu(x, *rest, limit="1"), "limit"),
        (lambda: moe_route(ids, 3.5), "num_experts"),
    ):
        with torch.no_grad(), pytest.raises((TypeError, RuntimeError), match=f"argument '{name}'"):
            call()


def test_bare_calls_have_nothing_to_dispatch():
    x, seen = torch.randn(2, 3), []

    def see(tensor):
        seen.append(is_plain_eager(tensor))
        return tensor + 1

    assert not is_plain_eager(x)  # gradients are enabled
    with torch.no_grad():
        assert is_plain_eager(x)
        with torch.inference_mode():
            assert is_plain_eager(x)
            assert is_plain_eager(torch.randn(2))
        assert not is_plain_eager(nn.Parameter(x))
        assert not is_plain_eager(FakeTensorMode().from_tensor(x))
        for mode in (
            FakeTensorMode(),
            FlopCounterMode(display=False),
            BaseTorchFunctionMode(),
            use_backend("reference"),
        ):
            with mode:
                assert not is_plain_eager(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_plain_eager(x)
        with torch.device("cpu"):  # as torch.set_default_device
            assert is_plain_eager(x)
            with BaseTorchFunctionMode():
                assert not is_plain_eager(x)
        with forward_ad.dual_level():
            assert not is_plain_eager(forward_ad.make_dual(x, x))
        wrapped = torch._to_functional_tensor(x)
        assert not is_plain_eager(wrapped)
        torch.vmap(see)(x)
        torch.func.functionalize(see)(x)
        torch.func.jvp(see, (x,), (x,))
        torch.jit.trace(see, (x,), check_trace=False)
        make_fx(see)(x)
        assert seen == [False] * 5
        assert is_plain_eager(x)
        compiled = torch.compile(lambda x: x * (2 if is_plain_eager(x) else 3), backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), 3 * x)
