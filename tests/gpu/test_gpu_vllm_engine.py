"""vLLM's whole engine on a GPU with the plugin's experts: a checkpoint on disk, CUDA graphs, sleeping, other weights.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls engines.
"""

from importlib.util import find_spec

import pytest
import torch
from engines import check, engine, experts_of, generated, methods_of_attention, written

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

CACHE = 4 << 30  # of keys and values: much beside what other processes allocate on the GPU meanwhile
sleepers = []  # formats whose engine can sleep


@pytest.fixture(scope="module", params=["nvfp4", "mxfp8"])
def format(request):
    """The number format of the experts."""
    return request.param


@pytest.fixture(scope="module")
def checkpoints(format, tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("checkpoints")
    return [written(folder / f"model{seed}", seed, format, linears=True) for seed in range(2)]


@pytest.fixture(scope="module")
def llm(format, checkpoints):
    if find_spec("vllm.cumem_allocator") is not None and not sleepers:  # vLLM lets one engine of a process sleep
        sleepers.append(format)
    with engine(checkpoints[0], enable_sleep_mode=format in sleepers, kv_cache_memory_bytes=CACHE) as running:
        yield running


def test_tokens(llm, checkpoints):
    (names,) = llm.apply_model(experts_of)
    assert names == {"ThunderExperts"}
    (names,) = llm.apply_model(methods_of_attention)
    assert all("Thunder" in name for name in names) == (torch.cuda.get_device_capability() == (9, 0))
    check(checkpoints[0], *generated(llm))


def test_other_checkpoint_and_back(llm, checkpoints):
    first = generated(llm)
    for path in checkpoints[::-1]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        out = generated(llm)
        check(path, *out)
    assert out == first


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(llm, format, level):
    """Level 1 keeps the weights in main memory, 2 drops them: the same tokens and log probabilities afterwards."""
    if format not in sleepers:
        pytest.skip("this build of vLLM has no cumem_allocator, or another engine of this process has it: use -k")
    before = generated(llm)
    free = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    assert torch.cuda.mem_get_info()[0] - free > CACHE // 2
    if level == 1:
        llm.wake_up()
    else:
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    assert generated(llm) == before
