# SPDX-License-Identifier: Apache-2.0
"""One major of a library above the driver: its stubs, what its interceptors define, its version script.

All majors of a library share the sources of interceptors/<folder>/, which are compiled once per major, against the
header of that major and against the declarations made here.
"""

from __future__ import annotations

from codegen.emit.stub import EXPORT, c_string, declaration, null_check, refusals
from codegen.tables import (
    RUNTIMES,
    Export,
    Function,
    runtime_exports,
    runtime_facts,
    runtime_table,
)

ENTER = {"": "", "driver": "enter_driver()", "context": "enter_context()"}


def folder(stem: str) -> str:
    """The interceptors' folder, and the namespace: the stem without its major."""
    return stem.rsplit("-", 1)[0]


def namespace(domain: str) -> str:
    """devproxy::sa::a::b of the domain a.b."""
    return f"devproxy::sa::{domain.replace('.', '::')}"


def signature(stem: str, export: Export) -> Function:
    """The declaration under which an export is called: its own, else (a per-thread variant) its target's."""
    known = runtime_facts(stem).functions
    return known.get(export.name) or known[export.target]


def emit_declarations(stem: str) -> str:
    """<folder>_decl.gen.h."""
    runtime, known = RUNTIMES[stem], runtime_facts(stem).functions
    answered = [e for e in runtime_exports(stem) if e.api is not None]
    out = ["#pragma once", f"#include <{runtime.header}>"]
    # The header renames plain names to newer versions by macros, which would rename our functions too.
    out += [f"#undef {e.name}" for e in answered]
    domains: dict[str, list[str]] = {}
    for name, api in runtime_table(stem).items():
        domains.setdefault(api.client_sa, []).append(f"{declaration(known[name], name)};")
    for domain, lines in domains.items():
        out += [
            f"namespace {namespace(domain)} {{",
            *lines,
            f"}}  // namespace {namespace(domain)}",
        ]
    return "\n".join(out) + "\n"


def stub(stem: str, export: Export) -> str:
    """One export: enters, checks pointers, calls the interceptor, and records a failure where the library does."""
    runtime, function = RUNTIMES[stem], signature(stem, export)
    assert export.api is not None
    api = export.api
    args = ", ".join(name for _, name in function.params)
    call = f"{namespace(api.client_sa)}::{export.target}({args})"
    lines = [f"{EXPORT} {declaration(function, export.name)} {{", f'  trace("{export.name}");']
    fails = function.result == runtime.result
    keep = "record" if fails and api.records else "pass"
    if fails and ENTER[api.enters]:
        lines.append(
            f"  if (const auto rc = {ENTER[api.enters]}; __builtin_expect(rc != 0, 0)) return {keep}(rc);"
        )
    if fails:
        lines += null_check(
            api.nonnull, f"{keep}(static_cast<{runtime.result}>({runtime.invalid}))"
        )
    if export.per_thread:
        lines.append("  PerThreadDefault per_thread;")
    lines.append(f"  return {keep}({call});" if fails else f"  return {call};")
    return "\n".join([*lines, "}"]) + "\n"


def emit_client(stem: str) -> str:
    """client.gen.cc: the answered exports, the names of results, the reasons of refusals."""
    runtime, exports, name = RUNTIMES[stem], runtime_exports(stem), folder(stem)
    refused = [e for e in exports if e.api is None]
    out = [
        f'#include "{name}_decl.gen.h"',
        f'#include "devproxy/interceptors/{name}/stub.h"',
        "",
        f"namespace {namespace(name)} {{",
        "",
        f"const char kSoname[] = {c_string(runtime.soname)};",
        "const ResultName kResultNames[] = {",
        *(
            f"    {{{value}, {c_string(word)}}},"
            for word, value in runtime_facts(stem).enums[runtime.names]
        ),
        "};",
        f"const size_t kResultNameCount = {len(runtime_facts(stem).enums[runtime.names])};",
        "",
        "const RefusedExport kRefused[] = {",
        *(f"    {{{c_string(e.name)}, {c_string(e.reason)}}}," for e in refused),
        "};",
        f"const size_t kRefusedCount = {len(refused)};",
        "",
        f"}}  // namespace {namespace(name)}",
        "",
        f"using namespace {namespace(name)};  // NOLINT: generated",
        "",
    ]
    return "\n".join(out) + "\n" + "\n".join(stub(stem, e) for e in exports if e.api is not None)


def emit_refused(stem: str) -> str:
    """refused.gen.cc."""
    names = [e.name for e in runtime_exports(stem) if e.api is None]
    return refusals(namespace(folder(stem)), "common.cc", names)


def emit_exports(stem: str) -> str:
    """The version script: every export, and nothing else, under the vendor's version node."""
    names = "".join(f"    {e.name};\n" for e in runtime_exports(stem))
    return f"{RUNTIMES[stem].soname} {{\n  global:\n{names}  local:\n    *;\n}};\n"


def emit_all(stem: str) -> dict[str, str]:
    """File name under build/gen -> text."""
    name = folder(stem)
    return {
        f"{stem}/{name}_decl.gen.h": emit_declarations(stem),
        f"{stem}/client.gen.cc": emit_client(stem),
        f"{stem}/refused.gen.cc": emit_refused(stem),
    }
