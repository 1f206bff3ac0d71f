"""What the two processes of the tests of compiled shards run.
Called by the fixture `ranks`; calls thunder_moe.parallel, its compilers, and one process without parallelism as judge.
"""

import copy
import functools
from types import SimpleNamespace

import torch
from compiler_speed import speed_up_compilers
from programs import FEATURES, A, E, H, error, run_rows_in_8_bits, run_tensor_layer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from thunder_moe import Llama4MoE, Llama4MoEConfig, dequantize_, quantize_, rewrite_report
from thunder_moe.parallel import ExpertParallel, TensorParallel


@functools.cache
def mesh():
    return init_device_mesh("cpu", (2,))


def compiled_by(compiler, model):
    torch._dynamo.reset()
    if compiler == "torch.compile":
        return torch.compile(model, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "eager"})
    from thunder_moe import moe_executor  # before Thunder, which it makes importable

    speed_up_compilers()  # Thunder is one of them from the first of these calls on
    if compiler == "thunder.jit":
        import thunder

        return thunder.jit(model, executors=[moe_executor])
    from thunder.dynamo import thunderfx

    return thunderfx(model, executors=[moe_executor])


def layer():
    """A frozen layer in bfloat16 whose shards of each expert have one largest magnitude, so that packing a shard gives
    the bits of packing the whole."""
    torch.manual_seed(1)
    moe = Llama4MoE(Llama4MoEConfig(H, FEATURES, E, top_k=A), dtype=torch.bfloat16).requires_grad_(False)
    for weight in moe.routed_experts.parameters():
        weight[:, 0, 0] = weight[:, -1, -1] = weight.abs().amax((1, 2))
    return moe


def tokens():
    return torch.randn(1, 6, H, generator=torch.Generator().manual_seed(3)).bfloat16()


@torch.no_grad()
def run_cut_after_quantize(compiler, format):
    """The error of a layer that is quantized and then cut, and its report's decisions."""
    whole = quantize_(layer(), format=format)
    moe = parallelize_module(copy.deepcopy(whole), mesh(), TensorParallel())
    compiled = compiled_by(compiler, moe)
    wanted = dequantize_(whole).float()(tokens().float())
    return error(compiled(tokens()), wanted), decisions(compiled)


@torch.no_grad()
def run_packed_by_compiler(compiler, style):
    """The errors of a 16-bit layer whose shards the compiler packs, before and after a change of the shards, and its
    report's decisions."""
    whole = layer()
    moe = parallelize_module(copy.deepcopy(whole), mesh(), style)
    assert all(isinstance(weight, DTensor) for weight in moe.routed_experts.parameters())
    compiled, errors = compiled_by(compiler, moe), []
    for factor in (1.0, -2.0, 1.0):
        for model in (whole, moe):
            for weight in model.routed_experts.parameters():
                weight.mul_(factor)  # of a DTensor, it raises the version of the DTensor alone
        wanted = dequantize_(quantize_(copy.deepcopy(whole))).float()(tokens().float())
        errors.append(error(compiled(tokens()), wanted))
    return max(errors), decisions(compiled)


def decisions(compiled):
    return [entry.decision for entry in rewrite_report(compiled)]


def run_training(compiler, quantized):
    """The largest error of outputs and gradients."""
    torch.manual_seed(0)
    meshes = SimpleNamespace(of=lambda ranks: mesh())
    return run_tensor_layer(meshes, 2, quantized, 1, functools.partial(compiled_by, compiler))


def run_training_in_8_bits(recipe):
    """The largest error of outputs and gradients, with rows that travel in 8 bits."""
    torch.manual_seed(0)
    compile_ = functools.partial(compiled_by, "torch.compile")
    return run_rows_in_8_bits(SimpleNamespace(two=mesh()), recipe, 20, compile_)


def run_step(compiler):
    """The error of a trainable layer under no_grad, after a step of an optimizer that changes DTensors."""
    moe = parallelize_module(layer().requires_grad_(True), mesh(), TensorParallel())
    compiled, weights = compiled_by(compiler, moe), list(moe.routed_experts.parameters())
    with torch.no_grad():
        compiled(tokens())
    compiled(tokens()).float().square().sum().backward()
    for weight in weights:
        weight.grad = DTensor.from_local(-weight.to_local().detach(), weight.device_mesh, weight.placements)
    torch.optim.SGD(weights, lr=1.0, foreach=False).step()  # doubles the weights
    whole = layer()
    with torch.no_grad():
        for weight in whole.routed_experts.parameters():
            weight.mul_(2)
        return error(compiled(tokens()), dequantize_(quantize_(whole)).float()(tokens().float()))


def run_refused(compiler, what):
    """The message of the NotImplementedError of a compiled layer."""
    moe = layer()
    if what == "expert parallel":
        style = ExpertParallel(capacity=6, exchange="all_gather", load_steps=0)
        parallelize_module(quantize_(moe), mesh(), style)
    else:
        parallelize_module(moe, mesh(), {"shared_expert.up_proj": ColwiseParallel(output_layouts=Replicate())})
    try:
        with torch.no_grad():
            compiled_by(compiler, moe)(tokens())
    except Exception as caught:
        return str(caught)


class Distributed(torch.nn.Module):
    """A grouped GEMM of DTensors, as torch's own styles for experts compute it."""

    def __init__(self):
        super().__init__()
        self.mesh, weight = mesh(), layer().routed_experts.up_proj.weight
        self.weight = torch.nn.Parameter(distribute_tensor(weight.data, mesh(), [Shard(1)]), requires_grad=False)

    def forward(self, x, offsets):
        x, offsets = (DTensor.from_local(t, self.mesh, [Replicate()], run_check=False) for t in (x, offsets))
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=offsets).to_local()


@torch.no_grad()
def run_dtensor_gemm():
    """The reason for which a GEMM of DTensors stays in 16 bits."""
    compiled = compiled_by("torch.compile", Distributed())
    compiled(tokens()[0], torch.full((E,), 6, dtype=torch.int32))
    (entry,) = rewrite_report(compiled).entries
    return entry.reason
