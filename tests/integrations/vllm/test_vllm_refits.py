"""16-bit checkpoints under `quantization="thunder_moe"`: vLLM's loaders bring them, the experts become NVFP4 with the
bytes of `quantize_`, and so do other weights that `reload_weights` brings, in the same memory.
Called by pytest, where vLLM is installed (`make test-vllm`); the models to compare with are transformers'.
"""

import json

import pytest
import torch
from exports import agreement, config_for_vllm, engine, generated, their_tokens
from safetensors.torch import load_file, save_file
from sleeping import sleep_and_wake_up, watched_loading, worker_of
from test_vllm_experts import moe_config
from tiny_models import tiny_model
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

from thunder_moe import quantize_
from thunder_moe.integrations.huggingface.experts import NVFP4Experts
from thunder_moe.integrations.vllm.online import ThunderOnlineMoEMethod

ASKED = dict(quantization="thunder_moe")


def saved(path, dtype=torch.float32, *, name="qwen3_moe", mirrored=False, linears=False):
    """(the folder of a checkpoint that is not quantized, its model after `quantize_`); mirrored: other weights."""
    model = tiny_model(name, dtype, config=config_for_vllm(name))
    if mirrored:
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data = parameter.data.flip(-2)
    model.save_pretrained(path)
    return path, quantize_(model, layout="linear", linears=linears)


def change(path, function):
    """Rewrites the tensors of a checkpoint."""
    tensors = function(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def fused(tensors):
    """All experts of a projection in one tensor (E, N, K), gate's rows before up's."""
    layers = {name.partition(".experts.0.")[0] for name in tensors if ".experts.0." in name}
    assert layers
    for layer in layers:
        experts = len([name for name in tensors if name.startswith(f"{layer}.experts.") and ".down_proj." in name])
        gate, up, down = (
            torch.stack([tensors.pop(f"{layer}.experts.{expert}.{part}_proj.weight") for expert in range(experts)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{layer}.experts.gate_up_proj"], tensors[f"{layer}.experts.down_proj"] = torch.cat([gate, up], 1), down
    return tensors


def parameters(worker):
    return dict(worker.model_runner.get_model().named_parameters())


def addresses(worker):
    return {name: parameter.data_ptr() for name, parameter in parameters(worker).items()}


def places(llm):
    return addresses(worker_of(llm))


def global_scales(worker):
    scales = {n: p.tolist() for n, p in parameters(worker).items() if n.endswith("_weight_scale_2")}
    return [scales[name] for name in sorted(scales)]


def of_quantize_(model):
    """The tensors of each layer's w13, then its w2, as `quantize_` has packed them."""
    layers = [module for module in model.modules() if isinstance(module, NVFP4Experts)]
    return [(w.qdata, w.scale, w.global_scale) for layer in layers for w in (layer.gate_up_proj, layer.down_proj)]


def packed(llm):
    """Return what `of_quantize_` returns, from vLLM's parameters."""
    mine = parameters(worker_of(llm))
    names = sorted(name for name in mine if name.endswith(("w13_weight", "w2_weight")))
    return [(mine[name].data, mine[f"{name}_scale"].data, mine[f"{name}_scale_2"].data) for name in names]


def same(left, right):
    pairs = [pair for tensors in zip(left, right, strict=True) for pair in zip(*tensors, strict=True)]
    return all(a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def reload(llm, path):
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(path)))
    llm.reset_prefix_cache()


def test_other_weights_are_quantized_into_the_same_memory(tmp_path):
    first, quantized = saved(tmp_path / "first")
    other, other_quantized = saved(tmp_path / "other", mirrored=True)
    whole = change(saved(tmp_path / "whole", mirrored=True)[0], fused)
    assert generated(quantized) != generated(other_quantized)
    with watched_loading() as made, engine(first, **ASKED) as llm:
        before = places(llm)
        assert same(packed(llm), of_quantize_(quantized))
        assert their_tokens(llm) == generated(quantized)
        for path, expected in ((other, other_quantized), (first, quantized), (whole, other_quantized)):
            with pytest.MonkeyPatch.context() as patch:  # no call for each expert
                patch.delattr(RoutedExperts, "_load_model_weight_or_group_weight_scale")
                reload(llm, path)
            assert places(llm) == before
            assert same(packed(llm), of_quantize_(expected))
            assert their_tokens(llm) == generated(expected)
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == generated(other_quantized)

        trained = {key: torch.nn.Parameter(tensor) for key, tensor in load_file(first / "model.safetensors").items()}
        pieces = [*reversed(trained.items())]  # of one expert after the other, a layer's in two calls
        pieces = pieces[::2] + pieces[1::2]
        llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(pieces)))
        llm.reset_prefix_cache()
        assert places(llm) == before
        assert same(packed(llm), of_quantize_(quantized))
        assert their_tokens(llm) == generated(quantized)

        name = "model.layers.1.mlp.experts.3.down_proj.weight"
        change(first, lambda tensors: tensors | {name: torch.full_like(tensors[name], torch.nan)})
        with pytest.raises(ValueError, match=r"w2_weight: NaN or missing in the checkpoint for experts \[3\]"):
            reload(llm, first)

        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        twice = [(key, tensor) for key, tensor in trained.items() for _ in range(1 + (key == name))]
        with pytest.raises(ValueError, match=r"3.up_proj.weight of '.*layers.1.mlp.experts.*': got two tensors"):
            llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(twice)))


def test_a_part_of_a_layer(tmp_path):
    """vLLM would quantize uninitialized memory."""
    path, _ = saved(tmp_path / "source")
    change(path, lambda tensors: {name: tensors[name] for name in tensors if ".layers.0.mlp.experts.3." not in name})
    try:
        with pytest.raises(ValueError, match=r"layers.0.mlp.experts'?: got \d+ of \d+ elements to load, wanted all"):
            with engine(path, **ASKED):
                pass
    finally:
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, tmp_path):
    """Experts that are cut into two keep the global scales of whole experts; each rank reloads, also from one tensor of
    all experts."""
    path, quantized = saved(tmp_path / "first")
    other, other_quantized = saved(tmp_path / "other", mirrored=True)
    change(other, fused)
    with engine(path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel, **ASKED) as llm:
        for reloaded, expected in ((path, quantized), (other, other_quantized)):
            reload(llm, reloaded)
            assert their_tokens(llm) == generated(expected)
            ranks = llm.collective_rpc(global_scales)
            whole = [tensors[2].tolist() for tensors in of_quantize_(expected)]
            if expert_parallel:
                assert [left + right for left, right in zip(*ranks, strict=True)] == whole
            else:
                assert ranks == [whole, whole]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dense_layers(ranks, tmp_path):
    """q, k and v are one layer of vLLM and of `quantize_`, with one global scale; neither quantizes a router."""
    patterns = ["*.self_attn.*", "*.mlp.*"]
    path, quantized = saved(tmp_path / "first", linears=patterns[:1])
    other, other_quantized = saved(tmp_path / "other", mirrored=True, linears=patterns[:1])
    overrides = dict(quantization_config_dict_json=json.dumps({"linears": patterns}))
    with engine(path, hf_overrides=overrides, tensor_parallel_size=ranks, **ASKED) as llm:
        assert their_tokens(llm) == generated(quantized)
        (before, *_) = llm.collective_rpc(addresses)
        dense = [name.split(".")[-2] for name in before if name.endswith(".weight_scale_2")]
        assert sorted(dense) == ["o_proj"] * 2 + ["qkv_proj"] * 2
        reload(llm, other)
        assert their_tokens(llm) == generated(other_quantized)
        assert llm.collective_rpc(addresses)[0] == before


def test_a_pattern_that_fits_nothing(tmp_path):
    path, _ = saved(tmp_path / "source")
    patterns = ["*.q_proj", "*.k_proj", "*.v_proj", "*.out"]
    overrides = dict(quantization_config_dict_json=json.dumps({"linears": patterns}))
    message = r"linears: '\*.out' fits no dense layer of the model; close names are \['model.layers.*.o_proj'"
    with pytest.raises(ValueError, match=message), engine(path, hf_overrides=overrides, **ASKED):
        pass
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("pattern", ["*.out", None])
def test_models_without_anything_to_quantize(pattern, tmp_path):
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    overrides = {} if pattern is None else dict(quantization_config_dict_json=json.dumps({"linears": [pattern]}))
    message = "--quantization thunder_moe: found no experts to quantize" if pattern is None else "fits no dense layer"
    with pytest.raises(ValueError, match=message), engine(tmp_path, hf_overrides=overrides, **ASKED):
        pass
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize("name", ["llama4", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_other_names(name, tmp_path):
    """Llama 4's checkpoints have one tensor (E, K, N) for all experts of a projection."""
    path, quantized = saved(tmp_path / "source", name=name)
    with engine(path, **ASKED) as llm:
        assert same(packed(llm), of_quantize_(quantized))
        assert their_tokens(llm) == generated(quantized)


def test_bfloat16(tmp_path):
    """In 16 bits two programs round differently, but weights do not."""
    path, quantized = saved(tmp_path / "source", torch.bfloat16)
    with engine(path, dtype="bfloat16", **ASKED) as llm:
        assert same(packed(llm), of_quantize_(quantized))
        equal, total = agreement(their_tokens(llm), generated(quantized))
    assert equal > 0.7 * total


def with_eplb():
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb = True
    return parallel


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(has_bias=True), "biases"),
        (dict(intermediate_size=24), "intermediate_size on a rank is 24"),
        (dict(is_lora_enabled=True), "--enable-lora"),
        (dict(eplb=True), "--enable-eplb"),
        (dict(moe_backend="triton"), "--moe-backend triton"),
    ],
)
def test_refused(changes, reason, groups):
    """Experts do not stay in 16 bits if NVFP4 was asked for."""
    config = moe_config(with_eplb() if changes.pop("eplb", False) else None, **changes)
    with pytest.raises(ValueError, match=f"its experts cannot become NVFP4: .*{reason}"):
        ThunderOnlineMoEMethod(moe=config)
