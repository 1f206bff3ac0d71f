"""The emulator's builds: found again by content, made again when something they depend on changes. Called by pytest."""

import pytest
from emulator import build

from thunder_moe.kernels.cuda import backend as cuda
from thunder_moe.kernels.cuda.arguments import RowStartsArguments

KERNEL = (cuda.ROUTE, "row_starts", RowStartsArguments)
pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return what an apparently new process compiles, with an empty cache."""
    calls, compile_program = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda *arguments: calls.append(arguments) or compile_program(*arguments))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = (build.library, build._emulator, build._folder, build._environment)
    for function in cached:
        function.cache_clear()
    yield calls
    for function in cached:
        function.cache_clear()


def test_a_build_is_found_again_by_other_processes(compiled, tmp_path):
    build.library(*KERNEL)
    assert len(compiled) == 3  # the header, the source, the kernel
    for function in (build.library, build._emulator):
        function.cache_clear()
    build.library(*KERNEL)
    assert len(compiled) == 3
    found = sorted(path.suffix for path in (tmp_path / "thunder_moe" / "emulator").iterdir())
    assert found == [".emulator", ".so"]  # nothing else is left behind


def test_another_compiler_or_source_is_another_build(compiled, monkeypatch):
    first = build._key("source")
    assert build._key("other source") != first
    monkeypatch.setattr(build, "_environment", lambda: "another compiler")
    assert build._key("source") != first


def test_what_does_not_compile_shows_the_compiler_message():
    with pytest.raises(AssertionError, match="nothing"):
        build.library(cuda.ROUTE, "nothing", RowStartsArguments)
