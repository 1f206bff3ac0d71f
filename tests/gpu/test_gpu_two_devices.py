"""One process that drives two GPUs: a call runs on the device of its tensors, whichever is the current one.
Called by pytest on a machine with two GPUs; calls operators and a quantized model.
"""

import threading
import time

import pytest
import torch

from thunder_moe import Llama4MoE, Llama4MoEConfig, quantize_
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.ops.grouped_mm import f16a_nvfp4weight_scaled_grouped_mm, operands

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


@torch.no_grad()
def test_a_full_queue_of_one_device_does_not_stop_threads_of_the_other():
    """Fill the queue of one device, which may wait for a launch of the other thread."""
    packed = quantize(torch.randn(2, 128, 128))
    weights = [operands(packed.to(f"cuda:{index}")) for index in range(2)]
    rows = [torch.ones(2, 128, device=f"cuda:{index}").bfloat16() for index in range(2)]
    ends = [torch.tensor([1, 2], device=f"cuda:{index}", dtype=torch.int32) for index in range(2)]

    def call(index):
        return f16a_nvfp4weight_scaled_grouped_mm(rows[index], *weights[index], ends[index])

    wanted = [call(index).cpu() for index in range(2)]
    gate, waiting, done = torch.cuda.Event(), threading.Event(), []
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        torch.cuda._sleep(10**10)  # some seconds
        gate.record()

    def fill():
        with torch.no_grad():
            torch.cuda.current_stream(0).wait_event(gate)
            waiting.set()
            for _ in range(50_000):  # more than a queue takes
                out = call(0)
            done.append(out.cpu())

    thread = threading.Thread(target=fill)
    thread.start()
    assert waiting.wait(60)
    begin = last = time.monotonic()
    longest = 0.0
    while not gate.query():
        assert torch.equal(call(1).cpu(), wanted[1])
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    was_waiting = not done
    thread.join(120)
    assert was_waiting  # its queue was full, or it would have ended
    assert torch.equal(done[0], wanted[0])
    assert last - begin > 1
    assert longest < 0.5
