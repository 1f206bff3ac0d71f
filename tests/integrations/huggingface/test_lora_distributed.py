"""Adapters of 4-bit experts and dense layers in two processes, DDP and FSDP2: a step equal to that of one process.
Called by pytest; the processes are those of the fixture `ranks`.
"""

import pytest
import torch
from tiny_models import VOCABULARY, tiny_model

from thunder_moe import add_lora_, quantize_
from thunder_moe.finetune.lora import lora_linears, lora_parameters

STEPS = 2


def model():
    torch.manual_seed(0)
    model = quantize_(
        tiny_model("qwen3_moe"), linears=lambda module, name: name.endswith(("q_proj", "v_proj", "o_proj"))
    )
    add_lora_(model, 4, 8, linears=True)
    for linear in lora_linears(model).values():
        for b in linear.lora_B.values():
            torch.nn.init.normal_(b, std=0.1)
    return model


def batch():
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(1))


def step(run, parameters, ids, clip):
    """Two steps; the gradient's norm of each."""
    optimizer, norms = torch.optim.SGD(parameters, lr=0.5), []
    for _ in range(STEPS):
        run(ids, labels=ids).loss.backward()
        norms.append(float(clip(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clip(parameters, limit):
    return full(torch.nn.utils.clip_grad_norm_(parameters, limit))


def alone():
    one = model()
    norms = step(one, list(lora_parameters(one)), batch(), clip)
    return norms, {name: p.detach() for name, p in one.named_parameters() if "lora_" in name}


def by_ddp(rank):
    own = model()
    run = torch.nn.parallel.DistributedDataParallel(own, broadcast_buffers=False, init_sync=False)
    norms = step(run, list(lora_parameters(own)), batch()[2 * rank :][:2], clip)
    return norms, {name: p.detach() for name, p in own.named_parameters() if "lora_" in name}


def by_fsdp(rank, units):
    from torch.distributed.fsdp import fully_shard

    own = model()
    frozen = {name: buffer.clone() for name, buffer in own.named_buffers()}
    for layer in own.model.layers:
        for name in units:
            fully_shard(layer.get_submodule(name))
        fully_shard(layer)
    fully_shard(own)
    norms = step(own, list(lora_parameters(own)), batch()[2 * rank :][:2], clip)
    for name, buffer in own.named_buffers():
        assert torch.equal(buffer.flatten().view(torch.uint8), frozen[name].flatten().view(torch.uint8)), name
    local = sum(p.to_local().numel() for p in lora_parameters(own))
    return norms, {name: full(p.detach()) for name, p in own.named_parameters() if "lora_" in name}, local


def check(results, tolerance=1e-5):
    norms, wanted = alone()
    before = {name: p.detach() for name, p in model().named_parameters() if "lora_" in name}
    assert any(not torch.equal(before[name], p) for name, p in wanted.items())
    for found in results:
        assert found[0] == pytest.approx(norms, rel=1e-4)
        for name, p in wanted.items():
            torch.testing.assert_close(found[1][name], p, rtol=1e-4, atol=1e-6)


def _ddp():
    import torch.distributed as dist

    return by_ddp(dist.get_rank())


def _fsdp(units):
    import torch.distributed as dist

    return by_fsdp(dist.get_rank(), units)


def test_ddp(ranks):
    check(ranks(2)(_ddp))


@pytest.mark.parametrize(
    "units", [pytest.param((), marks=pytest.mark.exhaustive), ("mlp.experts", "self_attn.q_proj", "self_attn.o_proj")]
)
def test_fully_shard(units, ranks):
    results = ranks(2)(_fsdp, units)
    check(results)
    assert results[0][2] + results[1][2] == sum(p.numel() for p in lora_parameters(model()))


def test_a_projection_of_experts_by_itself_is_refused(ranks):
    with pytest.raises(AssertionError, match="a projection is a FSDPNVFP4LoRAGroupedLinear .*wrap the experts module"):
        ranks(2)(_fsdp, ("mlp.experts.gate_up_proj",))
