"""Eager inference of quantized Hugging Face models on a GPU: prepared chains of kernels give what the backend's
functions give, on any stream, in graphs and behind changed weights; fused norms.
Called by pytest -m gpu.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tiny_models import tiny_config, tiny_model, tokens

from thunder_moe import quantize_
from thunder_moe.integrations.huggingface.norms import FusedNorm, fuse_norms_
from thunder_moe.kernels.cuda import launch
from thunder_moe.kernels.select import use_backend
from thunder_moe.ops.operator import Operator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
BF16 = torch.bfloat16


def by_functions(model, *args):
    with use_backend("cuda"):  # past all that is prepared
        return model(*args)


@pytest.fixture
def unprepared(monkeypatch):
    """The operators that have run without a chain."""
    seen, compute = [], Operator._compute

    def counted(self, *args, **options):
        seen.append(self.name)
        return compute(self, *args, **options)

    monkeypatch.setattr(Operator, "_compute", counted)
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
def test_models_equal_those_of_the_functions(name):
    model = quantize_(tiny_model(name, BF16).cuda(), linears=True)
    for length in (1, 3, 9):
        ids = tokens(1, length).cuda()
        expected = by_functions(model, ids).logits
        for _ in range(2):
            assert torch.equal(model(ids).logits, expected)


@torch.no_grad()
def test_blocks_on_streams_in_graphs_and_behind_other_weights(unprepared):
    block, other = block_of(), block_of()
    x = torch.randn(1, 4, 256, device="cuda", dtype=BF16)
    expected = by_functions(block, x)
    block(x)
    unprepared.clear()
    assert torch.equal(block(x), expected)
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
    assert not unprepared
    assert torch.equal(out, by_functions(block, y))
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
