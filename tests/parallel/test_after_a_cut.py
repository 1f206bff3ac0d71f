"""What is set or called on experts after their weights were cut over ranks, and is refused by name.
Called by pytest; torch's fake process group stands for the other rank, since nothing may be sent.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from thunder_moe import GroupedMLP, Llama4MoE, Llama4MoEConfig, quantize_
from thunder_moe.parallel import ExpertParallel


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


def test_quantize_names_the_cut(mesh, caplog):
    moe = Llama4MoE(Llama4MoEConfig(32, 32, 4))
    parallelize_module(moe, mesh, ExpertParallel())
    with caplog.at_level("WARNING"), pytest.raises(ValueError, match="is cut over ranks"):
        quantize_(torch.nn.Sequential(moe))
