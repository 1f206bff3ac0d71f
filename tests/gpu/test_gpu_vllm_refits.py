"""vLLM's engine on a GPU with `quantization="thunder_moe"`: 16-bit weights are quantized while it loads, and again when
other weights arrive, into memory that captured graphs read.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import check, engine, experts_of, generated, in_16_bits, written
from safetensors.torch import load_file

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu


def places(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_16_bit_weights_give_the_numbers_of_a_quantized_checkpoint(tmp_path):
    """From a path and from tensors of a trainer on the GPU: the log probabilities of an engine of quantize_'s bytes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sources = [in_16_bits(tmp_path / f"source{seed}", seed) for seed in range(2)]
    quantized = [written(tmp_path / f"model{seed}", seed) for seed in range(2)]
    wanted = []
    with engine(quantized[0]) as llm:
        for path in quantized:
            llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(path)))
            wanted.append(generated(llm))
    check(quantized[1], *wanted[1])
    assert wanted[0] != wanted[1]

    with engine(sources[0], quantization="thunder_moe") as llm:
        (names,) = llm.apply_model(experts_of)
        assert names == {"ThunderExperts"}
        before = llm.apply_model(places)
        assert generated(llm) == wanted[0]
        trained = {name: tensor.cuda() for name, tensor in load_file(sources[1] / "model.safetensors").items()}
        for given in (dict(weights_iterator=iter(trained.items())), dict(weights_path=str(sources[1]))):
            llm.collective_rpc("reload_weights", kwargs=given)
            assert generated(llm) == wanted[1]
            assert llm.apply_model(places) == before
            llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(sources[0])))
            assert generated(llm) == wanted[0]
