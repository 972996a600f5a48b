# SPDX-License-Identifier: Apache-2.0
"""python -m codegen.wheels WHEEL...: what the ELF files of a CUDA wheel import of NVIDIA's libraries.

Writes codegen/ir/wheels/torch-<version>.json: names, version nodes and SONAMEs, nothing else. Run by hand when a new
torch is to be supported; WHEEL is a file that `pip download --no-deps torch===2.13.0` brought, or an installed torch
folder. Unpacks one library at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from codegen import elf

OUT = Path(__file__).parent / "ir" / "wheels"
# Libraries whose symbols carry no version, so that only the name's beginning tells whose it is; first match counts.
UNVERSIONED = (
    (r"nccl[A-Z]", r"libnccl\.so"),
    (r"cusparseLt", r"libcusparseLt\.so"),
    (r"nvshmem", r"libnvshmem_host\.so"),
    (r"cuFile", r"libcufile\.so"),
    (r"cupti", r"libcupti\.so"),
    (r"nvrtc", r"libnvrtc\.so"),
    (r"(__)?nvJitLink", r"libnvJitLink\.so"),
    (r"nvml[A-Z]", r"libnvidia-ml\.so"),
    (r"cu[A-Z]", r"libcuda\.so"),
)
VENDOR = re.compile(
    r"lib(cuda|cudart|cublas|cublasLt|cudnn|cufft|cufftw|curand|cusolver|cusolverMg|cusparse|cusparseLt|cufile"
    r"|cufile_rdma|cupti|nccl|nvrtc|nvJitLink|nvshmem_host|nvidia-ml|nvToolsExt|nvtx3interop)\.so\.\d+"
)


def members(source: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of each shared object of a wheel or an installed folder; a wheel's lives until the next one."""
    if source.is_dir():
        for path in sorted([*source.glob("lib/*.so*"), *source.glob("*.so")]):
            yield path.name, path
        return
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as folder:
        for info in sorted(wheel.infolist(), key=lambda i: i.filename):
            if re.fullmatch(r"torch/(lib/)?[^/]*\.so(\.\d+)*", info.filename):
                path = Path(wheel.extract(info, folder))
                yield path.name, path
                path.unlink()


def metadata(source: Path) -> str:
    """The METADATA file's text."""
    if source.is_dir():
        return next(source.parent.glob("torch-*.dist-info/METADATA")).read_text()
    with zipfile.ZipFile(source) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        return wheel.read(name).decode()


def torch_version(source: Path) -> str:
    """`2.13.0+cu130` of torch/version.py."""
    if source.is_dir():
        text = (source / "version.py").read_text()
    else:
        with zipfile.ZipFile(source) as wheel:
            text = wheel.read("torch/version.py").decode()
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if not found:
        raise SystemExit(f"{source}: torch/version.py does not say its version")
    return found[1]


def requirements(text: str) -> list[str]:
    """`nvidia-cudnn-cu13==9.19.0.56`, ... of a METADATA file: the vendor's packages that the wheel asks for."""
    found = re.findall(r"^Requires-Dist: ((?:nvidia|cuda)-[^;\n]*)", text, re.MULTILINE)
    return sorted(re.sub(r"[ ()]", "", row) for row in found)


def vendor_imports(found: elf.Dynamic) -> Iterator[tuple[str, str, str]]:
    """(library, node, name) of each import that a library of the vendor gives."""
    needed = [n for n in found.needed if VENDOR.fullmatch(n)]
    for symbol in found.imports:
        if VENDOR.fullmatch(symbol.library):
            yield symbol.library, symbol.version, symbol.name
            continue
        if symbol.version:
            continue
        for beginning, file in UNVERSIONED:
            if re.match(beginning, symbol.name):
                yield from ((n, "", symbol.name) for n in needed if re.match(file, n))
                break


def collect(source: Path) -> dict[str, object]:
    """The JSON of one wheel. nodes: version node ("" where symbols have none) -> names."""
    libraries: dict[str, dict[str, set[str]]] = {}
    needed_by: dict[str, set[str]] = {}
    for name, path in members(source):
        try:
            found = elf.read(path)
        except ValueError:
            continue
        for library in found.needed:
            if VENDOR.fullmatch(library):
                needed_by.setdefault(library, set()).add(name)
        for library, node, symbol in vendor_imports(found):
            libraries.setdefault(library, {}).setdefault(node, set()).add(symbol)
    return {
        "source": f"torch {torch_version(source)}",
        "requires": requirements(metadata(source)),
        "libraries": {
            library: {
                "needed_by": sorted(users),
                "nodes": {
                    node: sorted(names)
                    for node, names in sorted(libraries.get(library, {}).items())
                },
            }
            for library, users in sorted(needed_by.items())
        },
    }


def text_of(facts: dict[str, object]) -> str:
    """One name per line, so that a new torch is a readable diff."""
    return json.dumps(facts, indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m codegen.wheels", description=__doc__)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for source in args.wheels:
        facts = collect(source)
        version = torch_version(source).split("+")[0]
        path = args.out / f"torch-{version}.json"
        path.write_text(text_of(facts))
        libraries = facts["libraries"]
        assert isinstance(libraries, dict)
        print(f"{path}:")
        for library, found in libraries.items():
            print(f"  {library} " + ", ".join(f"{len(v)} {k}" for k, v in found["nodes"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
