"""The table of the experts' gates: each class of transformers computes what its row says, others run their own gate.
Called by pytest; judged by the gates themselves, at probes.

Legend: I intermediate_size, P probes.
"""

import functools
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from experts_classes import experts_classes, make_experts
from torch import nn

transformers = pytest.importorskip("transformers")

from thunder_moe.activations import SwiGLUConfig  # noqa: E402
from thunder_moe.integrations.huggingface.forms import GATES, apply_gate, form_of  # noqa: E402
from thunder_moe.integrations.huggingface.known_code import NEWEST, origin, tell, unknown_version  # noqa: E402

LLAMA4 = pytest.param("transformers.models.llama4.modeling_llama4", "Llama4TextExperts", id="Llama4TextExperts")
QWEN3 = "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"
GPT_OSS = "transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"
PROBES = (0.0, 1e-3, 0.1, 0.5, 1.0, 1.7, 2.5, 3.9, 6.5, 6.99, 7.01, 9.0, 15.0, 17.0, 40.0, 100.0)
SETTINGS = [
    {},
    dict(hidden_act="gelu", hidden_activation="gelu"),
    dict(hidden_act="quick_gelu", hidden_activation="silu"),
    dict(hidden_act="swish", swiglu_limit=7.0, swiglu_alpha=1.3),
    dict(swiglu_limit=200.0),
]


@torch.no_grad()
def found_by_probes(experts):
    """Return the only `SwiGLUConfig` that agrees with the gate of experts to float32 rounding, or None."""
    limits = {None} | {getattr(experts, name, None) for name in ("limit", "swiglu_limit")} - {float("inf")}
    around = [factor * limit for limit in limits if limit is not None for factor in (0.9, 1.1, 4.0)]
    values = torch.tensor([sign * probe for probe in (*PROBES, *around) for sign in (1.0, -1.0)])
    gate, up = torch.cartesian_prod(values, values).unbind(-1)  # [P]
    interleaved = not getattr(experts, "is_concatenated", True)
    own = apply_gate(experts, type(experts), torch.cat([gate, up])[None], interleaved)[0]
    alphas = {1.0, 1.702} | {getattr(experts, name, 1.0) for name in ("alpha", "swiglu_alpha")}
    forms = [SwiGLUConfig(*each) for each in itertools.product(alphas, limits, (0.0, 1.0))]
    agreeing = [form for form in forms if torch.allclose(form(gate, up), own, rtol=1e-5, atol=1e-6)]
    assert len(agreeing) <= 1
    return agreeing[0] if agreeing else None


@pytest.mark.parametrize(("module", "name"), [*experts_classes(), LLAMA4])
def test_each_class_computes_what_the_table_says(module, name):
    for settings in SETTINGS:
        experts = make_experts(module, name, **settings)
        form = form_of(experts)
        if form.gated:
            assert form.swiglu == found_by_probes(experts)
        if hasattr(experts, "limit"):
            experts.limit = float("inf")
            assert form_of(experts).swiglu == found_by_probes(experts)


def test_each_row_is_of_a_function_of_transformers():
    if unknown_version(NEWEST):
        pytest.skip("this transformers may lack some")
    for module, name in GATES:
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        assert origin(function) == (module, name)


class Scaled(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    activation = nn.SiLU()
    activation.register_forward_hook(lambda module, inputs, output: 2 * output)
    return activation


def patched():
    activation = nn.SiLU()
    activation.forward = torch.relu
    return activation


@pytest.mark.parametrize("activation", [F.silu, nn.SiLU(), nn.SiLU(inplace=True)])
def test_activations_that_are_silu(activation):
    experts = make_experts(*QWEN3)
    del experts.act_fn
    experts.act_fn = activation
    assert form_of(experts).swiglu == SwiGLUConfig()


@pytest.mark.parametrize("activation", [nn.GELU(), Scaled(), hooked(), patched(), lambda x: F.silu(x), torch.relu])
def test_activations_that_the_table_does_not_know(activation):
    experts = make_experts(*QWEN3)
    del experts.act_fn
    experts.act_fn = activation
    assert form_of(experts).swiglu is None


def test_gates_that_somebody_has_changed(monkeypatch):
    cls = type(make_experts(*GPT_OSS))
    own = cls._apply_gate

    @functools.wraps(own)
    def doubled(self, gate_up):
        return 2 * own(self, gate_up)

    assert form_of(make_experts(*GPT_OSS)).swiglu is not None
    experts = make_experts(*GPT_OSS)
    experts._apply_gate = lambda gate_up: doubled(experts, gate_up)
    assert form_of(experts).swiglu is None
    experts = make_experts(*GPT_OSS)
    experts.is_concatenated = True
    assert form_of(experts).swiglu is None
    for limit in (torch.tensor(7.0), None, -1.0, float("nan")):
        experts = make_experts(*GPT_OSS)
        experts.limit = limit
        assert form_of(experts).swiglu is None
    monkeypatch.setattr(cls, "_apply_gate", doubled)
    assert form_of(make_experts(*GPT_OSS)).swiglu is None


def test_versions_of_transformers_that_the_table_does_not_know_run_their_own_gate(monkeypatch, caplog):
    tell.cache_clear()
    experts = make_experts(*QWEN3)
    monkeypatch.setattr("transformers.__version__", f"{NEWEST[0]}.{NEWEST[1] + 1}.0")
    assert form_of(experts).swiglu is None
    assert "the gate of Qwen3MoeExperts runs apart from its GEMM, slower" in caplog.text
