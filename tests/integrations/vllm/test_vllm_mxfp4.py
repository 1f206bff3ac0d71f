"""MXFP4 experts in vLLM: GPT-OSS as OpenAI released it, with the tokens of the model that transformers decodes, and
DeepSeek-V4's experts against the oracle.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import json

import pytest
import torch
from exports import decoded_by_transformers, engine, generated, released_gpt_oss, their_tokens
from oracle import decode_e2m1, moe_experts, relative_error
from safetensors.torch import load_file, save_file
from sleeping import sleep_and_wake_up, watched_loading, worker_of
from test_vllm_adapters import check
from test_vllm_experts import A, E, EmptyLayer, H, I, inputs, moe_config, run
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from thunder_moe.integrations.vllm.mxfp4 import ThunderMxfp4MoEMethod, mxfp4_method


def places(llm):
    model = worker_of(llm).model_runner.get_model()
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("spread", [False, True])
def test_tokens(spread, tmp_path):
    """Also after sleep of level 2, and with other weights in the same memory."""
    path, other = (released_gpt_oss(tmp_path / f"{seed}", seed, spread=spread) for seed in range(2))
    expected, others = (generated(decoded_by_transformers(each)) for each in (path, other))
    assert expected != others
    with watched_loading() as made, engine(path) as llm:
        model = worker_of(llm).model_runner.get_model()
        assert type(model.model.layers[1].mlp.experts.routed_experts.quant_method) is ThunderMxfp4MoEMethod
        assert their_tokens(llm) == expected
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == expected
        before = places(llm)
        llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(other)))
        llm.reset_prefix_cache()
        assert their_tokens(llm) == others
        assert places(llm) == before


def test_experts_of_another_form(tmp_path):
    """A layer that is in 16 bits, under the quantization_config of the release."""
    path, name = released_gpt_oss(tmp_path / "release"), "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(path / "model.safetensors")
    weight = decode(tensors.pop(f"{name}_blocks").flatten(2), tensors.pop(f"{name}_scales"))
    tensors[name] = weight.mT.bfloat16().contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name}: wanted '_blocks', '_scales', '_bias'"), engine(path):
        pass
    cleanup_dist_env_and_memory()


def test_dummy_weights(tmp_path):
    """vLLM leaves bytes unchanged, which here mark what is not loaded."""
    with engine(released_gpt_oss(tmp_path / "release"), load_format="dummy") as llm:
        assert their_tokens(llm)


@pytest.mark.parametrize("expert_parallel", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, tmp_path):
    """Each rank has one and a half of down's three blocks along K, or half of the experts."""
    path = released_gpt_oss(tmp_path / "release", spread=True, intermediate_size=96)
    with engine(path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel) as llm:
        assert their_tokens(llm) == generated(decoded_by_transformers(path))


@pytest.mark.slow
def test_adapters(tmp_path):
    forms = [dict(per_expert=False, attention=True), dict(per_expert=False)]
    check(released_gpt_oss(tmp_path / "release"), tmp_path, forms)


# As small as vLLM's model class allows; dense layers are in 16 bits, since vLLM runs FP8 on CPUs with AMX alone.
DEEPSEEK_V4 = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", vocab_size=64, hidden_size=H,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, q_lora_rank=64, o_lora_rank=64, head_dim=512,
    qk_rope_head_dim=64, o_groups=2, sliding_window=64, compress_ratios=[0, 0], index_topk=512, index_n_heads=4,
    index_head_dim=128, num_hash_layers=0, hc_mult=4, hc_sinkhorn_iters=2, hc_eps=1e-6, swiglu_limit=1.0,
    scoring_func="sqrtsoftplus", n_routed_experts=E, n_shared_experts=1, num_experts_per_tok=A,
    moe_intermediate_size=I, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.5,
    compress_rope_theta=40000.0, rope_theta=10000.0, rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    max_position_embeddings=256, hidden_act="silu", rms_norm_eps=1e-6, dtype="bfloat16", tie_word_embeddings=False,
    quantization_config=dict(
        quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128],
        ignored_layers=[f"model.layers.{layer}.{name}" for layer in (0, 1) for name in (
            *(f"attn.{part}" for part in ("wq_a", "wkv", "wq_b", "wo_a", "wo_b")),
            *(f"ffn.shared_experts.{part}" for part in ("w1", "w3", "gate_proj", "up_proj", "down_proj")),
        )],
    ),
)  # fmt: skip


def deepseek_v4(path, seed):
    """(the experts of a DeepSeek-V4, random ones in the form of its checkpoints, what they stand for by layer)."""
    generator = torch.Generator().manual_seed(seed)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(DEEPSEEK_V4))
    tensors, decoded = {}, []
    for layer in range(2):
        parts = {}
        for name, n, k in (("w1", I, H), ("w3", I, H), ("w2", H, I)):
            codes = torch.randint(0, 256, (E, n, k // 2), generator=generator).to(torch.uint8)
            scales = torch.randint(120, 124, (E, n, k // 32), generator=generator).to(torch.uint8)
            parts[name] = decode(codes, scales)
            for expert in range(E):
                stem = f"layers.{layer}.ffn.experts.{expert}.{name}"
                tensors[f"{stem}.weight"] = codes[expert].view(torch.int8)
                tensors[f"{stem}.scale"] = scales[expert].view(torch.float8_e8m0fnu)
        decoded.append((torch.cat([parts["w1"], parts["w3"]], 1), parts["w2"]))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path, decoded


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="vLLM's DeepSeek-V4 needs AVX-512 on a CPU"
)
def test_experts_of_deepseek_v4(tmp_path):
    """vLLM's loader and each layer's experts; its attention needs Triton for a step of the engine."""
    path, weights = deepseek_v4(tmp_path / "first", 0)
    other, others = deepseek_v4(tmp_path / "other", 1)
    with engine(path, dtype="bfloat16") as llm:
        model = worker_of(llm).model_runner.get_model()
        for expected in (weights, others):
            if expected is others:
                llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(other)))
            for layer, wanted in zip(model.model.layers, expected, strict=True):
                experts = layer.ffn.experts.routed_experts
                assert type(experts.quant_method) is ThunderMxfp4MoEMethod
                hidden, ids, shares = inputs(torch.bfloat16)
                out = run(experts.quant_method, experts, hidden * 4, ids, shares)
                assert relative_error(out, moe_experts(hidden * 4, ids, shares, *wanted, limit=1.0)) < 6e-3


def decode(codes, scales):
    """float32 (E, N, K) of codes (E, N, K / 2) and scales (E, N, K / 32)."""
    values = torch.tensor([decode_e2m1(code) for code in range(16)])
    decoded = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return decoded * torch.exp2(scales - 127.0).repeat_interleave(32, -1)


def copied(param, loaded_weight, *args, **options):
    param.data.copy_(loaded_weight)


class Mxfp4Layer(EmptyLayer):
    """`EmptyLayer` in MXFP4, with loaders that copy."""

    def __init__(self, config, method):
        super().__init__(config, method, weight_loader=copied)

    def fill(self, spread=0):
        """Load random weights, gate's rows first; every other row of expert 2 is 2**spread times smaller."""
        self.weights = []
        for name, n, k in (("w13", 2 * I, H), ("w2", H, I)):
            codes = torch.randint(0, 256, (E, n, k // 2)).to(torch.uint8)
            scales = torch.randint(120, 124, (E, n, k // 32))
            scales[2, ::2] -= spread
            for field, tensor in (("weight", codes), ("weight_scale", scales.to(torch.uint8))):
                parameter = getattr(self, f"{name}_{field}")
                parameter.weight_loader(parameter, tensor, f"{name}_{field}", "w1", 0)
            self.weights.append(decode(codes, scales))
        return self


@pytest.mark.usefixtures("groups")
class TestLayer:
    def made(self, config=None, spread=0):
        config = config or moe_config()
        method = mxfp4_method(config, GptOssMxfp4MoEMethod)
        return method, Mxfp4Layer(config, method).fill(spread)

    @pytest.mark.parametrize(("spread", "rows"), [(0, 0), (12, 0), (40, 1)])
    def test_experts(self, spread, rows):
        method, layer = self.made(spread=spread)
        method.process_weights_after_loading(layer)
        assert layer.w13_weight_scale_2.shape == ((E, 2 * I) if rows else (E,))
        assert layer.w2_weight_scale_2.shape == ((E, H) if rows else (E,))
        hidden, ids, weights = inputs()
        ids[1, 0] = -1
        expected = moe_experts(hidden, ids, weights, *layer.weights)
        assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5

    def test_rows_in_turns(self):
        """GPT-OSS; the rows that are small have global scales of their own."""
        config = moe_config(activation=MoEActivation.SWIGLUOAI, has_bias=True)
        method, layer = self.made(config, spread=40)
        biases = torch.randn(E, 2 * I), torch.randn(E, H)
        layer.w13_bias.data.copy_(biases[0])
        layer.w2_bias.data.copy_(biases[1])
        method.process_weights_after_loading(layer)
        (gate_up, down), hidden, ids, weights = layer.weights, *inputs()
        in_order = [torch.cat([rows[:, ::2], rows[:, 1::2]], 1) for rows in (gate_up, biases[0])]
        options = dict(limit=7.0, alpha=1.702, up_shift=1.0)
        expected = moe_experts(hidden, ids, weights, in_order[0], down, in_order[1], biases[1], **options)
        assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5

    def test_with_eplb_the_shape_does_not_depend_on_the_values(self):
        parallel = FusedMoEParallelConfig.make_no_parallel()
        parallel.enable_eplb = True
        method, layer = self.made(moe_config(parallel))
        method.process_weights_after_loading(layer)
        assert (layer.w13_weight_scale_2.shape, layer.w2_weight_scale_2.shape) == ((E, 2 * I), (E, H))
        hidden, ids, weights = inputs()
        expected = moe_experts(hidden, ids, weights, *layer.weights)
        assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5

    def test_too_wide_a_range(self):
        method, layer = self.made()
        layer.w2_weight_scale.data[5, 3, 1] -= 40
        message = (
            r"w2_weight of 'model.layers.0.mlp.experts', expert 5 \(of this rank\), cannot become NVFP4: scales: got"
            r" exponents from -\d+ to -\d+ in row 3 .*THUNDER_MOE_VLLM=0"
        )
        with pytest.raises(ValueError, match=message):
            method.process_weights_after_loading(layer)

    @pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"])
    def test_what_the_checkpoint_lacks(self, name):
        config = moe_config()
        method, layer = self.made(config)
        getattr(layer, name).data[3] = getattr(Mxfp4Layer(config, method), name).data[3]
        with pytest.raises(ValueError, match=rf"{name}: .*missing in the checkpoint for experts \[3\]"):
            method.process_weights_after_loading(layer)

    def test_scales_that_have_no_place_in_a_reload(self):
        method, layer = self.made()
        layer.quant_method = method
        record_metadata_for_reloading(layer)
        method.process_weights_after_loading(layer)
        initialize_layerwise_reload(layer)
        with pytest.raises(ValueError, match="w13_weight_scale_2 of 'model.*rows of an expert with global scales that"):
            layer.fill(spread=40)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [(dict(intermediate_size=24), "not a multiple of 16"), (dict(moe_backend="marlin"), "marlin was asked for")],
    )
    def test_refusals(self, changes, reason, monkeypatch, said):
        monkeypatch.setattr(GptOssMxfp4MoEMethod, "__init__", lambda *_: None)
        assert type(mxfp4_method(moe_config(**changes), GptOssMxfp4MoEMethod)) is GptOssMxfp4MoEMethod
        assert "MXFP4 experts do not run" in said[0]
        assert reason in said[0]
