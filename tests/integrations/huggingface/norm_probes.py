"""Compares a norm of transformers with what the table says that it computes: the numbers of its own forward, in both
16-bit dtypes, in training and evaluation.
Called by test_norms and router_probes; calls the norm's own forward.

Legend: P probes, H hidden_size.
"""

import itertools

import torch
from torch import nn

from thunder_moe.integrations.huggingface.routers import OWN_STATE


def probe_copy(module, dtype):
    """Return a module of the same class and attributes, with zeros of a dtype on the CPU for its tensors."""
    new = type(module).__new__(type(module))
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        if name not in OWN_STATE:
            vars(new)[name] = value
    for name, child in module._modules.items():
        new.register_module(name, None if child is None else probe_copy(child, dtype))
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        zeros = None if tensor is None else torch.zeros(tensor.shape, dtype=dtype, device="cpu")
        if name in module._parameters:
            new.register_parameter(name, None if zeros is None else nn.Parameter(zeros, requires_grad=False))
        else:
            new.register_buffer(name, zeros)
    return new


@torch.no_grad()
def computes(norm, epsilon, rounds_first):
    """True if a norm gives the numbers of the plain definition, nearly always the very same."""
    for dtype, training in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        probe = probe_copy(norm, dtype).train(training)
        (size,) = probe.weight.shape
        generator = torch.Generator().manual_seed(0)
        probe.weight.copy_(0.5 + torch.rand(size, generator=generator))
        # Some so small that epsilon decides.
        scale = torch.tensor([1e-4, 1e-3, 1e-2, 0.3, 1.0, 30.0])
        x = (torch.randn(6, 8, size, generator=generator) * scale[:, None, None]).to(dtype)  # [P, P, H]
        own, wanted = probe(x.clone()), defined(x, probe.weight, epsilon, rounds_first)
        if own.shape != wanted.shape or own.dtype != dtype or (own == wanted).float().mean() <= 0.999:
            return False
    return True


def defined(x, weight, epsilon, rounds_first):
    """Return what a `NormCall` computes, in plain operations."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype) if rounds_first else (weight.float() * wide).to(x.dtype)
