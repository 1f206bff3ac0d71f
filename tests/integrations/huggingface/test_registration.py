"""transformers meets the package's checkpoints whichever of the two is imported first.
Called by pytest; starts fresh interpreters.
"""

import pytest
from checkpoint_files import DATA
from interpreters import fresh_python

pytest.importorskip("transformers")

INSTALL = "from thunder_moe.integrations.huggingface import registration; registration.install()"
LOAD = """
name = "thunder_moe.integrations.huggingface.quantizer"
early = name in sys.modules
for export in ("compressed_tensors_qwen3_moe", "modelopt_qwen3_moe"):
    model = transformers.AutoModelForCausalLM.from_pretrained(f"{data}/{export}")
    print(early, sum(type(module).__name__ == "NVFP4Experts" for module in model.modules()))
"""
ORDERS = {
    "package first, twice": f"{INSTALL}\n{INSTALL}\nimport transformers\n",
    "transformers in use": f"import transformers\ntransformers.AutoModelForCausalLM\n{INSTALL}\n{INSTALL}\n",
}
# Each test starts a process that imports transformers, in four seconds: one fast test of each order.
FIRST_SLOW, SECOND_SLOW = (
    [pytest.param(code, id=name, marks=[pytest.mark.slow] * (name == slow)) for name, code in ORDERS.items()]
    for slow in ORDERS
)


def python(code):
    code = f"import sys\ndata = {str(DATA)!r}\n{code}"
    return fresh_python(code).split("\n")


@pytest.mark.parametrize("order", SECOND_SLOW)
def test_order_of_imports(order):
    assert python(order + LOAD) == ["False 1", "False 1", ""]


@pytest.mark.slow
def test_the_quantizer_itself_first():
    code = f"import thunder_moe.integrations.huggingface.quantizer, transformers\n{INSTALL}\n"
    assert python(code + LOAD) == ["True 1", "True 1", ""]


def test_imports_nothing_early_and_stands_an_absent_transformers():
    code = f"""
{INSTALL}
print("transformers" in sys.modules)
sys.modules["transformers"] = None
try:
    import transformers
except ImportError as error:
    print(error)
"""
    out = python(code)
    assert out[0] == "False"
    assert "transformers" in out[1]


def test_other_formats_go_on_to_transformers():
    code = f"""
{INSTALL}
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as mapping
from transformers import CompressedTensorsConfig
seen = []
CompressedTensorsConfig.from_dict = classmethod(lambda cls, config, **kwargs: seen.append(cls))
config = dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=dict(g=dict()))
mapping["compressed-tensors"].from_dict(config)
mapping["compressed-tensors"].from_dict(config)
print(seen == [CompressedTensorsConfig] * 2)
"""
    assert python(code)[0] == "True"


@pytest.mark.parametrize("order", FIRST_SLOW)
def test_experts_implementation_is_known(order):
    code = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, vocab_size=32)
heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2)
config = Qwen3MoeConfig(**sizes, **heads)
model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="thunder_moe")
print(model.config._experts_implementation)
"""
    assert python(order + code) == ["thunder_moe", ""]


def test_quantize_knows_the_experts_of_transformers_without_registration():
    code = """
import os
os.environ["THUNDER_MOE_AUTO_REGISTER"] = "0"
import thunder_moe, transformers
sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, vocab_size=32)
heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2)
model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads))
print(sum(type(module).__name__ == "NVFP4Experts" for module in thunder_moe.quantize_(model).modules()))
"""
    assert python(code) == ["1", ""]
