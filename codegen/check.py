# SPDX-License-Identifier: Apache-2.0
"""What must hold of the tables before anything is generated. Pure; each fault is one line that names its object."""

from __future__ import annotations

import re

from codegen.apis import cuda_driver, cudart
from codegen.emit.wire import HANDLES, layout, request_fields
from codegen.ops import OPS, RETIRED
from codegen.spec import Api, Capture, Carry, Log, Op
from codegen.tables import (
    LIBRARIES,
    RUNTIMES,
    Facts,
    driver_table,
    entries,
    facts,
    resolver_rows,
    runtime_facts,
    runtime_table,
)

# Names of csrc/base/result.h -> the vendor's, where the words differ.
RESULT_NAMES = {
    "kOk": "CUDA_SUCCESS",
    "kInvalidImage": "CUDA_ERROR_INVALID_IMAGE",
    "kNoBinaryForGpu": "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "kLaunchOutOfResources": "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
}


def result_names(header: str) -> dict[str, tuple[int, str]]:
    """Our result name -> (number, the vendor's name): kInvalidValue is CUDA_ERROR_INVALID_VALUE."""
    rows = re.findall(r"^\s*k(\w+)\s*=\s*(\d+),", header, re.MULTILINE)
    out = {}
    for word, number in rows:
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).upper()
        out[f"k{word}"] = (int(number), RESULT_NAMES.get(f"k{word}", f"CUDA_ERROR_{snake}"))
    return out


def log_faults(op: Op) -> list[str]:
    """What a message says of its handler and of the replay log, and does not hang together."""
    out: list[str] = []
    if not op.server_sa and (op.carry is not Carry.SYNC or op.req or op.rep or op.bulk):
        out.append("no server half handles it (server_sa=)")
    if (op.log is not Log.NONE) != bool(op.handle):
        out.append("log and handle go together: the one says what happens to the other")
    if op.handle in op.req and op.req[op.handle] not in HANDLES:
        out.append(f"its field {op.handle} is no handle")
    if op.log is not Log.CREATE and (op.parent or op.log_bulk):
        out.append("parent and log_bulk are for what it creates (log=Log.CREATE)")
    if op.log_bulk and op.bulk != "in":
        out.append("log_bulk: it brings no bulk data")
    if op.key and (op.log is not Log.SET or op.req.get(op.key) != "u32"):
        out.append("key is a u32 field of a message that sets (log=Log.SET)")
    return out


def op_faults(ops: dict[str, Op]) -> list[str]:
    """Opcodes that repeat, fields that are not aligned, handles and streams that name no field."""
    out: list[str] = []
    if len(ops) > 64:
        out.append("more than 64 messages: those of a call are bits of a word (ApiInfo::sends)")
    seen: dict[int, str] = {}
    for name, op in ops.items():
        if op.opcode in seen:
            out.append(f"message {name}: opcode {op.opcode:#06x} is already {seen[op.opcode]}'s")
        if op.opcode in RETIRED:
            out.append(f"message {name}: opcode {op.opcode:#06x} was {RETIRED[op.opcode]}'s")
        seen.setdefault(op.opcode, name)
        for fields in (request_fields(op), op.rep):
            try:
                layout(fields)
            except (KeyError, ValueError) as fault:
                out.append(f"message {name}: {fault}")
        for word in (op.handle, op.stream, op.parent, op.key):
            if word and word not in op.req:
                out.append(f"message {name}: it has no field {word}")
        out += [f"message {name}: {fault}" for fault in log_faults(op)]
        if op.bulk not in ("", "in", "out"):
            out.append(f"message {name}: bulk is 'in' or 'out', not {op.bulk!r}")
    return out


def api_faults(table: dict[str, Api], known: Facts, ops: dict[str, Op]) -> list[str]:
    """Entries that do not agree with the header facts or name messages that do not exist."""
    out: list[str] = []
    for name, api in table.items():
        function = known.functions.get(name)
        if function is None:
            out.append(f"{name}: the header ({known.source}) declares no such function")
            continue
        kinds = {param: kind for kind, param in function.params}
        for param in api.nonnull:
            if param not in kinds:
                out.append(
                    f"{name}: nonnull names {param}; the header has {', '.join(kinds) or 'no parameters'}"
                )
            elif not kinds[param].endswith("*") and known.typedefs.get(kinds[param]) not in (None,):
                out.append(f"{name}: nonnull names {param}, which is no pointer but {kinds[param]}")
        out += [
            f"{name}: no message is called {op}" for op in (*api.ops, *api.first) if op not in ops
        ]
        if "" in kinds:
            out.append(f"{name}: the header gives a parameter no name")
    return out


# Parameters by which a call can meet a capture. The emitter knows their types too: cuda.h gives them no other name.
CAPTURED_TYPES = {"CUstream", "CUevent"}


def capture_faults(table: dict[str, Api], known: Facts) -> list[str]:
    """Entries that can meet a stream capture and do not say what they do then."""
    out: list[str] = []
    for name, api in table.items():
        kinds = (
            {kind for kind, _ in known.functions[name].params} if name in known.functions else set()
        )
        meets = [
            *(f"names a {kind}" for kind in sorted(kinds & CAPTURED_TYPES)),
            *[
                *(f"sends {op}" for op in api.ops),
                *(f"sends {op} at the first use of what it names" for op in api.first),
            ][:1],
            *(["waits"] if api.waits else []),
        ]
        if meets and api.capture is None:
            out.append(
                f"{name}: it {' and '.join(meets)}: say what it does in a stream capture (capture=)"
            )
        if api.capture is Capture.REFUSED and "CUstream" not in kinds:
            out.append(f"{name}: capture={api.capture.name}, and it names no stream")
    return out


def resolver_faults() -> list[str]:
    known = facts("cuda").functions
    return [
        f"cuGetProcAddress table: {name} at {version} gives {export}, which the header does not declare"
        for name, rows in resolver_rows().items()
        for version, _, export in rows
        if export not in known
    ]


def table_faults() -> list[str]:
    """All faults of the committed tables; empty when they are right."""
    out = op_faults(OPS) + api_faults(driver_table(), facts("cuda"), OPS) + resolver_faults()
    out += capture_faults(driver_table(), facts("cuda"))
    for stem, module in LIBRARIES.items():
        out += api_faults(entries(module), facts(stem), OPS)
    for stem in RUNTIMES:
        out += api_faults(runtime_table(stem), runtime_facts(stem), OPS)
    known = {name for stem in RUNTIMES for name in runtime_facts(stem).functions}
    out += [
        f"{name}: no major of this library declares such a function"
        for name in entries(*cudart.CHAPTERS)
        if name not in known
    ]
    for title, (pattern, _) in (cuda_driver.FAMILIES | cudart.FAMILIES).items():
        try:
            re.compile(pattern)
        except re.error as fault:
            out.append(f"refused family '{title}': {fault}")
    return out
