"""The package itself: a light import, its public names, and errors that name the extra to install.
Called by pytest; starts fresh interpreters.
"""

import subprocess
import sys

import pytest

import thunder_moe


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_light():
    code = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import thunder_moe
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""
    assert python(code) == "['thunder_moe']"


def test_all_names_exist():
    for name in thunder_moe.__all__:
        assert getattr(thunder_moe, name) is not None
    assert set(thunder_moe.__all__) <= set(dir(thunder_moe))
    assert thunder_moe._HOME.keys() == set(thunder_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'moe_excutor'"):
        thunder_moe.moe_excutor  # noqa: B018


def test_works_without_the_optional_packages():
    code = """
import sys
sys.modules.update(dict.fromkeys(["thunder", "transformers", "triton", "matplotlib", "numpy"]))  # None: not there
import torch, thunder_moe
model = torch.nn.Sequential(thunder_moe.Llama4MoE(thunder_moe.Llama4MoEConfig(32, 32, 2)))
print(thunder_moe.quantize_(model)(torch.randn(1, 2, 32)).shape)
calls = (
    lambda: thunder_moe.moe_executor,
    lambda: thunder_moe.Llama4MoE.from_transformers(model),
    lambda: thunder_moe.load_checkpoint("path"),
)
for call in calls:
    try:
        call()
    except ImportError as error:
        print(error)
"""
    assert python(code).splitlines() == [
        "torch.Size([1, 2, 32])",
        "moe_executor needs lightning-thunder: pip install 'thunder_moe[thunder]'",
        "from_transformers needs transformers: pip install 'thunder_moe[transformers]'",
        "thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'",
    ]


def test_thunder_imports_after_moe_executor():
    assert python("from thunder_moe import moe_executor; import thunder; print(moe_executor.name)") == "thunder_moe"
