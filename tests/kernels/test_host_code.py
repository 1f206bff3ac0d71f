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
