"""The plugin's experts class with adapters, without an engine, against the oracle.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import copy
import threading
from types import SimpleNamespace

import pytest
import test_vllm_experts
import torch
import torch.nn.functional as F
from oracle import relative_error
from test_vllm_experts import E, H, I, MxFp8Layer, T, inputs, loaded, made, moe_config, run
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext

from thunder_moe.integrations.vllm import lora, methods
from thunder_moe.integrations.vllm.experts import unsupported_reason
from thunder_moe.integrations.vllm.lora import ThunderLoRAExperts

pytestmark = pytest.mark.usefixtures("groups")

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


def swiglu(gate, up):
    return F.silu(gate) * up


NO_BIASES = (0,) * E, (0,) * E


def expected(context, hidden, ids, weights, gate_up, down, slot=ADAPTERS, glu=swiglu, biases=NO_BIASES):
    """float32, token by token: dequantized weights plus dense adapters; `biases`: (E, 2I) and (E, H)."""
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
            of_rows, of_out = (bias[expert] for bias in biases)
            gate, up = (first @ hidden[token].float() + of_rows).chunk(2)
            out[token] += weight * (second @ glu(gate, up) + of_out)
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
    wanted = expected(given, *arguments, *layer.weights, glu=lambda gate, up: F.gelu(gate) * up)
    assert relative_error(run(method, layer, *arguments), wanted) < 1e-5
    method, layer = adapted(given, experts_per_token=1)
    layer.apply_router_weight_on_input = True
    hidden, ids, weights = inputs(top_k=1)
    wanted = expected(given, hidden * weights, ids, torch.ones_like(weights), *layer.weights)
    assert relative_error(run(method, layer, hidden.clone(), ids, weights), wanted) < 1e-5


def test_mxfp8():
    config = moe_config(is_lora_enabled=True)
    method = methods.mxfp8_method(test_vllm_experts.TestMxFp8.CONFIG, config)
    layer = MxFp8Layer(config, method).fill()
    method.process_weights_after_loading(layer)
    given, arguments = context(), inputs()
    method.moe_kernel.fused_experts.set_lora_context(given)
    wanted = expected(given, *arguments, *layer.weights)
    assert relative_error(run(method, layer, *arguments), wanted) < 1e-5


def clamped(gate, up):
    """GPT-OSS"""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize("fused", [True, False])
def test_biases_and_rows_in_turns(fused):
    """GPT-OSS: rows of gate and up alternate, those of the B of an adapter of both too."""
    config = moe_config(is_lora_enabled=True, activation=MoEActivation.SWIGLUOAI, has_bias=True)
    (method, layer), biases = loaded(config), (torch.randn(E, 2 * I), torch.randn(E, H))
    turns = torch.arange(2 * I).view(2, I).t().flatten()
    for name in ("w13_weight", "w13_weight_scale"):
        data = getattr(layer, name).data.view(torch.uint8)
        data.copy_(data[:, turns].clone())
    layer.w13_bias.data.copy_(biases[0][:, turns])
    layer.w2_bias.data.copy_(biases[1])
    method.process_weights_after_loading(layer)
    given = context(fused=fused)
    hidden, ids, weights = inputs()
    hidden = hidden * 4  # past the limit of the activation
    wanted = expected(given, hidden, ids, weights, *layer.weights, glu=clamped, biases=biases)
    plain = expected(given, hidden, ids, weights, *layer.weights, biases=biases)
    assert relative_error(plain, wanted) > 0.1
    if fused:
        given.w13_lora_b_stacked = (given.w13_lora_b_stacked[0][:, :, turns].contiguous(),)
    method.moe_kernel.fused_experts.set_lora_context(given)
    assert relative_error(run(method, layer, hidden, ids, weights), wanted) < 1e-5


@pytest.mark.parametrize("form", ["plain", "shared", "fused"])
def test_parts_of_adapters_on_each_rank(form, monkeypatch):
    """--fully-sharded-loras: a rank has a share of R of gate's and up's A, and of H of down's B. Two ranks, which are
    threads here, have the same adapters in other places, as vLLM's set of names puts them."""
    whole = context(shared=form == "shared", fused=form == "fused", inter=2 * I)
    ranks, parts, barrier = [], [None, None], threading.Barrier(2, timeout=60)
    for rank, places in enumerate((torch.arange(S), torch.tensor([2, 0, 1]))):
        given = copy.copy(whole)
        halves = torch.arange(2 * I if form != "fused" else 4 * I).view(-1, 2, I)[:, rank].flatten()
        given.w13_lora_a_stacked = tuple(a[places].chunk(2, 2)[rank].contiguous() for a in whole.w13_lora_a_stacked)
        given.w13_lora_b_stacked = tuple(b[places][:, :, halves].contiguous() for b in whole.w13_lora_b_stacked)
        given.w2_lora_a_stacked = tuple(a[places].chunk(2, 3)[rank].contiguous() for a in whole.w2_lora_a_stacked)
        given.w2_lora_b_stacked = tuple(b[places].chunk(2, 2)[rank].contiguous() for b in whole.w2_lora_b_stacked)
        given.fully_sharded, given.tp_size, given.tp_rank = True, 2, rank
        place_of = torch.argsort(places)
        given.punica_wrapper = SimpleNamespace(
            token_lora_indices=torch.where(ADAPTERS >= 0, place_of[ADAPTERS.clamp_min(0)], -1)
        )
        ranks.append(adapted(given))

    def exchanged(part):
        rank = int(threading.current_thread().name)
        parts[rank] = part
        barrier.wait()
        both = [*parts]
        barrier.wait()
        return both

    monkeypatch.setattr(lora, "tensor_model_parallel_all_gather", lambda part: torch.cat(exchanged(part), -1))
    monkeypatch.setattr(lora, "tensor_model_parallel_all_reduce", lambda part: sum(exchanged(part)))
    hidden, ids, weights = inputs()
    ids[4, 1] = -1
    outs = [None, None]

    def run_rank(rank):
        outs[rank] = run(*ranks[rank], hidden, ids, weights)

    threads = [threading.Thread(target=run_rank, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, second = (layer.weights for _, layer in ranks)
    gates = [torch.cat([x.chunk(2, 1)[at], y.chunk(2, 1)[at]], 1) for x, y in [(first[0], second[0])] for at in (0, 1)]
    wanted = expected(whole, hidden, ids, weights, torch.cat(gates, 1), torch.cat([first[1], second[1]], 2))
    assert relative_error(outs[0] + outs[1], wanted) < 1e-5


@pytest.mark.parametrize("what", ["data parallelism", "EPLB"])
def test_what_is_left_to_vllm(what, said):
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.enable_eplb, parallel.dp_size = what == "EPLB", 2 if what == "data parallelism" else 1
    config = moe_config(parallel, is_lora_enabled=True)
    assert unsupported_reason(moe_config(is_lora_enabled=True), ThunderLoRAExperts) is None
    assert f"LoRA with {what}" in unsupported_reason(config, ThunderLoRAExperts)
    with pytest.raises((NotImplementedError, ValueError)):
        made(config)
    assert "vLLM's own" in said[0]
