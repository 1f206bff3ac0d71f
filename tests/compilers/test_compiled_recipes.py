"""Training blocks in 8 bits under both compilers: the numbers of eager mode, one graph for all routings, no NVFP4.
Called by pytest; judged by eager modules, which tests/training/test_recipes.py compares with the fp64 oracle.
"""

import contextlib
import copy

import pytest
import torch
from both_compilers import compile_by, decisions
from fast_cases import others_slow
from oracle import relative_error

from thunder_moe import GroupedLinear, GroupedMLP, GroupedSwiGLU, offsets_from_splits, round_weights_once
from thunder_moe.kernels import training_reference

MODES = ["dynamo-aot_eager", pytest.param("thunder", marks=pytest.mark.slow)]
pytestmark = pytest.mark.filterwarnings("ignore::thunder_moe.compilers.report.RewriteWarning")


def leaves_and_result(run, module, splits, scaled):
    torch.manual_seed(1)
    x, scales, grad = torch.randn(40, 32), torch.rand(40), torch.randn(40, 32)
    live = sum(splits)
    x[live:] = scales[live:] = grad[live:] = float("nan")
    x.requires_grad_(), scales.requires_grad_()
    out = run(x, offsets_from_splits(splits), *([scales] if scaled else []))
    module.zero_grad()
    out.backward(grad)
    parameters = [p.grad for p in module.parameters() if p.requires_grad]
    return [out.detach(), x.grad, *([scales.grad] if scaled else []), *parameters]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
@pytest.mark.parametrize("frozen", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.covering(1)
def test_compiled_blocks_train_as_eager_ones(mode, recipe, frozen):
    mlp = GroupedMLP(3, 32, 48, bias=True, recipe=recipe)
    mlp.down_proj.weight.requires_grad_(not frozen)
    eager, run = copy.deepcopy(mlp), compile_by(mode, mlp)
    for splits in ([4, 0, 33], [0, 37, 0], [40, 0, 0]):
        results = leaves_and_result(run, mlp, splits, True), leaves_and_result(eager, eager, splits, True)
        for got, wanted in zip(*results, strict=True):
            assert relative_error(got, wanted) < 1e-5
            assert got.isfinite().all()
    assert set(decisions(run)) <= {"16-bit"}


@pytest.mark.parametrize("mode", ["dynamo-aot_eager", *others_slow(["thunder"], exhaustive=True)])
def test_frozen_blocks_keep_their_recipe(mode):
    block = GroupedSwiGLU(3, 32, 48, dtype=torch.bfloat16).requires_grad_(False)
    for linear in block.children():
        linear.recipe = "fp8"
    x, ends = torch.randn(11, 32).to(torch.bfloat16), offsets_from_splits([4, 0, 7])
    run = compile_by(mode, block)
    assert relative_error(run(x, ends), block(x, ends)) < 4e-3
    assert set(decisions(run)) <= {"16-bit"}


@pytest.mark.parametrize("mode", MODES)
def test_no_graph_is_compiled_again_for_another_routing(mode):
    linear = GroupedLinear(3, 32, 32, recipe="fp8")
    counted = torch._dynamo.testing.CompileCounter()
    run = compile_by(mode, linear) if mode == "thunder" else torch.compile(linear, backend=counted, fullgraph=True)
    for splits in ([4, 0, 7], [0, 0, 11], [1, 2, 3]):
        ends, x = offsets_from_splits(splits), torch.randn(11, 32)
        assert relative_error(run(x, ends), linear(x, ends)) < 1e-6
    assert mode == "thunder" or counted.frame_count == 1


@pytest.mark.parametrize("mode", ["dynamo-aot_eager", "thunder"])
def test_a_recipe_that_changes_after_compilation(mode):
    linear, x, ends = GroupedLinear(3, 32, 32), torch.randn(11, 32), offsets_from_splits([4, 0, 7])
    run = compile_by(mode, linear)
    for recipe in (None, "fp8", "mxfp8", None):
        linear.recipe = recipe
        assert relative_error(run(x, ends), linear(x, ends)) < 1e-6


@pytest.mark.parametrize(
    ("mode", "first"),
    [
        ("dynamo-aot_eager", "outside"),
        ("dynamo-aot_eager", "inside"),
        ("thunder", "outside"),
        *others_slow([("thunder", "inside")], exhaustive=True),
    ],
)
def test_weights_that_are_rounded_once(mode, first, monkeypatch):
    """Graphs that are compiled outside or inside use what the block keeps, and never what an earlier block kept."""
    linear, rounded = GroupedLinear(3, 32, 32, recipe="fp8"), []
    run = compile_by(mode, linear)
    if first == "outside":
        leaves_and_result(run, linear, [4, 0, 33], False)
    quantize = training_reference.quantize

    def counted(values, recipe):
        rounded.append(values.ndim)
        return quantize(values, recipe)

    monkeypatch.setattr(training_reference, "quantize", counted)
    outs = []
    for _ in range(2):
        results, counts = [], []
        for around in (round_weights_once(linear), contextlib.nullcontext()):
            rounded.clear()
            with around:
                results.append([leaves_and_result(run, linear, splits, False) for splits in ([4, 0, 33], [0, 37, 0])])
            counts.append(rounded.count(3))
        for inside, outside in zip(*results, strict=True):
            assert all(torch.equal(got, wanted) for got, wanted in zip(inside, outside, strict=True))
        assert counts == [1, 2]
        outs.append(results[0][0][0])
        with round_weights_once(linear), torch.no_grad():
            linear.weight.mul_(2)
            with pytest.raises(RuntimeError, match="was changed in place inside of the block"):
                leaves_and_result(run, linear, [4, 0, 33], False)
    assert torch.equal(outs[1], 2 * outs[0])
