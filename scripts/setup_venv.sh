#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes .venv with the pinned packages and an editable install of this checkout, a part of it:
#   scripts/setup_venv.sh PYTHON tools     what a build needs, and this checkout: the first
#   scripts/setup_venv.sh PYTHON torch     what devproxy imports, and PyTorch
#   scripts/setup_venv.sh PYTHON dev       tests and linters
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "setup_venv.sh: $python is older than 3.11; give another one: make PYTHON=python3.11" >&2
  exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
# runtime.txt's pins from the start, so that no later part replaces under a running build what an earlier one brought along.
pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --progress-bar off --retries 5
  -c requirements/constraints.txt -c requirements/runtime.txt"
case $2 in
  tools)
    $pip -r requirements/build.txt
    $pip --no-deps -r requirements/headers.txt
    scripts/cuda_headers.sh .venv/bin/python
    # compat: a plain .pth file, where the default mode costs every start of this Python an import hook.
    $pip --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
    ;;
  torch) $pip -r requirements/runtime.txt -r requirements/torch.txt ;;
  dev) $pip -r requirements/dev.txt ;;
esac
