# SPDX-License-Identifier: Apache-2.0
"""docs/support.md: what is answered and what is refused, and why."""

from __future__ import annotations

from collections import Counter

from codegen.apis import cudart
from codegen.apis.mathlibs import SHIMS
from codegen.spec import Capture
from codegen.tables import (
    LIBRARIES,
    PER_THREAD,
    RUNTIMES,
    WAITING,
    Export,
    driver_exports,
    library_exports,
    library_of,
    runtime_exports,
    shim_exports,
    status,
)

WORDS = {
    "local": "answered in the job's process; nothing is sent, but for a first use where it says so",
    "async": "posted to the device-proxy server; the call does not wait",
    "sync": "the call waits for the server or the device",
    "driver": "answered by calls of the driver's functions, or by none: what is sent, their rows say",
    "refused": "returns an error by name, with the reason",
    "unchecked": "refused because nobody has checked it yet",
}
# What a function does while some stream of the process captures, where it is not free.
CAPTURES = {
    Capture.NODE: "a command of the capturing stream becomes a node of its graph",
    Capture.HOOK: "depends on its arguments",
    Capture.REFUSED: "refused on the capturing stream, and the capture with it: no graph holds it",
    Capture.STREAM: "refused where it asks or waits for what the capturing stream has done, else unsafe",
    Capture.DEVICE: "refused where it waits for the capturing stream's device, else unsafe",
    Capture.UNSAFE: "refused by the modes of the thread and of the capture",
}
FIRST = (
    "init",
    "device",
    "context",
    "module",
    "memory",
    "hostmem",
    "managed",
    "stream",
    "event",
    "launch",
    "graph",
    "logs",
    "entrypoint",
)
# What must be known of a chapter beside the functions.
NOTES = {
    "managed": (
        "Managed memory is pinned host memory that kernels see (docs/design.md, Memory): coherent, never migrated, as slow for\n"
        "kernels as the link to the GPU, and limited by /dev/shm. A kernel's atomics on it are not atomic towards the host\n"
        "or another GPU. On `--device cuda` it needs DEVPROXY_CUDA_REGISTER_WINDOW=1, else it is refused by name; variables\n"
        "declared `__managed__` are always refused."
    ),
}


def row(export: Export) -> str:
    """One line of a table of answered functions."""
    notes = []
    if export.target and export.target != export.name and not export.per_thread:
        notes.append(f"as {export.target}")
    if export.per_thread:
        notes.append("null stream: the thread's own")
    if export.api is not None and export.api.ops:
        notes.append("sends " + ", ".join(export.api.ops))
    if export.api is not None and export.api.first:
        notes.append("first use sends " + ", ".join(export.api.first))
    if export.api is not None and export.api.capture in CAPTURES:
        notes.append(f"capture: {export.api.capture.value}")
    return f"| {export.name} | {status(export)} | {'; '.join(notes)} |"


def counts(exports: tuple[Export, ...]) -> str:
    found = Counter(status(e) for e in exports)
    return ", ".join(f"{found[word]} {word}" for word in WORDS if found[word])


def refused_rows(exports: tuple[Export, ...], heading: str) -> list[str]:
    """The refused functions by family: one reason for all of a family, or a table."""
    families: dict[str, list[Export]] = {}
    for export in exports:
        if export.api is None:
            families.setdefault(export.family, []).append(export)
    out = []
    for family, refused in sorted(families.items()):
        reasons = {e.reason for e in refused}
        out += ["", f"{heading} {family}", ""]
        if len(reasons) == 1:
            out += [f"{reasons.pop()}.", "", ", ".join(e.name for e in refused)]
        else:
            out += [
                "| function | why |",
                "|---|---|",
                *(f"| {e.name} | {e.reason} |" for e in refused),
            ]
    return out


def runtime_rows(stem: str) -> list[str]:
    """One major of a runtime library: what is answered, by chapter, and what is refused."""
    exports, soname = runtime_exports(stem), RUNTIMES[stem].soname
    out = ["", f"# {soname}: answered", "", "| chapter | functions |", "|---|---|"]
    for chapter in (module.__name__.rsplit(".", 1)[1] for module in cudart.CHAPTERS):
        names = [
            e.name + (" (waits)" if status(e) == "sync" else "")
            for e in exports
            if e.api is not None and e.family == chapter
        ]
        if names:
            out.append(f"| {chapter} | {', '.join(names)} |")
    return [*out, "", f"# {soname}: refused", *refused_rows(exports, "##")]


def emit() -> str:
    driver = driver_exports()
    out = [
        "<!-- Made by: python3 -m codegen --out build/gen -->",
        "# What is supported",
        "",
        "Every function of the driver API, of the runtime API, of NVML and of NCCL is exported. What nobody has checked is",
        "refused by name, never guessed.",
        "",
        f"- libcuda.so.1: {len(driver)} functions: {counts(driver)}",
    ]
    for stem in RUNTIMES:
        runtime = runtime_exports(stem)
        out.append(f"- {RUNTIMES[stem].soname}: {len(runtime)} functions: {counts(runtime)}")
    for stem, module in LIBRARIES.items():
        exports = library_exports(stem)
        out.append(f"- {library_of(module).soname}: {len(exports)} functions: {counts(exports)}")
    out += [
        "",
        "| status | meaning |",
        "|---|---|",
        *(f"| {word} | {meaning} |" for word, meaning in WORDS.items()),
        "",
        "| while a stream captures | meaning |",
        "|---|---|",
        *(f"| {word.value} | {meaning} |" for word, meaning in CAPTURES.items()),
        "",
        f"No row repeats that a thread's own default stream is made ({', '.join(PER_THREAD)}) where the thread first names it, and",
        f"that whoever waits fetches what kernels printed ({', '.join(WAITING)}).",
    ]
    families: dict[str, list[Export]] = {}
    for export in driver:
        families.setdefault(export.family, []).append(export)
    out += ["", "# libcuda.so.1: answered"]
    answered = [family for family, exports in families.items() if any(e.api for e in exports)]
    for family in (*FIRST, *sorted(set(answered) - set(FIRST))):
        out += ["", f"## {family}", ""]
        if note := NOTES.get(family):
            out += [note, ""]
        out += ["| function | status | |", "|---|---|---|"]
        out += [row(e) for e in families.pop(family, [])]
    out += ["", "# libcuda.so.1: refused"]
    out += refused_rows(driver, "##")
    for stem in RUNTIMES:
        out += runtime_rows(stem)
    for stem, module in LIBRARIES.items():
        exports = library_exports(stem)
        refused = [e for e in exports if e.api is None]
        out += [
            "",
            f"# {library_of(module).soname}",
            "",
            "| function | status | |",
            "|---|---|---|",
        ]
        out += [row(e) for e in exports if e.api is not None]
        out += [
            "",
            f"Refused: {library_of(module).reason}.",
            "",
            ", ".join(e.name for e in refused),
        ]
    out += [
        "",
        "# NVIDIA's libraries above the driver",
        "",
        "Each has a CUDA runtime of NVIDIA's inside, which does not run over devproxy's driver. A job on NVIDIA's kernels whose",
        "Python has PyTorch's CUDA wheel finds these in their place, with every function that torch 2.11 to 2.15 imports: a",
        "call returns the library's own result for what it cannot do, and says once which function it was.",
        "",
        "| library | refused | result | answered |",
        "|---|---|---|---|",
    ]
    for soname, shim in SHIMS.items():
        shimmed = shim_exports(soname)
        told = [e.name for e in shimmed if e.answer]
        out.append(
            f"| {soname} | {len(shimmed) - len(told)} functions | {shim.status} ({shim.refused}) | {', '.join(told)} |"
        )
    return "\n".join(out) + "\n"
