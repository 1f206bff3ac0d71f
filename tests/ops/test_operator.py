"""The description of operators: schemas stay as graphs and exported programs have them, the parts agree.
Called by pytest."""

import inspect

import pytest
import torch

from thunder_moe import f16a_nvfp4weight_scaled_grouped_mm, moe_route
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.ops import experts, scaled_mm  # noqa: F401  (register the operators)
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import OPERATORS
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
    "f16a_nvfp4weight_scaled_mm": f"(Tensor activation, {DENSE_WEIGHT}, Tensor? bias=None, *,"
    ' str layout="linear") -> Tensor',
    "f16a_nvfp4weight_scaled_mm_dgrad": f'(Tensor grad, {DENSE_WEIGHT}, *, str layout="linear") -> Tensor',
    "moe_route": "(Tensor expert_ids, SymInt num_experts) -> (Tensor, Tensor, Tensor)",
    "moe_router": '(Tensor logits, Tensor? bias=None, *, SymInt top_k, str score="softmax", bool normalize=True,'
    " float epsilon=0., float least_sum=0., float scale=1., SymInt num_groups=1, SymInt top_groups=1,"
    " SymInt group_best=2, bool mask_to_zero=False, ScalarType? scores_dtype=None)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}


def test_schemas():
    found = {name: str(getattr(torch.ops.thunder_moe, name).default._schema) for name in OPERATORS}
    assert found == {name: f"thunder_moe::{name}{schema}" for name, schema in SCHEMAS.items()}


@pytest.mark.parametrize("name", SCHEMAS)
def test_gradients_belong_to_the_arguments_of_their_names(name):
    described = OPERATORS[name]
    names = list(described.signature.parameters)
    assert [names[position] for position in described.positions] == list(described.differentiable)
    assert bool(described.positions) == (name != "moe_route")


def test_the_public_function_has_the_signature_and_the_documentation():
    signature = inspect.signature(f16a_nvfp4weight_scaled_grouped_mm)
    assert list(signature.parameters)[-1] == "layout"
    assert signature == OPERATORS["f16a_nvfp4weight_scaled_grouped_mm"].signature
    assert "Grouped GEMM" in f16a_nvfp4weight_scaled_grouped_mm.__doc__


def test_shapes_are_those_of_the_results():
    weight = operands(quantize(torch.randn(4, 32, 48)))
    ids = torch.tensor([[0, 3], [1, 1], [2, 0]])
    row_slot, offsets, slot_row = torch.ops.thunder_moe.moe_route(ids, 4)
    x, rows = torch.randn(3, 48), torch.randn(6, 48)
    dense = dense_operands(quantize(torch.randn(1, 32, 48)))
    calls = {
        "moe_route": (ids, 4),
        "moe_router": (torch.randn(3, 4),),
        "f16a_nvfp4weight_scaled_grouped_mm": (rows, *weight, offsets),
        "f16a_nvfp4weight_scaled_grouped_mm_dgrad": (torch.randn(6, 32), *weight, offsets),
        "f16a_nvfp4weight_scaled_mm": (torch.randn(2, 3, 48), *dense),
        "f16a_nvfp4weight_scaled_mm_dgrad": (torch.randn(2, 3, 32), *dense),
        "f16a_nvfp4weight_grouped_swiglu": (x, *weight, offsets, row_slot),
        "f16a_nvfp4weight_grouped_mm_combine": (rows, *weight, offsets, slot_row),
    }
    assert calls.keys() == OPERATORS.keys()
    for name, args in calls.items():
        options = dict(top_k=2) if name == "moe_router" else {}
        results = getattr(torch.ops.thunder_moe, name)(*args, **options)
        results = results if isinstance(results, tuple) else (results,)
        assert tuple(tuple(result.shape) for result in results) == OPERATORS[name].shapes(*args, **options)


def test_missing_and_unknown_arguments_are_type_errors():
    rows = torch.randn(2, 16)
    with pytest.raises(TypeError, match="missing a required argument: 'fp4_weight'"):
        f16a_nvfp4weight_scaled_grouped_mm(rows)
    with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
        moe_route(torch.zeros(2, 1, dtype=torch.int32), 4, foo=1)
    with pytest.raises(ValueError, match="activation: got"):
        f16a_nvfp4weight_scaled_grouped_mm(rows[0], *[rows] * 4)
