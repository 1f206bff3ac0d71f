"""The package itself: a light import, its public names, and errors that name the extra to install.
Called by pytest; starts fresh interpreters.
"""

import pytest
from fast_cases import others_slow
from interpreters import fresh_python

import thunder_moe


def test_import_is_light():
    code = """
import sys
before, finders = set(sys.modules), list(sys.meta_path)
import thunder_moe
print(sorted({name.split(".")[0] for name in set(sys.modules) - before}), sys.meta_path == finders)
"""
    assert fresh_python(code) == "['thunder_moe'] True\n"


def test_the_command_line_leaves_the_compiler_out():
    """`convert` starts in half the time without torch._dynamo, which `sensitivity` needs."""
    code = "import sys, thunder_moe.__main__; print('torch._dynamo' in sys.modules, 'torch' in sys.modules)"
    assert fresh_python(code) == "False True\n"


def test_all_names_exist():
    for name in thunder_moe.__all__:
        assert getattr(thunder_moe, name) is not None
    assert set(thunder_moe.__all__) <= set(dir(thunder_moe))
    assert thunder_moe._HOME.keys() == set(thunder_moe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'moe_excutor'. Did you mean: 'moe_executor'?"):
        thunder_moe.moe_excutor  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean: 'quantize_'?"):
        thunder_moe.quantize(None)  # was a module, which "is not callable" says little about


def test_works_without_the_optional_packages_and_without_being_installed():
    code = """
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(())
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
from thunder_moe import *
print(sorted(set(thunder_moe._HOME) - set(globals())), Llama4MoE.__name__)
thunder_moe.register("torch")
print(torch._dynamo.lookup_backend("thunder_moe").__module__, torch._dynamo.list_backends().count("thunder_moe"))
"""
    assert fresh_python(code).splitlines() == [
        "torch.Size([1, 2, 32])",
        "moe_executor needs lightning-thunder: pip install 'thunder_moe[thunder]'",
        "thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'",
        "thunder_moe.integrations needs transformers >= 5.7: pip install 'thunder_moe[transformers]'",
        "['ThunderMoeConfig', 'fast_generate', 'fuse_norms_', 'get_peft_model', 'load_checkpoint', 'load_lora_',"
        " 'load_peft_model', 'moe_executor', 'save_checkpoint', 'save_lora'] Llama4MoE",
        "thunder_moe.compilers.dynamo.backend 1",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "from thunder_moe import moe_executor; import thunder",
        *others_slow(
            [
                "import thunder_moe; thunder_moe.register('thunder'); import thunder",
                "import thunder_moe; thunder_moe.register(); import thunder",
                "from thunder_moe.compilers.thunder.executor import NVFP4MoE; import thunder",
            ],
            exhaustive=True,
        ),
    ],
)
@pytest.mark.slow
def test_thunder_imports_after_an_explicit_act(code):
    """An installed package has one backend of torch.compile then."""
    code = f"""
import torch
before = set(dir(torch.Tensor)), torch.autograd.Function.__dict__["apply"]
{code}
from thunder_moe import moe_executor
print(thunder.jit(lambda x: x + 1, executors=[moe_executor])(torch.ones(1)).item())
print(before[0] == set(dir(torch.Tensor)), before[1] is torch.autograd.Function.__dict__["apply"])
print(torch._dynamo.lookup_backend("thunder_moe").__module__, torch._dynamo.list_backends().count("thunder_moe"))
"""
    assert fresh_python(code).splitlines() == ["2.0", "True True", "thunder_moe.compilers.dynamo.backend 1"]


def test_a_failed_import_of_thunder_says_what_to_do():
    code = """
import sys, types
sys.modules["thunder.core"] = types.ModuleType("thunder.core")  # what is left of it
import thunder_moe
for use in (lambda: thunder_moe.register("thunder"), lambda: thunder_moe.moe_executor):
    try:
        use()
    except ImportError as error:
        print(str(error).split(": ")[1])
"""
    remedy = (
        "start a new process and write `from thunder_moe import moe_executor` before `import thunder`, which makes "
        "Thunder work on this version of torch"
    )
    assert fresh_python(code).splitlines() == [remedy] * 2


@pytest.mark.parametrize("name", ["thunder", "transformers"])
def test_another_package_of_that_name(name):
    """Say, a thunder.py of the user's own, or a release without what is imported."""
    code = f"""
import sys, types
sys.modules[{name!r}] = types.ModuleType({name!r})
import thunder_moe
try:
    thunder_moe.register({name!r})
except ImportError:
    print("only where it is asked for")
"""
    assert fresh_python(code) == "only where it is asked for\n"


@pytest.mark.parametrize(
    "act",
    ["import thunder_moe; thunder_moe.register('torch'); import torch", "import torch._dynamo, thunder_moe"],
)
@pytest.mark.exhaustive  # the tests above end with the same two lines
def test_torch_compile_knows_the_backend_of_a_package_that_is_not_installed(act):
    code = f"""
import importlib.metadata, sys
importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(())
{act}
print(torch._dynamo.lookup_backend("thunder_moe").__module__)
print(torch._dynamo.list_backends().count("thunder_moe"))
"""
    assert fresh_python(code).splitlines() == ["thunder_moe.compilers.dynamo.backend", "1"]


@pytest.mark.parametrize("first", ["import thunder_moe", "import torch._dynamo", "import torch._dynamo, thunder_moe"])
@pytest.mark.exhaustive
def test_an_installed_package_has_one_backend(first):
    code = f"""
import torch
{first}
from torch._dynamo import list_backends, lookup_backend
print(lookup_backend("thunder_moe").__module__, list_backends().count("thunder_moe"))
import thunder_moe
print(lookup_backend("thunder_moe") is thunder_moe.compilers.dynamo.backend.thunder_moe_backend)
"""
    assert fresh_python(code).splitlines() == ["thunder_moe.compilers.dynamo.backend 1", "True"]
