"""The experts class and the methods of the plugin without an engine, against the oracle: ids, weights, forms, refusals.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
import vllm.model_executor.layers.fused_moe.config as vllm_config
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from oracle import dequantize, dequantize_mxfp8, moe_experts, relative_error
from vllm.config import VllmConfig, get_current_vllm_config_or_none, set_current_vllm_config
from vllm.config.parallel import All2AllBackend
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.prepare_finalize import BatchedPrepareAndFinalize
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE, ModelOptNvFp4FusedMoE
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from thunder_moe.formats import mxfp8
from thunder_moe.formats.block_format import MXFP8, NVFP4
from thunder_moe.formats.nvfp4 import quantize
from thunder_moe.integrations.vllm import experts, gpt_oss, loading, methods, plugin
from thunder_moe.integrations.vllm.batched import ThunderBatchedExperts
from thunder_moe.integrations.vllm.configs import (
    ThunderCompressedTensorsConfig,
    ThunderModelOptMxFp8Config,
    ThunderModelOptNvFp4Config,
)
from thunder_moe.integrations.vllm.experts import ThunderExperts, unsupported_reason
from thunder_moe.integrations.vllm.lora import ThunderLoRAExperts
from thunder_moe.kernels.batch_invariance import make_batch_invariant

E, T, A, H, I = 8, 5, 2, 64, 32  # noqa: E741
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


pytestmark = pytest.mark.usefixtures("groups")


def moe_config(parallel=None, **changes):
    return FusedMoEConfig(
        **{
            **dict(
                num_experts=E,
                experts_per_token=A,
                hidden_dim=H,
                intermediate_size=I,
                num_local_experts=E,
                num_logical_experts=E,
                activation=MoEActivation.SILU,
                device="cpu",
                routing_method=RoutingMethodType.Default,
                in_dtype=torch.float32,
                moe_parallel_config=parallel or FusedMoEParallelConfig.make_no_parallel(),
            ),
            **changes,
        }
    )


def quant_config(algo="W4A16_NVFP4"):
    return ThunderModelOptNvFp4Config(algo, is_checkpoint_nvfp4_serialized=True)


class EmptyLayer(torch.nn.Module):
    """As much of vLLM's RoutedExperts as a method needs, before anything is loaded."""

    def __init__(self, config, method, experts=E, weight_loader=None):
        super().__init__()
        self.layer_name, self.expert_map = "model.layers.0.mlp.experts", None
        self.activation, self.global_num_experts = config.activation, config.num_experts
        self.apply_router_weight_on_input = False
        self.hidden_size, self.intermediate_size_per_partition = H, I
        for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"):
            setattr(self, name, getattr(config, name))
        method.create_weights(
            layer=self, num_experts=experts, hidden_size=H, intermediate_size_per_partition=I,
            params_dtype=config.in_dtype, weight_loader=weight_loader, global_num_experts=config.num_experts,
        )  # fmt: skip

    def _expert_routing_tables(self):
        return None


class Layer(EmptyLayer):
    """With random weights; up's global scale is not gate's."""

    def __init__(self, config, method, experts=E):
        super().__init__(config, method, experts)
        gate, up, down = (
            quantize(torch.randn(experts, *shape) * factor) for *shape, factor in ((I, H, 1), (I, H, 3), (H, I, 1))
        )
        self.w13_weight.data.copy_(torch.cat([gate.qdata, up.qdata], 1))
        self.w13_weight_scale.data.view(torch.uint8).copy_(
            torch.cat([gate.scale.view(torch.uint8), up.scale.view(torch.uint8)], 1)
        )
        self.w13_weight_scale_2.data.copy_(torch.stack([gate.global_scale, up.global_scale], 1))
        self.w2_weight.data.copy_(down.qdata)
        self.w2_weight_scale.data.view(torch.uint8).copy_(down.scale.view(torch.uint8))
        self.w2_weight_scale_2.data.copy_(down.global_scale)
        self.weights = _decoded(self)

    def give_one_scale(self):
        self.w13_weight_scale_2.data[:, 1] = self.w13_weight_scale_2.data[:, 0]
        self.weights = _decoded(self)
        return self


def _decoded(layer):
    """(E, 2I, H) and (E, H, I), what the loaded parameters stand for."""
    rows = layer.w13_weight_scale_2.data.repeat_interleave(layer.w13_weight.shape[1] // 2, 1)
    return tuple(
        dequantize(getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data, scale)
        for name, scale in (("w13", rows), ("w2", layer.w2_weight_scale_2.data))
    )


def loaded(config=None, experts=E, kind=Layer):
    """(method, layer) with the weights loaded."""
    config = config or moe_config()
    method = methods.modelopt_method(quant_config(), config)
    assert isinstance(method, methods.ModelOptThunderMoEMethod)
    return method, kind(config, method, experts)


def made(config=None, experts=E):
    """(method, layer) with the weights processed."""
    method, layer = loaded(config, experts)
    method.process_weights_after_loading(layer)
    return method, layer


def gelu_experts(hidden, ids, weights, gate_up, down, approximate="none"):
    """float32 (T, H), token by token."""
    out = torch.zeros(hidden.shape)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, weight in zip(chosen, shares, strict=True):
            if expert >= 0:
                gate, up = (gate_up[expert] @ hidden[token].float()).chunk(2)
                out[token] += weight * (down[expert] @ (F.gelu(gate, approximate=approximate) * up))
    return out


def inputs(dtype=torch.float32, top_k=A, experts=E):
    hidden = torch.randn(T, H).to(dtype)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(T)]).int()
    return hidden, ids, torch.rand(T, top_k)


def run(method, layer, hidden, ids, weights):
    return method.apply(layer, hidden, weights, ids, None, None)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts(dtype):
    method, layer = made(moe_config(in_dtype=dtype))
    hidden, ids, weights = inputs(dtype)
    expected = moe_experts(hidden, ids, weights, *layer.weights)
    out = run(method, layer, hidden, ids, weights)
    assert out.dtype == dtype
    assert relative_error(out, expected) < TOLERANCE[dtype]
    assert layer.w13_weight_scale_2.shape == (E, 2 * I)  # vLLM's own kernels have the gate's alone


def test_equal_scales_of_gate_and_up_are_one_per_expert():
    method, layer = loaded()
    layer.give_one_scale()
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_scale_2.shape == (E,)


class MxFp8Layer(EmptyLayer):
    """`Layer` in MXFP8."""

    def fill(self):
        self.weights = []
        for name, shape in (("w13", (E, 2 * I, H)), ("w2", (E, H, I))):
            packed = mxfp8.quantize(torch.randn(shape))
            getattr(self, f"{name}_weight").data.copy_(packed.qdata)
            getattr(self, f"{name}_weight_scale").data.copy_(packed.scale.view(torch.uint8))
            self.weights.append(dequantize_mxfp8(packed.qdata, packed.scale))
        return self


class TestMxFp8:
    CONFIG = ThunderModelOptMxFp8Config(True, None, [])

    def made(self, **changes):
        config = moe_config(**changes)
        method = methods.mxfp8_method(self.CONFIG, config)
        return method, MxFp8Layer(config, method)

    @pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.GELU])
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_experts(self, dtype, activation):
        method, layer = self.made(in_dtype=dtype, activation=activation)
        method.process_weights_after_loading(layer.fill())
        hidden, ids, weights = inputs(dtype)
        ids[1, 0] = -1
        out = run(method, layer, hidden, ids, weights)
        oracle = moe_experts if activation is MoEActivation.SILU else gelu_experts
        expected = oracle(hidden, ids, weights, *layer.weights)
        assert out.dtype == dtype
        assert relative_error(out, expected) < TOLERANCE[dtype]

    @pytest.mark.parametrize("name", ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale"])
    def test_what_the_checkpoint_lacks(self, name):
        method, layer = self.made()
        missing = getattr(layer, name).data.view(torch.uint8)[3].clone()
        layer.fill()
        getattr(layer, name).data.view(torch.uint8)[3] = missing
        with pytest.raises(ValueError, match=rf"{name}: NaN or missing in the checkpoint for experts \[3\]"):
            method.process_weights_after_loading(layer)

    def test_codes_of_nan(self):
        method, layer = self.made()
        layer.fill().w2_weight.data.view(torch.uint8)[5, 1, 2] = 0xFF
        with pytest.raises(ValueError, match=r"w2_weight: NaN or missing in the checkpoint for experts \[5\]"):
            method.process_weights_after_loading(layer)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [(dict(intermediate_size=48), "not a multiple of 32"), (dict(moe_backend="marlin"), "marlin was asked for")],
    )
    def test_refusals(self, changes, reason, monkeypatch, said):
        monkeypatch.setattr(ModelOptMxFp8FusedMoE, "__init__", lambda self, **_: None)
        assert type(methods.mxfp8_method(self.CONFIG, moe_config(**changes))) is ModelOptMxFp8FusedMoE
        assert "MXFP8 experts do not run" in said[0]
        assert reason in said[0]

    @pytest.mark.parametrize(("name", "offset"), [("w13_weight_scale", 0), ("w2_weight_scale", 1)])
    def test_scales_that_cuda_kernels_read_as_nan(self, name, offset, monkeypatch):
        (method, largest), (_, layer) = self.made(), self.made()
        monkeypatch.setattr(methods.current_platform, "is_cuda", lambda: True)
        getattr(largest.fill(), name).data[2, 1, 0] = 166
        method.process_weights_after_loading(largest)
        getattr(layer.fill(), name).data[2, 1, 0] = 167 + offset
        message = rf"{name} of 'model.*: got a scale of 2\*\*{40 + offset}, .* up to 2\*\*39"
        with pytest.raises(ValueError, match=message):
            method.process_weights_after_loading(layer)


@pytest.mark.parametrize("format", [NVFP4, MXFP8], ids=lambda format: format.name)
def test_claims_on_cuda(format, monkeypatch):
    """Both formats alike: Ampere and Hopper, 16-bit activations, where the kernels can be compiled."""
    capability, asked = [9, 0], []
    platform = dict(is_cpu=False, is_cuda=True, get_device_capability=capability)
    platform = SimpleNamespace(**{name: lambda value=value: value for name, value in platform.items()})
    monkeypatch.setattr(experts, "current_platform", platform)
    monkeypatch.setattr(experts, "runs_on_cuda", lambda device, name: asked.append(name) or "compiled" not in asked)
    config = moe_config(in_dtype=torch.bfloat16)
    assert unsupported_reason(config, format=format) is None
    capability[:] = 8, 0
    assert unsupported_reason(config, format=format) is None
    assert unsupported_reason(moe_config(in_dtype=torch.bfloat16, has_bias=True), format=format) is None
    assert asked == [format.name] * 3
    asked.append("compiled")
    assert "cannot be compiled" in unsupported_reason(config, format=format)
    assert "torch.float32" in unsupported_reason(moe_config(), format=format)
    capability[:] = 10, 0
    assert "device" in unsupported_reason(config, format=format)


class TestCompressedTensors:
    """Which method the configuration of a checkpoint gives a layer."""

    def method(self, name, kind=RoutedExperts):
        path = Path(__file__).parents[2] / "data" / "checkpoints" / name / "config.json"
        config = ThunderCompressedTensorsConfig.from_config(json.loads(path.read_text())["quantization_config"])
        config.packed_modules_mapping = {}
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.moe_config = moe_config()
        names = "gate_proj", "up_proj", "down_proj"
        layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = names
        return config.get_quant_method(layer, "model.layers.0.mlp.experts")

    def test_ours(self):
        of_nvfp4, of_mxfp8 = map(self.method, ("compressed_tensors_qwen3_moe", "compressed_tensors_mxfp8_qwen3_moe"))
        assert type(of_nvfp4) is methods.CompressedTensorsThunderMoEMethod
        assert type(of_mxfp8) is methods.CompressedTensorsThunderMxFp8MoEMethod

    @pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
    def test_loaders_that_know_classes_by_name(self, format, monkeypatch, said):
        """GPT-OSS: in a method of another name the loader would transpose what is packed."""
        monkeypatch.setattr(methods.CompressedTensorsW4A4Nvfp4MoEMethod, "__init__", lambda *args, **_: None)
        name = "compressed_tensors_qwen3_moe" if format == "nvfp4" else "compressed_tensors_mxfp8_qwen3_moe"
        assert "Thunder" not in type(self.method(name, GptOssRoutedExperts)).__name__
        (line,) = said
        assert f"{format.upper()} experts do not run" in line
        assert "GptOssRoutedExperts knows vLLM's classes by name" in line


@pytest.mark.parametrize("cls", [ThunderExperts, ThunderBatchedExperts, ThunderLoRAExperts])
def test_methods_have_the_parameters_of_vllm(cls):
    methods = vars(mk.FusedMoEExpertsModular).keys() | vars(mk.FusedMoEExperts).keys()
    public = [name for name in methods if not name.startswith("_") and callable(getattr(cls, name))]
    assert "apply" in public
    for name in public:
        wanted = inspect.signature(getattr(mk.FusedMoEExpertsModular, name)).parameters.values()
        got = inspect.signature(getattr(cls, name)).parameters.values()
        assert [(p.name, p.kind) for p in got] == [(p.name, p.kind) for p in wanted], name


@pytest.mark.parametrize("place", ["first", "last"])
def test_expert_map_and_ids_of_nobody(place):
    """A rank with half of the experts: ids of others' and -1 contribute nothing (-1 as an index is the last expert)."""
    method, layer = made(moe_config(num_local_experts=E // 2), E // 2)
    local, start = torch.arange(E // 2, dtype=torch.int32), 0 if place == "first" else E // 2
    layer.expert_map = torch.full((E,), -1, dtype=torch.int32)
    layer.expert_map[start : start + E // 2] = local
    hidden, ids, weights = inputs()
    ids[0, 1] = ids[2, 0] = -1
    ids[3] = -1
    own = torch.where((ids >= start) & (ids < start + E // 2), ids - start, -1)
    expected = moe_experts(hidden, own, weights, *layer.weights)
    out = run(method, layer, hidden, ids, weights)
    assert relative_error(out, expected) < 1e-5
    assert out[3].count_nonzero() == 0


def test_router_weight_on_input_is_applied_once():
    method, layer = made(moe_config(experts_per_token=1))
    layer.apply_router_weight_on_input = True
    hidden, ids, weights = inputs(top_k=1)
    expected = moe_experts(hidden, ids, weights, *layer.weights, weight_on_input=True)
    assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize(
    ("activation", "options"),
    [
        (MoEActivation.SILU, dict(limit=0.5)),  # DeepSeek-V4
        (MoEActivation.SWIGLUOAI_UNINTERLEAVE, dict(limit=0.7, alpha=1.702, up_shift=1.0)),  # MiniMax-M3
        (MoEActivation.SWIGLUOAI_UNINTERLEAVE, dict(limit=0.5, alpha=1.3, up_shift=0.4)),
    ],
)
def test_clamped_activations(activation, options, format):
    """Their numbers as vLLM's models give them: to vLLM's own layer."""
    names = dict(limit="swiglu_limit", alpha="swiglu_alpha", up_shift="swiglu_beta")
    numbers = {names[name]: value for name, value in options.items()}
    if format == "nvfp4":
        quant, (_, source) = quant_config(), loaded()
    else:
        quant, source = TestMxFp8.CONFIG, TestMxFp8().made()[1].fill()
    with set_current_vllm_config(VllmConfig()):
        layer = FusedMoEFactory(
            E, A, H, I, params_dtype=torch.float32, activation=activation.value, quant_config=quant,
            prefix="model.layers.0.mlp.experts", **numbers,
        ).routed_experts  # fmt: skip
    for name, parameter in source.named_parameters():
        getattr(layer, name).data.copy_(parameter.data)
    layer.quant_method.process_weights_after_loading(layer)
    hidden, ids, weights = inputs()
    expected = moe_experts(hidden, ids, weights, *source.weights, **options)
    assert relative_error(run(layer.quant_method, layer, hidden, ids, weights), expected) < 1e-5
    assert relative_error(moe_experts(hidden, ids, weights, *source.weights), expected) > 0.1


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_biases_and_rows_in_turns(format, rank):
    """GPT-OSS: rows of gate and up alternate; the biases of down are added once, not by each tensor-parallel rank."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_size, parallel.tp_rank = 2, rank
    config = moe_config(parallel, activation=MoEActivation.SWIGLUOAI, has_bias=True, intermediate_size=2 * I)
    if format == "nvfp4":
        method, layer = loaded(config)
    else:
        method = methods.mxfp8_method(TestMxFp8.CONFIG, config)
        layer = MxFp8Layer(config, method).fill()
    biases = torch.randn(E, 2 * I), torch.randn(E, H)
    turns = torch.arange(2 * I).view(2, I).t().flatten()
    for name in ("w13_weight", "w13_weight_scale"):
        data = getattr(layer, name).data.view(torch.uint8)
        data.copy_(data[:, turns].clone())
    with pytest.raises(ValueError, match="w13_bias: NaN or missing"):
        method.process_weights_after_loading(layer)
    layer.w13_bias.data.copy_(biases[0][:, turns])
    layer.w2_bias.data.copy_(biases[1])
    method.process_weights_after_loading(layer)
    hidden, ids, weights = inputs()
    hidden = hidden * 4  # past the limit of the activation
    own = biases[0], biases[1] * (rank == 0)
    expected = moe_experts(hidden, ids, weights, *layer.weights, *own, limit=7.0, alpha=1.702, up_shift=1.0)
    assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5
    free = moe_experts(hidden, ids, weights, *layer.weights, *own, alpha=1.702, up_shift=1.0)
    assert relative_error(free, expected) > 0.1


@pytest.mark.parametrize(("activation", "approximate"), [("GELU", "none"), ("GELU_TANH", "tanh")])
def test_gelu(activation, approximate):
    method, layer = made(moe_config(activation=MoEActivation[activation]))
    hidden, ids, weights = inputs()
    ids[1, 0] = -1
    expected = gelu_experts(hidden, ids, weights, *layer.weights, approximate)
    assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5


@pytest.mark.parametrize("one_scale", [False, True])
def test_relu_squared_without_a_gate(monkeypatch, one_scale):
    """Nemotron-H's experts. vLLM makes the configuration of such layers for GPUs alone."""
    monkeypatch.setattr(vllm_config, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb = not one_scale  # scales by row
    config = moe_config(parallel, activation=MoEActivation.RELU2_NO_MUL)
    method = methods.modelopt_method(quant_config(), config)
    layer = EmptyLayer(config, method)
    up, down = quantize(torch.randn(E, I, H)), quantize(torch.randn(E, H, I))
    for name, weight in (("w13", up), ("w2", down)):
        getattr(layer, f"{name}_weight").data.copy_(weight.qdata)
        getattr(layer, f"{name}_weight_scale").data.view(torch.uint8).copy_(weight.scale.view(torch.uint8))
    layer.w13_weight_scale_2.data.copy_(up.global_scale[:, None])
    layer.w2_weight_scale_2.data.copy_(down.global_scale)
    wanted = [dequantize(weight.qdata, weight.scale, weight.global_scale) for weight in (up, down)]
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_scale_2.shape == ((E,) if one_scale else (E, I))
    config.is_lora_enabled = True
    assert "no act_and_mul" in unsupported_reason(config, ThunderLoRAExperts)
    hidden, ids, weights = inputs()
    ids[1, 0] = -1
    expected = torch.zeros(T, H)
    for token, slot in itertools.product(range(T), range(A)):
        if (expert := int(ids[token, slot])) >= 0:
            rows = torch.relu(hidden[token] @ wanted[0][expert].T).square()
            expected[token] += weights[token, slot] * (rows @ wanted[1][expert].T)
    assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5


def test_moved_experts():
    """EPLB writes other experts into the parameters: the kernels read them there."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb = True
    method, layer = made(moe_config(parallel))
    hidden, ids, weights = inputs()
    before = run(method, layer, hidden, ids, weights)
    order = torch.randperm(E)
    for parameter in layer.parameters():
        view = parameter.data.view(E, -1)  # what EPLB moves: contiguous and expert-major
        view = view.view(torch.uint8) if view.dtype == torch.float8_e4m3fn else view
        view.copy_(view[order].clone())
    moved = torch.argsort(order)[ids.long()].int()
    assert torch.equal(run(method, layer, hidden, moved, weights), before)
    assert not torch.equal(run(method, layer, hidden, ids, weights), before)


def _loads(layer):
    """Parameters as vLLM's loaders make them: a loader each, which copies."""
    for parameter in layer.parameters():
        parameter.weight_loader = lambda param, loaded_weight: param.data.copy_(loaded_weight)
    return layer


class TestReload:
    """vLLM's layerwise reload of one layer: new parameters are loaded, processed and copied into the first ones."""

    @pytest.fixture
    def first(self):
        """(method, layer) with processed weights."""
        return self._recorded(moe_config())

    def _recorded(self, config):
        method, layer = loaded(config)
        layer.quant_method = method
        record_metadata_for_reloading(_loads(layer.give_one_scale()))
        method.process_weights_after_loading(layer)
        return method, layer

    @staticmethod
    def _reload(layer, other):
        initialize_layerwise_reload(layer)
        for name, parameter in other.named_parameters():
            target = getattr(layer, name)
            target.weight_loader(target, parameter.data)
        finalize_layerwise_reload(layer, None)

    def test_other_weights_in_the_same_memory(self, first):
        method, layer = first
        hidden, ids, weights = inputs()
        before = run(method, layer, hidden, ids, weights)
        places = {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        other = loaded()[1].give_one_scale()
        expected = moe_experts(hidden, ids, weights, *other.weights)
        self._reload(layer, other)
        assert places == {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
        out = run(method, layer, hidden, ids, weights)
        assert relative_error(out, expected) < 1e-5
        assert relative_error(before, expected) > 0.1
        layer.w2_weight_scale_2.data.mul_(2)  # what EPLB writes is seen after a reload, too
        assert torch.equal(run(method, layer, hidden, ids, weights), 2 * out)

    def test_a_part_of_a_layer(self, first):
        """vLLM would compute with the uninitialized memory of the rest."""
        _, layer = first
        initialize_layerwise_reload(layer)
        for name, parameter in loaded()[1].give_one_scale().named_parameters():
            if name != "w2_weight":
                getattr(layer, name).weight_loader(getattr(layer, name), parameter.data)
        with pytest.raises(ValueError, match=r"got \d+ of \d+ elements to load, wanted all"):
            finalize_layerwise_reload(layer, None)

    def test_scales_of_gate_and_up_that_have_no_place(self, first):
        _, layer = first
        with pytest.raises(ValueError, match="global scales that differ .in w13 the scales of gate and up"):
            self._reload(layer, loaded()[1])

    def test_with_eplb(self):
        """vLLM would load experts where they were first, though EPLB may have moved them."""
        parallel = FusedMoEParallelConfig.make_no_parallel()
        parallel.enable_eplb = True
        _, layer = self._recorded(moe_config(parallel))
        with pytest.raises(ValueError, match="reload_weights with --enable-eplb"):
            initialize_layerwise_reload(layer)

    def test_with_adapters(self):
        """vLLM would keep the old weights: it looks for `base_layer.` in the names of a checkpoint's tensors."""
        _, layer = self._recorded(moe_config(is_lora_enabled=True))
        with pytest.raises(ValueError, match="reload_weights with --enable-lora"):
            initialize_layerwise_reload(layer)

    def test_a_tensor_that_is_loaded_where_it_is(self, first):
        """The bias in a router's choice (DeepSeek-V3), which vLLM does not count, is no missing part."""
        method, layer = first
        layer.e_score_correction_bias = torch.nn.Parameter(torch.ones(E), requires_grad=False)
        other = loaded()[1].give_one_scale()
        self._reload(layer, other)
        hidden, ids, weights = inputs()
        expected = moe_experts(hidden, ids, weights, *other.weights)
        assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5

    def test_loading_into_what_was_processed(self, first):
        _, layer = first
        for name, parameter in layer.named_parameters():
            with pytest.raises(RuntimeError, match=f"{name} of 'model.layers.0.mlp.experts' is in the layout"):
                parameter.weight_loader(parameter, parameter.data)

    def test_experts_of_other_ranks(self, first):
        """vLLM offers them also after the last expert of this rank has arrived, and the layer was processed."""
        _, layer = first
        layer.expert_map = torch.tensor([0, -1])
        for parameter in layer.parameters():
            assert not parameter.weight_loader(parameter, parameter.data, expert_id=1, return_success=True)
            with pytest.raises(RuntimeError, match="is in the layout"):
                parameter.weight_loader(parameter, parameter.data, expert_id=0, return_success=True)

    def test_other_memory(self, first):
        """Offloading gives a parameter other memory after it was processed."""
        method, layer = first
        hidden, ids, weights = inputs()
        before = run(method, layer, hidden, ids, weights)
        layer.w2_weight_scale_2.data = 2 * layer.w2_weight_scale_2.data
        assert torch.equal(run(method, layer, hidden, ids, weights), 2 * before)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(moe_backend="marlin"), "--moe-backend marlin was asked for"),
        (dict(activation=MoEActivation.SWIGLUSTEP), "SWIGLUSTEP activation"),
        (dict(activation=MoEActivation.GELU, swiglu_limit=7.0), "swiglu_limit 7.0"),
        (dict(activation=MoEActivation.GELU, has_bias=True), "GELU with biases"),
        (dict(in_dtype=torch.float64), "activations are torch.float64"),
        (dict(intermediate_size=40), "intermediate_size on a rank is 40"),
        (dict(hidden_dim=72), "hidden_size on a rank is 72"),
        (dict(hidden_dim=H, hidden_dim_unpadded=48), "padded"),
    ],
)
def test_refusals(changes, reason, said):
    config = moe_config(**changes)
    with pytest.raises((NotImplementedError, ValueError)):  # vLLM's own method, which a CPU has no kernels for
        methods.modelopt_method(quant_config(), config)
    (line,) = said
    assert "vLLM's own" in line
    assert reason in line


EXCHANGES = get_args(All2AllBackend)
OURS = {"allgather_reducescatter": ThunderExperts} | dict.fromkeys(
    ("deepep_low_latency", "nixl_ep"), ThunderBatchedExperts
)


@pytest.mark.parametrize("backend", EXCHANGES)
def test_exchanges(backend):
    """Each that vLLM has: ours, or refused by name."""
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.use_ep, parallel.dp_size, parallel.ep_size, parallel.all2all_backend = True, 2, 2, backend
    if backend.startswith("mori"):  # vLLM itself has it for AMD alone
        with pytest.raises(AssertionError, match="aiter"):
            moe_config(parallel)
        return
    config = moe_config(parallel)
    kind = methods.experts_class(config)
    if backend in OURS:
        assert kind is OURS[backend]
        assert unsupported_reason(config, kind) is None
    else:
        assert f"--all2all-backend {backend}" in unsupported_reason(config, kind)


def test_elastic_expert_parallelism_is_refused():
    with set_current_vllm_config(VllmConfig()) as _:
        get_current_vllm_config_or_none().parallel_config.enable_elastic_ep = True
        assert "--enable-elastic-ep" in unsupported_reason(moe_config())


@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_of_rows(rank, monkeypatch):
    """The format of DeepEP's low latency, by vLLM's own exchange of that format in one process."""
    half = E // 2
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.use_ep, parallel.dp_size, parallel.ep_size, parallel.ep_rank = True, 2, 2, rank
    parallel.all2all_backend = "deepep_low_latency"
    exchange = BatchedPrepareAndFinalize(T + 2, half, 1, rank)
    monkeypatch.setattr(methods, "maybe_make_prepare_finalize", lambda **_: exchange)
    method, layer = made(moe_config(parallel, num_local_experts=half), half)
    hidden, ids, weights = inputs()
    own = torch.where(ids // half == rank, ids % half, -1)
    expected = moe_experts(hidden, own, weights, *layer.weights)
    assert relative_error(run(method, layer, hidden, ids, weights), expected) < 1e-5


def test_blocks_of_rows_of_other_sizes_are_refused(monkeypatch):
    method, _ = made()
    monkeypatch.setattr(FusedMoEMethodBase, "maybe_roundup_sizes", lambda self, size, *rest: (2 * size, rest[0]))
    with pytest.raises(ValueError, match="got hidden_size 64, wanted 128"):
        method.maybe_roundup_sizes(H, I, torch.float32, None)


class TestDamagedCheckpoints:
    """Errors that name the experts, of what vLLM itself would compute with."""

    def broken(self, name, wrong, expert=3, rows=slice(None)):
        """The error for a layer of which an expert has another value; None: what it has before anything is loaded."""
        method, layer = loaded()
        data = getattr(layer, name).data
        if wrong is None:
            _, fresh = loaded(kind=EmptyLayer)
            bits = torch.int32 if data.dtype == torch.float32 else torch.uint8
            part = (expert, rows) if data.ndim > 1 else expert
            data.view(bits)[part] = getattr(fresh, name).data.view(bits)[part]
        else:
            data[expert, ...].view(-1)[-1] = wrong
        with pytest.raises(
            ValueError, match=r"experts \[3\] \(of this rank\) of 'model.layers.0.mlp.experts'"
        ) as error:
            method.process_weights_after_loading(layer)
        return str(error.value)

    @pytest.mark.parametrize(
        "name",
        ["w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_weight_scale_2", "w2_weight_scale_2"],
    )
    def test_missing(self, name):
        assert self.broken(name, None).startswith(f"{name}: ")
        assert "missing in the checkpoint for" in self.broken(name, None)

    @pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
    def test_a_row_of_codes_that_is_missing(self, name):
        assert self.broken(name, None, rows=slice(-1, None)).startswith(f"{name}: missing in the checkpoint")

    @pytest.mark.parametrize("name", ["w13_weight_scale_2", "w2_weight_scale_2"])
    @pytest.mark.parametrize("value", [0.0, -0.5, torch.inf, torch.nan, 1e-39])
    def test_global_scales(self, name, value):
        assert self.broken(name, value).startswith(
            f"{name}: NaN, infinite, zero, negative or missing in the checkpoint"
        )

    @pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale"])
    @pytest.mark.parametrize("value", [-1.0, -0.0, torch.nan])
    def test_block_scales(self, name, value):
        assert self.broken(name, value).startswith(f"{name}: NaN, negative or missing in the checkpoint")

    def test_zeros_are_none(self):
        """Blocks of zeros have a scale of zero."""
        method, layer = loaded()
        layer.w13_weight_scale.data[0, 0] = 0
        expected = _decoded(layer)
        method.process_weights_after_loading(layer)
        hidden, ids, weights = inputs()
        wanted = moe_experts(hidden, ids, weights, *expected)
        assert relative_error(run(method, layer, hidden, ids, weights), wanted) < 1e-5

    def test_formats_of_no_checkpoint(self, monkeypatch):
        """vLLM's sharded_state has what the kernels have in memory; "dummy" has random scales, of both signs."""
        for format in ("sharded_state", "runai_streamer_sharded"):
            monkeypatch.setattr(loading, "_load_format", lambda format=format: format)
            method, layer = loaded()
            with pytest.raises(
                ValueError, match=f"--load-format {format}: got weights of 'model.layers.0.mlp.experts'"
            ):
                method.process_weights_after_loading(layer)
        monkeypatch.setattr(loading, "_load_format", lambda: "dummy")
        method, layer = loaded()
        layer.w2_weight_scale_2.data.neg_()
        method.process_weights_after_loading(layer)


def test_override_of_activations_is_vllms_own(monkeypatch):
    config = quant_config("NVFP4")
    config.moe_activation_override = object()
    monkeypatch.setattr(ModelOptNvFp4FusedMoE, "__init__", lambda self, **_: None)
    assert type(methods.modelopt_method(config, moe_config())) is ModelOptNvFp4FusedMoE


def test_kernel_is_vllms_modular_one():
    method, _ = made()
    assert isinstance(method.moe_kernel, mk.FusedMoEKernel)
    assert not method.is_monolithic
    prepare = maybe_make_prepare_finalize(moe_config(), method.moe_quant_config, None, allow_new_interface=True)
    assert type(method.moe_kernel.prepare_finalize) is type(prepare)


class TestSwitch:
    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch):
        from thunder_moe.integrations.vllm import configs

        self.calls = []
        monkeypatch.setattr(configs, "register_configs", lambda: self.calls.append(1))
        self.monkeypatch = monkeypatch

    def test_on(self):
        self.monkeypatch.delenv(plugin.SWITCH, raising=False)
        plugin.register()
        assert self.calls

    def test_off(self):
        self.monkeypatch.setenv(plugin.SWITCH, "0")
        plugin.register()
        assert not self.calls

    @pytest.mark.parametrize(("switch", "calls"), [("", []), ("1", [1])])
    def test_another_version(self, switch, calls):
        self.monkeypatch.setenv(plugin.SWITCH, switch)
        self.monkeypatch.setattr(plugin, "_vllm_version", lambda: "0.40.0")
        plugin.register()
        assert self.calls == calls

    def test_what_is_no_setting(self):
        self.monkeypatch.setenv(plugin.SWITCH, "yes")
        with pytest.raises(ValueError, match="THUNDER_MOE_VLLM: got 'yes'"):
            plugin.register()


@pytest.mark.parametrize(
    ("parameter", "shape", "fits"),
    [("w13", (E, 2, 128), True), ("w2", (E, 3, 64), True), ("w13", (E, 64, 4), False), ("w2", (E, 96, 2), False)],
)
def test_blocks_along_the_wrong_dimension(parameter, shape, fits):
    """GPT-OSS in MXFP8 as nvidia-modelopt writes it: 64 features, experts of 96, of which a rank has 48."""
    weight = torch.empty(E, 96, 64) if parameter == "w13" else torch.empty(E, 64, 48)
    if fits:
        gpt_oss._check_blocks("x", torch.empty(shape), weight, parameter)
        return
    with pytest.raises(ValueError, match=r"x: got shape \(8, .*wanted a scale for each 32 along in_features"):
        gpt_oss._check_blocks("x", torch.empty(shape), weight, parameter)


@pytest.mark.parametrize("kind", [ModelOptNvFp4FusedMoE, ModelOptMxFp8FusedMoE])
def test_gpt_oss_without_its_biases(kind):
    """vLLM's loader of the model would drop them where its own methods run the experts."""
    model = gpt_oss.ThunderGptOssForCausalLM.__new__(gpt_oss.ThunderGptOssForCausalLM)
    torch.nn.Module.__init__(model)
    model.experts = torch.nn.Module()
    model.experts.quant_method = kind.__new__(kind)
    with pytest.raises(ValueError, match=f"experts: vLLM's own {kind.__name__} would leave out the biases"):
        model.load_weights([])


def test_the_entry_point_registers():
    from importlib.metadata import entry_points

    (point,) = entry_points(group="vllm.general_plugins", name="thunder_moe")
    assert point.load() is plugin.register


def test_vllm_itself_leaves_what_is_not_ours():
    assert quant_config().get_quant_method(SimpleNamespace(), "model.norm") is None


class TestBatchInvariance:
    """VLLM_BATCH_INVARIANT=1: tokens have the same bits in any batch."""

    @pytest.fixture
    def invariant(self, monkeypatch):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        plugin.register()
        yield
        make_batch_invariant(False)

    def test_tokens_do_not_depend_on_others(self, invariant):
        method, layer = made()
        hidden, ids, weights = (each.repeat(40, 1) for each in inputs())
        hidden = hidden + torch.randn(hidden.shape)
        whole = run(method, layer, hidden, ids, weights)
        for tokens in (torch.tensor([7]), torch.randperm(200)[:9], torch.randperm(200)):
            assert torch.equal(run(method, layer, hidden[tokens], ids[tokens], weights[tokens]), whole[tokens])

    def test_adapters_are_left_to_vllm(self, invariant):
        assert unsupported_reason(moe_config()) is None
        reason = unsupported_reason(moe_config(is_lora_enabled=True), ThunderLoRAExperts)
        assert "batch invariance" in reason
