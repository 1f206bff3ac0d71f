"""Tensor-, expert- and data-parallel vLLM with the plugin: the tokens of one process.
Called by pytest, where vLLM is installed (`make test-vllm`); vLLM starts a process for each rank.
"""

import multiprocessing
import os
import socket

import pytest
from cpu_eplb import Platform
from exports import PROMPTS, engine, export, our_tokens, their_tokens

SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt_oss", "nvfp4"), ("gpt_oss", "mxfp8"))]


@pytest.mark.parametrize(("name", "format"), [("qwen3_moe", "nvfp4"), *SLOW])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, name, format, tmp_path):
    """Gate and up are cut apart by rows, down by columns; or each rank has half of the experts. Dense layers are cut by
    rows or columns, those of q, k and v one by one."""
    sizes = dict(intermediate_size=64) if format == "mxfp8" else {}  # blocks of 32 on each rank
    path = export(name, tmp_path / "export", dense=True, format=format, **sizes)
    with engine(path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel) as llm:
        assert their_tokens(llm) == our_tokens(path)


def places(worker):
    """(layers, places): the expert at each place of the ranks."""
    (state,) = worker.model_runner.eplb_state.model_states.values()
    return state.physical_to_logical_map.tolist()


@pytest.mark.slow
def test_eplb(tmp_path, monkeypatch):
    """Experts, two of them with replicas, move between the ranks at every fifth step: the same tokens."""
    monkeypatch.setattr("vllm.config.parallel.current_platform", Platform())
    path = export("qwen3_moe", tmp_path / "export")
    config = dict(window_size=5, step_interval=5, num_redundant_experts=2, use_async=False, communicator="torch_nccl")
    options = dict(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, eplb_config=config)
    seen = []
    with engine(path, worker_cls="cpu_eplb.BalancingWorker", distributed_executor_backend="mp", **options) as llm:
        for _ in range(3):
            assert their_tokens(llm) == our_tokens(path)
            one, other = llm.collective_rpc(places)
            assert one == other
            seen.append(one)
        with pytest.raises(Exception, match="reload_weights with --enable-eplb"):
            llm.collective_rpc("reload_weights")
    experts = len(seen[0][0]) - 2
    first, half = [*range(experts), 0, 1], len(seen[0][0]) // 2
    for layer in range(len(seen[0])):  # in each layer each rank got experts that it had not
        for own in (slice(half), slice(half, None)):
            assert any(set(now[layer][own]) - set(first[own]) for now in seen)


@pytest.mark.slow
def test_data_parallel(tmp_path):
    """Two engines, each with its prompts and half of the experts, which exchange tokens: two prompts on one, one on the
    other, whose ranks run empty batches for each other."""
    path = export("qwen3_moe", tmp_path / "export")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    processes = [spawn.Process(target=_data_parallel_rank, args=(rank, path, port, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    tokens = dict(answers.get(timeout=600) for _ in processes)
    for process in processes:
        process.join(120)
    assert tokens[0] + tokens[1] == our_tokens(path)


def _data_parallel_rank(rank, path, port, answers):
    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # engines with a loop of their own, which keep in step
    }
    prompts = PROMPTS[:2] if rank == 0 else PROMPTS[2:]
    with engine(path, enable_expert_parallel=True, worker_cls="cpu_exchange.ExchangingWorker") as llm:
        answers.put((rank, their_tokens(llm, prompts)))
