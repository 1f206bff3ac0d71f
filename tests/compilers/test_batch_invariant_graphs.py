"""A graph that was compiled outside of the batch-invariant mode is batch-invariant inside, and the other way round.
Called by pytest; the reference judges, whose bits differ between the modes.
"""

import pytest
import torch
from both_compilers import compile_by
from fast_cases import others_slow

from thunder_moe import Llama4MoE, Llama4MoEConfig, batch_invariant, quantize_, use_backend


@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")  # the graph has 4-bit operators already
@pytest.mark.parametrize("compiler", others_slow(["dynamo-aot_eager", "thunder"], ["dynamo-aot_eager"]))
@torch.no_grad()
def test_graphs_read_the_mode(compiler):
    config = Llama4MoEConfig(hidden_size=512, intermediate_size=64, num_experts=4, top_k=2)
    model, tokens = quantize_(Llama4MoE(config)), torch.randn(1, 200, 512)
    made_outside, made_inside = (compile_by(compiler, model) for _ in range(2))
    with use_backend("reference"):
        outside = made_outside(tokens)
        with batch_invariant():
            inside = made_inside(tokens)
            assert torch.equal(made_outside(tokens), inside)
        assert torch.equal(made_inside(tokens), outside)
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
