# SPDX-License-Identifier: Apache-2.0
"""<soname>.gen.c and <soname>.map: the libraries of codegen/apis/mathlibs, which refuse every call by name.

A refused function gives a 64-bit result: a caller that expects fewer bits looks at fewer, and one that expects a pointer
gets its own word (Shim.returns).
"""

from __future__ import annotations

from codegen.apis.mathlibs import REASON
from codegen.emit.stub import C_EXPORT, c_string, refusal
from codegen.spec import Answer, Shim
from codegen.tables import ShimExport, shim_exports, shim_node


def answer(name: str, kind: Answer, number: int, shim: Shim) -> str:
    head, status = C_EXPORT, shim.refused
    match kind:
        case Answer.NUMBER:
            return f"{head} size_t {name}(void) {{ return {number}; }}"
        case Answer.NUMBER_TO:
            return (
                f"{head} int {name}(int* to) {{ if (to == NULL) return {status};"
                f" *to = {number}; return 0; }}"
            )
        case Answer.PROPERTY:
            return (
                f"{head} int {name}(int which, int* to) {{ return dp_property(&shim, which, to); }}"
            )
        case Answer.TEXT:
            return f"{head} const char* {name}(int status) {{ return dp_text(&shim, status); }}"
        case Answer.TEXT_TO:
            return (
                f"{head} int {name}(int status, const char** to) {{ if (to == NULL) return {status};"
                " *to = dp_text(&shim, status); return 0; }"
            )
        case Answer.TEXT_INTO:
            return (
                f"{head} void {name}(char* to, size_t room) {{"
                ' if (to != NULL && room > 0) snprintf(to, room, "%s", shim.reason); }'
            )


def refused(export: ShimExport, number: int, shim: Shim) -> str:
    value = shim.returns.get(export.name, shim.refused)
    call = f"dp_refuse(shim.soname, {c_string(export.name)}, shim.reason, shim.status, &said[{number}])"
    return refusal(export.name, call, "long", str(value), C_EXPORT)


def emit_source(soname: str, shim: Shim) -> str:
    exports = shim_exports(soname)
    version = ", ".join(map(str, shim.version))
    reason = REASON.format(what=shim.what)
    out = [
        '#include "devproxy/interceptors/mathlibs/refuse.h"',
        "",
        f"static const struct dp_shim shim = {{{c_string(soname)}, {c_string(reason)},",
        f"    {c_string(shim.status)}, {shim.refused}, {{{version}}}}};",
        f"static unsigned char said[{len(exports)}];",
        "",
    ]
    for number, export in enumerate(exports):
        if export.answer:
            out.append(answer(export.name, *export.answer, shim))
        else:
            out.append(refused(export, number, shim))
    return "\n".join(out) + "\n"


def emit_map(soname: str) -> str:
    """The linker's version script. A loader that finds the SONAME without the node that a program names stops it."""
    node = shim_node(soname)
    return f"{node + ' ' if node else ''}{{ global: *; }};\n"
