"""Runs the Python code of README.md and of docs/; checks the links, `make` targets and benchmarks that the pages name.
Called by pytest; calls what the pages call.

The ```python blocks of a page run in order in one namespace, in an empty working directory. A block without a language
that follows one directly is what it prints. A block is left out only
when the line above it is an HTML comment `<!-- not run: why -->`; `NOT_RUN` counts those of each page. torch.compile
runs its graphs as they are ("eager" in the place of inductor, which takes seconds per graph and is tested elsewhere).
"""

import functools
import json
import re
from pathlib import Path

import engines_table
import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Blocks that need a GPU, a download, a minute, or a package that `pip install -e '.[test]'` does not install.
NOT_RUN = {
    "distributed.md": 2,
    "finetuning.md": 2,
    "gloo_race.md": 1,
    "huggingface.md": 1,
    "number_format.md": 2,
    "thunder.md": 4,
    "torch_compile.md": 1,
    "quickstart.md": 1,
}
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n+)?^```python\n(?P<code>.*?)^```$(?:\n+```\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]*)\)")


def blocks(page: Path) -> list[tuple[int, str, str | None, str | None]]:
    """(line, code, why it is not run or None, what the page says that it prints) of each Python block of a page."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start("code")), match["code"], match["why"], match["printed"])
        for match in _BLOCK.finditer(text)
    ]


PAGES_WITH_CODE = [page for page in PAGES if any(why is None for _, _, why, _ in blocks(page))]
SLOW = {"thunder.md"}  # three of Thunder's compilations, 7 s; README.md has one


@pytest.fixture
def eager_graphs(monkeypatch):
    """torch.compile without inductor: the graphs that a backend makes run as they are."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def without_inductor(*args, backend="inductor", mode=None, options=None, **kwargs):
        if backend == "thunder_moe":
            options = {"thunder_moe.inner": "eager", **(options or {})}
        elif backend == "inductor":
            backend, options = "eager", None
        return compile_(*args, backend=backend, options=options, **kwargs)

    monkeypatch.setattr(torch, "compile", without_inductor)


@pytest.mark.filterwarnings("default::thunder_moe.compilers.report.RewriteWarning")  # pages train, too
@pytest.mark.filterwarnings("error:erase_node")  # of torch.fx, which users would see
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW)) for page in PAGES_WITH_CODE],
)
def test_code_of_a_page_runs(page, eager_graphs, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code, why, printed in blocks(page):
        if why is None:
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
            output = capsys.readouterr().out
            assert printed is None or printed.strip() == output.strip(), f"{page.name}, line {line}"


def test_pages_with_code_are_found():
    assert {"README.md", "quickstart.md"} <= {page.name for page in PAGES_WITH_CODE}


def test_blocks_that_are_not_run_are_counted():
    left_out = {page.name: sum(why is not None for _, _, why, _ in blocks(page)) for page in PAGES}
    assert {name: count for name, count in left_out.items() if count} == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_have_targets(page):
    for link in _LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_of_a_page_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:`|^)make (?:[A-Z]+=\S+ )*([a-z][\w-]*)", page.read_text(), re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "python -m benchmarks" in page.read_text()], ids=lambda p: p.name
)
def test_benchmarks_of_a_page_exist(page):
    text = page.read_text().replace("\\\n", "")
    for command, options in re.findall(r"python -m benchmarks ([a-z]+)\b([^`\n]*)", text):
        sources = [ROOT / "benchmarks" / name for name in (f"suites/{command}.py", "harness/report.py")]
        known = "".join(source.read_text() for source in sources)
        for option in re.findall(r"--[\w-]+", options.replace("--help", "")):
            assert f'"{option}"' in known, f"{command} {option}"


def test_the_table_of_engines_is_that_of_their_results():
    page, results = engines_table.PAGE.read_text(), json.loads(engines_table.RESULTS.read_text())
    assert engines_table.with_table(page, results) == page, "python tests/engines_table.py writes it"


def test_a_table_of_engines():
    models = {
        "mixtral": {"tokens": "48/48", "ok": True, "why": None},
        "olmoe": {"tokens": "48/48", "ok": True, "why": None},
        "gpt_oss": {"tokens": None, "ok": False, "why": "a | b"},
    }
    first, _, *rows = engines_table.render({"vLLM": {"version": "1.2", "models": models}}).splitlines()
    assert first == "| model type | `load_checkpoint` | vLLM 1.2 |"
    assert rows[:2] == [
        "| `mixtral`, `olmoe` | bit for bit | 48 of 48 tokens |",
        "| `gpt_oss` | bit for bit | no, a / b |",
    ]
    assert rows[2].startswith("| `afmoe`, ")
    assert rows[2].endswith(" | bit for bit | not run |")
    with pytest.raises(ValueError, match=r"results: got \['x'\], wanted names of tiny_models"):
        engines_table.render({"vLLM": {"version": "1.2", "models": {"x": models["mixtral"]}}})
