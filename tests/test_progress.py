"""Tests of progress.py: what a bar writes to a log file, and what to a terminal.
Called by pytest; calls thunder_moe.progress.
"""

import ast
import io
import re
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from thunder_moe import progress
from thunder_moe.progress import progress_bar

ROOT = Path(__file__).parent.parent


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The seconds of the lines' clock, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def log(monkeypatch, capsys):
    """Read what was written to standard error, which is not a terminal here."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    return lambda: capsys.readouterr().err


def test_a_log_gets_one_line_of_a_short_loop(log):
    bar = progress_bar(range(2000), desc="training", unit="step", mininterval=0)
    for step in bar:
        bar.set_description("training")
        bar.set_postfix(loss=step)
    text = log()
    assert "\r" not in text
    assert text.count("\n") == 1
    assert re.fullmatch(r"training: 100%.* 2000/2000 .*loss=1999\]\n", text)


def test_without_standard_error_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress_bar(range(3), desc="training")) == [0, 1, 2]
    progress_bar(total=2).update()


def test_a_log_gets_a_line_every_half_minute(log, clock):
    for _ in progress_bar(range(100), mininterval=0, miniters=1):
        clock[0] += 1
    counts = [line.split("|")[2].split()[0] for line in log().splitlines()]
    assert counts == ["30/100", "60/100", "90/100", "100/100"]


def test_bars_in_a_bar_and_lines_beside_it_do_not_move_the_cursor(log):
    for _ in progress_bar(range(2), desc="outer"):
        for _ in progress_bar(range(3), desc="inner"):
            tqdm.write("a row", file=sys.stderr)
        for _ in progress_bar(range(3), desc="gone", leave=False):
            pass
    text = log()
    assert [line.split(":")[0] for line in text.splitlines()] == [*["a row"] * 3, "inner"] * 2 + ["outer"]
    assert not {"\r", "\x1b"} & set(text)


def test_a_disabled_bar_writes_nothing(log):
    with progress_bar(total=3, disable=True) as bar:
        bar.update(3)
    assert log() == ""


def test_a_terminal_and_a_notebook_keep_the_bar(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    list(progress_bar(range(3)))
    assert "\r" in log()
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setattr(sys, "stderr", Terminal())
    list(progress_bar(range(3)))
    assert "\r" in sys.stderr.getvalue()


def test_all_bars_are_of_this_module():
    """tqdm itself is there for its type and tqdm.write, which puts a line above a terminal's bars."""
    files = [path for part in ("thunder_moe", "benchmarks", "examples") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        if path != ROOT / "thunder_moe" / "progress.py" and "tqdm" in (text := path.read_text(encoding="utf-8")):
            calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            assert "tqdm" not in [ast.unparse(call) for call in calls], path
