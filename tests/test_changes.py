"""docs/changes.md says what the code does: its tables of changes and of private names are those of the source.
Called by pytest; reads both.
"""

import ast
import re
from pathlib import Path

import pytest
from private_names import PACKAGE, private_names

PAGE = (Path(__file__).parent.parent / "docs" / "changes.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading of the page."""
    lines = PAGE.partition(f"\n{heading}\n")[2].lstrip("\n").splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("|")) :]
    end = next((i for i, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:end]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_private_names_are_those_of_the_code():
    told = {quoted(file)[0]: {*quoted(names)} for file, names, _ in rows("## Private names that are used")}
    assert told == private_names("torch", "thunder", "transformers")


def functions(file: str) -> dict[str, str]:
    """The functions of a file -> their docstrings."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    return {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_change_of_thunder_is_in_the_table():
    """Functions of compat.py name the release that ends them, in whose row the page names them."""
    file = "compilers/thunder_compat.py"
    known = {name for name, text in functions(file).items() if "Unnecessary from the first Thunder release" in text}
    assert known == {name for row in rows("## What is changed in Thunder") for name in quoted(row[-1])} & {
        *functions(file)
    }


@pytest.mark.parametrize("heading", ["## What is replaced in transformers", "## What is changed in Thunder"])
def test_where_a_change_is_made(heading):
    names = {name for path in PACKAGE.rglob("*.py") for name in functions(str(path.relative_to(PACKAGE)))}
    for row in rows(heading):
        assert quoted(row[-1]), row
        assert {*quoted(row[-1])} <= names, row
