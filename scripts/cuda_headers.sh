#!/bin/sh
# Puts the CUDA runtime's headers of both majors under build/headers: cuda-13 and cuda-12, each to be used with crt. Does
# nothing when they are there. Headers only: what else the packages carry is not kept.
#   scripts/cuda_headers.sh [PYTHON]
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
wanted=requirements/cudart_headers.txt
[ "$(cat build/headers/.made-from 2>/dev/null)" = "$(cat $wanted)" ] && exit 0
fresh=build/headers.$$
trap 'rm -rf "$fresh"' EXIT
mkdir -p "$fresh/wheels" build/headers
env PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip download -q --retries 5 --no-deps --only-binary :all: \
  -d "$fresh/wheels" -r "$wanted"
"$python" - "$fresh" <<'EOF'
import pathlib, sys, zipfile
fresh = pathlib.Path(sys.argv[1])
# (package, folder in its wheel, folder here)
KEPT = (
    ("nvidia_cuda_runtime-", "nvidia/cu13/include/", "cuda-13/"),
    ("nvidia_cuda_runtime_cu12-", "nvidia/cuda_runtime/include/", "cuda-12/"),
    ("nvidia_cuda_crt-", "nvidia/cu13/include/crt/", "crt/crt/"),
)
for package, inside, here in KEPT:
    (wheel,) = (fresh / "wheels").glob(f"{package}*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(inside) and not name.endswith("/"):
                target = fresh / here / name[len(inside) :]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
EOF
for folder in cuda-12 cuda-13 crt; do
  rm -rf "build/headers/$folder"
  mv "$fresh/$folder" build/headers/
done
cp "$wanted" build/headers/.made-from
