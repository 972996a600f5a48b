# SPDX-License-Identifier: Apache-2.0
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

# Each step says what it does, and for how long: nothing is silent for more than ten seconds.
SAID := $(PYTHON) scripts/step.py
PINS := requirements/constraints.txt scripts/setup_venv.sh

.venv/.tools: build/.system $(PINS) setup.py pyproject.toml requirements/build.txt requirements/headers.txt requirements/cudart_headers.txt
	@$(SAID) "Python packages for the build" scripts/setup_venv.sh $(PYTHON) tools
	@touch $@

.venv/.torch: .venv/.tools $(PINS) requirements/runtime.txt requirements/torch.txt
	@$(SAID) "PyTorch and what devproxy imports" scripts/setup_venv.sh $(PYTHON) torch
	@touch $@

# One pip at a time: this one comes after the other two.
.venv/.ready: .venv/.torch $(PINS) requirements/dev.txt
	@$(SAID) "packages of tests and linters" scripts/setup_venv.sh $(PYTHON) dev
	@touch $@

setup: .venv/.ready  ## system packages and .venv

gen: setup  ## everything that is generated: build/gen, devproxy/control/_pb
	$(PY) -m codegen --out build/gen
	scripts/gen_proto.sh $(PY)

criu-if-possible: build/.system
	@$(SAID) "CRIU, for checkpoints" scripts/install_criu.sh || echo "build: going on without CRIU: jobs run, checkpoints are refused (make criu)"

criu: build/.system  ## CRIU with pycriu, into build/criu
	@scripts/install_criu.sh

native: .venv/.tools
	@$(SAID) "client libraries and server, C++" env PYTHON=$(PY) scripts/build.sh

plugin: native .venv/.torch
	@$(SAID) "plugin for PyTorch, C++" $(VENV)/devproxy build-torch

# What a job needs. Each verb starts Pythons, and where none may write this costs them 0.2 s each.
bytecode: native
	@$(PY) -m compileall -q devproxy

# pip fetches while compilers run.
SIDE_BY_SIDE = @$(MAKE) -s --no-print-directory -j3

ready: build/.system
	$(SIDE_BY_SIDE) plugin bytecode criu-if-possible

build: build/.system  ## client libraries, server and the torch plugin, into build/lib; CRIU for checkpoints; all of .venv
	$(SIDE_BY_SIDE) plugin bytecode criu-if-possible .venv/.ready

check: build  ## format, lint, types, layers, generated files, unit and native tests
	$(VENV)/ruff format --check -q .
	$(VENV)/ruff check -q .
	$(VENV)/mypy
	$(VENV)/mypy --config-file scripts/mypy-torch.ini
	@scripts/clang_format.sh --check
	$(PY) -m codegen --check
	PYTHONPATH=devproxy/torch/pylib:scripts $(VENV)/lint-imports
	@$(PY) -m tests.native.build
	$(PYTEST) -q -n 2 --dist worksteal tests/unit tests/native

test: build  ## all tests
	@scripts/install_test_tools.sh $(PY)
	scripts/test.sh

demo: ready  ## an unmodified PyTorch job: trained, killed with -9 in the middle, restored, compared
	$(PY) scripts/demo.py

demo-ranks: ready  ## the same for an unmodified DDP job of four ranks: cut, moved, suspended, killed, restored, compared
	$(PY) scripts/demo_ranks.py

demo-hosts: ready  ## the same on two hosts (network namespaces here): restored with the halves exchanged, and on one host
	$(PY) scripts/demo_hosts.py

# PyTorch's ordinary CUDA wheel (several GB) with Triton, and numba-cuda, in an environment of their own for each version;
# outside CI. TORCH=2.11.0 chooses another.
TORCH ?= 2.13.0
CUDA_VENV := .venv-cuda-$(TORCH)
$(CUDA_VENV)/.ready: requirements/third_party.txt requirements/runtime.txt
	$(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/pip install -q torch===$(TORCH) -r requirements/third_party.txt -r requirements/runtime.txt
	@touch $@

# Over the software GPU, with our plugin.
test-cuda-wheel: build $(CUDA_VENV)/.ready  ## the torch tests with the CUDA wheel (TORCH=2.13.0) instead of the CPU wheel
	$(VENV)/devproxy build-torch --python $(CUDA_VENV)/bin/python
	$(VENV)/devproxy-run --gpus 2 -- $(CUDA_VENV)/bin/python -m pytest -q -m "not soak and not gpu" tests/torch
	DEVPROXY_WHEEL_PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python $(PYTEST) -q tests/wheel/test_extension.py

# As it is, over the recording device, which executes no kernel: what it asks of a GPU is accepted.
test-cuda-wheel-record: build $(CUDA_VENV)/.ready  ## the unmodified CUDA wheel over --device record
	DEVPROXY_WHEEL_PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python $(PYTEST) -q tests/wheel/test_record.py

test-third-party-record: build $(CUDA_VENV)/.ready  ## numba-cuda's own tests and Triton's launcher over --device record
	DEVPROXY_WHEEL_PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python $(PYTEST) -q tests/wheel/test_third_party.py

# transformers, accelerate, peft, lightning, timm, hydra, wandb, ... as they are on PyPI, with the CUDA wheel; outside CI.
# Hours on two cores; K=lightning runs a part.
build/trainers/.ready: requirements/trainers.txt
	$(PYTHON) -m venv build/trainers
	build/trainers/bin/pip install -q -r requirements/trainers.txt
	@touch $@

test-trainers: build build/trainers/.ready  ## training stacks from PyPI, unmodified, through the lives of a job (K=lightning)
	$(VENV)/devproxy build-torch --python build/trainers/bin/python
	DEVPROXY_TRAINERS_PYTHON=$(CURDIR)/build/trainers/bin/python $(PYTEST) -v --timeout 900 -k "$(K)" tests/trainers

# Public training scripts, unmodified; outside CI. FOLDER holds clones of their repositories, PYTHON_OF a Python that has what
# they import. K=nanoGPT runs a part.
PYTHON_OF ?= $(PY)
test-scripts: build  ## public scripts of tests/scripts/public.toml: run, killed, restored (FOLDER=DIR, K=nanoGPT)
	DEVPROXY_SCRIPTS=$(abspath $(FOLDER)) DEVPROXY_SCRIPTS_PYTHON=$(abspath $(PYTHON_OF)) \
	  $(PYTEST) -v --timeout 900 -k "$(K)" tests/scripts

wheel:  ## dist/devproxy-*.whl, from an isolated build: nothing else in the checkout changes
	@scripts/install_system.sh $(PYTHON)
	$(PYTHON) -m pip wheel --no-deps -w dist .

# PYTHONS="python3.12 python3.13" chooses; by default those of 3.10 to 3.13 that are here.
test-wheel:  ## an isolated build, fresh environments, jobs from the installed wheel, doctor --fix, torch, uninstall
	@scripts/install_system.sh $(PYTHON)
	$(PYTHON) scripts/test_wheel.py --torch $(PYTHONS)

bench: build  ## the table of costs, also as JSON in build/bench.json
	$(PY) -m tests.bench

gpu-bundle: build  ## what a machine with a GPU and no network needs, into build/gpu-bundle (docs/gpu-results.md)
	$(PY) scripts/gpu_bundle.py

gpu-check:  ## on that machine: all stages, their results in $OUT (or build/gpu-check)
	$(PYTHON) scripts/gpu_check.py

# All of them without a GPU, for developers: the recording device on both sides of each comparison; some ten minutes.
gpu-rehearsal: gpu-bundle $(CUDA_VENV)/.ready  ## every stage of gpu-check over --device record
	DEVPROXY_WHEEL_PYTHON=$(CURDIR)/$(CUDA_VENV)/bin/python $(PYTEST) -q --timeout 2600 tests/wheel/test_rehearsal.py

soak: build  ## long campaigns, resumable; results as JSON in docs/
	$(PY) scripts/soak.py

fmt: setup  ## formats Python and C++, gives new files their licence line
	$(PY) scripts/spdx.py
	$(VENV)/ruff format -q .
	$(VENV)/ruff check -q --fix .
	@scripts/clang_format.sh

lint: setup  ## the linters alone
	$(VENV)/ruff format --check -q .
	$(VENV)/ruff check -q .
	$(VENV)/mypy
	$(VENV)/mypy --config-file scripts/mypy-torch.ini

clean:  ## removes build/, keeps .venv
	rm -rf build dist *.egg-info

.PHONY: help setup gen criu criu-if-possible native plugin bytecode ready build check test test-cuda-wheel test-cuda-wheel-record test-third-party-record test-trainers test-scripts \
  demo demo-ranks demo-hosts wheel test-wheel bench gpu-bundle gpu-check gpu-rehearsal soak fmt lint clean
