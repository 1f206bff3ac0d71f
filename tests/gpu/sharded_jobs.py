"""What the two processes of test_gpu_sharded.py run, a GPU each, with nccl. Called through tests/processes.py; calls
load_checkpoint and add_lora_.
"""

import torch

from thunder_moe import add_lora_, load_checkpoint
from thunder_moe.integrations.huggingface.experts import NVFP4Experts

DEVICE = "cuda"


def tokens():
    return torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0)).to(DEVICE)


def load(path, config, dtype):
    """A checkpoint in this process's part, or the whole one (None)."""
    from transformers.distributed import DistributedConfig

    torch.manual_seed(0)
    if config is None:
        return load_checkpoint(path, dtype=dtype, device=DEVICE)
    return load_checkpoint(path, dtype=dtype, distributed_config=DistributedConfig(**config))


def logits(path, config, dtype):
    """The logits, greedy tokens, and the devices and bytes of the experts that this process has."""
    model = load(path, config, dtype)
    with torch.no_grad():
        out = model(tokens()).logits.float().cpu()
    greedy = model.generate(tokens(), do_sample=False, max_new_tokens=6).cpu() if dtype == torch.float32 else None
    buffers = [buffer for module in model.modules() if isinstance(module, NVFP4Experts) for buffer in module.buffers()]
    return out, greedy, {buffer.device.type for buffer in buffers}, sum(buffer.nbytes for buffer in buffers)


def compiled(path, config, backend):
    """Logits of the compiled model, and of the eager one."""
    torch._dynamo.reset()
    model = load(path, config, torch.float32)
    run = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        return run(tokens(), use_cache=False).logits.cpu(), model(tokens()).logits.cpu()


def adapted(path, config, dtype):
    """Logits of a model with adapters of the experts, and the gradients of these by their names."""
    model = add_lora_(load(path, config, dtype), 4, 8.0)
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Experts)}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            whole = torch.randn(8, *parameter.shape[1:], generator=torch.Generator().manual_seed(len(name)))
            part = next(block.part for path, block in blocks.items() if name.startswith(path))
            parameter.data.copy_(0.1 * whole[part.experts(8)])
    out = model(tokens()).logits
    out.float().square().mean().backward()
    return out.detach().float().cpu(), {
        n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None
    }
