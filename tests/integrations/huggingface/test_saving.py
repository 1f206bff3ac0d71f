"""save_pretrained of models with 4-bit modules: what from_pretrained and load_checkpoint make of it, for every
architecture; state dicts, folders, copies, Trainer; and the way back to 16 bits. Called by pytest.
"""

import copy
import errno
import io
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from checkpoint_files import bits, load_tensors
from fast_cases import others_slow
from oracle import KERNEL_TOLERANCE, relative_error
from processes import CALL, FORKS
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, OTHERS, tiny_config, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import (  # noqa: E402
    dequantize_,
    finish_qat_,
    load_checkpoint,
    prepare_qat_,
    quantize_,
    save_checkpoint,
)
from thunder_moe.integrations.huggingface.saving import QuantizedModel  # noqa: E402

BF16 = torch.bfloat16
# transformers' Jamba computes otherwise where its configuration says that it is quantized.
FAST = ["llama4", "mixtral", "gpt_oss", "jamba"]
# Of OTHERS: names of their own, experts without a gate, tied heads, a model inside of another.
SPECIAL = ("granitemoe", "nemotron_h", "ernie4_5_moe", "gemma4", "qwen3_vl_moe")
# test_on_load.py and test_written_names.py load and save each of the rest.
CASES = [*FAST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SPECIAL)]
CASES += others_slow(sorted((ARCHITECTURES | OTHERS).keys() - {*FAST, *SPECIAL}), exhaustive=True)


def everything(module, name):
    return True


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def from_pretrained(path, **options):
    config = transformers.AutoConfig.from_pretrained(path)
    return getattr(transformers, config.architectures[0]).from_pretrained(path, **options)


def assert_same(one, other):
    """All tensors, bit for bit but for what transformers keeps in float32 (scores' corrections), and the logits."""
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        wide = second[name].dtype == torch.float32
        tensor = tensor.float() if wide and tensor.is_floating_point() else tensor
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor.float(), second[name].float()), name  # exact: of uint8, E4M3, 16 bits
    assert torch.equal(logits(one), logits(other))


def assert_same_tensors(one, other):
    first, second = load_tensors(one), load_tensors(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.float(), second[name].float()), name


@pytest.mark.parametrize("name", CASES)
def test_every_architecture(tmp_path, name):
    model = tiny_model(name, BF16)
    own_class = type(model)
    quantize_(model, linears=everything)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    for load in (from_pretrained, load_checkpoint):
        back = load(tmp_path / "saved")
        assert_same(model, back)
        assert isinstance(back, own_class)
    # What came from a checkpoint is saved again by the same names.
    back.save_pretrained(tmp_path / "again", save_original_format=False)
    assert_same_tensors(tmp_path / "again", tmp_path / "saved")
    # The way back, which transformers itself loads.
    plain = dequantize_(back)
    assert type(plain) is own_class
    plain.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    stock, info = from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info.values()), info
    assert_same(plain, stock)
    assert torch.equal(logits(dequantize_(model)), logits(stock))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_transformers_without_this_package(tmp_path, monkeypatch, name):
    """Says that it does not know the quantization; then the sizes of experts do not match, or it lists them."""
    quantize_(tiny_model(name, BF16)).save_pretrained(tmp_path)
    auto = transformers.quantizers.auto
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "modelopt")
    warnings = []
    monkeypatch.setattr(auto.logger, "warning", warnings.append)
    if name == "qwen3_moe":
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            from_pretrained(tmp_path)
    else:
        _, info = from_pretrained(tmp_path, output_loading_info=True)
        assert {key.rpartition(".")[2] for key in info["missing_keys"]} == {"gate_up_proj", "down_proj"}
    assert "Unknown quantization type, got modelopt" in warnings[0]


@pytest.fixture
def quantized():
    return quantize_(tiny_model("qwen3_moe", BF16))


def test_parts_and_ties(tmp_path):
    config = tiny_config("mixtral")
    config.tie_word_embeddings = True
    model = quantize_(
        tiny_model("mixtral", BF16, config=config),
        ignore="model.layers.0.mlp",
        linears=lambda module, name: name.endswith(("q_proj", "k_proj", "layers.0.self_attn.o_proj")),
    )
    model.save_pretrained(tmp_path / "saved")
    assert "lm_head.weight" not in load_tensors(tmp_path / "saved")
    for load in (from_pretrained, load_checkpoint):
        back = load(tmp_path / "saved")
        assert_same(model, back)
        assert back.lm_head.weight is back.model.embed_tokens.weight
    # As the shared config says nothing of it, a model made of it later is a plain one.
    assert not hasattr(config, "quantization_config")
    tiny_model("mixtral", BF16, config=config).save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize("linears", [False, everything])
def test_a_head_that_is_tied_by_the_configuration_alone(tmp_path, linears):
    model = tiny_model("cohere2_moe", BF16)
    model.lm_head.weight = torch.nn.Parameter(-1.5 * model.lm_head.weight.detach())
    model.save_pretrained(tmp_path / "plain")
    quantize_(model, linears=linears)
    loaded = quantize_(from_pretrained(tmp_path / "plain"), linears=linears)
    for number, each in enumerate((model, loaded)):
        each.save_pretrained(tmp_path / str(number))
        assert json.loads((tmp_path / str(number) / "config.json").read_text())["tie_word_embeddings"] is False
        assert_same(model, from_pretrained(tmp_path / str(number)))
    assert model.config.tie_word_embeddings
    # A state dict may have a tensor for each of two tied weights.
    tied = quantize_(tiny_model("cohere2_moe", BF16))
    state = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    tied.save_pretrained(tmp_path / "tied", state_dict=state)
    assert "lm_head.weight" not in load_tensors(tmp_path / "tied")
    assert_same(tied, from_pretrained(tmp_path / "tied"))


def test_layers_that_share_their_experts(tmp_path, quantized):
    layers = quantized.model.layers
    layers[1].mlp = layers[0].mlp
    quantized.save_pretrained(tmp_path / "saved")
    assert_same(quantized, from_pretrained(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_a_model_in_quantization_aware_training(tmp_path, name):
    """Its parameters are saved as transformers saves them, and loaded; afterwards the numbers training saw."""
    model = prepare_qat_(tiny_model(name))
    trained = logits(model)
    model.save_pretrained(tmp_path / "training")
    back, info = from_pretrained(tmp_path / "training", output_loading_info=True)
    assert not any(info.values()), info
    other = prepare_qat_(tiny_model(name))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    result = other.load_state_dict(load_tensors(tmp_path / "training"), strict=True)
    assert not result.missing_keys
    assert torch.equal(logits(other), trained)
    with pytest.raises(ValueError, match="is prepared for training: finish_qat_"):
        quantize_(other, linears=everything, ignore="*.experts").save_pretrained(tmp_path / "both")
    assert_same(finish_qat_(model), back)
    assert not isinstance(model, QuantizedModel)
    quantize_(model).save_pretrained(tmp_path / "saved")
    back = from_pretrained(tmp_path / "saved")
    assert_same(model, back)
    assert relative_error(logits(back), trained) < KERNEL_TOLERANCE[torch.float32]


@pytest.mark.covering(1)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_of_16_bits_in_shards(tmp_path, name, prepared):
    """More than ten, whose names are not in the order of their numbers; those of a layer are in several shards."""
    config = tiny_config(name)
    config.num_experts = config.num_local_experts = 12

    def make():
        model = tiny_model(name, BF16, config=config)
        return prepare_qat_(model) if prepared else quantize_(model, filter=lambda module, path: "layers.1" in path)

    model, whole, parts = make(), make(), make()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    with torch.no_grad():
        for parameter in (*whole.parameters(), *parts.parameters()):
            parameter.zero_()
    assert not whole.load_state_dict(load_tensors(tmp_path), strict=False).unexpected_keys
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 4
    for shard in shards:
        assert not parts.load_state_dict(load_file(shard), strict=False).unexpected_keys
    for other in (whole, parts):
        assert_same(model, other)


def test_layers_read_together_where_each_alone_has_another_layout(tmp_path, tiles):
    """q has rows enough for tiles, k and v do not; all three have."""
    config = tiny_config("qwen3_moe")
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    model = quantize_(tiny_model("qwen3_moe", BF16, config=config), linears=everything)
    model.save_pretrained(tmp_path)
    back = load_checkpoint(tmp_path)
    assert back.model.layers[0].self_attn.qkv_proj.layout == "tiled_64x64"
    assert_same(model, back)


def test_the_dtype_is_that_of_the_model(tmp_path, quantized):
    """Not that of the config, by which from_pretrained goes."""
    model = quantized.to(torch.float32)
    with torch.no_grad():
        model.model.norm.weight.add_(1e-4)
    model.save_pretrained(tmp_path / "saved")
    for load in (from_pretrained, load_checkpoint):
        assert_same(model, load(tmp_path / "saved"))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("change", [copy.deepcopy, pickled])
def test_copies_save_themselves(tmp_path, quantized, change):
    for model in (quantized, load_checkpoint(save_checkpoint(quantized, tmp_path / "source"))):
        other = change(model)
        assert isinstance(other, QuantizedModel)
        assert type(other) is type(model)
        with torch.no_grad():
            other.lm_head.weight.zero_()
        other.save_pretrained(tmp_path / "saved")
        assert not load_tensors(tmp_path / "saved")["lm_head.weight"].any()
        model.save_pretrained(tmp_path / "saved")
        assert_same_tensors(tmp_path / "saved", tmp_path / "source")


def test_a_given_state_dict_is_what_is_saved(tmp_path, quantized):
    state = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    state["model.layers.0.mlp.experts.down_proj.scale"].view(torch.uint8).zero_()
    state["lm_head.weight"].zero_()
    before = copy.deepcopy(quantized)
    quantized.save_pretrained(tmp_path / "saved", state_dict=state)
    assert_same(quantized, before)
    back = from_pretrained(tmp_path / "saved")
    assert not back.lm_head.weight.any()
    experts = back.model.layers[0].mlp.experts
    assert not experts.down_proj.scale.float().any()
    assert experts.gate_up_proj.scale.float().any()
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"state_dict: lacks lm_head.weight, wanted all tensors"):
        quantized.save_pretrained(tmp_path / "other", state_dict=state)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
def test_offloaded_tensors(tmp_path, quantized, how):
    accelerate = pytest.importorskip("accelerate")
    wanted = copy.deepcopy(quantized)
    if how == "cpu_offload":
        accelerate.cpu_offload(quantized, torch.device("cpu"), offload_buffers=True)
    else:  # which cannot hold float8
        accelerate.disk_offload(quantized, str(tmp_path / "offload"), torch.device("cpu"))
    assert quantized.lm_head.weight.is_meta
    quantized.save_pretrained(tmp_path / "saved")
    assert quantized.lm_head.weight.is_meta
    assert_same(wanted, from_pretrained(tmp_path / "saved"))


def test_a_class_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import Qwen3MoeForCausalLM\n\n\nclass Own(Qwen3MoeForCausalLM):\n    own = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    from modeling_own import Own

    Own.register_for_auto_class("AutoModelForCausalLM")
    model = Own._from_config(tiny_config("qwen3_moe"), dtype=BF16).eval()
    quantize_(model).save_pretrained(tmp_path / "saved")
    assert type(model).__name__ == "Own"
    assert (tmp_path / "saved" / "modeling_own.py").exists()
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert back.own
    assert_same(model, back)


def test_a_folder_is_used_again(tmp_path, quantized):
    path = tmp_path / "saved"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    (path / "model-00001-of-00009.safetensors").write_bytes(b"stale")
    sizes = ("20KB", "1GB", "50KB")
    for size in sizes:
        quantized.save_pretrained(path, max_shard_size=size)
        assert_same(quantized, from_pretrained(path))
        assert_same(quantized, load_checkpoint(path))
        shards = {file.name for file in path.glob("*.safetensors")}
        index = path / "model.safetensors.index.json"
        assert index.exists() == (size != "1GB")
        assert shards == (set(json.loads(index.read_text())["weight_map"].values()) if index.exists()
                          else {"model.safetensors"})  # fmt: skip
        assert (path / "tokenizer.json").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]


def test_an_interruption_between_two_saves_leaves_nothing_that_loads(tmp_path, quantized, monkeypatch):
    """Shards of a new save beside those of an older one are a mixture of two models."""
    path, replace, moved = tmp_path / "saved", os.replace, []
    quantized.save_pretrained(path, max_shard_size="20KB")

    def interrupted(source, target):
        if Path(target).parent == path:
            if len(moved) == 2:
                raise KeyboardInterrupt
            moved.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantized.save_pretrained(path, max_shard_size="20KB")
    monkeypatch.undo()
    assert len(moved) == 2
    with pytest.raises((OSError, ValueError)):
        from_pretrained(path)
    quantized.save_pretrained(path, max_shard_size="20KB")
    assert_same(quantized, from_pretrained(path))


@pytest.mark.parametrize("moment", [1, 2, 5])
def test_ctrl_c_between_two_saves_leaves_the_second_one(tmp_path, quantized, monkeypatch, moment):
    path, replace, other, moved = tmp_path / "saved", os.replace, copy.deepcopy(quantized), []
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    quantized.save_pretrained(path, max_shard_size="20KB")

    def interrupted(source, target):
        if Path(target).parent == path:
            moved.append(target)
            if len(moved) == moment:
                raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(path, max_shard_size="20KB")
    assert_same(other, from_pretrained(path))


def save_killed(path, save, call, moment):
    """Saves a model; the n-th call of a function of os ends the process."""
    model = quantize_(tiny_model("qwen3_moe", BF16))
    calls, original = [], getattr(os, call)

    def stop(*args):
        calls.append(args)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, call, stop)
    if save == "save_checkpoint":
        save_checkpoint(model, path, max_shard_size="20KB")
    else:
        model.save_pretrained(path, max_shard_size="20KB")


@pytest.mark.parametrize(
    ("save", "call", "moment"),
    [
        ("save_checkpoint", "replace", 2), ("save_checkpoint", "rename", 1),
        ("save_pretrained", "rename", 1), ("save_pretrained", "rename", 2),
        ("into a folder", "replace", 2), ("into a folder", "replace", -2),
        pytest.param("save_pretrained", "replace", 2, marks=pytest.mark.exhaustive),
        pytest.param("into a folder", "rename", 1, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_the_next_save_removes_what_a_killed_one_left(tmp_path, quantized, caplog, save, call, moment):
    """At each stage: while shards are written, before the checkpoint is whole, and while its files are moved."""
    path = tmp_path / "saved"
    if save == "into a folder":
        path.mkdir()
        (path / "tokenizer.json").write_text("{}")
    if moment < 0:  # counted from the end
        counted, replace = [], os.replace
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, lambda *args: (counted.append(args), replace(*args)))
            quantized.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
        moment += len(counted) + 1
    process = FORKS.Process(target=save_killed, args=(path, save, call, moment))
    process.start()
    process.join(CALL)
    assert process.exitcode == -signal.SIGKILL
    assert [name for place in (tmp_path, path) if place.exists() for name in os.listdir(place) if name[0] == "."]
    if save == "save_checkpoint":
        save_checkpoint(quantized, path)
    else:
        path.mkdir(exist_ok=True)  # as a tokenizer that is saved before
        quantized.save_pretrained(path)
    assert caplog.text.count("GB that an interrupted save had left") == 1
    assert os.listdir(tmp_path) == ["saved"]
    assert not [name for name in os.listdir(path) if name.startswith(".")]
    assert_same(quantized, from_pretrained(path))


def test_a_model_is_saved_where_it_was_loaded_from(tmp_path, quantized):
    """Also through a link. What it has of the files is mapped memory until then."""
    quantized.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    (tmp_path / "link").symlink_to("saved")
    left = tmp_path / "saved" / ".saved.thunder_moe_save.x"
    for path in (tmp_path / "saved", tmp_path / "link"):
        left.mkdir()
        back = from_pretrained(path)
        back.save_pretrained(path)
        assert_same(quantized, back)
        assert_same(quantized, load_checkpoint(path))
        assert not left.exists()


def test_two_saves_at_once_are_not_mixed(tmp_path, quantized, monkeypatch):
    """The second one moves its files when the first one has, so that the folder holds the second model."""
    path, replace, other = tmp_path / "saved", os.replace, copy.deepcopy(quantized)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    quantized.save_pretrained(path, max_shard_size="20KB")
    second = threading.Thread(target=other.save_pretrained, args=(path,), kwargs={"max_shard_size": "20KB"})

    def meanwhile(source, target):
        replace(source, target)
        if Path(target).parent == path and second.ident is None:
            second.start()
            second.join(0.7)

    monkeypatch.setattr(os, "replace", meanwhile)
    quantized.save_pretrained(path, max_shard_size="20KB")
    second.join(60)
    assert_same(other, from_pretrained(path))


def test_a_folder_that_is_a_mount_point(tmp_path, quantized, monkeypatch):
    replace = os.replace

    def within(source, target):
        if (tmp_path / "saved" in Path(source).parents) != (tmp_path / "saved" in Path(target).parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, target)

    (tmp_path / "saved").mkdir()
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, within)
    quantized.save_pretrained(tmp_path / "saved")
    assert_same(quantized, from_pretrained(tmp_path / "saved"))
    assert not [file for file in (tmp_path / "saved").iterdir() if file.is_dir()]


def test_what_is_refused(tmp_path, quantized, monkeypatch):
    quantized.save_pretrained(tmp_path / "other process", is_main_process=False)
    with pytest.raises(ValueError, match="variant: got 'fp16', wanted None"):
        quantized.save_pretrained(tmp_path / "saved", variant="fp16")
    with pytest.raises(ValueError, match="distributed_checkpoint: got True"):
        quantized.save_pretrained(tmp_path / "saved", distributed_checkpoint=True)
    with pytest.raises(ValueError, match="max_shard_size: got 'big'"):
        quantized.save_pretrained(tmp_path / "saved", max_shard_size="big")
    quantized.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"model.norm.weight is on the 'meta' device, wanted it in memory"):
        quantized.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file, wanted a directory"):
        quantized.save_pretrained(tmp_path / "file")


def test_a_part_of_a_model(tmp_path):
    model = tiny_model("qwen3_moe", BF16)
    quantize_(model.model)
    save_checkpoint(model, tmp_path / "whole")  # its own save_pretrained knows nothing of the part
    assert_same(model, load_checkpoint(tmp_path / "whole"))
    quantize_(model, linears="lm_head", filter="lm_head")
    model.save_pretrained(tmp_path / "saved")
    assert_same(model, load_checkpoint(tmp_path / "saved"))
    assert not isinstance(dequantize_(model), QuantizedModel)
    assert not isinstance(model.model, QuantizedModel)


@pytest.mark.parametrize("loaded", [False, True])
def test_dequantize_as_transformers_calls_it(tmp_path, quantized, loaded):
    save_checkpoint(quantized, tmp_path / "saved")
    model = load_checkpoint(tmp_path / "saved") if loaded else quantized
    plain = model.dequantize(torch.float32)
    assert plain is model
    assert type(plain) is transformers.Qwen3MoeForCausalLM
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert getattr(plain, "hf_quantizer", None) is None
    plain.float().save_pretrained(tmp_path / "plain")
    assert_same(plain, from_pretrained(tmp_path / "plain", dtype=torch.float32))


def test_push_to_hub(tmp_path, quantized, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def __init__(self, token=None):
            calls.append(token)

        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options))
            return type("Created", (), {"repo_id": f"me/{repo_id}"})

        def upload_folder(self, **options):
            calls.append((options, sorted(path.name for path in options["folder_path"].iterdir())))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    quantized.save_pretrained(tmp_path / "saved", push_to_hub=True, token="t", private=True, commit_message="new")
    names = ["config.json", "generation_config.json", "hf_quant_config.json", "model.safetensors"]
    folder = {"repo_id": "me/saved", "folder_path": tmp_path / "saved", "commit_message": "new"}
    assert calls == ["t", ("saved", {"exist_ok": True, "private": True}), (folder, names)]


@pytest.mark.parametrize("name", others_slow([*ARCHITECTURES, *SPECIAL], FAST, exhaustive=True))
def test_state_dicts_of_a_checkpoint(tmp_path, caplog, name):
    """By the names in the files, and shard by shard into another model of the same form."""
    model, other = (quantize_(tiny_model(name, BF16), linears=everything) for _ in range(2))
    with torch.no_grad():
        for tensor in other.state_dict().values():
            (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).zero_()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    caplog.clear()
    for shard in shards:
        assert not other.load_state_dict(load_file(shard), strict=False).unexpected_keys
    assert_same(model, other)
    buffers = {key for key in model.state_dict() if key not in dict(model.named_parameters())}
    fresh = quantize_(tiny_model(name, BF16), linears=everything)
    result = fresh.load_state_dict(load_tensors(tmp_path), strict=False)
    assert not result.unexpected_keys
    assert not set(result.missing_keys) - buffers
    assert not caplog.records  # of what writing would lose
    assert_same(model, fresh)


@pytest.mark.covering(1)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_shards_into_memory_that_holds_anything(tmp_path, name, format):
    """As after ``to_empty``: bytes that are no numbers wait for their shard."""
    model, other = (quantize_(tiny_model(name, BF16), linears=everything, format=format) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for tensor in other.buffers():
        raw = tensor.flatten().view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        raw[::7] = 0xFF
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        other.load_state_dict(load_file(shard), strict=False)
    for key, tensor in model.state_dict().items():
        if "inv_freq" not in key:
            assert torch.equal(bits(other.state_dict()[key]), bits(tensor)), key


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(12) * (index + 3) % 61 + 1
        return {"input_ids": ids, "labels": ids}


def trainer(model, path, **options):
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(path), per_device_train_batch_size=2, learning_rate=0.05, save_steps=2,
            logging_strategy="no",
            report_to=[], use_cpu=True, lr_scheduler_type="constant", seed=0, disable_tqdm=True, **options,
        ),
        train_dataset=Rows(),
    )  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("source", ["quantized", "loaded"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_trainer_saves_and_resumes(tmp_path, name, source):
    """Routers are trained on frozen 4-bit experts: two steps and two more give what four steps give."""
    pytest.importorskip("accelerate")

    def make():
        model = quantize_(tiny_model(name, torch.float32), linears=lambda module, path: "q_proj" in path)
        if source == "loaded":
            if not (tmp_path / "source").exists():
                model.save_pretrained(tmp_path / "source")
            model = load_checkpoint(tmp_path / "source")
        model.requires_grad_(False)
        for path, parameter in model.named_parameters():
            parameter.requires_grad_(path.endswith(("gate.weight", "router.weight", "norm.weight")))
        return model

    whole = trainer(make(), tmp_path / "whole", max_steps=4)
    whole.train()
    whole.save_model(str(tmp_path / "model"))
    assert_same(whole.model, load_checkpoint(tmp_path / "model"))
    assert_same(whole.model, from_pretrained(tmp_path / "whole" / "checkpoint-4"))
    start, first = make(), load_checkpoint(tmp_path / "whole" / "checkpoint-2")
    assert not torch.equal(logits(start), logits(first))
    resumed = trainer(make(), tmp_path / "whole", max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(resumed.model, whole.model)


def test_a_model_whose_layers_were_dequantized_one_by_one(tmp_path):
    model = quantize_(tiny_model("qwen3_moe"))
    for layer in model.model.layers:
        dequantize_(layer.mlp)
    model.save_pretrained(tmp_path)
    assert_same(type(model).from_pretrained(tmp_path), model)
