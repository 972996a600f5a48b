# SPDX-License-Identifier: Apache-2.0
"""Wire structs, opcodes and the lock, from codegen.ops.

Every struct is packed by construction: fields are naturally aligned in the order given, which the emitter checks and
a static_assert repeats.
"""

from __future__ import annotations

import hashlib
import re

from codegen.ops import OPS
from codegen.spec import Kind, Op, Space

SIZES = {"u8": 1, "u16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8, "f64": 8}
CTYPES = {
    "u8": "uint8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "i32": "int32_t",
    "u64": "uint64_t",
    "i64": "int64_t",
    "f32": "float",
    "f64": "double",
}
HANDLES = {kind.name.lower() for kind in Kind}


def ctype(word: str) -> str:
    """C++ type of a field; a virtual handle is VHandle, which does not mix with numbers."""
    return "VHandle" if word in HANDLES else CTYPES[word]


def layout(fields: dict[str, str]) -> int:
    """Bytes of the struct; raises ValueError where a field would not be naturally aligned, or the next record."""
    offset = 0
    for name, word in fields.items():
        size = 8 if word in HANDLES else SIZES[word]
        if offset % size:
            raise ValueError(f"field {name} of {fields} is not aligned: add a pad field before it")
        offset += size
    if offset % 8:
        raise ValueError(
            f"{fields} end at byte {offset}, no multiple of 8: add a pad field at the end"
        )
    return offset


def request_fields(op: Op) -> dict[str, str]:
    """Fields of the request as they travel, with the bulk descriptor where there is one."""
    return op.req | ({"bulk_bytes": "u32", "bulk_chunks": "u32"} if op.bulk == "in" else {})


def struct(name: str, fields: dict[str, str]) -> str:
    body = "".join(f"  {ctype(w)} {f};\n" for f, w in fields.items())
    size = layout(fields) or 1
    return f"struct {name} {{\n{body}}};\nstatic_assert(sizeof({name}) == {size});\n"


def enumeration(head: str, numbers: dict[str, int]) -> list[str]:
    """`enum X { kName = 1, };` of NAME: 1."""
    return [f"{head} {{", *(f"  k{n.capitalize()} = {v}," for n, v in numbers.items()), "};"]


def emit_kinds() -> str:
    """Text of handle_kind.gen.h."""
    numbers = {"NONE": 0} | {kind.name: kind.value for kind in Kind}
    out = [
        "#pragma once",
        "#include <cstdint>",
        "namespace devproxy {",
        *enumeration("enum class HandleKind : uint8_t", numbers),
        "}  // namespace devproxy",
    ]
    return "\n".join(out) + "\n"


def lock() -> str:
    """The contract: one line per message. Its hash is the ABI id."""
    rows = []
    for name, op in OPS.items():
        req = " ".join(f"{f}:{'v64' if w in HANDLES else w}" for f, w in request_fields(op).items())
        rep = " ".join(f"{f}:{w}" for f, w in op.rep.items())
        rows.append(
            f"{op.opcode:#06x} {name} {op.carry.value} {op.log.value} req{{{req}}}={layout(request_fields(op))} "
            f"rep{{{rep}}}={layout(op.rep)}{' bulk=' + op.bulk if op.bulk else ''}"
        )
    return "\n".join(rows) + "\n"


def code_of(text: str) -> str:
    """C++ without comments and layout, which change no byte on the wire. No string of these headers holds a "//"."""
    return " ".join(re.sub(r"//.*", "", text).split())


def abi_id(headers: str) -> bytes:
    """32 bytes: blake2b over the lock and the code of the shared headers."""
    return hashlib.blake2b((lock() + headers).encode(), digest_size=32).digest()


def emit(headers: str) -> str:
    """Text of wire.gen.h. headers: the code of csrc/args and csrc/wire, part of the ABI id."""
    out = [
        "#pragma once",
        "#include <cstdint>",
        '#include "devproxy/csrc/wire/handle.h"',
        "namespace devproxy::wire {",
        *enumeration("enum Space : uint8_t", {space.name: space.value for space in Space}),
        "enum class Opcode : uint16_t {",
    ]
    out += [f"  {name} = {op.opcode:#06x}," for name, op in OPS.items()]
    out += [
        "};",
        f"inline constexpr uint32_t kMaxOpcode = {max(o.opcode for o in OPS.values()):#06x};",
    ]
    for name, op in OPS.items():
        out.append(struct(f"{name}_req", request_fields(op)))
        out.append(struct(f"{name}_rep", op.rep))
    out.append("inline const char* opcode_name(uint16_t opcode) {\n  switch (opcode) {")
    out += [f'    case {op.opcode:#06x}: return "{name}";' for name, op in OPS.items()]
    out.append('    default: return "?";\n  }\n}')
    digest = ", ".join(f"{b:#04x}" for b in abi_id(headers))
    out.append(f"inline constexpr uint8_t kAbiId[32] = {{{digest}}};")
    out.append("}  // namespace devproxy::wire")
    return "\n".join(out) + "\n"
