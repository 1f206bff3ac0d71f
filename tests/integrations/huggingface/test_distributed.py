"""transformers' DistributedConfig with 4-bit experts: processes of a gloo group compute what one process does, and read
their part of a checkpoint alone; what is refused. Called by pytest; distributed_jobs has what the processes run.
"""

import copy
import importlib.util

import distributed_jobs as jobs
import pytest
import torch
from checkpoint_files import DATA, EXPORTS, bits, edit_tensors
from fast_cases import others_slow
from safetensors.torch import load_file
from tiny_models import tiny_config, tiny_model

transformers = pytest.importorskip("transformers")

from thunder_moe import quantize_  # noqa: E402
from thunder_moe.integrations.huggingface.checkpoint import load_checkpoint, save_checkpoint  # noqa: E402
from thunder_moe.integrations.huggingface.sharding import AVAILABLE, cut_  # noqa: E402
from thunder_moe.nn.packed import PackedModule  # noqa: E402

needs_sharding = pytest.mark.skipif(not AVAILABLE, reason="transformers < 5.23 cannot shard 4-bit experts")

EP, TP = dict(tp_size=2, ep_size=2), dict(tp_size=2)
ALL_REDUCE, ALL_TO_ALL = dict(EP, ep_implementation="all_reduce"), dict(EP, ep_implementation="all_to_all")
FSDP = dict(fsdp_size=2, ep_size=2)
LAYOUTS = dict(all_reduce=ALL_REDUCE, all_to_all=ALL_TO_ALL, tp=TP, fsdp=FSDP)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of tiny models by architecture, with the logits of one process."""
    known = {}

    def of(name, change=None):
        if (name, change) not in known:
            path = tmp_path_factory.mktemp(name) / "checkpoint"
            model = tiny_model(name)
            if change is not None:
                change(model)
            if not any(isinstance(module, PackedModule) for module in model.modules()):
                quantize_(model)
            save_checkpoint(model, path)
            known[name, change] = path, load_checkpoint(path, dtype=torch.float32)
        return known[name, change]

    return of


def close(actual, expected):
    # The same 4-bit weights, summed in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "llama4", "gpt_oss", "deepseek_v3"])
def test_two_processes_compute_what_one_does(name, layout, saved, ranks):
    path, model = saved(name)
    expected = jobs.logits_of(model)
    answers = ranks(2)(jobs.logits, path, LAYOUTS[layout])
    experts, features = (8, 16) if layout == "tp" else (4, 32)
    for actual, gate_up, down in answers:
        close(actual, expected)
        assert gate_up == (experts, 2 * features, 64)
        assert down == (experts, 64, features)


# An export in each format.
FORMATS = ("compressed_tensors_mxfp8_qwen3_moe", "compressed_tensors_qwen3_moe", "modelopt_llama4")
FORMATS += ("modelopt_mixed_qwen3_moe", "mxfp4_gpt_oss")


@needs_sharding
@pytest.mark.parametrize("export", others_slow(EXPORTS, FORMATS, exhaustive=True))
def test_real_exports(export, ranks):
    """Of every format; attention has a single head for keys and values, and stays whole."""
    whole = {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}
    expected = jobs.logits_of(load_checkpoint(DATA / export, dtype=torch.float32), high=16)
    for actual, gate_up, _ in ranks(2)(jobs.logits, DATA / export, dict(TP, tp_plan=whole), 9, None, 16):
        close(actual, expected)
        assert gate_up == (3, 64, 32)


@needs_sharding
@pytest.mark.parametrize("layout", ["all_reduce", pytest.param("tp", marks=pytest.mark.exhaustive)])
def test_compiles_without_a_graph_break(layout, saved, ranks):
    path, _ = saved("qwen3_moe")
    for actual, expected in ranks(2)(jobs.compiled, path, LAYOUTS[layout]):
        close(actual, expected)


def mxfp8_and_nvfp4(model):
    """Experts of a layer in each format, linears in MXFP8."""

    def format_of(module, name):
        return "nvfp4" if "layers.1." in name and "experts" in name else "mxfp8"

    quantize_(model, linears=lambda module, name: "self_attn" in name, format=format_of)


def mxfp8_linears(model):
    quantize_(model, linears=lambda module, name: True, format=lambda _, name: "nvfp4" if "exp" in name else "mxfp8")


@needs_sharding
def test_both_formats(saved, ranks):
    path, model = saved("qwen3_moe", mxfp8_and_nvfp4)
    expected = jobs.logits_of(model)
    for actual, *_ in ranks(2)(jobs.logits, path, ALL_REDUCE):
        close(actual, expected)
    for _, message in ranks(2)(jobs.refusal, path, TP):  # 16 of the 32 features
        assert "tp_size: got 2 for experts of 32 intermediate features" in message
        assert "multiples of 32, the features that share a scale" in message


def all_linears(model):
    quantize_(model, linears=lambda module, name: True)


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("linears", [True, False])
@pytest.mark.parametrize("layout", ["all_reduce", "fsdp"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_dense_layers(name, layout, linears, saved, ranks):
    """Those that are 4-bit in the checkpoint, too, and those that become 16-bit; attention has parts of both."""
    path, _ = saved(name, all_linears)
    expected = jobs.logits_of(load_checkpoint(path, dtype=torch.float32, linears=linears))
    if layout == "fsdp" and not linears:
        for _, message in ranks(2)(jobs.refusal, path, FSDP, dict(linears=False)):
            assert "would be dequantized into a parameter of FSDP, wanted linears=True" in message
        return
    for actual, *_ in ranks(2)(jobs.logits, path, LAYOUTS[layout], 9, dict(linears=linears)):
        close(actual, expected)


def one_expert_for_all(model):
    """All tokens go to the first two experts, which are the first rank's."""
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [9, 1])  # a single token per sequence: fewer than ranks behind the TP slicing of 4
@pytest.mark.parametrize("layout", ["all_reduce", "all_to_all"])
def test_a_rank_without_tokens(layout, count, saved, ranks):
    path, model = saved("qwen3_moe", one_expert_for_all)
    for actual, *_ in ranks(2)(jobs.logits, path, LAYOUTS[layout], count):
        close(actual, jobs.logits_of(model, count))


@needs_sharding
@pytest.mark.parametrize("ep_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_four_processes(ep_size, saved, ranks):
    """Attention is tensor parallel, the batches are two; with ep_size 2 there are two copies of each expert."""
    path, model = saved("qwen3_moe")
    config = dict(tp_size=2, fsdp_size=2, ep_size=ep_size)
    for actual, gate_up, _ in ranks(4)(jobs.logits, path, config):
        close(actual, jobs.logits_of(model))
        assert gate_up == (8 // ep_size, 64, 64)


@needs_sharding
@pytest.mark.parametrize("layout", ["all_reduce", "tp"])
def test_the_same_tokens(layout, saved, ranks):
    path, model = saved("qwen3_moe")
    expected = model.generate(jobs.tokens(), do_sample=False, max_new_tokens=6)
    for actual in ranks(2)(jobs.generated, path, LAYOUTS[layout]):
        assert torch.equal(actual, expected)


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["all_reduce", "tp"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # per expert, and one tensor for all experts
def test_a_process_reads_its_part_alone(name, layout, saved, ranks):
    path, model = saved(name)
    whole = jobs.expert_bytes(model)
    for read, largest, own, parameters in ranks(2)(jobs.bytes_read, path, LAYOUTS[layout]):
        assert own <= whole // 2 + 512  # TP: all global scales
        assert own <= read <= own + 6144  # biases, and global scales of gate and up apart
        assert largest <= own // len(jobs.experts_of(model))
        if name == "qwen3_moe":  # of the experts' biases a process counts its part
            assert parameters == model.num_parameters()


@needs_sharding
def test_refused(saved, ranks, tmp_path):
    path, _ = saved("qwen3_moe")
    odd = tiny_config("qwen3_moe")
    odd.num_experts = odd.num_local_experts = 7
    save_checkpoint(quantize_(tiny_model("qwen3_moe", config=odd)), tmp_path / "odd")
    for where, options, message in (
        (path, dict(tp_size=4, ep_size=4), "4 processes, but world_size is 2"),
        (tmp_path / "odd", EP, "ep_size: got 2 for 7 experts, wanted a size that divides their number"),
        (path, dict(EP, pp_size=2), "pp_size 2, wanted 1|4 processes"),
    ):
        for kind, text in ranks(2)(jobs.refusal, where, options):
            assert any(each in text for each in message.split("|")), (kind, text)
    for _, text in ranks(2)(jobs.refusal, path, EP, dict(device="cpu")):
        assert "device: got 'cpu' with a distributed_config, wanted None" in text
    close(ranks(2)(jobs.logits, path, EP)[1][0], jobs.logits_of(saved("qwen3_moe")[1]))  # nobody waits for anybody


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """16-bit checkpoints of tiny models by architecture, and the model that one process quantizes."""
    known = {}

    def of(name, format="nvfp4"):
        if (name, format) not in known:
            path = tmp_path_factory.mktemp(f"{name}-16")
            model = tiny_model(name)
            model.save_pretrained(path)
            known[name, format] = path, quantize_(model, format=format)
        return known[name, format]

    return of


@needs_sharding
@pytest.mark.parametrize("layout", ["all_reduce", "tp"])
def test_a_stock_model_beside_a_packed_one(layout, saved, plain, ranks):
    """Transformers' styles stay its own, and serve 16-bit models as before."""
    (path, _), (where, _) = saved("qwen3_moe", all_linears), plain("qwen3_moe")
    stock = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    for homes, left, actual in ranks(2)(jobs.beside, path, where, LAYOUTS[layout]):
        assert (homes, left) == ({"transformers"}, False)
        close(actual, jobs.logits_of(stock))


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("on_load", [False, True], ids=["after", "on_load"])
@pytest.mark.parametrize(
    ("name", "layout", "format"),
    [
        ("qwen3_moe", "all_reduce", "nvfp4"),
        ("qwen3_moe", "tp", "nvfp4"),
        ("llama4", "tp", "nvfp4"),
        ("gpt_oss", "all_to_all", "nvfp4"),
        ("gpt_oss", "all_to_all", "mxfp8"),
    ],
)
def test_quantized_in_parts_as_whole(name, layout, format, on_load, plain, ranks):
    """Each process quantizes its part to the bits that the whole has there."""
    path, model = plain(name, format)
    answers = ranks(2)(jobs.quantized, path, LAYOUTS[layout], on_load, format)
    wholes = jobs.experts_of(model)
    for actual, weights, parts in answers:
        close(actual, jobs.logits_of(model))
        for whole, part in zip(wholes, parts, strict=True):
            assert not part.is_unsharded
            expected = copy.deepcopy(whole)
            cut_(expected, part)
            prefix = next(path for path, module in model.named_modules() if module is whole)
            state = {f"{prefix}.{name}": tensor for name, tensor in expected.state_dict().items()}
            for key, tensor in state.items():
                assert torch.equal(weights.pop(key).view(torch.uint8), tensor.view(torch.uint8)), key
        assert not weights


@needs_sharding
@pytest.mark.parametrize("on_load", [False, True], ids=["after", "on_load"])
def test_parts_of_blocks_are_refused(on_load, plain, ranks):
    path, _ = plain("qwen3_moe", "mxfp8")
    for message in ranks(2)(jobs.attempt, path, TP, on_load, "mxfp8"):
        assert "in_features" in message
        assert "multiple of 32" in message


@needs_sharding
@pytest.mark.parametrize("layout", ["tp", "all_reduce"])
def test_training_for_4_bits_refuses_parts_of_weights(layout, plain, ranks):
    path, _ = plain("qwen3_moe")
    for message in ranks(2)(jobs.prepared, path, LAYOUTS[layout]):
        assert "wanted whole weights" in message


@needs_sharding
@pytest.mark.parametrize("on_load", [False, True], ids=["after", "on_load"])
def test_one_process_with_nan_stops_all(on_load, plain, ranks, tmp_path):
    model = tiny_model("qwen3_moe")
    for experts in (layer.mlp.experts for layer in model.model.layers):
        experts.down_proj.data[0, 0, 31] = torch.nan  # of the first expert, and of the second share of the features
    model.save_pretrained(tmp_path)
    first, second = ranks(2)(jobs.attempt, tmp_path, TP, on_load)
    assert "another process cannot quantize its part" in first
    assert "has NaN or Inf in a weight" in second


@needs_sharding
def test_one_process_with_a_wrong_shape_stops_all(ranks, tmp_path):
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)

    def add_expert(tensors):  # of nine experts the first of two processes reads five, the second four as the model has
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    edit_tensors(tmp_path, add_expert)
    first, second = ranks(2)(jobs.attempt, tmp_path, ALL_REDUCE, True)
    assert "has shape (5, 64, 32), the model's has (4, 64, 32)" in first
    assert "another process cannot quantize its part" in second


@needs_sharding
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4"])
def test_adapters_train_on_whole_experts(name, layout, saved, ranks):
    path, _ = saved(name)
    expected, wanted = jobs.adapted(path, None)
    assert len(wanted) == 8
    for rank, (actual, gradients) in enumerate(ranks(2)(jobs.adapted, path, LAYOUTS[layout])):
        close(actual, expected)
        assert gradients.keys() == wanted.keys()
        for key, gradient in gradients.items():
            close(gradient, wanted[key][4 * rank : 4 * rank + 4])


@needs_sharding
def test_adapters_that_are_refused(saved, ranks, tmp_path):
    path, _ = saved("qwen3_moe")
    for messages in ranks(2)(jobs.refusals_of_adapters, path, TP, tmp_path):
        assert len(messages) == 4
        assert all("processes share its features: adapters are for whole linears" in each for each in messages[:2])
        assert all("is a part of its experts" in each for each in messages[2:])
    for messages in ranks(2)(jobs.refusals_of_adapters, path, EP, tmp_path):
        assert len(messages) == 4
        assert "share: got 'A' at" in messages[0]
        assert all("is a part of its experts" in each for each in messages[1:])
        assert "whose adapters are whole" in messages[3]


@needs_sharding
@pytest.mark.parametrize(
    ("name", "change", "layout"),
    [
        pytest.param("qwen3_moe", None, "all_reduce", marks=pytest.mark.exhaustive),
        ("qwen3_moe", all_linears, "tp"),
        pytest.param("qwen3_moe", mxfp8_and_nvfp4, "all_reduce", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", mxfp8_linears, "tp", marks=pytest.mark.exhaustive),
        ("gpt_oss", None, "fsdp"),
        pytest.param("gpt_oss", None, "tp", marks=pytest.mark.exhaustive),
        ("llama4", None, "all_to_all"),
    ],
)
def test_saved_by_all_as_by_one(name, change, layout, saved, ranks, tmp_path):
    """Bit for bit what was loaded; the first process alone writes, and what it raises stops all."""
    path, _ = saved(name, change)
    answers = ranks(2)(jobs.saved_again, path, LAYOUTS[layout], tmp_path)
    expected = load_file(path / "model.safetensors")
    for folder in ("checkpoint", "pretrained"):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            assert tensor.dtype == expected[key].dtype
            assert torch.equal(bits(tensor), bits(expected[key])), key
        assert "distributed_config" not in (tmp_path / folder / "config.json").read_text()
    assert "FileExistsError" in answers[0][1]
    assert "RuntimeError: the first process could not save the model" in answers[1][1]
    for messages in answers:
        assert "is a part of its" in messages[0]
        assert "state_dict: got one for a model that several processes share" in messages[2]
    assert not [entry for entry in tmp_path.iterdir() if entry.name not in ("checkpoint", "pretrained")]


@pytest.mark.skipif(AVAILABLE, reason="of an older transformers")
def test_older_transformers_are_refused_by_name(saved, ranks):
    path, _ = saved("qwen3_moe")
    answers = ranks(2)(jobs.refusal, path, TP)
    if importlib.util.find_spec("accelerate"):  # without it transformers has an error of its own
        answers += ranks(2)(jobs.refusal_of_tp_plan, path)
    for kind, text in answers:
        assert kind == "ValueError"
        assert "wanted transformers >= 5.23 for 4-bit experts on several processes" in text
