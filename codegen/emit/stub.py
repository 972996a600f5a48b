# SPDX-License-Identifier: Apache-2.0
"""What the stubs of all client libraries have in common: the driver's, the runtimes', NVML's, NCCL's, the math libraries'."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.tables import Function

EXPORT = 'extern "C" __attribute__((visibility("default")))'
C_EXPORT = "DP_EXPORT"  # in a file of C


def c_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def spaced(kind: str) -> str:
    """`void**` of the header facts' `void **`."""
    return kind.replace(" *", "*")


def declaration(function: Function, name: str) -> str:
    """`CUresult cuMemFree_v2(CUdeviceptr dptr)`."""
    params = ", ".join(f"{spaced(kind)} {param}" for kind, param in function.params)
    return f"{spaced(function.result)} {name}({params})"


def null_check(pointers: Sequence[str], result: str) -> list[str]:
    """The line that returns `result` where one of these parameters is null; nothing where none is asked about."""
    nulls = " || ".join(f"{name} == nullptr" for name in pointers)
    return [f"  if ({nulls}) return {result};"] if nulls else []


def refusal(
    name: str, call: str, result: str = "int", value: str = "", export: str = EXPORT
) -> str:
    """An export that is refused. It takes no arguments: the C ABI lets it ignore those that the caller passes.

    value: what it returns; "": what `call` does.
    """
    if result == "void":
        body = f"{call};"
    else:
        body = f"{call}; return {value};" if value else f"return {call};"
    return f"{export} {result} {name}(void) {{ {body} }}"


def refusals(namespace: str, home: str, names: Sequence[str]) -> str:
    """A file of refused exports that needs no type of the vendor's. refuse_export(n) of `namespace` stands in `home`."""
    out = [f"namespace {namespace} {{", f"int refuse_export(unsigned number);  // {home}", "}", ""]
    out += [refusal(name, f"{namespace}::refuse_export({n})") for n, name in enumerate(names)]
    return "\n".join(out) + "\n"
