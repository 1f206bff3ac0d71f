"""vLLM's engine on two GPUs with the plugin's experts: tensor, expert and data parallel, experts that EPLB moves.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines; vLLM starts a process per rank.
"""

import contextlib
import multiprocessing
import os
import queue
import socket
from importlib.util import find_spec

import pytest
import torch
from engines import PROMPTS, check, engine, experts_of, generated, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

# Processes of this machine, which add by NCCL alone: vLLM's own all-reduce may use NVLink's multicast.
NCCL = dict(distributed_executor_backend="mp", disable_custom_all_reduce=True)
QUIET = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return written(tmp_path_factory.mktemp("checkpoints") / "model", 0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, checkpoint):
    """Gate and up are cut apart by rows, down by columns; or each rank has half of the experts."""
    options = dict(tensor_parallel_size=2, enable_expert_parallel=expert_parallel, **NCCL)
    with engine(checkpoint, **options) as llm:
        assert llm.apply_model(experts_of) == [{"ThunderExperts"}] * 2
        check(checkpoint, *generated(llm))


def places(worker):
    """(layers, places): the expert at each place of the ranks."""
    (state,) = worker.model_runner.eplb_state.model_states.values()
    return state.physical_to_logical_map.tolist()


@pytest.mark.parametrize("by_layer", [False, True], ids=["at once", "layer by layer"])
def test_eplb(by_layer, checkpoint):
    """Experts, two of them with replicas, move between the ranks while captured graphs read them."""
    config = dict(window_size=8, step_interval=16, num_redundant_experts=2, use_async=by_layer)
    options = dict(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, eplb_config=config, **NCCL)
    seen = []
    with engine(checkpoint, **options) as llm:
        assert llm.apply_model(experts_of) == [{"ThunderExperts"}] * 2
        for _ in range(6):
            check(checkpoint, *generated(llm))
            one, other = llm.collective_rpc(places)
            assert one == other
            seen.append(one)
        with pytest.raises(Exception, match="reload_weights with --enable-eplb"):
            llm.collective_rpc("reload_weights")
    first = [*range(16), 0, 1]
    for layer in range(3):  # in each layer each rank got experts that it had not
        for own in (slice(9), slice(9, 18)):
            assert any(set(now[layer][own]) - set(first[own]) for now in seen)


def test_data_parallel(checkpoint):
    """Two engines, each with its prompts and half of the experts, which exchange tokens by all-gather and
    reduce-scatter: three prompts on one, one on the other, whose ranks run empty batches for each other."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    processes = [spawn.Process(target=_data_parallel_rank, args=(r, checkpoint, port, answers)) for r in (0, 1)]
    for process in processes:
        process.start()
    got = {}
    while len(got) < len(processes):
        with contextlib.suppress(queue.Empty):
            rank, out = answers.get(timeout=1)
            got[rank] = out
        assert all(not process.exitcode for process in processes)
    for process in processes:
        process.join(120)
    check(checkpoint, *(one + other for one, other in zip(got[0], got[1], strict=True)))


def _data_parallel_rank(rank, path, port, answers):
    os.environ |= QUIET | {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
    # Both ranks call the model at every step: one step is scheduled at a time.
    options = dict(enable_expert_parallel=True, all2all_backend="allgather_reducescatter", async_scheduling=False)
    prompts = PROMPTS[:3] if rank == 0 else PROMPTS[3:]
    with engine(path, **options) as llm:
        assert llm.apply_model(experts_of) == [{"ThunderExperts"}]
        answers.put((rank, generated(llm, prompts)))
