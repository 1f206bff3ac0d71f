"""The table of docs/checkpoints.md that says which architectures other engines load and generate with.
`python tests/engines_table.py` writes it from docs/engines.json, which the tests of integrations/vllm write. Called by
test_docs, which compares, and by hand; calls tiny_models for the names.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tiny_models import ARCHITECTURES, OTHERS

DOCS = Path(__file__).parent.parent / "docs"
RESULTS, PAGE = DOCS / "engines.json", DOCS / "checkpoints.md"
_MARKED = re.compile(r"(?<=<!-- engines -->\n).*?(?=<!-- end of engines -->)", re.DOTALL)


def render(results: dict) -> str:
    """The table: one row for each outcome, with the model types that have it.

    Args:
        results: engine -> {"version": ..., "models": {name: {"tokens": "48/48" or None, "ok": bool, "why": ...}}}.

    Raises:
        ValueError: a name that is none of tiny_models.
    """
    engines = dict(sorted(results.items()))
    known = ARCHITECTURES | OTHERS
    for entry in engines.values():
        unknown = entry["models"].keys() - known.keys()
        if unknown:
            raise ValueError(f"results: got {sorted(unknown)}, wanted names of tiny_models")
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in known:
        outcome = tuple(_words(entry["models"].get(name)) for entry in engines.values())
        rows.setdefault(outcome, []).append(f"`{name}`")
    titles = ["model type", "`load_checkpoint`", *(f"{engine} {entry['version']}" for engine, entry in engines.items())]
    lines = [titles, ["---"] * len(titles)]
    order = sorted(rows, key=lambda outcome: (["not run" in words for words in outcome], -len(rows[outcome])))
    lines += [[", ".join(sorted(rows[outcome])), "bit for bit", *outcome] for outcome in order]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _words(result: dict | None) -> str:
    if result is None:
        return "not run"
    tokens = f"{result['tokens'].replace('/', ' of ')} tokens" if result.get("tokens") else ""
    if result["ok"]:
        return tokens
    why = " ".join(str(result.get("why") or "").replace("|", "/").split())
    return ", ".join(words for words in ("no", tokens, why) if words)


def with_table(page: str, results: dict) -> str:
    """The page with the table between its markers."""
    if not _MARKED.search(page):
        raise ValueError(f"page: {PAGE.name} has no markers '<!-- engines -->' and '<!-- end of engines -->'")
    return _MARKED.sub(lambda _: render(results), page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
