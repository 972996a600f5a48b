# SPDX-License-Identifier: Apache-2.0
"""format.gen.cc: one line of text per message, for the flight recorder."""

from __future__ import annotations

from codegen.emit.wire import HANDLES, request_fields
from codegen.ops import OPS

# How a field is printed: by its word, and addresses in hexadecimal by their names.
FORMATS = {
    "i32": ("%lld", "long long"),
    "i64": ("%lld", "long long"),
    "f32": ("%g", "double"),
    "f64": ("%g", "double"),
}
ADDRESSES = {"addr", "dst", "src"}


def field(name: str, word: str) -> tuple[str, str]:
    """printf format and the cast argument of one field."""
    if word in HANDLES:
        return f"{name}=%#llx", f"static_cast<unsigned long long>(m.{name}.value)"
    form, cast = FORMATS.get(word, ("%#llx" if name in ADDRESSES else "%llu", "unsigned long long"))
    return f"{name}={form}", f"static_cast<{cast}>(m.{name})"


def emit() -> str:
    out = [
        "#include <algorithm>",
        "#include <cstdio>",
        "#include <cstring>",
        "",
        '#include "dispatch.gen.h"',
        "",
        "namespace devproxy::wire {",
        "",
        "size_t format_message(uint16_t opcode, const void* req, size_t bytes, char* out, size_t out_bytes) {",
        "  if (out == nullptr || out_bytes == 0) return 0;",
        "  const OpInfo* info = op_info(opcode);",
        "  int n = 0;",
        "  if (info == nullptr) {",
        '    n = std::snprintf(out, out_bytes, "opcode %#x, %zu bytes", static_cast<unsigned>(opcode), bytes);',
        "  } else if (bytes < info->req_bytes || (req == nullptr && info->req_bytes != 0)) {",
        '    n = std::snprintf(out, out_bytes, "%s cut to %zu of %u bytes", info->name, bytes,',
        "                      static_cast<unsigned>(info->req_bytes));",
        "  } else {",
        "    switch (opcode) {",
    ]
    for name, op in OPS.items():
        fields = [field(f, w) for f, w in request_fields(op).items() if f != "pad"]
        out.append(f"      case {op.opcode:#06x}: {{")
        if fields:
            text = " ".join([name, *(form for form, _ in fields)])
            out += [
                f"        {name}_req m;",
                "        std::memcpy(&m, req, sizeof m);",
                f'        n = std::snprintf(out, out_bytes, "{text}",',
                "                          "
                + ",\n                          ".join(arg for _, arg in fields)
                + ");",
            ]
        else:
            out.append(f'        n = std::snprintf(out, out_bytes, "{name}");')
        out += ["        break;", "      }"]
    out += [
        "      default:",
        "        break;",
        "    }",
        "  }",
        "  return n < 0 ? 0 : std::min(static_cast<size_t>(n), out_bytes - 1);",
        "}",
        "",
        "}  // namespace devproxy::wire",
    ]
    return "\n".join(out) + "\n"
