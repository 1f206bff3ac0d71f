"""round_weights_once: the bits of the recipe without it, one rounding per weight and direction, and no stale numbers.
Called by pytest; judged by the same model outside of the block, which tests/training/test_recipes.py compares with an
fp64 oracle.
"""

import contextlib
import copy
import threading

import pytest
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp
from tiny_models import tiny_model
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    Llama4MoE,
    Llama4MoEConfig,
    offsets_from_splits,
    prepare_8bit_training_,
    round_weights_once,
)
from thunder_moe.kernels import rounded_weights, slow_paths, training_reference
from thunder_moe.parallel import ExpertParallel

pytestmark = pytest.mark.filterwarnings("error:.*round_weights_once")
SPLITS = ([4, 0, 7], [0, 11, 0], [0, 0, 0])
CHANGED = r"round_weights_once: a weight of shape \(3, 64, 32\) was changed in place inside of the block"


@pytest.fixture(autouse=True)
def roundings(monkeypatch):
    """Return a list that gets the shape of each weight that is rounded; nothing may be kept in the end."""
    shapes = []
    for name in ("quantize", "quantize_columns"):
        original = getattr(training_reference, name)

        def counted(values, *options, original=original):
            shapes.extend([values.shape] if values.ndim == 3 else [])
            return original(values, *options)

        monkeypatch.setattr(training_reference, name, counted)
    monkeypatch.setattr(slow_paths, "_warned", set())
    yield shapes
    assert not rounded_weights._KEPT


def make(recipe="fp8", **options):
    torch.manual_seed(0)
    return GroupedMLP(3, 32, 32, recipe=recipe, **options)


def inputs(index=0):
    torch.manual_seed(index)
    x, scales = torch.randn(13, 32).requires_grad_(), torch.rand(13).requires_grad_()
    return x, offsets_from_splits(SPLITS[index % len(SPLITS)]), scales


def train(mlp, around, run=None):
    """Return the outputs and gradients of three microbatches inside of a context."""
    for parameter in mlp.parameters():
        parameter.grad = parameter.main_grad = None
        parameter.main_grad = torch.zeros_like(parameter)
    results = []
    with around:
        for index in range(3):
            x, ends, scales = inputs(index)
            out = (run or mlp)(x, ends, scales)
            out.square().sum().backward()
            results += [out.detach(), x.grad, scales.grad]
        while mlp.need_backward_dw():
            mlp.backward_dw()
    return results + [t for p in mlp.parameters() for t in (p.grad, p.main_grad) if t is not None]


def assert_same_bits(results, wanted):
    for got, expected in zip(results, wanted, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, dict(bias=True, accumulate_into_main_grad=True, delay_wgrad=True)], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8"])
def test_microbatches(roundings, recipe, options):
    mlp = make(recipe, **options)
    wanted = train(mlp, contextlib.nullcontext())
    assert len(roundings) == 12
    roundings.clear()
    assert_same_bits(train(mlp, round_weights_once(mlp)), wanted)
    assert len(roundings) == 4
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.mul_(1.5)
    changed = train(mlp, round_weights_once(mlp))
    assert_same_bits(changed, train(mlp, contextlib.nullcontext()))
    assert not torch.equal(changed[0], wanted[0])


def test_frozen_weights_and_inference(roundings):
    mlp = make().requires_grad_(False)
    wanted = train(mlp, contextlib.nullcontext())
    with torch.inference_mode(), round_weights_once(mlp):
        mlp(*inputs())
        with torch.inference_mode(False):
            assert_same_bits(train(mlp, contextlib.nullcontext()), wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_transformers(roundings, name):
    model = prepare_8bit_training_(tiny_model(name, torch.float32), "fp8")
    results, counts = [], []
    for around in (contextlib.nullcontext(), round_weights_once(model)):
        model.zero_grad()
        with around:
            outs = [model(torch.arange(5 + index)[None]).logits for index in range(2)]
            sum(out.sum() for out in outs).backward()
        results.append([*outs, *(p.grad for p in model.parameters() if p.grad is not None)])
        counts.append(len(roundings))
    assert_same_bits(*results)
    assert counts == [2 * (counts[1] - counts[0]), counts[1]]


@pytest.mark.parametrize("change", ["mul_", "of a view", "load_state_dict"])
def test_a_change_inside_is_an_error(change):
    mlp = make()
    with round_weights_once(mlp):
        mlp(*inputs())
        with torch.no_grad():
            if change == "load_state_dict":
                mlp.load_state_dict(copy.deepcopy(mlp.state_dict()))
            else:
                weight = mlp.gate_up_proj.weight
                weight[1:].zero_() if change == "of a view" else weight.mul_(2)
        with pytest.raises(RuntimeError, match=CHANGED):
            mlp(*inputs())
    mlp(*inputs())


@pytest.mark.parametrize("options", [{}, dict(fused=True)], ids=str)
def test_an_optimizer_step_inside_is_an_error(options):
    mlp, other = make(), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW(mlp.parameters(), **options)
    with round_weights_once(mlp):
        optimizer.step()  # there are no gradients
        mlp(*inputs()).sum().backward()
        before = copy.deepcopy(mlp.state_dict())
        other.grad = torch.ones(3)
        torch.optim.SGD([other]).step()
        with pytest.raises(RuntimeError, match=r"AdamW.step\(\) would change a weight of shape"):
            optimizer.step()
    assert all(torch.equal(value, mlp.state_dict()[key]) for key, value in before.items())
    optimizer.step()


@pytest.mark.parametrize("case", ["data", "assign", "functional_call", "autocast"])
def test_other_tensors_are_rounded_each_time_after_a_warning(case):
    mlp, twin = make(), make()
    with torch.no_grad():
        twin.gate_up_proj.weight.mul_(2 if case != "autocast" else 1)
    state = twin.state_dict()
    cast = torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast")
    with round_weights_once(mlp), cast:
        if case == "data":
            mlp.gate_up_proj.weight.data = state["gate_up_proj.weight"]
        elif case == "assign":
            mlp.load_state_dict(state, assign=True)
        called_with = state if case == "functional_call" else {}
        with pytest.warns(UserWarning, match="is rounded at each product, as without it"):
            out = torch.func.functional_call(mlp, called_with, inputs())
    with cast:
        assert torch.equal(out, twin(*inputs()))


def test_views_at_the_address_of_a_weight():
    linear, (x, *_) = GroupedLinear(3, 32, 32, recipe="fp8"), inputs()
    weight = linear.weight.detach()
    views = [weight, weight.mT, weight[:, :16], weight.view(1, 96, 32)]

    def run():
        ends = [offsets_from_splits([1, 4, 5][: len(view)]) for view in views]
        linear_of = torch.ops.thunder_moe.grouped_linear
        return [linear_of(x, *operands, recipe="fp8") for operands in zip(views, ends, strict=True)]

    wanted = run()
    with round_weights_once(linear), pytest.warns(UserWarning, match="is rounded at each product"):
        assert_same_bits(run(), wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_and_a_backward_after_the_block(roundings, use_reentrant):
    mlp = make()

    def run(*given):
        return checkpoint(mlp, *given, use_reentrant=use_reentrant)

    wanted = train(mlp, contextlib.nullcontext())
    roundings.clear()
    assert_same_bits(train(mlp, round_weights_once(mlp), run), wanted)
    assert len(roundings) == 4
    mlp.zero_grad()
    (x, *rest), (twin, *_) = inputs(), inputs()
    with round_weights_once(mlp):
        late = run(x, *rest)
    late.sum().backward()
    got = [x.grad, *(p.grad.clone() for p in mlp.parameters())]
    mlp.zero_grad()
    mlp(twin, *rest).sum().backward()
    assert_same_bits(got, [twin.grad, *(p.grad for p in mlp.parameters())])


def test_a_backward_after_the_block_of_changed_weights_is_torchs_error():
    mlp = make()
    with round_weights_once(mlp):
        out = mlp(*inputs())
    with torch.no_grad():
        mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_nesting_exceptions_and_threads(roundings):
    mlp, results = make(), []
    wanted = train(mlp, contextlib.nullcontext())
    with round_weights_once(mlp):
        roundings.clear()
        with contextlib.suppress(KeyError), round_weights_once(torch.nn.ModuleList([mlp])):
            raise KeyError
        thread = threading.Thread(target=lambda: results.extend(train(mlp, round_weights_once(mlp))))
        thread.start()
        thread.join()
        assert not roundings
    assert_same_bits(results, wanted)
    with contextlib.suppress(KeyError), round_weights_once(mlp):
        raise KeyError


def test_a_capture_that_does_not_contain_the_block_rounds_itself(roundings, monkeypatch):
    """Else a graph would read memory that is freed, or that its replay has not written."""
    mlp = make()
    wanted = mlp(*inputs())
    for at_entry in (False, True):
        monkeypatch.setattr(rounded_weights, "_capturing", lambda weight, value=at_entry: value)
        slow_paths._warned.clear()
        with round_weights_once(mlp):
            roundings.clear()
            assert torch.equal(mlp(*inputs()), wanted)
            assert not roundings
            monkeypatch.setattr(rounded_weights, "_capturing", lambda weight, value=at_entry: not value)
            with pytest.warns(UserWarning, match="a weight in a CUDA graph whose capture does not contain the whole"):
                assert torch.equal(mlp(*inputs()), wanted)
            assert len(roundings) == 2


def test_fully_shard_and_expert_parallelism(roundings):
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        mlp, plain = make(), make()
        torch.distributed.fsdp.fully_shard(mlp, mesh=mesh)
        with pytest.raises(ValueError, match="model: '0' is sharded by FSDP, which gathers new weights"):
            round_weights_once(torch.nn.Sequential(mlp)).__enter__()
        with round_weights_once(mlp.gate_up_proj), pytest.warns(UserWarning, match="is rounded at each product"):
            assert torch.equal(mlp(*inputs()), plain(*inputs()))

        config = Llama4MoEConfig(hidden_size=32, intermediate_size=64, num_experts=4, top_k=2)
        moe, tokens = prepare_8bit_training_(Llama4MoE(config), "fp8"), torch.randn(1, 9, 32)
        wanted = moe(tokens)
        torch.distributed.tensor.parallel.parallelize_module(moe, mesh, {"routed_experts": ExpertParallel()})
        with round_weights_once(moe):
            roundings.clear()
            assert torch.equal(moe(tokens), wanted)
            assert not roundings
            with torch.no_grad():
                moe.routed_experts.up_proj.weight.mul_(2)
            with pytest.raises(RuntimeError, match="was changed in place inside of the block"):
                moe(tokens)
    finally:
        dist.destroy_process_group()


def test_optimizers_of_other_parameters_step():
    """Sparse tensors and subclasses come without a storage to compare."""
    others = [torch.eye(3).to_sparse(), TwoTensor(torch.ones(3), torch.ones(3)), torch.ones(3, device="meta")]
    parameters = [torch.nn.Parameter(other) for other in others]
    for parameter, other in zip(parameters, others, strict=True):
        parameter.grad = other.clone()
    with round_weights_once(make()):
        torch.optim.SGD(parameters, lr=0.5, foreach=False).step()
    assert torch.equal(parameters[0].to_dense(), torch.eye(3) / 2)


def test_what_is_refused():
    with torch.inference_mode():
        inference = make()
    with pytest.raises(ValueError, match=r"model: got weights made under torch.inference_mode\(\)"):
        round_weights_once(inference).__enter__()
    with pytest.raises(ValueError, match="model: found no experts with a recipe in Sequential, see prepare_8bit_train"):
        round_weights_once(torch.nn.Sequential(torch.nn.Linear(8, 8), GroupedLinear(2, 8, 8))).__enter__()
    model = tiny_model("llama4", torch.float32)
    with pytest.raises(ValueError, match="model: found no experts with a recipe"):
        round_weights_once(model).__enter__()
    mlp = make()

    def run(*given):
        with round_weights_once(mlp):
            return mlp(*given)

    with pytest.raises(Exception, match="round_weights_once: got it inside of a compiled function, wanted it around"):
        torch.compile(run, backend="eager", fullgraph=True)(*inputs())
