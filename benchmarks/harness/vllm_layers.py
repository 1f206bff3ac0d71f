"""Layers as vLLM builds them, routed MoE (router, experts, weighted sum) and dense, run by vLLM's kernels or by ours.
Called by suites/serving.py, adapters.py, linear.py and tests/gpu; calls vLLM, which must be installed, and the plugin.

Legend: T tokens, A = top_k, E experts of this rank, H hidden_size, I intermediate_size, S adapters, R their rank,
N output features and K input features of a dense layer.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import vllm
except ImportError as error:
    raise ImportError("layers of vLLM need vLLM: pip install 'thunder_moe[vllm]'") from error
from vllm.config import KernelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.lora.layers import FusedMoEWithLoRA, LoRAMapping
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptNvFp4Config, resolve
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.workspace import init_workspace_manager

from benchmarks.harness.served import COLUMNS, ServedLayer
from thunder_moe.formats.block_format import NVFP4, BlockFormat
from thunder_moe.formats.registry import dequantize_expert
from thunder_moe.formats.weight import PackedWeight
from thunder_moe.integrations.vllm.configs import ThunderModelOptMxFp8Config, ThunderModelOptNvFp4Config
from thunder_moe.integrations.vllm.experts import FIELDS
from thunder_moe.integrations.vllm.linears import ModelOptThunderLinearMethod, ModelOptThunderMxFp8LinearMethod

__all__ = ["VERSION", "Adapter", "VLLMLayer", "VLLMLinear", "VLLMLoRALayer", "one_process", "oracle"]

VERSION = vllm.__version__
_DENSE = {
    "nvfp4": ("W4A16_NVFP4", ModelOptThunderLinearMethod),
    "mxfp8": ("MXFP8", ModelOptThunderMxFp8LinearMethod),
}


@contextlib.contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """Provide vLLM's groups of processes, with this one in each, and its workspace."""
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{folder}/store", backend="gloo")
            initialize_model_parallel()
        if device.type == "cuda":
            init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


class VLLMLayer:
    """A layer of vLLM in bfloat16, with given weights."""

    def __init__(
        self, layer: ServedLayer, column: str, gate_up: PackedWeight, down: PackedWeight,
        correction: Tensor | None = None, lora: LoRAConfig | None = None,
        before: Callable[[Any], object] | None = None,
    ) -> None:  # fmt: skip
        """Builds it and lets vLLM prepare the weights for the kernels.

        Args:
            layer: the sizes and the routing.
            column: of `served.COLUMNS`.
            gate_up: (E, 2I, H) in layout "linear", gate's rows first.
            down: (E, H, I), likewise.
            correction: float32 (experts of all ranks,), where the layer has one.
            lora: vLLM's settings of adapters, None for a server without.
            before: what is done to vLLM's RoutedExperts between loading and that.

        Raises:
            ValueError, NotImplementedError: vLLM's, where the kernel cannot run the layer.
        """
        backend, quantized = COLUMNS[column]
        self.config = VllmConfig(
            kernel_config=KernelConfig(moe_backend=backend),
            parallel_config=ParallelConfig(enable_expert_parallel=layer.ranks > 1),
            lora_config=lora,
        )
        quant_config = _quant_config(gate_up.format, column == "thunder_moe") if quantized else None
        device = gate_up.device
        with set_current_vllm_config(self.config), device:
            self.runner = FusedMoEFactory(
                num_experts=layer.num_experts, top_k=layer.top_k, hidden_size=layer.hidden_size,
                intermediate_size=layer.intermediate_size, params_dtype=torch.bfloat16, tp_size=layer.ranks,
                quant_config=quant_config, prefix="model.layers.0.mlp.experts", e_score_correction_bias=correction,
                **layer.routing,
            )  # fmt: skip
            experts = self.runner.routed_experts
            if quantized:
                _fill(experts, gate_up, down)
            else:
                for name, weight in (("w13_weight", gate_up), ("w2_weight", down)):
                    getattr(experts, name).data.copy_(_in_bf16(weight))
            self.method = experts.quant_method
            if before is not None:
                before(experts)
            self.method.process_weights_after_loading(experts)
            self.method = experts.quant_method

    @property
    def kernel(self) -> str:
        """Return the class that runs the experts."""
        return type(self.method.moe_kernel.fused_experts).__name__

    def __call__(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Map (T, H) and (T, experts of all ranks) -> (T, H), the sum over this rank's experts."""
        with set_forward_context(None, self.config, num_tokens=hidden_states.shape[0]):
            out: Tensor = self.runner(hidden_states, router_logits)
        return out

    def chosen(self, hidden_states: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the router's weights (T, A) and experts of all ranks (T, A)."""
        with set_forward_context(None, self.config, num_tokens=hidden_states.shape[0]):
            weights, ids = self.runner.router.select_experts(
                hidden_states=hidden_states, router_logits=router_logits,
                topk_indices_dtype=self.method.topk_indices_dtype,
            )  # fmt: skip
        return weights, ids


class VLLMLinear:
    """A dense layer of vLLM in bfloat16, with a given weight."""

    def __init__(self, weight: PackedWeight, backend: str) -> None:
        """Builds it and lets vLLM prepare the weight for the kernel.

        Args:
            weight: (1, N, K) in layout "linear".
            backend: "thunder_moe" for the plugin's method, or vLLM's --linear-backend.

        Raises:
            ValueError: vLLM's, where it has no kernel.
        """
        _, n, k = weight.shape
        ours = backend == "thunder_moe"
        self.config = VllmConfig(kernel_config=KernelConfig(linear_backend="auto" if ours else backend))
        quant_config = _quant_config(weight.format, False)
        if ours:
            algorithm, method = _DENSE[weight.format.name]
            quant_config.get_quant_method = lambda layer, prefix: method(*resolve(algorithm, quant_config, prefix))
        with set_current_vllm_config(self.config), weight.device, set_default_torch_dtype(torch.bfloat16):
            self.layer = ReplicatedLinear(
                k, n, bias=False, params_dtype=torch.bfloat16, quant_config=quant_config, return_bias=False,
                prefix="model.layers.0.mlp.linear",
            )  # fmt: skip
            for field, tensor in zip(FIELDS[weight.format], weight.tensors(), strict=True):
                _copy(getattr(self.layer, field).data, tensor)
            self.layer.quant_method.process_weights_after_loading(self.layer)

    @property
    def kernel(self) -> str:
        """Return the class that runs it."""
        method = self.layer.quant_method
        return type(method if method.kernel is None else method.kernel).__name__

    def __call__(self, x: Tensor) -> Tensor:
        """Map (M, K) -> (M, N)."""
        with set_current_vllm_config(self.config):
            out: Tensor = self.layer(x)
        return out


class Adapter(NamedTuple):
    """An adapter of all experts, each tensor for gate, down and up, as vLLM's layer takes them.

    Attributes:
        a: bfloat16 (E, R, H), (E, R, I), (E, R, H).
        b: bfloat16 (E, I, R), (E, H, R), (E, I, R).
    """

    a: tuple[Tensor, Tensor, Tensor]
    b: tuple[Tensor, Tensor, Tensor]


class VLLMLoRALayer(VLLMLayer):
    """A layer with adapters, as `--enable-lora` wraps it."""

    def __init__(
        self, layer: ServedLayer, column: str, gate_up: PackedWeight, down: PackedWeight, adapters: Sequence[Adapter],
        tokens: int,
    ) -> None:  # fmt: skip
        """Builds the layer like `VLLMLayer`, with places for adapters.

        Args:
            layer: as there.
            column: as there.
            gate_up: as there.
            down: as there.
            adapters: what is loaded, all of one rank.
            tokens: most of a call.
        """
        self.loaded = len(adapters)
        lora = LoRAConfig(max_lora_rank=adapters[0].a[0].shape[1], max_loras=self.loaded, lora_dtype=torch.bfloat16)
        super().__init__(layer, column, gate_up, down, lora=lora)
        with set_current_vllm_config(self.config), gate_up.device:
            self.adapted = FusedMoEWithLoRA(self.runner)
            self.adapted.create_lora_weights(self.loaded, lora, None)
            for slot, adapter in enumerate(adapters):
                self.adapted.set_lora(slot, list(adapter.a), list(adapter.b))
            self.wrapper = get_punica_wrapper(tokens, max_batches=tokens, device=gate_up.device, lora_config=lora)
            self.adapted.set_mapping(self.wrapper)

    def choose(self, slots: Sequence[int]) -> None:
        """Sets the adapter of each token of the next calls, -1 for none."""
        ids = tuple(slot + 1 for slot in slots)  # vLLM's ids of adapters, 0 for none
        mapping = LoRAMapping(ids, ids, is_prefill=True)
        self.wrapper.update_metadata(mapping, list(range(1, self.loaded + 1)), self.loaded + 1, 1000)

    def __call__(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """Runs the layer like `VLLMLayer.__call__`, with the adapters of `choose`."""
        with set_forward_context(None, self.config, num_tokens=hidden_states.shape[0]):
            out: Tensor = self.adapted(hidden_states, router_logits)
        return out


def _quant_config(format: BlockFormat, ours: bool) -> Any:
    """Return the configuration of a ModelOpt checkpoint in a number format, the plugin's or vLLM's."""
    if format is NVFP4:
        kind = ThunderModelOptNvFp4Config if ours else ModelOptNvFp4Config
        return kind("W4A16_NVFP4", is_checkpoint_nvfp4_serialized=True)
    return (ThunderModelOptMxFp8Config if ours else ModelOptMxFp8Config)(True, None, [])


def _fill(experts: Any, gate_up: PackedWeight, down: PackedWeight) -> None:
    """Writes what a loader would: ModelOpt's tensors."""
    for name, weight in (("w13", gate_up), ("w2", down)):
        for field, tensor in zip(FIELDS[weight.format], weight.tensors(), strict=True):
            _copy(getattr(experts, f"{name}_{field}").data, tensor)
        if weight.format is NVFP4:
            getattr(experts, f"{name}_input_scale").data.fill_(1.0)


def _copy(into: Tensor, tensor: Tensor) -> None:
    """Copy a field of a weight into a parameter of vLLM."""
    if tensor.itemsize == 1:  # vLLM has E8M0 as bytes
        into.view(torch.uint8).copy_(tensor.view(torch.uint8).view(into.shape))
    else:
        into.copy_(tensor.reshape(-1, *[1] * (into.ndim - 1)).expand_as(into))


def _in_bf16(weight: PackedWeight) -> Tensor:
    return torch.stack([_expert(weight, expert, torch.bfloat16) for expert in range(weight.shape[0])])


def _expert(weight: PackedWeight, expert: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight (N, K) of an expert."""
    out = torch.empty(weight.shape[1:], dtype=dtype, device=weight.device)
    dequantize_expert(weight, expert, out)
    return out


def oracle(
    hidden_states: Tensor, weights: Tensor, ids: Tensor, gate_up: PackedWeight, down: PackedWeight, on_input: bool,
    adapters: Sequence[Adapter] = (), slots: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Compute in fp32, by expert and adapter: (T, H), (T, A), (T, A) of this rank's E experts or others -> (T, H).

    Args:
        hidden_states: (T, H).
        weights: (T, A).
        ids: (T, A).
        gate_up: (E, 2I, H).
        down: (E, H, I).
        on_input: whether the weights belong to the experts' input.
        adapters: S of them.
        slots: of T tokens, -1 for none; None for none of all.
    """
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    of_token = torch.tensor(slots or [-1] * len(hidden_states), device=hidden_states.device)
    for expert in range(gate_up.shape[0]):
        first, second = (_expert(weight, expert) for weight in (gate_up, down))
        for adapter in range(-1, len(adapters)):
            token, slot = ((ids == expert) & (of_token == adapter)[:, None]).nonzero(as_tuple=True)
            if not len(token):
                continue
            factor = weights[token, slot].float()[:, None]
            x = hidden_states[token].float()
            if on_input:  # vLLM multiplies in 16 bits
                x = (hidden_states[token] * factor.to(hidden_states.dtype)).float()
            parts = [first, second]
            if adapter >= 0:
                changes = [b[expert].float() @ a[expert].float() for a, b in zip(*adapters[adapter], strict=True)]
                parts = [first + torch.cat([changes[0], changes[2]]), second + changes[1]]
            gate, up = (x @ parts[0].t()).chunk(2, -1)
            y = (F.silu(gate) * up) @ parts[1].t()
            out.index_add_(0, token, y if on_input else y * factor)
    return out
