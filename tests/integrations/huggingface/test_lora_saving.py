"""Whole models with LoRA adapters on disk: they come back as they were saved, or an error names what to do.
Called by pytest; judged by the logits of the model that was saved, bit for bit.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tokens

from thunder_moe import load_checkpoint, merge_lora_, quantize_, unmerge_lora_, use_lora_
from thunder_moe.finetune.lora import add_lora_, lora_linears, lora_parameters, remove_lora_

transformers = pytest.importorskip("transformers")


def adapted(name="qwen3_moe", dtype=torch.float32, format="nvfp4", linears=True, **options):
    """A model with two active adapters of other ranks, factors and dtypes."""
    torch.manual_seed(0)
    model = quantize_(tiny_model(name, dtype), format=format, linears=linears and (lambda module, name: True))
    add_lora_(model, 4, 8, linears=linears, dropout=0.1, **options)
    add_lora_(model, 2, 6, linears=linears, adapter="other", rslora=True, dtype=torch.bfloat16)
    use_lora_(model, ["other", "default"])
    for parameter in lora_parameters(model):
        parameter.data.normal_(0, 0.1)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def adapters(model):
    return {name: (linear.lora_specs, linear.lora_active) for name, linear in lora_linears(model).items()}


def merged_and_back(model):
    merge_lora_(model)
    unmerge_lora_(model)


CHANGES = {
    "active": lambda model: None,
    "merged": merge_lora_,
    "one merged": lambda model: merge_lora_(model, "default"),
    "merged and back": merged_and_back,
    "disabled": lambda model: use_lora_(model, None),
    "one active": lambda model: use_lora_(model, "other"),
}
MODELS = {
    "dense, too": dict(),
    "mxfp8": dict(format="mxfp8", dtype=torch.bfloat16),
    "renamed in checkpoints": dict(name="mixtral", linears=False, share="A"),
    "gate and up apart": dict(name="llama4", split_gate_up=True),
    "16-bit attention": dict(name="deepseek_v3", linears=False, share="B"),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", MODELS)
def test_a_round_trip_gives_the_same_logits(options, change, tmp_path, caplog):
    model = adapted(**MODELS[options])
    CHANGES[change](model)
    expected = logits(model)
    model.save_pretrained(tmp_path / "first", max_shard_size="100KB")
    assert ("this package alone reads them" in caplog.text) == (change != "merged")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype="auto").eval()
    assert torch.equal(logits(loaded), expected)
    trained = {id(parameter) for parameter in lora_parameters(loaded)}
    assert {id(p) for p in loaded.parameters() if p.requires_grad} == (trained or {id(p) for p in loaded.parameters()})
    if "merged" in change and change != "merged and back":  # what is merged is in the weights, and not beside them
        kept = {"other"} if change == "one merged" else set()
        assert {name for linear in lora_linears(loaded).values() for name in linear.lora_specs} == kept
    else:
        assert adapters(loaded) == adapters(model)
        pairs = zip(lora_parameters(loaded), lora_parameters(model), strict=True)
        assert all(torch.equal(new, old) and new.dtype == old.dtype for new, old in pairs)
    model.save_pretrained(tmp_path / "second", state_dict=model.state_dict())
    assert torch.equal(logits(load_checkpoint(tmp_path / "second")), expected)


def test_state_dicts_of_merged_models():
    """They load into the model without adapters, and are refused where one would count twice."""
    model, other = adapted(), adapted()
    merge_lora_(model)
    saved, before = model.state_dict(), logits(other)
    with pytest.raises(RuntimeError, match=r"q_proj: got a weight with \['other', 'default'\] merged into it"):
        other.load_state_dict(saved, strict=False)
    assert torch.equal(logits(other), before)
    model, other = adapted(linears=False), adapted(linears=False)
    merge_lora_(model)
    remove_lora_(other).load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model))


def test_a_model_without_head_reads_the_adapters_of_one_with_a_head(tmp_path, caplog):
    model = adapted()
    model.save_pretrained(tmp_path)
    body = transformers.AutoModel.from_pretrained(tmp_path, dtype="auto").eval()
    assert torch.equal(body(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
    assert "lm_head has no counterpart in Qwen3MoeModel; its adapters are not loaded" in caplog.text


def test_distributed_checkpoints_load_whatever_is_active(tmp_path):
    """torch.distributed.checkpoint wants tensors of the same sizes."""
    from torch.distributed import checkpoint

    model, other = adapted(), adapted()
    expected = logits(model)
    checkpoint.save(model.state_dict(), checkpoint_id=tmp_path)
    use_lora_(other, None)
    for parameter in lora_parameters(other):
        parameter.data.zero_()
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    use_lora_(other, ["other", "default"])
    assert torch.equal(logits(other), expected)


def tensors_of(path):
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "options", [dict(rank=4, alpha=16), dict(rank=8, alpha=16), dict(rank=4, alpha=8, rslora=True)]
)
def test_another_rank_or_alpha_than_the_saved_one_is_an_error(options, tmp_path):
    """By the model's own names, by those of checkpoints, as Trainer resumes, and of the adapters alone."""
    model = add_lora_(quantize_(tiny_model("qwen3_moe")), 4, 8)
    model.save_pretrained(tmp_path)
    alone = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    other = add_lora_(quantize_(tiny_model("qwen3_moe")), **options)
    for state in (model.state_dict(), tensors_of(tmp_path), alone):
        with pytest.raises(
            RuntimeError, match=r"gate_up_proj: got an adapter 'default' of rank 4 and alpha 8 .*wanted"
        ):
            other.load_state_dict(state, strict=False)
    same = add_lora_(quantize_(tiny_model("qwen3_moe")), 4, 8)
    for state in (model.state_dict(), tensors_of(tmp_path)):
        same.load_state_dict(state)
        assert torch.equal(logits(same), logits(model))


def test_a_merged_model_refuses_a_checkpoint_before_anything_changes(tmp_path):
    """Its 4-bit weights were set before the adapters were looked at."""
    torch.manual_seed(1)
    quantize_(tiny_model("qwen3_moe"), linears=True).save_pretrained(tmp_path)
    model = adapted()
    merge_lora_(model)
    for parameter in model.parameters():  # others than in the checkpoint
        parameter.data.mul_(2)
    expected = logits(model)
    with pytest.raises(RuntimeError, match=r"are merged into its weight, wanted unmerge_lora_\(model\) before"):
        model.load_state_dict(tensors_of(tmp_path), strict=False)
    assert torch.equal(logits(model), expected)


def test_adapters_that_cannot_be_loaded_are_errors(tmp_path):
    adapted().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"_head: has adapters .*it is not a 4-bit layer here, wanted linears=True"):
        load_checkpoint(tmp_path, linears=False)
    file, key = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj.lora_specs"
    tensors = load_file(file)
    record = tensors[key]
    wrong = record.clone()
    wrong[0, 0] = 7  # of "default", the first by name
    changed = {
        r"down_proj\.lora_[AB]\.\w+: has no lora_specs beside it": None,
        r"down_proj: lora_specs: got .* \(1, 5\), wanted rank, .*'default', 'other'": record[:1].clone(),
        r"down_proj: lora_specs: got": record * torch.nan,
        r"down_proj\.lora_A\.default: got .* \(8, 4, 32\), wanted .* \(8, 7, 32\)": wrong,
    }
    for what, new in changed.items():
        save_file({name: tensor for name, tensor in ({**tensors, key: new}).items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=f"{tmp_path}.*{what}"):
            load_checkpoint(tmp_path)


def reactivated(model):
    use_lora_(model, "other")


@pytest.mark.parametrize("change", [merge_lora_, remove_lora_, reactivated], ids=lambda change: change.__name__)
def test_a_state_dict_from_before_a_change_of_the_adapters_is_not_saved(change, tmp_path):
    """The weights of the state dict went to the file without its adapters, or with the activity of the model."""
    model = adapted()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(model)
    with pytest.raises(ValueError, match=r"state_dict: got .*lora_.*wanted the state dict of the model as it is now"):
        model.save_pretrained(tmp_path, state_dict=state)
    model.save_pretrained(tmp_path, state_dict=model.state_dict())


def test_a_model_that_peft_has_wrapped_is_not_saved_as_a_whole(tmp_path):
    """Its weights would be written by names that no model loads."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quantize_(tiny_model("qwen3_moe")), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        ValueError, match=r"PEFT has wrapped model\.layers\.0\.self_attn\.q_proj, wanted the PeftModel's"
    ):
        model.get_base_model().save_pretrained(tmp_path)
