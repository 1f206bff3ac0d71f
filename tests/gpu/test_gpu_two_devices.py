"""One process that drives two GPUs: a call runs on the device of its tensors, whichever is the current one.
Called by pytest on a machine with two GPUs; calls operators and a quantized model.
"""

import pytest
import torch

from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
CONFIG = Llama4MoEConfig(256, 128, 8, top_k=2)


@pytest.fixture
def models():
    """A quantized model on each device, with the same weights."""
    torch.manual_seed(0)
    state = Llama4MoE(CONFIG).bfloat16().state_dict()
    models = []
    for index in range(2):
        model = Llama4MoE(CONFIG).bfloat16()
        model.load_state_dict(state)
        models.append(quantize_(model.to(f"cuda:{index}").eval()))
    return models


@torch.no_grad()
def test_calls_run_on_the_device_of_their_tensors(models):
    x = torch.randn(2, 3, 256).bfloat16()
    wanted = models[0](x.to("cuda:0")).cpu()
    for current in (0, 1, 0):
        torch.cuda.set_device(current)
        for index, model in enumerate(models):
            for _ in range(2):
                out = model(x.to(f"cuda:{index}"))
                assert out.device.index == index
                assert torch.cuda.current_device() == current
                assert torch.equal(out.cpu(), wanted)
    torch.cuda.set_device(0)
