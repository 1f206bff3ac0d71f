"""Builds of C++: the compiler that the environment names, and what a killed build leaves. Called by pytest.

The compilers here are shell scripts that write a file and take no time.
"""

import multiprocessing
import os
import time

import pytest

from thunder_moe.kernels import host_code

if "fork" not in multiprocessing.get_all_start_methods():
    pytest.skip("needs fork", allow_module_level=True)
FORKS = multiprocessing.get_context("fork")


@pytest.mark.parametrize("value", [" ", "g++ 'x", '"', "\t\n"])
def test_a_compiler_that_is_no_command_is_named(monkeypatch, value):
    monkeypatch.setenv("CXX", value)
    with pytest.raises(ValueError, match=r"CXX: got .* in the environment, wanted .*'ccache g\+\+'; unset it") as error:
        host_code.compiler()
    assert repr(value) in str(error.value)
    monkeypatch.setenv("CXX", "")
    assert host_code.compiler() == ["c++"]


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Build a library with a compiler that first does what a line of shell says."""
    monkeypatch.setattr(host_code.tempfile, "tempdir", str(tmp_path / "temporary files"))
    (tmp_path / "temporary files").mkdir()

    def build(line):
        compiler = tmp_path / f"c++{time.monotonic_ns()}"
        compiler.write_text(
            f'#!/bin/sh\ncase " $* " in *" -c "*) {line};; esac\n'
            'while [ "$1" != -o ]; do shift; done\nprintf library > "$2"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        assert host_code.compile_library([tmp_path / "source.cpp"], [], []) == b"library"

    return build


def test_the_next_build_removes_what_a_killed_one_left(build, tmp_path):
    process = FORKS.Process(target=build, args=("kill -9 $PPID",))
    process.start()
    process.join()
    place = tmp_path / "temporary files"
    assert process.exitcode == -9
    assert len(os.listdir(place)) == 1
    (place / "file of another program").touch()
    build(":")
    assert os.listdir(place) == ["file of another program"]


def test_a_build_that_runs_is_left_alone(build, tmp_path):
    process = FORKS.Process(
        target=build, args=(f"touch '{tmp_path}/on'; until [ -e '{tmp_path}/go' ]; do sleep 0.01; done",)
    )
    process.start()
    while not (tmp_path / "on").exists():
        time.sleep(0.01)
    build(":")
    assert len(os.listdir(tmp_path / "temporary files")) == 1
    (tmp_path / "go").touch()
    process.join()
    assert process.exitcode == 0
    assert not os.listdir(tmp_path / "temporary files")
