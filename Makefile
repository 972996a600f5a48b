# Short names only; each does its own set-up. PYTHON=... chooses the Python that .venv is made from.
PYTHON ?= python3
VENV := .venv/bin
PY := $(VENV)/python
PYTEST := $(PY) -m pytest
SHELL := /bin/sh
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

build/.system: scripts/install_system.sh
	@mkdir -p build
	scripts/install_system.sh $(PYTHON)
	@touch $@

.venv/.ready: build/.system scripts/setup_venv.sh setup.py $(wildcard requirements/*.txt)
	scripts/setup_venv.sh $(PYTHON)
	@touch $@

setup: .venv/.ready  ## system packages and .venv

gen: setup  ## everything that is generated: build/gen, devproxy/control/_pb
	$(PY) -m codegen --out build/gen
	scripts/gen_proto.sh $(PY)

criu-if-possible: build/.system
	@scripts/install_criu.sh || echo "build: going on without CRIU: jobs run, checkpoints are refused (make criu)"

criu: build/.system  ## CRIU with pycriu, into build/criu
	@scripts/install_criu.sh

# CRIU compiles while pip fetches.
build: build/.system  ## client libraries, server and the torch plugin, into build/lib; CRIU for checkpoints
	@$(MAKE) -s --no-print-directory -j2 -Otarget setup criu-if-possible
	@PYTHON=$(PY) scripts/build.sh
	@$(VENV)/devproxy build-torch
	@$(PY) -m compileall -q devproxy  # each verb starts Pythons, and where none may write this costs them 0.2 s each

check: build  ## format, lint, types, layers, generated files, unit tests
	$(VENV)/ruff format --check -q .
	$(VENV)/ruff check -q .
	$(VENV)/mypy
	@scripts/clang_format.sh --check
	$(PY) -m codegen --check
	$(VENV)/lint-imports
	$(PYTEST) -q tests/unit

test: build  ## all tests
	@scripts/install_nvcc.sh $(PY)
	scripts/test.sh

demo: build  ## an unmodified PyTorch job: trained, killed with -9 in the middle, restored, compared
	$(PY) scripts/demo.py

.venv-cuda/.ready:
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install -q torch===2.13.0 numpy==2.4.6 scipy expecttest pytest
	@touch $@

# The ordinary CUDA wheel (several GB) over the software GPU, in an environment of its own; outside CI.
test-cuda-wheel: build .venv-cuda/.ready  ## the torch tests with the CUDA wheel instead of the CPU wheel
	$(VENV)/devproxy build-torch --python .venv-cuda/bin/python
	$(VENV)/devproxy-run --gpus 2 -- .venv-cuda/bin/python -m pytest -q -m "not soak and not gpu" tests/torch

# The same wheel as it is, over the recording device, which executes no kernel: what it asks of a GPU is accepted.
test-cuda-wheel-record: build .venv-cuda/.ready  ## the unmodified CUDA wheel over --device record
	DEVPROXY_WHEEL_PYTHON=$(CURDIR)/.venv-cuda/bin/python $(PYTEST) -q tests/wheel

bench: build  ## the table of costs, also as JSON in build/bench.json
	$(PY) -m tests.bench

gpu-bundle: build  ## what a machine with a GPU and no network needs, into build/gpu-bundle (docs/gpu-results.md)
	$(PY) scripts/gpu_bundle.py

gpu-check:  ## on that machine: all stages, their results in $OUT (or build/gpu-check)
	$(PYTHON) scripts/gpu_check.py

soak: build  ## long campaigns, resumable; results as JSON in docs/
	$(PY) scripts/soak.py

fmt: setup  ## formats Python and C++
	$(VENV)/ruff format -q .
	$(VENV)/ruff check -q --fix .
	@scripts/clang_format.sh

lint: setup  ## the linters alone
	$(VENV)/ruff format --check -q .
	$(VENV)/ruff check -q .
	$(VENV)/mypy

clean:  ## removes build/, keeps .venv
	rm -rf build dist *.egg-info

.PHONY: help setup gen criu criu-if-possible build check test test-cuda-wheel test-cuda-wheel-record demo bench gpu-bundle gpu-check soak fmt lint clean
