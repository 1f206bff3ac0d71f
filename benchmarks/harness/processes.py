"""Runs the columns of the model suite, each in processes of its own, one after the other or several at the same time.
Called by suites/model.py; starts harness/column.py, calls harness/models.py for how much memory a model takes.

Nothing is timed while anything else of the run compiles or computes: a process that is ready to measure says so and
waits for its turn. On CUDA and with more than one job the parts of a column (each batch, the prefills, the check) are
processes that compile at the same time, and share the weights, which another process has loaded. On a CPU a column is
one process, which compiles a graph, measures it and goes on to the next. Once all that may run at the same time are
ready or have ended, they measure one by one; then they go on.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from benchmarks.harness.column import COLUMNS, Spec
from benchmarks.harness.decode import SPARE, tensor_bytes
from benchmarks.harness.models import config_of, has_sdpa, skeleton
from thunder_moe.progress import progress_bar

__all__ = ["WORKER", "cores", "run_columns"]

WORKER = [sys.executable, "-m", "benchmarks.harness.column"]
ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@dataclass
class _Task:
    """One process: what it runs, the row that its results belong to, and the process whose weights it shares."""

    spec: Spec
    row: Row = field(default_factory=dict)
    loader: _Task | None = None
    process: subprocess.Popen[bytes] | None = None
    results: TextIO | None = None
    unread: str = ""  # the beginning of a line whose end is not written yet
    log: Path | None = None
    ended: bool = False
    started: float = 0.0  # or when it began to compile again
    late: bool = False  # was killed because it took too long to compile
    ready: bool = False  # waits for its turn
    measured: bool = False  # waits until it may compile again
    weights: str | None = None  # of a loader: the file by which it shares them

    @property
    def name(self) -> str:
        cells = self.spec.batches or self.spec.prompts or "generate"
        what = {"measure": cells, "load": "loading", "check": "check", "all": ""}[self.spec.part]
        return " ".join(filter(None, map(str, (self.spec.model, self.spec.column, what))))

    @property
    def bytes(self) -> float:
        """About what it needs on its device."""
        return _bytes(self.spec)

    @property
    def compiles(self) -> bool:
        """True if it makes a compiled graph."""
        return COLUMNS[self.spec.column].compiled and bool(self.spec.batches or self.spec.prompts)

    @property
    def leads(self) -> bool:
        """True if it has to finish its work, which is short and timed, before others compile."""
        return self.spec.part == "load" or self.spec.column == "limits"

    @property
    def serves(self) -> bool:
        """True if it is a loader whose weights are loaded."""
        return self.spec.part == "load" and "load" in self.row

    @property
    def busy(self) -> bool:
        """True if it compiles or computes."""
        return not (self.ended or self.ready or self.measured or self.serves)

    def start(self, directory: Path, index: int, jobs: int) -> None:
        self.started = time.monotonic()
        results, self.log = directory / f"{index}.jsonl", directory / f"{index}.log"
        results.touch()
        self.results = results.open()
        spec = replace(self.spec, turns=True)
        loader = self if spec.part == "load" else self.loader
        if loader is not None:
            loader.weights = loader.weights or str(directory / f"{index}.weights")
            spec = replace(spec, weights=loader.weights)
        command = [*WORKER, json.dumps(asdict(spec)), str(results)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        if jobs > 1:  # inductor's default is one compiler for each core and process
            environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores() // (2 * jobs))))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment,
                start_new_session=True,  # an interrupt is for this process, which ends the others
            )  # fmt: skip

    def poll(self) -> int:
        """Takes new results into the row, and whether the process has ended; returns how many cells they are."""
        assert self.process is not None
        assert self.results is not None
        code, cells = self.process.poll(), 0
        *lines, self.unread = (self.unread + self.results.read()).split("\n")
        for line in lines:
            part: Row = json.loads(line)
            cells += "decode" in part or "prefill" in part
            self.ready = part.pop("ready", self.ready)
            self.measured = part.pop("measured", self.measured)
            for key, value in part.items():
                if isinstance(value, dict) and isinstance(self.row.get(key), dict):
                    self.row[key] |= value
                else:
                    self.row[key] = value
        if code is not None and not self.ended:
            self.ended = True
            self.results.close()
            if code != 0:
                self._fail(code)
        return cells

    def _fail(self, code: int) -> None:
        """Says what went wrong, if the process could not say it."""
        assert self.log is not None
        if self.late:
            self.row.setdefault(
                "error", f"too slow: not compiled {time.monotonic() - self.started:.0f} s after its start"
            )
            return
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
        self.row.setdefault("error", f"{how}: {lines[-1] if lines else 'no output'}")
        print(f"\n{self.name}:", *lines[-30:], sep="\n", file=sys.stderr)

    def give_turn(self) -> None:
        """Lets it measure, or compile again; it is busy then."""
        assert self.process is not None
        assert self.process.stdin is not None
        if self.measured:
            self.started = time.monotonic()
        self.ready = self.measured = False
        with contextlib.suppress(BrokenPipeError):  # it has died: the next poll says how
            self.process.stdin.write(b"turn\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Lets a loader end."""
        assert self.process is not None
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()


def run_columns(specs: Sequence[Spec], jobs: int, patience: float = math.inf) -> tuple[Row, list[Row]]:
    """Measures columns.

    Args:
        specs: of whole columns.
        jobs: processes that compile at the same time, as far as their device's memory allows.
        patience: seconds after which a process that still compiles is ended, since the others wait for it.

    Returns:
        The device's limits, and the row of each spec. A row whose process failed has an "error".
    """
    device = specs[0].device
    limits = _Task(Spec("", "limits", device))
    groups = list(_groups(specs, split=jobs > 1 and device == "cuda"))
    groups[0].insert(0, limits)
    tasks = [task for group in groups for task in group]
    cells = sum(len(spec.batches) + len(spec.prompts) for spec in specs)
    handler = signal.signal(signal.SIGTERM, _interrupt)
    with (
        tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True) as directory,
        progress_bar(total=cells, unit="cell") as bar,
    ):
        try:
            for index, group in enumerate(groups):
                (Path(directory) / str(index)).mkdir()
                _run(group, jobs, patience, Path(directory) / str(index), bar)
        except KeyboardInterrupt:  # what there is, is written
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)
            for task in tasks:
                if task.process is not None and not task.ended:
                    task.poll()
                if not task.ended:
                    task.row.setdefault("error", "interrupted")
            signal.signal(signal.SIGINT, interrupts)
        finally:
            for task in tasks:
                task.kill()
            signal.signal(signal.SIGTERM, handler)
    return limits.row, list(_rows(specs, tasks[1:]))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _groups(specs: Sequence[Spec], *, split: bool) -> Iterator[list[_Task]]:
    """Yield the processes that run together, in the order of their start: loaders, checks, parts of columns.

    Columns of a model are in as few groups as memory allows, since each group takes the time to compile once more.
    """
    for _, columns in itertools.groupby(specs, key=lambda spec: (spec.model, spec.layers)):
        if not split:
            yield [_Task(spec) for spec in columns]
            continue
        groups: list[list[Spec]] = []
        for spec in columns:
            capacity = _capacity(spec.device)
            room = (group for group in groups if _bytes_of_group([*group, spec]) <= capacity)
            if (group := next(room, None)) is not None:
                group.append(spec)
            else:
                groups.append([spec])
        yield from map(_tasks, groups)


def _bytes_of_group(specs: Sequence[Spec]) -> float:
    """About what columns need at the same time, their short checks aside."""
    return sum(task.bytes for task in _tasks(specs) if task.spec.part != "check")


def _tasks(specs: Sequence[Spec]) -> list[_Task]:
    """Return the processes of columns of one model."""
    loaders: dict[str, _Task] = {}
    checks, parts = list[_Task](), list[_Task]()
    for spec in specs:
        row: Row = {}
        loader = None
        if spec.device == "cuda":
            key = json.dumps(COLUMNS[spec.column].quantize)
            empty = replace(spec, part="load", attention="sdpa", batches=(), prompts=())
            loader = loaders.setdefault(key, _Task(empty))
        checks.append(_Task(replace(spec, part="check", batches=()), row))
        parts += [_Task(part, row, loader) for part in _parts(spec)]
    parts.sort(key=lambda task: not task.compiles)  # what does not may start when the checks have ended
    return [*loaders.values(), *checks, *parts]


def _parts(spec: Spec) -> Iterator[Spec]:
    """Return a part for each graph that is compiled, and one of what is eager."""
    part = replace(spec, part="measure")
    if not COLUMNS[spec.column].compiled:
        yield part
        return
    if COLUMNS[spec.column].generates and spec.generate is not None:
        yield replace(part, batches=(), prompts=())
    for batch in spec.batches:
        yield replace(part, batches=(batch,), prompts=(), generate=None)
    if spec.prompts:
        yield replace(part, batches=(), generate=None)


def _run(tasks: Sequence[_Task], jobs: int, patience: float, directory: Path, bar: tqdm[Any]) -> None:
    """Runs processes until all have ended: starts what may run together, then lets it measure one by one, and again."""
    waiting, running = list(tasks), list[_Task]()
    capacity = _capacity(tasks[0].spec.device)
    measuring = False
    while waiting or running:
        for task in list(waiting):
            if reason := _obstacle(task, capacity):
                task.row["error"], task.ended = reason, True
                waiting.remove(task)
        while not measuring and waiting and _may_start(waiting[0], waiting, running, jobs, capacity):
            running.append(waiting.pop(0))
            running[-1].start(directory, tasks.index(running[-1]), jobs)
        for task in running:
            if not measuring and task.busy and not task.leads and time.monotonic() - task.started > patience:
                task.late = True
                task.kill()
        ready = [task for task in running if task.ready]
        if not any(task.busy for task in running):
            measuring = bool(ready)
            if measuring:
                ready[0].give_turn()
                _say(bar, f"measuring {ready[0].name}")
            else:
                for task in running:
                    if task.measured:
                        task.give_turn()
        elif not measuring:
            _say(bar, f"compiling, {len(ready)} of {sum(not task.serves for task in running)} ready")
        for task in list(running):
            if task.loader is not None and "error" in task.loader.row:  # it has lost its weights
                task.kill()
                task.row["error"], task.ended = task.loader.row["error"], True
            elif cells := task.poll():
                bar.update(cells)
            if task.ended:
                running.remove(task)
            elif task.serves and not any(other.loader is task for other in (*waiting, *running)):
                task.close()
        time.sleep(0.05)


def _obstacle(task: _Task, capacity: float) -> str | None:
    """Say why a process need not be started, or None."""
    weights = _bytes(replace(task.spec, part="load"))
    if 0 < capacity < weights:
        return f"out of memory: {weights / 1e9:.0f} GB of weights"
    if task.loader is not None and "error" in task.loader.row:
        return str(task.loader.row["error"])
    error = str(task.row.get("error"))  # of another part of the column
    return error if error.startswith("wrong") else None


def _say(bar: tqdm[Any], text: str) -> None:
    if bar.desc != f"{text}: ":
        bar.set_description(text)


def _may_start(task: _Task, waiting: Sequence[_Task], running: Sequence[_Task], jobs: int, capacity: float) -> bool:
    """True if the first waiting process may start beside the running ones."""
    if not task.leads and any(other.leads and not other.serves for other in running):
        return False
    # The first one may always run: if it does not fit, its cells say so.
    if all(other.serves and any(part.loader is other for part in waiting) for other in running):
        return True
    parts = sum(other.spec.part != "load" for other in running)
    return (task.spec.part == "load" or parts < jobs) and sum(other.bytes for other in (*running, task)) <= capacity


def _rows(specs: Sequence[Spec], tasks: Sequence[_Task]) -> Iterator[Row]:
    """Return each column's row: what its loader and its parts found."""
    for spec in specs:
        own = [task for task in tasks if task.spec.part != "load" and _column_of(task.spec) == _column_of(spec)]
        row: Row = {"model": spec.model, "column": spec.column, "attention": spec.attention}
        row["all_layers"] = config_of(spec.model).num_hidden_layers
        loader = own[0].loader or next((task.loader for task in own if task.loader is not None), None)
        if loader is not None:
            row |= {key: value for key, value in loader.row.items() if key != "attention"}
        row |= own[0].row
        for kind in ("decode", "prefill"):
            if kind in row:
                wanted = map(str, spec.batches if kind == "decode" else spec.prompts)
                row[kind] = {key: row[kind][key] for key in wanted if key in row[kind]}
        if str(row.get("error")).startswith("wrong"):
            row = {key: value for key, value in row.items() if key not in ("decode", "prefill", "generate")}
        yield row


def _column_of(spec: Spec) -> tuple[str, int | None, str, str]:
    return spec.model, spec.layers, spec.column, spec.attention


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _capacity(device: str) -> float:
    """Return the bytes that the processes of one moment may need together."""
    if device != "cuda":
        known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) if known else math.inf
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:  # a CUDA context of this process would take memory
        return float(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) * 2**20
    except (OSError, IndexError, ValueError):
        return 0.0  # one after the other


def _bytes(spec: Spec) -> float:
    if spec.column == "limits":
        return 0.0
    weights, keys, squares, layers = _model_bytes(spec.model, spec.layers)
    form = COLUMNS[spec.column]
    share = 1.0 if form.quantize is None else 0.58 if form.quantize.get("format") == "mxfp8" else 0.33
    loaded = share * weights + 1e9
    packed = 0.3 * weights if form.backend is not None else 0.0
    prompt = max(spec.prompts, default=0)
    work = keys * max(spec.batches, default=0) * (spec.context + SPARE) + squares * prompt**2 + 2e5 * prompt + 0.9e9
    if spec.part == "all":
        return loaded + packed + work + (8e9 if spec.device == "cuda" else 1e9)
    return {"load": loaded, "check": 3 * weights / layers + 2e9, "measure": packed + work}[spec.part]


@functools.cache
def _model_bytes(source: str, layers: int | None) -> tuple[float, float, float, int]:
    """Return the bytes of a bf16 model, of a token's keys and values, of a score of attention, and its layers."""
    config: Any = config_of(source, layers)
    heads, head_dim = config.num_key_value_heads, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    number = int(config.num_hidden_layers)
    squares = 0.0 if has_sdpa(source) else 6.0 * config.num_attention_heads
    return float(tensor_bytes(skeleton(source, layers))), float(4 * heads * head_dim * number), squares, number
