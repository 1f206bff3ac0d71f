"""Makes tests/data/checkpoints: tiny exports by nvidia-modelopt and compressed-tensors, and an MXFP4 one, each with the
weights as the exporting library itself decodes them (expected.npz); and fp8.safetensors, weights in compressed-tensors'
FP8, decoded by it, too. Run by hand:

    pip install torch==2.13.0 transformers==5.23.0 accelerate datasets
    pip install nvidia-modelopt==0.47.0 compressed-tensors==0.20.0
    python tests/data/make_checkpoints.py

The two with MXFP8 in their names were made with compressed-tensors 0.17.0, transformers 5.19.0.
"""

import copy
import json
import shutil
from pathlib import Path

import modelopt.torch.quantization as mtq
import numpy as np
import torch
from compressed_tensors.compressors import FloatQuantizationCompressor
from compressed_tensors.compressors.mxfp8 import MXFP8QuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent / "checkpoints"
SIZES = dict(
    vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    max_position_embeddings=64, num_experts_per_tok=2, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    intermediate_size=64,
)  # fmt: skip
LLAMA4 = dict(intermediate_size_mlp=32, interleave_moe_layer_step=1, attention_chunk_size=32, num_local_experts=3)
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=3),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "llama4": Llama4TextConfig(**{**SIZES, **LLAMA4}),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=3),
}
TOKENS = torch.randint(0, 16, (4, 16), generator=torch.Generator().manual_seed(1))


def build(name):
    """A model whose projections differ in size, so that gate and up get different global scales."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05 + 0.01 * (number % 7))
    return model


def finish(directory, expected, source=None):
    """Keeps what is read, beside the weights as their own library decodes them, and the experts it quantized."""
    for file in directory.iterdir():
        if file.name not in ("config.json", "hf_quant_config.json") and not file.name.startswith("model"):
            file.unlink()
    arrays = {name: tensor.float().numpy() for name, tensor in expected.items()}
    np.savez_compressed(directory / "expected.npz", **arrays)
    if source is not None:
        save_file({name: tensor.contiguous() for name, tensor in source.items()}, directory / "source.safetensors")
    print(directory.name, sum(file.stat().st_size for file in directory.iterdir()), "bytes")


def mixed_recipe():
    """Experts in MXFP8, attention in NVFP4 with 16-bit activations."""
    recipe = copy.deepcopy(mtq.MXFP8_DEFAULT_CFG) | {"algorithm": "max"}
    nvfp4 = next(e for e in mtq.W4A16_NVFP4_CFG["quant_cfg"] if e["quantizer_name"] == "*weight_quantizer")
    recipe["quant_cfg"] += [
        {"quantizer_name": "*self_attn.*weight_quantizer", "cfg": nvfp4["cfg"]},
        {"quantizer_name": "*self_attn.*input_quantizer", "enable": False},
    ]
    return recipe


def modelopt(name, recipe, kind=""):
    model = build(name)
    state = revert_weight_conversion(model, model.state_dict())
    source = {key: tensor.clone() for key, tensor in state.items() if ".experts." in key}
    quantized = mtq.quantize(model, copy.deepcopy(recipe), lambda m: m(TOKENS, use_cache=False))
    quantized.config.architectures = [type(model).__name__.removeprefix("Quant")]
    directory = HERE / f"modelopt_{kind}{name}"
    export_hf_checkpoint(quantized, export_dir=directory)
    tensors, expected = load_file(directory / "model.safetensors"), {}
    for key, weight in tensors.items():
        if weight.dtype == torch.float8_e4m3fn and f"{key}_scale" in tensors and f"{key}_scale_2" not in tensors:
            packed = MXFP8QTensor(weight.shape, torch.float32, weight)
            expected[key] = packed.dequantize(dtype=torch.float32, scale=tensors[f"{key}_scale"])
            continue
        if weight.dtype != torch.uint8 or key.endswith("weight_scale"):
            continue
        fused = weight.ndim == 3  # (E, K / 2, N)
        prefix = f"{key}_weight" if fused else key
        scale, multiplier = tensors[f"{prefix}_scale"], tensors[f"{prefix}_scale_2"]
        if fused:
            weight, scale = weight.mT.contiguous(), scale.mT.contiguous()
        shape = (*weight.shape[:-1], 2 * weight.shape[-1])
        packed = NVFP4QTensor(shape, torch.float32, weight)
        options = dict(dtype=torch.float32, scale=scale, double_scale=multiplier, block_sizes={-1: 16})
        expected[key] = packed.dequantize(**options)
    finish(directory, expected, source if name in ("qwen3_moe", "llama4") and not kind else None)


def compressed_tensors(name):
    """All Linears, each with a global scale of its own; in two shards."""
    model = build(name)
    scheme = preset_name_to_scheme("NVFP4A16", targets=["Linear"])
    tensors, expected = {}, {}
    for key, weight in revert_weight_conversion(model, model.state_dict()).items():
        module = key.removesuffix(".weight")
        if weight.ndim != 2 or module.endswith(("lm_head", "embed_tokens", "mlp.gate")):
            tensors[key] = weight
            continue
        weight = weight.float()
        global_scale = generate_gparam(weight.amin(), weight.amax())
        blocks = weight.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        state = NVFP4PackedCompressor.compress(state, scheme)
        tensors |= {f"{module}.{field}": tensor for field, tensor in state.items()}
        # The compressor's own decompress does the same in bfloat16.
        values = unpack_fp4_from_uint8(state["weight_packed"], *weight.shape, dtype=torch.float32)
        options = dict(args=scheme.weights, global_scale=global_scale, dtype=torch.float32)
        expected[key] = dequantize(values, state["weight_scale"].float(), **options)
    directory = HERE / f"compressed_tensors_{name}"
    model.config.save_pretrained(directory)
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="nvfp4-pack-quantized", ignore=["lm_head", "model.layers.0.mlp.gate"]
    )
    save_config(directory, json.loads(quantization.model_dump_json()), type(model).__name__)
    shard(directory, tensors)
    finish(directory, expected)


def compressed_tensors_mxfp8(name):
    """All Linears, in MXFP8; in two shards."""
    model = build(name)
    scheme = preset_name_to_scheme("MXFP8A16", targets=["Linear"])
    tensors, expected = {}, {}
    for key, weight in revert_weight_conversion(model, model.state_dict()).items():
        module = key.removesuffix(".weight")
        if weight.ndim != 2 or module.endswith(("lm_head", "embed_tokens", "mlp.gate")):
            tensors[key] = weight
            continue
        blocks = weight.unflatten(-1, (-1, 32))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
        state = MXFP8QuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        tensors |= {f"{module}.{field}": tensor for field, tensor in state.items()}
        expected[key] = MXFP8QuantizationCompressor.decompress(dict(state), scheme)["weight"]
    directory = HERE / f"compressed_tensors_mxfp8_{name}"
    model.config.save_pretrained(directory)
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, format="mxfp8-quantized", ignore=["lm_head", "model.layers.0.mlp.gate"]
    )
    save_config(directory, json.loads(quantization.model_dump_json()), type(model).__name__)
    shard(directory, tensors)
    finish(directory, expected)


def fp8():
    """A weight (24, 48) with a scale per tensor, per row, and per block of (16, 32)."""
    torch.manual_seed(0)
    tensors = {}
    for strategy in ("tensor", "channel", "block"):
        structure = [16, 32] if strategy == "block" else None
        kind = dict(num_bits=8, type="float", symmetric=True)
        args = QuantizationArgs(**kind, strategy=strategy, block_structure=structure)
        inputs = QuantizationArgs(**kind, strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        weight = torch.randn(24, 48) * torch.rand(24, 1)
        padded = torch.nn.functional.pad(weight, (0, 16, 0, 8)).unflatten(0, (-1, 16)).unflatten(2, (-1, 32))
        dims = {"tensor": ((0, 1), False), "channel": ((1,), True), "block": ((1, 3), False)}[strategy]
        values = padded if structure else weight
        scale, _ = calculate_qparams(values.amin(*dims), values.amax(*dims), args)
        state = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        state["decoded"] = FloatQuantizationCompressor.decompress(dict(state), scheme)["weight"]
        tensors |= {f"{strategy}.{field}": tensor.contiguous() for field, tensor in state.items()}
    save_file(tensors, HERE.parent / "fp8.safetensors")


def mxfp4_gpt_oss():
    """As OpenAI published GPT-OSS: rows of gate and up alternate, scales are powers of two."""
    model = build("gpt_oss")
    tensors, expected = {}, {}
    for key, weight in model.state_dict().items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[key] = torch.randn_like(weight) * 0.1 if key.endswith("_bias") else weight
            continue
        blocks = weight.mT.float().unflatten(-1, (-1, 32))
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp_min(2**-20))) - 2
        magnitude = (blocks / torch.exp2(exponent)[..., None]).abs()
        codes = torch.bucketize(magnitude, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
        codes = (codes + 8 * (blocks < 0)).to(torch.uint8)
        tensors[f"{key}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{key}_scales"] = (exponent + 127).to(torch.uint8)
        # (E, in_features, out_features), as the model holds it.
        expected[key] = convert_moe_packed_tensors(
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"], dtype=torch.float32
        )
    directory = HERE / "mxfp4_gpt_oss"
    model.config.save_pretrained(directory)
    save_config(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, type(model).__name__)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    finish(directory, expected)


def save_config(directory, quantization_config, architecture):
    config = json.loads((directory / "config.json").read_text())
    config |= {"quantization_config": quantization_config, "architectures": [architecture], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def shard(directory, tensors):
    names = sorted(tensors)
    weight_map = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        part = names[number - 1 :: 2]
        save_file({name: tensors[name].contiguous() for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    modelopt("qwen3_moe", mtq.NVFP4_DEFAULT_CFG)
    modelopt("mixtral", mtq.W4A16_NVFP4_CFG)
    modelopt("llama4", mtq.NVFP4_DEFAULT_CFG)
    modelopt("gpt_oss", mtq.NVFP4_DEFAULT_CFG)
    modelopt("qwen3_moe", mixed_recipe(), "mixed_")
    compressed_tensors("qwen3_moe")
    compressed_tensors_mxfp8("qwen3_moe")
    mxfp4_gpt_oss()
    fp8()
