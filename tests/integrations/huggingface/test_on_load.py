"""from_pretrained with a `ThunderMoeConfig`: bit for bit what quantize_ makes of the loaded model, for each family;
how much is in 16 bits at a time; what is refused. Called by pytest.
"""

import gc
import json
import logging
import shutil

import pytest
import torch
from checkpoint_files import DATA, bits, edit_json, edit_tensors
from oracle import relative_error
from safetensors.torch import load_file
from tiny_models import ARCHITECTURES, OTHERS, tiny_config, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import ThunderMoeConfig, dequantize_, quantize_  # noqa: E402
from thunder_moe.formats.nvfp4 import dequantize  # noqa: E402
from thunder_moe.integrations.huggingface import on_load, sharding  # noqa: E402
from thunder_moe.integrations.huggingface.experts import NVFP4Experts  # noqa: E402
from thunder_moe.nn.linear import NVFP4Linear, NVFP4LinearPart  # noqa: E402
from thunder_moe.nn.packed import PackedModule  # noqa: E402
from thunder_moe.quantization import dense_linears  # noqa: E402
from thunder_moe.quantization.plan import QuantizationPlan  # noqa: E402

BF16 = torch.bfloat16
ANY = "*"


def projections(module, name):
    return name.endswith("_proj")


def by_name(module, name):
    if name.endswith("q_proj"):
        return None
    return "mxfp8" if name.endswith("o_proj") or ".0.mlp" in name else "nvfp4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function of an architecture: its tiny model's class and the directory where it is saved, in bfloat16."""
    known = {}

    def save(name):
        if name not in known:
            if not hasattr(transformers, (ARCHITECTURES | OTHERS)[name][0]):
                pytest.skip(f"transformers {transformers.__version__} has no {name}")
            model, path = tiny_model(name, BF16), tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size="60KB")
            known[name] = type(model), path
        return known[name]

    return save


def load(saved, config, **options):
    cls, path = saved
    return cls.from_pretrained(path, quantization_config=config, **{"dtype": BF16, **options})


def quantized(saved, dtype=BF16, **options):
    cls, path = saved
    return quantize_(cls.from_pretrained(path, dtype=dtype), **options)


def assert_same(one, other):
    """The same modules with the same tensors, bit for bit."""
    assert repr(one) == repr(other)
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert tensor.shape == second[name].shape
        assert torch.equal(bits(tensor), bits(second[name])), name
    for module, same in zip(one.modules(), other.modules(), strict=True):
        assert type(module) is type(same)
        if isinstance(module, PackedModule):
            assert module.weight_dtypes == same.weight_dtypes
            assert module.weights_require_grad == same.weights_require_grad
            assert (module.auto_layout, module.layout) == (same.auto_layout, same.layout)
    grads = [{name: p.requires_grad for name, p in model.named_parameters()} for model in (one, other)]
    assert grads[0] == grads[1]


# Of OTHERS: tied heads, names of their own, experts without a gate, a model inside of another; the rest is slow.
SPECIAL = ("cohere2_moe", "granitemoe", "nemotron_h", "qwen3_vl_moe", "ernie4_5_moe")
FAST = {"mixtral", "gpt_oss", "cohere2_moe", "ernie4_5_moe"}  # test_convert_models.py has the others of these


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.exhaustive) for name in ARCHITECTURES | OTHERS],
)
def test_on_load_equals_quantize(saved, name):
    model = quantized(saved(name), linears=lambda module, path: True)
    loaded, info = load(saved(name), ThunderMoeConfig(linears=ANY), output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(loaded, model)
    assert not loaded.training
    assert sum(isinstance(module, NVFP4Experts) for module in loaded.modules()) == len(
        (ARCHITECTURES | OTHERS)[name][2]
    )
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_weights_are_quantized_as_they_arrive(saved, name, monkeypatch):
    """Nothing is left for after the load."""
    wanted = {format: quantized(saved(name), format=format) for format in ("nvfp4", "mxfp8")}
    monkeypatch.setattr(QuantizationPlan, "quantize_modules", None)
    for format, model in wanted.items():
        assert_same(load(saved(name), ThunderMoeConfig(format=format)), model)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        (dict(scale_search="mse"), dict(scale_search="mse")),
        (dict(layout="linear"), dict(layout="linear")),
        (dict(filter="model.layers.1.*"), dict(filter=lambda module, name: name.startswith("model.layers.1."))),
        (
            dict(modules_to_not_convert="model.layers.0.*", ignore=["lm_head"], linears=["*_proj", "lm_head"]),
            dict(filter=lambda module, name: name.startswith("model.layers.1."), linears=projections),
        ),
        (dict(linears="*", filter="model.layers.1"), dict(linears="*", ignore=["model.layers.0", "lm_head"])),
        (dict(linears="*", ignore=r"re:.*\.0\..*"), dict(linears="*", filter=lambda module, name: ".0." not in name)),
        (
            dict(linears="*", filter=["*.q_proj", "*.1.*"], ignore="*.k_proj", format={"*.1.*": "MXFP8", "*": "nvfp4"}),
            dict(
                linears=lambda module, name: name != "lm_head",
                filter=lambda module, name: (".1." in name or "q_proj" in name) and "k_proj" not in name,
                format=lambda module, name: "mxfp8" if ".1." in name else "nvfp4",
            ),
        ),
        (dict(linears="*.q_proj"), dict(linears=lambda module, name: name.endswith(".q_proj"))),
        (dict(linears=True), dict(linears=True)),
        (dict(linears="*_proj", format="mxfp8"), dict(linears=projections, format="mxfp8")),
        (
            dict(linears="*_proj", format={"*.0.*experts": "mxfp8", "*.q_proj": None, "*.o_proj": "mxfp8"}),
            dict(
                linears=projections,
                format=by_name,
            ),
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_options(saved, options, same):
    config = ThunderMoeConfig(**options)
    again = ThunderMoeConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()
    assert_same(load(saved("qwen3_moe"), again), quantized(saved("qwen3_moe"), **same))


def test_linears_that_are_faster_but_for_some(saved, monkeypatch):
    asked = []

    def why_slower(device, dtype, n, k):
        asked.append((device.type, dtype, n, k))
        return None if n * k >= 64 * 64 else "it is too small"

    monkeypatch.setattr(dense_linears, "why_slower", why_slower)
    loaded = load(saved("qwen3_moe"), ThunderMoeConfig(linears=True))
    assert_same(loaded, quantized(saved("qwen3_moe"), linears=True))
    assert set(asked) == {("cpu", BF16, 128, 64), ("cpu", BF16, 64, 64)}  # q, k and v together, o; the head
    left = load(saved("qwen3_moe"), ThunderMoeConfig(linears=True, ignore=["*.o_proj", "lm_head"]))
    names = {name for name, module in left.named_modules() if isinstance(module, NVFP4LinearPart)}
    assert names == {f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkv"}
    assert type(left.lm_head) is type(left.model.layers[0].self_attn.o_proj) is torch.nn.Linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, "auto"])
def test_dtypes(saved, dtype):
    loaded = load(saved("gpt_oss"), ThunderMoeConfig(), dtype=dtype)
    assert_same(loaded, quantized(saved("gpt_oss"), dtype=dtype))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_device_maps(saved, device_map):
    pytest.importorskip("accelerate")
    if device_map == "auto" and torch.accelerator.is_available():
        pytest.skip("weights go to the accelerator")
    assert_same(load(saved("mixtral"), ThunderMoeConfig(), device_map=device_map), quantized(saved("mixtral")))


def test_a_state_dict_and_pickled_files(saved, tmp_path):
    cls, path = saved("olmoe")
    state = cls.from_pretrained(path, dtype=BF16).state_dict()
    config = transformers.AutoConfig.from_pretrained(path)
    given = cls.from_pretrained(
        None, config=config, state_dict=state, dtype=BF16, quantization_config=ThunderMoeConfig()
    )
    wanted = quantized(saved("olmoe"))
    assert_same(given, wanted)
    config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(load((cls, tmp_path), ThunderMoeConfig()), wanted)


def test_a_head_that_only_the_configuration_ties(tmp_path):
    """Whether it is tied is known after the load; it is quantized then."""
    model = tiny_model("ernie4_5_moe", BF16)
    model.save_pretrained(tmp_path)
    here = type(model), tmp_path
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": -model.lm_head.weight.detach()}))
    loaded = load(here, ThunderMoeConfig(linears=ANY))
    assert type(loaded.lm_head) is NVFP4Linear
    assert_same(loaded, quantized(here, linears=lambda module, name: True))


def test_weights_that_the_checkpoint_lacks(tmp_path, saved):
    """Transformers makes and reports them; the rest is quantized as ever."""
    cls, path = saved("qwen3_moe")
    model = cls.from_pretrained(path, dtype=BF16)
    model.save_pretrained(tmp_path, save_original_format=False)
    gone = "model.layers.1.mlp.experts.down_proj"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(gone))
    loaded, info = load((cls, tmp_path), ThunderMoeConfig(), output_loading_info=True)
    assert info["missing_keys"] == {gone}
    wanted, blocks = quantize_(model), loaded.model.layers
    for layer, name in ((0, "gate_up_proj"), (0, "down_proj"), (1, "gate_up_proj")):
        one, other = (getattr(m.model.layers[layer].mlp.experts, name) for m in (loaded, wanted))
        assert torch.equal(one.qdata, other.qdata)
    assert isinstance(blocks[1].mlp.experts, NVFP4Experts)
    assert dequantize(blocks[1].mlp.experts.down_proj.packed_weight).std() > 0


def live_bytes():
    """Of 16-bit tensors, each memory once."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    memory = {}
    for tensor in tensors:
        if tensor.dtype == BF16 and not tensor.is_meta and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            memory[storage.data_ptr()] = storage.nbytes()
    return sum(memory.values())


class Live:
    """Counts the bytes of 16-bit tensors at each weight that is quantized, beside those of before."""

    def __init__(self, monkeypatch):
        gc.collect()
        self.peak, self.calls, before, own = 0, 0, live_bytes(), on_load.non_finite_problem

        def count(*args, **options):
            self.peak, self.calls = max(self.peak, live_bytes() - before), self.calls + 1
            return own(*args, **options)

        monkeypatch.setattr(on_load, "non_finite_problem", count)


@pytest.mark.parametrize("original", [True, False], ids=["per expert", "fused"])
def test_one_weight_at_a_time_is_in_16_bits(tmp_path, monkeypatch, original):
    config = tiny_config("qwen3_moe")
    config.num_hidden_layers, config.num_experts, config.moe_intermediate_size = 8, 16, 64
    model = tiny_model("qwen3_moe", BF16, config=config)
    model.save_pretrained(tmp_path, save_original_format=original)
    here = type(model), tmp_path
    experts = model.model.layers[0].mlp.experts
    layer = sum(parameter.nbytes for parameter in experts.parameters())
    others = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    del model, experts
    live = Live(monkeypatch)
    loaded = load(here, ThunderMoeConfig())
    assert live.calls == 16
    # The weight that is quantized, and its parts that were merged.
    assert layer / 2 < live.peak <= 2 * layer + others
    assert live.peak < 8 * layer / 2
    assert_same(loaded, quantized(here))


def test_the_sizes_that_transformers_plans_with(saved, monkeypatch):
    pytest.importorskip("accelerate")
    cls, path = saved("qwen3_moe")
    sizes = {}
    own = on_load.ThunderMoeQuantizer.param_element_size

    def size(self, model, name, parameter):
        sizes[name] = own(self, model, name, parameter) * parameter.numel()
        return own(self, model, name, parameter)

    monkeypatch.setattr(on_load.ThunderMoeQuantizer, "param_element_size", size)
    model = load((cls, path), ThunderMoeConfig(linears=ANY), device_map="auto", max_memory={"cpu": "1GB"})
    packed = sum(b.nbytes for m in model.modules() if isinstance(m, PackedModule) for b in m.buffers())
    plain = sum(p.nbytes for p in model.parameters())
    assert 0.99 * (packed + plain) < sum(sizes.values()) < 1.01 * (packed + plain)


def assert_close(got, wanted, *, exactly):
    """Linears that are stacked in one model and apart in the other may be summed in another order."""
    assert torch.equal(got, wanted) if exactly else relative_error(got, wanted) < 2e-2


@pytest.mark.parametrize("linears", [False, "*_proj"])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_a_layer_on_disk(saved, tmp_path, name, linears):
    pytest.importorskip("accelerate")
    model = quantized(saved(name), linears=(lambda module, path: path.endswith("_proj")) if linears else False)
    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu")
    where = dict(device_map={**parts, "model.layers.1": "disk"}, offload_folder=tmp_path)
    loaded = load(saved(name), ThunderMoeConfig(linears=linears), **where)
    layers = loaded.model.layers
    assert {tensor.device.type for tensor in layers[1].state_dict().values()} == {"meta"}
    assert "meta" not in {tensor.device.type for tensor in layers[0].state_dict().values()}
    assert list(tmp_path.glob("model.layers.1.*.gate_up_proj.qdata.safetensors"))
    if linears:
        assert type(layers[1].self_attn.q_proj) is NVFP4Linear  # a stack's tensors would be away for its parts
        assert type(layers[0].self_attn.q_proj) is NVFP4LinearPart
    with torch.no_grad():
        for _ in range(2):
            assert_close(loaded(tokens()).logits, model(tokens()).logits, exactly=not linears)
    loaded.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=BF16).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(bits(tensor), bits(again[name])) for name, tensor in model.state_dict().items())
    if not linears:
        before = loaded(tokens()).logits
        with pytest.raises(ValueError, match="its weights are offloaded"):
            dequantize_(loaded)
        assert torch.equal(loaded(tokens()).logits, before)
    if not linears and name == "llama4":
        del where["offload_folder"]
        refused(saved(name), "provide an `offload_folder`", **where)


def test_a_router_whose_bias_is_on_disk(saved, tmp_path):
    """ERNIE's bias is a parameter of a child of the router; accelerate loads it for the child's forward alone."""
    pytest.importorskip("accelerate")
    here = saved("ernie4_5_moe")
    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu")
    loaded = load(here, ThunderMoeConfig(), device_map={**parts, "model.layers.1": "disk"}, offload_folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, quantized(here)(tokens()).logits)


def test_a_layer_on_disk_is_laid_out_for_where_it_computes(tmp_path, tiles):
    pytest.importorskip("accelerate")
    config = tiny_config("qwen3_moe")
    config.hidden_size, config.intermediate_size, config.moe_intermediate_size = 128, 64, 64
    model = tiny_model("qwen3_moe", BF16, config=config)
    model.save_pretrained(tmp_path / "source")
    here = type(model), tmp_path / "source"
    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu")
    loaded = load(here, ThunderMoeConfig(), device_map={**parts, "model.layers.1": "disk"}, offload_folder=tmp_path)
    assert {module.layout for module in loaded.modules() if isinstance(module, PackedModule)} == {"tiled_64x64"}
    wanted = quantized(here)
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, wanted(tokens()).logits)
    loaded.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=BF16).state_dict()
    assert all(torch.equal(bits(tensor), bits(again[name])) for name, tensor in wanted.state_dict().items())


def test_a_layer_in_main_memory_beside_an_accelerator(saved, tmp_path, monkeypatch):
    """On a CPU: accelerate gives hooks to what is on disk, and the layer's packed weights are kept in memory."""
    pytest.importorskip("accelerate")
    own = on_load._Load._waits
    monkeypatch.setattr(on_load._Load, "_waits", lambda self, name: own(self, name) and "cpu")
    parts = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"], "cpu")
    where = dict(device_map={**parts, "model.layers.1": "disk"}, offload_folder=tmp_path)
    loaded = load(saved("qwen3_moe"), ThunderMoeConfig(linears="*_proj"), **where)
    assert {tensor.device.type for tensor in loaded.model.layers[1].state_dict().values()} == {"meta"}
    assert not list(tmp_path.glob("*.qdata.safetensors"))
    model = quantized(saved("qwen3_moe"), linears=lambda module, path: path.endswith("_proj"))
    with torch.no_grad():
        for _ in range(2):
            assert_close(loaded(tokens()).logits, model(tokens()).logits, exactly=False)


@torch.inference_mode()
def test_in_inference_mode(saved):
    model = quantized(saved("gpt_oss"), linears=lambda module, path: True)
    loaded = load(saved("gpt_oss"), ThunderMoeConfig(linears=ANY))
    assert_same(loaded, model)
    with torch.inference_mode(False):
        assert not any(
            tensor.is_inference() for m in loaded.modules() if isinstance(m, PackedModule) for tensor in m.buffers()
        )


def test_an_index_that_leaves_its_folder(saved, tmp_path):
    cls, path = saved("qwen3_moe")
    shutil.copytree(path, tmp_path / "copy")
    (shard, *_) = sorted((tmp_path / "copy").glob("*.safetensors"))
    shard.rename(tmp_path / shard.name)

    def outside(index):
        for name, file in index["weight_map"].items():
            index["weight_map"][name] = f"../{file}" if file == shard.name else file

    edit_json(tmp_path / "copy" / "model.safetensors.index.json", outside)
    refused((cls, tmp_path / "copy"), rf"copy: its index names the file .*\.\./{shard.name}, wanted a file inside")


@pytest.mark.parametrize(
    ("architecture", "name", "dtype"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.3.up_proj.weight", torch.float8_e4m3fn),
        ("qwen3_moe", "lm_head.weight", torch.int64),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias", torch.int8),
        ("gpt_oss", "model.layers.1.self_attn.sinks", torch.uint8),
    ],
)
def test_weights_that_are_not_in_16_bits(saved, tmp_path, architecture, name, dtype):
    """Transformers would cast them, without the scales that they were made with."""
    cls, path = saved(architecture)
    cls.from_pretrained(path, dtype=BF16).save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    refused((cls, tmp_path), rf"model.safetensors: tensor '{name}' has dtype .*, wanted F32, BF16 or F16")


def test_files_that_contradict_each_other(saved, tmp_path):
    cls, path = saved("qwen3_moe")
    shutil.copytree(path, tmp_path / "copy")
    first, second, *_ = sorted((tmp_path / "copy").glob("*.safetensors"))
    (name, *_) = load_file(first)
    edit_tensors(tmp_path / "copy", lambda tensors: tensors.update({name: load_file(first)[name] * 2}), second.name)
    refused((cls, tmp_path / "copy"), rf"tensor '{name}' is also in .*, wanted in one file only")
    with second.open("r+b") as file:
        file.truncate(second.stat().st_size - 5)
    refused((cls, tmp_path / "copy"), f"{second.name}: is truncated or no safetensors file")


def test_a_model_without_its_head(saved):
    path = saved("qwen3_moe")[1]
    loaded = transformers.AutoModel.from_pretrained(path, dtype=BF16, quantization_config=ThunderMoeConfig())
    assert_same(loaded, quantize_(transformers.AutoModel.from_pretrained(path, dtype=BF16)))


def refused(saved, match, error=ValueError, config=None, **options):
    with pytest.raises(error, match=match):
        load(saved, ThunderMoeConfig() if config is None else config, **options)


def test_bad_options(saved):
    here = saved("qwen3_moe")
    with pytest.raises(TypeError, match=r"linears: got <function .*, wanted names or patterns .* call quantize_"):
        ThunderMoeConfig(linears=lambda module, name: True)
    with pytest.raises(TypeError, match=r"filter: got \[1\], wanted names or patterns"):
        ThunderMoeConfig(filter=[1])
    with pytest.raises(ValueError, match="quant_method: got 'fp8', wanted 'thunder_moe_on_load'"):
        ThunderMoeConfig(quant_method="fp8")
    for option, what in (("filter", "experts"), ("linears", "dense layer"), ("modules_to_not_convert", "module")):
        match = rf"'layers\.\*' fits no {what} of Qwen3MoeForCausalLM, .* close names are 'model.layers.\*"
        refused(here, match, config=ThunderMoeConfig(**{option: ["*layers.0.*", "layers.*"]}))
    refused(
        here,
        "filter: 'lm_head' fits modules of another kind, .* wanted experts of",
        config=ThunderMoeConfig(filter="lm_head"),
    )
    for option in (dict(scale_search="best"), dict(layout="swizzled"), dict(format="int4"), dict(format={"*": "int4"})):
        with pytest.raises(ValueError, match=rf"{next(iter(option))}: got '\w+', wanted"):
            ThunderMoeConfig(**option)
    refused(here, "scale_search: .* MXFP8", config=ThunderMoeConfig(format={"*": "mxfp8"}, scale_search="mse"))
    with pytest.raises(ValueError, match="scale_search: got 'mse', wanted None: MXFP8"):
        ThunderMoeConfig(format="mxfp8", scale_search="mse")
    refused(here, r"format: 'layers\.\*' fits no module", config=ThunderMoeConfig(format={"layers.*": "mxfp8"}))
    with pytest.raises(TypeError, match="format: got 8, wanted a format, or a dictionary"):
        ThunderMoeConfig(format=8)
    with pytest.raises(ValueError, match="format: got a pattern twice"):
        ThunderMoeConfig(format=[["*", "mxfp8"], ["*", "nvfp4"]])
    refused(here, "layout: got 'tiled_64x64' for 'model.layers.0", config=ThunderMoeConfig(layout="tiled_64x64"))


def test_a_model_without_experts(tmp_path):
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=1)  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    refused((transformers.LlamaForCausalLM, tmp_path), "found no .* to quantize in LlamaForCausalLM")
    loaded = load((transformers.LlamaForCausalLM, tmp_path), ThunderMoeConfig(linears=ANY))
    assert type(loaded.lm_head) is NVFP4Linear


def test_bad_weights(tmp_path, saved):
    cls, path = saved("qwen3_moe")
    cls.from_pretrained(path, dtype=BF16).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(tmp_path, lambda tensors: tensors[name].view(-1)[5].fill_(float("nan")))
    refused((cls, tmp_path), r"model: 'model.layers.1.mlp.experts' has NaN or Inf in a weight of experts \[3\], wanted")
    edit_json(tmp_path / "config.json", lambda config: config.update(num_experts=9, num_local_experts=9))
    match = r"checkpoint: model.layers.0.mlp.experts.down_proj has shape \(8, 64, 32\), the model's has \(9, 64, 32\)"
    refused((cls, tmp_path), match)


def test_other_weights_of_a_wrong_shape(tmp_path, saved):
    cls, path = saved("qwen3_moe")
    cls.from_pretrained(path, dtype=BF16).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(vocab_size=72))
    refused((cls, tmp_path), r"mismatch|has shape \(64, 64\), the model's has \(72, 64\)", (RuntimeError, ValueError))


@pytest.mark.parametrize("export", ["mxfp4_gpt_oss", "modelopt_qwen3_moe"])
def test_quantized_checkpoints(export):
    with pytest.raises(ValueError, match="The model is quantized with .* but you are passing a ThunderMoeConfig"):
        transformers.AutoModelForCausalLM.from_pretrained(DATA / export, quantization_config=ThunderMoeConfig())


def test_parallel_loads(saved, monkeypatch):
    """An older transformers splits the skeleton's parameters in a way that is not known; tests/test_distributed.py has
    those of transformers 5.23."""
    own = on_load.ThunderMoeQuantizer.param_needs_quantization

    def split(self, model, *args, **options):
        model._device_mesh = object()
        return own(self, model, *args, **options)

    monkeypatch.setattr(on_load.ThunderMoeQuantizer, "param_needs_quantization", split)
    monkeypatch.setattr(sharding, "AVAILABLE", False)
    refused(saved("qwen3_moe"), r"got one \(or a tp_plan\) with transformers .*, wanted transformers >= 5.23 for 4-bit")


def test_the_log_names_each_module_once(saved, caplog):
    with caplog.at_level(logging.INFO, logger="thunder_moe"):
        load(saved("qwen3_moe"), ThunderMoeConfig())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("quantizing: ")]
    assert [line.split()[1] for line in lines] == [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert all("Qwen3MoeExperts -> NVFP4Experts" in line for line in lines)


def test_the_model_is_as_after_quantize_and_comes_back_saved(saved, tmp_path):
    loaded, model = load(saved("mixtral"), ThunderMoeConfig(linears=ANY)), saved("mixtral")[0]
    assert not hasattr(loaded, "hf_quantizer")
    assert "quantization_config" not in loaded.config.to_dict()
    assert isinstance(loaded, model)
    loaded.save_pretrained(tmp_path / "saved")
    again = model.from_pretrained(tmp_path / "saved", dtype=BF16).state_dict()
    assert all(torch.equal(bits(tensor), bits(again[name])) for name, tensor in loaded.state_dict().items())
