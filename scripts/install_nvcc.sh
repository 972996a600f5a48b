#!/bin/sh
# nvcc of CUDA 13 for the tests' programs: the machine's own where it has one, else NVIDIA's packages, into build/cuda.
# The project itself is built without it.
#   scripts/install_nvcc.sh [PYTHON]     the Python whose pip fetches them
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
for nvcc in "$(command -v nvcc || :)" /usr/local/cuda/bin/nvcc build/cuda/bin/nvcc; do
  [ -n "$nvcc" ] && "$nvcc" --version 2>/dev/null | grep -q 'release 13\.' && exit 0
done
rm -rf build/cuda build/cuda.new
"$python" -m pip install -q --disable-pip-version-check --retries 5 --no-deps --target build/cuda.new -r requirements/nvcc.txt
mv build/cuda.new/nvidia/cu13 build/cuda
rm -rf build/cuda.new
# nvcc and its linker look for names that the packages do not have.
ln -sfn lib build/cuda/lib64
ln -sfn libcudart.so.13 build/cuda/lib/libcudart.so
build/cuda/bin/nvcc --version | tail -n 1
