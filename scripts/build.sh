#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the C++ side by CMake into build/lib. Does nothing when nothing changed.
#   DEVPROXY_BUILD=FOLDER ...       into FOLDER instead of build, and nothing into the checkout; setup.py makes a wheel so
#   PYTHON=... scripts/build.sh     the Python whose packages hold the generator's needs and the CUDA headers
#   UNITY=OFF scripts/build.sh      each file by itself: twice the work in whole, less of it after each small change
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
case $python in
  /*) ;;
  */*) python=$PWD/$python ;;
  *) python=$(command -v "$python") ;;
esac
build=${DEVPROXY_BUILD:-$PWD/build}
mkdir -p "$build"
build=$(cd "$build" && pwd)
[ "$build" = "$PWD/build" ] || export PYTHONDONTWRITEBYTECODE=1
# Wherever that Python imports from: an isolated build has its packages in a folder that only sys.path names.
include=$("$python" - <<'EOF'
import os, sys
folders = (os.path.join(path, "nvidia", "cu13", "include") for path in sys.path)
print(next((f for f in folders if os.path.isfile(os.path.join(f, "cuda.h"))), ""))
EOF
)
[ -n "$include" ] || {
  echo "build.sh: $python has no CUDA headers; run: $python -m pip install --no-deps -r requirements/headers.txt" >&2
  exit 2
}
scripts/cuda_headers.sh "$python" "$build/headers"
unity=${UNITY:-ON} # several files are compiled as one
configuration="$python $include $unity"
if [ ! -e "$build/cmake/build.ninja" ] || [ "$(cat "$build/cmake/.configuration" 2>/dev/null)" != "$configuration" ]; then
  cmake -S . -B "$build/cmake" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DDEVPROXY_PYTHON="$python" -DDEVPROXY_CUDA_INCLUDE="$include" -DCMAKE_UNITY_BUILD="$unity" \
    -DGEN="$build/gen" -DDEVPROXY_LIB_DIR="$build/lib" -DDEVPROXY_CUDART_HEADERS="$build/headers"
  echo "$configuration" > "$build/cmake/.configuration"
fi
if [ "$build" = "$PWD/build" ]; then
  scripts/gen_proto.sh "$python"
else
  scripts/gen_proto.sh "$python" "$build/_pb"
fi
cmake --build "$build/cmake" -j "${JOBS:-$(nproc)}"
