"""The layers of the package: its imports point one way, have no cycle, and meet optional packages where they may.
Called by pytest; reads the source, and so sees imports inside of functions too, and none for type checkers.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "thunder_moe"

# A module belongs to the longest of these that is its name or a package of it, and imports from its own layer and those
# below. The numbers are the layers, from below.
LAYERS = {
    "thunder_moe.progress": 0,  # imports nothing of ours
    "thunder_moe.scratch": 0,
    "thunder_moe.dense_names": 0,
    "thunder_moe.formats": 0,
    "thunder_moe.selection": 0,
    "thunder_moe.activations": 1,
    "thunder_moe.routing": 1,  # the plain-torch definitions that kernels share
    "thunder_moe.checkpoint": 1,
    "thunder_moe.kernels": 2,
    "thunder_moe.ops": 3,
    "thunder_moe.nn": 4,
    "thunder_moe.mxfp8": 4,
    "thunder_moe.nvfp4": 4,  # what users import
    "thunder_moe.training": 5,
    "thunder_moe.weight_cache": 5,
    "thunder_moe.compilers": 6,
    "thunder_moe.quantization": 6,
    "thunder_moe.finetune": 7,
    "thunder_moe.parallel": 7,
    "thunder_moe.integrations": 8,
    "thunder_moe.tools": 9,
    "thunder_moe.registration": 9,
    "thunder_moe.__main__": 10,
    "thunder_moe": 10,
}
# Imports that go upwards, and why. All but those of the version are inside of functions.
UPWARDS = {
    ("thunder_moe.nn.llama4", "thunder_moe.integrations.huggingface.llama4"): (
        "Llama4MoE.from_transformers is a public constructor; its code knows transformers' classes"
    ),
    ("thunder_moe.checkpoint.writer", "thunder_moe"): "__version__, a constant, for the producer in the files",
    ("thunder_moe.checkpoint.partial", "thunder_moe"): "__version__, a constant, of what a conversion resumes",
    ("thunder_moe.compilers.thunder.symbols", "thunder_moe"): "__version__, a constant, that of the executor",
    ("thunder_moe.integrations.vllm.graphs", "thunder_moe"): "__version__, a constant, for the key of compiled graphs",
}
# Their imports inside of functions load what they have registered when another package asks for it.
REGISTRATIONS = (
    "thunder_moe.registration",
    "thunder_moe.compilers.thunder_compat",  # the plugin
)
# Optional packages, and the only part of the package that imports each, but for what `ELSEWHERE` gives a reason for.
OPTIONAL = {
    "thunder": "thunder_moe.compilers.thunder",
    "transformers": "thunder_moe.integrations.huggingface",
    "vllm": "thunder_moe.integrations.vllm",
}
ELSEWHERE = {
    ("thunder", "thunder_moe.compilers.report"): "rewrite_report asks for the traces of a compiled function; lazily",
    ("transformers", "thunder_moe.compilers.thunder_compat"): "cures what Thunder makes of its masks; lazily",
}


def module_name(path: Path) -> str:
    parts = ("thunder_moe", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """All imports of a module: {what: whether outside of any function}; importlib.import_module of a literal too."""

    def __init__(self, path: Path) -> None:
        self.found: dict[str, bool] = {}
        self._functions = 0
        self._constants: dict[str, str] = {}  # names of the module that hold a string
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                self._constants |= dict.fromkeys(names, str(node.value.value))
        self.visit(tree)

    def _add(self, name: str) -> None:
        self.found[name] = self.found.get(name, False) or not self._functions

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            self._add(submodule if submodule in SOURCES else str(node.module))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        if function in ("importlib.import_module", "import_module", "__import__") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                self._add(str(argument.value))
            elif isinstance(argument, ast.Name) and argument.id in self._constants:
                self._add(self._constants[argument.id])
        self.generic_visit(node)


IMPORTS = {name: Imports(path).found for name, path in SOURCES.items()}


def layer(name: str) -> int:
    return LAYERS[max((key for key in LAYERS if name == key or name.startswith(f"{key}.")), key=len)]


def ours(name: str) -> list[str]:
    """The modules of ours that a module imports, at any place."""
    return [target for target in IMPORTS[name] if target.split(".")[0] == "thunder_moe"]


def test_every_module_is_of_a_layer():
    tops = {".".join(name.split(".")[:2]) for name in SOURCES}
    assert tops == LAYERS.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_downwards(name):
    upwards = {target for target in ours(name) if layer(target) > layer(name)}
    allowed = {target for source, target in UPWARDS if source == name}
    assert upwards == allowed
    for target in allowed:
        assert target == "thunder_moe" or not IMPORTS[name][target], (
            f"the import of {target} has to be inside of a function"
        )


def test_there_is_no_cycle():
    """Of imports at any place, but for those of `UPWARDS`, and for lazy ones of `REGISTRATIONS`."""

    def counts(name: str, target: str) -> bool:
        lazy = name in REGISTRATIONS and not IMPORTS[name][target]
        return target in SOURCES and (name, target) not in UPWARDS and not lazy

    rest = {name: {target for target in ours(name) if counts(name, target)} for name in SOURCES}
    while leaves := {name for name, targets in rest.items() if not targets & rest.keys()}:
        rest = {name: targets for name, targets in rest.items() if name not in leaves}
    assert not rest, f"a cycle is among {sorted(rest)}"


def room(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[: 3 if parts[1:2] == ["integrations"] else 2])


def test_rooms_have_no_cycle():
    """Packages of the package, and the modules beside them: a room imports another one, or is imported by it."""
    rest: dict[str, set[str]] = {room(name): set() for name in SOURCES}
    for name in SOURCES:
        for target in ours(name):
            if room(target) != room(name) and (name, target) not in UPWARDS and target in SOURCES:
                rest[room(name)].add(room(target))
    while leaves := {name for name, targets in rest.items() if not targets & rest.keys()}:
        rest = {name: targets for name, targets in rest.items() if name not in leaves}
    assert not rest, f"a cycle is among {sorted(rest)}"


@pytest.mark.parametrize("package", OPTIONAL)
def test_optional_packages_are_imported_in_one_place(package):
    importers = {name for name in SOURCES if any(target.split(".")[0] == package for target in IMPORTS[name])}
    assert importers
    strangers = {name for name in importers if not name.startswith(OPTIONAL[package])}
    assert strangers == {name for known, name in ELSEWHERE if known == package}


def test_formats_and_checkpoint_stand_alone():
    for name in SOURCES:
        for part, below in (
            ("formats", ()),
            ("checkpoint", ("formats", "dense_names", "progress", "scratch", "selection")),
        ):
            if name.startswith(f"thunder_moe.{part}"):
                allowed = tuple(f"thunder_moe.{own}" for own in (part, *below))
                assert all(t.startswith(allowed) or (name, t) in UPWARDS for t in ours(name)), name


def test_the_reader_of_imports_sees_all_kinds(tmp_path):
    (tmp_path / "module.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "import importlib, a.b\n"
        "if TYPE_CHECKING:\n    import hidden\nelse:\n    import otherwise\n"
        "NAME = 'named'\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\n"
        "class C:\n    import in_class\n    def f(self):\n        from lazy import x\n"
        "        importlib.import_module(NAME)\n"
        "from thunder_moe.kernels import select\n"
    )
    found = Imports(tmp_path / "module.py").found
    top = {"typing", "importlib", "a.b", "otherwise", "tried", "in_class", "thunder_moe.kernels.select"}
    assert found == dict.fromkeys(top, True) | {"lazy": False, "named": False}
