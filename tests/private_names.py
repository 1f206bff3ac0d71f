"""`private_names`: the names of another package with a leading underscore that the source of this package uses.
Called by test_changes; reads the source.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "thunder_moe"


def private_names(*packages: str) -> dict[str, set[str]]:
    """File of this package -> dotted names with a private part, of the given packages, that it imports or reads."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        names = set(_names(ast.parse(path.read_text(encoding="utf-8"))))
        for name in names:
            parts = name.split(".")
            private = any(part.startswith("_") and not part.startswith("__") for part in parts)
            if parts[0] in packages and private and not any(other.startswith(f"{name}.") for other in names):
                found[path.relative_to(PACKAGE).as_posix()].add(name)
    return dict(found)


def _names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names, through what the module imports; attributes that getattr reads by a literal, too."""
    home = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                full = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
                top = full.split(".")[0]
                home |= {alias.asname or top: full if alias.asname else top} if isinstance(node, ast.Import) else {
                    alias.asname or alias.name: full
                }  # fmt: skip
                yield full
    for node in ast.walk(tree):
        chain = []
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and isinstance(node.args[1], ast.Constant)
        ):
            chain, node = [node.args[1].value], node.args[0]
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if chain and isinstance(node, ast.Name) and node.id in home:
            yield ".".join([home[node.id], *reversed(chain)])
