#!/bin/sh
# What `make test` runs after the build: the checks of `make check`, then all tests in one pytest, whose closing line
# is the last thing printed. A failed check does not keep the tests from running; the exit code is the first failure's.
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
step .venv/bin/python -m pytest -m "not soak and not gpu" "$@" tests
exit "$status"
