"""transformers' RMS norms in torch's fused kernel: which are recognized, that they give the same, and where the own
forward runs.
Called by pytest; judged by the norms' own forward. The kernel's own numbers on CUDA: tests/gpu.
"""

import copy
import importlib
import io

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tiny_models import tiny_model, tokens

from thunder_moe import quantize_
from thunder_moe.integrations.huggingface import norms
from thunder_moe.integrations.huggingface.norms import FusedNorm, fuse_norms_, restore_norms_

BF16 = torch.bfloat16
FUSED = {  # module, class: whether it rounds ahead of the weight
    ("qwen3_moe", "Qwen3MoeRMSNorm"): True,
    ("mixtral", "MixtralRMSNorm"): True,
    ("deepseek_v3", "DeepseekV3RMSNorm"): True,
    ("llama4", "Llama4TextRMSNorm"): True,
    ("gpt_oss", "GptOssRMSNorm"): False,
}
LEFT = [("qwen3_next", "Qwen3NextRMSNorm"), ("qwen3_next", "Qwen3NextRMSNormGated"), ("llama4", "Llama4TextL2Norm")]


def make(name, kind, *args):
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    if not hasattr(module, kind):
        pytest.skip(f"this transformers has no {kind}")
    norm = getattr(module, kind)(*args).to(BF16)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return norm


@pytest.fixture
def runs(monkeypatch):
    """Norms take the CPU for a device whose kernel is known, and count their fused calls."""
    seen = []

    def run(self, x, weight):
        seen.append(tuple(x.shape))
        return self.defined(x, weight)

    monkeypatch.setattr(norms, "_is_served", lambda x: True)
    monkeypatch.setattr(norms.NormCall, "__call__", run)
    return seen


@pytest.mark.parametrize(("name", "kind"), FUSED)
@torch.no_grad()
def test_recognized(runs, name, kind):
    norm = make(name, kind, 64, 1e-5)
    own = copy.deepcopy(norm)
    fuse_norms_(norm)
    assert isinstance(norm, type(own))
    assert norm.norm_call.rounds_first is FUSED[name, kind]
    assert norm.norm_call.epsilon == 1e-5
    for x in (torch.randn(2, 3, 64, dtype=BF16), 1e-3 * torch.randn(4, 64, dtype=BF16)):
        assert torch.equal(norm(x), own(x))
        assert runs.pop() == tuple(x.shape)
    wide = torch.randn(2, 64)
    assert torch.equal(norm(wide), own(wide))
    assert not runs
    assert type(restore_norms_(norm)) is type(own)
    assert vars(norm).keys() == vars(own).keys()


@pytest.mark.parametrize(("name", "kind"), LEFT)
def test_left(name, kind):
    norm = make(name, kind) if kind == "Llama4TextL2Norm" else make(name, kind, 64)
    with pytest.raises(ValueError, match="found no RMS norm"):
        fuse_norms_(nn.Sequential(norm, nn.RMSNorm(64)))


def test_changed_norms_are_left():
    patched, replaced = (make("llama4", "Llama4TextRMSNorm", 64) for _ in range(2))
    patched._norm = lambda x: x
    replaced.forward = lambda x: x
    for norm in (
        patched,
        replaced,
        nn.utils.parametrizations.weight_norm(make("mixtral", "MixtralRMSNorm", 64), dim=None),
    ):
        with pytest.raises(ValueError, match="found no RMS norm"):
            fuse_norms_(norm)


def test_where_the_own_forward_runs(runs):
    norm = fuse_norms_(make("qwen3_moe", "Qwen3MoeRMSNorm", 64))
    own = restore_norms_(copy.deepcopy(norm))
    x = torch.randn(2, 64, dtype=BF16)
    leaf = x.clone().requires_grad_()
    norm(leaf).sum().backward()
    assert leaf.grad is not None
    with torch.no_grad():
        assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True)(x), own(x))
        with torch.autocast("cpu", BF16):
            assert torch.equal(norm(x), own(x))
        assert not runs
        assert torch.equal(norm(x), own(x))
        assert runs.pop()
        norm.variance_epsilon = own.variance_epsilon = 0.1
        assert torch.equal(norm(x), own(x))
        norm.weight = own.weight = nn.Parameter(torch.rand(64))
        assert torch.equal(norm(x), own(x))
        assert not runs


@torch.no_grad()
def test_models(runs):
    model = quantize_(tiny_model("qwen3_moe", BF16))
    ids = tokens()
    expected = model(ids).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    fuse_norms_(model)
    assert sum(isinstance(module, FusedNorm) for module in model.modules()) == 2 * 4 + 1
    file = io.BytesIO()
    torch.save(model.model.norm, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False), FusedNorm)
    for fused in (model, copy.deepcopy(model)):
        assert torch.equal(fused(ids).logits, expected)
        assert len(runs) == 9
        runs.clear()
    assert seen
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    restore_norms_(model)
    assert torch.equal(model(ids).logits, expected)
    assert not runs
