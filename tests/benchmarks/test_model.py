"""The model suite: what a column measures, columns that are wrong, do not fit or crash, the tables, real models' sizes.
Called by pytest; calls benchmarks/suites/model.py and harness/{column,decode,models}.py.
"""

import io
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_config
from torch.torch_version import TorchVersion

from benchmarks.__main__ import main
from benchmarks.harness import column, decode, model_report, models, processes
from benchmarks.harness.column import Spec
from benchmarks.harness.decode import DecodeStep
from benchmarks.harness.timing import machine_name
from benchmarks.suites import model as suite
from thunder_moe.kernels import dense
from thunder_moe.nn.linear import NVFP4Linear

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 11), reason="torch 2.10 lacks transformers' bf16 experts on a CPU"
)


@pytest.fixture
def config(tmp_path):
    def path(name="qwen3_moe", layers=2):
        tiny_config(name, layers).save_pretrained(tmp_path / name)
        return str(tmp_path / name / "config.json")

    return path


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(column._Column, "_compile", lambda self, model: model)


def run(spec):
    """The row of a spec, as the suite puts it together, and what was raised."""
    row, error = {}, None

    def emit(part):
        for key, value in part.items():
            row[key] = {**row[key], **value} if isinstance(row.get(key), dict) else value

    try:
        column.run(spec, emit)
    except (RuntimeError, ValueError) as raised:
        error = raised
    return row, error


def spec(source, name="quantize_", **options):
    sizes = dict(batches=(1, 3), context=40, prompts=(8, 12), generate=(4, 2), rounds=3, budget=0.1)
    return Spec(source, name, "cpu", **{**sizes, **options})


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "llama4", "deepseek_v3"])
def test_a_decode_step_predicts_the_next_token(config, name):
    model = models.build(config(name), CPU)
    step = DecodeStep(model, 3, 40)
    ids = torch.randint(1, 64, (3, 41), generator=torch.Generator().manual_seed(5))
    step.fill(model, ids[:, :40])
    step.token = ids[:, 40:]
    wanted = model(ids).logits[:, -1:]
    for _ in range(2):
        step.rewind()
        found = step(model)
        assert found.shape == wanted.shape
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    step.choose(2)
    step.token = ids[:2, 40:]
    found = step(model)
    assert (found - wanted[:2]).norm() < 0.02 * wanted[:2].norm()


def test_steps_are_rewound_so_that_any_number_fits(config):
    model = models.build(config(), CPU)
    step = DecodeStep(model, 1, 4)
    for _ in range(decode.SPARE + 1):
        step.rewind()
        step(model)
    step.rewind()
    for _ in range(decode.SPARE):
        step(model)
    with pytest.raises((RuntimeError, IndexError)):
        step(model)


def test_a_column_measures(config, uncompiled):
    row, error = run(spec(config(), profile=True))
    assert error is None
    assert row["layers"] == 2
    assert row["attention"] == "sdpa"
    assert 0 < row["relative_error"] < 0.05
    assert row["generate"]["tokens_per_second"] > 0
    assert row["load"]["quantize_seconds"] > 0
    assert list(row["decode"]) == ["1", "3"]
    assert list(row["prefill"]) == ["8", "12"]
    for cell in (*row["decode"].values(), *row["prefill"].values()):
        assert cell["median"] > 0
        assert cell["first_call_seconds"] > 0
    assert any("moe" in event["kernel"] for event in row["decode"]["1"]["profile"])
    plain, error = run(spec(config(), "thunder_moe", prompts=(), batches=(1,)))
    assert error is not None, "nothing was rewritten"
    assert "decode" not in plain


def test_bytes_of_a_step(config):
    tiny = tiny_config("qwen3_moe")
    experts = 2 * 8 * 3 * 64 * 32  # two layers of eight experts
    # Half a byte a weight, a scale per 16 weights, and two float32 multipliers an expert.
    nvfp4 = experts // 2 + experts // 16 + 4 * 2 * 8 * 2
    keys = 2 * 2 * tiny.num_hidden_layers * tiny.num_key_value_heads * tiny.head_dim
    found = {}
    for name in ("compiled bf16", "thunder_moe", "quantize_", "quantize_ mxfp8"):
        form = column.COLUMNS[name]
        finish = None if form.quantize is None else column.quantizer(form.quantize)
        model = models.build(config(), CPU, finish=finish)
        step = DecodeStep(model, 3, 40)
        packed = form.packed and form.quantize is None
        found[name] = decode.step_bytes(model, column._experts(model), step, packed=packed)
    embedding = 2 * tiny.vocab_size * tiny.hidden_size
    rest = decode.tensor_bytes(models.build(config(), CPU)) - 2 * experts - embedding + 3 * 41 * keys
    active = 1 - (6 / 8) ** 3
    assert found["compiled bf16"] == pytest.approx(rest + active * 2 * experts)
    assert found["thunder_moe"] == pytest.approx(rest + active * 2 * experts * 4.5 / 16)
    assert found["quantize_"] == pytest.approx(rest + active * nvfp4)
    assert found["quantize_ mxfp8"] == pytest.approx(rest + active * experts * 33 / 32)


def test_a_sliding_window_bounds_the_keys_of_a_step(config):
    model = models.build(config("gpt_oss"), CPU)
    model.config.sliding_window = 16
    size = 2 * model.config.num_key_value_heads * model.config.head_dim
    assert DecodeStep(model, 1, 40).cache_bytes() == 2 * size * (16 + 41)


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_wrong_logits_have_no_times(config, monkeypatch, what):
    def compiled(self, model):
        def forward(ids, **options):
            out = model(ids, **options)
            if (ids.shape[1] == 1) == (what == "decode"):
                out.logits = out.logits * 1.2
            return out

        return forward

    monkeypatch.setattr(column._Column, "_compile", compiled)
    for part in ("check", "all"):  # of a model of its own, and of the graphs that are timed
        row, error = run(spec(config(), "compiled bf16", part=part))
        assert "wrong: relative error 0.2" in str(error)
        assert "prefill" not in row
        assert ("decode" in row) == (part == "all" and what == "prefill")


def test_a_cell_that_does_not_fit_says_so(config, uncompiled, monkeypatch):
    def no_room(step, batch, **options):
        if batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        choose(step, batch, **options)

    choose = DecodeStep.choose
    monkeypatch.setattr(DecodeStep, "choose", no_room)
    row, error = run(spec(config(), "compiled bf16", batches=(1, 2, 3), prompts=()))
    assert error is None
    assert row["decode"]["2"] == {"error": "out of memory"}
    assert row["decode"]["3"]["median"] > 0


@pytest.mark.parametrize("least", [1, 2**20])
def test_the_head_is_quantized_with_the_layers(config, uncompiled, monkeypatch, least):
    monkeypatch.setitem(dense._LEAST_WEIGHTS, "cpu", least)
    built = []

    def build(*args, **options):
        built.append(models.build(*args, **options))
        return built[-1]

    monkeypatch.setattr(column, "build", build)
    for part in ("check", "all"):
        row, error = run(spec(config(), "quantize_ linears", part=part))
        assert error is None
        assert 0 < row["relative_error"] < 0.05
        reference, model = built
        assert not any(isinstance(part, NVFP4Linear) for part in reference.modules())
        assert isinstance(model.lm_head, NVFP4Linear) == (least == 1)
        built.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thunder_moe", pytest.param("quantize_ linears", marks=pytest.mark.exhaustive)])
def test_a_compiled_column(config, name):
    row, error = run(spec(config(layers=1), name, inner="aot_eager", batches=(3,), prompts=(8,)))
    assert error is None
    assert row["relative_error"] < 0.05
    assert list(row["decode"]) == ["3"]


@pytest.mark.slow
def test_columns_compile_once_for_all_batches_but_one(config, monkeypatch):
    graphs = []

    def count(self, model):
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        return torch.compile(model, fullgraph=True, backend=backend)

    monkeypatch.setattr(column._Column, "_compile", count)
    _, error = run(spec(config(layers=1), "quantize_", batches=(1, 3, 5), prompts=(), generate=(2, 1)))
    assert error is None
    assert len(graphs) == 2


WORKERS = """
import json, os, sys
spec, path = json.loads(sys.argv[1]), sys.argv[2]
def emit(**part):
    open(path, "a").write(json.dumps(part) + "\\n")
if spec["column"] == "limits":
    emit(read_bytes_per_second=1e9)
    sys.exit()
emit(layers=2, model_bytes=5e9, relative_error=0.012)
emit(load={"build_seconds": 1.0, "quantize_seconds": 2.0, "peak_bytes": 6e9})
if spec["column"] == "compiled bf16":
    os.kill(os.getpid(), 9)
if spec["column"] == "thunder_moe":
    sys.exit(emit(error="out of memory"))
if spec["column"] == "quantize_":
    emit(error="wrong")
    sys.exit("Traceback: wrong")
for batch in spec["batches"]:
    cell = {"median": 0.004 * batch, "method": "cuda graph", "first_call_seconds": 9, "step_bytes": 1e6}
    cell["peak_bytes"] = 7e9
    cell["profile"] = [{"kernel": "gemm", "count": 3, "microseconds": 40.0}]
    emit(decode={str(batch): cell if batch < 8 else {"error": "out of memory"}})
for tokens in spec["prompts"]:
    emit(prefill={str(tokens): {"median": 0.25, "method": "plain calls", "first_call_seconds": 1}})
emit(generate={"tokens_per_second": 12.34})
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKERS)
    monkeypatch.setattr(processes, "WORKER", [sys.executable, str(tmp_path / "worker.py")])


def test_columns_that_crash_spoil_no_other(config, workers, tmp_path, capsys):
    columns = "eager bf16,compiled bf16,thunder_moe,quantize_"
    arguments = ["--models", config(), "--columns", columns, "--batch", "8,1", "--prompts", "128", "--layers", "2"]
    with pytest.raises(SystemExit) as stopped:
        main(["model", "--device", "cpu", *arguments, "--jobs", "2", "--output", str(tmp_path / "out")])
    assert stopped.value.code == 1
    content = json.loads((tmp_path / "out" / f"model_{machine_name(torch.device('cpu'))}.json").read_text())
    good, killed, full, wrong = content["rows"]
    assert good["decode"]["1"]["floor_share"] == pytest.approx(1e6 / 1e9 / 0.004)
    assert killed["error"] == "killed by signal 9: no output"
    assert (full["error"], wrong["error"]) == ("out of memory", "wrong")
    assert content["read_bytes_per_second"] == 1e9
    assert content["environment"]["command"]
    output = capsys.readouterr()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in output.out.splitlines() if line[:1] == "|"]
    table = {line[0]: line[1:] for line in lines}
    assert table[""] == ["eager bf16", "compiled bf16", "thunder_moe", "quantize_"]
    assert table["decode, batch 1: ms (% of floor)"] == ["4.00 (25 %)", "killed by signal 9", "out of memory", "wrong"]
    assert table["batch 8: tokens/s (x)"] == ["out of memory", "killed by signal 9", "out of memory", "wrong"]
    assert table["first token behind 128: ms (x)"][0] == "250"
    assert table["eager generate: tokens/s (x)"] == ["12.3", "-", "-", "-"]
    assert table["most memory: GB"][0] == "7.0"
    assert table["build + quantize: s"][0] == "1.0 + 2.0"
    assert table["40"] == ["100.0", "3", "gemm"]
    assert "2 of 2 layers, attention sdpa" in output.out
    assert "FAILED: qwen3_moe, quantize_: wrong" in output.err
    assert (tmp_path / "out" / f"model_{machine_name(torch.device('cpu'))}.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupt_keeps_what_was_measured(config, workers, tmp_path, monkeypatch):
    poll = processes._Task.poll

    def interrupt(self):
        poll(self)
        if self.ended and self.spec.column == "eager bf16":
            raise KeyboardInterrupt

    monkeypatch.setattr(processes._Task, "poll", interrupt)
    arguments = ["--models", config(), "--columns", "eager bf16,quantize_", "--output", str(tmp_path / "out")]
    arguments += ["--jobs", "1"]
    with pytest.raises(SystemExit):
        main(["model", "--device", "cpu", *arguments])
    rows = json.loads((tmp_path / "out" / f"model_{machine_name(torch.device('cpu'))}.json").read_text())["rows"]
    assert "decode" in rows[0]
    assert "error" not in rows[0]
    assert rows[1]["error"] == "interrupted"


@pytest.mark.exhaustive  # two processes import all that a column needs: 28 s of a core
def test_model_runs_end_to_end(config, tmp_path, capsys):
    sizes = ["--batch", "3", "--prompts", "8", "--context", "16", "--generate", "4,3", "--rounds", "3"]
    arguments = ["--models", config(layers=1), *sizes, "--columns", "eager bf16"]
    rows = main(["model", "--device", "cpu", *arguments, "--output", str(tmp_path / "out")])
    assert [(row["model"], row["column"]) for row in rows] == [("qwen3_moe", "eager bf16")]
    assert rows[0]["decode"]["3"]["floor_share"] > 0
    assert "decode, batch 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers: got '0', wanted an integer of at least 1"),
        (["--generate", "1"], "--generate: got 1 numbers, wanted 2"),
        (["--models", "qwen4"], "--models: got 'qwen4', wanted one of qwen3-30b-a3b, mixtral-8x7b"),
        (["--columns", "fp8"], "--columns: got 'fp8', wanted one of eager bf16, compiled bf16"),
        (["--prompts", "many"], "--prompts: got 'many', wanted an integer of at least 1"),
    ],
)
def test_model_says_what_is_wanted(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["model", "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [
        ("qwen3-30b-a3b", 30.5, 128),
        ("mixtral-8x7b", 46.7, 8),
        ("gpt-oss-20b", 20.9, 32),
        ("llama-4-scout", 107.8, 16),
        ("llama-4-maverick", 400.7, 128),
    ],
)
def test_real_models_have_their_published_sizes(name, billions, experts):
    model = models.skeleton(name)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert models.num_experts(model.config) == experts


def test_model_knows_its_configs():
    from thunder_moe.integrations.huggingface.experts import expert_blocks

    for name in models.CONFIGS:
        model = models.skeleton(name, layers=2)
        assert model.config.num_hidden_layers == 2
        assert 1 <= len(expert_blocks(model)) <= 2


def test_layers_are_the_same_whatever_their_number(config):
    calls = []
    one, two = (models.build(config(), CPU, layers=n, finish=lambda _, name: calls.append(name)) for n in (1, 2))
    assert calls == ["model.layers.0", "", "model.layers.0", "model.layers.1", ""]
    wanted = two.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in (*two.parameters(), *two.buffers()))
    assert torch.equal(two.model.rotary_emb.inv_freq, type(two.model.rotary_emb)(two.config).inv_freq)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
def test_processes_share_a_model(config, uncompiled, monkeypatch, tmp_path, name):
    monkeypatch.setitem(dense._LEAST_WEIGHTS, "cpu", 1)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    path = str(tmp_path / "weights")
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # as CUDA's handles, it names memory
    try:
        sizes = dict(batches=(), prompts=(), generate=None)
        loaded, error = run(spec(config(name), "quantize_ linears", part="load", weights=path, **sizes))
        assert error is None
        assert loaded["load"]["quantize_seconds"] > 0
        attention = "sdpa" if name == "gpt_oss" else "thunder_moe_sdpa"
        part = spec(config(name), "quantize_ linears", part="measure", weights=path, attention=attention)
        row, error = run(part)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert error is None
    assert row["attention"] == ("eager" if name == "gpt_oss" else attention)
    assert row["decode"]["3"]["median"] > 0
    assert row["decode"]["3"]["step_bytes"] > 0
    assert "load" not in row


SHARING = """
import json, os, sys, time
spec, path = json.loads(sys.argv[1]), sys.argv[2]
def emit(**part):
    open(path, "a").write(json.dumps(part) + "\\n")
def log(what):
    open("LOG", "a").write(f"{what} {spec['column']} {spec['part']} {spec['batches']} {spec['prompts']}\\n")
def turn():
    log("ready")
    emit(ready=True)
    assert sys.stdin.readline()
    log("measures")
    time.sleep(0.15)
log("starts")
if spec["column"] == "limits":
    turn()
    emit(read_bytes_per_second=1e9)
if spec["part"] == "load":
    turn()
    if spec["column"] == "quantize_":
        sys.exit((log("ends"), emit(error="out of memory"))[1])
    open(spec["weights"], "w").write(spec["column"])
    log("serves")
    emit(load={"build_seconds": 1.0}, layers=2, attention="sdpa", model_bytes=8)
    sys.stdin.read()
if spec["part"] == "check":
    emit(relative_error=0.01)
if spec["part"] == "measure":
    assert ("bf16" in open(spec["weights"]).read()) == ("bf16" in spec["column"])
    time.sleep(0.1)
    if spec["batches"] == [8] and spec["column"] == "compiled bf16":
        log("ends")
        sys.exit("died while it compiled")
    turn()
    if spec["prompts"] == [16] and spec["column"] == "compiled bf16":
        log("ends")
        sys.exit("died while it measured")
    emit(attention=spec["attention"])
    for batch in spec["batches"]:
        emit(decode={str(batch): {"median": 0.1 * batch}})
log("ends")
"""


@pytest.mark.parametrize(
    ("capacity", "jobs"), [(0.0, 3), (1e15, 2), pytest.param(1e15, 9, marks=pytest.mark.exhaustive)]
)
@pytest.mark.slow
def test_a_process_measures_when_no_other_computes(config, tmp_path, monkeypatch, capacity, jobs):
    log = tmp_path / "log"
    (tmp_path / "worker.py").write_text(SHARING.replace("LOG", str(log)))
    monkeypatch.setattr(processes, "WORKER", [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(processes, "_capacity", lambda device: capacity)
    columns = ["compiled bf16", "eager bf16", "quantize_"]
    specs = [
        Spec(config(), name, "cuda", batches=(1, 8), prompts=(16,), attention="thunder_moe_sdpa") for name in columns
    ]
    limits, (compiled, eager, quantized) = processes.run_columns(specs, jobs=jobs)
    assert limits["read_bytes_per_second"] == 1e9
    for row in (compiled, eager):
        assert row["load"] == {"build_seconds": 1.0}
        assert row["relative_error"] == 0.01
        assert row["attention"] == "thunder_moe_sdpa"
    assert list(compiled["decode"]) == ["1"]
    assert compiled["error"] in (
        "ended with status 1: died while it compiled",
        "ended with status 1: died while it measured",
    )
    assert list(eager["decode"]) == ["1", "8"]
    assert "error" not in eager
    assert quantized["error"] == "out of memory"
    state, measured = {}, 0
    for line in log.read_text().splitlines():
        what, _, name = line.partition(" ")
        if what == "measures":
            assert {other for key, other in state.items() if key != name} <= {"ready", "ends", "serves"}, line
            measured += 1
        if what == "starts":
            assert "measures" not in state.values(), line
        state[name] = what
    assert measured == 1 + (3 if capacity == 0 else 2) + 3


ALTERNATING = """
import json, sys, time
spec, path = json.loads(sys.argv[1]), sys.argv[2]
def emit(**part):
    open(path, "a").write(json.dumps(part) + "\\n")
def log(what):
    open("LOG", "a").write(f"{what} {spec['column']}\\n")
def ask(what):
    log(what)
    emit(**{what: True})
    assert sys.stdin.readline()
if spec["column"] == "limits":
    ask("ready")
    sys.exit(emit(read_bytes_per_second=1e9))
def compile(number):
    # Ends when the other of a pair is at it too, if it ever is.
    log("compiles")
    other = {"compiled bf16": "thunder_moe", "thunder_moe": "compiled bf16"}.get(spec["column"])
    end = time.monotonic() + PATIENCE
    while other and open("LOG").read().count(f"compiles {other}\\n") < number and time.monotonic() < end:
        time.sleep(0.01)
for number, batch in enumerate(spec["batches"], 1):
    compile(number)
    ask("ready")
    log("measures")
    time.sleep(0.1)
    emit(decode={str(batch): {"median": 1.0}})
    if batch != spec["batches"][-1]:
        ask("measured")
log("ends")
"""


@pytest.mark.parametrize(("gigabytes", "together"), [(100, True), (4, False)])
@pytest.mark.slow
def test_processes_of_a_cpu_compile_again_when_all_have_measured(config, tmp_path, monkeypatch, gigabytes, together):
    log = tmp_path / "log"
    patience = 600 if together else 0.1  # on a busy machine the other process starts much later
    (tmp_path / "worker.py").write_text(ALTERNATING.replace("LOG", str(log)).replace("PATIENCE", str(patience)))
    monkeypatch.setattr(processes, "WORKER", [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(processes, "_capacity", lambda device: gigabytes * 1e9)
    specs = [Spec(config(), name, "cpu", batches=(1, 8)) for name in ("compiled bf16", "thunder_moe", "quantize_")]
    _, rows = processes.run_columns(specs, jobs=2)
    assert all(list(row["decode"]) == ["1", "8"] and "error" not in row for row in rows)
    state, compiled_together = {}, 0
    for line in log.read_text().splitlines():
        what, _, name = line.partition(" ")
        state[name] = what
        if what == "measures":
            assert {other for key, other in state.items() if key != name} <= {"ready", "measured", "ends"}, line
        compiled_together += list(state.values()).count("compiles") == 2
    assert (compiled_together >= 2) == together


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(config, tmp_path, monkeypatch):
    log = tmp_path / "log"
    slow = SHARING.replace("LOG", str(log))
    slow = slow.replace('sys.exit("died while it compiled")', 'log("hangs"), time.sleep(600)')
    (tmp_path / "worker.py").write_text(slow)
    monkeypatch.setattr(processes, "WORKER", [sys.executable, str(tmp_path / "worker.py")])
    monkeypatch.setattr(processes, "_capacity", lambda device: 1e15)
    tasks, start, now = [], processes._Task.start, [0.0]
    monkeypatch.setattr(processes._Task, "start", lambda task, *args: tasks.append(task) or start(task, *args))

    def clock():  # a minute passes once all but one are where they will stay
        busy = [task.spec.batches for task in tasks if task.busy]
        if len(tasks) == 5 and busy == [(8,)] and "hangs" in log.read_text():
            now[0] = 60.0
        return now[0]

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    specs = [Spec(config(), "compiled bf16", "cuda", batches=(1, 8), prompts=(), generate=None)]
    _, (row,) = processes.run_columns(specs, jobs=9, patience=59)
    assert list(row["decode"]) == ["1"]
    assert row["error"] == "too slow: not compiled 60 s after its start"


def test_lines_are_taken_when_they_are_whole(tmp_path):
    task, results = processes._Task(Spec("", "limits", "cpu")), tmp_path / "results.jsonl"
    results.touch()
    task.process, task.results = SimpleNamespace(poll=lambda: None), results.open()
    with results.open("a", buffering=1 << 16) as file:
        for written, cells, row in (
            ('{"layers": 2}\n{"dec', 0, {"layers": 2}),
            ('ode": {"1": {"median": 1', 0, {"layers": 2}),
            ("0.0}}}\n", 1, {"layers": 2, "decode": {"1": {"median": 10.0}}}),
        ):
            file.write(written)
            file.flush()
            assert task.poll() == cells
            assert task.row == row
    task.results.close()


@pytest.mark.slow
def test_weights_that_cannot_fit_are_not_loaded(config, tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(SHARING.replace("LOG", str(tmp_path / "log")))
    monkeypatch.setattr(processes, "WORKER", [sys.executable, str(tmp_path / "worker.py")])
    needed = processes._bytes(Spec(config(), "compiled bf16", "cuda", part="load"))
    monkeypatch.setattr(processes, "_capacity", lambda device: needed - 1)
    specs = [Spec(config(), name, "cuda", batches=(1,)) for name in ("compiled bf16", "quantize_ linears")]
    _, (compiled, quantized) = processes.run_columns(specs, jobs=2)
    assert compiled["error"] == "out of memory: 1 GB of weights"
    assert list(quantized["decode"]) == ["1"]


def test_columns_share_a_group_where_they_fit(monkeypatch):
    names = ("compiled bf16", "thunder_moe", "quantize_", "quantize_ linears")
    specs = [Spec("qwen3-30b-a3b", name, "cuda", batches=(1,), generate=None) for name in names]

    def groups(capacity):
        monkeypatch.setattr(processes, "_capacity", lambda device: capacity)
        return [
            list(dict.fromkeys(task.spec.column for task in group if task.spec.part == "measure"))
            for group in processes._groups(specs, split=True)
        ]

    assert groups(1e12) == [list(names)]
    # Both bf16 columns read the same 62 GB, and the copies of thunder_moe are 18; each quantized model takes 21.
    assert groups(83e9) == [["compiled bf16", "thunder_moe"], ["quantize_", "quantize_ linears"]]
    assert groups(65e9) == [["compiled bf16"], ["thunder_moe"], ["quantize_", "quantize_ linears"]]
    assert groups(0.0) == [[name] for name in names]


def test_models_have_layers_of_their_own(config, workers, tmp_path):
    models = f"{config()}:1,{config('mixtral')}"
    arguments = ["--models", models, "--columns", "eager bf16", "--batch", "none", "--prompts", "7", "--layers", "2"]
    rows = main(["model", "--device", "cpu", *arguments, "--output", str(tmp_path / "out")])
    assert [row["model"] for row in rows] == ["qwen3_moe", "mixtral"]
    assert all(list(row["prefill"]) == ["7"] for row in rows)
    assert all("decode" not in row for row in rows)
    assert suite._layers("qwen3-30b-a3b:12") == ("qwen3-30b-a3b", 12)
    assert suite._layers("C:/models") == ("C:/models", None)


def report(path, *rows, model="m"):
    """The file of a report with rows of (column, decode, more)."""
    every = []
    for column_name, cells, more in rows:
        decode = {
            batch: {"median": median, "quartiles": quartiles, "method": "cuda graph", "first_call_seconds": 9}
            for batch, (median, quartiles) in cells.items()
        }
        row = {"model": model, "layers": 2, "all_layers": 2, "attention": "sdpa", "column": column_name, **more}
        every.append({**row, "decode": decode} if decode else row)
    path.write_text(json.dumps({"benchmark": "model", "environment": {"of": path.name}, "rows": every}))
    return str(path)


def test_reports_are_merged(tmp_path, capsys):
    quiet, noisy = {"1": (0.008, [0.0079, 0.0081])}, {"8": (0.02, [0.015, 0.021])}
    first = report(
        tmp_path / "model_cuda.json", ("compiled bf16", quiet, {}), ("quantize_", {"1": (0.004, [0.004, 0.004])}, {})
    )
    second = report(
        tmp_path / "b.json",
        ("quantize_", noisy, {"generate": {"tokens_per_second": 30.0, "quartiles": [28.0, 30.5]}}),
        ("eager bf16", {}, {"generate": {"tokens_per_second": 20.0, "quartiles": [20.0, 20.0]}}),
    )
    other = report(tmp_path / "c.json", ("compiled bf16", quiet, {}), model="other")
    out = tmp_path / "out"
    rows = main(["model", "--device", "cpu", "--merge", first, second, other, "--output", str(out)])
    assert [(row["model"], row["column"], row["run"]) for row in rows] == [
        ("m", "compiled bf16", 0), ("m", "quantize_", 0), ("m", "eager bf16", 1), ("other", "compiled bf16", 2)
    ]  # fmt: skip
    content = json.loads((out / "model_cuda.json").read_text())
    assert [run["environment"]["of"] for run in content["runs"]] == ["model_cuda.json", "b.json", "c.json"]
    assert (out / "model_cuda.png").exists()
    text = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    table = [line for line in lines if len(line) == 4]
    assert table[0] == ["", "eager bf16", "compiled bf16", "quantize_"]
    assert table[2:5] == [
        ["decode, batch 1: ms (% of floor)", "-", "8.00", "4.00"],
        ["batch 1: tokens/s (x)", "-", "125", "250 (2.00)"],
        ["decode, batch 8: ms (% of floor)", "-", "-", "20.0 [15.0, 21.0]"],
    ]
    assert ["eager generate: tokens/s (x)", "20.0", "-", "30.0 [28.0, 30.5] (1.50)"] in table
    assert "at most 2.5% of the median apart, but for 2 DISTURBED cells" in text
    again = main(["model", "--device", "cpu", "--merge", str(out / "model_cuda.json"), "--output", str(out)])
    assert again == rows


def test_a_column_that_did_not_fit_is_in_the_table(tmp_path):
    rows = [
        {"model": "m", "column": "compiled bf16", "attention": "sdpa", "error": "out of memory: 217 GB of weights"},
        {"model": "m", "column": "quantize_", "attention": "sdpa", "layers": 2, "all_layers": 2,
         "decode": {"1": {"median": 0.004, "method": "cuda graph"}}},
    ]  # fmt: skip
    ((title, cells),) = model_report.tables(rows)
    assert title == "m, 2 of 2 layers, attention sdpa"
    assert cells[0] == ["", "compiled bf16", "quantize_"]
    assert cells[1] == ["decode, batch 1: ms (% of floor)", "out of memory: 217 GB of weights", "4.00"]


def test_merging_says_what_is_wrong(tmp_path):
    one = report(tmp_path / "a.json", ("quantize_", {"1": (0.004, [0.004, 0.004])}, {}))
    with pytest.raises(SystemExit, match=r"a\.json: m, quantize_, decode 1 is in an earlier file too"):
        main(["model", "--device", "cpu", "--merge", one, one, "--output", str(tmp_path)])
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(SystemExit, match="wanted a report of `python -m benchmarks model`"):
        main(["model", "--device", "cpu", "--merge", str(tmp_path / "b.json"), "--output", str(tmp_path)])
