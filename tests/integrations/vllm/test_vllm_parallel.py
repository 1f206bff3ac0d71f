"""Tensor-, expert- and data-parallel vLLM with the plugin: the tokens of one process.
Called by pytest, where vLLM is installed (`make test-vllm`); vLLM starts a process for each rank.
"""

import multiprocessing
import os
import socket

import pytest
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
