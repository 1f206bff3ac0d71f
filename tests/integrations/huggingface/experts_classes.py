"""Every experts class of the installed transformers, in tiny sizes.
Called by test_hf_experts and test_gates.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")


class _Config(SimpleNamespace):
    _experts_implementation = "eager"  # transformers' own loop over experts


SIZES = dict(hidden_size=64, intermediate_size=32, moe_intermediate_size=32, moe_hidden_size=64, moe_latent_size=None)
COUNTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6)
GATES = dict(hidden_act="silu", hidden_activation="gelu_pytorch_tanh", mlp_hidden_act="relu2", swiglu_limit=1.5)
OTHERS = dict(swiglu_alpha=1.702, post_norm_eps=1e-5, mlp_gate_softcap=1.0, mlp_up_softcap=1.0)


def experts_classes():
    root = Path(transformers.__file__).parent
    for path in sorted(root.glob("models/*/modeling_*.py")):
        module = ".".join(["transformers", *path.relative_to(root).with_suffix("").parts])
        source = path.read_text(encoding="utf-8")
        for name in re.findall(
            r"@use_experts_implementation.*\n(?:@.*\n)*class (\w+)\(|class (Step3p7Experts)", source
        ):
            yield pytest.param(module, "".join(name), id="".join(name))


def make_experts(module, name, **changes):
    config = _Config(**{**SIZES, **COUNTS, **GATES, **OTHERS, **changes})
    experts = getattr(pytest.importorskip(module, reason="not in this transformers"), name)(config)
    with torch.no_grad():
        for path, parameter in experts.named_parameters():
            if "norm" in path:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3)
    return experts.eval()
