#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts the CUDA runtime's headers of both majors under build/headers: cuda-13 and cuda-12, each to be used with crt. Does
# nothing when they are there. Headers only: what else the packages carry is not kept. They come from the packages that
# PYTHON has (pyproject.toml gives them to an isolated build, which has no pip), else pip fetches them.
#   scripts/cuda_headers.sh [PYTHON [FOLDER]]
set -eu
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
headers=${2:-build/headers}
wanted=requirements/cudart_headers.txt
[ "$(cat "$headers/.made-from" 2>/dev/null)" = "$(cat $wanted)" ] && exit 0
fresh=$headers.$$
trap 'rm -rf "$fresh"' EXIT
mkdir -p "$fresh" "$headers"
"$python" - "$fresh" "$wanted" <<'EOF2'
import importlib.metadata, pathlib, subprocess, sys, zipfile
fresh, wanted = map(pathlib.Path, sys.argv[1:])
# package: (folder in it, folder here)
KEPT = {
    "nvidia-cuda-runtime": ("nvidia/cu13/include/", "cuda-13/"),
    "nvidia-cuda-runtime-cu12": ("nvidia/cuda_runtime/include/", "cuda-12/"),
    "nvidia-cuda-crt": ("nvidia/cu13/include/crt/", "crt/crt/"),
}
lines = [line.split("#")[0].strip() for line in wanted.read_text().splitlines()]
versions = dict(line.split("==") for line in lines if line)
assert set(versions) == set(KEPT), (versions, KEPT)


def installed(package):
    """Names and texts of its headers here; nothing where it is not there in that version."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return {}
    if found.version != versions[package]:
        return {}
    names = [str(file) for file in found.files or () if str(file).startswith(KEPT[package][0])]
    return {name: pathlib.Path(found.locate_file(name)).read_bytes() for name in names}


def fetched(package):
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--retries", "5", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", str(fresh / "wheels"), f"{package}=={versions[package]}"]
    if subprocess.run(command).returncode:
        sys.exit(f"cuda_headers.sh: {package} could not be fetched; run: pip install --no-deps -r {wanted}")
    (wheel,) = (fresh / "wheels").glob(package.replace("-", "_") + "-[0-9]*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(KEPT[package][0]) and not name.endswith("/")]
        return {name: archive.read(name) for name in names}


for package, (inside, here) in KEPT.items():
    for name, text in (installed(package) or fetched(package)).items():
        target = fresh / here / name[len(inside) :]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
EOF2
for folder in cuda-12 cuda-13 crt; do
  rm -rf "${headers:?}/$folder"
  mv "$fresh/$folder" "$headers/"
done
cp "$wanted" "$headers/.made-from"
