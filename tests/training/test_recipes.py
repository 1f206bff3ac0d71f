"""Training blocks in 8 bits: the recipes "mxfp8" and "fp8" of GroupedLinear and GroupedMLP, forward and gradients.
Called by pytest; judged by fp64 loops over operands that tests/oracle.py rounds by arithmetic of its own.
"""

import copy

import oracle
import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from oracle import RecipeLinear, relative_error, round_to_recipe

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    ScaledSReLU,
    dequantize_,
    mxfp8,
    offsets_from_splits,
    quantize_,
)
from thunder_moe.kernels import training_reference

BF16 = torch.bfloat16
RECIPES = ["mxfp8", "fp8"]
TOLERANCE = {torch.float32: 1e-5, BF16: 4e-3}
SPLITS = {
    "with empty ones": (5, 0, 33, 0),
    "none": (0, 0, 0, 0),
    "whole blocks": (32, 64, 0, 32),
    "edges of 128": (127, 1, 129, 31),
}
PAD = 3


def operands(splits, k, n, dtype):
    """Return rows, their offsets and a gradient, of very different magnitudes, with NaN past the last row end."""
    ends = offsets_from_splits(splits)
    live = int(ends[-1])
    x, grad = (torch.randn(live + PAD, size) * 10 ** torch.randn(live + PAD, 1) for size in (k, n))
    x[live:], grad[live:] = float("nan"), float("inf")
    return x.to(dtype).requires_grad_(), ends, grad.to(dtype)


def fp64(*tensors):
    return [t.detach().double().nan_to_num(0, 0, 0).requires_grad_() for t in tensors]


def check(got, exact, dtype, live=None):
    assert got.dtype == dtype
    assert got.isfinite().all()
    assert relative_error(got, exact) < TOLERANCE[dtype] or (exact.eq(0).all() and got.eq(0).all())
    if live is not None:
        assert got[live:].eq(0).all()


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize(("k", "n"), [(64, 96), (40, 7)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear(recipe, dtype, k, n, splits):
    linear = GroupedLinear(4, k, n, dtype=dtype, recipe=recipe)
    x, ends, grad = operands(splits, k, n, dtype)
    live = int(ends[-1])
    out = linear(x, ends)
    out.backward(grad)
    twin, weight = fp64(x, linear.weight)
    exact = RecipeLinear.apply(twin, weight, ends, recipe)
    exact.backward(grad.double().nan_to_num(0, 0, 0))
    check(out, exact, dtype, live)
    check(x.grad, twin.grad, dtype, live)
    check(linear.weight.grad, weight.grad, dtype)
    assert linear.weight.grad[torch.tensor(splits) == 0].eq(0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows(recipe, monkeypatch):
    """A rank that no token is sent to; its weights are not rounded."""
    monkeypatch.setattr(training_reference, "quantize", None)
    linear, x = GroupedLinear(2, 40, 7, recipe=recipe), torch.zeros(0, 40, requires_grad=True)
    out = linear(x, offsets_from_splits([0, 0]))
    out.sum().backward()
    assert (out.shape, x.grad.shape) == ((0, 7), (0, 40))
    assert linear.weight.grad.eq(0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_not_the_16_bit_product(recipe):
    linear, x, ends = GroupedLinear(2, 64, 32, recipe=recipe), torch.randn(9, 64), offsets_from_splits([4, 5])
    plain = copy.deepcopy(linear)
    plain.recipe = None
    assert 0.01 < relative_error(linear(x, ends), plain(x, ends)) < 0.06
    assert torch.equal(plain(x, ends), torch.ops.thunder_moe.grouped_linear(x, plain.weight, ends))


def test_mxfp8_rounds_as_the_number_format():
    weight = torch.randn(3, 5, 64) * 10 ** torch.randn(3, 5, 1)
    assert torch.equal(
        round_to_recipe(weight, "mxfp8").float(), mxfp8.dequantize(mxfp8.quantize(weight), torch.float32)
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_visible(recipe, value):
    linear, ends = GroupedLinear(2, 64, 32, recipe=recipe), offsets_from_splits([3, 3])
    x = torch.randn(6, 64)
    x[1, 40] = value
    x.requires_grad_()
    out = linear(x, ends)
    assert (~out[1].isfinite()).all()
    assert out[[0, 2, 3, 4, 5]].isfinite().all()
    grad = torch.randn(6, 32)
    grad[4, 3] = value
    out.backward(grad)
    assert (~x.grad[4].isfinite()).all()
    assert x.grad[[0, 1, 2, 3, 5]].isfinite().all()
    of_weight = linear.weight.grad
    assert (~of_weight[0, :, 40].isfinite()).all()
    assert (~of_weight[1, 3].isfinite()).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_small_numbers(recipe):
    linear, ends = GroupedLinear(1, 64, 32, recipe=recipe), offsets_from_splits([3])
    x = torch.randn(3, 64)
    x[0], x[1] = 0, 1e-32 * x[1]
    out = linear(x.requires_grad_(), ends)
    out.backward(torch.zeros_like(out))
    assert out[0].eq(0).all()
    assert relative_error(out, RecipeLinear.apply(*fp64(x, linear.weight), ends, recipe)) < 1e-5
    assert x.grad.eq(0).all()
    assert linear.weight.grad.eq(0).all()


@pytest.mark.parametrize("frozen", ["weight", "rows"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_parts_and_biases(recipe, frozen):
    linear, ends = GroupedLinear(3, 32, 16, bias=True, recipe=recipe), offsets_from_splits([4, 0, 7])
    x, scale, grad = torch.randn(13, 32, requires_grad=frozen != "rows"), torch.rand(13), torch.randn(13, 16)
    linear.weight.requires_grad_(frozen != "weight")
    out = linear(x, ends, scale.requires_grad_())
    out.backward(grad)
    twin, weight = fp64(x, linear.weight)
    exact = RecipeLinear.apply(twin, weight, ends, recipe)
    exact.backward(grad.double())
    added = oracle.trained_linear(torch.zeros(13, 32), linear.weight, ends, linear.bias, scale)
    check(out, exact + added, torch.float32, 11)
    check(linear.bias.grad[0], (grad * scale[:, None])[:4].sum(0), torch.float32)
    for got, wanted, is_frozen in (
        (linear.weight.grad, weight.grad, frozen == "weight"),
        (x.grad, twin.grad, frozen == "rows"),
    ):
        assert got is None if is_frozen else relative_error(got, wanted) < 1e-5


def mlp64(x, ends, mlp, recipe, scales):
    """Return the block's result in fp64, and the leaves (x, scales, weights) that get its gradients."""
    leaves = fp64(x, scales, mlp.gate_up_proj.weight, mlp.down_proj.weight)
    rows, factors, gate_up, down = leaves
    y = RecipeLinear.apply(rows, gate_up, ends, recipe)
    hidden = oracle.scaled_swiglu(y, factors)
    return RecipeLinear.apply(hidden, down, ends, recipe), leaves


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mlp(recipe):
    mlp, (x, ends, grad) = GroupedMLP(4, 32, 48, recipe=recipe), operands((5, 0, 33, 0), 32, 32, torch.float32)
    scales = torch.rand(len(x), requires_grad=True)
    out = mlp(x, ends, scales)
    out.backward(grad)
    exact, leaves = mlp64(x, ends, mlp, recipe, scales)
    exact.backward(grad.double().nan_to_num(0, 0, 0))
    got = [x.grad, scales.grad, mlp.gate_up_proj.weight.grad, mlp.down_proj.weight.grad]
    check(out, exact, torch.float32, 38)
    for a, b in zip(got, leaves, strict=True):
        assert relative_error(a, b.grad) < 1e-5
    assert x.grad[38:].eq(0).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, dict(accumulate_into_main_grad=True), dict(delay_wgrad=True)], ids=str)
def test_buffers_main_grad_and_delayed_gradients(recipe, options):
    plain = GroupedMLP(3, 32, 48, bias=True, recipe=recipe)
    mlp = GroupedMLP(3, 32, 48, bias=True, recipe=recipe, **options)
    mlp.load_state_dict(plain.state_dict())
    for weight in (mlp.gate_up_proj.weight, mlp.down_proj.weight):
        weight.main_grad = torch.ones_like(weight)
    ends, x, scales = offsets_from_splits([4, 0, 7]), torch.randn(13, 32), torch.rand(13)
    buffers = {} if options else dict(out=torch.zeros(13, 32), grad_input=torch.zeros(13, 32))
    results = []
    for module, given in ((plain, {}), (mlp, buffers)):
        rows, factors = x.clone().requires_grad_(), scales.clone().requires_grad_()
        out = module(rows, ends, factors, **given)
        out.square().sum().backward()
        while module.need_backward_dw():
            module.backward_dw()
        results.append([out, rows.grad, factors.grad, module.down_proj.bias.grad])
        main = module is mlp and "accumulate_into_main_grad" in options
        for linear in (module.gate_up_proj, module.down_proj):
            results[-1].append(linear.weight.main_grad - 1 if main else linear.weight.grad)
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-6


def test_autocast_and_state_dicts():
    linear, x, ends = GroupedLinear(2, 64, 32, recipe="fp8"), torch.randn(6, 64), offsets_from_splits([3, 3])
    with torch.autocast("cpu", torch.bfloat16):
        out = linear(x, ends)
    weight = linear.weight.detach().bfloat16()
    check(out, RecipeLinear.apply(x.bfloat16(), weight, ends, "fp8"), BF16)
    other = GroupedLinear(2, 64, 32, recipe="fp8")
    other.load_state_dict({f"weight{i}": part for i, part in enumerate(linear.weight)})
    assert torch.equal(other(x, ends), linear(x, ends))
    assert list(linear.state_dict()) == ["weight"]


def test_fully_shard():
    dist = torch.distributed
    mlp, ends, x = GroupedMLP(4, 32, 48, recipe="fp8"), offsets_from_splits([2, 0, 3, 1]), torch.randn(6, 32)
    plain = copy.deepcopy(mlp)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.distributed.fsdp.fully_shard(mlp, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        for module in (mlp, plain):
            module(x, ends).pow(2).sum().backward()
        for sharded, parameter in zip(mlp.parameters(), plain.parameters(), strict=True):
            assert torch.equal(sharded.grad.full_tensor(), parameter.grad)
    finally:
        dist.destroy_process_group()


def test_a_quantized_block_gets_its_recipe_back():
    root = torch.nn.ModuleDict(dict(mlp=GroupedMLP(2, 32, 32, recipe="fp8")))
    assert "recipe" not in repr(quantize_(root))
    assert repr(dequantize_(root)).count("recipe='fp8'") == 2


def test_names_and_what_is_refused():
    assert repr(GroupedLinear(2, 8, 8, recipe="fp8")).endswith("out_features=8, recipe='fp8')")
    assert "recipe='mxfp8'" in repr(GroupedMLP(2, 8, 8, activation=ScaledSReLU(), recipe="mxfp8"))
    assert "recipe" not in repr(GroupedLinear(2, 8, 8))
    with pytest.raises(ValueError, match=r"recipe: got 'fp4', wanted one of \('mxfp8', 'fp8'\), or None"):
        GroupedLinear(2, 8, 8, recipe="fp4")
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(ValueError, match="recipe: got 'fp8' for torch.float.*, wanted bfloat16 or float32"):
            GroupedMLP(2, 8, 8, recipe="fp8", dtype=dtype)
        with pytest.raises(ValueError, match="recipe: got 'fp8' for torch.float.*, wanted bfloat16 or float32"):
            GroupedLinear(2, 8, 8, recipe="fp8").to(dtype)(torch.zeros(2, 8, dtype=dtype), offsets_from_splits([1, 1]))


def test_a_subclass_whose_forward_may_ignore_the_recipe():
    class OwnForward(GroupedLinear):
        def forward(self, x, offsets):
            return torch.nn.functional.grouped_mm(x, self.weight.mT, offs=offsets)

    class OwnInit(GroupedLinear):
        pass

    message = "recipe: got 'fp8' for OwnForward, whose own forward may not read it"
    with pytest.raises(ValueError, match=message):
        OwnForward(2, 8, 8, recipe="fp8")
    linear = OwnForward(2, 8, 8)
    linear.recipe = None
    with pytest.raises(ValueError, match=message):
        linear.recipe = "fp8"
    assert OwnInit(2, 8, 8, recipe="fp8").recipe == "fp8"
