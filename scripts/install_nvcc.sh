#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# nvcc and NVRTC of CUDA 13 for the tests' programs: the machine's own where it has them, else NVIDIA's packages, into
# build/cuda and build/nvrtc. The project itself is built without them.
#   scripts/install_nvcc.sh [PYTHON]     the Python whose pip fetches them
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}

fetch() { # REQUIREMENTS FOLDER
  rm -rf "$2" "$2.new"
  "$python" -m pip install -q --disable-pip-version-check --retries 5 --no-deps --target "$2.new" -r "$1"
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
