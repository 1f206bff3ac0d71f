"""Which checkpoints the plugin claims by vLLM's own hook, and that it replaces nothing of vLLM's, without an engine.
Called by pytest, where vLLM is installed (`make test-vllm`); calls vLLM's ModelConfig on the configurations of
tests/data/checkpoints.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from vllm.config import LoadConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import QuantizationMethods, get_quantization_config, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.registry import _VLLM_MODELS, ModelRegistry

from thunder_moe.integrations.vllm import configs, experts, plugin

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"
NVFP4 = "modelopt_qwen3_moe"
GPT_OSS = "modelopt_gpt_oss"
RELEASED_GPT_OSS = "mxfp4_gpt_oss"
VLLMS = {
    "modelopt_fp4": modelopt.ModelOptNvFp4Config,
    "modelopt_mxfp8": modelopt.ModelOptMxFp8Config,
    "mxfp8": modelopt.ModelOptMxFp8Config,
    "modelopt_mixed": modelopt.ModelOptMixedPrecisionConfig,
    "compressed-tensors": CompressedTensorsConfig,
    "gpt_oss_mxfp4": GptOssMxfp4Config,
}


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """The plugin is loaded; what it warns of."""
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    lines = []
    monkeypatch.setattr(configs.logger, "warning_once", lambda *args: lines.append(args[0] % args[1:]))
    plugin.register()
    return lines


def model_config(path, quantization=None):
    return EngineArgs(str(path), quantization=quantization, skip_tokenizer_init=True).create_model_config()


def quant_config(config):
    """What vLLM's engine makes of a model's configuration."""
    return VllmConfig.get_quantization_config(config, LoadConfig())


def changed(tmp_path, change, checkpoint=NVFP4):
    """The configuration of a checkpoint with another quantization_config, without weights."""
    content = json.loads((CHECKPOINTS / checkpoint / "config.json").read_text())
    content["quantization_config"] = change(content["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(content))
    return tmp_path


def test_nothing_of_vllms_is_replaced():
    for name, kind in VLLMS.items():
        assert get_quantization_config(name) is kind
    for name in get_args(QuantizationMethods):
        assert get_quantization_config(name).__module__.startswith("vllm.")
    assert not modelopt.LINEAR_METHOD_BUILDERS
    for name in _VLLM_MODELS:
        assert ModelRegistry.models[name].module_name.startswith("vllm.")


@pytest.mark.parametrize(
    ("checkpoint", "vllms", "ours"),
    [
        (NVFP4, "modelopt_fp4", configs.ThunderModelOptNvFp4Config),
        ("modelopt_mixed_qwen3_moe", "modelopt_mixed", configs.ThunderModelOptMixedPrecisionConfig),
        ("compressed_tensors_qwen3_moe", "compressed-tensors", configs.ThunderCompressedTensorsConfig),
        ("compressed_tensors_mxfp8_qwen3_moe", "compressed-tensors", configs.ThunderCompressedTensorsConfig),
        (RELEASED_GPT_OSS, "gpt_oss_mxfp4", configs.ThunderGptOssMxfp4Config),
    ],
)
def test_claimed(checkpoint, vllms, ours, said):
    """vLLM's models ask a configuration for its name, which stays; a name that the user gives is obeyed."""
    for asked in (None, "thunder_moe"):
        config = model_config(CHECKPOINTS / checkpoint, asked)
        assert config.quantization == "thunder_moe"
        assert type(quant_config(config)) is ours
        assert quant_config(config).get_name() == vllms
    assert not said
    config = model_config(CHECKPOINTS / checkpoint, vllms)
    assert config.quantization == vllms
    assert type(quant_config(config)) is VLLMS[vllms]
    assert f"on vLLM's own: --quantization {vllms} was asked for" in said[0]


def mxfp8(_):
    return {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}


def minimax(_):
    return {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}


@pytest.mark.parametrize("form", [mxfp8, minimax])
def test_claimed_mxfp8(form, tmp_path):
    config = model_config(changed(tmp_path, form))
    assert config.quantization == "thunder_moe"
    assert type(quant_config(config)) is configs.ThunderModelOptMxFp8Config


def test_requests_for_activations_reach_the_configuration():
    """--quantization-config beside a checkpoint."""
    options = dict(quantization_config={"moe": {"activation": "nvfp4_per_token"}}, skip_tokenizer_init=True)
    config = EngineArgs(str(CHECKPOINTS / NVFP4), **options).create_model_config()
    assert quant_config(config).moe_activation_override is not None


def w8a8(_):
    weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True, dynamic=False)
    inputs = weights | dict(strategy="token", dynamic=True)
    group = dict(targets=["Linear"], weights=weights, input_activations=inputs)
    config = dict(quant_method="compressed-tensors", format="int-quantized", config_groups={"group_0": group})
    return config | dict(ignore=["lm_head"], quantization_status="compressed")


def fp8(_):
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}


def mxfp4(_):
    return {"quant_method": "mxfp4"}


def mixed_of_fp8(_):
    layers = {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("form", "name", "kind"),
    [
        (w8a8, "compressed-tensors", CompressedTensorsConfig),
        (fp8, "modelopt", modelopt.ModelOptFp8Config),
        (mixed_of_fp8, "modelopt_mixed", modelopt.ModelOptMixedPrecisionConfig),
        (mxfp4, "mxfp4", Mxfp4Config),  # of a model other than GPT-OSS
    ],
)
def test_other_forms_are_vllms(form, name, kind, tmp_path, said):
    path = changed(tmp_path, form)
    config = model_config(path)
    assert config.quantization == name
    assert type(quant_config(config)) is kind
    assert not said
    with pytest.raises(ValueError, match="thunder_moe: the checkpoint has no NVFP4 or MXFP8 layers, and"):
        model_config(path, "thunder_moe")


def test_layers_that_config_json_does_not_list(tmp_path, said):
    """Older MIXED_PRECISION, whose list is in another file, for which vLLM has its own names alone."""
    config = model_config(changed(tmp_path, lambda _: {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}))
    assert config.quantization == "modelopt_mixed"
    assert "config.json has no quantized_layers" in said[0]


def test_devices_without_kernels(monkeypatch, said):
    values = dict(is_cpu=False, is_cuda=True, get_device_capability=(10, 0))
    platform = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
    monkeypatch.setattr(experts, "current_platform", platform)
    assert model_config(CHECKPOINTS / NVFP4).quantization == "modelopt_fp4"
    assert "neither a CPU nor a CUDA GPU of compute capability 8.0 to 9.0" in said[0]
    # GPT-OSS's model class refuses vLLM's methods, which leave out biases, but not those for MXFP4.
    assert model_config(CHECKPOINTS / GPT_OSS).quantization == "thunder_moe"
    assert model_config(CHECKPOINTS / RELEASED_GPT_OSS).quantization == "gpt_oss_mxfp4"


@pytest.mark.parametrize(
    ("checkpoint", "asked", "kind"),
    [
        (GPT_OSS, None, "ThunderGptOssForCausalLM"),
        (GPT_OSS, "modelopt_fp4", "GptOssForCausalLM"),
        (RELEASED_GPT_OSS, None, "ThunderGptOssForCausalLM"),
        (RELEASED_GPT_OSS, "gpt_oss_mxfp4", "GptOssForCausalLM"),
    ],
)
def test_model_class_of_gpt_oss(checkpoint, asked, kind, said):
    config = model_config(CHECKPOINTS / checkpoint, asked)
    assert get_model_architecture(config)[0].__name__ == kind
    assert config.architecture == "GptOssForCausalLM"  # vLLM's settings for it
    assert len(said) == bool(asked)
    drops = [line.endswith("which leaves out the biases of GPT-OSS's experts.") for line in said]
    assert drops == [checkpoint == GPT_OSS] * bool(asked)


def test_a_loaded_configuration_is_claimed_again():
    """Its `architectures` have our class by then."""
    config = model_config(CHECKPOINTS / RELEASED_GPT_OSS).hf_config
    claim = get_quantization_config("thunder_moe").override_quantization_method
    assert config.architectures == ["ThunderGptOssForCausalLM"]
    assert claim(config.quantization_config, "thunder_moe", config) == "thunder_moe"


@pytest.mark.parametrize(
    ("architecture", "options", "ours"),
    [
        ("DeepseekV4ForCausalLM", {}, True),
        ("DeepseekV4ForCausalLM", dict(expert_dtype="fp4"), True),
        ("DeepSeekV4MTPModel", {}, True),  # its draft model
        ("DeepseekV4ForCausalLM", dict(expert_dtype="fp8"), False),
        ("DeepseekV4ForCausalLM", dict(moe_quant_algo="NVFP4"), False),
        ("DeepseekV3ForCausalLM", {}, False),
    ],
)
def test_deepseek_v4(architecture, options, ours, said):
    """Its config.json says "fp8"; the experts are in MXFP4 unless another key says otherwise."""
    method = get_quantization_config("thunder_moe")
    model = SimpleNamespace(architectures=[architecture], **options)
    content = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", **options}
    assert method.override_quantization_method(content, None, model) == ("thunder_moe" if ours else None)
    assert not said
    if not ours:
        with pytest.raises(ValueError, match="is no GPT-OSS or DeepSeek-V4 with MXFP4 experts"):
            method.override_quantization_method(content, "thunder_moe", model)
        return
    assert method.override_quantization_method(content, "thunder_moe", model) == "thunder_moe"
    config = method.from_config(content)
    assert isinstance(config, get_quantization_config("deepseek_v4_fp8"))
    assert config.get_name() == "deepseek_v4_fp8"
    assert method.override_quantization_method(content, "deepseek_v4_fp8", model) is None
    assert "on vLLM's own: --quantization deepseek_v4_fp8 was asked for" in said[0]


@pytest.mark.parametrize("form", ["W4A16_NVFP4", "MIXED_PRECISION"])
def test_heads_that_vllm_has_in_16_bits(form):
    """Its loader would end in an error about the sizes of tensors."""
    claim = get_quantization_config("thunder_moe").override_quantization_method
    model = SimpleNamespace(architectures=["Qwen3NextForCausalLM"])
    layers = {name: {"quant_algo": "W4A16_NVFP4"} for name in ("model.layers.0.mlp.experts", "lm_head")}
    content = {"quant_method": "modelopt", "quant_algo": form, "ignore": [], "quantized_layers": layers}
    with pytest.raises(ValueError, match="lm_head: got a quantized head, .* vLLM's Qwen3NextForCausalLM has"):
        claim(content, None, model)
    assert claim(content, None, SimpleNamespace(**vars(model), tie_word_embeddings=True)) == "thunder_moe"
    del layers["lm_head"]
    assert claim(content | {"ignore": ["lm_head"]}, None, model) == "thunder_moe"


def test_model_class_of_llama4():
    config = model_config(CHECKPOINTS / "modelopt_llama4")
    assert get_model_architecture(config)[0].__name__ == "ThunderLlama4ForCausalLM"


def test_model_class_of_llama4_with_images():
    """vLLM's own needs torchvision, and mixes up block scales of fused experts on several ranks."""
    quantization = json.loads((CHECKPOINTS / "modelopt_llama4" / "config.json").read_text())["quantization_config"]
    config = SimpleNamespace(architectures=["Llama4ForConditionalGeneration"])
    assert get_quantization_config("thunder_moe").override_quantization_method(quantization, None, config)
    (name,) = config.architectures
    assert name == "ThunderLlama4ForConditionalGeneration"
    assert name in ModelRegistry.models
