"""Methods of the plugin for dense layers, without an engine: whose kernels run which, and the key of compiled graphs.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

from types import SimpleNamespace

import pytest
import torch
import vllm.envs
from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import modelopt

import thunder_moe
from thunder_moe.formats.block_format import MXFP8, NVFP4
from thunder_moe.integrations.vllm import graphs, linears, plugin
from thunder_moe.integrations.vllm.configs import ThunderModelOptMxFp8Config, ThunderModelOptNvFp4Config
from thunder_moe.integrations.vllm.linears import ThunderMxFp8Scheme, ThunderNvfp4Scheme

pytestmark = pytest.mark.usefixtures("groups")


class TestOnCuda:
    """Whose kernels run them: ours on Hopper, unless the user or the model's code wants vLLM's."""

    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        self.capability = [9, 0]
        values = dict(is_cpu=False, is_cuda=True, get_device_capability=self.capability)
        platform = SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})
        monkeypatch.setattr(linears, "current_platform", platform)
        monkeypatch.setattr(linears, "runs_on_cuda", lambda device, format: True)

    @pytest.mark.parametrize("format", [NVFP4, MXFP8], ids=lambda format: format.name)
    def test_reasons(self, format, monkeypatch):
        assert linears.dense_unsupported_reason(format) is None
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert linears.dense_unsupported_reason(format) is None
        config = VllmConfig(kernel_config=KernelConfig(linear_backend="marlin"))
        with set_current_vllm_config(config):
            assert linears.dense_unsupported_reason(format) == "--linear-backend marlin was asked for"
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.float32)
        with set_current_vllm_config(config):
            assert "torch.float32" in linears.dense_unsupported_reason(format)
        for capability in ([8, 0], [10, 0]):
            self.capability[:] = capability
            assert "9.0 alone" in linears.dense_unsupported_reason(format)
        self.capability[:] = 9, 0
        monkeypatch.setattr(linears, "runs_on_cuda", lambda device, format: False)
        assert "cannot be compiled" in linears.dense_unsupported_reason(format)

    @pytest.mark.parametrize("mark", ["is_bmm", "_retain_weight_for_gather"])
    @pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "MXFP8"])
    def test_weights_that_a_model_reads_itself(self, algorithm, mark, monkeypatch):
        """Their bytes stay as vLLM's method leaves them: a model that reads reordered ones would be silently wrong."""
        quant = (ThunderModelOptMxFp8Config if algorithm == "MXFP8" else ThunderModelOptNvFp4Config).from_config(
            {"quantization": dict(quant_algo=algorithm, kv_cache_quant_algo=None, exclude_modules=[], group_size=16)}
        )
        processed = []
        kernel = SimpleNamespace(process_weights_after_loading=processed.append)
        monkeypatch.setattr(linears, "select_linear_kernel", lambda *args, **options: kernel)
        monkeypatch.setattr(modelopt, "init_mxfp8_linear_kernel", lambda **options: kernel)
        method = quant.get_quant_method(ReplicatedLinear.__new__(ReplicatedLinear), "wo_a")
        assert isinstance(method, linears.ModelOptThunderLinearMethod)
        layer = torch.nn.Module()
        method.create_weights(layer, 64, [32], 64, 32, torch.bfloat16, weight_loader=None)
        layer.weight_scale.data.view(torch.uint8).fill_(120)
        layer.weight.data.view(torch.uint8).copy_(torch.arange(layer.weight.numel()).view(layer.weight.shape) % 100)
        if hasattr(layer, "weight_scale_2"):
            layer.weight_scale_2.data.fill_(0.5)
        before = layer.weight.data.view(torch.uint8).clone()
        setattr(layer, mark, True)
        layer.bmm_batch_size = 1
        if mark == "_retain_weight_for_gather" and algorithm == "MXFP8":
            with pytest.raises(NotImplementedError):  # vLLM's
                method.process_weights_after_loading(layer)
            return
        method.process_weights_after_loading(layer)
        assert type(layer.quant_method) is modelopt.ModelOptLinearMethod
        assert processed == [layer]
        assert torch.equal(layer.weight.data.view(torch.uint8), before)

    @pytest.mark.parametrize("scheme", [ThunderNvfp4Scheme(True, "wo_a"), ThunderMxFp8Scheme("wo_a")])
    def test_of_compressed_tensors(self, scheme):
        layer = torch.nn.Module()
        layer.is_bmm = True
        with pytest.raises(NotImplementedError, match="'wo_a': its model reads the weight itself"):
            scheme.process_weights_after_loading(layer)

    def test_large_scales(self):
        scheme = ThunderMxFp8Scheme("proj")
        layer = torch.nn.Module()
        scheme.create_weights(layer, [64], 64, torch.bfloat16, None)
        layer.weight.data.view(torch.uint8).zero_()
        layer.weight_scale.data.fill_(120)
        layer.weight_scale.data[3, 1] = 167
        with pytest.raises(ValueError, match=r"weight_scale of 'proj': got a scale of 2\*\*40"):
            scheme.process_weights_after_loading(layer)


def test_key_of_compiled_graphs(monkeypatch):
    """vLLM reuses a compiled graph where this is the same: not between our kernels and its own, nor two versions."""
    plugin.register()
    monkeypatch.setattr(graphs, "_choices", set())
    keys = [vllm.envs.compile_factors()[plugin.SWITCH]]
    graphs.decide("dense layers", "nvfp4", None)
    keys.append(vllm.envs.compile_factors()[plugin.SWITCH])
    graphs._choices.clear()
    graphs.decide("dense layers", "nvfp4", "of a test")
    keys.append(vllm.envs.compile_factors()[plugin.SWITCH])
    monkeypatch.setattr(thunder_moe, "__version__", "9.9")
    keys.append(vllm.envs.compile_factors()[plugin.SWITCH])
    assert len(set(map(str, keys))) == 4


@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_global_scale"])
def test_what_the_checkpoint_lacks(part):
    """A row of codes, the scales of one, or the global scale of a merged linear."""
    scheme, layer = ThunderNvfp4Scheme(True, "qkv_proj"), torch.nn.Module()
    scheme.create_weights(
        layer, output_partition_sizes=[32, 16], input_size_per_partition=64, params_dtype=torch.float32,
        weight_loader=None,
    )  # fmt: skip
    row = 40 if part != "weight_global_scale" else 1
    parameter = getattr(layer, "weight_packed" if part == "weight" else part)
    missing = parameter.data[row].clone()
    layer.weight_packed.data.zero_()
    layer.weight_scale.data.fill_(1)
    layer.weight_global_scale.data.fill_(2)
    parameter.data[row] = missing
    with pytest.raises(ValueError, match=rf"missing in the checkpoint for .* \[{row}\] \(of this rank\) of 'qkv_proj'"):
        scheme.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("scheme", "features"), [(ThunderNvfp4Scheme(True, "mlp.down_proj"), 24), (ThunderMxFp8Scheme("mlp.down_proj"), 48)]
)
def test_layers_whose_share_of_a_rank_is_no_whole_blocks(scheme, features):
    with pytest.raises(ValueError, match=f"'mlp.down_proj': got {features} input features on this rank, wanted"):
        scheme.create_weights(
            torch.nn.Module(), output_partition_sizes=[64], input_size_per_partition=features,
            params_dtype=torch.float32, weight_loader=None,
        )  # fmt: skip
