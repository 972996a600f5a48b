# SPDX-License-Identifier: Apache-2.0
"""Vendor header -> codegen/ir/*.json: names and types only, no vendor text. Run by hand for a new toolkit:

    python -m codegen.headers --include DIR [--nccl DIR] [--cudart DIR]... --out codegen/ir

DIR is the include folder of the PyPI packages nvidia-cuda-runtime and nvidia-nvml-dev; --nccl names the folder of
nccl.h (nvidia-nccl-cu13), each --cudart that of one major's cuda_runtime_api.h. Needs pycparser and gcc; nothing else
of codegen does.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pycparser import c_ast, c_generator, c_parser

from codegen.tables import canonical

# Stand-ins for what the vendor's headers include: the preprocessor must not see libc's or OpenGL's own headers.
# Only the sizes of scalar types matter.
STUBS = {
    "stddef.h": "typedef unsigned long size_t;",
    "stdint.h": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t;"
    "typedef unsigned short uint16_t; typedef int int32_t; typedef unsigned int uint32_t;"
    "typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long uintptr_t;",
    "stdlib.h": "#include <stddef.h>",
    "stdbool.h": "#define bool _Bool",
    "stdio.h": "",
    "limits.h": "#define INT_MIN (-2147483647 - 1)\n#define INT_MAX 2147483647",
    "float.h": "",
    "string.h": "",
    "GL/gl.h": "typedef unsigned int GLuint; typedef unsigned int GLenum;",
    "EGL/egl.h": "typedef int EGLint;",
    "EGL/eglext.h": "typedef void *EGLImageKHR; typedef void *EGLStreamKHR; typedef void *EGLSyncKHR;",
    "vdpau/vdpau.h": "typedef unsigned int VdpDevice; typedef unsigned int VdpVideoSurface;"
    "typedef unsigned int VdpOutputSurface; typedef int VdpStatus; typedef unsigned int VdpFuncId;"
    "typedef VdpStatus VdpGetProcAddress(VdpDevice, VdpFuncId, void **);",
    # The PyPI package carries cudaProfilerTypedefs.h but not the header that it includes.
    "cudaProfiler.h": "#include <cuda.h>\ntypedef enum CUoutput_mode_enum {CU_OUT_X} CUoutput_mode;",
    # What nccl.h takes from the CUDA runtime.
    "cuda_runtime.h": "#include <stddef.h>\n#include <stdint.h>\ntypedef struct CUstream_st *cudaStream_t;"
    "typedef int cudaError_t; typedef struct CUevent_st *cudaEvent_t;",
    "cuda_fp16.h": "typedef struct {unsigned short x;} half;",
    "cuda_bf16.h": "typedef struct {unsigned short x;} nv_bfloat16;",
    "cuda_fp8.h": "",
    # What cuda_runtime_api.h takes from the compiler's own folder: words for nvcc, nothing for names and types.
    "crt/host_defines.h": "\n".join(
        f"#define {word}"
        for word in (
            "CUDARTAPI",
            "CUDARTAPI_CDECL",
            "CUDA_CB",
            "__host__",
            "__device__",
            "__cudart_builtin__",
            "__device_builtin__",
            "__device_builtin_texture_type__",
            "__device_builtin_surface_type__",
            "__align__(n)",
            "__builtin_align__(n)",
            "__CUDA_DEPRECATED",
        )
    ),
}

CUDA_MODES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "per_thread": ("CUDA_API_PER_THREAD_DEFAULT_STREAM",),
    "internal": ("__CUDA_API_VERSION_INTERNAL",),
}
# cudaVDPAU.h expects both to be included before it.
PRELUDE = "#include <cuda.h>\n#include <vdpau/vdpau.h>\n"
CUDA_HEADERS = ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
TYPEDEF_HEADERS = (
    "cudaTypedefs.h",
    "cudaGLTypedefs.h",
    "cudaEGLTypedefs.h",
    "cudaVDPAUTypedefs.h",
    "cudaProfilerTypedefs.h",
)
PFN = re.compile(r"^PFN_(\w+?)_v(\d+)(_ptds|_ptsz)?$")
SUFFIX = re.compile(r"^(\w+?)(?:_v(\d+))?$")
CUDART_MODES = ((), ("CUDA_API_PER_THREAD_DEFAULT_STREAM",))
CUDART_HEADERS = (
    "cuda_runtime_api.h",
    "cuda_gl_interop.h",
    "cuda_vdpau_interop.h",
)
DEVICE_RUNTIME = "cudaCDP"  # functions of device code
# Enums of cuda.h whose numbers are known where no vendor header is: by the server, and by the devices without one.
CUDA_ENUMS = {"CUdevice_attribute", "CUfunction_attribute", "CUstream_flags", "CUevent_flags"}
CUDART_ENUMS = ("cudaError",)  # whose names the library gives out as text


@dataclass
class Header:
    """What one pass over one header declared. Types are C text as the vendor's typedef names spell them."""

    functions: dict[str, tuple[str, list[list[str]]]] = field(
        default_factory=dict
    )  # name -> result, [type, name]
    typedefs: dict[str, str] = field(default_factory=dict)
    structs: dict[str, list[list[str]]] = field(default_factory=dict)
    pointers: dict[str, tuple[str, list[list[str]]]] = field(
        default_factory=dict
    )  # typedef of a function pointer
    enums: dict[str, list[list[str | int]]] = field(default_factory=dict)  # tag -> name, value


def preprocess(text: str, include: Path, defines: tuple[str, ...]) -> str:
    """The preprocessed text; raises CalledProcessError with the compiler's own words."""
    with tempfile.TemporaryDirectory() as stubs:
        for name, body in STUBS.items():
            path = Path(stubs, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#pragma once\n{body}\n")
        # Attributes and C11 words that pycparser does not read say nothing about names and types.
        command = ["gcc", "-E", "-P", "-nostdinc", f"-I{stubs}", f"-I{include}", "-x", "c", "-"]
        command += [
            "-D__attribute__(x)=",
            "-D__extension__=",
            "-D__inline__=inline",
            "-D__LP64__=1",
            "-w",
        ]
        command += [f"-D{name}" for name in defines]
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=True
        ).stdout


def type_text(node: c_ast.Node) -> str:
    """C text of a parameter's type; arrays decay to pointers as they do in a parameter list."""
    generator = c_generator.CGenerator()
    if isinstance(node, c_ast.ArrayDecl):
        return f"{type_text(node.type)} *"
    if isinstance(node, c_ast.PtrDecl) and not isinstance(node.type, c_ast.FuncDecl):
        quals = f" {' '.join(node.quals)}" if node.quals else ""
        return f"{type_text(node.type)} *{quals}".replace("* *", "**")
    if isinstance(node, c_ast.TypeDecl):
        if isinstance(node.type, c_ast.IdentifierType):
            return " ".join([*node.quals, *node.type.names])
        kind = type(node.type).__name__.lower()
        return " ".join([*node.quals, kind, node.type.name or "<unnamed>"])
    return str(generator.visit(node))


def parameters(decl: c_ast.FuncDecl) -> list[list[str]]:
    """[type, name] of each parameter, in order; (void) gives an empty list."""
    if decl.args is None:
        return []
    rows = [[type_text(p.type), p.name or ""] for p in decl.args.params if hasattr(p, "type")]
    return [] if rows == [["void", ""]] else rows


def struct_fields(node: c_ast.Struct) -> list[list[str]] | None:
    """[type, name, array length] of each field, None where a field is not a scalar, a pointer or an array of them."""
    rows = []
    for d in node.decls or []:
        length, kind = "", d.type
        if isinstance(kind, c_ast.ArrayDecl):
            if not isinstance(kind.dim, c_ast.Constant):
                return None
            length, kind = kind.dim.value, kind.type
        if not isinstance(kind, c_ast.TypeDecl) or not isinstance(kind.type, c_ast.IdentifierType):
            return None
        rows.append([type_text(kind), d.name, length])
    return rows


def enumerators(node: c_ast.Enum) -> list[list[str | int]]:
    """[name, value] of an enum whose values are written as numbers, as other names of it, or not at all."""
    values: dict[str, int] = {}
    last = -1
    for e in node.values.enumerators if node.values else []:
        if isinstance(e.value, c_ast.Constant):
            last = int(e.value.value, 0)
        elif isinstance(e.value, c_ast.ID):
            last = values[e.value.name]
        elif e.value is None:
            last += 1
        else:
            return []
        values[e.name] = last
    return [[name, value] for name, value in values.items()]


def read(text: str, include: Path, defines: tuple[str, ...] = ()) -> Header:
    """Parse one header text (usually '#include <x.h>')."""
    out = Header()
    for node in c_parser.CParser().parse(preprocess(text, include, defines)).ext:
        if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
            out.functions[node.name] = (type_text(node.type.type), parameters(node.type))
        elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.Enum):
            if node.type.name in CUDART_ENUMS:
                out.enums[node.type.name] = enumerators(node.type)
        elif isinstance(node, c_ast.Typedef):
            kind = node.type
            if isinstance(kind, c_ast.PtrDecl) and isinstance(kind.type, c_ast.FuncDecl):
                out.pointers[node.name] = (type_text(kind.type.type), parameters(kind.type))
            elif isinstance(kind, c_ast.TypeDecl) and isinstance(kind.type, c_ast.Struct):
                out.typedefs[node.name] = "struct"
                fields = struct_fields(kind.type)
                if fields:
                    out.structs[node.name] = fields
            elif isinstance(kind, c_ast.TypeDecl) and isinstance(kind.type, c_ast.Enum):
                out.typedefs[node.name] = "enum"
                if node.name in CUDA_ENUMS:
                    out.enums[node.name] = enumerators(kind.type)
            elif isinstance(kind, (c_ast.TypeDecl, c_ast.PtrDecl)):
                out.typedefs[node.name] = type_text(kind)
    return out


Shape = tuple[str, tuple[str, ...]]


def shape(result: str, params: list[list[str]], typedefs: dict[str, str]) -> Shape:
    return canonical(result, typedefs), tuple(canonical(kind, typedefs) for kind, _ in params)


def siblings(base: str, form: str, functions: dict[str, tuple[str, list[list[str]]]]) -> list[str]:
    """The exports of one base name in one thread form, newest first: f_v3, f_v2, f."""
    names = [f"{base}_v{k}{form}" for k in range(9, 1, -1)] + [f"{base}{form}"]
    return [name for name in names if name in functions]


def versions(
    pfns: Header, functions: dict[str, tuple[str, list[list[str]]]], typedefs: dict[str, str]
) -> Iterator[tuple[str, int, str, str]]:
    """(base name, driver version, thread form, export) for each PFN_name_vN of the vendor's typedef headers.

    The vendor does not say which export a version means. Both lists grow by appending, so they are aligned from the
    newest; an export whose types differ from the typedef's is passed over.
    """
    by_form: dict[tuple[str, str], dict[int, Shape]] = {}
    for name, (result, params) in pfns.pointers.items():
        match = PFN.match(name)
        if match:
            base, version, form = match[1], int(match[2]), match[3] or ""
            by_form.setdefault((base, form), {})[version] = shape(result, params, typedefs)
    for (base, form), wanted in by_form.items():
        free = siblings(base, form, functions)
        for version in sorted(wanted, reverse=True):
            fits = [f for f in free if shape(*functions[f], typedefs) == wanted[version]]
            if not fits:
                print(f"{base} {version}{form}: no export with these types", file=sys.stderr)
                continue
            free = free[free.index(fits[0]) + 1 :]
            yield base, version, form, fits[0]


def dump(path: Path, source: str, sections: dict[str, dict[str, object]]) -> None:
    """One entry per line, sorted, so that a new toolkit is a readable diff."""
    lines = ["{", f'"source": {json.dumps(source)},']
    for number, (title, rows) in enumerate(sections.items()):
        body = [
            f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}"
            for k, v in sorted(rows.items())
        ]
        lines += [
            f'"{title}": {{',
            ",\n".join(body),
            "}" + ("," if number + 1 < len(sections) else ""),
        ]
    path.write_text("\n".join([*lines, "}"]) + "\n")
    print(f"{path}: " + ", ".join(f"{len(rows)} {title}" for title, rows in sections.items()))


def used_types(
    functions: dict[str, tuple[str, list[list[str]]]], *sets: Mapping[str, object]
) -> set[str]:
    """Typedef names that the functions mention, directly or through another typedef or struct."""
    todo = {
        w
        for result, ps in functions.values()
        for kind in [result, *(p[0] for p in ps)]
        for w in kind.split()
    }
    seen: set[str] = set()
    while todo:
        word = todo.pop()
        if word in seen:
            continue
        seen.add(word)
        for known in sets:
            value = known.get(word)
            if isinstance(value, str):
                todo |= set(value.split())
            elif isinstance(value, list):
                todo |= {w for row in value for w in row[0].split()}
    return seen


def cuda(include: Path, out: Path) -> None:
    """ir/cuda-<version>.json."""
    match = re.search(r"#define CUDA_VERSION (\d+)", Path(include, "cuda.h").read_text())
    if not match:
        raise SystemExit(
            f"{include}/cuda.h does not define CUDA_VERSION: give the folder of a CUDA toolkit"
        )
    toolkit = f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    functions: dict[str, tuple[str, list[list[str]]]] = {}
    headers: dict[str, str] = {}
    typedefs: dict[str, str] = {}
    for header in CUDA_HEADERS:
        for defines in CUDA_MODES.values():
            found = read(f"{PRELUDE}#include <{header}>", include, defines)
            typedefs |= {k: v for k, v in found.typedefs.items() if k not in typedefs}
            for name, sig in found.functions.items():
                headers.setdefault(name, header)
                functions.setdefault(name, sig)
    enums: dict[str, object] = dict(read(f"{PRELUDE}#include <cuda.h>", include, ()).enums)
    rows: dict[str, list[tuple[int, str, str]]] = {}
    for header in TYPEDEF_HEADERS:
        pfns = Header()
        for defines in CUDA_MODES.values():
            found = read(f"{PRELUDE}#include <{header}>", include, defines)
            pfns.pointers |= found.pointers
            typedefs |= {k: v for k, v in found.typedefs.items() if k not in typedefs}
        if (
            header == "cudaProfilerTypedefs.h"
        ):  # its functions are declared nowhere else in the package
            for name, sig in pfns.pointers.items():
                match = PFN.match(name)
                if match and match[1] not in functions:
                    functions[match[1]], headers[match[1]] = sig, "cudaProfiler.h"
        for base, version, form, export in versions(pfns, functions, typedefs):
            if (version, form, export) not in rows.setdefault(base, []):
                rows[base].append((version, form, export))
    types = used_types(functions, typedefs)
    dump(
        out / f"cuda-{toolkit}.json",
        f"toolkit {toolkit}",
        {
            "functions": {
                n: [r, p, headers[n]] for n, (r, p) in functions.items() if n.startswith("cu")
            },
            "enums": enums,
            "typedefs": {k: v for k, v in typedefs.items() if k in types},
            "versions": {k: sorted(v) for k, v in rows.items()},
        },
    )


def library(
    header: str, stem: str, prefix: str, include: Path, out: Path, modes: tuple[str, ...]
) -> None:
    """ir/<stem>-<major>.json of a library whose functions are found by their plain names."""
    text = Path(include, header).read_text()
    match = re.search(r"#define\s+(?:NVML_API_VERSION|NCCL_MAJOR)\s+(\d+)", text)
    if not match:
        raise SystemExit(f"{include}/{header} does not say its version")
    functions: dict[str, tuple[str, list[list[str]]]] = {}
    typedefs: dict[str, str] = {}
    structs: dict[str, list[list[str]]] = {}
    for defines in ((), modes):
        found = read(f"#include <{header}>", include, defines)
        functions |= {k: v for k, v in found.functions.items() if k.startswith(prefix)}
        typedefs |= found.typedefs
        structs |= found.structs
    functions = {k: v for k, v in functions.items() if not k.startswith("p" + prefix)}
    types = used_types(functions, typedefs, structs)
    dump(
        out / f"{stem}-{match[1]}.json",
        f"{header} {match[1]}",
        {
            "functions": {n: [r, p, header] for n, (r, p) in functions.items()},
            "structs": {k: v for k, v in structs.items() if k in types},
            "typedefs": {k: v for k, v in typedefs.items() if k in types},
        },
    )


def cudart(include: Path, out: Path) -> None:
    """ir/cudart-<version>.json of one major's runtime API."""
    match = re.search(
        r"#define CUDART_VERSION\s+(\d+)", Path(include, "cuda_runtime_api.h").read_text()
    )
    if not match:
        raise SystemExit(f"{include}/cuda_runtime_api.h does not define CUDART_VERSION")
    toolkit = f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}"
    functions: dict[str, list[object]] = {}
    enums: dict[str, object] = {}
    for header in CUDART_HEADERS:
        for defines in CUDART_MODES:
            found = read(f"{PRELUDE}#include <{header}>", include, defines)
            enums |= found.enums
            for name, (result, params) in found.functions.items():
                if name.startswith("cuda") and not name.startswith(DEVICE_RUNTIME):
                    functions.setdefault(name, [result, params, header])
    dump(
        out / f"cudart-{toolkit}.json",
        f"toolkit {toolkit}",
        {"functions": dict(functions), "enums": enums, "typedefs": {}},
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m codegen.headers", description=__doc__)
    parser.add_argument(
        "--include", type=Path, required=True, help="folder of cuda.h, cudaTypedefs.h and nvml.h"
    )
    parser.add_argument("--nccl", type=Path, help="folder of nccl.h")
    parser.add_argument(
        "--cudart", type=Path, action="append", default=[], help="folder of cuda_runtime_api.h"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cuda(args.include, args.out)
    if Path(args.include, "nvml.h").exists():
        library(
            "nvml.h", "nvml", "nvml", args.include, args.out, ("NVML_NO_UNVERSIONED_FUNC_DEFS",)
        )
    if args.nccl:
        library("nccl.h", "nccl", "nccl", args.nccl, args.out, ())
    for folder in args.cudart:
        cudart(folder, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
