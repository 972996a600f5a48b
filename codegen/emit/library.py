# SPDX-License-Identifier: Apache-2.0
"""<stem>_client.gen.cc and <stem>_decl.gen.h: a library other than the driver, compiled without its vendor's header."""

from __future__ import annotations

from codegen.emit.stub import EXPORT, c_string, declaration, null_check, refusal, spaced
from codegen.ops import OPS
from codegen.tables import LIBRARIES, Export, entries, facts, library_exports, library_of


def type_lines(stem: str, words: set[str]) -> list[str]:
    """Declarations of the named types and of what they are made of, in an order that compiles."""
    known, out, done = facts(stem), list[str](), set[str]()

    def add(word: str) -> None:
        if word in done or word not in known.typedefs:
            return
        done.add(word)
        target = known.typedefs[word]
        if target == "enum":
            out.append(f"typedef int {word};  // an enum in the vendor's header")
        elif target == "struct":
            fields = known.structs.get(word)
            if fields is None:
                out.append(f"struct {word};")
                return
            for kind, _, _ in fields:
                for part in kind.split():
                    add(part)
            body = " ".join(
                f"{kind} {name}{f'[{length}]' if length else ''};" for kind, name, length in fields
            )
            out.append(f"struct {word} {{ {body} }};")
        else:
            for part in target.split():
                add(part)
            out.append(f"typedef {target.replace(' *', '*')} {word};")

    for word in sorted(words):
        add(word)
    return out


def emit_declarations(stem: str) -> str:
    """<stem>_decl.gen.h: the types that answered functions use, and what interceptors/<stem>/client.cc defines."""
    known, table, library = facts(stem), entries(LIBRARIES[stem]), library_of(LIBRARIES[stem])
    functions = [known.functions[name] for name in table]
    words = {
        w for f in functions for kind in (f.result, *(k for k, _ in f.params)) for w in kind.split()
    }
    out = ["#pragma once", "#include <cstddef>", "#include <cstdint>", "", 'extern "C" {']
    out += [*type_lines(stem, words), "}", ""]
    domains: dict[str, list[str]] = {}
    for f in functions:
        domains.setdefault(table[f.name].client_sa, []).append(f"{declaration(f, f.name)};")
    if library.null_hook:
        domain, hook = library.null_hook.split(".")
        domains[domain].append(f"int {hook}(const char* function, const char* parameter);")
    for domain, lines in domains.items():
        out += [
            f"namespace devproxy::sa::{domain} {{",
            *lines,
            f"}}  // namespace devproxy::sa::{domain}",
        ]
    return "\n".join(out) + "\n"


def sends_anything(stem: str) -> bool:
    """Then it posts by the driver's library, which does not see whose messages they are."""
    return any(export.api and export.api.ops for export in library_exports(stem))


def stub(stem: str, export: Export, number: int) -> str:
    library, function = library_of(LIBRARIES[stem]), facts(stem).functions.get(export.name)
    if export.api is None or function is None:
        result = spaced(function.result) if function else "int"
        call = f"devproxy_refuse({number}, {c_string(export.name)})"
        if result.endswith("*"):  # a text: whoever prints it gets the reason
            return refusal(export.name, call, "const char*", "kReason")
        return refusal(export.name, call, result if result == "void" else "int")
    lines = [f"{EXPORT} {declaration(function, export.name)} {{"]
    if sends_anything(stem):
        places = {name: place for place, name in enumerate(OPS)}
        bits = sum(1 << places[op] for op in {*export.api.ops, *export.api.first})
        lines.append(f'  const devproxy::Watched watched("{export.name}", {bits:#x});')
    if library.null_hook:
        hook = library.null_hook.replace(".", "::")
        for name in export.api.nonnull:
            lines += null_check([name], f'devproxy::sa::{hook}("{export.name}", "{name}")')
    else:
        lines += null_check(export.api.nonnull, str(library.invalid))
    args = ", ".join(name for _, name in function.params)
    lines.append(f"  return devproxy::sa::{export.api.client_sa}::{export.target}({args});")
    return "\n".join([*lines, "}"])


def emit_client(stem: str) -> str:
    library, exports = library_of(LIBRARIES[stem]), library_exports(stem)
    out = [
        '#include "devproxy/csrc/base/refusal.h"',
        *(['#include "devproxy/csrc/core/watched.h"'] if sends_anything(stem) else []),
        f'#include "{stem}_decl.gen.h"',
        "",
        "namespace {",
        "",
        f"constexpr char kReason[] = {c_string(library.reason)};",
        f"unsigned char g_said[{len(exports)}];",
        "",
        "int devproxy_refuse(unsigned number, const char* name) {",
        f"  dp_refuse({c_string(library.soname)}, name, kReason, {c_string(library.status)}, &g_said[number]);",
        f"  return {library.refused};",
        "}",
        "",
        "}  // namespace",
        "",
    ]
    return "\n".join(out) + "\n" + "\n".join(stub(stem, e, n) for n, e in enumerate(exports)) + "\n"
