#!/bin/sh
# What `make test` runs after the build. First, side by side: the checks of `make check` and the torch tests under
# devproxy-run, whose output is shown when they have ended; and everything but torch and whole lives of jobs. Then those
# lives. A failure does not keep the others from running; the exit code is the first one's. Arguments go to pytest.
set -u
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # hundreds of Pythons start
# A thread of libgomp that has nothing to do spins, unless it is told otherwise, on a core that another job of the tests
# needs: a sixth of the time of the lives below.
export OMP_WAIT_POLICY=passive
status=0
step() {
  echo "== $*"
  "$@" || { code=$?; echo "== failed ($code): $*"; [ "$status" != 0 ] || status=$code; }
}
pytest=".venv/bin/python -m pytest -q"
select="not soak and not gpu"

aside() {
  step .venv/bin/ruff format --check -q .
  step .venv/bin/ruff check -q .
  step .venv/bin/mypy
  step scripts/clang_format.sh --check
  step .venv/bin/python -m codegen --check
  step .venv/bin/lint-imports
  # The torch tests are a job like any other: run by devproxy-run, on two software GPUs.
  step .venv/bin/devproxy-run --gpus 2 --name test-torch -- $pytest -m "$select" "$@" tests/torch
  step .venv/bin/devproxy-run --gpus 2 --chaos 11 --name test-torch-chaos -- \
    $pytest "$@" tests/torch/test_models.py tests/torch/test_api.py
  exit "$status"
}

(aside "$@") >build/test-aside.log 2>&1 &
aside=$!
step $pytest -n 2 --durations 12 -m "$select" --ignore tests/torch --ignore tests/checkpoint --ignore tests/fault "$@" tests
wait $aside || { code=$?; [ "$status" != 0 ] || status=$code; }
cat build/test-aside.log
# Whole lives of jobs, mostly waiting for each other's steps: several at a time.
step $pytest -n 4 --durations 12 -m "$select" "$@" tests/checkpoint tests/fault
exit "$status"
