"""One meaning of filter, ignore, linears and format: patterns and functions, for experts and dense layers; the plan.
Called by pytest; integrations/huggingface/test_selected_checkpoints.py compares the entry points.
"""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from thunder_moe import (
    GroupedSwiGLU,
    Llama4MoE,
    Llama4MoEConfig,
    add_lora_,
    dequantize_,
    plan_quantization,
    prepare_qat_,
    quantize_,
)
from thunder_moe.quantization.plan import exclusive

BF16 = torch.bfloat16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.moe = Llama4MoE(Llama4MoEConfig(64, 32, 4, top_k=2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(12))
        self.head = nn.Linear(64, 48)


def make():
    torch.manual_seed(0)
    return Model().to(BF16)


def formats(model):
    """Name -> format of each packed block of experts, dense layer, and part of a block that is not packed whole."""
    names = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "NVFP4GroupedSwiGLU":
            names[name] = module.down_proj.format_name
        elif kind in ("NVFP4Linear", "NVFP4GroupedLinear") and name.rpartition(".")[0] not in names:
            names[name] = module.format_name
    return names


def layers(model):
    """The layers of which anything is packed."""
    return sorted({int(name.split(".")[1]) for name in formats(model) if name.startswith("layers.")})


def by_name(module, name):
    return name.startswith("layers.1.")


@pytest.mark.parametrize(
    ("options", "taken", "head"),
    [
        (dict(filter="layers.1"), [1], False),
        (dict(filter="layers.1.*"), [1], False),
        (dict(filter="layers.1*"), [1, 10, 11], False),
        (dict(filter=["layers.1", "head"]), [1], True),
        (dict(filter=("*.2.q_proj", "*.3.moe.routed_experts")), [2, 3], False),
        (dict(filter=r"re:layers\.[23]\."), [2, 3], False),
        (dict(filter=r"re:.*layers\.(?!0\.)"), [*range(1, 12)], False),
        (dict(filter=by_name), [1], False),
        (dict(ignore="layers.0"), [*range(1, 12)], True),
        (dict(ignore=["layers.?.*", "head"]), [10, 11], False),
        (dict(filter="layers.1*", ignore=[r"re:.*\.10\."]), [1, 11], False),
        (dict(filter=[]), [], None),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],  # of a function: the same in every process
)
def test_patterns_are_of_experts_and_dense_layers(options, taken, head):
    if head is None:
        with pytest.raises(ValueError, match="all declined by the filter or ignored"):
            quantize_(make(), linears="*", **options)
        return
    model = quantize_(make(), linears="*", **options)
    assert layers(model) == taken
    assert (type(model.head).__name__ == "NVFP4Linear") == head
    for number, layer in enumerate(model.layers):
        packed = [type(module) is not nn.Linear for module in (layer.q_proj, layer.o_proj)]
        if options.get("filter") != ("*.2.q_proj", "*.3.moe.routed_experts"):
            assert packed == [number in taken] * 2
            assert (type(layer.moe.routed_experts) is not GroupedSwiGLU) == (number in taken)
        assert type(layer.moe.router) is nn.Linear


def test_a_dictionary_of_formats_beside_a_filter():
    model = quantize_(
        make(),
        format={"layers.1.moe": "MXFP8", "*.o_proj": None, "re:.*q_proj": "mxfp8"},
        filter=["layers.1", "layers.2"],
        ignore="*.shared_expert",
        linears="*",
    )
    assert formats(model) == {
        "layers.1.q_proj": "mxfp8",
        "layers.1.moe.routed_experts": "mxfp8",
        "layers.2.q_proj": "mxfp8",
        "layers.2.moe.routed_experts": "nvfp4",
    }


@pytest.mark.parametrize("option", ["filter", "ignore", "linears", "format"])
def test_a_pattern_that_fits_nothing_is_an_error_with_close_names(option):
    for pattern, close in (("layer.0.q_proj", "layers.*.q_proj"), ("re:q_proj", "layers.*.q_proj")):
        options = {"linears": True, option: {pattern: "mxfp8"} if option == "format" else ["layers.0*", pattern]}
        model = make()
        with pytest.raises(ValueError, match=f"{option}: '{pattern}' fits no .* of Model, .* close names .*'{close}'"):
            quantize_(model, **{option: options[option], "linears": options["linears"]})
        assert not formats(model)
    with pytest.raises(ValueError, match=rf"{option}: got 're:\(', wanted a regular expression"):
        quantize_(make(), **{"linears": True, option: {"re:(": None} if option == "format" else "re:("})


def test_what_cannot_be_converted_is_no_match_of_a_filter():
    with pytest.raises(
        ValueError, match="filter: 'head' fits modules of another kind, or converted already, wanted experts of Model"
    ):
        quantize_(make(), filter=["layers.0", "head"])
    with pytest.raises(ValueError, match="filter: '.*router' fits modules .*, wanted experts or dense layers"):
        quantize_(make(), filter="*.router", linears=True)
    quantize_(make(), ignore=["*.router", "head"])  # lists that models share name more than these options reach


def test_a_second_call_for_the_same_names_is_an_error_and_for_others_converts_them():
    model = quantize_(make(), filter="layers.0", linears="*")
    with pytest.raises(ValueError, match="filter: 'layers.0' fits modules of another kind, or converted already"):
        quantize_(model, filter="layers.0", linears="*")
    assert repr(quantize_(model, linears="*")) == repr(quantize_(make(), linears="*"))


def test_a_regular_expression_of_a_module_that_holds_others_is_an_error():
    for option in ({"ignore": "re:.*moe$"}, {"format": {"re:.*moe$": "mxfp8"}}):
        with pytest.raises(
            ValueError, match=r"(ignore|format): 're:.\*moe\$' fits 'layers.*moe' alone, wanted one that"
        ):
            quantize_(make(), **option)
    assert 0 not in layers(quantize_(make(), ignore=r"re:layers\.0\b"))


def test_a_module_of_two_names_has_both():
    def tied():
        model = make()
        model.layers[3] = model.layers[1]
        return model

    model = quantize_(tied(), filter="layers.3", linears="*")
    assert model.layers[3] is model.layers[1]
    assert layers(model) == [1]
    assert 1 not in layers(quantize_(tied(), ignore="layers.3.*", linears="*"))
    model = nn.ModuleDict({"block": GroupedSwiGLU(4, 64, 32), "other": GroupedSwiGLU(4, 64, 32)})
    model["alias"] = model["block"].down_proj
    quantize_(model, ignore="alias")
    assert formats(model) == {"block.gate_proj": "nvfp4", "block.up_proj": "nvfp4", "other": "nvfp4"}


def test_a_block_of_which_a_part_is_ignored_is_converted_by_parts():
    model = quantize_(make(), filter="layers.1", ignore="*.down_proj")
    experts = model.layers[1].moe.routed_experts
    assert type(experts) is GroupedSwiGLU
    assert [type(part).__name__ for part in experts.children()] == ["NVFP4GroupedLinear"] * 2 + ["GroupedLinear"]


def test_names_with_the_letters_of_patterns():
    model = nn.ModuleDict({name: GroupedSwiGLU(4, 64, 32) for name in ("a[0]", "a0", "b+", "b", "(c")})
    assert formats(quantize_(copy.deepcopy(model), filter="a[0]")).keys() == {"a[0]"}  # a name before a glob
    assert formats(quantize_(copy.deepcopy(model), filter="a[[0]*")).keys() == {"a[0]", "a0"}
    assert formats(quantize_(copy.deepcopy(model), filter=["b+", "(c"])).keys() == {"b+", "(c"}
    assert formats(quantize_(copy.deepcopy(model), filter=r"re:b\+")).keys() == {"b+"}


def test_functions_are_called_with_a_module_and_its_name():
    for option in ("filter", "linears", "format"):
        for function in (lambda name: True, lambda name, module: None, lambda path, _: None, lambda a, b, c: True):
            with pytest.raises(TypeError, match=rf"{option}: got a function of .*, wanted .* f\(module, name\)"):
                quantize_(make(), **{option: function})
    seen = {}
    quantize_(make(), filter=lambda module, name: not seen.update({name: module}), linears=lambda module, name: True)
    assert {"head", "layers.0.q_proj", "layers.11.moe.routed_experts"} <= seen.keys()
    assert all(isinstance(module, nn.Linear | GroupedSwiGLU) for module in seen.values())
    with pytest.raises(TypeError, match="ignore: got <function .*; a function is an option of `filter`"):
        quantize_(make(), ignore=lambda module, name: True)


class NVFP4DynamicActivationNVFP4WeightConfig:
    """Stands for torchao's."""


class MXFP8Recipe:
    pass


def test_what_other_packages_spell():
    for format in ("NVFP4", "nvfp4"):
        assert set(formats(quantize_(make(), format)).values()) == {"nvfp4"}
    experts = quantize_(make(), "MXFP8").layers[0].moe.routed_experts
    assert experts.down_proj.format_name == "mxfp8"
    for config, name in ((NVFP4DynamicActivationNVFP4WeightConfig(), "nvfp4"), (MXFP8Recipe, "mxfp8")):
        with pytest.raises(TypeError, match=f"format: got .* configuration objects are not read: format='{name}' says"):
            quantize_(make(), config)
    assert prepare_qat_(make(), format="MXFP8").layers[0].moe.routed_experts.down_proj.parametrizations


def test_qat_and_adapters_have_the_same_patterns():
    model = prepare_qat_(make(), filter="layers.1*", ignore=r"re:.*\.11\.")
    prepared = [name for name, _ in model.named_parameters() if "parametrizations" in name]
    assert {name.split(".")[1] for name in prepared} == {"1", "10"}
    model = add_lora_(quantize_(make(), linears="*"), 2, 4, filter=["layers.1", "head"], linears=True)
    adapted = {".".join(name.split(".")[:2]) for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"layers.1", "head.lora_A"}


def test_a_plan_is_a_table_that_changes_nothing():
    model = make()
    before = repr(model)
    plan = plan_quantization(model, {"layers.1.moe": "mxfp8"}, filter="layers.1", linears=["*.q_proj", "*.o_proj"])
    assert repr(model) == before
    rows = {row.name: row for row in plan.modules}
    assert {name: row.format for name, row in rows.items() if row.format is not None} == {
        "layers.1.q_proj": "nvfp4",
        "layers.1.o_proj": "nvfp4",
        "layers.1.moe.routed_experts": "mxfp8",
    }
    assert rows["head"].reason == "linears declines it"
    assert rows["layers.2.moe.routed_experts"].reason == rows["layers.2.q_proj"].reason == "filter declines it"
    lines = str(plan).splitlines()
    assert " ".join(lines[0].split()) == "module class format MB before MB after why it stays"
    assert [line.split()[0] for line in lines[1:-1]] == list(rows)
    assert lines[-1].startswith("whole model")
    assert plan.apply() is model
    packed = {name: module for name, module in model.named_modules() if rows.get(name) and rows[name].format}
    for name, module in packed.items():
        size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        assert rows[name].bytes_after <= size < 1.15 * rows[name].bytes_after, name  # global scales of small rows
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert plan.bytes_after <= size < 1.01 * plan.bytes_after < plan.bytes_before
    assert str(plan).splitlines() == lines
    with pytest.raises(ValueError, match="plan: it is applied already, or the model has other modules now"):
        plan.apply()
    same = quantize_(make(), {"layers.1.moe": "mxfp8"}, filter="layers.1", linears=["*.q_proj", "*.o_proj"])
    assert repr(same) == repr(model)


def test_a_plan_that_is_applied_keeps_no_weights():
    model = make()
    plan = plan_quantization(model, linears="*")
    plan.apply()
    memory = model.layers[0].moe.routed_experts.down_proj.qdata.data_ptr()
    model.layers[0] = nn.Identity()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and not thing.is_meta]
    assert memory not in {tensor.data_ptr() for tensor in tensors if tensor.layout == torch.strided}
    assert plan.modules


def test_a_plan_says_why_modules_stay():
    model = make()
    model.layers[0].moe.routed_experts.register_forward_hook(lambda *_: None)
    plan = plan_quantization(model, ignore=["layers.1.moe"], format={"layers.2.moe": None})
    reasons = {row.name: row.reason for row in plan.modules if row.format is None}
    assert reasons == {
        "layers.0.moe.routed_experts": "it has forward hooks",
        "layers.1.moe.routed_experts": "ignore has 'layers.1.moe'",
        "layers.2.moe.routed_experts": "format is None for it",
    }
    assert str(plan).splitlines()[-1].endswith("linears=False: 61 dense layers are left out")
    plan = plan_quantization(make(), linears=True)
    assert "too small to be faster in 4 bits" in next(row for row in plan.modules if row.name == "head").reason
    stale = make()
    plan = plan_quantization(stale)
    stale.layers[5] = nn.Identity()
    with pytest.raises(ValueError, match="plan: .* the model has other modules now"):
        plan.apply()
    stale = make()
    plan = plan_quantization(stale)
    stale.layers[5].moe.routed_experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="plan: 'layers.5.moe.routed_experts' has changed, it has forward hooks"):
        plan.apply()
    assert not formats(stale)


def _tie_dense(model):
    model.layers[0].q_proj.weight = model.layers[1].q_proj.weight


def _tie_experts(model):
    # The planned block shares a weight with a block that the options leave.
    model.layers[5].moe.routed_experts.up_proj.weight = model.layers[0].moe.routed_experts.up_proj.weight


def _spoil(model):
    model.layers[0].moe.routed_experts.up_proj.weight.data[1, 2, 3] = torch.nan


def _add(model):
    model.layers.append(Layer().to(BF16))


def _compile(model):
    model.layers[2].q_proj = torch.compile(model.layers[2].q_proj)


def _thaw(model):
    model.layers[3].o_proj._forward_hooks.clear()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tie_dense, "plan: 'layers.0.q_proj' has changed, its weight is tied to the weight of layers.1.q_proj"),
        (_tie_experts, "plan: the model has changed .* not 'layers.5.moe.routed_experts.up_proj', which is tied"),
        (
            _spoil,
            "plan: the model has changed .*'layers.0.moe.routed_experts' has NaN or Inf in a weight of experts .1",
        ),
        (_add, "plan: 'layers.12.q_proj' has changed, it would be nvfp4, and 16-bit in the plan"),
        (_compile, "plan: 'layers.2.q_proj' has changed, torch.compile wraps it"),
        (_thaw, "plan: 'layers.3.o_proj' has changed, it would be nvfp4, and 16-bit in the plan"),
    ],
)
def test_a_plan_is_applied_only_to_what_it_was_made_for(change, message):
    model = make()
    model.layers[3].o_proj.register_forward_hook(lambda *_: None)
    plan = plan_quantization(model, linears="*", ignore="layers.5.moe")
    change(model)
    with pytest.raises(ValueError, match=message + ".*: make a plan again"):
        plan.apply()
    assert not formats(model)


def test_a_tied_weight_counts_once_in_a_plan():
    model = make()
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(model.layers[1].moe.routed_experts, name).weight = getattr(
            model.layers[0].moe.routed_experts, name
        ).weight
    plan = plan_quantization(model)
    plan.apply()
    memory = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert plan.bytes_after <= sum(memory.values()) < 1.05 * plan.bytes_after


def run(model, errors, start):
    start.wait()
    try:
        quantize_(model, linears="*")
    except ValueError as error:
        errors.append(str(error))


def test_threads_that_quantize_one_model():
    """One of them does it, the others get an error; nothing is half converted."""
    for _ in range(2):
        model, errors, start = make(), [], threading.Barrier(4)

        threads = [threading.Thread(target=run, args=(model, errors, start)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        assert all("another thread" in error or "quantized already" in error for error in errors)
        assert repr(model) == repr(quantize_(make(), linears="*"))
        dequantize_(model)


def test_a_thread_that_was_interrupted_leaves_the_model_free():
    """The interrupt came where the thread would have said that it has ended."""
    model, held = make(), []

    def convert():
        held.append(exclusive(model))
        held[0].__enter__()

    thread = threading.Thread(target=convert)
    thread.start()
    thread.join()
    assert "NVFP4" in repr(quantize_(model))


def test_the_expert_with_nan_is_named():
    model = make()
    model.layers[2].moe.routed_experts.up_proj.weight.data[3, 5, 7] = torch.nan
    with pytest.raises(ValueError, match=r"'layers.2.moe.routed_experts' has NaN or Inf in a weight of experts \[3\]"):
        quantize_(model)
    model = make()
    model.head.weight.data[3, 5] = torch.inf
    with pytest.raises(ValueError, match=r"'head' has NaN or Inf in a weight, wanted finite values"):
        quantize_(model, linears="*")
