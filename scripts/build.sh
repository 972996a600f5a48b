#!/bin/sh
# Builds the C++ side by CMake into build/lib. Does nothing when nothing changed.
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
include=$("$python" - <<'EOF'
import glob, sysconfig
found = glob.glob(sysconfig.get_path("purelib") + "/nvidia/cu13/include/cuda.h")
print(found[0][: -len("/cuda.h")] if found else "")
EOF
)
[ -n "$include" ] || {
  echo "build.sh: $python has no CUDA headers; run: $python -m pip install --no-deps -r requirements/headers.txt" >&2
  exit 2
}
scripts/cuda_headers.sh "$python"
unity=${UNITY:-ON} # several files are compiled as one
configuration="$python $include $unity"
if [ ! -e build/cmake/build.ninja ] || [ "$(cat build/cmake/.configuration 2>/dev/null)" != "$configuration" ]; then
  cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DDEVPROXY_PYTHON="$python" -DDEVPROXY_CUDA_INCLUDE="$include" -DCMAKE_UNITY_BUILD="$unity"
  echo "$configuration" > build/cmake/.configuration
fi
scripts/gen_proto.sh "$python"
cmake --build build/cmake -j "${JOBS:-$(nproc)}"
