"""vLLM's whole engine on a GPU with GPT-OSS: experts with biases, rows of gate and up in turns, attention's sinks.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import check, engine, experts_of, generated, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp4"])
def test_tokens_and_other_checkpoint(format, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    paths = [written(tmp_path / f"model{seed}", seed, format, gpt_oss=True) for seed in range(2)]
    with engine(paths[0]) as llm:
        (names,) = llm.apply_model(experts_of)
        assert names == {"ThunderExperts"}
        check(paths[0], *generated(llm))
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[1])})
        check(paths[1], *generated(llm))
