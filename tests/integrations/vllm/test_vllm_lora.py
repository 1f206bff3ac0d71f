"""The plugin's experts class with adapters, without an engine, against the oracle.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from test_vllm_experts import E, H, I, T, inputs, made, moe_config, run
from test_vllm_experts import _groups as _groups
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

from thunder_moe.integrations.vllm import methods
from thunder_moe.integrations.vllm.lora import ThunderLoRAExperts, why_no_adapters

S, R = 3, 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
ADAPTERS = torch.tensor([0, -1, 2, 0, 1])


def factors(*shape):
    return 2 * torch.randn(shape) / shape[-1] ** 0.5


def context(dtype=torch.float32, shared=False, fused=False, experts=E, slot=ADAPTERS, on_cuda=False, inter=I):
    """What FusedMoEWithLoRA gives the experts, with random adapters; `fused`: FusedMoE3DWithLoRA."""
    slices, of_a, of_b = (1, 1, experts) if fused else (2, 1 if shared else experts, 1 if shared else experts)
    of_a = experts if fused else of_a
    wrapper = SimpleNamespace(token_lora_indices=slot)
    if on_cuda:  # has room for more tokens, and a flag on the host for batches without any adapter
        mapping = torch.cat([slot.int(), torch.full((7,), 1, dtype=torch.int32)])
        wrapper = SimpleNamespace(
            token_mapping_meta=SimpleNamespace(token_lora_mapping=mapping, no_lora_flag_cpu=torch.tensor([False]))
        )
    return MoELoRAContext(
        w13_lora_a_stacked=tuple(factors(S, of_a, R, H).to(dtype) for _ in range(slices)),
        w13_lora_b_stacked=tuple(factors(S, experts, inter * 2 // slices, R).to(dtype) for _ in range(slices)),
        w2_lora_a_stacked=(factors(S, experts, R, inter).to(dtype),),
        w2_lora_b_stacked=(factors(S, of_b, H, R).to(dtype),),
        adapter_enabled=torch.ones(S + 1, dtype=torch.int32),
        max_loras=S, top_k=2, w13_num_slices=slices, fully_sharded=False, tp_rank=0, tp_size=1,
        local_num_experts=experts, punica_wrapper=wrapper, use_tuned_config=False, enable_moe_shared_loras=shared,
    )  # fmt: skip


def expected(context, hidden, ids, weights, gate_up, down, slot=ADAPTERS, activation=F.silu):
    """float32, token by token: dequantized weights plus dense adapters."""
    a, b, c, d = ([each.float() for each in stacked] for stacked in (
        context.w13_lora_a_stacked, context.w13_lora_b_stacked, context.w2_lora_a_stacked, context.w2_lora_b_stacked
    ))  # fmt: skip
    out = torch.zeros(hidden.shape[0], H)
    for token in range(hidden.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert < 0:
                continue
            first, second, at = gate_up[expert].clone(), down[expert].clone(), int(slot[token])
            if at >= 0:
                first += torch.cat([y[at, expert] @ x[at, expert % x.shape[1]] for x, y in zip(a, b, strict=True)])
                second += d[0][at, expert % d[0].shape[1]] @ c[0][at, expert]
            gate, up = (first @ hidden[token].float()).chunk(2)
            out[token] += weight * (second @ (activation(gate) * up))
    return out


def adapted(context, config=None, **options):
    method, layer = made(config or moe_config(is_lora_enabled=True, **options))
    experts = method.moe_kernel.fused_experts
    assert type(experts) is ThunderLoRAExperts
    assert method.moe_kernel.supports_lora()
    experts.set_lora_context(context)
    return method, layer


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("form", ["plain", "shared", "fused"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts(dtype, form, on_cuda):
    given = context(dtype, form == "shared", form == "fused", on_cuda=on_cuda)
    method, layer = adapted(given, in_dtype=dtype)
    hidden, ids, weights = inputs(dtype)
    out = run(method, layer, hidden, ids, weights)
    assert out.dtype == dtype
    wanted = expected(given, hidden, ids, weights, *layer.weights)
    assert relative_error(out, wanted) < TOLERANCE[dtype]
    without = expected(given, hidden, ids, weights, *layer.weights, slot=torch.full((T,), -1))
    assert relative_error(wanted[1], without[1]) == 0  # the token without an adapter
    assert relative_error(wanted, without) > 0.3


@pytest.mark.parametrize("on_cuda", [False, True])
def test_batch_without_adapters_is_that_of_the_plain_class(on_cuda):
    given = context(slot=torch.full((T,), -1), on_cuda=on_cuda)
    method, layer = adapted(given)
    if on_cuda:  # vLLM leaves the mapping of the batch before
        given.punica_wrapper.token_mapping_meta.token_lora_mapping[:] = 0
        given.punica_wrapper.token_mapping_meta.no_lora_flag_cpu[0] = True
    arguments = inputs()
    out = run(method, layer, *arguments)
    method.moe_kernel.fused_experts._lora_context = None
    assert torch.equal(out, run(method, layer, *arguments))


def test_padding_of_a_graph_may_have_any_adapter():
    """Tokens behind those of the batch, in memory that nobody has set; -1 as an expert likewise."""
    given = context(slot=torch.tensor([0, 1, 2, -7, 12345]), on_cuda=True)
    method, layer = adapted(given)
    hidden, ids, weights = inputs()
    ids[0, 1] = ids[2, 0] = -1
    wanted = expected(given, hidden, ids, weights, *layer.weights, slot=torch.tensor([0, 1, 2, -1, -1]))
    assert relative_error(run(method, layer, hidden, ids, weights), wanted) < 1e-5


def test_expert_map():
    """A rank with the last half of the experts has the adapters of these."""
    given = context(experts=E // 2)
    config = moe_config(is_lora_enabled=True, num_local_experts=E // 2)
    method, layer = made(config, E // 2)
    method.moe_kernel.fused_experts.set_lora_context(given)
    layer.expert_map = torch.full((E,), -1, dtype=torch.int32)
    layer.expert_map[E // 2 :] = torch.arange(E // 2, dtype=torch.int32)
    hidden, ids, weights = inputs()
    own = torch.where(ids >= E // 2, ids - E // 2, -1)
    wanted = expected(given, hidden, own, weights, *layer.weights)
    assert relative_error(run(method, layer, hidden, ids, weights), wanted) < 1e-5


def test_gelu_and_weights_on_the_input():
    given = context()
    method, layer = adapted(given, activation=MoEActivation.GELU)
    arguments = inputs()
    wanted = expected(given, *arguments, *layer.weights, activation=F.gelu)
    assert relative_error(run(method, layer, *arguments), wanted) < 1e-5
    method, layer = adapted(given, experts_per_token=1)
    layer.apply_router_weight_on_input = True
    hidden, ids, weights = inputs(top_k=1)
    wanted = expected(given, hidden * weights, ids, torch.ones_like(weights), *layer.weights)
    assert relative_error(run(method, layer, hidden.clone(), ids, weights), wanted) < 1e-5


def test_parts_of_adapters_on_each_rank_are_refused():
    given = context()
    given.fully_sharded, given.tp_size = True, 2
    with pytest.raises(ValueError, match="--fully-sharded-loras: got True with 2 ranks"):
        adapted(given)


@pytest.mark.parametrize("what", ["data parallelism", "EPLB", "biases of experts"])
def test_what_is_left_to_vllm(what, monkeypatch):
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb, parallel.dp_size = what == "EPLB", 2 if what == "data parallelism" else 1
    config = moe_config(parallel, is_lora_enabled=True, has_bias=what == "biases of experts")
    assert why_no_adapters(moe_config(is_lora_enabled=True)) is None
    assert f"LoRA with {what}" in why_no_adapters(config)
    said = []
    monkeypatch.setattr(methods.logger, "warning_once", lambda *args: said.append(args[0] % args[1:]))
    with pytest.raises((NotImplementedError, ValueError)):
        made(config)
    assert "vLLM's own" in said[0]
