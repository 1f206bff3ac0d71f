"""A graph that was compiled outside of the batch-invariant mode is batch-invariant inside, and the other way round.
Called by pytest; the reference judges, whose bits differ between the modes.
"""

import pytest
import torch
from both_compilers import compile_by
from fast_cases import others_slow
from torch import nn

from thunder_moe import GroupedLinear, Llama4MoE, Llama4MoEConfig, batch_invariant, quantize_, use_backend


@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")  # the graph has 4-bit operators already
@pytest.mark.parametrize("compiler", ["dynamo-aot_eager", *others_slow(["thunder"])])
@torch.no_grad()
def test_graphs_read_the_mode(compiler):
    model = quantize_(nn.ModuleList([GroupedLinear(4, 512, 64)]))[0]
    given = torch.randn(200, 512), torch.tensor([50, 100, 150, 200], dtype=torch.int32)
    made_outside, made_inside = (compile_by(compiler, model) for _ in range(2))
    with use_backend("reference"):
        outside = made_outside(*given)
        with batch_invariant():
            inside = made_inside(*given)
            assert torch.equal(made_outside(*given), inside)
        assert torch.equal(made_inside(*given), outside)
    assert not torch.equal(inside, outside)


@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
@torch.no_grad()
def test_the_router_of_a_graph():
    """A graph has one operator for the router and its linear layer, which reads the mode."""
    config = Llama4MoEConfig(hidden_size=512, intermediate_size=64, num_experts=4, num_shared_experts=0, top_k=2)
    model, tokens = quantize_(Llama4MoE(config)), torch.randn(1, 65, 512)
    compiled = compile_by("dynamo-aot_eager", model)
    with batch_invariant():
        whole = compiled(tokens)
        assert torch.equal(whole, model(tokens))
        assert torch.equal(compiled(tokens[:, 64:]), whole[:, 64:])
