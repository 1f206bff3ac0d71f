"""The inference suite: its cells, metrics and files, cells that are wrong or cannot run, its options.
Called by pytest; calls benchmarks/suites/inference.py on tiny models.
"""

import contextlib
import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

pytest.importorskip("transformers")

from fast_cases import others_slow
from tiny_models import tiny_config, tiny_model, tokens
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.__main__ import main
from benchmarks.harness import models
from benchmarks.harness.decode import GreedyLoop
from benchmarks.harness.timing import machine_name
from benchmarks.suites import inference as suite
from thunder_moe import Llama4MoE
from thunder_moe.kernels import dense

CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--input-length", "6", "--output-length", "4", "--num-iterations", "2", "--batch-size", "8"]
REPORT = f"inference_{machine_name(CPU)}.json"
pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 11), reason="torch 2.10 lacks transformers' bf16 experts on a CPU"
)


@pytest.fixture(autouse=True)
def _tiny_models(monkeypatch):
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
    monkeypatch.setattr(models, "SIZES", {**models.SIZES, **sizes})
    experts = {
        "llama4": dict(num_experts_per_tok=1, num_local_experts=4, intermediate_size_mlp=32),
        "qwen3_moe": dict(num_experts_per_tok=2, num_experts=4, moe_intermediate_size=32),
        "gpt_oss": dict(num_experts_per_tok=2, num_local_experts=4, sliding_window=4),
    }
    for name, changes in experts.items():
        config_class, own = models.CONFIGS[name]
        monkeypatch.setitem(models.CONFIGS, name, (config_class, {**own, "head_dim": 16, **changes}))


def run(*arguments, output, report=REPORT):
    """Return the rows of the JSON, and the status of the process."""
    try:
        rows, status = main(["inference", *SMALL, *arguments, "--save-results", "--output-dir", str(output)]), 0
    except SystemExit as stopped:
        rows, status = None, stopped.code
    saved = json.loads((output / report).read_text())["rows"]
    assert rows is None or saved == json.loads(json.dumps(rows))
    return saved, status


def test_cells_have_the_metrics_of_thunders_benchmark(tmp_path, capsys):
    rows, status = run("--mode", "eager", "--columns", ",".join(suite.COLUMNS), output=tmp_path)
    assert status == 0
    assert [row["column"] for row in rows] == list(suite.COLUMNS)
    for row in rows:
        if row["column"] == "thunder_moe":
            assert row["not_run"] == "nothing packs 16-bit weights without a compiler"
            continue
        metrics, detailed = row["metrics"], row["detailed_metrics"]
        prefill, decode = detailed["prefill_times"], detailed["decode_times"]
        assert len(prefill) == len(decode) == 2
        assert metrics["time_to_first_token_ms"] == pytest.approx(sum(prefill) / 2)
        assert metrics["time_between_output_tokens_ms"] == pytest.approx(sum(decode) / 2 / 3)
        assert metrics["total_time_ms"] == pytest.approx(sum(prefill + decode) / 2)
        assert metrics["latency_ms_per_token"] == pytest.approx(metrics["total_time_ms"] / 32)
        assert metrics["prefill_throughput_tokens_per_sec"] == pytest.approx(24e3 * sum(1 / t for t in prefill))
        assert metrics["decode_throughput_tokens_per_sec"] == pytest.approx(12e3 * sum(1 / t for t in decode))
        assert metrics["ttft_std_ms"] == pytest.approx(abs(prefill[0] - prefill[1]) / math.sqrt(2))
        assert 0 <= row["relative_error"] < 0.03
    config = json.loads((tmp_path / REPORT).read_text())["config"]
    assert (config["model_name"], config["batch_size"], config["output_length"]) == ("llama4", 8, 4)
    assert (tmp_path / REPORT).with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    for line in ("Time to First Token (TTFT): ", "Time Between Output Tokens (TBOT): ", "Decode Throughput: "):
        assert line in output
    assert "not run: eager thunder_moe: nothing packs" in output


def test_layers_of_experts_between_dense_ones(tmp_path, monkeypatch):
    """As in Llama 4 Maverick; dense layers are quantized, too."""
    monkeypatch.setitem(dense._LEAST_WEIGHTS, "cpu", 1)
    config_class, own = models.CONFIGS["llama4"]
    own = {**own, "interleave_moe_layer_step": 2, "use_qk_norm": False}
    monkeypatch.setitem(models.CONFIGS, "llama4", (config_class, own))
    columns = "bf16,quantize_,quantize_ linears"
    rows, status = run("--mode", "eager", "--num-layers", "2", "--columns", columns, output=tmp_path)
    assert status == 0
    assert all(row["relative_error"] < 0.03 for row in rows)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_unconverted_models_and_windows(tmp_path, capsys, name):
    """The prompt is longer than the window of GPT-OSS."""
    arguments = ["--model-name", name, "--num-layers", "2", "--disable-moe-replacement", "--format", "mxfp8"]
    (row,), status = run("--mode", "eager", *arguments, output=tmp_path)
    assert status == 0
    attention = "eager" if name == "gpt_oss" else "sdpa"
    assert (row["column"], row["attention"]) == ("quantize_ linears", attention)
    assert f"{name}, attention {attention}\n" in capsys.readouterr().out
    assert 0 < row["relative_error"] < 0.05


@pytest.mark.parametrize("name", ["llama4", "qwen3_moe", "gpt_oss"])
def test_the_reference_reads_long_prompts_in_pieces(tmp_path, monkeypatch, name):
    monkeypatch.setattr(suite, "REFERENCE_TOKENS", 4)  # of 6 + 3 tokens
    [row], status = run("--mode", "eager", "--columns", "bf16", "--model-name", name, output=tmp_path)
    assert status == 0
    assert row["metrics"]


def test_a_configuration_in_a_file(tmp_path):
    """Whose name begins as a known model's."""
    path = tmp_path / "mixtral-8x7b.json"
    tiny_config("qwen3_moe").to_json_file(path)
    (row,), status = run("--mode", "eager", "--model-name", str(path), output=tmp_path)
    assert status == 0
    assert row["metrics"]["total_time_ms"] > 0
    assert json.loads((tmp_path / REPORT).read_text())["config"]["model_name"] == str(path)


def test_without_a_mode_all_cells_are_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "_compile", lambda model, *_: model)
    monkeypatch.setattr(suite, "rewrite_report", lambda forward: SimpleNamespace(rewritten=[]))
    rows, status = run(output=tmp_path)
    assert status == 0
    assert len(rows) == len({(row["mode"], row["column"], row["cudagraph"]) for row in rows}) == 4 * 2 * 2
    assert all(row["not_run"] == "CUDA graphs need a CUDA device" for row in rows if row["cudagraph"])
    assert all(row["metrics"]["total_time_ms"] > 0 for row in rows if not row["cudagraph"])
    assert "| thunderjit | quantize_ linears | no " in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [1, 6], ids=["decode", "prefill"])
def test_a_wrong_cell_is_an_error_and_has_no_times(tmp_path, monkeypatch, capsys, tokens):
    def compile_(model, mode, *_):
        def forward(ids, **options):
            out = model(ids, **options)
            if ids.shape[1] == tokens and mode == "inductor":
                out.logits = out.logits * 1.2
            return out

        return forward

    monkeypatch.setattr(suite, "_compile", compile_)
    monkeypatch.setattr(suite, "MODES", ("eager", "inductor"))
    rows, status = run(output=tmp_path)
    assert status == 1
    for row in rows:
        if not row["cudagraph"]:
            assert ("metrics" in row) == (row["mode"] == "eager")
            assert row.get("error", "").startswith("RuntimeError: wrong: relative error 0.2") == (
                row["mode"] != "eager"
            )
    assert "FAILED: inductor bf16: RuntimeError: wrong" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::thunder_moe.RewriteWarning")
def test_other_weights_than_the_columns_are_an_error(tmp_path, monkeypatch):
    def compile_(model, *_):
        options = {"thunder_moe.inner": "eager", "thunder_moe.format": lambda gemm, name: None}
        return torch.compile(model, backend="thunder_moe", options=options)

    monkeypatch.setattr(suite, "_compile", compile_)
    monkeypatch.setattr(suite, "require_same_logits", lambda *_: None)
    (row,), status = run("--mode", "inductor", "--columns", "thunder_moe", output=tmp_path)
    assert status == 1
    assert "wanted 3 experts' weights in 4 or 8 bits" in row["error"]


def test_a_cell_that_thunder_cannot_trace_says_so(tmp_path):
    (row,), status = run("--mode", "thunderjit", "--model-name", "gpt_oss", output=tmp_path)
    assert status == 0
    assert "max(dim).values" in row["not_run"]


def test_one_cell_that_raises_spoils_no_other(tmp_path, monkeypatch):
    def compile_(model, mode, *_):
        if mode == "inductor":
            raise NotImplementedError("cannot\n  compile this")
        return model

    monkeypatch.setattr(suite, "_compile", compile_)
    monkeypatch.setattr(suite, "MODES", ("inductor", "eager"))
    rows, status = run("--format", "nvfp4", output=tmp_path)
    assert status == 0
    assert rows[0]["not_run"] == "NotImplementedError: cannot compile this"
    assert rows[2]["metrics"]["total_time_ms"] > 0


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    def compile_(model, mode, *_):
        if mode == "inductor":
            raise KeyboardInterrupt
        return model

    monkeypatch.setattr(suite, "_compile", compile_)
    rows, status = run("--format", "nvfp4", output=tmp_path)
    assert status == 1
    assert rows[0]["metrics"]["total_time_ms"] > 0
    assert all(row["error"] == "interrupted" for row in rows[2::2])


@pytest.mark.parametrize(
    ("mode", "name", "columns"),
    [
        ("thunder", "llama4", "thunder_moe"),
        *others_slow(  # a cell takes a quarter of a minute
            [
                ("inductor", "llama4", "thunder_moe,quantize_ linears"),
                ("thunder", "llama4", "quantize_ linears"),
                ("thunderjit", "qwen3_moe", "thunder_moe"),
            ],
            exhaustive=True,
        ),
    ],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:transformer_engine module not found")
def test_compiled_cells(tmp_path, mode, name, columns):
    rows, status = run("--mode", mode, "--model-name", name, "--columns", columns, output=tmp_path)
    assert status == 0
    assert all(row["metrics"]["total_time_ms"] > 0 and row["relative_error"] < 0.03 for row in rows)


@pytest.mark.slow
def test_a_cell_of_torch_compile(tmp_path, monkeypatch):
    """With graphs that run eagerly: Inductor compiles for a minute."""
    compile_ = torch.compile

    def compile_with_eager(model, *, backend, options=None, **others):
        if options is not None:
            options = {**options, "thunder_moe.inner": "eager"}
        return compile_(model, backend=backend, options=options, **others)

    monkeypatch.setattr(torch, "compile", compile_with_eager)
    (row,), status = run("--mode", "inductor", "--columns", "thunder_moe", output=tmp_path)
    assert status == 0
    assert row["metrics"]["total_time_ms"] > 0
    assert row["relative_error"] < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_cells_in_cuda_graphs(tmp_path, mode):
    arguments = ["--device", "cuda", "--model-name", "llama4", "--mode", mode, "--enable-cudagraph"]
    arguments += ["--columns", "bf16,quantize_", "--warmup-iterations", "1"]
    rows, status = run(*arguments, output=tmp_path, report="inference_cuda.json")
    assert status == 0
    assert all(row["cudagraph"] and row["metrics"]["peak_memory_gb"] > 0 for row in rows)
    assert all(row["relative_error"] < 0.03 for row in rows)


def test_the_replacement_of_llama4s_layers_has_a_way_back():
    stock = models.build("llama4", CPU, layers=2)
    wanted = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    ids = torch.arange(8)[None]
    logits = stock(ids).logits
    models.use_llama4_moe(stock)
    assert sum(isinstance(module, Llama4MoE) for module in stock.modules()) == 2
    assert (stock(ids).logits - logits).norm() < 0.02 * logits.norm()
    models.use_transformers_moe(stock)
    found = stock.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert torch.equal(stock(ids).logits, logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-name", "meta-llama/Llama-5"], "--model-name: got 'meta-llama/Llama-5', wanted one of qwen3-30b-a3b"),
        (
            ["--model-name", "meta-llama/Llama-4-Maverick-17B-128E", "--batch-size", "0"],
            "--batch-size: got '0', wanted",
        ),
        (["--output-length", "1"], "--output-length: got 1, wanted at least 2"),
        (["--mode", "jit"], "--mode: invalid choice: 'jit'"),
        (["--columns", "fp8"], "--columns: got 'fp8', wanted one of bf16, thunder_moe"),
        (["--enable-nvfp4", "--columns", "bf16"], "--columns: not allowed with argument --enable-nvfp4"),
        (["--enable-nvfp4", "--format", "mxfp8"], "--format: got 'mxfp8' and --enable-nvfp4, wanted one of them"),
        (["--profile"], "--profile: it needs --device cuda"),
        (["--num-iterations", "none"], "--num-iterations: got 'none', wanted an integer of at least 1"),
    ],
)
def test_options_that_are_wrong(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["inference", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def llama4(**changes):
    config = tiny_config("llama4", layers=1)
    for name, value in changes.items():
        setattr(config, name, value)
    model = tiny_model("llama4", config=config).requires_grad_(False)
    models.use_llama4_moe(model)
    return model


@torch.no_grad()
def run_cut_head(tied):
    """Cut a model, in each process, and compile the untied one; return the error of its gathered logits and other
    findings."""
    model, found = llama4(tie_word_embeddings=tied), SimpleNamespace()
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    prompt = tokens()
    whole = GreedyLoop(model, model, *prompt.shape)
    whole.cache.reset()
    wanted = whole.read(prompt)
    vocabulary = wanted.shape[-1]
    suite._shard_(model, init_device_mesh("cpu", (2,)))
    forward = model if tied else torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    loop = GreedyLoop(model, forward, *prompt.shape, suite._gather_vocabulary)
    loop.cache.reset()
    own = loop.read(prompt)
    found.parts = [part.shape[-1] / vocabulary for part in (own, head.weight.to_local().mT, embedding.weight.mT)]
    found.error = ((loop.gather(own) - wanted).norm() / wanted.norm()).item()
    found.same_tokens = torch.equal(loop.token, whole.token)
    found.first_half = bool((loop.token < vocabulary // 2).all())
    return found


def run_uneven_head():
    with pytest.raises(ValueError, match=r"wanted a multiple of 2") as raised:
        suite._shard_(llama4(vocab_size=65), init_device_mesh("cpu", (2,)))
    return str(raised.value)


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_compute_the_columns_of_the_head(ranks, tied):
    for found in ranks(2)(run_cut_head, tied):
        assert found.parts == [0.5, 0.5, 1]
        assert found.error < 1e-5
        assert found.same_tokens
        assert not found.first_half  # the tokens of one rank's logits would be others


def test_a_vocabulary_that_the_ranks_do_not_divide(ranks):
    for message in ranks(2)(run_uneven_head):
        assert message == "lm_head: it has out_features=65, wanted a multiple of 2, for 2 ranks"


def run_main(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(arguments)
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_processes_of_torchrun_are_tensor_parallel(ranks, tmp_path, mode):
    """tests/parallel/test_compiled_shards.py has Thunder, whose traces of this model take minutes."""
    options = ["--mode", mode, "--columns", f"quantize_,{suite.QUANTIZED}"]
    options += ["--save-results", "--output-dir", str(tmp_path)]
    printed = ranks(2).as_of_torchrun(run_main, ["inference", *SMALL, *options])
    assert ["Throughput Metrics" in text for text in printed] == [True, False]
    saved = json.loads((tmp_path / REPORT).read_text())
    assert saved["config"]["ranks"] == 2
    assert ["metrics" in row for row in saved["rows"]] == [True, False]
    assert "not cut over several processes" in saved["rows"][-1]["not_run"]
