"""Adapters in engines of vLLM: files of this package, equal tokens; two adapters and none in a batch, several ranks.
Called by pytest, where vLLM is installed (`make test-vllm`).
"""

import json

import pytest
import torch
from exports import NEW_TOKENS, PROMPTS, engine, export, generated, our_tokens
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from thunder_moe import add_lora_, load_checkpoint
from thunder_moe.finetune.lora import lora_linears
from thunder_moe.integrations.huggingface.lora_files import save_lora

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def trained(path, folder, *, seed, rank, per_expert=True, attention=False, **options):
    """A model of a checkpoint with adapters after steps of training, which it has written; dense ones, if any, are
    in the file and, as whole weights, in the model."""
    torch.manual_seed(seed)
    model = add_lora_(load_checkpoint(path), rank, 4 * rank, **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ids = torch.randint(64, (4, 12))
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool(b.count_nonzero()) for linear in lora_linears(model).values() for b in linear.lora_B.values())
    save_lora(model, folder, per_expert=per_expert)
    if attention:
        _adapt_attention(model, folder, rank)
    return model


@torch.no_grad()
def _adapt_attention(model, folder, rank):
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, module in model.named_modules():
        if name.endswith(ATTENTION):
            a, b = torch.randn(rank, module.in_features) / 8, torch.randn(module.out_features, rank) / 8
            tensors |= {f"base_model.model.{name}.lora_{each}.weight": t for each, t in (("A", a), ("B", b))}
            module.weight += 4 * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] += ATTENTION
    (folder / "adapter_config.json").write_text(json.dumps(config))


def answers(llm, requests):
    """Tokens of each prompt with each of the requests, all of them in one batch."""
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS for _ in requests]
    found = llm.generate(prompts, parameters, use_tqdm=False, lora_request=requests * len(PROMPTS))
    tokens = [list(request.outputs[0].token_ids) for request in found]
    return [tokens[at :: len(requests)] for at in range(len(requests))]


def check(path, tmp_path, forms, **options):
    """Two adapters and none in the same batch, against generate with each of them."""
    models = [
        trained(path, tmp_path / f"{at}", seed=at, rank=(8, 4)[at], split_gate_up=bool(at), **form)
        for at, form in enumerate(forms)
    ]
    wanted = [*map(generated, models), our_tokens(path)]
    assert len({json.dumps(tokens) for tokens in wanted}) == 3
    # vLLM's dense layers on a CPU give tokens without an adapter that of the last place, which stays empty here.
    options = dict(enable_lora=True, max_loras=3, max_lora_rank=8, max_num_seqs=16) | options
    with engine(path, **options) as llm:
        requests = [
            LoRARequest(f"{at}", at + 1, str(tmp_path / f"{at}"), is_3d_lora_weight=not form.get("per_expert", True))
            for at, form in enumerate(forms)
        ]
        assert answers(llm, [*requests, None]) == wanted


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    return export("qwen3_moe", tmp_path_factory.mktemp("exports") / "qwen3_moe")


def test_two_adapters_and_none_in_a_batch(qwen3_moe, tmp_path):
    check(qwen3_moe, tmp_path, [dict(attention=True), {}])


def test_files_for_peft(qwen3_moe, tmp_path):
    """PEFT's form of fused experts (gate and up of one adapter have ranks of their own there: twice the rank)."""
    options = dict(enable_mixed_moe_lora_format=True)
    check(qwen3_moe, tmp_path, [dict(per_expert=False), dict(per_expert=False)], **options)


@pytest.mark.parametrize("options", [{}, dict(enable_mixed_moe_lora_format=True)], ids=["fused", "mixed"])
def test_gpt_oss(options, tmp_path):
    """vLLM reads adapters of its fused experts in PEFT's form; biases, rows of gate and up in turns, of which vLLM
    knows by the name of the architecture."""
    forms = [dict(per_expert=False, attention=True), dict(per_expert=False)]
    check(export("gpt_oss", tmp_path / "export"), tmp_path, forms, **options)


@pytest.mark.parametrize("name", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow), "llama4"])
def test_architectures(name, tmp_path):
    check(export(name, tmp_path / "export"), tmp_path, [dict(attention=name == "mixtral"), {}])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow, id="tp2"),
        pytest.param(dict(enable_expert_parallel=True), id="tp2+ep2"),
        pytest.param(dict(fully_sharded_loras=True), id="tp2+sharded"),
    ],
)
def test_two_ranks(options, qwen3_moe, tmp_path):
    check(qwen3_moe, tmp_path, [dict(attention=True), {}], tensor_parallel_size=2, **options)
