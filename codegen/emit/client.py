# SPDX-License-Identifier: Apache-2.0
"""client.gen.cc: the exports of libcuda.so.1 that are answered. refused.gen.cc: the others. sa_decl.gen.h: what
interceptors/<domain>/client.cc defines.

The refused exports are in a file of their own without <cuda.h>, so that they need none of the vendor's types.
"""

from __future__ import annotations

from codegen.emit.stub import EXPORT, c_string, declaration, null_check, refusals
from codegen.ops import OPS
from codegen.spec import Capture
from codegen.tables import Export, Function, driver_exports, driver_table, facts, may_send

# What a stub asks while some stream captures: a function of interceptors/graph/hooks.h, and the type of the first
# parameter that it looks at ("": none).
REFUSALS = {
    Capture.REFUSED: ("refuse_command", "CUstream"),
    Capture.STREAM: ("refuse_stream", "CUstream"),
    Capture.DEVICE: ("refuse_device", "CUcontext"),
    Capture.UNSAFE: ("refuse_unsafe", "CUevent"),
}


def function_of(export: Export) -> Function:
    """The declaration under which an export is called: its own, else (a per-thread variant) its target's."""
    known = facts("cuda").functions
    return known.get(export.name) or known[export.target]


def domain(export: Export) -> str:
    assert export.api is not None
    return f"devproxy::sa::{export.api.client_sa}"


def sends(export: Export) -> int:
    """The messages that a call may send: a bit for each, by its place in the table."""
    places = {name: place for place, name in enumerate(OPS)}
    return sum(1 << places[op] for op in set(may_send(export)))


def capture_check(export: Export, function: Function) -> list[str]:
    """What a stub does while some stream of the process captures; nothing for a call that may be made at any time."""
    assert export.api is not None
    word = export.api.capture or Capture.FREE
    if word is Capture.FREE:
        return []
    if word in (Capture.NODE, Capture.HOOK):
        args = ", ".join(name for _, name in function.params)
        call = f"{domain(export)}::captured::{export.target}({args})"
        return [f"  if (devproxy::sa::graph::capturing()) return {call};"]
    refusal, kind = REFUSALS[word]
    asked = [name for param, name in function.params if param == kind][:1]
    args = ", ".join([*asked, "&refused"])
    return [
        "  if (devproxy::sa::graph::capturing()) {",
        "    CUresult refused = CUDA_SUCCESS;",
        f"    if (devproxy::sa::graph::{refusal}({args})) return refused;",
        "  }",
    ]


def stub(export: Export, number: int) -> str:
    """One export: the scope checks initialisation, then null pointers, then a capture, then the interceptor."""
    function = function_of(export)
    assert export.api is not None
    lines = [f"{EXPORT} {declaration(function, export.name)} {{"]
    lines.append(f"  CallScope scope(kApis[{number}]);  // {export.name}")
    lines.append("  if (!scope.ok()) return scope.error();")
    lines += null_check(export.api.nonnull, "CUDA_ERROR_INVALID_VALUE")
    if export.per_thread:
        lines.append("  PerThreadDefault per_thread;")
    lines += capture_check(export, function)
    args = ", ".join(name for _, name in function.params)
    lines.append(f"  return {domain(export)}::{export.target}({args});")
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
        domains.setdefault(api.client_sa, []).append(name)
    for folder, names in domains.items():
        out.append(f"namespace devproxy::sa::{folder} {{")
        out += [f"{declaration(known[name], name)};" for name in names]
        captured = [n for n in names if table[n].capture in (Capture.NODE, Capture.HOOK)]
        if captured:  # called in place of the others while some stream captures
            out.append("namespace captured {")
            out += [f"[[gnu::cold]] {declaration(known[name], name)};" for name in captured]
            out.append("}")
        out.append(f"}}  // namespace devproxy::sa::{folder}")
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
        '#include "devproxy/interceptors/graph/hooks.h"',
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
        init = str(export.api.needs_init).lower()
        out.append(f'    {{"{export.name}", {number}, {init}, {sends(export):#x}}},')
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
    """refused.gen.cc."""
    return refusals("devproxy::client", "client.gen.cc", [e.name for e in refused_exports()])
