"""vLLM's engine on a GPU as `vllm serve` starts it: the model compiled by vLLM, piecewise and full CUDA graphs.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import check, engine, experts_of, generated, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_compiled(format, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = written(tmp_path / "model", 0, format)
    with engine(path, compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8])) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        assert config.mode.name == "VLLM_COMPILE"
        assert config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
        assert llm.apply_model(experts_of) == [{"ThunderExperts"}]
        first = generated(llm)
        check(path, *first)
        assert generated(llm) == first
