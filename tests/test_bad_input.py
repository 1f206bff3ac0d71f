"""Bad input to what users call: an error at once that names the argument, what it was and what is wanted.
Called by pytest; calls the public functions and classes. Each module's own tests have the cases of its own arithmetic.
"""

import pytest
import torch
from torch import nn

import thunder_moe
from thunder_moe import (
    GroupedLinear,
    GroupedMLP,
    GroupedSwiGLU,
    Llama4MoE,
    ScaledSReLU,
    ScaledSwiGLU,
    SwiGLU,
    add_lora_,
    mxfp8,
    nvfp4,
    quantize_,
)
from thunder_moe.integrations.huggingface.configs import ThunderMoeConfig
from thunder_moe.parallel import ExpertParallel, expert_load

WEIGHT = nvfp4.quantize(torch.ones(2, 32, 32))
IN_MXFP8 = mxfp8.quantize(torch.ones(2, 32, 32))
ROWS = torch.ones(4, 32, dtype=torch.bfloat16)
ENDS = torch.tensor([2, 4], dtype=torch.int32)
IDS, SCORES = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)


IN_TRANSFORMERS = dict(
    fuse_norms_="transformers", load_lora_="transformers", save_lora="transformers", get_peft_model="peft",
    load_peft_model="peft", fast_generate="transformers",
)  # fmt: skip


def model():
    return nn.ModuleDict({"experts": GroupedSwiGLU(2, 32, 32)})


@pytest.mark.parametrize(
    "name",
    ["quantize_", "dequantize_", "to_layout_", "refresh_", "prepare_qat_", "finish_qat_"]
    + ["use_lora_", "merge_lora_", "unmerge_lora_", "remove_lora_", "add_lora_"]
    + ["fuse_norms_", "get_peft_model", "load_lora_", "load_peft_model", "save_lora"],
)
@pytest.mark.parametrize("given", [None, {}, torch.ones(2)], ids=["None", "dict", "tensor"])
def test_a_model_is_a_module(name, given):
    if name in IN_TRANSFORMERS:
        pytest.importorskip(IN_TRANSFORMERS[name])
    more = dict(use_lora_=("default",), add_lora_=(4, 8), get_peft_model=(None,)).get(name, ())
    more = ("directory",) if name in ("load_lora_", "load_peft_model", "save_lora") else more
    with pytest.raises(TypeError, match=rf"^model: got {type(given).__name__}, wanted a torch\.nn\.Module$"):
        getattr(thunder_moe, name)(given, *more)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: expert_load(None), TypeError, "model: got NoneType"),
        (
            lambda: thunder_moe.load_checkpoint("~nobody-of-this-name/x"),
            ValueError,
            "path: got '~nobody-of-this-name/x'",
        ),
        (
            lambda: quantize_(model(), filter="expert"),
            ValueError,
            "filter: 'expert' fits no experts of .* close names are 'experts'",
        ),
        (lambda: quantize_(model(), filter=8), TypeError, "filter: got 8, wanted names or patterns of modules"),
        (lambda: quantize_(model(), ignore=print), TypeError, "ignore: got <.*; a function is an option of `filter`"),
        (lambda: thunder_moe.prepare_qat_(model(), filter=["expert"]), ValueError, "filter: 'expert' fits no"),
        (lambda: ThunderMoeConfig(format="nvfp5"), ValueError, "format: got 'nvfp5', wanted one of"),
        (lambda: ThunderMoeConfig(format={"*": "nvfp5"}), ValueError, "format: got 'nvfp5'"),
        (lambda: ThunderMoeConfig(format={"*": 4}), ValueError, "format: got 4"),
        (lambda: ThunderMoeConfig(scale_search="msee"), ValueError, "scale_search: got 'msee', wanted None or one of"),
        (lambda: ThunderMoeConfig(layout=None), ValueError, "layout: got None, wanted one of"),
        (lambda: thunder_moe.load_formats(3), TypeError, "formats: got int, wanted a string or a pathlib.Path"),
        (lambda: thunder_moe.convert(3, "x"), TypeError, "source: got int, wanted a string or a pathlib.Path"),
        (lambda: thunder_moe.convert("x", None), TypeError, "destination: got NoneType, wanted a string or a path"),
        (lambda: thunder_moe.calibrate_(model(), 3), TypeError, "batches: got int, wanted a list of tensors"),
        (lambda: thunder_moe.calibrate_(model(), [ROWS], device=True), ValueError, "device: got 'True', which cannot"),
        (lambda: thunder_moe.use_lora_(add_lora_(model(), 2, 2), 3), TypeError, "adapters: got int, wanted a name, a"),
        (lambda: thunder_moe.use_lora_(add_lora_(model(), 2, 2), [{}]), TypeError, "adapters: got dict, wanted a name"),
        (lambda: thunder_moe.merge_lora_(add_lora_(model(), 2, 2), 3), TypeError, "adapters: got int, wanted a name"),
        (
            lambda: thunder_moe.merge_lora_(add_lora_(model(), 2, 2), torch.zeros(2)),
            TypeError,
            "adapters: got Tensor",
        ),
        (
            lambda: thunder_moe.remove_lora_(add_lora_(model(), 2, 2), "x"),
            ValueError,
            "adapter: got 'x', wanted",
        ),
        (lambda: thunder_moe.remove_lora_(add_lora_(model(), 2, 2), {}), TypeError, "adapter: got dict, wanted a name"),
        (lambda: thunder_moe.use_backend([]).__enter__(), ValueError, r"backend: got \[\], wanted one of"),
        (lambda: ExpertParallel(chunks=None), ValueError, "chunks: got None, wanted an integer"),
        (lambda: ExpertParallel(exchange=["all_gather"]), ValueError, r"exchange: got \['all_gather'\]"),
    ],
)
def test_options_of_models(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nvfp4.quantize([1.0]), TypeError, "weight: got list, wanted a tensor"),
        (lambda: mxfp8.quantize(None), TypeError, "weight: got NoneType"),
        (lambda: nvfp4.quantize(torch.ones(1, 2, 32, device="meta")), ValueError, "weight: got .* on meta, wanted a d"),
        (lambda: mxfp8.quantize(torch.ones(1, 2, 32).to_sparse()), ValueError, "weight: got .*, wanted a dense tensor"),
        (lambda: nvfp4.dequantize(IN_MXFP8), TypeError, "weight: got MXFP8Weight, wanted an NVFP4Weight"),
        (lambda: mxfp8.dequantize(WEIGHT), TypeError, "weight: got NVFP4Weight, wanted an MXFP8Weight"),
        (lambda: nvfp4.dequantize(torch.ones(2)), TypeError, "weight: got Tensor"),
        (lambda: nvfp4.fake_quantize(None), TypeError, "weight: got None, wanted a tensor"),
        (lambda: Llama4MoE(None), TypeError, "config: got NoneType, wanted a Llama4MoEConfig"),
        (lambda: thunder_moe.offsets_from_splits(3), TypeError, "splits: got int, wanted a tensor or a sequence"),
        (lambda: thunder_moe.per_expert_state_dict({}), TypeError, "module: got dict, wanted a torch.nn.Module"),
        (lambda: thunder_moe.NVFP4Linear(None), TypeError, "weight: got NoneType, wanted a packed weight"),
        (lambda: GroupedLinear(2, 32, 32, dtype="bf16"), ValueError, "dtype: got bf16, wanted bfloat16"),
        (lambda: SwiGLU(0, 32), ValueError, "hidden_size: got 0, wanted an integer"),
        (lambda: GroupedSwiGLU(2, 64.0, 32), ValueError, "hidden_size: got 64.0"),
        (lambda: GroupedMLP(2, 32, None), ValueError, "intermediate_size: got None"),
        (lambda: GroupedMLP(2, 32, 32, activation="silu"), TypeError, "activation: got str, wanted a module"),
        (lambda: GroupedLinear(2, 32, 32, dtype=torch.complex64), ValueError, "dtype: got torch.complex64"),
        (lambda: SwiGLU(32, 32, dtype=torch.int8), ValueError, "dtype: got torch.int8"),
        (lambda: ScaledSwiGLU(alpha="x"), TypeError, "alpha: got str, wanted a number"),
        (lambda: ScaledSwiGLU(limit="x"), TypeError, "limit: got str, wanted a number"),
        (lambda: ScaledSwiGLU(up_shift=float("nan")), ValueError, "alpha, up_shift: got 1.0 and nan"),
        (lambda: ScaledSwiGLU()(torch.ones(2, 4, dtype=torch.int64)), ValueError, "y: got torch.int64"),
        (lambda: ScaledSReLU()(torch.ones(2, 4, dtype=torch.bool)), ValueError, "y: got torch.bool"),
    ],
)
def test_weights_and_modules(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


OPERANDS = dict(
    activation=ROWS,
    fp4_weight=WEIGHT.qdata.mT,
    weight_scaling_factor=WEIGHT.scale,
    weight_global_scale=WEIGHT.global_scale,
    offsets=ENDS,
)


@pytest.mark.parametrize("name", OPERANDS)
def test_an_operand_that_is_none(name):
    with pytest.raises(TypeError, match=f"^{name}: got None, wanted a tensor$"):
        thunder_moe.f16a_nvfp4weight_scaled_grouped_mm(**OPERANDS | {name: None})


@pytest.mark.parametrize("name", ["gate_up_layout", "down_layout"])
def test_an_unknown_layout_is_that_of_its_weight(name):
    weights = WEIGHT.qdata.mT, WEIGHT.scale, WEIGHT.global_scale
    with pytest.raises(ValueError, match=f"^{name}: got 'tiled', wanted one of"):
        thunder_moe.f16a_nvfp4weight_moe_experts(ROWS, IDS, SCORES, *weights, *weights, **{name: "tiled"})


def test_an_unknown_inner_compiler():
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"options\['thunder_moe.inner'\]: got 3, wanted the name of a compiler"):
        torch.compile(lambda x: x + 1, backend="thunder_moe", options={"thunder_moe.inner": 3})(torch.ones(2))


@pytest.mark.parametrize("name", ["load_lora_", "load_peft_model", "save_lora"])
def test_an_adapter_is_at_a_path(name):
    pytest.importorskip(IN_TRANSFORMERS[name])
    with pytest.raises(TypeError, match=r"^path: got int, wanted a string or a pathlib\.Path$"):
        getattr(thunder_moe, name)(model(), 3)


def test_other_objects_of_other_libraries():
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="^model: got Linear, wanted a model of transformers: model.generate"):
        thunder_moe.fast_generate(nn.Linear(2, 2), ROWS, None, None, None)
    pytest.importorskip("peft")
    with pytest.raises(TypeError, match="^peft_config: got dict, wanted a peft.LoraConfig$"):
        thunder_moe.get_peft_model(model(), {})


@pytest.mark.parametrize("path", [None, 5])
def test_a_checkpoint_is_at_a_path(path):
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match=f"^path: got {type(path).__name__}, wanted a string or a pathlib.Path$"):
        thunder_moe.load_checkpoint(path)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_gradients_inside_transforms(transform):
    swiglu = quantize_(model())["experts"]
    with pytest.raises(NotImplementedError, match=r"no gradient inside .* use torch\.autograd"):
        transform(lambda rows: swiglu(rows, ENDS).sum())(ROWS)


def test_vmap_without_gradients():
    swiglu = quantize_(model())["experts"]
    assert torch.equal(torch.func.vmap(lambda rows: swiglu(rows, ENDS))(ROWS[None])[0], swiglu(ROWS, ENDS))
