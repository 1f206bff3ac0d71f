"""What is set or called on experts after their weights were cut over ranks, and is refused by name.
Called by pytest; torch's fake process group stands for the other rank, since nothing may be sent.
"""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from thunder_moe import GroupedMLP, GroupedSwiGLU, Llama4MoE, Llama4MoEConfig, add_lora_, quantize_
from thunder_moe.parallel import ExpertParallel, TensorParallel


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad"])
def test_options_of_training(mesh, option):
    experts = parallelize_module(GroupedMLP(4, 32, 32), mesh, ExpertParallel())
    setattr(experts.down_proj, option, True)
    x, offsets = torch.randn(4, 32), torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{option}: got it for a weight that is cut over ranks"):
        experts.down_proj(x, offsets)
    experts.down_proj.requires_grad_(False)(x, offsets)  # writes nothing


def test_buffers_of_the_caller(mesh):
    experts = parallelize_module(GroupedMLP(4, 32, 32), mesh, ExpertParallel())
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="out: got it for a weight that is cut over ranks"):
        experts.down_proj(torch.randn(4, 32), offsets, out=torch.empty(4, 32))


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([0, 2, 1, 3], "never decrease"),
        ([-1, 0, 1, 1], "at least 0"),
        ([0, 1, 2, 5], "last row end of 5, .* 4 rows of x"),
    ],
)
def test_offsets_as_one_process_has_them(mesh, ends, message):
    experts = parallelize_module(GroupedSwiGLU(4, 32, 32), mesh, ExpertParallel(capacity=4))
    with pytest.raises(ValueError, match=f"offsets: got .*{message}"):
        experts(torch.randn(4, 32), torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("block", [Llama4MoE(Llama4MoEConfig(32, 32, 4)), GroupedSwiGLU(4, 32, 32)])
def test_quantize_names_the_cut(mesh, block, caplog):
    parallelize_module(block, mesh, ExpertParallel())
    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="is cut over ranks"):
        quantize_(torch.nn.Sequential(block))


@pytest.mark.parametrize("quantized", [False, True])
def test_copies_and_pickles(mesh, quantized):
    moe = Llama4MoE(Llama4MoEConfig(32, 32, 4))
    moe = parallelize_module(quantize_(moe) if quantized else moe, mesh, TensorParallel())
    torch.save(moe, file := io.BytesIO())
    file.seek(0)
    x, others = torch.randn(1, 3, 32), (copy.deepcopy(moe), torch.load(file, weights_only=False))
    expected = moe(x)
    for other in others:
        assert torch.equal(other(x), expected)
        torch.nn.init.zeros_(other.router.weight)
        assert not torch.equal(other(x), expected)  # it runs on its own parameters


@pytest.mark.parametrize("style", [ExpertParallel(), TensorParallel()], ids=["expert", "tensor"])
def test_adapters_name_the_cut(mesh, style, caplog):
    moe = parallelize_module(quantize_(Llama4MoE(Llama4MoEConfig(32, 32, 4))), mesh, style)
    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="cut its weight over ranks, where adapters"):
        add_lora_(moe, 2, 2.0)


def moe_layer():
    return Llama4MoE(Llama4MoEConfig(32, 32, 4)), (torch.randn(1, 3, 32),)


def experts_alone():
    return GroupedSwiGLU(4, 32, 32), (torch.randn(2, 32), torch.tensor([1, 1, 2, 2], dtype=torch.int32))


@pytest.mark.parametrize("style", [ExpertParallel(), TensorParallel()], ids=["expert", "tensor"])
@pytest.mark.parametrize("build", [moe_layer, experts_alone])
def test_ddp_that_gives_all_ranks_the_experts_of_the_first(mesh, build, style):
    block, inputs = build()
    model = torch.nn.ModuleDict(dict(block=block, dense=torch.nn.Linear(32, 32)))
    model.forward = lambda *inputs: model.block(*inputs)
    parallelize_module(quantize_(model).block, mesh, style)
    parameters = [name for name, _ in model.named_parameters() if "shared_expert" in name]  # DTensors of TensorParallel
    buffers = [name for name, _ in model.named_buffers()]
    leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(model, parameters)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"has put the first rank's experts into the {type(model.block).__name__}"):
            wrapped(*inputs)
    leave_out(model, parameters + buffers)
    allowed = DistributedDataParallel(model)
    allowed(*inputs)
    assert allowed(*inputs).shape == inputs[0].shape
