"""generate() of Hugging Face models with quantized experts: the tokens of the stock model with dequantized weights.
Called by pytest; eager, with a static cache under torch.compile, and by the experts implementation "thunder_moe".
"""

import copy

import pytest
import torch
from fast_cases import others_slow
from oracle import relative_error
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens

transformers = pytest.importorskip("transformers")

from thunder_moe import dequantize_, quantize_, rewrite_report  # noqa: E402
from thunder_moe.integrations.huggingface import experts as integration  # noqa: E402

LENGTH = 12
ALL = list(ARCHITECTURES)
WITH_INTERFACE = [name for name in ALL if name != "llama4"]


def small_model(name, dtype=torch.float32, **options):
    """A model to compile: a layer with experts for each kind of attention that it has."""
    return tiny_model(name, dtype, tiny_config(name, 2 if name == "gpt_oss" else 1), **options)


def generate(model, device="cpu", **options):
    prompt = tokens().to(device)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=LENGTH, do_sample=False, **options)


def generate_in_16_bits(model):
    """With a static cache where it can be: attention rounds as beside a compiled model's; ties make other tokens."""
    cache = None if fails_with_a_static_cache(model) else "static"
    return generate(model, cache_implementation=cache)


def fails_with_a_static_cache(model):
    """transformers 5.17 fails to make the masks of Llama 4 for one."""
    return transformers.__version__.startswith("5.17.") and model.config.model_type.startswith("llama4")


def compile_forward(model, **options):
    """As Hugging Face's documentation does it: generate calls the compiled forward."""
    model.forward = torch.compile(model.forward, fullgraph=True, **options)
    return model


@pytest.mark.parametrize("name", others_slow(ALL, ("llama4", "deepseek_v3", "gpt_oss"), exhaustive=True))
def test_eager(name):
    quantized = quantize_(tiny_model(name))
    expected = generate(dequantize_(copy.deepcopy(quantized)))
    assert expected.shape == (2, 9 + LENGTH)
    assert len(expected[:, 9:].unique()) > 4  # a text that says something
    assert torch.equal(generate(quantized), expected)
    if fails_with_a_static_cache(quantized):
        pytest.skip("transformers 5.17 fails to make the masks of Llama 4 for a static cache")
    assert torch.equal(generate(quantized, cache_implementation="static"), expected)


@pytest.mark.parametrize("name", others_slow(WITH_INTERFACE, ("qwen3_moe", "gpt_oss"), exhaustive=True))
def test_experts_implementation(name):
    model = tiny_model(name, torch.bfloat16, experts_implementation="thunder_moe")
    quantized = quantize_(tiny_model(name, torch.bfloat16))
    assert torch.equal(generate(model), generate(quantized))
    assert integration.expert_blocks(model)


@pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="on torch 2.10 and a CPU, transformers looks at addresses, which dynamo cannot trace",
)
@pytest.mark.skipif(
    transformers.__version__.startswith("5.7."),
    reason="transformers 5.7 logs in its grouped_mm, which dynamo cannot trace",
)
@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "gpt_oss", "deepseek_v3"])
@pytest.mark.exhaustive  # one block of it, and generate's decode step, are below
def test_an_unconverted_model_with_the_backend(name):
    model = small_model(name, torch.bfloat16)
    expected = generate_in_16_bits(quantize_(copy.deepcopy(model)))
    compile_forward(model, backend="thunder_moe", options={"thunder_moe.inner": "aot_eager"})
    generated = generate(model, cache_implementation="static")
    assert (generated == expected).float().mean() > 0.7  # sums round otherwise, and one other token brings more
    report = rewrite_report(model.forward)
    weights = {entry.gemm.weight for entry in report}
    assert len(weights) == 2 * model.config.num_hidden_layers
    assert {weight.rpartition(".")[2] for weight in weights} == {"gate_up_proj", "down_proj"}
    assert all(entry.rewritten for entry in report)


@pytest.mark.parametrize("name", ["llama4", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.exhaustive  # test_mxfp8_experts.py compiles a quantized model with the backend
def test_a_quantized_model_with_the_backend(name):
    quantized = quantize_(small_model(name))
    expected = generate(dequantize_(copy.deepcopy(quantized)))
    compile_forward(quantized, backend="thunder_moe", options={"thunder_moe.inner": "eager"})
    assert torch.equal(generate(quantized, cache_implementation="static"), expected)
    report = rewrite_report(quantized.forward)
    assert {entry.gemm.weight.split(".experts.")[1] for entry in report} == {"gate_up_proj.qdata", "down_proj.qdata"}
    assert all(entry.reason.endswith(" beforehand") for entry in report)
    assert len(report) % (2 * quantized.config.num_hidden_layers) == 0


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", ["qwen3_moe", *others_slow(["gpt_oss"], exhaustive=True)])
def test_a_block_with_the_backend(name, implementation):
    """Also what generate puts in the place of grouped_mm on a GPU gives the numbers of quantize_."""
    model = tiny_model(name, torch.bfloat16, experts_implementation=implementation).requires_grad_(False)
    block, quantized = (each.model.layers[0].mlp for each in (model, quantize_(copy.deepcopy(model))))
    compiled = torch.compile(block, backend="thunder_moe", fullgraph=True, options={"thunder_moe.inner": "aot_eager"})
    hidden = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    out, stock, expected = (first(run(hidden)) for run in (compiled, block, quantized))
    assert relative_error(out, expected) < 0.015
    assert relative_error(stock, expected) > 0.03
    report = rewrite_report(compiled)
    assert len(report.rewritten) == len(report) == 2


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def counting():
    """The name of a torch.compile backend, and the graphs that it has compiled."""
    graphs = []

    def compile_and_count(gm, inputs):
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    torch._dynamo.register_backend(compile_and_count, name="counting")
    yield "counting", graphs
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")


# Compiled, two cases are in the fast set: seconds each. "thunder_moe" and "batched_mm" are by the backend.
FAST = [("qwen3_moe", "quantize_"), ("qwen3_moe", "batched_mm")]
REST = [(name, "quantize_") for name in ("gpt_oss", "deepseek_v3", "mixtral", "olmoe")]
REST += [("qwen3_moe", "thunder_moe"), ("gpt_oss", "thunder_moe"), ("gpt_oss", "batched_mm")]


@pytest.mark.parametrize(("name", "how"), [*FAST, *others_slow(REST, exhaustive=True)])
def test_generate_compiles_the_decode_step_once(name, how, counting):
    inner, graphs = counting
    if how == "quantize_":
        model = quantize_(small_model(name))
        expected = generate(dequantize_(copy.deepcopy(model)))
        config = transformers.CompileConfig(backend=inner)
    else:
        model = small_model(name, torch.bfloat16, experts_implementation=how).requires_grad_(False)
        expected = generate_in_16_bits(quantize_(copy.deepcopy(model)))
        config = transformers.CompileConfig(backend="thunder_moe", options={"thunder_moe.inner": inner})
    config.mode, config._compile_all_devices = None, True  # as on a GPU, but for its mode
    # Of sliding windows, transformers counts the tokens in Python: 1, then any number.
    wanted = 2 if name == "gpt_oss" else 1
    for _ in range(2):
        generated = generate(model, cache_implementation="static", compile_config=config)
        assert len(graphs) == wanted
        if how == "quantize_":
            assert torch.equal(generated, expected)
        elif how == "thunder_moe":  # the prefill is quantized, too
            assert (generated == expected).float().mean() > 0.7  # sums round otherwise
    if how != "quantize_":
        report = rewrite_report(model._compiled_call)
        assert len(report.rewritten) == len(report) == wanted * 2 * model.config.num_hidden_layers


@pytest.mark.gpu
@pytest.mark.parametrize("name", WITH_INTERFACE)
def test_generate_on_a_gpu(name):
    """Compiled by generate itself, with CUDA graphs."""
    quantized = quantize_(tiny_model(name)).cuda()
    expected = generate(dequantize_(copy.deepcopy(quantized)), device="cuda")
    for _ in range(3):
        assert torch.equal(generate(quantized, device="cuda", cache_implementation="static"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    transformers.__version__.startswith("5.17."),
    reason="transformers 5.17 fails to make the masks of Llama 4 for a static cache",
)
@pytest.mark.parametrize("name", ["llama4", "qwen3_moe"])
def test_a_compiled_prefill_on_a_gpu(name):
    """With CUDA graphs, and a static cache made ahead of the compiled region: torch may crash if it is made inside."""
    quantized = quantize_(tiny_model(name)).cuda()
    expected = generate(dequantize_(copy.deepcopy(quantized)), device="cuda")
    compile_forward(quantized, mode="reduce-overhead")
    config = quantized.config
    for _ in range(3):
        cache = transformers.StaticCache(config=config, max_cache_len=9 + LENGTH)
        cache.early_initialization(2, config.num_key_value_heads, config.head_dim, torch.float32, torch.device("cuda"))
        options = dict(past_key_values=cache, disable_compile=True)
        assert torch.equal(generate(quantized, device="cuda", **options), expected)
