"""vLLM's engine on a GPU as `vllm serve` starts it: the model compiled by vLLM, piecewise and full CUDA graphs.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import check, engine, experts_of, generated, methods_of_attention, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu


COMPILED = dict(compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8]))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_compiled(format, tmp_path, monkeypatch):
    """Experts and attention in the format; then attention by vLLM's kernels, which finds no graph of before."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    paths = [written(tmp_path / f"model{seed}", seed, format, linears=True) for seed in range(2)]
    with engine(paths[0], **COMPILED) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        assert config.mode.name == "VLLM_COMPILE"
        assert config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
        assert llm.apply_model(experts_of) == [{"ThunderExperts"}]
        (names,) = llm.apply_model(methods_of_attention)
        assert all("Thunder" in name for name in names) == (torch.cuda.get_device_capability() == (9, 0))
        first = generated(llm)
        check(paths[0], *first)
        assert generated(llm) == first
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(paths[1])})
        check(paths[1], *generated(llm))
    from thunder_moe.integrations.vllm import linears

    monkeypatch.setattr(linears, "dense_unsupported_reason", lambda format=None: "of a test")
    with engine(paths[0], **COMPILED) as llm:
        (names,) = llm.apply_model(methods_of_attention)
        assert not any("Thunder" in name for name in names)
        check(paths[0], *generated(llm))
