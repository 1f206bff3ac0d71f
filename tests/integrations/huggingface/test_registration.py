"""What transformers knows of the package, and by which act: entries of the package's own names, the reader of
compressed-tensors while it is registered, and nothing of transformers' replaced otherwise.
Called by pytest; starts fresh interpreters.
"""

import json

import pytest
from checkpoint_files import DATA
from interpreters import OF_TRANSFORMERS, fresh_python

transformers = pytest.importorskip("transformers")

import thunder_moe  # noqa: E402
from thunder_moe.integrations.huggingface.quantizer import NVFP4CheckpointConfig  # noqa: E402

REGISTRIES = """
import sys
import transformers.modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
REGISTRIES = (ALL_EXPERTS_FUNCTIONS, ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_PARALLEL_STYLES,
              AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING)
before = [dict(registry) for registry in REGISTRIES]

def replaced():
    return [name for old, new in zip(before, REGISTRIES) for name in old if new[name] is not old[name]]

def added():
    return sorted({name for old, new in zip(before, REGISTRIES) for name in new if name not in old})
"""
OURS = ["modelopt", "thunder_moe", "thunder_moe_fp8", "thunder_moe_mxfp8", "thunder_moe_on_load", "thunder_moe_sdpa"]
TINY = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
sizes = dict(hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, vocab_size=32)
heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2)
config = Qwen3MoeConfig(**sizes, **heads)
"""
EXPERTS = (
    TINY
    + """
model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="thunder_moe")
print(model.config._experts_implementation)
"""
)
# What makes transformers know the package, in either order of the imports.
ACTS = {
    "transformers first": "import transformers, thunder_moe",
    "register": "import thunder_moe; thunder_moe.register('transformers')",
    "a public name": "from thunder_moe import ThunderMoeConfig; import transformers",
    "the environment": "import os; os.environ['THUNDER_MOE_AUTO_REGISTER'] = '1'; import thunder_moe",
}


def python(code):
    return fresh_python(f"data = {str(DATA)!r}\n{code}", OF_TRANSFORMERS).split("\n")


def test_importing_adds_entries_and_replaces_none():
    code = f"""
{REGISTRIES}
finders = list(sys.meta_path)
import thunder_moe
print(added(), replaced(), sys.meta_path == finders, "vllm" in sys.modules, "thunder" in sys.modules)
transformers.AutoModelForCausalLM.from_pretrained(f"{{data}}/modelopt_qwen3_moe")
thunder_moe.load_checkpoint(f"{{data}}/compressed_tensors_qwen3_moe")
print(replaced())
with thunder_moe.register("transformers"):
    print(replaced())
print(replaced())
"""
    assert python(code) == [f"{OURS} [] True False False", "[]", "['compressed-tensors']", "[]", ""]


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.exhaustive  # the tests around it look at the registries
def test_experts_implementation_is_known(act):
    assert python(ACTS[act] + EXPERTS) == ["thunder_moe", ""]


def test_transformers_says_what_it_does_not_know():
    code = f"""
import thunder_moe
try:
    {EXPERTS.strip().replace(chr(10), chr(10) + "    ")}
except ValueError as error:
    print(str(error)[:55])
import os
os.environ["THUNDER_MOE_AUTO_REGISTER"] = "0"
thunder_moe.registration.on_import()  # as where transformers is imported first
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print([name for name in AUTO_QUANTIZER_MAPPING if "thunder_moe" in name])
thunder_moe.quantize_(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)))  # a public function that needs entries
Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**sizes, **heads), experts_implementation="thunder_moe")
"""
    assert python(code) == ['Specified `experts_implementation="thunder_moe"` is not', "[]", ""]


@pytest.mark.exhaustive  # the one above ends the same way
def test_quantize_knows_the_experts_of_transformers_without_registration():
    code = f"""
import os
os.environ["THUNDER_MOE_AUTO_REGISTER"] = "0"
import transformers, thunder_moe
{TINY}
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
print([name for name in AUTO_QUANTIZER_MAPPING if "thunder_moe" in name])
model = thunder_moe.quantize_(Qwen3MoeForCausalLM(config))
print(sum(type(module).__name__ == "NVFP4Experts" for module in model.modules()))
"""
    assert python(code) == ["[]", "1", ""]


@pytest.fixture
def mapping():
    thunder_moe.unregister()
    yield transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    thunder_moe.unregister()


def test_register_is_undone(mapping):
    own = mapping["compressed-tensors"]
    assert own is transformers.CompressedTensorsConfig
    with thunder_moe.register("transformers"):
        assert mapping["compressed-tensors"] is not own
        with thunder_moe.register("transformers"):  # the outer one stays
            pass
        assert mapping["compressed-tensors"] is not own
    assert mapping["compressed-tensors"] is own
    thunder_moe.register("transformers")
    thunder_moe.unregister()
    thunder_moe.unregister()
    assert mapping["compressed-tensors"] is own
    with pytest.raises(ValueError, match="packages: got 'vllm', wanted some of"):
        thunder_moe.register("vllm")
    with pytest.raises(ValueError, match=r"packages: got \['torch'\], wanted some of"):
        thunder_moe.register(["torch"])


def test_other_formats_stay_with_transformers(mapping, monkeypatch):
    """Of compressed-tensors, beside an NVFP4 checkpoint that the registered reader takes."""
    seen = []
    monkeypatch.setattr(
        transformers.CompressedTensorsConfig,
        "from_dict",
        classmethod(lambda cls, config, **_: seen.append((cls, config["format"])) or cls.__new__(cls)),
    )
    other = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {}}}
    ours = json.loads((DATA / "compressed_tensors_qwen3_moe" / "config.json").read_text())["quantization_config"]
    read = transformers.quantizers.auto.AutoQuantizationConfig.from_dict
    assert type(read(ours)) is transformers.CompressedTensorsConfig
    with thunder_moe.register("transformers"):
        assert type(read(ours)) is NVFP4CheckpointConfig
        assert type(read(other)) is transformers.CompressedTensorsConfig
    assert [format for _, format in seen] == ["nvfp4-pack-quantized", "pack-quantized"]
    assert {cls for cls, _ in seen} == {transformers.CompressedTensorsConfig}


def test_another_format_loads_beside_an_nvfp4_checkpoint(mapping, tmp_path):
    """By transformers' own classes, as it does without this package."""
    pytest.importorskip("compressed_tensors")
    linear = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    saved["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "initialized",
        "config_groups": {"group_0": linear}, "ignore": ["lm_head"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with thunder_moe.register("transformers"):
        packed = transformers.AutoModelForCausalLM.from_pretrained(DATA / "compressed_tensors_qwen3_moe")
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(packed.hf_quantizer).__module__.startswith("thunder_moe.")
    assert type(other.hf_quantizer) is transformers.quantizers.auto.CompressedTensorsHfQuantizer


@pytest.mark.parametrize("missing", [pytest.param("transformers", marks=pytest.mark.exhaustive), "thunder"])
def test_a_missing_package_is_an_error_where_it_is_named(missing):
    code = f"""
import sys
sys.modules[{missing!r}] = None
import thunder_moe
try:
    thunder_moe.register({missing!r})
except ImportError as error:
    print(str(error).split(": ")[-1])
"""
    assert python(code) == [f"pip install 'thunder_moe[{missing}]'", ""]
