#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What `make test` runs after the build. First it compiles the programs of the tests (tests/prebuild.py). Then it runs side
# by side: the checks of `make check` and the torch tests under devproxy-run, whose output is shown when they have ended;
# and everything but torch and whole lives of jobs. Then those lives. A failure does not keep the others from running; the
# exit code is the first one's. Arguments go to pytest.
#
# TEST_AGAIN=N, as CI sets it: where at most N tests of a suite fail, they are run once more when all else has
# ended. One that passes then is named as unstable, with what it said before in the output above, and the run goes on: a
# machine of two noisy cores must not hide what the other thousand tests have to say. It is a bug all the same.
set -u
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE # hundreds of Pythons start
# A thread of libgomp that has nothing to do spins, unless it is told otherwise, on a core that another job of the tests
# needs: a sixth of the time of the lives below.
export OMP_WAIT_POLICY=passive
# What this run leaves out (tests/sweeps.py).
export DEVPROXY_TEST_SWEEPS="${DEVPROXY_TEST_SWEEPS:-$(git rev-parse HEAD 2>/dev/null || echo no-commit)}"
status=0
failures=build/test-failures # lines of: suite, exit code
rm -rf $failures build/pytest
mkdir -p build/pytest
# The torch tests are jobs; whoever runs devproxy's verbs meanwhile does not meet them.
own=$(mktemp -d /dev/shm/devproxy-test-XXXXXX)
trap 'rm -rf "$own"' EXIT
fail() { [ "$status" != 0 ] || status=$1; }

step() {
  echo "== $*"
  "$@" || { code=$?; echo "== failed ($code): $*"; fail $code; }
}

apart() { env DEVPROXY_SHM_DIR="$own" DEVPROXY_STATE_DIR="$own/state" DEVPROXY_DAEMON_IDLE_S=1 "$@"; }

# A suite by its name; then arguments of pytest's. The torch tests are a job like any other: run by devproxy-run, on two
# software GPUs. Lives run several at a time, so that one computes while another waits.
run() {
  suite=$1
  shift
  set -- -q -o cache_dir=build/pytest/"$suite" -m "not soak and not gpu" "$@"
  case $suite in
    rest) .venv/bin/python -m pytest -n 2 --durations 12 --ignore tests/torch --ignore tests/checkpoint --ignore tests/fault \
      --ignore tests/scripts "$@" tests ;;
    torch) apart .venv/bin/devproxy-run --gpus 2 --name test-torch -- .venv/bin/python -m pytest "$@" tests/torch ;;
    # Both GPUs are one, and nothing may write what the executor has not said.
    torch-chaos) apart env DEVPROXY_SPLICING=guard .venv/bin/devproxy-run --gpu 0,0 --chaos 11 --name test-torch-chaos -- \
      .venv/bin/python -m pytest "$@" tests/torch/test_models.py tests/torch/test_api.py ;;
    lives) .venv/bin/python -m pytest -n 4 --durations 12 "$@" tests/checkpoint tests/fault tests/scripts ;;
  esac
}

suite() {
  echo "== the tests of: $1"
  run "$@" || { code=$?; echo "== failed ($code): $1"; echo "$1 $code" >>$failures; }
}

aside() {
  step .venv/bin/ruff format --check -q .
  step .venv/bin/ruff check -q .
  step .venv/bin/mypy
  step .venv/bin/mypy --config-file scripts/mypy-torch.ini
  step scripts/clang_format.sh --check
  step .venv/bin/python -m codegen --check
  step env PYTHONPATH=devproxy/torch/pylib:scripts .venv/bin/lint-imports
  step .venv/bin/python -m tests.native.build
  suite torch "$@"
  suite torch-chaos "$@"
  exit "$status"
}

step .venv/bin/python -m tests.prebuild
(aside "$@") >build/test-aside.log 2>&1 &
aside=$!
suite rest "$@"
wait $aside || fail $?
cat build/test-aside.log
suite lives "$@"

failed_of() { .venv/bin/python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "build/pytest/$1/v/cache/lastfailed"; }
[ ! -e $failures ] || while read -r name code; do
  # 1 is pytest's "tests failed"; anything else is no matter of a test.
  if [ "$code" = 1 ] && failed=$(failed_of "$name") && [ "$(echo "$failed" | wc -l)" -le "${TEST_AGAIN:-0}" ]; then
    echo "== once more, alone: $name"
    # pytest gives no others to tests/sweeps.py, which would take its share of these few.
    if (export DEVPROXY_TEST_SWEEPS=all && run "$name" --last-failed --last-failed-no-failures none -n 0 "$@" </dev/null); then
      echo "$failed" | sed 's/^/== UNSTABLE (it failed above, and passed alone): /'
      echo "$failed" | while read -r one; do
        grep -qF -- "$one" tests/unstable.txt || echo "== and is not in tests/unstable.txt: put it there with its cause, or mend it: $one"
      done
      continue
    fi
  fi
  fail "$code"
done <$failures
exit "$status"
