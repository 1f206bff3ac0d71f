"""Tensor- and expert-parallel vLLM with the plugin: the tokens of one process.
Called by pytest, where vLLM is installed (`make test-vllm`); vLLM starts a process for each rank.
"""

import pytest
from exports import engine, export, our_tokens, their_tokens


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "tp2+ep2"])
def test_two_ranks(expert_parallel, tmp_path):
    """Gate and up are cut apart by rows, down by columns; or each rank has half of the experts."""
    path = export("qwen3_moe", tmp_path / "export")
    with engine(path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel) as llm:
        assert their_tokens(llm) == our_tokens(path)
