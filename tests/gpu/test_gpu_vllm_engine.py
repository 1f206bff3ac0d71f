"""vLLM's whole engine on a GPU with the plugin's experts: a checkpoint on disk, CUDA graphs, sleeping, other weights.
Called by pytest with -m gpu, where a CUDA build of vLLM can be imported; calls save_checkpoint and load_checkpoint.
"""

import gc
from importlib.util import find_spec

import pytest
import torch

from thunder_moe import load_checkpoint, quantize_, save_checkpoint, use_backend

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + 3 * j + 1) % 500 for j in range(17)] for i in range(4)]
NEW = 12
TOLERANCE = 0.1  # of log probabilities in bf16, whose top one is about 4 above the mean


def written(path, seed):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        num_hidden_layers=3, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        initializer_range=0.06, dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    return save_checkpoint(quantize_(model), path)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = tmp_path_factory.mktemp("checkpoints")
    return [written(folder / f"model{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def llm(checkpoints):
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setenv("THUNDER_MOE_VLLM", "1")
    if find_spec("flashinfer") is None:
        patch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        str(checkpoints[0]), skip_tokenizer_init=True, seed=0, dtype="bfloat16", max_model_len=128, max_num_seqs=8,
        max_num_batched_tokens=256, enable_prefix_caching=False, attention_backend="TRITON_ATTN",
        kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.1, enable_sleep_mode=sleeps(),
        compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4, 8]),
    )  # fmt: skip
    yield engine
    patch.undo()
    del engine
    gc.collect()
    cleanup_dist_env_and_memory()


def sleeps():
    return find_spec("vllm.cumem_allocator") is not None


def generated(llm):
    """Greedy tokens, and their log probabilities."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=NEW, min_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0
    )
    out = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters, use_tqdm=False)
    tokens = [list(request.outputs[0].token_ids) for request in out]
    values = [
        [position[token].logprob for token, position in zip(own, request.outputs[0].logprobs, strict=True)]
        for own, request in zip(tokens, out, strict=True)
    ]
    return tokens, values


@torch.no_grad()
def check(path, tokens, values):
    """The log probabilities are those of load_checkpoint in fp32, and the tokens its best ones."""
    model = load_checkpoint(path, dtype=torch.float32).eval()
    for prompt, new, given in zip(PROMPTS, tokens, values, strict=True):
        with use_backend("reference"):
            logits = model(torch.tensor([prompt + new]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)
        own = wanted.gather(1, torch.tensor(new)[:, None])[:, 0]
        assert (own - torch.tensor(given)).abs().max() < TOLERANCE
        assert (wanted.amax(-1) - own).max() < TOLERANCE


def experts_of(model):
    """The classes that run the model's experts."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    return {type(method.moe_kernel.fused_experts).__name__ for method in methods if hasattr(method, "moe_kernel")}


def test_tokens(llm, checkpoints):
    (names,) = llm.apply_model(experts_of)
    assert names == {"ThunderExperts"}
    check(checkpoints[0], *generated(llm))


def test_other_checkpoint_and_back(llm, checkpoints):
    first = generated(llm)
    for path in checkpoints[::-1]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        out = generated(llm)
        check(path, *out)
    assert out == first


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(llm, checkpoints, level):
    """Level 1 keeps the weights in main memory, 2 drops them: the same tokens and log probabilities afterwards."""
    if not sleeps():
        pytest.skip("this build of vLLM has no cumem_allocator")
    before = generated(llm)
    free = torch.cuda.mem_get_info()[0]
    llm.sleep(level=level)
    assert torch.cuda.mem_get_info()[0] - free > 1 << 30  # most of the cache of keys and values
    if level == 1:
        llm.wake_up()
    else:
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
    assert generated(llm) == before
