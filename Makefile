# Everything runs in .venv, which the first call makes. On a fresh machine: `make demo`, `make test`.
#   PYTHON  the interpreter to make .venv with (3.10 to 3.13)
#   TORCH   what pip installs as torch; on a Linux machine with a GPU, TORCH=torch takes the newest CUDA build
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: demo test lint bench test-matrix clean

demo: .venv/installed-bench
	$(BIN)/python examples/llama4_moe_text.py

test: .venv/installed-test
	$(BIN)/python -m pytest

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-bench
	$(BIN)/python benchmarks/bench_grouped_mm.py
	$(BIN)/python benchmarks/bench_moe_layer.py
	$(BIN)/python benchmarks/bench_compile_overhead.py

# The suite on torch 2.10 to 2.15 (several GB of downloads each on Linux).
test-matrix: .venv/installed-dev
	$(BIN)/nox

.venv/torch:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and "thunder_moe needs Python 3.10 to 3.13: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear .venv
	$(PIP) '$(TORCH)' setuptools
	touch $@

.venv/installed-%: .venv/torch pyproject.toml
	$(PIP) --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv .nox build dist out *.egg-info
