# SPDX-License-Identifier: Apache-2.0
"""python -m codegen --out build/gen [--check]: everything that is generated, from the tables and the header facts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from codegen import check
from codegen.apis.mathlibs import SHIMS
from codegen.emit import (
    client,
    dispatch,
    docs,
    format,
    library,
    mathlibs,
    numbers,
    resolve,
    runtime,
    wire,
)
from codegen.tables import RUNTIMES

ROOT = Path(__file__).parent.parent
COMMAND = "python3 -m codegen --out build/gen"
LOCK = ROOT / "codegen/wire.lock"
SUPPORT = ROOT / "docs/support.md"


def abi_headers() -> str:
    """The code, without comments, of the headers that client, wire and device share: part of the ABI id."""
    texts = (
        path.read_text()
        for folder in ("args", "wire")
        for path in sorted((ROOT / "devproxy/csrc" / folder).glob("*.h"))
    )
    return wire.code_of("".join(texts))


def results() -> dict[str, tuple[int, str]]:
    """Result names of csrc/base/result.h."""
    return check.result_names((ROOT / "devproxy/csrc/base/result.h").read_text())


def outputs() -> dict[str, str]:
    """File name -> text of everything under build/gen. The folder is the layer that may use the file (CMakeLists.txt)."""
    texts = {
        "wire/wire.gen.h": wire.emit(abi_headers()),
        "wire/handle_kind.gen.h": wire.emit_kinds(),
        "wire/dispatch.gen.h": dispatch.emit(),
        "server/handlers.gen.h": dispatch.emit_handlers(),
        "wire/format.gen.cc": format.emit(),
        "args/cuda_number.gen.h": numbers.emit(),
        "client/sa_decl.gen.h": client.emit_declarations(),
        "client/client.gen.cc": client.emit_client(results()),
        "client/refused.gen.cc": client.emit_refused(),
        "client/resolve.gen.cc": resolve.emit(),
        "nvml/nvml_decl.gen.h": library.emit_declarations("nvml"),
        "nvml/nvml_client.gen.cc": library.emit_client("nvml"),
        "nccl/nccl_decl.gen.h": library.emit_declarations("nccl"),
        "nccl/nccl_client.gen.cc": library.emit_client("nccl"),
    }
    for stem in RUNTIMES:
        texts |= runtime.emit_all(stem)
    for soname, shim in SHIMS.items():
        texts[f"mathlibs/{soname}.gen.c"] = mathlibs.emit_source(soname, shim)
    out = {name: f"// Made by: {COMMAND}\n{text}" for name, text in texts.items()}
    maps = {f"{stem}/exports.map": runtime.emit_exports(stem) for stem in RUNTIMES}
    maps |= {f"mathlibs/{soname}.map": mathlibs.emit_map(soname) for soname in SHIMS}
    for name, text in maps.items():  # a version script, which has comments of its own
        out[name] = f"/* Made by: {COMMAND} */\n{text}"
    return out


def write(path: Path, text: str) -> bool:
    """Write only what has changed, so that nothing is compiled again for nothing; True where it was written."""
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m codegen", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/gen", help="folder of the generated files"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="change no committed file; exit 1 where one is not in step with the tables",
    )
    args = parser.parse_args()
    faults = check.table_faults()
    if faults:
        print("\n".join(f"codegen: {fault}" for fault in faults), file=sys.stderr)
        return 1
    committed = {LOCK: wire.lock(), SUPPORT: docs.emit()}
    if args.check:
        for path, text in committed.items():
            if not path.exists() or path.read_text() != text:
                print(
                    f"codegen: {path.relative_to(ROOT)} is not in step with the tables; "
                    f"run '{COMMAND}' and commit the difference",
                    file=sys.stderr,
                )
                faults.append(str(path))
    else:
        for path, text in committed.items():
            write(path, text)
    for name, text in outputs().items():
        write(args.out / name, text)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
