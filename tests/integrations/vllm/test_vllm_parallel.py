"""Tensor- and expert-parallel vLLM with the plugin: the tokens of one process.
Called by pytest, where vLLM is installed (`make test-vllm`); vLLM starts a process for each rank.
"""

import pytest
from exports import engine, export, our_tokens, their_tokens

GPT_OSS = pytest.param("gpt_oss", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["qwen3_moe", GPT_OSS])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, name, tmp_path):
    """Gate and up are cut apart by rows, down by columns; or each rank has half of the experts. Dense layers are cut by
    rows or columns, those of q, k and v one by one."""
    path = export(name, tmp_path / "export", dense=True)
    with engine(path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel) as llm:
        assert their_tokens(llm) == our_tokens(path)
