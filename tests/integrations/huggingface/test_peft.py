"""PEFT with 4-bit experts: configurations, files that PEFT reads and writes, several adapters, Trainer and SFTTrainer.
Called by pytest where PEFT is installed (the extra "test" has it); judged by PEFT itself on the dequantized model.
"""

import io
import itertools
import json
import warnings

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tokens

from thunder_moe import dequantize_, load_checkpoint, quantize_, save_checkpoint
from thunder_moe.finetune.lora import add_lora_, lora_linears, lora_parameters, remove_lora_, use_lora_
from thunder_moe.finetune.merge import merge_lora_
from thunder_moe.integrations.huggingface.lora_files import load_lora_, save_lora
from thunder_moe.nn.linear import is_packed_dense

peft = pytest.importorskip("peft")

from thunder_moe.integrations.huggingface.lora import get_peft_model, load_peft_model  # noqa: E402

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CONFIGS = {
    "parameters": dict(target_parameters=EXPERTS),
    "with attention": dict(target_parameters=EXPERTS[1:], target_modules=["q_proj", "v_proj"]),
    "projections": dict(target_modules=["gate_proj", "up_proj", "down_proj", "o_proj"], use_rslora=True),
    "pattern": dict(target_parameters=EXPERTS, rank_pattern={"experts.down_proj": 2}, layers_to_transform=[1]),
}


def quantized(name="qwen3_moe"):
    return quantize_(tiny_model(name))


def adapted(name="qwen3_moe", config="parameters", **options):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, **{**CONFIGS[config], **options})
    model = get_peft_model(quantized(name), config)
    randomize(model)
    return model


def randomize(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))


def by_peft(name, path):
    """The 16-bit model with the weights of the quantized one, and an adapter that PEFT itself has loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no (parameter|module) was matched")
        return peft.PeftModel.from_pretrained(dequantize_(quantized(name)), path)


@pytest.mark.covering(1)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_peft_loads_what_is_saved_and_the_reverse(name, config, tmp_path):
    model = adapted(name, config)
    with torch.no_grad():
        logits = model(tokens()).logits
        model.save_pretrained(tmp_path)
        stock = by_peft(name, tmp_path)
        assert relative_error(stock(tokens()).logits, logits) < 1e-5
        stock.save_pretrained(tmp_path / "again")
        loaded = load_peft_model(quantized(name), tmp_path / "again")
        assert relative_error(loaded(tokens()).logits, logits) < 1e-5
        with model.disable_adapter():
            assert torch.equal(model(tokens()).logits, quantized(name)(tokens()).logits)
        assert torch.equal(model(tokens()).logits, logits)
    assert isinstance(model, peft.PeftModel)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    assert all(parameter.requires_grad for parameter in lora_parameters(model))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("split", [False, True])
def test_one_tensor_per_expert(split, tmp_path):
    """The form that vLLM reads: its own loader wants these names, and A of gate and up each."""
    model = add_lora_(quantized(), 4, 8, split_gate_up=split)
    randomize(model)
    save_lora(model, tmp_path, per_expert=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.experts.7"
    shapes = {key.removeprefix(f"{prefix}."): tuple(t.shape) for key, t in tensors.items() if key.startswith(prefix)}
    assert shapes == {
        f"{name}.lora_{each}.weight": shape
        for name, (n, k) in dict(gate_proj=(32, 64), up_proj=(32, 64), down_proj=(64, 32)).items()
        for each, shape in (("A", (4, k)), ("B", (n, 4)))
    }
    linear = model.model.layers[1].mlp.experts.gate_up_proj
    a, b = (tensors[f"{prefix}.up_proj.lora_{each}.weight"] for each in "AB")
    assert relative_error(2 * b @ a, linear.lora_delta(("default",))[7, 32:]) < 1e-6
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    other = load_lora_(quantized(), tmp_path, "other")
    assert relative_error(other(tokens()).logits, model(tokens()).logits) < 1e-5


@pytest.mark.parametrize(("name", "config"), [("mixtral", "with attention"), ("qwen3_moe", "projections")])
def test_one_tensor_per_expert_beside_attention(name, config, tmp_path):
    """Under the names of the architecture's checkpoints, which vLLM has; zeros where gate and up have no adapter."""
    model = adapted(name, config, rank_pattern={r"experts\.(\d+\.)?down_proj": 2})
    model.save_pretrained(tmp_path, per_expert=True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    place, names = ("mlp", CONFIGS["projections"]["target_modules"][:3])
    if name == "mixtral":
        place, names = "block_sparse_moe", ("w1", "w3", "w2")
    for at, each in enumerate(names):
        b = tensors[f"base_model.model.model.layers.1.{place}.experts.7.{each}.lora_B.weight"]
        rank = 4 if at < 2 and name != "mixtral" else 2
        assert b.shape == ((32, rank) if at < 2 else (64, rank))
        assert bool(b.count_nonzero()) == (at == 2 or name != "mixtral")
    attention = "self_attn.q_proj" if name == "mixtral" else "self_attn.o_proj"
    assert f"base_model.model.model.layers.0.{attention}.lora_A.weight" in tensors
    loaded = load_peft_model(quantized(name), tmp_path)
    assert relative_error(loaded(tokens()).logits, model(tokens()).logits) < 1e-5


DENSE = {
    "with experts": dict(target_parameters=EXPERTS, target_modules=["q_proj", "v_proj"], rank_pattern={"v_proj": 2}),
    "alone": dict(target_modules=["q_proj", "o_proj"], layers_to_transform=[1]),
    "all-linear": dict(target_modules="all-linear", use_rslora=True),
}


@pytest.mark.parametrize("config", DENSE)
def test_4_bit_attention(config, tmp_path):
    """Adapters of `NVFP4Linear`s by PEFT's names: PEFT loads them onto the 16-bit model, and they come back."""
    kept = ("lm_head", "o_proj") if config == "with experts" else ("lm_head",)

    def quantized():
        return quantize_(tiny_model("qwen3_moe"), linears=lambda module, name: not name.endswith(kept))

    options = DENSE[config]
    torch.manual_seed(0)
    model = get_peft_model(quantized(), peft.LoraConfig(r=4, lora_alpha=8, **options))
    randomize(model)
    adapted = {name for name, linear in lora_linears(model.get_base_model()).items() if is_packed_dense(linear)}
    ends = {"with experts": ("q_proj", "v_proj"), "alone": ("q_proj", "o_proj")}.get(config)
    assert {name.rpartition(".")[2] for name in adapted} == {*(ends or ("q_proj", "k_proj", "v_proj", "o_proj"))}
    assert all("layers.1." in name for name in adapted) == (config == "alone")
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        logits = model(tokens()).logits
        model.save_pretrained(tmp_path)
        whole = dequantize_(quantized())  # PEFT knows 16-bit layers
        stock = peft.PeftModel.from_pretrained(whole, tmp_path)
        assert relative_error(stock(tokens()).logits, logits) < 1e-5
        loaded = load_peft_model(quantized(), tmp_path)
        assert relative_error(loaded(tokens()).logits, logits) < 1e-5
        with model.disable_adapter():
            assert relative_error(model(tokens()).logits, logits) > 0.01
        assert torch.equal(model(tokens()).logits, logits)
    if config == "with experts":
        train(get_peft_model(quantized(), peft.LoraConfig(r=4, **options)), tmp_path / "run", max_steps=2)


def test_what_matches_nothing_is_an_error(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name none of the 4 4-bit linears"):
        adapted(target_parameters=["mlp.other.gate_up_proj"])
    with pytest.raises(ValueError, match="name none of the 0 4-bit linears"):
        get_peft_model(tiny_model("qwen3_moe"), peft.LoraConfig(target_parameters=EXPERTS))
    other = tmp_path / "attention"
    other.mkdir()
    (other / "adapter_config.json").write_text((tmp_path / "adapter_config.json").read_text())
    attention = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64)}
    save_file(attention, other / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no adapter of the 2 blocks of 4-bit experts"):
        load_peft_model(quantized(), other)
    with pytest.raises(ValueError, match="wanted both of gate_proj and up_proj"):
        get_peft_model(quantized(), peft.LoraConfig(target_modules=["gate_proj"]))
    with pytest.raises(ValueError, match="use_dora: got True"):
        get_peft_model(quantized(), peft.LoraConfig(target_parameters=EXPERTS, use_dora=True))
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | dict(r=2)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="wanted 8 experts of rank 2"):
        load_lora_(quantized(), tmp_path)


def whole(name):
    """A model whose dense layers are 4-bit, but for routers and the head."""
    kept = ("router", "gate", "lm_head")
    return quantize_(tiny_model(name), linears=lambda module, path: not path.endswith(kept))


@pytest.mark.parametrize(
    ("name", "make"), [("qwen3_moe", whole), ("qwen3_moe", quantized), ("gemma4", whole), ("llama4", whole)]
)
def test_stock_all_linear_does_not_leave_4_bit_layers_out(name, make):
    """PEFT would adapt what is 16-bit alone, routers in the end; the error leaves its layers out of the model again."""
    model = make(name)
    logits = model(tokens()).logits
    with pytest.raises(ValueError, match=r"4-bit layers, model\.layers\.0\..*thunder_moe\.get_peft_model"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert torch.equal(model(tokens()).logits, logits)
    ours = get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert relative_error(ours(tokens()).logits, logits) < 1e-5
    linears = set(lora_linears(model).values())
    assert linears >= {module for module in model.modules() if is_packed_dense(module)}
    assert linears


def test_all_linear_by_transformers_leaves_the_model_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **options: None)
    model = whole("qwen3_moe")
    with pytest.raises(ValueError, match="4-bit layers"):
        model.add_adapter(peft.LoraConfig(target_modules="all-linear"))
    model.save_pretrained(tmp_path)
    assert torch.equal(load_checkpoint(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_adapters_that_transformers_would_not_save_are_refused(tmp_path, monkeypatch):
    """With adapters of its own, transformers saves these alone: the trained ones of the experts would be lost."""
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **options: None)
    model = add_lora_(quantized(), 4, 8)
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapters of add_lora_ beside .*save_lora and remove_lora_"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    save_lora(model, tmp_path / "experts")
    remove_lora_(model).save_pretrained(tmp_path / "attention")
    assert (tmp_path / "attention" / "adapter_model.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*pattern keys did not match")
@pytest.mark.parametrize("name", ["mixtral", *others_slow(["qwen3_moe", "gpt_oss"], exhaustive=True)])
def test_all_linear_is_what_it_is_to_peft_in_16_bits(name, tmp_path):
    config = dict(r=4, lora_alpha=8, target_modules="all-linear", use_rslora=True)
    model = get_peft_model(whole(name), peft.LoraConfig(**config))
    randomize(model)
    stock = peft.get_peft_model(dequantize_(whole(name)), peft.LoraConfig(**config))
    assert model.get_nb_trainable_parameters() == stock.get_nb_trainable_parameters()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    shapes = {name: tensor.shape for name, tensor in peft.get_peft_model_state_dict(stock).items()}
    assert {name: tensor.shape for name, tensor in saved.items()} == shapes
    expected = model(tokens()).logits
    stock = peft.PeftModel.from_pretrained(dequantize_(whole(name)), tmp_path)
    assert relative_error(stock(tokens()).logits, expected) < 1e-5
    assert torch.equal(load_peft_model(whole(name), tmp_path)(tokens()).logits, expected)


def test_two_adapters_of_all_linear(tmp_path):
    model = get_peft_model(whole("qwen3_moe"), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=5, target_modules="all-linear"))
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded = load_peft_model(whole("qwen3_moe"), tmp_path)
    loaded.load_adapter(tmp_path / "other", "other")
    stock = peft.PeftModel.from_pretrained(dequantize_(whole("qwen3_moe")), tmp_path)
    stock.load_adapter(tmp_path / "other", "other")
    for name in ("default", "other"):
        for each in (model, loaded, stock):
            each.set_adapter(name)
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
        assert relative_error(stock(tokens()).logits, model(tokens()).logits) < 1e-5


def test_all_linear_without_excluded_modules():
    config = peft.LoraConfig(target_modules="all-linear", exclude_modules=["q_proj"], target_parameters=EXPERTS)
    adapted = lora_linears(get_peft_model(whole("llama4"), config).get_base_model())
    assert {name.rpartition(".")[2] for name in adapted} == {
        "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"
    }  # fmt: skip


def test_adapters_of_routers_alone(tmp_path):
    """Asked for by name, beside 4-bit layers: PEFT's own, which come back, and all parameters count."""
    config = dict(target_parameters=["gate.weight"], target_modules=[])
    model = get_peft_model(whole("qwen3_moe"), peft.LoraConfig(**config))
    randomize(model)
    assert not lora_linears(model.get_base_model())
    sizes = sum(parameter.numel() for parameter in tiny_model("qwen3_moe").parameters())
    trainable, total = model.get_nb_trainable_parameters()
    assert total == sizes + trainable
    with model.disable_adapter():
        assert torch.equal(model(tokens()).logits, whole("qwen3_moe")(tokens()).logits)
    model.save_pretrained(tmp_path)
    loaded = load_peft_model(whole("qwen3_moe"), tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_names_that_peft_takes_for_experts_are_said(tmp_path, caplog):
    """PEFT 0.21 takes a dense "down_proj" of these architectures for the experts', and warns of nothing."""
    config = peft.LoraConfig(target_modules=["down_proj", "o_proj"])
    get_peft_model(whole("deepseek_v3"), config).save_pretrained(tmp_path)
    assert "PEFT takes the names of model.layers.0.mlp.down_proj and others for names of experts" in caplog.text


@pytest.mark.filterwarnings("ignore:.*target_parameters")
def test_stock_loading_onto_4_bit_experts_is_an_error(tmp_path):
    """PEFT itself warns where attention has adapters, and the model would compute without those of experts."""
    adapted(config="with attention").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got 2 4-bit layers, .*experts\.down_proj and .*load_peft_model"):
        peft.PeftModel.from_pretrained(quantized(), tmp_path)


def test_experts_that_peft_has_wrapped_are_refused_by_name():
    model = peft.get_peft_model(tiny_model("qwen3_moe"), peft.LoraConfig(target_parameters=EXPERTS))
    with pytest.raises(ValueError, match="a ParamWrapper of PEFT wraps it: quantize_ before PEFT"):
        quantize_(model)
    model = peft.get_peft_model(tiny_model("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj"]))
    assert quantize_(model)(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("experts", [True, False])
def test_trainer_takes_a_checkpoint_with_adapters(experts, tmp_path):
    """Of attention alone by PEFT's own function, too."""
    save_checkpoint(quantized(), tmp_path / "model")
    model = load_checkpoint(tmp_path / "model", dtype=torch.float32)
    if experts:
        model = get_peft_model(model, peft.LoraConfig(r=4, **CONFIGS["with attention"]))
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    before = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    train(model, tmp_path / "run", max_steps=2)
    assert all(not torch.equal(model.get_parameter(name), p) for name, p in before.items() if "lora_B" in name)


def test_several_adapters(tmp_path):
    model = adapted(config="with attention")
    first = model(tokens()).logits
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, **CONFIGS["parameters"]))
    assert torch.equal(model(tokens()).logits, first)
    model.set_adapter("other")
    randomize(model)
    second = model(tokens()).logits
    assert relative_error(second, first) > 0.01
    trainable = {
        name.split(".")[-1 if name.endswith("other") else -2] for name, p in model.named_parameters() if p.requires_grad
    }
    assert trainable == {"other"}
    model.save_pretrained(tmp_path)
    loaded = load_peft_model(quantized(), tmp_path / "other")
    assert relative_error(loaded(tokens()).logits, second) < 1e-5
    assert len(lora_linears(loaded)) == 4


def test_peft_says_what_is_active_not_a_state_dict():
    """PEFT's own layers do not switch at `load_state_dict`, so those of experts do not either."""
    model = adapted(config="with attention")
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, lora_dropout=0.1, **CONFIGS["with attention"]))
    randomize(model)
    saved, expected = model.state_dict(), model(tokens()).logits
    model.set_adapter("other")
    model.load_state_dict(saved)
    assert {linear.lora_active for linear in lora_linears(model).values()} == {("other",)}
    model.set_adapter("default")
    assert torch.equal(model(tokens()).logits, expected)


BOTH = dict(target_parameters=EXPERTS, target_modules=["q_proj", "v_proj"])


def test_a_second_adapter_is_attentions_too(tmp_path):
    """Added or loaded beside one that has the same layers of PEFT's; what is trained stays as it was."""
    model = adapted(target_modules=["q_proj", "v_proj"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    first = model(tokens()).logits
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, **BOTH))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
    model.set_adapter("other")
    randomize(model)
    second = model(tokens()).logits
    model.save_pretrained(tmp_path)
    assert relative_error(by_peft("qwen3_moe", tmp_path / "other")(tokens()).logits, second) < 1e-5
    again = adapted(target_modules=["q_proj", "v_proj"])
    again.load_adapter(tmp_path / "other", "other")
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained
    assert relative_error(again(tokens()).logits, first) < 1e-5
    again.set_adapter("other")
    assert relative_error(again(tokens()).logits, second) < 1e-5
    loaded = load_peft_model(quantized(), tmp_path / "other", is_trainable=True)
    trained = [name for name, p in loaded.named_parameters() if p.requires_grad]
    assert sum("experts" in name for name in trained) == sum("self_attn" in name for name in trained) == 8


def test_adapters_are_deleted_disabled_and_unloaded_together():
    model = adapted(target_modules=["q_proj", "v_proj"]).eval()
    base = quantized()(tokens()).logits
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=2, **BOTH))
    randomize(model)
    first = model(tokens()).logits
    model.set_adapter("other")
    model.disable_adapter_layers()
    assert torch.equal(model(tokens()).logits, base)
    model.enable_adapter_layers()
    second = model(tokens()).logits
    assert relative_error(second, first) > 0.01 < relative_error(second, base)
    with pytest.raises(ValueError, match="experts have one for all rows of a batch"):
        model(tokens(), adapter_names=["default"] * len(tokens()))
    with pytest.raises(ValueError, match="adapters of experts cannot be combined"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "mix")
    with pytest.raises(ValueError, match=r"adapter_names: got \['default'\], wanted None or the active"):
        model.merge_adapter(["default"])
    model.delete_adapter("other")
    assert model.active_adapter == "default"
    assert torch.equal(model(tokens()).logits, first)
    model.add_adapter("other", peft.LoraConfig(r=2, **BOTH))
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"unload: got .*self_attn.* merged, while the adapters of experts would go"):
        model.unload()
    model.unmerge_adapter()
    assert relative_error(model.unload()(tokens()).logits, base) < 1e-5


def test_deleting_one_of_two_adapters_of_experts_alone():
    model = adapted()
    first = model(tokens()).logits
    model.add_adapter("other", peft.LoraConfig(r=2, **CONFIGS["parameters"]))
    model.delete_adapter("other")
    assert model.active_adapters == ["default"]
    assert torch.equal(model(tokens()).logits, first)


def test_merge_and_unload_merges_experts():
    model = adapted(target_modules=["q_proj", "v_proj"])
    adapted_logits, base = model(tokens()).logits, quantized()(tokens()).logits
    merged = model.merge_and_unload()
    assert not lora_linears(merged)
    assert not [name for name in merged.state_dict() if "lora_" in name]
    assert 0 < relative_error(merged(tokens()).logits, adapted_logits) < 0.1 < relative_error(base, adapted_logits)


@pytest.mark.parametrize("gone", [lambda model: merge_lora_(model, dequantize=True), remove_lora_])
def test_what_is_left_of_an_adapter_without_experts_is_not_saved(gone, tmp_path):
    """Nor is it switched: the merged weights would stay."""
    model = adapted(target_modules=["q_proj", "v_proj"])
    gone(model)
    expected = model(tokens()).logits

    def disable():
        with model.disable_adapter():
            pass

    calls = (lambda: model.save_pretrained(tmp_path), disable, model.disable_adapter_layers, model.unload,
             lambda: model.set_adapter("default"))  # fmt: skip
    for call in calls:
        with pytest.raises(
            ValueError, match=r"the part of \['default'\] in experts .* is gone.*wanted merge_and_unload"
        ):
            call()
    assert not list(tmp_path.iterdir())
    assert relative_error(model.merge_and_unload()(tokens()).logits, expected) < 1e-5


def test_layers_to_transform_are_attentions_too():
    model = adapted(config="pattern", target_modules=["q_proj"])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(names) == 6
    assert all(".layers.1." in name for name in names)
    elsewhere = dict(layers_to_transform=[1], layers_pattern="blocks", target_modules=["down_proj"])
    with pytest.raises(ValueError, match="name none of the 4 4-bit linears"):
        get_peft_model(quantized(), peft.LoraConfig(**elsewhere))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(alora_invocation_tokens=[1, 2]), "alora_invocation_tokens: got"),
        (dict(layer_replication=[(0, 2)]), "layer_replication: got"),
        (dict(modules_to_save=["mlp"]), "modules_to_save: got 'mlp', which has the 4-bit weights of"),
        (dict(target_modules=["gate_proj", "up_proj"], rank_pattern={"up_proj": 2}), r"several .rank, alpha.*, 8.*, 8"),
        (dict(target_modules=["experts.0.down_proj"]), "names 1 of 8 projections"),
        (dict(target_parameters=EXPERTS, rank_pattern={"experts.down_proj": 0}), "rank: got 0, wanted a positive"),
    ],
)
def test_options_that_experts_do_not_have(options, what):
    model = quantized()
    with pytest.raises(ValueError, match=what):
        get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options))
    assert not lora_linears(model)


def test_other_tuners_are_refused():
    """AdaLoRA would change the ranks of PEFT's layers alone."""
    config = peft.AdaLoraConfig(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], total_step=10)
    with pytest.raises(ValueError, match="peft_config: got .*ADALORA, wanted a LoraConfig"):
        get_peft_model(quantized(), config)


def test_a_home_directory_in_the_path_of_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    adapted().save_pretrained("~/adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    load_peft_model(quantized(), "~/adapter").load_adapter("~/adapter", "other")


def test_filling_an_adapter(tmp_path):
    """It becomes the active one; merged ones, and linears that would keep what they have, are errors."""
    model = add_lora_(quantized(), 4, 8, filter=lambda module, name: name.endswith("down_proj"))
    randomize(model)
    save_lora(model, tmp_path, config=dict(lora_dropout=0.25))
    expected = model(tokens()).logits
    other = add_lora_(quantized(), 4, 8, adapter="first")
    load_lora_(other, tmp_path, "second")
    assert {spec.dropout for linear in lora_linears(other).values() for spec in linear.lora_specs.values()} == {0, 0.25}
    assert relative_error(other.eval()(tokens()).logits, expected) < 1e-5
    use_lora_(other, "first")
    load_lora_(other, tmp_path, "second")
    assert relative_error(other(tokens()).logits, expected) < 1e-5
    with pytest.raises(ValueError, match=r"gate_up_proj has \(2 in all\) and the files have not"):
        load_lora_(other, tmp_path, "first")
    merge_lora_(other)
    with pytest.raises(ValueError, match="are merged in .*, wanted unmerge_lora_ before"):
        load_lora_(other, tmp_path, "second")


def test_merged_experts_are_refused_before_anything_changes(tmp_path):
    model = adapted(target_modules=["q_proj", "v_proj"])
    merge_lora_(model.get_base_model())
    merged = model(tokens()).logits
    calls = (
        lambda: model.save_pretrained(tmp_path / "saved"),
        lambda: model.set_adapter("default"),
        lambda: model.add_adapter("other", peft.LoraConfig(r=2, **BOTH)),
        lambda: model.delete_adapter("default"),
        model.disable_adapter_layers,
        model.merge_and_unload,
        model.unload,
    )
    for call in calls:
        with pytest.raises(ValueError, match="are merged in .*, wanted unmerge_lora_ before"):
            call()
    assert list(model.peft_config) == ["default"]
    assert not (tmp_path / "saved").exists()
    assert torch.equal(model(tokens()).logits, merged)


def test_pickles():
    model = adapted(target_modules=["q_proj", "v_proj"])
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    loaded.disable_adapter_layers()
    assert torch.equal(loaded(tokens()).logits, quantized()(tokens()).logits)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids = torch.randint(1, 64, (9,), generator=torch.Generator().manual_seed(index))
        return dict(input_ids=ids, labels=ids)


def train(model, folder, resume=None, trainer=None, **options):
    """Ten steps, a checkpoint after five; the losses."""
    from transformers import Trainer, TrainingArguments

    arguments = dict(max_steps=10) | options
    arguments = dict(
        save_steps=5, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2, seed=1,
        report_to=[], use_cpu=True, save_strategy="steps", lr_scheduler_type="constant", disable_tqdm=True, **arguments,
    )  # fmt: skip
    run = (trainer or Trainer)(model, TrainingArguments(folder, **arguments), train_dataset=Texts())
    run.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_trainer_resumed_is_trainer_uninterrupted(tmp_path):
    whole = adapted(config="with attention")
    losses = train(whole, tmp_path)
    assert losses[-1] < losses[0] or min(losses) < losses[0]
    resumed = adapted(config="with attention")
    train(resumed, tmp_path, resume=str(tmp_path / "checkpoint-5"))
    given = dict(whole.named_parameters())
    trained = {name: p for name, p in resumed.named_parameters() if p.requires_grad}
    assert len(trained) == 12
    assert all(torch.equal(p, given[name]) for name, p in trained.items())
    assert {path.name for path in (tmp_path / "checkpoint-5").iterdir()} >= {"adapter_model.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.exhaustive), False])
def test_trainer_with_gradient_checkpointing(reentrant, tmp_path):
    expected = train(adapted(), tmp_path / "plain")
    options = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    assert train(adapted(), tmp_path / "checkpointed", **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_kbit_training_under_autocast(tmp_path):
    model = peft.prepare_model_for_kbit_training(quantize_(tiny_model("qwen3_moe", torch.bfloat16)))
    model = get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **CONFIGS["parameters"]))
    losses = train(model, tmp_path, bf16=True)
    assert min(losses) < losses[0]


@pytest.mark.slow
def test_sft_trainer(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"input_ids": Texts()[index]["input_ids"].tolist()} for index in range(24)])
    arguments = trl.SFTConfig(tmp_path, max_steps=4, logging_steps=1, per_device_train_batch_size=2, learning_rate=1e-2,
                              report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, pad_token="<pad>")  # fmt: skip
    tokenizer = _tokenizer()
    model = adapted()
    trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    before = [parameter.clone() for parameter in lora_parameters(model)]
    trainer.train()
    assert all(not torch.equal(p, was) for p, was in zip(lora_parameters(model), before, strict=True))


def _tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{index}": index for index in range(2, 64)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )


def test_accelerates_loop_is_the_plain_one():
    """Ten steps with clipping, of experts and attention."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, PartialState

    def data():
        return torch.utils.data.DataLoader(Texts(), batch_size=2)

    def loop(model, optimizer, loader, backward, clip):
        losses = []
        for batch in itertools.islice(itertools.cycle(loader), 10):
            loss = model(**batch).loss
            backward(loss)
            clip([p for p in model.parameters() if p.requires_grad], 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters() if p.requires_grad]

    def made():
        model = adapted(config="with attention")
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    wanted = loop(*made(), data(), torch.Tensor.backward, torch.nn.utils.clip_grad_norm_)
    AcceleratorState._reset_state()  # a Trainer of another test has left its own
    PartialState._reset_state()
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        prepared = accelerator.prepare(*made(), data())
        found = loop(*prepared, accelerator.backward, accelerator.clip_grad_norm_)
    finally:
        AcceleratorState._reset_state()
        PartialState._reset_state()
    assert found[0] == wanted[0]
    assert wanted[0][-1] < wanted[0][0]
    assert all(map(torch.equal, found[1], wanted[1]))
