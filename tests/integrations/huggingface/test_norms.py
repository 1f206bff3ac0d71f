"""transformers' RMS norms in torch's fused kernel: which are recognized, that they give the same, and where the own
forward runs.
Called by pytest; judged by the norms' own forward. The kernel's own numbers on CUDA: tests/gpu.
"""

import copy
import io
import re
from pathlib import Path

import pytest
import torch
from fast_cases import others_slow
from torch import nn

transformers = pytest.importorskip("transformers")

from norm_probes import computes, defined  # noqa: E402
from tiny_models import tiny_model, tokens  # noqa: E402

from thunder_moe import quantize_  # noqa: E402
from thunder_moe.integrations.huggingface import norms  # noqa: E402
from thunder_moe.integrations.huggingface.known_code import NEWEST, tell, unknown_version  # noqa: E402
from thunder_moe.integrations.huggingface.norm_table import NORMS  # noqa: E402
from thunder_moe.integrations.huggingface.norms import FusedNorm, fuse_norms_, restore_norms_  # noqa: E402

BF16 = torch.bfloat16
FUSED = {  # module, class: whether it rounds ahead of the weight
    ("qwen3_moe", "Qwen3MoeRMSNorm"): True,
    ("mixtral", "MixtralRMSNorm"): True,
    ("deepseek_v3", "DeepseekV3RMSNorm"): True,
    ("llama4", "Llama4TextRMSNorm"): True,
    ("gpt_oss", "GptOssRMSNorm"): False,
}
LEFT = [("qwen3_next", "Qwen3NextRMSNorm"), ("qwen3_next", "Qwen3NextRMSNormGated"), ("llama4", "Llama4TextL2Norm")]


# Classes named so that torch's rms_norm does not compute: with weights around 0, with none, or with more operations.
NOT_FUSED = """
    axk2.AXK2GatedRMSNorm deepseek_v4.DeepseekV4UnweightedRMSNorm esmfold2.EsmFold2RMSNorm
    falcon_mamba.FalconMambaWeightlessRMSNorm gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm
    glm5_next.Glm5NextTextUnweightedRMSNorm hrm_text.HrmTextRMSNorm hy_v4.HYV4UnweightedRMSNorm
    hy_v4_vl.HYV4VLUnweightedRMSNorm inkling2.Inkling2UnweightedRMSNorm inkling2_loop.Inkling2LoopUnweightedRMSNorm
    minimax_m3_vl.MiniMaxM3VLRMSNorm muse_glimmer.MuseGlimmerTextCenteredRMSNorm
    muse_spark.MuseSparkTextCenteredRMSNorm muse_spark.MuseSparkTextInputScaledRMSNorm nanochat.NanoChatRMSNorm
    qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm qwen3_next.Qwen3NextRMSNorm qwen4_exp.Qwen4ExpTextRMSNorm
    recurrent_gemma.RecurrentGemmaRMSNorm step3p7.Step3p7RMSNorm t5gemma.T5GemmaRMSNorm t5gemma2.T5Gemma2RMSNorm
    vaultgemma.VaultGemmaRMSNorm
"""


def make(name, kind, *args):
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
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
        return defined(x, weight, self.epsilon, self.rounds_first)

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


TABLE = [(name.split(".")[2], cls) for name, cls in NORMS]


# The others are copies in transformers, which `make test-matrix` runs for a new version.
@pytest.mark.parametrize(("name", "kind"), others_slow(TABLE, {name for name, _ in FUSED}, exhaustive=True))
def test_each_class_of_the_table_computes_what_it_says(name, kind):
    norm = make(name, kind, 64, 3e-5)
    row = NORMS[type(norm).__module__, kind]
    if unknown_version(row.since):
        with pytest.raises(ValueError, match="found no RMS norm"):
            fuse_norms_(norm)
        return
    call = fuse_norms_(copy.deepcopy(norm)).norm_call
    assert (call.epsilon, call.rounds_first) == (3e-5, row.rounds_first)
    assert computes(norm, 3e-5, row.rounds_first)
    assert not computes(norm, 3e-5, not row.rounds_first)
    assert not computes(norm, 1e-6, row.rounds_first)


def test_no_norm_of_this_transformers_has_been_forgotten():
    """Where it fails, a class wants a row, or to be named in `NOT_FUSED`."""
    if unknown_version(NEWEST):
        pytest.skip("the table was completed with another version")
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        names = re.findall(r"^class (\w*RMSNorm)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        found.update(f"{path.parent.name}.{name}" for name in names)
    assert found - {f"{name}.{cls}" for name, cls in TABLE} == set(NOT_FUSED.split())


def test_versions_of_transformers_that_the_table_does_not_know_keep_their_norms(monkeypatch, caplog):
    tell.cache_clear()
    norm = make("mixtral", "MixtralRMSNorm", 64)
    monkeypatch.setattr("transformers.__version__", f"{NEWEST[0]}.{NEWEST[1] + 1}.0.dev0")
    with pytest.raises(ValueError, match="known in transformers 5.7 to {}.{} alone".format(*NEWEST)):
        fuse_norms_(norm)
    assert "MixtralRMSNorm keeps its own operations, slower in eager code" in caplog.text


@pytest.mark.parametrize(("name", "kind"), LEFT)
def test_left(name, kind, caplog):
    tell.cache_clear()
    caplog.set_level("INFO", "thunder_moe")
    norm = make(name, kind) if kind == "Llama4TextL2Norm" else make(name, kind, 64)
    with pytest.raises(ValueError, match="found no RMS norm"):
        fuse_norms_(nn.Sequential(norm, nn.RMSNorm(64)))
    assert f"norm {kind} keeps its own operations" in caplog.text


def test_changed_norms_are_left(monkeypatch):
    unscaled = make("gemma4", "Gemma4RMSNorm", 64)
    unscaled.with_scale = False
    of_another_class = make("moshi", "MoshiRMSNorm", 64)
    monkeypatch.setattr(type(of_another_class), "_norm", lambda self, x: x)
    patched, replaced = (make("llama4", "Llama4TextRMSNorm", 64) for _ in range(2))
    patched._norm = lambda x: x
    replaced.forward = lambda x: x
    for norm in (
        patched,
        replaced,
        unscaled,
        of_another_class,
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
