"""What each process does in test_distributed.py. Called through tests/processes.py; calls the package."""

import torch

from thunder_moe.checkpoint.files import TensorFiles
from thunder_moe.integrations.huggingface.checkpoint import load_checkpoint, save_checkpoint
from thunder_moe.integrations.huggingface.experts import NVFP4Experts


def tokens(count=9, high=64):
    return torch.randint(0, high, (2, count), generator=torch.Generator().manual_seed(0))


def load(path, config, **options):
    """A checkpoint in this process's part; a bare dictionary has the options of a `DistributedConfig`."""
    from transformers.distributed import DistributedConfig

    config = None if config is None else DistributedConfig(**config)
    return load_checkpoint(path, dtype=torch.float32, distributed_config=config, **options)


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, NVFP4Experts)]


def expert_bytes(model):
    linears = [linear for block in experts_of(model) for linear in (block.gate_up_proj, block.down_proj)]
    return sum(linear.packed_weight.nbytes for linear in linears)


def logits_of(model, count=9, high=64):
    with torch.no_grad():
        return model(tokens(count, high)).logits


def logits(path, config, count=9, options=None, high=64):
    """The logits of a checkpoint, and shapes of what this process has of the first experts."""
    model = load(path, config, **(options or {}))
    first = experts_of(model)[0]
    return logits_of(model, count, high), first.gate_up_proj.packed_weight.shape, first.down_proj.packed_weight.shape


def beside(path, plain, config):
    """The packages of all parallel styles and the logits of a 16-bit model, after a load of a 4-bit checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    packed = load(path, config)
    stock = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, distributed_config=DistributedConfig(**config)
    )
    homes = {type(style).__module__.partition(".")[0] for style in ALL_PARALLEL_STYLES.values()}
    return homes, "_resolve_parallel_plans" in vars(packed), logits_of(stock)


def compiled(path, config):
    """Return the outputs of a compiled block of experts, and of the eager one."""
    block = load(path, config).model.layers[0].mlp
    hidden = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    run = torch.compile(block, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        return run(hidden), block(hidden)


def generated(path, config):
    """Greedy tokens."""
    model = load(path, config)
    return model.generate(tokens(), do_sample=False, max_new_tokens=6)


def bytes_read(path, config):
    """Bytes of the tensors that this package reads of the files, and of the experts that this process has then; the
    number of parameters of the whole model."""
    read, own = [], TensorFiles.read

    def counted(*args):
        tensor = own(*args)
        read.append(tensor.nbytes)
        return tensor

    TensorFiles.read = counted
    try:
        model = load(path, config)
    finally:
        TensorFiles.read = own
    return sum(read), max(read), expert_bytes(model), model.num_parameters()


def refusal(path, config, options=None):
    """What loading raises."""
    try:
        load(path, config, **(options or {}))
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def saved_again(path, config, where, options=None):
    """Saves a loaded model by both ways, and what loading a checkpoint's tensors into it and a second save raise."""
    from safetensors.torch import load_file

    model, messages = load(path, config, **(options or {})), []
    save_checkpoint(model, where / "checkpoint")
    model.save_pretrained(where / "pretrained")
    tensors = load_file(path / "model.safetensors")
    for attempt in (
        lambda: model.load_state_dict(tensors, strict=False),
        lambda: save_checkpoint(model, where / "checkpoint"),
        lambda: model.save_pretrained(where / "pretrained", state_dict={}),
    ):
        try:
            attempt()
        except (ValueError, FileExistsError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def refusal_of_tp_plan(path):
    """What the quantizer raises where an older transformers has a mesh."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    try:
        AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2))
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return None


def adapted(path, config, experts=8):
    """Logits of a model with adapters of the experts, and the gradients of these by their names."""
    from thunder_moe import add_lora_

    model = add_lora_(load(path, config), 4, 8.0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            whole = torch.randn(experts, *parameter.shape[1:], generator=torch.Generator().manual_seed(len(name)))
            part = next(block.part for path, block in blocks_of(model).items() if name.startswith(path))
            parameter.data.copy_(0.1 * whole[part.experts(experts)])
    out = model(tokens()).logits
    out.float().square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def refusals_of_adapters(path, config, where):
    """What adapters raise that are not of whole experts, or not of all of them."""
    from thunder_moe import add_lora_
    from thunder_moe.integrations.huggingface.lora_files import load_lora_, save_lora

    model, messages = load(path, config), []
    for attempt in (
        lambda: add_lora_(model, 4, 8.0, share="A"),
        lambda: add_lora_(model, 4, 8.0),
        lambda: save_lora(model, where),
        lambda: load_lora_(model, where),
        lambda: model.save_pretrained(where / "whole"),
    ):
        try:
            attempt()
        except ValueError as error:
            messages.append(str(error))
    return messages


def blocks_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Experts)}


def weights_of(model):
    """The 4-bit weights and biases of the experts of a model, by their names, on the CPU."""
    return {name: buffer.clone() for name, buffer in model.state_dict().items() if ".experts." in name}


def quantized(path, config, on_load, format="nvfp4"):
    """Logits and 4-bit experts of a 16-bit checkpoint that is quantized while it loads, or once it is sharded."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from thunder_moe import quantize_
    from thunder_moe.integrations.huggingface.configs import ThunderMoeConfig

    options = dict(quantization_config=ThunderMoeConfig(format=format)) if on_load else {}
    options |= dict(distributed_config=DistributedConfig(**config), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    if not on_load:
        quantize_(model, format=format)
    parts = [block.part for block in experts_of(model)]
    return logits_of(model), weights_of(model), parts


def attempt(path, config, on_load, format="nvfp4"):
    """The error of `quantized`."""
    try:
        quantized(path, config, on_load, format)
    except ValueError as error:
        return str(error)
    return None


def prepared(path, config):
    """The error of `prepare_qat_` for a model that processes share."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from thunder_moe import prepare_qat_

    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(**config))
    try:
        prepare_qat_(model)
    except ValueError as error:
        return str(error)
    return logits_of(model)
