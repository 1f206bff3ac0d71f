"""from_pretrained, load_checkpoint and save_checkpoint of transformers models: real exports against stock transformers
with the weights that the exporting library decodes; round trips; what is refused. Called by pytest.
"""

import json
import logging
import sys

import pytest
import torch
from checkpoint_files import (
    DATA,
    EXPORTS,
    assert_same_bits,
    bits,
    copy_export,
    edit_json,
    edit_tensors,
    load_expected,
    load_tensors,
)
from dense_calls import DenseCalls
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import dequantize_, mxfp8, quantize_, register  # noqa: E402
from thunder_moe.checkpoint import Checkpoint, convert  # noqa: E402
from thunder_moe.integrations.huggingface import checkpoint_names, sharding  # noqa: E402
from thunder_moe.integrations.huggingface import quantizer as hf_quantizer  # noqa: E402
from thunder_moe.integrations.huggingface.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from thunder_moe.integrations.huggingface.experts import NVFP4Experts  # noqa: E402
from thunder_moe.integrations.huggingface.quantizer import NVFP4CheckpointConfig  # noqa: E402
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart, NVFP4LinearStack  # noqa: E402

FP32, BF16 = torch.float32, torch.bfloat16
IDS = torch.randint(0, 16, (2, 9), generator=torch.Generator().manual_seed(0))


def experts_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, NVFP4Experts)}


def from_pretrained(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    with register("transformers"):
        yield


@pytest.fixture(scope="module")
def stock_model(tmp_path_factory):
    """Stock transformers in fp32, with the weights of an export as the exporting library decodes them."""

    def make(export):
        checkpoint = Checkpoint(DATA / export)
        state = {name: checkpoint.read(name).float() for name in checkpoint.others}
        state |= {name: tensor for name, tensor in load_tensors(DATA / export).items() if "_proj_bias" in name}
        for name, tensor in load_expected(export).items():
            fused = name.endswith(("gate_up_proj", "down_proj")) and export.startswith("modelopt")
            state[name] = tensor.mT.contiguous() if fused else tensor  # (E, K, N), as these models hold it
        directory = tmp_path_factory.mktemp(export)
        save_file(state, directory / "model.safetensors")
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        (directory / "config.json").write_text(json.dumps(config))
        model, info = from_pretrained(directory, dtype=FP32, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        return model

    return make


def logits(model):
    # transformers 5.24.0 cannot call Llama 4 with images (AttributeError: image_outputs); its text model runs.
    with torch.no_grad():
        return getattr(model, "language_model", model)(IDS).logits


def assert_same_state(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert tensor.shape == second[name].shape
        assert torch.equal(bits(tensor), bits(second[name])), name
    forms = [{name: module.form for name, module in experts_of(model).items()} for model in (one, other)]
    assert forms[0] == forms[1]


@pytest.mark.parametrize("export", EXPORTS)
def test_loaded_models_equal_the_stock_model(export, stock_model):
    stock, models = stock_model(export), [load_checkpoint(DATA / export, dtype=FP32)]
    if not export.startswith("mxfp4"):
        model, info = from_pretrained(DATA / export, dtype=FP32, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        models.append(model)
    for model in models:
        assert len(experts_of(model)) == 1
        assert not model.training
        assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}
        assert relative_error(logits(model), logits(stock)) < KERNEL_TOLERANCE[FP32]
    greedy = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(models[0].generate(IDS, **greedy), stock.generate(IDS, **greedy))


def test_device():
    pytest.importorskip("accelerate")
    model = load_checkpoint(DATA / "modelopt_gpt_oss", device="cpu")
    assert_same_state(model, load_checkpoint(DATA / "modelopt_gpt_oss"))
    with pytest.raises(ValueError, match="device_map: got 'disk'"):
        load_checkpoint(DATA / "modelopt_qwen3_moe", device={"model": "cpu", "lm_head": "disk"})


def test_device_needs_accelerate(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"load_checkpoint on devices that it is given needs accelerate: pip install"):
        load_checkpoint(DATA / "modelopt_gpt_oss", device="cpu")


def test_dtypes():
    model = load_checkpoint(DATA / "modelopt_gpt_oss")
    experts = experts_of(model)["model.layers.0.mlp.experts"]
    assert {p.dtype for p in model.parameters()} == {BF16}
    assert experts.gate_up_proj.weight_dtypes == (BF16,)
    assert model.config.quantization_config.to_dict()["quant_method"] == "modelopt"
    model = load_checkpoint(DATA / "modelopt_qwen3_moe", dtype=torch.float16)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("export", EXPORTS)
def test_saving_a_loaded_model_is_bit_exact(tmp_path, export):
    model = load_checkpoint(DATA / export)
    save_checkpoint(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "pretrained")
    for folder in ("out", "pretrained"):
        assert_same_state(model, load_checkpoint(tmp_path / folder))
        assert_same_state(model, from_pretrained(tmp_path / folder, dtype="auto"))
    assert torch.equal(logits(model), logits(load_checkpoint(tmp_path / "out")))
    assert Checkpoint(tmp_path / "out").experts == Checkpoint(DATA / export).experts
    before, after = Checkpoint(DATA / export), Checkpoint(tmp_path / "out")
    assert set(after.others) == set(before.others)
    assert set(after.dense) == set(before.dense)
    for name in before.dense:
        assert_same_bits(after.read_dense_weight(name), before.read_dense_weight(name))


@pytest.mark.parametrize("export", [export for export in EXPORTS if not export.startswith("mxfp4")])
def test_dense_layers_stay_4_bit_or_are_dequantized(export, stock_model):
    dense = Checkpoint(DATA / export).dense
    model, old = load_checkpoint(DATA / export, dtype=FP32), load_checkpoint(DATA / export, dtype=FP32, linears=False)
    kinds = NVFP4Linear, NVFP4LinearPart
    found = {name for name, m in model.named_modules() if type(m) in kinds and ".experts" not in name}
    assert {name.rpartition(".")[2] for name in found} == {name.rpartition(".")[2] for name in dense}
    assert len(found) == len(dense) > 0
    assert not any(isinstance(module, kinds) for module in old.modules())
    stock = logits(stock_model(export))
    for one in (model, old):
        assert relative_error(logits(one), stock) < KERNEL_TOLERANCE[FP32]
    if all(f"model.layers.0.self_attn.{name}_proj" in dense for name in "qkv"):
        with torch.no_grad(), DenseCalls() as calls:
            model(IDS)
        attention = model.model.layers[0].self_attn
        assert type(attention.qkv_proj) is NVFP4LinearStack
        assert calls.count == sum(type(m) in (NVFP4Linear, NVFP4LinearStack) for m in model.modules())
    with pytest.raises(TypeError, match="linears: got 1, wanted a bool"):
        load_checkpoint(DATA / export, linears=1)


@pytest.mark.parametrize("linears", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("name", others_slow(ARCHITECTURES, ("qwen3_moe", "olmoe", "deepseek_v3"), exhaustive=True))
def test_saving_a_quantized_model_is_bit_exact(tmp_path, name, linears):
    tiny_model(name, BF16).save_pretrained(tmp_path / "source")
    model = from_pretrained(tmp_path / "source", dtype="auto")
    quantize_(model, linears=(lambda module, path: True) if linears else False)
    save_checkpoint(model, tmp_path / "out", max_shard_size="50KB")
    back = load_checkpoint(tmp_path / "out")
    assert_same_state(model, back)
    assert torch.equal(logits(model), logits(back))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]


def test_weights_are_loaded_in_the_layout_that_their_device_prefers(tmp_path, tiles):
    config = tiny_config("qwen3_moe")
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    model = quantize_(tiny_model("qwen3_moe", BF16, config=config), layout="linear")
    save_checkpoint(model, tmp_path / "saved")
    del tiles[:]
    loaded = load_checkpoint(tmp_path / "saved")
    found = [(linear.layout, linear.packed_weight.layout) for linear in loaded.modules() if hasattr(linear, "qdata")]
    assert found
    assert set(found) == {("tiled_64x64", "tiled_64x64")}
    assert set(tiles) == {("cpu", 128, 128), ("cpu", 128, 64)}
    assert_same_state(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_every_layout_is_saved_the_same(tmp_path, monkeypatch, name):
    config = tiny_config(name)
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    models = [
        quantize_(tiny_model(name, BF16, config=config), layout=layout)
        for layout in ("linear", "tiled_64x64", "tiled_64x64")
    ]
    models[2].load_state_dict(models[0].state_dict())
    monkeypatch.setattr(type(models[1]), "state_dict", None)  # it would copy all 4-bit weights
    written = []
    for number, model in enumerate(models):
        save_checkpoint(model, tmp_path / f"{number}", max_shard_size="50KB")
        written.append({path.name: path.read_bytes() for path in (tmp_path / f"{number}").iterdir()})
    assert written[0] == written[1] == written[2]
    assert len(written[0]) > 4
    monkeypatch.undo()
    assert torch.equal(logits(models[1]), logits(load_checkpoint(tmp_path / "1")))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_converted_checkpoint_loads(tmp_path, name):
    model = tiny_model(name, BF16)
    model.save_pretrained(tmp_path / "source")
    errors = convert(tmp_path / "source", tmp_path / "out")
    layers = ARCHITECTURES[name][2]
    assert len(errors) == len(layers)
    assert all(19 < decibels < 22 for error in errors for decibels in (error.gate_up, error.down))
    loaded = from_pretrained(tmp_path / "out", dtype="auto")
    assert len(experts_of(loaded)) == len(layers)
    wanted = quantize_(model)
    for path, experts in experts_of(loaded).items():
        theirs = experts_of(wanted)[path]
        for ours, other in ((experts.gate_up_proj, theirs.gate_up_proj), (experts.down_proj, theirs.down_proj)):
            assert torch.equal(ours.qdata, other.qdata)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("jamba", "mamba.dt_proj"),
        ("granitemoehybrid", "mamba.out_proj"),  # in training alone
        ("deepseek_v32", "self_attn.indexer.weights_proj"),
    ],
)
def test_dense_layers_whose_weight_transformers_reads(tmp_path, name, read):
    tiny_model(name, BF16).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted", linears=True)
    model, wanted = (load_checkpoint(tmp_path / "converted", dtype=torch.float32) for _ in range(2))
    assert isinstance(model.model.layers[0].get_submodule(read), torch.nn.Linear)
    assert any(isinstance(module, NVFP4Linear) for module in model.model.layers[0].modules())
    dequantize_(wanted)
    for training in (False, True):
        ours, theirs = (each.train(training)(tokens(), use_cache=False).logits for each in (model, wanted))
        assert relative_error(ours, theirs) < 1e-5


def small_nemotron_h():
    """Experts without a gate, renamed by transformers."""
    layers = dict(layers_block_type=["moe", "attention"], hidden_size=32, vocab_size=16, max_position_embeddings=64)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=48)
    config = transformers.NemotronHConfig(**layers, **heads, **experts, moe_shared_expert_intermediate_size=16)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)


def small_llama4_with_images():
    """A text model inside of another, under a prefix."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=16)
    experts = dict(num_local_experts=4, intermediate_size_mlp=32, interleave_moe_layer_step=1, attention_chunk_size=32)
    text = dict(**sizes, **experts, num_key_value_heads=1, head_dim=16, max_position_embeddings=64)
    text |= dict(bos_token_id=0, eos_token_id=None, pad_token_id=0)
    projector = dict(
        vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, image_size=28, patch_size=14
    )
    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, **projector)
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config).to(BF16)


@pytest.mark.parametrize("make", [small_nemotron_h, small_llama4_with_images])
def test_other_architectures(tmp_path, make):
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "source")
    (error,) = convert(tmp_path / "source", tmp_path / "converted")
    assert 19 < error.gate_up < 22
    converted = load_checkpoint(tmp_path / "converted")
    assert len(experts_of(converted)) == 1
    loaded = type(converted).from_pretrained(tmp_path / "source", dtype="auto")
    exact = logits(loaded)
    assert relative_error(logits(converted), exact) < 0.1
    for number, model in enumerate((quantize_(loaded), converted)):
        save_checkpoint(model, tmp_path / f"{number}")
        back, info = type(model).from_pretrained(tmp_path / f"{number}", dtype="auto", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_same_state(model, back)
        assert torch.equal(logits(model), logits(back))
        assert Checkpoint(tmp_path / f"{number}").experts == [error.name]


def test_convert_keeps_the_names_that_modelopt_has(tmp_path):
    """The same model through convert and through nvidia-modelopt has the same tensors, but for calibration."""
    tiny_model("mixtral", BF16).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    ours, theirs = (
        {name.replace("layers.1.", "layers.0.") for name in load_tensors(path) if ".experts." in name}
        for path in (tmp_path / "out", DATA / "modelopt_mixtral")
    )
    assert {name for name in ours if int(name.split(".experts.")[1].split(".")[0]) < 3} == theirs


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2"])
def test_the_method_mxfp8(tmp_path, name):
    """As MiniMax releases it; judged by transformers' own decoding."""
    tiny_model(name, BF16).save_pretrained(tmp_path / "mxfp8")
    codes = {}
    for key, tensor in load_tensors(tmp_path / "mxfp8").items():
        codes[key] = tensor
        if tensor.ndim == 2 and ("_proj." in key or ".experts." in key):
            packed = mxfp8.quantize(tensor[None])
            codes |= {key: packed.qdata[0], f"{key}_scale_inv": packed.scale[0].view(torch.uint8)}
    save_file(codes, tmp_path / "mxfp8" / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "fmt": "e4m3"}

    def edit(config):
        config["quantization_config"] = {**quantization, "ignored_layers": ["lm_head"], "dequantize": True}

    edit_json(tmp_path / "mxfp8" / "config.json", edit)
    loaded = load_checkpoint(tmp_path / "mxfp8")
    assert {module.format.name for module in loaded.modules() if isinstance(module, NVFP4Linear)} == {"mxfp8"}
    save_checkpoint(loaded, tmp_path / "saved")
    again = load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(loaded.buffers(), again.buffers(), strict=True))
    if "mxfp8" not in hf_quantizer.AUTO_QUANTIZATION_CONFIG_MAPPING:
        pytest.skip("transformers knows no method 'mxfp8'")
    pytest.importorskip("accelerate")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mxfp8", dtype=BF16)
    ours = dict(dequantize_(loaded).named_parameters())
    for key, parameter in theirs.named_parameters():
        assert torch.equal(ours[key], parameter), key


def test_tied_embeddings(tmp_path):
    config = tiny_config("qwen3_moe")
    config.tie_word_embeddings = True
    model = quantize_(tiny_model("qwen3_moe", BF16, config=config))
    save_checkpoint(model, tmp_path / "out")
    assert "lm_head.weight" not in load_tensors(tmp_path / "out")
    back = load_checkpoint(tmp_path / "out")
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(back))


def test_layers_left_in_16_bits(tmp_path):
    model = quantize_(tiny_model("qwen3_moe", BF16), filter=lambda module, name: "layers.1" in name)
    assert len(experts_of(model)) == 1
    save_checkpoint(model, tmp_path / "out")
    back = load_checkpoint(tmp_path / "out")
    assert_same_state(model, back)
    assert torch.equal(logits(model), logits(back))


def test_methods_of_checkpoints():
    mapping = transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    ours = json.loads((DATA / "compressed_tensors_qwen3_moe" / "config.json").read_text())["quantization_config"]
    assert isinstance(mapping["compressed-tensors"].from_dict(ours), NVFP4CheckpointConfig)
    assert isinstance(mapping["modelopt"].from_dict({**ours, "quant_method": "modelopt", "quant_algo": "NVFP4"}),
                      NVFP4CheckpointConfig)  # fmt: skip


def test_prefix_and_missing_parts_are_said(tmp_path, caplog):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")

    def extra_layer(tensors):
        tensors |= {n.replace("layers.0", "layers.7"): t.clone() for n, t in tensors.items() if "layers.0.mlp" in n}

    edit_tensors(copy, extra_layer)
    with caplog.at_level(logging.WARNING):
        from_pretrained(copy, dtype=BF16)
    assert any("layers.7.mlp.experts has no counterpart" in record.message for record in caplog.records)


@pytest.mark.parametrize("where", ["../elsewhere/{file}", "{tmp}/elsewhere/{file}"])
@pytest.mark.parametrize("moved", [("1", "2"), ("1",), ("2",)])
def test_an_index_that_leaves_its_folder(tmp_path, where, moved):
    """Also where the other folder is a checkpoint itself, whose 4-bit weights would be read."""
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    copy.rename(tmp_path / "elsewhere")
    copy_export(tmp_path, copy.name)

    def outside(index):
        for name, file in index["weight_map"].items():
            if file[10] in moved:
                index["weight_map"][name] = where.format(file=file, tmp=tmp_path)

    edit_json(copy / "model.safetensors.index.json", outside)
    for load in (from_pretrained, load_checkpoint):
        with pytest.raises(ValueError, match=r"index.* names .*elsewhere.*, wanted a file inside"):
            load(copy)


def test_a_folder_above_the_one_of_the_process(tmp_path, monkeypatch):
    copy = copy_export(tmp_path, "compressed_tensors_qwen3_moe")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert experts_of(from_pretrained(f"../{copy.name}/"))
    assert experts_of(from_pretrained("..", subfolder=copy.name))


def one_layer_more(config):
    config["num_hidden_layers"] += 1
    for name in ("layer_types", "no_rope_layers", "moe_layers"):
        if config.get(name):
            config[name] = [*config[name], config[name][0] + 1 if name == "moe_layers" else config[name][0]]


@pytest.mark.parametrize("export", EXPORTS)
def test_layers_that_the_files_lack(tmp_path, export):
    copy = copy_export(tmp_path, export)
    edit_json(copy / "config.json", one_layer_more)
    with pytest.raises(ValueError, match=rf"{export} lacks the weights of model\.layers\.1\..*experts"):
        load_checkpoint(copy)
    if export != "mxfp4_gpt_oss":  # transformers' own
        with pytest.raises(ValueError, match=rf"{export} lacks the weights of model\.layers\.1\..*experts"):
            from_pretrained(copy)


def test_linears_that_the_files_lack(tmp_path):
    """They are an error where another layer has them in 4 bits. What is left in 16 bits, and a head of one's own, are
    not; transformers reports what it makes."""
    model = quantize_(tiny_model("qwen3_moe", BF16), linears=lambda module, name: "proj" in name and "layers.1" in name)
    model.save_pretrained(tmp_path)
    assert experts_of(from_pretrained(tmp_path))
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert len(experts_of(classifier)) == 2
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.o_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks the weights of model.layers.0.self_attn.o_proj, which the Qwen3"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("export", EXPORTS)
def test_experts_that_are_not_known_are_an_error(monkeypatch, export):
    monkeypatch.setattr(checkpoint_names, "expert_blocks", lambda model: {})
    with pytest.raises(ValueError, match=r"experts.gate_up_proj is of experts that are not known here, cannot load"):
        load_checkpoint(DATA / export)


def test_transformers_that_cannot_shard(monkeypatch):
    """An older one asks for plans, too, and loads on one process."""
    monkeypatch.setattr(sharding, "AVAILABLE", False)
    monkeypatch.setattr(sharding, "by_layer", None)
    assert experts_of(load_checkpoint(DATA / "modelopt_qwen3_moe"))


def test_broken_checkpoints(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(quant_algo="NVFP4_AWQ"))
    for load in (from_pretrained, load_checkpoint):
        with pytest.raises(ValueError, match="quant_algo: got 'NVFP4_AWQ', wanted one of"):
            load(copy)
    edit_json(copy / "config.json", lambda config: config["quantization_config"].update(quant_algo="NVFP4"))
    name = "model.layers.0.mlp.experts.2.gate_proj.weight_scale"
    edit_tensors(copy, lambda tensors: tensors.pop(name))
    for load in (from_pretrained, load_checkpoint):
        with pytest.raises(ValueError, match=r"model.safetensors: tensor '.*experts.2.gate_proj.weight' has no"):
            load(copy)


def test_sizes_that_are_not_the_models(tmp_path):
    copy = copy_export(tmp_path, "modelopt_qwen3_moe")
    edit_json(copy / "config.json", lambda config: config.update(moe_intermediate_size=32))
    with pytest.raises(ValueError, match=r"experts has up projections \(3, 128, 32\), wanted \(3, 64, 32\)"):
        load_checkpoint(copy)
    copy = copy_export(tmp_path, "modelopt_gpt_oss")
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_bias"))
    with pytest.raises(ValueError, match="mlp.experts has biases where the model has none, or lacks its own"):
        load_checkpoint(copy)


def test_what_is_refused(tmp_path):
    tiny_model("qwen3_moe", BF16).save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="plain is a 16-bit checkpoint, wanted a 4-bit one; load it with"):
        load_checkpoint(tmp_path / "plain")
    with pytest.raises(FileNotFoundError, match="nowhere is not a directory"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="model: got Linear, wanted a transformers model"):
        save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(ValueError, match=r"found no NVFP4 experts in Qwen3MoeForCausalLM; call quantize_"):
        save_checkpoint(tiny_model("qwen3_moe"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="plain exists already"):
        save_checkpoint(quantize_(tiny_model("qwen3_moe", BF16)), tmp_path / "plain")
    with pytest.raises(ValueError, match="not serializable"):  # of transformers itself
        transformers.PreTrainedModel.save_pretrained(load_checkpoint(DATA / "modelopt_qwen3_moe"), tmp_path / "out")
    model = quantize_(tiny_model("qwen3_moe", BF16))
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"lm_head.weight is on the 'meta' device"):
        save_checkpoint(model, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
