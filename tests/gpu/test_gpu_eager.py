"""Eager inference of quantized Hugging Face models on a GPU: kernels called without their operators give the same, on
any stream, in graphs and behind changed weights; fused norms.
Called by pytest -m gpu.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import quantize_
from thunder_moe.integrations.huggingface import experts, routers
from thunder_moe.integrations.huggingface.norms import FusedNorm, fuse_norms_
from thunder_moe.kernels.cuda import bound, launch
from thunder_moe.nn import linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BF16 = torch.bfloat16


def by_operators(model, *args):
    with pytest.MonkeyPatch.context() as patch:
        for module in (experts, routers, linear):
            patch.setattr(module, "is_bare", lambda tensor: False)
        return model(*args)


@pytest.fixture
def ran(monkeypatch):
    """How many layers' experts have run without their operator."""
    seen, run = [], bound.Chain.__call__
    monkeypatch.setattr(bound.Chain, "__call__", lambda *args: seen.append(1) or run(*args))
    return seen


def block_of(hidden=256, inner=128, expert_count=8):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = tiny_config("qwen3_moe")
    config.hidden_size, config.moe_intermediate_size, config.num_experts = hidden, inner, expert_count
    with torch.device("cuda"):
        block = Qwen3MoeSparseMoeBlock(config).to(BF16).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return quantize_(block)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_models_equal_those_of_operators(ran, name):
    model = quantize_(tiny_model(name, BF16).cuda(), linears=True)
    for length in (1, 3, 9):
        ids = tokens(1, length).cuda()
        expected = by_operators(model, ids).logits
        assert not ran
        model(ids)
        assert torch.equal(model(ids).logits, expected)
        ran.clear()


@torch.no_grad()
def test_blocks_on_streams_in_graphs_and_behind_other_weights(ran):
    block, other = block_of(), block_of()
    x = torch.randn(1, 4, 256, device="cuda", dtype=BF16)
    expected = by_operators(block, x)
    block(x)
    assert torch.equal(block(x), expected)
    assert len(ran) == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.equal(block(x), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph, y = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = block(y)
    y.copy_(x.flip(1))
    graph.replay()
    assert torch.equal(out, by_operators(block, y))
    assert len(ran) == 3
    block.experts.load_state_dict(copy.deepcopy(other.experts.state_dict()))
    block.gate.weight.copy_(other.gate.weight)
    assert torch.equal(block(x), other(x))
    block.cpu()
    assert block(x.cpu()).isfinite().all()
    block.cuda()
    assert torch.equal(block(x), other(x))
    assert launch.current_device() == 0


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@torch.no_grad()
def test_fused_norms(dtype):
    model = tiny_model("qwen3_moe", dtype).cuda()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    own = copy.deepcopy(model.model.norm)
    fuse_norms_(model)
    norm = model.model.norm
    assert isinstance(norm, FusedNorm)
    for scale in (1e-3, 1.0, 30.0):
        x = scale * torch.randn(4, 33, 64, device="cuda", dtype=dtype)
        wanted, found = own(x), norm(x)
        assert found.dtype == dtype
        assert (found == wanted).float().mean() > 0.995
        torch.testing.assert_close(found, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
