"""What save_checkpoint and convert write of each architecture: names that engines read, lists of 16-bit modules by the
engines' own rules, and the same logits when loaded again. Called by pytest.
"""

import fnmatch
import json
import re

import pytest
import torch
from checkpoint_files import DATA, bits, load_tensors, stream
from fast_cases import others_slow
from tiny_models import ARCHITECTURES, OTHERS, tiny_config, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import load_checkpoint, quantize_, save_checkpoint  # noqa: E402
from thunder_moe.checkpoint import Checkpoint, ExpertsLayout, convert, write_checkpoint  # noqa: E402
from thunder_moe.checkpoint.ignored import ignored_modules, merge_conflicts  # noqa: E402
from thunder_moe.formats.nvfp4 import quantize  # noqa: E402
from thunder_moe.integrations.huggingface.experts import NVFP4Experts, expert_blocks  # noqa: E402
from thunder_moe.integrations.huggingface.writing import model_config, model_tensors  # noqa: E402

ALL = ARCHITECTURES | OTHERS
BF16 = torch.bfloat16
FAST = ("llama4", "mixtral", "gpt_oss", "gemma4", "granitemoe", "nemotron_h", "qwen3_vl_moe")
TABLE = others_slow(ALL, FAST, exhaustive=True)
# Of OTHERS: tied heads, layers without experts or attention, names that no other has.
SAVED = (*ARCHITECTURES, *FAST, "afmoe", "cohere2_moe", "ernie4_5_moe", "jamba", "lfm2_moe", "minimax", "phimoe")
# Linears that engines merge into one, whose precision has to be the same.
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))


def known(name):
    """The name, or a skip with a transformers that lacks the architecture."""
    if not hasattr(transformers, ALL[name][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {ALL[name][0]}")
    return name


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


# The three rules, each written from the engine's documented behaviour; `module` is a path of the checkpoint.


def skipped_by_vllm(module, ignore):
    """Exactly, as a part of the module's path, or as a pattern; experts also when one of them is listed."""
    experts = module.endswith(".experts") and any(module in entry for entry in ignore if "experts" in entry)
    return experts or any(entry in module or fnmatch.fnmatch(module, entry) for entry in ignore)


def skipped_by_sglang(module, ignore):
    """The whole path or one part of it, "*" for anything."""
    patterns = [re.compile(re.escape(entry).replace(r"\*", ".*")) for entry in ignore]
    return any(pattern.fullmatch(part) for pattern in patterns for part in (module, *module.split(".")))


def skipped_by_compressed_tensors(module, ignore):
    """Exactly, or a regular expression behind "re:"; TensorRT-LLM's patterns agree where there is no "*"."""
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in ignore)


RULES = (skipped_by_vllm, skipped_by_sglang, skipped_by_compressed_tensors)


def modules_of(path):
    """({4-bit modules}, {16-bit modules}) of a checkpoint as engines have them: all experts of a layer are one."""
    tensors = load_tensors(path)
    quantized, plain = set(), set()
    for name, tensor in tensors.items():
        experts = re.match(r"(.+\.experts)\.", name)
        module = experts.group(1) if experts else name.removesuffix(".weight")
        beside = re.fullmatch(r"(.+)\.(input|output)_linear\.weight", name)
        if beside and tensor.ndim == 3:
            module = f"{beside.group(1)}.experts"
        if tensor.dtype == torch.uint8:
            quantized.add(module)
        elif tensor.dtype.is_floating_point and tensor.ndim >= 2 and (experts or name.endswith(".weight")):
            plain.add(module)
    return quantized, plain - quantized


def check_ignored(path, tied):
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    old = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    ignore = config["ignore"]
    assert ignore == old["exclude_modules"]
    assert len(ignore) == len(set(ignore))
    quantized, plain = modules_of(path)
    assert quantized
    for rule in RULES:
        assert {module for module in plain if not rule(module, ignore)} == set()
        assert {module for module in quantized if rule(module, ignore)} == set()
        if tied:
            assert "lm_head" not in plain | quantized
        assert rule("lm_head", ignore) == ("lm_head" not in quantized)
    tensors = load_tensors(path)
    for names in MERGED:
        for module in quantized:
            parent, _, own = module.rpartition(".")
            if own in names:
                siblings = {f"{parent}.{name}" for name in names}
                assert not siblings & plain
                assert len({tensors[f"{sibling}.weight_scale_2"].item() for sibling in siblings & quantized}) == 1
    return quantized, plain


def check_names(path, name):
    """Quantized experts are one by one but for GPT-OSS."""
    tensors = load_tensors(path)
    experts = [key for key in tensors if ".experts." in key and tensors[key].dtype == torch.uint8]
    projections = r"\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
    for key in experts:
        if name == "gpt_oss":
            assert re.fullmatch(r"model\.layers\.\d\.mlp\.experts\.(gate_up|down)_proj", key)
        else:
            assert re.fullmatch(r".+\.layers\.\d\.(\w+\.)?experts\.\d" + projections, key)
            scale = tensors[key.replace(".weight", ".weight_scale_2")]
            assert scale.shape == ()
            for gate, up in (("gate_proj", "up_proj"), ("w1", "w3")):
                other = key.replace(f".{gate}.", f".{up}.").replace(".weight", ".weight_scale_2")
                assert torch.equal(scale, tensors[other]) or f".{gate}." not in key
    return experts


@pytest.mark.parametrize("name", others_slow(ALL, SAVED, exhaustive=True))
def test_saved_experts(tmp_path, name):
    model = quantize_(tiny_model(known(name), BF16))
    save_checkpoint(model, tmp_path / "out")
    quantized, _ = check_ignored(tmp_path / "out", bool(model.all_tied_weights_keys))
    assert len(quantized) == len(ALL[name][2])
    assert check_names(tmp_path / "out", name)
    assert torch.equal(logits(load_checkpoint(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("name", TABLE)
def test_saved_partly_quantized(tmp_path, name):
    """The first block of experts stays 16-bit, and the linears of its layer alone become 4-bit."""
    first = f"layers.{ALL[known(name)][2][0]}."
    model = tiny_model(name, BF16)
    quantize_(model, filter=lambda module, path: (first in path) == isinstance(module, torch.nn.Linear), linears="*")
    blocks = [path for path, module in model.named_modules() if isinstance(module, NVFP4Experts)]
    assert len(blocks) == len(ALL[name][2]) - 1
    save_checkpoint(model, tmp_path / "out")
    quantized, plain = check_ignored(tmp_path / "out", bool(model.all_tied_weights_keys))
    assert sum(module.endswith(".experts") for module in plain) == 1
    assert sum(module.endswith(".experts") for module in quantized) == len(blocks)
    assert torch.equal(logits(load_checkpoint(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("name", TABLE)
def test_converted(tmp_path, name):
    """convert writes the names and lists of save_checkpoint."""
    model = tiny_model(known(name), BF16)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "converted")
    save_checkpoint(quantize_(model), tmp_path / "saved")
    converted, saved = (load_tensors(tmp_path / path) for path in ("converted", "saved"))
    assert converted.keys() == saved.keys()
    for key, tensor in saved.items():
        assert converted[key].dtype == tensor.dtype
        assert torch.equal(bits(converted[key]), bits(tensor)), key
    first, second = ((tmp_path / path / "hf_quant_config.json").read_text() for path in ("converted", "saved"))
    assert first == second
    assert check_ignored(tmp_path / "converted", bool(model.all_tied_weights_keys))
    loaded = logits(load_checkpoint(tmp_path / "converted"))
    wanted = logits(model)
    if name != "gpt_oss":
        assert torch.equal(loaded, wanted)
    else:  # other roundings, the same error
        stock = logits(type(model).from_pretrained(tmp_path / "source", dtype=BF16)).float()
        errors = [(each.float() - stock).norm() / stock.norm() for each in (loaded, wanted)]
        assert 0 < errors[0] < 1.2 * errors[1]


def small_step3p7():
    text = tiny_config("qwen3_moe").to_dict() | dict(
        model_type="step3p7_text", n_routed_experts=8, share_expert_dim=32, mlp_layer_types=["dense", "sparse"],
        layer_types=["full_attention"] * 2, tie_word_embeddings=False,
    )  # fmt: skip
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=56)
    config = transformers.Step3p7Config(text_config=text, vision_config=vision)
    return transformers.Step3p7ForConditionalGeneration._from_config(config, dtype=BF16)


def small_aria():
    sizes = {name: getattr(tiny_config("mixtral"), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    experts = dict(moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1, num_hidden_layers=1)
    config = transformers.AriaTextConfig(**sizes, **experts, num_attention_heads=4, num_key_value_heads=2)
    return transformers.AriaTextForCausalLM._from_config(config, dtype=BF16)


def small_ernie_vl():
    text = tiny_config("ernie4_5_moe").to_dict() | dict(
        model_type="ernie4_5_vl_moe_text", moe_intermediate_size=[32, 16], mlp_layer_types=["dense", "sparse"],
        rope_parameters=dict(mrope_section=[2, 2, 4], rope_type="default", rope_theta=10000.0),
    )  # fmt: skip
    vision = dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32)
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Ernie4_5_VLMoeForConditionalGeneration._from_config(config, dtype=BF16)


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (small_step3p7, ["model.layers.1.moe.experts"]),
        (small_aria, ["model.layers.0.mlp.experts"]),
        (small_ernie_vl, [f"model.language_model.layers.1.mlp.{kind}_moe.experts" for kind in ("text", "vision")]),
    ],
)
def test_experts_that_checkpoints_name_otherwise(tmp_path, make, paths):
    try:
        model = make()
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    if not expert_blocks(model):
        pytest.skip(f"transformers {transformers.__version__}: other experts than those of the interface")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    save_checkpoint(quantize_(model), tmp_path / "out")
    assert Checkpoint(tmp_path / "out").experts == paths
    back = load_checkpoint(tmp_path / "out")
    first, second = model.state_dict(), back.state_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(bits(tensor), bits(second[key])), key


@pytest.mark.parametrize("name", ["llama4", "qwen3_vl_moe"])
def test_files_with_fused_names_load(tmp_path, name):
    """As they were written before: one tensor for all experts, with one scale."""
    model = quantize_(tiny_model(known(name), BF16))
    for module in model.modules():
        if isinstance(module, NVFP4Experts):
            for linear in (module.gate_up_proj, module.down_proj):
                linear.global_scale.fill_(linear.global_scale.mean())
    tensors = list(model_tensors(model))
    write_checkpoint(tmp_path / "old", model_config(model), tensors, layout=ExpertsLayout(fused=True))
    assert any(key.endswith(".experts.gate_up_proj_weight_scale_2") for key in load_tensors(tmp_path / "old"))
    loaded = load_checkpoint(tmp_path / "old")
    assert torch.equal(logits(loaded), logits(model))
    save_checkpoint(loaded, tmp_path / "new")
    assert check_names(tmp_path / "new", name)
    convert(tmp_path / "old", tmp_path / "converted")
    new, converted = (load_tensors(tmp_path / path) for path in ("new", "converted"))
    assert new.keys() == converted.keys()
    for key, tensor in new.items():
        assert torch.equal(bits(tensor), bits(converted[key])), key


def test_ignore_lists():
    plain = {
        "model.embed_tokens.weight": (16, 32),
        "model.norm.weight": (32,),
        "model.layers.0.experts.gate_up_proj": (4, 64, 32),
        "model.layers.0.experts.gate_up_proj_bias": (4, 64),
        "model.layers.0.router.proj.weight": (4, 32),
        "model.layers.0.router.per_expert_scale": (4,),
        "model.layers.1.mlp.experts.3.w1.weight": (32, 32),
        "model.layers.1.mlp.shared_experts.up_proj.weight": (32, 32),
        "model.layers.2.moe.input_linear.weight": (4, 64, 32),
        "model.layers.2.mlp.input_linear.weight": (64, 32),
    }
    wanted = [
        "lm_head", "model.embed_tokens", "model.layers.0.experts", "model.layers.0.router.proj",
        "model.layers.1.mlp.experts", "model.layers.1.mlp.experts.3.w1", "model.layers.1.mlp.shared_experts.up_proj",
        "model.layers.2.mlp.input_linear", "model.layers.2.moe.experts", "model.layers.2.moe.input_linear",
    ]  # fmt: skip
    assert ignored_modules(plain.items()) == wanted
    assert ignored_modules(plain.items(), ["lm_head"]) == wanted[1:]
    assert ignored_modules([*plain.items(), ("language_model.lm_head.weight", (16, 32))])[0] == "language_model.lm_head"


def test_linears_that_engines_merge():
    scales = {"a.q_proj": 1.0, "a.k_proj": 1.0, "a.v_proj": 1.0, "b.gate_proj": 1.0, "b.up_proj": 2.0, "w1": 1.0}
    (words,) = merge_conflicts(["c.k_proj"], scales)
    assert words == "b.gate_proj and b.up_proj have several global scales, of which engines take the largest"
    first, _, last = merge_conflicts(
        ["a.k_proj", "w3"], {path: 1.0 for path in scales if path != "a.k_proj"} | {"b.up_proj": 2.0}
    )
    assert first == "a.q_proj and a.k_proj and a.v_proj are of 4 and of 16 bits, which engines refuse"
    assert last == "w1 and w3 are of 4 and of 16 bits, which engines refuse"


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4"])
def test_linears_that_engines_merge_and_the_model_does_not_share_a_scale(name):
    """As if they were quantized in one piece, each exactly once; a part that is declined has no say."""
    names = ("q_a_proj", "kv_a_proj_with_mqa") if name == "deepseek_v3" else ("q_proj", "k_proj", "v_proj")
    own = tiny_model(known(name), BF16).model.layers[1].self_attn
    for taken in (names, names[:2], names[:1]):
        model = tiny_model(name, BF16)
        quantize_(model, linears=lambda _, path, taken=taken: path.endswith(taken) and "layers.1." in path)
        whole = quantize(torch.cat([own.get_submodule(child).weight for child in taken])[None].detach())
        parts = [
            model.model.layers[1].self_attn.get_submodule(child).packed_weight.to_layout("linear") for child in taken
        ]
        assert torch.equal(torch.cat([part.qdata for part in parts], 1), whole.qdata)
        assert torch.equal(bits(torch.cat([bits(part.scale) for part in parts], 1)), bits(whole.scale))
        assert all(torch.equal(part.row_global_scale()[0, :1], whole.global_scale) for part in parts)


def test_scales_that_engines_do_not_keep_are_said(tmp_path, caplog):
    checkpoint = Checkpoint(DATA / "compressed_tensors_qwen3_moe")
    write_checkpoint(tmp_path / "one", checkpoint.config, stream(checkpoint))
    experts, linears = (record.message for record in caplog.records if "global scales" in record.message)
    assert "layers.0.mlp.experts: gate and up of 3 experts have different global scales" in experts
    assert "q_proj and model.layers.0.self_attn.k_proj and model.layers.0.self_attn.v_proj have several" in linears
    caplog.clear()
    convert(checkpoint.path, tmp_path / "converted")
    assert [record.message for record in caplog.records if "global scales" in record.message] == [experts, linears]
    caplog.clear()
    save_checkpoint(quantize_(tiny_model("qwen3_moe", BF16)), tmp_path / "two")
    assert not caplog.records


def test_sixteen_bits_of_the_model_as_it_is(tmp_path):
    """config.json says the dtype of the weights in the file, whatever the model was loaded in."""
    model = quantize_(tiny_model("qwen3_moe", BF16))
    config = tiny_config("qwen3_moe")
    for number, dtype in enumerate((BF16, torch.float32)):
        save_checkpoint(model.to(dtype), tmp_path / str(number))
        written = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert written["dtype"] == str(dtype).removeprefix("torch.")
        assert written["architectures"] == ["Qwen3MoeForCausalLM"]
        assert written["model_type"] == config.model_type
        assert load_checkpoint(tmp_path / str(number)).dtype == dtype
