"""client.gen.cc: the exports of libcuda.so.1 that are answered. refused.gen.cc: the others. sa_decl.gen.h: what
interceptors/<domain>/client.cc defines.

The refused exports are in a file of their own without <cuda.h>, so that they need none of the vendor's types.
"""

from __future__ import annotations

from codegen.tables import Export, Function, driver_exports, driver_table, facts

EXPORT = 'extern "C" __attribute__((visibility("default")))'


def c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def spaced(kind: str) -> str:
    """`void**` of the header facts' `void **`."""
    return kind.replace(" *", "*")


def declaration(function: Function, name: str) -> str:
    """`CUresult cuMemFree_v2(CUdeviceptr dptr)`."""
    params = ", ".join(f"{spaced(kind)} {param}" for kind, param in function.params)
    return f"{spaced(function.result)} {name}({params})"


def function_of(export: Export) -> Function:
    """The declaration under which an export is called: its own, else (a per-thread variant) its target's."""
    known = facts("cuda").functions
    return known.get(export.name) or known[export.target]


def stub(export: Export, number: int) -> str:
    """One export: the scope checks initialisation, then null pointers, then the interceptor."""
    function = function_of(export)
    assert export.api is not None
    lines = [f"{EXPORT} {declaration(function, export.name)} {{"]
    lines.append(f"  CallScope scope(kApis[{number}]);  // {export.name}")
    lines.append("  if (!scope.ok()) return scope.error();")
    if export.api.nonnull:
        nulls = " || ".join(f"{name} == nullptr" for name in export.api.nonnull)
        lines.append(f"  if ({nulls}) return CUDA_ERROR_INVALID_VALUE;")
    if export.per_thread:
        lines.append("  PerThreadDefault per_thread;")
    args = ", ".join(name for _, name in function.params)
    lines.append(f"  return devproxy::sa::{export.api.client_sa}::{export.target}({args});")
    return "\n".join([*lines, "}"]) + "\n"


def answered_exports() -> list[Export]:
    return [e for e in driver_exports() if e.api is not None]


def refused_exports() -> list[Export]:
    return [e for e in driver_exports() if e.api is None]


def emit_declarations() -> str:
    """sa_decl.gen.h."""
    table, known = driver_table(), facts("cuda").functions
    out = ["#pragma once", "#include <cuda.h>"]
    # cuda.h renames plain names to their newest version by macros, which would rename our functions too.
    out += [f"#undef {name}" for name in sorted({e.name for e in answered_exports()})]
    domains: dict[str, list[str]] = {}
    for name, api in table.items():
        if api.checked:
            domains.setdefault(api.client_sa, []).append(name)
    for domain, names in domains.items():
        out.append(f"namespace devproxy::sa::{domain} {{")
        out += [f"{declaration(known[name], name)};" for name in names]
        out.append(f"}}  // namespace devproxy::sa::{domain}")
    return "\n".join(out) + "\n"


def emit_client(results: dict[str, tuple[int, str]]) -> str:
    """client.gen.cc. results: our result name -> (its number, the vendor's name)."""
    answered, refused = answered_exports(), refused_exports()
    out = [
        "// Old and per-thread entry points are declared only so; each definition below is held against its prototype.",
        "#define __CUDA_API_VERSION_INTERNAL",
        "#include <cuda.h>",
        "",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        '#include "devproxy/csrc/base/result.h"',
        '#include "devproxy/csrc/client/stub.h"',
        '#include "sa_decl.gen.h"',
    ]
    out += [f"#undef {e.name}" for e in answered]
    out += [
        "",
        "using devproxy::client::ApiInfo;",
        "using devproxy::client::CallScope;",
        "using devproxy::client::PerThreadDefault;",
        "",
    ]
    out += [
        f"static_assert(static_cast<int>(devproxy::{ours}) == {theirs});"
        for ours, (_, theirs) in results.items()
    ]
    out += ["", "namespace {", "", "constexpr ApiInfo kApis[] = {"]
    for number, export in enumerate(answered):
        assert export.api is not None
        out.append(f'    {{"{export.name}", {number}, {str(export.api.needs_init).lower()}}},')
    out += ["};", "", "struct RefusedApi {", "  ApiInfo info;", "  const char* reason;", "};", ""]
    out.append("constexpr RefusedApi kRefused[] = {")
    for number, export in enumerate(refused):
        info = f'{{"{export.name}", {len(answered) + number}, false}}'
        out.append(f"    {{{info}, {c_string(export.reason)}}},")
    out += ["};", "", "}  // namespace", ""]
    out += [
        "namespace devproxy::client {",
        "",
        "// Called by refused.gen.cc.",
        "int refuse_export(unsigned number) {",
        "  return static_cast<int>(refuse(kRefused[number].info, kRefused[number].reason));",
        "}",
        "",
        "}  // namespace devproxy::client",
        "",
    ]
    return "\n".join(out) + "\n" + "\n".join(stub(e, n) for n, e in enumerate(answered))


def emit_refused() -> str:
    """refused.gen.cc: a refused export takes no arguments; the C ABI lets it ignore those that the caller passes."""
    out = [
        "namespace devproxy::client {",
        "int refuse_export(unsigned number);  // client.gen.cc",
        "}",
        "",
    ]
    out += [
        f"{EXPORT} int {e.name}() {{ return devproxy::client::refuse_export({n}); }}"
        for n, e in enumerate(refused_exports())
    ]
    return "\n".join(out) + "\n"
