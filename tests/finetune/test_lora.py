"""LoRA on this package's modules: values and gradients against dense adapters, compilers, several adapters, merging.
Called by pytest; calls plain torch for what is expected.
"""

import copy
import io
import math

import pytest
import torch
from interruptions import interrupted
from oracle import KERNEL_TOLERANCE, relative_error
from safetensors.torch import load_file, save_file

from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    Llama4MoE,
    Llama4MoEConfig,
    ScaledSReLU,
    ScaledSwiGLU,
    dequantize_,
    offsets_from_splits,
    quantize_,
    rewrite_report,
)
from thunder_moe.finetune.lora import (
    add_lora_,
    lora_linears,
    lora_parameters,
    remove_lora_,
    use_lora_,
)
from thunder_moe.finetune.merge import merge_lora_, unmerge_lora_
from thunder_moe.nn import NVFP4GroupedLinear

E, H, INNER = 4, 48, 32
OFFSETS = offsets_from_splits([5, 0, 9, 2])
GPT_OSS = dict(alpha=1.702, limit=7.0, up_shift=1.0)
MODULES = {
    "linear": lambda dtype: GroupedLinear(E, H, INNER, bias=True, dtype=dtype),
    "mlp": lambda dtype: GroupedMLP(E, H, INNER, bias=True, dtype=dtype),
    "clamped": lambda dtype: GroupedMLP(E, H, INNER, bias=True, activation=ScaledSwiGLU(2, **GPT_OSS), dtype=dtype),
    "srelu": lambda dtype: GroupedMLP(E, H, INNER, activation=ScaledSReLU(), dtype=dtype),
    "llama4": lambda dtype: Llama4MoE(Llama4MoEConfig(H, INNER, E, top_k=2), dtype=dtype),
}


def adapted(kind, of=torch.float32, quantized=True, **options):
    """A module with adapters whose B is not zero, and its arguments."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"m": MODULES[kind](of)})
    if quantized:
        quantize_(model)
    add_lora_(model, 4, 8, **options)
    for linear in lora_linears(model).values():
        for b in linear.lora_B.values():
            torch.nn.init.normal_(b, std=0.1)
    if kind == "llama4":
        return model, (torch.randn(2, 7, H, dtype=of, requires_grad=True),)
    x = torch.randn(16, H, dtype=of, requires_grad=True)
    return model, (x, OFFSETS) if kind == "linear" else (x, OFFSETS, torch.rand(16, requires_grad=True))


def dense(model):
    """A float32 copy whose 16-bit linears read weights that autograd adds the adapters to, and those parameters."""
    base = copy.deepcopy(model)
    for linear in lora_linears(base).values():
        if isinstance(linear, NVFP4GroupedLinear):
            linear.weight_dtypes = (torch.float32,) * len(linear.weight_dtypes)
    remove_lora_(base)
    if any(isinstance(module, NVFP4GroupedLinear) for module in base.modules()):
        dequantize_(base)
    base, leaves, weights = base.float(), [], {}
    for name, linear in lora_linears(model).items():
        spec = linear.lora_specs["default"]
        a, b = (each["default"].detach().float().requires_grad_() for each in (linear.lora_A, linear.lora_B))
        leaves += [a, b]
        parts = [
            spec.scaling * part @ rows
            for part, rows in zip(b.chunk(spec.parts, 1), a.chunk(spec.parts, 1), strict=True)
        ]
        delta = torch.cat(parts, 1).expand(E, -1, -1)
        names = [name]
        if f"{name}.weight" not in base.state_dict():  # gate and up of a GroupedSwiGLU
            names = [name.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
        for each, part in zip(names, delta.chunk(len(names), 1), strict=True):
            weights[f"{each}.weight"] = base.state_dict()[f"{each}.weight"] + part
    return base["m"], {name.removeprefix("m."): weight for name, weight in weights.items()}, leaves


def compare(model, args, call=None, tolerance=1e-5):
    """Values and all gradients of a call of the module against dense ones."""
    base, weights, leaves = dense(model)
    wide = [arg.detach().float().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    out = (model["m"] if call is None else call)(*args)
    expected = torch.func.functional_call(base, weights, tuple(wide))
    assert relative_error(out, expected) < tolerance
    grad = torch.randn(expected.shape)
    given = [arg for arg in args if arg.requires_grad]
    actual = torch.autograd.grad(out, [*given, *lora_parameters(model)], grad.to(out.dtype))
    wanted = torch.autograd.grad(expected, [*(arg for arg in wide if arg.requires_grad), *leaves], grad)
    for got, want in zip(actual, wanted, strict=True):
        assert relative_error(got, want) < 3 * tolerance


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_values_and_gradients(kind, quantized):
    compare(*adapted(kind, quantized=quantized))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_sixteen_bits(kind):
    compare(*adapted(kind, torch.bfloat16), tolerance=3 * KERNEL_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("options", [dict(share="A"), dict(share="B"), dict(split_gate_up=True), dict(rslora=True)])
def test_shared_split_and_rank_stabilized(options):
    model, args = adapted("mlp", **options)
    linear = model["m"].gate_up_proj
    assert linear.lora_A["default"].shape == (
        1 if options.get("share") == "A" else E,
        4 << ("split_gate_up" in options),
        H,
    )
    assert linear.lora_B["default"].shape[0] == (1 if options.get("share") == "B" else E)
    assert linear.lora_specs["default"].scaling == (4.0 if "rslora" in options else 2.0)
    compare(model, args)


@pytest.mark.parametrize("kind", ["clamped", pytest.param("llama4", marks=pytest.mark.exhaustive)])
def test_torch_compile(kind):
    model, args = adapted(kind)
    inner = {"thunder_moe.inner": "aot_eager"}
    compare(model, args, torch.compile(model["m"], backend="thunder_moe", fullgraph=True, options=inner))


@pytest.mark.parametrize("kind", ["clamped", pytest.param("llama4", marks=pytest.mark.exhaustive)])
def test_thunder(kind):
    from thunder_moe import moe_executor

    import thunder  # isort: skip

    model, args = adapted(kind)
    compare(model, args, thunder.jit(model["m"], executors=[moe_executor]))


def test_compilers_leave_adapters_in_16_bits():
    """The frozen weight becomes NVFP4, its adapters do not, though they are frozen as well."""
    model, args = adapted("linear", torch.bfloat16, quantized=False, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model["m"](*args)
        compiled = torch.compile(model["m"], backend="thunder_moe", options={"thunder_moe.inner": "eager"})
        assert relative_error(compiled(*args), expected) < 0.12  # that of NVFP4
    decisions = [entry.decision for entry in rewrite_report(compiled).entries]
    assert sorted(decisions) == ["16-bit", "16-bit", "nvfp4"]


def test_frozen_parts_get_no_gradient():
    model, args = adapted("mlp")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        f"m.{linear}.lora_{each}.default" for linear in ("gate_up_proj", "down_proj") for each in "AB"
    }
    model["m"](*args).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_a_new_adapter_changes_nothing():
    model = torch.nn.ModuleDict({"m": MODULES["mlp"](torch.float32)})
    quantize_(model)
    args = torch.randn(16, H), OFFSETS
    before = model["m"](*args)
    add_lora_(model, 4, 8)
    assert relative_error(model["m"](*args), before) < 1e-6
    remove_lora_(model)
    assert torch.equal(model["m"](*args), before)
    assert type(model["m"].down_proj) is NVFP4GroupedLinear
    assert not list(lora_parameters(model))


def test_several_adapters_are_switched():
    model, args = adapted("mlp")
    use_lora_(model, None)
    zero = model["m"](*args)
    add_lora_(model, 2, 2, adapter="other")
    for linear in lora_linears(model).values():
        torch.nn.init.normal_(linear.lora_B["other"], std=0.1)
    outputs = {}
    for names in (("default",), ("other",), ("default", "other")):
        use_lora_(model, names)
        outputs[names] = model["m"](*args)
    use_lora_(model, "default")
    assert torch.equal(model["m"](*args), outputs["default",])
    distances = {names: relative_error(out, zero) for names, out in outputs.items()}
    assert min(distances.values()) > 0.01
    assert len(set(distances.values())) == 3
    # Both at once are what merging one and running the other gives.
    merged = copy.deepcopy(model)
    for linear in lora_linears(merged).values():  # exactly: in float32
        linear.weight_dtypes = (torch.float32,)
    use_lora_(merged, ("default", "other"))
    merge_lora_(merged, dequantize=True)
    assert relative_error(merged["m"](*args), outputs["default", "other"]) < 1e-5
    remove_lora_(model, "default")
    assert [*lora_linears(model)["m.down_proj"].lora_specs] == ["other"]
    with pytest.raises(ValueError, match=r"adapters: got 'default', wanted some of \['other'\]"):
        use_lora_(model, "default")


def test_a_new_adapter_of_some_linears_is_the_only_active_one():
    model, args = adapted("mlp")
    add_lora_(model, 2, 2, adapter="other", filter=lambda module, name: name.endswith("down_proj"))
    assert [linear.lora_active for linear in lora_linears(model).values()] == [(), ("other",)]
    alone, _ = adapted("mlp")
    use_lora_(alone, None)
    assert relative_error(model["m"](*args), alone["m"](*args)) < 1e-6


def test_merge_into_nvfp4_and_back():
    model, args = adapted("mlp")
    before, state = model["m"](*args), {name: value.clone() for name, value in model.state_dict().items()}
    errors = merge_lora_(model)
    assert errors.keys() == lora_linears(model).keys()
    assert all(0.05 < error < 0.5 for error in errors.values())
    merged = model["m"](*args)
    assert 1e-3 < relative_error(merged, before) < 0.2
    with pytest.raises(ValueError, match="merged"):
        use_lora_(model, None)
    unmerge_lora_(model)
    assert all(torch.equal(value.view(torch.uint8), state[name].view(torch.uint8)) if value.ndim and value.itemsize == 1
               else torch.equal(value, state[name]) for name, value in model.state_dict().items())  # fmt: skip
    assert torch.equal(model["m"](*args), before)


@pytest.mark.parametrize(("quantized", "step"), [(True, 41), (False, 7)])
def test_an_interrupted_merge_is_undone(quantized, step):
    model, args = adapted("mlp", quantized=quantized)
    before = model["m"](*args)
    moments = 0
    for _ in interrupted(lambda: merge_lora_(model), step=step):
        assert torch.equal(model["m"](*args), before)
        moments += 1
    assert moments > 5
    assert not torch.equal(model["m"](*args), before)
    assert torch.equal(unmerge_lora_(model)["m"](*args), before)


def test_an_interrupted_add_leaves_nothing():
    model, args = adapted("mlp")
    before, keys = model["m"](*args), model.state_dict().keys()
    plain = remove_lora_(copy.deepcopy(model))
    for _ in interrupted(lambda: add_lora_(model, 2, 4, adapter="other")):
        assert torch.equal(model["m"](*args), before)
        assert model.state_dict().keys() == keys
    expected, keys = plain["m"](*args), plain.state_dict().keys()
    for _ in interrupted(lambda: add_lora_(plain, 2, 4)):
        assert torch.equal(plain["m"](*args), expected)
        assert plain.state_dict().keys() == keys
    assert lora_linears(plain)


def test_an_interrupted_add_leaves_an_adapter_of_that_name_in_other_linears():
    model = torch.nn.ModuleList(MODULES["linear"](torch.float32) for _ in range(2))
    add_lora_(model, 2, 4, filter="0")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in interrupted(lambda: add_lora_(model, 2, 4, filter="1")):
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_merging_one_of_two_adapters_leaves_the_other_out_everywhere():
    """Also in linears that have the other alone."""
    model, args = adapted("mlp")
    add_lora_(model, 2, 4, adapter="other", filter=lambda module, name: name.endswith("down_proj"))
    torch.nn.init.normal_(model["m"].down_proj.lora_B["other"], std=0.1)
    with torch.no_grad():
        use_lora_(model, "default")
        expected = model["m"](*args)
        use_lora_(model, ["default", "other"])
        merge_lora_(model, "other")
        assert {linear.lora_active for linear in lora_linears(model).values()} == {()}
        alone = remove_lora_(copy.deepcopy(model))["m"](*args)
        assert relative_error(model["m"](*args), alone) < 1e-5
        unmerge_lora_(model)
        assert {linear.lora_active for linear in lora_linears(model).values()} == {(), ("other",)}
        use_lora_(model, "default")
        assert torch.equal(model["m"](*args), expected)


@pytest.mark.parametrize("quantized", [True, False])
def test_merge_into_16_bits(quantized):
    model, args = adapted("mlp", torch.bfloat16, quantized=quantized)
    before = model["m"](*args)
    errors = merge_lora_(model, dequantize=True)
    assert all(0 < error < 0.05 for error in errors.values())
    assert type(model["m"]) is GroupedMLP
    assert type(model["m"].down_proj) is GroupedLinear
    assert relative_error(model["m"](*args), before) < 0.02


def test_dropout():
    model, args = adapted("linear", dropout=0.5)
    linear = model["m"].train()
    torch.manual_seed(1)
    first = linear(*args)
    torch.manual_seed(1)
    assert torch.equal(first, linear(*args))
    mean = torch.stack([linear(*args) for _ in range(300)]).mean(0)
    linear.eval()
    assert relative_error(first, linear(*args)) > 0.01
    assert relative_error(mean, linear(*args)) < 0.05


def test_copies_pickles_and_state_dicts():
    model, args = adapted("mlp")
    expected = model["m"](*args)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other["m"](*args), expected)
    fresh, _ = adapted("mlp")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh["m"](*args), expected)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_state_dict_says_its_rank_and_alpha(quantized):
    model, _ = adapted("mlp", quantized=quantized)  # of rank 4 and alpha 8
    other = add_lora_(remove_lora_(copy.deepcopy(model)), 4, 16)
    with pytest.raises(RuntimeError, match="m.down_proj: got an adapter 'default' of rank 4 and alpha 8 .*alpha 16"):
        other.load_state_dict(model.state_dict())
    older = {name: value for name, value in model.state_dict().items() if "lora_specs" not in name}
    other.load_state_dict(older)


def test_state_dicts_of_merged_adapters():
    """Adapters that are in a weight are never added to it again, nor lost."""
    model, args = adapted("mlp")
    add_lora_(model, 2, 4, adapter="other")
    use_lora_(model, "default")
    state = copy.deepcopy(model.state_dict())
    merge_lora_(model)
    merged = model["m"](*args)
    into = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"m.down_proj: \['default'\] are merged into its weight"):
        into.load_state_dict(state)
    saved = model.state_dict()
    assert state.keys() - saved.keys() == {name for name in state if name.endswith(".default")} != set()
    fresh, _ = adapted("mlp")
    with pytest.raises(RuntimeError, match=r"lora_B.default"):
        fresh.load_state_dict(saved)
    plain = remove_lora_(adapted("mlp")[0])
    plain.load_state_dict({name: value for name, value in saved.items() if "lora_" not in name})
    assert relative_error(plain["m"](*args), merged) < 1e-6
    unmerge_lora_(model)
    model.load_state_dict(state)


def test_a_state_dict_says_what_is_active_and_its_dropout():
    model, args = adapted("mlp", dropout=0.25)
    add_lora_(model, 2, 4, adapter="other", filter="*down_proj")
    torch.nn.init.normal_(model["m"].down_proj.lora_B["other"], std=0.1)
    fresh = copy.deepcopy(remove_lora_(copy.deepcopy(model)))
    add_lora_(add_lora_(fresh, 4, 8), 2, 4, adapter="other", filter="*down_proj", dropout=0.5)
    for active in (["other", "default"], "default", None):
        use_lora_(model, active)
        fresh.load_state_dict(model.state_dict())
        pairs = zip(lora_linears(fresh).values(), lora_linears(model).values(), strict=True)
        assert all((new.lora_active, new.lora_specs) == (old.lora_active, old.lora_specs) for new, old in pairs)
        assert torch.equal(fresh.eval()["m"](*args), model.eval()["m"](*args))
    use_lora_(model, ["default", "other"])
    alone = {name: tensor for name, tensor in remove_lora_(model, "default").state_dict().items() if "lora_" in name}
    use_lora_(fresh, "default")
    fresh.load_state_dict(alone, strict=False)  # what it does not have stays
    assert fresh["m"].gate_up_proj.lora_active == ("default",)
    assert fresh["m"].down_proj.lora_active == ("other", "default")
    with pytest.raises(RuntimeError, match="lora_specs: got torch.float16 .* in float64"):
        fresh.load_state_dict({name: tensor.half() for name, tensor in alone.items()}, strict=False)


def cycle(kind, state, path):
    """A state dict as a file gives it back."""
    if kind == "safetensors":
        save_file(state, path)
        return load_file(path)
    torch.save(state, path)
    return torch.load(path)


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
@pytest.mark.parametrize("quantized", [True, False])
def test_merged_weights_are_not_loaded_below_the_same_adapter(quantized, kind, tmp_path):
    """They would count twice, also with strict=False, which allows that the state dict lacks the adapter."""
    model, args = adapted("mlp", quantized=quantized)
    add_lora_(model, 2, 4, adapter="other")
    for linear in lora_linears(model).values():
        torch.nn.init.normal_(linear.lora_B["other"], std=0.1)
    merge_lora_(model, ["other", "default"])
    merged, saved = model["m"](*args), cycle(kind, model.state_dict(), tmp_path / "file")
    other, _ = adapted("mlp", quantized=quantized)
    before = other["m"](*args)
    what = r"m.down_proj: got a weight with \['default'\] merged into it.* remove_lora_\(model, 'default'\) before"
    with pytest.raises(RuntimeError, match=what):
        other.load_state_dict(saved, strict=False)
    assert torch.equal(other["m"](*args), before)
    plain = remove_lora_(copy.deepcopy(other))
    plain.load_state_dict(saved)
    assert relative_error(plain["m"](*args), merged) < 1e-6
    with pytest.raises(RuntimeError, match="merged into it"):
        other["m"].down_proj.load_state_dict(model["m"].down_proj.state_dict(), strict=False)


def test_merged_weights_load_beside_an_adapter_of_another_name():
    model, args = adapted("mlp")
    add_lora_(model, 2, 4, adapter="other", filter="*down_proj")
    merge_lora_(model, "default")
    merged, saved = model["m"](*args), model.state_dict()
    fresh = add_lora_(remove_lora_(adapted("mlp")[0]), 2, 4, adapter="other", filter="*down_proj")
    fresh.load_state_dict(saved)
    assert relative_error(use_lora_(fresh, None)["m"](*args), merged) < 1e-6


def test_thunder_compiles_again_when_adapters_change():
    from thunder_moe import moe_executor

    import thunder  # isort: skip

    model, args = adapted("linear")
    add_lora_(model, 2, 4, adapter="other")
    torch.nn.init.normal_(model["m"].lora_B["other"], std=0.1)
    compiled = thunder.jit(model["m"], executors=[moe_executor])
    with torch.no_grad():
        for active in (None, "default", ("default", "other")):
            use_lora_(model, active)
            assert relative_error(compiled(*args), model["m"](*args)) < 1e-5, active


def test_what_is_replaced_is_refused_by_name():
    model, _ = adapted("mlp")
    with pytest.raises(ValueError, match="it has LoRA adapters: merge_lora_"):
        dequantize_(model)
    model, _ = adapted("mlp", quantized=False)
    with pytest.raises(ValueError, match="it has LoRA adapters"):
        quantize_(model)
    x = torch.randn(16, H)
    with pytest.raises(ValueError, match="grad_input: got a buffer"):
        model["m"].gate_up_proj(x, OFFSETS, grad_input=torch.empty_like(x))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (dict(rank=0), "rank: got 0"),
        (dict(dropout=1.0), "dropout: got 1.0"),
        (dict(share="C"), "share: got 'C'"),
        (dict(adapter="a.b"), "adapter: got 'a.b'"),
        (dict(adapter="keys"), "adapter: got 'keys'"),
        (dict(adapter=5), "adapter: got 5"),
        (dict(rank=True), "rank: got True"),
        (dict(rank=2.0), "rank: got 2.0"),
        (dict(alpha="8"), "alpha: got '8'"),
        *((dict(alpha=alpha), f"alpha: got {alpha}, wanted a finite") for alpha in (0, True, math.nan, math.inf)),
        (dict(dtype=torch.int8), "dtype: got torch.int8"),
        (dict(filter=lambda module, name: False), "model: found no linear of experts"),
    ],
)
def test_bad_arguments(options, what):
    with pytest.raises(ValueError, match=what):
        add_lora_(MODULES["mlp"](None), **{"rank": 2, "alpha": 4, **options})


def test_bad_calls():
    model, _ = adapted("mlp")
    with pytest.raises(ValueError, match="'default', which 'm.gate_up_proj' has"):
        add_lora_(model, 2, 2)
    with pytest.raises(ValueError, match="found no linear of experts"):
        add_lora_(torch.nn.Linear(2, 2), 2, 2)
    with pytest.raises(ValueError, match="nothing to unmerge"):
        unmerge_lora_(model)
    with pytest.raises(ValueError, match="no LoRA adapters"):
        merge_lora_(torch.nn.Linear(2, 2))
    tied = torch.nn.ModuleList([MODULES["linear"](None), MODULES["linear"](None)])
    tied[1].weight = tied[0].weight
    add_lora_(tied, 2, 2)
    with pytest.raises(ValueError, match="share a weight"):
        merge_lora_(tied)


def test_arguments_of_peft_are_translated():
    model, _ = adapted("mlp")
    with pytest.raises(TypeError, match="required positional arguments: 'rank' and 'alpha'"):
        add_lora_(model, r=4, lora_alpha=8)
    for name, own in dict(r="rank", lora_dropout="dropout", target_modules="filter and linears").items():
        with pytest.raises(TypeError, match=f"got the argument '{name}', wanted {own}.*get_peft_model"):
            add_lora_(model, 4, 8, adapter="other", **{name: 0.1})
    with pytest.raises(TypeError, match="'dense', wanted an argument of its signature, or get_peft_model"):
        add_lora_(model, 4, 8, adapter="other", dense=True)


def test_functions_that_are_none():
    for name in ("filter", "linears"):
        with pytest.raises(TypeError, match=f"{name}: got 8, wanted names or patterns of modules"):
            add_lora_(MODULES["mlp"](None), 2, 4, **{name: 8})
        with pytest.raises(ValueError, match=f"{name}: 'down' fits no linear for an adapter of GroupedMLP"):
            add_lora_(MODULES["mlp"](None), 2, 4, **{name: "down"})


def test_nothing_is_added_twice():
    """Neither what one linear has merged when another gets an adapter of its name, nor a name that is there twice."""
    model, args = adapted("mlp", filter=lambda module, name: name.endswith("gate_up_proj"))
    merge_lora_(model)
    expected = model["m"](*args)
    with pytest.raises(ValueError, match="are merged in m.gate_up_proj, wanted unmerge_lora_ before"):
        add_lora_(model, 4, 8, filter=lambda module, name: name.endswith("down_proj"))
    assert torch.equal(model["m"](*args), expected)
    unmerge_lora_(model)
    for function in (use_lora_, merge_lora_):
        with pytest.raises(ValueError, match=r"adapters: got \['default', 'default'\], wanted each name once"):
            function(model, ["default", "default"])


@pytest.mark.parametrize("broken", ["hook", "root", "nan", "nan in 16 bits", "overflow"])
def test_merging_that_fails_changes_nothing(broken):
    model, args = adapted("mlp", quantized=broken != "nan in 16 bits")
    use_lora_(model, None)
    last, merged = model["m"].down_proj, model
    if broken == "hook":
        model["m"].register_forward_hook(lambda module, given, out: None)
    elif broken == "root":
        merged = last
    elif broken == "overflow":
        last.lora_A["default"].data[0], last.lora_B["default"].data[0] = 1e3, 1e3
        last.weight_dtypes = (torch.float16,)
    else:
        last.lora_A["default"].data[3, 0, 0] = float("nan")
    what = dict(hook="m.gate_up_proj cannot be replaced by a 16-bit module: it has forward hooks", root="bare").get(
        broken, r"the weight of m.down_proj plus \['default'\] has NaN or Inf"
    )
    before, state = model["m"](*args), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=what):
        merge_lora_(merged, "default", dequantize=broken in ("hook", "root", "overflow"))
    assert torch.equal(model["m"](*args), before)
    assert model.state_dict().keys() == state.keys()
    assert all(linear.lora_active == () == linear.lora_merged for linear in lora_linears(model).values())
    assert not any(getattr(linear, "lora_to_restore", False) for linear in lora_linears(model).values())


def test_autocast_computes_in_its_dtype():
    """Float32 rows, as `prepare_model_for_kbit_training` makes them."""
    for kind in ("linear", "mlp", "llama4"):
        model, args = adapted(kind)
        expected = model["m"](*args)
        with torch.autocast("cpu", torch.bfloat16):
            out = model["m"](*args)
        assert out.dtype == torch.bfloat16
        assert relative_error(out, expected) < 0.02
        remove_lora_(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert model["m"](*args).dtype == torch.bfloat16
