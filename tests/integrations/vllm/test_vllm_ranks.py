"""Two ranks with half of the experts each and no engine: vLLM's exchange of tokens between data-parallel ranks, and the
experts that its EPLB moves between them, which its engine does on GPUs alone.
Called by pytest, where vLLM is installed (`make test-vllm`); starts a process for each rank.
"""

import torch
import torch.multiprocessing as mp
from cpu_exchange import add_exchange
from oracle import moe_experts, relative_error
from test_vllm_experts import A, E, H, loaded, moe_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_ep_group, init_distributed_environment, initialize_model_parallel
from vllm.distributed.eplb.eplb_communicator import create_eplb_communicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

RANKS = 2
PHYSICAL = E + 2  # two experts have a replica
BEFORE = [*range(E), 0, 1]  # the expert at each place, vLLM's first order
AFTER = [5, 3, 5, 1, 0, 2, 7, 4, 6, 2]
TOKENS = [5, 0]  # of each rank


def test_two_ranks(tmp_path):
    mp.spawn(_rank, (str(tmp_path / "store"),), nprocs=RANKS)


def _rank(rank, store):
    config = VllmConfig()
    parallel = config.parallel_config
    parallel.data_parallel_size, parallel.data_parallel_rank = RANKS, rank
    parallel.enable_expert_parallel, parallel.distributed_executor_backend = True, "external_launcher"
    with set_current_vllm_config(config):
        init_distributed_environment(RANKS, rank, f"file://{store}", backend="gloo")
        initialize_model_parallel(backend="gloo")
        _check(rank, config)


def _bits(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _check(rank, config):
    torch.manual_seed(0)
    add_exchange()
    own = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=RANKS, dp_rank=rank, ep_size=RANKS, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=True,
    )  # fmt: skip
    local = PHYSICAL // RANKS
    changes = dict(num_experts=PHYSICAL, num_local_experts=local, num_logical_experts=E)
    _, every = loaded()  # the experts of all ranks
    method, layer = loaded(moe_config(own, **changes), local)
    places = BEFORE[rank * local : (rank + 1) * local]
    for name, parameter in layer.named_parameters():
        if "input_scale" not in name:
            _bits(parameter.data).copy_(_bits(getattr(every, name).data)[places])
    method.process_weights_after_loading(layer)
    layer.local_num_experts = local
    layer.expert_map = torch.full((PHYSICAL,), -1, dtype=torch.int32)
    layer.expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)

    hidden, weights = torch.randn(sum(TOKENS), H), torch.rand(sum(TOKENS), A)
    ids = torch.stack([torch.randperm(E)[:A] for _ in range(sum(TOKENS))])
    expected = moe_experts(hidden, ids, weights, *every.weights)
    mine = slice(sum(TOKENS[:rank]), sum(TOKENS[: rank + 1]))

    def run(order):
        at = torch.tensor([order.index(expert) for expert in range(E)])[ids[mine]].int()
        across = torch.tensor(TOKENS, dtype=torch.int32)
        with set_forward_context(None, config, TOKENS[rank], across):
            with get_forward_context().dp_metadata.sp_local_sizes(1):
                return method.apply(layer, hidden[mine], weights[mine], at, None, None)

    before = run(BEFORE)
    assert before.shape == (TOKENS[rank], H)
    assert TOKENS[rank] == 0 or relative_error(before, expected[mine]) < 1e-5

    tensors = list(RoutedExperts.get_expert_weights(layer))
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    group = get_ep_group()
    rearrange_expert_weights_inplace(
        torch.tensor([BEFORE]), torch.tensor([AFTER]), [tensors], buffers, group.cpu_group,
        create_eplb_communicator(group, "torch_nccl", [tensors], buffers),
    )  # fmt: skip
    after = run(AFTER)
    assert TOKENS[rank] == 0 or torch.equal(after, before)  # in another order of experts, the same sums
    stale = run(BEFORE)
    assert TOKENS[rank] == 0 or relative_error(stale, expected[mine]) > 0.1
