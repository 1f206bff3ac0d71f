"""vLLM's engine on a GPU with VLLM_BATCH_INVARIANT=1 and the plugin's experts and attention: a request alone and among
others. Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import PROMPTS, check, engine, experts_of, generated, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

OTHERS = 63


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_a_request_alone_and_among_others(format, tmp_path):
    """Compare tokens and the bits of their log probabilities. The engine runs in another process, because vLLM replaces
    torch's operators there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = written(tmp_path / "model", 0, format, linears=True)
    others = [[(11 * i + 5 * j + 2) % 500 for j in range(3 + i)] for i in range(OTHERS)]
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of apply_model's function
    }
    sizes = dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64])
    options = dict(max_num_seqs=OTHERS + 1, max_num_batched_tokens=4096, compilation_config=sizes)
    with engine(path, environment=environment, **options) as llm:
        (names,) = llm.apply_model(experts_of)
        assert names == {"ThunderExperts"}
        alone = [generated(llm, [prompt]) for prompt in PROMPTS]
        for index, (tokens, values) in enumerate(alone):
            prompts = [*others[: 16 * index], PROMPTS[index], *others[16 * index :]]
            among = generated(llm, prompts)
            assert (among[0][16 * index], among[1][16 * index]) == (tokens[0], values[0])
    check(path, [tokens[0] for tokens, _ in alone], [values[0] for _, values in alone])
