"""`ThunderExperts`: the experts step of vLLM's modular kernels on our operators; `unsupported_reason`: its limits.
Called by methods and vLLM's FusedMoEKernel, between its dispatch and combine; calls ops.

Legend: T tokens, A = top_k, M = T * A rows, E experts of this rank, H hidden_size, I intermediate_size of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp8Static, kNvfp4Static
from vllm.platforms import current_platform

from thunder_moe.activations import SwiGLUConfig
from thunder_moe.formats.block_format import MXFP8, NVFP4, BlockFormat
from thunder_moe.formats.weight import WEIGHTS, PackedWeight
from thunder_moe.integrations.vllm.expert_map import local_ids
from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.experts import ExpertsCall
from thunder_moe.kernels.select import runs_on_cuda, select
from thunder_moe.ops import activation as _activation  # noqa: F401  (registers the operator)
from thunder_moe.ops import grouped_linear  # noqa: F401  (registers grouped_bias)
from thunder_moe.ops.checks import ACTIVATION_DTYPES
from thunder_moe.ops.experts import moe_experts
from thunder_moe.ops.grouped_mm import operands
from thunder_moe.ops.operator import op_name_for
from thunder_moe.routing import gather_rows

# The names of vLLM's parameters behind "w13_" and "w2_", in the order of `BlockFormat.fields`.
FIELDS = {NVFP4: ("weight", "weight_scale", "weight_scale_2"), MXFP8: ("weight", "weight_scale")}
_KEYS = {NVFP4: kNvfp4Static, MXFP8: kMxfp8Static}
# Computed inside of the first GEMM. SWIGLUOAI is for rows of gate and up that alternate in the checkpoint; the methods
# sort them.
FUSED_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)
_OF_VLLM = (MoEActivation.GELU, MoEActivation.GELU_TANH)  # vLLM's own kernels between the GEMMs
_UNGATED = (MoEActivation.RELU2_NO_MUL,)  # of experts without a gate (Nemotron-H): a kernel of ours between the GEMMs
_SEPARATE_ACTIVATIONS = (*_OF_VLLM, *_UNGATED)
SWIGLUOAI_FORM = SwiGLUConfig(alpha=1.702, limit=7.0, up_shift=1.0)  # vLLM's own kernels compute this for every config
# From 10.0 on vLLM has kernels with 4-bit activations; those GPUs have tensor cores for them.
_CAPABILITIES = ((8, 0), (10, 0))


def unsupported_reason(moe_config: FusedMoEConfig, experts: Any = None, format: BlockFormat = NVFP4) -> str | None:
    """Return why `ThunderExperts`, or a subclass, does not run the experts of a layer; None if it runs them.

    Reasons are devices other than CPUs and CUDA of compute capability 8.0 to 9.0, activations and dtypes without a
    kernel, sizes that are not whole blocks of scales on each rank, LoRA with data parallelism, EPLB or batch
    invariance, padding, untested exchanges of tokens, elastic expert parallelism, and a moe_backend that the user has
    named.
    """
    experts = experts or ThunderExperts
    parallel = moe_config.moe_parallel_config
    if moe_config.moe_backend != "auto":
        return f"--moe-backend {moe_config.moe_backend} was asked for"
    ok, reason = experts.is_supported_config(experts, moe_config, _KEYS[format], None, experts.activation_format())
    if not ok:
        return str(reason)
    if moe_config.in_dtype not in ACTIVATION_DTYPES or (
        current_platform.is_cuda() and moe_config.in_dtype.itemsize > 2
    ):
        return f"activations are {moe_config.in_dtype}"
    for name, size in (
        ("hidden_size", moe_config.hidden_dim),
        ("intermediate_size", moe_config.intermediate_size_per_partition),
    ):
        if size % format.block_size:
            return f"{name} on a rank is {size}, which is not a multiple of {format.block_size}"
    padded = moe_config.hidden_dim_unpadded != moe_config.hidden_dim or moe_config.tp_shard_with_padding
    if padded or moe_config.intermediate_size_per_partition_unpadded != moe_config.intermediate_size_per_partition:
        return "sizes are padded"
    if moe_config.activation in _SEPARATE_ACTIVATIONS and moe_config.has_bias:
        return f"{moe_config.activation} with biases"
    if moe_config.activation in _SEPARATE_ACTIVATIONS and moe_config.swiglu_limit is not None:
        return f"{moe_config.activation} with swiglu_limit {moe_config.swiglu_limit}"
    config = get_current_vllm_config_or_none()
    if config is not None and config.parallel_config.enable_elastic_ep:
        return "--enable-elastic-ep makes experts anew, from other classes' arguments"
    tested = parallel.use_ag_rs_all2all_kernels or parallel.use_batched_activation_format
    if parallel.use_passthrough_all2all or (parallel.use_all2all_kernels and not tested):
        return f"--all2all-backend {parallel.all2all_backend} is untested"
    if current_platform.is_cuda() and not runs_on_cuda(torch.device("cuda"), format.name):
        return "the CUDA kernels cannot be compiled, see kernels.cuda.nvrtc"
    if moe_config.is_lora_enabled and parallel.dp_size > 1:
        # prepare_tensors of vLLM's LoRAKernelMeta returns early, and the exchange of tokens sends stale adapters.
        return "LoRA with data parallelism: ranks without adapters in a batch send the others an older batch's adapters"
    if moe_config.is_lora_enabled and parallel.enable_eplb:
        return "LoRA with EPLB: experts would move, and their adapters would not"
    return None


class ThunderExperts(mk.FusedMoEExpertsModular):  # type: ignore[misc]
    """The experts of packed weights and 16-bit rows: route -> gate_up GEMM, activation -> down GEMM, weighted sum."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        if current_platform.is_cuda():
            capability = current_platform.get_device_capability()
            return capability is not None and _CAPABILITIES[0] <= tuple(capability) < _CAPABILITIES[1]
        return bool(current_platform.is_cpu())

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key in _KEYS.values() and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (*FUSED_ACTIVATIONS, *_SEPARATE_ACTIVATIONS)

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True  # by `make_batch_invariant` of plugin.py

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_batched_activation_format

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Return no workspaces but the output (T, H).

        The operators allocate their memory, while a CUDA graph is captured from the graph's pool."""
        return (0,), (0,), (M, K)

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Return (E, T, 2I, H, A)."""
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[-1], topk_ids.shape[1]

    def take_weights(self, layer: Any, layouts: dict[str, str], format: BlockFormat) -> None:
        """Use the parameters of vLLM's RoutedExperts as weights.

        They are looked up at each call, because offloading and reloading replace their memory, and EPLB the experts.

        Args:
            layer: with w13_ and w2_ weight, weight_scale and, in NVFP4, weight_scale_2; gate's rows first, then up's.
            layouts: of "w13" and "w2".
            format: of both.
        """
        self._format, self._fields, self._kind = format, FIELDS[format], WEIGHTS[format.name]
        self._layer, self._layouts = layer, layouts
        self._made: dict[str, tuple[tuple[int, ...], PackedWeight]] = {}

    @property
    def gate_up(self) -> PackedWeight:
        """Return the weight (E, 2I, H), gate's rows first."""
        return self._weight("w13")

    @property
    def down(self) -> PackedWeight:
        """Return the weight (E, H, I)."""
        return self._weight("w2")

    @property
    def biases(self) -> dict[str, Any]:
        """Return gate_up_bias (E, 2I) and down_bias (E, H); empty for models without biases."""
        if not self.moe_config.has_bias:
            return {}
        return {"gate_up_bias": self._layer.w13_bias.data, "down_bias": self._layer.w2_bias.data}

    def _weight(self, name: str) -> PackedWeight:
        tensors = [getattr(self._layer, f"{name}_{field}").data for field in self._fields]
        layout, kind = self._layouts[name], self._kind
        tensors[1] = tensors[1].view(self._format.scale_dtype)  # vLLM has E8M0 as bytes
        if torch.compiler.is_compiling():
            return kind.unchecked(*tensors, layout)
        places = tuple(tensor.data_ptr() for tensor in tensors)
        known = self._made.get(name)
        if known is None or known[0] != places:
            known = self._made[name] = places, kind(*tensors, layout)
        return known[1]

    def apply(
        self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        activation: MoEActivation, global_num_experts: int, expert_map: Tensor | None, a1q_scale: Tensor | None,
        a2_scale: Tensor | None, workspace13: Tensor, workspace2: Tensor, expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Writes the weighted sum (T, H) of the experts of this rank into `output`.

        The parameters are vLLM's. Activations stay in 16 bits, so their scales are not read; neither are w2, the
        workspaces and the counts of tokens.

        Args:
            hidden_states: (T, H); with apply_router_weight_on_input, as in Llama 4, multiplied by the weights already.
            w1: only its shape is used; `take_weights` has the weights.
            topk_ids: (T, A), physical experts of all ranks, or -1 for none.
            expert_map: (experts of all ranks,) -> experts of this rank, -1 for experts of others; None for one rank.
        """
        ids = local_ids(topk_ids, expert_map)
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        ranks = 1 if expert_map is None else round(global_num_experts / w1.shape[0])
        self._run_into(output, hidden_states, ids, weights, activation, ranks)

    def _run_into(
        self, output: Tensor, hidden_states: Tensor, ids: Tensor, weights: Tensor, activation: MoEActivation, ranks: int
    ) -> None:
        """Writes what `run` returns into `output`; `ranks` is the number of ranks that share all experts."""
        # is_cuda comes first: on a CPU vLLM compiles this, and `select` cannot be traced.
        if (
            hidden_states.is_cuda
            and activation in FUSED_ACTIVATIONS
            and select(hidden_states.device, format=self._format.name) is cuda
        ):
            form = self._swiglu_config(activation)
            call = ExpertsCall(
                hidden_states, ids, weights, self.gate_up, self.down, **self.biases, form=form, expert_ranks=ranks
            )
            cuda.moe_experts(call, out=output)
        else:
            output.copy_(self.run(hidden_states, ids, weights, activation))

    def run(self, hidden_states: Tensor, ids: Tensor, weights: Tensor, activation: MoEActivation) -> Tensor:
        """Return the weighted sums of the experts of this rank, (T, H) -> (T, H); ids are int32 (T, A), or -1."""
        if activation not in FUSED_ACTIVATIONS:
            return self._run_by_steps(hidden_states, ids, weights, activation)
        options: dict[str, Any] = self._swiglu_options(activation) | self.biases
        return moe_experts(hidden_states, ids, weights, self.gate_up, self.down, **options)

    def _run_by_steps(
        self, hidden_states: Tensor, ids: Tensor, weights: Tensor, activation: MoEActivation,
        adapters: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the weighted sums like `run`, with an operator for each step.

        `adapters` makes an object with `add_to_rows` and `add_to_tokens` from row_slot (M,) and slot_row (T, A)."""
        ops, first, second, biases = torch.ops.thunder_moe, self.gate_up, self.down, self.biases
        row_slot, offsets, slot_row = ops.moe_route(ids, first.shape[0])
        added = None if adapters is None else adapters(row_slot, slot_row)
        rows = gather_rows(hidden_states, row_slot)  # [M, H]
        gate_up = _multiply("f16a_nvfp4weight_scaled_grouped_mm", rows, first, offsets)  # [M, 2I], or [M, I]
        del rows
        if biases:
            gate_up = ops.grouped_bias(gate_up, offsets, biases["gate_up_bias"])
        if added is not None:
            added.add_to_rows(gate_up, hidden_states)
        if activation in FUSED_ACTIVATIONS:
            gated = ops.scaled_activation(gate_up, None, offsets, **self._swiglu_options(activation))  # [M, I]
        elif activation in _UNGATED:
            gated = ops.scaled_activation(gate_up, None, offsets, kind="srelu")
        else:
            gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
            self.activation(activation, gated, gate_up)  # vLLM's
        del gate_up
        more = slot_row, weights, biases.get("down_bias")
        out = _multiply("f16a_nvfp4weight_grouped_mm_combine", gated, second, offsets, *more)
        if added is not None:
            added.add_to_tokens(out, gated)
        return out

    def _swiglu_options(self, activation: MoEActivation) -> dict[str, Any]:
        form = self._swiglu_config(activation)
        return dict(alpha=form.alpha, limit=form.limit, up_shift=form.up_shift)

    def _swiglu_config(self, activation: MoEActivation) -> SwiGLUConfig:
        """Return the activation for our kernels, with the clamp of the model's config."""
        config = self.activation_config
        if activation == MoEActivation.SILU:
            return SwiGLUConfig(limit=config.clamp_limit)
        if activation == MoEActivation.SWIGLUOAI:
            return SWIGLUOAI_FORM
        if config.clamp_limit is None:
            raise ValueError(f"swiglu_limit: got None for activation {activation.value!r}, wanted a number")
        return SwiGLUConfig(config.alpha, config.clamp_limit, config.beta)


def _multiply(name: str, rows: Tensor, weight: PackedWeight, offsets: Tensor, *more: Any) -> Tensor:
    """Run an operator on rows (M, K): the one of this NVFP4 name, or its counterpart for the weight's number format."""
    operator = getattr(torch.ops.thunder_moe, op_name_for(name, weight.format))
    return operator(rows, *operands(weight), offsets, *more, layout=weight.layout)
