# SPDX-License-Identifier: Apache-2.0
"""resolve.gen.cc: the table behind cuGetProcAddress, by name, thread form and driver version."""

from __future__ import annotations

from codegen.tables import resolver_rows


def emit() -> str:
    rows = resolver_rows()
    exports = sorted({export for found in rows.values() for _, _, export in found})
    out = [
        '#include "devproxy/interceptors/entrypoint/resolve.h"',
        "",
        "// Only the addresses are taken, so the types do not matter; the definitions are in client.gen.cc and refused.gen.cc.",
        'extern "C" {',
        *(f"int {export}();" for export in exports),
        "}",
        "",
        "namespace devproxy::sa::entrypoint {",
        "",
        "const ResolveRow kResolveRows[] = {",
    ]
    count = 0
    for name in sorted(rows):
        for version, form, export in sorted(rows[name], key=lambda row: (row[1] != "", row[0])):
            out.append(
                f'    {{"{name}", {version}, {str(form != "").lower()}, reinterpret_cast<void*>(&{export})}},'
            )
            count += 1
    out += [
        "};",
        f"const size_t kResolveCount = {count};",
        "",
        "}  // namespace devproxy::sa::entrypoint",
    ]
    return "\n".join(out) + "\n"
