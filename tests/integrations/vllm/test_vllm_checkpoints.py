"""Checkpoints of this package in vLLM: its loaders read them, it generates the tokens of load_checkpoint + generate,
also after its memory was dropped and loaded again.
Called by pytest, where vLLM is installed (`make test-vllm`); docs/engines.json has the results, docs a table of them.

VLLM_RESULTS=write in the environment writes what was measured instead of comparing with it, of all architectures with
pytest's `-m "not gpu"`; then `python tests/engines_table.py` renders the table.
"""

import json
import os
import traceback
from pathlib import Path

import forms
import pytest
import torch
import vllm
from exports import PROMPTS, agreement, engine, export, generated, our_tokens, their_tokens
from sleeping import sleep_and_wake_up, watched_loading, worker_of
from tiny_models import ARCHITECTURES, OTHERS
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod

from thunder_moe import load_checkpoint
from thunder_moe.integrations.vllm.linears import ModelOptThunderLinearMethod
from thunder_moe.integrations.vllm.methods import ModelOptThunderMoEMethod

RESULTS = Path(__file__).parents[3] / "docs" / "engines.json"


def outcome(name: str, path: Path) -> dict:
    """What docs/engines.json says of an architecture, measured."""
    expected = our_tokens(export(name, path))
    assert len({token for tokens in expected for token in tokens}) > 2  # a text that says something
    tokens, woken = None, None
    try:
        with watched_loading() as made, engine(path) as llm:
            tokens = their_tokens(llm)
            if name in FAST:
                sleep_and_wake_up(llm, made)
                woken = their_tokens(llm)
    except Exception as error:
        if tokens is not None:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        first = (str(error).strip().splitlines() or [f"{Path(last.filename).name}, {last.line}"])[0]
        return {"tokens": None, "ok": False, "why": f"{type(error).__name__}: {first}"[:160]}
    assert woken == (tokens if name in FAST else None)
    equal, total = agreement(tokens, expected)
    return {"tokens": f"{equal}/{total}", "ok": equal == total, "why": None if equal == total else "other tokens"}


KNOWN = json.loads(RESULTS.read_text())["vLLM"]
WRITES = os.environ.get("VLLM_RESULTS") == "write"
FAST = {*ARCHITECTURES, "ernie4_5_moe", "gemma4", "glm4_moe", "qwen2_moe"}  # what the others are like
NAMES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow)
    for name in (ARCHITECTURES | OTHERS if WRITES else KNOWN["models"])
]


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name, tmp_path):
    measured = outcome(name, tmp_path / name)
    if WRITES:
        known = json.loads(RESULTS.read_text())["vLLM"]
        known["version"], known["models"][name] = vllm.__version__, measured
        content = json.loads(RESULTS.read_text()) | {"vLLM": known}
        RESULTS.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    else:
        assert KNOWN["version"] == vllm.__version__
        assert KNOWN["models"][name] == measured


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    """Dense layers are 4-bit, too: merged q, k and v, and the output of attention."""
    return export("qwen3_moe", tmp_path_factory.mktemp("exports") / "qwen3_moe", dense=True)


@pytest.mark.parametrize("form", [forms.compressed_tensors, forms.nvfp4, forms.mixed, forms.gate_and_up_apart])
def test_forms(form, qwen3_moe, tmp_path):
    """The same weights in other forms, and global scales of which vLLM's own kernels use the gate's for up, and the
    largest for q, k and v."""
    path = forms.rewrite(qwen3_moe, tmp_path / "form", form)
    expected = our_tokens(path)
    assert (expected == our_tokens(qwen3_moe)) == (form is not forms.gate_and_up_apart)
    with watched_loading() as made, engine(path) as llm:
        assert their_tokens(llm) == expected
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == expected


def test_fp8_attention_beside_nvfp4(tmp_path):
    """Qwen3.6-35B-A3B has this form. vLLM runs FP8 layers, on a CPU without AMX with inputs that it rounds to FP8."""
    source = export("qwen2_moe", tmp_path / "export", dense=True, head=True)
    path = forms.rewrite(source, tmp_path / "form", forms.fp8_attention)
    model = load_checkpoint(path)  # FP8 layers in float32
    with watched_loading() as made, engine(path) as llm:
        theirs = worker_of(llm).model_runner.get_model()
        layer = theirs.model.layers[0]
        fp8 = [layer.self_attn.qkv_proj.quant_method, layer.self_attn.o_proj.quant_method]
        assert [type(method) for method in fp8] == [ModelOptLinearMethod] * 2
        for each in (theirs.lm_head, layer.mlp.shared_expert.down_proj):
            assert type(each.quant_method) is ModelOptThunderLinearMethod
        assert type(layer.mlp.experts.routed_experts.quant_method) is ModelOptThunderMoEMethod
        if fp8[0].kernel.input_quant_key() is not None:
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and ".self_attn." in name:
                    module.register_forward_pre_hook(with_fp8_inputs)
        expected = generated(model)
        assert their_tokens(llm) == expected
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == expected


def with_fp8_inputs(_, args):
    """Round the input of a layer as FP8 with the checkpoint's scale does."""
    scaled = (args[0] / forms.FP8_INPUT_SCALE).clamp(-448, 448)
    return (scaled.to(torch.float8_e4m3fn).to(scaled.dtype) * forms.FP8_INPUT_SCALE,)


def attention_in_nvfp4(module, name):
    return "nvfp4" if "self_attn" in name else "mxfp8"


SLOW_FORMS = [pytest.param(form, marks=pytest.mark.slow) for form in ("minimax", "mixed")]


@pytest.mark.parametrize("form", ["alone", "compressed_tensors", *SLOW_FORMS])
def test_mxfp8(form, tmp_path):
    """Experts and dense layers, in ModelOpt's form and in that of compressed-tensors and of MiniMax; in one checkpoint
    with NVFP4."""
    format = attention_in_nvfp4 if form == "mixed" else "mxfp8"
    path = export("qwen3_moe", tmp_path / "export", dense=True, format=format)
    if form == "compressed_tensors":
        path = forms.rewrite(path, tmp_path / "form", forms.compressed_tensors_mxfp8)
    elif form == "minimax":
        path = forms.rewrite(path, tmp_path / "form", forms.minimax_mxfp8)
    with watched_loading() as made, engine(path) as llm:
        assert their_tokens(llm) == our_tokens(path)
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == our_tokens(path)


def test_mxfp8_with_biases(tmp_path):
    """GPT-OSS as `convert` and save_checkpoint write it: the experts of a projection in one tensor."""
    path = export("gpt_oss", tmp_path / "export", format="mxfp8")
    with watched_loading() as made, engine(path) as llm:
        assert their_tokens(llm) == our_tokens(path)
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == our_tokens(path)


def test_fused_experts_of_llama4(tmp_path):
    """As nvidia-modelopt writes them; vLLM's own loader of the text model ends in a KeyError."""
    path = forms.rewrite(export("llama4", tmp_path / "export"), tmp_path / "form", forms.fused)
    expected = our_tokens(path)
    with watched_loading() as made, engine(path) as llm:
        assert their_tokens(llm) == expected
        sleep_and_wake_up(llm, made)
        assert their_tokens(llm) == expected


CONVENTIONS = ["mixtral", "deepseek_v3", "ernie4_5_moe", "gemma4", "glm4_moe", "olmoe", "qwen2_moe"]


@pytest.mark.parametrize("name", [CONVENTIONS[0], *(pytest.param(n, marks=pytest.mark.slow) for n in CONVENTIONS[1:])])
def test_compressed_tensors(name, tmp_path):
    """Other names of experts, heads that are tied, and layers without experts."""
    path = forms.rewrite(export(name, tmp_path / "export"), tmp_path / "form", forms.compressed_tensors)
    with engine(path) as llm:
        assert their_tokens(llm) == our_tokens(path)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_dense_layers(name, tmp_path):
    """Latent attention, shared experts, layers without experts, the head; a checkpoint that says MIXED_PRECISION."""
    path = forms.rewrite(export(name, tmp_path / "export", dense=True, head=True), tmp_path / "form", forms.mixed)
    with engine(path) as llm:
        assert their_tokens(llm) == our_tokens(path)


HEADS = [("qwen3_moe", 1), ("gpt_oss", 1), pytest.param("gpt_oss", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "ranks"), HEADS)
def test_head(name, ranks, tmp_path):
    """vLLM pads the head's rows to 128. Its own GPT-OSS has a 16-bit head alone."""
    path = export(name, tmp_path / "export", dense=True, head=True, vocab_size=100)
    expected = our_tokens(path)
    with watched_loading() as made, engine(path, tensor_parallel_size=ranks) as llm:
        assert their_tokens(llm) == expected
        if ranks == 1:
            assert type(worker_of(llm).model_runner.get_model().lm_head.quant_method) is ModelOptThunderLinearMethod
            sleep_and_wake_up(llm, made)
            assert their_tokens(llm) == expected


@pytest.mark.slow
def test_compiled(qwen3_moe, tmp_path, monkeypatch):
    """Without --enforce-eager: on a CPU vLLM traces experts and dense layers, which are opaque to it on CUDA."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with engine(qwen3_moe, enforce_eager=False) as llm:
        assert their_tokens(llm) == our_tokens(qwen3_moe)


def test_bfloat16(tmp_path):
    """In 16 bits two programs round differently: most tokens are the same until two are nearly as probable."""
    path = export("qwen3_moe", tmp_path / "bfloat16", torch.bfloat16)
    with engine(path, dtype="bfloat16") as llm:
        equal, total = agreement(their_tokens(llm), our_tokens(path))
    assert equal > 0.7 * total


class TestRequests:
    """One engine, several ways to ask it."""

    @pytest.fixture(scope="class")
    def llm(self, qwen3_moe):
        with engine(qwen3_moe, max_num_batched_tokens=8, max_num_seqs=2) as llm:  # chunks of a prompt: 8 tokens
            yield llm

    def test_chunked_prefill_of_more_requests_than_run_at_once(self, llm, qwen3_moe):
        prompts = [*PROMPTS, PROMPTS[0] * 3]
        assert their_tokens(llm, prompts) == our_tokens(qwen3_moe, prompts)

    def test_aborted_request(self, llm, qwen3_moe):
        from vllm import SamplingParams

        (expected,) = our_tokens(qwen3_moe, PROMPTS[:1])
        core = llm.llm_engine
        parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        for name, prompt in (("kept", PROMPTS[0]), ("aborted", PROMPTS[1])):
            core.add_request(name, {"prompt_token_ids": prompt}, parameters)
        tokens: dict[str, list[int]] = {}
        steps = 0
        while core.has_unfinished_requests():
            for output in core.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            steps += 1
            if steps == 6:
                core.abort_request(["aborted"])
        assert tokens["kept"] == expected
        assert len(tokens.get("aborted", [])) < 16

    def test_other_weights_are_loaded(self, llm, qwen3_moe, tmp_path):
        """reload_weights, as in reinforcement learning: the memory stays, which CUDA graphs have the addresses of."""
        other = export("qwen3_moe", tmp_path / "other", dense=True, mirrored=True)
        model = worker_of(llm).model_runner.get_model()
        places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        for path in (other, qwen3_moe):
            expected = our_tokens(path)
            llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(path)))
            llm.reset_prefix_cache()
            assert their_tokens(llm) == expected
            assert places == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
        assert our_tokens(other) != our_tokens(qwen3_moe)
