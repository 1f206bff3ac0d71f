"""`dense_names.READ_TOGETHER_BY` against the models of the installed transformers: the tensor that a class is called
with reaches each of its linears once, as it is.
Called by pytest; judged by hooks in models that nothing was done to.
"""

import importlib

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import ARCHITECTURES, OTHERS, tiny_config, tiny_model, tokens

from thunder_moe.dense_names import READ_TOGETHER, READ_TOGETHER_BY, read_together

DENSE = {"llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
# What a tiny model of the test has no layer of.
ELSEWHERE = {"Qwen3MoeMLP": "qwen3_moe"}
CALLS_IN_BRANCHES = {"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "Gemma4TextAttention"}


def model_of(name):
    import transformers

    if name not in DENSE:
        config = tiny_config(name)
        if name in ELSEWHERE.values():
            config.mlp_only_layers = [1]
        return tiny_model(name, config=config)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, DENSE[name])(**sizes, num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def watch(parent, names, seen):
    """Adds to `seen`, for each call of `parent`, the names of linears that were called with what it was called with."""
    calls, given = [], []

    def before(module, args, options):
        x = args[0] if args else options["hidden_states"]
        given[:] = [x, x._version, x.clone()]
        calls.append([])

    def called(name):
        def hook(module, args):
            same = args[0] is given[0] and given[0]._version == given[1] and torch.equal(given[0], given[2])
            calls[-1].append(name if same else f"{name} with another tensor")

        return hook

    parent.register_forward_pre_hook(before, with_kwargs=True)
    for name in names:
        parent.get_submodule(name).register_forward_pre_hook(called(name))
    seen.append((parent, names, calls))


@pytest.mark.parametrize("name", [*ARCHITECTURES, *OTHERS, *DENSE])
def test_linears_read_what_their_class_is_called_with(name):
    model, seen = model_of(name), []
    for parent in model.modules():
        names = read_together(type(parent))
        assert (
            names
            or not all(hasattr(parent, linear) for linear in READ_TOGETHER[0])
            or type(parent).__name__ in CALLS_IN_BRANCHES
        ), f"{type(parent).__name__} is not listed"
        if names:
            watch(parent, names, seen)
    assert seen
    with torch.no_grad():
        cache = model(tokens(), use_cache=True).past_key_values
        model(tokens()[:, :1], past_key_values=cache, use_cache=True)
    for parent, names, calls in seen:
        assert len(calls) == 2, f"{type(parent).__name__} was not called"
        assert calls == [list(names)] * 2, type(parent).__name__


def test_each_listed_class_exists():
    for module, name in READ_TOGETHER_BY:
        try:
            found = importlib.import_module(module)
        except ImportError:  # of another transformers
            continue
        assert "forward" in vars(getattr(found, name)), name


def test_each_listed_class_is_in_a_model_that_is_tried():
    found = {type(module).__name__ for name in [*ARCHITECTURES, *OTHERS, *DENSE] for module in model_of(name).modules()}
    missing = {name for module, name in READ_TOGETHER_BY if module.startswith("transformers")} - found
    assert not missing
