# SPDX-License-Identifier: Apache-2.0
"""dispatch.gen.h: the facts of each message that the server checks before a handler sees it. handlers.gen.h: what the
server halves of interceptors/<domain> define, and the row of each message.
"""

from __future__ import annotations

from codegen.emit.wire import HANDLES, SIZES, layout, request_fields
from codegen.ops import OPS
from codegen.spec import Carry, Log, Op


def offset(op: Op, field: str) -> int:
    """Byte offset of a request field; -1 where there is none."""
    at = 0
    for name, word in request_fields(op).items():
        if name == field:
            return at
        at += 8 if word in HANDLES else SIZES[word]
    return -1


def emit() -> str:
    top = max(op.opcode for op in OPS.values())
    index = [255] * (top + 1)
    for number, op in enumerate(OPS.values()):
        index[op.opcode] = number
    out = [
        "#pragma once",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        '#include "wire.gen.h"',
        "",
        "namespace devproxy::wire {",
        "",
        "// What the replay log does with a message whose handler is done.",
        "enum class Log : uint8_t { kNone, kCreate, kDestroy, kSet };",
        "",
        "// What every message of an opcode must satisfy before its handler runs.",
        "struct OpInfo {",
        "  const char* name;",
        "  uint16_t opcode;",
        "  uint16_t req_bytes;      // fixed part of the request; 0 where it has no fields (sizeof would say 1)",
        "  uint16_t rep_bytes;      // fixed part of the reply; 0 where it has no fields",
        "  bool has_bulk;           // the request ends with {bulk_bytes, bulk_chunks} and bulk data follows",
        "  bool is_sync;            // the client waits: seq != 0",
        "  bool communicates;       // it may need other ranks",
        "  int16_t stream_offset;   // of the VHandle of the stream on which it is a command; -1: no command",
        "  int16_t bulk_offset;     // of bulk_bytes; bulk_chunks follows it; -1: no bulk",
        "  Log log;",
        "  bool log_bulk;           // what it creates is logged with its bulk data",
        "  int16_t handle_offset;   // of the VHandle that it creates, destroys or sets; -1: none",
        "  int16_t parent_offset;   // of the VHandle that it is made from; -1: none",
        "  int16_t key_offset;      // of the 32-bit number that tells its SETs apart; -1: there is one",
        "};",
        "",
        "inline constexpr OpInfo kOps[] = {",
    ]
    for name, op in OPS.items():
        flags = f"{str(op.bulk == 'in').lower()}, {str(op.carry is Carry.SYNC).lower()}, {str(op.communicates).lower()}"
        bulk = offset(op, "bulk_bytes") if op.bulk == "in" else -1
        log = f"Log::k{op.log.value.capitalize()}, {str(op.log_bulk).lower()}"
        logged = ", ".join(str(offset(op, word)) for word in (op.handle, op.parent, op.key))
        out.append(
            f'    {{"{name}", {op.opcode:#06x}, {layout(request_fields(op))}, {layout(op.rep)}, {flags}, '
            f"{offset(op, op.stream)}, {bulk}, {log}, {logged}}},"
        )
    out += ["};", f"inline constexpr size_t kOpCount = {len(OPS)};", ""]
    out += [
        "// Place in kOps of each opcode; 255: no such opcode.",
        f"inline constexpr uint8_t kOpIndex[{top + 1}] = {{",
    ]
    out += [
        "    " + "".join(f"{n}," for n in index[at : at + 32]) for at in range(0, len(index), 32)
    ]
    out += [
        "};",
        "",
        "// nullptr for a number that is no opcode.",
        "inline constexpr const OpInfo* op_info(uint16_t opcode) {",
        "  if (opcode > kMaxOpcode || kOpIndex[opcode] == 255) return nullptr;",
        "  return &kOps[kOpIndex[opcode]];",
        "}",
        "",
        "// One line of text about a message, for the flight recorder (format.gen.cc). req: `bytes` bytes of the fixed part",
        "// and what follows. Writes at most out_bytes with the closing zero; returns the characters written without it.",
        "size_t format_message(uint16_t opcode, const void* req, size_t bytes, char* out, size_t out_bytes);",
        "",
        "}  // namespace devproxy::wire",
    ]
    return "\n".join(out) + "\n"


def handler(name: str, op: Op) -> str:
    return f"{op.server_sa}::{name.lower()}"


def emit_handlers() -> str:
    """handlers.gen.h. A logged message's handler says whether it is done, so none can be left out of the log."""
    domains: dict[str, list[str]] = {}
    for name, op in OPS.items():
        if op.server_sa:
            result = "void" if op.log is Log.NONE else "[[nodiscard]] bool"
            line = f"{result} {name.lower()}(Connection&, const Message&);"
            domains.setdefault(op.server_sa, []).append(line)
    out = [
        "#pragma once",
        "",
        '#include "devproxy/csrc/server/handlers.h"',
        "",
        "namespace devproxy::server {",
        "",
    ]
    for domain, lines in domains.items():
        out += [f"namespace {domain} {{", *lines, f"}}  // namespace {domain}", ""]
    out += [
        "// In the order of wire::kOps.",
        "inline constexpr Handler kHandlers[wire::kOpCount] = {",
    ]
    for name, op in OPS.items():
        if not op.server_sa:
            row = "answer"
        elif op.log is Log.NONE:
            row = handler(name, op)
        else:
            row = f"logged<{handler(name, op)}>"
        out.append(f"    {row},  // {name}")
    out += ["};", "", "}  // namespace devproxy::server"]
    return "\n".join(out) + "\n"
