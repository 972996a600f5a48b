#!/bin/sh
# What `make test` runs after the build: the checks of `make check`, then the torch tests under devproxy-run, then all
# others, whose closing line is the last thing printed. A failed check does not keep the tests from running; the exit
# code is the first failure's.
set -u
cd "$(dirname "$0")/.."
status=0
step() {
  echo "== $*"
  "$@" || { code=$?; echo "== failed ($code): $*"; [ "$status" != 0 ] || status=$code; }
}
step .venv/bin/ruff format --check -q .
step .venv/bin/ruff check -q .
step .venv/bin/mypy
step scripts/clang_format.sh --check
step .venv/bin/python -m codegen --check
step .venv/bin/lint-imports
# The torch tests are a job like any other: run by devproxy-run, on two software GPUs.
step .venv/bin/devproxy-run --gpus 2 --name test-torch -- \
  .venv/bin/python -m pytest -q -m "not soak and not gpu" "$@" tests/torch
step .venv/bin/devproxy-run --gpus 2 --chaos 11 --name test-torch-chaos -- \
  .venv/bin/python -m pytest -q "$@" tests/torch/test_models.py tests/torch/test_api.py
# Whole lives of jobs, mostly waiting for each other's steps: several at a time.
step .venv/bin/python -m pytest -q -n 3 --durations 12 -m "not soak and not gpu" "$@" tests/checkpoint tests/fault
step .venv/bin/python -m pytest -q -m "not soak and not gpu" --ignore tests/torch --ignore tests/checkpoint \
  --ignore tests/fault "$@" tests
exit "$status"
