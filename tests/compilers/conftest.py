"""Fixtures that the tests of both compilers share: a layer and its input.
Called by pytest.

What the fast set shows, once each:
- every view, call, SwiGLU, router, and form of a layer that is recognised, rewritten and equal to eager mode, under
  torch.compile, the forms of a table in one graph; under Thunder views and SwiGLUs, too, and routers of some forms;
- each reason for declining, and code that is nearly a pattern;
- each kind of mutation, alias, grad mode and nested graph that the rewrite must respect, under each compiler;
- one layer compiled by inductor, and one whole layer by Thunder, which traces it in two seconds.
Products of these tables, Thunder's runs of tests that torch.compile passes, other inner compilers, exported programs by
AOTInductor and whole models under Thunder are exhaustive.
"""

import pytest
import torch
from torch import nn

from thunder_moe import Llama4MoE, Llama4MoEConfig


@pytest.fixture
def moe():
    # std K**-0.5 makes the routed experts weigh as much as the shared one, so that their errors show.
    model = Llama4MoE(Llama4MoEConfig(64, 32, 4), dtype=torch.bfloat16)
    for linear in (model.routed_experts.gate_proj, model.routed_experts.up_proj, model.routed_experts.down_proj):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return model


@pytest.fixture
def x():
    return torch.randn(2, 8, 64, dtype=torch.bfloat16)
