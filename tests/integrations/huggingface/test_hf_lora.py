"""LoRA on the 4-bit experts of transformers' models: values and gradients of every kind against dense adapters.
Called by pytest; calls plain torch for what is expected.
"""

import copy
import json
import os

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens

from thunder_moe import dequantize_, quantize_, rewrite_report
from thunder_moe.compilers.eligibility import GroupedGemm
from thunder_moe.finetune.lora import add_lora_, lora_linears, lora_parameters, remove_lora_
from thunder_moe.finetune.merge import merge_lora_, unmerge_lora_
from thunder_moe.formats.gate_up import interleave
from thunder_moe.integrations.huggingface import lora_files


def adapted(name, dtype=torch.float32, format="nvfp4", *, layers=2, **options):
    model = quantize_(tiny_model(name, dtype, tiny_config(name, layers)), format=format)
    add_lora_(model, 4, 8, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in lora_parameters(model):
        parameter.data.copy_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    return model


def dense(model):
    """A float32 copy with 16-bit modules, its weights with adapters that autograd knows, and their parameters."""
    base, leaves, weights = copy.deepcopy(model), [], {}
    for linear in lora_linears(base).values():
        linear.weight_dtypes = (torch.float32,)
    remove_lora_(base)
    dequantize_(base)
    for name, linear in lora_linears(model).items():
        a, b = (each["default"].detach().float().requires_grad_() for each in (linear.lora_A, linear.lora_B))
        leaves += [a, b]
        path, _, kind = name.rpartition(".")
        form = model.get_submodule(path).form
        delta = linear.lora_specs["default"].scaling * b @ a
        delta = interleave(delta) if form.interleaved and kind == "gate_up_proj" else delta
        parameter = f"{path}.{kind if form.gated or kind == 'down_proj' else 'up_proj'}"
        weights[parameter] = base.get_parameter(parameter).detach() + (delta.mT if form.transposed else delta)
    return base.float(), weights, leaves


def gradients(model, call=None):
    """The logits and the adapters' gradients."""
    logits = (model if call is None else call)(tokens()).logits
    return logits, torch.autograd.grad(logits.float().pow(2).mean(), list(lora_parameters(model)))


def expected_of(model):
    base, weights, leaves = dense(model)
    logits = torch.func.functional_call(base, weights, (tokens(),)).logits
    return logits, torch.autograd.grad(logits.pow(2).mean(), leaves)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients(name):
    model = adapted(name)
    logits, grads = gradients(model)
    expected, wanted = expected_of(model)
    assert relative_error(logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_mxfp8(name):
    """Values, gradients, and what is merged."""
    model = adapted(name, format="mxfp8")
    logits, grads = gradients(model)
    expected, wanted = expected_of(model)
    assert relative_error(logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))
    before = copy.deepcopy(model.state_dict())
    errors = merge_lora_(model)
    assert 0 < max(errors.values()) < 0.5
    assert {linear.format_name for linear in lora_linears(model).values()} == {"mxfp8"}
    assert relative_error(model(tokens()).logits, expected) < 0.1
    unmerge_lora_(model)
    assert all(torch.equal(bits(tensor), bits(before[key])) for key, tensor in model.state_dict().items())
    merge_lora_(model, dequantize=True)
    assert relative_error(model(tokens()).logits, expected) < 1e-5


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_around_the_operator(name):
    """A dropout of next to nothing takes the way around the operator of the whole layer, as own gates and norms do."""
    model = adapted(name, dropout=1e-12).train()
    logits, grads = gradients(model)
    for linear in lora_linears(model).values():
        linear.lora_specs = {name: type(spec)(4, 2.0) for name, spec in linear.lora_specs.items()}
    expected, wanted = gradients(model)
    assert relative_error(logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))


def test_projections_of_two_formats():
    """Each projection runs the operator of its own format, where none runs the whole layer."""
    model, other = (quantize_(tiny_model("qwen3_moe"), format=format) for format in ("nvfp4", "mxfp8"))
    for layer, of_other in zip(model.model.layers, other.model.layers, strict=True):
        layer.mlp.experts.down_proj = of_other.mlp.experts.down_proj
    add_lora_(model, 4, 8, dropout=1e-12)
    assert {linear.format_name for linear in lora_linears(model).values()} == {"nvfp4", "mxfp8"}
    logits, grads = gradients(model.train())
    expected, wanted = expected_of(model)
    assert relative_error(logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))


def test_own_gates():
    model = adapted("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.form = type(layer.mlp.experts.form)(True, False, False, False, None, False)
    _, grads = gradients(model)
    expected, wanted = expected_of(model)
    assert relative_error(model(tokens()).logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("qwen3_moe", "nvfp4"),
        *others_slow([("llama4", "nvfp4"), ("gpt_oss", "mxfp8"), ("gpt_oss", "nvfp4")], exhaustive=True),
    ],
)
def test_torch_compile(name, format):
    model = adapted(name, format=format, layers=1)
    expected, wanted = gradients(model)
    inner = {"thunder_moe.inner": "aot_eager"}
    compiled = torch.compile(model, backend="thunder_moe", fullgraph=True, options=inner)
    logits, grads = gradients(model, compiled)
    assert {entry.decision for entry in rewrite_report(compiled) if isinstance(entry.gemm, GroupedGemm)} == {format}
    assert relative_error(logits, expected) < 1e-5
    assert all(relative_error(got, want) < 3e-5 for got, want in zip(grads, wanted, strict=True))


@pytest.mark.exhaustive  # tests/finetune/test_lora.py has adapters of experts with this activation under Thunder
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_thunder(format):
    from thunder_moe import moe_executor

    import thunder  # isort: skip

    experts = adapted("gpt_oss", format=format).model.layers[0].mlp.experts
    ids, weights = torch.randint(0, 8, (10, 2)), torch.rand(10, 2, requires_grad=True)
    hidden = torch.randn(10, 64, requires_grad=True)
    given = [hidden, weights, *lora_parameters(experts)]
    jitted = thunder.jit(experts, executors=[moe_executor])
    out, compiled = experts(hidden, ids, weights), jitted(hidden, ids, weights)
    assert [entry.decision for entry in rewrite_report(jitted)] == [format] * 2
    assert relative_error(compiled, out) < 1e-5
    pairs = zip(torch.autograd.grad(compiled.sum(), given), torch.autograd.grad(out.sum(), given), strict=True)
    assert all(relative_error(got, want) < 1e-5 for got, want in pairs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = adapted("qwen3_moe").train()
    expected, wanted = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    logits = model(tokens()).logits
    logits.pow(2).mean().backward()
    assert relative_error(logits, expected) < 1e-6
    assert all(relative_error(p.grad, want) < 1e-5 for p, want in zip(lora_parameters(model), wanted, strict=True))


def test_float32_rows_under_autocast():
    """As `prepare_model_for_kbit_training` makes them: 16-bit parameters become float32."""
    model = adapted("qwen3_moe", torch.bfloat16)
    expected, wanted = expected_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    seen = []
    model.model.layers[0].mlp.experts.register_forward_hook(
        lambda module, args, out: seen.append((args[0].dtype, out.dtype))
    )
    with torch.autocast("cpu", torch.bfloat16):
        logits, grads = gradients(model)
    assert seen == [(torch.float32, torch.bfloat16)]
    assert relative_error(logits, expected) < 0.03
    assert all(relative_error(got, want) < 0.06 for got, want in zip(grads, wanted, strict=True))


def test_16_bit_experts_are_not_found():
    with pytest.raises(ValueError, match="16-bit experts of transformers: quantize_ it"):
        add_lora_(tiny_model("qwen3_moe"), 4, 8)


def test_offloaded_models():
    """Adapters come after the hooks of accelerate; the other order, or packed weights elsewhere, are errors."""
    accelerate = pytest.importorskip("accelerate")
    expected = adapted("qwen3_moe")(tokens()).logits
    model = accelerate.cpu_offload(quantize_(tiny_model("qwen3_moe")), torch.device("cpu"))
    with pytest.raises(ValueError, match="on meta, wanted device cpu"):
        accelerate.cpu_offload(adapted("qwen3_moe"), torch.device("cpu"))(tokens())
    add_lora_(model, 4, 8)
    model.load_state_dict({k: v for k, v in adapted("qwen3_moe").state_dict().items() if "lora_" in k}, strict=False)
    out = model(tokens()).logits
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in lora_parameters(model))
    model = quantize_(tiny_model("qwen3_moe"))
    model = accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    with pytest.raises(ValueError, match="its weight is on the meta device .offloaded"):
        add_lora_(model, 4, 8)


def test_an_adapter_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    model = adapted(next(iter(ARCHITECTURES)))
    lora_files.save_lora(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise lora_files.SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lora_files, "save_file", full)
        with pytest.raises(OSError, match=r"adapter_model.*cannot be written.*No space"):
            lora_files.save_lora(model, tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    replace = os.replace

    def killed(source, target):
        replace(source, target)
        raise SystemExit

    with monkeypatch.context() as patch:  # new weights never stand beside an older rank and alpha
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            lora_files.save_lora(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="adapter_config"):
        lora_files.load_lora_(model, tmp_path)
    pressed = iter([KeyboardInterrupt])

    def interrupted(source, target):
        replace(source, target)
        for error in pressed:
            raise error

    with monkeypatch.context() as patch:  # Ctrl-C lets the other file be moved
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lora_files.save_lora(model, tmp_path)
    lora_files.load_lora_(model, tmp_path)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (dict(r=0), r"adapter_config.json .*\(rank: got 0, wanted a positive integer"),
        (dict(lora_alpha=0), r"adapter_config.json .*\(alpha: got 0.0, wanted a finite number that is not 0"),
        (dict(lora_alpha=None), "adapter_config.json has no valid r and lora_alpha"),
        (dict(rank_pattern={"(": 2}), "adapter_config.json has no valid r and lora_alpha"),
        (dict(rank_pattern={"down_proj": 8}), r"down_proj has adapters .*, wanted 8 experts of rank 8"),
        (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights 'pissa_niter_4', whose adapters are for other"),
        (dict(peft_type="IA3"), "adapter_config.json: got IA3, wanted a LoraConfig"),
        (dict(bias="all"), "adapter_config.json.bias: got 'all', wanted none of it"),
        (dict(layer_replication=[[0, 2]]), r"adapter_config.json.layer_replication: got \[\[0, 2\]\], wanted none"),
    ],
)
def test_configurations_of_adapters_that_are_not_plain_lora(config, what, tmp_path):
    model = adapted("qwen3_moe")
    lora_files.save_lora(model, tmp_path)
    file = tmp_path / lora_files.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    before, other = copy.deepcopy(model.state_dict()), remove_lora_(copy.deepcopy(model))
    for each in (model, other):
        with pytest.raises(ValueError, match=what):
            lora_files.load_lora_(each, tmp_path)
    assert all(torch.equal(bits(tensor), bits(before[name])) for name, tensor in model.state_dict().items())
    assert not lora_linears(other)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tensor: None, "the adapter base_layer of model.layers.1.mlp.experts has lora_A alone"),
        (lambda tensor: tensor * torch.nan, "lora_B.weight in torch.float32, wanted finite values"),
        (lambda tensor: tensor.int(), "lora_B.weight in torch.int32, wanted finite values"),
        (lambda tensor: tensor.flatten(), r"model.layers.1.mlp.experts has shape \(\d+,\), wanted a matrix"),
        (lambda tensor: tensor[:-1].clone(), r"lora_B: got shape \(8, \d+, 4\), wanted \(8, \d+, 4\)"),
    ],
)
def test_damaged_adapters_change_nothing(change, what, tmp_path):
    """Those of the last layer, when the first one's are read."""
    model = adapted("qwen3_moe")
    lora_files.save_lora(model, tmp_path)
    file = tmp_path / lora_files.WEIGHTS
    tensors, key = load_file(file), "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
    save_file({k: t for k, t in (tensors | {key: change(tensors[key])}).items() if t is not None}, file)
    before, other = copy.deepcopy(model.state_dict()), remove_lora_(copy.deepcopy(model))
    for parameter in lora_parameters(model):
        parameter.data.zero_()
    for each in (model, other):
        with pytest.raises(ValueError, match=what):
            lora_files.load_lora_(each, tmp_path)
    assert not any(parameter.any() for parameter in lora_parameters(model))
    assert before.keys() == model.state_dict().keys()
    assert not lora_linears(other)


@pytest.mark.parametrize(
    ("per_expert", "key", "other"),
    [
        (False, "experts.lora_{}.weight", "experts.lora_{}.default.weight"),
        (True, "experts.1.gate_proj.lora_{}.weight", "experts.1.w1.lora_{}.weight"),
    ],
)
def test_two_names_of_one_tensor_are_refused(per_expert, key, other, tmp_path):
    model = adapted("qwen3_moe")
    lora_files.save_lora(model, tmp_path, per_expert=per_expert)
    file, layer = tmp_path / lora_files.WEIGHTS, "base_model.model.model.layers.1.mlp"
    tensors = load_file(file)
    again = {f"{layer}.{other.format(each)}": 2 * tensors[f"{layer}.{key.format(each)}"] for each in "AB"}
    save_file(tensors | again, file)
    with pytest.raises(ValueError, match="two tensors .*, under two names, wanted one"):
        lora_files.load_lora_(model, tmp_path)


def test_a_negative_alpha_subtracts_everywhere(tmp_path):
    model, other = adapted("qwen3_moe"), quantize_(tiny_model("qwen3_moe"))
    add_lora_(other, 4, -8)
    lora_files.save_lora(model, tmp_path)
    lora_files.load_lora_(other, tmp_path)  # fills the adapter, whose B is the negative one then
    assert relative_error(other(tokens()).logits, model(tokens()).logits) < 1e-6
    lora_files.save_lora(other, tmp_path)
    again = lora_files.load_lora_(remove_lora_(copy.deepcopy(model)), tmp_path)
    assert {linear.lora_specs["default"].scaling for linear in lora_linears(again).values()} == {-2.0}
    assert relative_error(again(tokens()).logits, model(tokens()).logits) < 1e-6


def test_broken_files_of_an_adapter_are_named(tmp_path):
    model = adapted(next(iter(ARCHITECTURES)))
    lora_files.save_lora(model, tmp_path)
    weights = tmp_path / lora_files.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read"):
        lora_files.load_lora_(model, tmp_path)
    (tmp_path / lora_files.CONFIG).write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json: is not JSON"):
        lora_files.load_lora_(model, tmp_path)


def test_a_home_directory_in_the_path_of_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = adapted(next(iter(ARCHITECTURES)))
    lora_files.save_lora(model, "~/adapter")
    assert (tmp_path / "adapter" / lora_files.WEIGHTS).is_file()
    lora_files.load_lora_(model, "~/adapter")
    for call in (lora_files.save_lora, lora_files.load_lora_):
        with pytest.raises(ValueError, match=r"^path: got '~nobody-of-this-name/x', wanted the name of a user"):
            call(model, "~nobody-of-this-name/x")
