"""GPT-OSS as OpenAI released it, with MXFP4 experts, in vLLM: the tokens of the model that transformers decodes.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import pytest
import torch
from exports import decoded_by_transformers, engine, generated, released_gpt_oss, their_tokens
from oracle import decode_e2m1, moe_experts, relative_error
from sleeping import sleep_and_wake_up, watched_loading, worker_of
from test_vllm_adapters import check
from test_vllm_experts import E, EmptyLayer, H, I, inputs, moe_config, run
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


def test_dummy_weights(tmp_path):
    """vLLM leaves bytes as they are, which here mark what is not loaded."""
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


def copied(param, loaded_weight, *args, **options):
    param.data.copy_(loaded_weight)


class Mxfp4Layer(EmptyLayer):
    """`EmptyLayer` in MXFP4, with loaders that copy."""

    def __init__(self, config, method):
        super().__init__(config, method, weight_loader=copied)

    def fill(self, spread=0):
        """Load random weights, gate's rows first; every other row of expert 2 is 2**spread times smaller."""
        values = torch.tensor([decode_e2m1(code) for code in range(16)])
        self.weights = []
        for name, n, k in (("w13", 2 * I, H), ("w2", H, I)):
            codes = torch.randint(0, 256, (E, n, k // 2)).to(torch.uint8)
            scales = torch.randint(120, 124, (E, n, k // 32))
            scales[2, ::2] -= spread
            for field, tensor in (("weight", codes), ("weight_scale", scales.to(torch.uint8))):
                parameter = getattr(self, f"{name}_{field}")
                parameter.weight_loader(parameter, tensor, f"{name}_{field}", "w1", 0)
            decoded = values[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
            self.weights.append(decoded * torch.exp2(scales - 127.0).repeat_interleave(32, -1))
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
